"""Forecasts of every step of a trace, and from when each is known. Loads without torch."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seqmoe.predictors.forecast import Forecast
from seqmoe.predictors.trace import Trace

Half = NDArray[np.float16]


@dataclass(frozen=True, eq=False)
class TraceForecasts:
    """Inclusion probabilities for every step of a trace (S steps, L layers, E experts), and from when each is known.

    `start[s]` may know the token of step s, which is sampled after the last layer of step s - 1: it is known from
    position s * L on. `after[s]` knows what step s - 1 routed and no more: it is known once the last layer of that step
    has routed, position s * L - 1. Row h of both is for step s + h.
    """

    start: Half  # [S, horizon, L, E]
    after: Half | None = None  # [S, horizon, L, E]

    def __post_init__(self) -> None:
        if self.start.ndim != 4 or (self.after is not None and self.after.shape != self.start.shape):
            raise ValueError("forecasts must have shape [steps, horizon, layers, experts], both the same")

    @property
    def horizon(self) -> int:
        """Steps ahead."""
        return int(self.start.shape[1])

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.start.shape[2])

    def at_start(self, step: int, position: int) -> Forecast:
        """The forecast of `step` with its token, asked for at `position`. ValueError before that token is known."""
        if position < step * self.num_layers:
            known = step * self.num_layers
            raise ValueError(f"the token of step {step} is known from position {known} on, asked for at {position}")
        return Forecast(position, self.start[step].astype(np.float32))

    def after_last(self, step: int, position: int) -> Forecast:
        """The forecast of `step` without its token. ValueError before the step before it has routed its last layer."""
        if self.after is None:
            raise ValueError("these forecasts are made at the start of a step only")
        if position < step * self.num_layers - 1:
            known = step * self.num_layers - 1
            raise ValueError(f"the forecast of step {step} is there from position {known} on, asked for at {position}")
        return Forecast(position, self.after[step].astype(np.float32))


def perfect_forecasts(trace: Trace, horizon: int) -> TraceForecasts:
    """The true next steps as forecasts, known as early as any forecast may be: an upper bound."""
    truth = np.zeros((trace.num_steps, trace.num_layers, trace.num_experts), dtype=np.float16)
    np.put_along_axis(truth, trace.expert_ids.astype(np.int64), np.float16(1), axis=-1)
    out = np.empty((trace.num_steps, horizon, trace.num_layers, trace.num_experts), dtype=np.float16)
    even = np.float16(trace.top_k / trace.num_experts)
    for first, count in zip(trace.seq_start.tolist(), trace.seq_len.tolist(), strict=True):
        for h in range(horizon):
            out[first : first + max(0, count - h), h] = truth[first + h : first + count]
            out[first + max(0, count - h) : first + count, h] = even
    return TraceForecasts(out, out)
