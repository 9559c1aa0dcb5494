"""Sequences of mixed lengths packed into rows of one length for the parallel scan, without leaking from one to another."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from seqmoe.predictors.psi import normalised_weights
from seqmoe.predictors.seq2seq import RARE_TOKEN
from seqmoe.predictors.trace import Trace
from seqmoe.profiles.errors import UsageError


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Token id -> embedding row: tokens that training saw often enough have their own, all others share RARE_TOKEN."""

    ids: NDArray[np.int64]  # ascending; ids[i] has row i + 2

    @classmethod
    def of(cls, tokens: NDArray[np.integer], least: int = 2, most: int = 65536) -> "Vocabulary":
        """The tokens seen at least `least` times, the `most` frequent of them."""
        ids, counts = np.unique(tokens, return_counts=True)
        often = counts >= least
        ids, counts = ids[often], counts[often]
        if len(ids) > most:
            ids = np.sort(ids[np.argsort(-counts, kind="stable")[:most]])
        return cls(ids.astype(np.int64))

    @property
    def rows(self) -> int:
        return len(self.ids) + 2

    def lookup(self, tokens: NDArray[np.integer]) -> NDArray[np.int64]:
        """Rows of token ids of any shape; ids that are not in the vocabulary, negative ones too, are RARE_TOKEN."""
        if not len(self.ids):
            return np.full(np.shape(tokens), RARE_TOKEN, dtype=np.int64)
        at = np.searchsorted(self.ids, tokens).clip(max=len(self.ids) - 1)
        return np.where(self.ids[at] == tokens, at + 2, RARE_TOKEN).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Steps:
    """A trace's steps as tensors."""

    ids: torch.Tensor  # int16 [S, L, k]
    shares: torch.Tensor  # float32 [S, L, k], normalised weights
    rows: torch.Tensor | None  # int64 [S], token rows
    starts: NDArray[np.int64]  # [n]
    lengths: NDArray[np.int64]  # [n]
    num_experts: int

    @classmethod
    def of(cls, trace: Trace, vocabulary: Vocabulary | None) -> "Steps":
        """UsageError if tokens are wanted and the trace has none."""
        if vocabulary is not None and trace.tokens is None:
            raise UsageError("the trace has no tokens, this predictor needs them: train with --no-tokens")
        rows = None
        if vocabulary is not None and trace.tokens is not None:
            rows = torch.from_numpy(vocabulary.lookup(trace.tokens))
        return cls(
            torch.from_numpy(trace.expert_ids.astype(np.int16)),
            torch.from_numpy(normalised_weights(trace.expert_ids, trace.expert_weights)),
            rows,
            trace.seq_start,
            trace.seq_len,
            trace.num_experts,
        )


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of packed sequences (b rows of s steps)."""

    psi: torch.Tensor  # float32 [b, s, L, E], of the step before; zero at a sequence's first
    rows: torch.Tensor | None  # int64 [b, s]
    ids: torch.Tensor  # int64 [b, s, L, k], what was chosen
    shares: torch.Tensor  # float32 [b, s, L, k]
    valid: torch.Tensor  # bool [b, s]: a step, not padding, and not one whose past was cut away
    segments: torch.Tensor  # int32 [b, s], one number a sequence, ascending along a row

    def to(self, device: str | torch.device) -> "Batch":
        """The same on another device."""
        rows = None if self.rows is None else self.rows.to(device)
        rest = (part.to(device) for part in (self.ids, self.shares, self.valid, self.segments))
        return Batch(self.psi.to(device), rows, *rest)


Piece = tuple[int, int, bool]  # first step, number of steps, whether it is a sequence's beginning


def pack(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], row_steps: int, rng: np.random.Generator
) -> list[list[Piece]]:
    """Every step once, in rows of at most `row_steps`: sequences in random order, each into the first row with room.

    A sequence longer than a row is cut, the first cut at a random place, so other steps lose their past each time.
    """
    pieces: list[Piece] = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        at, size = 0, row_steps if length <= row_steps else int(rng.integers(row_steps // 2, row_steps + 1))
        while at < length:
            count = min(size, length - at)
            pieces.append((start + at, count, at == 0))
            at, size = at + count, row_steps
    rows: list[list[Piece]] = []
    room: list[int] = []
    for index in rng.permutation(len(pieces)).tolist():
        piece = pieces[index]
        for row, left in enumerate(room):
            if left >= piece[1]:
                rows[row].append(piece)
                room[row] -= piece[1]
                break
        else:
            rows.append([piece])
            room.append(row_steps - piece[1])
    order = rng.permutation(len(rows)).tolist()
    return [rows[i] for i in order]


def assemble(steps: Steps, rows: list[list[Piece]], row_steps: int) -> Batch:
    """The batch of the given rows, padded to `row_steps`."""
    index = np.zeros((len(rows), row_steps), dtype=np.int64)
    begins = np.zeros_like(index, dtype=bool)
    inside = np.zeros_like(begins)
    cut = np.zeros_like(begins)
    segments = np.zeros_like(index, dtype=np.int32)
    for r, pieces in enumerate(rows):
        at = 0
        for number, (first, count, is_start) in enumerate(pieces):
            index[r, at : at + count] = np.arange(first, first + count)
            inside[r, at : at + count] = True
            segments[r, at : at + count] = number
            begins[r, at] = True
            cut[r, at] = not is_start
            at += count
        segments[r, at:] = len(pieces)
    here = torch.from_numpy(index)
    ids, shares = steps.ids[here].long(), steps.shares[here]
    before = (here - 1).clamp_min(0)
    # a step that begins a piece, or is padding, has nothing before it
    seen = torch.from_numpy(inside & ~begins)
    known = steps.shares[before] * seen[..., None, None]
    psi = torch.zeros(*ids.shape[:-1], steps.num_experts).scatter_(-1, steps.ids[before].long(), known)
    return Batch(
        psi,
        None if steps.rows is None else steps.rows[here],
        ids,
        shares,
        torch.from_numpy(inside & ~cut),
        torch.from_numpy(segments),
    )


def epoch(
    steps: Steps, batch_rows: int, row_steps: int, rng: np.random.Generator, rank: int = 0, world: int = 1
) -> Iterator[list[list[Piece]]]:
    """Row lists of one pass; of `world` processes each gets its own rows of every batch (all draw the same `rng`).

    A last batch with fewer rows than processes is left out, so that all take the same number of steps.
    """
    rows = pack(steps.starts, steps.lengths, row_steps, rng)
    for at in range(0, len(rows), batch_rows * world):
        part = rows[at : at + batch_rows * world]
        if len(part) >= world:
            yield part[rank::world]


def whole_sequences(steps: Steps, most_steps: int) -> Iterator[list[list[Piece]]]:
    """Sequences whole and alone in their rows, similar lengths together, at most `most_steps` padded steps (or one row)."""
    order = np.argsort(steps.lengths, kind="stable").tolist()
    group: list[list[Piece]] = []
    for index in order:
        piece = (int(steps.starts[index]), int(steps.lengths[index]), True)
        if group and (len(group) + 1) * piece[1] > most_steps:
            yield group
            group = []
        group.append([piece])
    if group:
        yield group
