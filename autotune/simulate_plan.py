"""What a simulation is given and what it gives: timing, plan, inputs, outcome."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqmoe.predictors.trace import Trace
from seqmoe.predictors.trace_forecasts import TraceForecasts
from seqmoe.runtime.policy import BY_FORECAST, EVICTIONS, Plan


@dataclass(frozen=True)
class Timing:
    """How long things take, in any one unit."""

    layer: tuple[float, ...]  # compute of each layer
    transfer: float  # one record over the link: bytes / bandwidth + latency
    forecast: float = 0.0  # the predictor, each time it is asked
    record_bytes: int = 1
    expert: float = 0.0  # compute of one expert, a part of its layer's: goes on while others of the layer are loaded

    @classmethod
    def of_ratio(
        cls, ratio: float, num_layers: int, record_bytes: int = 1, forecast: float = 0.0, expert: float = 0.0
    ) -> "Timing":
        """`ratio`: time of one transfer / compute time of one layer, which is the unit."""
        return cls((1.0,) * num_layers, ratio, forecast, record_bytes, expert)

    @property
    def transfers_per_layer(self) -> float:
        """What the link can move while an average layer computes: the first budget."""
        return sum(self.layer) / len(self.layer) / self.transfer


@dataclass(frozen=True, eq=False)
class Outcome:
    """Counts by sequence [n], and times in the timing's unit."""

    steps: NDArray[np.int64]
    hits: NDArray[np.int64]
    misses: NDArray[np.int64]
    late: NDArray[np.int64]  # prefetches that were needed while on their way; misses too
    prefetched: NDArray[np.int64]
    useful: NDArray[np.int64]  # prefetches that had arrived when they were needed
    wasted: NDArray[np.int64]  # prefetches that were evicted without ever having been needed
    named: NDArray[np.int64]  # needed experts that the forecast of their step named
    ready: NDArray[np.int64]  # of those, what was resident when it was needed
    ahead: NDArray[np.int64]  # steps with prefetch on
    time: NDArray[np.float64]
    full_time: NDArray[np.float64]
    budget: float = 0.0  # budget_avg in the end
    levels: tuple[tuple[int, int], ...] = ()  # (first step, restraint's Level from then on), where it changed
    log: tuple[tuple[int, int, int, int], ...] = ()  # (position, expert, victim, 1 for a prefetch)

    @property
    def hit_rate(self) -> float:
        """Over all sequences together."""
        return float(self.hits.sum() / max(1, self.hits.sum() + self.misses.sum()))

    @property
    def named_rate(self) -> float:
        """Share of the needed experts that the forecast had named: its recall."""
        return float(self.named.sum() / max(1, self.hits.sum() + self.misses.sum()))

    @property
    def ready_recall(self) -> float:
        """Of the needed experts that the forecast had named, the share that was resident or arrived in time."""
        return float(self.ready.sum() / max(1, self.named.sum()))

    @property
    def speed_of_full(self) -> float:
        """Decode speed as a share of that with all experts resident."""
        return float(self.full_time.sum() / self.time.sum())

    def to_dict(self, record_bytes: int) -> dict[str, Any]:
        """For JSON."""
        steps = int(self.steps.sum())
        on_demand = int(self.misses.sum() - self.late.sum())
        return {
            "hit_rate": self.hit_rate,
            "speed_of_full": self.speed_of_full,
            "transfers_per_step": (int(self.prefetched.sum()) + on_demand) / steps,
            "useful_bytes": int(self.useful.sum()) * record_bytes,
            "wasted_bytes": int(self.wasted.sum()) * record_bytes,
            "late_bytes": int(self.late.sum()) * record_bytes,
            "on_demand_bytes": on_demand * record_bytes,
            "named_rate": self.named_rate,
            "ready_recall": self.ready_recall,
            "prefetch_on": int(self.ahead.sum()) / steps,
            "levels": [list(change) for change in self.levels],
            "steps": steps,
        }


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a replay is fed with, beside the plan."""

    trace: Trace
    forecasts: TraceForecasts | None = None
    popularity: NDArray[np.integer] | None = None  # [L * E] counts of other traces; for static and prefill-hot
    layer_scores: NDArray[np.float32] | None = None  # [S, L, E]: layer l as seen from l - 1, for order "window"

    def check(self, plan: Plan) -> None:
        """ValueError where the plan needs what is not there."""
        if plan.eviction not in EVICTIONS:
            raise ValueError(f"unknown eviction {plan.eviction!r}, known are {', '.join(EVICTIONS)}")
        if plan.uses_forecast and self.forecasts is None:
            raise ValueError("this plan needs forecasts")
        if plan.order == "window" and self.layer_scores is None:
            raise ValueError("order 'window' needs layer_scores")
        if plan.eviction in ("static", "prefill-hot") and self.popularity is None:
            raise ValueError(f"eviction {plan.eviction!r} needs the experts' popularity")
        if plan.admission and plan.eviction not in BY_FORECAST:
            raise ValueError("admission needs an eviction by forecast")
        if plan.restraint and (plan.eviction not in BY_FORECAST or plan.order is None):
            raise ValueError("restraint needs prefetch and an eviction by forecast")


def full_outcome(trace: Trace, timing: Timing) -> Outcome:
    """Everything resident."""
    steps = trace.seq_len.astype(np.int64)
    zero = np.zeros_like(steps)
    time = (steps * sum(timing.layer)).astype(np.float64)
    return Outcome(steps, steps * trace.num_layers * trace.top_k, *(zero,) * 8, time, time)


def gather(
    rows: list[tuple[float, ...]],
    budget: float,
    log: list[tuple[int, int, int, int]],
    levels: list[tuple[int, int]],
) -> Outcome:
    """An outcome from each sequence's fields, in their order."""
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    counts, times = [c.astype(np.int64) for c in columns[:-2]], [c.astype(np.float64) for c in columns[-2:]]
    return Outcome(*counts, *times, budget, tuple(levels), tuple(log))  # type: ignore[call-arg, arg-type]  # ten and two
