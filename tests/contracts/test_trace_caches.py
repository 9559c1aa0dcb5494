"""The quick cache loops of predictors/ against the runtime's own residency and eviction, which they must equal."""

import numpy as np
import pytest
from support.routing import routed_trace

from seqmoe.predictors.kernels import belady_hits, lru_depths
from seqmoe.predictors.trace import Trace
from seqmoe.predictors.trace_stats import hit_curves
from seqmoe.runtime.eviction import LRU
from seqmoe.runtime.replay_counts import replay


def demanded(trace: Trace, policy: str, slots: int) -> int:
    """Hits of one pool on one sequence: the optimum as the runtime's residency counts it, LRU by the runtime's order.

    The residency releases a layer's hits before what was loaded, so which of one layer's experts is older depends on
    the number of slots; here all of a layer's experts are released as they were chosen.
    """
    if policy == "belady":
        return replay(trace, slots, policy).hits
    order = LRU()
    resident: set[int] = set()
    hits = 0
    for position, row in enumerate(trace.flat_ids().reshape(-1, trace.top_k).tolist()):
        order.touch(row, position)
        hits += sum(expert in resident for expert in row)
        for expert in row:
            if expert not in resident:
                if len(resident) == slots:
                    resident.remove(order.victim())
                resident.add(expert)
        order.release(row, position)
    return hits


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layers", [1, 3])
def test_hits_equal_the_runtimes_for_every_size(seed: int, layers: int) -> None:
    trace = routed_trace(seed, lengths=(120,), layers=layers)
    universe = layers * trace.num_experts
    groups = trace.flat_ids().reshape(-1, trace.top_k)
    counts = np.zeros(universe + 1, dtype=np.int64)
    lru_depths(groups, universe, counts)
    lru = np.cumsum(counts)
    for slots in range(trace.top_k, universe + 1):
        assert lru[slots - 1] == demanded(trace, "lru", slots), slots
        assert belady_hits(groups, universe, slots) == demanded(trace, "belady", slots), slots
    assert counts.sum() == groups.size and counts[-1] == len(np.unique(groups))


def test_curves_add_up_sequences_and_layers() -> None:
    trace = routed_trace(5, lengths=(40, 30))
    curves = {(c.policy, c.pool): c for c in hit_curves(trace, [2, 5])}
    parts = [trace.sequence(i) for i in range(2)]
    per_layer = sum(demanded(part.layer(layer), "lru", 5) for part in parts for layer in range(3))
    assert curves["lru", False].hit_rate[1] == pytest.approx(per_layer / trace.expert_ids.size)
    pooled = sum(demanded(part, "belady", 15) for part in parts)
    assert curves["belady", True].hit_rate[1] == pytest.approx(pooled / trace.expert_ids.size)
    for pool in (False, True):
        assert all(b >= a for a, b in zip(curves["lru", pool].hit_rate, curves["belady", pool].hit_rate, strict=True))
