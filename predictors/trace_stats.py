"""What a trace says about its model: how much consecutive steps share, how popular experts are, what caches would hit.

Loads without torch. Caches start cold in every sequence; a step's experts of one layer are looked up together.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqmoe.predictors.trace import Trace
from seqmoe.profiles.errors import UsageError


@dataclass(frozen=True)
class HitCurve:
    """Hit rates by cache size. `slots` are per layer for caches of each layer, else of the one pool of all layers."""

    policy: str  # lru, belady or static
    pool: bool  # one cache for all layers
    slots: tuple[int, ...]
    residency: tuple[float, ...]  # slots / experts
    hit_rate: tuple[float, ...]


@dataclass(frozen=True)
class TraceStats:
    """Figures of a trace; lists of L values are per layer."""

    sequences: int
    steps: int
    layers: int
    experts: int
    top_k: int
    overlap: float  # mean share of a step's k experts that the step before chose too
    overlap_by_layer: tuple[float, ...]
    entropy_bits_by_layer: tuple[float, ...]  # of the popularity; log2(experts) where all are equally popular
    unused_experts: int
    popularity: tuple[tuple[float, ...], ...]  # [L][E] share of the layer's choices
    curves: tuple[HitCurve, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def trace_stats(
    trace: Trace, residencies: Sequence[float] | None = None, progress: Callable[[int, int], None] | None = None
) -> TraceStats:
    """Counts everything. `residencies`: shares of the experts at which the curves are taken (default: 16 of them).

    Raises UsageError for a share that is not in (0, 1] or gives less than k slots a layer.
    """
    popularity = trace.popularity().reshape(trace.num_layers, trace.num_experts)
    shares = popularity / popularity.sum(axis=1, keepdims=True)
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    by_layer = overlap_by_layer(trace)
    return TraceStats(
        trace.num_sequences,
        trace.num_steps,
        trace.num_layers,
        trace.num_experts,
        trace.top_k,
        float(by_layer.mean()),
        _floats(by_layer),
        _floats(-(shares * logs).sum(axis=1)),
        int((popularity == 0).sum()),
        tuple(_floats(row) for row in shares),
        hit_curves(trace, _layer_slots(trace, residencies), progress),
    )


def overlap_by_layer(trace: Trace) -> NDArray[np.float64]:
    """Mean share of a step's k experts that the same layer chose in the step before, within sequences: [L]."""
    same = np.zeros((max(trace.num_steps - 1, 0), trace.num_layers), dtype=np.int64)
    before, after = trace.expert_ids[:-1], trace.expert_ids[1:]
    for j in range(trace.top_k):
        same += (after == before[:, :, j : j + 1]).sum(axis=2)
    inside = np.ones(len(same), dtype=bool)
    inside[trace.seq_start[1:] - 1] = False
    if not inside.any():
        raise UsageError("overlap needs a sequence of at least 2 steps, every one in this trace has 1")
    return same[inside].mean(axis=0) / trace.top_k


def hit_curves(
    trace: Trace, layer_slots: Sequence[int], progress: Callable[[int, int], None] | None = None
) -> tuple[HitCurve, ...]:
    """LRU, Belady and the statically most popular, per layer with `layer_slots` each and as one pool of L times that."""
    from seqmoe.predictors.kernels import belady_hits, lru_depths  # numba takes a while to import

    layers, experts, total = trace.num_layers, trace.num_experts, trace.expert_ids.size
    everything = layers * experts
    pool_slots = [slots * layers for slots in layer_slots]
    depths = np.zeros(experts + 1, dtype=np.int64)
    pool_depths = np.zeros(everything + 1, dtype=np.int64)
    belady = np.zeros(len(layer_slots), dtype=np.int64)
    pool_belady = np.zeros(len(layer_slots), dtype=np.int64)
    for i in range(trace.num_sequences):
        sequence = trace.sequence(i)
        for layer in range(layers):
            groups = np.ascontiguousarray(sequence.expert_ids[:, layer], dtype=np.int32)
            lru_depths(groups, experts, depths)
            belady += [belady_hits(groups, experts, slots) for slots in layer_slots]
        pooled = sequence.flat_ids().reshape(-1, trace.top_k)
        lru_depths(pooled, everything, pool_depths)
        pool_belady += [belady_hits(pooled, everything, slots) for slots in pool_slots]
        if progress:
            progress(i + 1, trace.num_sequences)
    popularity = trace.popularity().reshape(layers, experts)
    ranked = np.cumsum(np.sort(popularity, axis=1)[:, ::-1].sum(axis=0))
    pool_ranked = np.cumsum(np.sort(popularity.ravel())[::-1])
    found: list[HitCurve] = []
    for pool, slots, whole, lru, optimum, static in (
        (False, layer_slots, experts, depths, belady, ranked),
        (True, pool_slots, everything, pool_depths, pool_belady, pool_ranked),
    ):
        hits = np.cumsum(lru[:-1])
        residency = tuple(n / whole for n in slots)
        for policy, rates in (
            ("lru", [hits[n - 1] / total for n in slots]),
            ("belady", optimum / total),
            ("static", [static[n - 1] / total for n in slots]),
        ):
            found.append(HitCurve(policy, pool, tuple(slots), residency, _floats(rates)))
    return tuple(found)


def plot_stats(stats: TraceStats, path: Path) -> None:
    """Overlap and entropy per layer, popularity by rank, and the hit-rate curves, as one PNG."""
    from seqmoe.predictors.plots import COLOURS, new_figure

    figure, (layer_axes, rank_axes, cache_axes) = new_figure(3)
    layers = range(stats.layers)
    layer_axes.plot(layers, stats.overlap_by_layer, color=COLOURS[0], marker="o", label="overlap with the step before")
    top = np.log2(stats.experts) or 1.0
    entropy = np.array(stats.entropy_bits_by_layer) / top
    layer_axes.plot(layers, entropy, color=COLOURS[1], marker="s", label="entropy / log2(experts)")
    layer_axes.axhline(stats.top_k / stats.experts, color="black", linestyle=":", label="overlap at random")
    layer_axes.set_xlabel("MoE layer")
    layer_axes.set_ylim(0, 1.02)
    layer_axes.legend(frameon=False, fontsize=8)
    ranked = np.sort(np.array(stats.popularity), axis=1)[:, ::-1]
    places = np.arange(1, stats.experts + 1)
    rank_axes.fill_between(places, ranked.min(axis=0), ranked.max(axis=0), color=COLOURS[4], alpha=0.4, label="layers")
    rank_axes.plot(places, ranked.mean(axis=0), color=COLOURS[0], label="mean")
    rank_axes.set_xlabel("expert, by rank in its layer")
    rank_axes.set_ylabel("share of choices")
    rank_axes.set_ylim(bottom=0)
    rank_axes.legend(frameon=False, fontsize=8)
    for place, policy in enumerate(("belady", "lru", "static")):
        for curve in (c for c in stats.curves if c.policy == policy):
            label = f"{policy}, {'one pool' if curve.pool else 'per layer'}"
            x = [100 * share for share in curve.residency]
            line = "--" if curve.pool else "-"
            cache_axes.plot(x, curve.hit_rate, line, color=COLOURS[place], marker="os^"[place], ms=4, label=label)
    cache_axes.set_xlabel("residency (% of the experts)")
    cache_axes.set_ylabel("hit rate, cold at every sequence")
    cache_axes.set_ylim(0, 1.02)
    cache_axes.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{stats.sequences} sequences, {stats.steps} steps, {stats.layers} layers, {stats.experts} experts")
    figure.savefig(path, format="png")


def _layer_slots(trace: Trace, residencies: Sequence[float] | None) -> list[int]:
    experts, k = trace.num_experts, trace.top_k
    if residencies is None:
        return sorted({max(k, round(experts * i / 16)) for i in range(1, 17)})
    slots = [round(experts * share) for share in residencies]
    for share, count in zip(residencies, slots, strict=True):
        if not k <= count <= experts:
            raise UsageError(
                f"residency {share} of {experts} experts is {count} a layer, must be {k} (k) to {experts}: "
                f"{k / experts:.3g} to 1"
            )
    return sorted(set(slots))


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
