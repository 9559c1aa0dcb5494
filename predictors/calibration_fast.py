"""Calibration and softmax compiled, for each decode step's forecast. Loads without torch.

The shift that makes a row sum to k is found as in `kernels.shift_rows`, by the same steps, with
sigmoid(logit + shift) = 1 / (1 + exp(-logit) * exp(-shift)): one exponential a step in place of one for each expert.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from seqmoe.predictors.calibration import _EDGE, Calibration
from seqmoe.predictors.forecast import _FLOOR
from seqmoe.predictors.kernels import shift_rows
from seqmoe.profiles.errors import UsageError

_WIDEST = 600.0  # between a row's logits; with exp(710) a float64 overflows


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "nsz"})
def _shift(odds: NDArray[np.float64], most: float, least: float, k: int, out: NDArray[np.float32]) -> None:
    """kernels.shift_rows for one row of logits, given as odds[e] = exp(most - logit[e]), most and least among them."""
    experts = len(odds)
    start = np.log(k / (experts - k))
    low = start - most
    high = start - least
    shift = low if k == 1 else 0.5 * (low + high)
    factor = 0.0
    for _ in range(60):
        factor = np.exp(-(shift + most))
        total = 0.0
        slope = 0.0
        for e in range(experts):
            p = 1.0 / (1.0 + odds[e] * factor)
            total += p
            slope += p * (1.0 - p)
        excess = total - k
        if abs(excess) < 1e-5 * k:
            break
        if excess > 0:
            high = shift
        else:
            low = shift
        step = shift - excess / max(slope, 1e-12)
        shift = step if low < step < high else 0.5 * (low + high)
    for e in range(experts):
        out[e] = 1.0 / (1.0 + odds[e] * factor)


@njit(cache=True, nogil=True, error_model="numpy")
def _follow(
    row: NDArray[np.float32], curve: NDArray[np.float64], last: int, at: NDArray[np.int64], out: NDArray[np.float64]
) -> None:
    """The curve's values, as np.interp has them, from _EDGE to 1 - _EDGE; `curve` [3, P]: x, y, slopes up to `last`.

    The places of all experts are halved in together, without branches, half of which would be guessed wrong."""
    x, y, slope = curve[0], curve[1], curve[2]
    experts = len(row)
    for e in range(experts):
        at[e] = 0
    left = last + 1
    while left > 1:
        half = left >> 1
        for e in range(experts):
            at[e] += half * (x[at[e] + half] <= row[e])
        left -= half
    for e in range(experts):
        p = max(np.float64(row[e]), x[0])
        a = at[e]  # x[a] <= p < x[a + 1]; the last has no slope
        out[e] = min(max(slope[a] * (p - x[a]) + y[a], _EDGE), 1.0 - _EDGE)


@njit(cache=True, nogil=True, error_model="numpy")
def _calibrate(
    scores: NDArray[np.float32],
    k: int,
    temperature: NDArray[np.float64],
    points: NDArray[np.int64],
    curve: NDArray[np.float64],
    out: NDArray[np.float32],
) -> None:
    """Calibration.apply on scores [N, horizon, L, E]; `curve` [steps, 3, P]: see `_follow`."""
    count, horizon, layers, experts = scores.shape
    logits = np.empty(experts)
    odds = np.empty(experts)
    places = np.empty(experts, dtype=np.int64)
    for n in range(count):
        for h in range(horizon):
            at = min(h, len(temperature) - 1)
            last = points[at] - 1
            for layer in range(layers):
                row = scores[n, h, layer]
                result = out[n, h, layer]
                most = -np.inf
                least = np.inf
                is_finite = True
                for e in range(experts):
                    is_finite = is_finite and np.isfinite(row[e])
                    logits[e] = np.log(max(np.float64(row[e]), 1e-9)) / temperature[at]
                    most = max(most, logits[e])
                    least = min(least, logits[e])
                if not is_finite:
                    result[:] = np.nan
                    continue
                if k == experts:
                    result[:] = 1.0
                    continue
                if most - least > _WIDEST:
                    shift_rows(logits.reshape(1, experts), k, result.reshape(1, experts))
                else:
                    for e in range(experts):
                        odds[e] = np.exp(most - logits[e])
                    _shift(odds, most, least, k, result)
                if last < 1:
                    continue
                _follow(result, curve[at], last, places, logits)
                top = _EDGE
                bottom = 1.0 - _EDGE
                for e in range(experts):
                    top = max(top, logits[e])
                    bottom = min(bottom, logits[e])
                best = top / (1.0 - top)
                for e in range(experts):
                    odds[e] = best * (1.0 - logits[e]) / logits[e]
                _shift(odds, np.log(best), np.log(bottom / (1.0 - bottom)), k, result)


@njit(cache=True, nogil=True, error_model="numpy")
def _fill_water(scores: NDArray[np.float32], k: int, out: NDArray[np.float32]) -> None:
    """forecast.to_inclusion on rows [R, E]."""
    rows, experts = scores.shape
    ordered = np.empty(k)
    rest = np.empty(k)
    for r in range(rows):
        found = 0
        small = 0.0  # sum of all but the k largest
        is_finite = True
        for e in range(experts):
            is_finite = is_finite and np.isfinite(scores[r, e])
            value = max(np.float64(scores[r, e]), 0.0) + _FLOOR
            if found == k:
                if value <= ordered[k - 1]:
                    small += value
                    continue
                small += ordered[k - 1]
                found -= 1
            at = found
            while at > 0 and value > ordered[at - 1]:
                ordered[at] = ordered[at - 1]
                at -= 1
            ordered[at] = value
            found += 1
        if not is_finite:
            out[r, :] = np.nan
            continue
        for j in range(k - 1, -1, -1):
            small += ordered[j]
            rest[j] = small
        factor = 0.0
        for j in range(k):
            factor = (k - j) / rest[j]
            if factor * ordered[j] <= 1:
                break
        for e in range(experts):
            out[r, e] = min((max(np.float64(scores[r, e]), 0.0) + _FLOOR) * factor, 1.0)


@njit(cache=True, nogil=True, error_model="numpy")
def _softmax(logits: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    rows, experts = logits.shape
    for r in range(rows):
        most = logits[r, 0]
        for e in range(1, experts):
            most = max(most, logits[r, e])
        total = np.float32(0.0)
        for e in range(experts):
            out[r, e] = np.exp(logits[r, e] - most)
            total += out[r, e]
        for e in range(experts):
            out[r, e] /= total


class FastCalibration:
    """`Calibration.apply` within 1e-6, or `to_inclusion` where there is no calibration.

    A row with a score that is not finite comes out as NaN, whole.
    """

    def __init__(self, calibration: Calibration | None, k: int) -> None:
        """UsageError for a calibration of another k."""
        if calibration is not None and calibration.k != k:
            raise UsageError(f"the calibration is for k={calibration.k}, the model has k={k}")
        self.k = k
        self._temperature: NDArray[np.float64] | None = None
        if calibration is None:
            return
        self._temperature = np.array(calibration.temperature, dtype=np.float64)
        self._points = np.array([len(x) for x in calibration.forecast], dtype=np.int64)
        self._curve = np.zeros((len(self._points), 3, max(1, int(self._points.max()))))
        for step, pair in enumerate(zip(calibration.forecast, calibration.happened, strict=True)):
            widths, heights = np.diff(pair)  # where a width is 0 the slope is never used
            self._curve[step, :2, : len(pair[0])] = pair
            self._curve[step, 2, : len(widths)] = heights / np.where(widths > 0, widths, 1.0)

    def apply(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scores [..., horizon, L, E] -> probabilities of the same shape, summing to k."""
        shape = scores.shape
        if not 1 <= self.k <= shape[-1]:
            raise ValueError(f"k must be 1 to {shape[-1]} experts, got {self.k}")
        scores = np.ascontiguousarray(scores, dtype=np.float32)
        out = np.empty(shape, dtype=np.float32)
        if self._temperature is None:
            _fill_water(scores.reshape(-1, shape[-1]), self.k, out.reshape(-1, shape[-1]))
        else:
            flat = (-1, *shape[-3:])
            _calibrate(scores.reshape(flat), self.k, self._temperature, self._points, self._curve, out.reshape(flat))
        return out


def fast_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """`psi.softmax` within 1e-6: logits [..., E] -> scores that sum to 1."""
    rows = np.ascontiguousarray(logits, dtype=np.float32).reshape(-1, logits.shape[-1])
    out = np.empty(logits.shape, dtype=np.float32)
    _softmax(rows, out.reshape(rows.shape))
    return out
