"""Memory and cores that this process may use, by its control groups (Linux cgroups, version 1 and 2).

1. A process is in one group of each hierarchy, and the limits of all ancestors of that group hold for it too.
2. ``/proc/self/cgroup`` names the group; ``/proc/self/mountinfo`` says where the hierarchy is mounted, and which group
   is at the top of the mount: a container often sees its own part of the hierarchy alone.
3. Where the group is not below the top of a mount (another cgroup namespace), the limits of the top are the nearest
   that can be seen.
4. Page cache counts as used, but the kernel drops it before it lets anything fail: it is subtracted here.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

# Written by version 1 where there is no limit: the largest number of whole pages. Such a number means no limit.
UNLIMITED_BYTES = 2**62

# Of memory.stat: file pages that can be dropped. Version 1 has sums over the group and those below under these names.
DROPPED_V2 = ("active_file", "inactive_file")
DROPPED_V1 = ("total_active_file", "total_inactive_file")


class Group(NamedTuple):
    """A group of one hierarchy, as a folder of files."""

    folder: Path
    version: int


def free_bytes(root: Path = Path("/")) -> int | None:
    """Memory that the groups of this process have left; None where none of them has a limit."""
    found = [_find_free(group) for group in memory_groups(root)]
    return min((free for free in found if free is not None), default=None)


def memory_groups(root: Path = Path("/")) -> Iterator[Group]:
    """The groups that may limit this process's memory: its own first, then their ancestors."""
    return _list_groups(root, "memory")


def cores(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the groups of this process may use; None where none of them has a limit."""
    found = [_read_quota(group) for group in _list_groups(root, "cpu")]
    return min((cores for cores in found if cores is not None), default=None)


def _find_free(group: Group) -> int | None:
    statistics = _read_statistics(group.folder / "memory.stat")
    if group.version == 2:
        limits = [_read_number(group.folder / "memory.max"), _read_number(group.folder / "memory.high")]
        used, dropped = _read_number(group.folder / "memory.current"), DROPPED_V2
    else:  # the second covers ancestors that this mount does not show
        limits = [_read_number(group.folder / "memory.limit_in_bytes"), statistics.get("hierarchical_memory_limit")]
        used, dropped = _read_number(group.folder / "memory.usage_in_bytes"), DROPPED_V1
    limit = min((limit for limit in limits if limit is not None), default=UNLIMITED_BYTES)
    if limit >= UNLIMITED_BYTES:
        return None
    kept = max(0, (used or 0) - sum(statistics.get(name, 0) for name in dropped))
    return max(0, limit - kept)


def _read_quota(group: Group) -> float | None:
    if group.version == 2:  # "150000 100000", or "max 100000"
        quota, _, period = _read_text(group.folder / "cpu.max").partition(" ")
    else:  # -1 means no limit
        quota, period = _read_text(group.folder / "cpu.cfs_quota_us"), _read_text(group.folder / "cpu.cfs_period_us")
    try:
        return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else None
    except ValueError:
        return None


def _list_groups(root: Path, controller: str) -> Iterator[Group]:
    """The groups whose limits hold for this process, its own and their ancestors, as far as they are mounted."""
    paths = _own_paths(_read_text(root / "proc/self/cgroup"))
    for line in _read_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        mount, kind = before.split(), after.split()
        if len(mount) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        version = 2 if kind[0] == "cgroup2" else 1
        path = paths.get("" if version == 2 else controller)
        if path is None or (version == 1 and controller not in kind[2].split(",")):
            continue
        top, below = root / _unescape(mount[4]).lstrip("/"), _path_below(path, _unescape(mount[3]))
        for folder in (below, *below.parents):
            yield Group(top / folder, version)


def _own_paths(text: str) -> dict[str, str]:
    """The group of each controller, from ``/proc/self/cgroup``; version 2 is under the empty name."""
    found = {}
    for line in text.splitlines():
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _path_below(path: str, top: str) -> PurePosixPath:
    """A group's path below the one at the top of a mount; the top itself where it is not below."""
    group = PurePosixPath(path)
    if ".." in group.parts or not group.is_relative_to(top):
        return PurePosixPath()
    return group.relative_to(top)


def _unescape(name: str) -> str:
    r"""A path of mountinfo, where blanks and the like are octal: ``\040``."""
    head, *rest = name.split("\\")
    return head + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)


def _read_statistics(path: Path) -> Mapping[str, int]:
    pairs = (line.split() for line in _read_text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _read_number(path: Path) -> int | None:
    text = _read_text(path)
    return int(text) if text.isdigit() else None


def _read_text(path: Path) -> str:
    """The text of a file; "" if it does not exist or may not be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
