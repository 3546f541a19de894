"""Where the rows of an HDF5 dataset lie, as far as that can be told without h5py's help in reading them."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import codecs, index
from penstock.errors import LimitExceeded, Missing, Truncated
from penstock.extents import NEVER_WRITTEN, Chunks, ChunkTable, CodecId, Contiguous, Extents, FileId, KnownTable
from penstock.formats import hdf5_btree
from penstock.formats.hdf5_btree import NotUnderstood
from penstock.machine import free_bytes
from penstock.sizes import KiB, format_size

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions

# HDF5's registered numbers for the filters understood here.
FILTERS = {
    1: "deflate", 2: "shuffle", 3: "fletcher32",
    32000: "lzf", 32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32015: "zstd",
}  # fmt: skip

# What bitshuffle compresses with, by the fifth of its parameters.
BITSHUFFLE = {2: "bitshuffle-lz4", 3: "bitshuffle-zstd"}

# Chunks handed over at a time by the walk through a file's chunk index: few enough that the interpreter does not
# begin to look for garbage among them.
WALK_PIECE = 256

MISREPORTED = "HDF5 can misreport where its chunks lie, having one unlimited axis that is not the first"

# Rows that lie on an inner axis of a contiguous dataset are read in runs of about so much.
TURNED_BYTES = 16 * KiB

# Fewer chunks than this fit in any memory.
MANY_CHUNKS = 1_000_000
# What an entry of the table takes while it is made: twice its place and its length.
ENTRY_BYTES = 24


@dataclass(frozen=True)
class Found:
    """A dataset of an open file, with the shape it had when it was first looked at: the file may be growing."""

    file: FileId
    name: str
    dataset: Any
    shape: tuple[int, ...]
    axis: int
    """That of the rows."""

    @property
    def rows(self) -> int:
        return self.shape[self.axis]

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks along each axis."""
        return tuple(-(-size // step) for size, step in zip(self.shape, self.dataset.chunks, strict=True))

    @property
    def filters(self) -> list[tuple[int, tuple[int, ...], str]]:
        """Number, parameters and name of each."""
        plist = self.dataset.id.get_create_plist()
        found = [plist.get_filter(position) for position in range(plist.get_nfilters())]
        return [(number, parameters, label.decode(errors="replace")) for number, _, parameters, label in found]

    @property
    def remedy(self) -> str:
        """What rewrites it with one row a chunk."""
        whole = "x".join(str(1 if axis == self.axis else size) for axis, size in enumerate(self.shape))
        return f"h5repack -l {self.name}:CHUNK={whole} OLD NEW"

    def holes(self) -> dict[int, int]:
        """Chunks that were never written, by block of rows; not counted where there are more than a million blocks."""
        if self.grid[self.axis] > MANY_CHUNKS:
            return {}
        written: Counter[int] = Counter()
        step = self.dataset.chunks[self.axis]
        self.dataset.id.chunk_iter(lambda chunk: written.update((chunk.chunk_offset[self.axis] // step,)))
        across = prod(self.grid) // self.grid[self.axis]
        blocks = range(self.grid[self.axis])
        return {block: across - written[block] for block in blocks if written[block] < across}

    def never_written(self, there: str) -> Missing:
        """The error for a dataset of which only some is there."""
        return Missing(
            f"{self.file.path}: dataset {self.name!r} was never written in full ({there} there); the rest would read "
            f"as the fill value {self.dataset.fillvalue}. Pass allow_fill=True to accept that"
        )


def extents(found: Found, options: "OpenOptions") -> Extents | str:
    """Where the rows lie, or why this reader cannot tell."""
    import h5py

    dataset, stored = found.dataset, found.dataset.dtype
    if not dataset.id.get_type().equal(h5py.h5t.py_create(stored, logical=True)):
        return f"its elements are not stored as numpy has {stored}"
    if dataset.is_virtual or dataset.external:
        return "its bytes lie in other files"
    if dataset.file.userblock_size:
        return "the file begins with a user block"
    if prod(found.shape) == 0:
        return "it is empty"
    if not dataset.chunks:
        offset = dataset.id.get_offset()
        if offset is None:
            return "it is stored inside the metadata, or was never written"
        if found.axis:
            return _turned(found, offset)
        return Contiguous(found.file, found.name, stored, found.shape[1:], found.rows, offset)
    known = _codecs(found)
    if isinstance(known, str):
        return known
    return _chunks(found, known, options) if _can_be_believed(found) else MISREPORTED


def _can_be_believed(found: Found) -> bool:
    """Whether the walk through the chunks tells where they lie.

    Datasets with one unlimited axis have an index of their own since HDF5 1.10, and for that the library reports wrong
    coordinates (seen up to 2.0.0), unless the axis is the first. Files of the old format do not have it, unless the
    dataset was added by a new program; in a dataset written in full, some wrong coordinates then lie outside of it,
    which the walk notices.
    """
    dataset = found.dataset
    if dataset.maxshape.count(None) != 1 or dataset.maxshape[0] is None:
        return True
    superblock = dataset.file.id.get_create_plist().get_version()[0]
    return bool(superblock < 2 and dataset.id.get_num_chunks() == prod(found.grid))


def _codecs(found: Found) -> tuple[CodecId, ...] | str:
    known: list[CodecId] = []
    for number, parameters, label in found.filters:
        if ("fletcher32", 0) in known:
            return "its checksum is not the outermost filter"
        codec: CodecId = (FILTERS.get(number, ""), 0)
        if number == 2:
            codec = ("shuffle", parameters[0] if parameters else found.dataset.dtype.itemsize)
        elif number == 32008 and len(parameters) > 4:
            codec = (BITSHUFFLE.get(parameters[4], ""), parameters[2])
        if not codec[0] or not codecs.available(codec):
            return f"filter {number} ({label}) has no decoder here"
        known.append(codec)
    return tuple(known)


def _chunks(found: Found, known: tuple[CodecId, ...], options: "OpenOptions") -> Chunks | str:
    file, dataset, axis = found.file, found.dataset, found.axis
    # A dataset of the same name can be seen along another axis, and a growing file has no table that lasts.
    saved_as = f"{found.name} along {axis}"
    folder = None if file.growing else options.index_folder
    table: ChunkTable | None = index.load(folder, file, saved_as) if folder else None
    if table is None:
        _check_grid(found, options)
        walked = walk(found)
        if walked is None:
            return MISREPORTED
        table = index.save(folder, file, saved_as, walked) if folder else walked
    array = Chunks(
        file, found.name, dataset.dtype, _without(found.shape, axis), found.rows, dataset.chunks[axis],
        _without(dataset.chunks, axis), table, known, axis,
        np.asarray(dataset.fillvalue, dataset.dtype).tobytes() if options.allow_fill else None,
        remedy=found.remedy, fill_told=str(dataset.fillvalue),
    )  # fmt: skip
    if options.on_error == "raise":
        _check_table(array, found)
    return array


def _check_grid(found: Found, options: "OpenOptions") -> None:
    """Refuse a table of more chunks than this machine can hold: a few bytes declare as many as they like."""
    chunks = prod(found.grid)
    if chunks <= MANY_CHUNKS:
        return
    there = found.dataset.id.get_num_chunks()
    if there < chunks and not options.allow_fill and options.on_error == "raise":
        raise found.never_written(f"{there:,} of {chunks:,} chunks are")
    if chunks * ENTRY_BYTES > (free := free_bytes()):
        raise LimitExceeded(
            f"{found.file.path}: dataset {found.name!r} of {found.shape} has {chunks:,} chunks of "
            f"{found.dataset.chunks}, and a table of them would take {format_size(chunks * ENTRY_BYTES)}, where "
            f"{format_size(free)} are free. Leave it out with fields=(…), or write it again in larger chunks"
        )


def _without(sizes: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*sizes[:axis], *sizes[axis + 1 :])


def walk(found: Found) -> KnownTable | None:
    """The whole chunk table, in one pass over the file's own index; None if that has chunks where there can be none."""
    if not found.file.growing and found.file.can_be_mapped:
        with suppress(NotUnderstood):
            return _by_nodes(found)
    return _one_by_one(found)


def _by_nodes(found: Found) -> KnownTable | None:
    """Without the library, where the index is of the usual kind."""
    import h5py

    columns = _Columns(found)
    low, high = h5py.h5g.get_objinfo(found.dataset.id, b".").objno  # h5o.get_info would walk through all chunks
    for piece in hdf5_btree.chunks(found.file, found.dataset, low | high << 32, found.grid):
        columns.put(piece["corner"].astype(np.int64), piece["place"], piece["size"], piece["mask"])
    return columns.table()


def _one_by_one(found: Found) -> KnownTable | None:
    """Through the library."""
    columns, waiting = _Columns(found), list[Any]()

    def take() -> None:
        corners, masks, places, sizes = zip(*waiting, strict=True)
        columns.put(np.asarray(corners), np.asarray(places), np.asarray(sizes), np.asarray(masks))
        waiting.clear()

    def visit(chunk: Any) -> None:
        waiting.append(chunk)
        if len(waiting) == WALK_PIECE:
            take()

    found.dataset.id.chunk_iter(visit)
    if waiting:
        take()
    return columns.table()


class _Columns:
    """A table that is being filled."""

    def __init__(self, found: Found) -> None:
        self.found, self.grid, self._steps = found, found.grid, found.dataset.chunks
        self.offsets = np.full(prod(self.grid), NEVER_WRITTEN, np.int64)
        self.lengths = np.zeros(prod(self.grid), np.uint32)
        self.skipped = np.zeros(0, np.uint32)
        self.outside = 0

    def put(self, corners: np.ndarray, places: np.ndarray, sizes: np.ndarray, masks: np.ndarray) -> None:
        """Some chunks: where each begins in the dataset and in the file, its length, and the filters it skipped."""
        # Axis by axis: numpy divides by one number several times faster than by one a column.
        along = [column // step for column, step in zip(corners.T, self._steps, strict=True)]
        if any(int(column.max()) >= size for column, size in zip(along, self.grid, strict=True)):
            inside = np.all([column < size for column, size in zip(along, self.grid, strict=True)], axis=0)
            self.outside += len(inside) - int(inside.sum())
            along = [column[inside] for column in along]
            places, sizes, masks = places[inside], sizes[inside], masks[inside]
        at = np.ravel_multi_index(tuple(along), self.grid)
        self.offsets[at], self.lengths[at] = places, sizes
        if masks.any():
            self.skipped = self.skipped if len(self.skipped) else np.zeros(len(self.offsets), np.uint32)
            self.skipped[at] = masks

    def table(self) -> KnownTable | None:
        """All that was put; None if some of it lies where nothing can."""
        if self.outside and not self.found.file.growing:  # where it may have chunks that came since it was looked at
            return None
        written = self.lengths[self.offsets != NEVER_WRITTEN]
        alike = len(written) and bool((written == written[0]).all())
        lengths = int(written[0]) if alike else self._turned(self.lengths)
        return KnownTable(
            self._turned(self.offsets), lengths, self._turned(self.skipped) if len(self.skipped) else None
        )

    def _turned(self, column: np.ndarray) -> np.ndarray:
        """Blocks of rows first."""
        axis = self.found.axis
        moved = np.moveaxis(column.reshape(self.grid), axis, 0)
        return np.ascontiguousarray(moved).reshape(self.grid[axis], -1)


def _check_table(array: Chunks, found: Found) -> None:
    """Refuse chunks that are not there, and name the first."""
    table = array.table
    if table.missing and array.fill is None:
        there = f"{prod(table.shape) - table.missing:,} of {prod(table.shape):,} chunks are"
        first = _first(array, lambda offsets, _: offsets == NEVER_WRITTEN)
        raise Missing(f"{found.never_written(there)}. The first that is not: {first}")
    if table.end > array.file.size and not array.file.growing:
        first = _first(array, lambda offsets, lengths: offsets + lengths > array.file.size)
        raise Truncated(
            f"{array.file.path}: {first} reaches beyond the file's end: chunks reach to byte {table.end:,}, but the "
            f"file has only {array.file.size:,}. It was cut short, perhaps by an unfinished download or copy: fetch it "
            f'again, or pass on_error="skip" to open and Loader to leave out what cannot be read'
        )


def _first(array: Chunks, bad: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> str:
    for block in range(array.table.shape[0]):
        offsets, lengths, _ = array.table.find(block, slice(None))
        found = np.flatnonzero(bad(offsets, lengths))
        if len(found):
            return array.piece_place(block, int(found[0]))
    return array.name


def _turned(found: Found, offset: int) -> Extents:
    """Contiguous, with rows on an inner axis: seen as chunks of some rows of one run of elements each."""
    rows, shape, stored = found.rows, _without(found.shape, found.axis), found.dataset.dtype
    outer, inner = shape[: found.axis], shape[found.axis :]
    run_bytes = prod(inner) * stored.itemsize
    most = max(1, min(rows, TURNED_BYTES // run_bytes))
    together = next(count for count in range(most, 0, -1) if rows % count == 0)
    runs = np.arange(prod(outer), dtype=np.int64) * rows
    blocks = np.arange(0, rows, together, dtype=np.int64)
    table = KnownTable(offset + (blocks[:, None] + runs) * run_bytes, together * run_bytes)
    chunk = (*(1,) * len(outer), *inner)
    return Chunks(
        found.file, found.name, stored, shape, rows, together, chunk, table, (), found.axis, remedy=found.remedy
    )
