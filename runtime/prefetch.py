"""What is fetched ahead, when, and at whose expense: a policy's decisions as one object. Pure: no clock, no thread, no torch.

The simulator's loop and the runtime's worker drive this very object. Whoever drives it says what happens (`reach` a layer,
`take` a forecast, `lookup`, `land`, `release`), asks `next` each time the link is free, and moves the bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from seqmoe.predictors.trace import Trace
from seqmoe.runtime.control import Jobs, pack_jobs, unpack_jobs
from seqmoe.runtime.eviction import LFU, LRU, Belady, BeladyWithin, Eviction, PrefillHot, Static
from seqmoe.runtime.eviction_forecast import ForecastEviction, Rule, expected_worth, first_use_worth, hard_worth
from seqmoe.runtime.policy import BY_FORECAST, Plan
from seqmoe.runtime.residency import Fetch, Lookup, Residency
from seqmoe.runtime.schedule import FetchJob, Scheduler, make_jobs


@dataclass(slots=True)
class PrefetchCounts:
    """Records that were fetched ahead, by what became of them. What is neither has yet to show."""

    useful: int = 0  # resident when they were needed
    late: int = 0  # needed while they were on their way
    wasted: int = 0  # evicted without ever having been needed


def make_rule(name: str, top_k: int) -> Rule:
    """The worth of an expert for an eviction by forecast."""
    return {"expected": expected_worth, "first-use": first_use_worth}.get(name, partial(hard_worth, k=top_k))


def plan_eviction(
    plan: Plan,
    num_layers: int,
    num_experts: int,
    top_k: int,
    *,
    trace: Trace | None = None,
    popularity: ArrayLike | None = None,
    forecast_eviction: type[ForecastEviction] = ForecastEviction,
) -> Eviction:
    """The eviction that a plan names. `trace`: the future, for Belady; `popularity` [L * E]: for static, prefill-hot."""
    if plan.eviction in BY_FORECAST:
        return forecast_eviction(
            num_layers,
            num_experts,
            horizon=plan.horizon,
            discount=plan.discount,
            rule=make_rule(plan.eviction, top_k),
            by_position=plan.by_position and plan.eviction != "hard",
        )
    if plan.eviction in ("static", "prefill-hot"):
        assert popularity is not None, plan
        return (Static if plan.eviction == "static" else PrefillHot)(popularity)
    if plan.eviction in ("belady", "belady-8"):
        assert trace is not None, plan
        return Belady(trace) if plan.eviction == "belady" else BeladyWithin(trace, 8)
    return LFU() if plan.eviction == "lfu" else LRU()


class Prefetcher:
    """A policy at work on one pool. Not safe to use from several threads at once.

    `enabled` False: nothing is sent and no forecast is needed, as with a plan without order.
    """

    def __init__(self, plan: Plan, residency: Residency, scheduler: Scheduler | None) -> None:
        """`scheduler`: of the plan's order; None for plans without prefetch."""
        self.plan = plan
        self.residency = residency
        self.eviction = residency.eviction
        self.scheduler = scheduler
        self.enabled = True
        self.counts = PrefetchCounts()
        self.log: list[tuple[int, int, int, int]] | None = None  # (position, expert, victim, 1 for a prefetch)
        # the eviction, where it goes by forecasts
        self.by_forecast = self.eviction if isinstance(self.eviction, ForecastEviction) else None
        self._slot_of = residency.slot_of_expert  # a live view
        # What the scheduler sees: with early binding a queued expert has its slot, and all others are out of question.
        self._queued = np.zeros(len(self._slot_of), dtype=np.int32) if plan.early_binding else self._slot_of
        self._bound: dict[int, Fetch] = {}  # early binding: by expert, not yet sent
        self._fresh: set[int] = set()  # fetched ahead, and not needed since

    def start_sequence(self, position: int | None = None) -> None:
        """What was queued concerned another sequence. `position`: of its first layer, where that does not go on from the
        last sequence's."""
        self._drop_bound(set())
        if self.scheduler is not None:
            self.scheduler.clear()
            if position is not None:
                self.scheduler.restart(position)

    def reset(self) -> None:
        """The tables were emptied (`Residency.forget`): nothing is known to be fetched."""
        self._bound.clear()
        if self.plan.early_binding:
            self._queued[:] = 0
        self._fresh.clear()
        if self.scheduler is not None:
            self.scheduler.clear()

    def reach(self, position: int) -> None:
        """The layer at `position` is about to be looked up."""
        if self.scheduler is None:
            return
        self.scheduler.advance(position)
        if self._bound:
            last = position + self.plan.lead
            self._drop_bound({job.expert for job in self.scheduler.jobs if job.deadline > last})

    def take(self, scores: NDArray[np.floating], step: int, position: int) -> None:
        """`forecast` and `offer` in one."""
        self.offer(self.forecast(scores, step, position))

    def forecast(
        self, scores: NDArray[np.floating], step: int, position: int, *, k_prime: int | None = None, steps: int | None = None
    ) -> list[FetchJob]:
        """A forecast of whole steps, made at `position`: inclusion probabilities [horizon, L, E], row h for step
        `step` + h. The jobs that it makes; those of earlier forecasts are void. `k_prime`, `steps`: in place of the plan's."""
        if self.by_forecast is not None:
            self.by_forecast.update(scores, step)
        return self._jobs(scores, step, position, k_prime or self.plan.k_prime, steps or self.plan.job_steps)

    def forecast_layer(self, scores: NDArray[np.floating], layer: int, step: int, position: int) -> list[FetchJob]:
        """The same from a forecast [E] of one layer of the step that runs (SpecPrefetch)."""
        whole = np.zeros((1, self.residency.num_layers, self.residency.num_experts), dtype=np.float32)
        whole[0, layer] = scores
        return self._jobs(whole, step, position, self.plan.k_prime, 1)

    def forecast_block(
        self, scores: NDArray[np.floating], step: int, position: int, *, k_prime: int | None = None, steps: int | None = None
    ) -> Jobs:
        """`forecast`, its jobs as they travel through the control region. Good until the next call."""
        return pack_jobs(self.forecast(scores, step, position, k_prime=k_prime, steps=steps))

    def offer_block(self, block: Jobs, *, replace: bool = True) -> None:
        """`offer` of what came through the control region."""
        self.offer(unpack_jobs(block), replace=replace)

    def offer(self, jobs: Sequence[FetchJob], *, replace: bool = True) -> None:
        """Queues jobs, in place of what is queued unless `replace` is False."""
        if self.scheduler is not None:
            self.scheduler.offer(jobs, replace=replace)

    def next(self) -> Fetch | None:
        """The link is free: the fetch to send now, its slot bound; None where there is none worthwhile."""
        scheduler, residency = self.scheduler, self.residency
        if scheduler is None or not self.enabled:
            return None
        if self.plan.early_binding:
            job = scheduler.next(self._queued)
            return None if job is None else self._unbind(job.expert)
        if residency.free_for_prefetch() == 0:
            scheduler.pause()
            return None
        admission = None
        if self.plan.admission and self.by_forecast is not None and not self._has_empty():
            admission = self.by_forecast.admission()
        job = scheduler.next(self._slot_of, admission)
        return None if job is None else self._fetch(job)

    def lookup(self, layer: int, experts: Sequence[int]) -> Lookup:
        """See Residency.lookup; in flight is only what has been sent."""
        found = self.residency.lookup(layer, experts)
        if self._fresh:
            self._account(layer, experts, found)
        if not self._bound or not found.in_flight:
            return found
        missing, sent = list(found.missing), []
        for fetch in found.in_flight:
            if fetch.expert in self._bound:
                self.residency.drop(self._unbind(fetch.expert).tag)
                missing.append(fetch.expert)
            else:
                sent.append(fetch)
        return Lookup(found.slots, missing, sent)

    def load(self, expert: int) -> Fetch:
        """See Residency.load."""
        fetch = self.residency.load(expert)
        self._note(fetch, self.residency.position, 0)
        return fetch

    def lost(self, fetch: Fetch) -> None:
        """A prefetch that failed or was given up: its expert has not been fetched after all."""
        self._fresh.discard(fetch.expert)

    def release(self, layer: int) -> None:
        """See Residency.release; a plan that keeps nothing discards."""
        if self.plan.eviction == "none":
            self.residency.discard(layer)
        else:
            self.residency.release(layer)

    # -- inside -------------------------------------------------------------------------------------------------

    def _account(self, layer: int, experts: Sequence[int], found: Lookup) -> None:
        coming = {fetch.expert for fetch in found.in_flight}
        base = layer * self.residency.num_experts
        for index in experts:
            flat = base + index
            if flat in self._fresh:
                self._fresh.discard(flat)
                self.counts.late += flat in coming and flat not in self._bound
                self.counts.useful += flat not in coming

    def _jobs(
        self, scores: NDArray[np.floating], step: int, position: int, k_prime: int, steps: int
    ) -> list[FetchJob]:
        if self.scheduler is None or not self.enabled:
            return []
        plan = self.plan
        self._drop_bound(set())
        jobs = make_jobs(
            scores, step, position, self._slot_of,
            k_prime=k_prime, steps=steps, lead=plan.lead, least=plan.least,
        )  # fmt: skip
        return [job for job in jobs if self._bind(job)] if plan.early_binding else jobs

    def _bind(self, job: FetchJob) -> bool:
        """Early: a slot for the job, if it may have one."""
        if self.residency.free_for_prefetch() == 0:
            return False
        if self.plan.admission and self.by_forecast is not None and not self._has_empty():
            admission = self.by_forecast.admission()
            if admission is not None and not admission.admits(job):
                return False
        self._bound[job.expert] = self._fetch(job)
        self._queued[job.expert] = -1
        return True

    def _unbind(self, expert: int) -> Fetch:
        self._queued[expert] = 0
        return self._bound.pop(expert)

    def _drop_bound(self, keep: set[int]) -> None:
        for expert in [expert for expert in self._bound if expert not in keep]:
            self.residency.drop(self._unbind(expert).tag)
            self._fresh.discard(expert)

    def _has_empty(self) -> bool:
        assert self.by_forecast is not None
        return self.residency.free_for_demand() > len(self.by_forecast)

    def _fetch(self, job: FetchJob) -> Fetch:
        assert self.scheduler is not None
        fetch = self.residency.fetch(job.expert)
        assert fetch is not None, job
        self._fresh.add(fetch.expert)
        self._note(fetch, self.scheduler.position, 1)
        return fetch

    def _note(self, fetch: Fetch, position: int, ahead: int) -> None:
        if fetch.victim in self._fresh:
            self._fresh.discard(fetch.victim)
            self.counts.wasted += 1
        if self.log is not None:
            self.log.append((position, fetch.expert, fetch.victim, ahead))
