"""The keys of a Zarr store in a folder or a zip archive: documents to read, nodes to list, places of chunks.

Paths are joined only here.
"""

import os
from collections.abc import Iterator, Mapping
from math import prod

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.file_id import FileId
from penstock.base.urls import is_remote
from penstock.errors import ConfigError, LimitExceeded, Unavailable
from penstock.files.files import Files
from penstock.files.handles import NOT_SEEN, check_no_link, is_there, unseen_file
from penstock.formats.zip_table import ZipTable, zip_table
from penstock.read.chunk_files import FolderNames, Grid
from penstock.read.extents import NEVER_WRITTEN, KnownTable

# No metadata document is larger than this.
DOCUMENT_BYTES = 512 * 2**20


class FolderKeys:
    """A folder on this machine, or the address of one."""

    def __init__(self, root: str, files: Files) -> None:
        self.root, self._files = root.rstrip("/") or "/", files

    @property
    def is_remote(self) -> bool:
        return is_remote(self.root)

    def path(self, key: str) -> str:
        """A key as shown in messages."""
        return f"{self.root}/{key}"

    def place(self, key: str) -> str:
        """The real path of a node, with links resolved."""
        return self.path(key) if self.is_remote else os.path.realpath(self.path(key))

    def identity(self, key: str) -> FileId:
        """The file that must not change while the array of this document is read."""
        return self._files.identify(self.path(key))

    def read(self, key: str) -> bytes | None:
        """A metadata document; None if there is none."""
        with self._files.lend(unseen_file(self.path(key))) as handle:
            if handle.size == NOT_SEEN:
                return None
            if handle.size > DOCUMENT_BYTES:
                raise LimitExceeded(f"{self.path(key)}: {handle.size:,} bytes are too many for metadata; restore it")
            document = np.empty(handle.size, np.uint8)
            handle.read_into(0, document)
            return document.tobytes()

    def holds(self, key: str) -> bool:
        """Whether a key stays below the root, with links resolved."""
        if self.is_remote:
            return True
        root = os.path.realpath(self.root)
        return os.path.commonpath([root, os.path.realpath(self.path(key))]) == root

    def has(self, key: str) -> bool:
        """Whether there is such a file on this machine."""
        return is_there(self.path(key))

    def children(self, key: str) -> Iterator[str]:
        """Names directly below a node."""
        if self.is_remote:
            raise ConfigError(
                f"{self.path(key)}: a group on another machine cannot be listed. Name its arrays with "
                f"fields=(…), or consolidate its metadata (zarr.consolidate_metadata)"
            )
        entries = self._entries(self.path(key))
        # A broken link may have led to an array: it is not left out here, but refused when it is read.
        yield from sorted(each.name for each in entries if os.path.isdir(each.path) or not os.path.exists(each.path))

    def names(self, prefix: str, before: str, separator: str) -> FolderNames:
        """The names of the files of an array's chunks."""
        return FolderNames(f"{self.root}/{prefix}".rstrip("/"), before, separator)

    def has_chunks(self, prefix: str, before: str) -> bool:
        """Whether any chunk of an array was written; True for other machines, where this is unknown."""
        if self.is_remote:
            return True
        folder = self.path(f"{prefix}c" if before == "c/" else prefix)
        return any(each.name != "zarr.json" and not each.name.startswith(".") for each in self._entries(folder))

    def _entries(self, folder: str) -> "Iterator[os.DirEntry[str]]":
        try:
            with os.scandir(folder) as entries:
                yield from entries
        except FileNotFoundError:
            check_no_link(folder)
        except OSError as error:
            raise Unavailable(f"{folder}: cannot be listed ({error.strerror})") from error


class ZipKeys:
    """A zip archive, whose members are the keys."""

    def __init__(self, path: str, files: Files) -> None:
        self.root = path
        self.table: ZipTable = zip_table(path, files)
        self._numbers: Mapping[str, int] = {name: number for number, name in enumerate(self.table.names)}

    def path(self, key: str) -> str:
        return f"{self.root}: {key}"

    def place(self, key: str) -> str:
        return key

    def identity(self, key: str) -> FileId:
        return self.table.file

    def read(self, key: str) -> bytes | None:
        number = self._numbers.get(key)
        return None if number is None else self.table.read(number, DOCUMENT_BYTES)

    def holds(self, key: str) -> bool:
        return True

    def has(self, key: str) -> bool:
        return key in self._numbers

    def children(self, key: str) -> Iterator[str]:
        inside = (name[len(key) :].split("/", 1) for name in self._numbers if name.startswith(key))
        yield from sorted({parts[0] for parts in inside if len(parts) == 2})

    def has_chunks(self, prefix: str, before: str) -> bool:
        """Whether any chunk of an array was written."""
        begin = f"{prefix}{before}"
        inside = (name[len(begin) :] for name in self._numbers if name.startswith(begin))
        return any(name != "zarr.json" and not name.startswith(".") for name in inside)

    def chunks(self, prefix: str, before: str, separator: str, counts: tuple[int, ...]) -> "ZipChunks | None":
        """The chunks of an array; None if the archive compresses some of them."""
        offsets = np.full(prod(counts), NEVER_WRITTEN, np.int64)
        lengths, sums = np.zeros(prod(counts), np.int64), np.zeros(prod(counts), np.uint32)
        begin = f"{prefix}{before}"
        for name, number in self._numbers.items():
            if not name.startswith(begin):
                continue
            along = name[len(begin) :].split(separator)
            if len(along) != len(counts) or not all(each.isdecimal() for each in along):
                continue
            at = tuple(map(int, along))
            if any(each >= count for each, count in zip(at, counts, strict=True)):
                continue
            if self.table.compressed[number]:
                return None
            where = int(np.ravel_multi_index(at, counts))
            offsets[where], lengths[where] = self.table.offsets[number], self.table.lengths[number]
            sums[where] = self.table.sums[number]
        return ZipChunks(self.table.file, counts, offsets, lengths, sums)


@dataclass(frozen=True)
class ZipChunks:
    """Chunks or shards that are members of an archive."""

    root = ""
    file: FileId
    counts: tuple[int, ...]
    offsets: np.ndarray
    lengths: np.ndarray
    sums: np.ndarray
    """CRC-32 of each, from the archive's directory."""

    def place(self, at: tuple[int, ...]) -> tuple[FileId, int, int]:
        number = int(np.ravel_multi_index(at, self.counts))
        return self.file, int(self.offsets[number]), int(self.lengths[number])

    def table(self, grid: Grid) -> KnownTable:
        """The table of these chunks."""
        offsets, lengths, sums = map(grid.by_block, (self.offsets, self.lengths, self.sums))
        return KnownTable(offsets, lengths, crc32=sums)


ZarrKeys = FolderKeys | ZipKeys
