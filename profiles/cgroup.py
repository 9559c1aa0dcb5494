"""The limits that control groups v1 and v2 put on this process: of its own group and of every parent.

Every function takes `root`, the folder that holds `proc` and `sys`: "/" on a live machine, a tree of files in a test.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
# v1 writes "no limit" as the largest page-aligned long; anything near it is no limit.
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class MemoryLimit:
    """One group's limit: `used_bytes` is what cannot be reclaimed of what the group holds (all its processes, no page cache)."""

    path: str
    limit_bytes: int
    used_bytes: int
    kind: str  # the file's name: memory.max, memory.high, memory.limit_in_bytes


@dataclass(frozen=True)
class _Mount:
    group_root: str  # the group that is mounted here (not "/" in containers)
    point: str
    version: int
    controllers: frozenset[str]


def memory_limits(root: Path = ROOT) -> tuple[MemoryLimit, ...]:
    """Every limit on this process's memory, own group first. Empty where there is none or cgroups cannot be read."""
    limits = []
    for folder, version in _group_folders("memory", root):
        names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
        for name in names:
            limit = read_int(folder / name)
            if limit is not None and limit < _UNLIMITED:
                shown = "/" + str(folder.relative_to(root))
                limits.append(MemoryLimit(shown, limit, _unreclaimable(folder, version), name))
    return tuple(limits)


def memory_limit(root: Path = ROOT) -> MemoryLimit | None:
    """The tightest of `memory_limits`, None if there is none."""
    return min(memory_limits(root), key=lambda found: found.limit_bytes, default=None)


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs' worth of time that the group and its parents allow, None for no quota."""
    quotas = []
    for folder, version in _group_folders("cpu", root):
        if version == 2:
            parts = _read(folder / "cpu.max").split()
            quota, period = (parts[0], parts[1]) if len(parts) == 2 else ("max", "1")
        else:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        with contextlib.suppress(ValueError, ZeroDivisionError):  # "max", "-1" and missing files mean no quota
            if int(quota) > 0:
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _group_folders(controller: str, root: Path) -> list[tuple[Path, int]]:
    """(folder, version) of this process's group for `controller` and of each parent that counts, own group first."""
    folders: list[tuple[Path, int]] = []
    groups = _own_groups(root)
    for mount in _mounts(root):
        # On a hybrid machine the v2 tree is mounted as well, but the memory controller belongs to one of the two.
        if mount.version == 1 and controller not in mount.controllers:
            continue
        group = groups.get(controller if mount.version == 1 else "")
        if group is None:
            continue
        folders += _walk_up(root / mount.point.lstrip("/"), _below(group, mount.group_root), mount.version)
    return folders


def _below(group: str, group_root: str) -> tuple[str, ...]:
    """Path of `group` below what the mount shows. A group outside of it (a namespace writes "/../..") is seen at the mount."""
    if ".." in group.split("/"):
        return ()
    parts, hidden = [p for p in group.split("/") if p], [p for p in group_root.split("/") if p]
    return tuple(parts[len(hidden) :]) if parts[: len(hidden)] == hidden else ()


def _walk_up(point: Path, below: tuple[str, ...], version: int) -> list[tuple[Path, int]]:
    folders: list[tuple[Path, int]] = []
    for depth in range(len(below), -1, -1):
        folder = point.joinpath(*below[:depth])
        # Without use_hierarchy a v1 parent counts only its own processes.
        counts = version == 2 or not folders or read_int(folder / "memory.use_hierarchy") != 0
        if folder.is_dir() and counts:
            folders.append((folder, version))
    return folders


def _own_groups(root: Path) -> dict[str, str]:
    """Controller -> path of this process's group; "" is the v2 tree."""
    groups: dict[str, str] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                groups[controller] = parts[2]
    return groups


def _mounts(root: Path) -> list[_Mount]:
    found = []
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, dash, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if dash and len(fields) >= 5 and len(tail) >= 1 and tail[0] in ("cgroup", "cgroup2"):
            controllers = frozenset(tail[2].split(",")) if len(tail) > 2 else frozenset()
            found.append(_Mount(fields[3], fields[4], 2 if tail[0] == "cgroup2" else 1, controllers))
    return found


def _unreclaimable(folder: Path, version: int) -> int:
    """Bytes that the group holds and cannot give back: all that is charged to it without the page cache on its file lists."""
    stat = {}
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdigit():
            stat[name] = int(value)
    prefix = (
        "" if version == 2 else "total_"
    )  # v1 writes a group's own numbers and, with total_, its children's as well
    used = read_int(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes")) or 0
    cache = (
        stat.get(f"{prefix}active_file", 0) + stat.get(f"{prefix}inactive_file", 0) + stat.get("slab_reclaimable", 0)
    )
    return max(0, used - cache)


def read_int(path: Path) -> int | None:
    """The whole number in a small file, None if there is none ("max", missing, unreadable)."""
    try:
        return int(_read(path))
    except ValueError:
        return None


def _read(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def usable_cores(affinity: int, quota: float | None) -> int:
    """Cores worth a thread: the affinity mask, less where a quota allows less time. Part of a CPU is not worth a thread."""
    return max(1, min(affinity, int(quota) if quota is not None else affinity))


def affinity_count() -> int:
    """Logical CPUs that this process may be scheduled on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
