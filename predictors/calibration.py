"""From a predictor's scores to probabilities that can be believed, fitted on validation sequences. Loads without torch.

Per step ahead: one temperature, p -> sigmoid(log(p) / T + b) with b so that a layer sums to k, then an isotonic curve
over those, then b once more, since the curve does not keep the sum.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from seqmoe.predictors.forecast import logit_inclusion, shift_to_sum
from seqmoe.predictors.metrics import FIRST_ROW, chosen_experts
from seqmoe.predictors.protocol import Predictor
from seqmoe.predictors.trace import Trace
from seqmoe.profiles.errors import UsageError
from seqmoe.profiles.files import write_atomic

FILE_NAME = "calibration.json"  # beside the predictor's weights
FORMAT, VERSION = "seqmoe-calibration", 1
MODES = ("without_tokens", "with_tokens")
_POINTS = 48
_EDGE = 1e-5
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Calibration:
    """How scores of each step ahead become inclusion probabilities. Steps beyond the last fitted one use the last's."""

    k: int
    temperature: tuple[float, ...]  # [horizon]
    forecast: tuple[tuple[float, ...], ...]  # [horizon][points] ascending; none: no curve
    happened: tuple[tuple[float, ...], ...]  # [horizon][points] not descending

    def __post_init__(self) -> None:
        if self.k < 1 or not self.temperature or not all(0 < t < 1e3 for t in self.temperature):
            raise UsageError(f"calibration needs k >= 1 and temperatures above 0, got {self.k}, {self.temperature}")
        if not len(self.temperature) == len(self.forecast) == len(self.happened):
            raise UsageError("calibration needs a temperature and a curve for each step ahead")
        for x, y in zip(self.forecast, self.happened, strict=True):
            values = np.array([*x, *y])
            if len(x) != len(y) or not ((values >= 0) & (values <= 1)).all() or (np.diff(x) < 0).any():
                raise UsageError("calibration curves must be probabilities, ascending, one y for each x")

    def apply(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scores [..., horizon, L, E] -> probabilities of the same shape, summing to k."""
        out = np.empty(scores.shape, dtype=np.float32)
        for h in range(scores.shape[-3]):
            at = min(h, len(self.temperature) - 1)
            out[..., h, :, :] = self.apply_step(scores[..., h, :, :], at)
        return out

    def apply_step(self, scores: NDArray[np.float32], step: int) -> NDArray[np.float32]:
        """Scores [..., L, E] of one step ahead (0: the step about to run)."""
        probabilities = logit_inclusion(scores, self.k, self.temperature[step])
        x, y = self.forecast[step], self.happened[step]
        if len(x) < 2:
            return probabilities
        curved = np.clip(np.interp(probabilities.astype(np.float64), x, y), _EDGE, 1 - _EDGE)
        return shift_to_sum(np.log(curved / (1 - curved)), self.k)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"temperature": self.temperature, "forecast": self.forecast, "happened": self.happened}

    @classmethod
    def from_dict(cls, k: int, data: Any) -> Self:
        """Raises UsageError for what is not a calibration."""
        try:
            curves = [tuple(tuple(float(v) for v in row) for row in data[name]) for name in ("forecast", "happened")]
            return cls(k, tuple(float(t) for t in data["temperature"]), *curves)
        except (TypeError, KeyError, ValueError) as error:
            raise UsageError(f"calibration is damaged: {error!r}") from None


def fit_calibration(predictor: Predictor, trace: Trace, horizon: int, with_tokens: bool) -> Calibration:
    """Fits temperature (least Brier score) and curve to what the predictor says of validation sequences."""
    return fit_to_forecasts(
        (
            (predictor.forecast_trace(sequence, horizon, with_tokens), sequence)
            for sequence in (trace.sequence(i) for i in range(trace.num_sequences))
        ),
        horizon,
        trace.top_k,
        trace.num_steps,
    )


def fit_to_forecasts(
    forecasts: Iterable[tuple[NDArray[np.float32], Trace]], horizon: int, k: int, num_steps: int, rows: int = 4000
) -> Calibration:
    """The same from forecasts [S, horizon, L, E] and their sequences; about `rows` steps of `num_steps` are looked at."""
    stride = max(1, num_steps // rows)
    scores: list[list[np.ndarray]] = [[] for _ in range(horizon)]
    truths: list[list[np.ndarray]] = [[] for _ in range(horizon)]
    for forecast, sequence in forecasts:
        chosen = chosen_experts(sequence)
        for h in range(horizon):
            part = slice(FIRST_ROW, max(FIRST_ROW, len(forecast) - h), stride)
            scores[h].append(forecast[part, h])
            truths[h].append(chosen[FIRST_ROW + h :: stride])
    temperatures, xs, ys = [], [], []
    for h in range(horizon):
        s, y = np.concatenate(scores[h]), np.concatenate(truths[h])
        if not len(s):
            raise UsageError(f"calibration needs a sequence of more than {h + 1} steps")
        few = max(1, len(s) // 500)
        temperature = _best_temperature(s[::few], y[::few], k)
        x, happened = _isotonic(logit_inclusion(s, k, temperature).ravel(), y.ravel())
        temperatures.append(temperature)
        xs.append(x)
        ys.append(happened)
    return Calibration(k, tuple(temperatures), tuple(xs), tuple(ys))


def save_calibration(folder: Path, modes: dict[str, Calibration]) -> None:
    """Writes `calibration.json` into a predictor's folder; `modes`: of "with_tokens" and "without_tokens"."""
    k = next(iter(modes.values())).k
    data = {"format": FORMAT, "version": VERSION, "k": k, **{name: c.to_dict() for name, c in modes.items()}}
    write_atomic(folder / FILE_NAME, json.dumps(data) + "\n")


def load_calibration(folder: Path, k: int) -> dict[str, Calibration]:
    """Calibrations by mode, none where the folder has no file. UsageError, naming file and field, for a wrong one."""
    path = folder / FILE_NAME
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (FORMAT, VERSION):
            raise UsageError(f"format and version are not '{FORMAT}' and {VERSION}")
        if data.get("k") != k:
            raise UsageError(f"k is {data.get('k')}, expected {k}")
        return {name: Calibration.from_dict(k, data[name]) for name in MODES if name in data}
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({error})") from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _best_temperature(scores: np.ndarray, truth: np.ndarray, k: int) -> float:
    """Golden-section search over log T for the least Brier score."""

    def loss(log_t: float) -> float:
        return float(((logit_inclusion(scores, k, float(np.exp(log_t))) - truth) ** 2).mean())

    low, high = -2.0, 2.0
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_a, at_b = loss(a), loss(b)
    for _ in range(10):
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - _GOLDEN * (high - low)
            at_a = loss(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + _GOLDEN * (high - low)
            at_b = loss(b)
    return float(np.exp((low + high) / 2))


def _isotonic(forecast: np.ndarray, happened: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Points (forecast, share that happened), not descending: bins of equal width in the logit's sense, pooled until
    they ascend (pool adjacent violators)."""
    edges = 1 / (1 + np.exp(-np.linspace(-7, 7, _POINTS - 1)))
    places = np.searchsorted(edges, forecast)
    count = np.bincount(places, minlength=_POINTS).astype(np.float64)
    x = np.bincount(places, weights=forecast, minlength=_POINTS)
    y = np.bincount(places, weights=happened, minlength=_POINTS)
    pooled: list[tuple[float, float, float]] = []  # (count, sum of forecasts, sum of happened)
    for block in zip(count, x, y, strict=True):
        if block[0] < 20:  # too few to say anything; the curve runs straight over them
            continue
        pooled.append(block)
        while len(pooled) > 1 and pooled[-2][2] / pooled[-2][0] >= pooled[-1][2] / pooled[-1][0]:
            last = pooled.pop()
            before = pooled.pop()
            pooled.append((before[0] + last[0], before[1] + last[1], before[2] + last[2]))
    points = [(float(a / n), float(b / n)) for n, a, b in pooled]
    points = [(0.0, 0.0), *points, (1.0, 1.0)]
    return tuple(min(p[0], 1.0) for p in points), tuple(min(p[1], 1.0) for p in points)
