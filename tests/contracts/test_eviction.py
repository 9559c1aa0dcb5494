"""What every eviction must keep, whoever drives it. A new one is tested by inheriting `EvictionContract`."""

import itertools
import random
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmoe.predictors.trace import Trace
from seqmoe.profiles.errors import UsageError
from seqmoe.runtime.eviction import LFU, LRU, NEVER, Belady, Eviction, Static, make_eviction
from seqmoe.runtime.replay_counts import replay

LAYERS, EXPERTS, TOP_K = 4, 8, 2
TOTAL = LAYERS * EXPERTS


def make_trace(choices: list[list[list[int]]], num_experts: int) -> Trace:
    """`choices` [steps][layers][k] as one sequence."""
    ids = np.array(choices, dtype=np.int16)
    return Trace(ids, None, None, np.zeros(1, dtype=np.int64), np.array([len(ids)]), num_experts)


def random_trace(rng: random.Random, steps: int, layers: int, experts: int, top_k: int) -> Trace:
    """Skewed choices, so that popularity and recency carry something."""
    choices = []
    for _ in range(steps):
        step = []
        for _ in range(layers):
            chosen: list[int] = []
            while len(chosen) < top_k:
                expert = min(int(rng.expovariate(3.0 / experts)), experts - 1)
                if expert not in chosen:
                    chosen.append(expert)
            step.append(chosen)
        choices.append(step)
    return make_trace(choices, experts)


class Model:
    """The naive version that each eviction is compared with: a list of candidates and the history of all calls."""

    def __init__(self) -> None:
        self.candidates: list[tuple[int, int]] = []  # (expert, position of release), least recent first
        self.touches: list[tuple[int, int]] = []  # (expert, position)

    def touch(self, experts: list[int], position: int) -> None:
        self.touches += [(expert, position) for expert in experts]
        self.candidates = [(e, p) for e, p in self.candidates if e not in experts]

    def release(self, experts: list[int], position: int) -> None:
        self.candidates += [(expert, position) for expert in experts]


class EvictionContract:
    """`make` gives a fresh order; `rank` says from the history alone what leaves first: the least, then least recent."""

    trace = random_trace(random.Random(7), 80, LAYERS, EXPERTS, TOP_K)

    def make(self) -> Eviction:
        raise NotImplementedError

    def rank(self, model: Model, expert: int, position: int) -> float:
        raise NotImplementedError

    def naive_victim(self, model: Model) -> int:
        best = min(range(len(model.candidates)), key=lambda i: (self.rank(model, *model.candidates[i]), i))
        return model.candidates[best][0]

    @pytest.mark.parametrize("seed", range(3))
    def test_chooses_as_the_naive_version(self, seed: int) -> None:
        rng = random.Random(seed)
        eviction, model = self.make(), Model()
        in_use: set[int] = set()
        for row in range(self.trace.num_steps):
            for layer in range(LAYERS):
                position = row * LAYERS + layer
                routed = [layer * EXPERTS + e for e in self.trace.expert_ids[row, layer].tolist()]
                eviction.touch(routed, position)
                model.touch(routed, position)
                in_use.update(routed)
                for expert in rng.sample(range(TOTAL), 2):  # as prefetches that nobody looked up
                    if expert not in in_use and expert not in [e for e, _ in model.candidates]:
                        in_use.add(expert)
                while model.candidates and rng.random() < 0.5:
                    expected = self.naive_victim(model)
                    assert eviction.victim() == expected
                    model.candidates = [(e, p) for e, p in model.candidates if e != expected]
                done = [e for e in sorted(in_use) if rng.random() < 0.8]
                eviction.release(done, position)
                model.release(done, position)
                in_use.difference_update(done)
                assert len(eviction) == len(model.candidates)  # type: ignore[arg-type]

    def test_each_candidate_leaves_once(self) -> None:
        eviction = self.make()
        eviction.release(list(range(TOTAL)), 0)
        eviction.touch([3, 4, 5], 0)
        left = [eviction.victim() for _ in range(TOTAL - 3)]
        assert sorted(left) == [e for e in range(TOTAL) if e not in (3, 4, 5)]

    def test_what_is_in_use_is_never_chosen(self) -> None:
        eviction = self.make()
        eviction.release([0, 1], 0)
        eviction.touch([0], 1)
        assert eviction.victim() == 1
        eviction.release([0], 1)
        assert eviction.victim() == 0

    def test_touching_what_is_not_there_is_harmless(self) -> None:
        eviction = self.make()
        eviction.touch([9, 10], 0)
        eviction.release([2], 0)
        eviction.touch([9], 1)
        assert eviction.victim() == 2

    def test_same_calls_same_choice(self) -> None:
        first, second = self.make(), self.make()
        for eviction in (first, second):
            for row in range(20):
                routed = self.trace.expert_ids[row, 0].tolist()
                eviction.touch(routed, row * LAYERS)
                eviction.release(routed, row * LAYERS)
        count = len(first)  # type: ignore[arg-type]
        assert [first.victim() for _ in range(count)] == [second.victim() for _ in range(count)]


class TestLRU(EvictionContract):
    def make(self) -> Eviction:
        return LRU()

    def rank(self, model: Model, expert: int, position: int) -> float:
        return 0.0  # recency alone


class TestLFU(EvictionContract):
    def make(self) -> Eviction:
        return LFU()

    def rank(self, model: Model, expert: int, position: int) -> float:
        return sum(e == expert for e, _ in model.touches)

    def test_count_survives_eviction(self) -> None:
        eviction = LFU()
        for position in range(3):
            eviction.touch([0], position)
        eviction.release([0], 2)
        assert eviction.victim() == 0
        eviction.touch([1], 3)
        eviction.release([0, 1], 3)  # 0 comes back, say by prefetch: its three uses are remembered
        assert eviction.victim() == 1


class TestStatic(EvictionContract):
    def make(self) -> Eviction:
        return make_eviction("static", trace=self.trace)

    def rank(self, model: Model, expert: int, position: int) -> float:
        counts = self.trace.popularity()
        return float(counts[expert]) + 1e-6 * (TOTAL - expert)  # of equals the higher flat id leaves first

    def test_order_is_by_popularity(self) -> None:
        eviction = Static([1.0, 5.0, 3.0, 5.0])
        assert eviction.order == [1, 3, 2, 0]
        eviction.release([0, 1, 2, 3], 0)
        assert [eviction.victim() for _ in range(4)] == [0, 2, 3, 1]


class TestBelady(EvictionContract):
    def make(self) -> Eviction:
        return Belady(self.trace)

    def rank(self, model: Model, expert: int, position: int) -> float:
        layer, index = divmod(expert, EXPERTS)
        rows = np.flatnonzero((self.trace.expert_ids[:, layer] == index).any(axis=1))
        after = [int(row) * LAYERS + layer for row in rows if int(row) * LAYERS + layer > position]
        return -(after[0] if after else NEVER)

    def test_next_use(self) -> None:
        eviction = Belady(make_trace([[[0], [1]], [[1], [1]], [[0], [0]]], 2))
        # positions: step * 2 + layer; flat 0 at 0 and 4, flat 1 at 2, flat 2 at 5, flat 3 at 1 and 3
        assert [eviction.next_use(0, p) for p in (-1, 0, 3, 4)] == [0, 4, 4, NEVER]
        assert [eviction.next_use(3, p) for p in (0, 1, 2, 3)] == [1, 3, 3, NEVER]
        assert [eviction.next_use(e, -1) for e in (1, 2)] == [2, 5]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), layers=st.integers(1, 3), top_k=st.integers(1, 3), spare=st.integers(0, 8))
def test_belady_misses_least(seed: int, layers: int, top_k: int, spare: int) -> None:
    trace = random_trace(random.Random(seed), 60, layers, 6, top_k)
    misses = {name: replay(trace, top_k + spare, name).misses for name in ("lru", "lfu", "static", "belady")}
    assert misses["belady"] == min(misses.values()), misses


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), top_k=st.integers(1, 2), slots=st.integers(2, 4))
def test_belady_equals_brute_force(seed: int, top_k: int, slots: int) -> None:
    """Against every possible sequence of evictions, under our rule that a layer's routed residents stay."""
    trace = random_trace(random.Random(seed), 8, 2, 3, top_k)
    best: dict[frozenset[int], int] = {frozenset(): 0}  # resident set -> fewest misses that lead to it
    for needed in (set(row) for step in trace.flat_ids().tolist() for row in step):
        after: dict[frozenset[int], int] = {}
        for resident, misses in best.items():
            others = resident - needed
            cost = misses + len(needed - resident)
            for kept in itertools.combinations(sorted(others), min(len(others), slots - len(needed))):
                state = frozenset(needed.union(kept))
                after[state] = min(after.get(state, cost), cost)
        best = after
    assert replay(trace, slots, "belady").misses == min(best.values())


@pytest.mark.parametrize("name", ["lru", "lfu", "static", "belady"])
def test_choice_does_not_slow_down_with_candidates(name: str) -> None:
    trace = random_trace(random.Random(0), 10, 1, 30000, 4)

    def per_victim(count: int) -> float:
        best = float("inf")
        for _ in range(7):
            eviction = make_eviction(name, trace=trace)
            eviction.release(random.Random(1).sample(range(30000), count), 0)
            start = time.thread_time()
            for _ in range(200):
                eviction.release([eviction.victim()], 0)
            best = min(best, time.thread_time() - start)
        return best

    assert per_victim(30000) < 60 * per_victim(30)  # a linear search would take 1000 times as long


@pytest.mark.parametrize("name", ["lfu", "static", "belady"])
def test_memory_stays_with_the_candidates(name: str) -> None:
    trace = random_trace(random.Random(0), 10, 1, 100, 4)
    eviction = make_eviction(name, trace=trace)
    for position in range(5000):
        eviction.touch([1, 2, 3], position)
        eviction.release([1, 2, 3], position)
    assert len(eviction._heap) < 200  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_eviction("lur"), "unknown eviction 'lur': did you mean 'lru'?"),
        (lambda: make_eviction("random"), "unknown eviction 'random': known are lru, lfu, static, belady"),
        (lambda: make_eviction("static"), "eviction 'static' needs the experts' popularity"),
        (lambda: make_eviction("belady"), "eviction 'belady' needs the trace"),
        (lambda: Static(np.array([1.0, np.nan])), r"popularity\[1\] is nan, must be finite"),
        (lambda: Static(np.zeros((2, 2))), r"popularity must have shape \[layers \* experts\], got \[2, 2\]"),
        (lambda: Static([]), r"popularity must have shape"),
    ],
)
def test_bad_input_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()
