"""HDF5: h5py parses the metadata; the bytes are read outside its lock wherever their layout is understood.

Understood directly: contiguous datasets, and chunks of any shape written through any of the filters below. Everything
else is read by h5py, behind one lock, with the file open only while a read lasts.
"""

import errno
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import coalesce
from penstock.combine import Joined, Part
from penstock.errors import ConfigError, Corrupt, Missing, PenstockError, SchemaMismatch, Truncated, Unavailable, Unsafe
from penstock.extents import Chunks, CodecId, Contiguous, Extents, FileId
from penstock.fileio import check_unchanged, identify
from penstock.memory import aligned, borrow
from penstock.sizes import MiB
from penstock.spec import Fields, FieldSpec, Origin
from penstock.store import ExtentStore, Out, Store, check_rows, digest

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions

# HDF5's registered numbers for the filters understood here.
FILTERS = {
    1: "deflate", 2: "shuffle", 3: "fletcher32",
    32000: "lzf", 32001: "blosc", 32004: "lz4", 32015: "zstd",
}  # fmt: skip

# Rows in more pieces than this are left to h5py: finding one's way among them would cost more than it gains.
MOST_PIECES = 65536

# Rows that pass through h5py at a time, and the largest chunk cache it is given: enough to decode a chunk once for all
# its rows in a read, where chunks are of a reasonable size.
READ_BYTES = 1 * MiB
CACHE_BYTES = 64 * MiB

# What HDF5 allocates of its own in a read, measured: type conversion buffer and metadata cache, and for each chunk its
# stored form and an inflated one that grows by doubling.
LIBRARY_BYTES = 4 * MiB
CHUNK_COPIES = 3


def open_file(path: str, options: "OpenOptions") -> Store:
    """The rows of the datasets of one HDF5 file."""
    file = identify(path)
    with _opened(file) as h5:
        names = options.fields or _shared_rows(h5, path)
        datasets = {name: _dataset(h5, path, name) for name in names}
        _check_lengths(path, datasets)
        direct: dict[str, Extents] = {}
        through_h5py: dict[str, _ChunkedSpec] = {}
        for name, dataset in datasets.items():
            _check_readable(path, name, dataset, options.allow_fill)
            extents = _extents(file, name, dataset)
            if extents is None:
                through_h5py[name] = _ChunkedSpec(dataset)
            else:
                direct[name] = extents
        rows = len(next(iter(datasets.values())))
    stores: list[Store] = []
    if direct:
        stores.append(ExtentStore(direct, options.files))
    if through_h5py:
        stores.append(H5pyStore(file, rows, through_h5py))
    if len(stores) == 1:
        return stores[0]
    both = Joined({str(i): Part(store, None, {n: n for n in store.fields}) for i, store in enumerate(stores)})
    return both.choosing(list(names))


@contextmanager
def _opened(file: FileId, cache_bytes: int = 0) -> Iterator[Any]:
    try:
        import h5py
    except ImportError:
        raise ConfigError('reading HDF5 needs h5py: pip install "penstock[hdf5]"') from None
    try:
        h5 = h5py.File(file.path, "r", rdcc_nbytes=cache_bytes)
    except OSError as error:
        if "truncated" in str(error):
            raise Truncated(f"{file.path}: HDF5 file cut short ({error}); fetch it again") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EIO, errno.ENOENT):
            raise Unavailable(f"{file.path}: cannot be read ({error}); check the path and its permissions") from error
        raise Corrupt(
            f"{file.path}: not a whole HDF5 file ({file.size:,} bytes; {error}); fetch it again, or leave it out"
        ) from error
    with h5:
        yield h5


def _shared_rows(h5: Any, path: str) -> list[str]:
    """All numeric datasets, provided they have as many rows as each other."""
    import h5py

    found: dict[str, int] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.ndim and _numeric(item.dtype):
            found[name] = len(item)

    h5.visititems(visit)
    if not found:
        raise Missing(f"{path}: no dataset of numbers with at least one axis; the file has {_contents(h5)}")
    if len(set(found.values())) > 1:
        told = ", ".join(f"{name} has {rows:,}" for name, rows in found.items())
        raise SchemaMismatch(
            f"{path}: its datasets differ in rows ({told}); name those that belong together with fields=(…)"
        )
    return list(found)


def _dataset(h5: Any, path: str, name: str) -> Any:
    import h5py

    item = h5.get(name)
    if not isinstance(item, h5py.Dataset):
        raise Missing(f"{path}: no dataset {name!r}; the file has {_contents(h5)}")
    if item.ndim == 0 or not _numeric(item.dtype):
        raise SchemaMismatch(
            f"{path}: dataset {name!r} is {item.dtype} {item.shape}; expected numbers with one row a sample. "
            f"Leave it out with fields=(…)"
        )
    return item


def _contents(h5: Any) -> str:
    names: list[str] = []
    h5.visititems(lambda name, item: names.append(name) if hasattr(item, "dtype") else None)
    shown = ", ".join(repr(name) for name in names[:10]) or "no datasets"
    return f"{shown} and {len(names) - 10} more" if len(names) > 10 else shown


def _numeric(dtype: np.dtype) -> bool:
    return dtype.kind in "biufc" and dtype.subdtype is None


def _check_lengths(path: str, datasets: Mapping[str, Any]) -> None:
    lengths = {name: len(dataset) for name, dataset in datasets.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {rows:,}" for name, rows in lengths.items())
        raise SchemaMismatch(f"{path}: the fields asked for differ in rows: {told}")


def _check_readable(path: str, name: str, dataset: Any, allow_fill: bool) -> None:
    """Refuse what would read other files than those beside this one, or rows that were never written."""
    root = Path(path).resolve().parent
    others = [entry[0] for entry in dataset.external or ()]
    if dataset.is_virtual:
        others += [source.file_name for source in dataset.virtual_sources() if source.file_name != "."]
    for other in others:
        target = (root / (other.decode() if isinstance(other, bytes) else other)).resolve()
        if root != target.parent and root not in target.parents:
            raise Unsafe(f"{path}: dataset {name!r} refers to {target}, outside the folder that was opened")
    if others or dataset.is_virtual or allow_fill or dataset.size == 0:
        return
    stored = dataset.id.get_storage_size()
    if stored == 0 or (dataset.chunks and dataset.id.get_num_chunks() < _grid(dataset)):
        there = f"{dataset.id.get_num_chunks():,} of {_grid(dataset):,} chunks" if dataset.chunks else "no data"
        raise Missing(
            f"{path}: dataset {name!r} was never written in full ({there} allocated); the rest would read as the fill "
            f"value {dataset.fillvalue}. Pass allow_fill=True to accept that"
        )


def _grid(dataset: Any) -> int:
    return prod(-(-size // chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True))


def _extents(file: FileId, name: str, dataset: Any) -> Extents | None:
    """Where the rows lie, if this reader understands the layout."""
    import h5py

    stored, shape, rows = dataset.dtype, dataset.shape[1:], len(dataset)
    as_numpy_has_it = dataset.id.get_type().equal(h5py.h5t.py_create(stored, logical=True))
    if not as_numpy_has_it or dataset.is_virtual or dataset.external or dataset.file.userblock_size:
        return None
    if dataset.id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS and dataset.id.get_offset() is not None:
        return Contiguous(file, name, stored, shape, rows, dataset.id.get_offset())
    codecs = _codecs(dataset)
    if codecs is None or not dataset.chunks or dataset.id.get_num_chunks() < _grid(dataset):
        return None
    if _grid(dataset) * dataset.chunks[0] > MOST_PIECES * rows:
        return None
    return _chunks(file, name, dataset, codecs)


def _codecs(dataset: Any) -> tuple[CodecId, ...] | None:
    plist = dataset.id.get_create_plist()
    known: list[CodecId] = []
    for position in range(plist.get_nfilters()):
        number, _, parameters, _ = plist.get_filter(position)
        if number not in FILTERS or ("fletcher32", 0) in known:  # a checksum that is not the outermost layer
            return None
        width = parameters[0] if parameters else dataset.dtype.itemsize
        known.append((FILTERS[number], width if number == 2 else 0))
    return tuple(known)


def _chunks(file: FileId, name: str, dataset: Any, codecs: tuple[CodecId, ...]) -> Chunks:
    grid = [-(-size // step) for size, step in zip(dataset.shape, dataset.chunks, strict=True)]
    offsets, lengths, skipped = np.empty(grid, np.int64), np.empty(grid, np.int64), np.zeros(grid, np.uint32)

    def visit(chunk: Any) -> None:
        at = tuple(begin // step for begin, step in zip(chunk.chunk_offset, dataset.chunks, strict=True))
        offsets[at], lengths[at], skipped[at] = chunk.byte_offset, chunk.size, chunk.filter_mask

    dataset.id.chunk_iter(visit)
    table = (grid[0], -1)
    return Chunks(
        file, name, dataset.dtype, dataset.shape[1:], len(dataset), dataset.chunks[0], dataset.chunks[1:],
        offsets.reshape(table), lengths.reshape(table), codecs, skipped.reshape(table) if skipped.any() else None,
    )  # fmt: skip


class _ChunkedSpec:
    """What reading one dataset through h5py takes."""

    def __init__(self, dataset: Any) -> None:
        self.spec = FieldSpec(dataset.dtype, dataset.shape[1:])
        chunks = dataset.chunks or (1, *dataset.shape[1:])
        self.chunk_rows = chunks[0] if dataset.chunks else 1
        self.chunk_bytes = prod(chunks) * dataset.dtype.itemsize if dataset.chunks else 0
        row_of_chunks = self.chunk_rows * self.spec.row_bytes
        self.cache_bytes = row_of_chunks if dataset.chunks and row_of_chunks <= CACHE_BYTES else 0
        self.group = max(1, READ_BYTES // max(1, self.spec.row_bytes))

    def scratch_bytes(self, rows: int) -> int:
        group = aligned(min(rows, self.group) * self.spec.row_bytes)
        return group + self.cache_bytes + CHUNK_COPIES * self.chunk_bytes + LIBRARY_BYTES


# h5py serialises itself; this lock keeps one file open at a time and one chunk cache in memory.
_ONE_AT_A_TIME = threading.Lock()


class H5pyStore:
    """Rows that h5py must read: exact for every layout, and one thread at a time."""

    def __init__(self, file: FileId, rows: int, specs: Mapping[str, _ChunkedSpec]) -> None:
        self.file, self._rows, self.specs = file, rows, dict(specs)
        self.fields: Fields = {name: each.spec for name, each in specs.items()}

    index_bytes = 0

    def __len__(self) -> int:
        return self._rows

    @property
    def blocks(self) -> np.ndarray | None:
        rows = max(each.chunk_rows for each in self.specs.values())
        return np.arange(0, self._rows, rows) if rows > 1 else None

    @property
    def fingerprint(self) -> str:
        return digest("h5py", Path(self.file.path).name, self.file.size, sorted(self.fields.items()))

    def scratch_bytes(self, rows: int) -> int:
        return max(each.scratch_bytes(rows) for each in self.specs.values())

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        check_rows(rows, self)
        check_unchanged(self.file)
        ascending = np.argsort(rows, kind="stable")
        cache_bytes = max((self.specs[name].cache_bytes for name in out), default=0)
        try:
            with _ONE_AT_A_TIME, _opened(self.file, cache_bytes) as h5:
                for name, target in out.items():
                    self._read_field(h5[name], name, rows[ascending], at[ascending], target)
        except (PenstockError, KeyError):
            check_unchanged(self.file)  # another file under its name is the likelier cause
            raise

    def _read_field(self, dataset: Any, name: str, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        """``rows`` ascend, with repeats: read each run of neighbours once and copy it out."""
        spec = self.fields[name]
        distinct = np.unique(rows)
        runs = coalesce.limited(coalesce.neighbours(distinct, distinct), self.specs[name].group)
        for first, _, count in runs:
            begin, end = np.searchsorted(rows, [first, first + count])
            with borrow(count * spec.row_bytes) as scratch:
                read = scratch.view(spec.dtype).reshape(count, *spec.shape)
                self._read_run(dataset, first, read)
                target[at[begin:end]] = read[rows[begin:end] - first]

    def _read_run(self, dataset: Any, first: int, read: np.ndarray) -> None:
        try:
            dataset.read_direct(read, np.s_[first : first + len(read)])
        except OSError as error:
            raise Corrupt(
                f"{self.file.path}: {dataset.name}, rows {first} to {first + len(read) - 1}: {error}. The file is "
                f"damaged there, or needs a filter that is not installed (pip install hdf5plugin)"
            ) from error

    def origin(self, row: int) -> Origin:
        return Origin(self.file.path, f"{next(iter(self.fields))}[{row}]")

    def close(self) -> None:
        """Nothing stays open between reads."""


__all__: Sequence[str] = ["H5pyStore", "open_file"]
