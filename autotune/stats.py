"""The arithmetic of the verdict: pure functions on logarithms of time ratios."""

import itertools
import math
import statistics
from collections.abc import Sequence

import numpy as np

MIN_BAND = 0.02  # a difference of 2% is a tie, however steady the machine
# Two-sided 95% quantiles of Student's t for 1 to 30 degrees of freedom.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_DRAWS = 1 << 20  # numbers drawn at once by the bootstrap


def log_ratios(default_s: Sequence[float], tuned_s: Sequence[float]) -> list[float]:
    """log(default / tuned) of each pair of seconds per token: more than 0 where the tuned arm was faster."""
    return [math.log(default / tuned) for default, tuned in zip(default_s, tuned_s, strict=True)]


def bootstrap_interval(values: Sequence[float], seed: int, resamples: int = 10_000) -> tuple[float, float]:
    """95% percentile interval of the mean, by resampling whole pairs; the same seed gives the same interval."""
    array, n = np.asarray(values, dtype=np.float64), len(values)
    if n == 0:
        raise ValueError("an interval needs at least one value")
    draw = np.random.default_rng(seed)
    # in parts, so that many values take no more memory than few
    part = max(1, _DRAWS // n)
    sizes = [min(part, resamples - first) for first in range(0, resamples, part)]
    means = np.sort(np.concatenate([array[draw.integers(n, size=(size, n))].mean(axis=1) for size in sizes]))
    return float(means[int(0.025 * resamples)]), float(means[math.ceil(0.975 * resamples) - 1])


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of the mean by Student's t; without bounds for fewer than 2 values."""
    if len(values) < 2:
        return -math.inf, math.inf
    freedom = len(values) - 1
    quantile = _T95[freedom - 1] if freedom <= len(_T95) else 1.96
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """The wider of the two on each side: with few pairs the bootstrap alone promises too much (3 pairs cover about 75%)."""
    low, high = t_interval(values)
    boot_low, boot_high = bootstrap_interval(values, seed)
    return min(low, boot_low), max(high, boot_high)


def aa_band(default_s: Sequence[float], n_pairs: int) -> float:
    """What the mean of `n_pairs` pairs differs by when both arms are the default, as a log ratio; at least 2%.

    Taken from neighbouring runs of the default: root mean square of their log ratios over sqrt(n_pairs).
    """
    steps = [math.log(b / a) for a, b in itertools.pairwise(default_s)]
    if not steps:
        return math.log1p(MIN_BAND)
    noise = math.sqrt(sum(step * step for step in steps) / len(steps)) / math.sqrt(max(1, n_pairs))
    return max(math.log1p(MIN_BAND), noise)
