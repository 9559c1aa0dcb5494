"""The loops over traces that numpy cannot do: stack distances, Belady's optimum, ranks. Compiled by numba, cached."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

NEVER = 1 << 62  # next use that does not come


@njit(cache=True, nogil=True)
def lru_depths(groups: NDArray[np.int32], universe: int, counts: NDArray[np.int64]) -> None:
    """Adds to counts[d] the uses of experts that had d others used more recently (Mattson's stack distance).

    `groups` [G, k]: the experts, 0 to universe - 1, that are used together; all of a group are looked up before any is
    loaded, then used in their order. An LRU cache of C >= k slots hits what has d < C. counts has universe + 1
    entries; the last takes first uses. Starts cold.
    """
    total = groups.shape[0] * groups.shape[1]
    tree = np.zeros(total + 1, dtype=np.int32)  # Fenwick tree over time: 1 where an expert was used last
    last = np.zeros(universe, dtype=np.int64)  # 1-based time of last use, 0: none
    now = 0
    distinct = 0
    for g in range(groups.shape[0]):
        for j in range(groups.shape[1]):
            at = last[groups[g, j]]
            if at == 0:
                counts[universe] += 1
                continue
            older = 0  # experts whose last use is not later than this one's
            while at > 0:
                older += tree[at]
                at -= at & -at
            counts[distinct - older] += 1
        for j in range(groups.shape[1]):
            expert = groups[g, j]
            now += 1
            at = last[expert]
            if at == 0:
                distinct += 1
            else:
                while at <= total:
                    tree[at] -= 1
                    at += at & -at
            last[expert] = now
            at = now
            while at <= total:
                tree[at] += 1
                at += at & -at


@njit(cache=True, nogil=True)
def belady_hits(groups: NDArray[np.int32], universe: int, slots: int) -> int:
    """Hits of the optimal cache of `slots` >= k on `groups` [G, k] (see `lru_depths`), from cold: it evicts what is
    used again last (Belady 1966), never what the present group uses."""
    count, k = groups.shape
    total = count * k
    next_use = np.empty((count, k), dtype=np.int64)
    coming = np.full(universe, NEVER, dtype=np.int64)
    for g in range(count - 1, -1, -1):
        for j in range(k):
            next_use[g, j] = coming[groups[g, j]]
        for j in range(k):
            coming[groups[g, j]] = g
    resident = np.zeros(universe, dtype=np.bool_)
    due = np.full(universe, -1, dtype=np.int64)  # next use of a resident; -1 while its group is at work
    keys = np.empty(total + 1, dtype=np.int64)  # heap, greatest first, with entries that are out of date
    items = np.empty(total + 1, dtype=np.int32)
    size = 0
    used = 0
    hits = 0
    for g in range(count):
        for j in range(k):
            expert = groups[g, j]
            if resident[expert]:
                hits += 1
                due[expert] = -1  # not to be evicted by this group's own misses
        for j in range(k):
            expert = groups[g, j]
            if resident[expert]:
                continue
            if used < slots:
                used += 1
            else:
                while True:
                    key = keys[0]
                    item = items[0]
                    size -= 1
                    if size > 0:  # the last entry sinks from the top
                        moved_key = keys[size]
                        moved_item = items[size]
                        at = 0
                        while True:
                            child = 2 * at + 1
                            if child >= size:
                                break
                            if child + 1 < size and keys[child + 1] > keys[child]:
                                child += 1
                            if keys[child] <= moved_key:
                                break
                            keys[at] = keys[child]
                            items[at] = items[child]
                            at = child
                        keys[at] = moved_key
                        items[at] = moved_item
                    if resident[item] and due[item] == key:
                        resident[item] = False
                        break
            resident[expert] = True
            due[expert] = -1
        for j in range(k):
            expert = groups[g, j]
            key = next_use[g, j]
            due[expert] = key
            at = size
            size += 1
            while at > 0:
                parent = (at - 1) // 2
                if keys[parent] >= key:
                    break
                keys[at] = keys[parent]
                items[at] = items[parent]
                at = parent
            keys[at] = key
            items[at] = expert
    return hits


@njit(cache=True, nogil=True)
def count_ranks(scores: NDArray[np.float32], ids: NDArray[np.int16], counts: NDArray[np.int64]) -> None:
    """Adds the ranks of the chosen experts among the scores: counts[l, r] += 1 for an expert with r others above it.

    `scores` [R, L, E], `ids` [R, L, k], `counts` [L, E]; of equal scores the lower index is above.
    """
    rows, layers, experts = scores.shape
    for r in range(rows):
        for layer in range(layers):
            for j in range(ids.shape[2]):
                expert = ids[r, layer, j]
                score = scores[r, layer, expert]
                above = 0
                for other in range(experts):
                    value = scores[r, layer, other]
                    if value > score or (value == score and other < expert):
                        above += 1
                counts[layer, above] += 1


@njit(cache=True, nogil=True)
def running_counts(
    ids: NDArray[np.int16], weights: NDArray[np.float32], decay: float, out: NDArray[np.float32]
) -> None:
    """out[t] = decay * out[t - 1] + what step t - 1 chose, out[0] = 0. `ids`, `weights` [S, L, k], `out` [S, L, E]."""
    for t in range(1, ids.shape[0]):
        for layer in range(ids.shape[1]):
            for e in range(out.shape[2]):
                out[t, layer, e] = decay * out[t - 1, layer, e]
            for j in range(ids.shape[2]):
                out[t, layer, ids[t - 1, layer, j]] += weights[t - 1, layer, j]


@njit(cache=True, nogil=True)
def shift_rows(logits: NDArray[np.float64], k: int, out: NDArray[np.float32]) -> None:
    """out[r] = sigmoid(logits[r] + b) with b so that the row sums to k: Newton's method within a shrinking bracket.

    `logits` and `out` [R, E], 1 <= k < E.
    """
    rows, experts = logits.shape
    start = np.log(k / (experts - k))
    for r in range(rows):
        least = logits[r, 0]
        most = logits[r, 0]
        for e in range(1, experts):
            least = min(least, logits[r, e])
            most = max(most, logits[r, e])
        low = start - most  # with all logits alike the answer would be start - logit
        high = start - least
        shift = low if k == 1 else 0.5 * (low + high)
        for _ in range(60):
            total = 0.0
            slope = 0.0
            for e in range(experts):
                p = 1.0 / (1.0 + np.exp(-(logits[r, e] + shift)))
                out[r, e] = p
                total += p
                slope += p * (1.0 - p)
            excess = total - k
            if abs(excess) < 1e-5 * k:
                break
            if excess > 0:
                high = shift
            else:
                low = shift
            step = shift - excess / max(slope, 1e-12)
            shift = step if low < step < high else 0.5 * (low + high)
