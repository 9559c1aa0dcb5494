"""What to fetch next over a link that is too slow for everything: jobs, budgets and orders. Pure: no clock, no torch.

Jobs come from a forecast (design section 4, paper section 6). `Scheduler.next` is asked each time the link is free. The
order that the paper proposes, "joint", keeps the most valuable set of jobs that can all arrive in time (job sequencing with
deadlines; the sets that can form a matroid, so that greedy is optimal) and sends its most urgent one. The others are what
earlier systems do, and rank each job by itself. `schedule_fast.py` has the same decisions compiled.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from seqmoe.profiles.errors import UsageError

ORDERS = ("joint", "infinity", "promoe", "first-come", "window")
NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class FetchJob:
    """A wish to have an expert resident by a deadline."""

    expert: int  # flat id
    deadline: int  # position at which the expert is computed
    confidence: float  # forecast probability that it is used there


@dataclass(frozen=True, slots=True)
class Admission:
    """What a fetch would cost: the expert that has to go for it, as the eviction sees it. See `admits`."""

    worth: Sequence[float] | NDArray[np.float64]  # [L * E] by expert: the eviction's score
    floor: float  # that of the expert that would be evicted
    next_use: int  # position at which that expert may be used next
    chance: float  # probability that it is

    def admits(self, job: FetchJob) -> bool:
        """Whether the job's expert is worth more than the victim, and the victim is not likelier to be used before it."""
        if not self.worth[job.expert] > self.floor:
            return False
        return not (self.next_use < job.deadline and self.chance > job.confidence)


def make_jobs(
    scores: NDArray[np.floating],
    step: int,
    position: int,
    slot_of: Sequence[int] | NDArray[np.integer],
    *,
    k_prime: int,
    steps: int = 1,
    lead: int = 1,
    least: float = 0.0,
) -> list[FetchJob]:
    """Jobs for the `k_prime` likeliest experts of each layer, most urgent first, of a layer the likeliest first.

    `scores` [horizon, L, E] inclusion probabilities, row h for step `step` + h (mean over the batch); `steps` rows are
    taken. Left out: deadlines up to `position` + `lead`, experts with a slot (resident or in flight: slot_of >= 0),
    confidences not above `least`, and what an earlier row has a job for.
    """
    rows, layers, experts = scores.shape
    jobs: list[FetchJob] = []
    taken: set[int] = set()
    for h in range(min(steps, rows)):
        for layer in range(layers):
            deadline = (step + h) * layers + layer
            if deadline <= position + lead:
                continue
            row = scores[h, layer]
            base = layer * experts
            for index in np.argsort(-row, kind="stable")[:k_prime].tolist():
                expert, confidence = base + index, float(row[index])
                if confidence <= least:
                    break
                if slot_of[expert] >= 0 or expert in taken:
                    continue
                taken.add(expert)
                jobs.append(FetchJob(expert, deadline, confidence))
    return jobs


def capacity(deadline: int, position: int, budget_now: float, budget_avg: float) -> float:
    """C(d): transfers that can be made from `position` on and arrive before `deadline`."""
    return max(1.0, budget_now) + max(0.0, budget_avg) * (deadline - position - 1)


def select(jobs: Iterable[FetchJob], capacity_of: Callable[[int], float]) -> list[FetchJob]:
    """The set of greatest total confidence in which, for every d, at most C(d) jobs have a deadline of d or before.

    Algorithm 1, lines 5 to 10. `capacity_of` must not descend. In the order of their deadlines; of equals those that came
    first.
    """
    heap: list[tuple[float, int, int, FetchJob]] = []
    for number, job in enumerate(sorted(jobs, key=lambda job: job.deadline)):
        heappush(heap, (job.confidence, -job.deadline, -number, job))
        while len(heap) > capacity_of(job.deadline):
            heappop(heap)
    return [job for _, _, _, job in sorted(heap, key=lambda entry: -entry[2])]


def infinity_score(job: FetchJob, position: int, num_layers: int) -> float:
    """MoE-Infinity's: confidence, less for what is further away (as SeqMoE section 3.2 states it)."""
    return job.confidence * (1.0 - (job.deadline - position) / (num_layers + 1))


class Scheduler:
    """The queue of fetch jobs, the link's budget, and the order in which jobs are sent.

    `advance` when a layer is reached, `offer` when a forecast was made, `next` when the link is free. `budget_avg` is the
    running mean of transfers a layer, `budget_now` what is left of the present layer's. Layers in which the link had
    nothing to send or was paused say nothing of what it can do and do not count.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        order: str = "joint",
        budget: float = 1.0,
        ema_alpha: float = 0.1,
        lead: int = 1,
        m_max: int = NO_LIMIT,
        printed_form: bool = False,
    ) -> None:
        """`budget`: transfers a layer to begin with, as measured. `lead`: jobs due within so many layers are dropped.
        `m_max`: at most so many transfers a layer (SpecPrefetch's window budget). `printed_form`: the paper's update of the
        budget as printed, with a plus, which runs away: an ablation."""
        if order not in ORDERS:
            near = difflib.get_close_matches(order, ORDERS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(ORDERS)}"
            raise UsageError(f"unknown order '{order}': {hint}")
        if not 0 < ema_alpha <= 1 or budget <= 0:
            raise UsageError(f"ema_alpha must be above 0 and at most 1, budget above 0; got {ema_alpha} and {budget}")
        self.num_layers = num_layers
        self.order = order
        self.ema_alpha = ema_alpha
        self.lead = lead
        self.m_max = m_max
        self.printed_form = printed_form
        self.position = -1
        self.budget_avg = self.budget_now = float(budget)
        self.sent = 0  # transfers begun in the present layer
        self._skip_layer = True  # the present layer does not count; nothing is known of what was before the first
        self._queue: list[FetchJob] = []  # by deadline, of equals in the order they came
        self._arrival: list[int] = []  # of the same
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def jobs(self) -> list[FetchJob]:
        """What is queued, most urgent first."""
        return list(self._queue)

    def advance(self, position: int) -> None:
        """Layer `position` is reached: the layers before it go into the budget."""
        layers = position - self.position
        if layers < 1:
            raise ValueError(f"position must ascend from {self.position}, got {position}")
        if not self._skip_layer:
            left = self.budget_now if layers == 1 else (self.budget_now + (layers - 1) * self.budget_avg) / layers
            change = self.ema_alpha * left
            self.budget_avg = self.budget_avg + change if self.printed_form else self.budget_avg - change
        self.position = position
        self.budget_now = self.budget_avg
        self.sent = 0
        self._skip_layer = False

    def restart(self, position: int) -> None:
        """The layer at `position`, which need not be ahead, comes next; the budget stays."""
        self.position = position - 1
        self._skip_layer = True

    def pause(self) -> None:
        """On-demand loads had the link while the present layer computed: it says nothing of the budget."""
        self._skip_layer = True

    def offer(self, jobs: Sequence[FetchJob], *, replace: bool = True) -> None:
        """Queues jobs of a new forecast, in place of all that are queued unless `replace` is False."""
        numbers = range(self._arrivals, self._arrivals + len(jobs))
        self._arrivals += len(jobs)
        entries = list(zip(jobs, numbers, strict=True))
        if not replace:
            entries = [*zip(self._queue, self._arrival, strict=True), *entries]
        entries.sort(key=lambda entry: (entry[0].deadline, entry[1]))
        self._queue = [job for job, _ in entries]
        self._arrival = [number for _, number in entries]

    def offer_scores(
        self,
        scores: NDArray[np.floating],
        step: int,
        position: int,
        slot_of: Sequence[int] | NDArray[np.integer],
        *,
        k_prime: int,
        steps: int = 1,
        lead: int = 1,
        least: float = 0.0,
    ) -> None:
        """`offer` of what `make_jobs` makes of a forecast [horizon, L, E]."""
        self.offer(make_jobs(scores, step, position, slot_of, k_prime=k_prime, steps=steps, lead=lead, least=least))

    def clear(self) -> None:
        """Forgets all jobs: a new sequence begins, or prefetch is switched off."""
        self._queue, self._arrival = [], []

    def next(self, slot_of: Sequence[int] | NDArray[np.integer], admission: Admission | None = None) -> FetchJob | None:
        """The job to send now, out of the queue and charged to the budget; None where there is none worthwhile.

        Jobs that are too late or whose expert has a slot are dropped, those not admitted wait. `admission` None: a slot is
        free, everything is admitted.
        """
        if self.sent >= self.m_max:
            return None
        self._prune(slot_of)
        places = [i for i, job in enumerate(self._queue) if admission is None or admission.admits(job)]
        if not places:
            self._skip_layer = True
            return None
        at = self._choose(places)
        job = self._queue.pop(at)
        del self._arrival[at]
        self.budget_now -= 1.0
        self.sent += 1
        return job

    def _prune(self, slot_of: Sequence[int] | NDArray[np.integer]) -> None:
        last = self.position + self.lead
        kept = [i for i, job in enumerate(self._queue) if job.deadline > last and slot_of[job.expert] < 0]
        if len(kept) < len(self._queue):
            self._queue, self._arrival = [self._queue[i] for i in kept], [self._arrival[i] for i in kept]

    def _choose(self, places: list[int]) -> int:
        """Of those places in the queue the one to send."""
        queue, position = self._queue, self.position
        if self.order == "joint":
            chosen = select(
                (queue[i] for i in places),
                lambda deadline: capacity(deadline, position, self.budget_now, self.budget_avg),
            )
            # a capacity is at least 1, so that something is left; of the most urgent the likeliest
            best = min(chosen, key=lambda job: (job.deadline, -job.confidence))
            return next(i for i in places if queue[i] is best)
        if self.order == "infinity":
            return max(places, key=lambda i: (infinity_score(queue[i], position, self.num_layers), -i))
        if self.order == "promoe":
            return max(places, key=lambda i: (-queue[i].deadline, queue[i].confidence, -i))
        if self.order == "first-come":
            return min(places, key=lambda i: self._arrival[i])
        return max(places, key=lambda i: (queue[i].confidence, -i))  # window: the likeliest
