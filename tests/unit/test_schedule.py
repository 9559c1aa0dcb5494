"""The scheduler: the worked case, brute force, budgets, and the compiled one's equality."""

import itertools
import random

import numpy as np
import pytest

from seqmoe.profiles.errors import UsageError
from seqmoe.runtime.schedule import (
    ORDERS,
    Admission,
    FetchJob,
    Scheduler,
    capacity,
    infinity_score,
    make_jobs,
    select,
)  # fmt: skip
from seqmoe.runtime.schedule_fast import FastScheduler

NAMES = "ABCDEF"
GOLDEN = [
    FetchJob(expert, deadline, confidence)
    for expert, (deadline, confidence) in enumerate([(1, 0.55), (2, 0.9), (2, 0.4), (3, 0.75), (3, 0.7), (3, 0.3)])
]
CAPACITIES = {1: 1, 2: 3, 3: 4}


def names(jobs: list[FetchJob]) -> set[str]:
    return {NAMES[job.expert] for job in jobs}


def sent(order: str) -> set[str]:
    """What an order sends in the golden case: transfer n leaves in time for deadlines d with C(d) >= n."""
    scheduler = Scheduler(24, order=order)
    left, done = list(GOLDEN), []
    for n in range(1, CAPACITIES[3] + 1):
        scheduler.position, scheduler.lead = 0, 0
        scheduler.offer([job for job in left if CAPACITIES[job.deadline] >= n])
        job = scheduler.next([-1] * 6)
        assert job is not None
        left.remove(job)
        done.append(job)
    return names(done)


def test_golden_case():
    assert names(select(GOLDEN, CAPACITIES.__getitem__)) == set("ABDE")
    assert sent("infinity") == set("BDEF")
    assert sent("promoe") == set("ABCD")
    assert infinity_score(FetchJob(0, 5, 0.8), 3, 3) == pytest.approx(0.8 * (1 - 2 / 4))


def brute_force(jobs: list[FetchJob], room: dict[int, float]) -> float:
    best = 0.0
    for size in range(len(jobs) + 1):
        for chosen in itertools.combinations(jobs, size):
            if all(sum(job.deadline <= d for job in chosen) <= room[d] for d in room):
                best = max(best, sum(job.confidence for job in chosen))
    return best


def test_greedy_is_optimal():
    rng = random.Random(0)
    for _ in range(300):
        jobs = [FetchJob(i, rng.randint(2, 6), rng.random()) for i in range(rng.randint(1, 9))]
        now, avg = rng.choice([-1.0, 0.4, 1.4, 3.0]), rng.choice([0.2, 0.7, 1.39])
        room = {d: capacity(d, 0, now, avg) for d in range(2, 7)}
        chosen = select(jobs, room.__getitem__)
        assert all(sum(job.deadline <= d for job in chosen) <= room[d] for d in room)
        assert sum(job.confidence for job in chosen) == pytest.approx(brute_force(jobs, room))


def test_it_sends_the_most_urgent_of_the_best_set():
    scheduler = Scheduler(24, budget=1.0)
    scheduler.advance(0)
    scheduler.offer([FetchJob(1, 2, 0.1), FetchJob(2, 3, 0.9), FetchJob(3, 3, 0.8), FetchJob(4, 1, 0.99)])
    free = [-1] * 8
    # job 4 is due in the next layer: too late. C(2) = 2 and C(3) = 3, so that all others fit
    assert scheduler.next(free) == FetchJob(1, 2, 0.1)
    assert scheduler.budget_now == 0.0
    assert scheduler.next(free) == FetchJob(2, 3, 0.9)
    free[3] = 5  # has come in meanwhile
    assert scheduler.next(free) is None and len(scheduler) == 0


def test_a_job_that_cannot_make_it_gives_way():
    scheduler = Scheduler(24, budget=0.25)
    scheduler.advance(0)
    scheduler.offer([FetchJob(1, 2, 0.3), FetchJob(2, 4, 0.9)])  # C(4) = 1.75: one of them
    assert scheduler.next([-1] * 4) == FetchJob(2, 4, 0.9)


def test_admission():
    worth = [0.5, 0.2, 0.3, 0.9]
    admission = Admission(worth, 0.3, next_use=5, chance=0.4)
    assert admission.admits(FetchJob(0, 5, 0.1))  # not used before 5
    assert not admission.admits(FetchJob(0, 6, 0.3))  # the victim is likelier, and sooner
    assert admission.admits(FetchJob(0, 6, 0.4))
    assert not admission.admits(FetchJob(2, 2, 0.9))  # worth no more than the victim
    scheduler = Scheduler(24)
    scheduler.advance(0)
    scheduler.offer([FetchJob(1, 2, 0.9), FetchJob(3, 3, 0.5)])
    assert scheduler.next([-1] * 4, admission) == FetchJob(3, 3, 0.5)
    assert scheduler.next([-1] * 4, admission) is None and scheduler.jobs == [FetchJob(1, 2, 0.9)]  # it waits


def run_link(scheduler: Scheduler, first: int, layers: int, ratio: float, starve: bool = False) -> list[float]:
    """budget_avg by layer with a link that takes `ratio` of a layer for a transfer and always has jobs, or with `starve`
    none in every second layer."""
    seen, free_at = [], float(first)
    for position in range(first, first + layers):
        scheduler.advance(position)
        idle = starve and position % 2 == 0
        scheduler.offer([] if idle else [FetchJob(i, position + 2 + i // 40, 0.5) for i in range(80)])
        free_at = max(free_at, float(position))
        while free_at < position + 1:
            if scheduler.next([-1] * 80) is None:
                break
            free_at += ratio
        seen.append(scheduler.budget_avg)
    return seen


def test_the_budget_adapts_and_does_not_run_away():
    scheduler = Scheduler(24, budget=1 / 0.72)
    assert run_link(scheduler, 0, 200, 0.72)[-1] == pytest.approx(1 / 0.72, rel=0.1)
    slow = run_link(scheduler, 200, 50, 7.2)
    assert slow[-1] == pytest.approx(1 / 7.2, abs=0.08), "a link ten times slower: within 50 layers"
    fast = run_link(scheduler, 250, 50, 0.72)
    assert fast[-1] == pytest.approx(1 / 0.72, rel=0.1)
    idle = run_link(scheduler, 300, 200, 0.72, starve=True)
    # layers with nothing to send do not count; the others begin two transfers each, on a link that has rested
    assert min(idle) > 1.3 and max(idle) <= 2.0


def test_the_printed_form_runs_away():
    scheduler = Scheduler(24, budget=1.39, printed_form=True, ema_alpha=0.1)
    position = 0
    for position in range(100):  # an idle half, whose layers the paper counts
        scheduler.advance(position)
        if position % 2:
            scheduler.budget_now -= 1.39
    assert scheduler.budget_avg > 5


def test_paused_layers_do_not_count():
    scheduler = Scheduler(24, budget=2.0)
    scheduler.advance(0)
    scheduler.pause()
    scheduler.advance(1)
    assert scheduler.budget_avg == 2.0
    scheduler.advance(2)  # this one had nothing sent and was not paused: the link was slow
    assert scheduler.budget_avg == pytest.approx(1.8)
    scheduler.advance(5)
    assert scheduler.budget_avg == pytest.approx(1.62)
    with pytest.raises(ValueError, match="ascend"):
        scheduler.advance(5)


def test_m_max_limits_a_layer():
    scheduler = Scheduler(24, order="window", m_max=2, lead=0)
    scheduler.advance(3)
    scheduler.offer([FetchJob(i, 4, 0.1 * i) for i in range(5)])
    chosen = [scheduler.next([-1] * 5) for _ in range(3)]
    assert chosen == [FetchJob(4, 4, 0.4), FetchJob(3, 4, 0.1 * 3), None]
    scheduler.advance(4)
    assert scheduler.next([-1] * 5) is None, "those of the next layer are too late now"


def test_make_jobs():
    scores = np.array([[[0.9, 0.5, 0.5, 0.1], [0.2, 0.8, 0.7, 0.3]], [[0.6, 0.9, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]])
    slot_of = [-1] * 8
    slot_of[5] = 3
    jobs = make_jobs(scores, 10, 19, slot_of, k_prime=2, lead=0, steps=2)
    # layer 1's best has a slot; expert 0 has an earlier job; nothing is fetched that is forecast not to be used
    assert jobs == [FetchJob(0, 20, 0.9), FetchJob(1, 20, 0.5), FetchJob(6, 21, 0.7)]
    jobs = make_jobs(scores, 10, 20, slot_of, k_prime=3, lead=0, steps=2)
    assert [(job.expert, job.deadline) for job in jobs] == [(6, 21), (7, 21), (1, 22), (0, 22), (2, 22)]
    assert make_jobs(scores, 10, 20, slot_of, k_prime=3, lead=1, steps=1) == []


def test_unknown_order():
    with pytest.raises(UsageError, match="did you mean 'promoe'"):
        Scheduler(4, order="promo")


def test_the_compiled_scheduler_is_equal():
    rng = random.Random(1)
    for case in range(150):
        options = {
            "order": ORDERS[case % len(ORDERS)],
            "budget": rng.choice([0.3, 1.39]),
            "lead": rng.randint(0, 2),
            "m_max": rng.choice([2, 1 << 30]),
            "printed_form": rng.random() < 0.2,
        }
        plain, fast = Scheduler(6, **options), FastScheduler(6, **options)
        slot_of = np.full(40, -1, dtype=np.int32)
        for position in range(rng.randint(0, 3), 30):
            for one in (plain, fast):
                one.advance(position)
            if rng.random() < 0.4:
                jobs = [
                    FetchJob(rng.randrange(40), position + rng.randint(0, 12), rng.randint(0, 9) / 9)
                    for _ in range(rng.choice([3, 30, 700 if case == 0 else 40]))
                ]
                replace = rng.random() < 0.6
                for one in (plain, fast):
                    one.offer(jobs, replace=replace)
            if rng.random() < 0.1:
                for one in (plain, fast):
                    one.pause()
            slot_of[rng.randrange(40)] = rng.choice([-1, 2])
            for _ in range(rng.randint(0, 4)):
                worth = np.array([rng.randint(0, 5) / 5 for _ in range(40)])
                admission = None
                if rng.random() < 0.5:
                    admission = Admission(worth, rng.randint(0, 4) / 5, position + rng.randint(1, 9), rng.random())
                assert plain.next(slot_of, admission) == fast.next(slot_of, admission)
                assert (plain.budget_avg, plain.budget_now, plain.sent) == (
                    fast.budget_avg, fast.budget_now, fast.sent,
                )  # fmt: skip
            assert plain.jobs == fast.jobs and len(plain) == len(fast)
