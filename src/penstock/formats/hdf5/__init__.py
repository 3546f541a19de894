"""HDF5: h5py parses the metadata; the bytes are read outside its lock wherever their layout is understood.

Understood directly: contiguous datasets, and chunks of any shape written through the filters known here. Everything
else is read by h5py, behind one lock, with the file open only during a read.
"""

import glob
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.base.file_id import FileId
from penstock.base.text_column import TextColumn
from penstock.base.urls import is_remote
from penstock.dataset.extent_store import ExtentStore
from penstock.dataset.held_values import HeldValues
from penstock.dataset.rewrite import side_by_side
from penstock.dataset.store import Store, StoreBase
from penstock.errors import ConfigError, Corrupt, LimitExceeded, Missing, SchemaMismatch, Unsafe
from penstock.formats.hdf5.description import load_array
from penstock.formats.hdf5.fallback import OWN_FILTERS, H5pyLayout, H5pyStore, installed_filters, open_with_h5py
from penstock.formats.hdf5.index import check_index
from penstock.formats.hdf5.layout import StoredDataset, fill_value_of, find_holes, locate_rows
from penstock.formats.hdf5.values import decoder_of_values, read_values
from penstock.formats.rows import checked_axis, common_rows, list_names
from penstock.formats.sparse import is_sparse, open_sparse, rows_of, with_matrices
from penstock.read.extents import Chunks, Extents
from penstock.read.objects import ObjectDecoder

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions


def open_file(path: str, options: "OpenOptions") -> Store:
    """The rows of the datasets of one HDF5 file."""
    if options.swmr and is_remote(path):
        raise ConfigError(f"{path}: swmr=True reads a file that is being written on this machine; leave it out")
    file = options.files.identify(path, growing=options.swmr)
    if saved := _load_arrays(file, options):
        common_rows(path, {name: array.rows for name, array in saved.items()}, asked_for=True)
        return ExtentStore(saved, options.files)
    with open_with_h5py(file, options.files) as h5:
        names = options.fields or _choose_datasets(h5, path, options)
        values = {name: item for name in names if (item := _find_values(h5, path, name)) is not None}
        matrices = {name: about for name in names if (about := _find_matrix(h5, path, name)) is not None}
        numbers = [name for name in names if name not in values and name not in matrices]
        datasets = [_describe_dataset(file, name, _find_dataset(h5, path, name), options) for name in numbers]
        lengths = {found.name: found.rows for found in datasets} | {name: len(item) for name, item in values.items()}
        rows = common_rows(path, lengths | {name: rows_of(about) for name, about in matrices.items()}, asked_for=True)
        columns = {name: _read_values(file, name, item, options) for name, item in values.items()}
        direct: dict[str, Extents] = {}
        through_h5py: dict[str, H5pyLayout] = {}
        for found in datasets:
            _check_files(path, found.dataset, options)
            check_index(file, found.dataset, found.header_at)
            where = locate_rows(found, options)
            if isinstance(where, str):
                holes = _find_holes(found, options)
                _check_filters(found)
                stored, chunks = found.dataset.dtype, found.dataset.chunks
                checked_by = "fletcher32" * found.dataset.fletcher32
                through_h5py[found.name] = H5pyLayout(
                    stored, found.shape, chunks, found.axis, where, holes=holes, checked_by=checked_by
                )
            else:
                direct[found.name] = where
    stores: list[StoreBase] = []
    if direct:
        stores.append(ExtentStore(direct, options.files))
    if through_h5py:
        stores.append(H5pyStore(file, options.files, rows, through_h5py))
    if columns:
        stores.append(HeldValues(file, columns))
    for name, about in matrices.items():
        stores.append(open_sparse(path, name, about, lambda parts: open_file(path, replace(options, fields=parts))))
    return side_by_side(stores, names)


def _load_arrays(file: FileId, options: "OpenOptions") -> dict[str, Chunks]:
    """The fields asked for, if all were described when their tables were saved: h5py then need not open the file."""
    found = {}
    for name in options.fields or ():
        array = load_array(file, name, options)
        if array is None:
            return {}
        found[name] = array
    return found


def _describe_dataset(file: FileId, name: str, dataset: Any, options: "OpenOptions") -> StoredDataset:
    axis = checked_axis(file.path, name, dataset.shape, options.row_axis_of(name))
    return StoredDataset(file, name, dataset, dataset.shape, axis)


def _choose_datasets(h5: Any, path: str, options: "OpenOptions") -> list[str]:
    """All numeric datasets, which must have the same number of rows. Others with as many rows are left out."""
    import h5py

    found, others = {}, {}
    for name, item in _walk_datasets(h5):
        if isinstance(item, h5py.ExternalLink):
            options.leave_out(name, f"a link into another file, {item.filename!r}: open that file itself")
        elif item.ndim:
            rows = item.shape[options.row_axis_of(name) % item.ndim]
            if _is_numeric(item.dtype) or decoder_of_values(item) is not None:
                found[name] = rows
            else:
                others[name] = (rows, _describe_kind(item))
    if not found:
        raise Missing(f"{path}: no dataset of numbers with at least one axis; the file has {_list_contents(h5)}")
    found = with_matrices(found, lambda name: h5[name].attrs)
    common = common_rows(path, found, asked_for=False)
    for name, (rows, kind) in others.items():
        if rows == common:
            options.leave_out(name, kind)
    return list(found)


def _walk_datasets(h5: Any) -> Iterator[tuple[str, Any]]:
    """Datasets at any depth with their names, and links into other files, which are not followed.

    Each group is visited once, under its first name: rings of links, or many links to each group, would make an endless
    number of names. Not ``visititems``, which asks for each object's size and so walks through every chunk.
    """
    import h5py

    seen = {h5py.h5o.get_info(h5.id).addr}
    waiting = [_list_links(h5, "")]
    while waiting:
        name, item = next(waiting[-1], ("", None))
        if item is None:
            waiting.pop()
        elif isinstance(item, h5py.Dataset | h5py.ExternalLink):
            yield name, item
        elif isinstance(item, h5py.Group) and (address := h5py.h5o.get_info(item.id).addr) not in seen:
            seen.add(address)
            waiting.append(_list_links(item, f"{name}/"))


def _list_links(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """The members of a group, and its links into other files; links within the file are not followed."""
    import h5py

    for name in group:
        link = group.get(name, getlink=True)
        where = f"{group.file.filename}: {prefix}{name}"
        if link is None:  # h5py's answer for a name that the group lists and does not find
            raise Corrupt(f"{where} is listed, but its entry cannot be found; the file is damaged: fetch it again")
        if isinstance(link, h5py.ExternalLink):
            yield prefix + name, link
        if not isinstance(link, h5py.HardLink):
            continue
        try:
            item = group[name]
        except (KeyError, OSError, RuntimeError) as error:
            raise Corrupt(f"{where} cannot be opened ({error}); the file is damaged: fetch it again") from error
        yield prefix + name, item


# Chains of links longer than this are a ring.
DEEPEST_LINKS = 16

# Sources of nested virtual datasets: the library opens each once for every path that leads to it.
MOST_SOURCES = 10_000


def _follow_links(h5: Any, path: str, name: str, depth: int = 0) -> Any:
    """The object of this name, following links within the file only; None if there is none.

    The library would open whatever file a link names, and wait forever if that is a pipe.
    """
    import h5py

    item: Any = h5
    parts = [part for part in name.split("/") if part not in ("", ".")]
    for number, part in enumerate(parts):
        link = item.get(part, getlink=True) if isinstance(item, h5py.Group) else None
        if link is None:
            return None
        if isinstance(link, h5py.ExternalLink):
            raise Unsafe(
                f"{path}: {name!r} is a link into another file, {link.filename!r}: open that file itself if you mean it"
            )
        if isinstance(link, h5py.SoftLink):
            if depth == DEEPEST_LINKS:
                raise Corrupt(f"{path}: {name!r} leads through more than {DEEPEST_LINKS} links, which form a circle")
            before = "" if link.path.startswith("/") else item.name
            found = _follow_links(h5, path, "/".join((before, link.path, *parts[number + 1 :])), depth + 1)
            if found is None:
                raise Missing(f"{path}: {name!r} is a link to nowhere ({link.path}); the file has {_list_contents(h5)}")
            return found
        item = item[part]
    return item


def _find_dataset(h5: Any, path: str, name: str) -> Any:
    import h5py

    try:
        item = _follow_links(h5, path, name)
    except (KeyError, OSError, RuntimeError, TypeError) as error:
        raise Corrupt(
            f"{path}: dataset {name!r} cannot be opened ({error}); the file is damaged: fetch it again"
        ) from error
    if not isinstance(item, h5py.Dataset):
        raise Missing(f"{path}: no dataset {name!r}; the file has {_list_contents(h5)}")
    if item.ndim == 0 or not _is_numeric(item.dtype):
        raise SchemaMismatch(
            f"{path}: dataset {name!r} is {_describe_kind(item)}; expected numbers with one row per sample. "
            f"{_describe_way_out(item)}"
        )
    return item


def _find_values(h5: Any, path: str, name: str) -> Any | None:
    """A dataset of values of no fixed size, if it is one."""
    import h5py

    item = _follow_links(h5, path, name)
    return item if isinstance(item, h5py.Dataset) and decoder_of_values(item) is not None else None


def _read_values(file: FileId, name: str, item: Any, options: "OpenOptions") -> tuple[ObjectDecoder, TextColumn]:
    found = StoredDataset(file, name, item, item.shape, 0)
    _check_files(file.path, item, options)
    _find_holes(found, options)
    _check_filters(found)
    return read_values(item, f"{file.path}: dataset {name!r}")


def _find_matrix(h5: Any, path: str, name: str) -> dict[str, Any] | None:
    """The attributes of a group that is a sparse matrix."""
    import h5py

    item = _follow_links(h5, path, name)
    return dict(item.attrs) if isinstance(item, h5py.Group) and is_sparse(item.attrs) else None


def _describe_kind(item: Any) -> str:
    import h5py

    if item.shape is None:
        return "empty, without a shape"
    if item.ndim == 0:
        return f"a single value ({item.dtype})"
    if item.dtype.names:
        return f"a table of {', '.join(item.dtype.names)} {item.shape}"
    if h5py.check_ref_dtype(item.dtype) is not None:
        return f"references to other places of the file {item.shape}"
    if h5py.check_string_dtype(item.dtype) is not None:
        return f"text {item.shape}"
    if (inner := h5py.check_vlen_dtype(item.dtype)) is not None:
        return f"of variable length: a list of {inner} each {item.shape}"
    return f"{item.dtype} {item.shape}"


def _describe_way_out(item: Any) -> str:
    if item.ndim == 0:
        return "Leave it out with fields=(…), and read it with h5py: it is the same for all samples"
    return (
        "Leave it out with fields=(…); its content can be joined as an array of numbers: "
        "penstock.join(data=ds, label=codes)"
    )


def _list_contents(h5: Any) -> str:
    import h5py

    return list_names(name for name, item in _walk_datasets(h5) if isinstance(item, h5py.Dataset)) or "no datasets"


def _is_numeric(dtype: np.dtype) -> bool:
    return dtype.kind in "biufc" and dtype.subdtype is None


def _check_files(
    path: str, dataset: Any, options: "OpenOptions", depth: int = 0, visits: Iterator[int] | None = None
) -> None:
    """Refuse a dataset that reads other files, unless they are in the same folder or in one that the caller allows.

    The sources of a virtual dataset may be virtual too, or in external storage. ``visits`` counts the sources: the
    library opens a source again for each dataset that is made of it.
    """
    visits = count() if visits is None else visits
    virtual = dataset.virtual_sources() if dataset.is_virtual else []
    sources = dict.fromkeys((each.file_name, each.dset_name) for each in virtual)
    others = [(os.fsdecode(entry[0]), None) for entry in dataset.external or ()]
    others += [each for each in sources if each[0] != "."]
    name = dataset.name.strip("/")
    if others and is_remote(path):
        raise Unsafe(f"{path}: dataset {name!r} refers to another file, which is not looked for on this machine")
    if depth > DEEPEST_LINKS:
        raise Corrupt(f"{path}: {name!r} is made of datasets made of datasets, more than {DEEPEST_LINKS} times")
    if depth > 1 and next(visits) >= MOST_SOURCES:
        raise LimitExceeded(
            f"{path}: {name!r} is one of more than {MOST_SOURCES:,} sources of nested virtual datasets. Build it from "
            f"the datasets that hold the numbers, or leave it out with fields=(…)"
        )
    for inside in (inside for file, inside in sources if file == "."):
        if _follow_links(dataset.file, path, inside) is not None:
            _check_files(path, _find_dataset(dataset.file, path, inside), options, depth + 1, visits)
    home = Path(path).resolve().parent
    for other, inside in others:
        for target in _find_targets(home, other):
            _check_place(path, name, target, (home, *(Path(each).resolve() for each in options.allow_external)))
            if target.is_file():
                if inside is not None:
                    _check_source(str(target), inside, options, depth, visits)
            elif inside is None or not options.allow_fill:
                raise Missing(
                    f"{path}: dataset {name!r} refers to {target}, which is not there, and would read as the fill "
                    f"value {fill_value_of(dataset)}. Restore it, or pass allow_fill=True if it is meant to be missing"
                )


def _find_targets(home: Path, other: str) -> list[Path]:
    """The files of this name; ``%b`` in a name stands for a number."""
    named = home / other
    if "%b" not in other:
        return [named.resolve()]
    return [each.resolve() for each in named.parent.glob(glob.escape(named.name).replace("%b", "*"))]


def _check_place(path: str, name: str, target: Path, allowed: tuple[Path, ...]) -> None:
    if not any(root in target.parents for root in allowed):
        raise Unsafe(
            f"{path}: dataset {name!r} refers to {target}, outside the folder that was opened. Pass "
            f"allow_external=[{str(target.parent)!r}] to open if you trust it"
        )
    if target.exists() and not target.is_file():
        raise Unsafe(f"{path}: dataset {name!r} refers to {target}, which is not a regular file")


def _check_source(path: str, name: str, options: "OpenOptions", depth: int, visits: Iterator[int]) -> None:
    """Check a source of a virtual dataset in the same way."""
    file = options.files.identify(path)
    with open_with_h5py(file, options.files) as h5:
        found = StoredDataset(file, name, _find_dataset(h5, path, name), (), 0)
        _check_files(path, found.dataset, options, depth + 1, visits)
        _check_filters(found)


def _find_holes(found: StoredDataset, options: "OpenOptions") -> dict[int, int]:
    """Chunks that were never written of a dataset that h5py will read, by block of rows; an error unless allowed.

    For virtual datasets and external storage this is unknown.
    """
    dataset = found.dataset
    if dataset.external or dataset.is_virtual or prod(found.shape) == 0:
        return {}
    in_one_piece = {0: 1} if not dataset.chunks and dataset.id.get_storage_size() == 0 else {}  # counts once per epoch
    absent = find_holes(found) if dataset.chunks else in_one_piece
    if absent and not options.allow_fill:
        there = prod(found.grid) - sum(absent.values()) if dataset.chunks else 0
        raise found.never_written(f"{there:,} of {prod(found.grid):,} chunks are" if there else "no data are")
    return absent


def _check_filters(found: StoredDataset) -> None:
    """Refuse a dataset that h5py cannot decode, now and not in the middle of an epoch.

    For any other filter, HDF5 would load a library from a folder named by an environment variable, so that a file would
    choose what code runs. Only filters of installed packages are used.
    """
    import h5py

    for number, _, label in found.filters:
        if number in OWN_FILTERS and h5py.h5z.filter_avail(number):
            continue
        if number not in installed_filters():
            raise ConfigError(
                f"{found.file.path}: dataset {found.name!r} needs filter {number} ({label}), which is not installed; "
                f"most come with: pip install hdf5plugin. Filters from HDF5_PLUGIN_PATH are not loaded: rewrite "
                f"the data without this one (h5repack -f {found.name}:NONE OLD NEW)"
            )
