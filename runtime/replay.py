"""Routing replay: the experts of each token come from a trace instead of the router, so that a synthetic checkpoint of
the trace's geometry runs with real routing, real bytes and real compute (its text is noise)."""

from dataclasses import dataclass

import numpy as np
import torch

from seqmoe.predictors.trace import Trace
from seqmoe.profiles.errors import UsageError


@dataclass
class Replay:
    """Feeds the rows of a trace, one per token and sequence, in order; wraps around at the trace's end.

    The sequences of a batch start evenly spaced in the trace, so that they do not replay the same rows in step.
    """

    trace: Trace
    batch: int = 1
    position: int = 0  # rows consumed so far by each sequence
    width: int = 0  # rows that the pass at hand consumes
    _routed_for: tuple[int, int, torch.dtype | None] = (-1, 0, None)
    _ids: tuple[torch.Tensor, ...] = ()  # by layer, of that pass
    _weights: tuple[torch.Tensor, ...] = ()

    def begin(self, tokens: int) -> None:
        """Starts a forward pass of `tokens` tokens over the whole batch (each sequence the same number)."""
        self.position += self.width
        self.width = max(1, tokens // self.batch)

    def next_request(self) -> None:
        """A request begins: of a trace of several sequences at the next one's first row, if a single sequence runs."""
        if self.batch == 1 and self.trace.num_sequences > 1 and self.width:
            at = (self.position + self.width) % self.trace.num_steps
            later = self.trace.seq_start[self.trace.seq_start >= at]
            self.position, self.width = int(later[0]) if len(later) else 0, 0

    def tokens(self) -> np.ndarray | None:
        """Tokens [batch] that the trace was fed in the rows of this decode step; None where it does not know them."""
        return None if self.trace.tokens is None else self.trace.tokens[self._rows(self.batch)].astype(np.int64)

    def prompt_tokens(self, length: int) -> np.ndarray | None:
        """The same for a prompt of `length` tokens, which the rows before this step's stand for: [batch, length]."""
        if self.trace.tokens is None:
            return None
        steps = self.trace.num_steps
        starts = np.arange(self.batch) * (steps // self.batch) + self.position - length
        rows = (starts[:, None] + np.arange(length)[None]) % steps
        return self.trace.tokens[rows].astype(np.int64)

    def route(self, layer: int, index: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts int64 [tokens, k] and weights [tokens, k] (in the dtype of `weights`) for this pass and layer."""
        wanted = (self.position, index.shape[0], weights.dtype)
        if wanted != self._routed_for:  # all layers of a pass at once: replay is not to cost what a router does not
            rows = self._rows(index.shape[0])
            ids = self.trace.expert_ids[rows].astype(np.int64)
            self._ids = torch.from_numpy(np.ascontiguousarray(ids.swapaxes(0, 1))).unbind()
            if self.trace.expert_weights is None:
                shares = np.full(ids.shape, 1.0 / ids.shape[2], dtype=np.float32)
            else:
                shares = self.trace.expert_weights[rows].astype(np.float32)
            self._weights = torch.from_numpy(np.ascontiguousarray(shares.swapaxes(0, 1))).to(weights.dtype).unbind()
            self._routed_for = wanted
        return self._ids[layer], self._weights[layer]

    def _rows(self, tokens: int) -> np.ndarray:
        steps = self.trace.expert_ids.shape[0]
        per_sequence = max(1, tokens // self.batch)
        starts = np.arange(self.batch) * (steps // self.batch)
        rows = (starts[:, None] + self.position + np.arange(per_sequence)[None, :]).reshape(-1)
        return rows[:tokens] % steps

    def check(self, num_layers: int, num_experts: int, top_k: int) -> None:
        """Raises UsageError where the trace is of another geometry than the model."""
        have = (self.trace.num_layers, self.trace.num_experts, self.trace.top_k)
        want = (num_layers, num_experts, top_k)
        if have != want:
            raise UsageError(
                f"the replayed trace has layers, experts, top-k {have}, the model has {want}: "
                "make a synthetic checkpoint of the trace's geometry with bench/make_checkpoint.py --like-trace"
            )
