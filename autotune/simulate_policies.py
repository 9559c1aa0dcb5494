"""The simulator's policies by name: ours, its ablations, and the rivals of the papers."""

import difflib
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seqmoe.autotune.forecasts import Progress, TraceForecasts, perfect_forecasts, trace_forecasts
from seqmoe.autotune.simulate_plan import Inputs, Outcome, Plan, Timing, full_outcome
from seqmoe.predictors.calibration import FILE_NAME as CALIBRATION
from seqmoe.predictors.registry import NAMES
from seqmoe.predictors.trace import Trace
from seqmoe.profiles.errors import UsageError

GIVEN = "given"  # the predictor that the user names
PERFECT = "the future"
LAYERS = "specprefetch"  # from router inputs, within the step


@dataclass(frozen=True)
class Policy:
    """What a name stands for. `plan` None: everything is resident."""

    plan: Plan | None
    predictor: str | None  # GIVEN, PERFECT, LAYERS, or a predictor of its own
    help: str


_HORIZON = 8  # forecasts are made for so many steps and one, so that policies share them
_SEQMOE = Plan("expected", "joint", admission=True, k_prime=12, job_steps=2)
POLICIES: dict[str, Policy] = {
    "full": Policy(None, None, "every expert resident"),
    "eager": Policy(Plan("none"), None, "nothing is kept"),
    "lru": Policy(Plan("lru"), None, "least recently used goes first"),
    "lfu": Policy(Plan("lfu"), None, "least often used goes first"),
    "static": Policy(Plan("static"), None, "the most popular of the training sequences stay"),
    "prefill-hot": Policy(Plan("prefill-hot"), None, "what a sequence's first steps used most stays (KTransformers)"),
    "belady": Policy(Plan("belady"), None, "the optimum without prefetch"),
    "belady-8": Policy(Plan("belady-8"), None, "the same, seeing 8 steps ahead"),
    "belady-f8": Policy(Plan("hard"), GIVEN, "Belady's rule on the forecast's best k of 8 steps"),
    "moe-infinity": Policy(
        Plan("expected", "infinity", horizon=1, by_position=False, after=False), "infinity",
        "matched request, its order by confidence and distance",
    ),
    "promoe": Policy(Plan("lru", "promoe"), GIVEN, "forecast, earliest deadline first, LRU"),
    "patterns": Policy(Plan("lru", "first-come"), "patterns", "chances from token to token, first come, LRU"),
    "specprefetch": Policy(Plan("lru", "window", lead=0), LAYERS, "next layer's router, window budget, LRU"),
    "seqmoe": Policy(_SEQMOE, GIVEN, "joint scheduling, probabilistic Belady, admission"),
    "seqmoe-cache-only": Policy(replace(_SEQMOE, order=None, admission=False), GIVEN, "seqmoe without prefetch"),
    "seqmoe-infinity-order": Policy(replace(_SEQMOE, order="infinity"), GIVEN, "seqmoe, MoE-Infinity's order"),
    "seqmoe-promoe-order": Policy(replace(_SEQMOE, order="promoe"), GIVEN, "seqmoe, ProMoE's order"),
    "seqmoe-first-come": Policy(replace(_SEQMOE, order="first-come"), GIVEN, "seqmoe, first come first sent"),
    "seqmoe-no-recursion": Policy(replace(_SEQMOE, horizon=1, job_steps=1), GIVEN, "seqmoe, one step of forecast"),
    "seqmoe-no-admission": Policy(replace(_SEQMOE, admission=False), GIVEN, "seqmoe, every fetch admitted"),
    "seqmoe-early-binding": Policy(replace(_SEQMOE, early_binding=True), GIVEN, "seqmoe, slots bound with the jobs"),
    "foresight": Policy(_SEQMOE, PERFECT, "seqmoe fed with the true next steps"),
}  # fmt: skip


def find_policy(name: str) -> Policy:
    """UsageError for an unknown name."""
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(POLICIES)}"
        raise UsageError(f"unknown policy '{name}': {hint}")
    return POLICIES[name]


@dataclass(frozen=True)
class Changes:
    """What the user sets differently; None: as the policy has it."""

    k_prime: int | None = None
    job_steps: int | None = None
    horizon: int | None = None
    discount: float | None = None
    ema_alpha: float | None = None
    m_max: int | None = None
    lead: int | None = None
    least: float | None = None
    eviction: str | None = None
    early_binding: bool | None = None

    def apply(self, plan: Plan) -> Plan:
        """The plan with these, as far as they concern it."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        if plan.eviction != "expected":
            given.pop("eviction", None)
        return replace(plan, **given) if plan.order or plan.uses_forecast else plan


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
        plan = changes.apply(policy.plan)
        if policy.predictor == LAYERS:
            # of all experts the likeliest, as many as the window can move
            plan = replace(plan, k_prime=self.trace.num_experts, m_max=changes.m_max or max(1, round(1 / ratio)))
        elif policy.plan.order and changes.k_prime is None and policy.plan.k_prime < self.trace.top_k + 3:
            plan = replace(plan, k_prime=self.trace.top_k + 3)
        return replace(plan, k_prime=min(plan.k_prime, self.trace.num_experts))

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
        forecasts, layer_scores = None, None
        if predictor == LAYERS:
            layer_scores = self._by_layer()
        elif predictor is not None:
            forecasts = self._forecast(predictor, max(plan.horizon, _HORIZON) + 1)
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
