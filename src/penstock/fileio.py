"""Open data files, lent to whoever reads: nobody else opens one.

Positioned reads into memory the caller owns, through handles lent from a bounded, least-recently-used set.

Rules:
1. A handle is lent in a ``with``, to several threads at once, and no thread borrows two, so that waiting for one
   cannot deadlock.
2. Never more than ``max_open`` descriptors are open; with 0, each request opens and closes its own.
3. Handles are never shared across a fork: the child closes what it inherited and opens its own.
4. A file is identified when it is parsed and checked when it is lent. Another size or time is an error, not other data.
   Files that nobody looked at before, one of a million chunks each, are opened for one loan: they may be absent.
5. A file on another machine is read in ranges; with a cache, from its copy there, which is open only while it is lent,
   so that the cache can make room. Where a cache cannot hold all files that were opened, the first that fit have
   copies and the others are read in ranges: they would push each other out with every read. None is ever mapped.
6. With a manifest, no byte of a file is handed out before the block that it is of was compared, nor is a file mapped,
   where nobody could see what is read. What a library opens by its name is compared whole before it does.
"""

import errno
import hashlib
import os
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from penstock import packing, stopping
from penstock.errors import CacheIsFull, Changed, ConfigError, Corrupt, LimitExceeded, Missing, Unavailable
from penstock.extents import FileId
from penstock.filecache import PATIENCE_S, CacheFull, FileCache
from penstock.handles import (
    FETCH_BYTES,
    NOT_SEEN,
    BodyHandle,
    CachedHandle,
    Handle,
    PassingHandle,
    RemoteHandle,
    identify,
)
from penstock.machine import descriptor_limit
from penstock.manifest import PIECE_BYTES, Digests, Manifest, copies_bytes, of_copy
from penstock.memory import aligned
from penstock.packing import MAX_EXPANSION
from penstock.sizes import KiB, parse_size
from penstock.steady import AGAIN_AFTER_S, TRIES, open_steady
from penstock.urls import is_remote

if TYPE_CHECKING:  # what speaks to servers takes a while to import, and is imported when it is needed
    from penstock.remote import Body, Head, Remote, RemoteOptions

# Enough for a handle a session and a thread, far below any system's limit of 256 (macOS) or 1024 (Linux).
MAX_OPEN_FILES = 64

# Of files that are read from beginning to end.
BUFFER_BYTES = 256 * KiB

# What tells a file's format.
HEAD_BYTES = 512

# Files that LMDB and TileDB lock.
LOCKS = ("lock.mdb", "__lock.tdb")


def _beginning(path: str, count: int) -> bytes:
    with open_steady(path) as file:
        return file.read(count)


class Files:
    """Open files, lent to whoever reads."""

    def __init__(
        self,
        max_open: int = MAX_OPEN_FILES,
        remote: "Remote | None" = None,
        cache: FileCache | None = None,
        known: "Mapping[str, Head] | None" = None,
        manifest: Manifest | None = None,
        max_expansion: int = MAX_EXPANSION,
    ) -> None:
        if not isinstance(max_open, int) or max_open < 0:
            raise ConfigError(
                f"max_open_files={max_open!r}: expected a whole number, 0 (open for each request) or more"
            )
        if not isinstance(max_expansion, int) or max_expansion < 1:
            raise ConfigError(f"max_expansion={max_expansion!r}: expected a whole number, 1 or more")
        self.max_open, self.max_expansion = max_open, max_expansion
        self._remote, self.cache, self.manifest = remote, cache, manifest
        self._known: dict[str, Head] = dict(known or {})
        """Files on other machines, as they were when they were identified last."""
        self._known_bytes = sum(head.file.size for head in self._known.values())
        self._just_asked: set[str] = set()
        self._cache_is_full = False
        self._copies: dict[FileId, Manifest | None] = {}
        """What copies in the cache were when they were made."""
        self._reset()
        _EVERY_FILES.add(self)

    def _reset(self) -> None:
        self._open: OrderedDict[tuple[FileId, bool], Handle] = OrderedDict()
        self._passing: set[Handle] = set()  # open for one loan
        self._most = min(self.max_open or MAX_OPEN_FILES, max(1, descriptor_limit() // 2))  # others need some too
        self._changed = threading.Condition()

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.max_open, self._remote, self.cache, self._known, self.manifest, self.max_expansion)

    @property
    def remote(self) -> "Remote":
        """What reads files on other machines."""
        if self._remote is None:
            from penstock.remote import Remote

            self._remote = Remote()
        return self._remote

    def identify(self, path: str, *, growing: bool = False) -> FileId:
        """The file as it is now; ``path`` may be an address that was admitted."""
        if not is_remote(path):
            found = identify(path, growing=growing)
            if self.manifest is None:
                return found
            self.manifest.check_size(path, found.size)
            return replace(found, compared=True)
        if path in self._just_asked:
            self._just_asked.discard(path)
        else:
            self._ask(path)
        head = self._known[path]
        if not head.in_parts and self.cache is None:
            raise Unavailable(
                f"{path}: the server cannot send parts of files, so single samples cannot be read from there. Pass "
                f"cache_dir= to fetch files whole, once; or read in order with penstock.webdataset"
            )
        if self.manifest is None:
            return head.file
        self.manifest.check_size(path, head.file.size)
        return replace(head.file, compared=True)

    def first_bytes(self, path: str) -> bytes:
        """What tells a file's format; fewer bytes if it is shorter."""
        if is_remote(path):  # the same request identifies it, and that is what comes next
            self._just_asked.add(path)
            return self._ask(path).first
        return _beginning(path, HEAD_BYTES)

    def _ask(self, path: str) -> "Head":
        head, before = self.remote.head(path), self._known.get(path)
        self._known[path] = head
        self._known_bytes += head.file.size - (before.file.size if before else 0)
        return head

    def head_of(self, file: FileId, count: int) -> bytes:
        """The first bytes of a file while it is parsed; fewer if it is shorter. No handle of it is kept."""
        if not is_remote(file.path) and not file.compared:
            return _beginning(file.path, count)
        head = np.empty(min(count, file.size), np.uint8)
        with self.lend(file) as handle:
            handle.read_into(0, head)
        return head.tobytes()

    @property
    def scratch_bytes(self) -> int:
        """What a read borrows to compare what it reads."""
        if self.manifest is not None and self._known:  # blocks of files elsewhere are held while they are compared
            return aligned(self.manifest.block_bytes) + PIECE_BYTES
        return 0 if self.manifest is None and self.cache is None else PIECE_BYTES

    @property
    def shared_index(self) -> dict[int, int]:
        """Memory of what all files are held against."""
        if self.manifest is not None:
            return {id(self.manifest): self.manifest.index_bytes}
        return {} if self.cache is None else {id(self): copies_bytes(len(self._known), self._known_bytes)}

    def marked(self, file: FileId) -> FileId:
        """A file or folder whose bytes were held against the manifest, if there is one."""
        return replace(file, compared=self.manifest is not None)

    def compare_whole(self, path: str) -> None:
        """Hold all of a file, or of the files of a folder, against the manifest: a library will open it by its name."""
        if self.manifest is None or is_remote(path):
            return
        self.manifest.check_there(path)
        for each in files_below(path):
            file = self.identify(each)
            with self.lend(file) as handle:
                handle.compare(0, file.size)

    def is_far(self, file: FileId) -> bool:
        """Whether each read of it is a journey, so that many at a time pay."""
        return is_remote(file.path) and not file.expanded and not self._keeps(file)

    def _keeps(self, file: FileId) -> bool:
        """Whether there is to be a copy of a file in the cache."""
        if self.cache is None:
            return False
        limit = self.cache.limit_bytes
        if self._cache_is_full and self._comes_in_parts(file):
            return self.cache.has(file)
        if limit is None or self._known_bytes <= limit or self.cache.has(file):
            return True
        head = self._known.get(file.path)
        return head is None or not head.in_parts or file.size > limit  # the last is an error, which tells of the limit

    def lend(self, file: FileId, *, mapped: bool = False) -> AbstractContextManager["Handle"]:
        """A handle of this file (or a mapping of it, where rows are too small for a system call each).

        The handle of a file that was not seen before tells by its ``size`` whether it is there.
        """
        if file.size == NOT_SEEN or file.expanded or is_remote(file.path):
            return self._lend_other(file)
        return _Loan(self, file, mapped)

    @contextmanager
    def _lend_other(self, file: FileId) -> Iterator["Handle"]:
        if file.size == NOT_SEEN:
            with self._once(file) as handle:
                yield handle
        elif file.expanded:
            assert self.cache is not None
            with self.cache.lent(file, lambda descriptor: self._expand(file, descriptor)) as descriptor:
                yield CachedHandle(file, descriptor, self._as_copied(file), self.cache)
        elif self.cache is None or not self._keeps(file):
            yield RemoteHandle(file, self.remote, self.manifest)
        else:
            with self._copy(file) as handle:
                yield handle

    @contextmanager
    def _copy(self, file: FileId) -> Iterator["Handle"]:
        """A file on another machine by its copy here; where the disk is full, without one."""
        assert self.cache is not None
        far = RemoteHandle(file, self.remote, self.manifest)
        with ExitStack() as stack:
            try:
                lent = self.cache.lent(file, lambda descriptor: self._fetch(file, descriptor))
                descriptor = stack.enter_context(lent)
            except CacheFull as error:
                if not self._comes_in_parts(file):
                    raise
                self._do_without_copies(error)
                yield far
                return
            spare = far if self._comes_in_parts(file) else None
            yield CachedHandle(file, descriptor, self.manifest or self._as_copied(file), self.cache, spare)

    def _comes_in_parts(self, file: FileId) -> bool:
        head = self._known.get(file.path)
        return head is not None and head.in_parts

    def _do_without_copies(self, error: CacheFull) -> None:
        if not self._cache_is_full:
            self._cache_is_full = True
            warnings.warn(f"{error}. Reading over the network goes on", CacheIsFull, stacklevel=2)

    def _as_copied(self, file: FileId) -> Manifest | None:
        """What a copy was when it was made; known to this process from its first use on."""
        assert self.cache is not None
        if file not in self._copies:
            told = f"in {self.cache.folder}"
            self._copies[file] = of_copy(told, file.path, file.size, self.cache.sums(file))
        return self._copies[file]

    @contextmanager
    def lend_in_order(self, file: FileId) -> Iterator["Handle"]:
        """A handle for reads that go ahead through the file: one long request where it is far away."""
        if not self.is_far(file) or self.manifest is not None:  # comparing reads whole blocks, and not in this order
            with self.lend(file) as handle:
                yield handle
            return
        with self.remote.body(file.path, file) as body:
            yield BodyHandle(file, body)

    @contextmanager
    def stream(self, path: str) -> Iterator["Body | BinaryIO"]:
        """All bytes of a file on another machine, in order; from its copy, where there is a cache."""
        file = self.copied(path)
        if file is None:
            with self.remote.body(path) as body:
                yield body
            return
        with self.lend(file) as handle, open(os.dup(handle.descriptor), "rb", buffering=BUFFER_BYTES) as copy:
            os.lseek(handle.descriptor, 0, os.SEEK_SET)
            yield copy

    def copied(self, path: str) -> FileId | None:
        """A file on another machine of which a copy is kept here; None where there is no cache, no room in it, or no
        telling how long the file is.
        """
        from penstock.remote import NoLength

        if self.cache is None:
            return None
        try:
            file = self.identify(path)
        except NoLength:
            return None
        return file if self._keeps(file) else None

    def _fetch(self, file: FileId, descriptor: int) -> bytes:
        """Write a file from another machine to an open one, and compare its checksum where the server gives one."""
        from penstock.remote import digest_of

        piece = memoryview(bytearray(min(FETCH_BYTES, max(1, file.size))))
        sums = {name: hashlib.new(name, usedforsecurity=False) for name in ("md5", "sha256")}
        digests = Digests()
        with self.remote.body(file.path, file) as body:
            told = None
            while got := body.readinto(piece):
                told = digest_of(file.path, body.headers)
                if told is not None:
                    sums[told[0]].update(piece[:got])
                digests.add(piece[:got])
                _write(descriptor, piece[:got])
        if told is not None and sums[told[0]].digest() != told[1]:
            raise Corrupt(
                f"{file.path}: what came is not what the server says it sent: {told[0]} {sums[told[0]].hexdigest()} "
                f"instead of {told[1].hex()}. It is not kept; try again"
            )
        return digests.whole()

    def expanded(self, path: str, size: int | None = None) -> FileId:
        """What a compressed file holds, of which a copy is kept in the cache; its size, where it is not known, is found
        by going through it.
        """
        packed = self.identify(path)
        if self.cache is None:
            raise ConfigError(
                f"{path}: is compressed, so that single samples cannot be read. Pass cache_dir= to keep an expanded "
                f"copy; or read in order with penstock.webdataset"
            )
        if size is None:
            size = 0
            for piece in self._pieces(packed):
                size += len(piece)
                if self.cache.limit_bytes is not None and size > self.cache.limit_bytes:
                    raise LimitExceeded(
                        f"{path}: expands to more than cache_bytes={self.cache.limit_bytes:,}; give more, or read in "
                        f"order with penstock.webdataset"
                    )
        place = "" if is_remote(path) else os.path.abspath(path)
        version = f"expanded from {packed.size} bytes {packed.etag} {place}"
        return FileId(path, size, packed.mtime_ns, packed.inode, etag=version, expanded=True)

    def _expand(self, file: FileId, descriptor: int) -> bytes:
        written, digests = 0, Digests()
        for piece in self._pieces(file):
            digests.add(memoryview(piece))
            _write(descriptor, memoryview(piece))
            written += len(piece)
        if written != file.size or self.identify(file.path).mtime_ns != file.mtime_ns:
            raise Changed(
                f"{file.path}: the file was rewritten after it was opened: it expanded to {file.size:,} bytes, now to "
                f"{written:,}. Open the dataset again to read the new file"
            )
        return digests.whole()

    def _pieces(self, file: FileId) -> Iterator[bytes]:
        """What a compressed file holds, here or on another machine."""
        if is_remote(file.path):
            with self.remote.body(file.path) as body:
                yield from packing.pieces(body, file.path, FETCH_BYTES, self.max_expansion)
        else:
            with open(file.path, "rb", buffering=BUFFER_BYTES) as source:
                yield from packing.pieces(source, file.path, FETCH_BYTES, self.max_expansion)

    def close(self) -> None:
        """Close the descriptors that are not lent right now; the files can be lent again afterwards.

        Mappings have none, and stay while they are among the most recently used: making one anew costs a page fault
        for every page that is touched again.
        """
        with self._changed:
            for key in [key for key, handle in self._open.items() if handle.users == 0 and handle.descriptor >= 0]:
                self._close(*key)
            self._changed.notify_all()
        if self._remote is not None:
            self._remote.close()

    def _take(self, file: FileId, mapped: bool) -> "Handle":
        """A handle that counts as lent. Where the process has no more descriptors, idle ones are closed first."""
        for left in range(TRIES - 1, -1, -1):
            try:
                return self._take_once(file, mapped)
            except Unavailable as error:
                if not left or not _out_of_descriptors(error):
                    raise
            for each in list(_EVERY_FILES):
                each.close()
            stopping.sleep(AGAIN_AFTER_S)
        raise AssertionError

    def _take_once(self, file: FileId, mapped: bool) -> "Handle":
        with self._changed:
            while (handle := self._open.get((file, mapped))) is None:
                if self._has_room():
                    handle = self._opened(file, mapped)
                    break
            self._open.move_to_end((file, mapped))
            handle.users += 1
            return handle

    def _give_back(self, handle: "Handle", file: FileId, mapped: bool) -> None:
        with self._changed:
            handle.users -= 1
            if handle.users == 0:
                if self.max_open == 0:
                    self._close(file, mapped)
                self._changed.notify()

    def _has_room(self) -> bool:
        """Whether one more may be open; if not, one that is idle is closed, or what has changed is waited for."""
        if len(self._open) + len(self._passing) < self._most:
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
        if is_remote(file.path):
            try:
                seen = self.remote.head(file.path).file
            except Missing:
                absent = PassingHandle(file, self.manifest)
                absent.check_may_be_absent()
                yield absent
                return
            with self.lend(seen) as handle:
                yield handle
            return
        handle = PassingHandle(file, self.manifest)
        with self._changed:
            while not self._has_room():
                pass
            self._passing.add(handle)
        try:
            handle.look()
            yield handle
        finally:
            handle.close()
            with self._changed:
                self._passing.discard(handle)
                self._changed.notify()

    def _opened(self, file: FileId, mapped: bool) -> "Handle":
        try:
            handle = self._open[file, mapped] = Handle(file, mapped, self.manifest)
        except BaseException:
            self._changed.notify()  # the room that was made for it is somebody else's
            raise
        return handle

    def _close(self, file: FileId, mapped: bool) -> None:
        self._open.pop((file, mapped)).close()


def files_below(path: str) -> Iterator[str]:
    """A file itself, or all files of a folder and of those in it, in the order of their names.

    Locks are left out: they are not data, and change when they are looked at.
    """
    if not os.path.isdir(path):
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders.sort()
        yield from (os.path.join(folder, name) for name in sorted(names) if name not in LOCKS)


class _Loan:
    """A handle of a file on this machine, for the length of a ``with``. (A generator would take twice as long.)"""

    __slots__ = ("file", "files", "handle", "mapped")

    def __init__(self, files: Files, file: FileId, mapped: bool) -> None:
        self.files, self.file, self.mapped = files, file, mapped

    def __enter__(self) -> "Handle":
        handle = self.handle = self.files._take(self.file, self.mapped)
        try:
            handle.check()
        except BaseException:
            self.files._give_back(handle, self.file, self.mapped)
            raise
        return handle

    def __exit__(self, *error: object) -> None:
        self.files._give_back(self.handle, self.file, self.mapped)


def remote_files(
    cache_dir: str | os.PathLike[str] | None,
    cache_bytes: int | str | None,
    options: "RemoteOptions | None",
    max_open: int = MAX_OPEN_FILES,
    manifest: Manifest | None = None,
    max_expansion: int = MAX_EXPANSION,
) -> Files:
    """Files that may lie on other machines, as the caller of ``open`` wants them read."""
    remote, patience_s = None, PATIENCE_S
    if options is not None:
        from penstock.remote import Remote

        remote, patience_s = Remote(options), options.deadline_s
    if cache_dir is None:
        if cache_bytes is not None:
            raise ConfigError(f"cache_bytes={cache_bytes!r} without cache_dir=: name the folder that it limits")
        return Files(max_open, remote, manifest=manifest, max_expansion=max_expansion)
    limit = None if cache_bytes is None else parse_size(cache_bytes, argument="cache_bytes")
    cache = FileCache(os.fspath(cache_dir), limit, patience_s)
    return Files(max_open, remote, cache, manifest=manifest, max_expansion=max_expansion)


def _out_of_descriptors(error: Unavailable) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.EMFILE, errno.ENFILE)


def _write(descriptor: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(descriptor, view) :]


_EVERY_FILES: "weakref.WeakSet[Files]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for files in list(_EVERY_FILES):
        inherited = [*files._open.values(), *files._passing]
        files._reset()
        if files._remote is not None:
            files._remote.after_fork()
        for handle in inherited:
            handle.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
