"""What a link reads from: a file past the page cache or through it, or a range of memory. Every read lands at an address."""

import contextlib
import ctypes
import errno
import mmap
import os
import warnings
from pathlib import Path
from typing import Protocol

from seqmoe.profiles.errors import LinkError
from seqmoe.runtime.extents import ALIGN, round_up

# Called through ctypes, these let other Python threads run meanwhile, and take plain addresses.
_libc = ctypes.CDLL(None, use_errno=True)
_pread = getattr(_libc, "pread64", _libc.pread)
_pread.restype = ctypes.c_ssize_t
_pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
_memcpy = _libc.memcpy
_memcpy.restype = ctypes.c_void_p
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_O_DIRECT = getattr(os, "O_DIRECT", 0)
# How file systems say that they will not do this read with O_DIRECT.
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


class Source(Protocol):
    """Bytes at offsets. `read` is called by several threads at once."""

    name: str
    nbytes: int
    direct_fd: int  # for reads by AIO that start and end at multiples of 4096; -1: `read` only

    def read(self, offset: int, length: int, address: int) -> None:
        """Copies bytes [offset, offset + length) to `address`, where there is room up to the next multiple of 4096.

        `offset` and `address` are multiples of 4096. Raises LinkError unless all bytes came.
        """

    def close(self) -> None: ...


class FileSource:
    """A file, read with O_DIRECT if `direct` and where the file system allows it, else through the page cache.

    A refusal is found at open, or at the first read that meets it, and noted once: a warning, and a line in `notices`. Then
    pages are dropped from the cache after each read, so that under a memory limit the cache cannot crowd out the pool.
    With `direct=False` the cache is left as it is. A file replaced under its name stays the one that was opened.
    """

    def __init__(self, path: Path, *, direct: bool, notices: list[str]) -> None:
        self.name = str(path)
        self.direct = direct  # as it turned out
        self.direct_fd = -1
        self._notices = notices
        self._drop_cache = False
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise LinkError(f"{path}: cannot be opened: {error.strerror}") from error
        self._fds = [self._fd]
        stat = os.fstat(self._fd)
        self.nbytes = stat.st_size
        self._stamp = (stat.st_size, stat.st_mtime_ns)
        if direct:
            self._open_direct(path)
        if not self.direct:
            with contextlib.suppress(OSError):  # experts lie anywhere: reading ahead would only waste the disk's time
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    def _open_direct(self, path: Path) -> None:
        if not _O_DIRECT:
            return self._refused(errno.EOPNOTSUPP)
        try:
            self.direct_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | _O_DIRECT)
        except OSError as error:
            return self._refused(error.errno or 0)
        self._fds.append(self.direct_fd)
        # One block away from any coarser alignment, in the file and in memory: it fails if 4096 is not fine enough.
        with mmap.mmap(-1, 4 * ALIGN) as probe:
            base = ctypes.addressof(ctypes.c_char.from_buffer(probe))
            address = base + (ALIGN if base % (2 * ALIGN) == 0 else 2 * ALIGN)
            offset = ALIGN if self.nbytes > ALIGN else 0
            if self.nbytes and _pread(self.direct_fd, address, ALIGN, offset) < 0:
                number = ctypes.get_errno()
                if number not in _REFUSALS:
                    raise LinkError(f"{self.name}: byte {offset} cannot be read: {os.strerror(number)}")
                self._refused(number)

    def _refused(self, number: int) -> None:
        """From now on this file is read through the page cache."""
        if self._drop_cache:
            return  # another thread was faster
        self._drop_cache = True
        self.direct = False
        self.direct_fd = -1  # left open: another thread may be reading by it
        notice = f"{self.name}: direct reads are refused here ({os.strerror(number)}); reading through the page cache"
        self._notices.append(notice)
        warnings.warn(notice, RuntimeWarning, stacklevel=2)

    def read(self, offset: int, length: int, address: int) -> None:
        got = 0
        fd = self.direct_fd
        while got < length:
            if fd < 0:
                count = _pread(self._fd, address + got, length - got, offset + got)
            else:
                count = _pread(fd, address + got, round_up(length - got), offset + got)
            if count > 0:
                got += count
                if fd >= 0 and got < length:
                    # Short. A direct read goes on at a block's begin; what is left of a block comes through the cache.
                    got -= got % ALIGN
                    if count < ALIGN:
                        fd = -1
            elif count == 0:
                now = os.fstat(self._fd).st_size
                raise LinkError(
                    f"{self.name}: wanted bytes {offset} to {offset + length}, but the file ends at {now}"
                    + (f"; it had {self.nbytes} bytes when it was opened" if now != self.nbytes else "")
                )
            elif (number := ctypes.get_errno()) in _REFUSALS and fd >= 0:
                self._refused(number)
                fd = -1
            elif number != errno.EINTR:
                raise LinkError(f"{self.name}: bytes {offset + got} to {offset + length} cannot be read: {os.strerror(number)}")
        if self._drop_cache:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)

    def check_unchanged(self) -> None:
        """Raises LinkError if the opened file was written to or cut since it was opened."""
        stat = os.fstat(self._fd)
        if (stat.st_size, stat.st_mtime_ns) != self._stamp:
            raise LinkError(f"{self.name}: the file was changed while it was in use ({self.nbytes} bytes then, {stat.st_size} now)")

    def close(self) -> None:
        self.direct_fd = -1
        while self._fds:
            os.close(self._fds.pop())


class MemorySource:
    """A range of memory of this process; whoever owns it keeps it alive. Reads are copies by the processor."""

    direct_fd = -1

    def __init__(self, name: str, address: int, nbytes: int) -> None:
        self.name = name
        self.address = address
        self.nbytes = nbytes

    def read(self, offset: int, length: int, address: int) -> None:
        assert offset >= 0 and offset + length <= self.nbytes, (offset, length, self.nbytes)
        _memcpy(address, self.address + offset, length)

    def close(self) -> None:
        pass
