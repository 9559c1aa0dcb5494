"""`Prefetcher` with compiled decisions: the same fetches, without an object for each job."""

import numpy as np
from numpy.typing import NDArray

from seqmoe.runtime.control import Jobs
from seqmoe.runtime.policy import Plan
from seqmoe.runtime.prefetch import Prefetcher
from seqmoe.runtime.residency import Residency
from seqmoe.runtime.schedule_fast import FastScheduler, JobMaker


class FastPrefetcher(Prefetcher):
    """Equal to `Prefetcher` in every decision; with early binding it is `Prefetcher`."""

    scheduler: FastScheduler | None

    def __init__(self, plan: Plan, residency: Residency, scheduler: FastScheduler | None) -> None:
        super().__init__(plan, residency, scheduler)
        self._maker = JobMaker(residency.num_layers, residency.num_experts)

    def forecast_block(
        self,
        scores: NDArray[np.floating],
        step: int,
        position: int,
        *,
        k_prime: int | None = None,
        steps: int | None = None,
    ) -> Jobs:
        """See Prefetcher."""
        plan = self.plan
        if plan.early_binding or self.scheduler is None or not self.enabled:
            return super().forecast_block(scores, step, position, k_prime=k_prime, steps=steps)
        if self.by_forecast is not None:
            self.by_forecast.update(scores, step)
        return self._maker.make(
            scores, step, position, self._slot_of,
            k_prime=k_prime or plan.k_prime, steps=steps or plan.job_steps, lead=plan.lead, least=plan.least,
        )  # fmt: skip

    def offer_block(self, block: Jobs, *, replace: bool = True) -> None:
        """See Prefetcher."""
        if replace and self.scheduler is not None:
            self.scheduler.offer_block(block)
        else:
            super().offer_block(block, replace=replace)
