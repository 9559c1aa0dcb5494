"""How good forecasts are: recall at m, Brier score, calibration error, and what is known how many layers ahead.

Loads without torch. Row t of a forecast made over a trace [S, horizon, L, E] is held against steps t to t + horizon - 1;
row 0, for which nothing had been observed, does not count.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from seqmoe.predictors.trace import Trace

FIRST_ROW = 1
_BINS = 20  # of width 0.05


class RankCounts:
    """Where the chosen experts stand among the scores; recall at every m follows from it."""

    def __init__(self, horizon: int, num_layers: int, num_experts: int) -> None:
        self.counts = np.zeros((horizon, num_layers, num_experts), dtype=np.int64)  # [h, l, rank]

    def add(self, scores: NDArray[np.float32], sequence: Trace) -> None:
        """Counts forecasts [S, horizon, L, E] of one sequence."""
        from seqmoe.predictors.kernels import count_ranks  # numba takes a while to import

        for h in range(len(self.counts)):
            rows = np.ascontiguousarray(scores[FIRST_ROW : max(FIRST_ROW, len(scores) - h), h], dtype=np.float32)
            count_ranks(rows, np.ascontiguousarray(sequence.expert_ids[FIRST_ROW + h :]), self.counts[h])

    def recall(self, m: int) -> NDArray[np.float64]:
        """Share of the chosen experts that are among the m with the highest scores: [horizon, L]; 0 where none."""
        found = self.counts[:, :, :m].sum(axis=2)
        return found / np.maximum(self.counts.sum(axis=2), 1)


class Reliability:
    """Brier score and calibration of inclusion probabilities, per step ahead."""

    def __init__(self, horizon: int) -> None:
        self._squares = np.zeros(horizon)
        self._cells = np.zeros(horizon)
        self._count = np.zeros((horizon, _BINS))  # by forecast probability
        self._forecast = np.zeros((horizon, _BINS))
        self._happened = np.zeros((horizon, _BINS))
        self.worst_sum = 0.0  # largest |sum - k| / k of a layer's probabilities

    def add(self, inclusion: NDArray[np.float32], sequence: Trace) -> None:
        """Counts probabilities [S, horizon, L, E] of one sequence."""
        chosen = chosen_experts(sequence)
        for h in range(len(self._squares)):
            part = inclusion[FIRST_ROW : max(FIRST_ROW, len(inclusion) - h), h].astype(np.float64)
            truth = chosen[FIRST_ROW + h :]
            if not len(part):
                continue
            self._squares[h] += ((part - truth) ** 2).sum()
            self._cells[h] += part.size
            places = np.minimum((part * _BINS).astype(np.int64), _BINS - 1).ravel()
            self._count[h] += np.bincount(places, minlength=_BINS)
            self._forecast[h] += np.bincount(places, weights=part.ravel(), minlength=_BINS)
            self._happened[h] += np.bincount(places, weights=truth.ravel(), minlength=_BINS)
            off = np.abs(part.sum(axis=2) - sequence.top_k).max() / sequence.top_k
            self.worst_sum = max(self.worst_sum, float(off))

    def brier(self) -> NDArray[np.float64]:
        """Mean squared error per expert: [horizon]. Knowing only k of E it would be k/E * (1 - k/E)."""
        return self._squares / np.maximum(self._cells, 1)

    def error_above(self, threshold: float = 0.1) -> NDArray[np.float64]:
        """Expected calibration error among forecasts above `threshold` (a multiple of 0.05): [horizon]."""
        first = round(threshold * _BINS)
        gaps = np.abs(self._forecast[:, first:] - self._happened[:, first:]).sum(axis=1)
        return gaps / np.maximum(self._count[:, first:].sum(axis=1), 1)

    def diagram(self, step: int = 0) -> list[tuple[float, float, int]]:
        """(mean forecast, share that happened, how many) for each bin that is not empty."""
        rows = zip(self._forecast[step], self._happened[step], self._count[step], strict=True)
        return [(float(f / n), float(y / n), int(n)) for f, y, n in rows if n]


def chosen_experts(trace: Trace) -> NDArray[np.float32]:
    """1 where an expert was chosen: [S, L, E]."""
    chosen = np.zeros((trace.num_steps, trace.num_layers, trace.num_experts), dtype=np.float32)
    np.put_along_axis(chosen, trace.expert_ids.astype(np.int64), 1, axis=2)
    return chosen


def brier_skill(brier: NDArray[np.float64], reference: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 - brier / reference: 0 is as good as the reference, 1 perfect, below 0 worse."""
    return 1 - brier / np.maximum(reference, 1e-12)


def leads(horizon: int, num_layers: int, trigger_layers: Sequence[int] = (), with_tokens: bool = False) -> NDArray:
    """How many layers before its use a forecast is made: [horizon, L].

    The group of layers that ends before trigger l' is forecast when layer l' - 1 of the step before has routed: for
    layer p of the coming step that is L - (l' - 1 - p) layers ahead (design section 4). A forecast with the token is
    made as the step begins, p layers ahead. Every further step ahead adds L.
    """
    layers = np.arange(num_layers)
    triggers = np.sort(np.array(trigger_layers or (num_layers,)))
    end = triggers[np.searchsorted(triggers, layers, side="right")]
    first = layers if with_tokens else num_layers - (end - 1 - layers)
    return first + num_layers * np.arange(horizon)[:, None]


def lead_curve(recall: NDArray[np.float64], ahead: NDArray) -> list[tuple[int, float]]:
    """(layers ahead, share of the needed experts that is known at least so early), from recall [horizon, L] and `leads`.

    For each layer the latest forecast that is made early enough; the curve ends where some layer has none.
    """
    curve = []
    for lead in range(int(ahead.max(axis=0).min()) + 1):
        early = ahead >= lead
        latest = early.argmax(axis=0)  # leads grow with the steps ahead: the first that is early enough
        curve.append((lead, float(recall[latest, np.arange(recall.shape[1])].mean())))
    return curve
