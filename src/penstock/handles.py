"""Open files of every kind: read from a position into memory the caller owns.

A handle is a descriptor, a mapping, a copy in the cache, or an address on another machine; whoever holds one reads
without knowing which. A file is identified when it is parsed, and any other size or time is an error, not other data.
"""

import ctypes
import mmap
import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from penstock import tally
from penstock.errors import Changed, Corrupt, Missing, Truncated, Unavailable
from penstock.extents import FileId
from penstock.filecache import FileCache
from penstock.manifest import Manifest, Span, digest
from penstock.memory import borrow
from penstock.sizes import MiB
from penstock.steady import tried, words

if TYPE_CHECKING:  # what speaks to servers takes a while to import, and is imported when it is needed
    from penstock.remote import Body, Remote

# How long a look at a file's size and time holds good. Looking costs microseconds, and a switch of threads.
CHECK_EVERY_S = 0.02

# The system reads ahead of whoever reads on, megabytes at times, and a row that is read in pieces looks like that: it
# may read twice what is wanted. After so many jumps of more than so many bytes it is told not to guess.
JUMP_BYTES = 64 * MiB
JUMPS = 2

# Pieces in which a file is fetched.
FETCH_BYTES = 1 * MiB

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
    if _is_unchanged(file):
        return
    now = replace(identify(file.path, growing=file.growing), compared=file.compared)
    if now == file or (file.growing and now.inode == file.inode and now.size >= file.size):
        return
    how = "replaced" if now.inode != file.inode else "rewritten"
    raise Changed(
        f"{file.path}: the file was {how} after it was opened: it had {file.size:,} bytes, now {now.size:,}, "
        f"written {(now.mtime_ns - file.mtime_ns) / 1e9:+.3f} s later. Open the dataset again to read the new file"
    )


def _is_unchanged(file: FileId) -> bool:
    """Asked with every loan of a mapping."""
    try:
        found = os.stat(file.path)
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns, found.st_ino) == (file.size, file.mtime_ns, file.inode)


class Handle:
    """One open descriptor: of a file to read from, or of a mapping in ``bytes``."""

    manifest: Manifest | None = None
    _span: Span | None = None
    """Which blocks of the manifest are this file's, once that was asked."""
    _after, _jumps = 0, 0
    """Where the last read ended, and how often the next began far from there."""

    def __init__(self, file: FileId, mapped: bool, manifest: Manifest | None = None) -> None:
        self.file = file
        self.manifest = manifest
        self.descriptor = -1
        self.users = 0
        self.bytes = np.empty(0, np.uint8)
        self._checked = -CHECK_EVERY_S
        self._seek = threading.Lock()
        try:
            self.descriptor = os.open(file.path, os.O_RDONLY | _BINARY | _CLOEXEC)
        except FileNotFoundError:
            raise Missing(
                f"{file.path}: the file was there when the dataset was opened, and is gone; restore it, or open the "
                f"dataset again without it"
            ) from None
        except OSError as error:
            raise Unavailable(f"{file.path}: cannot be opened ({words(error)})") from error
        if manifest is not None:
            manifest.check_size(file.path, file.size)
        if mapped:  # a mapping needs no descriptor any more
            try:
                self.bytes = _map(self.descriptor, file.size)
            except (OSError, ValueError) as error:
                check_unchanged(file)  # the likelier cause: it is shorter now
                raise Unavailable(f"{file.path}: mapping {file.size:,} bytes failed: {error}") from error
            finally:
                os.close(self.descriptor)
                self.descriptor = -1

    @property
    def size(self) -> int:
        """Bytes; ``NOT_SEEN`` where there is no file."""
        return self.file.size

    def check(self) -> None:
        """Refuse a file that was changed or replaced, unless that was looked at a moment ago.

        A mapping is always looked at: where a mapped file is cut short, the system ends the process.
        """
        now = time.monotonic()
        if len(self.bytes) or now - self._checked >= CHECK_EVERY_S:
            check_unchanged(self.file)
            self._checked = now

    def read_into(self, offset: int, *targets: np.ndarray) -> None:
        """Fill ``targets`` (each contiguous) one after another from ``offset`` on; an early end is an error."""
        views = [target.reshape(-1).view(np.uint8).data for target in targets]
        mine, began = tally.mine(), time.perf_counter()
        wanted = sum(map(len, views))
        mine.bytes_read += wanted
        tally.note(self.file.path, (offset,), wanted)
        if self.manifest is not None:
            self.compare(offset, wanted)
        self.fill(offset, views)
        mine.file_seconds += time.perf_counter() - began

    def compare(self, offset: int, length: int) -> None:
        """Hold what is there against the manifest, unless that was done before."""
        assert self.manifest is not None
        if self._span is None:
            self._span = self.manifest.span(self.file.path)
        self.manifest.compare(self.file.path, self._span, self.fill, (offset, offset + length))

    def fill(self, offset: int, views: list[memoryview]) -> None:
        """Short reads go on."""
        wanted = sum(map(len, views))
        if self._jumps < JUMPS:
            self._notice_jumps(offset, wanted)
        if wanted <= _MOST_PER_CALL and self._read_some(views, offset) == wanted:
            return
        for view in views:
            self._read_all(view, offset)
            offset += len(view)

    def _notice_jumps(self, offset: int, count: int) -> None:
        if abs(offset - self._after) > JUMP_BYTES:
            self._jumps += 1
            if self._jumps == JUMPS and hasattr(os, "posix_fadvise"):
                with suppress(OSError):  # advice: a file system may have no use for it
                    os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        self._after = offset + count

    def _read_all(self, view: memoryview, offset: int) -> None:
        done, wanted = 0, len(view)
        while done < wanted:
            got = self._read_some([view[done : done + _MOST_PER_CALL]], offset + done)
            if got == 0:
                raise Truncated(
                    f"{self.file.path}: {wanted:,} bytes were expected at offset {offset:,}, but the file ends after "
                    f"{done:,} of them"
                )
            done += got

    def _read_some(self, views: list[memoryview], offset: int) -> int:
        return tried(
            lambda: self._read_once(views, offset),
            lambda: f"{self.file.path}: reading {sum(map(len, views)):,} bytes at offset {offset:,}",
        )

    def _read_once(self, views: list[memoryview], offset: int) -> int:
        if _PREADV:
            return os.preadv(self.descriptor, views, offset)
        with self._seek:
            os.lseek(self.descriptor, offset, os.SEEK_SET)
            return _readinto(self.descriptor, views[0])

    def close(self) -> None:
        self.bytes = np.empty(0, np.uint8)  # the mapping goes with its last view
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


class PassingHandle(Handle):
    """A file that was not seen before, and may be absent."""

    def __init__(self, file: FileId, manifest: Manifest | None = None) -> None:
        self.file, self.descriptor, self.manifest = file, -1, manifest
        self._seek = threading.Lock()

    def look(self) -> None:
        """Open the file, if it is there."""
        path = self.file.path
        try:
            self.descriptor = os.open(path, os.O_RDONLY | _BINARY | _CLOEXEC)
            found = os.fstat(self.descriptor)
        except (FileNotFoundError, NotADirectoryError):
            self.check_may_be_absent()
            return
        except OSError as error:
            raise Unavailable(f"{path}: cannot be opened ({words(error)})") from error
        self.file = FileId(path, found.st_size, found.st_mtime_ns, found.st_ino)
        if self.manifest is not None:
            self.manifest.check_size(path, found.st_size)

    def check_may_be_absent(self) -> None:
        """Refuse that a file which the manifest lists is not there."""
        path = self.file.path
        if self.manifest is not None and self.manifest.lists(path):
            raise Missing(f"{path}: the manifest {self.manifest.path} lists it, and it is not there; restore it")


class CachedHandle(Handle):
    """A copy in the cache, whose descriptor is the cache's to close.

    One that is not what it was leaves the cache, and what was wanted of it comes from where it was copied, if it can.
    """

    def __init__(
        self,
        file: FileId,
        descriptor: int,
        manifest: Manifest | None,
        cache: FileCache,
        spare: "RemoteHandle | None" = None,
    ) -> None:
        self.file, self.descriptor, self.manifest = file, descriptor, manifest
        self._cache, self._spare, self._is_spoilt = cache, spare, False
        self._seek = threading.Lock()

    def compare(self, offset: int, length: int) -> None:
        if self._is_spoilt:
            return
        try:
            super().compare(offset, length)
        except Corrupt as error:
            self._cache.remove(self.file)
            if self._spare is None:
                raise Corrupt(f"{error}. It was a copy in {self._cache.folder}, which is removed: read again") from None
            self._is_spoilt = True

    def fill(self, offset: int, views: list[memoryview]) -> None:
        if self._is_spoilt:
            assert self._spare is not None
            self._spare.fill(offset, views)
        else:
            super().fill(offset, views)

    def check(self) -> None:
        """A copy does not change."""

    def close(self) -> None:
        """The cache's to do."""


class RemoteHandle(Handle):
    """A file on another machine, read in ranges."""

    def __init__(self, file: FileId, remote: "Remote", manifest: Manifest | None = None) -> None:
        self.file, self._remote, self.manifest = file, remote, manifest

    def check(self) -> None:
        """Every answer tells whether it is the same file."""

    def compare(self, offset: int, length: int) -> None:
        """Done with what comes, when it comes: a second time it may be something else."""

    def fill(self, offset: int, views: list[memoryview]) -> None:
        _check_inside(self.file, offset, views)
        if self.manifest is None:
            self._remote.read_into(self.file, offset, views)
            return
        for view in views:
            self._fill_compared(offset, np.frombuffer(view, np.uint8), self.manifest)
            offset += len(view)

    def _fill_compared(self, offset: int, goal: np.ndarray, known: Manifest) -> None:
        """By whole blocks, each held against its digest, and asked for once more where it was damaged on its way."""
        path, step = self.file.path, known.block_bytes
        with borrow(min(step, self.file.size)) as scratch:
            for number, begin, end in known.blocks(known.span(path), offset, offset + len(goal)):
                block = scratch[: end - begin]
                self._remote.read_into(self.file, begin, [block.data])
                if known.is_other(number, block):
                    self._remote.read_into(self.file, begin, [block.data])
                    known.check(path, number, begin, end, digest(block))
                first, last = max(begin, offset), min(end, offset + len(goal))
                goal[first - offset : last - offset] = block[first - begin : last - begin]

    def close(self) -> None:
        """Connections are shared."""


class BodyHandle(Handle):
    """A file on another machine, read from beginning to end."""

    def __init__(self, file: FileId, body: "Body") -> None:
        self.file, self._body = file, body

    def check(self) -> None:
        """Every answer tells whether it is the same file."""

    def fill(self, offset: int, views: list[memoryview]) -> None:
        _check_inside(self.file, offset, views)
        if offset != self._body.at:
            self._body.move(offset)
        for view in views:
            for begin in range(0, len(view), FETCH_BYTES):
                self._body.readinto(view[begin : begin + FETCH_BYTES])

    def close(self) -> None:
        """The lender's to do."""


def _check_inside(file: FileId, offset: int, views: list[memoryview]) -> None:
    wanted = sum(map(len, views))
    if offset + wanted > file.size:
        raise Truncated(
            f"{file.path}: {wanted:,} bytes were expected at offset {offset:,}, but the file ends after "
            f"{max(0, file.size - offset):,} of them"
        )


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
