"""Open data files, lent to readers. No other package opens a data file (tests/test_layers.py).

Reads go to a position and into the caller's memory, through handles from a bounded, least-recently-used set.

Rules:
1. A handle is lent in a ``with``, to several threads at once (pool.py).
2. Handles are never shared across a fork: the child closes what it inherited and opens its own.
3. A file is identified when it is parsed and checked when it is lent. Another size or time is an error, not other data.
   Files that were not seen before, one of a million chunks each, are opened for one loan: they may be absent.
4. A file on another machine is read in ranges; with a cache, from its copy there, which is open only while it is lent,
   so that the cache can make room (copies.py). None is ever mapped.
5. With a manifest, no byte of a file is delivered before its block was compared, and no file is mapped, since reads of
   a mapping cannot be seen. A file that a library opens by its name is compared whole before that.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import numpy as np

from penstock.base import checks, fork
from penstock.base import policy as policies
from penstock.base.file_id import FileId
from penstock.base.policy import ReadPolicy
from penstock.base.scratch import aligned
from penstock.base.sizes import KiB, parse_size
from penstock.base.urls import is_remote
from penstock.errors import ConfigError, Missing, Unavailable
from penstock.files.cache import PATIENCE_S, FileCache
from penstock.files.compression import MAX_EXPANSION
from penstock.files.copies import CachedCopies, Servers, no_cache
from penstock.files.handles import NOT_SEEN, BodyHandle, Handle, RemoteHandle, UnseenHandle, identify
from penstock.files.manifest import PIECE_BYTES, Manifest
from penstock.files.pool import IDLE, HandleLoan, Pool
from penstock.files.retry import open_for_parser

if TYPE_CHECKING:  # remote takes a while to import, and is imported when it is needed
    from penstock.remote.ranges import Body, Head, Remote, RemoteOptions

# For files that are read from beginning to end.
BUFFER_BYTES = 256 * KiB

# Enough to recognise a file's format.
HEAD_BYTES = 512

# Files that LMDB and TileDB lock: not data.
LOCKS = ("lock.mdb", "__lock.tdb")


class Files:
    """Open files, lent to readers."""

    def __init__(
        self,
        max_open: int | None = None,
        *,
        remote: "Remote | None" = None,
        cache: FileCache | None = None,
        known: "Mapping[str, Head] | None" = None,
        manifest: Manifest | None = None,
        max_expansion: int = MAX_EXPANSION,
        policy: ReadPolicy | None = None,
    ) -> None:
        self.max_open = (
            None
            if max_open is None
            else checks.whole("max_open_files", max_open, expected="how many may be open at once, or None")
        )
        self.max_expansion = checks.whole("max_expansion", max_expansion, least=1)
        self.policy = policy or policies.DEFAULT
        self._pool = Pool(self.max_open, self.policy, manifest)
        self._servers = Servers(remote, known or {})
        self._copies = None if cache is None else CachedCopies(cache, self._servers, manifest, self.max_expansion)
        IDLE.add(self)
        fork.register(self)

    def after_fork(self) -> None:
        """Close inherited descriptors; the child opens its own."""
        self._pool.after_fork()
        if self._servers.made is not None:
            self._servers.made.after_fork()

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(
            Files,
            self.max_open,
            remote=self._servers.made,
            cache=self.cache,
            known=self._servers.known,
            manifest=self.manifest,
            max_expansion=self.max_expansion,
            policy=self.policy,
        )
        return made, ()

    @property
    def manifest(self) -> Manifest | None:
        return self._pool.manifest

    @property
    def cache(self) -> FileCache | None:
        return None if self._copies is None else self._copies.cache

    @property
    def remote(self) -> "Remote":
        """Reads files on other machines."""
        return self._servers.remote

    def identify(self, path: str, *, growing: bool = False) -> FileId:
        """The file as it is now; ``path`` may be an address that was admitted."""
        if is_remote(path):
            file = self._servers.identify(path, whole=self._copies is not None)
        else:
            file = identify(path, growing=growing)
        if self.manifest is None:
            return file
        self.manifest.check_size(path, file.size)
        return replace(file, is_compared=True)

    def first_bytes(self, path: str) -> bytes:
        """Enough to recognise a file's format; fewer bytes if it is shorter."""
        return self._servers.first_bytes(path) if is_remote(path) else _read_first_bytes(path, HEAD_BYTES)

    def head_of(self, file: FileId, count: int) -> bytes:
        """The first bytes of a file while it is parsed; fewer if it is shorter. No handle stays open."""
        if not is_remote(file.path) and not file.is_compared:
            return _read_first_bytes(file.path, count)
        head = np.empty(min(count, file.size), np.uint8)
        with self.lend(file) as handle:
            handle.read_into(0, head)
        return head.tobytes()

    @property
    def scratch_bytes(self) -> int:
        """Scratch that a read borrows to compare what it reads."""
        if self.manifest is not None and self._servers.known:  # blocks of remote files are held while they are compared
            return aligned(self.manifest.block_bytes) + PIECE_BYTES
        return 0 if self.manifest is None and self._copies is None else PIECE_BYTES

    @property
    def shared_index(self) -> dict[int, int]:
        """Memory of the digests that files are compared with."""
        if self.manifest is not None:
            return {id(self.manifest): self.manifest.index_bytes}
        return {} if self._copies is None else {id(self): self._copies.index_bytes}

    def mark_compared(self, file: FileId) -> FileId:
        """The same file or folder, marked as compared if there is a manifest."""
        return replace(file, is_compared=self.manifest is not None)

    def compare_addresses(self, paths: Sequence[str]) -> None:
        """Use the manifest's names for these remote files."""
        if self.manifest is not None:
            self._pool.manifest = self.manifest.of_addresses(paths)
            if self._copies is not None:
                self._copies.manifest = self.manifest

    def compare_whole(self, path: str) -> None:
        """Compare all of a file or folder with the manifest, before a library opens it by its name."""
        if self.manifest is None or is_remote(path):
            return
        self.manifest.check_there(path)
        for each in files_below(path):
            file = self.identify(each)
            with self.lend(file) as handle:
                handle.compare(0, file.size)

    def is_far(self, file: FileId) -> bool:
        """Whether each read goes over the network, so that many at a time are faster."""
        return is_remote(file.path) and not file.is_expanded and not self._keeps(file)

    def _keeps(self, file: FileId) -> bool:
        return self._copies is not None and self._copies.keeps(file)

    def lend(self, file: FileId, *, mapped: bool = False) -> AbstractContextManager[Handle]:
        """A handle of this file, or a mapping of it (for rows too small for a system call each).

        The handle of a file that was not seen before has the size ``NOT_SEEN`` if the file does not exist.
        """
        if file.size == NOT_SEEN or file.is_expanded or is_remote(file.path):
            return self._lend_other(file)
        return HandleLoan(self._pool, file, mapped)

    def _lend_other(self, file: FileId) -> AbstractContextManager[Handle]:
        if file.size == NOT_SEEN:
            return self._lend_unseen_remote(file) if is_remote(file.path) else self._pool.lend_once(file)
        if file.is_expanded or self._keeps(file):
            assert self._copies is not None
            return self._copies.lend(file)
        return nullcontext(RemoteHandle(file, self.remote, self.manifest))

    @contextmanager
    def _lend_unseen_remote(self, file: FileId) -> Iterator[Handle]:
        try:
            seen = self.remote.head(file.path).file
        except Missing:
            absent = UnseenHandle(file, self.manifest, self.policy)
            absent.check_may_be_absent()
            yield absent
            return
        with self.lend(seen) as handle:
            yield handle

    @contextmanager
    def lend_in_order(self, file: FileId) -> Iterator[Handle]:
        """A handle for reads that go forward through the file: one long request if it is remote."""
        if not self.is_far(file) or self.manifest is not None:  # comparing reads whole blocks, in another order
            with self.lend(file) as handle:
                yield handle
            return
        with self.remote.body(file.path, file) as body:
            yield BodyHandle(file, body)

    @contextmanager
    def stream(self, path: str) -> Iterator["Body | BinaryIO"]:
        """All bytes of a remote file, in order; from its copy if there is a cache."""
        file = self.find_copied(path)
        if file is None:
            with self.remote.body(path) as body:
                yield body
            return
        with self.lend(file) as handle, open(os.dup(handle.descriptor), "rb", buffering=BUFFER_BYTES) as copy:
            os.lseek(handle.descriptor, 0, os.SEEK_SET)
            yield copy

    def find_copied(self, path: str) -> FileId | None:
        """A remote file that has a copy here; None without a cache, without room in it, or if its length is unknown."""
        from penstock.remote.ranges import UnknownLength

        if self._copies is None:
            return None
        try:
            file = self.identify(path)
        except UnknownLength:
            return None
        return file if self._copies.keeps(file) else None

    def expand(self, path: str, size: int | None = None) -> FileId:
        """The decompressed contents of a file, which get a copy in the cache."""
        packed = self.identify(path)
        if self._copies is None:
            raise no_cache(path)
        return self._copies.expand(packed, size)

    def close(self) -> None:
        """Close the descriptors that are not lent right now; the files can be lent again afterwards."""
        self._pool.close()
        if self._servers.made is not None:
            self._servers.made.close()


def files_below(path: str) -> Iterator[str]:
    """A file itself, or all files of a folder and its subfolders, in the order of their names.

    Locks are left out: they are not data, and change when they are opened.
    """
    if not os.path.isdir(path):
        yield path
        return
    for folder, folders, names in os.walk(path, onerror=_raise_unlisted):
        folders.sort()
        yield from (os.path.join(folder, name) for name in sorted(names) if name not in LOCKS)


def _raise_unlisted(error: OSError) -> NoReturn:
    raise Unavailable(f"{error.filename}: cannot be listed ({error.strerror})") from error


def _read_first_bytes(path: str, count: int) -> bytes:
    with open_for_parser(path) as file:
        return file.read(count)


def remote_files(
    cache_dir: str | os.PathLike[str] | None,
    cache_bytes: int | str | None,
    options: "RemoteOptions | None",
    max_open: int | None = None,
    manifest: Manifest | None = None,
    max_expansion: int = MAX_EXPANSION,
) -> Files:
    """Files that may be remote, with the options that the caller of ``open`` gave."""
    remote, patience_s = None, PATIENCE_S
    if options is not None:
        from penstock.remote.ranges import Remote, RemoteOptions

        if not isinstance(options, RemoteOptions):  # not shown: a password may be in it
            raise ConfigError(f"remote: expected RemoteOptions(…), got a {type(options).__name__}")
        remote, patience_s = Remote(options), options.deadline_s
    cache = None
    if cache_dir is not None:
        limit = None if cache_bytes is None else parse_size(cache_bytes, argument="cache_bytes")
        cache = FileCache(os.path.abspath(checks.path("cache_dir", cache_dir)), limit, patience_s)
    elif cache_bytes is not None:
        raise ConfigError(f"cache_bytes={cache_bytes!r} without cache_dir=: name the folder that it limits")
    return Files(max_open, remote=remote, cache=cache, manifest=manifest, max_expansion=max_expansion)
