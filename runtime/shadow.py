"""What would have missed without prefetch: two caches without bytes beside the real one, which load on demand only.

One goes by recency (plain LRU), the other by the worth of the forecasts (`seqmoe-cache-only`). They are the measure of what
forecasts and prefetch bring. What the real cache does is seen; what it would have done otherwise is not, and no account of
single transfers adds up to it, since one eviction leads to the next. A step is worked off at once, when all its experts are
known: some 40 us for 24 layers of 4 experts.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from seqmoe.runtime.eviction_forecast import Scores, position_factors

RECENT, WORTHY, USES = range(3)  # places in `counts`
OLDER, LATER = range(2)  # columns of `links`


class ShadowState(NamedTuple):
    """Everything that changes; by expert unless said otherwise."""

    links: NDArray[
        np.int32
    ]  # [L * E + 1, 2] the cache by recency, a ring from the oldest to the latest; its last entry: the seam
    recent: NDArray[np.bool_]  # whether it is in that
    kept: NDArray[np.int32]  # [slots] what the cache by worth holds, in no order
    place: NDArray[np.int32]  # in `kept`, -1 for none
    used: NDArray[np.int64]  # number of the latest use
    worth: NDArray[np.float64]  # scratch: as of the layer at work
    counts: NDArray[np.int64]  # residents of the one, of the other, uses so far


def shadow_state(num_slots: int, num_experts: int) -> ShadowState:
    """Both caches empty. `num_experts`: of all layers."""
    return ShadowState(
        links=np.full((num_experts + 1, 2), num_experts, dtype=np.int32),
        recent=np.zeros(num_experts, dtype=np.bool_),
        kept=np.zeros(num_slots, dtype=np.int32),
        place=np.full(num_experts, -1, dtype=np.int32),
        used=np.zeros(num_experts, dtype=np.int64),
        worth=np.zeros(num_experts, dtype=np.float64),
        counts=np.zeros(3, dtype=np.int64),
    )


@njit(cache=True, nogil=True)
def _unlink(links: NDArray[np.int32], expert: int) -> None:
    links[links[expert, OLDER], LATER] = links[expert, LATER]
    links[links[expert, LATER], OLDER] = links[expert, OLDER]


@njit(cache=True, nogil=True)
def _append(links: NDArray[np.int32], expert: int) -> None:
    seam = len(links) - 1
    latest = links[seam, OLDER]
    links[latest, LATER] = expert
    links[expert, OLDER] = latest
    links[expert, LATER] = seam
    links[seam, OLDER] = expert


@njit(cache=True, nogil=True)
def _recent(st: ShadowState, group: NDArray[np.int32]) -> int:
    """Misses of the cache by recency. Hits before what is missing: so a layer's experts are released."""
    misses = 0
    for j in range(len(group)):
        if group[j] >= 0 and st.recent[group[j]]:
            _unlink(st.links, group[j])
            _append(st.links, group[j])
    for j in range(len(group)):
        expert = group[j]
        if expert < 0 or st.recent[expert]:
            continue
        misses += 1
        if st.counts[RECENT] < len(st.kept):
            st.counts[RECENT] += 1
        else:
            oldest = st.links[len(st.links) - 1, LATER]
            st.recent[oldest] = False
            _unlink(st.links, oldest)
        st.recent[expert] = True
        _append(st.links, expert)
    return misses


@njit(cache=True, nogil=True)
def _weigh(st: ShadowState, layer: int, by_worth: bool, soon: Scores, later: Scores, factor: Scores) -> None:
    """What every expert is worth once the layer has routed; without a forecast, when it was used last."""
    if not by_worth:
        st.worth[:] = st.used
        return
    layers = len(factor)
    experts = len(st.worth) // layers
    for of in range(layers):
        ahead = factor[(of - layer - 1) % layers]
        source = later if of <= layer else soon
        for e in range(of * experts, (of + 1) * experts):
            st.worth[e] = source[e] * ahead


@njit(cache=True, nogil=True)
def _worthy(
    st: ShadowState, group: NDArray[np.int32], layer: int, by_worth: bool, soon: Scores, later: Scores, factor: Scores
) -> int:
    """Misses of the cache by worth at a layer; without a forecast (`by_worth` False) it evicts by recency."""
    misses = 0
    is_weighed = False
    begin = st.counts[USES]  # what was used later is the group's own and stays
    for j in range(len(group)):
        if group[j] >= 0 and st.place[group[j]] >= 0:
            st.counts[USES] += 1
            st.used[group[j]] = st.counts[USES]
    for j in range(len(group)):
        expert = group[j]
        if expert < 0 or st.place[expert] >= 0:
            continue
        misses += 1
        st.counts[USES] += 1
        st.used[expert] = st.counts[USES]
        at = -1
        if st.counts[WORTHY] < len(st.kept):
            at = st.counts[WORTHY]
            st.counts[WORTHY] += 1
        else:
            if not is_weighed:
                is_weighed = True
                _weigh(st, layer, by_worth, soon, later, factor)
            least = np.inf
            victim = -1
            for i in range(len(st.kept)):
                other = st.kept[i]
                value = st.worth[other]
                if value > least or st.used[other] > begin:
                    continue
                if victim < 0 or value < least or other < victim:
                    least = value
                    victim = other
                    at = i
            if victim < 0:
                continue  # more are needed than there are slots
            st.place[victim] = -1
        st.kept[at] = expert
        st.place[expert] = at
    return misses


@njit(cache=True, nogil=True)
def shadow_step(
    st: ShadowState, ids: NDArray[np.int32], by_worth: bool, soon: Scores, later: Scores, factor: Scores
) -> tuple[int, int]:
    """A step's misses, by recency and by worth. `ids` [L, width] flat, -1 for none; `soon`, `later` [L * E]: worth at the
    start of the step of what its layer has yet to reach, and has reached; `factor` [L] by how many layers ahead."""
    recent = 0
    worthy = 0
    for layer in range(ids.shape[0]):
        recent += _recent(st, ids[layer])
        worthy += _worthy(st, ids[layer], layer, by_worth, soon, later, factor)
    return recent, worthy


class Shadow:
    """Both caches for a pool of `num_slots`. `forecast` when a step has begun with one, `step` when it has ended."""

    def __init__(self, num_slots: int, num_layers: int, num_experts: int, factor: Scores | None = None) -> None:
        """`factor` [L]: of the eviction's worth by distance, as `ForecastEviction` has it; None for none."""
        self._state = shadow_state(num_slots, num_layers * num_experts)
        self._factor = position_factors(num_layers, 1.0) if factor is None else factor
        self._soon = np.zeros(num_layers * num_experts)
        self._later = np.zeros(num_layers * num_experts)
        self._has_forecast = False

    def start(self, resident: NDArray[np.integer]) -> None:
        """What both hold from now on, flat ids, the least recently used first: after a prefill, what the real cache holds."""
        state = self._state
        size = len(state.kept)
        self._state = shadow_state(size, len(state.used))
        state = self._state
        for expert in resident.tolist()[-size:]:
            _append(state.links, expert)
            state.recent[expert] = True
            state.place[expert] = state.counts[WORTHY]
            state.kept[state.counts[WORTHY]] = expert
            state.counts[:] += 1
            state.used[expert] = state.counts[USES]
        self._has_forecast = False

    def forecast(self, soon: Scores, later: Scores) -> None:
        """The worths of the forecast that the step began with, [L, E] or flat."""
        self._soon[:] = soon.reshape(-1)
        self._later[:] = later.reshape(-1)
        self._has_forecast = True

    def step(self, ids: NDArray[np.int32]) -> tuple[int, int]:
        """Misses of the step that has ended, by recency and by worth; both are by recency where it had no forecast.
        `ids` [L, width]: flat ids of what each layer needed, -1 where it needed fewer."""
        by_worth, self._has_forecast = self._has_forecast, False
        return shadow_step(self._state, ids, by_worth, self._soon, self._later, self._factor)
