"""Replays a trace on a virtual clock through the runtime's own decision objects: residency, eviction, scheduler.

`simulate_reference` is the plain loop and the reference; `simulate_fast` (simulate_fast.py) is the same compiled.

The model of time, for each layer of each step: what has arrived is landed; the routed experts are looked up; a needed
expert that is on its way is awaited, the missing ones are loaded one after another once the link is free (a transfer that
has begun is not interrupted), and no prefetch begins meanwhile; then the layer computes, and the link takes job after job.
One transfer is on the link at a time. Forecasts cost time of their own, during which the link goes on with older jobs.
"""

import numpy as np
from numpy.typing import NDArray

from seqmoe.autotune.forecasts import TraceForecasts
from seqmoe.autotune.simulate_plan import Inputs, Outcome, Timing, gather
from seqmoe.predictors.trace import Trace
from seqmoe.runtime.eviction import PrefillHot
from seqmoe.runtime.eviction_fallback import FallbackEviction
from seqmoe.runtime.eviction_forecast import ForecastEviction
from seqmoe.runtime.policy import Plan
from seqmoe.runtime.prefetch import PrefetchCounts, Prefetcher, plan_eviction
from seqmoe.runtime.residency import Fetch, Residency, demand_reserve
from seqmoe.runtime.restraint import Level, Restraints, SelfRestraint
from seqmoe.runtime.schedule import Scheduler

PREFILL_STEPS = 64  # of a sequence, at most, and at most a quarter of it: what stands in for the prompt


def prefill_counts(sequence: Trace) -> NDArray[np.int64]:
    """Uses [L * E] of what stands in for a sequence's prompt: its first steps."""
    steps = max(1, min(PREFILL_STEPS, sequence.num_steps // 4))
    return np.bincount(
        sequence.flat_ids()[:steps].ravel(), minlength=sequence.num_layers * sequence.num_experts
    )  # fmt: skip


def step_record(timing: Timing, level: Level, stall: float, after: bool) -> dict[str, float]:
    """The times that self-restraint is told of a step. `after`: a second forecast was made."""
    return {
        "compute": sum(timing.layer),
        "stall": stall,
        "forecast": timing.forecast if level > Level.OFF else 0.0,
        "prefetch": timing.forecast if after else 0.0,
        "load": timing.transfer,
    }


def simulate_reference(
    inputs: Inputs, plan: Plan, timing: Timing, num_slots: int, restraints: Restraints | None = None
) -> Outcome:
    """One sequence after another with one pool, cold before the first. `restraints`: for plans with restraint."""
    inputs.check(plan)
    return _Replay(inputs, plan, timing, num_slots, restraints).run()


class _Replay:
    def __init__(
        self, inputs: Inputs, plan: Plan, timing: Timing, num_slots: int, restraints: Restraints | None = None
    ) -> None:
        trace = inputs.trace
        self.inputs, self.plan, self.timing, self.trace = inputs, plan, timing, trace
        eviction = plan_eviction(
            plan, trace.num_layers, trace.num_experts, trace.top_k, trace=trace, popularity=inputs.popularity,
            forecast_eviction=FallbackEviction if plan.restraint else ForecastEviction,
        )  # fmt: skip
        reserve = demand_reserve(trace.num_experts, trace.top_k, 1)
        self.residency = Residency(num_slots, trace.num_layers, trace.num_experts, eviction, reserve=reserve)
        scheduler = None
        if plan.order:
            scheduler = Scheduler(
                trace.num_layers,
                order=plan.order,
                budget=timing.transfers_per_layer,
                ema_alpha=plan.ema_alpha,
                lead=plan.lead,
                m_max=plan.m_max,
                printed_form=plan.printed_form,
            )
        self.prefetcher = Prefetcher(plan, self.residency, scheduler)
        self.prefetcher.log = []
        self.restraint = SelfRestraint(self.prefetcher, restraints) if plan.restraint else None
        self.levels: list[tuple[int, int]] = []
        self.named = self.ready = self.ahead = 0
        self.stall = 0.0  # of the step
        self.flat_ids = trace.flat_ids()
        self.now = 0.0
        self.on_link: Fetch | None = None
        self.link_free = 0.0
        self.arrived: list[Fetch] = []

    def run(self) -> Outcome:
        """All sequences."""
        trace, prefetcher = self.trace, self.prefetcher
        rows: list[tuple[float, ...]] = []
        for first, count in zip(trace.seq_start.tolist(), trace.seq_len.tolist(), strict=True):
            self.residency.reset_counts()
            fates = prefetcher.counts = PrefetchCounts()
            self.named = self.ready = self.ahead = 0
            began = self.now
            prefetcher.start_sequence()
            if isinstance(prefetcher.eviction, PrefillHot):
                prefetcher.eviction.prefill(prefill_counts(trace.sequence(len(rows))))
            for row in range(first, first + count):
                self._step(row, last=row + 1 == first + count)
            counts = self.residency.counts
            fetched = counts.prefetched - counts.dropped
            on_time = count * sum(self.timing.layer)
            rows.append((count, counts.hits, counts.misses, fates.late, fetched, fates.useful, fates.wasted)
                        + (self.named, self.ready, self.ahead, self.now - began, on_time))  # fmt: skip
        budget = 0.0 if prefetcher.scheduler is None else prefetcher.scheduler.budget_avg
        return gather(rows, budget, prefetcher.log or [], self.levels)

    def _step(self, row: int, last: bool) -> None:
        trace, plan, timing, prefetcher = self.trace, self.plan, self.timing, self.prefetcher
        restraint = self.restraint
        forecasts = self.inputs.forecasts if plan.uses_forecast else None
        if restraint is not None and not restraint.wants_forecast:
            forecasts = None
        after = plan.after and prefetcher.enabled and forecasts is not None and forecasts.after is not None and not last
        self.ahead += plan.order is not None and prefetcher.enabled
        self.stall = 0.0
        self.residency.begin_step(row)
        for layer, experts in enumerate(trace.expert_ids[row].tolist()):
            position = row * trace.num_layers + layer
            if forecasts is not None and layer == 0:
                self._spend(timing.forecast)
            self._land()
            prefetcher.reach(position)
            if restraint is not None:
                restraint.reach()
            if forecasts is not None and layer == 0:
                prefetcher.take(forecasts.at_start(row, position).scores, row, position)
                if restraint is not None:
                    restraint.forecast()
            self._count_named(row, layer, experts, forecasts)
            computed = self._layer(layer, experts)
            if after and layer == trace.num_layers - 1:
                assert forecasts is not None
                self._spend(timing.forecast)
                prefetcher.take(forecasts.after_last(row + 1, position).scores, row + 1, position)
            if plan.order == "window" and layer + 1 < trace.num_layers:
                assert self.inputs.layer_scores is not None
                scores = self.inputs.layer_scores[row, layer + 1]
                prefetcher.offer(prefetcher.forecast_layer(scores, layer + 1, row, position))
            self._spend(timing.layer[layer] - computed)
            prefetcher.release(layer)
        if restraint is not None:
            level = restraint.level
            record = step_record(timing, level, self.stall, after)
            now = restraint.end_step(self.flat_ids[row], **record)
            if now != level:
                self.levels.append((row + 1, int(now)))

    def _count_named(self, row: int, layer: int, experts: list[int], forecasts: TraceForecasts | None) -> None:
        """Which of the layer's experts its forecast named, and which of those are there."""
        plan = self.plan
        if plan.order == "window" and layer > 0:
            assert self.inputs.layer_scores is not None
            scores, count = self.inputs.layer_scores[row, layer], min(plan.k_prime, plan.m_max)
        elif plan.order != "window" and forecasts is not None:
            scores, count = forecasts.start[row, 0, layer], plan.k_prime
        else:
            return
        named = set(np.argsort(-scores.astype(np.float32), kind="stable")[:count].tolist())
        base = layer * self.trace.num_experts
        for index in experts:
            if index in named:
                self.named += 1
                self.ready += self.residency.is_ready(base + index)

    def _layer(self, layer: int, experts: list[int]) -> float:
        """Looks up, waits, loads; what is resident computes meanwhile. The part of the layer's compute that this was."""
        found = self.prefetcher.lookup(layer, experts)
        if not found.missing and not found.in_flight:
            return 0.0
        asked, loaded = self.now, self.now
        if self.on_link is not None:
            loaded = max(self.now, self.link_free)
            if found.in_flight:  # one transfer is on the link at a time: it is this one
                self.residency.land(self.on_link.tag)
                self.now = loaded
            else:
                self.arrived.append(self.on_link)
            self.on_link = None
        for flat in found.missing:
            self.prefetcher.load(flat)
        loaded += len(found.missing) * self.timing.transfer
        computed = (len(experts) - len(found.missing)) * self.timing.expert if found.missing else 0.0
        self.now = max(loaded, self.now + computed)
        self.stall += self.now - asked - computed
        return computed

    def _spend(self, duration: float) -> None:
        """The clock goes on; the link works."""
        end = self.now + duration
        at = self.now
        self.now = end
        if not self.plan.order:
            return
        if self.on_link is not None:
            if self.link_free > end:
                return
            self.arrived.append(self.on_link)
            self.on_link = None
            at = max(at, self.link_free)
        while at < end:
            fetch = self.prefetcher.next()
            if fetch is None:
                return
            self.link_free = at + self.timing.transfer
            if self.link_free > end:
                self.on_link = fetch
                return
            self.arrived.append(fetch)
            at = self.link_free

    def _land(self) -> None:
        for fetch in self.arrived:
            self.residency.land(fetch.tag)
        self.arrived.clear()
