"""How one field is cut into outputs that are each written by one task. Pure arithmetic.

A field is an array (rows, *shape of a row). A **shard** is some rows of it, or where all rows of a source block do not
fit in memory together, part of each of these rows. A **read** fills a piece of a shard: it is what a task holds in
memory at a time. A **chunk** is what a reader of the output decodes at a time.

Rules:
1. Shards are a regular grid, and no two share a byte: each has one writer.
2. Reads are whole source blocks, so that each is decoded once. Where a block does not fit, the row is cut, along
   the source's chunks where possible.
3. Chunks never cross the border of a read.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.sizes import MiB
from penstock.conversion.values import ValueKind

CHUNK_BYTES = 1 * MiB
SHARD_BYTES = 256 * MiB
# Larger reads are no faster.
READ_BYTES = 64 * MiB
# Reads are no smaller, nor are rows cut into less, all rows of a block together: there would be no end of them. Of tiny
# rows, each of which takes memory besides its values, so many are enough.
LEAST_READ_BYTES = 1 * MiB
LEAST_READ_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The shards of one field, the reads that fill one, and the chunks in it."""

    rows: int
    shape: tuple[int, ...]
    """Of a row."""
    dtype: np.dtype
    box: tuple[int, ...]
    """The part of a row that a shard has; ``shape`` where rows are not cut."""
    chunk_rows: int
    read_rows: int
    shard_rows: int
    need_bytes: int
    """The most that a task holds."""
    compression: str = "none"
    """Of its chunks, where it has any."""
    values: ValueKind | None = None
    """Of a field of values of no fixed size: what they are. ``dtype`` then only says how large a value may be."""

    def __post_init__(self) -> None:
        if self.shard_rows % self.chunk_rows or self.read_rows % self.chunk_rows:
            raise ValueError("chunks cross the border of a shard or a read")

    @property
    def grid(self) -> tuple[int, ...]:
        """How many shards there are along each axis."""
        return tuple(-(-n // step) for n, step in zip((self.rows, *self.shape), self.shard_shape, strict=True))

    @property
    def shard_shape(self) -> tuple[int, ...]:
        return (self.shard_rows, *self.box)

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        return (self.chunk_rows, *self.box)

    @property
    def bytes(self) -> int:
        """Of all values."""
        return self.rows * prod(self.shape) * self.dtype.itemsize

    def shard(self, place: Sequence[int]) -> tuple[range, tuple[slice, ...]]:
        """The rows of a shard, and the part of each."""
        first = place[0] * self.shard_rows
        part = tuple(
            slice(at * step, min((at + 1) * step, n))
            for at, step, n in zip(place[1:], self.box, self.shape, strict=True)
        )
        return range(first, min(first + self.shard_rows, self.rows)), part

    def reads(self, rows: range) -> Iterator[range]:
        """The reads that fill a shard."""
        return (rows[begin : begin + self.read_rows] for begin in range(0, len(rows), self.read_rows))


@dataclass(frozen=True, kw_only=True)
class CutRequest:
    """What a cut is made for."""

    rows: int
    shape: tuple[int, ...]
    dtype: np.dtype
    block_rows: int
    """Source rows that are read together or not at all; 1 where each can be read by itself."""
    source_chunk: tuple[int, ...]
    """The part of a row that a chunk of the source holds; empty where there are none."""
    chunk_rows: int | None
    """As the caller wants it; None for as many as make 1 MiB of the largest field."""
    largest_row_bytes: int = 0
    """Of the fields that are written together: samples of all are then in chunks of as many rows. 0: of this one."""
    shard_bytes: int
    least_read_bytes: int = LEAST_READ_BYTES
    least_run_bytes: int = 0
    """Parts of a row must have this much of it in one piece."""


Overhead = Callable[[tuple[int, ...], int, int], int]
"""(box, rows per read, rows per chunk) -> what a task holds besides the values of a read."""


def cut_field(request: CutRequest, room_bytes: int, overhead: Overhead) -> Cut:
    """The cut whose tasks hold at most ``room_bytes`` each; the fewest pieces of a row that do."""
    least, row_bytes = 0, request.dtype.itemsize * min(request.block_rows, request.rows)
    for box in boxes(request.shape, request.source_chunk):
        if box != request.shape and _is_too_small(request, box, row_bytes):
            continue
        cut = _with_box(request, box, room_bytes, overhead)
        if cut.need_bytes <= room_bytes:
            return cut
        least = min(least, cut.need_bytes) if least else cut.need_bytes
    raise TooLittle(least)


def _is_too_small(request: CutRequest, box: tuple[int, ...], row_bytes: int) -> bool:
    run_bytes = run_values(request.shape, box) * request.dtype.itemsize
    return prod(box) * row_bytes < request.least_read_bytes or run_bytes < request.least_run_bytes


def run_values(shape: tuple[int, ...], box: tuple[int, ...]) -> int:
    """How many values of a part of a row lie together in the row."""
    axis = len(shape) - 1
    while axis > 0 and box[axis] == shape[axis]:
        axis -= 1
    return prod(box[axis:])


class TooLittle(Exception):  # caught where all that is needed is known, and reported there
    """No cut fits; the smallest would need so many bytes."""

    def __init__(self, need_bytes: int) -> None:
        super().__init__(need_bytes)
        self.need_bytes = need_bytes


def boxes(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Parts of a row, from all of it to the smallest: each cuts one axis further, by whole chunks first.

    Axes before the one that is cut have the extent of a chunk, so that each chunk lies in one part.
    """
    chunk = chunk if len(chunk) == len(shape) else (1,) * len(shape)
    chunk = tuple(min(c, n) for c, n in zip(chunk, shape, strict=True))
    yield shape
    for axis, n in enumerate(shape):
        pieces = 2
        while (step := -(-n // pieces)) >= chunk[axis]:
            step = -(-step // chunk[axis]) * chunk[axis]
            yield (*chunk[:axis], step, *shape[axis + 1 :])
            if step == chunk[axis]:
                break
            pieces = max(pieces + 1, -(-n // step) + 1, pieces * 9 // 8)
    for axis, n in enumerate(chunk):  # cutting through chunks reads them more than once, and is better than nothing
        step = n
        while step > 1:
            step = -(-step // 2)
            yield (*(1,) * axis, step, *chunk[axis + 1 :])


def _with_box(request: CutRequest, box: tuple[int, ...], room_bytes: int, overhead: Overhead) -> Cut:
    row_bytes = max(1, request.largest_row_bytes, prod(request.shape) * request.dtype.itemsize)
    box_bytes = max(1, prod(box) * request.dtype.itemsize)
    chunk_rows = request.chunk_rows or max(1, min(CHUNK_BYTES, request.shard_bytes) // row_bytes)
    chunk_rows = min(chunk_rows, request.rows)
    block = min(request.block_rows, request.rows)
    if block > 1 and request.chunk_rows is None:
        chunk_rows = largest_divisor(block, chunk_rows) if chunk_rows < block else chunk_rows // block * block
    step = block * chunk_rows // np.gcd(block, chunk_rows)
    spare = min(room_bytes - overhead(box, int(step), chunk_rows), READ_BYTES, request.shard_bytes)
    most = -(-request.rows // step)
    least_rows = min(LEAST_READ_ROWS, min(request.least_read_bytes, request.shard_bytes) // box_bytes)
    least = max(1, min(least_rows // step, most))
    times = max(least, min(spare // (step * box_bytes), most))
    while times > least and _need(box_bytes, int(times * step), chunk_rows, box, overhead) > room_bytes:
        times = max(least, times // 2)
    read_rows = int(times * step)
    shard_rows = read_rows * max(1, min(request.shard_bytes // (read_rows * box_bytes), -(-request.rows // read_rows)))
    return Cut(
        rows=request.rows, shape=request.shape, dtype=request.dtype, box=box,
        chunk_rows=chunk_rows, read_rows=read_rows, shard_rows=shard_rows,
        need_bytes=_need(box_bytes, read_rows, chunk_rows, box, overhead),
    )  # fmt: skip


def _need(box_bytes: int, read_rows: int, chunk_rows: int, box: tuple[int, ...], overhead: Overhead) -> int:
    return read_rows * box_bytes + overhead(box, read_rows, chunk_rows)


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of ``number`` that is at most ``most``."""
    return next(each for each in range(min(number, max(1, most)), 0, -1) if number % each == 0)
