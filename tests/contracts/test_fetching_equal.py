"""The runtime on a fake link does what the simulator does: the same fetches in the same order, at the same times.

The runner, the worker (`poll`, without its thread), the control region and the tables are the real ones. Bytes, kernels and
the clock are not: a transfer takes its time, transfers queue, and while a layer computes or a predictor thinks the clock
goes on and the worker is asked each time the link is free. Times are chosen so that no two events coincide.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.toy_traces import random_trace, walking_trace

from seqmoe.autotune.simulate import prefill_counts, simulate_reference
from seqmoe.autotune.simulate_plan import Inputs, Outcome, Timing, gather
from seqmoe.predictors.forecast import to_inclusion
from seqmoe.predictors.trace import Trace
from seqmoe.predictors.trace_forecasts import TraceForecasts, perfect_forecasts
from seqmoe.runtime.eviction import PrefillHot
from seqmoe.runtime.eviction_fast import FastForecastEviction
from seqmoe.runtime.eviction_forecast import ForecastEviction
from seqmoe.runtime.fetching import Fetching
from seqmoe.runtime.forecaster import TraceForecaster
from seqmoe.runtime.policy import BY_FORECAST, EVICTIONS, POLICIES, Plan
from seqmoe.runtime.prefetch import PrefetchCounts, Prefetcher, plan_eviction
from seqmoe.runtime.prefetch_fast import FastPrefetcher
from seqmoe.runtime.report import Totals
from seqmoe.runtime.residency import Fetch, Residency, demand_reserve
from seqmoe.runtime.runner import CachedRunner
from seqmoe.runtime.schedule import Scheduler
from seqmoe.runtime.schedule_fast import FastScheduler
from seqmoe.runtime.worker import FetchWorker

COUNTS = ("steps", "hits", "misses", "late", "prefetched", "useful", "wasted")


class Clock:
    """Virtual time. While it goes on, the worker is asked whenever the link is free."""

    def __init__(self) -> None:
        self.now = 0.0
        self.worker: Any = None
        self.prefetch_due = 0.0

    def spend(self, duration: float) -> None:
        end = self.now + duration
        while self.worker is not None and self.now < end and self.worker.poll() and self.prefetch_due <= end:
            self.now = self.prefetch_due
        self.now = end


@dataclass
class Transfer:
    """Over at `due`. Whoever waits lets the clock go on; the worker is not asked, the link is not free."""

    clock: Clock
    due: float

    def done(self) -> bool:
        return self.clock.now >= self.due

    def wait(self, timeout_s: float | None = None, *, exact: bool = True) -> None:
        self.clock.now = max(self.clock.now, self.due)


class FakeStore:
    """A link that takes `transfer` for each record, one after the other; what is needed now queues behind what is on it."""

    num_views = 1
    record_bytes = 1 << 30

    def __init__(self, clock: Clock, transfer: float) -> None:
        self.clock, self.transfer = clock, transfer
        self.link = SimpleNamespace(drain=lambda: True)
        self._free_at = 0.0

    def load(self, fetches: list[Fetch], *, inline: bool = False, background: bool = False) -> Transfer:
        self._free_at = max(self.clock.now, self._free_at) + len(fetches) * self.transfer
        if background:
            assert self._free_at == self.clock.now + self.transfer, "a prefetch was begun while the link was busy"
            self.clock.prefetch_due = self._free_at
        return Transfer(self.clock, self._free_at)

    def view_addresses(self, flat: int, slot: int) -> NDArray[np.int64]:
        return np.array([slot], dtype=np.int64)


class FakeCompute:
    """Takes a layer's time, after all its experts are there."""

    def __init__(self, clock: Clock, duration: float) -> None:
        self.clock, self.duration = clock, duration

    def forward(self, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        self.clock.spend(self.duration)
        return hidden

    def begin(self, hidden: torch.Tensor, *_: Any) -> "FakeCompute":
        self._hidden = hidden
        return self

    def add(self, experts: list[int], addresses: NDArray[np.int64]) -> None:
        pass

    def finish(self) -> torch.Tensor:
        return self.forward(self._hidden)


class SlowForecaster(TraceForecaster):
    """Forecasts take their time. After a sequence's last step none is made, as in the simulator, which knows the end."""

    def __init__(self, inputs: Inputs, clock: Clock, duration: float) -> None:
        assert inputs.forecasts is not None
        super().__init__(inputs.forecasts)
        self.clock, self.duration = clock, duration
        self.ends = set((inputs.trace.seq_start + inputs.trace.seq_len).tolist())

    def at_start(self, row: int, tokens: NDArray[np.int64] | None) -> NDArray[np.float32] | None:
        self.clock.spend(self.duration)
        return super().at_start(row, tokens)

    def after_last(self, row: int) -> NDArray[np.float32] | None:
        if row in self.ends:
            return None
        self.clock.spend(self.duration)
        return super().after_last(row)


class LayerScores:
    """What the next layer's adapter says, made beforehand."""

    name, depth, nbytes = "given", 1, 0

    def __init__(self, scores: NDArray[np.float32]) -> None:
        self.scores, self.row = scores, 0

    def refine(self, layer: int, router_input: NDArray[np.floating]) -> NDArray[np.float32]:
        return self.scores[self.row, layer + 1][None]


def run(inputs: Inputs, plan: Plan, timing: Timing, num_slots: int, fast: bool) -> Outcome:
    """The trace through the runtime, as `simulate_reference` does it."""
    trace, clock = inputs.trace, Clock()
    eviction = plan_eviction(
        plan, trace.num_layers, trace.num_experts, trace.top_k, trace=trace, popularity=inputs.popularity,
        forecast_eviction=FastForecastEviction if fast else ForecastEviction,
    )  # fmt: skip
    reserve = demand_reserve(trace.num_experts, trace.top_k, 1)
    residency = Residency(num_slots, trace.num_layers, trace.num_experts, eviction, reserve=reserve)
    scheduler: Any = None
    if plan.order:
        scheduler = (FastScheduler if fast else Scheduler)(
            trace.num_layers, order=plan.order, budget=timing.transfers_per_layer, ema_alpha=plan.ema_alpha,
            lead=plan.lead, m_max=plan.m_max, printed_form=plan.printed_form,
        )  # fmt: skip
    prefetcher = (FastPrefetcher if fast else Prefetcher)(plan, residency, scheduler)
    prefetcher.log = []
    store = FakeStore(clock, timing.transfer)
    computes: Any = [FakeCompute(clock, duration) for duration in timing.layer]
    runner = CachedRunner(computes, prefetcher, store, Totals())  # type: ignore[arg-type]
    layers = LayerScores(inputs.layer_scores) if plan.order == "window" else None
    fetching = None
    if scheduler is not None or plan.uses_forecast:
        fetching = Fetching(
            prefetcher,
            lambda fetch: store.load([fetch], background=True),
            runner.place,
            forecaster=SlowForecaster(inputs, clock, timing.forecast) if plan.uses_forecast else None,
            layer_predictor=layers,
            threaded=False,
        )
        runner.fetch_ahead(fetching)
        clock.worker = fetching.worker if scheduler is not None else None
    rows = []
    for number, (first, count) in enumerate(zip(trace.seq_start.tolist(), trace.seq_len.tolist(), strict=True)):
        residency.reset_counts()
        fates = prefetcher.counts = PrefetchCounts()
        began = clock.now
        if fetching is not None:
            fetching.begin_request(1)
        if isinstance(eviction, PrefillHot):
            eviction.prefill(prefill_counts(trace.sequence(number)))
        for row in range(first, first + count):
            residency.begin_step(row)
            if layers is not None:
                layers.row = row
            if fetching is not None:
                fetching.begin_step(row, None, reserve)
            for layer, experts in enumerate(trace.expert_ids[row].astype(np.int64)):
                index = torch.from_numpy(experts)[None]
                runner(layer, torch.zeros(1, 1), index, torch.ones(index.shape))
            residency.check_integrity()
        counts = residency.counts
        rows.append((count, counts.hits, counts.misses, fates.late, counts.prefetched - counts.dropped, fates.useful,
                     fates.wasted, 0, 0, 0, clock.now - began, count * sum(timing.layer)))  # fmt: skip
    if fetching is not None and scheduler is not None:  # the layers that went by during the last transfer are counted
        fetching.worker.quiesce(0.0)
        clock.now = clock.prefetch_due
        fetching.worker.poll()
    return gather(rows, 0.0 if scheduler is None else scheduler.budget_avg, prefetcher.log, [])


# -- cases ----------------------------------------------------------------------------------------------------------


def inputs_of(seed: int, horizon: int = 4, quality: float = 0.6) -> Inputs:
    """A small trace, and forecasts that are right about as often as `quality` says, full of ties."""
    rng = np.random.default_rng(seed)
    layers, experts, k = int(rng.integers(1, 6)), int(rng.integers(4, 9)), int(rng.integers(1, 4))
    if rng.random() < 0.3:
        trace = walking_trace(3, 12, layers, experts, seed)
    else:
        trace = random_trace([9, 14, 2, 11], layers, experts, k, seed)
    truth = perfect_forecasts(trace, horizon).start.astype(np.float32)

    def noisy() -> NDArray[np.float16]:
        mixed = np.round(quality * truth + rng.random(truth.shape), 1) + 1e-3
        return to_inclusion(mixed / mixed.sum(-1, keepdims=True), trace.top_k).astype(np.float16)

    layer_scores = rng.random((trace.num_steps, layers, experts)).astype(np.float32)
    return Inputs(trace, TraceForecasts(noisy(), noisy()), rng.integers(0, 50, layers * experts), layer_scores)


def plan_of(seed: int) -> Plan:
    """Any plan whose decisions do not depend on when within a layer a forecast is made; see the test of the others."""
    rng = np.random.default_rng(seed)
    eviction = str(rng.choice([name for name in EVICTIONS if name != "none"]))
    order = None if rng.random() < 0.15 else str(rng.choice(["joint", "joint", "infinity", "promoe", "first-come"]))
    if eviction.startswith("belady"):
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
        after=False,
    )


def timing_of(seed: int, trace: Trace) -> Timing:
    """From a tenth of a layer to several layers for a transfer, with irregular figures."""
    rng = np.random.default_rng(seed + 10_000)
    layer = rng.choice([0.5, 1.0, 1.7], trace.num_layers) * rng.uniform(0.97, 1.03, trace.num_layers)
    transfer = float(rng.choice([0.1, 0.36, 0.72, 1.67, 4.0]) * rng.uniform(0.97, 1.03))
    return Timing(tuple(layer.tolist()), transfer, float(rng.choice([0.0, 0.3]) * rng.uniform(0.97, 1.03)))


def same(got: Outcome, want: Outcome) -> None:
    for place, (mine, simulated) in enumerate(zip(got.log, want.log, strict=False)):
        assert mine == simulated, f"fetch {place} of {len(want.log)}: {mine}, simulated {simulated}"
    assert len(got.log) == len(want.log)
    for name in COUNTS:
        assert np.array_equal(getattr(got, name), getattr(want, name)), name
    np.testing.assert_allclose(got.time, want.time, rtol=1e-12)
    assert np.array_equal(got.full_time, want.full_time)
    assert got.budget == pytest.approx(want.budget, rel=1e-12)


def compare(seed: int, plan: Plan, fast: bool, timing: Timing | None = None) -> Outcome:
    inputs, rng = inputs_of(seed), np.random.default_rng(seed)
    trace = inputs.trace
    slots = int(rng.integers(trace.top_k, trace.num_layers * trace.num_experts + 2))
    timing = timing or timing_of(seed, trace)
    want = simulate_reference(inputs, plan, timing, slots)
    same(run(inputs, plan, timing, slots, fast), want)
    return want


FAST = pytest.mark.parametrize("fast", [False, True], ids=["pure", "fast"])


@FAST
def test_random_cases(fast: bool) -> None:
    outcomes = [compare(seed, plan_of(seed), fast) for seed in range(60)]
    for name in COUNTS:  # every kind of event was there
        assert sum(int(getattr(one, name).sum()) for one in outcomes) > 50, name


@FAST
def test_slots_bound_early(fast: bool) -> None:
    """The side that decodes follows position and jobs itself then, so that both give back the same slots before a lookup."""
    dropped = 0
    for seed in range(200, 225):
        plan = plan_of(seed)
        if plan.order is not None:
            outcome = compare(seed, replace(plan, early_binding=True), fast)
            dropped += sum(ahead for _, _, _, ahead in outcome.log) - int(outcome.prefetched.sum())
    assert dropped > 50  # bound, and never sent


NAMED = [
    name
    for name, policy in POLICIES.items()
    if policy.plan is not None and policy.plan.eviction != "none" and policy.plan.order != "window"
]


@pytest.mark.parametrize("name", NAMED)
def test_named_policies(name: str) -> None:
    """Each policy's plan, at the link ratios of the paper's machines, on a trace that has something to forecast."""
    given = POLICIES[name].plan
    assert given is not None
    # forecasts within a step: see below; restraint goes by times that the clock here does not have
    plan = replace(given, after=False, restraint=False, k_prime=min(given.k_prime, 5))
    trace = walking_trace(2, 16, layers=4, experts=10, seed=1)
    rng = np.random.default_rng(0)
    truth = perfect_forecasts(trace, 9).start.astype(np.float32)
    scores = truth + 0.7 * rng.random(truth.shape)
    forecasts = TraceForecasts(to_inclusion(scores / scores.sum(-1, keepdims=True), 2).astype(np.float16))
    inputs = Inputs(trace, forecasts, rng.integers(0, 50, 40))
    for ratio, slots in ((0.36, 10), (0.72, 6), (0.72, 18), (3.3, 10)):
        timing = Timing((1.0, 1.01, 0.99, 1.002), ratio * 1.003, 0.0501)
        same(run(inputs, plan, timing, slots, fast=True), simulate_reference(inputs, plan, timing, slots))


# The simulator makes a forecast within a step once the layer has all its experts, and lets the clock go on before the layer
# computes. The runtime makes it as soon as the missing experts have their slots and are on their way, so that it thinks
# while they come: no decision may differ for that (the tables are the same), but where thinking takes time the layer is
# over sooner, and the link is free sooner. So equality is asked for with a predictor that takes no time.


@FAST
def test_forecasts_after_the_last_layer(fast: bool) -> None:
    for seed in range(300, 325):
        timing = replace(timing_of(seed, inputs_of(seed).trace), forecast=0.0)
        compare(seed, replace(plan_of(seed), after=True), fast, timing)


@FAST
def test_forecasts_within_a_step(fast: bool) -> None:
    """SpecPrefetch: the next layer's router, from this layer's input."""
    for seed in range(400, 420):
        plan = replace(plan_of(seed), order="window", eviction="lru", admission=False, lead=0)
        compare(seed, plan, fast)


@pytest.mark.slow
@FAST
def test_many_random_cases(fast: bool) -> None:
    for seed in range(1000, 3000):
        plan = plan_of(seed)
        compare(seed, replace(plan, early_binding=plan.order is not None and seed % 3 == 0), fast)


# -- the tests can fail ---------------------------------------------------------------------------------------------


def different() -> int:
    count = 0
    for seed in range(20):
        try:
            compare(seed, plan_of(seed), fast=False)
        except AssertionError:
            count += 1
    return count


def test_a_worker_that_passes_over_layers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the budget differs, and with it what is sent."""
    follow = FetchWorker.follow
    monkeypatch.setattr(FetchWorker, "follow", lambda self, busy: follow(self, busy=False))
    assert different()


def test_a_link_that_stays_paused_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a late expert was awaited, while the layer computes."""
    await_late = Fetching.await_late

    def paused(self: Fetching, fetch: Fetch) -> bool:
        landed = await_late(self, fetch)
        self.region.set_pause(True)
        return landed

    monkeypatch.setattr(Fetching, "await_late", paused)
    assert different()


def test_a_slot_given_back_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release = CachedRunner._give_back

    def late(self: CachedRunner, layer: int) -> None:
        if layer:
            release(self, layer)
        elif self.fetching is not None:
            self.fetching.resume()

    monkeypatch.setattr(CachedRunner, "_give_back", late)
    assert different()
