"""The live distance to Belady's optimum: equal to the optimum itself where the window holds everything."""

import numpy as np
import pytest
from support.toy_traces import random_trace

from seqmoe.predictors.kernels import belady_hits
from seqmoe.profiles.errors import UsageError
from seqmoe.runtime.belady_gap import BeladyGap


def sticky_ids(seed: int, steps: int, layers: int, experts: int, k: int) -> np.ndarray:
    """Flat ids [steps, layers, k] of which many come again soon."""
    rng = np.random.default_rng(seed)
    liking = rng.random((layers, experts))
    ids = np.empty((steps, layers, k), dtype=np.int32)
    for step in range(steps):
        liking = 0.7 * liking + 0.3 * rng.random((layers, experts))
        ids[step] = np.argsort(-liking, axis=1)[:, :k] + np.arange(layers)[:, None] * experts
    return ids


def feed(gap: BeladyGap, ids: np.ndarray) -> list[int]:
    """Hits of the optimum as each step found them."""
    found = []
    for step in ids:
        before = gap.optimal_hits
        gap.step(step, 0)
        found.append(gap.optimal_hits - before)
    return found


def test_by_hand():
    # one layer, one expert a step, two slots: a b a c b a. Of the three that come again a and b stay, then a or b
    gap = BeladyGap(2, 1, 3, window=9)
    uses = np.array([0, 1, 0, 2, 1, 0], dtype=np.int32)[:, None, None]
    assert feed(gap, uses) == [0, 0, 1, 0, 1, 0]
    assert (gap.needed, gap.optimal_hits) == (6, 2) and gap.optimal_hit_rate == pytest.approx(1 / 3)


@pytest.mark.parametrize("seed", range(40))
def test_equal_to_belady_on_whole_traces(seed: int):
    rng = np.random.default_rng(seed)
    layers, experts = int(rng.integers(1, 6)), int(rng.integers(3, 12))
    k, steps = int(rng.integers(1, min(5, experts) + 1)), int(rng.integers(2, 80))
    if seed % 2:
        ids = sticky_ids(seed, steps, layers, experts, k)
    else:
        ids = random_trace([steps], layers, experts, k, seed).flat_ids().astype(np.int32)
    for slots in {k, k + 1, int(rng.integers(k, layers * experts + 1)), layers * experts}:
        gap = BeladyGap(slots, layers, experts, window=steps)
        feed(gap, ids)
        assert gap.needed == ids.size
        assert gap.optimal_hits == belady_hits(ids.reshape(-1, k), layers * experts, slots), (slots, k)


def test_a_window_sees_a_little_less():
    ids = sticky_ids(3, 600, 6, 16, 3)
    truth = {slots: belady_hits(ids.reshape(-1, 3), 96, slots) for slots in (14, 30, 60)}
    for slots, hits in truth.items():
        for window, points in ((64, 0.0), (16, 3.0), (8, 15.0)):
            found = sum(feed_all(BeladyGap(slots, 6, 16, window=window), ids))
            assert hits - points / 100 * ids.size <= found <= hits, (slots, window)


def feed_all(gap: BeladyGap, ids: np.ndarray) -> list[int]:
    """The optimum's hits of every step, also of those that have left the window."""
    found = []
    for step in ids:
        gap.step(step, 0)
        found.append(gap._ring[(gap._steps - 1) % gap.window][2])
    return found


def test_rates_are_of_the_window():
    ids = sticky_ids(5, 50, 3, 8, 2)
    gap = BeladyGap(10, 3, 8, window=7)
    assert (gap.hit_rate, gap.optimal_hit_rate, gap.gap) == (0.0, 0.0, 0.0)
    hits = np.random.default_rng(0).integers(0, 6, 50).tolist()
    optimal = []
    for step, count in zip(ids, hits, strict=True):
        gap.step(step, count)
        optimal.append(gap._ring[(gap._steps - 1) % 7][2])
    assert gap.needed == 7 * 6 and gap.hits == sum(hits[-7:]) and gap.optimal_hits == sum(optimal[-7:])
    assert gap.gap == pytest.approx((sum(optimal[-7:]) - sum(hits[-7:])) / 42)
    gap.start()
    assert (gap.needed, gap.hits, gap.optimal_hits) == (0, 0, 0)
    gap.step(ids[0], 0)
    assert gap.optimal_hits == 0, "what was used before the start does not count"


def test_layers_may_need_fewer():
    """A batch needs now more, now fewer experts of a layer."""
    rng = np.random.default_rng(1)
    gap, groups = BeladyGap(6, 2, 6, window=40), []
    for _ in range(40):
        rows = [np.sort(rng.permutation(6)[: rng.integers(1, 5)]) + 6 * layer for layer in range(2)]
        padded = np.full((2, 5), -1, dtype=np.int32)
        for row, own in zip(padded, rows, strict=True):
            row[: len(own)] = own
        gap.step(padded[:, rng.permutation(5)], 0)
        groups += rows
    assert gap.needed == sum(len(own) for own in groups)
    assert gap.optimal_hits == best_by_search(groups, 6)


def best_by_search(groups: list[np.ndarray], slots: int) -> int:
    """The most intervals between two uses that fit, each time taking the one that ends first, with sets instead of sums."""
    last: dict[int, int] = {}
    intervals = []
    for t, group in enumerate(groups):
        for expert in group.tolist():
            if expert in last:
                intervals.append((t, -last[expert], expert))
            last[expert] = t
    held = [set(group.tolist()) for group in groups]
    hits = 0
    for end, minus_begin, expert in sorted(intervals):
        inside = held[1 - minus_begin : end]
        if all(len(at) < slots for at in inside):
            hits += 1
            for at in inside:
                at.add(expert)
    return hits


def test_a_window_of_nothing_is_refused():
    with pytest.raises(UsageError, match="at least one step, got 0"):
        BeladyGap(4, 2, 4, window=0)
