"""Routing traces: which experts a router chose, step by step and layer by layer. Loads without torch."""

import struct
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seqmoe.profiles.errors import UsageError

MAX_EXPERTS = 32768  # ids are int16

# All that zipfile, zlib and numpy's header parser were seen to raise for damaged files.
_UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    RuntimeError,
    MemoryError,
    SyntaxError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True)
class TraceMeta:
    """Where a trace comes from; empty strings where that is not known."""

    model_digest: str = ""  # of the checkpoint's headers
    model_name: str = ""
    source: str = ""  # the prompts, the file that was imported, ...
    path: str = ""  # the file that the trace was read from; for messages


@dataclass(frozen=True, eq=False)
class Trace:
    """What a router chose in a number of sequences, laid end to end (S steps, L MoE layers, k experts a token).

    The arrays are read-only and the sequences tile the steps: sequence i is the rows `seq_start[i]` to
    `seq_start[i] + seq_len[i] - 1`, and sequence i + 1 begins on the next row. A step's row number times L plus the
    layer is its position. Raises UsageError, naming the field and the place, for anything that cannot be a trace.
    Router inputs are large and may be memory-mapped: only their shape and type are looked at.
    """

    expert_ids: NDArray[np.int16]  # [S, L, k], best first, distinct within a step's layer
    expert_weights: NDArray[np.floating] | None  # [S, L, k] float16 or float32, finite, not negative
    tokens: NDArray[np.int32] | None  # [S], the token fed at that step
    seq_start: NDArray[np.int64]  # [n]
    seq_len: NDArray[np.int64]  # [n], at least 1
    num_experts: int
    router_inputs: NDArray[np.float16] | NDArray[np.uint16] | None = None  # [S, L, H]; uint16: the bits of bfloat16
    meta: TraceMeta = TraceMeta()

    def __post_init__(self) -> None:
        for name in ("expert_ids", "seq_start", "seq_len"):
            object.__setattr__(self, name, _frozen(name, getattr(self, name), np.integer))
        if self.expert_weights is not None:
            object.__setattr__(self, "expert_weights", _frozen("expert_weights", self.expert_weights, np.floating))
        if self.tokens is not None:
            object.__setattr__(self, "tokens", _frozen("tokens", self.tokens, np.integer))
        _check_ids(self.expert_ids, self.num_experts)
        object.__setattr__(self, "expert_ids", _as_dtype(self.expert_ids, np.dtype(np.int16)))
        _check_companions(self.expert_ids.shape, self.expert_weights, self.tokens)
        _check_router_inputs(self.expert_ids.shape, self.router_inputs)
        _check_tiling(self.seq_start, self.seq_len, self.num_steps)

    @property
    def num_steps(self) -> int:
        """S: steps of all sequences together."""
        return int(self.expert_ids.shape[0])

    @property
    def num_layers(self) -> int:
        """L: MoE layers."""
        return int(self.expert_ids.shape[1])

    @property
    def top_k(self) -> int:
        """k: experts chosen per token and layer."""
        return int(self.expert_ids.shape[2])

    @property
    def num_sequences(self) -> int:
        return len(self.seq_len)

    def sequence(self, index: int) -> "Trace":
        """Sequence `index` alone, as a view of the same rows (no copy)."""
        if not 0 <= index < self.num_sequences:
            raise UsageError(f"sequence {index} is not in the trace, which has {self.num_sequences} (0 to n-1)")
        start, length = int(self.seq_start[index]), int(self.seq_len[index])
        return self._rows(slice(start, start + length), np.array([length], dtype=np.int64))

    def select(self, sequences: Iterable[int]) -> "Trace":
        """The given sequences, in the given order, as a trace of their own (copies the rows)."""
        chosen = list(sequences)
        if not chosen:
            raise UsageError("a trace needs at least one sequence, none was selected")
        for index in chosen:
            if not 0 <= index < self.num_sequences:
                raise UsageError(f"sequence {index} is not in the trace, which has {self.num_sequences} (0 to n-1)")
        return self._rows(ranges(self.seq_start[chosen], self.seq_len[chosen]), self.seq_len[chosen])

    def layer(self, layer: int) -> "Trace":
        """One layer of all sequences, as a trace with a single layer (no copy)."""
        if not 0 <= layer < self.num_layers:
            raise UsageError(f"layer {layer} is not in the trace, which has {self.num_layers} (0 to L-1)")
        return self.layers(layer, layer + 1)

    def layers(self, first: int, last: int | None = None) -> "Trace":
        """The layers first..last-1 (default: to the end) of all sequences, as a trace of their own (no copy)."""
        part = slice(first, last)
        weights = None if self.expert_weights is None else self.expert_weights[:, part]
        inputs = None if self.router_inputs is None else self.router_inputs[:, part]
        ids = self.expert_ids[:, part]
        return Trace(ids, weights, self.tokens, self.seq_start, self.seq_len, self.num_experts, inputs, self.meta)

    def shuffled(self, seed: int) -> "Trace":
        """The same steps in a random order within each sequence (the paper's control: no temporal order is left)."""
        rng = np.random.default_rng(seed)
        parts = [s + rng.permutation(n) for s, n in zip(self.seq_start.tolist(), self.seq_len.tolist(), strict=True)]
        return self._rows(np.concatenate(parts), self.seq_len)

    def router_input(self, layer: int, rows: "slice | NDArray[np.int64]" = slice(None)) -> NDArray[np.float32]:
        """Router inputs [rows, H] of one layer as float32; reads those rows only. UsageError where there are none, or
        where one is not finite."""
        if self.router_inputs is None:
            raise UsageError(f"{self._name()}router_inputs are not in this trace; collect it with router inputs")
        part = np.ascontiguousarray(self.router_inputs[rows, layer])
        values = (part.astype(np.uint32) << 16).view(np.float32) if part.dtype == np.uint16 else part.astype(np.float32)
        if not np.isfinite(values).all():
            raise UsageError(f"{self._name()}router_inputs of layer {layer} hold values that are not finite")
        return values

    def check_model(self, digest: str, num_layers: int, num_experts: int, top_k: int) -> None:
        """UsageError, naming file, field and expected value, unless the trace is of this model. An empty digest, here
        or there, is not compared."""
        for field, got, expected in (
            ("layers", self.num_layers, num_layers),
            ("experts", self.num_experts, num_experts),
            ("k", self.top_k, top_k),
            ("model_digest", self.meta.model_digest or digest, digest or self.meta.model_digest),
        ):
            if got != expected:
                made = f" (it was made for {self.meta.model_name})" if self.meta.model_name else ""
                raise UsageError(f"{self._name()}{field} is {got}, expected {expected}: a trace of another model{made}")

    def _name(self) -> str:
        return f"{self.meta.path}: " if self.meta.path else ""

    def popularity(self) -> NDArray[np.int64]:
        """How often each expert was chosen: counts by flat id, shape [L * E]."""
        return np.bincount(self.flat_ids().ravel(), minlength=self.num_layers * self.num_experts)

    def flat_ids(self) -> NDArray[np.int32]:
        """`layer * num_experts + id` of every choice, shape [S, L, k]."""
        base = np.arange(self.num_layers, dtype=np.int32) * self.num_experts
        return self.expert_ids.astype(np.int32) + base[None, :, None]

    def overlap(self) -> float:
        """Mean share of a step's k experts that the same layer chose in the step before it, within sequences."""
        same = np.zeros(max(self.num_steps - 1, 0), dtype=np.int64)  # [S-1], summed over layers and k
        before, after = self.expert_ids[:-1], self.expert_ids[1:]
        for j in range(self.top_k):
            same += (after == before[:, :, j : j + 1]).sum(axis=(1, 2))
        inside = np.ones(len(same), dtype=bool)
        inside[self.seq_start[1:] - 1] = False
        if not inside.any():
            raise UsageError("overlap needs a sequence of at least 2 steps, every one in this trace has 1")
        return float(same[inside].mean() / (self.num_layers * self.top_k))

    def _rows(self, rows: "slice | NDArray[np.int64]", seq_len: NDArray[np.int64]) -> "Trace":
        weights = None if self.expert_weights is None else self.expert_weights[rows]
        tokens = None if self.tokens is None else self.tokens[rows]
        inputs = None if self.router_inputs is None else self.router_inputs[rows]
        start = starts_of(seq_len)
        return Trace(self.expert_ids[rows], weights, tokens, start, seq_len, self.num_experts, inputs, self.meta)


def read_npz(path: str | Path, num_experts: int | None = None) -> Trace:
    """Reads a trace file: arrays `expert_ids` [S, L, k], `seq_start` and `seq_len` [n], and where they are there
    `expert_probs` [S, L, k] and `token` [S].

    `num_experts` defaults to the file's own `num_experts`, else to the highest id + 1. Rows that no sequence names are
    left out. Raises UsageError with the file and the field for a file that cannot be used; nothing is unpickled.
    """
    path = Path(path)
    arrays = _load_arrays(path)
    try:
        return _build(arrays, num_experts, TraceMeta(source=path.name, path=str(path)))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _build(arrays: dict[str, np.ndarray], num_experts: int | None, meta: TraceMeta) -> Trace:
    for key in ("expert_ids", "seq_start", "seq_len"):
        if key not in arrays:
            raise UsageError(f"array {key} is missing; of the known ones the file has {', '.join(arrays) or 'none'}")
    ids, start, length = arrays["expert_ids"], arrays["seq_start"], arrays["seq_len"]
    weights, tokens = arrays.get("expert_probs"), arrays.get("token")
    _check_integers("expert_ids", ids, 3)
    for key, array in (("expert_probs", weights), ("token", tokens)):
        if array is not None and array.shape[:1] != ids.shape[:1]:
            raise UsageError(f"{key} has shape {list(array.shape)}, expert_ids has {len(ids)} steps")
    if num_experts is None and "num_experts" in arrays:
        num_experts = _scalar("num_experts", arrays["num_experts"])
    if num_experts is None:
        num_experts = max(1, int(ids.max(initial=0)) + 1)
    rows = sequence_rows(start, length, len(ids))
    if rows is not None:
        ids = ids[rows]
        weights = None if weights is None else weights[rows]
        tokens = None if tokens is None else tokens[rows]
    return Trace(ids, weights, tokens, starts_of(length), length.astype(np.int64), num_experts, None, meta)


def _load_arrays(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise UsageError(f"{path}: no such trace file; an .npz with expert_ids, seq_start and seq_len is needed")
    if not zipfile.is_zipfile(path):  # a truncated zip has lost its directory, which stands at the end
        raise UsageError(f"{path}: not a complete .npz file (cut off, or something else); copy it again")
    arrays: dict[str, np.ndarray] = {}
    key = ""
    try:
        with np.load(path, allow_pickle=False) as file:
            for key in ("expert_ids", "seq_start", "seq_len", "expert_probs", "token", "num_experts"):
                if key in file.files:
                    arrays[key] = file[key]
    except _UNREADABLE as error:
        what = f"array {key}" if key else "the list of its arrays"
        raise UsageError(f"{path}: {what} cannot be read ({' '.join(str(error).split())})") from None
    return arrays


def _scalar(name: str, array: np.ndarray) -> int:
    if array.size != 1 or not np.issubdtype(array.dtype, np.integer):
        raise UsageError(f"{name} must be one integer, got {array.dtype} {list(array.shape)}")
    return int(array.reshape(-1)[0])


def sequence_rows(start: np.ndarray, length: np.ndarray, steps: int) -> NDArray[np.int64] | None:
    """The rows that the sequences name, in their order; None when that is simply all rows."""
    _check_integers("seq_start", start, 1)
    _check_integers("seq_len", length, 1)
    if len(start) != len(length):
        raise UsageError(f"seq_start has {len(start)} entries, seq_len has {len(length)}: one of each per sequence")
    if not len(length):
        raise UsageError("seq_len is empty: at least one sequence is needed")
    for i, (first, count) in enumerate(zip(start.tolist(), length.tolist(), strict=True)):
        if count < 2:
            raise UsageError(f"seq_len[{i}] is {count}: a sequence needs at least 2 steps, one and the next")
        if first < 0 or first + count > steps:
            raise UsageError(
                f"sequence {i} is rows {first} to {first + count - 1}, expert_ids has rows 0 to {steps - 1}"
            )
    order = np.argsort(start, kind="stable")
    for i, j in pairwise(order.tolist()):
        if start[j] < start[i] + length[i]:
            last = start[i] + length[i] - 1
            raise UsageError(f"sequences {i} and {j} overlap: {j} starts at row {start[j]}, {i} ends with row {last}")
    if np.array_equal(order, np.arange(len(order))) and int(length.sum()) == steps:
        return None
    return ranges(start, length)


def starts_of(seq_len: NDArray[np.int64]) -> NDArray[np.int64]:
    """First row of each sequence, where they lie end to end."""
    return np.concatenate([[0], np.cumsum(seq_len)[:-1]]).astype(np.int64)


def ranges(start: NDArray[np.int64], length: NDArray[np.int64]) -> NDArray[np.int64]:
    """start[0] .. start[0] + length[0] - 1, start[1] .. and so on, end to end."""
    return np.concatenate([np.arange(s, s + n) for s, n in zip(start.tolist(), length.tolist(), strict=True)])


def _check_integers(name: str, array: np.ndarray, ndim: int) -> None:
    if not np.issubdtype(array.dtype, np.integer) or array.ndim != ndim:
        shape = {1: "[sequences]", 3: "[steps, layers, k]"}[ndim]
        raise UsageError(f"{name} must be integers of shape {shape}, got {array.dtype} {list(array.shape)}")


def _frozen(name: str, array: np.ndarray, kind: type[np.integer | np.floating]) -> np.ndarray:
    if not isinstance(array, np.ndarray) or not np.issubdtype(array.dtype, kind):
        got = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise UsageError(f"{name} must be an array of {kind.__name__} values, got {got}")
    target = {"seq_start": np.int64, "seq_len": np.int64, "tokens": np.int32}.get(name)
    if target is not None:
        array = _as_dtype(array, np.dtype(target))
    elif kind is np.floating and array.dtype not in (np.float16, np.float32):
        array = array.astype(np.float32)
    view = array.view()
    view.flags.writeable = False
    return view


def _as_dtype(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if array.dtype == dtype:
        return array
    converted = array.astype(dtype)
    converted.flags.writeable = False
    return converted


def _check_ids(ids: np.ndarray, num_experts: int) -> None:
    _check_integers("expert_ids", ids, 3)
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise UsageError(f"num_experts must be 1 to {MAX_EXPERTS}, got {num_experts}")
    if 0 in ids.shape:
        raise UsageError(f"expert_ids is empty: shape {list(ids.shape)}, [steps, layers, k] must all be at least 1")
    if ids.shape[2] > num_experts:
        raise UsageError(f"expert_ids chooses k={ids.shape[2]} experts of {num_experts}")
    if int(ids.min()) < 0 or int(ids.max()) >= num_experts:
        step, layer, j = (int(i) for i in np.argwhere((ids < 0) | (ids >= num_experts))[0])
        raise UsageError(f"expert_ids[{step}, {layer}, {j}] is {ids[step, layer, j]}, not in 0 to {num_experts - 1}")
    if ids.shape[2] > 1:
        ordered = np.sort(ids, axis=2)
        twice = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2)
        if twice.any():
            step, layer = (int(i) for i in np.argwhere(twice)[0])
            raise UsageError(f"expert_ids[{step}, {layer}] names an expert twice: {ids[step, layer].tolist()}")


def _check_companions(shape: tuple[int, ...], weights: np.ndarray | None, tokens: np.ndarray | None) -> None:
    if weights is not None:
        if weights.shape != shape:
            raise UsageError(f"expert_weights has shape {list(weights.shape)}, expert_ids has {list(shape)}")
        bad = ~(np.isfinite(weights) & (weights >= 0))
        if bad.any():
            step, layer, j = (int(i) for i in np.argwhere(bad)[0])
            value = float(weights[step, layer, j])
            raise UsageError(f"expert_weights[{step}, {layer}, {j}] is {value}, must be finite and not negative")
    if tokens is not None and tokens.shape != shape[:1]:
        raise UsageError(f"tokens has shape {list(tokens.shape)}, expert_ids has {shape[0]} steps")


def _check_router_inputs(shape: tuple[int, ...], inputs: np.ndarray | None) -> None:
    if inputs is None:
        return
    if inputs.dtype not in (np.float16, np.uint16):
        raise UsageError(f"router_inputs must be float16 or bfloat16 (as uint16), got {inputs.dtype}")
    if inputs.ndim != 3 or inputs.shape[:2] != shape[:2] or not inputs.shape[2]:
        raise UsageError(f"router_inputs has shape {list(inputs.shape)}, expected {[*shape[:2], 'hidden size']}")


def _check_tiling(seq_start: np.ndarray, seq_len: np.ndarray, steps: int) -> None:
    _check_integers("seq_start", seq_start, 1)
    _check_integers("seq_len", seq_len, 1)
    if not len(seq_len) or int(seq_len.min()) < 1:
        empty = int(np.argmin(seq_len)) if len(seq_len) else 0
        raise UsageError(f"seq_len[{empty}] is 0 or missing: every sequence needs a step")
    if len(seq_start) != len(seq_len) or not np.array_equal(seq_start, starts_of(seq_len)) or int(seq_len.sum()) != steps:
        raise UsageError(
            f"seq_start and seq_len do not tile the {steps} steps: seq_start must be the running sum of seq_len"
        )
