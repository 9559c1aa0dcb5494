"""Eviction on traces small enough to work out by hand, and the known figures of the real trace."""

from pathlib import Path

import numpy as np
import pytest

from seqmoe.predictors.trace import Trace, read_npz
from seqmoe.runtime.eviction import make_eviction, popularity_share
from seqmoe.runtime.replay_counts import replay, replay_layers
from seqmoe.runtime.residency import Residency

ROUTING = Path(__file__).parents[2].parent / "shared" / "traces" / "gpt-oss-20b" / "routing.npz"


def make_trace(choices: list[list[list[int]]], num_experts: int) -> Trace:
    ids = np.array(choices, dtype=np.int16)
    return Trace(ids, None, None, np.zeros(1, dtype=np.int64), np.array([len(ids)]), num_experts)


def play(trace: Trace, num_slots: int, name: str) -> tuple[int, int, list[int]]:
    """(hits, misses, victims in order) of demand caching."""
    residency = Residency(num_slots, trace.num_layers, trace.num_experts, make_eviction(name, trace=trace))
    victims = []
    for step in trace.expert_ids.tolist():
        residency.begin_step()
        for layer, experts in enumerate(step):
            for flat in residency.lookup(layer, experts).missing:
                fetch = residency.load(flat)
                if fetch.victim >= 0:
                    victims.append(fetch.victim)
            residency.release(layer)
    counts = residency.counts
    assert counts == replay(trace, num_slots, name)
    return counts.hits, counts.misses, victims


# Belady's own anomaly string, one layer, k = 1, three slots:    0 1 2 3 0 1 4 0 1 2 3 4
ANOMALY = make_trace([[[e]] for e in (0, 1, 2, 3, 0, 1, 4, 0, 1, 2, 3, 4)], 5)


def test_lru_by_hand() -> None:
    # 0 1 2 fill. 3 takes 0, 0 takes 1, 1 takes 2, 4 takes 3 -> {0, 1, 4}; 0 and 1 hit -> order 4 0 1;
    # 2 takes 4, 3 takes 0, 4 takes 1. Misses 3 + 4 + 3 = 10.
    assert play(ANOMALY, 3, "lru") == (2, 10, [0, 1, 2, 3, 4, 0, 1])


def test_belady_by_hand() -> None:
    # 0 1 2 fill. 3: next uses 0@4 1@5 2@9, takes 2. 0 1 hit. 4 (at 6): 0@7 1@8 3@10, takes 3. 0 1 hit.
    # 2 (at 9): 0 and 1 never again, 4@11; the less recent is 0. 3 (at 10): takes 1. 4 hits. Misses 3 + 4 = 7.
    assert play(ANOMALY, 3, "belady") == (5, 7, [2, 3, 0, 1])


def test_lfu_by_hand() -> None:
    # 0 1 2 fill, each used once. 3 takes 0. 0 (its 2nd use) takes 1 of 1:1 2:1 3:1. 1 (2nd) takes 2 of 2:1 3:1 0:2.
    # 4 takes 3 of 3:1 0:2 1:2. 0 1 hit (3 each). 2 (2nd) takes 4 of 0:3 1:3 4:1. 3 (2nd) takes 2 of 0:3 1:3 2:2.
    # 4 (2nd) takes 3 of 0:3 1:3 3:2. Misses 3 + 7 = 10.
    assert play(ANOMALY, 3, "lfu") == (2, 10, [0, 1, 2, 3, 4, 2, 3])


def test_lfu_counts_misses_by_hand() -> None:
    # Two slots, 0 1 2 0 3 4 0. 0 1 fill. 2 takes 0. 0 (2nd) takes 1 of 1:1 2:1. 3 takes 2 of 2:1 0:2. 4 takes 3 of 0:2
    # 3:1, though 0 is the less recent: its first use was a miss and counts all the same. 0 hits.
    trace = make_trace([[[e]] for e in (0, 1, 2, 0, 3, 4, 0)], 5)
    assert play(trace, 2, "lfu") == (1, 6, [0, 1, 2, 3])


def test_static_by_hand() -> None:
    # Uses: 0:3 1:3 2:2 3:2 4:2, of equals the higher id leaves first. 0 1 2 fill. 3 takes 2. 0 1 hit. 4 takes 3.
    # 0 1 hit. 2 takes 4. 3 takes 2. 4 takes 3. Misses 3 + 5 = 8: 0 and 1 never leave.
    assert play(ANOMALY, 3, "static") == (4, 8, [2, 3, 4, 2, 3])


# Two layers of three experts (flat 0 1 2 and 3 4 5), k = 2, one pool of four slots.
#                                 layer 0  layer 1                        flat
TWO_LAYERS = make_trace([[[0, 1], [0, 1]],  # position 0, 1:  0 1 | 3 4
                         [[0, 2], [2, 0]],  # position 2, 3:  0 2 | 5 3
                         [[1, 2], [0, 1]]], 3)  # 4, 5:       1 2 | 3 4   # fmt: skip


def test_lru_over_two_layers_by_hand() -> None:
    # 0: load 0 1. 1: load 3 4. 2: 0 hits, 2 takes 1 -> order 3 4 0 2. 3: 3 hits though it is the least recent and 5 is
    # asked for before it: hits are claimed first, so 5 takes 4 -> order 0 2 3 5. 4: 2 hits, 1 takes 0 -> 3 5 2 1.
    # 5: 3 hits, 4 takes 5. Hits 0 3 2 3.
    assert play(TWO_LAYERS, 4, "lru") == (4, 8, [1, 4, 0, 5])


def test_belady_over_two_layers_by_hand() -> None:
    # 0, 1: load 0 1 3 4. 2: 0 hits; next uses 1@4 3@3 4@5, 2 takes 4. 3: 3 hits; 0 never, 1@4, 2@4, 5 takes 0.
    # 4: 1 2 hit. 5: 3 hits; none of 5 1 2 is used again and 5 is the least recent, 4 takes 5. Hits 0 3 1 2 3.
    assert play(TWO_LAYERS, 4, "belady") == (5, 7, [4, 0, 5])


def test_replay_per_layer_starts_cold_in_each_sequence() -> None:
    ids = np.array([[[0]], [[0]], [[0]], [[0]]], dtype=np.int16)
    trace = Trace(ids, None, None, np.array([0, 2]), np.array([2, 2]), 2)
    assert replay(trace, 1, "lru").hits == 3  # one run over everything: only the first misses
    counts = replay_layers(trace, 1, "lru")
    assert (counts.hits, counts.misses) == (2, 2)  # the first of each sequence misses


def test_replay_needs_room_for_a_layer() -> None:
    with pytest.raises(ValueError, match="num_slots must be at least top_k=2, got 1"):
        replay(TWO_LAYERS, 1, "lru")


# -- the real trace: figures on the whole of it are given with it, for per-layer caches that start cold -----------------


@pytest.fixture(scope="module")
def routing() -> Trace:
    if not ROUTING.exists():
        pytest.skip("the shared trace is not here")
    return read_npz(ROUTING)


def one_by_one(trace: Trace, layers: range) -> list[Trace]:
    """Each layer as a trace that asks for one expert at a time, best first: the textbook cache, where a step's later
    expert can lose its place to an earlier one. The given LRU figures are of that kind."""
    k = trace.top_k
    return [
        Trace(trace.expert_ids[:, i].reshape(-1, 1, 1), None, None, trace.seq_start * k, trace.seq_len * k, 32)
        for i in layers
    ]


def hit_rate(traces: list[Trace], slots: int, name: str) -> float:
    counts = [replay_layers(trace, slots, name) for trace in traces]
    return sum(c.hits for c in counts) / sum(c.hits + c.misses for c in counts)


def test_figures_of_the_whole_trace(routing: Trace) -> None:
    assert (routing.num_steps, routing.num_sequences) == (112114, 321)
    assert (routing.num_layers, routing.num_experts, routing.top_k) == (24, 32, 4)
    assert routing.overlap() == pytest.approx(0.44, abs=0.005)
    assert popularity_share(routing.popularity(), 24, 8) == pytest.approx(0.49, abs=0.015)


@pytest.fixture(scope="module")
def sample(routing: Trace) -> list[Trace]:
    """Every fourth layer of every 40th sequence: near the whole trace's figures, in a fiftieth of the time."""
    part = routing.select(range(6, 321, 40))
    return [part.layer(i) for i in range(1, 24, 4)]


@pytest.mark.parametrize(("slots", "expected"), [(8, 0.62), (14, 0.84)])
def test_lru_figures(routing: Trace, slots: int, expected: float) -> None:
    traces = one_by_one(routing.select(range(6, 321, 40)), range(1, 24, 4))
    assert hit_rate(traces, slots, "lru") == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(("slots", "lru", "belady"), [(8, 0.64, 0.77), (14, 0.85, 0.92)])
def test_figures_layer_by_layer(sample: list[Trace], slots: int, lru: float, belady: float) -> None:
    assert hit_rate(sample, slots, "lru") == pytest.approx(
        lru, abs=0.02
    )  # more than one by one: hits are claimed first
    assert hit_rate(sample, slots, "belady") == pytest.approx(belady, abs=0.02)


@pytest.mark.parametrize(
    ("name", "hits", "misses"),
    [("lru", 9613, 6899), ("lfu", 9940, 6572), ("static", 10353, 6159), ("belady", 13219, 3293)],
)
def test_one_pool_regression(routing: Trace, name: str, hits: int, misses: int) -> None:
    """Counts of our own, kept so that a change of any choice shows: two sequences, a quarter of all experts resident."""
    counts = replay(routing.select([1, 200]), 192, name)
    assert (counts.hits, counts.misses) == (hits, misses)


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "one", "lru", "belady"), [(8, 0.6230, 0.6492, 0.7700), (14, 0.8430, 0.8498, 0.9175)])
def test_figures_of_all_layers(routing: Trace, slots: int, one: float, lru: float, belady: float) -> None:
    """Every 8th sequence; the expected figures are those of this code on all 321, which takes five minutes."""
    part = routing.select(range(2, 321, 8))
    assert hit_rate(one_by_one(part, range(24)), slots, "lru") == pytest.approx(one, abs=0.01)
    assert replay_layers(part, slots, "lru").hit_rate == pytest.approx(lru, abs=0.01)
    assert replay_layers(part, slots, "belady").hit_rate == pytest.approx(belady, abs=0.01)
