"""Who else may use a file on disk: locks between processes, and checks that only its owner can write to it.

Locks are those of the system, which releases them when their holder dies.

Files that are kept between runs are used only if no other user could have written them. A user who may write to a
folder may replace files in it. One who may write to a folder above it may replace the folder, unless the folder above
has the sticky bit, as ``/tmp`` has: then only owners rename what is in it. Folders above that belong to a colleague or
a group are normal on shared machines and are accepted: files that others put there belong to them, and are refused.
"""

import os
import stat
from collections.abc import Iterator
from typing import Any

from penstock.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be removed either
    fcntl = None  # type: ignore[assignment]
    import msvcrt

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file, alone or together with others that share it; False if that cannot be done now."""
    return _lock(descriptor, shared) is True


def is_taken(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file in the same way; True if another process has it, False also if there are no locks."""
    return _lock(descriptor, shared) is False


def _lock(descriptor: int, shared: bool) -> bool | None:
    """Whether the file is locked now; False if another process has it, None if the file system has no locks."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        elif not shared:
            windows: Any = msvcrt
            windows.locking(descriptor, windows.LK_NBLCK, 1)
    except OSError as error:
        return False if fcntl is None or isinstance(error, BlockingIOError) else None
    return True


def unlock(descriptor: int) -> None:
    """Release the lock, also for a forked child that inherited the file."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_trusted(about: os.stat_result) -> bool:
    """Whether a file belongs to this user or root, and no other user may write to it."""
    return os.name != "posix" or (_is_own(about) and not about.st_mode & _WRITABLE)


def make_folder(folder: str) -> None:
    """Make a folder for this user alone, and missing folders above it."""
    if os.path.isdir(folder):
        return
    above = os.path.dirname(os.path.abspath(folder))
    if above != folder:
        make_folder(above)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:  # made by another process this moment, or not a folder
        if not os.path.isdir(folder):
            raise


def check_folder(folder: str, argument: str) -> None:
    """Refuse a folder whose files others could replace; ``argument`` is the caller's name for it."""
    if why := why_distrusted(folder):
        raise ConfigError(f"{argument}: {why}")


def why_distrusted(folder: str) -> str:
    """Which other users could replace files in a folder, and the way out; "" if none could, or there is no folder."""
    if os.name != "posix":
        return ""
    return _why_folder(folder) or next(filter(None, map(_why_above, _folders_above(folder))), "")


def _folders_above(folder: str) -> Iterator[str]:
    """All folders above, on the path as given and on the one that links lead to."""
    for path in {os.path.abspath(folder), os.path.realpath(folder)}:
        while (above := os.path.dirname(path)) != path:
            path = above
            yield path


def _why_folder(folder: str) -> str:
    try:
        about = os.stat(folder)
    except OSError:
        return ""
    if about.st_mode & _WRITABLE:
        who = "anybody" if about.st_mode & stat.S_IWOTH else f"its group (gid {about.st_gid})"
        return _describe_writable(folder, who)
    if not _is_own(about):
        return (
            f"{folder}: its owner is another user (uid {about.st_uid}, not {os.geteuid()}), who could put other data "
            f"in a file's place; use a folder of your own"
        )
    return ""


def _why_above(folder: str) -> str:
    try:
        mode = os.stat(folder).st_mode
    except OSError:
        return ""
    return _describe_writable(folder, "anybody") if mode & stat.S_IWOTH and not mode & stat.S_ISVTX else ""


def _describe_writable(folder: str, who: str) -> str:
    return (
        f"{who} may write to {folder}, and so put other data in a file's place; use a folder of your own, or "
        f"chmod go-w {folder}"
    )


def _is_own(about: os.stat_result) -> bool:
    return about.st_uid in (os.geteuid(), 0)
