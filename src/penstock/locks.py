"""Locks on open files, between threads and processes alike. The system lets go of those whose holder dies."""

from typing import Any

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed either
    fcntl = None  # type: ignore[assignment]
    import msvcrt


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file, alone or with others that share it; False if somebody else has it."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        elif not shared:
            windows: Any = msvcrt
            windows.locking(descriptor, windows.LK_NBLCK, 1)
    except OSError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Let go, also on behalf of a forked child that has inherited the file."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
