"""Runs the chosen experts of a layer: looks them up, loads the missing ones into slots, computes, gives the slots back.

Decisions are made by `Prefetcher` and its `Residency` and by nothing else; bytes are moved by `Store`; arithmetic is
`ExpertsCompute`'s. What a token gets does not depend on which of its experts were resident, nor on how many rounds a
layer takes: each expert sees all its tokens of the layer in one call, and the sum over the k experts has a fixed order.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from seqmoe.profiles.errors import LinkError
from seqmoe.runtime.fetching import Fetching
from seqmoe.runtime.kernels.experts_cpu import ExpertsCompute, ExpertsJob
from seqmoe.runtime.link import Ticket
from seqmoe.runtime.prefetch import Prefetcher
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
        started = time.perf_counter()
        out = self.computes[layer].forward(hidden, index, weights, self.addresses[layer])
        self.totals.experts_s += time.perf_counter() - started
        return out


class CachedRunner:
    """Every other mode: a pool of fewer slots than experts, and a policy; with `fetching` it also fetches ahead."""

    def __init__(
        self,
        computes: Sequence[ExpertsCompute],
        prefetcher: Prefetcher,
        store: Store,
        totals: Totals,
    ) -> None:
        self.computes = computes
        self.store = store
        self.totals = totals
        self.fetching: Fetching | None = None
        self.replay: Replay | None = None
        self.observer: Observer | None = None
        self.prompt_counts: NDArray[np.int64] | None = None  # [L * E] uses while a prompt runs, where somebody wants them
        self._lock: AbstractContextManager[object] = nullcontext()
        self._broken: str | None = None  # set when a slot may still be written to by a read that was given up
        self._interrupted = False  # Ctrl-C came, perhaps between two updates of a table
        self._compute_s = 0.0  # of the layer at work
        self.adopt(prefetcher)
        self._wanted: list[list[int]] = [[] for _ in computes]  # by layer, in the pass that runs
        # int64 [E, views] per layer; the row of an expert is valid while the expert is resident.
        self.addresses = [np.zeros((self.num_experts, store.num_views), dtype=np.int64) for _ in computes]

    def adopt(self, prefetcher: Prefetcher) -> None:
        """Works with these tables from now on."""
        self.prefetcher = prefetcher
        self.residency: Residency = prefetcher.residency
        self.num_experts = prefetcher.residency.num_experts

    def take_needed(self) -> NDArray[np.int32]:
        """[L, width] flat ids of what each layer of the pass needed, -1 where fewer; they are forgotten."""
        width = max(1, *map(len, self._wanted))
        needed = np.array([wanted + [-1] * (width - len(wanted)) for wanted in self._wanted], dtype=np.int32)
        needed += np.where(needed < 0, 0, np.arange(len(needed), dtype=np.int32)[:, None] * self.num_experts)
        self._wanted = [[] for _ in self._wanted]
        return needed

    def fetch_ahead(self, fetching: Fetching) -> None:
        """From now on somebody else uses the tables too."""
        self.fetching = fetching
        self._lock = fetching.lock

    def __call__(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self._interrupted:
            self._start_over()
        try:
            return self._forward(layer, hidden, index, weights)
        except Exception:
            raise
        except BaseException:
            self._interrupted = True
            if self.fetching is not None:
                self.fetching.region.set_pause(True)
            raise

    def _forward(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        started = time.perf_counter()
        totals, fetching = self.totals, self.fetching
        stalled, forecast = totals.stall_s, totals.predictor_s
        self._compute_s = 0.0
        if self.replay is not None:
            index, weights = self.replay.route(layer, index, weights)
        if self._broken is not None:
            raise LinkError(self._broken)
        # Python runs with cold caches here, after each layer's megabytes of weights: every step less counts
        rows = index.tolist()
        chosen = rows[0] if len(rows) == 1 else [expert for row in rows for expert in row]
        if self.observer is not None:
            self.observer(layer, hidden, index, weights)
        wanted = list(dict.fromkeys(chosen))
        self._wanted[layer] = wanted
        if self.prompt_counts is not None:
            first = layer * self.num_experts
            self.prompt_counts[first : first + self.num_experts] += np.bincount(chosen, minlength=self.num_experts)
        found = self.prefetcher.lookup(layer, wanted) if fetching is None else fetching.lookup(layer, wanted)
        absent = len(found.missing) + len(found.in_flight)
        try:
            if not absent:
                self._tell_routed(layer, hidden, index, weights)
                computing = time.perf_counter()
                out = self.computes[layer].forward(hidden, index, weights, self.addresses[layer])
                self._compute_s = time.perf_counter() - computing
            else:
                out = self._with_misses(layer, hidden, index, weights, wanted, found)
        except Exception:
            self._give_back(layer)
            raise
        self._give_back(layer)
        totals.lookups += len(wanted)
        totals.hits += len(wanted) - absent
        totals.needed_bytes += absent * self.store.record_bytes
        totals.experts_s += self._compute_s
        spent = time.perf_counter() - started - self._compute_s
        totals.management_s += spent - (totals.stall_s - stalled) - (totals.predictor_s - forecast)
        return out

    def _tell_routed(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
        """After the layer's own loads are bound: a forecast that comes now has no say in their victims."""
        if self.fetching is not None:
            self.fetching.routed(layer, hidden, index, weights)
            self.totals.predictor_s = self.fetching.predictor_s

    def _give_back(self, layer: int) -> None:
        with self._lock:
            self.prefetcher.release(layer)
        if self.fetching is not None:
            self.fetching.resume()

    def _start_over(self) -> None:
        """After an interruption: tables and slots may not agree, so that no expert counts as resident any more."""
        if not self.store.link.drain() or (self.fetching is not None and not self.fetching.start_over()):
            self._broken = _NEVER_ENDED
            return
        self.residency.forget()
        self._interrupted = False

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
                with self._lock:
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
        base = layer * self.num_experts
        absent = {flat - base for flat in found.missing} | {fetch.expert - base for fetch in found.in_flight}
        resident = [expert for expert in wanted if expert not in absent]
        missing = list(found.missing)
        for fetch in found.in_flight:  # its bytes are on their way already: nothing is faster than to await them
            waiting = time.perf_counter()
            assert self.fetching is not None
            arrived = self.fetching.await_late(fetch)
            self.totals.stall_s += time.perf_counter() - waiting
            if arrived:
                resident.append(fetch.expert - base)
            else:
                missing.append(fetch.expert)
        job = self.computes[layer].begin(hidden, index, weights)
        pending: list[_Load] = []
        # A small record is there sooner than a thread wakes up, so the read is left to this one.
        inline = not resident or self.store.record_bytes <= SMALL_RECORD_BYTES
        try:
            missing = self._start(missing, pending, inline=inline)
            self._tell_routed(layer, hidden, index, weights)
            if resident:
                self._add(job, layer, resident)
                if missing:  # the slots of what is computed make room for what is yet to come
                    self._release(layer, [base + expert for expert in resident])
            missing = self._start(missing, pending)
            while pending:
                load = pending.pop(0)
                self._finish(load)
                if not pending:
                    missing = self._start(missing, pending)
                if not missing and not pending and self.fetching is not None:
                    self.fetching.resume()
                self._add(job, layer, [fetch.expert - base for fetch in load.fetches])
                if missing:
                    self._release(layer, [fetch.expert for fetch in load.fetches])
                    missing = self._start(missing, pending)
        except Exception:
            self._abandon(pending)
            raise
        assert not missing, f"experts {missing} of layer {layer} found no slot"
        computing = time.perf_counter()
        out = job.finish()
        self._compute_s += time.perf_counter() - computing
        return out

    def _add(self, job: ExpertsJob, layer: int, experts: list[int]) -> None:
        computing = time.perf_counter()
        job.add(experts, self.addresses[layer])
        self._compute_s += time.perf_counter() - computing

    def _release(self, layer: int, flats: list[int]) -> None:
        with self._lock:
            self.residency.release(layer, flats)

    def _start(self, missing: list[int], pending: list[_Load], *, inline: bool = False) -> list[int]:
        """Begins to load as many of `missing` (flat ids) as there is room for; returns the rest."""
        while missing:
            with self._lock:
                room = min(self.residency.free_for_demand(), GROUP, len(missing))
                fetches = [self.prefetcher.load(flat) for flat in missing[:room]]
            if room == 0:
                break
            try:
                pending.append(_Load(fetches, self.store.load(fetches, inline=inline)))
            except Exception:  # nothing is under way for these
                self._fail(fetches)
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
        waited = time.perf_counter() - started
        self.totals.stall_s += waited
        if self.fetching is not None:
            self.fetching.loaded(len(load.fetches), waited)
        for fetch in load.fetches:
            self.place(fetch)

    def place(self, fetch: Fetch) -> None:
        """Notes where the fetch's expert now lies."""
        layer, expert = divmod(fetch.expert, self.num_experts)
        self.addresses[layer][expert] = self.store.view_addresses(fetch.expert, fetch.slot)

    def _abandon(self, loads: list[_Load]) -> None:
        """After an error: waits until nothing writes into the slots any more, then gives them back as EMPTY."""
        if not self.store.link.drain():
            self._broken = _NEVER_ENDED
            return
        self._fail([fetch for load in loads for fetch in load.fetches])

    def _fail(self, fetches: list[Fetch]) -> None:
        with self._lock:
            for fetch in fetches:
                self.residency.fail(fetch)
