"""HDF5: a dataset for each field. Without compression values have fixed places, and tasks fill them side by side.

With compression nobody can know where a chunk will lie, and the library has one writer: tasks compress their chunks
into files of their own, and the last step puts these, as they are, into one.
"""

import os
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np

from penstock.conversion.attributes import for_hdf5
from penstock.conversion.cut import Cut
from penstock.conversion.encode import BLOSC, LEVELS, chunks_of, coder
from penstock.conversion.ranges import make_file
from penstock.conversion.values import plain_values, unpack
from penstock.conversion.work import Work, writing
from penstock.dataset.held_values import HOLDS
from penstock.errors import ConfigError

HDF5_LZ4 = 1
"""The number of lz4 among the compressors of HDF5's blosc filter."""


def _library(name: str = "h5py") -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        raise ConfigError(f'writing HDF5 needs {name}: pip install "penstock[hdf5]"') from None


def check_libraries(compression: str) -> None:
    """Refuse to begin without the libraries that the last step needs."""
    for name in ("h5py", "hdf5plugin") if compression in ("zstd", "blosc") else ("h5py",):
        _library(name)


def make_plain(work: Work, name: str, cuts: Mapping[str, Cut], attributes: Mapping[str, Any]) -> None:
    """A file with room for all values of all fields."""
    if os.path.exists(work.data(name)):
        return
    h5py = _library()
    partial = work.partial(name)
    with writing(work.goal):
        with h5py.File(partial, "w", libver="earliest") as file:
            for field, cut in cuts.items():
                creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                creation.set_layout(h5py.h5d.CONTIGUOUS)
                creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
                creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
                creation.set_obj_track_times(False)
                made = _dataset(h5py, file, field, cut, creation)
                _set_attributes(made.attrs, attributes.get(field, {}))
            _set_attributes(file.attrs, attributes.get("", {}))
        make_file(work, name, partial)


def offset_of(path: str, field: str) -> int:
    """Where the values of a field begin."""
    with _library().File(path, "r") as file:
        return int(file[field].id.get_offset())


def assemble(work: Work, name: str, cuts: Mapping[str, Cut], attributes: Mapping[str, Any]) -> None:
    """One file of the chunks that tasks have compressed."""
    h5py = _library()
    partial = work.partial(name)
    with writing(work.goal):
        with h5py.File(partial, "w", libver="earliest") as file:
            for field, cut in cuts.items():
                made = _write_values(work, file, field, cut) if cut.values else _write_chunks(work, file, field, cut)
                _set_attributes(made.attrs, attributes.get(field, {}))
            _set_attributes(file.attrs, attributes.get("", {}))
        with open(partial, "r+b") as whole:
            os.fsync(whole.fileno())
        os.replace(partial, work.data(name))


def _write_chunks(work: Work, file: Any, field: str, cut: Cut) -> Any:
    h5py = _library()
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_chunk(cut.chunk_shape)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)
    _set_filter(creation, cut)
    made = _dataset(h5py, file, field, cut, creation)
    _copy_chunks(work, made, field, cut)
    return made


def _write_values(work: Work, file: Any, field: str, cut: Cut) -> Any:
    """Values of no fixed size, for which HDF5 has types of its own."""
    h5py, kind = _library(), cut.values
    assert kind is not None
    _, decode = coder(cut.compression, 1)
    stored = h5py.string_dtype() if kind.is_text else h5py.vlen_dtype(np.dtype(kind.dtype or np.uint8))
    made = file.create_dataset(field, (cut.rows,), stored, track_times=False)
    for first, chunk in _pieces(work, field, cut):
        values = plain_values(kind, unpack(bytes(decode(chunk))))[: cut.rows - first[0]]
        goal = np.empty(len(values), object)
        goal[:] = values
        made[first[0] : first[0] + len(values)] = goal
    made.attrs[HOLDS] = kind.holds
    return made


def _set_filter(creation: Any, cut: Cut) -> None:
    """What readers must undo; the library itself compresses nothing here."""
    if cut.compression == "none":
        return
    level = LEVELS[cut.compression]
    if cut.compression == "gzip":
        creation.set_deflate(level)
        return
    plugin = _library("hdf5plugin")  # registers them
    if cut.compression == "zstd":
        creation.set_filter(plugin.ZSTD_ID, _library("h5py").h5z.FLAG_OPTIONAL, (level,))
        return
    by_itself = (0, 0, 0, 0)  # versions and sizes, which the filter fills in
    chosen = (*by_itself, level, BLOSC["shuffle"], HDF5_LZ4)
    creation.set_filter(plugin.BLOSC_ID, _library("h5py").h5z.FLAG_OPTIONAL, chosen)


def _dataset(h5py: Any, file: Any, field: str, cut: Cut, creation: Any) -> Any:
    linking = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    linking.set_create_intermediate_group(True)
    space = h5py.h5s.create_simple((cut.rows, *cut.shape))
    kind = h5py.h5t.py_create(cut.dtype, logical=True)
    return h5py.Dataset(h5py.h5d.create(file.id, field.encode(), kind, space, dcpl=creation, lcpl=linking))


def _copy_chunks(work: Work, made: Any, field: str, cut: Cut) -> None:
    """Chunks as they were compressed."""
    for first, chunk in _pieces(work, field, cut):
        made.id.write_direct_chunk(first, chunk)


def _pieces(work: Work, field: str, cut: Cut) -> Iterator[tuple[tuple[int, ...], bytes]]:
    """First element and bytes of every chunk, without its checksum, which HDF5 has no place for."""
    per_shard = tuple(n // c for n, c in zip(cut.shard_shape, cut.chunk_shape, strict=True))
    for place in np.ndindex(*cut.grid):
        path = work.data(piece_name(field, place))
        index = chunks_of(path, int(np.prod(per_shard)))
        with open(path, "rb", buffering=0) as file:
            for (offset, length), within in zip(index.tolist(), product(*map(range, per_shard)), strict=True):
                if offset == 2**64 - 1:  # beyond the last row
                    continue
                along = zip(place, cut.shard_shape, within, cut.chunk_shape, strict=True)
                first = tuple(at * shard + inner * chunk for at, shard, inner, chunk in along)
                file.seek(offset)
                yield first, file.read(length - 4)


def piece_name(field: str, place: tuple[int, ...]) -> str:
    """A shard on its way into the file."""
    return "/".join(["pieces", field, *map(str, place)])


def _set_attributes(to: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        to[name] = for_hdf5(value)
