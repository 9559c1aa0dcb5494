"""What travels from a predictor to the scheduler: scores per coming step, layer and expert. Loads without torch.

A predictor's own scores rank the experts of a layer and sum to 1 (a softmax). The scheduler needs the probability that
an expert is among the k chosen, which sums to k: `to_inclusion` and `logit_inclusion` make one of the other, and
`calibration.py` fits how.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

_SLACK = 0.02  # of k: how far a layer's probabilities may be from summing to k
_FLOOR = 1e-12  # beside scores that sum to 1: shares a rest evenly among the experts that have no score


@dataclass(frozen=True, eq=False)
class Forecast:
    """Probabilities that an expert is among the chosen ones, made at one position (L layers, E experts a layer).

    `scores[h, l, e]` is for layer l of step s + h, where s is the step that is about to run: `position` = s * L when
    the forecast is made between steps. Every row `scores[h, l]` lies in [0, 1] and sums to k (within 2%).
    """

    position: int  # step * L + layer: the forecast knows what was routed before it, nothing later
    scores: NDArray[np.float32]  # [horizon, L, E]

    def __post_init__(self) -> None:
        scores = np.asarray(self.scores, dtype=np.float32)
        if scores.ndim != 3 or 0 in scores.shape:
            raise ValueError(f"scores must have shape [horizon, layers, experts], got {list(scores.shape)}")
        if not np.isfinite(scores).all() or scores.min() < 0 or scores.max() > 1 + 1e-4:
            raise ValueError("scores must be probabilities from 0 to 1 and finite")
        view = scores.view()
        view.flags.writeable = False
        object.__setattr__(self, "scores", view)

    @property
    def horizon(self) -> int:
        """Steps ahead: row 0 is the step that is about to run."""
        return int(self.scores.shape[0])

    def check_sums(self, k: int) -> None:
        """ValueError unless every layer's probabilities sum to k within 2%."""
        sums = self.scores.sum(axis=2)
        worst = np.unravel_index(int(np.abs(sums - k).argmax()), sums.shape)
        if abs(float(sums[worst]) - k) > _SLACK * k:
            raise ValueError(f"scores[{worst[0]}, {worst[1]}] sum to {sums[worst]:.3f}, must be k={k} within 2%")


def to_inclusion(p: ArrayLike, k: int) -> NDArray[np.float32]:
    """Scores [..., E] that sum to 1 -> probabilities [..., E] in [0, 1] that sum to k, by water-filling: min(1, c * p).

    c is the same for a whole row. Keeps the order; experts without a score share what the others cannot take.
    """
    scores = np.asarray(p, dtype=np.float64)
    experts = scores.shape[-1]
    if not 1 <= k <= experts:
        raise ValueError(f"k must be 1 to {experts} experts, got {k}")
    scores = np.maximum(scores, 0) + _FLOOR
    ordered = -np.sort(-scores, axis=-1)
    rest = np.cumsum(ordered[..., ::-1], axis=-1)[..., ::-1]  # rest[j]: sum of all but the j largest
    places = np.arange(k)
    factors = (k - places) / rest[..., :k]  # with the j largest cut off at 1, the others are scaled by this
    fits = factors * ordered[..., :k] <= 1  # the largest of the others is not above 1
    first = np.where(fits.any(axis=-1), fits.argmax(axis=-1), k - 1)
    factor = np.take_along_axis(factors, first[..., None], axis=-1)
    return np.minimum(scores * factor, 1).astype(np.float32)


def logit_inclusion(p: ArrayLike, k: int, temperature: float = 1.0) -> NDArray[np.float32]:
    """Scores [..., E] that sum to 1 -> probabilities sigmoid(log(p) / temperature + b) that sum to k, b per row.

    Unlike water-filling it never says 0 or 1, and one temperature tells how sure the scores are.
    """
    logits = np.log(np.maximum(np.asarray(p, dtype=np.float64), 1e-9)) / temperature
    return shift_to_sum(logits, k)


def shift_to_sum(logits: NDArray[np.float64], k: int) -> NDArray[np.float32]:
    """sigmoid(logits + b) with one b per row [..., E], so that every row sums to k (E itself: all ones)."""
    experts = logits.shape[-1]
    if not 1 <= k <= experts:
        raise ValueError(f"k must be 1 to {experts} experts, got {k}")
    if k == experts:
        return np.ones(logits.shape, dtype=np.float32)
    from seqmoe.predictors.kernels import shift_rows  # numba takes a while to import

    flat = np.ascontiguousarray(logits, dtype=np.float64).reshape(-1, experts)
    out = np.empty(flat.shape, dtype=np.float32)
    shift_rows(flat, k, out)
    return out.reshape(logits.shape)
