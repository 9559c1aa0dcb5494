"""Which experts a model chose, and what two cache policies would have made of it. Decisions only: no clock, no tensor.

A choice array is int [steps, layers, top_k]; an expert's flat id is `layer * experts + index`; the cache is one pool
of slots over all layers, cold at the start. At each position (step, layer) the experts that the router chose are
looked up first, then the missing ones are loaded, each into an empty slot or over a victim. An expert of the present
position is never a victim.
"""

from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

NEVER = 1 << 60


@dataclass(frozen=True)
class LayerStats:
    """How one layer routes, over all the steps given."""

    used: int  # experts chosen at least once
    entropy: float  # of the shares of the choices, over log(experts): 1 is even
    overlap: float  # share of a step's experts that the step before had too
    max_share: float  # of the choices that went to the busiest expert; 1 / experts is even
    dead: int  # experts never chosen


def positions(choices: NDArray[np.int64], experts: int) -> list[list[int]]:
    """Flat expert ids per position, in the order in which they are computed."""
    steps, layers, top_k = choices.shape
    flat = choices + np.arange(layers)[None, :, None] * experts
    return [[int(e) for e in row] for row in flat.reshape(steps * layers, top_k)]


def lru_hits(needs: list[list[int]], slots: int) -> int:
    """Lookups that find their expert resident, when the expert used longest ago is evicted."""
    _check(needs, slots)
    resident: OrderedDict[int, None] = OrderedDict()  # oldest use first
    hits = 0
    for need in needs:
        found = [e for e in need if e in resident]
        hits += len(found)
        for expert in found:
            resident.move_to_end(expert)
        for expert in need:
            if expert not in resident:
                if len(resident) == slots:
                    resident.popitem(last=False)  # slots >= len(need): never one of this position
                resident[expert] = None
    return hits


def belady_hits(needs: list[list[int]], slots: int) -> int:
    """The same, when the expert whose next use is farthest is evicted: no policy of loading on demand does better."""
    _check(needs, slots)
    uses: defaultdict[int, deque[int]] = defaultdict(deque)
    for position, need in enumerate(needs):
        for expert in need:
            uses[expert].append(position)
    next_use: dict[int, int] = {}  # of the residents
    hits = 0
    for need in needs:
        hits += sum(e in next_use for e in need)
        present = set(need)
        for expert in need:
            uses[expert].popleft()
            if expert not in next_use and len(next_use) == slots:
                victim = max((e for e in next_use if e not in present), key=lambda e: next_use[e])
                del next_use[victim]
            next_use[expert] = uses[expert][0] if uses[expert] else NEVER
    return hits


def _check(needs: list[list[int]], slots: int) -> None:
    most = max(map(len, needs), default=0)
    if slots < most:
        raise ValueError(f"slots must be at least the experts of one position={most}, got {slots}")


def layer_stats(choices: list[NDArray[np.int64]], experts: int) -> list[LayerStats]:
    """Statistics per layer over several sequences, each int [steps, layers, top_k]."""
    stats = []
    for layer in range(choices[0].shape[1]):
        of_layer = [sequence[:, layer] for sequence in choices]  # [steps, top_k] each
        counts = np.bincount(np.concatenate([c.ravel() for c in of_layer]), minlength=experts)
        shares = counts / counts.sum()
        positive = shares[shares > 0]
        same = [np.isin(now, before).mean() for c in of_layer for before, now in pairwise(c)]
        stats.append(
            LayerStats(
                used=int((counts > 0).sum()),
                entropy=float(-(positive * np.log(positive)).sum() / np.log(experts)),
                overlap=float(np.mean(same)),
                max_share=float(shares.max()),
                dead=int((counts == 0).sum()),
            )
        )
    return stats
