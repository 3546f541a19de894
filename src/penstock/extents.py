"""Where the bytes of a field lie: immutable tables from a format's metadata, valid from birth.

A format's parser makes these; one shared reader serves them all. Nothing here opens a file.
"""

from dataclasses import dataclass
from functools import cached_property
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


@dataclass(frozen=True)
class RowChunks(Array):
    """One stored chunk a row, each somewhere in the file, written through ``codecs`` in this order."""

    offsets: np.ndarray
    lengths: np.ndarray
    codecs: tuple[CodecId, ...] = ()

    def __post_init__(self) -> None:
        if self.rows:
            _check_inside(self, int((self.offsets + self.lengths).max()))

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest stored chunk."""
        return int(self.lengths.max(initial=0))

    @property
    def index_bytes(self) -> int:
        return self.offsets.nbytes + self.lengths.nbytes

    def describe(self) -> tuple[object, ...]:
        return (self.name, str(self.stored), self.shape, self.rows, self.codecs, int(self.lengths.sum()))


Extents = Contiguous | RowChunks


def _check_inside(array: Array, end: int) -> None:
    if end > array.file.size:
        raise Truncated(
            f"{array.file.path}: {array.name!r} reaches to byte {end:,}, but the file has only {array.file.size:,}. "
            f"It was cut short, perhaps by an unfinished download or copy: fetch it again"
        )
