"""Traces as one safetensors file, read by memory map and written one sequence at a time. Loads without torch.

Tensors: `expert_ids` [S, L, k] I16 or U8, `seq_start` and `seq_len` [n] I64, and where they are known `expert_weights`
[S, L, k] F16 or F32, `tokens` [S] I32, `router_inputs` [S, L, H] F16 or BF16. `__metadata__`: format "seqmoe-trace",
version "1", num_experts, and model_digest, model_name, source. The sequences tile the steps.
"""

import json
import math
import mmap
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqmoe.predictors.trace import Trace, TraceMeta, ranges, read_npz, sequence_rows, starts_of
from seqmoe.profiles.errors import UsageError
from seqmoe.profiles.files import replacing, write_error

FORMAT, VERSION = "seqmoe-trace", "1"
_MAX_HEADER_BYTES = 100_000_000
# field -> what it may be on disk; the order of the file, widest first, so that every tensor lies aligned
_FIELDS: dict[str, tuple[str, ...]] = {
    "seq_start": ("I64",),
    "seq_len": ("I64",),
    "tokens": ("I32",),
    "expert_weights": ("F32", "F16"),
    "expert_ids": ("I16", "U8"),
    "router_inputs": ("F16", "BF16"),
}
_SHAPES = {
    "seq_start": "[sequences]",
    "seq_len": "[sequences]",
    "tokens": "[steps]",
    "expert_weights": "[steps, layers, k]",
    "expert_ids": "[steps, layers, k]",
    "router_inputs": "[steps, layers, hidden]",
}
_NUMPY = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "|u1", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_NAMES = {np.dtype(kind): name for name, kind in _NUMPY.items()}


@dataclass(frozen=True)
class TraceFile:
    """An open trace file: header and sequence bounds are checked, everything else is read when it is sliced."""

    path: Path
    num_experts: int
    meta: TraceMeta
    seq_start: NDArray[np.int64]  # [n]
    seq_len: NDArray[np.int64]  # [n], each at least 2
    arrays: dict[str, np.ndarray]  # memory-mapped, by field

    @property
    def num_sequences(self) -> int:
        return len(self.seq_len)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(S, L, k)."""
        steps, layers, k = self.arrays["expert_ids"].shape
        return int(steps), int(layers), int(k)

    def trace(self, sequences: Sequence[int] | None = None) -> Trace:
        """These sequences (default: all) as a Trace; consecutive ones are views of the file, nothing is copied."""
        n = self.num_sequences
        chosen = list(range(n)) if sequences is None else list(sequences)
        for index in chosen:
            if not 0 <= index < n:
                raise UsageError(f"{self.path}: sequence {index} is not in the trace, which has {n} (0 to n-1)")
        if not chosen:
            raise UsageError(f"{self.path}: at least one of the {n} sequences must be selected, none was")
        first, last = chosen[0], chosen[-1]
        consecutive = chosen == list(range(first, last + 1))
        low, high = (first, last) if consecutive else (min(chosen), max(chosen))
        base = int(self.seq_start[low])
        rows = slice(base, int(self.seq_start[high] + self.seq_len[high]))
        part = {name: self.arrays[name][rows] for name in self.arrays if not name.startswith("seq_")}
        length = self.seq_len[low : high + 1]
        try:
            if not consecutive:
                steps = ranges(self.seq_start[chosen] - base, self.seq_len[chosen])
                part = {name: array[steps] for name, array in part.items()}
                length = self.seq_len[chosen]
            return Trace(
                part["expert_ids"],
                part.get("expert_weights"),
                part.get("tokens"),
                starts_of(length),
                length,
                self.num_experts,
                part.get("router_inputs"),
                self.meta,
            )
        except UsageError as error:
            where = "" if low == 0 and high == n - 1 and consecutive else f" (rows from {base} on)"
            raise UsageError(f"{self.path}: {error}{where}") from None


def open_trace(path: str | Path) -> TraceFile:
    """Opens a trace file by memory map. Raises UsageError, naming the file and the field, for one that cannot be used."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"{path}: no such trace file")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header, start = _read_header(path, file.read(min(size, 8)), size, file)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from None
    try:
        return _open(path, header, np.frombuffer(mapped, dtype=np.uint8)[start:])
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def read_trace(path: str | Path, sequences: Sequence[int] | None = None) -> Trace:
    """A trace by file name: .safetensors, or .npz as `trace.read_npz` takes it. Only `sequences`, where given."""
    path = Path(path)
    if path.suffix == ".npz":
        trace = read_npz(path)
        if sequences is None:
            return trace
        try:
            return trace.select(sequences)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
    return open_trace(path).trace(sequences)


def write_trace(path: str | Path, trace: Trace) -> None:
    """Writes a whole trace to one file, which is there whole or not at all."""
    arrays = {name: getattr(trace, name) for name in _FIELDS if getattr(trace, name) is not None}
    entries = {name: (_NAMES[a.dtype] if name != "router_inputs" else _kind(a), a.shape) for name, a in arrays.items()}
    with replacing(Path(path)) as temporary, temporary.open("wb") as file:
        file.write(_header(entries, trace.meta, trace.num_experts))
        for name in entries:
            file.write(np.ascontiguousarray(arrays[name]).data)


class TraceWriter:
    """Collects a trace one sequence at a time and survives being killed: finished sequences are kept.

    While it grows, the trace lies in the folder `<path>.parts`: one raw file for each field, and `journal.jsonl` with a
    line for each finished sequence, which counts only once its data are on disk. `finish` makes the one file.
    """

    def __init__(
        self,
        path: str | Path,
        num_experts: int,
        meta: TraceMeta | None = None,
        *,
        resume: bool = False,
    ) -> None:
        self.path = Path(path)
        self.parts = self.path.with_name(self.path.name + ".parts")
        self.num_experts = num_experts
        self.meta = meta or TraceMeta()
        self.done: list[str] = []  # keys of the finished sequences, in order
        self._lengths: list[int] = []
        self._fields: dict[str, tuple[str, list[int]]] = {}  # field -> (dtype, shape of a step)
        if self.parts.exists() and not resume:
            raise UsageError(f"{self.parts}: an unfinished collection is there; resume it, or delete the folder")
        try:
            self.parts.mkdir(parents=True, exist_ok=True)
            self._resume()
        except OSError as error:
            raise write_error(self.parts, error) from None

    def add(self, sequence: Trace, key: str = "") -> None:
        """Appends a trace of one sequence; `key` (a prompt's number, say) is in `done` from then on, after a kill too."""
        if sequence.num_sequences != 1 or sequence.num_steps < 2:
            raise UsageError(
                f"{self.path}: sequence {key or len(self.done)} must be one sequence of at least 2 steps, "
                f"got {sequence.num_sequences} with {sequence.num_steps} steps"
            )
        names = ("tokens", "expert_weights", "expert_ids", "router_inputs")
        arrays = {name: getattr(sequence, name) for name in names if getattr(sequence, name) is not None}
        fields = {
            n: (_kind(a) if n == "router_inputs" else _NAMES[a.dtype], list(a.shape[1:])) for n, a in arrays.items()
        }
        if self._fields and fields != self._fields:
            raise UsageError(f"{self.path}: sequence {key} has fields {fields}, those before it have {self._fields}")
        if sequence.num_experts != self.num_experts:
            raise UsageError(f"{self.path}: num_experts is {sequence.num_experts}, expected {self.num_experts}")
        self._fields = fields
        try:
            for name, array in arrays.items():
                with (self.parts / f"{name}.raw").open("ab") as file:
                    file.write(np.ascontiguousarray(array).data)
                    file.flush()
                    os.fsync(file.fileno())
            line = {"key": key, "steps": sequence.num_steps, "num_experts": self.num_experts, "fields": fields}
            line["model_digest"] = self.meta.model_digest
            with (self.parts / "journal.jsonl").open("a", encoding="utf-8") as journal:
                journal.write(json.dumps(line) + "\n")
                journal.flush()
                os.fsync(journal.fileno())
        except OSError as error:
            raise write_error(self.parts, error) from None
        self.done.append(key)
        self._lengths.append(sequence.num_steps)

    def finish(self, order: Sequence[str] | None = None) -> Path:
        """Makes the one file and removes the parts. `order`: all keys, in the order that their sequences shall have
        (default: as they were added). UsageError when no sequence was added."""
        if not self._lengths:
            raise UsageError(f"{self.path}: no sequence was added to the trace")
        begin = np.concatenate([[0], np.cumsum(self._lengths)])
        places = range(len(self.done)) if order is None else [self.done.index(key) for key in order]
        assert sorted(places) == list(range(len(self.done))), "order must name every sequence once"
        length = np.array([self._lengths[place] for place in places], dtype=np.int64)
        bounds = {"seq_start": starts_of(length), "seq_len": length}
        steps = int(length.sum())
        entries: dict[str, tuple[str, tuple[int, ...]]] = {name: ("I64", (len(length),)) for name in bounds}
        entries |= {n: (self._fields[n][0], (steps, *self._fields[n][1])) for n in _FIELDS if n in self._fields}
        with replacing(self.path) as temporary, temporary.open("wb") as file:
            file.write(_header(entries, self.meta, self.num_experts))
            for name in entries:
                if name in bounds:
                    file.write(bounds[name].data)
                    continue
                kind, shape = self._fields[name]
                step_bytes = math.prod(shape) * np.dtype(_NUMPY[kind]).itemsize
                with (self.parts / f"{name}.raw").open("rb") as part:
                    for place in places:
                        part.seek(int(begin[place]) * step_bytes)
                        file.write(part.read(self._lengths[place] * step_bytes))
        shutil.rmtree(self.parts)
        return self.path

    def _resume(self) -> None:
        journal = self.parts / "journal.jsonl"
        lines = journal.read_bytes().split(b"\n") if journal.exists() else []
        kept = b""
        for raw in lines:
            try:
                line = json.loads(raw)
            except ValueError:
                break  # the line that was being written when the process was killed
            for field, got, expected in (
                ("num_experts", line["num_experts"], self.num_experts),
                ("model_digest", line["model_digest"], self.meta.model_digest),
            ):
                if got != expected:
                    raise UsageError(f"{journal}: {field} is {got}, expected {expected}; it is another collection's")
            self._fields = {name: (kind, shape) for name, (kind, shape) in line["fields"].items()}
            self.done.append(line["key"])
            self._lengths.append(line["steps"])
            kept += raw + b"\n"
        if journal.exists():
            journal.write_bytes(kept)
        for name, (kind, shape) in self._fields.items():
            part = self.parts / f"{name}.raw"
            expected = sum(self._lengths) * math.prod(shape) * np.dtype(_NUMPY[kind]).itemsize
            if not part.exists() or part.stat().st_size < expected:
                raise UsageError(f"{part}: shorter than its journal says ({expected} bytes); delete {self.parts}")
            os.truncate(part, expected)  # what a killed sequence had written
        if not self._fields:
            for part in self.parts.glob("*.raw"):
                part.unlink()


def _kind(router_inputs: np.ndarray) -> str:
    return "BF16" if router_inputs.dtype == np.uint16 else "F16"


def _read_header(path: Path, head: bytes, size: int, file: Any) -> tuple[dict[str, Any], int]:
    if len(head) < 8:
        raise UsageError(f"{path}: {size} bytes are not a safetensors file; it is cut off, or empty")
    length = int.from_bytes(head, "little")
    if length > _MAX_HEADER_BYTES:
        raise UsageError(f"{path}: not a safetensors file (its header would have {length} bytes)")
    if 8 + length > size:
        raise UsageError(f"{path}: cut off within its header ({size} bytes of at least {8 + length}); copy it again")
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError):
        raise UsageError(f"{path}: not a safetensors file (its header is not JSON)") from None
    if not isinstance(header, dict):
        raise UsageError(f"{path}: not a safetensors file (its header is no JSON object)")
    return header, 8 + length


def _open(path: Path, header: dict[str, Any], data: NDArray[np.uint8]) -> TraceFile:
    known = header.get("__metadata__")
    known = known if isinstance(known, dict) else {}
    if known.get("format") != FORMAT:
        raise UsageError(f"__metadata__.format is {known.get('format')!r}, expected '{FORMAT}': not a routing trace")
    if known.get("version") != VERSION:
        raise UsageError(f"__metadata__.version is {known.get('version')!r}, expected '{VERSION}'")
    experts = str(known.get("num_experts", ""))
    if not experts.isdecimal() or int(experts) < 1:
        raise UsageError(f"__metadata__.num_experts is {experts!r}, expected a number of at least 1")
    for name in ("expert_ids", "seq_start", "seq_len"):
        if name not in header:
            raise UsageError(f"tensor {name} is missing")
    arrays = {name: _tensor(name, header[name], data) for name in _FIELDS if name in header}
    ids = arrays["expert_ids"]
    for name in ("tokens", "expert_weights", "router_inputs"):
        if name in arrays and len(arrays[name]) != len(ids):
            raise UsageError(f"{name} has {len(arrays[name])} steps, expected {len(ids)} as expert_ids has")
    start, length = np.array(arrays["seq_start"]), np.array(arrays["seq_len"])
    if sequence_rows(start, length, len(ids)) is not None:
        raise UsageError(f"seq_start and seq_len do not tile the {len(ids)} steps of expert_ids, one after the other")
    words = {name: str(known.get(name, "")) for name in ("model_digest", "model_name", "source")}
    return TraceFile(path, int(experts), TraceMeta(**words, path=str(path)), start, length, arrays)


def _tensor(name: str, entry: Any, data: NDArray[np.uint8]) -> np.ndarray:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        good = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and begin <= end
    except (TypeError, KeyError, ValueError):
        good = False
    if not good:
        raise UsageError(f"the header's entry for {name} is damaged: {json.dumps(entry)[:80]}")
    if dtype not in _FIELDS[name]:
        raise UsageError(f"{name} has dtype {dtype}, expected {' or '.join(_FIELDS[name])}")
    if len(shape) != _SHAPES[name].count(",") + 1:
        raise UsageError(f"{name} has shape {list(shape)}, expected {_SHAPES[name]}")
    kind = np.dtype(_NUMPY[dtype])
    if end - begin != math.prod(shape) * kind.itemsize:
        raise UsageError(f"{name} has {end - begin} bytes, expected {math.prod(shape) * kind.itemsize} for {shape}")
    if end > len(data):
        raise UsageError(f"cut off within {name}: {len(data)} bytes of data of at least {end}; copy it again")
    return data[begin:end].view(kind).reshape(shape)


def _header(entries: dict[str, tuple[str, tuple[int, ...]]], meta: TraceMeta, num_experts: int) -> bytes:
    words = {"model_digest": meta.model_digest, "model_name": meta.model_name, "source": meta.source}
    header: dict[str, Any] = {
        "__metadata__": {"format": FORMAT, "version": VERSION, "num_experts": str(num_experts), **words}
    }
    offset = 0
    for name, (dtype, shape) in entries.items():
        nbytes = math.prod(shape) * np.dtype(_NUMPY[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)  # so that the data begin aligned
    return len(raw).to_bytes(8, "little") + raw


def parse_sequences(text: str, option: str = "--sequences") -> list[int]:
    """ "288:321" -> 288 to 320; "3,5,7" -> those; both may be mixed. Raises UsageError naming `option`."""
    chosen: list[int] = []
    for part in text.split(","):
        first, colon, end = part.strip().partition(":")
        if not first.isdecimal() or (colon and (not end.isdecimal() or int(end) <= int(first))):
            raise UsageError(f"{option} takes numbers and ranges such as 288:321 (321 not included); got {text!r}")
        chosen += range(int(first), int(end) if colon else int(first) + 1)
    return chosen
