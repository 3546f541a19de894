"""Zarr, versions 2 and 3, in folders and zip archives.

Arrays whose metadata are understood are read and decoded here, others by zarr-python.

A chunk without a file is an error when it is read, unless ``allow_fill=True``: then it is the fill value, as Zarr
defines it, and loaders count it. Writers may leave out chunks that hold only the fill value, but a chunk that a copy
lost looks the same. An array without any chunk is refused when it is opened.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.spec import without_axis
from penstock.base.text_column import TextColumn
from penstock.dataset.extent_store import ExtentStore
from penstock.dataset.held_values import HeldValues
from penstock.dataset.memory import MemoryStore
from penstock.dataset.rewrite import side_by_side
from penstock.dataset.store import Store, StoreBase, as_base
from penstock.errors import ConfigError, Corrupt, LimitExceeded, Missing, SchemaMismatch, Unsafe
from penstock.files.files import Files
from penstock.formats.rows import checked_axis, common_rows, list_names
from penstock.formats.sparse import is_sparse, open_sparse, with_matrices
from penstock.formats.zarr.fallback import ZarrLayout, ZarrStore, find_absent_chunks, read_values
from penstock.formats.zarr.keys import FolderKeys, ZarrKeys, ZipKeys
from penstock.formats.zarr.metadata import ZarrArray, parse, zarr_array
from penstock.read.chunk_files import FileTable, Grid, ShardTable
from penstock.read.extents import Chunks, ChunkTable, Extents
from penstock.read.objects import ObjectDecoder

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions

FIELD = "data"
"""The name of the array if a store is one array and not a group."""

# Groups nested deeper than this are a ring of links.
DEEPEST = 32

# Arrays of a store, chunks along the rows of an array, chunks per row: more can only be declared, not written.
MOST_ARRAYS = 100_000
MOST_BLOCKS = 100_000_000
MOST_PIECES = 1_000_000

# How many chunk sizes identify a store whose other chunk sizes are unknown.
EVIDENCE = 8

MARKS = ("zarr.json", ".zarray", ".zgroup")


def is_store(path: str) -> bool:
    """Whether a folder or zip archive is a Zarr array or group."""
    keys = _open_keys(path, Files())
    return any(keys.read(mark) is not None for mark in MARKS)


def _open_keys(path: str, files: Files) -> ZarrKeys:
    return ZipKeys(path, files) if os.path.isfile(path) else FolderKeys(path, files)


@dataclass(frozen=True)
class StoredArray:
    """An array of a store."""

    name: str
    key: str
    """Its path below the root; empty for the root itself."""
    document: str
    """The key of its metadata."""
    array: ZarrArray
    axis: int
    """The axis of the rows."""

    @property
    def rows(self) -> int:
        return self.array.shape[self.axis]

    @property
    def prefix(self) -> str:
        return f"{self.key}/" if self.key else ""


def open_store(path: str, options: "OpenOptions") -> Store:
    """The rows of the arrays of one store."""
    if os.path.isfile(path):
        options.files.compare_whole(path)
    keys = _open_keys(path, options.files)
    matrices = {name: about for name in options.fields or () if is_sparse(about := _read_attributes(keys, name))}
    if matrices:
        return _open_matrices(path, matrices, options)
    nodes = dict(_find_named(keys, options.fields or ()) or islice(_list_arrays(keys, options, set()), MOST_ARRAYS + 1))
    if len(nodes) > MOST_ARRAYS:
        raise LimitExceeded(f"{path}: has more than {MOST_ARRAYS:,} arrays. Choose some of them with fields=(…)")
    if not nodes:
        raise Missing(f"{path}: no Zarr array in it; expected zarr.json or .zarray, in it or in its subfolders")
    names = _choose_names(keys, path, nodes, options)
    if options.fields is None and "" not in nodes and not nodes.keys() >= set(names):
        return open_store(path, replace(options, fields=names))
    found = [_load_array(keys, path, name, nodes, options) for name in names]
    rows = common_rows(path, {each.name: each.rows for each in found}, asked_for=True)
    direct: dict[str, Extents] = {}
    empty: dict[str, np.ndarray] = {}
    through_zarr: dict[str, tuple[StoredArray, str]] = {}
    values: dict[str, tuple[ObjectDecoder, TextColumn]] = {}
    for each in found:
        _check_safe(keys, each)
        if each.array.holds:
            _check_written(keys, each, options)
            values[each.name] = read_values(keys, each.key, each.array.holds)
            continue
        if prod(each.array.shape) == 0:
            empty[each.name] = np.empty((rows, *without_axis(each.array.shape, each.axis)), each.array.stored)
            continue
        _check_grid(keys, each)
        where = each.array.why or _make_chunks(keys, each, options)
        if isinstance(where, str):
            through_zarr[each.name] = (each, where)
        else:
            direct[each.name] = where
    stores: list[StoreBase] = [MemoryStore(empty)] if empty else []
    if direct:
        stores.append(ExtentStore(direct, options.files))
    if through_zarr:
        stores.append(_open_through_zarr(keys, through_zarr, rows, options))
    if values:
        stores.append(HeldValues(keys.identity(found[0].document), values))
    return side_by_side(stores, names)


def _open_matrices(path: str, matrices: Mapping[str, Mapping[str, Any]], options: "OpenOptions") -> Store:
    """Sparse matrices, and the other fields that were named."""

    def opened(names: tuple[str, ...]) -> StoreBase:
        return as_base(open_store(path, replace(options, fields=names)))

    assert options.fields is not None
    stores = [open_sparse(path, name, about, opened) for name, about in matrices.items()]
    if others := tuple(name for name in options.fields if name not in matrices):
        stores.append(opened(others))
    common_rows(path, {next(iter(each.fields)): len(each) for each in stores}, asked_for=True)
    return side_by_side(stores, options.fields)


def _read_attributes(keys: ZarrKeys, name: str) -> Mapping[str, Any]:
    """Of the group of this name."""
    key = _check_inside(keys, name)
    document = _read(keys, f"{key}/zarr.json")
    found = _read(keys, f"{key}/.zattrs") if document is None else document.get("attributes")
    return found if isinstance(found, dict) else {}


# Arrays of a store.


def _list_arrays(
    keys: ZarrKeys, options: "OpenOptions", seen: set[str], key: str = "", depth: int = 0
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Arrays at any depth: key and metadata. If the store has a list of all (consolidated metadata), that is used.

    Each group is visited once (``seen``): a few groups that link to each other have an endless number of names.
    """
    prefix = f"{key}/" if key else ""
    if depth > DEEPEST:
        raise Corrupt(f"{keys.path(key)}: more than {DEEPEST} groups inside each other, perhaps links in a ring")
    document = _read(keys, f"{prefix}zarr.json") or _read(keys, f"{prefix}.zarray")
    if document and not _is_group(document):
        yield key, document
        return
    listed = _read_consolidated(keys, prefix, document)
    if listed is not None:
        yield from ((f"{prefix}{_check_inside(keys, name)}", each) for name, each in listed.items())
        return
    if document is None and _read(keys, f"{prefix}.zgroup") is None:
        if key and options.fields is None and not key.rpartition("/")[2].startswith("."):
            options.leave_out(key, "no metadata: expected zarr.json, .zarray or .zgroup in its folder")
        return
    if (place := keys.place(key)) in seen:
        return
    seen.add(place)
    for name in keys.children(prefix):
        _check_inside(keys, f"{prefix}{name}")
        yield from _list_arrays(keys, options, seen, f"{prefix}{name}", depth + 1)


def _check_inside(keys: ZarrKeys, name: str) -> str:
    """A name as a key; names that lead out of the store are refused."""
    key = name.strip("/")
    plain = unquote(key)  # as a server would see it
    if any(part in ("", ".", "..") for part in plain.split("/")) or "\0" in plain or "\\" in plain:
        raise Unsafe(
            f"{keys.root}: an array named {name!r}, which is outside of the store; open that store itself if you "
            f"trust it"
        )
    if not keys.holds(key):
        raise Unsafe(f"{keys.path(key)}: is a link that leads out of the store; open its target itself if you trust it")
    return key


def _find_named(keys: ZarrKeys, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The arrays of these names if all are there: then the store need not be listed."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        key = _check_inside(keys, name)
        document = _read(keys, f"{key}/zarr.json") or _read(keys, f"{key}/.zarray")
        if document is None or _is_group(document):
            return {}
        found[key] = document
    return found


def _read_consolidated(
    keys: ZarrKeys, prefix: str, group: dict[str, Any] | None
) -> Mapping[str, dict[str, Any]] | None:
    """Metadata of all arrays below a group, if the group has them in one place."""
    if group is not None:
        kept = group.get("consolidated_metadata")
        listed = kept.get("metadata") if isinstance(kept, dict) else None
        if not isinstance(listed, dict):
            return None
        return {name: each for name, each in listed.items() if not _is_group(each)}
    kept = _read(keys, f"{prefix}.zmetadata")
    listed = kept.get("metadata") if kept else None
    if not isinstance(listed, dict):
        return None
    return {name.removesuffix("/.zarray"): each for name, each in listed.items() if name.endswith("/.zarray")}


def _is_group(document: object) -> bool:
    return isinstance(document, dict) and document.get("node_type") == "group"


def _read(keys: ZarrKeys, key: str) -> dict[str, Any] | None:
    text = keys.read(key)
    return None if text is None else parse(text, keys.path(key))


def _choose_names(
    keys: ZarrKeys, path: str, nodes: Mapping[str, dict[str, Any]], options: "OpenOptions"
) -> tuple[str, ...]:
    """The fields asked for, or all arrays of numbers, which must have the same number of rows."""
    if "" in nodes:
        names = options.fields or (FIELD,)
        if len(names) != 1:
            raise ConfigError(f"{path}: is one array, but fields names {len(names)}: {', '.join(names)}")
        return names
    if options.fields:
        return options.fields
    arrays = {name: zarr_array(document, f"{path}: {name}") for name, document in nodes.items()}
    found = {
        name: array.shape[options.row_axis_of(name) % len(array.shape)]
        for name, array in arrays.items()
        if (array.stored is not None or array.holds) and array.shape
    }
    if not found:
        raise Missing(f"{path}: no array of numbers with at least one axis; it has {list_names(nodes)}")
    found = with_matrices(found, lambda name: _read_attributes(keys, name))
    rows = common_rows(path, found, asked_for=False)
    for name, array in arrays.items():
        if name in found or not array.shape:
            continue
        if array.shape[options.row_axis_of(name) % len(array.shape)] == rows:
            options.leave_out(name, f"{array.kind} {array.shape}, no numbers")
    return tuple(found)


def _load_array(
    keys: ZarrKeys, path: str, name: str, nodes: Mapping[str, dict[str, Any]], options: "OpenOptions"
) -> StoredArray:
    key = "" if "" in nodes else name.strip("/")
    if key not in nodes:
        raise Missing(f"{path}: no array {name!r}; it has {list_names(nodes)}")
    prefix = f"{key}/" if key else ""
    document = f"{prefix}zarr.json" if nodes[key].get("zarr_format") == 3 else f"{prefix}.zarray"
    own = _read(keys, document)  # consolidated metadata can be older than the array
    if own is None:
        raise Missing(f"{keys.path(document)}: is listed in the group, but missing; restore it")
    array = zarr_array(own, keys.path(document))
    if (array.stored is None and not array.holds) or not array.shape:
        kind = f"{array.kind} of shape {array.shape}"
        raise SchemaMismatch(
            f"{path}: array {name!r} is {kind}; expected numbers with one row per sample. Leave it out with fields=(…)"
        )
    axis = checked_axis(path, name, array.shape, options.row_axis_of(name))
    return StoredArray(name, key, document, array, axis)


def _check_safe(keys: ZarrKeys, found: StoredArray) -> None:
    """Refuse codecs that would run code from the data."""
    document = _read(keys, found.document) or {}
    steps = [*(document.get("filters") or []), document.get("compressor"), *(document.get("codecs") or [])]
    for step in steps:
        if isinstance(step, dict) and "pickle" in str(step.get("id") or step.get("name")):
            raise Unsafe(
                f"{keys.path(found.document)}: array {found.name!r} is stored by pickle, and reading it would run "
                f"code from it; if you trust it, copy it with another codec"
            )


# The place of chunks.


def _check_grid(keys: ZarrKeys, found: StoredArray) -> None:
    """Refuse too many chunks: a few bytes can declare any number."""
    array, axis = found.array, found.axis
    steps = array.chunk or array.outer
    if len(steps) != len(array.shape):
        return  # the reader of the metadata reports it
    counts = tuple(-(-size // step) for size, step in zip(array.shape, steps, strict=True))
    blocks, pieces = counts[axis], prod(without_axis(counts, axis))
    too_many_blocks = blocks > MOST_BLOCKS and steps[axis] > 1
    if pieces > MOST_PIECES or too_many_blocks or (isinstance(keys, ZipKeys) and blocks * pieces > MOST_BLOCKS):
        raise LimitExceeded(
            f"{keys.path(found.document)}: array {found.name!r} of {array.shape} in chunks of {steps} has {blocks:,} "
            f"times {pieces:,} chunks, along its rows and in each of them; at most {MOST_BLOCKS:,} and {MOST_PIECES:,} "
            f"are read. Leave it out with fields=(…), or write it again in larger chunks"
        )
    if prod(array.shape) >= 2**63:
        raise Corrupt(
            f"{keys.path(found.document)}: array {found.name!r} has shape {array.shape}: more elements than can be "
            f"counted. Restore the file"
        )


def _make_chunks(keys: ZarrKeys, found: StoredArray, options: "OpenOptions") -> Chunks | str:
    array, axis = found.array, found.axis
    assert array.stored is not None
    table = _make_table(keys, found, options.files.policy.kept_shard_index_bytes)
    if isinstance(table, str):
        return table
    whole = tuple(1 if each == axis else size for each, size in enumerate(array.shape))
    _check_written(keys, found, options)
    return Chunks(
        file=keys.identity(found.document), name=found.name, stored=array.stored, shape=without_axis(array.shape, axis),
        rows=found.rows, rows_per_chunk=array.chunk[axis], chunk=without_axis(array.chunk, axis), table=table,
        codecs=array.codecs, row_axis=axis, fill=array.fill_element if options.allow_fill else None, axes=array.axes,
        remedy=f"a copy with chunks={whole}", fill_text=array.fill_text,
        evidence=table.sizes(EVIDENCE) if isinstance(table, FileTable) else (),
    )  # fmt: skip


def _make_table(keys: ZarrKeys, found: StoredArray, kept_index_bytes: int) -> ChunkTable | str:
    array = found.array
    grid = Grid(tuple(-(-size // step) for size, step in zip(array.shape, array.chunk, strict=True)), found.axis)
    if isinstance(keys, FolderKeys):
        names = keys.names(found.key, array.before, array.separator)
        if array.index is None:
            return FileTable(grid, names, array.longest)
        return ShardTable(grid, names, array.longest, array.index, kept_index_bytes)
    members = keys.chunks(found.prefix, array.before, array.separator, array.files)
    if members is None:
        return "its chunks are compressed again by the zip archive"
    if array.index:
        return ShardTable(grid, members, array.longest, array.index, kept_index_bytes)
    return members.table(grid)


def _check_written(keys: ZarrKeys, found: StoredArray, options: "OpenOptions") -> None:
    if options.allow_fill or options.on_error == "skip":
        return
    if not keys.has_chunks(found.prefix, found.array.before):
        raise Missing(
            f"{keys.path(found.prefix)}: of array {found.name!r} no chunk was ever written, so that all of it would "
            f"read as the fill value {found.array.fill_text}. Restore its chunks, or pass allow_fill=True to accept "
            f"that"
        )


def _open_through_zarr(
    keys: ZarrKeys, arrays: Mapping[str, tuple[StoredArray, str]], rows: int, options: "OpenOptions"
) -> ZarrStore:
    if isinstance(keys, FolderKeys) and keys.is_remote:
        reasons = "; ".join(f"{name!r}: {why}" for name, (_, why) in arrays.items())
        raise ConfigError(
            f"{keys.root}: has arrays that only zarr-python can read ({reasons}); copy the store to this machine first"
        )
    options.files.compare_whole(keys.root)
    layouts = {}
    for name, (found, why) in arrays.items():
        _check_written(keys, found, options)
        holes = find_absent_chunks(keys, found.key, name, found.axis, allowed=options.allow_fill)
        array = found.array
        assert array.stored is not None
        layouts[name] = ZarrLayout(array.stored, array.shape, array.outer, found.axis, why, holes=holes)
    file = keys.identity(next(iter(arrays.values()))[0].document)
    return ZarrStore(file, rows, layouts, keys.root, {name: found.key for name, (found, _) in arrays.items()})
