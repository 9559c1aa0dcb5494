import mmap
import time

import pytest

from seqmoe.profiles.errors import BudgetError
from seqmoe.runtime.pool import Pool


def test_slots_lie_side_by_side_on_page_boundaries() -> None:
    pool = Pool(3, 8192)
    assert pool.slot_address(0) % mmap.PAGESIZE == 0
    assert [pool.slot_address(i) - pool.slot_address(0) for i in range(3)] == [0, 8192, 16384]
    pool.memory(1)[:] = b"\x11" * 8192
    pool.memory(2)[:4] = b"abcd"
    assert bytes(pool.memory(0)) == bytes(8192)
    assert bytes(pool.memory(1)) == b"\x11" * 8192
    assert bytes(pool.memory(2)[:5]) == b"abcd\0"
    pool.close()


def test_memory_is_taken_when_touched_and_given_back_by_close() -> None:
    pool = Pool(64, 1 << 20)
    assert pool.resident_bytes() == 0
    pool.memory(10)[::4096] = b"x" * 256
    touched = pool.resident_bytes()
    assert 1 << 20 <= touched <= 4 << 20  # at most the huge pages that the slot lies in
    view = pool.memory(0)
    pool.close()
    assert pool.resident_bytes() == 0
    assert bytes(view[:1]) == b"\0"  # a forgotten view reads zeros, not freed memory
    pool.close()


def test_close_frees_at_once() -> None:
    def rss() -> int:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * mmap.PAGESIZE

    pool = Pool(32, 1 << 20)
    for slot in range(32):
        pool.memory(slot)[::4096] = b"x" * 256
    full = rss()
    pool.close()
    time.sleep(0)
    assert full - rss() > 30 << 20


def test_impossible_size_is_a_budget_error() -> None:
    with pytest.raises(BudgetError, match="refused a pool"):
        Pool(1 << 40, 1 << 20)
