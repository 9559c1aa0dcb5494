"""`simulate_reference` compiled: the same decisions and times, equal in every count and to the last bit of time."""

import numpy as np
from numpy.typing import NDArray

from seqmoe.autotune.simulate import prefill_counts, simulate_reference, step_record
from seqmoe.autotune.simulate_kernel import (
    BELADY,
    BELADY_8,
    BUDGET_AVG,
    BUDGET_NOW,
    CACHE_MISSES,
    EMPTY,
    HITS,
    JOBS,
    LATE,
    LEVEL,
    LFU,
    LOGGED,
    LRU,
    LRU_MISSES,
    MISSES,
    NAMED,
    NONE,
    NOW,
    ON_LINK,
    POSITION,
    PREFETCH,
    PREFETCHED,
    RANK,
    READY,
    SIZE,
    SKIP,
    STALL,
    USEFUL,
    WASTED,
    WORTH,
    Fed,
    Rules,
    State,
    next_uses,
    run_steps,
)  # fmt: skip
from seqmoe.autotune.simulate_plan import Inputs, Outcome, Timing, gather
from seqmoe.predictors.kernels import NEVER
from seqmoe.predictors.trace import Trace
from seqmoe.runtime.eviction import PrefillHot, Static
from seqmoe.runtime.eviction_forecast import position_factors
from seqmoe.runtime.policy import BY_FORECAST, Plan
from seqmoe.runtime.prefetch import make_rule
from seqmoe.runtime.residency import demand_reserve
from seqmoe.runtime.restraint import Level, Restraint, Restraints, StepRecord
from seqmoe.runtime.schedule import ORDERS
from seqmoe.runtime.shadow import ShadowState, shadow_state

_KINDS = {
    "none": NONE, "lru": LRU, "lfu": LFU, "static": RANK, "prefill-hot": RANK, "belady": BELADY, "belady-8": BELADY_8,
}  # fmt: skip


def simulate_fast(
    inputs: Inputs,
    plan: Plan,
    timing: Timing,
    num_slots: int,
    log_size: int = 0,
    restraints: Restraints | None = None,
) -> Outcome:
    """As `simulate_reference`; `log_size` entries of the log are kept. Early binding is left to the reference."""
    inputs.check(plan)
    if plan.early_binding and plan.order:
        return simulate_reference(inputs, plan, timing, num_slots, restraints)
    trace = inputs.trace
    rules = _rules(plan, timing, trace, num_slots)
    state = _state(rules, timing, num_slots, log_size)
    flat = trace.flat_ids()
    coming = next_uses(flat, trace.num_layers * trace.num_experts)
    ranking = None
    if plan.eviction in ("static", "prefill-hot"):
        assert inputs.popularity is not None
        ranking = (Static if plan.eviction == "static" else PrefillHot)(inputs.popularity)
    restraint = Restraint(restraints) if plan.restraint else None
    shadow = shadow_state(num_slots, trace.num_layers * trace.num_experts)
    rows: list[tuple[float, ...]] = []
    levels: list[tuple[int, int]] = []
    for n, (first, count) in enumerate(zip(trace.seq_start.tolist(), trace.seq_len.tolist(), strict=True)):
        if ranking is not None:
            if isinstance(ranking, PrefillHot):
                ranking.prefill(prefill_counts(trace.sequence(n)))
            state.rank[ranking.order] = np.arange(len(ranking.order), 0, -1)
        part = slice(first, first + count)
        state.ints[HITS : READY + 1] = 0
        state.ints[JOBS] = 0
        began = float(state.floats[NOW])
        fed = _feed(inputs, plan, first, part, flat, coming)
        ahead = count if plan.order else 0
        if restraint is None:
            run_steps(state, shadow, rules, fed, 0, count)
        else:
            ahead = _restrained(state, shadow, rules, fed, timing, restraint, levels)
        counts = [int(state.ints[i]) for i in (HITS, MISSES, LATE, PREFETCHED, USEFUL, WASTED, NAMED, READY)]
        rows.append((count, *counts, ahead, float(state.floats[NOW]) - began, count * sum(timing.layer)))
    budget = float(state.floats[BUDGET_AVG]) if plan.order else 0.0
    log = [(a, b, c, d) for a, b, c, d in state.log[: state.ints[LOGGED]].tolist()]
    return gather(rows, budget, log, levels)


def _restrained(
    state: State,
    shadow: ShadowState,
    rules: Rules,
    fed: Fed,
    timing: Timing,
    restraint: Restraint,
    levels: list[tuple[int, int]],
) -> int:
    """One sequence step by step, with self-restraint in between; the number of steps with prefetch on."""
    ints = state.ints
    steps, ahead = len(fed.ids), 0
    for i in range(steps):
        level = restraint.level
        ahead += level == Level.PREFETCH
        run_steps(state, shadow, rules, fed, i, i + 1)
        after = fed.use_after and level == Level.PREFETCH and i + 1 < steps
        times = step_record(timing, level, float(state.floats[STALL]), after)
        record = StepRecord(**times, lru_misses=int(ints[LRU_MISSES]), cache_misses=int(ints[CACHE_MISSES]))
        ints[LEVEL] = now = restraint.step(record)
        if now != level:
            ints[JOBS] = 0
            levels.append((fed.first + i + 1, int(now)))
    return ahead


def _rules(plan: Plan, timing: Timing, trace: Trace, num_slots: int) -> Rules:
    by_position = plan.by_position and plan.eviction != "hard"
    return Rules(
        kind=WORTH if plan.eviction in BY_FORECAST else _KINDS[plan.eviction],
        order=ORDERS.index(plan.order) if plan.order else -1,
        admission=plan.admission,
        k_prime=min(plan.k_prime, trace.num_experts),
        job_steps=plan.job_steps,
        lead=plan.lead,
        m_max=plan.m_max,
        least=plan.least,
        alpha=plan.ema_alpha,
        printed=plan.printed_form,
        layers=trace.num_layers,
        experts=trace.num_experts,
        reserve=demand_reserve(trace.num_experts, trace.top_k, 1),
        slots=num_slots,
        named=min(plan.k_prime, plan.m_max) if plan.order == "window" else plan.k_prime,
        restraint=plan.restraint,
        layer_time=np.array(timing.layer, dtype=np.float64),
        transfer=float(timing.transfer),
        expert=float(timing.expert),
        forecast=float(timing.forecast),
        factor=position_factors(trace.num_layers, plan.discount if by_position else 1.0),
    )


def _state(rules: Rules, timing: Timing, num_slots: int, log_size: int) -> State:
    total = rules.layers * rules.experts
    room = rules.layers * rules.k_prime * rules.job_steps + 1
    ints = np.zeros(SIZE, dtype=np.int64)
    ints[EMPTY], ints[ON_LINK], ints[POSITION], ints[SKIP] = num_slots, -1, -1, 1
    ints[LEVEL] = PREFETCH
    floats = np.zeros(5, dtype=np.float64)
    floats[BUDGET_AVG] = floats[BUDGET_NOW] = timing.transfers_per_layer

    def zeros(dtype: type[np.generic], size: int = total) -> NDArray:
        return np.zeros(size, dtype=dtype)

    return State(
        status=zeros(np.int8), slot_of=np.full(total, -1, dtype=np.int32), residents=zeros(np.int32, num_slots + 1),
        place=zeros(np.int32), fresh=zeros(np.bool_), unclaimed=zeros(np.bool_), released=zeros(np.int64),
        uses=zeros(np.int64), next_use=np.full(total, NEVER, dtype=np.int64), rank=zeros(np.int64),
        computing=np.zeros((rules.layers, num_slots), dtype=np.int32),
        computing_count=zeros(np.int32, rules.layers), arrived=zeros(np.int32, num_slots + 1),
        now=zeros(np.float64), worth=zeros(np.float64), chance=zeros(np.float64), stamp=zeros(np.int64),
        job_expert=zeros(np.int64, room), job_deadline=zeros(np.int64, room), job_confidence=zeros(np.float64, room),
        job_arrival=zeros(np.int64, room), heap=zeros(np.int32, room), best=zeros(np.int32, rules.k_prime + 1),
        log=np.zeros((log_size, 4), dtype=np.int64), ints=ints, floats=floats,
    )  # fmt: skip


def _feed(
    inputs: Inputs, plan: Plan, first: int, part: slice, flat: NDArray[np.int32], coming: NDArray[np.int64]
) -> Fed:
    trace, forecasts = inputs.trace, inputs.forecasts
    scores = np.zeros((1, 0, 1, trace.num_layers, trace.num_experts), dtype=np.float32)
    soon = later = np.zeros((1, 0, trace.num_layers * trace.num_experts))
    use = plan.uses_forecast and forecasts is not None
    after = use and plan.after and forecasts is not None and forecasts.after is not None
    if use:
        assert forecasts is not None
        made = [forecasts.start[part]]
        if after:
            assert forecasts.after is not None
            made.append(forecasts.after[part])
        kept = min(forecasts.horizon, max(plan.job_steps, 2))
        scores = np.stack([one[:, :kept] for one in made]).astype(np.float32)
        if plan.eviction in BY_FORECAST:
            rule = make_rule(plan.eviction, trace.top_k)
            whole = [one[:, : plan.horizon + 1].astype(np.float32) for one in made]
            flatten = (len(made), len(made[0]), trace.num_layers * trace.num_experts)
            soon = np.stack([rule(one, 0, plan.horizon, plan.discount) for one in whole]).reshape(flatten)
            later = np.stack([rule(one, 1, plan.horizon, plan.discount) for one in whole]).reshape(flatten)
    layer_scores = np.zeros((0, trace.num_layers, trace.num_experts), dtype=np.float32)
    if plan.order == "window" and inputs.layer_scores is not None:
        layer_scores = np.ascontiguousarray(inputs.layer_scores[part], dtype=np.float32)
    return Fed(first, flat[part], coming[part], bool(use), bool(after), scores, soon, later, layer_scores)
