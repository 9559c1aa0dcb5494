"""What a policy does, and the policies by name: ours, its ablations, the rivals of the papers. One table for the runtime
and the simulator. Loads without torch."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from seqmoe.profiles.errors import UsageError
from seqmoe.runtime.schedule import NO_LIMIT, ORDERS

EVICTIONS = (
    "none", "lru", "lfu", "static", "prefill-hot", "belady", "belady-8", "expected", "first-use", "hard",
)  # fmt: skip
BY_FORECAST = ("expected", "first-use", "hard")


@dataclass(frozen=True)
class Plan:
    """What a policy does: how it evicts, and whether, what and in which order it fetches ahead."""

    eviction: str = "lru"  # of EVICTIONS; "none" keeps nothing
    order: str | None = None  # of schedule.ORDERS; None: no prefetch
    admission: bool = False  # needs an eviction by forecast
    k_prime: int = 7
    job_steps: int = 1  # steps for which jobs are made: the one that begins, the one after it, ...
    horizon: int = 8  # c
    discount: float = 0.5  # lambda
    by_position: bool = True
    ema_alpha: float = 0.1
    lead: int = 1
    m_max: int = NO_LIMIT
    least: float = 0.0  # confidence that a job needs to exceed
    printed_form: bool = False
    early_binding: bool = False  # the slot is bound when the job is made (paper); else when the transfer starts
    after: bool = True  # also a forecast without token after a step's last layer
    restraint: bool = False  # forecasts and prefetch stop where they cost more than they bring

    @property
    def uses_forecast(self) -> bool:
        """Whether whole-step forecasts are needed."""
        return self.eviction in BY_FORECAST or (self.order is not None and self.order != "window")


@dataclass(frozen=True)
class Changes:
    """What the user sets differently in the plans, for tuning and ablations; None: as the policy has it."""

    k_prime: int | None = None
    job_steps: int | None = None
    horizon: int | None = None
    discount: float | None = None
    ema_alpha: float | None = None
    m_max: int | None = None
    lead: int | None = None
    least: float | None = None
    eviction: str | None = None  # of BY_FORECAST
    early_binding: bool | None = None
    after: bool | None = None
    restraint: bool | None = None
    admission: bool | None = None
    by_position: bool | None = None
    printed_form: bool | None = None
    order: str | None = None

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Self:
        """Of a JSON object. UsageError for a name, a type or a value that cannot be."""
        for name, value in given.items():
            if name not in cls.__dataclass_fields__:
                near = difflib.get_close_matches(name, cls.__dataclass_fields__, n=1)
                hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(cls.__dataclass_fields__)}"
                raise UsageError(f"policy: unknown field '{name}': {hint}")
            if value is not None:
                _check_change(name, value)
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """What is set differently, and nothing else."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def apply(self, plan: Plan) -> Plan:
        """The plan with these, as far as they concern it."""
        given = self.to_dict()
        if plan.eviction != "expected":
            given.pop("eviction", None)
        if plan.eviction not in BY_FORECAST:
            given = {name: value for name, value in given.items() if name not in ("admission", "restraint")}
        if plan.m_max == 0:  # the control that fetches nothing
            given.pop("m_max", None)
        return replace(plan, **given) if plan.order or plan.uses_forecast else plan


_BOUNDS: dict[str, tuple[float, float]] = {
    "k_prime": (1, NO_LIMIT), "job_steps": (1, 64), "horizon": (1, 63), "discount": (1e-6, 1), "ema_alpha": (1e-6, 1),
    "m_max": (0, NO_LIMIT), "lead": (0, NO_LIMIT), "least": (0, 1),
}  # fmt: skip
_WORDS = {"eviction": BY_FORECAST, "order": ORDERS}


def _check_change(name: str, value: object) -> None:
    shown = json.dumps(value, default=str)[:60]
    if name in _WORDS:
        if value not in _WORDS[name]:
            raise UsageError(f"policy: {name} must be one of {', '.join(_WORDS[name])}, got {shown}")
    elif name in _BOUNDS:
        low, high = _BOUNDS[name]
        kinds = (int, float) if name in ("discount", "ema_alpha", "least") else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            what = "a number" if float in kinds else "a whole number"
            raise UsageError(f"policy: {name} must be {what} from {low:g} to {high:g}, got {shown}")
    elif not isinstance(value, bool):
        raise UsageError(f"policy: {name} must be true or false, got {shown}")


GIVEN = "given"  # the predictor that the user names
PERFECT = "the future"
PREVIOUS = "last"  # the step before, by name in predictors/registry.py
LAYERS = "specprefetch"  # from router inputs, within the step


@dataclass(frozen=True)
class Policy:
    """What a name stands for. `plan` None: everything is resident."""

    plan: Plan | None
    predictor: str | None  # GIVEN, PERFECT, LAYERS, or a predictor of its own
    help: str

    @property
    def wants_fit(self) -> bool:
        """Whether it makes use of a trace to be fitted to: for its predictor, or for the experts' popularity."""
        plan = self.plan
        return plan is not None and (
            plan.order is not None or plan.uses_forecast or plan.eviction in ("static", "prefill-hot")
        )


HORIZON = 8  # forecasts are made for so many steps and one, so that policies share them
# c = 2 and no second forecast: more of either costs the predictor's time and brings next to nothing (docs/results.md)
_SEQMOE = Plan("expected", "joint", admission=True, k_prime=12, job_steps=2, horizon=2, after=False, restraint=True)
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
    "previous-token": Policy(
        Plan("lru", "first-come", after=False), PREVIOUS, "what the last step used, first come, LRU (SpecPrefetch's control)"
    ),
    "forecasts-without-transfers": Policy(
        Plan("lru", "joint", m_max=0), GIVEN, "LRU that pays for forecasts and fetches nothing (SpecPrefetch's PRED0)"
    ),
    "specprefetch": Policy(Plan("lru", "window", lead=0), LAYERS, "next layer's router, window budget, LRU"),
    "seqmoe": Policy(_SEQMOE, GIVEN, "joint scheduling, probabilistic Belady, admission"),
    "seqmoe-cache-only": Policy(
        replace(_SEQMOE, order=None, admission=False, restraint=False), GIVEN, "seqmoe without prefetch"
    ),
    "seqmoe-infinity-order": Policy(replace(_SEQMOE, order="infinity"), GIVEN, "seqmoe, MoE-Infinity's order"),
    "seqmoe-promoe-order": Policy(replace(_SEQMOE, order="promoe"), GIVEN, "seqmoe, ProMoE's order"),
    "seqmoe-first-come": Policy(replace(_SEQMOE, order="first-come"), GIVEN, "seqmoe, first come first sent"),
    "seqmoe-no-recursion": Policy(replace(_SEQMOE, horizon=1, job_steps=1), GIVEN, "seqmoe, one step of forecast"),
    "seqmoe-no-admission": Policy(replace(_SEQMOE, admission=False), GIVEN, "seqmoe, every fetch admitted"),
    "seqmoe-no-restraint": Policy(replace(_SEQMOE, restraint=False), GIVEN, "seqmoe, prefetch whatever it costs"),
    "seqmoe-early-binding": Policy(replace(_SEQMOE, early_binding=True), GIVEN, "seqmoe, slots bound with the jobs"),
    "foresight": Policy(
        replace(_SEQMOE, horizon=8, after=True, restraint=False), PERFECT, "seqmoe fed with the true next steps"
    ),
}  # fmt: skip


def plan_for(policy: Policy, top_k: int, num_experts: int, changes: Changes | None = None) -> Plan:
    """The policy's plan with `changes`, for a model of `num_experts` a layer of which `top_k` are chosen: unless
    `changes` say otherwise, jobs are made for three experts more than are needed or more, by SpecPrefetch for all."""
    changes = changes or Changes()
    assert policy.plan is not None, policy
    plan = changes.apply(policy.plan)
    if policy.predictor == LAYERS:
        plan = replace(plan, k_prime=num_experts)
    elif policy.plan.order and changes.k_prime is None:
        plan = replace(plan, k_prime=max(plan.k_prime, top_k + 3))
    return replace(plan, k_prime=min(plan.k_prime, num_experts))


def find_policy(name: str) -> Policy:
    """UsageError for an unknown name."""
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(POLICIES)}"
        raise UsageError(f"unknown policy '{name}': {hint}")
    return POLICIES[name]
