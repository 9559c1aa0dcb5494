"""The compiled loop of the simulator: one sequence of a trace, all decisions included. See simulate_fast.py.

The tables are kept by expert: which slot an expert is in changes nothing that is counted.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from seqmoe.predictors.kernels import NEVER
from seqmoe.runtime.schedule_fast import choose, prune, remove
from seqmoe.runtime.shadow import ShadowState, shadow_step

ABSENT, USED, FETCH, COMPUTE = range(4)
LRU, LFU, RANK, BELADY, BELADY_8, WORTH, NONE = range(7)
# places in State.ints and State.floats
(
    EMPTY, USED_COUNT, HELD, RELEASES, ON_LINK, ARRIVED, POSITION, JOBS, ARRIVALS, SKIP, SENT, RESIDENT, LOGGED,
    HITS, MISSES, LATE, PREFETCHED, USEFUL, WASTED, NAMED, READY, LEVEL, LRU_MISSES, CACHE_MISSES, SIZE,
) = range(25)  # fmt: skip
NOW, LINK_FREE, BUDGET_AVG, BUDGET_NOW, STALL = range(5)
OFF, CACHE, PREFETCH = range(3)  # restraint.Level


class State(NamedTuple):
    """Everything that changes. By expert unless said otherwise."""

    status: NDArray[np.int8]
    slot_of: NDArray[np.int32]  # 0 where it has a slot, else -1
    residents: NDArray[np.int32]  # [slots] those that have one, in no order
    place: NDArray[np.int32]  # in residents
    fresh: NDArray[np.bool_]
    unclaimed: NDArray[np.bool_]
    released: NDArray[np.int64]  # number of the last release
    uses: NDArray[np.int64]
    next_use: NDArray[np.int64]
    rank: NDArray[np.int64]
    computing: NDArray[np.int32]  # [L, slots] in the order in which they came
    computing_count: NDArray[np.int32]  # [L]
    arrived: NDArray[np.int32]  # [slots] off the link, to be landed
    now: NDArray[np.float64]  # worth before the discount by position
    worth: NDArray[np.float64]
    chance: NDArray[np.float64]
    stamp: NDArray[np.int64]  # make_jobs: the offer that has a job for it
    job_expert: NDArray[np.int64]
    job_deadline: NDArray[np.int64]
    job_confidence: NDArray[np.float64]
    job_arrival: NDArray[np.int64]
    heap: NDArray[np.int32]
    best: NDArray[np.int32]  # [k_prime] scratch
    log: NDArray[np.int64]  # [n, 4]
    ints: NDArray[np.int64]
    floats: NDArray[np.float64]


class Rules(NamedTuple):
    """What does not change: the plan and the times."""

    kind: int
    order: int  # -1: no prefetch
    admission: bool
    k_prime: int
    job_steps: int
    lead: int
    m_max: int
    least: float
    alpha: float
    printed: bool
    layers: int
    experts: int
    reserve: int
    slots: int
    named: int  # experts of a layer that count as named by its forecast
    restraint: bool
    layer_time: NDArray[np.float64]
    transfer: float
    expert: float
    forecast: float
    factor: NDArray[np.float64]


class Fed(NamedTuple):
    """One sequence: its choices and forecasts (empty arrays where there are none)."""

    first: int  # its first row
    ids: NDArray[np.int32]  # [S, L, k] flat
    coming: NDArray[np.int64]  # [S, L, k] position of the next use
    use_start: bool
    use_after: bool
    scores: NDArray[np.float32]  # [2, S, rows, L, E]: at the start, after the last layer
    soon: NDArray[np.float64]  # [2, S, L * E]
    later: NDArray[np.float64]
    layer_scores: NDArray[np.float32]  # [S, L, E]


@njit(cache=True, nogil=True)
def _victim(st: State, rules: Rules) -> int:
    best = -1
    first = np.int64(0)
    second = np.int64(0)
    least = 0.0
    seen = st.ints[POSITION] + 8 * rules.layers
    by_worth = rules.kind == WORTH and st.ints[LEVEL] > OFF
    for i in range(st.ints[RESIDENT]):
        e = st.residents[i]
        if st.status[e] != USED:
            continue
        if by_worth:
            value = st.worth[e]
            if best < 0 or value < least or (value == least and e < best):
                best = e
                least = value
            continue
        number = st.released[e]
        key = np.int64(0)
        if rules.kind == LFU:
            key = st.uses[e]
        elif rules.kind == RANK:
            key = st.rank[e]
        elif rules.kind == BELADY:
            key = -st.next_use[e]
        elif rules.kind == BELADY_8:
            key = -st.next_use[e] if st.next_use[e] <= seen else np.int64(-NEVER)
        if best < 0 or key < first or (key == first and number < second):
            best = e
            first = key
            second = number
    return best


@njit(cache=True, nogil=True)
def _vacate(st: State, e: int) -> None:
    last = st.residents[st.ints[RESIDENT] - 1]
    st.residents[st.place[e]] = last
    st.place[last] = st.place[e]
    st.ints[RESIDENT] -= 1
    st.status[e] = ABSENT
    st.slot_of[e] = -1


@njit(cache=True, nogil=True)
def _bind(st: State, rules: Rules, e: int, status: int, position: int) -> None:
    victim = -1
    if st.ints[EMPTY] > 0:
        st.ints[EMPTY] -= 1
    else:
        victim = _victim(st, rules)
        _vacate(st, victim)
        st.ints[USED_COUNT] -= 1
        if st.fresh[victim]:
            st.fresh[victim] = False
            st.ints[WASTED] += 1
    st.residents[st.ints[RESIDENT]] = e
    st.place[e] = st.ints[RESIDENT]
    st.ints[RESIDENT] += 1
    st.status[e] = status
    st.slot_of[e] = 0
    n = st.ints[LOGGED]
    if n < len(st.log):
        st.log[n, 0] = position
        st.log[n, 1] = e
        st.log[n, 2] = victim
        st.log[n, 3] = 1 if status == FETCH else 0
        st.ints[LOGGED] = n + 1


@njit(cache=True, nogil=True)
def _to_compute(st: State, rules: Rules, e: int) -> None:
    layer = e // rules.experts
    st.computing[layer, st.computing_count[layer]] = e
    st.computing_count[layer] += 1
    st.status[e] = COMPUTE


@njit(cache=True, nogil=True)
def _send_next(st: State, rules: Rules) -> int:
    """What the link sends now, its slot bound; -1 for nothing."""
    free = min(st.ints[EMPTY] + st.ints[USED_COUNT], rules.slots - rules.reserve - st.ints[HELD])
    if free <= 0:
        st.ints[SKIP] = 1
        return -1
    if st.ints[SENT] >= rules.m_max:
        return -1
    limited = rules.admission and st.ints[EMPTY] == 0
    floor = 0.0
    chance = 0.0
    next_use = np.int64(0)
    position = st.ints[POSITION]
    if limited:
        victim = _victim(st, rules)
        floor = st.worth[victim]
        chance = st.chance[victim]
        after = position + 1
        next_use = after + (victim // rules.experts - after) % rules.layers
    count = prune(
        st.job_expert, st.job_deadline, st.job_confidence, st.job_arrival, st.ints[JOBS], st.slot_of,
        position + rules.lead,
    )  # fmt: skip
    at = choose(
        rules.order, st.job_expert, st.job_deadline, st.job_confidence, st.job_arrival, count, position, rules.layers,
        st.floats[BUDGET_NOW], st.floats[BUDGET_AVG], limited, st.worth, floor, next_use, chance, st.heap,
    )  # fmt: skip
    st.ints[JOBS] = count
    if at < 0:
        st.ints[SKIP] = 1
        return -1
    e = st.job_expert[at]
    remove(st.job_expert, st.job_deadline, st.job_confidence, st.job_arrival, count, at)
    st.ints[JOBS] = count - 1
    st.floats[BUDGET_NOW] -= 1.0
    st.ints[SENT] += 1
    _bind(st, rules, e, FETCH, position)
    st.ints[HELD] += 1
    st.ints[PREFETCHED] += 1
    st.fresh[e] = True
    return e


@njit(cache=True, nogil=True)
def _spend(st: State, rules: Rules, duration: float) -> None:
    at = st.floats[NOW]
    end = at + duration
    st.floats[NOW] = end
    if rules.order < 0:
        return
    if st.ints[ON_LINK] >= 0:
        if st.floats[LINK_FREE] > end:
            return
        st.arrived[st.ints[ARRIVED]] = st.ints[ON_LINK]
        st.ints[ARRIVED] += 1
        st.ints[ON_LINK] = -1
        at = max(at, st.floats[LINK_FREE])
    while at < end:
        e = _send_next(st, rules) if st.ints[LEVEL] == PREFETCH else -1
        if e < 0:
            return
        st.floats[LINK_FREE] = at + rules.transfer
        if st.floats[LINK_FREE] > end:
            st.ints[ON_LINK] = e
            return
        st.arrived[st.ints[ARRIVED]] = e
        st.ints[ARRIVED] += 1
        at = st.floats[LINK_FREE]


@njit(cache=True, nogil=True)
def _land(st: State, rules: Rules, e: int) -> None:
    _to_compute(st, rules, e)
    st.unclaimed[e] = True


@njit(cache=True, nogil=True)
def _offer(st: State, rules: Rules, scores: NDArray[np.float32], low: int, high: int, step: int, position: int) -> None:
    """make_jobs from scores [rows, L, E], layers low to high - 1, in place of what is queued."""
    count = 0
    st.ints[ARRIVALS] += 1
    mark = st.ints[ARRIVALS]
    for h in range(min(rules.job_steps, scores.shape[0])):
        for layer in range(low, high):
            deadline = (step + h) * rules.layers + layer
            if deadline <= position + rules.lead:
                continue
            found = 0
            for e in range(rules.experts):
                value = scores[h, layer, e]
                if value <= rules.least:
                    continue
                at = found
                while at > 0 and value > scores[h, layer, st.best[at - 1]]:
                    at -= 1
                if at >= rules.k_prime:
                    continue
                for j in range(min(found, rules.k_prime - 1), at, -1):
                    st.best[j] = st.best[j - 1]
                st.best[at] = e
                found = min(found + 1, rules.k_prime)
            for j in range(found):
                flat = layer * rules.experts + st.best[j]
                if st.slot_of[flat] >= 0 or st.stamp[flat] == mark:
                    continue
                st.stamp[flat] = mark
                st.job_expert[count] = flat
                st.job_deadline[count] = deadline
                st.job_confidence[count] = scores[h, layer, st.best[j]]
                st.job_arrival[count] = count
                count += 1
    st.ints[JOBS] = count


@njit(cache=True, nogil=True)
def _weigh(st: State, rules: Rules) -> None:
    for layer in range(rules.layers):
        factor = rules.factor[(layer - st.ints[POSITION] - 1) % rules.layers]
        for e in range(layer * rules.experts, (layer + 1) * rules.experts):
            st.worth[e] = st.now[e] * factor


@njit(cache=True, nogil=True)
def _take(st: State, rules: Rules, fed: Fed, which: int, i: int, step: int, position: int) -> None:
    if rules.kind == WORTH:
        st.now[:] = fed.soon[which, i]
        for layer in range(rules.layers):
            for e in range(rules.experts):
                st.chance[layer * rules.experts + e] = fed.scores[which, i, 0, layer, e]
        _weigh(st, rules)
    if rules.order >= 0 and st.ints[LEVEL] == PREFETCH:
        _offer(st, rules, fed.scores[which, i], 0, rules.layers, step, position)


@njit(cache=True, nogil=True)
def _reach(st: State, rules: Rules, fed: Fed, which: int, i: int, layer: int, position: int) -> None:
    """The eviction's touch: the layer has routed, its next use is in the step after this."""
    if rules.kind != WORTH or st.ints[LEVEL] == OFF:
        return
    first = layer * rules.experts
    row = min(1, fed.scores.shape[2] - 1)
    for e in range(rules.experts):
        st.now[first + e] = fed.later[which, i, first + e]
        st.chance[first + e] = fed.scores[which, i, row, layer, e]
    _weigh(st, rules)


@njit(cache=True, nogil=True)
def _is_named(scores: NDArray[np.float32], index: int, count: int) -> bool:
    """Whether the expert is among the `count` likeliest of its layer's scores [E], of equals the first."""
    above = 0
    for e in range(len(scores)):
        above += scores[e] > scores[index] or (scores[e] == scores[index] and e < index)
    return above < count


@njit(cache=True, nogil=True)
def run_steps(st: State, shadow: ShadowState, rules: Rules, fed: Fed, begin: int, end: int) -> None:
    """Steps `begin` to `end` - 1 of a sequence; the state goes on into what comes next."""
    ints, floats = st.ints, st.floats
    layers, k = rules.layers, fed.ids.shape[2]
    missing = np.empty(k, dtype=np.int32)
    steps = fed.ids.shape[0]
    floats[STALL] = 0.0
    by_layer = rules.order >= 0 and fed.layer_scores.shape[0] > 0
    for i in range(begin, end):
        forecasts = fed.use_start and ints[LEVEL] > OFF
        for layer in range(layers):
            position = (fed.first + i) * layers + layer
            if forecasts and layer == 0:
                _spend(st, rules, rules.forecast)
            for j in range(ints[ARRIVED]):
                _land(st, rules, st.arrived[j])
            ints[ARRIVED] = 0
            if rules.order >= 0:  # Scheduler.advance
                if ints[SKIP] == 0:
                    change = rules.alpha * floats[BUDGET_NOW]
                    floats[BUDGET_AVG] += change if rules.printed else -change
                floats[BUDGET_NOW] = floats[BUDGET_AVG]
                ints[SENT] = 0
                ints[SKIP] = 0 if ints[LEVEL] == PREFETCH else 1
            if forecasts and layer == 0:
                # the eviction stands at the layer before, the queue at this one
                _take(st, rules, fed, 0, i, fed.first + i, position)
            ints[POSITION] = position
            _reach(st, rules, fed, 0, i, layer, position)
            # lookup
            absent = 0
            waits = False
            for j in range(k):
                e = fed.ids[i, layer, j]
                st.uses[e] += 1
                st.next_use[e] = fed.coming[i, layer, j]
                status = st.status[e]
                named = False
                if by_layer:
                    named = layer > 0 and _is_named(fed.layer_scores[i, layer], e - layer * rules.experts, rules.named)
                elif forecasts:
                    named = _is_named(fed.scores[0, i, 0, layer], e - layer * rules.experts, rules.named)
                ints[NAMED] += named
                ints[READY] += named and status >= USED and status != FETCH
                if status == ABSENT:
                    missing[absent] = e
                    absent += 1
                    ints[MISSES] += 1
                    continue
                if status == FETCH:  # on the link: what has arrived was landed
                    waits = True
                    ints[MISSES] += 1
                    if st.fresh[e]:
                        ints[LATE] += 1
                        st.fresh[e] = False
                    continue
                ints[HITS] += 1
                if st.fresh[e]:
                    ints[USEFUL] += 1
                    st.fresh[e] = False
                if status == USED:
                    ints[USED_COUNT] -= 1
                    _to_compute(st, rules, e)
                elif st.unclaimed[e]:
                    st.unclaimed[e] = False
                    ints[HELD] -= 1
            computed = 0.0
            if waits or absent > 0:
                asked = floats[NOW]
                loaded = asked
                if ints[ON_LINK] >= 0:
                    loaded = max(floats[NOW], floats[LINK_FREE])
                    if waits:
                        _land(st, rules, ints[ON_LINK])
                        floats[NOW] = loaded
                    else:
                        st.arrived[ints[ARRIVED]] = ints[ON_LINK]
                        ints[ARRIVED] += 1
                    ints[ON_LINK] = -1
                for j in range(absent):
                    _bind(st, rules, missing[j], COMPUTE, position)
                    _to_compute(st, rules, missing[j])
                loaded += absent * rules.transfer
                if absent > 0:
                    computed = (k - absent) * rules.expert
                floats[NOW] = max(loaded, floats[NOW] + computed)
                floats[STALL] += floats[NOW] - asked - computed
            if fed.use_after and ints[LEVEL] == PREFETCH and layer == layers - 1 and i + 1 < steps:
                _spend(st, rules, rules.forecast)
                _take(st, rules, fed, 1, i + 1, fed.first + i + 1, position)
            if by_layer and ints[LEVEL] == PREFETCH and layer + 1 < layers:
                _offer(st, rules, fed.layer_scores[i : i + 1], layer + 1, layer + 2, fed.first + i, position)
            _spend(st, rules, rules.layer_time[layer] - computed)
            # release
            for j in range(st.computing_count[layer]):
                e = st.computing[layer, j]
                if st.unclaimed[e]:
                    st.unclaimed[e] = False
                    ints[HELD] -= 1
                if rules.kind == NONE:
                    _vacate(st, e)
                    ints[EMPTY] += 1
                else:
                    st.status[e] = USED
                    ints[RELEASES] += 1
                    st.released[e] = ints[RELEASES]
                    ints[USED_COUNT] += 1
            st.computing_count[layer] = 0
        if rules.restraint:
            soon, later = fed.soon[0], fed.later[0]
            row = i if forecasts else 0
            ints[LRU_MISSES], ints[CACHE_MISSES] = shadow_step(
                shadow, fed.ids[i], forecasts, soon[row], later[row], rules.factor
            )


@njit(cache=True, nogil=True)
def next_uses(ids: NDArray[np.int32], total: int) -> NDArray[np.int64]:
    """Position of the next use of every choice of ids [S, L, k]."""
    out = np.empty(ids.shape, dtype=np.int64)
    coming = np.full(total, NEVER, dtype=np.int64)
    for row in range(ids.shape[0] - 1, -1, -1):
        for layer in range(ids.shape[1] - 1, -1, -1):
            for j in range(ids.shape[2]):
                e = ids[row, layer, j]
                out[row, layer, j] = coming[e]
                coming[e] = row * ids.shape[1] + layer
    return out
