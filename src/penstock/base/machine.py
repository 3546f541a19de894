"""Memory of this process and free memory of the machine, as the kernel counts them."""

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

from penstock.base import cgroups
from penstock.base.sizes import KiB, MiB

PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096

# Assumed if neither /proc nor sysconf gives the size of memory.
UNKNOWN_FREE_BYTES = 4096 * MiB

# Windows lets a program have some 8,000.
UNKNOWN_DESCRIPTORS = 4096


def held_bytes(pid: int | str = "self") -> int:
    """RssAnon + RssShmem: the memory the kernel cannot drop, which is what a budget is about.

    0 where the system does not say (not Linux), or the process is gone.
    """
    return sum(anonymous_and_shared_bytes(pid))


def anonymous_and_shared_bytes(pid: int | str = "self") -> tuple[int, int]:
    """RssAnon, and RssShmem: shared memory that the process has touched."""
    return _read_counts(f"/proc/{pid}/status", b"RssAnon:", b"RssShmem:")


def proportional_bytes(pid: int | str = "self") -> int:
    """As ``held_bytes``, but a page that n processes share counts as 1/n, like most pages of a forked worker."""
    return sum(_read_counts(f"/proc/{pid}/smaps_rollup", b"Pss_Anon:", b"Pss_Shmem:"))


def mapped_shared_bytes(pid: int | str = "self") -> int:
    """The shared memory in ``proportional_bytes``."""
    return _read_counts(f"/proc/{pid}/smaps_rollup", b"Pss_Anon:", b"Pss_Shmem:")[1]


def machine_shared_bytes() -> int:
    """Shared memory of the whole machine, mapped or not: batches on their way between processes."""
    try:
        found = os.statvfs("/dev/shm")  # noqa: S108  # it is looked at, not written to
    except (OSError, AttributeError):
        return 0
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def _read_counts(path: str, first: bytes, second: bytes) -> tuple[int, int]:
    """Two lines of a file of the kernel's, in bytes. Read many times per second: nothing else of it is looked at."""
    try:
        with open(path, "rb", buffering=0) as file:
            text = file.read()
    except OSError:
        return 0, 0
    return _parse_count(text, first), _parse_count(text, second)


def _parse_count(text: bytes, name: bytes) -> int:
    begin = text.find(b"\n" + name) + len(name) + 1
    return int(text[begin : text.index(b"kB", begin)]) * KiB if begin > len(name) else 0


def children(pid: int) -> list[int]:
    """All descendants of a process."""
    found: list[int] = []
    tasks = f"/proc/{pid}/task"
    try:
        threads = os.listdir(tasks)
    except OSError:
        return []
    for thread in threads:
        try:
            with open(f"{tasks}/{thread}/children", "rb") as file:
                direct = [int(child) for child in file.read().split()]
        except OSError:
            continue
        for child in direct:
            found += [child, *children(child)]
    return found


def free_bytes() -> int:
    """Memory that can be taken without swapping: the machine's, or less where a cgroup or a limit allows less."""
    found = [_machine_free(), cgroups.free_bytes(), *_find_rest_of_limits()]
    return min(free for free in found if free is not None)


def cores() -> int:
    """Cores this process may use: those it may run on, or fewer where a cgroup gives it less time than they have."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroups.cores()
    return allowed if quota is None else min(allowed, max(1, math.ceil(quota)))


def descriptor_limit() -> int:
    """How many files this process may have open."""
    if resource is None:
        return UNKNOWN_DESCRIPTORS
    limit = int(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return UNKNOWN_DESCRIPTORS if limit == resource.RLIM_INFINITY else limit


def _find_rest_of_limits() -> Iterator[int]:
    """What is left of this process's own limits: of its data (``ulimit -d``) and of its addresses (``ulimit -v``)."""
    if resource is None:
        return
    used = _read_counts("/proc/self/status", b"VmData:", b"VmSize:")
    for name, taken in zip((resource.RLIMIT_DATA, resource.RLIMIT_AS), used, strict=True):
        limit = int(resource.getrlimit(name)[0])
        if limit != resource.RLIM_INFINITY:
            yield max(0, limit - taken)


def _machine_free() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * KiB
    except OSError:
        pass
    if sys.platform == "win32":
        return UNKNOWN_FREE_BYTES
    return os.sysconf("SC_PHYS_PAGES") * PAGE // 2
