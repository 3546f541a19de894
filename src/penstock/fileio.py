"""The only module that opens data files.

Positioned reads into memory the caller owns, through handles lent from a bounded, least-recently-used set.

Rules:
1. A handle is lent in a ``with``, to several threads at once, and no thread borrows two, so that waiting for one
   cannot deadlock.
2. Never more than ``max_open`` descriptors are open; with 0, each request opens and closes its own.
3. Handles are never shared across a fork: the child closes what it inherited and opens its own.
4. A file is identified when it is parsed and checked when it is lent. Another size or time is an error, not other data.
   Files that nobody looked at before, one of a million chunks each, are opened for one loan: they may be absent.
"""

import ctypes
import mmap
import os
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from penstock import tally
from penstock.errors import Changed, ConfigError, Missing, Truncated, Unavailable
from penstock.extents import FileId

# Enough for a handle a session and a thread, far below any system's limit of 256 (macOS) or 1024 (Linux).
MAX_OPEN_FILES = 64

# How long a look at a file's size and time holds good. Looking costs microseconds, and a switch of threads.
CHECK_EVERY_S = 0.02

_BINARY = getattr(os, "O_BINARY", 0)
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)

# Linux moves at most 2 GiB - 4 KiB in one call.
_MOST_PER_CALL = 2**30

_PREADV = hasattr(os, "preadv")  # else (Windows) seek and read, one thread at a time in a handle


def identify(path: str, *, growing: bool = False) -> FileId:
    """The file as it is now."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise Missing(f"{path}: no such file; check the path, or restore the file") from None
    except OSError as error:
        raise Unavailable(f"{path}: cannot be read ({error.strerror})") from error
    return FileId(path, found.st_size, found.st_mtime_ns, found.st_ino, growing)


NOT_SEEN = -1
"""The size of a file that is looked at when it is read."""


def unseen(path: str) -> FileId:
    """A file that may be there: one of too many to look at them all."""
    return FileId(path, NOT_SEEN, 0, 0)


def check_unchanged(file: FileId) -> None:
    """Refuse to go on with any other file than the one that was parsed."""
    now = identify(file.path, growing=file.growing)
    if now == file or (file.growing and now.inode == file.inode and now.size >= file.size):
        return
    how = "replaced" if now.inode != file.inode else "rewritten"
    raise Changed(
        f"{file.path}: the file was {how} after it was opened: it had {file.size:,} bytes, now {now.size:,}, "
        f"written {(now.mtime_ns - file.mtime_ns) / 1e9:+.3f} s later. Open the dataset again to read the new file"
    )


class Files:
    """Open files, lent to whoever reads."""

    def __init__(self, max_open: int = MAX_OPEN_FILES) -> None:
        if not isinstance(max_open, int) or max_open < 0:
            raise ConfigError(
                f"max_open_files={max_open!r}: expected a whole number, 0 (open for each request) or more"
            )
        self.max_open = max_open
        self._reset()
        _EVERY_FILES.add(self)

    def _reset(self) -> None:
        self._open: OrderedDict[tuple[FileId, bool], Handle] = OrderedDict()
        self._passing: set[Handle] = set()  # open for one loan
        self._changed = threading.Condition()

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return type(self), (self.max_open,)

    @contextmanager
    def lend(self, file: FileId, *, mapped: bool = False) -> Iterator["Handle"]:
        """A handle of this file (or a mapping of it, where rows are too small for a system call each).

        The handle of a file that was not seen before tells by its ``size`` whether it is there.
        """
        if file.size == NOT_SEEN:
            with self._once(file) as handle:
                yield handle
            return
        handle = self._take(file, mapped)
        try:
            handle.check()
            yield handle
        finally:
            with self._changed:
                handle.users -= 1
                if handle.users == 0:
                    if self.max_open == 0:
                        self._close(file, mapped)
                    self._changed.notify()

    def close(self) -> None:
        """Close the descriptors that are not lent right now; the files can be lent again afterwards.

        Mappings have none, and stay while they are among the most recently used: making one anew costs a page fault
        for every page that is touched again.
        """
        with self._changed:
            for key in [key for key, handle in self._open.items() if handle.users == 0 and handle.descriptor >= 0]:
                self._close(*key)
            self._changed.notify_all()

    def _take(self, file: FileId, mapped: bool) -> "Handle":
        with self._changed:
            while (handle := self._open.get((file, mapped))) is None:
                if self._has_room():
                    handle = self._opened(file, mapped)
                    break
            self._open.move_to_end((file, mapped))
            handle.users += 1
            return handle

    def _has_room(self) -> bool:
        """Whether one more may be open; if not, one that is idle is closed, or what has changed is waited for."""
        if len(self._open) + len(self._passing) < (self.max_open or MAX_OPEN_FILES):
            return True
        idle = next((key for key, handle in self._open.items() if handle.users == 0), None)
        if idle:
            self._close(*idle)
        else:
            self._changed.wait()
        return False

    @contextmanager
    def _once(self, file: FileId) -> Iterator["Handle"]:
        """A file opened for this loan alone, without holding up others while it is opened."""
        handle = Handle(file, mapped=False, later=True)
        with self._changed:
            while not self._has_room():
                pass
            self._passing.add(handle)
        try:
            handle.open()
            yield handle
        finally:
            handle.close()
            with self._changed:
                self._passing.discard(handle)
                self._changed.notify()

    def _opened(self, file: FileId, mapped: bool) -> "Handle":
        try:
            handle = self._open[file, mapped] = Handle(file, mapped)
        except BaseException:
            self._changed.notify()  # the room that was made for it is somebody else's
            raise
        return handle

    def _close(self, file: FileId, mapped: bool) -> None:
        self._open.pop((file, mapped)).close()


class Handle:
    """One open descriptor: of a file to read from, or of a mapping in ``bytes``."""

    def __init__(self, file: FileId, mapped: bool, later: bool = False) -> None:
        self.file = file
        self.size = file.size
        """Bytes; ``NOT_SEEN`` where there is no file."""
        self.descriptor = -1
        self.users = 0
        self.bytes = np.empty(0, np.uint8)
        self._checked = -CHECK_EVERY_S
        self._seek = threading.Lock()
        if later:
            return
        self.open()
        if mapped:  # a mapping needs no descriptor any more
            try:
                self.bytes = _map(self.descriptor, file.size)
            except (OSError, ValueError) as error:
                check_unchanged(file)  # the likelier cause: it is shorter now
                raise Unavailable(f"{file.path}: mapping {file.size:,} bytes failed: {error}") from error
            finally:
                os.close(self.descriptor)
                self.descriptor = -1

    def open(self) -> None:
        """Open the file; one that was not seen before may be absent."""
        file = self.file
        try:
            self.descriptor = os.open(file.path, os.O_RDONLY | _BINARY | _CLOEXEC)
            if file.size == NOT_SEEN:
                self.size = os.fstat(self.descriptor).st_size
        except (FileNotFoundError, NotADirectoryError):
            if file.size == NOT_SEEN:
                return
            raise Missing(
                f"{file.path}: the file was there when the dataset was opened, and is gone; restore it, or open the "
                f"dataset again without it"
            ) from None
        except OSError as error:
            raise Unavailable(f"{file.path}: cannot be opened ({error.strerror})") from error

    def check(self) -> None:
        """Refuse a file that was changed or replaced, unless that was looked at a moment ago.

        A mapping is always looked at: where a mapped file is cut short, the system ends the process.
        """
        now = time.monotonic()
        if len(self.bytes) or now - self._checked >= CHECK_EVERY_S:
            check_unchanged(self.file)
            self._checked = now

    def read_into(self, offset: int, target: np.ndarray) -> None:
        """Fill ``target`` (contiguous) from ``offset`` on; short reads go on, an early end is an error."""
        view = target.reshape(-1).view(np.uint8).data
        done, wanted = 0, len(view)
        tally.mine().bytes_read += wanted
        while done < wanted:
            got = self._read_some(view[done : done + _MOST_PER_CALL], offset + done)
            if got == 0:
                raise Truncated(
                    f"{self.file.path}: {wanted:,} bytes were expected at offset {offset:,}, but the file ends after "
                    f"{done:,} of them"
                )
            done += got

    def _read_some(self, view: memoryview, offset: int) -> int:
        try:
            if _PREADV:
                return os.preadv(self.descriptor, [view], offset)
            with self._seek:
                os.lseek(self.descriptor, offset, os.SEEK_SET)
                return _readinto(self.descriptor, view)
        except OSError as error:
            raise Unavailable(
                f"{self.file.path}: reading {len(view):,} bytes at offset {offset:,} failed: "
                f"{error.strerror} (errno {error.errno})"
            ) from error

    def close(self) -> None:
        self.bytes = np.empty(0, np.uint8)  # the mapping goes with its last view
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def map_file(path: str) -> np.ndarray:
    """The bytes of a file, read-only, with no descriptor held."""
    descriptor = os.open(path, os.O_RDONLY | _BINARY | _CLOEXEC)
    try:
        return _map(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def _map(descriptor: int, size: int) -> np.ndarray:
    """A file's bytes, mapped read-only until the last view of them dies, and if possible without a descriptor."""
    if sys.version_info >= (3, 13):
        return np.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ, trackfd=False), np.uint8)
    if sys.platform != "linux":
        return np.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    block = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(block, libc.munmap, address, size).atexit = False
    mapped = np.frombuffer(memoryview(block), np.uint8)
    mapped.flags.writeable = False
    return mapped


def _readinto(descriptor: int, view: memoryview) -> int:
    data = os.read(descriptor, len(view))
    view[: len(data)] = data
    return len(data)


_EVERY_FILES: "weakref.WeakSet[Files]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for files in list(_EVERY_FILES):
        inherited = [*files._open.values(), *files._passing]
        files._reset()
        for handle in inherited:
            handle.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
