"""Replays a trace on a virtual clock through the runtime's own decision objects: residency, eviction, scheduler.

`simulate_reference` is the plain loop and the reference; `simulate_fast` (simulate_fast.py) is the same compiled.

The model of time, for each layer of each step: what has arrived is landed; the routed experts are looked up; a needed
expert that is on its way is awaited, the missing ones are loaded one after another once the link is free (a transfer that
has begun is not interrupted), and no prefetch begins meanwhile; then the layer computes, and the link takes job after job.
One transfer is on the link at a time. Forecasts cost time of their own, during which the link goes on with older jobs.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from seqmoe.autotune.simulate_plan import Inputs, Outcome, Timing, gather
from seqmoe.predictors.trace import Trace
from seqmoe.runtime.eviction import LFU, LRU, Belady, BeladyWithin, Eviction, PrefillHot, Static
from seqmoe.runtime.eviction_forecast import ForecastEviction, Rule, expected_worth, first_use_worth, hard_worth
from seqmoe.runtime.policy import BY_FORECAST, Plan
from seqmoe.runtime.residency import Fetch, Residency, demand_reserve
from seqmoe.runtime.schedule import FetchJob, Scheduler, make_jobs

PREFILL_STEPS = 64  # of a sequence, at most, and at most a quarter of it: what stands in for the prompt


def make_rule(name: str, top_k: int) -> Rule:
    """The worth of an expert for an eviction by forecast."""
    return {"expected": expected_worth, "first-use": first_use_worth}.get(name, partial(hard_worth, k=top_k))


def prefill_counts(sequence: Trace) -> NDArray[np.int64]:
    """Uses [L * E] of what stands in for a sequence's prompt: its first steps."""
    steps = max(1, min(PREFILL_STEPS, sequence.num_steps // 4))
    return np.bincount(
        sequence.flat_ids()[:steps].ravel(), minlength=sequence.num_layers * sequence.num_experts
    )  # fmt: skip


def make_eviction(inputs: Inputs, plan: Plan) -> Eviction:
    """The eviction that a plan names."""
    trace = inputs.trace
    if plan.eviction in BY_FORECAST:
        return ForecastEviction(
            trace.num_layers,
            trace.num_experts,
            horizon=plan.horizon,
            discount=plan.discount,
            rule=make_rule(plan.eviction, trace.top_k),
            by_position=plan.by_position and plan.eviction != "hard",
        )
    if plan.eviction in ("static", "prefill-hot"):
        assert inputs.popularity is not None
        return (Static if plan.eviction == "static" else PrefillHot)(inputs.popularity)
    if plan.eviction == "belady":
        return Belady(trace)
    if plan.eviction == "belady-8":
        return BeladyWithin(trace, 8)
    return LFU() if plan.eviction == "lfu" else LRU()


def simulate_reference(inputs: Inputs, plan: Plan, timing: Timing, num_slots: int) -> Outcome:
    """One sequence after another with one pool, cold before the first."""
    inputs.check(plan)
    return _Replay(inputs, plan, timing, num_slots).run()


class _Replay:
    def __init__(self, inputs: Inputs, plan: Plan, timing: Timing, num_slots: int) -> None:
        trace = inputs.trace
        self.inputs, self.plan, self.timing, self.trace = inputs, plan, timing, trace
        self.eviction = make_eviction(inputs, plan)
        reserve = demand_reserve(trace.num_experts, trace.top_k, 1)
        self.residency = Residency(num_slots, trace.num_layers, trace.num_experts, self.eviction, reserve=reserve)
        # what the scheduler sees: with early binding a queued expert has its slot, and all others are out of question
        self.slot_of: Sequence[int] | NDArray[np.int32] = self.residency.slot_of_expert
        if plan.early_binding:
            self.slot_of = np.zeros(len(self.slot_of), dtype=np.int32)
        self.scheduler = Scheduler(
            trace.num_layers,
            order=plan.order or "joint",
            budget=timing.transfers_per_layer,
            ema_alpha=plan.ema_alpha,
            lead=plan.lead,
            m_max=plan.m_max,
            printed_form=plan.printed_form,
        )
        self.now = 0.0
        self.on_link: Fetch | None = None
        self.link_free = 0.0
        self.arrived: list[Fetch] = []
        self.bound: dict[int, Fetch] = {}  # early binding: by expert, not yet sent
        self.fresh: set[int] = set()  # prefetched, and not needed since
        self.useful = self.wasted = self.late = 0
        self.log: list[tuple[int, int, int, int]] = []

    def run(self) -> Outcome:
        """All sequences."""
        trace, plan = self.trace, self.plan
        rows: list[tuple[float, ...]] = []
        for first, count in zip(trace.seq_start.tolist(), trace.seq_len.tolist(), strict=True):
            self.residency.reset_counts()
            self.useful = self.wasted = self.late = 0
            began = self.now
            self._drop_bound(set())
            self.scheduler.clear()
            if isinstance(self.eviction, PrefillHot):
                self.eviction.prefill(prefill_counts(trace.sequence(len(rows))))
            for row in range(first, first + count):
                self._step(row, last=row + 1 == first + count)
            counts = self.residency.counts
            on_time = count * sum(self.timing.layer)
            rows.append(
                (
                    count,
                    counts.hits,
                    counts.misses,
                    self.late,
                    counts.prefetched - counts.dropped,
                    self.useful,
                    self.wasted,
                )
                + (self.now - began, on_time)
            )
        return gather(rows, self.scheduler.budget_avg if plan.order else 0.0, self.log)

    def _step(self, row: int, last: bool) -> None:
        trace, plan, residency, timing = self.trace, self.plan, self.residency, self.timing
        forecasts = self.inputs.forecasts if plan.uses_forecast else None
        residency.begin_step(row)
        for layer, experts in enumerate(trace.expert_ids[row].tolist()):
            position = row * trace.num_layers + layer
            if forecasts is not None and layer == 0:
                self._spend(timing.forecast)
            self._land()
            if plan.order:
                self.scheduler.advance(position)
                if plan.early_binding:
                    self._drop_bound({job.expert for job in self.scheduler.jobs if job.deadline > position + plan.lead})
            if forecasts is not None and layer == 0:
                self._take(forecasts.at_start(row, position).scores, row, position)
            self._layer(layer, experts, position)
            if forecasts is not None and plan.after and forecasts.after is not None and not last:  # noqa: SIM102
                if layer == trace.num_layers - 1:
                    self._spend(timing.forecast)
                    self._take(forecasts.after_last(row + 1, position).scores, row + 1, position)
            if plan.order == "window" and layer + 1 < trace.num_layers:
                assert self.inputs.layer_scores is not None
                scores = np.zeros((1, trace.num_layers, trace.num_experts), dtype=np.float32)
                scores[0, layer + 1] = self.inputs.layer_scores[row, layer + 1]
                self._offer(scores, row, position)
            self._spend(timing.layer[layer])
            if plan.eviction == "none":
                residency.discard(layer)
            else:
                residency.release(layer)

    def _layer(self, layer: int, experts: list[int], position: int) -> None:
        """Looks up, waits, loads."""
        residency = self.residency
        found = residency.lookup(layer, experts)
        coming = {fetch.expert for fetch in found.in_flight}
        for index in experts:
            flat = layer * residency.num_experts + index
            if flat in self.fresh:
                self.fresh.discard(flat)
                self.late += flat in coming and flat not in self.bound
                self.useful += flat not in coming
        if not found.missing and not coming:
            return
        missing = list(found.missing)
        for fetch in found.in_flight:
            if fetch.expert in self.bound:  # never sent
                residency.drop(self._unbind(fetch.expert).tag)
                missing.append(fetch.expert)
        if self.on_link is not None:
            self.now = max(self.now, self.link_free)
            if self.on_link.expert in coming:
                residency.land(self.on_link.tag)
            else:
                self.arrived.append(self.on_link)
            self.on_link = None
        for flat in missing:
            self._note(residency.load(flat), position, 0)
        self.now += len(missing) * self.timing.transfer

    def _take(self, scores: NDArray[np.float32], step: int, position: int) -> None:
        if isinstance(self.eviction, ForecastEviction):
            self.eviction.update(scores, step)
        if self.plan.order:
            self._offer(scores, step, position)

    def _offer(self, scores: NDArray[np.float32], step: int, position: int) -> None:
        plan, residency = self.plan, self.residency
        self._drop_bound(set())
        jobs = make_jobs(
            scores, step, position, residency.slot_of_expert,
            k_prime=plan.k_prime, steps=plan.job_steps, lead=plan.lead, least=plan.least,
        )  # fmt: skip
        if not plan.early_binding:
            self.scheduler.offer(jobs)
            return
        kept = []
        for job in jobs:
            fetch = self._bind(job)
            if fetch is not None:
                self.bound[job.expert] = fetch
                self._waiting(job.expert, True)
                kept.append(job)
        self.scheduler.offer(kept)

    def _bind(self, job: FetchJob) -> Fetch | None:
        """Early: a slot for the job, if it may have one."""
        if self.residency.free_for_prefetch() == 0:
            return None
        if self.plan.admission and not self._has_empty():
            assert isinstance(self.eviction, ForecastEviction)
            admission = self.eviction.admission()
            if admission is not None and not admission.admits(job):
                return None
        return self._fetched(self.residency.fetch(job.expert))

    def _drop_bound(self, keep: set[int]) -> None:
        for expert in [expert for expert in self.bound if expert not in keep]:
            self.residency.drop(self._unbind(expert).tag)
            self.fresh.discard(expert)

    def _unbind(self, expert: int) -> Fetch:
        self._waiting(expert, False)
        return self.bound.pop(expert)

    def _waiting(self, expert: int, waits: bool) -> None:
        assert isinstance(self.slot_of, np.ndarray)
        self.slot_of[expert] = -1 if waits else 0

    def _has_empty(self) -> bool:
        assert isinstance(self.eviction, ForecastEviction)
        return self.residency.free_for_demand() > len(self.eviction)

    def _next(self) -> Fetch | None:
        """The link is free: what it sends now, with its slot."""
        plan, residency = self.plan, self.residency
        if plan.early_binding:
            job = self.scheduler.next(self.slot_of)
            return None if job is None else self._unbind(job.expert)
        if residency.free_for_prefetch() == 0:
            self.scheduler.pause()
            return None
        admission = None
        if plan.admission and not self._has_empty():
            assert isinstance(self.eviction, ForecastEviction)
            admission = self.eviction.admission()
        job = self.scheduler.next(self.slot_of, admission)
        return None if job is None else self._fetched(residency.fetch(job.expert))

    def _fetched(self, fetch: Fetch | None) -> Fetch:
        assert fetch is not None
        self.fresh.add(fetch.expert)
        self._note(fetch, self.scheduler.position, 1)
        return fetch

    def _note(self, fetch: Fetch, position: int, ahead: int) -> None:
        if fetch.victim in self.fresh:
            self.fresh.discard(fetch.victim)
            self.wasted += 1
        self.log.append((position, fetch.expert, fetch.victim, ahead))

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
            fetch = self._next()
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
