"""Forecasts of whole traces for the simulator: made once per trace and predictor, calibrated, kept on disk as float16."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from seqmoe.predictors.calibration import MODES, Calibration, fit_calibration, load_calibration
from seqmoe.predictors.forecast import to_inclusion
from seqmoe.predictors.protocol import Predictor
from seqmoe.predictors.registry import NAMES, make_predictor
from seqmoe.predictors.trace import Trace
from seqmoe.predictors.trace_forecasts import Half, TraceForecasts
from seqmoe.profiles.errors import UsageError
from seqmoe.profiles.files import replacing
from seqmoe.runtime.demo_xl import default_cache_dir

_VERSION = b"1"
Progress = Callable[[str, int, int], None]  # what is done, sequences done, sequences in all


def trace_forecasts(
    name: str,
    trace: Trace,
    horizon: int,
    *,
    training: Trace | None = None,
    validation: Trace | None = None,
    both: bool = True,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> TraceForecasts:
    """Forecasts of a predictor (name or folder) for all steps of `trace`, from the cache where they are there.

    `training`: what rivals are fitted to. `validation`: what the calibration is fitted to; without it a folder's own
    calibration is used, else water-filling. `both`: also those without token, made after each step's last layer.
    """
    folder = folder or default_cache_dir() / "forecasts"
    modes = [True, False] if both else [True]
    paths = [folder / f"{_key(name, trace, horizon, training, validation, mode)}.npy" for mode in modes]
    predictor: Predictor | None = None
    for mode, path in zip(modes, paths, strict=True):
        if path.exists():
            continue
        if predictor is None:
            if progress:
                progress(f"{name}: fitting", 0, 0)
            predictor = make_predictor(name, training, horizon)
        _compute(predictor, name, trace, horizon, validation, mode, path, progress)
    arrays = [_open(path, trace, horizon) for path in paths]
    return TraceForecasts(arrays[0], arrays[1] if both else None)


def _compute(
    predictor: Predictor,
    name: str,
    trace: Trace,
    horizon: int,
    validation: Trace | None,
    mode: bool,
    path: Path,
    progress: Progress | None,
) -> None:
    with_tokens = mode and predictor.uses_tokens and trace.tokens is not None
    calibration: Calibration | None = None
    if validation is not None:
        if progress:
            progress(f"{name}: calibrating", 0, 0)
        calibration = fit_calibration(predictor, validation, horizon, with_tokens)
    elif name not in NAMES:
        calibration = load_calibration(Path(name), trace.top_k).get(MODES[with_tokens])
    with replacing(path) as temporary:
        shape = (trace.num_steps, horizon, trace.num_layers, trace.num_experts)
        out = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.float16, shape=shape)
        for i in range(trace.num_sequences):
            scores = predictor.forecast_trace(trace.sequence(i), horizon, with_tokens)
            values = calibration.apply(scores) if calibration else to_inclusion(scores, trace.top_k)
            first = int(trace.seq_start[i])
            out[first : first + len(values)] = values
            if progress:
                progress(f"{name}: forecasts", i + 1, trace.num_sequences)
        out.flush()
        del out


def _open(path: Path, trace: Trace, horizon: int) -> Half:
    try:
        array: Half = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); delete it to have it made again") from None
    if array.shape != (trace.num_steps, horizon, trace.num_layers, trace.num_experts) or array.dtype != np.float16:
        raise UsageError(f"{path}: has shape {list(array.shape)}, not the trace's; delete it to have it made again")
    return array


def _key(name: str, trace: Trace, horizon: int, training: Trace | None, validation: Trace | None, mode: bool) -> str:
    digest = hashlib.sha256(_VERSION)
    digest.update(f"|{horizon}|{mode}|".encode())
    folder = Path(name)
    if name in NAMES or not folder.is_dir():
        digest.update(name.encode())
    else:
        for path in sorted(p for p in folder.iterdir() if p.is_file()):
            digest.update(path.name.encode() + b"=" + hashlib.sha256(path.read_bytes()).digest())
    for part in (trace, training, validation):
        digest.update(b"|none" if part is None else _trace_digest(part))
    return digest.hexdigest()[:32]


def _trace_digest(trace: Trace) -> bytes:
    digest = hashlib.sha256(f"{trace.num_experts}|{trace.expert_ids.shape}".encode())
    arrays: tuple[Any, ...] = (trace.expert_ids, trace.expert_weights, trace.tokens, trace.seq_start, trace.seq_len)
    for array in arrays:
        digest.update(b"|" if array is None else np.ascontiguousarray(array).tobytes())
    return digest.digest()
