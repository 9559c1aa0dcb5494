"""The pool: one page-aligned allocation, cut into equal slots, that storage writes to directly and kernels read from."""

import contextlib
import ctypes
import mmap

from seqmoe.profiles.errors import BudgetError
from seqmoe.runtime.extents import ALIGN

_HUGE_BYTES = 2 << 20
_libc = ctypes.CDLL(None, use_errno=True)


class Pool:
    """`num_slots` slots of `slot_bytes` bytes (a multiple of 4096) in one anonymous private mapping.

    Memory is taken when a slot is first written. Huge pages are asked for: O_DIRECT pins them one by one, and on the machine
    this was measured on, reads reached 2.1 GB/s instead of 1.1. `close` gives the memory back at once; addresses are
    dead from then on, so no read may be under way.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        assert num_slots > 0 and slot_bytes > 0 and slot_bytes % ALIGN == 0, (num_slots, slot_bytes)
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.nbytes = num_slots * slot_bytes
        try:
            self._map = mmap.mmap(-1, self.nbytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise BudgetError(f"the system refused a pool of {self.nbytes} bytes ({error}); ask for less memory") from error
        with contextlib.suppress(OSError, AttributeError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._lead = -base % _HUGE_BYTES  # a pool that begins on a huge page has one page fewer that two slots share
        self.address = base + self._lead
        self._closed = False

    def slot_address(self, slot: int) -> int:
        """Absolute address of the slot's first byte."""
        assert 0 <= slot < self.num_slots, slot
        return self.address + slot * self.slot_bytes

    def memory(self, slot: int) -> memoryview:
        """The slot's bytes, writable; release the view before `close`, or its memory stays mapped (but empty)."""
        assert 0 <= slot < self.num_slots and not self._closed, slot
        begin = self._lead + slot * self.slot_bytes
        return memoryview(self._map)[begin : begin + self.slot_bytes]

    def resident_bytes(self) -> int:
        """Bytes of the pool that are in memory now."""
        if self._closed:
            return 0
        pages = -(-self.nbytes // mmap.PAGESIZE)
        present = (ctypes.c_ubyte * pages)()
        if _libc.mincore(ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes), present) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        return bytes(present).count(1) * mmap.PAGESIZE

    def close(self) -> None:
        """Gives all memory back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError, AttributeError):
            self._map.madvise(mmap.MADV_DONTNEED)  # frees the pages even while somebody still holds a view
        with contextlib.suppress(BufferError):
            self._map.close()
