"""Routing traces of a model that runs here, in two passes as the paper does (section 5.1): first the token ids are
generated, then many sequences go through one prefill that records what every router chose.

The second pass runs the whole sequences again, prompt and answer, packed as the rows of a batch and padded on the right:
a causal model's tokens do not see what comes after them, so no mask is needed and models with a recurrent state work as
well. It loads each expert once for all of a pass's tokens, where decoding loads experts for each token.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from seqmoe.predictors.trace import Trace, TraceMeta
from seqmoe.predictors.trace_file import TraceWriter
from seqmoe.profiles.budget import PREFILL_TOKENS
from seqmoe.profiles.errors import UsageError
from seqmoe.profiles.files import write_error
from seqmoe.runtime.engine import Engine
from seqmoe.runtime.graph_tape import ForwardNames

MIN_STEPS = 2
Notice = Callable[[str, int, int], None]  # (pass, done, total), for a progress bar


@dataclass(frozen=True)
class Collected:
    """What a collection did. `agreement`: share of expert choices that decoding, where this session did it, made alike."""

    path: Path
    sequences: int
    steps: int
    agreement: float | None
    skipped: int  # prompts whose sequence was too short for a trace


class Recorder:
    """An observer that keeps what the layers of one pass route, `tokens` at a time."""

    def __init__(self, num_layers: int, inputs: bool) -> None:
        self.inputs = inputs
        self._ids: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]
        self._weights: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]
        self._hidden: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]

    def __call__(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
        self._ids[layer].append(index.to(torch.int16, copy=True))
        self._weights[layer].append(weights.to(torch.float32, copy=True))
        if self.inputs:
            self._hidden[layer].append(hidden.to(torch.bfloat16, copy=True))

    def take(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Ids, weights [rows, T, L, k] and router inputs [rows, T, L, H] since the last call, which forgets them."""

        def joined(layers: list[list[torch.Tensor]]) -> torch.Tensor:
            return torch.stack(
                [torch.cat([part.view(rows, -1, part.shape[-1]) for part in parts], 1) for parts in layers], 2
            )

        out = joined(self._ids), joined(self._weights), joined(self._hidden) if self.inputs else None
        for kept in (self._ids, self._weights, self._hidden):
            for parts in kept:
                parts.clear()
        return out


def collect(
    engine: Engine,
    prompts: Sequence[str | Sequence[int]],
    out: Path,
    *,
    max_new_tokens: int,
    router_inputs: bool = False,
    ignore_eos: bool = False,
    temperature: float = 0.0,
    seed: int = 0,
    resume: bool = False,
    source: str = "",
    progress: Notice = lambda stage, done, total: None,
) -> Collected:
    """Writes the trace of `prompts` and their continuations to `out`, `engine.batch` sequences at a time.

    A step is a token fed, of the prompt or of the answer; the last token generated is never fed. What is finished stays
    in `<out>.parts` until all is, and `resume` goes on from there. Raises UsageError, and what the engine raises.
    """
    spec = engine.spec
    meta = TraceMeta(spec.digest, spec.name, source)
    writer = TraceWriter(out, spec.num_experts, meta, resume=resume)
    question = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "prompts": len(prompts), "ignore_eos": ignore_eos}
    sequences = _Sequences(writer.parts / "sequences.jsonl", question)
    seen: dict[str, NDArray[np.int16]] = {}  # decode's own choices, to compare the second pass with
    for first in range(0, len(prompts), engine.batch):
        keys = [str(number) for number in range(first, min(first + engine.batch, len(prompts)))]
        if not all(key in sequences.ids for key in keys):
            group = [prompts[int(key)] for key in keys]
            ids, choices = _generate(engine, group, max_new_tokens, temperature, seed + first, ignore_eos)
            sequences.add(dict(zip(keys, ids, strict=True)))
            seen.update(zip(keys, choices, strict=True))
        progress("generating", first + len(keys), len(prompts))
    # Sequences of like length together: least padding. The order depends on nothing but the sequences.
    order = sorted(sequences.ids, key=lambda key: (len(sequences.ids[key]), int(key)))
    long_enough = [key for key in order if len(sequences.ids[key]) > MIN_STEPS]
    if not long_enough:
        raise UsageError("no prompt gave a sequence of two steps; ask for more tokens")
    waiting = [key for key in long_enough if key not in set(writer.done)]
    alike = compared = 0
    for first in range(0, len(waiting), engine.batch):
        keys = waiting[first : first + engine.batch]
        traces = packed_routing(engine, [sequences.ids[key][:-1] for key in keys], router_inputs, meta)
        for key, trace in zip(keys, traces, strict=True):
            writer.add(trace, key)
            if key in seen:
                same, total = _same_choices(trace.expert_ids, seen.pop(key), spec.num_experts)
                alike, compared = alike + same, compared + total
        progress("recording", len(writer.done), len(long_enough))
    steps = sum(len(sequences.ids[key]) - 1 for key in long_enough)
    writer.finish(sorted(long_enough, key=int))  # as the prompts are: a split by number must not be one by length
    agreement = alike / compared if compared else None
    return Collected(out, len(long_enough), steps, agreement, len(order) - len(long_enough))


@torch.inference_mode()
def packed_routing(
    engine: Engine, sequences: Sequence[Sequence[int]], router_inputs: bool = False, meta: TraceMeta | None = None
) -> list[Trace]:
    """What the routers choose for every token of these sequences, which run together, as one trace each.

    At most `engine.batch` sequences of at most `engine.context` tokens. The pass is cut into chunks of as many tokens as
    the memory plan has room for.
    """
    if len(sequences) > engine.batch or max(map(len, sequences)) > engine.context:
        raise UsageError(f"at most {engine.batch} sequences of {engine.context} tokens fit the memory that was planned")
    model, spec = engine.model, engine.spec
    rows, longest = len(sequences), max(map(len, sequences))
    tokens = torch.zeros(rows, longest, dtype=torch.long)
    for row, fed in enumerate(sequences):
        tokens[row, : len(fed)] = torch.tensor(fed)
    recorder = Recorder(spec.num_layers, router_inputs)
    chunk = longest if spec.whole_prefill else max(1, PREFILL_TOKENS // rows)
    names, cache = ForwardNames(model), DynamicCache(config=model.config)
    engine.runner.observer = recorder
    try:
        for first in range(0, longest, chunk):
            model(
                input_ids=tokens[:, first : first + chunk],
                use_cache=True,
                logits_to_keep=1,
                **names.arguments(cache, None),
            )
    finally:
        engine.runner.observer = None
    ids, weights, hidden = recorder.take(rows)
    traces = []
    for row, fed in enumerate(sequences):
        n = len(fed)
        traces.append(
            Trace(
                ids[row, :n].numpy(),
                weights[row, :n].numpy(),
                np.array(fed, dtype=np.int32),
                np.zeros(1, dtype=np.int64),
                np.array([n], dtype=np.int64),
                spec.num_experts,
                None if hidden is None else hidden[row, :n].contiguous().view(torch.uint16).numpy(),
                meta or TraceMeta(spec.digest, spec.name),
            )
        )
    return traces


def _generate(
    engine: Engine,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    ignore_eos: bool,
) -> tuple[list[list[int]], list[NDArray[np.int16]]]:
    """Each prompt's token ids with its continuation's, and what decode chose for the continuation, [steps, L, k]."""
    ids, mask = engine.encode(prompts)
    recorder = Recorder(engine.spec.num_layers, inputs=False)
    engine.runner.observer = recorder
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
    try:
        report = engine.generate(prompts, max_new_tokens, ignore_eos=ignore_eos, seed=seed, **sampling)
    finally:
        engine.runner.observer = None
    steps = len(report.decode)
    choices = recorder.take(len(prompts))[0][:, -steps:].numpy() if steps else None
    sequences, routed = [], []
    for row, new in enumerate(report.token_ids):
        sequences.append([*ids[row][mask[row] > 0].tolist(), *new])
        routed.append(choices[row, : len(new) - 1] if choices is not None else np.zeros((0, 1, 1), np.int16))
    return sequences, routed


def _same_choices(packed: NDArray[np.int16], decoded: NDArray[np.int16], num_experts: int) -> tuple[int, int]:
    """How many of decode's choices the packed pass made too, in whatever order, and how many there are."""
    if not len(decoded):
        return 0, 0
    tail = packed[-len(decoded) :]
    found = (tail[..., :, None] == decoded[..., None, :]).any(axis=-1)
    return int(found.sum()), int(found.size)


class _Sequences:
    """The token ids of the first pass, one line a prompt, kept on disk as they come."""

    def __init__(self, path: Path, question: dict[str, float]) -> None:
        self.path = path
        self.ids: dict[str, list[int]] = {}
        try:
            lines = path.read_bytes().split(b"\n") if path.exists() else []
            if lines and json.loads(lines[0]) != question:
                raise UsageError(f"{path}: an unfinished collection with other prompts or settings; delete its folder")
            kept = [json.dumps(question).encode()]
            for raw in lines[1:]:
                try:
                    key, ids = json.loads(raw)
                except ValueError:
                    break  # what was being written when the process was killed
                self.ids[key] = ids
                kept.append(raw)
            path.write_bytes(b"\n".join(kept) + b"\n")
        except ValueError:
            raise UsageError(f"{path}: damaged; delete its folder and start again") from None
        except OSError as error:
            raise write_error(path, error) from None

    def add(self, ids: dict[str, list[int]]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                for key, tokens in ids.items():
                    file.write(json.dumps([key, tokens]) + "\n")
        except OSError as error:
            raise write_error(self.path, error) from None
        self.ids.update(ids)
