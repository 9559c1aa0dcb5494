"""How far the cache is from the best that it could have done: Belady's hits on the recent past, counted as it goes by.

The optimum is a matter of intervals. Between two uses of an expert it hits if it stays resident all the while, and a set of
such intervals can be had together if at every group of experts that is used between their ends there is room for all that
span it, beside the group's own. Taking the intervals in the order of their ends, of equal ends the shortest first, each
that still fits, gives the most (interval scheduling on `slots` machines), so that one pass over the uses with an array of
occupancy by time is exact: OPTgen of Hawkeye (Jain and Lin, ISCA 2016), here with all experts of a layer as one group.

Only the last `window` steps are looked at: a use whose last use is further back counts as a miss of the optimum too. The
optimum is that of loading on demand; prefetch can be better than that, and the gap below zero.
"""

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from seqmoe.profiles.errors import UsageError


@njit(cache=True, nogil=True)
def _fits(occupancy: NDArray[np.int32], first: int, end: int, slots: int) -> bool:
    """Whether every place from `first` to `end` - 1 of the ring has room for one more."""
    size = len(occupancy)
    place = first % size
    for _ in range(first, end):  # the oldest first: they are the fullest
        if occupancy[place] >= slots:
            return False
        place = 0 if place + 1 == size else place + 1
    return True


@njit(cache=True, nogil=True)
def optimal_step(
    ids: NDArray[np.int32],
    slots: int,
    last: NDArray[np.int64],
    occupancy: NDArray[np.int32],
    order: NDArray[np.int32],
    now: int,
) -> tuple[int, int]:
    """Uses, and how many of them the optimum hits, of the groups `ids` [L, width] flat, -1 where there is no more.

    `last` [L * E]: group of the last use, negative for none; `occupancy`: ring over groups; `order` [width]: scratch; `now`:
    number of the first group.
    """
    size = len(occupancy)
    needed = 0
    hits = 0
    for row in range(ids.shape[0]):
        group = now + row
        count = 0
        for j in range(ids.shape[1]):  # the latest used first
            expert = ids[row, j]
            if expert < 0:
                continue
            at = count
            while at > 0 and last[order[at - 1]] < last[expert]:
                order[at] = order[at - 1]
                at -= 1
            order[at] = expert
            count += 1
        occupancy[group % size] = count
        needed += count
        for j in range(count):
            expert = order[j]
            since = last[expert]
            last[expert] = group
            if since < 0 or group - since > size or not _fits(occupancy, since + 1, group, slots):
                continue
            hits += 1
            first, end = (since + 1) % size, group % size
            if first <= end:
                for t in range(first, end):
                    occupancy[t] += 1
            else:
                for t in range(first, size):
                    occupancy[t] += 1
                for t in range(end):
                    occupancy[t] += 1
    return needed, hits


class BeladyGap:
    """Hit rate, and the optimum's for as many slots, over the last `window` steps."""

    def __init__(self, num_slots: int, num_layers: int, num_experts: int, *, window: int = 64) -> None:
        """`num_experts` of each layer. UsageError for a window of no step."""
        if window < 1:
            raise UsageError(f"the window must be at least one step, got {window}")
        self.num_slots, self.num_layers, self.window = num_slots, num_layers, window
        self._last = np.full(num_layers * num_experts, -1, dtype=np.int64)
        self._occupancy = np.zeros(num_layers * window, dtype=np.int32)
        self._order = np.zeros(num_experts, dtype=np.int32)
        self._ring = [(0, 0, 0)] * window  # needed, hits, hits of the optimum, by step
        self._steps = 0
        self.needed = self.hits = self.optimal_hits = 0  # over the window

    def start(self) -> None:
        """Forgets everything: what comes does not follow on what was."""
        self._last[:] = -1
        self._ring = [(0, 0, 0)] * self.window
        self._steps = self.needed = self.hits = self.optimal_hits = 0

    def step(self, ids: NDArray[np.int32] | Sequence[Sequence[int]], hits: int) -> None:
        """A step: `ids` [L, width] flat ids of what each layer needed, -1 where it needed fewer; `hits` of them were
        resident."""
        ids = np.asarray(ids, dtype=np.int32)
        assert len(ids) == self.num_layers, f"{len(ids)} layers of {self.num_layers}"
        now = self._steps * self.num_layers
        needed, optimal = optimal_step(ids, self.num_slots, self._last, self._occupancy, self._order, now)
        place = self._steps % self.window
        gone = self._ring[place]
        self._ring[place] = (needed, hits, optimal)
        self._steps += 1
        self.needed += needed - gone[0]
        self.hits += hits - gone[1]
        self.optimal_hits += optimal - gone[2]

    @property
    def hit_rate(self) -> float:
        """Over the window; 0 before anything was needed."""
        return self.hits / max(1, self.needed)

    @property
    def optimal_hit_rate(self) -> float:
        """What Belady's optimum would have had."""
        return self.optimal_hits / max(1, self.needed)

    @property
    def gap(self) -> float:
        """By how much the optimum is better; below zero where prefetch is."""
        return self.optimal_hit_rate - self.hit_rate
