"""The scheduler's decisions compiled, equal to `schedule.Scheduler` in every one of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from seqmoe.runtime.schedule import ORDERS, Admission, FetchJob, Scheduler

JOINT, INFINITY, PROMOE, FIRST_COME, WINDOW = range(len(ORDERS))
_NO_WORTH = np.zeros(0, dtype=np.float64)


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
            at = size
            size += 1
            while at > 0:
                parent = (at - 1) >> 1
                if not _less(confidence, i, heap[parent]):
                    break
                heap[at] = heap[parent]
                at = parent
            heap[at] = i
            room = max(1.0, budget_now) + max(0.0, budget_avg) * (deadline[i] - position - 1)
            while size > room:
                size -= 1
                moved = heap[size]
                at = 0
                while True:
                    child = 2 * at + 1
                    if child >= size:
                        break
                    if child + 1 < size and _less(confidence, heap[child + 1], heap[child]):
                        child += 1
                    if not _less(confidence, heap[child], moved):
                        break
                    heap[at] = heap[child]
                    at = child
                heap[at] = moved
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
def _next(
    order: int,
    expert: NDArray[np.int64],
    deadline: NDArray[np.int64],
    confidence: NDArray[np.float64],
    arrival: NDArray[np.int64],
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
) -> tuple[int, int]:
    count = prune(expert, deadline, confidence, arrival, count, slot_of, position + lead)
    at = choose(
        order, expert, deadline, confidence, arrival, count, position, num_layers, budget_now, budget_avg,
        limited, worth, floor, next_use, chance, heap,
    )  # fmt: skip
    return count, at


class FastScheduler(Scheduler):
    """`Scheduler` with its queue in arrays and compiled decisions. `slot_of` must be an int32 array."""

    def __init__(self, num_layers: int, **options: Any) -> None:
        super().__init__(num_layers, **options)
        self._order = ORDERS.index(self.order)
        self._count = 0
        self._room(512)

    def _room(self, size: int) -> None:
        self._experts = np.zeros(size, dtype=np.int64)
        self._deadlines = np.zeros(size, dtype=np.int64)
        self._confidences = np.zeros(size, dtype=np.float64)
        self._numbers = np.zeros(size, dtype=np.int64)
        self._heap = np.zeros(size, dtype=np.int32)

    def __len__(self) -> int:
        return self._count

    @property
    def jobs(self) -> list[FetchJob]:
        """What is queued, most urgent first."""
        return [self._job(i) for i in range(self._count)]

    def _job(self, at: int) -> FetchJob:
        return FetchJob(int(self._experts[at]), int(self._deadlines[at]), float(self._confidences[at]))

    def offer(self, jobs: Sequence[FetchJob], *, replace: bool = True) -> None:
        """See Scheduler."""
        if not replace:
            self._queue, self._arrival = self.jobs, self._numbers[: self._count].tolist()
        super().offer(jobs, replace=replace)
        self._count = count = len(self._queue)
        if count > len(self._experts):
            self._room(2 * count)
        self._experts[:count] = [job.expert for job in self._queue]
        self._deadlines[:count] = [job.deadline for job in self._queue]
        self._confidences[:count] = [job.confidence for job in self._queue]
        self._numbers[:count] = self._arrival

    def clear(self) -> None:
        """See Scheduler."""
        super().clear()
        self._count = 0

    def next(self, slot_of: Sequence[int] | NDArray[np.integer], admission: Admission | None = None) -> FetchJob | None:
        """See Scheduler."""
        if self.sent >= self.m_max:
            return None
        if admission is None:
            limit: tuple[Any, ...] = (False, _NO_WORTH, 0.0, 0, 0.0)
        else:
            limit = (True, admission.worth, admission.floor, admission.next_use, admission.chance)
        self._count, at = _next(
            self._order, self._experts, self._deadlines, self._confidences, self._numbers, self._count, slot_of,
            self.lead, self.position, self.num_layers, self.budget_now, self.budget_avg, *limit, self._heap,
        )  # fmt: skip
        if at < 0:
            self._skip_layer = True
            return None
        job = self._job(at)
        remove(self._experts, self._deadlines, self._confidences, self._numbers, self._count, at)
        self._count -= 1
        self.budget_now -= 1.0
        self.sent += 1
        return job
