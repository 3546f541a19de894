"""Chunks that lie in many files: one file a chunk, or many chunks in each file behind an index of its own.

Which files there are is not asked when a dataset is opened, for there may be millions. A file that is not there when it
is read, or an index that has no place for a chunk, means that the chunk was never written.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple, Protocol

import numpy as np

from penstock import codecs, forks
from penstock.errors import Corrupt, PenstockError, Truncated
from penstock.extents import NEVER_WRITTEN, Chunks, FileId
from penstock.fileio import Files
from penstock.handles import NOT_SEEN, Handle, identify, unseen
from penstock.memory import aligned, borrow
from penstock.sizes import MiB

TO_THE_END = -1
"""The length of a chunk that is as long as its file."""

# Indices of shards kept in memory, by each array.
KEPT_BYTES = 64 * MiB

_NOWHERE = 2**64 - 1  # offset and length of an absent chunk in a shard's index


class Found(NamedTuple):
    """Some of the chunks asked for, which lie in one file."""

    file: FileId
    lines: np.ndarray
    """Which of those asked for."""
    offsets: np.ndarray
    lengths: np.ndarray


class Places(Protocol):
    """Where the files of a grid are: a folder, or an archive."""

    @property
    def root(self) -> str:
        """The folder; empty where it is none."""

    def place(self, at: tuple[int, ...]) -> tuple[FileId, int, int]:
        """File, offset and length (``TO_THE_END`` of the file) of the one with these coordinates."""


@dataclass(frozen=True)
class FolderNames:
    """Files named by their coordinates: ``root/c/3/0/1``."""

    root: str
    before: str = ""
    separator: str = "."

    def place(self, at: tuple[int, ...]) -> tuple[FileId, int, int]:
        return unseen(f"{self.root}/{self.before}{self.separator.join(map(str, at))}"), 0, TO_THE_END


@dataclass(frozen=True)
class Grid:
    """How the pieces of blocks of rows are numbered along the array's axes."""

    counts: tuple[int, ...]
    """Chunks along each axis, that of the rows included."""
    row_axis: int

    @property
    def shape(self) -> tuple[int, int]:
        """(blocks, pieces)"""
        return self.counts[self.row_axis], prod(self.within_row)

    @cached_property
    def within_row(self) -> tuple[int, ...]:
        return (*self.counts[: self.row_axis], *self.counts[self.row_axis + 1 :])

    def coordinates(self, block: int, pieces: np.ndarray) -> np.ndarray:
        """(pieces, axes)"""
        along = list(np.unravel_index(pieces, self.within_row)) if self.within_row else []
        along.insert(self.row_axis, np.full(len(pieces), block))
        return np.stack(along, axis=1)


class FileTable:
    """One file a chunk."""

    stored_bytes = missing = end = index_bytes = 0
    some_skipped = False
    told = "a file each"

    def __init__(self, grid: Grid, places: Places, longest: int) -> None:
        self.grid, self.places, self.longest = grid, places, longest
        self.shape = grid.shape
        self.folder = places.root

    def sizes(self, most: int) -> tuple[int, ...]:
        """Those of up to so many of its files, evenly spread: evidence that two tables are of the same data."""
        grid = self._files_grid
        count = prod(grid)
        spread = (np.unravel_index(number, grid) for number in range(0, count, -(-count // most)))
        places = (self.places.place(tuple(int(each) for each in at)) for at in spread)
        return tuple(_size(file.path) if length == TO_THE_END else length for file, _, length in places)

    @property
    def _files_grid(self) -> tuple[int, ...]:
        return self.grid.counts

    def find(self, block: int, pieces: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        raise NotImplementedError("chunks in files of their own are located, not found")

    def locate(self, files: Files, block: int, pieces: np.ndarray) -> Iterator[Found]:
        """Where chunks are, file by file."""
        for line, at in enumerate(self.grid.coordinates(block, pieces).tolist()):
            file, offset, length = self.places.place(tuple(at))
            yield Found(file, np.array([line]), np.array([offset]), np.array([length]))


@dataclass(frozen=True)
class ShardIndex:
    """How the index of a shard is stored: an offset and a length of eight bytes each for each of its chunks."""

    chunks: tuple[int, ...]
    """Chunks of a shard along each axis."""
    at_end: bool = True
    order: str = "<"
    checksum: bool = True

    @property
    def table_bytes(self) -> int:
        return 16 * prod(self.chunks)

    @property
    def stored_bytes(self) -> int:
        return self.table_bytes + (codecs.Checksum.BYTES if self.checksum else 0)


class ShardTable(FileTable):
    """Many chunks a file, each file with an index, of which those used last are kept."""

    @property
    def told(self) -> str:  # type: ignore[override]
        return f"{prod(self.index.chunks):,} to a shard"

    def __init__(self, grid: Grid, places: Places, longest: int, index: ShardIndex) -> None:
        super().__init__(grid, places, longest)
        self.index = index
        self._kept: OrderedDict[tuple[int, ...], np.ndarray | None] = OrderedDict()
        self._looking = forks.Lock()
        self._most = max(1, KEPT_BYTES // index.table_bytes)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.grid, self.places, self.longest, self.index)

    @property
    def _files_grid(self) -> tuple[int, ...]:
        return tuple(-(-count // inside) for count, inside in zip(self.grid.counts, self.index.chunks, strict=True))

    @property
    def index_bytes(self) -> int:  # type: ignore[override]
        return min(prod(self._files_grid), self._most) * self.index.table_bytes

    @property
    def scratch_bytes(self) -> int:
        """What reading an index borrows, and the copy that is made of it where one more than can be kept is used."""
        return aligned(self.index.stored_bytes) + aligned(self.index.table_bytes)

    def locate(self, files: Files, block: int, pieces: np.ndarray) -> Iterator[Found]:
        shards, inside = np.divmod(self.grid.coordinates(block, pieces), self.index.chunks)
        numbers = np.ravel_multi_index(tuple(inside.T), self.index.chunks)
        of_each = np.ravel_multi_index(tuple(shards.T), self._files_grid)
        for number in np.unique(of_each).tolist():
            lines = np.flatnonzero(of_each == number)
            shard = tuple(shards[lines[0]].tolist())
            file, offset, _ = self.places.place(shard)
            table = self._table(files, shard)
            if table is None:
                yield Found(file, lines, np.full(len(lines), NEVER_WRITTEN), np.zeros(len(lines), np.int64))
                continue
            there = table[numbers[lines]].astype(np.int64)  # nowhere is -1 in both
            written = there[:, 0] != NEVER_WRITTEN
            yield Found(
                file,
                lines,
                np.where(written, there[:, 0] + offset, NEVER_WRITTEN),
                np.where(written, there[:, 1], 0),
            )

    def _table(self, files: Files, shard: tuple[int, ...]) -> np.ndarray | None:
        with self._looking:
            if shard in self._kept:
                self._kept.move_to_end(shard)
                return self._kept[shard]
        table = self._read(files, shard)
        with self._looking:
            self._kept[shard] = table
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return table

    def _read(self, files: Files, shard: tuple[int, ...]) -> np.ndarray | None:
        file, offset, length = self.places.place(shard)
        if offset == NEVER_WRITTEN:
            return None
        with files.lend(file) as handle, borrow(self.index.stored_bytes) as stored:
            if handle.size == NOT_SEEN:
                return None
            size = handle.size - offset if length == TO_THE_END else length
            if size < len(stored):
                raise Truncated(
                    f"{file.path}: the shard {shard} has {size:,} bytes, too few for its index of {len(stored):,}. It "
                    f"was cut short, perhaps by an unfinished copy: restore it"
                )
            return self._checked(handle, offset + (size - len(stored) if self.index.at_end else 0), size, stored, shard)

    def _checked(self, handle: Handle, begin: int, size: int, stored: np.ndarray, shard: tuple[int, ...]) -> np.ndarray:
        handle.read_into(begin, stored)
        try:
            payload = codecs.Crc32c().checked(stored) if self.index.checksum else stored
        except Corrupt as error:
            raise Corrupt(
                f"{handle.file.path}: the index of shard {shard} is damaged ({error}); restore the file"
            ) from None
        table = payload.view(f"{self.index.order}u8").astype(np.uint64).reshape(-1, 2)
        there = table[table[:, 0] != _NOWHERE]
        beyond = (there[:, 0] > size) | (there[:, 1] > size) | (there.sum(axis=1, dtype=np.uint64) > size)
        if beyond.any():
            first, length = there[beyond][0].tolist()
            raise Truncated(
                f"{handle.file.path}: the index of shard {shard} has a chunk of {length:,} bytes at {first:,}, but the "
                f"shard ends at {size:,}. It was cut short or is damaged: restore the file"
            )
        return table


def _size(path: str) -> int:
    try:
        return identify(path).size
    except PenstockError:
        return NOT_SEEN


def spread(array: Chunks) -> FileTable | None:
    """The table of an array whose chunks lie in many files."""
    return array.table if isinstance(array.table, FileTable) else None


def index_scratch_bytes(array: Chunks) -> int:
    """What finding out where a chunk lies borrows."""
    return array.table.scratch_bytes if isinstance(array.table, ShardTable) else 0
