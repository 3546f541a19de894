"""HDF5: h5py parses the metadata; the bytes are read outside its lock wherever their layout is understood.

Understood directly: contiguous datasets, and chunks of any shape written through the filters known here. Everything
else is read by h5py, behind one lock, with the file open only while a read lasts.
"""

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.combine import side_by_side
from penstock.errors import ConfigError, Corrupt, Missing, SchemaMismatch, Unsafe
from penstock.extents import Extents, FileId
from penstock.formats.h5py_store import H5pyStore, Layout, opened
from penstock.formats.hdf5_layout import Found, extents
from penstock.formats.rows import checked_axis, common_rows
from penstock.store import ExtentStore, Store
from penstock.urls import is_remote

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions


def open_file(path: str, options: "OpenOptions") -> Store:
    """The rows of the datasets of one HDF5 file."""
    if options.swmr and is_remote(path):
        raise ConfigError(f"{path}: swmr=True reads a file that is being written on this machine; leave it out")
    file = options.files.identify(path, growing=options.swmr)
    with opened(file, options.files) as h5:
        names = options.fields or _shared_rows(h5, path, options)
        datasets = [_found(file, name, _dataset(h5, path, name), options) for name in names]
        rows = common_rows(path, {found.name: found.rows for found in datasets}, asked_for=True)
        direct: dict[str, Extents] = {}
        through_h5py: dict[str, Layout] = {}
        for found in datasets:
            _check_files(path, found.dataset, options)
            where = extents(found, options)
            if isinstance(where, str):
                holes = _holes(found, options)
                _check_filters(found)
                stored, chunks = found.dataset.dtype, found.dataset.chunks
                checked_by = "fletcher32" * found.dataset.fletcher32
                through_h5py[found.name] = Layout(
                    stored, found.shape, chunks, found.axis, where, holes=holes, checked_by=checked_by
                )
            else:
                direct[found.name] = where
    stores: list[Store] = []
    if direct:
        stores.append(ExtentStore(direct, options.files))
    if through_h5py:
        stores.append(H5pyStore(file, options.files, rows, through_h5py))
    return side_by_side(stores, names)


def _found(file: FileId, name: str, dataset: Any, options: "OpenOptions") -> Found:
    axis = checked_axis(file.path, name, dataset.shape, options.row_axis_of(name))
    return Found(file, name, dataset, dataset.shape, axis)


def _shared_rows(h5: Any, path: str, options: "OpenOptions") -> list[str]:
    """All numeric datasets, provided they have as many rows as each other."""
    found = {
        name: item.shape[options.row_axis_of(name) % item.ndim]
        for name, item in _walk_datasets(h5)
        if item.ndim and _numeric(item.dtype)
    }
    if not found:
        raise Missing(f"{path}: no dataset of numbers with at least one axis; the file has {_contents(h5)}")
    common_rows(path, found, asked_for=False)
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
        try:
            item = group[name]
        except (KeyError, OSError, RuntimeError) as error:
            where = f"{group.file.filename}: {prefix}{name}"
            raise Corrupt(f"{where} cannot be opened ({error}); the file is damaged: fetch it again") from error
        if isinstance(item, h5py.Dataset):
            yield prefix + name, item
        elif isinstance(item, h5py.Group):
            yield from _walk_datasets(item, f"{prefix}{name}/", above | {address})


# Links to links beyond this are a ring.
DEEPEST_LINKS = 16


def _linked(h5: Any, path: str, name: str, depth: int = 0) -> Any:
    """What a name in a file stands for, by links within the file alone; None if there is no such thing.

    The library would open whatever file a link names, and wait for ever if that is a pipe.
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
                raise Corrupt(f"{path}: {name!r} is a link to a link more than {DEEPEST_LINKS} times: links in a ring")
            before = "" if link.path.startswith("/") else item.name
            found = _linked(h5, path, "/".join((before, link.path, *parts[number + 1 :])), depth + 1)
            if found is None:
                raise Missing(f"{path}: {name!r} is a link to nowhere ({link.path}); the file has {_contents(h5)}")
            return found
        item = item[part]
    return item


def _dataset(h5: Any, path: str, name: str) -> Any:
    import h5py

    try:
        item = _linked(h5, path, name)
    except (KeyError, OSError, RuntimeError, TypeError) as error:
        raise Corrupt(
            f"{path}: dataset {name!r} cannot be opened ({error}); the file is damaged: fetch it again"
        ) from error
    if not isinstance(item, h5py.Dataset):
        raise Missing(f"{path}: no dataset {name!r}; the file has {_contents(h5)}")
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


def _check_files(path: str, dataset: Any, options: "OpenOptions", depth: int = 0) -> None:
    """Refuse what would read other files than those beside this one, or in folders that the caller allows.

    What a virtual dataset is made of may be virtual too, or in external storage.
    """
    virtual = dataset.virtual_sources() if dataset.is_virtual else []
    sources = dict.fromkeys((each.file_name, each.dset_name) for each in virtual)
    others = [(os.fsdecode(entry[0]), None) for entry in dataset.external or ()]
    others += [each for each in sources if each[0] != "."]
    name = dataset.name.strip("/")
    if others and is_remote(path):
        raise Unsafe(f"{path}: dataset {name!r} refers to another file, which is not looked for on this machine")
    if depth > DEEPEST_LINKS:
        raise Corrupt(f"{path}: {name!r} is made of datasets made of datasets, more than {DEEPEST_LINKS} times")
    for inside in (inside for file, inside in sources if file == "."):
        if _linked(dataset.file, path, inside) is not None:
            _check_files(path, _dataset(dataset.file, path, inside), options, depth + 1)
    home = Path(path).resolve().parent
    for other, inside in others:
        for target in _targets(home, other):
            _check_place(path, name, target, (home, *(Path(each).resolve() for each in options.allow_external)))
            if target.is_file():
                if inside is not None:
                    _check_source(str(target), inside, options, depth)
            elif inside is None or not options.allow_fill:
                raise Missing(
                    f"{path}: dataset {name!r} refers to {target}, which is not there, and would read as the fill "
                    f"value {dataset.fillvalue}. Restore it, or pass allow_fill=True if it is meant to be missing"
                )


def _targets(home: Path, other: str) -> list[Path]:
    """The files that are meant; ``%b`` in a name stands for a number."""
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
        raise Unsafe(f"{path}: dataset {name!r} refers to {target}, which is no plain file")


def _check_source(path: str, name: str, options: "OpenOptions", depth: int) -> None:
    """The same for what a virtual dataset is made of."""
    file = options.files.identify(path)
    with opened(file, options.files) as h5:
        found = Found(file, name, _dataset(h5, path, name), (), 0)
        _check_files(path, found.dataset, options, depth + 1)
        _check_filters(found)


def _holes(found: Found, options: "OpenOptions") -> dict[int, int]:
    """What was never written of a dataset that h5py will read, by block of rows; an error unless it is allowed.

    What virtual datasets refer to, and other files hold, is not known here.
    """
    dataset = found.dataset
    if dataset.external or dataset.is_virtual or prod(found.shape) == 0:
        return {}
    empty = dataset.id.get_storage_size() == 0
    there = dataset.id.get_num_chunks() if dataset.chunks else 0
    if not empty and (not dataset.chunks or there >= prod(found.grid)):
        return {}
    if not options.allow_fill:
        raise found.never_written("no data are" if empty else f"{there:,} of {prod(found.grid):,} chunks are")
    if not dataset.chunks:
        return {0: 1}  # one piece, which counts once an epoch
    return found.holes()


# HDF5's own, and the one that h5py brings.
OWN_FILTERS = frozenset({1, 2, 3, 4, 5, 6, 32000})


def _installed_filters() -> frozenset[int]:
    """Those of hdf5plugin, which makes them known when it is imported; and asks for each, so that HDF5 would search."""
    with suppress(ImportError), _no_plugin_folders():
        import hdf5plugin

        return frozenset(hdf5plugin.FILTERS[name] for name in hdf5plugin.get_config().registered_filters)
    return frozenset()


@contextmanager
def _no_plugin_folders() -> Iterator[None]:
    """For a moment HDF5 has no folder to load libraries from."""
    from h5py import h5pl

    folders = [h5pl.get(number) for number in range(h5pl.size())]
    for _ in folders:
        h5pl.remove(0)
    try:
        yield
    finally:
        for folder in folders:
            h5pl.append(folder)


def _check_filters(found: Found) -> None:
    """Refuse a dataset that h5py cannot decode, now and not in the middle of an epoch.

    Asked for any other filter, HDF5 would load a library from a folder that its environment names: then a file would
    choose what code is run. Only what the packages installed here bring is used.
    """
    import h5py

    for number, _, label in found.filters:
        if number in OWN_FILTERS and h5py.h5z.filter_avail(number):
            continue
        if number not in _installed_filters():
            raise ConfigError(
                f"{found.file.path}: dataset {found.name!r} is written through filter {number} ({label}), which is not "
                f"installed; most such filters come with: pip install hdf5plugin. Filters that HDF5 would load from "
                f"HDF5_PLUGIN_PATH are not: write the data again without (h5repack -f {found.name}:NONE OLD NEW)"
            )
