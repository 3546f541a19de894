"""HDF5: h5py parses the metadata; the bytes are read outside its lock wherever their layout is understood.

Understood directly: contiguous datasets, and chunks of any shape written through any of the filters below. Everything
else is read by h5py, behind one lock, with the file open only while a read lasts.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import codecs, index
from penstock.combine import Joined, Part
from penstock.errors import ConfigError, Missing, SchemaMismatch, Truncated, Unsafe
from penstock.extents import NEVER_WRITTEN, Chunks, ChunkTable, CodecId, Contiguous, Extents, FileId, KnownTable
from penstock.fileio import identify
from penstock.formats.h5py_store import H5pyStore, Layout, opened
from penstock.sizes import KiB
from penstock.store import ExtentStore, Store

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

# Rows that lie on an inner axis of a contiguous dataset are read in runs of about so much.
TURNED_BYTES = 16 * KiB


def open_file(path: str, options: "OpenOptions") -> Store:
    """The rows of the datasets of one HDF5 file."""
    file = identify(path, growing=options.swmr)
    with opened(file) as h5:
        names = options.fields or _shared_rows(h5, path, options)
        datasets = {name: _dataset(h5, path, name) for name in names}
        rows = _common_rows(path, datasets, options)
        direct: dict[str, Extents] = {}
        through_h5py: dict[str, Layout] = {}
        for name, dataset in datasets.items():
            _check_files(path, name, dataset)
            found = _extents(file, name, dataset, options)
            if isinstance(found, str):
                _check_written(path, name, dataset, options)
                _check_filters(path, name, dataset)
                axis = options.row_axis_of(name)
                through_h5py[name] = Layout(dataset.dtype, dataset.shape, dataset.chunks, axis, found)
            else:
                direct[name] = found
    stores: list[Store] = []
    if direct:
        stores.append(ExtentStore(direct, options.files))
    if through_h5py:
        stores.append(H5pyStore(file, rows, through_h5py))
    if len(stores) == 1:
        return stores[0]
    both = Joined({str(i): Part(store, None, {n: n for n in store.fields}) for i, store in enumerate(stores)})
    return both.choosing(list(names))


def _shared_rows(h5: Any, path: str, options: "OpenOptions") -> list[str]:
    """All numeric datasets, provided they have as many rows as each other."""
    found = {
        name: item.shape[options.row_axis_of(name) % item.ndim]
        for name, item in _walk_datasets(h5)
        if item.ndim and _numeric(item.dtype)
    }
    if not found:
        raise Missing(f"{path}: no dataset of numbers with at least one axis; the file has {_contents(h5)}")
    if len(set(found.values())) > 1:
        told = ", ".join(f"{name} has {rows:,}" for name, rows in found.items())
        raise SchemaMismatch(
            f"{path}: its datasets differ in rows ({told}); name those that belong together with fields=(…)"
        )
    return list(found)


def _walk_datasets(group: Any, prefix: str = "", above: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Datasets at any depth, by their own names: links to elsewhere are not followed, nor groups inside themselves.

    Not ``visititems``, which asks for each object's size, and so walks through every chunk.
    """
    import h5py

    address = h5py.h5o.get_info(group.id).addr
    for name in group:
        if address in above or not isinstance(group.get(name, getlink=True), h5py.HardLink):
            continue
        item = group[name]
        if isinstance(item, h5py.Dataset):
            yield prefix + name, item
        elif isinstance(item, h5py.Group):
            yield from _walk_datasets(item, f"{prefix}{name}/", above | {address})


def _dataset(h5: Any, path: str, name: str) -> Any:
    import h5py

    item = h5.get(name)
    if not isinstance(item, h5py.Dataset):
        raise Missing(f"{path}: no dataset {name!r}; the file has {_contents(h5)}")
    if item.file.filename != h5.filename:
        raise Unsafe(f"{path}: dataset {name!r} is a link into {item.file.filename}: open that file itself")
    if item.ndim == 0 or not _numeric(item.dtype):
        raise SchemaMismatch(
            f"{path}: dataset {name!r} is {_kind(item)}; expected numbers with one row a sample. {_way_out(item)}"
        )
    return item


def _kind(item: Any) -> str:
    if item.shape is None:
        return "empty, without even a shape"
    if item.ndim == 0:
        return f"a single value ({item.dtype})"
    if item.dtype.names:
        return f"a table of {', '.join(item.dtype.names)} {item.shape}"
    if item.dtype.kind in "OSU":
        return f"text, or of variable length ({item.dtype} {item.shape})"
    return f"{item.dtype} {item.shape}"


def _way_out(item: Any) -> str:
    if item.ndim == 0:
        return "Leave it out with fields=(…), and read it with h5py: it is the same for all samples"
    return (
        "Leave it out with fields=(…); what it says can be joined as an array of numbers: "
        "penstock.join(data=ds, label=codes)"
    )


def _contents(h5: Any) -> str:
    names = [name for name, _ in _walk_datasets(h5)]
    shown = ", ".join(repr(name) for name in names[:10]) or "no datasets"
    return f"{shown} and {len(names) - 10} more" if len(names) > 10 else shown


def _numeric(dtype: np.dtype) -> bool:
    return dtype.kind in "biufc" and dtype.subdtype is None


def _common_rows(path: str, datasets: Mapping[str, Any], options: "OpenOptions") -> int:
    lengths = {}
    for name, dataset in datasets.items():
        axis = options.row_axis_of(name)
        if not 0 <= axis < dataset.ndim:
            raise ConfigError(
                f"{path}: row_axis={axis} for {name!r}, which has shape {dataset.shape}: expected 0 to "
                f"{dataset.ndim - 1}"
            )
        lengths[name] = dataset.shape[axis]
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {rows:,}" for name, rows in lengths.items())
        raise SchemaMismatch(f"{path}: the fields asked for differ in rows: {told}")
    return int(next(iter(lengths.values())))


def _check_files(path: str, name: str, dataset: Any) -> None:
    """Refuse what would read other files than those beside this one."""
    root = Path(path).resolve().parent
    others = [entry[0] for entry in dataset.external or ()]
    if dataset.is_virtual:
        others += [source.file_name for source in dataset.virtual_sources() if source.file_name != "."]
    for other in others:
        target = (root / (other.decode() if isinstance(other, bytes) else other)).resolve()
        if root != target.parent and root not in target.parents:
            raise Unsafe(f"{path}: dataset {name!r} refers to {target}, outside the folder that was opened")


def _check_written(path: str, name: str, dataset: Any, options: "OpenOptions") -> None:
    """Refuse rows that were never written, of datasets that h5py will read."""
    if dataset.external or dataset.is_virtual or options.allow_fill or dataset.size == 0:
        return
    if dataset.id.get_storage_size() == 0:
        raise _never_written(path, name, dataset, "no data are")
    if dataset.chunks and dataset.id.get_num_chunks() < prod(_grid(dataset)):
        there = f"{dataset.id.get_num_chunks():,} of {prod(_grid(dataset)):,} chunks are"
        raise _never_written(path, name, dataset, there)


def _never_written(path: str, name: str, dataset: Any, there: str) -> Missing:
    return Missing(
        f"{path}: dataset {name!r} was never written in full ({there} there); the rest would read as the fill value "
        f"{dataset.fillvalue}. Pass allow_fill=True to accept that"
    )


def _check_filters(path: str, name: str, dataset: Any) -> None:
    """Refuse a dataset that h5py cannot decode, now and not in the middle of an epoch."""
    import h5py

    for number, _, label in _filters(dataset):
        if h5py.h5z.filter_avail(number):
            continue
        with suppress(ImportError):
            import hdf5plugin  # noqa: F401  importing it is what makes its filters known
        if not h5py.h5z.filter_avail(number):
            raise ConfigError(
                f"{path}: dataset {name!r} is written through filter {number} ({label}), which is not installed; most "
                f"such filters come with: pip install hdf5plugin"
            )


def _grid(dataset: Any) -> tuple[int, ...]:
    return tuple(-(-size // chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True))


def _filters(dataset: Any) -> list[tuple[int, tuple[int, ...], str]]:
    plist = dataset.id.get_create_plist()
    found = [plist.get_filter(position) for position in range(plist.get_nfilters())]
    return [(number, parameters, label.decode(errors="replace")) for number, _, parameters, label in found]


def _extents(file: FileId, name: str, dataset: Any, options: "OpenOptions") -> Extents | str:
    """Where the rows lie, or why this reader cannot tell."""
    import h5py

    stored, axis = dataset.dtype, options.row_axis_of(name)
    if not dataset.id.get_type().equal(h5py.h5t.py_create(stored, logical=True)):
        return f"its elements are not stored as numpy has {stored}"
    if dataset.is_virtual or dataset.external:
        return "its bytes lie in other files"
    if dataset.file.userblock_size:
        return "the file begins with a user block"
    if dataset.size == 0:
        return "it is empty"
    if not dataset.chunks:
        offset = dataset.id.get_offset()
        if offset is None:
            return "it is stored inside the metadata, or was never written"
        if axis == 0:
            return Contiguous(file, name, stored, dataset.shape[1:], len(dataset), offset)
        return _turned(file, name, dataset, axis, offset)
    known = _codecs(dataset)
    if isinstance(known, str):
        return known
    return _chunks(file, name, dataset, known, options)


def _codecs(dataset: Any) -> tuple[CodecId, ...] | str:
    known: list[CodecId] = []
    for number, parameters, label in _filters(dataset):
        if ("fletcher32", 0) in known:
            return "its checksum is not the outermost filter"
        codec: CodecId = (FILTERS.get(number, ""), 0)
        if number == 2:
            codec = ("shuffle", parameters[0] if parameters else dataset.dtype.itemsize)
        elif number == 32008 and len(parameters) > 4:
            codec = (BITSHUFFLE.get(parameters[4], ""), parameters[2])
        if not codec[0] or not codecs.available(codec):
            return f"filter {number} ({label}) has no decoder here"
        known.append(codec)
    return tuple(known)


def _chunks(file: FileId, name: str, dataset: Any, known: tuple[CodecId, ...], options: "OpenOptions") -> Chunks:
    axis = options.row_axis_of(name)
    # A dataset of the same name can be seen along another axis, and a growing file has no table that lasts.
    saved_as = f"{name} along {axis}"
    folder = None if file.growing else options.index_folder
    table: ChunkTable | None = index.load(folder, file, saved_as) if folder else None
    if table is None:
        walked = _walk(dataset, axis)
        table = index.save(folder, file, saved_as, walked) if folder else walked
    array = Chunks(
        file, name, dataset.dtype, _without(dataset.shape, axis), dataset.shape[axis], dataset.chunks[axis],
        _without(dataset.chunks, axis), table, known, axis,
        np.asarray(dataset.fillvalue, dataset.dtype).tobytes() if options.allow_fill else None,
    )  # fmt: skip
    if options.on_error == "raise":
        _check_table(array, dataset)
    return array


def _without(sizes: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*sizes[:axis], *sizes[axis + 1 :])


def _walk(dataset: Any, axis: int) -> KnownTable:
    """The whole chunk table, in one pass over the file's own index."""
    grid = _grid(dataset)
    offsets = np.full(prod(grid), NEVER_WRITTEN, np.int64)
    lengths = np.zeros(prod(grid), np.uint32)
    skipped = np.zeros(0, np.uint32)
    # Files list their chunks in C order as a rule; then their coordinates need not be turned into numbers.
    in_order = product(*(range(0, size, step) for size, step in zip(dataset.shape, dataset.chunks, strict=True)))
    done, regular = 0, True
    waiting: list[Any] = []

    def take() -> None:
        nonlocal done, regular, skipped
        corners, masks, places, sizes = zip(*waiting, strict=True)
        regular = regular and list(corners) == list(islice(in_order, len(corners)))
        at: Any = slice(done, done + len(corners))
        if not regular:
            along = np.asarray(corners) // dataset.chunks
            at = np.ravel_multi_index(tuple(along.T), grid)
        offsets[at], lengths[at] = places, sizes
        if any(masks):
            skipped = skipped if len(skipped) else np.zeros(len(offsets), np.uint32)
            skipped[at] = masks
        done += len(corners)
        waiting.clear()

    def visit(chunk: Any) -> None:
        waiting.append(chunk)
        if len(waiting) == WALK_PIECE:
            take()

    dataset.id.chunk_iter(visit)
    if waiting:
        take()

    def turned(column: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.moveaxis(column.reshape(grid), axis, 0)).reshape(grid[axis], -1)

    written = lengths[offsets != NEVER_WRITTEN]
    alike = len(written) and bool((written == written[0]).all())
    return KnownTable(
        turned(offsets), int(written[0]) if alike else turned(lengths), turned(skipped) if len(skipped) else None
    )


def _check_table(array: Chunks, dataset: Any) -> None:
    """Refuse chunks that are not there, and name the first."""
    table, path = array.table, array.file.path
    if table.missing and array.fill is None:
        there = f"{prod(table.shape) - table.missing:,} of {prod(table.shape):,} chunks are"
        first = _first(array, lambda offsets, _: offsets == NEVER_WRITTEN)
        raise Missing(f"{_never_written(path, array.name, dataset, there)}. The first that is not: {first}")
    if table.end > array.file.size:
        first = _first(array, lambda offsets, lengths: offsets + lengths > array.file.size)
        raise Truncated(
            f"{path}: {first} reaches beyond the file's end: chunks reach to byte {table.end:,}, but the file has only "
            f"{array.file.size:,}. It was cut short, perhaps by an unfinished download or copy: fetch it again, or "
            f'pass on_error="skip" to open and Loader to leave out what cannot be read'
        )


def _first(array: Chunks, bad: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> str:
    for block in range(array.table.shape[0]):
        offsets, lengths, _ = array.table.find(block, slice(None))
        found = np.flatnonzero(bad(offsets, lengths))
        if len(found):
            return array.piece_place(block, int(found[0]))
    return array.name


def _turned(file: FileId, name: str, dataset: Any, axis: int, offset: int) -> Extents:
    """Contiguous, with rows on an inner axis: seen as chunks of some rows of one run of elements each."""
    rows, shape = dataset.shape[axis], _without(dataset.shape, axis)
    outer, inner = shape[:axis], shape[axis:]
    run_bytes = prod(inner) * dataset.dtype.itemsize
    most = max(1, min(rows, TURNED_BYTES // run_bytes))
    together = next(count for count in range(most, 0, -1) if rows % count == 0)
    runs = np.arange(prod(outer), dtype=np.int64) * rows
    blocks = np.arange(0, rows, together, dtype=np.int64)
    table = KnownTable(offset + (blocks[:, None] + runs) * run_bytes, together * run_bytes)
    return Chunks(file, name, dataset.dtype, shape, rows, together, (*(1,) * len(outer), *inner), table, (), axis)
