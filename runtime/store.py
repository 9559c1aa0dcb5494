"""The owner of the records: brings whole experts into slots, and knows where each of their tensors then lies."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from seqmoe.profiles.errors import BudgetError, CheckpointError
from seqmoe.profiles.machine import memory_facts
from seqmoe.profiles.sizes import format_bytes
from seqmoe.runtime.extents import RecordPlan
from seqmoe.runtime.link import Link, Request, Ticket
from seqmoe.runtime.link_sources import FileSource, MemorySource
from seqmoe.runtime.pool import Pool

if TYPE_CHECKING:
    from seqmoe.runtime.residency import Fetch

Progress = Callable[[int, int], None]  # records done, records in all


class Store:
    """Records of `plan`, read over `link` into slots of `pool`. It closes both, also when it cannot be made.

    The link's first sources are the checkpoint's files in the plan's order. Over a `dma` link all records are held in memory from
    the start (the host copy) and slots are names only: `view_addresses` points into that copy, the pool stays untouched.
    Over a `throttled` link with `host_copy` records are copied from there, else from the files.

    Raises CheckpointError if a file no longer has the size that the plan was made for, BudgetError if the host copy does not
    fit in memory.
    """

    def __init__(
        self,
        plan: RecordPlan,
        pool: Pool,
        link: Link,
        *,
        host_copy: bool = False,
        progress: Progress | None = None,
    ) -> None:
        assert pool.slot_bytes == plan.slot_bytes, (pool.slot_bytes, plan.slot_bytes)
        self.plan = plan
        self.pool = pool
        self.link = link
        self.num_views = int(plan.view_offset.shape[2])
        self.record_bytes = plan.record_bytes
        self.slot_bytes = plan.slot_bytes
        self.bytes_needed = 0  # of the experts loaded so far, without alignment
        self._view_offset = np.ascontiguousarray(plan.view_offset.reshape(plan.num_records, self.num_views))
        self._host: Pool | None = None
        self._host_source = -1
        # Plain lists: the reads of one expert are looked up while the model waits for them.
        self._first_read: list[int] = plan.first_read.tolist()
        self._reads: list[tuple[int, int, int, int]] = list(
            zip(
                plan.read_file.tolist(),
                plan.read_offset.tolist(),
                plan.read_length.tolist(),
                plan.read_slot_offset.tolist(),
                strict=True,
            )
        )
        try:
            self._check_sizes()
            if link.kind == "dma" or host_copy:
                self._make_host_copy(progress)
        except BaseException:
            self.close()
            raise

    def load(self, fetches: Sequence["Fetch"], *, inline: bool = False, background: bool = False) -> Ticket:
        """Begins to read each fetch's expert into its slot; one ticket for all.

        `inline`: the caller waits at once. `background`: goes after all loads that are not. Errors name the expert.
        """
        requests: list[Request] = []
        by_address: list[tuple[int, int]] = []
        for fetch in fetches:
            flat, base = fetch.expert, self.pool.slot_address(fetch.slot)
            by_address.append((base, flat))
            if self._host is not None:
                nbytes = self.record_bytes if self.link.kind == "dma" else self.slot_bytes
                requests.append(Request(self._host_source, flat * self.slot_bytes, nbytes, base))
                continue
            for file, offset, length, place in self._reads[self._first_read[flat] : self._first_read[flat + 1]]:
                requests.append(Request(file, offset, length, base + place))

        def describe(request: Request) -> str:
            flat = next(flat for base, flat in by_address if base <= request.address < base + self.slot_bytes)
            return f"expert {self.name(flat)} could not be loaded"

        ticket = self.link.submit(requests, inline=inline, background=background, describe=describe)
        self.bytes_needed += len(fetches) * self.record_bytes
        return ticket

    def load_all(self, progress: Progress | None = None) -> NDArray[np.int64]:
        """Loads every expert, flat id f into slot f; returns the views' addresses, int64 [L, E, n_views]."""
        assert self.pool.num_slots >= self.plan.num_records, (self.pool.num_slots, self.plan.num_records)
        if self._host is None:
            self._read_all(self.link, self.pool, progress)
            self.bytes_needed += self.plan.num_records * self.record_bytes
        everyone = np.arange(self.plan.num_records)
        return self.addresses(everyone, everyone).reshape(self.plan.view_offset.shape)

    def view_addresses(self, flat: int, slot: int) -> NDArray[np.int64]:
        """int64 [n_views]: the absolute address of each view of expert `flat` when it is loaded in `slot`."""
        if self._host is not None and self.link.kind == "dma":
            return self._view_offset[flat] + self._host.slot_address(flat)
        return self._view_offset[flat] + self.pool.slot_address(slot)

    def addresses(self, flats: Sequence[int] | NDArray[np.int64], slots: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """`view_addresses` of several: int64 [len(flats), n_views]."""
        offsets = self._view_offset[np.asarray(flats, dtype=np.int64)]
        if self._host is not None and self.link.kind == "dma":
            return offsets + (np.asarray(flats, dtype=np.int64) * self.slot_bytes + self._host.address)[:, None]
        return offsets + (np.asarray(slots, dtype=np.int64) * self.slot_bytes + self.pool.address)[:, None]

    @property
    def bytes_read(self) -> int:
        """Bytes that came over the link so far, alignment included (`dma`: bytes charged)."""
        return self.link.stats.bytes_read

    @property
    def host_copy_bytes(self) -> int:
        """Memory that the host copy takes, which stands for another tier's: not part of any budget."""
        return self._host.nbytes if self._host is not None else 0

    def name(self, flat: int) -> str:
        """The expert's name in messages."""
        return f"(layer {flat // self.plan.num_experts}, index {flat % self.plan.num_experts})"

    def check_unchanged(self) -> None:
        """Raises LinkError if a checkpoint's file was written to since it was opened."""
        self.link.check_unchanged()

    def close(self) -> bool:
        """Closes the link, then gives the memory back. False if a read hangs: the memory it may write to is then kept."""
        stopped = self.link.close()
        if stopped:
            self.pool.close()
            if self._host is not None:
                self._host.close()
        return stopped

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_sizes(self) -> None:
        for source, planned in zip(self.link.sources, self.plan.file_bytes, strict=True):
            if isinstance(source, FileSource) and source.nbytes != planned:
                raise CheckpointError(f"{source.name}: the file has {source.nbytes} bytes, its header says {planned}")

    def _make_host_copy(self, progress: Progress | None) -> None:
        need = self.plan.num_records * self.slot_bytes
        memory = memory_facts()
        room = memory.ram_room_bytes - memory.rss_bytes
        if memory.cgroup_room_bytes is not None:
            room = min(room, memory.cgroup_room_bytes - memory.rss_bytes)
        if need > room:
            raise BudgetError(
                f"a {self.link.kind} link keeps all {self.plan.num_records} experts in memory: {format_bytes(need)},"
                f" but {format_bytes(room)} are free; use link disk"
            )
        self._host = Pool(self.plan.num_records, self.slot_bytes)
        # Opened anew: these reads are neither held back nor counted.
        sources = [Path(source.name) if isinstance(source, FileSource) else source for source in self.link.sources]
        with Link(sources) as disk:
            self._read_all(disk, self._host, progress)
        self._host_source = self.link.add_source(MemorySource("host copy", self._host.address, self._host.nbytes))

    def _read_all(self, link: Link, into: Pool, progress: Progress | None) -> None:
        total = self.plan.num_records
        group = max(1, (64 << 20) // self.slot_bytes)
        for begin in range(0, total, group):
            requests = [
                Request(file, offset, length, into.slot_address(flat) + place)
                for flat in range(begin, min(total, begin + group))
                for file, offset, length, place in self._reads[self._first_read[flat] : self._first_read[flat + 1]]
            ]
            link.read(requests)
            if progress is not None:
                progress(min(total, begin + group), total)
