"""Where each record lies on disk and where its bytes land in a slot, for reads that go straight to the slot (no bounce copy).

O_DIRECT moves whole blocks: a read covers the 4096-aligned superset of its views, so a view's place inside its slot depends on
the remainder of its file offset and differs from expert to expert. Pure arithmetic: no file, no clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from seqmoe.profiles.errors import CheckpointError

if TYPE_CHECKING:
    from seqmoe.runtime.layout import RecordLayout

ALIGN = 4096  # bytes; every read's file offset, memory address and (but at a file's end) length is a multiple

def round_up(nbytes: int) -> int:
    """`nbytes` up to the next multiple of 4096."""
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True)
class Read:
    """One read of a record: `length` bytes at `offset` of file `file` go to byte `slot_offset` of the slot.

    `offset` and `slot_offset` are multiples of 4096. `length` is one too, but where the file ends first; the slot has room
    for `length` rounded up, which is what O_DIRECT asks for.
    """

    file: int
    offset: int  # bytes in the file
    length: int  # bytes
    slot_offset: int  # bytes in the slot


@dataclass(frozen=True)
class RecordPlan:
    """The reads of every record, and where each view then lies in its slot."""

    view_offset: NDArray[np.int64]  # [L, E, n_views] bytes inside the slot
    slot_bytes: int  # the same for every expert: the largest, a multiple of 4096
    record_bytes: int  # bytes that the views need, without alignment
    file_bytes: tuple[int, ...]  # size of each file that the plan was made for
    first_read: NDArray[np.int64]  # [L*E + 1]: the reads of expert `flat` are first_read[flat] : first_read[flat + 1]
    read_file: NDArray[np.int64]  # [n_reads]
    read_offset: NDArray[np.int64]  # [n_reads] bytes in the file
    read_length: NDArray[np.int64]  # [n_reads] bytes
    read_slot_offset: NDArray[np.int64]  # [n_reads] bytes in the slot

    @property
    def num_layers(self) -> int:
        return int(self.view_offset.shape[0])

    @property
    def num_experts(self) -> int:
        return int(self.view_offset.shape[1])

    @property
    def num_records(self) -> int:
        return self.num_layers * self.num_experts

    def reads(self, flat: int) -> list[Read]:
        """The reads that bring expert `flat` into a slot, in the order of their places in it."""
        begin, end = int(self.first_read[flat]), int(self.first_read[flat + 1])
        columns = (self.read_file, self.read_offset, self.read_length, self.read_slot_offset)
        return [Read(*row) for row in zip(*(c[begin:end].tolist() for c in columns), strict=True)]

    @cached_property
    def read_bytes(self) -> NDArray[np.int64]:
        """[L*E] bytes read from storage for each expert, alignment included."""
        return np.add.reduceat(self.read_length, self.first_read[:-1])


def plan_records(layout: "RecordLayout", sources: NDArray[np.int64], file_bytes: Sequence[int]) -> RecordPlan:
    """The plan for a model whose record has `layout` and whose views begin at `sources`.

    `sources`: int64 [L, E, n_views, 2] = (file index, byte offset in that file). `file_bytes`: the size of each file.
    Raises CheckpointError where a view lies outside its file.
    """
    return plan_reads([view.nbytes for view in layout.views], sources, file_bytes)


def plan_reads(view_bytes: Sequence[int], sources: NDArray[np.int64], file_bytes: Sequence[int]) -> RecordPlan:
    """`plan_records` from the views' sizes in bytes alone."""
    num_layers, num_experts, num_views, _ = sources.shape
    assert num_views == len(view_bytes) > 0 and num_layers * num_experts > 0, (sources.shape, view_bytes)
    records = num_layers * num_experts
    file = sources[..., 0].reshape(records, num_views)
    begin = sources[..., 1].reshape(records, num_views)
    sizes = np.asarray(file_bytes, dtype=np.int64)
    end = begin + np.asarray(view_bytes, dtype=np.int64)
    outside = (file < 0) | (file >= len(sizes)) | (begin < 0) | (end > sizes[np.clip(file, 0, len(sizes) - 1)])
    if outside.any():
        flat, view = (int(i) for i in np.argwhere(outside)[0])
        raise CheckpointError(
            f"expert (layer {flat // num_experts}, index {flat % num_experts}): view {view} lies at bytes {begin[flat, view]} to"
            f" {end[flat, view]} of file {file[flat, view]}, which is outside that file"
        )

    # In each record, views by place on disk; one read per run of views whose aligned extents touch or overlap.
    order = np.lexsort((begin, file), axis=-1)
    file, begin, end = (np.take_along_axis(a, order, axis=-1) for a in (file, begin, end))
    low = begin // ALIGN * ALIGN
    high = -(-end // ALIGN) * ALIGN
    starts = np.ones((records, num_views), dtype=bool)
    reach = high.copy()  # how far the run that view v belongs to reaches
    slot_low = np.zeros((records, num_views), dtype=np.int64)  # where the run of view v begins in the slot
    run_low = low.copy()  # where the run of view v begins in the file
    for v in range(1, num_views):
        joins = (file[:, v] == file[:, v - 1]) & (low[:, v] <= reach[:, v - 1])
        starts[:, v] = ~joins
        reach[:, v] = np.where(joins, np.maximum(reach[:, v - 1], high[:, v]), high[:, v])
        run_low[:, v] = np.where(joins, run_low[:, v - 1], low[:, v])
        after = slot_low[:, v - 1] + reach[:, v - 1] - run_low[:, v - 1]
        slot_low[:, v] = np.where(joins, slot_low[:, v - 1], after)
    ends = np.ones_like(starts)
    ends[:, :-1] = starts[:, 1:]

    view_offset = np.empty((records, num_views), dtype=np.int64)
    np.put_along_axis(view_offset, order, slot_low + begin - run_low, axis=-1)
    read_file = file[starts]
    read_offset = run_low[starts]
    return RecordPlan(
        view_offset=view_offset.reshape(num_layers, num_experts, num_views),
        slot_bytes=int((slot_low + reach - run_low)[:, -1].max()),
        record_bytes=sum(view_bytes),
        file_bytes=tuple(int(n) for n in file_bytes),
        first_read=np.concatenate([[0], np.cumsum(starts.sum(axis=1))]).astype(np.int64),
        read_file=read_file,
        read_offset=read_offset,
        read_length=np.minimum(reach[ends], sizes[read_file]) - read_offset,
        read_slot_offset=slot_low[starts],
    )
