"""Failed reads are repeated: a disk may wake up, and a network mount may reconnect.

A read that keeps failing becomes one error that names the place, and that no parser mistakes for the end of a file.
"""

import errno
import io
import os
import stat
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.base import stop
from penstock.errors import Unavailable

# After EIO, the same read may succeed a moment later.
TRIES = 3
AGAIN_AFTER_S = 0.05

_T = TypeVar("_T")

_FLAGS = sum(getattr(os, name, 0) for name in ("O_BINARY", "O_CLOEXEC", "O_NONBLOCK"))
_OTHERS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}

# Errors of the system that do not concern the file itself.
_REFUSALS = (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.ENOMEM, errno.EAGAIN)


def open_regular(path: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file; usable as ``opener`` of ``open``.

    A pipe would wait for a writer forever, and a device may never end: both are opened without waiting, and refused.
    """
    descriptor = os.open(path, flags | _FLAGS)
    try:
        check_regular(os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(found: os.stat_result) -> None:
    """Refuse what is not a regular file."""
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(found.st_mode):
        what = _OTHERS.get(stat.S_IFMT(found.st_mode), "not a file")
        raise OSError(errno.EINVAL, f"{what}, expected a plain file")


def open_for_parser(path: str, buffer_bytes: int = io.DEFAULT_BUFFER_SIZE) -> io.BufferedReader:
    """A file for a parser that reads it in order. A failed read is ``Unavailable``: parsers swallow ``OSError``."""
    try:
        return io.BufferedReader(_RetryingFile(path, "rb", opener=open_regular), buffer_bytes)
    except OSError as error:
        raise Unavailable(f"{path}: cannot be opened ({one_line(error)})") from error


class _RetryingFile(io.FileIO):
    def readinto(self, view: Any) -> int:
        try:
            return io.FileIO.readinto(self, view) or 0
        except OSError as error:
            return retry_read(
                lambda: io.FileIO.readinto(self, view) or 0,
                f"{self.name}: reading {len(view):,} bytes at offset {self.tell():,}",
                error,
            )

    read, readall = io.RawIOBase.read, io.RawIOBase.readall  # type: ignore[assignment]  # which call readinto


def retry_read(read: Callable[[], _T], what: str, error: OSError) -> _T:
    """Repeat a read that failed with ``error``; ``what`` describes it for the message."""
    for _ in range(TRIES - 1):
        if error.errno != errno.EIO:
            raise Unavailable(f"{what} failed: {one_line(error)}") from error
        stop.sleep(AGAIN_AFTER_S)
        try:
            return read()
        except OSError as again:
            error = again
    raise Unavailable(f"{what} failed {TRIES} times: {one_line(error)}") from error


def retry_library(path: str, read: Callable[[], _T]) -> _T:
    """Let a library read a file; repeat that if the system failed to read for it."""
    for left in range(TRIES - 1, -1, -1):
        try:
            return read()
        except Exception as error:
            if isinstance(error, Unavailable) or not _has_system_failed(error):
                raise
            text = " ".join(str(error).split())[:300]
        if left:
            stop.sleep(AGAIN_AFTER_S)
    # Without the library's error as its cause: its traceback may keep files open.
    raise Unavailable(f"{path}: reading failed {TRIES} times: {os.strerror(errno.EIO)} (errno {errno.EIO}): {text}")


def _has_system_failed(error: BaseException | None) -> bool:
    """Whether the cause is a failed read; HDF5 puts the number into its message only."""
    while error is not None:
        if getattr(error, "errno", None) == errno.EIO or f"errno = {errno.EIO}," in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_refusal(error: BaseException) -> str:
    """Why the system refused a library's request; "" if its error is about the file itself."""
    if isinstance(error, MemoryError):
        return "no memory is left for it; a limit of the system (ulimit -d, ulimit -v, a container's) may be in the way"
    for number in _REFUSALS:
        if getattr(error, "errno", None) == number or os.strerror(number) in str(error):
            return one_line(OSError(number, os.strerror(number)))
    return ""


def one_line(error: BaseException) -> str:
    """An error as part of a message: the system's reason and number, or the first line of its text."""
    if isinstance(error, OSError) and error.errno is not None:
        way_out = ""
        if error.errno in (errno.EMFILE, errno.ENFILE):
            way_out = ". Raise the limit of open files (ulimit -n), or lower max_open_files="
        elif error.errno == errno.ENOMEM:
            way_out = ". Raise the limit of this process's memory (ulimit -v, ulimit -d) or of its container"
        return f"{error.strerror} (errno {error.errno}){way_out}"
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__
