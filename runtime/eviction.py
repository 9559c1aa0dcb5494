"""Which expert leaves when a slot is needed: LRU, LFU, static popularity, and Belady's optimum. Loads without torch.

An expert is a candidate while its slot is USED. The residency says when that begins (`release`) and ends (`touch`, or
being chosen by `victim`), so that a choice never looks at slots that may not be taken. EMPTY slots go before any
candidate and never reach this file. Recency is the order in which experts were released: a layer's experts together,
when its compute has finished.
"""

import difflib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from seqmoe.predictors.trace import Trace
from seqmoe.profiles.errors import UsageError

NEVER = 1 << 62  # position of a next use that does not come


class Eviction(Protocol):
    """Order of eviction over flat expert ids. Every method changes the order; none looks at a clock."""

    def touch(self, experts: Sequence[int], position: int) -> None:
        """`experts` are routed at `position`, resident or not; those that were candidates no longer are."""

    def release(self, experts: Sequence[int], position: int) -> None:
        """`experts`, none of them a candidate, are resident and no longer in use: they become candidates, in order."""

    def victim(self) -> int:
        """Takes the candidate that should leave out of the order and returns it. There must be one."""


class LRU:
    """Evicts what was used longest ago."""

    def __init__(self) -> None:
        self._candidates: OrderedDict[int, None] = OrderedDict()  # least recent first

    def touch(self, experts: Sequence[int], position: int) -> None:
        pop = self._candidates.pop
        for expert in experts:
            pop(expert, None)

    def release(self, experts: Sequence[int], position: int) -> None:
        candidates = self._candidates
        for expert in experts:
            candidates[expert] = None

    def victim(self) -> int:
        return self._candidates.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._candidates)


class _Ranked:
    """Evicts the candidate with the least rank, the less recent of equals.

    The rank may depend on everything up to the release, not on what comes after. A heap with stale entries: an entry
    counts while it is its expert's latest, and the heap is rebuilt when more than half are stale, so that every
    operation is O(log n) on average and memory is O(candidates).
    """

    def __init__(self) -> None:
        self._entry: dict[int, tuple[float, int, int]] = {}  # candidate -> (rank, release number, expert)
        self._heap: list[tuple[float, int, int]] = []
        self._releases = 0

    def touch(self, experts: Sequence[int], position: int) -> None:
        pop = self._entry.pop
        for expert in experts:
            pop(expert, None)

    def release(self, experts: Sequence[int], position: int) -> None:
        entries, heap, rank = self._entry, self._heap, self._rank
        number = self._releases
        for expert in experts:
            number += 1
            entry = (rank(expert, position), number, expert)
            entries[expert] = entry
            heappush(heap, entry)
        self._releases = number
        if len(heap) > 2 * len(entries) + 64:
            heap[:] = entries.values()
            heapify(heap)

    def victim(self) -> int:
        entries, heap = self._entry, self._heap
        while True:
            entry = heappop(heap)
            expert = entry[2]
            if entries.get(expert) is entry:
                del entries[expert]
                return expert

    def __len__(self) -> int:
        return len(self._entry)

    def _rank(self, expert: int, position: int) -> float:
        raise NotImplementedError


class LFU(_Ranked):
    """Evicts what was used least often over the whole run; a count survives eviction."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[int, int] = {}

    def touch(self, experts: Sequence[int], position: int) -> None:
        uses = self._uses
        for expert in experts:
            uses[expert] = uses.get(expert, 0) + 1
        super().touch(experts, position)

    def _rank(self, expert: int, position: int) -> float:
        return self._uses.get(expert, 0)


class Static(_Ranked):
    """Evicts what is least popular by a fixed count or score, shape [L * E]; equally popular experts by flat id.

    `order` lists all experts, most popular first: what to load before the first step.
    """

    def __init__(self, popularity: ArrayLike) -> None:
        super().__init__()
        scores = np.asarray(popularity, dtype=np.float64)
        if scores.ndim != 1 or not scores.size:
            raise UsageError(f"popularity must have shape [layers * experts], got {list(scores.shape)}")
        if not np.isfinite(scores).all():
            bad = int(np.argmin(np.isfinite(scores)))
            raise UsageError(f"popularity[{bad}] is {scores[bad]}, must be finite")
        self.order: list[int] = np.argsort(-scores, kind="stable").tolist()
        self._standing = [0] * len(self.order)  # by expert: the most popular one stands highest
        for place, expert in enumerate(self.order):
            self._standing[expert] = len(self.order) - place

    def _rank(self, expert: int, position: int) -> float:
        return self._standing[expert]


class Belady(_Ranked):
    """Evicts what is needed again last, from a trace of the future: no policy misses less (Belady 1966).

    Positions are those of the trace, `row * L + layer`; experts that are routed differently from the trace spoil the
    optimum, nothing else.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        flat = trace.flat_ids()
        total = trace.num_layers * trace.num_experts
        steps, layers, k = flat.shape
        width = np.int32 if steps * layers < 2**31 else np.int64
        positions = np.repeat(np.arange(steps * layers, dtype=width), k)
        # stable, so that each expert's positions stay ascending; 16-bit keys take numpy's radix sort
        keys = flat.ravel().astype(np.uint16) if total <= 65536 else flat.ravel()
        self._positions = positions[np.argsort(keys, kind="stable")].data  # a memoryview: items are plain integers
        self._first: list[int] = np.concatenate([[0], np.cumsum(np.bincount(keys, minlength=total))]).tolist()

    def next_use(self, expert: int, position: int) -> int:
        """The first position after `position` at which `expert` is used, or NEVER."""
        end = self._first[expert + 1]
        at = bisect_right(self._positions, position, self._first[expert], end)
        return self._positions[at] if at < end else NEVER

    def _rank(self, expert: int, position: int) -> float:
        return -self.next_use(expert, position)


class PrefillHot(Static):
    """KTransformers' choice, as SeqMoE section 9.3 has it: what the prompt used most stays, and nothing else is kept.

    `prefill` has been given the prompt's counts [L * E] when a request's decoding begins; before that it is `Static`.
    """

    def prefill(self, counts: ArrayLike) -> None:
        """A new request: its prompt's counts decide from now on, for candidates too. Ties as they stood before."""
        before = {expert: place for place, expert in enumerate(self.order)}
        uses = np.asarray(counts, dtype=np.float64).tolist()
        if len(uses) != len(self.order):
            raise UsageError(f"a prompt's counts must have shape [{len(self.order)}], got [{len(uses)}]")
        self.order = sorted(self.order, key=lambda expert: (-uses[expert], before[expert]))
        for place, expert in enumerate(self.order):
            self._standing[expert] = len(self.order) - place
        self._entry = {e: (self._standing[e], number, e) for e, (_, number, _) in self._entry.items()}
        self._heap = list(self._entry.values())
        heapify(self._heap)


class BeladyWithin:
    """Belady that sees only `steps` steps ahead (Belady-8 of SeqMoE section 3.3): what is not used within them goes
    first, of those the least recent."""

    def __init__(self, trace: Trace, steps: int) -> None:
        self.window = steps * trace.num_layers
        self._future = Belady(trace)
        self._position = -1
        self._candidates: OrderedDict[int, int] = OrderedDict()  # least recent first: expert -> next use

    def touch(self, experts: Sequence[int], position: int) -> None:
        self._position = position
        for expert in experts:
            self._candidates.pop(expert, None)

    def release(self, experts: Sequence[int], position: int) -> None:
        for expert in experts:
            self._candidates[expert] = self._future.next_use(expert, position)

    def victim(self) -> int:
        seen = self._position + self.window
        worst, latest = -1, -1
        for expert, next_use in self._candidates.items():
            if next_use > seen:
                worst = expert
                break
            if next_use > latest:
                worst, latest = expert, next_use
        del self._candidates[worst]
        return worst

    def __len__(self) -> int:
        return len(self._candidates)


def _static(popularity: ArrayLike | None, trace: Trace | None) -> Eviction:
    if popularity is None and trace is None:
        raise UsageError(
            "eviction 'static' needs the experts' popularity: counts of shape [layers * experts], or a trace"
        )
    return Static(trace.popularity() if popularity is None and trace is not None else np.asarray(popularity))


def _belady(popularity: ArrayLike | None, trace: Trace | None) -> Eviction:
    if trace is None:
        raise UsageError("eviction 'belady' needs the trace that will be replayed: it looks into the future")
    return Belady(trace)


def _belady_8(popularity: ArrayLike | None, trace: Trace | None) -> Eviction:
    if trace is None:
        raise UsageError("eviction 'belady-8' needs the trace that will be replayed: it looks into the future")
    return BeladyWithin(trace, 8)


EVICTIONS: dict[str, Callable[[ArrayLike | None, Trace | None], Eviction]] = {
    "lru": lambda popularity, trace: LRU(),
    "lfu": lambda popularity, trace: LFU(),
    "static": _static,
    "belady": _belady,
    "belady-8": _belady_8,
}


def make_eviction(name: str, *, popularity: ArrayLike | None = None, trace: Trace | None = None) -> Eviction:
    """A fresh eviction order by name: 'lru', 'lfu', 'static' (needs `popularity` [L * E], or counts it in `trace`),
    'belady' or 'belady-8' (need `trace`). Raises UsageError for a name that is not there or a need that is not met."""
    if name not in EVICTIONS:
        near = difflib.get_close_matches(name, EVICTIONS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(EVICTIONS)}"
        raise UsageError(f"unknown eviction '{name}': {hint}")
    return EVICTIONS[name](popularity, trace)


def popularity_share(popularity: NDArray[np.int64], num_layers: int, per_layer: int) -> float:
    """Share of all choices that go to the `per_layer` most popular experts of each layer; `popularity` is [L * E]."""
    by_layer = np.sort(popularity.reshape(num_layers, -1), axis=1)[:, ::-1]
    return float(by_layer[:, :per_layer].sum() / popularity.sum())
