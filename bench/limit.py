"""Memory cgroups, cold caches and read-ahead for fair comparisons (Linux; most of it needs root).

    python bench/limit.py 2048 -- COMMAND ...      COMMAND in a memory cgroup of 2048 MiB, page cache included

A group is a child of the caller's own, so limits above it still hold. Cgroup v1 and v2 are known.
"""

import contextlib
import ctypes
import mmap
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from seqmoe.profiles.errors import SeqmoeError


class MemoryGroup:
    """A memory cgroup: processes are started in it with `join` as `preexec_fn`, the page cache they fill counts too."""

    def __init__(self, limit_bytes: int, name: str | None = None) -> None:
        """Creates the group. Raises SeqmoeError saying why where that is not possible here."""
        parent, self.version = _parent_group()
        self.path = parent / (name or f"seqmoe-bench.{os.getpid()}")
        limit, swap, swap_bytes, self._peak = {
            1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", limit_bytes, "memory.max_usage_in_bytes"),
            2: ("memory.max", "memory.swap.max", 0, "memory.peak"),
        }[self.version]
        try:
            self.path.mkdir()
            (self.path / limit).write_text(str(limit_bytes))
        except OSError as error:
            with contextlib.suppress(OSError):
                self.path.rmdir()
            hint = f"systemd-run --scope -p MemoryMax={limit_bytes >> 20}M COMMAND"
            raise SeqmoeError(f"cannot make a memory cgroup ({error.strerror}): be root, or try {hint}") from None
        with contextlib.suppress(OSError):  # kernels without swap accounting
            (self.path / swap).write_text(str(swap_bytes))

    def join(self) -> None:
        """Moves the calling process into the group."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def peak_bytes(self) -> int:
        """The most that was charged at any time, page cache included; 0 where the kernel does not tell."""
        try:
            return int((self.path / self._peak).read_text())
        except OSError:
            return 0

    def out_of_memory_kills(self) -> int:
        """How many processes of the group the kernel has ended for want of memory."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        with contextlib.suppress(OSError):
            for line in (self.path / name).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def close(self) -> None:
        """Removes the group; its cached pages are handed back first, or they stay charged to a dead group."""
        with contextlib.suppress(OSError):
            (self.path / "memory.force_empty").write_text("0")
        for _ in range(20):
            try:
                self.path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.1)  # the last process is still on its way out
        print(f"limit: could not remove {self.path}", file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _parent_group() -> tuple[Path, int]:
    """Folder in which a child group can be made, and the cgroup version."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    groups = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    for mount in mounts:
        if mount[2] == "cgroup" and "memory" in mount[3].split(","):
            own = next(path for controllers, path in groups.items() if "memory" in controllers.split(","))
            return Path(mount[1] + own), 1
    root = next((Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"), None)
    if root is None:
        raise SeqmoeError("no memory cgroup is mounted here")
    # v2 allows no processes in a group that hands the controller down: climb to the nearest one that already does.
    base = Path(f"{root}{groups.get('', '/')}")
    while True:
        with contextlib.suppress(OSError):
            if "memory" in (base / "cgroup.subtree_control").read_text().split():
                return base, 2
        if base == root or root not in base.parents:
            raise SeqmoeError(
                "the memory controller is not delegated: try systemd-run --scope -p MemoryMax=... COMMAND"
            )
        base = base.parent


def drop_caches(files: Sequence[Path], everything: bool = True) -> str:
    """Makes the page cache cold, for all of the machine where allowed and wanted, else for `files`; says which."""
    os.sync()
    if everything:
        try:
            Path("/proc/sys/vm/drop_caches").write_text("3")
            return "all page caches dropped"
        except OSError:
            pass
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return "the model's files dropped from the page cache"


def cached_bytes(path: Path) -> int:
    """How much of a file the page cache holds."""
    size = path.stat().st_size
    if not size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as view,
    ):
        marks = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(view)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), marks)
        del start  # the map cannot be closed while something points into it
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return mmap.PAGESIZE * sum(mark & 1 for mark in marks)


def read_ahead_kib(path: Path) -> int | None:
    """Read-ahead of the device that a file lies on, or None where the kernel does not tell."""
    device = path.stat().st_dev
    base = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for folder in (base, base.parent / base.resolve().parent.name, base.resolve().parent):  # a partition has no queue
        with contextlib.suppress(OSError, ValueError):
            return int((folder / "queue/read_ahead_kb").read_text())
    return None


@contextlib.contextmanager
def loop_device(file: Path, read_ahead: int) -> Iterator[Path]:
    """A private read-only loop device over `file` with its own read-ahead (KiB); the disk's setting is not touched.

    With direct I/O, so that there is no second page cache. The file's size must be a multiple of 512.
    """
    if missing := [tool for tool in ("losetup", "blockdev") if shutil.which(tool) is None]:
        raise SeqmoeError(f"a loop device needs {missing[0]} (package util-linux)")
    options = ["-r", "--direct-io=on", "--show", "-f", str(file)]
    made = subprocess.run(["losetup", *options], check=False, capture_output=True, text=True)
    if made.returncode:
        raise SeqmoeError(f"cannot make a loop device: {made.stderr.strip()}; be root")
    device = made.stdout.strip()
    try:
        subprocess.run(["blockdev", "--setra", str(read_ahead * 2), device], check=True, capture_output=True)
        yield Path(device)
    finally:
        subprocess.run(["losetup", "-d", device], check=False)


@contextlib.contextmanager
def mounted(device: Path, folder: Path) -> Iterator[Path]:
    """`device` mounted read-only on `folder`, which is made and removed again."""
    folder.mkdir()
    try:
        made = subprocess.run(
            ["mount", "-o", "ro", str(device), str(folder)], check=False, capture_output=True, text=True
        )
        if made.returncode:
            raise SeqmoeError(f"cannot mount {device}: {made.stderr.strip()}; be root")
        try:
            yield folder
        finally:
            subprocess.run(["umount", str(folder)], check=False)
    finally:
        folder.rmdir()


def make_image(folder: Path, image: Path) -> Path:
    """A file system image (ext4) with the files of `folder`, for `loop_device` and `mounted`."""
    if shutil.which("mke2fs") is None:
        raise SeqmoeError("an image needs mke2fs (package e2fsprogs)")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    mib = int(size * 1.02) // 2**20 + 64
    partial = image.with_name(f".{image.name}.partial")
    command = [
        "mke2fs",
        "-q",
        "-t",
        "ext4",
        "-O",
        "^has_journal",
        "-m",
        "0",
        "-d",
        str(folder),
        str(partial),
        f"{mib}M",
    ]
    try:
        made = subprocess.run(command, check=False, capture_output=True, text=True)
        if made.returncode:
            raise SeqmoeError(f"cannot make {image}: {made.stderr.strip()}")
        partial.rename(image)
    finally:
        partial.unlink(missing_ok=True)
    return image


def main(arguments: list[str]) -> int:
    """The command line; returns the command's exit code."""
    match = re.fullmatch(r"(\d+) -- (.+)", " ".join(arguments), re.DOTALL)
    if not match:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(f"limit: {drop_caches([])}", file=sys.stderr)
        with MemoryGroup(int(arguments[0]) << 20) as group:
            code = subprocess.run(arguments[2:], check=False, preexec_fn=group.join).returncode
            kills = group.out_of_memory_kills()
            print(f"limit: {arguments[0]} MiB, peak {group.peak_bytes() >> 20} MiB, {kills} killed", file=sys.stderr)
            return code if code >= 0 else 128 - code
    except SeqmoeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
