"""The keys of a Zarr store: documents to read, nodes to list, and where chunks lie. A folder, or a zip archive.

Paths are joined here and nowhere else.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np

from penstock.chunkfiles import FolderNames, Grid
from penstock.errors import ConfigError, LimitExceeded
from penstock.extents import NEVER_WRITTEN, FileId, KnownTable
from penstock.fileio import Files
from penstock.handles import NOT_SEEN, unseen
from penstock.urls import is_remote
from penstock.ziptable import ZipTable, zip_table

# A document of a Zarr store larger than this is none.
DOCUMENT_BYTES = 512 * 2**20


class Keys(Protocol):
    """A store's keys."""

    root: str

    def read(self, key: str) -> bytes | None:
        """A small document; None where there is none."""

    def children(self, key: str) -> Iterator[str]:
        """Names directly below a node, files and folders."""

    def path(self, key: str) -> str:
        """How a key is told in messages."""

    def identity(self, key: str) -> FileId:
        """What must not change while the array whose document this is, is read."""


class Folder:
    """A directory, or an address of one on another machine."""

    def __init__(self, root: str, files: Files) -> None:
        self.root, self._files = root.rstrip("/") or "/", files

    @property
    def is_remote(self) -> bool:
        return is_remote(self.root)

    def path(self, key: str) -> str:
        return f"{self.root}/{key}"

    def identity(self, key: str) -> FileId:
        return self._files.identify(self.path(key))

    def read(self, key: str) -> bytes | None:
        with self._files.lend(unseen(self.path(key))) as handle:
            if handle.size == NOT_SEEN:
                return None
            if handle.size > DOCUMENT_BYTES:
                raise LimitExceeded(f"{self.path(key)}: {handle.size:,} bytes are too many for a document; restore it")
            document = np.empty(handle.size, np.uint8)
            handle.read_into(0, document)
            return document.tobytes()

    def holds(self, key: str) -> bool:
        """Whether this leads to no other place than below the root; links inside of it may."""
        if self.is_remote:
            return True
        root = os.path.realpath(self.root)
        return os.path.commonpath([root, os.path.realpath(self.path(key))]) == root

    def has(self, key: str) -> bool:
        """Whether there is such a file, on this machine."""
        return os.path.exists(self.path(key))

    def children(self, key: str) -> Iterator[str]:
        if self.is_remote:
            raise ConfigError(
                f"{self.path(key)}: what a group on another machine holds cannot be listed. Name its arrays with "
                f"fields=(…), or consolidate its metadata (zarr.consolidate_metadata)"
            )
        with os.scandir(self.path(key)) as entries:
            yield from sorted(entry.name for entry in entries if entry.is_dir())

    def names(self, prefix: str, before: str, separator: str) -> FolderNames:
        """Where the chunks of an array are."""
        return FolderNames(f"{self.root}/{prefix}".rstrip("/"), before, separator)

    def has_chunks(self, prefix: str, before: str) -> bool:
        """Whether anything at all was written of an array; on another machine that is not known."""
        if self.is_remote:
            return True
        folder = self.path(f"{prefix}c" if before == "c/" else prefix)
        try:
            with os.scandir(folder) as entries:
                return any(entry.name != "zarr.json" and not entry.name.startswith(".") for entry in entries)
        except FileNotFoundError:
            return False


class Zip:
    """An archive whose members are the keys."""

    def __init__(self, path: str, files: Files) -> None:
        self.root = path
        self.table: ZipTable = zip_table(path, files)
        self._numbers: Mapping[str, int] = {name: number for number, name in enumerate(self.table.names)}

    def path(self, key: str) -> str:
        return f"{self.root}: {key}"

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
        """Whether anything at all was written of an array."""
        begin = f"{prefix}{before}"
        inside = (name[len(begin) :] for name in self._numbers if name.startswith(begin))
        return any(name != "zarr.json" and not name.startswith(".") for name in inside)

    def members(self, prefix: str, before: str, separator: str, counts: tuple[int, ...]) -> "Members | None":
        """Where the chunks of an array are; None if some are compressed as members."""
        offsets = np.full(prod(counts), NEVER_WRITTEN, np.int64)
        lengths = np.zeros(prod(counts), np.int64)
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
        return Members(self.table.file, counts, offsets, lengths)


@dataclass(frozen=True)
class Members:
    """Members of an archive, one a chunk or shard."""

    root = ""
    file: FileId
    counts: tuple[int, ...]
    offsets: np.ndarray
    lengths: np.ndarray

    def place(self, at: tuple[int, ...]) -> tuple[FileId, int, int]:
        number = int(np.ravel_multi_index(at, self.counts))
        return self.file, int(self.offsets[number]), int(self.lengths[number])

    def table(self, grid: Grid) -> KnownTable:
        """As a table of chunks."""

        def turned(column: np.ndarray) -> np.ndarray:
            moved = np.moveaxis(column.reshape(grid.counts), grid.row_axis, 0)
            return np.ascontiguousarray(moved).reshape(grid.shape)

        return KnownTable(turned(self.offsets), turned(self.lengths))
