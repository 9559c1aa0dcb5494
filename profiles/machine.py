"""Facts of this machine as this process may use it, without torch. Nothing here raises for a missing piece: it says None.

Functions that read files take `root` ("/" on a live machine), so that a tree of files can stand in for another machine.
"""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from seqmoe.profiles import cgroup
from seqmoe.profiles.cgroup import ROOT, read_int
from seqmoe.profiles.spec import GpuSpec, MachineSpec, StorageSpec

# Those that choose between kernels or data types.
_KERNEL_FLAGS = (
    "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni",
    "amx_tile", "amx_bf16", "amx_int8", "neon", "asimd", "asimdhp", "asimddp", "sve", "sve2", "bf16", "i8mm",
)  # fmt: skip


@dataclass(frozen=True)
class MemoryFacts:
    """All that bounds what this process may come to hold, in bytes; None = no such bound.

    The `*_room` fields say how large this process may grow *as a whole*, its present size included.
    """

    ram_total_bytes: int
    ram_room_bytes: int  # MemAvailable plus what this process holds already
    cgroup_limit_bytes: int | None
    cgroup_room_bytes: int | None  # the limit less what other processes of the group hold
    cgroup_path: str
    memlock_bytes: int | None
    address_space_bytes: int | None
    address_room_bytes: int | None
    rss_bytes: int


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """The tightest cgroup memory limit on this process (v1 and v2, own group and all parents), None for no limit."""
    found = cgroup.memory_limit(root)
    return found.limit_bytes if found else None


_parent_files_bytes = 0


def count_as_resident(parent_files_bytes: int) -> None:
    """Called as a forked process starts: files' pages that its parent has resident count as its own from now on.

    A fork leaves the pages of libraries for the child to map again when it uses them. A process that has imported the
    libraries itself would have them, and its memory is what is to be planned and reported.
    """
    global _parent_files_bytes
    _parent_files_bytes = parent_files_bytes


def resident_files_bytes(root: Path = ROOT) -> int:
    """The part of the resident set that is files, such as libraries."""
    return _status(root).get("RssFile", 0)


def rss_bytes(root: Path = ROOT) -> int:
    """Resident set of this process now."""
    status = _status(root)
    return status.get("VmRSS", 0) + max(0, _parent_files_bytes - status.get("RssFile", 0))


def peak_rss_bytes(root: Path = ROOT) -> int:
    """Largest resident set that this process has had (VmHWM: unlike ru_maxrss it forgets the parent's)."""
    status = _status(root)
    return status.get("VmHWM", 0) + max(0, _parent_files_bytes - status.get("RssFile", 0))


def memory_facts(root: Path = ROOT) -> MemoryFacts:
    """RAM, cgroup and rlimit bounds of this process, read now."""
    status, info = _status(root), _meminfo(root)
    own = status.get("VmRSS", 0)
    total = info.get("MemTotal", 0)
    free = info.get("MemAvailable", info.get("MemFree", 0) + info.get("Buffers", 0) + info.get("Cached", 0))
    # The room counts this process as a whole; of what it holds, only the anonymous part is in the group's unreclaimable use.
    own_anon = min(own, status.get("RssAnon", own))
    rooms = [(max(0, m.limit_bytes - max(0, m.used_bytes - own_anon)), m) for m in cgroup.memory_limits(root)]
    room, group = min(rooms, key=lambda pair: pair[0], default=(None, None))
    limits = rlimits(root)
    bounds = [
        max(0, limit - status.get(now, 0)) + own
        for limit, now in ((limits["address_space"], "VmSize"), (limits["data"], "VmData"))
        if limit is not None
    ]
    return MemoryFacts(
        ram_total_bytes=total,
        ram_room_bytes=min(total, free + own),
        cgroup_limit_bytes=memory_limit_bytes(root),
        cgroup_room_bytes=room,
        cgroup_path=f"{group.path}/{group.kind}" if group else "",
        memlock_bytes=limits["memlock"],
        address_space_bytes=limits["address_space"],
        address_room_bytes=min(bounds, default=None),
        rss_bytes=own,
    )


def rlimits(root: Path = ROOT) -> dict[str, int | None]:
    """Soft limits in bytes of "memlock", "address_space" and "data" (RLIMIT_MEMLOCK, _AS, _DATA); None = unlimited."""
    names = {"Max locked memory": "memlock", "Max address space": "address_space", "Max data size": "data"}
    found: dict[str, int | None] = dict.fromkeys(names.values())
    for line in _lines(root / "proc/self/limits"):
        for title, name in names.items():
            if line.startswith(title):
                soft = line[len(title) :].split()[0]
                found[name] = int(soft) if soft.isdigit() else None
    return found


def machine_spec(path: Path | None = None, root: Path = ROOT) -> MachineSpec:
    """Everything about this machine that profiles and reports name; storage facts are those of `path`."""
    memory, quota = memory_facts(root), cgroup.cpu_quota(root)
    model, flags = cpu_facts(root)
    return MachineSpec(
        cpu_model=model,
        cpu_flags=flags,
        cores=usable_cores(root),
        physical_cores=physical_cores(root),
        cpu_quota=quota,
        ram_total_bytes=memory.ram_total_bytes,
        ram_available_bytes=memory.ram_room_bytes,
        memory_limit_bytes=memory.cgroup_limit_bytes,
        memory_limit_source=memory.cgroup_path,
        memlock_bytes=memory.memlock_bytes,
        address_space_bytes=memory.address_space_bytes,
        os=f"{platform.system()} {platform.machine()}",
        kernel=platform.release(),
        python=platform.python_version(),
        gpus=gpu_facts()[0],
        storage=storage_facts(path, root) if path is not None else None,
    )


def usable_cores(root: Path = ROOT) -> int:
    """Cores that this process may use: its affinity mask, less where a cgroup quota allows less time."""
    return cgroup.usable_cores(cgroup.affinity_count(), cgroup.cpu_quota(root))


def cpu_facts(root: Path = ROOT) -> tuple[str, tuple[str, ...]]:
    """(model name, those flags that matter for kernels)."""
    model, flags = "", set[str]()
    for line in _lines(root / "proc/cpuinfo"):
        name, _, value = line.partition(":")
        name = name.strip()
        if name in ("model name", "Model", "CPU part") and not model:
            model = value.strip()
        elif name in ("flags", "Features"):
            flags.update(value.split())
        elif not name and flags:
            break  # one processor's block is enough
    return model or platform.processor() or platform.machine(), tuple(f for f in _KERNEL_FLAGS if f in flags)


def physical_cores(root: Path = ROOT) -> int:
    """Cores among the CPUs of the affinity mask, SMT siblings counted once."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = set()
    for cpu in cpus:
        text = "".join(_lines(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        cores.add(text.strip() or str(cpu))
    return len(cores)


def storage_facts(path: Path, root: Path = ROOT) -> StorageSpec | None:
    """The file system and block device under `path` or its nearest existing parent; None if nothing of it exists."""
    path = existing_parent(path)
    try:
        status, space = os.stat(path), os.statvfs(path)
    except OSError:
        return None
    fs_type, source = _mount_of(path, root)
    block = _block_folder(status.st_dev, source, root)
    queue = block / "queue" if block else None
    # A partition has no queue of its own; its disk, the folder above, has.
    if block and queue and not queue.is_dir():
        block, queue = block.parent, block.parent / "queue"
    rotational = read_int(queue / "rotational") if queue else None
    read_ahead = read_int(queue / "read_ahead_kb") if queue else None
    return StorageSpec(
        fs_type=fs_type,
        device=block.name if block else "",
        model=" ".join("".join(_lines(block / "device/model")).split()) if block else "",
        total_bytes=space.f_blocks * space.f_frsize,
        free_bytes=space.f_bavail * space.f_frsize,
        rotational=bool(rotational) if rotational is not None else None,
        read_ahead_bytes=read_ahead * 1024 if read_ahead is not None else None,
        block_bytes=read_int(queue / "logical_block_size") if queue else None,
    )


def existing_parent(path: Path) -> Path:
    """`path` or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def gpu_facts() -> tuple[tuple[GpuSpec, ...], str]:
    """(GPUs that the NVIDIA driver shows, "" or why there are none)."""
    try:
        import pynvml
    except ImportError:
        return (), "the pynvml module (nvidia-ml-py) is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), f"no NVIDIA driver: {error}"
    try:
        driver, gpus = _text(pynvml.nvmlSystemGetDriverVersion()), []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory, pci = pynvml.nvmlDeviceGetMemoryInfo(handle), pynvml.nvmlDeviceGetPciInfo(handle)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            pci_id = f"{pci.pciDeviceId & 0xFFFF:04x}:{pci.pciDeviceId >> 16:04x}"
            name = _text(pynvml.nvmlDeviceGetName(handle))
            gpus.append(GpuSpec(name, pci_id, int(memory.total), int(memory.free), f"{major}.{minor}", driver))
        return tuple(gpus), "" if gpus else "the NVIDIA driver shows no GPU"
    except pynvml.NVMLError as error:
        return (), f"the NVIDIA driver does not answer: {error}"
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _mount_of(path: Path, root: Path) -> tuple[str, str]:
    """(type, source) of the deepest mount that holds `path`; a later line covers an earlier one at the same place."""
    best, found = -1, ("unknown", "")
    target = path.resolve()
    for line in _lines(root / "proc/self/mountinfo"):
        before, dash, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if not dash or len(fields) < 5 or len(tail) < 2:
            continue
        point = Path(fields[4].replace("\\040", " "))
        depth = len(point.parts)
        if depth >= best and (target == point or point in target.parents):
            best, found = depth, (tail[0], tail[1])
    return found


def _block_folder(device: int, source: str, root: Path) -> Path | None:
    numbered = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    # btrfs and overlay give files a device number that no block device has; the mount's source may still name one.
    named = root / "sys/class/block" / Path(source).name if source.startswith("/dev/") else None
    for candidate in (numbered, named):
        if candidate is not None and candidate.exists():
            return candidate.resolve()
    return None


def _status(root: Path) -> dict[str, int]:
    return _kib_table(root / "proc/self/status")


def _meminfo(root: Path) -> dict[str, int]:
    return _kib_table(root / "proc/meminfo")


def _kib_table(path: Path) -> dict[str, int]:
    table = {}
    for line in _lines(path):
        name, _, value = line.partition(":")
        parts = value.split()
        if len(parts) == 2 and parts[1] == "kB" and parts[0].isdigit():
            table[name.strip()] = int(parts[0]) * 1024
    return table


def _lines(path: Path) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []
