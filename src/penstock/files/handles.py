"""Open files of every kind: read from a position into memory the caller owns.

A handle is a descriptor, a mapping, a copy in the cache, or an address on another machine; its user reads without
knowing which. A file is identified when it is parsed, and any other size or time is an error, not other data.
"""

import os
import stat
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.base import counters, stop
from penstock.base.file_id import FileId
from penstock.base.policy import ReadPolicy
from penstock.base.scratch import borrow
from penstock.base.sizes import MiB
from penstock.errors import Changed, Missing, Truncated, Unavailable
from penstock.files.manifest import BlockSpan, Manifest, digest
from penstock.files.mapping import map_descriptor
from penstock.files.retry import check_regular, one_line, open_regular, retry_read

if TYPE_CHECKING:  # remote takes a while to import, and is imported when it is needed
    from penstock.remote.ranges import Body, Remote

# The system reads ahead of sequential reads, sometimes by megabytes. Rows that are read in pieces look sequential, so
# twice the wanted bytes may be read. After two jumps of more than this, read-ahead is switched off.
JUMP_BYTES = 64 * MiB
JUMPS = 2

# Cached data arrive several times faster than this, other data rarely half as fast. A call takes this long at most.
CACHED_BYTES_PER_S = 2e9
CALL_S = 100e-6

# A file is fetched in pieces of this size.
FETCH_BYTES = 1 * MiB

NOT_SEEN = -1
"""The size of a file that is looked at only when it is read."""


def identify(path: str, *, growing: bool = False) -> FileId:
    """The file, or folder, as it is now."""
    try:
        found = os.stat(path)
        if not stat.S_ISDIR(found.st_mode):  # some formats are folders
            check_regular(found)
    except FileNotFoundError:
        raise Missing(f"{path}: no such file; check the path, or restore the file") from None
    except OSError as error:
        raise Unavailable(f"{path}: cannot be read ({error.strerror})") from error
    return FileId(path, found.st_size, found.st_mtime_ns, found.st_ino, growing)


def unseen_file(path: str) -> FileId:
    """A file that may or may not exist: one of too many to look at them all."""
    return FileId(path, NOT_SEEN, 0, 0)


def is_there(path: str) -> bool:
    """Whether there is such a file on this machine; anything else under that name, or in the way, is an error."""
    try:
        check_regular(os.stat(path))
    except FileNotFoundError:
        check_no_link(path)
        return False
    except OSError as error:
        raise Unavailable(f"{path}: cannot be read ({one_line(error)})") from error
    return True


def check_no_link(path: str) -> None:
    """Refuse to treat a file as absent if a link to it, or to a folder above it, leads nowhere."""
    there = os.path.abspath(path)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if os.path.islink(there) and not os.path.exists(there):
        raise Unavailable(f"{path}: {there} is a link to nowhere ({os.readlink(there)}); restore what it leads to")


def check_unchanged(file: FileId) -> None:
    """Raise if the file is not the one that was parsed."""
    if _is_unchanged(file):
        return
    now = replace(identify(file.path, growing=file.is_growing), is_compared=file.is_compared)
    if now == file or (file.is_growing and now.inode == file.inode and now.size >= file.size):
        return
    how = "replaced" if now.inode != file.inode else "rewritten"
    raise Changed(
        f"{file.path}: the file was {how} after it was opened: it had {file.size:,} bytes, now {now.size:,}, "
        f"written {(now.mtime_ns - file.mtime_ns) / 1e9:+.3f} s later. Open the dataset again to read the new file"
    )


def _is_unchanged(file: FileId) -> bool:
    """The quick answer, needed for every loan of a mapping."""
    try:
        found = os.stat(file.path)
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns, found.st_ino) == (file.size, file.mtime_ns, file.inode)


class Handle:
    """One open descriptor of a file, or a ``mapping`` of it."""

    manifest: Manifest | None = None
    _policy = ReadPolicy()
    _span: BlockSpan | None = None
    """Which blocks of the manifest are this file's, once that was needed."""
    descriptor = -1
    _is_slow = False
    """Whether the last read took longer than one from memory."""
    _after, _jumps = 0, 0
    """Where the last read ended, and how many reads began far from the end of the one before."""
    mapping = np.empty(0, np.uint8)
    """The mapping, if there is one."""
    _close_descriptor = staticmethod(os.close)
    """Kept here: a handle may be closed while the interpreter shuts down, when modules are empty."""

    def __init__(self, file: FileId, mapped: bool, manifest: Manifest | None, policy: ReadPolicy) -> None:
        self.file = file
        self.manifest = manifest
        self._policy = policy
        self.descriptor = -1
        self.users = 0
        self._checked_at = -policy.check_file_every_s
        self._seek = threading.Lock()
        try:
            self.descriptor = open_regular(file.path)
        except FileNotFoundError:
            raise Missing(
                f"{file.path}: the file was there when the dataset was opened, and is gone; restore it, or open the "
                f"dataset again without it"
            ) from None
        except OSError as error:
            raise Unavailable(f"{file.path}: cannot be opened ({one_line(error)})") from error
        if manifest is not None:
            manifest.check_size(file.path, file.size)
        if mapped:
            self._map()

    def _map(self) -> None:
        """Map the file, and close the descriptor, which a mapping does not need."""
        try:
            self.mapping = map_descriptor(self.descriptor, self.file.size)
        except (OSError, ValueError) as error:
            check_unchanged(self.file)  # the likelier cause: it is shorter now
            text = f"{self.file.path}: mapping {self.file.size:,} bytes failed: {one_line(error)}"
            raise Unavailable(text) from error
        finally:
            os.close(self.descriptor)
            self.descriptor = -1

    @property
    def size(self) -> int:
        """Bytes; ``NOT_SEEN`` if there is no file."""
        return self.file.size

    def check(self) -> None:
        """Refuse a file that was changed or replaced, unless it was checked a moment ago.

        A mapping is always checked: if a mapped file is cut short, the system ends the process.
        """
        now = time.monotonic()
        if len(self.mapping) or now - self._checked_at >= self._policy.check_file_every_s:
            check_unchanged(self.file)
            self._checked_at = now

    def expect(self, offset: int, count: int) -> None:
        """Announce that this range is read next, piece by piece; does nothing while reads come from memory.

        The system then fetches all of it at once, beside the work on the first pieces.
        """
        if self._is_slow and self.descriptor >= 0 and hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # advice that a file system may ignore
                os.posix_fadvise(self.descriptor, offset, count, os.POSIX_FADV_WILLNEED)

    def read_into(self, offset: int, *targets: np.ndarray) -> None:
        """Fill ``targets`` (each contiguous) one after another from ``offset`` on; an early end is an error."""
        if stop.is_asked():  # a loop that is left waits for its threads: they end in the middle of large blocks
            raise Unavailable(f"{self.file.path}: reading was stopped, because the loop was left")
        views = [target.reshape(-1).view(np.uint8).data for target in targets]
        mine, began = counters.mine(), time.perf_counter()
        wanted = sum(map(len, views))
        mine.bytes_read += wanted
        counters.note(self.file.path, (offset,), wanted)
        if self.manifest is not None:
            self.compare(offset, wanted)
        self.fill(offset, views)
        seconds = time.perf_counter() - began
        mine.file_seconds += seconds
        self._is_slow = seconds * CACHED_BYTES_PER_S > wanted + CACHED_BYTES_PER_S * CALL_S

    def compare(self, offset: int, length: int) -> None:
        """Compare the blocks of a range with the manifest, unless that was done before."""
        assert self.manifest is not None
        if self._span is None:
            self._span = self.manifest.span(self.file.path)
        self.manifest.compare(self.file.path, self._span, self.fill, (offset, offset + length))

    def fill(self, offset: int, views: list[memoryview]) -> None:
        """Fill ``views`` one after another from ``offset`` on. Usually one system call, made right here."""
        wanted = sum(map(len, views))
        if self._jumps < JUMPS:
            self._count_jumps(offset, wanted)
        if self._policy.use_preadv and wanted <= self._policy.bytes_per_call:
            try:
                done = os.preadv(self.descriptor, views, offset)
            except OSError as error:
                done = retry_read(
                    lambda: os.preadv(self.descriptor, views, offset), self._describe(offset, wanted), error
                )
            if done == wanted:
                return
        for view in views:
            self._fill_in_pieces(offset, view)
            offset += len(view)

    def _count_jumps(self, offset: int, count: int) -> None:
        if abs(offset - self._after) > JUMP_BYTES:
            self._jumps += 1
            if self._jumps == JUMPS and hasattr(os, "posix_fadvise"):
                with suppress(OSError):  # advice that a file system may ignore
                    os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        self._after = offset + count

    def _describe(self, offset: int, count: int) -> str:
        return f"{self.file.path}: reading {count:,} bytes at offset {offset:,}"

    def _fill_in_pieces(self, offset: int, view: memoryview) -> None:
        done, wanted = 0, len(view)
        while done < wanted:
            got = self._read_some(view[done : done + self._policy.bytes_per_call], offset + done)
            if got == 0:
                raise Truncated(
                    f"{self.file.path}: {wanted:,} bytes were expected at offset {offset:,}, but the file ends after "
                    f"{done:,} of them"
                )
            done += got

    def _read_some(self, view: memoryview, offset: int) -> int:
        try:
            return self._read_once(view, offset)
        except OSError as error:
            return retry_read(lambda: self._read_once(view, offset), self._describe(offset, len(view)), error)

    def _read_once(self, view: memoryview, offset: int) -> int:
        if self._policy.use_preadv:
            return os.preadv(self.descriptor, [view], offset)
        with self._seek:
            os.lseek(self.descriptor, offset, os.SEEK_SET)
            data = os.read(self.descriptor, len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self.mapping = type(self).mapping  # the mapping ends with its last view
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            self._close_descriptor(descriptor)

    def __del__(self) -> None:
        self.close()


class UnseenHandle(Handle):
    """A file that was not seen before and may be absent."""

    def __init__(self, file: FileId, manifest: Manifest | None, policy: ReadPolicy) -> None:
        self.file, self.descriptor, self.manifest, self._policy = file, -1, manifest, policy
        self._seek = threading.Lock()

    def open(self) -> None:
        """Open the file, if it is there."""
        path = self.file.path
        try:
            self.descriptor = open_regular(path)
            found = os.fstat(self.descriptor)
        except FileNotFoundError:
            check_no_link(path)
            self.check_may_be_absent()
            return
        except OSError as error:
            raise Unavailable(f"{path}: cannot be opened ({one_line(error)})") from error
        self.file = FileId(path, found.st_size, found.st_mtime_ns, found.st_ino)
        if self.manifest is not None:
            self.manifest.check_size(path, found.st_size)

    def check_may_be_absent(self) -> None:
        """Refuse the absence of a file that the manifest lists."""
        path = self.file.path
        if self.manifest is not None and self.manifest.lists(path):
            raise Missing(f"{path}: the manifest {self.manifest.path} lists it, and it is not there; restore it")


class RemoteHandle(Handle):
    """A file on another machine, read in ranges."""

    def __init__(self, file: FileId, remote: "Remote", manifest: Manifest | None = None) -> None:
        self.file, self._remote, self.manifest = file, remote, manifest

    def check(self) -> None:
        """Every answer of the server identifies the file."""

    def compare(self, offset: int, length: int) -> None:
        """Done in ``fill``, on the bytes that are delivered: a second request may bring others."""

    def fill(self, offset: int, views: list[memoryview]) -> None:
        _check_inside(self.file, offset, views)
        if self.manifest is None:
            self._remote.read_into(self.file, offset, views)
            return
        for view in views:
            self._fill_compared(offset, np.frombuffer(view, np.uint8), self.manifest)
            offset += len(view)

    def _fill_compared(self, offset: int, goal: np.ndarray, known: Manifest) -> None:
        """In whole blocks, each compared with its digest, and requested once more if it was damaged on its way."""
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
        """Nothing to close: connections are shared."""


class BodyHandle(Handle):
    """A file on another machine, read from beginning to end."""

    def __init__(self, file: FileId, body: "Body") -> None:
        self.file, self._body = file, body

    def check(self) -> None:
        """Every answer of the server identifies the file."""

    def fill(self, offset: int, views: list[memoryview]) -> None:
        _check_inside(self.file, offset, views)
        if offset != self._body.at:
            self._body.move(offset)
        for view in views:
            for begin in range(0, len(view), FETCH_BYTES):
                self._body.readinto(view[begin : begin + FETCH_BYTES])

    def close(self) -> None:
        """The lender closes it."""


def _check_inside(file: FileId, offset: int, views: list[memoryview]) -> None:
    wanted = sum(map(len, views))
    if offset + wanted > file.size:
        raise Truncated(
            f"{file.path}: {wanted:,} bytes were expected at offset {offset:,}, but the file ends after "
            f"{max(0, file.size - offset):,} of them"
        )
