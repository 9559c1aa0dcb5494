"""Facts of machines that are not here: trees of files as their kernels write them."""

import os
from pathlib import Path

import pytest

from seqmoe.profiles.cgroup import cpu_quota, memory_limit, memory_limits, usable_cores
from seqmoe.profiles.machine import (
    cpu_facts,
    machine_spec,
    memory_facts,
    memory_limit_bytes,
    rlimits,
    storage_facts,
)

MIB = 1 << 20
NONE_V1 = "9223372036854771712"
V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V1_CPU = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "29 22 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_v2_tightest_limit_of_own_group_and_parents(tmp_path):
    root = tree(tmp_path, {
        "proc/self/cgroup": "0::/system.slice/app.service/job\n",
        "proc/self/mountinfo": V2.format(root="/"),
        "sys/fs/cgroup/cgroup.controllers": "cpu memory",
        "sys/fs/cgroup/system.slice/memory.max": "max\n",
        "sys/fs/cgroup/system.slice/app.service/memory.max": f"{800 * MIB}\n",
        "sys/fs/cgroup/system.slice/app.service/memory.high": "max\n",
        "sys/fs/cgroup/system.slice/app.service/job/memory.max": f"{900 * MIB}\n",
        "sys/fs/cgroup/system.slice/app.service/job/memory.high": f"{850 * MIB}\n",
        "sys/fs/cgroup/system.slice/other/memory.max": "4096\n",
    })  # fmt: skip
    assert memory_limit_bytes(root) == 800 * MIB
    assert memory_limit(root).path == "/sys/fs/cgroup/system.slice/app.service"
    assert [limit.limit_bytes // MIB for limit in memory_limits(root)] == [900, 850, 800]


def test_v1_own_group_with_no_limit_under_a_parent_with_one(tmp_path):
    files = {
        "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/abc/sub\n1:cpu:/\n0::/\n",
        "proc/self/mountinfo": V1.format(root="/"),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": NONE_V1,
        "sys/fs/cgroup/memory/docker/memory.limit_in_bytes": NONE_V1,
        "sys/fs/cgroup/memory/docker/memory.use_hierarchy": "1",
        "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": f"{512 * MIB}\n",
        "sys/fs/cgroup/memory/docker/abc/memory.use_hierarchy": "1",
        "sys/fs/cgroup/memory/docker/abc/sub/memory.limit_in_bytes": NONE_V1,
    }
    assert memory_limit_bytes(tree(tmp_path, files)) == 512 * MIB
    # An old kernel's parent without hierarchy counts only its own processes.
    tree(tmp_path, {"sys/fs/cgroup/memory/docker/abc/memory.use_hierarchy": "0"})
    assert memory_limit_bytes(tmp_path) is None


def test_v1_in_a_container_sees_its_group_at_the_mount(tmp_path):
    root = tree(tmp_path, {
        "proc/self/cgroup": "4:memory:/docker/abc\n",
        "proc/self/mountinfo": V1.format(root="/docker/abc"),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{256 * MIB}",
    })  # fmt: skip
    assert memory_limit_bytes(root) == 256 * MIB


def test_v2_group_outside_of_the_namespace_is_read_at_the_mount(tmp_path):
    root = tree(tmp_path, {
        "proc/self/cgroup": "0::/../../elsewhere\n",
        "proc/self/mountinfo": V2.format(root="/"),
        "sys/fs/cgroup/memory.max": f"{256 * MIB}",
    })  # fmt: skip
    assert memory_limit_bytes(root) == 256 * MIB


def test_hybrid_machine_reads_memory_from_v1(tmp_path):
    root = tree(tmp_path, {
        "proc/self/cgroup": "4:memory:/job\n0::/job\n",
        "proc/self/mountinfo": V1.format(root="/") + V2.format(root="/").replace("cgroup rw,n", "cgroup/unified rw,n"),
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{300 * MIB}",
        "sys/fs/cgroup/unified/job/cgroup.procs": "",
    })  # fmt: skip
    assert memory_limit_bytes(root) == 300 * MIB


def test_no_cgroups_at_all(tmp_path):
    assert memory_limit_bytes(tmp_path) is None
    assert cpu_quota(tmp_path) is None
    facts = memory_facts(tmp_path)
    assert (facts.cgroup_room_bytes, facts.memlock_bytes, facts.ram_total_bytes) == (None, None, 0)


@pytest.mark.parametrize(
    ("v2", "v1", "quota"),
    [("150000 100000", ("150000", "100000"), 1.5), ("max 100000", ("-1", "100000"), None), ("20000 100000", ("20000", "100000"), 0.2)],
)  # fmt: skip
def test_cpu_quota_of_both_versions(tmp_path, v2, v1, quota):
    two = tree(tmp_path / "v2", {
        "proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": V2.format(root="/"),
        "sys/fs/cgroup/a/cpu.max": v2, "sys/fs/cgroup/a/b/cpu.max": "max 100000",
    })  # fmt: skip
    one = tree(tmp_path / "v1", {
        "proc/self/cgroup": "1:cpu,cpuacct:/a\n", "proc/self/mountinfo": V1_CPU,
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": v1[0], "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": v1[1],
    })  # fmt: skip
    assert cpu_quota(two) == cpu_quota(one) == quota


@pytest.mark.parametrize(("affinity", "quota", "cores"), [(8, None, 8), (8, 2.5, 2), (8, 0.2, 1), (1, 4.0, 1)])
def test_cores_worth_a_thread(affinity, quota, cores):
    assert usable_cores(affinity, quota) == cores


STATUS = "Name:\tpython\nVmSize:\t 2048000 kB\nVmRSS:\t 102400 kB\nRssAnon:\t  51200 kB\nVmData:\t 1024000 kB\n"
LIMITS = (
    "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max data size             unlimited            unlimited            bytes     \n"
    "Max locked memory         8388608              8388608              bytes     \n"
    "Max address space         4194304000           unlimited            bytes     \n"
)


def test_room_is_what_this_process_as_a_whole_may_take(tmp_path):
    root = tree(tmp_path, {
        "proc/self/cgroup": "0::/job\n",
        "proc/self/mountinfo": V2.format(root="/"),
        "proc/self/status": STATUS,
        "proc/self/limits": LIMITS,
        "proc/meminfo": "MemTotal: 4096000 kB\nMemFree: 100 kB\nMemAvailable: 2048000 kB\n",
        "sys/fs/cgroup/job/memory.max": str(1000 * MIB),
        "sys/fs/cgroup/job/memory.current": str(600 * MIB),
        # 350 MiB of cache can go; 250 cannot, of which 50 are our own
        "sys/fs/cgroup/job/memory.stat": f"anon 1\nactive_file {200 * MIB}\ninactive_file {100 * MIB}\nslab_reclaimable {50 * MIB}\n",
    })  # fmt: skip
    facts = memory_facts(root)
    assert facts.cgroup_room_bytes == 800 * MIB
    assert facts.ram_room_bytes == (2048000 + 102400) * 1024
    assert facts.memlock_bytes == 8 * MIB
    assert facts.address_room_bytes == 4194304000 - 2048000 * 1024 + 100 * MIB
    assert rlimits(root)["data"] is None


def test_v1_usage_counts_children(tmp_path):
    root = tree(tmp_path, {
        "proc/self/cgroup": "4:memory:/job\n",
        "proc/self/mountinfo": V1.format(root="/"),
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(1000 * MIB),
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(600 * MIB),
        "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {500 * MIB}\ntotal_active_file 0\n",
    })  # fmt: skip
    assert memory_limits(root)[0].used_bytes == 100 * MIB


def test_cpu_of_another_kind(tmp_path):
    root = tree(
        tmp_path, {"proc/cpuinfo": "processor\t: 0\nBogoMIPS\t: 50\nFeatures\t: fp asimd bf16 crc32\n\nprocessor : 1\n"}
    )
    assert cpu_facts(root)[1] == ("asimd", "bf16")
    root = tree(tmp_path, {"proc/cpuinfo": "model name\t: Xeon\nflags\t\t: fpu avx2 avx512f amx_bf16 sse\n\n"})
    assert cpu_facts(root) == ("Xeon", ("avx2", "avx512f", "amx_bf16"))


def test_storage_of_a_partition_is_its_disk(tmp_path):
    device = os.stat(tmp_path).st_dev
    disk = tmp_path / "sys/devices/pci0/nvme0n1"
    tree(tmp_path, {
        "sys/devices/pci0/nvme0n1/queue/rotational": "0\n",
        "sys/devices/pci0/nvme0n1/queue/read_ahead_kb": "128\n",
        "sys/devices/pci0/nvme0n1/queue/logical_block_size": "512\n",
        "sys/devices/pci0/nvme0n1/device/model": "Samsung  SSD 990 \n",
        "sys/devices/pci0/nvme0n1/nvme0n1p2/partition": "2\n",
        "proc/self/mountinfo": "27 1 259:2 / / rw - ext4 /dev/nvme0n1p2 rw\n28 27 0:5 / /nowhere rw - tmpfs tmpfs rw\n",
    })  # fmt: skip
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    (tmp_path / f"sys/dev/block/{os.major(device)}:{os.minor(device)}").symlink_to(disk / "nvme0n1p2")
    found = storage_facts(tmp_path / "not" / "there" / "yet", tmp_path)
    assert (found.fs_type, found.device, found.model) == ("ext4", "nvme0n1", "Samsung SSD 990")
    assert (found.rotational, found.read_ahead_bytes, found.block_bytes) == (False, 128 * 1024, 512)
    assert 0 < found.free_bytes <= found.total_bytes


def test_this_machine_answers():
    spec = machine_spec(Path.cwd())
    assert spec.cores >= 1
    assert spec.ram_total_bytes >= spec.ram_available_bytes > 0
    assert spec.storage.total_bytes > 0
