"""Runs the chosen experts of a layer: looks them up, loads the missing ones into slots, computes, gives the slots back.

Decisions are made by `Residency` (which slot, which victim) and by nothing else; bytes are moved by `Store`; arithmetic
is `ExpertsCompute`'s. What a token gets does not depend on which of its experts were resident, nor on how many rounds a
layer takes: each expert sees all its tokens of the layer in one call, and the sum over the k experts has a fixed order.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from seqmoe.profiles.errors import LinkError
from seqmoe.runtime.kernels.experts_cpu import ExpertsCompute
from seqmoe.runtime.link import Ticket
from seqmoe.runtime.replay import Replay
from seqmoe.runtime.report import Totals
from seqmoe.runtime.residency import Fetch, Lookup, Residency
from seqmoe.runtime.store import Store

log = logging.getLogger("seqmoe")

# In a pass over many tokens a layer's missing experts are loaded in groups of this many, so that the first can be
# computed while the next are on their way.
GROUP = 4
SMALL_RECORD_BYTES = 256 << 10
# An expert read that takes longer than this means a dead device, not a slow one.
READ_TIMEOUT_S = 120.0
_NEVER_ENDED = "an earlier read of the storage never ended; open the engine again"

# Sees what every layer routed: (layer, the router's input [tokens, H], chosen [tokens, k], their weights [tokens, k]).
# The tensors are only valid during the call.
Observer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(slots=True)
class _Load:
    """Fetches under way together."""

    fetches: list[Fetch]
    ticket: Ticket


class ResidentRunner:
    """Mode `full`: every expert has its own slot for good; a layer is one call into the kernels."""

    def __init__(self, computes: Sequence[ExpertsCompute], addresses: np.ndarray, totals: Totals) -> None:
        """`addresses` int64 [L, E, views]: where each view of each expert lies in memory."""
        self.computes = computes
        self.addresses = [np.ascontiguousarray(addresses[layer]) for layer in range(addresses.shape[0])]
        self.totals = totals
        self.replay: Replay | None = None
        self.observer: Observer | None = None

    def __call__(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.replay is not None:
            index, weights = self.replay.route(layer, index, weights)
        if self.observer is not None:
            self.observer(layer, hidden, index, weights)
        return self.computes[layer].forward(hidden, index, weights, self.addresses[layer])


class CachedRunner:
    """Every other mode: a pool of fewer slots than experts, with an eviction policy; `keep=False` is mode `eager`."""

    def __init__(
        self,
        computes: Sequence[ExpertsCompute],
        residency: Residency,
        store: Store,
        totals: Totals,
        *,
        keep: bool = True,
    ) -> None:
        self.computes = computes
        self.residency = residency
        self.store = store
        self.totals = totals
        self.keep = keep
        self.replay: Replay | None = None
        self.observer: Observer | None = None
        self.num_experts = residency.num_experts
        self._broken: str | None = None  # set when a slot may still be written to by a read that was given up
        self._interrupted = False  # Ctrl-C came, perhaps between two updates of a table
        self._prefetches: dict[int, _Load] = {}  # by tag
        views = store.num_views
        # int64 [E, views] per layer; the row of an expert is valid while the expert is resident.
        self.addresses = [np.zeros((self.num_experts, views), dtype=np.int64) for _ in computes]

    def __call__(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self._interrupted:
            self._start_over()
        try:
            return self._forward(layer, hidden, index, weights)
        except Exception:
            raise
        except BaseException:
            self._interrupted = True
            raise

    def _forward(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.replay is not None:
            index, weights = self.replay.route(layer, index, weights)
        if self._broken is not None:
            raise LinkError(self._broken)
        chosen = index.flatten().tolist()
        if self.observer is not None:
            self.observer(layer, hidden, index, weights)
        wanted = list(dict.fromkeys(chosen))
        if self._prefetches:
            self.land_arrived()
        residency = self.residency
        found = residency.lookup(layer, wanted)
        give_back = residency.release if self.keep else residency.discard
        try:
            if not found.missing and not found.in_flight:
                out = self.computes[layer].forward(hidden, index, weights, self.addresses[layer])
            else:
                out = self._with_misses(layer, hidden, index, weights, wanted, found)
        except Exception:
            give_back(layer)
            raise
        give_back(layer)
        totals, absent = self.totals, len(found.missing) + len(found.in_flight)
        totals.lookups += len(wanted)
        totals.hits += len(wanted) - absent
        totals.needed_bytes += absent * self.store.record_bytes
        return out

    def _start_over(self) -> None:
        """After an interruption: tables and slots may not agree, so that no expert counts as resident any more."""
        if not self.store.link.drain():
            self._broken = _NEVER_ENDED
            return
        self._prefetches.clear()
        self.residency.forget()
        self._interrupted = False

    # -- fetches made by a caller ---------------------------------------------------------------------------------

    def prefetch(self, flats: Sequence[int]) -> int:
        """Begins to fetch the experts (flat ids) that are neither resident nor under way, behind all on-demand loads,
        until no slot may be taken; returns how many it began. They land by themselves when a layer runs."""
        if self._interrupted:
            self._start_over()
        begun = 0
        try:
            for flat in flats:
                begun += self._prefetch(flat)
        except Exception:
            raise
        except BaseException:
            self._interrupted = True
            raise
        return begun

    def _prefetch(self, flat: int) -> bool:
        fetch = self.residency.fetch(flat)
        if fetch is None:
            return False
        try:
            self._prefetches[fetch.tag] = _Load([fetch], self.store.load([fetch], background=True))
        except Exception:
            self.residency.drop(fetch.tag)
            raise
        return True

    def land_arrived(self) -> None:
        """Takes in the fetches whose bytes are there; one that failed gives its slot back and is loaded when needed."""
        for load in [load for load in self._prefetches.values() if load.ticket.done()]:
            self._land(load)

    def _land(self, load: _Load) -> bool:
        fetch = load.fetches[0]
        try:
            load.ticket.wait(READ_TIMEOUT_S)
        except LinkError as error:
            if not load.ticket.done():
                raise  # still being written to: the slot must stay as it is
            log.warning("a fetch failed and will be repeated when needed: %s", error)
            del self._prefetches[fetch.tag]
            self.residency.fail(fetch)
            return False
        del self._prefetches[fetch.tag]
        if not self.residency.land(fetch.tag):
            return False
        self._place(fetch)
        return True

    # -- loading on demand ----------------------------------------------------------------------------------------

    def preload(self, popularity: NDArray[np.int64]) -> None:
        """Fills the pool with the most popular experts ([L * E] counts), the least of them first, so that they go first."""
        most = np.argsort(popularity, kind="stable")[-self.residency.num_slots :].tolist()
        pending: list[_Load] = []
        try:
            while most or pending:
                most = self._start(most, pending)
                load = pending.pop(0)
                self._finish(load)
                for fetch in load.fetches:
                    self.residency.release(fetch.expert // self.num_experts, [fetch.expert])
        except Exception:
            self._abandon(pending)
            raise

    def _with_misses(
        self,
        layer: int,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        wanted: list[int],
        found: Lookup,
    ) -> torch.Tensor:
        """Computes what is resident while the missing experts come in, group by group, as many at a time as slots allow."""
        addresses, base = self.addresses[layer], layer * self.num_experts
        absent = {flat - base for flat in found.missing} | {fetch.expert - base for fetch in found.in_flight}
        resident = [expert for expert in wanted if expert not in absent]
        missing = list(found.missing)
        for fetch in found.in_flight:  # its bytes are on their way already: nothing is faster than to await them
            if self._land(self._prefetches[fetch.tag]):
                resident.append(fetch.expert - base)
            else:
                missing.append(fetch.expert)
        job = self.computes[layer].begin(hidden, index, weights)
        pending: list[_Load] = []
        # A small record is there sooner than a thread wakes up, so the read is left to this one.
        inline = not resident or self.store.record_bytes <= SMALL_RECORD_BYTES
        try:
            missing = self._start(missing, pending, inline=inline)
            if resident:
                job.add(resident, addresses)
                if missing:  # the slots of what is computed make room for what is yet to come
                    self.residency.release(layer, [base + expert for expert in resident])
            missing = self._start(missing, pending)
            while pending:
                load = pending.pop(0)
                self._finish(load)
                if not pending:
                    missing = self._start(missing, pending)
                job.add([fetch.expert - base for fetch in load.fetches], addresses)
                if missing:
                    self.residency.release(layer, [fetch.expert for fetch in load.fetches])
                    missing = self._start(missing, pending)
        except Exception:
            self._abandon(pending)
            raise
        assert not missing, f"experts {missing} of layer {layer} found no slot"
        return job.finish()

    def _start(self, missing: list[int], pending: list[_Load], *, inline: bool = False) -> list[int]:
        """Begins to load as many of `missing` (flat ids) as there is room for; returns the rest."""
        while missing:
            room = min(self.residency.free_for_demand(), GROUP, len(missing))
            if room == 0:
                break
            fetches = [self.residency.load(flat) for flat in missing[:room]]
            try:
                pending.append(_Load(fetches, self.store.load(fetches, inline=inline)))
            except Exception:  # nothing is under way for these
                for fetch in fetches:
                    self.residency.fail(fetch)
                raise
            missing = missing[room:]
        return missing

    def _finish(self, load: _Load) -> None:
        started = time.perf_counter()
        try:
            load.ticket.wait(READ_TIMEOUT_S)
        except Exception:
            self._abandon([load])
            raise
        self.totals.stall_s += time.perf_counter() - started
        for fetch in load.fetches:
            self._place(fetch)

    def _place(self, fetch: Fetch) -> None:
        layer, expert = divmod(fetch.expert, self.num_experts)
        self.addresses[layer][expert] = self.store.view_addresses(fetch.expert, fetch.slot)

    def _abandon(self, loads: list[_Load]) -> None:
        """After an error: waits until nothing writes into the slots any more, then gives them back as EMPTY."""
        if not self.store.link.drain():
            self._broken = _NEVER_ENDED
            return
        for load in loads:
            for fetch in load.fetches:
                self.residency.fail(fetch)
