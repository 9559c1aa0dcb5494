"""Which expert is in which slot, and who may take a slot: pure tables, no clock, no file, no thread, no torch.

Slot states and all ways between them (design section 4):

    EMPTY, USED -> FETCH     fetch()             a prefetch was bound to the slot; its bytes may arrive at any time
    FETCH -> COMPUTE         land()              they are there; protected until the expert's layer was computed
    FETCH -> EMPTY           drop(), fail(), or land() of an orphan
    EMPTY, USED -> COMPUTE   load()              on-demand load for the layer at work
    USED -> COMPUTE          lookup()            a hit; all hits of a layer, before anything is allocated
    COMPUTE -> USED          release()           the layer's compute has finished reading; settle() between passes
    COMPUTE -> EMPTY         fail(), discard()   the read went wrong; or the layer's experts are not to be kept
    USED, COMPUTE -> EMPTY   clear()             everywhere: a cold start

FETCH and COMPUTE are never evicted, and a slot in FETCH belongs to its transfer until that is acknowledged by its tag.
"""

from array import array
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, fields
from enum import IntEnum
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from seqmoe.runtime.eviction import Eviction


class SlotState(IntEnum):
    EMPTY = 0  # no expert
    USED = 1  # an expert that may be evicted
    FETCH = 2  # a prefetch is on its way
    COMPUTE = 3  # an expert that may not be evicted


# plain integers: an IntEnum member costs an attribute lookup each time
EMPTY, USED, FETCH, COMPUTE = (int(state) for state in SlotState)


class NoSlot(RuntimeError):
    """Every slot is in FETCH or COMPUTE: the caller must release a round or await a transfer first."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """A record to be brought into a slot. Between its making and its end the slot's bytes belong to the transfer."""

    expert: int  # flat id
    slot: int
    victim: int  # flat id of the expert that lost the slot, -1 for none
    tag: int  # unique in the life of the table, ascending from 1


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a layer's routed experts found."""

    slots: list[int]  # in the order asked; -1 where the expert is missing or in flight
    missing: list[int]  # flat ids to load on demand
    in_flight: list[Fetch]  # prefetches to await (land their tags), or to orphan and load


@dataclass(slots=True)
class Counts:
    """Counts of events since the start or the last reset."""

    hits: int = 0  # needed and resident before the on-demand load began
    misses: int = 0  # needed and not resident: hits + misses = all that was needed
    late: int = 0  # those of the misses that were in flight
    on_demand: int = 0  # on-demand loads begun
    prefetched: int = 0  # prefetches begun
    landed: int = 0  # prefetches that arrived
    dropped: int = 0  # prefetches given up
    orphaned: int = 0  # prefetches whose expert was loaded elsewhere meanwhile
    failed: int = 0  # loads and prefetches whose read went wrong
    evictions: int = 0  # experts that lost their slot to another

    @property
    def hit_rate(self) -> float:
        """Hits over all needed, 0.0 before anything was needed."""
        return self.hits / max(1, self.hits + self.misses)


class Residency:
    """The slots of one pool shared by all layers, and the experts in them.

    One layer is at work at a time: `lookup`, `load` what is missing, compute, `release`, then the next layer.
    `reserve` slots are kept out of prefetch, so that the layer's at most `reserve` needed experts always find room;
    None keeps a whole layer's worth (E) out. Not safe to use from several threads at once.
    """

    def __init__(
        self, num_slots: int, num_layers: int, num_experts: int, eviction: Eviction, *, reserve: int | None = None
    ) -> None:
        for name, value in (("num_slots", num_slots), ("num_layers", num_layers), ("num_experts", num_experts)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.num_slots = num_slots
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.eviction = eviction
        self.counts = Counts()
        self.step = -1  # before the first begin_step: prefill, whose positions lie before the first decode step's
        self.position = -num_layers  # step * L + layer of the last lookup
        total = num_layers * num_experts
        self._slot_of = array("i", [-1]) * total
        self._expert_of = array("i", [-1]) * num_slots  # -1 also for an orphan's slot
        self._state = bytearray(num_slots)
        self._tag_of = [0] * num_slots  # tag of the slot's latest Fetch
        self._empty = list(range(num_slots))  # heap: the lowest EMPTY slot goes first
        self._num_used = 0
        # by layer, the experts in COMPUTE, in the order in which they came to it
        self._computing: list[dict[int, None]] = [{} for _ in range(num_layers)]
        self._in_flight: dict[int, Fetch] = {}  # by tag; slots in FETCH
        self._orphans: set[int] = set()  # those tags of them that no expert waits for
        self._unclaimed: set[int] = set()  # experts that landed and were neither looked up nor released since
        self._last_tag = 0
        self._reserve = 0
        self.reserve = num_experts if reserve is None else reserve

    # -- what is where ------------------------------------------------------------------------------------------

    @property
    def slot_of_expert(self) -> NDArray[np.int32]:
        """[L * E] slot of each expert, -1 where it has none (in FETCH it has one already). A live, read-only view."""
        return _view(self._slot_of, np.int32)

    @property
    def expert_of_slot(self) -> NDArray[np.int32]:
        """[num_slots] flat id of each slot's expert, -1 where it has none. A live, read-only view."""
        return _view(self._expert_of, np.int32)

    @property
    def state(self) -> NDArray[np.uint8]:
        """[num_slots] SlotState of each slot. A live, read-only view."""
        return _view(self._state, np.uint8)

    @property
    def in_flight(self) -> list[Fetch]:
        """Prefetches that were neither landed, dropped nor failed, oldest first; orphans too."""
        return list(self._in_flight.values())

    @property
    def reserve(self) -> int:
        """Slots that prefetch leaves alone: `demand_reserve(E, k, batch)`. To be raised only when nothing is fetched."""
        return self._reserve

    @reserve.setter
    def reserve(self, slots: int) -> None:
        if not 1 <= slots <= self.num_experts:
            raise ValueError(f"reserve must be 1 to num_experts={self.num_experts}, got {slots}")
        held = self._held()
        assert not held or held <= self.num_slots - slots, f"prefetch holds {held} of {self.num_slots}, reserve {slots}"
        self._reserve = slots

    def is_ready(self, expert: int) -> bool:
        """Whether `expert` (flat id) is resident, that is in USED or COMPUTE."""
        slot = self._slot_of[expert]
        return slot >= 0 and self._state[slot] != FETCH

    def free_for_demand(self) -> int:
        """How many on-demand loads may be made now: slots in EMPTY or USED."""
        return len(self._empty) + self._num_used

    def free_for_prefetch(self) -> int:
        """How many fetches may be made now: never more than leaves `reserve` slots to demand."""
        return max(0, min(self.free_for_demand(), self.num_slots - self._reserve - self._held()))

    # -- the layer at work --------------------------------------------------------------------------------------

    def begin_step(self, step: int | None = None) -> None:
        """Starts decode step `step` (default: the next; the first is 0). Only Belady depends on the number."""
        self.step = self.step + 1 if step is None else step
        self.position = self.step * self.num_layers

    def lookup(self, layer: int, experts: Sequence[int]) -> Lookup:
        """What of the `experts` (distinct indices within `layer`) is resident; those go to COMPUTE at once. Counts hits
        and misses, so call it once per layer and step, before the layer's first load."""
        num_experts = self.num_experts
        assert 0 <= layer < self.num_layers, f"layer {layer} of {self.num_layers}"
        assert len(set(experts)) == len(experts), f"experts are not distinct: {experts}"
        base = layer * num_experts
        self.position = position = self.step * self.num_layers + layer
        slot_of, state = self._slot_of, self._state
        slots: list[int] = []
        missing: list[int] = []
        in_flight: list[Fetch] = []
        needed: list[int] = []
        for index in experts:
            assert 0 <= index < num_experts, f"expert {index} of {num_experts} in layer {layer}"
            expert = base + index
            needed.append(expert)
            slot = slot_of[expert]
            if slot < 0:
                missing.append(expert)
                slots.append(-1)
                continue
            now = state[slot]
            if now == USED:
                state[slot] = COMPUTE
                self._num_used -= 1
                self._computing[layer][expert] = None
            elif now == FETCH:
                in_flight.append(self._in_flight[self._tag_of[slot]])
                slots.append(-1)
                continue
            elif self._unclaimed:
                self._unclaimed.discard(expert)
            slots.append(slot)
        self.eviction.touch(needed, position)
        counts = self.counts
        late = len(in_flight)
        absent = len(missing) + late
        counts.hits += len(needed) - absent
        counts.misses += absent
        counts.late += late
        return Lookup(slots, missing, in_flight)

    def load(self, expert: int) -> Fetch:
        """Binds a slot to `expert` (flat id, not resident, not in flight), which must be read before the compute.
        Raises NoSlot when every slot is in FETCH or COMPUTE; nothing has changed then."""
        assert self._slot_of[expert] < 0, f"expert {expert} already has slot {self._slot_of[expert]}"
        fetch = self._bind(expert, COMPUTE)
        self._computing[expert // self.num_experts][expert] = None
        self.counts.on_demand += 1
        return fetch

    def release(self, layer: int, experts: Sequence[int] | None = None) -> None:
        """COMPUTE -> USED for the layer's experts, or for those `experts` (flat ids, all in COMPUTE) of one round: their
        compute has finished reading. Prefetches of the layer that landed and were not needed are given back as well."""
        computing = self._computing[layer]
        done = list(computing) if experts is None else experts
        if not done:
            return
        slot_of, state = self._slot_of, self._state
        if experts is None:
            computing.clear()
        else:
            for expert in experts:
                del computing[expert]
        for expert in done:
            state[slot_of[expert]] = USED
        if self._unclaimed:
            self._unclaimed.difference_update(done)
        self._num_used += len(done)
        self.eviction.release(done, self.position)

    def discard(self, layer: int) -> None:
        """COMPUTE -> EMPTY for the layer's experts, in place of `release`, where nothing is to be kept (mode eager)."""
        for expert in list(self._computing[layer]):
            self._vacate(self._slot_of[expert])

    def clear(self) -> None:
        """USED and COMPUTE -> EMPTY, everywhere: a cold start. No compute may be reading. Prefetches in flight go on."""
        for layer in range(self.num_layers):
            self.discard(layer)
        for _ in range(self._num_used):
            self._vacate(self._slot_of[self.eviction.victim()])
        self._num_used = 0

    def forget(self) -> None:
        """Every slot EMPTY, whatever an interruption between two updates has left here. Nothing may be reading or writing."""
        total = self.num_layers * self.num_experts
        self.eviction.touch(range(total), self.position)  # no candidates are left
        self._slot_of[:] = array("i", [-1]) * total  # in place: there may be views of it
        self._expert_of[:] = array("i", [-1]) * self.num_slots
        self._state[:] = bytes(self.num_slots)
        self._empty = list(range(self.num_slots))
        self._num_used = 0
        self._computing = [{} for _ in range(self.num_layers)]
        self._in_flight.clear()
        self._orphans.clear()
        self._unclaimed.clear()

    # -- prefetch -----------------------------------------------------------------------------------------------

    def fetch(self, expert: int) -> Fetch | None:
        """Binds a slot to `expert` (flat id) ahead of its need; None if it is resident or in flight, or if no slot may
        be taken. The transfer must end in exactly one of land, drop and fail."""
        if self._slot_of[expert] >= 0 or self.free_for_prefetch() == 0:
            return None
        fetch = self._bind(expert, FETCH)
        self._in_flight[fetch.tag] = fetch
        self.counts.prefetched += 1
        return fetch

    def land(self, tag: int) -> bool:
        """The prefetch's bytes are in its slot. True if its expert is ready now; False for a stale tag, which changes
        nothing, and for an orphan, whose slot becomes EMPTY."""
        fetch = self._in_flight.get(tag)
        if fetch is None:
            return False
        del self._in_flight[tag]
        if tag in self._orphans:
            self._vacate(fetch.slot)
            return False
        self._state[fetch.slot] = COMPUTE
        self._computing[fetch.expert // self.num_experts][fetch.expert] = None
        self._unclaimed.add(fetch.expert)
        self.counts.landed += 1
        return True

    def settle(self) -> None:
        """COMPUTE -> USED for prefetches that landed and were never looked up. Only between passes: no layer is at work."""
        for layer, experts in enumerate(self._computing):
            waiting = [expert for expert in experts if expert in self._unclaimed]
            if waiting:
                self.release(layer, waiting)

    def drop(self, tag: int) -> bool:
        """The transfer was given up and will write no more: its slot becomes EMPTY. False for a stale tag."""
        fetch = self._in_flight.pop(tag, None)
        if fetch is None:
            return False
        if tag not in self._orphans:
            self.counts.dropped += 1
        self._vacate(fetch.slot)
        return True

    def fail(self, fetch: Fetch) -> bool:
        """The read went wrong, of a prefetch or of an on-demand load: its slot becomes EMPTY. To be called before the
        layer's release. False for a stale tag."""
        if self._tag_of[fetch.slot] != fetch.tag or self._state[fetch.slot] == EMPTY:
            return False
        assert self._state[fetch.slot] != USED, f"{fetch} was released before its failure was reported"
        self._in_flight.pop(fetch.tag, None)
        self._vacate(fetch.slot)
        self.counts.failed += 1
        return True

    def orphan(self, tag: int) -> bool:
        """Parts a prefetch from its expert, which may then be loaded elsewhere; the slot stays in FETCH until the tag
        is acknowledged by land, drop or fail, and is EMPTY then. False for a stale tag or an orphan."""
        fetch = self._in_flight.get(tag)
        if fetch is None or tag in self._orphans:
            return False
        self._orphans.add(tag)
        self._slot_of[fetch.expert] = -1
        self._expert_of[fetch.slot] = -1
        self.counts.orphaned += 1
        return True

    # -- inside -------------------------------------------------------------------------------------------------

    def reset_counts(self) -> Counts:
        """Starts the counts again from zero and returns the old ones."""
        old, self.counts = self.counts, Counts()
        return old

    def _held(self) -> int:
        """Slots that prefetch holds: in flight, or landed and waiting for their layer."""
        return len(self._in_flight) + len(self._unclaimed)

    def _bind(self, expert: int, state: int) -> Fetch:
        victim = -1
        if self._empty:
            slot = heappop(self._empty)
        elif self._num_used:
            victim = self.eviction.victim()
            slot = self._slot_of[victim]
            assert self._state[slot] == USED, f"victim {victim} is in slot {slot}, {SlotState(self._state[slot]).name}"
            self._slot_of[victim] = -1
            self._num_used -= 1
            self.counts.evictions += 1
        else:
            raise NoSlot(f"all {self.num_slots} slots are in FETCH or COMPUTE, none for expert {expert}")
        self._last_tag = tag = self._last_tag + 1
        self._slot_of[expert] = slot
        self._expert_of[slot] = expert
        self._state[slot] = state
        self._tag_of[slot] = tag
        return Fetch(expert, slot, victim, tag)

    def _vacate(self, slot: int) -> None:
        """Any state -> EMPTY. What the caller has done before: a tag is out of `_in_flight`, a victim is accounted for."""
        expert = self._expert_of[slot]
        if expert < 0:
            self._orphans.discard(self._tag_of[slot])
        else:
            self._slot_of[expert] = -1
            self._expert_of[slot] = -1
            if self._state[slot] == COMPUTE:
                del self._computing[expert // self.num_experts][expert]
                self._unclaimed.discard(expert)
        self._state[slot] = EMPTY
        heappush(self._empty, slot)

    def check_integrity(self) -> None:
        """Raises AssertionError, printing both sides, where tables, lists and counts contradict each other. O(L * E)."""
        slots_by_state: list[list[int]] = [[] for _ in SlotState]
        for slot, state in enumerate(self._state):
            slots_by_state[state].append(slot)
        empty, used, fetch, compute = slots_by_state
        flying = self._in_flight
        orphan_slots = [flying[tag].slot for tag in self._orphans]
        placed = {slot: expert for slot, expert in enumerate(self._expert_of) if expert >= 0}
        _same("slots of experts", {s: e for e, s in enumerate(self._slot_of) if s >= 0}, "experts of slots", placed)
        _same("experts with a slot", sum(s >= 0 for s in self._slot_of), "slots with an expert", len(placed))
        _same("slots without expert", sorted(set(range(self.num_slots)) - set(placed)), "EMPTY and orphaned slots",
              sorted(empty + orphan_slots))  # fmt: skip
        _same("free list", sorted(self._empty), "slots in EMPTY", empty)
        _same("count of USED", self._num_used, "slots in USED", len(used))
        if isinstance(self.eviction, Sized):
            _same("candidates of eviction", len(self.eviction), "slots in USED", len(used))
        _same("slots in flight", sorted(f.slot for f in flying.values()), "slots in FETCH", fetch)
        _same("tags in flight", [f.tag for f in flying.values()], "tags of their slots",
              [self._tag_of[f.slot] for f in flying.values()])  # fmt: skip
        _same("experts in flight", sorted(f.expert for f in flying.values() if f.tag not in self._orphans),
              "experts of slots in FETCH", sorted(placed[s] for s in fetch if s in placed))  # fmt: skip
        _same("experts at work", sorted(self._slot_of[e] for layer in self._computing for e in layer),
              "slots in COMPUTE", compute)  # fmt: skip
        _same("experts at work by layer", [[e // self.num_experts for e in layer] for layer in self._computing],
              "their layers", [[i] * len(layer) for i, layer in enumerate(self._computing)])  # fmt: skip
        _same("landed and unclaimed", sorted(self._unclaimed), "those of them in COMPUTE",
              sorted(e for e in self._unclaimed if self._slot_of[e] in compute))  # fmt: skip
        if (held := self._held()) > max(0, self.num_slots - self._reserve):
            raise AssertionError(f"prefetch holds {held} of {self.num_slots} slots, {self._reserve} are reserved")
        late = self.counts.late
        if min(getattr(self.counts, f.name) for f in fields(Counts)) < 0 or late > self.counts.misses:
            raise AssertionError(f"counts are impossible: {self.counts}")


def demand_reserve(num_experts: int, top_k: int, batch: int) -> int:
    """Slots to keep out of prefetch: the most experts that one layer of one decode step can need."""
    return min(num_experts, top_k * batch)


def plan_rounds(missing: Sequence[int], resident: Iterable[int], room: int) -> list[list[int]]:
    """The experts to compute in each round of a layer that needs more of them than fit at once.

    The first round takes all that are `resident` (in COMPUTE, or in flight and awaited) and as many of the `missing`
    as there is `room` (`free_for_demand()` after the lookup); each later one as many of the rest as the slots that the
    release of a round gives back, its own and the residents'. With room for all it is one round. Order is kept, every
    expert is in exactly one round. Raises NoSlot where no slot ever comes free.

    >>> plan_rounds([10, 11, 12, 13, 14], [1, 2], room=1)
    [[1, 2, 10], [11, 12, 13], [14]]
    """
    rounds = [[*resident, *missing[:room]]]
    size = len(rounds[0])  # if missing is left over, `room` of them are in: all that the pool gives to this layer
    rest = missing[room:]
    if rest and not size:
        raise NoSlot(f"{len(missing)} experts are needed and no slot is free for the layer")
    rounds += [list(rest[i : i + size]) for i in range(0, len(rest), size or 1)]
    return rounds


def _view(buffer: array | bytearray, dtype: type[np.generic]) -> NDArray:
    view = np.frombuffer(buffer, dtype=dtype)
    view.flags.writeable = False
    return view


def _same(left_name: str, left: object, right_name: str, right: object) -> None:
    if left != right:
        raise AssertionError(f"{left_name}: {left} != {right_name}: {right}")
