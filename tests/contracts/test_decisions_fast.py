"""The compiled decisions against the pure ones: the same victims, jobs and figures to the last bit, ties included."""

import random
from functools import partial

import numpy as np
import pytest

from seqmoe.runtime.control import JOB_EPOCH, pack_jobs
from seqmoe.runtime.eviction_fast import FastForecastEviction
from seqmoe.runtime.eviction_forecast import (
    ForecastEviction,
    Rule,
    expected_worth,
    first_use_worth,
    hard_worth,
)
from seqmoe.runtime.residency import Residency
from seqmoe.runtime.schedule import ORDERS, Admission, Scheduler, make_jobs
from seqmoe.runtime.schedule_fast import FastScheduler, JobMaker, best_of_row

RULES: dict[str, Rule] = {
    "expected": expected_worth,
    "first-use": first_use_worth,
    "hard": partial(hard_worth, k=2),
    "own": lambda scores, first, rows, discount: 2.0 * expected_worth(scores, first, rows, discount),
}


def forecast(rng: random.Random, layers: int, experts: int, rows: int) -> np.ndarray:
    """Half of them full of ties; of any floating type, any strides."""
    scores = np.random.default_rng(rng.randrange(1 << 30)).random((rows, layers, experts))
    if rng.random() < 0.5:
        scores = np.round(scores * 4) / 4
    scores = scores.astype(rng.choice([np.float32, np.float32, np.float16, np.float64]))
    if rng.random() < 0.2:
        scores = np.asfortranarray(scores)
    scores.flags.writeable = rng.random() < 0.5
    return scores


def same(plain: ForecastEviction, fast: FastForecastEviction) -> None:
    assert np.array_equal(plain.worth, fast.worth)
    assert plain.peek() == fast.peek() and len(plain) == len(fast)
    a, b = plain.admission(), fast.admission()
    assert (a is None) == (b is None)
    if a is not None and b is not None:
        assert (a.floor, a.next_use, a.chance) == (b.floor, b.next_use, b.chance)
        assert type(b.floor) is type(b.chance) is float and type(b.next_use) is int
        assert np.array_equal(a.worth, b.worth)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(6))
def test_the_compiled_eviction_is_equal(rule: str, seed: int):
    rng = random.Random(f"{rule} {seed}")
    layers, experts = rng.choice([(3, 4), (1, 3), (5, 8), (2, 1)])
    options = {
        "rule": RULES[rule],
        "horizon": rng.choice([1, 2, 8]),
        "discount": rng.choice([0.0, 0.5, 0.7, 1.0]),
        "by_position": rng.random() < 0.7,
    }
    plain = ForecastEviction(layers, experts, **options)
    fast = FastForecastEviction(layers, experts, **options)
    both = (plain, fast)
    candidates: set[int] = set()
    position, step = -layers, 0
    for _ in range(600):
        action = rng.random()
        if action < 0.15:
            scores = forecast(rng, layers, experts, rng.choice([1, 2, 3, 9]))
            step = position // layers + rng.choice([-1, 0, 0, 1, 1])
            for one in both:
                one.update(scores, step)
        elif action < 0.45:
            position += rng.choice([0, 1, 1, 1, 2])
            routed = rng.sample(range(layers * experts), rng.randint(0, min(4, layers * experts)))
            for one in both:
                one.touch(routed, position)
            candidates.difference_update(routed)
        elif action < 0.75:
            rest = [e for e in range(layers * experts) if e not in candidates]
            released = rng.sample(rest, rng.randint(0, min(5, len(rest))))
            for one in both:
                one.release(released, position)
            candidates.update(released)
        elif candidates:
            victim = plain.victim()
            assert fast.victim() == victim
            candidates.remove(victim)
        same(plain, fast)
        assert len(fast) == len(candidates)
        assert [plain.next_use(e) for e in range(layers * experts)] == [
            fast.next_use(e) for e in range(layers * experts)
        ]


def test_worth_is_a_snapshot():
    fast = FastForecastEviction(2, 2)
    fast.release([0, 1, 2], -1)
    scores = np.full((3, 2, 2), 0.5, dtype=np.float32)
    fast.update(scores, 0)
    for change in (partial(fast.touch, [0], 0), partial(fast.update, scores / 2, 0)):
        admission = fast.admission()
        assert admission is not None
        before = np.array(admission.worth)
        change()
        assert np.array_equal(admission.worth, before) and not np.array_equal(fast.worth, before)


def test_garbage_does_not_break_it():
    for rule in RULES.values():
        plain, fast = (kind(2, 3, rule=rule) for kind in (ForecastEviction, FastForecastEviction))
        scores = np.full((3, 2, 3), 0.5, dtype=np.float32)
        scores[0, 1, 1] = scores[1, 0, 2] = np.nan
        for one in (plain, fast):
            one.release([1, 2, 4, 5], -1)
            one.update(scores, 0)
            one.touch([], 0)
        assert np.array_equal(plain.worth, fast.worth, equal_nan=True)
        assert [plain.victim() for _ in range(4)] == [fast.victim() for _ in range(4)]
        assert fast.peek() == -1
        with pytest.raises(AssertionError, match="no candidate"):
            fast.victim()


def use_pool(eviction: ForecastEviction, seed: int) -> list[object]:
    """What a residency does with an eviction in 2,000 random operations."""
    rng = random.Random(seed)
    layers, experts = 3, 6
    residency = Residency(9, layers, experts, eviction, reserve=2)
    log: list[object] = []
    for step in range(150):
        eviction.update(forecast(rng, layers, experts, 3), step)
        residency.begin_step(step)
        for layer in range(layers):
            found = residency.lookup(layer, rng.sample(range(experts), 2))
            log.append(found)
            for fetch in found.in_flight:
                residency.land(fetch.tag)
            log += [residency.load(expert) for expert in found.missing]
            for expert in rng.sample(range(layers * experts), 2):
                log.append(residency.fetch(expert))
            for fetch in residency.in_flight:
                if rng.random() < 0.6:
                    rng.choice([residency.land, residency.drop, residency.orphan])(fetch.tag)
            residency.release(layer)
            residency.check_integrity()
        if rng.random() < 0.02:
            rng.choice([residency.clear, residency.forget])()
            residency.check_integrity()
    return [*log, residency.counts]


@pytest.mark.parametrize("rule", RULES)
def test_it_serves_a_residency(rule: str):
    for seed in range(3):
        logs = [use_pool(kind(3, 6, rule=RULES[rule]), seed) for kind in (ForecastEviction, FastForecastEviction)]
        assert logs[0] == logs[1]


def test_best_of_row():
    rng = np.random.default_rng(0)
    for _ in range(500):
        row = np.round(rng.random(rng.integers(1, 20)), 1).astype(np.float32)
        row[rng.random(len(row)) < 0.1] = np.nan
        k = int(rng.integers(0, len(row) + 1))
        best = np.zeros(k, dtype=np.int64)
        assert best_of_row(row, k, best) == k
        assert best.tolist() == np.argsort(-row, kind="stable")[:k].tolist()


def state(scheduler: Scheduler) -> tuple[object, ...]:
    return scheduler.jobs, len(scheduler), scheduler.budget_avg, scheduler.budget_now, scheduler.sent


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(4))
def test_jobs_of_a_forecast_are_equal(order: str, seed: int):
    rng = random.Random(f"{order} {seed}")
    layers, experts = rng.choice([(3, 5), (6, 8), (2, 4), (24, 32)])
    options = {"order": order, "budget": rng.choice([0.4, 1.39, 3.0]), "m_max": rng.choice([2, 1 << 30])}
    plain, fast = Scheduler(layers, **options), FastScheduler(layers, **options)
    maker = JobMaker(layers, experts)
    slot_of = np.full(layers * experts, -1, dtype=np.int32)
    seen = slot_of.view()
    seen.flags.writeable = False  # as Residency shows it
    sent = 0
    for position in range(250):
        for one in (plain, fast):
            one.advance(position)
        if rng.random() < 0.3:
            slot_of[:] = [rng.choice([-1, -1, 7]) for _ in slot_of]
            scores = forecast(rng, layers, experts, rng.choice([1, 2, 3]))
            step = position // layers + rng.choice([0, 0, 1])
            choice = {
                "k_prime": rng.choice([1, 3, experts, experts + 3]),
                "steps": rng.choice([1, 2, 5]),
                "lead": rng.choice([0, 1, 2]),
                "least": rng.choice([0.0, 0, 0.25, 0.5]),
            }
            made = make_jobs(scores, step, position, seen, **choice)
            block = maker.make(scores, step, position, seen, **choice)
            assert np.array_equal(block[:, :JOB_EPOCH], pack_jobs(made)[:, :JOB_EPOCH])
            plain.offer_scores(scores, step, position, seen, **choice)
            if rng.random() < 0.5:
                fast.offer_scores(scores, step, position, seen, **choice)
            else:
                fast.offer_block(block)
            assert fast.jobs == made
        elif rng.random() < 0.1:  # beside it, jobs as they were
            jobs = rng.sample(fast.jobs, min(3, len(fast)))
            replace = rng.random() < 0.3
            for one in (plain, fast):
                one.offer(jobs, replace=replace)
        elif rng.random() < 0.05:
            for one in (plain, fast):
                one.clear()
        for expert in rng.sample(range(layers * experts), 2):
            slot_of[expert] = rng.choice([-1, 7])
        for _ in range(rng.randint(0, 4)):
            admission = None
            if rng.random() < 0.5:
                worth = np.round(np.random.default_rng(position).random(layers * experts), 1)
                admission = Admission(worth, rng.randint(0, 4) / 10, position + rng.randint(1, 9), rng.random())
            job = plain.next(seen, admission)
            assert fast.next(seen, admission) == job
            sent += job is not None
        assert state(plain) == state(fast)
    assert sent > 20


def test_a_forecast_with_nan_makes_the_same_jobs():
    plain, fast = Scheduler(1, order="first-come"), FastScheduler(1, order="first-come")
    scores = np.array([[[0.5, np.nan, 0.7, 0.1]]], dtype=np.float32)
    for one in (plain, fast):
        one.offer_scores(scores, 3, 0, np.full(4, -1, dtype=np.int32), k_prime=4)
    assert [job.expert for job in plain.jobs] == [job.expert for job in fast.jobs] == [2, 0, 3, 1]


def test_warm_up_changes_nothing():
    scores = forecast(random.Random(0), 2, 3, 2)
    scheduler, eviction = FastScheduler(2, order="infinity", budget=2.0), FastForecastEviction(2, 3)
    before = state(scheduler)
    scheduler.warm_up(scores, np.full(6, -1, dtype=np.int32))
    eviction.warm_up(scores)
    assert state(scheduler) == before and scheduler.position == -1
    assert not eviction.worth.any() and len(eviction) == 0
