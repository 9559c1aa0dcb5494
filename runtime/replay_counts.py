"""Demand caching over a whole trace, counted: the same residency and eviction objects as the engine, no bytes moved."""

from seqmoe.predictors.trace import Trace
from seqmoe.runtime.eviction import make_eviction
from seqmoe.runtime.residency import Counts, Residency


def replay(trace: Trace, num_slots: int, eviction_name: str) -> Counts:
    """Counts after all of `trace` with one pool of `num_slots` (at least k) shared by all layers, from cold, without
    prefetch. 'static' takes its popularity from the trace itself."""
    if num_slots < trace.top_k:
        raise ValueError(f"num_slots must be at least top_k={trace.top_k}, got {num_slots}")
    eviction = make_eviction(eviction_name, trace=trace)
    residency = Residency(num_slots, trace.num_layers, trace.num_experts, eviction)
    lookup, load, release = residency.lookup, residency.load, residency.release
    for step in trace.expert_ids:
        residency.begin_step()
        for layer, experts in enumerate(step.tolist()):
            for expert in lookup(layer, experts).missing:
                load(expert)
            release(layer)
    return residency.counts


def replay_layers(trace: Trace, slots_per_layer: int, eviction_name: str) -> Counts:
    """As `replay`, but each layer has a cache of its own with `slots_per_layer`, and every sequence starts from cold:
    the usual figure for a trace's locality. The counts are summed over layers and sequences."""
    total = Counts()
    for index in range(trace.num_sequences):
        sequence = trace.sequence(index)
        for layer in range(trace.num_layers):
            counts = replay(sequence.layer(layer), slots_per_layer, eviction_name)
            total.hits += counts.hits
            total.misses += counts.misses
            total.on_demand += counts.on_demand
            total.evictions += counts.evictions
    return total
