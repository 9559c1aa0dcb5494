"""Random operations on the slot-state machine, each compared with a naive model and followed by the integrity check."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from seqmoe.predictors.trace import Trace
from seqmoe.runtime.eviction import make_eviction
from seqmoe.runtime.eviction_forecast import ForecastEviction
from seqmoe.runtime.residency import Fetch, Residency, SlotState

LAYERS, EXPERTS, TOP_K = 3, 5, 2
EMPTY, USED, FETCH, COMPUTE = SlotState
POLICIES = ["lru", "lfu", "static", "belady", "belady-8", "forecast"]


class Restless(ForecastEviction):
    """With a forecast out of nothing at every step's start, sometimes one that is not of that step."""

    def touch(self, experts: Sequence[int], position: int) -> None:
        if position % LAYERS == 0:
            rng = np.random.default_rng(position + 1)
            self.update(rng.random((3, LAYERS, EXPERTS)).round(1), position // LAYERS + int(rng.integers(-1, 2)))
        super().touch(experts, position)


def small_trace() -> Trace:
    rng = random.Random(3)
    ids = np.array([[rng.sample(range(EXPERTS), TOP_K) for _ in range(LAYERS)] for _ in range(50)], dtype=np.int16)
    return Trace(ids, None, None, np.zeros(1, dtype=np.int64), np.array([50]), EXPERTS)


def make(num_slots: int, name: str) -> Residency:
    eviction = Restless(LAYERS, EXPERTS) if name == "forecast" else make_eviction(name, trace=small_trace())
    return Residency(num_slots, LAYERS, EXPERTS, eviction, reserve=TOP_K)


class Model:
    """What the tables should hold, kept in the dumbest way: one (state, expert, tag) per slot."""

    def __init__(self, num_slots: int, reserve: int) -> None:
        self.slots: list[tuple[SlotState, int, int]] = [(EMPTY, -1, 0)] * num_slots
        self.reserve = reserve
        self.ahead: set[int] = set()  # slots that landed and were neither looked up nor released

    def slot(self, expert: int) -> int:
        return next((i for i, (state, e, _) in enumerate(self.slots) if e == expert and state != EMPTY), -1)

    def of(self, *states: SlotState) -> list[int]:
        return [i for i, (state, _, _) in enumerate(self.slots) if state in states]

    def may_fetch(self, expert: int) -> bool:
        held = len(self.of(FETCH)) + len(self.ahead)
        return self.slot(expert) < 0 and bool(self.of(EMPTY, USED)) and held + 1 <= len(self.slots) - self.reserve

    def bind(self, fetch: Fetch, expert: int, state: SlotState) -> None:
        assert fetch.expert == expert
        empty = self.of(EMPTY)
        if empty:
            assert (fetch.slot, fetch.victim) == (empty[0], -1)
        else:
            assert self.slots[fetch.slot][:2] == (USED, fetch.victim)
        self.slots[fetch.slot] = (state, expert, fetch.tag)

    def set(self, slot: int, state: SlotState) -> None:
        _, expert, tag = self.slots[slot]
        self.slots[slot] = (EMPTY, -1, 0) if state == EMPTY else (state, expert, tag)
        self.ahead.discard(slot)

    def check(self, residency: Residency) -> None:
        assert residency.state.tolist() == [state for state, _, _ in self.slots]
        assert residency.expert_of_slot.tolist() == [expert for _, expert, _ in self.slots]
        expected = [-1] * (LAYERS * EXPERTS)
        for slot, (_, expert, _) in enumerate(self.slots):
            if expert >= 0:
                expected[expert] = slot
        assert residency.slot_of_expert.tolist() == expected
        residency.check_integrity()


def random_operations(policy: str, seed: int, count: int) -> None:
    """One layer at work at a time, as the engine does it, with prefetches of every fate in between."""
    rng = random.Random(seed)
    num_slots = rng.randint(TOP_K, 12)
    residency, model = make(num_slots, policy), Model(num_slots, TOP_K)
    tags: list[Fetch] = []
    ended = [0]  # tags that are over
    layer, working = 0, False
    pending: list[int] = []  # flat ids that the layer at work has yet to load
    loaded: list[Fetch] = []  # on-demand loads of the layer at work

    def end(fetch: Fetch) -> None:
        tags.remove(fetch)
        ended.append(fetch.tag)

    for _ in range(count):
        op = rng.choice(["layer", "layer", "load", "load", "fetch", "fetch", "land", "land", "drop", "fail", "fail load",
                         "orphan", "stale", "part", "clear"])  # fmt: skip
        if op == "layer" and not working:
            layer = (layer + 1) % LAYERS
            if layer == 0:
                residency.begin_step()
            experts = rng.sample(range(EXPERTS), TOP_K)
            found = residency.lookup(layer, experts)
            for index, slot in zip(experts, found.slots, strict=True):
                at = model.slot(layer * EXPERTS + index)
                assert slot == (at if at in model.of(USED, COMPUTE) else -1)
                if slot >= 0:
                    model.set(slot, COMPUTE)
            assert found.missing == [f for f in (layer * EXPERTS + i for i in experts) if model.slot(f) < 0]
            assert all(model.slots[f.slot] == (FETCH, f.expert, f.tag) for f in found.in_flight)
            pending, loaded, working = found.missing, [], True
            for fetch in found.in_flight:
                if rng.random() < 0.5:  # do not wait for it: load it elsewhere
                    assert residency.orphan(fetch.tag)
                    model.slots[fetch.slot] = (FETCH, -1, fetch.tag)
                    pending.append(fetch.expert)
        elif op == "layer" and not pending:
            residency.release(layer)
            for slot in model.of(COMPUTE):
                if model.slots[slot][1] // EXPERTS == layer:
                    model.set(slot, USED)
            loaded, working = [], False
        elif op == "load" and pending:
            flat = pending.pop()
            fetch = residency.load(flat)  # never NoSlot: that is what the reserve is for
            model.bind(fetch, flat, COMPUTE)
            loaded.append(fetch)
        elif op == "fail load" and loaded:
            fetch = loaded.pop()
            assert residency.fail(fetch)
            model.set(fetch.slot, EMPTY)
        elif op == "fetch":
            flat = rng.choice([f for f in range(LAYERS * EXPERTS) if f not in pending])
            allowed = model.may_fetch(flat)
            new = residency.fetch(flat)
            assert (new is not None) == allowed
            if new is not None:
                assert new.tag not in ended
                model.bind(new, flat, FETCH)
                tags.append(new)
        elif op in ("land", "drop", "fail") and tags:
            fetch = rng.choice(tags)
            orphan = model.slots[fetch.slot][1] < 0
            done = residency.fail(fetch) if op == "fail" else getattr(residency, op)(fetch.tag)
            assert done == (op != "land" or not orphan)
            model.set(fetch.slot, COMPUTE if op == "land" and not orphan else EMPTY)
            if op == "land" and not orphan:
                model.ahead.add(fetch.slot)
            end(fetch)
        elif op == "orphan" and tags and not working:
            fetch = rng.choice(tags)
            assert residency.orphan(fetch.tag) == (model.slots[fetch.slot][1] >= 0)
            model.slots[fetch.slot] = (FETCH, -1, fetch.tag)
        elif op == "stale":
            tag = rng.choice(ended)
            assert not residency.land(tag) and not residency.drop(tag) and not residency.orphan(tag)
        elif op == "part" and working and loaded:
            fetch = loaded.pop()
            residency.release(layer, [fetch.expert])
            model.set(fetch.slot, USED)
        elif op == "clear" and not working and rng.random() < 0.1:
            residency.clear()
            for slot in model.of(USED, COMPUTE):
                model.set(slot, EMPTY)
        model.check(residency)
    assert residency.counts.misses and (residency.counts.hits or num_slots < 4)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_random_operations(policy: str, seed: int) -> None:
    random_operations(policy, seed, 1500)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_many_random_operations(policy: str) -> None:
    for seed in range(100, 200 if policy == "forecast" else 125):
        random_operations(policy, seed, 2000)
