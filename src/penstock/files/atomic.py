"""Files that appear under their name when they are complete.

A file is first written under another name in the same folder. Its writer holds a lock on it, which ends with the
process: the next writer of the same file removes what killed writers left.
"""

import glob
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from penstock.files import locks
from penstock.files.retry import open_regular

_ATTEMPTS = 10
"""Attempts to create a file that no other process removes before it is locked."""


@contextmanager
def atomic_write(path: str, *, mode: int = 0o600, durable: bool = False) -> Iterator[BinaryIO]:
    """A file to write that appears under its name when it is complete, and not at all after an error.

    durable:  it is on the disk, and not only in the system's cache, before it gets its name
    """
    folder, name = os.path.split(os.path.abspath(path))
    remove_abandoned(glob.glob(os.path.join(glob.escape(folder), f".{glob.escape(name)}.*.partial")))
    descriptor, partial = _create(folder, name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            if mode != 0o600:  # as mkstemp makes it
                os.chmod(partial, mode)
            os.replace(partial, path)  # while it is locked: other processes would regard it as abandoned
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise


def remove_abandoned(partials: Iterable[str]) -> None:
    """Remove those of these files that no living process has locked."""
    for partial in partials:
        with suppress(OSError), open(partial, "r+b", opener=open_regular) as left:
            if locks.try_lock(left.fileno()):
                os.unlink(partial)


def _create(folder: str, name: str) -> tuple[int, str]:
    """A locked file of a new name; once more if another writer removed it as abandoned before it was locked."""
    for attempt in range(_ATTEMPTS):
        descriptor, partial = tempfile.mkstemp(dir=folder, prefix=f".{name}.", suffix=".partial")
        is_locked = locks.try_lock(descriptor) and os.fstat(descriptor).st_nlink > 0
        if is_locked or attempt == _ATTEMPTS - 1:  # without locks on this file system, no process removes it either
            break
        os.close(descriptor)
        with suppress(OSError):
            os.unlink(partial)
    return descriptor, partial
