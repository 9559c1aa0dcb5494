"""The scheduler's decisions compiled, equal to `schedule.Scheduler` in every one of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from seqmoe.runtime.control import JOB_WORDS, Jobs
from seqmoe.runtime.schedule import ORDERS, Admission, FetchJob, Scheduler

JOINT, INFINITY, PROMOE, FIRST_COME, WINDOW = range(len(ORDERS))
_NO_LIMIT = Admission(np.zeros(0), 0.0, 0, 0.0)


@njit(cache=True, nogil=True)
def prune(
    expert: NDArray[np.int64],
    deadline: NDArray[np.int64],
    confidence: NDArray[np.float64],
    arrival: NDArray[np.int64],
    count: int,
    slot_of: NDArray[np.int32],
    last: int,
) -> int:
    """Keeps the jobs due after `last` whose expert has no slot, in their order; returns how many."""
    kept = 0
    for i in range(count):
        if deadline[i] > last and slot_of[expert[i]] < 0:
            if kept != i:
                expert[kept] = expert[i]
                deadline[kept] = deadline[i]
                confidence[kept] = confidence[i]
                arrival[kept] = arrival[i]
            kept += 1
    return kept


@njit(cache=True, nogil=True)
def _less(confidence: NDArray[np.float64], a: int, b: int) -> bool:
    # the queue is in order of deadlines, so that the later of two equals has the greater (deadline, number)
    return confidence[a] < confidence[b] or (confidence[a] == confidence[b] and a > b)


@njit(cache=True, nogil=True)
def choose(
    order: int,
    expert: NDArray[np.int64],
    deadline: NDArray[np.int64],
    confidence: NDArray[np.float64],
    arrival: NDArray[np.int64],
    count: int,
    position: int,
    num_layers: int,
    budget_now: float,
    budget_avg: float,
    limited: bool,
    worth: NDArray[np.float64],
    floor: float,
    next_use: int,
    chance: float,
    heap: NDArray[np.int32],
) -> int:
    """Place of the job to send, -1 for none. `heap` is room for `count` places; the queue is ascending by deadline."""
    size = 0
    best = -1
    score = 0.0
    for i in range(count):
        if limited:
            if not worth[expert[i]] > floor:
                continue
            if next_use < deadline[i] and chance > confidence[i]:
                continue
        if order == JOINT:
            room = max(1.0, budget_now) + max(0.0, budget_avg) * (deadline[i] - position - 1)
            if size + 1 <= room:
                at = size
                size += 1
                while at > 0:
                    parent = (at - 1) >> 1
                    if not _less(confidence, i, heap[parent]):
                        break
                    heap[at] = heap[parent]
                    at = parent
                heap[at] = i
            elif _less(confidence, heap[0], i):  # full, and room does not shrink: it comes in for the least
                at = 0
                while True:
                    child = 2 * at + 1
                    if child >= size:
                        break
                    if child + 1 < size and _less(confidence, heap[child + 1], heap[child]):
                        child += 1
                    if not _less(confidence, heap[child], i):
                        break
                    heap[at] = heap[child]
                    at = child
                heap[at] = i
            continue
        if order == PROMOE:
            if best < 0 or (deadline[i] == deadline[best] and confidence[i] > confidence[best]):
                best = i
        elif order == FIRST_COME:
            if best < 0 or arrival[i] < arrival[best]:
                best = i
        else:
            now = confidence[i]
            if order == INFINITY:
                now = confidence[i] * (1.0 - (deadline[i] - position) / (num_layers + 1))
            if best < 0 or now > score:
                best = i
                score = now
    for j in range(size):
        i = heap[j]
        if (
            best < 0
            or deadline[i] < deadline[best]
            or (deadline[i] == deadline[best] and (confidence[i] > confidence[best] or
                (confidence[i] == confidence[best] and i < best)))
        ):  # fmt: skip
            best = i
    return best


@njit(cache=True, nogil=True)
def remove(
    expert: NDArray[np.int64],
    deadline: NDArray[np.int64],
    confidence: NDArray[np.float64],
    arrival: NDArray[np.int64],
    count: int,
    at: int,
) -> None:
    """Takes the job at a place out."""
    for i in range(at, count - 1):
        expert[i] = expert[i + 1]
        deadline[i] = deadline[i + 1]
        confidence[i] = confidence[i + 1]
        arrival[i] = arrival[i + 1]


@njit(cache=True, nogil=True)
def best_of_row(row: NDArray[np.floating], k: int, best: NDArray[np.int64]) -> int:
    """The k greatest of a row into best[:k], descending, of equals the lower index first, NaN last; returns how many."""
    found = 0
    for e in range(len(row)):
        value = row[e]
        at = found
        while at > 0:
            other = row[best[at - 1]]
            if not (value > other or (np.isnan(other) and not np.isnan(value))):
                break
            at -= 1
        if at >= k:
            continue
        for j in range(min(found, k - 1), at, -1):
            best[j] = best[j - 1]
        best[at] = e
        found = min(found + 1, k)
    return found


@njit(cache=True, nogil=True)
def _make(
    scores: NDArray[np.floating],
    step: int,
    position: int,
    slot_of: NDArray[np.int32],
    k_prime: int,
    steps: int,
    lead: int,
    least: float,
    stamp: NDArray[np.int64],
    mark: int,
    best: NDArray[np.int64],
    queue: NDArray[np.int64],
    confidence: NDArray[np.float64],
    arrival: int,
) -> int:
    """make_jobs into the queue; returns how many. `stamp` [L * E] holds `mark` nowhere yet."""
    expert, deadline, number = queue[0], queue[1], queue[2]
    rows, layers, experts = scores.shape
    count = 0
    for h in range(min(steps, rows)):
        for layer in range(layers):
            due = (step + h) * layers + layer
            if due <= position + lead:
                continue
            row = scores[h, layer]
            for j in range(best_of_row(row, k_prime, best)):
                value = row[best[j]]
                if value <= least:
                    break
                flat = layer * experts + best[j]
                if slot_of[flat] >= 0 or stamp[flat] == mark:
                    continue
                stamp[flat] = mark
                expert[count] = flat
                deadline[count] = due
                confidence[count] = value
                number[count] = arrival + count
                count += 1
    return count


@njit(cache=True, nogil=True)
def _take(
    order: int,
    queue: NDArray[np.int64],
    confidence: NDArray[np.float64],
    count: int,
    slot_of: NDArray[np.int32],
    lead: int,
    position: int,
    num_layers: int,
    budget_now: float,
    budget_avg: float,
    limited: bool,
    worth: NDArray[np.float64],
    floor: float,
    next_use: int,
    chance: float,
    heap: NDArray[np.int32],
) -> tuple[int, int, int, float]:
    """Prunes, chooses, and takes the job out: jobs left, its expert (-1: none), deadline and confidence."""
    expert, deadline, arrival = queue[0], queue[1], queue[2]
    count = prune(expert, deadline, confidence, arrival, count, slot_of, position + lead)
    at = choose(
        order, expert, deadline, confidence, arrival, count, position, num_layers, budget_now, budget_avg,
        limited, worth, floor, next_use, chance, heap,
    )  # fmt: skip
    if at < 0:
        return count, -1, 0, 0.0
    job = (count - 1, expert[at], deadline[at], confidence[at])
    remove(expert, deadline, confidence, arrival, count, at)
    return job


@njit(cache=True, nogil=True)
def _make_block(
    scores: NDArray[np.floating],
    step: int,
    position: int,
    slot_of: NDArray[np.int32],
    k_prime: int,
    steps: int,
    lead: int,
    least: float,
    stamp: NDArray[np.int64],
    mark: int,
    best: NDArray[np.int64],
    queue: NDArray[np.int64],
    confidence: NDArray[np.float64],
    block: NDArray[np.int64],
) -> int:
    """_make, and the jobs as rows of the control region (columns 0 to 3)."""
    count = _make(
        scores, step, position, slot_of, k_prime, steps, lead, least, stamp, mark, best, queue, confidence, 0
    )  # fmt: skip
    bits = confidence.view(np.int64)
    for i in range(count):
        block[i, 0] = queue[0, i]
        block[i, 1] = -1
        block[i, 2] = queue[1, i]
        block[i, 3] = bits[i]
    return count


@njit(cache=True, nogil=True)
def _take_block(
    block: NDArray[np.int64], queue: NDArray[np.int64], confidence: NDArray[np.float64], arrival: int
) -> None:
    bits = confidence.view(np.int64)
    for i in range(len(block)):
        queue[0, i] = block[i, 0]
        queue[1, i] = block[i, 2]
        queue[2, i] = arrival + i
        bits[i] = block[i, 3]


class JobMaker:
    """`make_jobs` compiled, its jobs as rows of the control region, [n, JOB_WORDS]."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        total = num_layers * num_experts
        self._stamp, self._mark = np.zeros(total, np.int64), 0
        self._best = np.zeros(num_experts, np.int64)
        self._queue, self._confidences = np.zeros((3, total), np.int64), np.zeros(total, np.float64)
        self._block = np.zeros((total, JOB_WORDS), np.int64)  # an expert has one job at most

    def make(
        self, scores: NDArray[np.floating], step: int, position: int, slot_of: NDArray[np.int32], *, k_prime: int, steps: int,
        lead: int, least: float,
    ) -> Jobs:  # fmt: skip
        """See make_jobs; good until the next call."""
        self._mark += 1
        count = _make_block(
            plain_scores(scores), step, position, slot_of, min(k_prime, scores.shape[2]), steps, lead, float(least),
            self._stamp, self._mark, self._best, self._queue, self._confidences, self._block,
        )  # fmt: skip
        return self._block[:count]


def plain_scores(scores: NDArray[np.floating]) -> NDArray[np.floating]:
    """As the compiled decisions take them: contiguous, float32 or float64, and read-only, since for numba that is another
    type, to be compiled for by itself."""
    scores = np.ascontiguousarray(scores, dtype=None if scores.dtype.char in "fd" else np.float32)
    if scores.flags.writeable:
        scores = scores.view()
        scores.flags.writeable = False
    return scores


class FastScheduler(Scheduler):
    """`Scheduler` with its queue in arrays and compiled decisions. `slot_of` must be an int32 array."""

    def __init__(self, num_layers: int, **options: Any) -> None:
        super().__init__(num_layers, **options)
        self._options = options
        self._order = ORDERS.index(self.order)
        self._count = 0
        self._stamp = np.zeros(0, dtype=np.int64)  # [L * E] the offer that has a job for the expert
        self._mark = 0
        self._best = np.zeros(0, dtype=np.int64)
        self._room(512)

    def _room(self, size: int) -> None:
        self._jobs = np.zeros((3, size), dtype=np.int64)  # experts, deadlines, numbers of arrival
        self._confidences = np.zeros(size, dtype=np.float64)
        self._heap = np.zeros(size, dtype=np.int32)

    def __len__(self) -> int:
        return self._count

    @property
    def jobs(self) -> list[FetchJob]:
        """What is queued, most urgent first."""
        experts, deadlines = self._jobs[:2, : self._count].tolist()
        return [FetchJob(*job) for job in zip(experts, deadlines, self._confidences.tolist(), strict=False)]

    def offer(self, jobs: Sequence[FetchJob], *, replace: bool = True) -> None:
        """See Scheduler."""
        if not replace:
            self._queue, self._arrival = self.jobs, self._jobs[2, : self._count].tolist()
        super().offer(jobs, replace=replace)
        self._count = count = len(self._queue)
        if count > len(self._confidences):
            self._room(2 * count)
        self._jobs[0, :count] = [job.expert for job in self._queue]
        self._jobs[1, :count] = [job.deadline for job in self._queue]
        self._jobs[2, :count] = self._arrival
        self._confidences[:count] = [job.confidence for job in self._queue]

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
        """See Scheduler."""
        rows, layers, experts = scores.shape
        k_prime = min(k_prime, experts)
        room = min(layers * experts, min(steps, rows) * layers * k_prime)  # an expert has one job at most
        if room > len(self._confidences):
            self._room(room)
        if k_prime > len(self._best) or layers * experts > len(self._stamp):
            self._best, self._stamp = np.zeros(experts, np.int64), np.zeros(layers * experts, np.int64)
        self._mark += 1
        self._count = _make(
            plain_scores(scores), step, position, slot_of, k_prime, steps, lead, float(least),
            self._stamp, self._mark, self._best, self._jobs, self._confidences, self._arrivals,
        )  # fmt: skip
        self._arrivals += self._count

    def offer_block(self, block: Jobs) -> None:
        """`offer` of jobs as the control region has them, ascending by deadline."""
        if len(block) > len(self._confidences):
            self._room(2 * len(block))
        _take_block(block, self._jobs, self._confidences, self._arrivals)
        self._count = len(block)
        self._arrivals += self._count

    def clear(self) -> None:
        """See Scheduler."""
        super().clear()
        self._count = 0

    def next(self, slot_of: Sequence[int] | NDArray[np.integer], admission: Admission | None = None) -> FetchJob | None:
        """See Scheduler."""
        if self.sent >= self.m_max:
            return None
        least = _NO_LIMIT if admission is None else admission
        self._count, expert, deadline, confidence = _take(
            self._order, self._jobs, self._confidences, self._count, slot_of,
            self.lead, self.position, self.num_layers, self.budget_now, self.budget_avg,
            admission is not None, least.worth, least.floor, least.next_use, least.chance, self._heap,
        )  # fmt: skip
        if expert < 0:
            self._skip_layer = True
            return None
        self.budget_now -= 1.0
        self.sent += 1
        return FetchJob(expert, deadline, confidence)

    def warm_up(self, scores: NDArray[np.floating], slot_of: NDArray[np.int32]) -> None:
        """Compiles what the first decisions would wait for, for forecasts and tables like these. Changes nothing here."""
        one = FastScheduler(self.num_layers, **self._options)
        one.advance(0)
        one.offer_scores(scores, 0, 0, slot_of, k_prime=1)
        one.next(slot_of, Admission(np.zeros(len(slot_of)), 0.0, 0, 0.0))
