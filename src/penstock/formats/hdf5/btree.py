"""Reads the chunk index of HDF5's first file format, a version 1 B-tree, without the library.

The library reports chunks one by one, in two seconds for 700,000 of them; numpy parses whole nodes in a tenth of that.
Rules:

1. Anything that differs from the format's specification raises ``IndexNotUnderstood``: the library then walks through
   the index instead: it knows all formats, and reports what is wrong with a damaged file.
2. Each level of the tree is read from the one above it, with no more nodes than the dataset can have chunks. So the
   walk through a damaged tree ends, wherever its addresses lead.
"""

import struct
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from penstock.base.file_id import FileId
from penstock.errors import Corrupt
from penstock.files.handles import check_unchanged
from penstock.files.mapping import map_file
from penstock.formats.hdf5.object_header import CONTINUED, LAYOUT, MOST_BLOCKS, NOWHERE, messages

NODES_AT_ONCE = 512

# Entries of a node, unless the file's writer chose otherwise: "indexed storage internal node K" is 32.
MOST_BELOW = 64

_HEADER_VERSION, _HEADER = 1, struct.Struct("<BxHII4x")
_MESSAGE = struct.Struct("<HH4x")


class IndexNotUnderstood(Exception):
    """The index is of another kind, or damaged."""


def read_chunks(file: FileId, dataset: Any, header_at: int, grid: tuple[int, ...]) -> Iterator[np.ndarray]:
    """All chunks of an h5py dataset, in groups: ``corner``, ``size``, ``mask`` and ``place`` of each."""
    if dataset.file.id.get_create_plist().get_sizes() != (8, 8):
        raise IndexNotUnderstood("addresses are not of 8 bytes")
    try:
        mapped = _MappedFile(file)
        root = _find_root(mapped, header_at, (*dataset.chunks, dataset.dtype.itemsize))
        where = f"{file.path}: dataset {dataset.name.strip('/')!r}"
        yield from _read_leaves(mapped, root, _make_node_type(dataset.ndim), prod(grid), where)
    except (OSError, ValueError, struct.error) as error:
        raise IndexNotUnderstood(str(error)) from error


class _MappedFile:
    """A mapped file. The system kills a process that reads beyond the end of one: so its size is checked each time."""

    def __init__(self, file: FileId) -> None:
        self._file, self._bytes = file, map_file(file.path)

    def read(self, address: int, size: int) -> bytes:
        check_unchanged(self._file)
        if address + size > len(self._bytes):
            raise IndexNotUnderstood("a header beyond the end of the file")
        return self._bytes[address : address + size].tobytes()

    def nodes(self, addresses: np.ndarray, node_type: np.dtype) -> np.ndarray:
        check_unchanged(self._file)
        last = len(self._bytes) - node_type.itemsize
        if int(addresses.max()) > last:
            raise IndexNotUnderstood("a node beyond the end of the file")
        found: np.ndarray = np.ndarray(last + 1, node_type, self._bytes, strides=(1,))[addresses]
        return found


def _find_root(mapped: _MappedFile, address: int, chunk: tuple[int, ...]) -> int:
    """The offset of the tree's root, from the dataset's object header."""
    version, _, _, size = _HEADER.unpack(mapped.read(address, _HEADER.size))
    if version != _HEADER_VERSION:
        raise IndexNotUnderstood(f"an object header of version {version}")
    blocks = [(address + _HEADER.size, size)]
    for begin, length in blocks:
        for kind, message in messages(mapped.read(begin, length), _MESSAGE):
            if kind == CONTINUED and len(blocks) < MOST_BLOCKS:
                blocks.append(struct.unpack_from("<QQ", message))
            elif kind == LAYOUT:
                expected = struct.pack("<BBB", 3, 2, len(chunk))  # version, chunked, axes
                root, *sizes = struct.unpack_from(f"<Q{len(chunk)}I", message, len(expected))
                if not message.startswith(expected) or tuple(sizes) != chunk:
                    raise IndexNotUnderstood("a chunk index of another kind")
                return int(root)
    raise IndexNotUnderstood("no layout message")


def _make_node_type(axes: int) -> np.dtype:
    """A node as stored: chunks, or nodes of the next level, each after its key."""
    key = [("size", "<u4"), ("mask", "<u4"), ("corner", "<u8", (axes,)), ("element", "<u8")]
    return np.dtype(
        [("sign", "S4"), ("kind", "u1"), ("level", "u1"), ("used", "<u2"), ("beside", "<u8", (2,)),
         ("below", [*key, ("place", "<u8")], (MOST_BELOW,)), ("last", key)]
    )  # fmt: skip


def _read_leaves(mapped: _MappedFile, root: int, node_type: np.dtype, most: int, where: str) -> Iterator[np.ndarray]:
    if root == NOWHERE:  # no chunk was ever written
        return
    addresses, level = np.array([root], np.uint64), None
    while level != 0:
        inner, found = [], 0
        expected = None if level is None else level - 1
        for begin in range(0, len(addresses), NODES_AT_ONCE):
            nodes = mapped.nodes(addresses[begin : begin + NODES_AT_ONCE], node_type)
            expected = int(nodes["level"][0]) if expected is None else expected
            below = _list_entries(nodes, expected)
            if not (ascending := _keys_ascend(nodes)).all():
                at = int(addresses[begin + int(ascending.argmin())])
                raise Corrupt(
                    f"{where}: its chunk index is out of order at offset {at:,}, so that HDF5 would miss some "
                    f"of its chunks and deliver the fill value instead. The file is damaged: fetch it again"
                )
            found += len(below)
            if found > most:
                raise IndexNotUnderstood("more chunks than there can be")
            if expected == 0:
                yield below
            else:
                inner.append(below["place"].copy())
        addresses, level = np.concatenate(inner) if inner else addresses, expected


def _keys_ascend(nodes: np.ndarray) -> np.ndarray:
    """Which nodes have ascending keys, which the library relies on to find chunks."""
    keys = [
        np.concatenate([each["corner"], each["element"][..., None]], axis=-1)
        for each in (nodes["below"], nodes["last"])
    ]
    whole = np.concatenate([keys[0], keys[1][:, None]], axis=1).astype(">u8")
    texts = np.ascontiguousarray(whole).view(f"S{8 * whole.shape[2]}")[..., 0]
    wrong = (texts[:, :-1] >= texts[:, 1:]) | (nodes["below"]["element"] != 0)
    return np.asarray(~(wrong & (np.arange(MOST_BELOW) < nodes["used"][:, None])).any(axis=1))


def _list_entries(nodes: np.ndarray, level: int) -> np.ndarray:
    """The entries of some nodes of one level."""
    known = (nodes["sign"] == b"TREE") & (nodes["kind"] == 1) & (nodes["level"] == level)
    if not known.all() or nodes["used"].max() > MOST_BELOW:
        raise IndexNotUnderstood(f"not a node of level {level}")
    return nodes["below"][np.arange(MOST_BELOW) < nodes["used"][:, None]]
