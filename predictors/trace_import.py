"""Routing recorded by other tools -> Trace: an .npz (see trace.read_npz) or JSON lines. Loads without torch.

JSON lines, one sequence a line, in decode order:

    {"experts": [[[3, 17], [0, 5]], [[3, 9], [5, 2]]],           # per step, per MoE layer, the k chosen, best first
     "weights": [[[0.7, 0.3], [0.6, 0.4]], [[0.9, 0.1], [0.5, 0.5]]],  # optional: router weights of those
     "tokens": [1212, 11]}                                       # optional: id of the token fed at each step

Empty lines are skipped. Either every line has weights (tokens), or none.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from seqmoe.predictors.trace import Trace, TraceMeta, read_npz
from seqmoe.predictors.trace_file import read_trace
from seqmoe.profiles.errors import UsageError

_KNOWN = {"experts", "weights", "tokens"}


def import_trace(path: str | Path, num_experts: int | None = None, meta: TraceMeta | None = None) -> Trace:
    """Reads .npz, .jsonl or our own .safetensors; what `meta` says of the model goes before what the file says.

    `num_experts` defaults to what the file says, else to the highest id + 1. Raises UsageError with file and line.
    """
    path = Path(path)
    if path.suffix == ".npz":
        trace = read_npz(path, num_experts)
    elif path.suffix in (".jsonl", ".ndjson"):
        trace = read_jsonl(path, num_experts)
    elif path.suffix == ".safetensors":
        trace = read_trace(path)
        if num_experts not in (None, trace.num_experts):
            raise UsageError(f"{path}: num_experts is {trace.num_experts}, expected {num_experts}")
    else:
        raise UsageError(f"{path}: unknown kind of trace; .npz, .jsonl and .safetensors can be read")
    if meta is None:
        return trace
    known = trace.meta
    meta = TraceMeta(
        meta.model_digest or known.model_digest, meta.model_name or known.model_name, meta.source or known.source, meta.path
    )
    parts = (trace.expert_ids, trace.expert_weights, trace.tokens, trace.seq_start, trace.seq_len)
    return Trace(*parts, trace.num_experts, trace.router_inputs, meta)


def read_jsonl(path: str | Path, num_experts: int | None = None) -> Trace:
    """Reads JSON lines as described above. Raises UsageError with the file, the line and the field."""
    path = Path(path)
    ids: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    tokens: list[np.ndarray] = []
    fields: set[str] = set()
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    record = _record(line)
                    if ids and set(record) != fields:
                        raise UsageError(f"has {', '.join(record)}; the lines before it have {', '.join(fields)}")
                    fields = set(record)
                    experts = _array("experts", record["experts"], 3, int)
                    if ids and experts.shape[1:] != ids[0].shape[1:]:
                        got, expected = list(experts.shape[1:]), list(ids[0].shape[1:])
                        raise UsageError(f"experts has [layers, k] = {got}, expected {expected} as on the lines before")
                    if len(experts) < 2:
                        raise UsageError(f"experts has {len(experts)} step: a sequence needs at least 2")
                    ids.append(experts)
                    if "weights" in record:
                        weights.append(_like("weights", record["weights"], 3, float, experts.shape))
                    if "tokens" in record:
                        tokens.append(_like("tokens", record["tokens"], 1, int, experts.shape[:1]))
                    _checked(ids[-1], weights[-1] if weights else None, num_experts)
                except UsageError as error:
                    raise UsageError(f"{path}:{number}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as text ({error})") from None
    if not ids:
        raise UsageError(f"{path}: no sequence in it; it takes one a line")
    length = np.array([len(part) for part in ids], dtype=np.int64)
    together = np.concatenate(ids)
    return Trace(
        together.astype(np.int16),
        np.concatenate(weights).astype(np.float32) if weights else None,
        np.concatenate(tokens).astype(np.int32) if tokens else None,
        np.concatenate([[0], np.cumsum(length)[:-1]]),
        length,
        num_experts or int(together.max()) + 1,
        None,
        TraceMeta(source=path.name, path=str(path)),
    )


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON ({error})") from None
    if not isinstance(record, dict) or "experts" not in record:
        raise UsageError('expected an object with "experts": per step, per layer, the chosen ids')
    if unknown := sorted(set(record) - _KNOWN):
        raise UsageError(f"unknown field {unknown[0]!r}; known are experts, weights, tokens")
    return {name: record[name] for name in record if record[name] is not None}


def _array(name: str, value: Any, ndim: int, kind: type) -> np.ndarray:
    try:
        array = np.array(value)
    except ValueError:
        array = np.array(None)
    number = np.issubdtype(array.dtype, np.integer) or (kind is float and np.issubdtype(array.dtype, np.floating))
    if not number or array.ndim != ndim:
        nested = {3: "[steps][layers][k]", 1: "[steps]"}[ndim]
        raise UsageError(
            f"{name} must be {'whole ' if kind is int else ''}numbers nested as {nested}, of equal lengths"
        )
    return array


def _like(name: str, value: Any, ndim: int, kind: type, shape: tuple[int, ...]) -> np.ndarray:
    array = _array(name, value, ndim, kind)
    if array.shape != shape:
        raise UsageError(f"{name} has shape {list(array.shape)}, expected {list(shape)} as experts has")
    return array


def _checked(ids: np.ndarray, weights: np.ndarray | None, num_experts: int | None) -> None:
    """The trace of one line, for its errors alone."""
    experts = num_experts or max(1, int(ids.max(initial=0)) + 1)
    shaped = None if weights is None else weights.astype(np.float64)
    Trace(ids, shaped, None, np.array([0]), np.array([len(ids)]), experts)
