"""Copies in the cache: which remote or compressed files get one, how it is made, and how it is read.

A cache that cannot hold all files that were opened keeps the first ones that fit. The others are read in ranges, since
copies would replace each other with every read.
"""

import hashlib
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from penstock.base.file_id import FileId
from penstock.base.urls import is_remote
from penstock.errors import CacheIsFull, Changed, ConfigError, Corrupt, LimitExceeded, Unavailable
from penstock.files import compression
from penstock.files.cache import CacheFull, FileCache
from penstock.files.handles import FETCH_BYTES, Handle, RemoteHandle, identify
from penstock.files.manifest import Digests, Manifest, copies_bytes, of_copy
from penstock.files.retry import open_for_parser

if TYPE_CHECKING:
    from penstock.remote.ranges import Head, Remote


class Servers:
    """Remote files: the connections to them, and what servers last reported about files."""

    def __init__(self, remote: "Remote | None", known: "Mapping[str, Head]") -> None:
        self.made = remote
        """None until the first remote file is opened."""
        self.known = dict(known)
        self.known_bytes = sum(head.file.size for head in self.known.values())
        self._just_asked: set[str] = set()

    @property
    def remote(self) -> "Remote":
        """Reads files on other machines."""
        if self.made is None:
            from penstock.remote.ranges import Remote

            self.made = Remote()
        return self.made

    def first_bytes(self, path: str) -> bytes:
        """The first bytes of a file; the same request also identifies it."""
        self._ask(path)
        self._just_asked.add(path)
        return self.known[path].first

    def identify(self, path: str, *, whole: bool) -> FileId:
        """The file as it is now; ``whole`` if it can be fetched as a whole."""
        if path in self._just_asked:
            self._just_asked.discard(path)
        else:
            self._ask(path)
        head = self.known[path]
        if not head.has_parts and not whole:
            raise Unavailable(
                f"{path}: the server cannot send parts of files, so single samples cannot be read from there. Pass "
                f"cache_dir= to fetch files whole, once; or read in order with penstock.webdataset"
            )
        return head.file

    def _ask(self, path: str) -> None:
        head, before = self.remote.head(path), self.known.get(path)
        self.known[path] = head
        self.known_bytes += head.file.size - (before.file.size if before else 0)

    def can_send_parts(self, file: FileId) -> bool:
        """Whether ranges of this file can be read."""
        head = self.known.get(file.path)
        return head is not None and head.has_parts


class CachedCopies:
    """The copies that one ``Files`` keeps in a cache."""

    def __init__(self, cache: FileCache, servers: Servers, manifest: Manifest | None, max_expansion: int) -> None:
        self.cache, self._servers = cache, servers
        self.manifest, self._max_expansion = manifest, max_expansion
        self._is_full = False
        self._manifests: dict[FileId, Manifest | None] = {}
        """Digests of copies as they were made."""

    @property
    def index_bytes(self) -> int:
        """Memory of the digests of copies."""
        return copies_bytes(len(self._servers.known), self._servers.known_bytes)

    def keeps(self, file: FileId) -> bool:
        """Whether a remote file gets a copy."""
        limit = self.cache.limit_bytes
        if self._is_full and self._servers.can_send_parts(file):
            return self.cache.has(file)
        if limit is None or self._servers.known_bytes <= limit or self.cache.has(file):
            return True
        head = self._servers.known.get(file.path)
        return head is None or not head.has_parts or file.size > limit  # too large alone: an error that names the limit

    @contextmanager
    def lend(self, file: FileId) -> Iterator[Handle]:
        """A handle of the file's copy, which is made if need be; of the remote file if the disk is full."""
        far = None if file.is_expanded else RemoteHandle(file, self._servers.remote, self.manifest)
        make = self._expand if file.is_expanded else self._fetch
        self._remove_unchecked(file)
        with ExitStack() as stack:
            try:
                descriptor = stack.enter_context(self.cache.lent(file, lambda descriptor: make(file, descriptor)))
            except CacheFull as error:
                if far is None or not self._servers.can_send_parts(file):
                    raise
                self._continue_without(error)
                yield far
                return
            known = self._digests(file) if file.is_expanded else self.manifest or self._digests(file)
            spare = far if self._servers.can_send_parts(file) else None
            yield CachedHandle(file, descriptor, known, self.cache, spare)

    def _continue_without(self, error: CacheFull) -> None:
        if not self._is_full:
            self._is_full = True
            warnings.warn(f"{error}. Files are read over the network instead", CacheIsFull, stacklevel=2)

    def _remove_unchecked(self, file: FileId) -> None:
        """Remove a copy whose digests are lost or truncated: damage to it would go unnoticed."""
        if file not in self._manifests and self.cache.has(file) and self._digests(file) is None:
            self.cache.remove(file)
            del self._manifests[file]

    def _digests(self, file: FileId) -> Manifest | None:
        """The blocks of a copy as it was made; read once per process."""
        if file not in self._manifests:
            source = f"in {self.cache.folder}"
            self._manifests[file] = of_copy(source, file.path, file.size, self.cache.sums(file))
        return self._manifests[file]

    def _fetch(self, file: FileId, descriptor: int) -> bytes:
        """Write a remote file to a descriptor, and compare its checksum if the server sends one."""
        from penstock.remote.answers import digest_of

        piece = memoryview(bytearray(min(FETCH_BYTES, max(1, file.size))))
        sums = {name: hashlib.new(name, usedforsecurity=False) for name in ("md5", "sha256")}
        digests = Digests()
        with self._servers.remote.body(file.path, file) as body:
            sent = None
            while got := body.readinto(piece):
                sent = digest_of(file.path, body.headers)
                if sent is not None:
                    sums[sent[0]].update(piece[:got])
                digests.add(piece[:got])
                _write(descriptor, piece[:got])
        if sent is not None and sums[sent[0]].digest() != sent[1]:
            raise Corrupt(
                f"{file.path}: the bytes do not match the server's checksum: {sent[0]} {sums[sent[0]].hexdigest()} "
                f"instead of {sent[1].hex()}. It is not kept; try again"
            )
        return digests.whole()

    def expand(self, packed: FileId, size: int | None) -> FileId:
        """The decompressed contents of a file; their size, if unknown, is found by decompressing once."""
        if size is None:
            size = sum(map(len, self._limited(packed)))
        version = f"expanded from {packed.size} bytes {packed.etag} {packed.kept_as}"
        return FileId(packed.path, size, packed.mtime_ns, packed.inode, etag=version, is_expanded=True)

    def _limited(self, packed: FileId) -> Iterator[bytes]:
        size, limit = 0, self.cache.limit_bytes
        for piece in self._pieces(packed):
            size += len(piece)
            if limit is not None and size > limit:
                raise LimitExceeded(
                    f"{packed.path}: expands to more than cache_bytes={limit:,}; give more, or read in order with "
                    f"penstock.webdataset"
                )
            yield piece

    def _expand(self, file: FileId, descriptor: int) -> bytes:
        written, digests = 0, Digests()
        for piece in self._pieces(file):
            digests.add(memoryview(piece))
            _write(descriptor, memoryview(piece))
            written += len(piece)
        if written != file.size or self._mtime_ns(file.path) != file.mtime_ns:
            raise Changed(
                f"{file.path}: the file was rewritten after it was opened: it expanded to {file.size:,} bytes, now to "
                f"{written:,}. Open the dataset again to read the new file"
            )
        return digests.whole()

    def _mtime_ns(self, path: str) -> int:
        if is_remote(path):
            return self._servers.remote.head(path).file.mtime_ns
        return identify(path).mtime_ns

    def _pieces(self, file: FileId) -> Iterator[bytes]:
        """The decompressed contents of a local or remote file."""
        source = self._servers.remote.body(file.path) if is_remote(file.path) else open_for_parser(file.path)
        with source as packed:
            yield from compression.pieces(packed, file.path, FETCH_BYTES, self._max_expansion)


class CachedHandle(Handle):
    """A copy in the cache, which owns the descriptor.

    A damaged copy is removed from the cache, and the wanted bytes come from the original, if it can be read in parts.
    """

    def __init__(
        self, file: FileId, descriptor: int, manifest: Manifest | None, cache: FileCache, spare: RemoteHandle | None
    ) -> None:
        self.file, self.descriptor, self.manifest = file, descriptor, manifest
        self._cache, self._spare, self._is_damaged = cache, spare, False
        self._seek = threading.Lock()

    def compare(self, offset: int, length: int) -> None:
        if self._is_damaged:
            return
        try:
            super().compare(offset, length)
        except Corrupt as error:
            self._cache.remove(self.file)
            if self._spare is None:
                raise Corrupt(f"{error}. It was a copy in {self._cache.folder}, which is removed: read again") from None
            self._is_damaged = True

    def fill(self, offset: int, views: list[memoryview]) -> None:
        if self._is_damaged:
            assert self._spare is not None
            self._spare.fill(offset, views)
        else:
            super().fill(offset, views)

    def check(self) -> None:
        """A copy does not change."""

    def close(self) -> None:
        """The cache closes it."""


def no_cache(path: str) -> ConfigError:
    """The error for a compressed file that has to be expanded first."""
    return ConfigError(
        f"{path}: is compressed, so that single samples cannot be read. Pass cache_dir= to keep an expanded copy; or "
        f"read in order with penstock.webdataset"
    )


def _write(descriptor: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(descriptor, view) :]
