"""The slot-state machine, rule by rule, under every eviction."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from seqmoe.predictors.trace import Trace
from seqmoe.runtime.eviction import LRU, make_eviction
from seqmoe.runtime.residency import (
    Fetch,
    Lookup,
    NoSlot,
    Residency,
    SlotState,
    demand_reserve,
    plan_rounds,
)

LAYERS, EXPERTS, TOP_K = 3, 5, 2
EMPTY, USED, FETCH, COMPUTE = SlotState


def small_trace() -> Trace:
    rng = random.Random(3)
    ids = np.array([[rng.sample(range(EXPERTS), TOP_K) for _ in range(LAYERS)] for _ in range(50)], dtype=np.int16)
    return Trace(ids, None, None, np.zeros(1, dtype=np.int64), np.array([50]), EXPERTS)


def make(num_slots: int, name: str = "lru", reserve: int = TOP_K) -> Residency:
    return Residency(num_slots, LAYERS, EXPERTS, make_eviction(name, trace=small_trace()), reserve=reserve)


def run_layer(residency: Residency, layer: int, experts: list[int]) -> list[Fetch]:
    fetches = [residency.load(flat) for flat in residency.lookup(layer, experts).missing]
    residency.release(layer)
    residency.check_integrity()
    return fetches


class ResidencyContract:
    """The rules that hold whatever the eviction is."""

    policy = "lru"

    def make(self, num_slots: int, reserve: int = TOP_K) -> Residency:
        return make(num_slots, self.policy, reserve)

    def test_a_miss_never_evicts_its_layers_own_hit(self) -> None:
        for hit in range(EXPERTS):
            residency = self.make(2)
            run_layer(residency, 0, [hit, (hit + 1) % EXPERTS])
            found = residency.lookup(0, [(hit + 2) % EXPERTS, hit])
            assert found.slots[0] == -1 and found.slots[1] >= 0
            assert residency.load(found.missing[0]).victim == (hit + 1) % EXPERTS
            assert residency.is_ready(hit)
            residency.check_integrity()

    def test_empty_slots_go_first_and_in_order(self) -> None:
        residency = self.make(4)
        assert [(f.slot, f.victim) for f in run_layer(residency, 0, [0, 1])] == [(0, -1), (1, -1)]
        fetch = residency.fetch(7)
        assert fetch is not None and (fetch.slot, fetch.victim) == (2, -1)
        assert residency.drop(fetch.tag)
        assert [(f.slot, f.victim) for f in run_layer(residency, 1, [3, 4])] == [(2, -1), (3, -1)]
        assert run_layer(residency, 2, [0])[0].victim >= 0
        assert residency.counts.evictions == 1

    def test_no_slot_changes_nothing(self) -> None:
        residency = self.make(2)
        for flat in residency.lookup(0, [0, 1, 2]).missing[:2]:
            residency.load(flat)
        before = residency.state.tobytes(), residency.slot_of_expert.tobytes(), residency.free_for_demand()
        with pytest.raises(NoSlot, match="all 2 slots are in FETCH or COMPUTE, none for expert 2"):
            residency.load(2)
        assert (residency.state.tobytes(), residency.slot_of_expert.tobytes(), residency.free_for_demand()) == before
        residency.check_integrity()

    def test_fetch_lands_protected_until_its_layer_was_computed(self) -> None:
        residency = self.make(3)
        fetch = residency.fetch(1 * EXPERTS + 4)
        assert fetch is not None and residency.state[fetch.slot] == FETCH
        assert not residency.is_ready(fetch.expert)
        assert residency.land(fetch.tag) and residency.state[fetch.slot] == COMPUTE
        run_layer(residency, 0, [0, 1])
        run_layer(residency, 0, [2, 3])  # two slots are left for demand: never the landed one
        assert residency.state[fetch.slot] == COMPUTE and residency.is_ready(fetch.expert)
        found = residency.lookup(1, [4])
        assert found.slots == [fetch.slot] and residency.counts.hits == 1
        residency.release(1)
        assert residency.state[fetch.slot] == USED
        residency.check_integrity()

    def test_landed_but_not_needed_is_given_back_with_its_layer(self) -> None:
        residency = self.make(3)
        fetch = residency.fetch(1 * EXPERTS + 4)
        assert fetch is not None and residency.land(fetch.tag)
        run_layer(residency, 1, [0])
        assert residency.state[fetch.slot] == USED
        assert residency.free_for_prefetch() == 1

    @pytest.mark.parametrize("end", ["drop", "fail"])
    def test_a_dropped_or_failed_fetch_gives_its_slot_back(self, end: str) -> None:
        residency = self.make(3)
        fetch = residency.fetch(6)
        assert fetch is not None
        assert residency.drop(fetch.tag) if end == "drop" else residency.fail(fetch)
        assert residency.state[fetch.slot] == EMPTY and residency.slot_of_expert[6] == -1
        assert (residency.counts.dropped, residency.counts.failed) == ((1, 0) if end == "drop" else (0, 1))
        again = residency.fetch(6)
        assert again is not None and again.tag > fetch.tag
        residency.check_integrity()

    def test_a_failed_load_leaves_no_expert_behind(self) -> None:
        residency = self.make(2)
        residency.lookup(0, [0, 1])
        good, bad = residency.load(0), residency.load(1)
        assert residency.fail(bad) and not residency.fail(bad)
        residency.release(0)
        assert residency.is_ready(0) and not residency.is_ready(1)
        assert residency.state.tolist() == [USED, EMPTY]
        assert residency.lookup(0, [0, 1]) == Lookup([good.slot, -1], [1], [])
        residency.check_integrity()

    def test_failing_after_release_is_our_bug(self) -> None:
        residency = self.make(2)
        residency.lookup(0, [0])
        fetch = residency.load(0)
        residency.release(0)
        with pytest.raises(AssertionError, match="was released before its failure was reported"):
            residency.fail(fetch)

    def test_stale_tags_change_nothing(self) -> None:
        residency = self.make(4)
        fetch = residency.fetch(3)
        assert fetch is not None
        demand = run_layer(residency, 1, [0])[0]
        assert residency.land(fetch.tag)
        before = residency.state.tobytes(), residency.expert_of_slot.tobytes(), residency.counts
        for tag in (fetch.tag, demand.tag, 0, -1, 999):
            assert not residency.land(tag)
            assert not residency.drop(tag)
            assert not residency.orphan(tag)
        assert not residency.fail(Fetch(3, fetch.slot, -1, 999))
        assert (residency.state.tobytes(), residency.expert_of_slot.tobytes(), residency.counts) == before
        residency.check_integrity()

    def test_a_tag_of_an_earlier_owner_is_stale(self) -> None:
        residency = self.make(3)
        first = residency.fetch(6)
        assert first is not None and residency.drop(first.tag)
        second = residency.fetch(7)
        assert second is not None and second.slot == first.slot
        assert not residency.land(first.tag) and not residency.fail(first)
        assert residency.state[second.slot] == FETCH and residency.expert_of_slot[second.slot] == 7

    def test_a_slot_in_fetch_is_not_rebound(self) -> None:
        residency = self.make(3)
        fetch = residency.fetch(6)
        assert fetch is not None
        for step in range(6):
            loaded = run_layer(residency, 0, [step % EXPERTS, (step + 1) % EXPERTS])
            assert fetch.slot not in [f.slot for f in loaded]
        assert residency.state[fetch.slot] == FETCH

    def test_needed_while_in_flight_is_a_miss_and_can_be_awaited(self) -> None:
        residency = self.make(3)
        fetch = residency.fetch(2)
        assert fetch is not None
        found = residency.lookup(0, [1, 2])
        assert found == Lookup([-1, -1], [1], [fetch])
        counts = residency.counts
        assert (counts.hits, counts.misses, counts.late) == (0, 2, 1)
        residency.load(1)
        assert residency.land(fetch.tag) and residency.slot_of_expert[2] == fetch.slot
        residency.release(0)
        assert residency.state[fetch.slot] == USED
        residency.check_integrity()

    @pytest.mark.parametrize("end", ["land", "drop", "fail"])
    def test_an_orphans_slot_is_unusable_until_acknowledged(self, end: str) -> None:
        residency = self.make(3)
        fetch = residency.fetch(2)
        assert fetch is not None
        residency.lookup(0, [1, 2])
        assert residency.orphan(fetch.tag) and not residency.orphan(fetch.tag)
        residency.check_integrity()
        loaded = [residency.load(1), residency.load(2)]
        assert fetch.slot not in [f.slot for f in loaded]
        residency.release(0)
        assert residency.free_for_demand() == 2 and residency.state[fetch.slot] == FETCH
        if end == "land":
            assert not residency.land(fetch.tag)  # nobody waits for it: no expert became ready
        else:
            assert residency.drop(fetch.tag) if end == "drop" else residency.fail(fetch)
        assert residency.state[fetch.slot] == EMPTY and residency.is_ready(2)
        assert residency.slot_of_expert[2] == loaded[1].slot
        assert (residency.counts.orphaned, residency.counts.landed, residency.counts.dropped) == (1, 0, 0)
        residency.check_integrity()

    def test_fetch_refuses_what_is_there_or_on_its_way(self) -> None:
        residency = self.make(5)
        run_layer(residency, 0, [0])
        fetch = residency.fetch(7)
        assert fetch is not None
        assert residency.fetch(0) is None and residency.fetch(7) is None
        assert residency.land(fetch.tag) and residency.fetch(7) is None

    def test_prefetch_leaves_the_reserve_to_demand(self) -> None:
        residency = self.make(5, reserve=2)
        made = [residency.fetch(flat) for flat in range(5, 15)]
        assert sum(f is not None for f in made) == 3 and residency.free_for_prefetch() == 0
        for fetch in made[:3]:
            assert fetch is not None and residency.land(fetch.tag)
        assert residency.fetch(14) is None  # landed ones still count: their layer is to come
        run_layer(residency, 0, [0, 1])
        run_layer(residency, 0, [2, 3])
        residency.check_integrity()
        run_layer(residency, 1, [0, 1])  # flat 5 and 6 are hits: their slots become free for both
        assert residency.free_for_prefetch() == 3

    @pytest.mark.parametrize(("num_slots", "reserve"), [(2, 2), (1, 2), (4, 5)])
    def test_prefetch_is_off_with_no_slots_to_spare(self, num_slots: int, reserve: int) -> None:
        residency = self.make(num_slots, reserve=reserve)
        assert residency.free_for_prefetch() == 0 and residency.fetch(3) is None
        assert residency.counts.prefetched == 0

    def test_release_is_of_one_layer_only(self) -> None:
        residency = self.make(4)
        for layer in (0, 1):
            for flat in residency.lookup(layer, [0, 1]).missing:
                residency.load(flat)
        residency.release(0)
        assert [SlotState(s).name for s in residency.state] == ["USED", "USED", "COMPUTE", "COMPUTE"]
        residency.release(0)
        residency.release(1, [6])
        assert [SlotState(s).name for s in residency.state] == ["USED", "USED", "COMPUTE", "USED"]
        residency.check_integrity()

    def test_discard_empties_one_layer(self) -> None:
        residency = self.make(5)
        run_layer(residency, 0, [0, 1])
        landed = residency.fetch(8)
        assert landed is not None and residency.land(landed.tag)
        residency.load(residency.lookup(0, [1, 2]).missing[0])
        residency.discard(0)
        residency.check_integrity()
        assert [residency.is_ready(e) for e in (0, 1, 2, 8)] == [True, False, False, True]
        residency.discard(1)
        assert residency.free_for_prefetch() == 3 and residency.slot_of_expert.tolist().count(-1) == 14
        residency.check_integrity()

    def test_clear_keeps_nothing_but_transfers(self) -> None:
        residency = self.make(5)
        run_layer(residency, 0, [0, 1])
        flying, landed = residency.fetch(7), residency.fetch(8)
        assert flying is not None and landed is not None and residency.land(landed.tag)
        residency.clear()
        residency.check_integrity()
        assert sorted(residency.state.tolist()) == [EMPTY] * 4 + [FETCH]
        assert residency.land(flying.tag) and residency.is_ready(7)
        residency.check_integrity()
        assert residency.counts.evictions == 0

    def test_counts(self) -> None:
        residency = self.make(4)
        run_layer(residency, 0, [0, 1])  # 2 misses
        run_layer(residency, 0, [1, 2])  # 1 hit, 1 miss
        fetch = residency.fetch(14)
        assert fetch is not None and residency.land(fetch.tag)
        run_layer(residency, 2, [4])  # 1 hit, prefetched
        counts = residency.reset_counts()
        assert (counts.hits, counts.misses, counts.on_demand, counts.prefetched, counts.landed) == (2, 3, 3, 1, 1)
        assert counts.hit_rate == pytest.approx(0.4)
        assert residency.counts.hits == residency.counts.misses == 0 and residency.counts.hit_rate == 0.0

    def test_rounds_run_a_layer_that_does_not_fit(self) -> None:
        residency = self.make(3)
        run_layer(residency, 0, [4])
        run_layer(residency, 1, [0, 1])
        found = residency.lookup(0, list(range(EXPERTS)))
        rounds = plan_rounds(found.missing, [4], residency.free_for_demand())
        assert rounds == [[4, 0, 1], [2, 3]]
        done: list[int] = []
        for chunk in rounds:
            for flat in chunk:
                if not residency.is_ready(flat):
                    residency.load(flat)
            assert all(residency.is_ready(flat) for flat in chunk)
            done += chunk
            residency.release(0)
            residency.check_integrity()
        assert sorted(done) == list(range(EXPERTS))
        assert (residency.counts.hits, residency.counts.misses) == (1, 3 + 4)


class TestWithLRU(ResidencyContract):
    policy = "lru"

    def test_least_recent_layer_goes_first(self) -> None:
        residency = self.make(4)
        run_layer(residency, 0, [0, 1])
        run_layer(residency, 1, [0, 1])
        run_layer(residency, 0, [0])
        assert [f.victim for f in run_layer(residency, 2, [0, 1])] == [1, 5]


class TestWithLFU(ResidencyContract):
    policy = "lfu"


class TestWithStatic(ResidencyContract):
    policy = "static"


class TestWithBelady(ResidencyContract):
    policy = "belady"


CORRUPTIONS: list[tuple[Callable[[Residency, Fetch], object], str]] = [
    (lambda r, f: r._expert_of.__setitem__(0, 3), "slots of experts"),
    (lambda r, f: r._slot_of.__setitem__(0, -1), "slots of experts"),
    (lambda r, f: r._slot_of.__setitem__(9, 0), "slots of experts"),
    (lambda r, f: r._slot_of.__setitem__(0, 1), "slots of experts"),
    (lambda r, f: r._state.__setitem__(0, COMPUTE), "count of USED"),
    (lambda r, f: r._state.__setitem__(0, EMPTY), "slots without expert"),
    (lambda r, f: setattr(r, "_num_used", 1), "count of USED"),
    (lambda r, f: r._empty.append(0), "free list"),
    (lambda r, f: r._tag_of.__setitem__(f.slot, 99), "tags in flight"),
    (lambda r, f: r._in_flight.pop(f.tag), "slots in flight"),
    (lambda r, f: r._orphans.add(f.tag), "slots without expert"),
    (lambda r, f: r._unclaimed.add(0), "landed and unclaimed"),
    (lambda r, f: r._computing[1].__setitem__(0, None), "experts at work"),
    (lambda r, f: r.eviction.victim(), "candidates of eviction"),
    (lambda r, f: setattr(r, "_reserve", 4), "prefetch holds 1 of 4 slots, 4 are reserved"),
    (lambda r, f: setattr(r.counts, "hits", -1), "counts are impossible"),
]


@pytest.mark.parametrize(("corrupt", "message"), CORRUPTIONS)
def test_integrity_check_finds(corrupt: Callable[[Residency, Fetch], object], message: str) -> None:
    residency = make(4)
    run_layer(residency, 0, [0, 1])
    fetch = residency.fetch(7)
    assert fetch is not None
    residency.check_integrity()
    corrupt(residency, fetch)
    with pytest.raises(AssertionError, match=message):
        residency.check_integrity()


def test_views_are_live_and_read_only() -> None:
    residency = make(3)
    slots, experts, state = residency.slot_of_expert, residency.expert_of_slot, residency.state
    run_layer(residency, 1, [2])
    assert (slots[7], experts[0], state[0]) == (0, 7, USED)
    assert (slots.dtype, experts.dtype, state.dtype) == (np.int32, np.int32, np.uint8)
    for view in (slots, experts, state):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1


@pytest.mark.parametrize(
    ("experts", "message"), [([0, 0], "not distinct"), ([EXPERTS], "expert 5 of 5"), ([-1], "expert -1 of 5")]
)
def test_lookup_refuses_what_no_router_gives(experts: list[int], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        make(3).lookup(1, experts)


def test_load_refuses_what_has_a_slot() -> None:
    residency = make(4)
    run_layer(residency, 0, [0])
    fetch = residency.fetch(3)
    assert fetch is not None
    for flat in (0, 3):
        with pytest.raises(AssertionError, match="already has slot"):
            residency.load(flat)


@pytest.mark.parametrize(
    ("args", "message"),
    [((0, 1, 1), "num_slots must be at least 1, got 0"), ((1, 0, 1), "num_layers"), ((1, 1, -2), "num_experts")],
)
def test_impossible_sizes(args: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Residency(*args, LRU())


def test_reserve() -> None:
    assert [demand_reserve(64, 4, batch) for batch in (1, 3, 16, 100)] == [4, 12, 64, 64]
    residency = Residency(8, 2, 6, LRU())
    assert residency.reserve == 6 and residency.free_for_prefetch() == 2
    residency.reserve = 2
    assert residency.free_for_prefetch() == 6
    for wrong in (0, 7):
        with pytest.raises(ValueError, match=f"reserve must be 1 to num_experts=6, got {wrong}"):
            residency.reserve = wrong
    for flat in range(6):
        assert residency.fetch(flat) is not None
    with pytest.raises(AssertionError, match="prefetch holds 6 of 8"):
        residency.reserve = 3


def test_position_is_step_times_layers_plus_layer() -> None:
    residency = make(4)
    residency.lookup(1, [0])
    assert residency.position == 1 - LAYERS  # prefill lies before the first decode step
    for step in range(2):
        residency.begin_step()
        for layer in range(LAYERS):
            residency.lookup(layer, [])
            assert residency.position == step * LAYERS + layer
    residency.begin_step(100)
    assert residency.position == 100 * LAYERS


@pytest.mark.parametrize(
    ("missing", "resident", "room", "rounds"),
    [
        ([], [], 4, [[]]),
        ([1, 2], [5], 2, [[5, 1, 2]]),
        ([1, 2], [5, 6], 9, [[5, 6, 1, 2]]),
        ([1, 2, 3], [5, 6], 0, [[5, 6], [1, 2], [3]]),
        ([1, 2, 3, 4, 5], [], 2, [[1, 2], [3, 4], [5]]),
        ([1, 2, 3, 4], [9], 1, [[9, 1], [2, 3], [4]]),
    ],
)
def test_plan_rounds(missing: list[int], resident: list[int], room: int, rounds: list[list[int]]) -> None:
    assert plan_rounds(missing, resident, room) == rounds


def test_plan_rounds_without_any_slot() -> None:
    with pytest.raises(NoSlot, match="2 experts are needed and no slot is free"):
        plan_rounds([1, 2], [], 0)
