"""Zarr, versions 2 and 3, in folders and zip archives.

Chunks are read and decoded here wherever an array's metadata are understood, and by zarr-python elsewhere.

A chunk without a file is an error when it is read, unless ``allow_fill=True``: then it is the fill value, as Zarr
defines it, and loaders count it. Writers may leave out chunks that hold nothing else, but a chunk that a copy lost
looks the same. An array of which no chunk at all was written is refused when it is opened.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from penstock.chunkfiles import FileTable, Grid, ShardTable
from penstock.combine import side_by_side
from penstock.errors import ConfigError, Corrupt, Missing, SchemaMismatch, Unsafe
from penstock.extents import Chunks, ChunkTable, Extents
from penstock.fileio import Files
from penstock.formats.memory import MemoryStore
from penstock.formats.rows import checked_axis, common_rows
from penstock.formats.zarr_keys import Folder, Zip
from penstock.formats.zarr_metadata import ZarrArray, parse, zarr_array
from penstock.formats.zarr_store import Layout, ZarrStore, absent_chunks
from penstock.store import ExtentStore, Store

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions

FIELD = "data"
"""What the array is called where a store is one array and no group."""

# Groups inside groups beyond this are links in a ring.
DEEPEST = 32

# So many chunks are looked at to tell one store from another, where it is not known what all take.
EVIDENCE = 8

MARKS = ("zarr.json", ".zarray", ".zgroup")


def is_store(path: str) -> bool:
    """Whether a folder or zip archive is a Zarr array or group."""
    keys = _keys(path, Files())
    return any(keys.read(mark) is not None for mark in MARKS)


def _keys(path: str, files: Files) -> Folder | Zip:
    return Zip(path, files) if os.path.isfile(path) else Folder(path, files)


@dataclass(frozen=True)
class Found:
    """An array of a store."""

    name: str
    key: str
    """Where it is, below the root; empty for the root itself."""
    document: str
    """What its metadata are in."""
    array: ZarrArray
    axis: int
    """That of the rows."""

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
    keys = _keys(path, options.files)
    nodes = dict(_asked_for(keys, options.fields or ()) or _nodes(keys))
    if not nodes:
        raise Missing(f"{path}: no Zarr array in it; expected zarr.json or .zarray, there or below")
    names = _names(path, nodes, options)
    found = [_found(keys, path, name, nodes, options) for name in names]
    rows = common_rows(path, {each.name: each.rows for each in found}, asked_for=True)
    direct: dict[str, Extents] = {}
    empty: dict[str, np.ndarray] = {}
    through_zarr: dict[str, tuple[Found, str]] = {}
    for each in found:
        _check_safe(keys, each)
        if prod(each.array.shape) == 0:
            empty[each.name] = np.empty((rows, *_without(each.array.shape, each.axis)), each.array.stored)
            continue
        where = each.array.why or _chunks(keys, each, options)
        if isinstance(where, str):
            through_zarr[each.name] = (each, where)
        else:
            direct[each.name] = where
    stores: list[Store] = [MemoryStore(empty)] if empty else []
    if direct:
        stores.append(ExtentStore(direct, options.files))
    if through_zarr:
        stores.append(_through_zarr(keys, through_zarr, rows, options))
    return side_by_side(stores, names)


# What there is.


def _nodes(keys: Folder | Zip, key: str = "", depth: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Arrays at any depth: where each is, and its metadata. A list that the store keeps of them all is believed."""
    prefix = f"{key}/" if key else ""
    if depth > DEEPEST:
        raise Corrupt(f"{keys.path(key)}: more than {DEEPEST} groups inside each other, perhaps links in a ring")
    document = _read(keys, f"{prefix}zarr.json") or _read(keys, f"{prefix}.zarray")
    if document and document.get("node_type", "array") == "array":
        yield key, document
        return
    listed = _consolidated(keys, prefix, document)
    if listed is not None:
        yield from ((f"{prefix}{_inside(keys, name)}", each) for name, each in listed.items())
        return
    if document is None and _read(keys, f"{prefix}.zgroup") is None:
        return
    for name in keys.children(prefix):
        _inside(keys, f"{prefix}{name}")
        yield from _nodes(keys, f"{prefix}{name}", depth + 1)


def _inside(keys: Folder | Zip, name: str) -> str:
    """A name as a key; one that would lead out of the store is refused."""
    key = name.strip("/")
    told = unquote(key)  # as a server would see it
    if any(part in ("", ".", "..") for part in told.split("/")) or "\0" in told or "\\" in told:
        raise Unsafe(
            f"{keys.root}: an array named {name!r}, which would lie outside of the store; open that store itself if "
            f"you mean it"
        )
    if not keys.holds(key):
        raise Unsafe(
            f"{keys.path(key)}: is a link that leads outside of the store; open what it leads to if you mean it"
        )
    return key


def _asked_for(keys: Folder | Zip, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The arrays named, if all are there: then nobody needs to list the others."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        key = _inside(keys, name)
        document = _read(keys, f"{key}/zarr.json") or _read(keys, f"{key}/.zarray")
        if document is None or document.get("node_type", "array") != "array":
            return {}
        found[key] = document
    return found


def _consolidated(keys: Folder | Zip, prefix: str, group: dict[str, Any] | None) -> Mapping[str, dict[str, Any]] | None:
    """Metadata of all arrays below a group, where the group has them in one place."""
    if group is not None:
        kept = group.get("consolidated_metadata")
        listed = kept.get("metadata") if isinstance(kept, dict) else None
        if not isinstance(listed, dict):
            return None
        return {name: each for name, each in listed.items() if _is_array(each)}
    kept = _read(keys, f"{prefix}.zmetadata")
    listed = kept.get("metadata") if kept else None
    if not isinstance(listed, dict):
        return None
    documents = {name.removesuffix("/.zarray"): each for name, each in listed.items() if name.endswith("/.zarray")}
    return {name: each for name, each in documents.items() if isinstance(each, dict)}


def _is_array(document: object) -> bool:
    return isinstance(document, dict) and document.get("node_type") == "array"


def _read(keys: Folder | Zip, key: str) -> dict[str, Any] | None:
    text = keys.read(key)
    return None if text is None else parse(text, keys.path(key))


def _names(path: str, nodes: Mapping[str, dict[str, Any]], options: "OpenOptions") -> tuple[str, ...]:
    """The fields asked for, or all arrays of numbers, provided they have as many rows as each other."""
    if "" in nodes:
        names = options.fields or (FIELD,)
        if len(names) != 1:
            raise ConfigError(f"{path}: is one array, and {len(names)} fields were asked for: {', '.join(names)}")
        return names
    if options.fields:
        return options.fields
    arrays = {name: zarr_array(document, f"{path}: {name}") for name, document in nodes.items()}
    found = {
        name: array.shape[options.row_axis_of(name) % len(array.shape)]
        for name, array in arrays.items()
        if array.stored is not None and array.shape
    }
    if not found:
        raise Missing(f"{path}: no array of numbers with at least one axis; it has {_told(nodes)}")
    common_rows(path, found, asked_for=False)
    return tuple(found)


def _told(nodes: Mapping[str, object]) -> str:
    names = list(nodes)
    shown = ", ".join(map(repr, names[:10]))
    return f"{shown} and {len(names) - 10} more" if len(names) > 10 else shown


def _found(
    keys: Folder | Zip, path: str, name: str, nodes: Mapping[str, dict[str, Any]], options: "OpenOptions"
) -> Found:
    key = "" if "" in nodes else name.strip("/")
    if key not in nodes:
        raise Missing(f"{path}: no array {name!r}; it has {_told(nodes)}")
    prefix = f"{key}/" if key else ""
    document = f"{prefix}zarr.json" if nodes[key].get("zarr_format") == 3 else f"{prefix}.zarray"
    own = _read(keys, document)  # a list of all can be older than the arrays
    if own is None:
        raise Missing(f"{keys.path(document)}: is listed in the group, and not there; restore it")
    array = zarr_array(own, keys.path(document))
    if array.stored is None or not array.shape:
        kind = f"{array.kind} of shape {array.shape}"
        raise SchemaMismatch(
            f"{path}: array {name!r} is {kind}; expected numbers with one row a sample. Leave it out with fields=(…)"
        )
    axis = checked_axis(path, name, array.shape, options.row_axis_of(name))
    return Found(name, key, document, array, axis)


def _check_safe(keys: Folder | Zip, found: Found) -> None:
    """Refuse codecs that would run what the bytes say."""
    document = _read(keys, found.document) or {}
    steps = [*(document.get("filters") or []), document.get("compressor"), *(document.get("codecs") or [])]
    for step in steps:
        if isinstance(step, dict) and "pickle" in str(step.get("id") or step.get("name")):
            raise Unsafe(
                f"{keys.path(found.document)}: array {found.name!r} is stored through pickle, and reading it would run "
                f"code from it; copy it with another codec where you trust it"
            )


# Where it lies.


def _without(sizes: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*sizes[:axis], *sizes[axis + 1 :])


def _chunks(keys: Folder | Zip, found: Found, options: "OpenOptions") -> Chunks | str:
    array, axis = found.array, found.axis
    assert array.stored is not None
    table = _table(keys, found)
    if isinstance(table, str):
        return table
    whole = tuple(1 if each == axis else size for each, size in enumerate(array.shape))
    _check_written(keys, found, options)
    return Chunks(
        keys.identity(found.document), found.name, array.stored, _without(array.shape, axis), found.rows,
        array.chunk[axis], _without(array.chunk, axis), table, array.codecs, axis,
        _fill(array) if options.allow_fill else None, array.axes, f"a copy with chunks={whole}",
        table.sizes(EVIDENCE) if isinstance(table, FileTable) else (), _told_fill(array),
    )  # fmt: skip


def _table(keys: Folder | Zip, found: Found) -> ChunkTable | str:
    array = found.array
    grid = Grid(tuple(-(-size // step) for size, step in zip(array.shape, array.chunk, strict=True)), found.axis)
    if isinstance(keys, Folder):
        names = keys.names(found.key, array.before, array.separator)
        if array.index is None:
            return FileTable(grid, names, array.longest)
        return ShardTable(grid, names, array.longest, array.index)
    members = keys.members(found.prefix, array.before, array.separator, array.files)
    if members is None:
        return "its chunks are compressed once more by the zip archive"
    return ShardTable(grid, members, array.longest, array.index) if array.index else members.table(grid)


def _fill(array: ZarrArray) -> bytes:
    """The element that stands for what was never written; 0 where the metadata name none."""
    assert array.stored is not None
    return bytes(array.stored.itemsize) if array.fill is None else array.fill


def _told_fill(array: ZarrArray) -> str:
    assert array.stored is not None
    return str(np.frombuffer(_fill(array), array.stored)[0])


def _check_written(keys: Folder | Zip, found: Found, options: "OpenOptions") -> None:
    if options.allow_fill or options.on_error == "skip":
        return
    if not keys.has_chunks(found.prefix, found.array.before):
        raise Missing(
            f"{keys.path(found.prefix)}: of array {found.name!r} no chunk was ever written, so that all of it would "
            f"read as the fill value {_told_fill(found.array)}. Restore its chunks, or pass allow_fill=True to accept "
            f"that"
        )


def _through_zarr(
    keys: Folder | Zip, arrays: Mapping[str, tuple[Found, str]], rows: int, options: "OpenOptions"
) -> ZarrStore:
    if isinstance(keys, Folder) and keys.is_remote:
        told = "; ".join(f"{name!r}: {why}" for name, (_, why) in arrays.items())
        raise ConfigError(
            f"{keys.root}: has arrays that only zarr-python can read ({told}); fetch the store to do that"
        )
    options.files.compare_whole(keys.root)
    layouts = {}
    for name, (found, why) in arrays.items():
        _check_written(keys, found, options)
        holes = absent_chunks(keys, found.key, name, found.axis, allowed=options.allow_fill)
        array = found.array
        assert array.stored is not None
        layouts[name] = Layout(array.stored, array.shape, array.outer, found.axis, why, holes=holes)
    file = keys.identity(next(iter(arrays.values()))[0].document)
    return ZarrStore(file, rows, layouts, keys.root, {name: found.key for name, (found, _) in arrays.items()})
