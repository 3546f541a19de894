"""Limits of control groups, over folders that look like /proc and /sys/fs/cgroup."""

import math

import pytest

from penstock.base import cgroups, machine

MiB = 2**20
UNLIMITED = 9223372036854771712  # what version 1 writes where there is no limit

V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2_MOUNTS = "24 18 0:22 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def fake(tmp_path, mounts, own, files):
    for name, text in {"proc/self/mountinfo": mounts, "proc/self/cgroup": own, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return tmp_path


def v1(group, limit, used, file=0, hierarchical=UNLIMITED):
    folder = f"sys/fs/cgroup/memory{group}"
    stat = f"total_active_file {file // 4}\ntotal_inactive_file {file - file // 4}\nshmem 7\n"
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": used,
        f"{folder}/memory.stat": f"{stat}hierarchical_memory_limit {hierarchical}",
    }


def v2(group, limit, used, file=0, high="max"):
    folder = f"sys/fs/cgroup{group}"
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.high": high,
        f"{folder}/memory.current": used,
        f"{folder}/memory.stat": f"anon 5\nactive_file {file // 4}\ninactive_file {file - file // 4}",
    }


V1_OWN, V2_OWN = "4:memory:/a/b\n1:cpu,cpuacct:/a\n0::/", "0::/a/b"

MEMORY = {
    "v1, own limit": (V1_MOUNTS, V1_OWN, v1("/a/b", 600, 200), 400),
    "v1, page cache can be dropped": (V1_MOUNTS, V1_OWN, v1("/a/b", 600, 590, 500), 510),
    "v1, limit of the parent": (V1_MOUNTS, V1_OWN, {**v1("/a/b", UNLIMITED, 10), **v1("/a", 600, 450)}, 150),
    "v1, the least of several": (V1_MOUNTS, V1_OWN, {**v1("/a/b", 500, 10), **v1("", 900, 890)}, 10),
    "v1, limit of an ancestor out of sight": (V1_MOUNTS, V1_OWN, v1("/a/b", UNLIMITED, 50, 0, 600), 550),
    "v1, no limit": (V1_MOUNTS, V1_OWN, {**v1("/a/b", UNLIMITED, 10), **v1("", UNLIMITED, 10)}, None),
    "v1, a sibling does not count": (V1_MOUNTS, V1_OWN, {**v1("/a/b", 600, 0), **v1("/a/c", 5, 5)}, 600),
    "v1, a container that sees its own part": (
        V1_MOUNTS.replace("0:32 / ", "0:32 /docker/x "), "4:memory:/docker/x/b", v1("/b", 600, 100), 500,
    ),
    "v1, a container at the top of its mount": (
        V1_MOUNTS.replace("0:32 / ", "0:32 /docker/x "), "4:memory:/docker/x", v1("", 600, 100), 500,
    ),
    "v2, own limit": (V2_MOUNTS, V2_OWN, v2("/a/b", 600, 200), 400),
    "v2, page cache can be dropped": (V2_MOUNTS, V2_OWN, v2("/a/b", 600, 590, 500), 510),
    "v2, high comes before max": (V2_MOUNTS, V2_OWN, v2("/a/b", 600, 200, high=500), 300),
    "v2, high alone": (V2_MOUNTS, V2_OWN, v2("/a/b", "max", 200, high=500), 300),
    "v2, limit of the parent": (V2_MOUNTS, V2_OWN, {**v2("/a/b", "max", 10), **v2("/a", 600, 450)}, 150),
    "v2, limit of the top": (V2_MOUNTS, V2_OWN, {**v2("/a/b", "max", 10), **v2("", 600, 450)}, 150),
    "v2, no limit": (V2_MOUNTS, V2_OWN, {**v2("/a/b", "max", 10), **v2("", "max", 10)}, None),
    "v2, more used than allowed": (V2_MOUNTS, V2_OWN, v2("/a/b", 600, 700), 0),
    "v2, a namespace of its own": (V2_MOUNTS, "0::/", v2("", 600, 100), 500),
    "v2, a group outside the namespace": (V2_MOUNTS, "0::/../x", v2("", 600, 100), 500),
    "v2, usage unknown": (V2_MOUNTS, V2_OWN, {"sys/fs/cgroup/a/b/memory.max": 600}, 600),
    "v2, nonsense": (V2_MOUNTS, V2_OWN, v2("/a/b", "nonsense", "nonsense"), None),
    "both, memory in v1": (V1_MOUNTS, V1_OWN, {**v1("/a/b", 600, 200), **v2("/unified", "max", 0)}, 400),
    "a mount with a blank in its name": (
        V2_MOUNTS.replace("/sys/fs/cgroup", "/sys/my\\040groups"), "0::/",
        {"sys/my groups/memory.max": 600, "sys/my groups/memory.current": 1}, 599,
    ),
    "no groups": ("", "", {}, None),
    "mounts of no known form": ("cgroup\n\n- - cgroup\n", "nonsense", {}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", MEMORY)
def test_memory_of_groups_and_their_ancestors(tmp_path, case):
    mounts, own, files, free = MEMORY[case]
    assert cgroups.free_bytes(fake(tmp_path, mounts, own, files)) == free


def cpu_v1(group, quota, period=100_000):
    folder = f"sys/fs/cgroup/cpu,cpuacct{group}"
    return {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": period}


CORES = {
    "v1, no limit": (V1_MOUNTS, V1_OWN, cpu_v1("/a", -1), None),
    "v1, own": (V1_MOUNTS, V1_OWN, cpu_v1("/a", 150_000), 1.5),
    "v1, of the parent": (V1_MOUNTS, V1_OWN, {**cpu_v1("/a", 400_000), **cpu_v1("", 50_000)}, 0.5),
    "v2, no limit": (V2_MOUNTS, V2_OWN, {"sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
    "v2, own": (V2_MOUNTS, V2_OWN, {"sys/fs/cgroup/a/b/cpu.max": "300000 100000"}, 3),
    "v2, of the top": (V2_MOUNTS, V2_OWN, {"sys/fs/cgroup/cpu.max": "20000 100000"}, 0.2),
    "v2, nonsense": (V2_MOUNTS, V2_OWN, {"sys/fs/cgroup/cpu.max": "lots of it"}, None),
    "no groups": ("", "", {}, None),
}


@pytest.mark.parametrize("case", CORES)
def test_cores_of_groups_and_their_ancestors(tmp_path, case):
    mounts, own, files, cores = CORES[case]
    assert cgroups.cores(fake(tmp_path, mounts, own, files)) == cores


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (0.2, 1), (1.5, 2), (3.0, 3), (64.0, 8)])
def test_the_machine_counts_the_cores_that_a_group_pays_for(monkeypatch, quota, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(cgroups, "cores", lambda: quota)
    assert machine.cores() == cores


@pytest.mark.parametrize("free", [None, 0, 5 * MiB, 2**60])
def test_the_machine_has_no_more_free_than_a_group(monkeypatch, free):
    monkeypatch.setattr(machine, "_machine_free", lambda: 100 * MiB)
    monkeypatch.setattr(cgroups, "free_bytes", lambda: free)
    assert machine.free_bytes() == min(100 * MiB, math.inf if free is None else free)
