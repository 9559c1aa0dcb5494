from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmoe.profiles.errors import CheckpointError
from seqmoe.runtime.extents import ALIGN, RecordPlan, plan_reads, plan_records, round_up


def sources_of(rows: list[list[list[tuple[int, int]]]]) -> np.ndarray:
    return np.asarray(rows, dtype=np.int64)


def test_adjacent_views_become_one_read() -> None:
    plan = plan_reads([6000, 6000], sources_of([[[(0, 100), (0, 6100)]]]), [50_000])
    (read,) = plan.reads(0)
    assert (read.file, read.offset, read.length, read.slot_offset) == (0, 0, 12288, 0)
    assert plan.view_offset.tolist() == [[[100, 6100]]]
    assert (plan.slot_bytes, plan.record_bytes) == (12288, 12000)


def test_views_in_disk_order_keep_their_own_index() -> None:
    # View 0 lies after view 1 on disk; they do not touch.
    plan = plan_reads([10, 20], sources_of([[[(0, 40960 + 5), (0, 8192 + 7)]]]), [100_000])
    assert [(r.offset, r.length, r.slot_offset) for r in plan.reads(0)] == [(8192, 4096, 0), (40960, 4096, 4096)]
    assert plan.view_offset[0, 0].tolist() == [4096 + 5, 7]


def test_views_of_one_block_are_read_once() -> None:
    plan = plan_reads([10, 10], sources_of([[[(0, 0), (0, 4000)]]]), [8192])
    assert [(r.offset, r.length) for r in plan.reads(0)] == [(0, 4096)]


def test_files_are_not_mixed() -> None:
    plan = plan_reads([4096, 4096], sources_of([[[(0, 0), (1, 4096)]]]), [4096, 8192])
    assert [(r.file, r.offset, r.slot_offset) for r in plan.reads(0)] == [(0, 0, 0), (1, 4096, 4096)]


def test_read_is_cut_at_the_files_end_but_the_slot_is_not() -> None:
    plan = plan_reads([1000], sources_of([[[(0, 4096)]]]), [5096])
    assert [(r.offset, r.length) for r in plan.reads(0)] == [(4096, 1000)]
    assert plan.slot_bytes == 4096
    assert plan.read_bytes.tolist() == [1000]


def test_slots_are_as_large_as_the_largest_record_needs() -> None:
    # 4096 bytes at remainder 0 take one block, at remainder 1 two.
    plan = plan_reads([4096], sources_of([[[(0, 0)], [(0, 8193)]]]), [50_000])
    assert plan.slot_bytes == 8192
    assert plan.view_offset.tolist() == [[[0], [1]]]
    assert plan.read_bytes.tolist() == [4096, 8192]


@pytest.mark.parametrize("place", [(0, 4095), (0, -1), (1, 0), (-1, 0)])
def test_view_outside_its_file_is_named(place: tuple[int, int]) -> None:
    with pytest.raises(CheckpointError, match=r"expert \(layer 0, index 1\): view 0"):
        plan_reads([2], sources_of([[[(0, 0)], [place]]]), [4096])


def test_layout_gives_the_views_sizes() -> None:
    @dataclass(frozen=True)
    class Piece:
        nbytes: int

    @dataclass(frozen=True)
    class Layout:
        views: tuple[Piece, ...]

    sources = sources_of([[[(0, 100), (0, 6100)]]])
    plan = plan_records(Layout((Piece(6000), Piece(6000))), sources, [50_000])  # type: ignore[arg-type]
    assert plan.record_bytes == 12000


def read_by_plan(plan: RecordPlan, files: list[bytes], flat: int) -> bytearray:
    slot = bytearray(b"\xee" * plan.slot_bytes)
    for read in plan.reads(flat):
        assert read.offset % ALIGN == 0 and read.slot_offset % ALIGN == 0
        assert read.slot_offset + round_up(read.length) <= plan.slot_bytes
        end = read.offset + read.length
        assert end % ALIGN == 0 or end == len(files[read.file])
        slot[read.slot_offset : read.slot_offset + read.length] = files[read.file][read.offset : end]
    return slot


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_layout_lands_where_view_offset_says(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    files = [rng.bytes(int(n)) for n in rng.integers(20_000, 60_000, size=data.draw(st.integers(1, 3)))]
    view_bytes = data.draw(st.lists(st.integers(1, 9000), min_size=1, max_size=4))
    layers, experts = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    sources = np.zeros((layers, experts, len(view_bytes), 2), dtype=np.int64)
    for place in np.ndindex(layers, experts, len(view_bytes)):
        file = int(rng.integers(len(files)))
        last = len(files[file]) - view_bytes[place[-1]]
        sources[place] = file, last if rng.random() < 0.2 else rng.integers(last + 1)
    plan = plan_reads(view_bytes, sources, [len(f) for f in files])
    for layer, expert in np.ndindex(layers, experts):
        slot = read_by_plan(plan, files, layer * experts + expert)
        for view, nbytes in enumerate(view_bytes):
            file, begin = sources[layer, expert, view]
            at = plan.view_offset[layer, expert, view]
            assert bytes(slot[at : at + nbytes]) == files[file][begin : begin + nbytes]
    assert plan.slot_bytes % ALIGN == 0
    assert plan.first_read[-1] == len(plan.read_file)
