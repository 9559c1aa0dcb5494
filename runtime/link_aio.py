"""Linux AIO by its bare system calls: one thread hands the kernel several direct reads at once and waits for all of them.

Measured against plain reads in threads, side by side: the same from 256 KiB up, 10 to 20 % sooner for 2 to 8 reads of 48 KiB,
where waking threads is what costs.
"""

import ctypes
import errno
import platform
import struct
import sys
import time
from collections.abc import Sequence

# io_setup, io_destroy, io_getevents, io_submit
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2), "riscv64": (0, 1, 4, 2)}.get(platform.machine())
_IOCB = struct.Struct("<QIiHhIQQqQII")  # data, key, rw_flags, opcode, priority, fd, buffer, bytes, offset, reserved, flags, eventfd
_EVENT = struct.Struct("<QQqq")  # data, iocb, result, result2
_TIMESPEC = struct.Struct("@ll")

_syscall = ctypes.CDLL(None, use_errno=True).syscall  # lets other Python threads run meanwhile
_syscall.restype = ctypes.c_long
_syscall.argtypes = (ctypes.c_long,) * 6


class AioQueue:
    """Up to `depth` reads under way at once, for one thread at a time. OSError where the system has no AIO for us."""

    def __init__(self, depth: int) -> None:
        if _NUMBERS is None or sys.byteorder != "little" or ctypes.sizeof(ctypes.c_long) != 8:
            raise OSError(errno.ENOSYS, "no AIO on this kind of processor")
        self._setup, self._destroy, self._getevents, self._submit = _NUMBERS
        self._iocbs = ctypes.create_string_buffer(_IOCB.size * depth)
        base = ctypes.addressof(self._iocbs)
        self._pointers = (ctypes.c_uint64 * depth)(*range(base, base + _IOCB.size * depth, _IOCB.size))
        self._events = ctypes.create_string_buffer(_EVENT.size * depth)
        self._timeout = ctypes.create_string_buffer(_TIMESPEC.size)
        self.results: list[int] = []  # of the last `submit`, in its order: bytes read, or -errno; valid after `wait`
        self._left = 0
        context = ctypes.c_ulong(0)
        self._context = 0
        if _syscall(self._setup, depth, ctypes.addressof(context), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "io_setup was refused")
        self._context = context.value

    def submit(self, reads: Sequence[tuple[int, int, int, int]]) -> None:
        """Begins reads (fd, offset, length, address), at most `depth`; the kernel may refuse some: their result is -EAGAIN."""
        assert self._left == 0, self._left
        for n, (fd, offset, length, address) in enumerate(reads):
            _IOCB.pack_into(self._iocbs, n * _IOCB.size, n, 0, 0, 0, 0, fd, address, length, offset, 0, 0, 0)
        self.results = [-errno.EAGAIN] * len(reads)
        begun = _syscall(self._submit, self._context, len(reads), ctypes.addressof(self._pointers), 0, 0)
        self._left = max(0, begun)

    def wait(self, timeout_s: float | None = None) -> bool:
        """True once all that was submitted is over; False after `timeout_s`, with reads still under way."""
        deadline = None if timeout_s is None else time.perf_counter() + timeout_s
        while self._left:
            timeout = 0
            if deadline is not None:
                rest = max(0.0, deadline - time.perf_counter())
                _TIMESPEC.pack_into(self._timeout, 0, int(rest), int(rest % 1 * 1e9))
                timeout = ctypes.addressof(self._timeout)
            events = ctypes.addressof(self._events)
            count = _syscall(self._getevents, self._context, self._left, self._left, events, timeout)
            if count < 0 and ctypes.get_errno() != errno.EINTR:
                raise OSError(ctypes.get_errno(), "io_getevents failed")
            for n in range(max(0, count)):
                number, _, result, _ = _EVENT.unpack_from(self._events, n * _EVENT.size)
                self.results[number] = result
                self._left -= 1
            if self._left and deadline is not None and time.perf_counter() >= deadline:
                return False
        return True

    def close(self) -> None:
        """Gives the kernel's part back; waits for reads under way."""
        context, self._context = self._context, 0
        if context:
            _syscall(self._destroy, context, 0, 0, 0, 0)
