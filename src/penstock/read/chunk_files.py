"""Chunks that lie in many files: one file per chunk, or many chunks per file (a shard), with an index in each.

Opening a dataset does not list its files, since there may be millions. A chunk was never written if its file does not
exist when it is read, or if the index of its shard has no place for it.
"""

from collections import OrderedDict
from collections.abc import Iterator
from functools import cached_property
from math import prod
from typing import NamedTuple, Protocol

import numpy as np

from penstock.base import fork
from penstock.base.dataclass import dataclass
from penstock.base.file_id import FileId
from penstock.base.scratch import aligned, borrow
from penstock.base.spec import without_axis
from penstock.base.urls import is_remote
from penstock.errors import Corrupt, PenstockError, Truncated
from penstock.files.files import Files
from penstock.files.handles import NOT_SEEN, Handle, identify, unseen_file
from penstock.read import codecs
from penstock.read.extents import NEVER_WRITTEN, Chunks

TO_THE_END = -1
"""The length of a chunk that is as long as its file."""

# Entries of an index that are checked at a time.
CHECKED_AT_ONCE = 2048

KEPT_CHUNK_BYTES = 17
"""What is kept of a chunk of a shard: its offset, its length, and whether it was compared with its checksum."""

_NOWHERE = 2**64 - 1  # offset and length of an absent chunk in a shard's index


class ChunksInFile(NamedTuple):
    """The wanted chunks that lie in one file."""

    file: FileId
    lines: np.ndarray
    """Their positions among the wanted chunks."""
    offsets: np.ndarray
    lengths: np.ndarray


class CachedIndex(NamedTuple):
    """The index of a shard, and the shard as it was when the index was read."""

    file: FileId
    table: np.ndarray
    """(chunks, 2): offset in the file and length of each; the offset of those that are absent is ``NEVER_WRITTEN``."""
    checked: np.ndarray
    """Which chunks this process has compared with their checksums. The file is still the same, or reading it fails, so
    that once is enough: a checksum takes as long as the reading itself where the file is in memory."""

    def set_checked(self, numbers: np.ndarray | int) -> None:
        """Note that chunks were compared. What comes over a network is compared each time."""
        if not is_remote(self.file.path):
            self.checked[numbers] = True


class FoundChunk(NamedTuple):
    """One chunk, and where it lies."""

    file: FileId
    offset: int
    length: int
    shard: CachedIndex | None = None
    """The index of its shard, if it is in one."""
    number: int = 0
    """In its shard."""

    @property
    def is_checked(self) -> bool:
        return self.shard is not None and bool(self.shard.checked[self.number])

    def set_checked(self) -> None:
        if self.shard is not None:
            self.shard.set_checked(self.number)


class FilePlaces(Protocol):
    """Where the files of a grid are: in a folder or an archive."""

    @property
    def root(self) -> str:
        """The folder; empty for an archive."""

    def place(self, at: tuple[int, ...]) -> tuple[FileId, int, int]:
        """File, offset and length (perhaps ``TO_THE_END``) of the chunk or shard at these coordinates."""


@dataclass(frozen=True)
class FolderNames:
    """Files named by their coordinates: ``root/c/3/0/1``."""

    root: str
    before: str = ""
    separator: str = "."

    def place(self, at: tuple[int, ...]) -> tuple[FileId, int, int]:
        return unseen_file(f"{self.root}/{self.before}{self.separator.join(map(str, at))}"), 0, TO_THE_END


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
        return without_axis(self.counts, self.row_axis)

    def by_block(self, column: np.ndarray) -> np.ndarray:
        """A number per chunk, in C order along the array's axes, as (blocks, pieces)."""
        moved = np.moveaxis(column.reshape(self.counts), self.row_axis, 0)
        return np.ascontiguousarray(moved).reshape(self.shape)

    def coordinates(self, block: int, pieces: np.ndarray) -> np.ndarray:
        """(pieces, axes)"""
        along = list(np.unravel_index(pieces, self.within_row)) if self.within_row else []
        along.insert(self.row_axis, np.full(len(pieces), block))
        return np.stack(along, axis=1)

    def coordinate(self, block: int, piece: int) -> tuple[int, ...]:
        """The coordinates of one piece, ten times as fast."""
        along: list[int] = []
        for count in reversed(self.within_row):
            piece, at = divmod(piece, count)
            along.append(at)
        along.reverse()
        along.insert(self.row_axis, block)
        return tuple(along)


class FileTable:
    """One file per chunk."""

    stored_bytes = missing = end = index_bytes = 0
    has_skipped = False
    checked_by = ""
    text = "a file each"

    def __init__(self, grid: Grid, places: FilePlaces, longest: int) -> None:
        self.grid, self.places, self.longest = grid, places, longest
        self.shape = grid.shape
        self.folder = places.root

    def sizes(self, most: int) -> tuple[int, ...]:
        """Sizes of up to ``most`` files at regular distances: evidence that two tables are of the same data."""
        grid = self._files_grid
        count = prod(grid)
        some = (np.unravel_index(number, grid) for number in range(0, count, -(-count // most)))
        places = (self.places.place(tuple(int(each) for each in at)) for at in some)
        return tuple(_find_size(file.path) if length == TO_THE_END else length for file, _, length in places)

    @property
    def _files_grid(self) -> tuple[int, ...]:
        return self.grid.counts

    def find(self, block: int, pieces: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        raise NotImplementedError("chunks in files of their own are located, not found")

    def sums(self, block: int, pieces: np.ndarray | slice) -> None:
        return None

    def locate(self, files: Files, block: int, pieces: np.ndarray) -> Iterator[ChunksInFile]:
        """Where chunks lie, file by file."""
        for line, at in enumerate(self.grid.coordinates(block, pieces).tolist()):
            file, offset, length = self.places.place(tuple(at))
            yield ChunksInFile(file, np.array([line]), np.array([offset]), np.array([length]))

    def locate_one(self, files: Files, block: int, piece: int) -> FoundChunk:
        """The file of one chunk, and where it lies there."""
        return FoundChunk(*self.places.place(self.grid.coordinate(block, piece)))


@dataclass(frozen=True)
class ShardIndex:
    """How the index of a shard is stored: per chunk an offset and a length of eight bytes each."""

    chunks: tuple[int, ...]
    """Chunks of a shard along each axis."""
    is_at_end: bool = True
    order: str = "<"
    has_checksum: bool = True

    @property
    def table_bytes(self) -> int:
        return 16 * prod(self.chunks)

    @property
    def kept_bytes(self) -> int:
        """In memory."""
        return KEPT_CHUNK_BYTES * prod(self.chunks)

    @property
    def stored_bytes(self) -> int:
        return self.table_bytes + (codecs.Checksum.BYTES if self.has_checksum else 0)


class ShardTable(FileTable):
    """Many chunks per file, each file with an index; the indices used last are kept in memory."""

    @property
    def text(self) -> str:  # type: ignore[override]
        return f"{prod(self.index.chunks):,} to a shard"

    def __init__(self, grid: Grid, places: FilePlaces, longest: int, index: ShardIndex, kept_bytes: int) -> None:
        super().__init__(grid, places, longest)
        self.index, self._kept_bytes = index, kept_bytes
        self._kept: OrderedDict[tuple[int, ...], CachedIndex | None] = OrderedDict()
        self._looking = fork.Lock()
        self._most = max(1, kept_bytes // index.kept_bytes)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.grid, self.places, self.longest, self.index, self._kept_bytes)

    @property
    def _files_grid(self) -> tuple[int, ...]:
        return tuple(-(-count // inside) for count, inside in zip(self.grid.counts, self.index.chunks, strict=True))

    @property
    def index_bytes(self) -> int:  # type: ignore[override]
        return min(prod(self._files_grid), self._most) * self.index.kept_bytes

    @property
    def scratch_bytes(self) -> int:
        """Scratch for reading an index, and for a copy of it when more are used than can be kept."""
        return aligned(self.index.stored_bytes) + aligned(self.index.kept_bytes)

    def locate(self, files: Files, block: int, pieces: np.ndarray) -> Iterator[ChunksInFile]:
        shards, inside = np.divmod(self.grid.coordinates(block, pieces), self.index.chunks)
        numbers = np.ravel_multi_index(tuple(inside.T), self.index.chunks)
        of_each = np.ravel_multi_index(tuple(shards.T), self._files_grid)
        for number in np.unique(of_each).tolist():
            lines = np.flatnonzero(of_each == number)
            shard = tuple(shards[lines[0]].tolist())
            kept = self._index(files, shard)
            if kept is None:
                file = self.places.place(shard)[0]
                yield ChunksInFile(file, lines, np.full(len(lines), NEVER_WRITTEN), np.zeros(len(lines), np.int64))
                continue
            there = kept.table[numbers[lines]]
            yield ChunksInFile(kept.file, lines, there[:, 0], there[:, 1])

    def locate_one(self, files: Files, block: int, piece: int) -> FoundChunk:
        shard, number = [], 0
        for at, count in zip(self.grid.coordinate(block, piece), self.index.chunks, strict=True):
            shard.append(at // count)
            number = number * count + at % count
        kept = self._index(files, tuple(shard))
        if kept is None:
            return FoundChunk(self.places.place(tuple(shard))[0], NEVER_WRITTEN, 0)
        offset, length = kept.table[number].tolist()
        return FoundChunk(kept.file, offset, length, kept, number)

    def locate_rows(
        self, files: Files, rows: np.ndarray
    ) -> Iterator[tuple[np.ndarray, CachedIndex | None, np.ndarray]]:
        """Chunks that are one row each, shard by shard: positions among ``rows``, the index, and numbers in it."""
        axis, (steps, counts) = self.grid.row_axis, (self.index.chunks, self._files_grid)
        shards, inside = np.divmod(rows, steps[axis])
        numbers = inside * prod(steps[axis + 1 :])
        for number in sorted(set(shards.tolist())):
            lines = np.flatnonzero(shards == number)
            at = tuple(number if each == axis else 0 for each in range(len(counts)))
            yield lines, self._index(files, at), numbers[lines]

    def _index(self, files: Files, shard: tuple[int, ...]) -> CachedIndex | None:
        with self._looking:
            if shard in self._kept:
                self._kept.move_to_end(shard)
                return self._kept[shard]
        index = self._read(files, shard)
        with self._looking:
            index = self._kept.setdefault(shard, index)  # another thread may have been quicker
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return index

    def _read(self, files: Files, shard: tuple[int, ...]) -> CachedIndex | None:
        file, offset, length = self.places.place(shard)
        if offset == NEVER_WRITTEN:
            return None
        needed = self.index.stored_bytes
        with files.lend(file) as handle:
            if handle.size == NOT_SEEN:
                return None
            size = handle.size - offset if length == TO_THE_END else length
            if size < needed:  # found before memory is taken for an index as large as the metadata say
                raise Truncated(
                    f"{file.path}: the shard {shard} has {size:,} bytes, too few for its index of {needed:,}. It "
                    f"was cut short, perhaps by an unfinished copy: restore it"
                )
            begin = offset + (size - needed if self.index.is_at_end else 0)
            with borrow(needed) as stored:
                table = self._checked(handle, begin, size, stored, shard).view(np.int64)
            table[table[:, 0] == NEVER_WRITTEN, 1] = 0
            if offset:
                table[table[:, 0] != NEVER_WRITTEN, 0] += offset
            return CachedIndex(handle.file, table, np.zeros(len(table), bool))

    def _checked(self, handle: Handle, begin: int, size: int, stored: np.ndarray, shard: tuple[int, ...]) -> np.ndarray:
        handle.read_into(begin, stored)
        try:
            payload = codecs.Crc32c().checked(stored) if self.index.has_checksum else stored
        except Corrupt as error:
            raise Corrupt(
                f"{handle.file.path}: the index of shard {shard} is damaged ({error}); restore the file"
            ) from None
        table = payload.view(f"{self.index.order}u8").astype(np.uint64).reshape(-1, 2)
        beyond = _find_beyond(table, size)
        if beyond is not None:
            first, length = beyond
            raise Truncated(
                f"{handle.file.path}: the index of shard {shard} has a chunk of {length:,} bytes at {first:,}, but the "
                f"shard ends at {size:,}. It was cut short or is damaged: restore the file"
            )
        return table


def _find_beyond(table: np.ndarray, size: int) -> tuple[int, int] | None:
    """Offset and length of the first chunk that ends beyond the shard; searched in pieces to save memory."""
    for begin in range(0, len(table), CHECKED_AT_ONCE):
        some = table[begin : begin + CHECKED_AT_ONCE]
        there = some[some[:, 0] != _NOWHERE]
        beyond = (there[:, 0] > size) | (there[:, 1] > size) | (there.sum(axis=1, dtype=np.uint64) > size)
        if beyond.any():
            first, length = there[beyond][0].tolist()
            return first, length
    return None


def _find_size(path: str) -> int:
    try:
        return identify(path).size
    except PenstockError:
        return NOT_SEEN


def table_of_files(array: Chunks) -> FileTable | None:
    """The table of an array whose chunks lie in many files; else None."""
    return array.table if isinstance(array.table, FileTable) else None


def index_scratch_bytes(array: Chunks) -> int:
    """Scratch for finding a chunk."""
    return array.table.scratch_bytes if isinstance(array.table, ShardTable) else 0


def locating_bytes(array: Chunks, pieces: int) -> int:
    """Memory that numpy takes to find the files of ``pieces`` chunks and their places there."""
    if not isinstance(array.table, FileTable):
        return 0
    axes = len(array.table.grid.counts)
    numbers = 5 * axes + 12 if isinstance(array.table, ShardTable) else 2 * axes
    return 8 * numbers * pieces
