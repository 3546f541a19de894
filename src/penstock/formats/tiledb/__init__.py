"""Dense TileDB arrays: rows along one dimension, attributes as fields, read by TileDB's own library.

Rules:
1. An array is read as of the time when it was opened. TileDB stores the time of each write; later writes are ignored.
2. Rows are those between the first and the last that were written. Cells that were never written are an error, unless
   ``allow_fill`` is set.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.base import counters
from penstock.base.dataclass import dataclass
from penstock.base.file_id import FileId
from penstock.base.sizes import MiB
from penstock.dataset import sliced
from penstock.dataset.sliced import SlicedStore
from penstock.dataset.store import Store, digest
from penstock.errors import ConfigError, Corrupt, Missing, PenstockError, SchemaMismatch, Unavailable
from penstock.files.files import files_below
from penstock.files.handles import identify, is_there
from penstock.formats.tiledb.library import (
    TILES_BYTES,
    OpenArray,
    context,
    count_query,
    explain,
    library,
    library_errors,
)
from penstock.formats.tiledb.records import check_records
from penstock.read import coalesce

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions

FIELD = "data"
"""What an attribute without a name is called."""

# Measured: the library holds each tile as stored and as decoded.
TILE_COPIES = 2

# Measured: what a read takes besides its tiles, and what a context keeps.
LIBRARY_BYTES = 7 * MiB

CHECKSUMS = {"ChecksumSHA256Filter": "sha256", "ChecksumMD5Filter": "md5"}

# Cells that were never written are not searched for beyond this many boxes, nor counted beyond this many tiles.
MOST_CELLS_COMPARED = 1_000_000


def is_array(path: str) -> bool:
    """Whether a folder is a TileDB array."""
    return os.path.isdir(os.path.join(path, "__schema")) or os.path.isfile(os.path.join(path, "__array_schema.tdb"))


def open_folder(path: str, options: "OpenOptions") -> Store:
    """The rows of one dense array."""
    errors = library_errors()
    _check_path(path)
    for each in files_below(path):  # the library would open a pipe, and wait
        is_there(each)
    check_records(path)
    try:
        return _open(path, options)
    except PenstockError:
        raise
    except errors as error:
        text = f"TileDB cannot make sense of it ({type(error).__name__}: {error}); restore it, or leave it out"
        raise explain(path, error, text) from error


def _check_path(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{path!r}: TileDB opens only paths that are valid UTF-8; rename the folder") from None
    try:
        os.getcwd()
    except OSError:
        raise Unavailable(
            f"{path}: TileDB needs a current folder, and that of this process was removed; change to another"
        ) from None


def _open(path: str, options: "OpenOptions") -> Store:
    opened = OpenArray(os.path.abspath(path), int(time.time() * 1000))
    with opened.lend() as array:
        schema, written = array.schema, array.nonempty_domain()
        fragments = library().array_fragments(opened.path, ctx=context())
    if schema.sparse:
        raise SchemaMismatch(f"{path}: a sparse TileDB array; expected a dense one: copy it into one")
    if written is None:
        raise Missing(f"{path}: nothing was ever written to this TileDB array")
    attributes = _choose_attributes(path, schema, options)
    layouts = {name: _make_layout(path, schema, written, name, options.row_axis_of(name)) for name in attributes}
    lengths = {name: each.shape[each.row_axis] for name, each in layouts.items()}
    if len(set(lengths.values())) > 1:
        raise SchemaMismatch(f"{path}: fields must have the same number of rows, but have {lengths}")
    for name, layout in layouts.items():
        holes = _find_holes(path, fragments.nonempty_domain, layout, allowed=options.allow_fill)
        layouts[name] = replace(layout, holes=holes)
    named = sorted(os.path.basename(uri.rstrip("/")) for uri in fragments.uri)
    return TileDBStore(
        options.files.mark_compared(identify(path)), next(iter(lengths.values())), layouts, opened, digest(*named)
    )


def _choose_attributes(path: str, schema: Any, options: "OpenOptions") -> Sequence[str]:
    there = [schema.attr(number) for number in range(schema.nattr)]
    known = [each.name or FIELD for each in there if not _why_not(each)]
    shown = ", ".join(f"{each.name or FIELD!r} ({each.dtype})" for each in there)
    for name in options.fields or ():
        if name not in known:
            raise Missing(f"{path}: no attribute {name!r} of numbers; the array has {shown}")
    if not known:
        raise SchemaMismatch(f"{path}: no attribute with one number per cell; the array has {shown}")
    if options.fields is None:
        for each in there:
            if why := _why_not(each):
                options.leave_out(each.name or FIELD, why)
    return options.fields or known


def _why_not(attribute: Any) -> str:
    """Why an attribute cannot be a field; empty if it can."""
    if attribute.dtype.kind in "SUO":
        return "text, or of variable length"
    if attribute.isvar:
        return f"of variable length ({attribute.dtype} each)"
    if attribute.isnullable:
        return f"{attribute.dtype} that may be null"
    return "" if attribute.dtype.kind in "biufc" else f"{attribute.dtype}, no numbers"


@dataclass(frozen=True)
class TileDBLayout(sliced.Layout):
    """One attribute, read by TileDB; ``chunks`` are tiles."""

    begins: tuple[int, ...] = ()
    """The first coordinate of each dimension; for rows, the first that was written."""
    attribute: str = ""
    unaligned: int = 0
    """Rows of the first tile that come before the first written row."""
    fill: str = ""
    """The fill value, as text."""

    @property
    def how(self) -> str:
        return "read by TileDB"

    @property
    def remedy(self) -> str:
        return "a copy whose tiles are one row long"

    @property
    def group(self) -> int:
        """Whole tiles, so that none is decoded twice."""
        rows = max(1, sliced.READ_BYTES // max(1, self.read_bytes))
        return -(-rows // self.chunk_rows) * self.chunk_rows

    @property
    def library_bytes(self) -> int:
        assert self.chunks is not None
        read = [*self.read_shape]
        read.insert(self.row_axis, min(self.group, self.shape[self.row_axis]))
        along = zip(self.shape, read, self.chunks, strict=True)
        touched = prod(part if step == 1 else min(-(-size // step), -(-part // step)) + 1 for size, part, step in along)
        return TILE_COPIES * min(touched * self.chunk_bytes, TILES_BYTES + 2 * self.chunk_bytes) + LIBRARY_BYTES


def _make_layout(path: str, schema: Any, written: Sequence[tuple[int, int]], name: str, row_axis: int) -> TileDBLayout:
    dimensions = [schema.domain.dim(number) for number in range(schema.domain.ndim)]
    if any(each.dtype.kind not in "iu" for each in dimensions):
        shown = ", ".join(f"{each.name} ({each.dtype})" for each in dimensions)
        raise SchemaMismatch(f"{path}: dimensions {shown}; expected whole numbers")
    if not -len(dimensions) <= row_axis < len(dimensions):
        raise ConfigError(f"{path}: row_axis={row_axis}, but the array has {len(dimensions)} dimensions")
    axis = row_axis % len(dimensions)
    ranges = [written[axis] if number == axis else each.domain for number, each in enumerate(dimensions)]
    shape = tuple(int(last) - int(first) + 1 for first, last in ranges)
    tiles = tuple(min(int(each.tile), size) for each, size in zip(dimensions, shape, strict=True))
    unaligned = (int(written[axis][0]) - int(dimensions[axis].domain[0])) % int(dimensions[axis].tile)
    attribute = schema.attr("" if name == FIELD and not schema.has_attr(FIELD) else name)
    return TileDBLayout(
        attribute.dtype, shape, tiles, axis, "", begins=tuple(int(first) for first, _ in ranges),
        attribute=attribute.name, unaligned=unaligned, fill=str(attribute.fill), checked_by=_find_checksum(attribute),
    )  # fmt: skip


def _find_checksum(attribute: Any) -> str:
    """The checksum that the library verifies for each tile, if any."""
    kinds = {type(each).__name__ for each in attribute.filters}
    return next((name for kind, name in CHECKSUMS.items() if kind in kinds), "")


def _find_holes(
    path: str, boxes: Sequence[Sequence[tuple[int, int]]], layout: TileDBLayout, *, allowed: bool
) -> dict[int, int]:
    """Rows of tiles with cells that no fragment wrote, found on the grid of all fragment edges.

    Such cells are an error unless ``allowed``.
    """
    ends = [begin + size for begin, size in zip(layout.begins, layout.shape, strict=True)]
    edges = [
        sorted({begin, end, *(int(each) + side for box in boxes for side, each in enumerate(box[axis])
                              if begin < int(each) + side < end)})
        for axis, (begin, end) in enumerate(zip(layout.begins, ends, strict=True))
    ]  # fmt: skip
    if prod(len(each) - 1 for each in edges) > MOST_CELLS_COMPARED:
        return {}
    there = np.zeros([len(each) - 1 for each in edges], bool)
    for box in boxes:
        along = zip(edges, box, strict=True)
        there[tuple(slice(*np.searchsorted(edge, [int(low), int(high) + 1])) for edge, (low, high) in along)] = True
    if not there.all() and not allowed:
        at = np.unravel_index(int(np.argmin(there)), there.shape)
        first = tuple(int(edge[index]) for edge, index in zip(edges, at, strict=True))
        raise Missing(
            f"{path}: cells from {first} on were never written, and would read as the fill value {layout.fill}. Pass "
            f"allow_fill=True to accept that: what is filled is then counted"
        )
    axis = layout.row_axis
    others = tuple(number for number in range(there.ndim) if number != axis)
    begin, rows = layout.begins[axis], edges[axis]
    if layout.shape[axis] // layout.chunk_rows > MOST_CELLS_COMPARED:
        return {}
    return {
        block: 1
        for number in np.flatnonzero(~there.all(axis=others)).tolist()
        for block in range(
            (rows[number] - begin) // layout.chunk_rows, (rows[number + 1] - 1 - begin) // layout.chunk_rows + 1
        )
    }


class TileDBStore(SlicedStore):
    """Attributes of one dense array."""

    kind = "tiledb"
    layouts: dict[str, TileDBLayout]  # type: ignore[assignment]

    def __init__(
        self, file: FileId, rows: int, layouts: Mapping[str, sliced.Layout], array: OpenArray, written: str
    ) -> None:
        super().__init__(file, rows, layouts)
        self.array, self.written = array, written
        """The array, and a digest of what was written to it."""

    def with_layouts(self, layouts: Mapping[str, sliced.Layout]) -> "TileDBStore":
        return TileDBStore(self.file, self._rows, layouts, self.array, self.written)

    @property
    def blocks(self) -> np.ndarray | None:
        layout = max(self.layouts.values(), key=lambda each: each.chunk_rows)
        if layout.chunk_rows == 1:
            return None
        edges = np.arange(-layout.unaligned, self._rows, layout.chunk_rows)
        return np.maximum(edges[edges > -layout.chunk_rows], 0)

    @property
    def fingerprint(self) -> str:
        return digest(self.kind, self.written, *self.describe_layouts())

    @contextmanager
    def opened(self, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        with self.array.lend() as array:
            yield {name: (array, self.layouts[name]) for name in names}

    def _read_field(self, array: Any, name: str, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        layout = self.layouts[name]
        if layout.chunk_rows > 1 or layout.row_axis or layout.part is not None:
            super()._read_field(array, name, rows, at, target)
            return
        runs = coalesce.limit_runs(coalesce.merge_neighbours(rows, at), layout.group)
        for first, place, count in runs:  # straight into place
            where = f"{self.file.path}: {name}, rows {first} to {first + count - 1}"
            wanted = (slice(first, first + count), *layout.bounds)
            self.read_slice(array, wanted, target[place : place + count], where)
            layout.count_filled(first, count)

    def read_slice(self, array: Any, wanted: tuple[slice, ...], goal: np.ndarray, where: str) -> None:
        tiledb_array, layout = array
        native, ctx = library().libtiledb, tiledb_array.ctx
        count_query()
        counters.mine().bytes_read += goal.nbytes
        flat = goal.reshape(-1)
        parts = 2 if flat.dtype.kind == "c" else 1
        try:
            query = native.Query(ctx, native.Array(ctx, tiledb_array))
            query.layout = native.LayoutType.ROW_MAJOR
            region = library().Subarray(tiledb_array, ctx)
            along = zip(wanted, layout.begins, strict=True)
            region.add_ranges([[(each.start + begin, each.stop + begin - 1)] for each, begin in along])
            query.set_subarray(region)
            query.set_data_buffer(layout.attribute, flat, flat.size * parts)
            query._submit()
            status = query.query_status()
        except library_errors() as error:
            text = (
                f"{error}. The array is damaged there, or some of it was removed after it was opened: "
                f'restore it, open it again, or leave those rows out with select or on_error="skip"'
            )
            raise explain(where, error, text) from error
        if status != native.QueryStatus.COMPLETE:
            raise Corrupt(f"{where}: TileDB returned only a part ({status}); restore the array")

    def close(self) -> None:
        self.array.close()
