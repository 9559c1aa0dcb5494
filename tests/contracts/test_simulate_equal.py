"""The compiled simulator equals the plain one on random small cases: counts, fetch lists, times, budgets."""

from dataclasses import replace

import numpy as np
import pytest
from support.toy_traces import random_trace

from seqmoe.autotune.simulate import simulate_reference
from seqmoe.autotune.simulate_fast import simulate_fast
from seqmoe.autotune.simulate_plan import Inputs, Outcome, Timing
from seqmoe.predictors.forecast import to_inclusion
from seqmoe.predictors.trace_forecasts import TraceForecasts, perfect_forecasts
from seqmoe.runtime.policy import BY_FORECAST, EVICTIONS, Plan
from seqmoe.runtime.restraint import Level, Restraints
from seqmoe.runtime.schedule import ORDERS

LENGTHS = [9, 14, 2, 11]
COUNTS = ("hits", "misses", "late", "useful", "wasted")


HASTY = Restraints(memory=3, settle=1, window=3, pause=2, longest_pause=8, margin=0.0, price=1.0, change=1.1)


def inputs_of(seed: int, horizon: int = 4, quality: float = 0.6) -> Inputs:
    """A random trace, and forecasts that are right about as often as `quality` says. Ties are common: scores are rounded."""
    rng = np.random.default_rng(seed)
    layers, experts, k = int(rng.integers(1, 6)), int(rng.integers(4, 9)), int(rng.integers(1, 4))
    trace = random_trace(LENGTHS, layers, experts, k, seed)
    truth = perfect_forecasts(trace, horizon).start.astype(np.float32)

    def noisy() -> np.ndarray:
        mixed = np.round(quality * truth + rng.random(truth.shape), 1) + 1e-3
        return to_inclusion(mixed / mixed.sum(-1, keepdims=True), k).astype(np.float16)

    layer_scores = rng.random((trace.num_steps, layers, experts)).astype(np.float32)
    popularity = rng.integers(0, 50, layers * experts)
    return Inputs(trace, TraceForecasts(noisy(), noisy()), popularity, layer_scores)


def plan_of(seed: int) -> Plan:
    rng = np.random.default_rng(seed)
    eviction = str(rng.choice(EVICTIONS))
    order = None if eviction == "none" or rng.random() < 0.2 else str(rng.choice(ORDERS))
    if order and eviction.startswith("belady"):
        order = None  # they know what is needed, not what is fetched
    return Plan(
        eviction=eviction,
        order=order,
        admission=eviction in BY_FORECAST and bool(rng.random() < 0.7),
        k_prime=int(rng.integers(1, 7)),
        job_steps=int(rng.integers(1, 4)),
        horizon=int(rng.integers(1, 5)),
        discount=float(rng.choice([0.3, 0.5, 1.0])),
        by_position=bool(rng.random() < 0.5),
        ema_alpha=float(rng.choice([0.05, 0.3, 1.0])),
        lead=int(rng.integers(0, 3)),
        m_max=int(rng.choice([1, 2, 1 << 30])),
        least=float(rng.choice([0.0, 0.3])),
        printed_form=bool(rng.random() < 0.2),
        after=bool(rng.random() < 0.6),
    )


def same(fast: Outcome, plain: Outcome) -> None:
    assert fast.log == plain.log
    for name in (*COUNTS, "steps", "prefetched", "named", "ready", "ahead", "time", "full_time"):
        assert np.array_equal(getattr(fast, name), getattr(plain, name)), name
    assert fast.budget == plain.budget
    assert fast.levels == plain.levels


def compare(seed: int, plan: Plan | None = None, forecast: float = 0.3) -> Outcome:
    inputs, plan, rng = inputs_of(seed), plan or plan_of(seed), np.random.default_rng(seed)
    trace = inputs.trace
    total = trace.num_layers * trace.num_experts
    slots = int(rng.integers(trace.top_k, total + 2))
    layer_times = tuple(rng.choice([0.5, 1.0, 1.7], trace.num_layers).tolist())
    times = float(rng.choice([0.2, 0.5, 0.72, 1.0, 4.0])), float(rng.choice([0.0, forecast]))
    timing = Timing(layer_times, *times, expert=float(rng.choice([0.0, 0.15])))
    plain = simulate_reference(inputs, plan, timing, slots, HASTY)
    same(simulate_fast(inputs, plan, timing, slots, log_size=1 << 14, restraints=HASTY), plain)
    return plain


@pytest.mark.parametrize("part", range(4))
def test_equal_on_random_cases(part: int) -> None:
    outcomes = [compare(seed) for seed in range(40 * part, 40 * part + 40)]
    for name in (*COUNTS, "prefetched", "named", "ready"):  # every kind of event was there
        assert sum(int(getattr(one, name).sum()) for one in outcomes) > 20, name


@pytest.mark.parametrize("part", range(3))
def test_equal_with_restraint(part: int) -> None:
    outcomes = []
    for seed in range(500 + 30 * part, 530 + 30 * part):
        given = plan_of(seed)
        plan = replace(
            given, eviction=["expected", "first-use", "hard"][seed % 3], order=given.order or "joint", restraint=True
        )
        outcomes.append(compare(seed, plan, forecast=2.0))
    changes = [change for one in outcomes for change in one.levels]
    for level in Level:
        assert any(now == level for _, now in changes), level


@pytest.mark.slow
def test_equal_on_many_random_cases() -> None:
    for seed in range(1000, 1600):
        compare(seed)
        compare(seed, replace(plan_of(seed), eviction="expected", order="joint", restraint=True))
