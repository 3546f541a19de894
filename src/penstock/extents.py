"""Where the bytes of a field lie: immutable tables from a format's metadata, valid from birth.

A format's parser makes these; one shared reader serves them all. Nothing here opens a file.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

import numpy as np

from penstock.errors import Truncated
from penstock.spec import FieldSpec

CodecId = tuple[str, int]
"""A codec's name and its one parameter (the element width of a shuffle; else 0), as written into an index."""


@dataclass(frozen=True)
class FileId:
    """A file as it was when its metadata was parsed."""

    path: str
    size: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True)
class Array:
    """What all tables share: whose bytes these are, and what they mean."""

    file: FileId
    name: str
    """The array's name inside the file, for messages."""
    stored: np.dtype
    """The dtype as stored, byte order included."""
    shape: tuple[int, ...]
    """The shape of one row."""
    rows: int

    @cached_property
    def spec(self) -> FieldSpec:
        return FieldSpec(self.stored, self.shape)

    @cached_property
    def row_bytes(self) -> int:
        return self.stored.itemsize * prod(self.shape)

    def place(self, row: int) -> str:
        """``betas[12]``."""
        return f"{self.name}[{row}]"


@dataclass(frozen=True)
class Contiguous(Array):
    """Rows one after another from ``offset`` on, stored as they are."""

    offset: int

    def __post_init__(self) -> None:
        _check_inside(self, self.offset + self.rows * self.row_bytes)

    @property
    def index_bytes(self) -> int:
        return 0

    def describe(self) -> tuple[object, ...]:
        return (self.name, str(self.stored), self.shape, self.rows, self.offset)


Box = tuple[slice, ...]


@dataclass(frozen=True)
class Chunks(Array):
    """Chunks of some rows, or of a piece of each, anywhere in the file, written through ``codecs`` in this order.

    Pieces are numbered in C order over the row; all have the shape ``chunk``, also where they reach beyond the row, and
    all hold ``rows_per_chunk`` rows, also the last.
    """

    rows_per_chunk: int
    chunk: tuple[int, ...]
    """The shape of one row's share of a chunk."""
    offsets: np.ndarray
    """(blocks of rows, pieces)"""
    lengths: np.ndarray
    """(blocks of rows, pieces)"""
    codecs: tuple[CodecId, ...] = ()
    skipped: np.ndarray | None = None
    """(blocks of rows, pieces): bit i is set where codec i was left out, as it did not help; None where none was."""

    def __post_init__(self) -> None:
        if self.rows:
            _check_inside(self, int((self.offsets + self.lengths).max()))

    @cached_property
    def boxes(self) -> list[tuple[Box, Box]]:
        """For each piece, its place in the row, and the part of the chunk that lies inside the row."""
        starts = [range(0, size, step) for size, step in zip(self.shape, self.chunk, strict=True)]
        found = []
        for corner in product(*starts):
            ends = [min(c + step, size) for c, step, size in zip(corner, self.chunk, self.shape, strict=True)]
            inside = tuple(slice(c, end) for c, end in zip(corner, ends, strict=True))
            found.append((inside, tuple(slice(0, end - c) for c, end in zip(corner, ends, strict=True))))
        return found

    @cached_property
    def chunk_bytes(self) -> int:
        return self.stored.itemsize * self.rows_per_chunk * prod(self.chunk)

    def block_place(self, block: int) -> str:
        """``betas[12]``, or ``betas[94:141]`` where chunks hold many rows."""
        first = block * self.rows_per_chunk
        last = min(first + self.rows_per_chunk, self.rows)
        return self.place(first) if self.rows_per_chunk == 1 else f"{self.name}[{first}:{last}]"

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest stored chunk."""
        return int(self.lengths.max(initial=0))

    @property
    def index_bytes(self) -> int:
        return self.offsets.nbytes + self.lengths.nbytes + (0 if self.skipped is None else self.skipped.nbytes)

    def describe(self) -> tuple[object, ...]:
        stored = int(self.lengths.sum())
        return (
            self.name,
            str(self.stored),
            self.shape,
            self.rows,
            self.rows_per_chunk,
            self.chunk,
            self.codecs,
            stored,
        )


Extents = Contiguous | Chunks


def _check_inside(array: Array, end: int) -> None:
    if end > array.file.size:
        raise Truncated(
            f"{array.file.path}: {array.name!r} reaches to byte {end:,}, but the file has only {array.file.size:,}. "
            f"It was cut short, perhaps by an unfinished download or copy: fetch it again"
        )
