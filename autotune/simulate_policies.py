"""Policies in the simulator, and the forecasts that they need."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seqmoe.autotune.forecasts import Progress, trace_forecasts
from seqmoe.autotune.simulate_plan import Inputs, Outcome, Timing, full_outcome
from seqmoe.predictors.calibration import FILE_NAME as CALIBRATION
from seqmoe.predictors.registry import NAMES
from seqmoe.predictors.trace import Trace
from seqmoe.predictors.trace_forecasts import TraceForecasts, perfect_forecasts
from seqmoe.profiles.errors import UsageError
from seqmoe.runtime.policy import GIVEN, HORIZON, LAYERS, PERFECT, PREVIOUS, Changes, Plan, find_policy, plan_for


@dataclass(eq=False)
class Workbench:
    """A trace to simulate on, what rivals are fitted and calibrated on, and the forecasts made so far."""

    trace: Trace
    training: Trace | None = None
    validation: Trace | None = None
    predictor: str | None = None
    cache: Path | None = None
    progress: Progress | None = None
    _forecasts: dict[tuple[str, int], TraceForecasts] = field(default_factory=dict)
    _layer_scores: NDArray[np.float32] | None = None

    def plan(self, name: str, changes: Changes, ratio: float) -> Plan | None:
        """The policy's plan for a link of this ratio."""
        policy = find_policy(name)
        if policy.plan is None:
            return None
        plan = plan_for(policy, self.trace.top_k, self.trace.num_experts, changes)
        if policy.predictor == LAYERS:  # as many as the window can move
            plan = replace(plan, m_max=changes.m_max or max(1, round(1 / ratio)))
        elif policy.predictor == PREVIOUS:  # what was used, no more
            plan = replace(plan, k_prime=self.trace.top_k)
        return plan

    def predictor_of(self, name: str) -> str | None:
        """Whose forecasts a policy uses. UsageError where one must be named."""
        own = find_policy(name).predictor
        if own == GIVEN and self.predictor is None:
            raise UsageError(f"policy {name} needs --predictor: a folder of `seqmoe train`, or of {', '.join(NAMES)}")
        return self.predictor if own == GIVEN else own

    def run(self, name: str, plan: Plan | None, timing: Timing, slots: int) -> Outcome:
        """Simulates one policy."""
        from seqmoe.autotune.simulate_fast import simulate_fast

        if plan is None:
            return full_outcome(self.trace, timing)
        predictor = self.predictor_of(name)
        if predictor == PREVIOUS:
            timing = replace(timing, forecast=0.0)  # there is nothing to compute
        forecasts, layer_scores = None, None
        if predictor == LAYERS:
            layer_scores = self._by_layer()
        elif predictor is not None:
            forecasts = self._forecast(predictor, max(plan.horizon, HORIZON) + 1)
        popularity = None
        if plan.eviction in ("static", "prefill-hot"):
            if self.training is None:
                raise UsageError(f"policy {name} needs --fit-sequences: popularity is of other sequences")
            popularity = self.training.popularity()
        return simulate_fast(Inputs(self.trace, forecasts, popularity, layer_scores), plan, timing, slots)

    def _forecast(self, predictor: str, horizon: int) -> TraceForecasts:
        if (predictor, horizon) not in self._forecasts:
            if predictor == PERFECT:
                made = perfect_forecasts(self.trace, horizon)
            else:
                own = predictor not in NAMES and (Path(predictor) / CALIBRATION).exists()
                made = trace_forecasts(
                    predictor, self.trace, horizon, training=self.training if predictor in NAMES else None,
                    validation=None if own else self.validation, folder=self.cache, progress=self.progress,
                )  # fmt: skip
            self._forecasts[predictor, horizon] = made
        return self._forecasts[predictor, horizon]

    def _by_layer(self) -> NDArray[np.float32]:
        if self._layer_scores is None:
            if self.trace.router_inputs is None or self.training is None or self.training.router_inputs is None:
                raise UsageError(
                    "policy specprefetch needs router_inputs in the trace and --fit-sequences: collect a trace with them"
                )
            from seqmoe.predictors.routers import SpecPrefetch

            adapters = SpecPrefetch.fit(self.training)
            trace = self.trace
            out = np.zeros((trace.num_steps, trace.num_layers, trace.num_experts), dtype=np.float32)
            for layer in range(trace.num_layers - 1):
                inputs = trace.router_input(layer)
                for row in range(trace.num_steps):
                    out[row, layer + 1] = adapters.refine(layer, inputs[row : row + 1])[0]
            self._layer_scores = out
        return self._layer_scores
