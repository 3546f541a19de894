"""Manifests: sizes of files, and a digest of every block of them.

A manifest is a JSON file. Names in it are relative to the folder it lies in, so that data and manifest can be moved and
copied together; or, where the files are on other machines, to the folder that all of them are in:

    {"penstock manifest": 1, "digest": "sha256", "block_bytes": 1048576,
     "files": {"betas_session01.hdf5": {"size": 3145999, "blocks": "<64 hexadecimal digits for each block>"}}}

Rules:
1. It may come from anybody: anything that is not exactly as above is refused, and names cannot lead outside its folder.
2. A process compares a block when it first reads it, and not again: later changes show in the file's size and time.
3. With a manifest, no file is read that it does not list.
"""

import hashlib
import io
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import takewhile
from typing import Any

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.scratch import borrow
from penstock.base.sizes import MOST_FILE_BYTES, KiB, MiB, format_size
from penstock.base.urls import bare_name, is_remote
from penstock.errors import ConfigError, ConvertFailed, Corrupt, LimitExceeded, Missing, Truncated, Unavailable, Unsafe
from penstock.files.atomic import atomic_write
from penstock.files.retry import open_regular

NAME = "penstock-manifest.json"
"""Its default name."""

VERSION = 1
DIGEST = "sha256"
DIGEST_BYTES = 32
BLOCK_BYTES = 1 * MiB

# A block is read and digested in pieces of this size, so that comparing takes little memory.
PIECE_BYTES = 256 * KiB

# Larger ones are not read. This is enough for 2 TB, or a million small files, and takes 1 GB of memory while parsed.
MOST_BYTES = 128 * MiB
LEAST_BLOCK, MOST_BLOCK = 4 * KiB, 64 * MiB

# Measured: memory per name, beside its text.
ENTRY_BYTES = 200

BlockSpan = tuple[int, int]

Fill = Callable[[int, list[memoryview]], None]
"""Reads from an offset on into these views, one after another."""


@dataclass(frozen=True)
class Manifest:
    """Digests of the blocks of files, by their names."""

    path: str
    """Where it was read from, for messages."""
    folder: str
    """What names are relative to."""
    block_bytes: int
    sizes: Mapping[str, int]
    firsts: Mapping[str, int]
    """The number of each file's first block."""
    digests: np.ndarray = field(repr=False)
    """(blocks, ``DIGEST_BYTES``)"""
    seen: np.ndarray = field(repr=False, compare=False)
    """Which blocks were compared by this process."""

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.path, self.folder, self.block_bytes, self.sizes, self.firsts, self.digests)
        return Manifest, (*fields, np.zeros(len(self.digests), bool))

    def of_addresses(self, addresses: Sequence[str]) -> "Manifest":
        """This manifest, for files on other machines."""
        return replace(self, folder=common_folder(addresses))

    @property
    def index_bytes(self) -> int:
        """Memory that the manifest takes."""
        texts = sum(map(len, self.sizes)) if len(self.sizes) < 1000 else 100 * len(self.sizes)
        return self.digests.nbytes + self.seen.nbytes + texts + ENTRY_BYTES * len(self.sizes)

    def name_of(self, path: str) -> str:
        """The name of a file in the manifest."""
        if is_remote(path):
            name = path.removeprefix(f"{self.folder}/")
            return name if name in self.sizes else bare_name(path).removeprefix(f"{self.folder}/")
        return os.path.relpath(os.path.abspath(path), self.folder).replace(os.sep, "/")

    def lists(self, path: str) -> bool:
        """Whether it lists this file."""
        return self.name_of(path) in self.sizes

    def check_size(self, path: str, size: int) -> None:
        """Refuse a file that it does not list, or that has another size."""
        name = self.name_of(path)
        if name not in self.sizes:
            raise Corrupt(
                f"{path}: the manifest {self.path} does not list it: it was added later, or has another name. Write "
                f"a new manifest (penstock verify … --write) if it belongs to the data"
            )
        expected = self.sizes[name]
        if size != expected:
            wrong = Truncated if size < expected else Corrupt
            raise wrong(
                f"{path}: has {size:,} bytes, and {expected:,} in the manifest {self.path}; restore the file, or "
                f"write a new manifest (penstock verify … --write) if the change was intended"
            )

    def below(self, path: str) -> Iterator[str]:
        """The names of a file, or of the files of a folder."""
        name = self.name_of(path)
        return (each for each in self.sizes if name == "." or each == name or each.startswith(f"{name}/"))

    def check_there(self, path: str) -> None:
        """Refuse the absence of files that it lists."""
        for name in self.below(path):
            if not os.path.exists(os.path.join(self.folder, name)):
                raise Missing(f"{path}: the manifest {self.path} lists {name}, which is not there; restore it")

    def span(self, path: str) -> BlockSpan:
        """The first block of a file that it lists, and the file's size."""
        name = self.name_of(path)
        return self.firsts[name], self.sizes[name]

    def blocks(self, span: BlockSpan, begin: int = 0, end: int = MOST_FILE_BYTES) -> Iterator[tuple[int, int, int]]:
        """The number, begin and end of each block of a file, or of those that a range of bytes touches."""
        (first, size), step = span, self.block_bytes
        for block in range(begin // step, -(-min(end, size) // step)):
            yield first + block, block * step, min((block + 1) * step, size)

    def is_other(self, number: int, data: np.ndarray) -> bool:
        """Whether these bytes differ from those of a block."""
        return bool(digest(data) != self.digests[number].tobytes())

    def compare(self, path: str, span: BlockSpan, fill: Fill, wanted: tuple[int, int]) -> None:
        """Compare every block of a range with its digest, unless that was done before."""
        for number, begin, end in self.blocks(span, *wanted):
            if not self.seen[number]:
                self.compare_block(path, fill, number, begin, end)

    def compare_block(self, path: str, fill: Fill, number: int, begin: int, end: int) -> None:
        """Compare one block of a file with its digest."""
        self.check(path, number, begin, end, digest_of(fill, begin, end))
        self.seen[number] = True

    def check(self, path: str, number: int, begin: int, end: int, found: bytes) -> None:
        """Refuse a block whose digest differs."""
        expected = self.digests[number].tobytes()
        if found != expected:
            raise Corrupt(
                f"{path}: bytes {begin:,} to {end:,} differ from the manifest {self.path}: {DIGEST} "
                f"{found.hex()[:16]}… instead of {expected.hex()[:16]}…. The file was damaged or changed: restore it, "
                f"or if the change was intended, write a new manifest (penstock verify … --write)"
            )


def digest(data: np.ndarray) -> bytes:
    """The digest of bytes in memory."""
    return hashlib.new(DIGEST, data.data, usedforsecurity=False).digest()


def digest_of(fill: Fill, begin: int, end: int) -> bytes:
    """The digest of some bytes of a file, read piece by piece."""
    found = hashlib.new(DIGEST, usedforsecurity=False)
    with borrow(min(PIECE_BYTES, end - begin)) as scratch:
        for at in range(begin, end, PIECE_BYTES):
            piece = scratch[: min(PIECE_BYTES, end - at)].data
            fill(at, [piece])
            found.update(piece)
    return found.digest()


def common_folder(addresses: Sequence[str]) -> str:
    """The common beginning of all addresses, up to a slash."""
    folders = [each.rstrip("/").rpartition("/")[0].split("/") for each in addresses]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*folders, strict=False))
    return "/".join(parts[0] for parts in shared)


def copies_bytes(files: int, bytes_: int) -> int:
    """Memory of the digests of copies of ``files`` files."""
    return files * (ENTRY_BYTES + 1024) + (DIGEST_BYTES + 1) * -(-bytes_ // BLOCK_BYTES)


class Digests:
    """Digests of the blocks of bytes that come one after another."""

    def __init__(self) -> None:
        self._done, self._block, self._room = bytearray(), hashlib.new(DIGEST, usedforsecurity=False), BLOCK_BYTES

    def add(self, data: memoryview) -> None:
        while len(data):
            some = data[: self._room]
            self._block.update(some)
            self._room -= len(some)
            if self._room == 0:
                self._end_block()
            data = data[len(some) :]

    def _end_block(self) -> None:
        self._done += self._block.digest()
        self._block, self._room = hashlib.new(DIGEST, usedforsecurity=False), BLOCK_BYTES

    def whole(self) -> bytes:
        """The digests of all blocks; the last one may be shorter."""
        if self._room < BLOCK_BYTES:
            self._end_block()
        return bytes(self._done)


def of_copy(source: str, path: str, size: int, digests: bytes) -> Manifest | None:
    """The digests of a copy as it was made; None if they are unknown."""
    if len(digests) != DIGEST_BYTES * -(-size // BLOCK_BYTES):
        return None
    folder, _, name = path.rpartition("/")
    table = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)
    return Manifest(
        source, folder, block_bytes=BLOCK_BYTES, sizes={name: size}, firsts={name: 0}, digests=table,
        seen=np.zeros(len(table), bool),
    )  # fmt: skip


# Written.


def new(path: str, addresses: Sequence[str] = ()) -> Manifest:
    """An empty manifest that will be written here."""
    folder = common_folder(addresses) if addresses else os.path.dirname(os.path.abspath(path))
    return Manifest(
        path, folder, block_bytes=BLOCK_BYTES, sizes={}, firsts={}, digests=np.empty((0, DIGEST_BYTES), np.uint8),
        seen=np.empty(0, bool),
    )  # fmt: skip


def write(manifest: Manifest, files: Iterable[tuple[str, int, bytes]]) -> None:
    """Write the manifest of these files: path, size, and the digests of all blocks of each.

    It appears under its name when it is complete.
    """
    path, folder = manifest.path, os.path.dirname(os.path.abspath(manifest.path))
    entries: dict[str, dict[str, object]] = {}
    named: dict[str, str] = {}
    for file, size, digests in files:
        name = manifest.name_of(file)
        if named.setdefault(name, file) != file:  # what looks like a secret chooses the file
            name = file.removeprefix(f"{manifest.folder}/")
        if name.startswith("../"):
            raise ConfigError(
                f"{file}: does not lie in {folder} or below, and names in a manifest are relative to the folder it "
                f"lies in; write it further up"
            )
        entries[name] = {"size": size, "blocks": digests.hex()}
    document = {"penstock manifest": VERSION, "digest": DIGEST, "block_bytes": BLOCK_BYTES, "files": entries}
    try:
        with atomic_write(path, mode=0o644, durable=True) as output:
            text = io.TextIOWrapper(output, encoding="utf-8")
            json.dump(document, text, indent=1)
            text.detach()
    except OSError as error:
        raise ConvertFailed(f"{path}: cannot be written ({error.strerror}, errno {error.errno})") from error


# Read.


def load(path: str | os.PathLike[str], *, most_bytes: int = MOST_BYTES) -> Manifest:
    """The manifest in a file."""
    path = os.fspath(path)
    document = _read_document(path, most_bytes)
    if not isinstance(document, dict) or document.get("penstock manifest") != VERSION:
        raise Corrupt(
            f'{path}: not a manifest that this version can read: expected {{"penstock manifest": {VERSION}, …'
        )
    expected = {"penstock manifest", "digest", "block_bytes", "files"}
    if document.keys() != expected:
        raise Corrupt(f"{path}: expected the entries {sorted(expected)}, found {sorted(map(str, document))!r:.200}")
    if document["digest"] != DIGEST:
        raise Corrupt(f"{path}: digests of kind {document['digest']!r:.50}; expected {DIGEST!r}")
    block_bytes, files = document["block_bytes"], document["files"]
    if not _is_count(block_bytes) or not LEAST_BLOCK <= block_bytes <= MOST_BLOCK:
        raise Corrupt(
            f"{path}: blocks of {block_bytes!r:.50} bytes; expected a number from {LEAST_BLOCK} to {MOST_BLOCK}"
        )
    if not isinstance(files, dict):
        raise Corrupt(f'{path}: "files" is {type(files).__name__}; expected a dict of names and entries')
    sizes: dict[str, int] = {}
    firsts: dict[str, int] = {}
    digests: list[bytes] = []
    blocks = 0
    for name, entry in files.items():
        _check_name(path, name)
        of_file = _parse_digests(path, name, entry, block_bytes)
        sizes[name], firsts[name] = entry["size"], blocks
        digests.append(of_file)
        blocks += len(of_file) // DIGEST_BYTES
    table = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)
    folder = os.path.dirname(os.path.abspath(path))
    return Manifest(
        path, folder, block_bytes=block_bytes, sizes=sizes, firsts=firsts, digests=table, seen=np.zeros(blocks, bool),
    )  # fmt: skip


def _read_document(path: str, most_bytes: int) -> Any:
    try:
        with open(path, "rb", opener=open_regular) as file:
            about = os.fstat(file.fileno())
            if (size := about.st_size) > most_bytes:
                raise LimitExceeded(
                    f"{path}: has {format_size(size)}; a manifest of more than {format_size(most_bytes)} is not read. "
                    f"Write one for each part of the data"
                )
            _check_others(path, about)
            text = file.read(size + 1)
    except FileNotFoundError:
        raise Missing(
            f"{path}: no such manifest; write one with penstock verify … --write, or check the path"
        ) from None
    except OSError as error:
        raise Unavailable(f"{path}: cannot be read ({error.strerror})") from error
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _refuse_repeats(path, pairs))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, endless numbers, lists nested too deeply
        raise Corrupt(f"{path}: not a manifest: expected JSON ({str(error)[:200]})") from None


def _check_others(path: str, about: os.stat_result) -> None:
    """Refuse a manifest that others may write to: they could make damaged data look right."""
    if os.name == "posix" and about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        who = "anybody" if about.st_mode & stat.S_IWOTH else f"its group (gid {about.st_gid})"
        raise Unsafe(
            f"{path}: {who} may write to this manifest, and so say that damaged or other data is right; expected one "
            f"that only its owner may write to: chmod go-w {path}"
        )


def _refuse_repeats(path: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, _ in pairs if found.pop(name, pairs) is pairs)
        raise Corrupt(f"{path}: {twice!r:.200} is in it twice; expected each name once")
    return found


def _check_name(path: str, name: str) -> None:
    parts = name.split("/")
    if (
        not name
        or name.startswith("/")
        or "\0" in name
        or "\\" in name
        or any(part in ("", ".", "..") for part in parts)
    ):
        raise Unsafe(f"{path}: names {name!r:.200}; expected files inside its own folder, by relative names")


def _parse_digests(path: str, name: str, entry: object, block_bytes: int) -> bytes:
    if not isinstance(entry, dict) or entry.keys() != {"size", "blocks"}:
        raise Corrupt(f"{path}: {name!r:.200}: {entry!r:.100}; expected a size and blocks")
    size, blocks = entry["size"], entry["blocks"]
    if not _is_count(size) or size > MOST_FILE_BYTES or not isinstance(blocks, str):
        raise Corrupt(f"{path}: {name!r:.200}: size {size!r:.50}; expected a number of bytes, and digests as text")
    expected = 2 * DIGEST_BYTES * -(-size // block_bytes)
    try:
        found = bytes.fromhex(blocks)
    except ValueError:
        found = b""
    if len(blocks) != expected or 2 * len(found) != expected:
        raise Corrupt(
            f"{path}: {name!r:.200}: {size:,} bytes have {expected:,} hexadecimal digits of digests; found "
            f"{len(blocks):,} characters"
        )
    return found


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
