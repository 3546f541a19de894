"""Dense TileDB arrays: rows along one dimension, attributes as fields, read by TileDB's own library.

Rules:
1. The library's threads and memory are ours to bound: one context a process, without threads of its own beyond the
   least, with a limit on the tiles it holds at once. A context keeps something of every query for as long as it lives
   (measured: 12 KB), so that after some hundreds of them another takes its place.
2. Contexts and open arrays never cross a fork: their threads do not, and ending them would wait for those. A child
   leaves what it inherited alone for good, and opens its own.
3. An array is read as it was when it was opened. TileDB keeps what was written with its time, and later writes are not
   looked at.
4. Rows are those between the first and the last that were written; cells that nobody wrote are refused, unless
   ``allow_fill`` says otherwise.
"""

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import coalesce, tally
from penstock.errors import ConfigError, Corrupt, Missing, PenstockError, SchemaMismatch
from penstock.extents import FileId
from penstock.formats import sliced
from penstock.formats.sliced import SlicedStore
from penstock.handles import identify
from penstock.sizes import MiB
from penstock.store import Store, digest

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions

FIELD = "data"
"""What an attribute without a name is called."""

# Tiles that the library takes up together; a larger one is taken up by itself. Measured: it holds each as stored and
# as decoded, and one more than these.
TILES_BYTES = 8 * MiB
TILE_COPIES = 2

# Queries of one context: what it keeps of them is 3 MiB then.
MOST_QUERIES = 256

# Measured: what a read takes besides its tiles, and what a context keeps.
LIBRARY_BYTES = 7 * MiB

DAMAGED = (RuntimeError, ValueError, TypeError, KeyError, IndexError, OverflowError)
"""What its Python face raises, besides its own error, when names and numbers in the files are not what they can be."""

CHECKSUMS = {"ChecksumSHA256Filter": "sha256", "ChecksumMD5Filter": "md5"}

# More boxes than this are not compared cell by cell to find what was never written, and more tiles not counted.
MOST_CELLS_COMPARED = 1_000_000


def is_array(path: str) -> bool:
    """Whether a folder is a TileDB array."""
    return os.path.isdir(os.path.join(path, "__schema")) or os.path.isfile(os.path.join(path, "__array_schema.tdb"))


def open_folder(path: str, options: "OpenOptions") -> Store:
    """The rows of one dense array."""
    library = _library()
    try:
        return _opened(path, options)
    except PenstockError:
        raise
    except (library.TileDBError, *DAMAGED) as error:
        raise Corrupt(
            f"{path}: TileDB cannot make sense of it ({type(error).__name__}: {error}); restore it, or leave it out"
        ) from error


def _opened(path: str, options: "OpenOptions") -> Store:
    library = _library()
    opened = Opened(os.path.abspath(path), int(time.time() * 1000))
    with opened.lend() as array:
        schema, written = array.schema, array.nonempty_domain()
        fragments = library.array_fragments(opened.path, ctx=_context())
    if schema.sparse:
        raise SchemaMismatch(f"{path}: a sparse TileDB array; rows are read from dense ones: copy it into one")
    if written is None:
        raise Missing(f"{path}: a TileDB array that nothing was ever written to")
    attributes = _attributes(path, schema, options)
    layouts = {name: _layout(path, schema, written, name, options.row_axis_of(name)) for name in attributes}
    lengths = {name: each.shape[each.row_axis] for name, each in layouts.items()}
    if len(set(lengths.values())) > 1:
        raise SchemaMismatch(f"{path}: fields must have as many rows as each other, but have {lengths}")
    for name, layout in layouts.items():
        holes = _holes(path, fragments.nonempty_domain, layout, allowed=options.allow_fill)
        layouts[name] = replace(layout, holes=holes)
    named = sorted(os.path.basename(uri.rstrip("/")) for uri in fragments.uri)
    return TileDBStore(
        options.files.marked(identify(path)), next(iter(lengths.values())), layouts, opened, digest(*named)
    )


def _attributes(path: str, schema: Any, options: "OpenOptions") -> Sequence[str]:
    there = [schema.attr(number) for number in range(schema.nattr)]
    known = [each.name or FIELD for each in there if _is_plain(each)]
    told = ", ".join(f"{each.name or FIELD!r} ({each.dtype})" for each in there)
    for name in options.fields or ():
        if name not in known:
            raise Missing(f"{path}: no attribute {name!r} of numbers; the array has {told}")
    if not known:
        raise SchemaMismatch(f"{path}: no attribute of numbers, one a cell; the array has {told}")
    return options.fields or known


def _is_plain(attribute: Any) -> bool:
    return not attribute.isvar and not attribute.isnullable and attribute.dtype.kind in "biufc"


@dataclass(frozen=True)
class Layout(sliced.Layout):
    """What reading one attribute through TileDB takes; ``chunks`` are tiles."""

    begins: tuple[int, ...] = ()
    """Where each dimension begins: rows with the first that was written."""
    attribute: str = ""
    unaligned: int = 0
    """Rows of the first tile that come before the first that was written."""
    fill: str = ""
    """The fill value, in words."""

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


def _layout(path: str, schema: Any, written: Sequence[tuple[int, int]], name: str, row_axis: int) -> Layout:
    dimensions = [schema.domain.dim(number) for number in range(schema.domain.ndim)]
    if any(each.dtype.kind not in "iu" for each in dimensions):
        told = ", ".join(f"{each.name} ({each.dtype})" for each in dimensions)
        raise SchemaMismatch(f"{path}: dimensions {told}; expected whole numbers")
    if not -len(dimensions) <= row_axis < len(dimensions):
        raise ConfigError(f"{path}: row_axis={row_axis}, but the array has {len(dimensions)} dimensions")
    axis = row_axis % len(dimensions)
    ranges = [written[axis] if number == axis else each.domain for number, each in enumerate(dimensions)]
    shape = tuple(int(last) - int(first) + 1 for first, last in ranges)
    tiles = tuple(min(int(each.tile), size) for each, size in zip(dimensions, shape, strict=True))
    unaligned = (int(written[axis][0]) - int(dimensions[axis].domain[0])) % int(dimensions[axis].tile)
    attribute = schema.attr("" if name == FIELD and not schema.has_attr(FIELD) else name)
    return Layout(
        attribute.dtype, shape, tiles, axis, "", begins=tuple(int(first) for first, _ in ranges),
        attribute=attribute.name, unaligned=unaligned, fill=str(attribute.fill), checked_by=_checksum(attribute),
    )  # fmt: skip


def _checksum(attribute: Any) -> str:
    """What the library holds each tile against, if anything."""
    kinds = {type(each).__name__ for each in attribute.filters}
    return next((name for kind, name in CHECKSUMS.items() if kind in kinds), "")


def _holes(path: str, boxes: Sequence[Sequence[tuple[int, int]]], layout: Layout, *, allowed: bool) -> dict[int, int]:
    """Rows of tiles with cells that no fragment wrote, compared on the grid that the edges of fragments make.

    An error where that is not ``allowed``.
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
    layouts: dict[str, Layout]  # type: ignore[assignment]

    def __init__(
        self, file: FileId, rows: int, layouts: Mapping[str, sliced.Layout], array: "Opened", written: str
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
        parts = sorted((name, each.part.describe()) for name, each in self.layouts.items() if each.part)
        layouts = sorted((name, str(each.stored), each.shape, each.row_axis) for name, each in self.layouts.items())
        return digest(self.kind, self.written, layouts, parts)

    @contextmanager
    def opened(self, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        with self.array.lend() as array:
            yield {name: (array, self.layouts[name]) for name in names}

    def _read_field(self, array: Any, name: str, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        layout = self.layouts[name]
        if layout.chunk_rows > 1 or layout.row_axis or layout.part is not None:
            super()._read_field(array, name, rows, at, target)
            return
        for first, place, count in coalesce.limited(coalesce.neighbours(rows, at), layout.group):  # straight into place
            where = f"{self.file.path}: {name}, rows {first} to {first + count - 1}"
            wanted = (slice(first, first + count), *layout.bounds)
            self.read_slice(array, wanted, target[place : place + count], where)
            layout.count_filled(first, count)

    def read_slice(self, array: Any, wanted: tuple[slice, ...], goal: np.ndarray, where: str) -> None:
        library = _library()
        tiledb_array, layout = array
        native, context = library.libtiledb, tiledb_array.ctx
        _count_query()
        tally.mine().bytes_read += goal.nbytes
        flat = goal.reshape(-1)
        parts = 2 if flat.dtype.kind == "c" else 1
        try:
            query = native.Query(context, native.Array(context, tiledb_array))
            query.layout = native.LayoutType.ROW_MAJOR
            region = library.Subarray(tiledb_array, context)
            along = zip(wanted, layout.begins, strict=True)
            region.add_ranges([[(each.start + begin, each.stop + begin - 1)] for each, begin in along])
            query.set_subarray(region)
            query.set_data_buffer(layout.attribute, flat, flat.size * parts)
            query._submit()
            status = query.query_status()
        except (library.TileDBError, *DAMAGED) as error:
            raise Corrupt(
                f"{where}: {error}. The array is damaged there, or what was written was removed after it was opened: "
                f'restore it, open it again, or leave those rows out with select or on_error="skip"'
            ) from error
        if status != native.QueryStatus.COMPLETE:
            raise Corrupt(f"{where}: TileDB gave only part of it ({status}); restore the array")

    def close(self) -> None:
        self.array.close()


class Opened:
    """One array as it was at a time: open from its first read on until ``close``, in each process anew."""

    def __init__(self, path: str, timestamp: int) -> None:
        self.path, self.timestamp = path, timestamp
        self.reset()
        _EVERY_OPENED.add(self)

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (self.path, self.timestamp)

    def reset(self) -> Any:
        """Forget the open array, which is returned."""
        inherited = getattr(self, "_array", None)
        self._array: Any = None
        self._users: dict[int, int] = {}
        self._lock = threading.Lock()
        return inherited

    @contextmanager
    def lend(self) -> Iterator[Any]:
        """The library's array, to several threads at once; anew where its context has done enough."""
        with self._lock:
            if self._array is not None and self._array.ctx is not _context():
                self._let_go(self._array)
                self._array = None
            if self._array is None:
                self._array = self._open()
            array = self._array
            self._users[id(array)] = self._users.get(id(array), 0) + 1
        try:
            yield array
        finally:
            with self._lock:
                self._users[id(array)] -= 1
                if array is not self._array:
                    self._let_go(array)

    def _let_go(self, array: Any) -> None:
        """Close it, unless somebody reads from it right now, who then does."""
        if self._users.get(id(array), 0) == 0:
            self._users.pop(id(array), None)
            array.close()

    def _open(self) -> Any:
        library = _library()
        try:
            return library.open(self.path, ctx=_context(), timestamp=self.timestamp)
        except (library.TileDBError, *DAMAGED) as error:
            raise Corrupt(f"{self.path}: TileDB cannot open it ({error}); restore it, or leave it out") from error

    def close(self) -> None:
        """Close it, unless somebody reads from it right now."""
        with self._lock:
            if self._array is not None and self._users.get(id(self._array), 0) == 0:
                self._let_go(self._array)
                self._array = None


def _library() -> Any:
    try:
        import tiledb
    except ImportError:
        raise ConfigError('reading TileDB arrays needs tiledb: pip install "penstock[tiledb]"') from None
    return tiledb


_context_made: list[Any] = []
_context_making = threading.Lock()
_queries = 0


def _count_query() -> None:
    """One more of the present context."""
    global _queries
    _queries += 1  # one that is lost between threads does no harm


def _context() -> Any:
    """The one context of this process, until it has done enough; those that opened arrays with it keep it."""
    global _queries
    made = _context_made[:1]
    if made and _queries < MOST_QUERIES:
        return made[0]
    with _context_making:
        if not _context_made or _queries >= MOST_QUERIES:
            limits = {
                "sm.compute_concurrency_level": "1",  # the readers are threads already
                "sm.io_concurrency_level": "1",
                "sm.mem.tile_upper_memory_limit": str(TILES_BYTES),
            }
            _context_made[:] = [_library().Ctx(limits)]
            _queries = 0
        return _context_made[0]


_EVERY_OPENED: "weakref.WeakSet[Opened]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    global _context_making
    inherited = [each.reset() for each in list(_EVERY_OPENED)] + _context_made
    for each in inherited:
        if each is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))  # its end would wait for threads that are not here
    _context_made.clear()
    _context_making = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
