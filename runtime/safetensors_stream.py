"""Safetensors files read by their headers and written tensor by tensor, so that a checkpoint larger than RAM can be made.

A folder is built under another name and renamed when it is complete and synced: a reader sees all of it or nothing.
"""

import errno
import fcntl
import json
import logging
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seqmoe.profiles.errors import CheckpointError, DiskSpaceError, UsageError

log = logging.getLogger("seqmoe")

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
DATA_ALIGNMENT = 4096  # where a file's tensor data starts: a direct read then needs no extra block at its front
SPARE_BYTES = 64 * 2**20  # left free on the disk, for its own book-keeping
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
WRITE_CHUNK_BYTES = 8 * 2**20

Progress = Callable[[int, int], None]
"""Called with (bytes written, bytes in all)."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written: `dtype` as safetensors names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `offset` is in bytes from the start of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def read(self) -> NDArray[np.uint8]:
        """The tensor's bytes, uint8 [nbytes]. Raises CheckpointError when the file is shorter than its header says."""
        data = np.fromfile(self.path, np.uint8, self.nbytes, offset=self.offset)
        if data.size != self.nbytes:
            raise CheckpointError(f"{self.path}: truncated, it ends inside a tensor of {self.nbytes} bytes")
        return data


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Where each tensor of one safetensors file lies. Raises CheckpointError when it is not one, or is truncated."""
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else MAX_HEADER_BYTES + 1
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{path}: not a safetensors file")
        try:
            header = dict(json.loads(file.read(length)))
        except (ValueError, TypeError):
            raise CheckpointError(f"{path}: the safetensors header is truncated or not JSON") from None
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            start, end = entry["data_offsets"]
            found[name] = StoredTensor(path, entry["dtype"], tuple(entry["shape"]), 8 + length + start, end - start)
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{path}: the safetensors header has no dtype, shape and place for {name}") from None
    ends = max((tensor.offset + tensor.nbytes for tensor in found.values()), default=0)
    if path.stat().st_size < ends:
        raise CheckpointError(f"{path}: truncated, {path.stat().st_size} bytes where its header asks for {ends}")
    return found


def index_folder(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the safetensors files in a folder, by name."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder}: no safetensors file there")
    return {name: tensor for path in paths for name, tensor in read_header(path).items()}


def header_bytes(tensors: Sequence[TensorSpec]) -> bytes:
    """A file's first bytes: the header's length, then the header, padded with spaces so that the data is aligned."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def shard_sizes(shards: Sequence[Sequence[TensorSpec]]) -> list[int]:
    """Bytes of each file that `write_shards` would write."""
    return [len(header_bytes(shard)) + sum(tensor.nbytes for tensor in shard) for shard in shards]


def write_shards(
    folder: Path,
    shards: Sequence[Sequence[TensorSpec]],
    produce: Callable[[TensorSpec], NDArray[np.generic]],
    progress: Progress | None = None,
) -> None:
    """Write the shards and their index into `folder` under the hub's names, each tensor as `produce` gives it.

    Only one tensor is asked for at a time, in file order. What is written is synced and then dropped from the page
    cache, so that memory use does not grow with the checkpoint.
    """
    total, done = sum(shard_sizes(shards)), 0
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        with (folder / name).open("wb", buffering=0) as file:
            done += _write_all(file.fileno(), memoryview(header_bytes(shard)))
            for tensor in shard:
                data = np.ascontiguousarray(produce(tensor))
                assert data.nbytes == tensor.nbytes, f"{tensor.name}: {data.nbytes} bytes, not {tensor.nbytes}"
                done += _write_all(file.fileno(), data.reshape(-1).view(np.uint8).data)
                weight_map[tensor.name] = name
                if progress:
                    progress(done, total)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    data_bytes = sum(tensor.nbytes for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": data_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def _write_all(fd: int, data: memoryview) -> int:
    written = 0
    while written < len(data):
        written += os.write(fd, data[written : written + WRITE_CHUNK_BYTES])
    return written


@contextmanager
def building(folder: Path, needed_bytes: int) -> Iterator[Path]:
    """Gives an empty folder to fill, and renames it to `folder` (replacing what is there) when the block ends well.

    After an error, Ctrl-C included, nothing is left. The caller holds `locked(folder)`. Raises DiskSpaceError before
    anything is written when `needed_bytes` do not fit, and when the disk fills up on the way.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed: its lock is gone, so is its use
    free_bytes = shutil.disk_usage(folder.parent).free
    if needed_bytes + SPARE_BYTES > free_bytes:
        raise DiskSpaceError(
            f"{folder}: needs {_gib(needed_bytes + SPARE_BYTES)} and {_gib(free_bytes)} are free there; "
            "free some, or choose another folder or smaller experts"
        )
    try:
        partial.mkdir()
        yield partial
        _sync_folder(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        _sync_folder(folder.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = _gib(shutil.disk_usage(folder.parent).free)
            raise DiskSpaceError(
                f"{folder}: the disk filled up while {_gib(needed_bytes)} were written ({error.strerror}); what was "
                f"written is removed and {free} are free now"
            ) from error
        raise


def _sync_folder(folder: Path) -> None:
    for path in [*folder.glob("*.json"), folder]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def locked(folder: Path, notice: Callable[[str], None] = log.warning) -> Iterator[None]:
    """Holds the lock of a folder that is to be built, so that only one process builds it; the others wait here."""
    path = folder.with_name(f".{folder.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = _acquire(path, notice)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"{path.parent}: cannot be written to ({error.strerror}); choose another folder") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _acquire(path: Path, notice: Callable[[str], None]) -> int:
    while True:
        fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                notice(f"another process is writing {path.parent / path.name[1:-5]}; waiting for it")
                fcntl.flock(fd, fcntl.LOCK_EX)
            # The holder before us has unlinked the file: a lock on it keeps nobody out who opens the path anew.
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def random_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float) -> NDArray[np.generic]:
    """Random finite numbers at more than 1 GB/s: any sign and mantissa, magnitudes in the four octaves below `scale`.

    They come as unsigned integers that hold the bits of `dtype` (numpy has no bfloat16).
    """
    mantissa, bias, width = {"BF16": (7, 127, 16), "F16": (10, 15, 16), "F32": (23, 127, 32)}[dtype]
    lowest = min(max(math.floor(math.log2(scale)) + bias - 4, 1), 2 * bias - 4)  # exponent field of the least octave
    repeat = {16: 0x0001000100010001, 32: 0x0000000100000001}[width]
    keep = (1 << width - 1 | (4 << mantissa) - 1) * repeat  # sign, the exponent's low two bits, mantissa
    count = math.prod(shape)
    words = rng.integers(0, 2**64, -(-count * width // 64), np.uint64)
    words &= np.uint64(keep)
    words += np.uint64((lowest << mantissa) * repeat)  # never carries out of the exponent's field
    return words.view(np.uint16 if width == 16 else np.uint32)[:count].reshape(shape)


def ones(shape: tuple[int, ...], dtype: str) -> NDArray[np.generic]:
    """1.0 everywhere, as the bits of `dtype`."""
    bits = {"BF16": np.uint16(0x3F80), "F16": np.uint16(0x3C00), "F32": np.uint32(0x3F800000)}[dtype]
    return np.full(shape, bits)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
