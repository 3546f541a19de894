"""Where the bytes of a field lie: frozen tables made from a format's metadata, checked when they are made.

A format's parser makes these; shared readers read them. Nothing here opens a file.
"""

import os
from dataclasses import field
from functools import cached_property
from math import prod
from typing import Any, Protocol
from zlib import crc32

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.file_id import FileId
from penstock.base.spec import FieldSpec
from penstock.base.text_column import TextColumn
from penstock.errors import Truncated
from penstock.read.member_sum import MemberSum

CodecId = tuple[str, int]
"""A codec's name and its one parameter (the element width of a shuffle; else 0), as written into an index."""


@dataclass(frozen=True)
class Array:
    """What all tables share: the file, and what its bytes mean."""

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

    @property
    def source_path(self) -> str:
        """The file or folder that the samples come from."""
        return self.file.path

    def place(self, row: int) -> str:
        """``betas[12]``."""
        return f"{self.name}[{row}]"

    def sample(self, row: int) -> str:
        """The name of a sample."""
        return self.place(row)


@dataclass(frozen=True)
class Contiguous(Array):
    """Rows one after another from ``offset`` on, stored as they are."""

    offset: int
    member: MemberSum | None = field(default=None, compare=False)
    """What covers all rows, if they lie in a member of an archive that is compared."""

    def __post_init__(self) -> None:
        end = self.offset + self.rows * self.row_bytes
        if end > self.file.size:
            raise Truncated(
                f"{self.file.path}: {self.name!r} reaches to byte {end:,}, but the file has only {self.file.size:,}. "
                f"It was cut short, perhaps by an unfinished download or copy: fetch it again"
            )

    @property
    def index_bytes(self) -> int:
        return 0

    def describe(self) -> tuple[object, ...]:
        return (self.name, str(self.stored), self.shape, self.rows, self.offset)


NEVER_WRITTEN = -1
"""The offset of a chunk that has no bytes in the file."""


class ChunkTable(Protocol):
    """Where each chunk lies: rows are blocks of rows, columns the pieces that a row is split into."""

    shape: tuple[int, int]
    """(blocks, pieces)"""
    longest: int
    """Bytes of the longest stored chunk."""
    stored_bytes: int
    missing: int
    """Chunks that were never written."""
    end: int
    """The byte after the last one of any chunk."""
    has_skipped: bool
    """Whether some chunks were written without some of the codecs."""
    folder: str
    """Where its files are, if they are many; else empty."""
    checked_by: str
    """The checksum that the table has of every stored chunk; empty if it has none."""

    @property
    def index_bytes(self) -> int:
        """Memory that the table takes."""

    def find(self, block: int, pieces: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Offsets, lengths, and masks of the codecs left out (None where none was)."""

    def sums(self, block: int, pieces: np.ndarray | slice) -> np.ndarray | None:
        """CRC-32 of the stored chunks; None if the table has none."""


# Chunks of a table that are summed at a time: a file may have a million.
_AT_ONCE = 1 << 14


def _missing_and_end(offsets: np.ndarray, lengths: np.ndarray | int) -> tuple[int, int]:
    """How many chunks were never written, and the byte after the last one of any."""
    missing, end, places = 0, 0, offsets.reshape(-1)
    sizes = lengths.reshape(-1) if isinstance(lengths, np.ndarray) else None
    for first in range(0, len(places), _AT_ONCE):
        some = places[first : first + _AT_ONCE]
        missing += int(np.count_nonzero(some == NEVER_WRITTEN))
        ends = some + (lengths if sizes is None else sizes[first : first + _AT_ONCE])
        end = max(end, int(ends.max()))
    return missing, end


class KnownTable:
    """A table in memory: 8 bytes per chunk, 12 if stored lengths differ, more with checksums or skipped codecs."""

    folder = ""

    def __init__(
        self,
        offsets: np.ndarray,
        lengths: np.ndarray | int,
        skipped: np.ndarray | None = None,
        crc32: np.ndarray | None = None,
    ) -> None:
        self.shape: tuple[int, int] = (offsets.shape[0], offsets.shape[1])
        self.offsets, self.lengths, self.skipped, self._crc32 = offsets, lengths, skipped, crc32
        self.checked_by = "" if crc32 is None else "crc32"
        self.missing, self.end = _missing_and_end(offsets, lengths)
        self.has_skipped = skipped is not None
        if isinstance(lengths, np.ndarray):
            self.longest, self.stored_bytes = int(lengths.max(initial=0)), int(lengths.sum(dtype=np.int64))
        else:
            self.longest, self.stored_bytes = lengths, lengths * (offsets.size - self.missing)

    @property
    def index_bytes(self) -> int:
        columns = (self.offsets, self.lengths, self.skipped, self._crc32)
        return sum(column.nbytes for column in columns if isinstance(column, np.ndarray))

    def find(self, block: int, pieces: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        offsets = self.offsets[block, pieces]
        if isinstance(self.lengths, np.ndarray):
            lengths = self.lengths[block, pieces]
        else:
            lengths = np.broadcast_to(np.int64(self.lengths), offsets.shape)
        return offsets, lengths, None if self.skipped is None else self.skipped[block, pieces]

    def sums(self, block: int, pieces: np.ndarray | slice) -> np.ndarray | None:
        return None if self._crc32 is None else self._crc32[block, pieces]


@dataclass(frozen=True)
class Chunks(Array):
    """Chunks of some rows, or of a piece of each, anywhere in the file, written through ``codecs`` in this order.

    Pieces are numbered in C order over the row; all have the shape ``chunk``, also where they reach beyond the row, and
    all hold ``rows_per_chunk`` rows, also the last.
    """

    rows_per_chunk: int
    chunk: tuple[int, ...]
    """The shape of one row's share of a chunk."""
    table: ChunkTable
    codecs: tuple[CodecId, ...] = ()
    row_axis: int = 0
    """Which axis of a stored chunk is that of the rows."""
    fill: bytes | None = None
    """The element that replaces chunks that were never written; None if that is an error."""
    axes: tuple[int, ...] | None = None
    """The order of the axes in a stored chunk, if it differs from that of the array."""
    remedy: str = ""
    """How to store the array so that each row can be read by itself."""
    evidence: tuple[int, ...] = ()
    """Sizes of some of its files, if not all are known."""
    fill_text: str = ""
    """The fill value as text, also if it must not be used."""

    @property
    def source_path(self) -> str:
        return self.table.folder or self.file.path

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Pieces along each axis of a row."""
        return tuple(-(-size // step) for size, step in zip(self.shape, self.chunk, strict=True))

    @cached_property
    def piece_elements(self) -> int:
        """Elements of one row's share of a chunk."""
        return prod(self.chunk)

    @cached_property
    def chunk_bytes(self) -> int:
        return self.stored.itemsize * self.rows_per_chunk * self.piece_elements

    @cached_property
    def stored_chunk(self) -> tuple[int, ...]:
        """The shape of a chunk as it lies in the file."""
        whole = (*self.chunk[: self.row_axis], self.rows_per_chunk, *self.chunk[self.row_axis :])
        return whole if self.axes is None else tuple(whole[axis] for axis in self.axes)

    @cached_property
    def rows_first(self) -> tuple[int, ...]:
        """The axes of a stored chunk, in the order in which rows come first and a row is as it is delivered."""
        stored = list(self.axes or range(len(self.stored_chunk)))
        wanted = sorted(stored, key=lambda axis: (axis != self.row_axis, axis))
        return tuple(stored.index(axis) for axis in wanted)

    @cached_property
    def is_turned(self) -> bool:
        """Whether the rows of a chunk are not contiguous, or their axes are in another order."""
        longer = [axis for axis in self.rows_first if self.stored_chunk[axis] > 1]
        return longer != sorted(longer)

    def block_place(self, block: int) -> str:
        """``betas[12]``, or ``betas[94:141]`` where chunks hold many rows."""
        first = block * self.rows_per_chunk
        last = min(first + self.rows_per_chunk, self.rows)
        return self.place(first) if self.rows_per_chunk == 1 else f"{self.name}[{first}:{last}]"

    def piece_place(self, block: int, piece: int) -> str:
        """``betas[94:141], chunk (94, 0, 16)``: its rows, and its first element."""
        corner = [
            int(at) * step for at, step in zip(np.unravel_index(piece, self.grid or (1,)), self.chunk, strict=False)
        ]
        corner.insert(self.row_axis, block * self.rows_per_chunk)
        return f"{self.block_place(block)}, chunk {tuple(corner)}"

    @property
    def index_bytes(self) -> int:
        return self.table.index_bytes

    def describe(self) -> tuple[object, ...]:
        return (
            self.name,
            str(self.stored),
            self.shape,
            self.rows,
            self.rows_per_chunk,
            self.chunk,
            self.row_axis,
            self.codecs,
            self.table.stored_bytes,
            *(each for each in (self.axes, self.evidence) if each),
        )


@dataclass(frozen=True)
class Members(Array):
    """One file of an archive per row, anywhere in it."""

    offsets: np.ndarray
    """-1 where a sample lacks it."""
    lengths: np.ndarray
    keys: TextColumn
    """The names of the samples."""
    kind: Any
    """How the bytes become an element: one of ``penstock.read.members``."""
    table_bytes: int
    """Memory of the table that these columns and keys are part of, together with those of other fields."""
    pattern: str = ""
    """The name of a member, with ``*`` for its sample; ``sample.field`` if empty."""
    layout: str = "members of an archive"
    max_bytes: int = 2**62
    """Members of more are refused."""

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest that is read."""
        return min(int(self.lengths.max(initial=0)), self.max_bytes)

    @cached_property
    def spec(self) -> FieldSpec:
        if not self.stored.hasobject:
            return FieldSpec(self.stored, self.shape)
        values = self.kind.values
        return FieldSpec(self.stored, self.shape, values.name, values.most_bytes(self.longest))

    def place(self, row: int) -> str:
        """``000012.jpg``."""
        return (self.pattern or f"*.{self.name}").replace("*", self.keys[row], 1)

    def sample(self, row: int) -> str:
        """``000012``."""
        return self.keys[row]

    @property
    def index_bytes(self) -> int:
        return 0  # shared with other fields

    def describe(self) -> tuple[object, ...]:
        return (self.name, str(self.stored), self.shape, self.rows, int(self.lengths.sum()))


@dataclass(frozen=True)
class LooseFiles(Members):
    """One file per row, in a folder and its subfolders; ``keys`` are paths relative to it."""

    mtimes: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    inodes: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    saved: str = ""
    """Where the list of files is saved, if it is."""

    def file_at(self, row: int) -> FileId:
        """The file of one row."""
        path = os.path.join(self.file.path, os.fsdecode(self.keys.raw(row)))
        return FileId(path, int(self.lengths[row]), int(self.mtimes[row]), int(self.inodes[row]))

    def describe(self) -> tuple[object, ...]:
        return (*super().describe(), crc32(self.keys.buffer.data), crc32(np.ascontiguousarray(self.lengths).data))


Extents = Contiguous | Chunks | Members
