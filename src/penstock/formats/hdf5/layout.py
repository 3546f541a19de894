"""Where the rows of an HDF5 dataset are in its file, or why only h5py can read them."""

from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.file_id import FileId
from penstock.base.machine import free_bytes
from penstock.base.sizes import KiB, MiB, format_size
from penstock.base.spec import without_axis
from penstock.errors import Corrupt, LimitExceeded, Missing
from penstock.formats.hdf5 import btree
from penstock.formats.hdf5.btree import IndexNotUnderstood
from penstock.formats.hdf5.description import check_table, make_array, never_written, repack_command, saved_as
from penstock.read import codecs, saved_chunks
from penstock.read.chunk_files import Grid
from penstock.read.extents import NEVER_WRITTEN, Chunks, ChunkTable, CodecId, Contiguous, Extents, KnownTable

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions

# Chunks per step of the walk through a chunk index: few enough that the garbage collector does not start.
WALK_PIECE = 256

MISREPORTED = "HDF5 can misreport where its chunks lie, having one unlimited axis that is not the first"

# If rows are on an inner axis of a contiguous dataset, they are read in runs of about this size.
TURNED_BYTES = 16 * KiB

# A table of fewer chunks fits into any memory.
MANY_CHUNKS = 1_000_000
# Bytes per entry while the table is made: offset and length, twice.
ENTRY_BYTES = 24
# The largest table that is accepted.
LARGEST_TABLE = 4096 * MiB


@dataclass(frozen=True)
class StoredDataset:
    """A dataset of an open file, with the shape that it had first: the file may be growing."""

    file: FileId
    name: str
    dataset: Any
    shape: tuple[int, ...]
    axis: int
    """The axis of the rows."""

    @property
    def rows(self) -> int:
        return self.shape[self.axis]

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks along each axis."""
        return tuple(-(-size // step) for size, step in zip(self.shape, self.dataset.chunks, strict=True))

    @property
    def header_at(self) -> int:
        """The offset of the dataset's object header."""
        import h5py

        low, high = h5py.h5g.get_objinfo(self.dataset.id, b".").objno  # h5o.get_info would walk through all chunks
        return int(low | high << 32)

    @property
    def filters(self) -> list[tuple[int, tuple[int, ...], str]]:
        """Number, parameters and name of each filter."""
        plist = self.dataset.id.get_create_plist()
        found = [plist.get_filter(position) for position in range(plist.get_nfilters())]
        return [(number, parameters, label.decode(errors="replace")) for number, _, parameters, label in found]

    @property
    def fill_value(self) -> Any:
        """What chunks that were never written read as."""
        return fill_value_of(self.dataset)

    @property
    def remedy(self) -> str:
        """A command that rewrites it with one row per chunk."""
        return repack_command(self.name, self.shape, self.axis)

    @property
    def can_be_misreported(self) -> bool:
        """Whether the library may report wrong places of its chunks."""
        unlimited = [axis for axis, size in enumerate(self.dataset.maxshape) if size is None]
        return len(unlimited) == 1 and unlimited != [0]

    def never_written(self, there: str) -> Missing:
        """The error for a dataset that was only partly written."""
        return never_written(self.file, self.name, there, self.fill_value)


def locate_rows(found: StoredDataset, options: "OpenOptions") -> Extents | str:
    """Where the rows are, or why only h5py can read them."""
    import h5py

    dataset, stored = found.dataset, found.dataset.dtype
    if not dataset.id.get_type().equal(h5py.h5t.py_create(stored, logical=True)):
        return f"its elements are not stored as numpy has {stored}"
    if dataset.is_virtual or dataset.external:
        return "its bytes are in other files"
    if dataset.file.userblock_size:
        return "the file begins with a user block"
    if prod(found.shape) == 0:
        return "it is empty"
    if not dataset.chunks:
        offset = dataset.id.get_offset()
        if offset is None:
            return "it is stored inside the metadata, or was never written"
        if found.axis:
            return _describe_turned(found, offset)
        return Contiguous(
            file=found.file, name=found.name, stored=stored, shape=found.shape[1:], rows=found.rows, offset=offset
        )
    known = _find_codecs(found)
    if isinstance(known, str):
        return known
    return _make_chunks(found, known, options) if _can_be_believed(found) else MISREPORTED


def _can_be_believed(found: StoredDataset) -> bool:
    """Whether the library reports the right coordinates of chunks.

    Since HDF5 1.10, datasets with one unlimited axis have another kind of index, for which the library reports wrong
    coordinates (seen up to 2.0.0) unless that axis is the first. Files of the old format do not have it, unless a newer
    program added the dataset; if it was written in full, some wrong coordinates are outside of its grid, which the walk
    detects.
    """
    dataset = found.dataset
    if not found.can_be_misreported:
        return True
    superblock = dataset.file.id.get_create_plist().get_version()[0]
    return bool(superblock < 2 and dataset.id.get_num_chunks() == prod(found.grid))


def _find_codecs(found: StoredDataset) -> tuple[CodecId, ...] | str:
    known: list[CodecId] = []
    for number, parameters, label in found.filters:
        if ("fletcher32", 0) in known:
            return "its checksum is not the outermost filter"
        codec: CodecId = (codecs.BY_HDF5_FILTER.get(number, ""), 0)
        if codec[0] == "shuffle":
            codec = ("shuffle", parameters[0] if parameters else found.dataset.dtype.itemsize)
        elif number == codecs.BITSHUFFLE_FILTER and len(parameters) > 4:
            codec = (codecs.BITSHUFFLE_COMPRESSORS.get(parameters[4], ""), parameters[2])
        if not codec[0] or not codecs.is_available(codec):
            return f"filter {number} ({label}) has no decoder here"
        known.append(codec)
    return tuple(known)


def _make_chunks(found: StoredDataset, known: tuple[CodecId, ...], options: "OpenOptions") -> Chunks | str:
    file, dataset, axis = found.file, found.dataset, found.axis
    folder = None if file.is_growing else options.index_folder  # the table of a growing file is not saved
    table: ChunkTable | None = saved_chunks.load(folder, file, saved_as(found.name, axis)) if folder else None
    about = {
        "stored": dataset.dtype.str, "shape": found.shape, "chunks": dataset.chunks, "codecs": known,
        "fill": np.asarray(found.fill_value, dataset.dtype).tobytes().hex(), "fill_text": str(found.fill_value),
    }  # fmt: skip
    if not isinstance(table, saved_chunks.SavedChunkTable) or not table.about:
        check_grid(found, options)
        walked = walk(found)
        if walked is None:
            return MISREPORTED
        least, name = options.files.policy.save_table_from_chunks, saved_as(found.name, axis)
        table = saved_chunks.save(folder, file, name, walked, from_chunks=least, about=about) if folder else walked
    return check_table(make_array(file, found.name, axis, about, table, options), options)


def find_holes(found: StoredDataset) -> dict[int, int]:
    """Chunks that were never written of a dataset that the library will read, by block of rows.

    The library takes a chunk that it does not find for one that was never written, so the whole index is read.
    """
    chunks = prod(found.grid)
    table = walk(found) if chunks * ENTRY_BYTES <= _largest_table() else None
    if table is not None:
        absent = (table.offsets == NEVER_WRITTEN).sum(axis=1)
        return {block: int(absent[block]) for block in np.flatnonzero(absent).tolist()}
    there = found.dataset.id.get_num_chunks()
    if there > chunks and not found.file.is_growing:
        raise Corrupt(
            f"{found.file.path}: dataset {found.name!r}: its chunk index has {there:,} chunks, and its grid of "
            f"{found.grid} has {chunks:,}. The file is damaged: fetch it again"
        )
    return {0: chunks - there} if there < chunks else {}  # the number is known, the places are not


def check_grid(found: StoredDataset, options: "OpenOptions") -> None:
    """Refuse a table of more chunks than this machine can hold: a few bytes can declare any number."""
    chunks = prod(found.grid)
    if chunks <= MANY_CHUNKS:
        return
    there = found.dataset.id.get_num_chunks()
    if there < chunks and not options.allow_fill and options.on_error == "raise":
        raise found.never_written(f"{there:,} of {chunks:,} chunks are")
    if chunks * ENTRY_BYTES > (free := _largest_table()):
        raise LimitExceeded(
            f"{found.file.path}: dataset {found.name!r} of {found.shape} has {chunks:,} chunks of "
            f"{found.dataset.chunks}, and a table of them would take {format_size(chunks * ENTRY_BYTES)}, where "
            f"{format_size(free)} are free or allowed. Leave it out with fields=(…), or write it again in larger chunks"
        )


def _largest_table() -> int:
    return min(free_bytes(), LARGEST_TABLE)


def walk(found: StoredDataset) -> KnownTable | None:
    """The whole chunk table, in one pass over the file's own index; None if the library reports it wrongly."""
    if not found.file.is_growing and found.file.can_be_mapped and not found.dataset.file.userblock_size:
        with suppress(IndexNotUnderstood):
            return _walk_nodes(found)
    if found.file.is_growing and found.can_be_misreported:  # a wrong place looks like a chunk that came later
        return None
    try:
        return _walk_chunks(found)
    except Corrupt:
        if found.can_be_misreported:
            return None
        raise


def _walk_nodes(found: StoredDataset) -> KnownTable:
    """Without the library, if the index is a version 1 B-tree."""
    columns = _ChunkColumns(found)
    for piece in btree.read_chunks(found.file, found.dataset, found.header_at, found.grid):
        columns.put(piece["corner"].astype(np.int64), piece["place"], piece["size"], piece["mask"])
    return columns.table()


def _walk_chunks(found: StoredDataset) -> KnownTable:
    """Through the library."""
    columns, waiting = _ChunkColumns(found), list[Any]()

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


class _ChunkColumns:
    """A chunk table under construction."""

    def __init__(self, found: StoredDataset) -> None:
        self.found, self.grid, self._steps = found, found.grid, found.dataset.chunks
        self.offsets = np.full(prod(self.grid), NEVER_WRITTEN, np.int64)
        self.lengths = np.zeros(prod(self.grid), np.uint32)
        self.skipped = np.zeros(0, np.uint32)

    def put(self, corners: np.ndarray, places: np.ndarray, sizes: np.ndarray, masks: np.ndarray) -> None:
        """Add chunks: where each begins in the dataset and in the file, its length, and the filters it skipped."""
        # Axis by axis: numpy divides by one number several times faster than by one per column.
        along = [column // step for column, step in zip(corners.T, self._steps, strict=True)]
        inside = np.ones(len(corners), bool)
        for column, size in zip(along, self.grid, strict=True):
            inside &= (column >= 0) & (column < size)
        if self.found.file.is_growing:  # chunks may have been added since the shape was read
            along = [column[inside] for column in along]
            places, sizes, masks = places[inside], sizes[inside], masks[inside]
        else:
            aligned = (corners == np.stack(along, axis=1) * self._steps).all(axis=1)
            self._check(inside & aligned, corners, places, f"outside its grid of {self.grid} chunks of {self._steps}")
        at = np.ravel_multi_index(tuple(along), self.grid)
        if not self.found.file.is_growing:
            new = np.zeros(len(at), bool)
            new[np.unique(at, return_index=True)[1]] = True
            self._check(new & (self.offsets[at] == NEVER_WRITTEN), corners, places, "a second time")
        self.offsets[at], self.lengths[at] = places, sizes
        if masks.any():
            self.skipped = self.skipped if len(self.skipped) else np.zeros(len(self.offsets), np.uint32)
            self.skipped[at] = masks

    def _check(self, good: np.ndarray, corners: np.ndarray, places: np.ndarray, what: str) -> None:
        if not good.all():
            first = int(good.argmin())
            raise Corrupt(
                f"{self.found.file.path}: dataset {self.found.name!r}: its chunk index has a chunk at "
                f"{tuple(corners[first].tolist())} {what} (its bytes are said to begin at offset "
                f"{int(places[first]):,}). The file is damaged: fetch it again"
            )

    def _check_apart(self) -> None:
        """Refuse chunks that overlap in the file."""
        order = np.argsort(self.offsets, kind="stable")
        order = order[self.offsets[order] != NEVER_WRITTEN]
        ends = self.offsets[order] + self.lengths[order]
        both = np.flatnonzero(ends[:-1] > self.offsets[order[1:]])
        if len(both):
            first, second = (np.unravel_index(order[both[0] + each], self.grid) for each in (0, 1))
            raise Corrupt(
                f"{self.found.file.path}: dataset {self.found.name!r}: chunks number {tuple(map(int, first))} and "
                f"{tuple(map(int, second))} of its grid overlap at offset "
                f"{int(self.offsets[order[both[0] + 1]]):,}. The file is damaged: fetch it again"
            )

    def table(self) -> KnownTable:
        """The table of all chunks that were added."""
        if not self.found.file.is_growing:
            self._check_apart()
        written = self.lengths[self.offsets != NEVER_WRITTEN]
        alike = len(written) and bool((written == written[0]).all())
        by_block = Grid(self.grid, self.found.axis).by_block
        lengths = int(written[0]) if alike else by_block(self.lengths)
        return KnownTable(by_block(self.offsets), lengths, by_block(self.skipped) if len(self.skipped) else None)


def _describe_turned(found: StoredDataset, offset: int) -> Extents:
    """A contiguous dataset with rows on an inner axis, described as chunks: some rows of one run of elements each."""
    rows, shape, stored = found.rows, without_axis(found.shape, found.axis), found.dataset.dtype
    outer, inner = shape[: found.axis], shape[found.axis :]
    run_bytes = prod(inner) * stored.itemsize
    most = max(1, min(rows, TURNED_BYTES // run_bytes))
    together = next(count for count in range(most, 0, -1) if rows % count == 0)
    runs = np.arange(prod(outer), dtype=np.int64) * rows
    blocks = np.arange(0, rows, together, dtype=np.int64)
    table = KnownTable(offset + (blocks[:, None] + runs) * run_bytes, together * run_bytes)
    chunk = (*(1,) * len(outer), *inner)
    return Chunks(
        file=found.file, name=found.name, stored=stored, shape=shape, rows=rows, rows_per_chunk=together, chunk=chunk,
        table=table, row_axis=found.axis, remedy=found.remedy,
    )  # fmt: skip


def fill_value_of(dataset: Any) -> Any:
    """The value that missing chunks read as."""
    dataset.id.get_create_plist().fill_value_defined()  # raises where a damaged one makes the library crash
    return dataset.fillvalue
