"""Reads that the system failed to do, tried again: a disk that was asleep, a mount that reconnects.

What fails for good is one error with its place, which no parser takes for the end of a file.
"""

import errno
import io
import os
from collections.abc import Callable
from typing import Any, TypeVar

from penstock import stopping
from penstock.errors import Unavailable

# A read that the system failed to do (EIO) may go well a moment later: a disk that was asleep, a mount that reconnects.
TRIES = 3
AGAIN_AFTER_S = 0.05

_T = TypeVar("_T")


def open_steady(path: str) -> io.BufferedReader:
    """A file for a parser, read from beginning to end. What cannot be read is no ``OSError``, which parsers swallow."""
    try:
        return io.BufferedReader(_Steady(path, "rb"))
    except OSError as error:
        raise Unavailable(f"{path}: cannot be opened ({words(error)})") from error


class _Steady(io.FileIO):
    def readinto(self, view: Any) -> int:
        return tried(
            lambda: io.FileIO.readinto(self, view) or 0,
            lambda: f"{self.name}: reading {len(view):,} bytes at offset {self.tell():,}",
        )

    read, readall = io.RawIOBase.read, io.RawIOBase.readall  # type: ignore[assignment]  # which call it


def tried(read: Callable[[], _T], told: Callable[[], str]) -> _T:
    """Do a read, again where the system failed; a short one goes on elsewhere."""
    for left in range(TRIES - 1, -1, -1):
        try:
            return read()
        except OSError as error:
            if error.errno != errno.EIO or not left:
                times = f" {TRIES} times" if error.errno == errno.EIO else ""
                raise Unavailable(f"{told()} failed{times}: {words(error)}") from error
        stopping.sleep(AGAIN_AFTER_S)
    raise AssertionError


def steadily(path: str, read: Callable[[], _T]) -> _T:
    """Let a library read a file, again where the system failed under it."""
    for left in range(TRIES - 1, -1, -1):
        try:
            return read()
        except Exception as error:
            if isinstance(error, Unavailable) or not _system_failed(error):
                raise
            words = " ".join(str(error).split())[:300]
        if left:
            stopping.sleep(AGAIN_AFTER_S)
    # Not as a consequence of the library's error, whose traceback may hold its files open.
    raise Unavailable(f"{path}: reading failed {TRIES} times: {os.strerror(errno.EIO)} (errno {errno.EIO}): {words}")


def _system_failed(error: BaseException | None) -> bool:
    """Whether that is what is behind it; HDF5 tells in words."""
    while error is not None:
        if getattr(error, "errno", None) == errno.EIO or f"errno = {errno.EIO}," in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def words(error: OSError) -> str:
    way_out = ""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        way_out = ". Raise the limit of open files (ulimit -n), or lower max_open_files="
    return f"{error.strerror} (errno {error.errno}){way_out}"
