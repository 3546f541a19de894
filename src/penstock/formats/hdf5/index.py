"""Checks the headers of HDF5's newer chunk indices before the library uses them.

The library trusts them. Given records of a wrong size, nodes of a gigabyte or too many entries, it divides by zero,
reads foreign memory, or does not end. Each header repeats values of the dataset's own layout message, so the two must
agree. Indices of unknown kinds are left to the library.
"""

import struct
from collections.abc import Iterator
from contextlib import suppress
from math import prod
from typing import Any

from penstock.base.file_id import FileId
from penstock.errors import Corrupt
from penstock.files.handles import check_unchanged
from penstock.files.mapping import map_file
from penstock.formats.hdf5.object_header import CONTINUED, LAYOUT, MOST_BLOCKS, NOWHERE, messages

_MESSAGE, _NUMBERED_MESSAGE = struct.Struct("<BHx"), struct.Struct("<BH3x")

# The library skips this many empty entries in a second or two.
_FEW_ENTRIES = 1_000_000


def check_index(file: FileId, dataset: Any, header_at: int) -> None:
    """Refuse a dataset whose chunk index contradicts it; does nothing without an index, or for one of another kind."""
    plain = dataset.file.id.get_create_plist().get_sizes() == (8, 8) and not dataset.file.userblock_size
    if file.is_growing or not file.can_be_mapped or not dataset.chunks or not plain:
        return
    check_unchanged(file)
    mapped = map_file(file.path).data
    with suppress(struct.error):
        for message in _find_layouts(mapped, header_at):
            for what, found, least, most in _list_rules(mapped, dataset, message):
                if not least <= found <= most:
                    expected = f"{least:,}" if least == most else f"{least:,} to {most:,}"
                    raise Corrupt(
                        f"{file.path}: the chunk index of dataset {dataset.name!r} has {found:,} as its {what}, "
                        f"expected {expected}. The file is damaged: fetch it again"
                    )


def _find_layouts(mapped: memoryview, address: int) -> Iterator[bytes]:
    """The layout message of a dataset, if its object header is of the newer kind."""
    sign, version, flags = struct.unpack_from("<4sBB", mapped, address)
    if sign != b"OHDR" or version != 2:
        return
    begin = address + 6 + 16 * bool(flags & 0x20) + 4 * bool(flags & 0x10)
    width = 1 << (flags & 3)
    blocks = [(begin + width, int.from_bytes(mapped[begin : begin + width].tobytes(), "little"))]
    head = _NUMBERED_MESSAGE if flags & 0x04 else _MESSAGE
    for at, length in blocks:
        for kind, message in messages(mapped[at : at + length].tobytes(), head):
            if kind == CONTINUED and len(blocks) < MOST_BLOCKS:
                place, size = struct.unpack_from("<QQ", message)
                blocks.append((place + 4, max(0, size - 8)))  # between a signature and a checksum
            elif kind == LAYOUT:
                yield message


Rule = tuple[str, int, int, int]
"""The meaning of a number, its value, and its smallest and largest valid value."""


def _list_rules(mapped: memoryview, dataset: Any, message: bytes) -> Iterator[Rule]:
    version, kind, _, axes, width = struct.unpack_from("<5B", message)
    if version not in (4, 5) or (kind, axes) != (2, dataset.ndim + 1):
        return
    at = 5 + axes * width
    index, given = message[at], message[at + 1 : -8]
    (address,) = struct.unpack_from("<Q", message, len(message) - 8)
    if address == NOWHERE:
        return
    entry = _entry_bytes(dataset, version)
    if index == 3:
        yield from _rules_of_fixed_array(mapped, dataset, address, given, entry)
    elif index == 4:
        yield from _rules_of_extensible_array(mapped, dataset, address, given, entry)
    elif index == 5:
        yield from _rules_of_tree(mapped, dataset, address, given, entry)


def _rules_of_fixed_array(mapped: memoryview, dataset: Any, address: int, given: bytes, entry: int) -> Iterator[Rule]:
    sign, _, client, size, page_bits, entries = struct.unpack_from("<4s4BQ", mapped, address)
    yield "sign", int.from_bytes(sign, "big"), *_sign_twice(b"FAHD")
    yield "kind", client, *[_is_filtered(dataset)] * 2
    yield "bytes of an entry", size, entry, entry
    yield "bits of a page", page_bits, given[0], given[0]
    yield "number of entries", entries, *[_most_chunks(dataset)] * 2


def _rules_of_extensible_array(
    mapped: memoryview, dataset: Any, address: int, given: bytes, entry: int
) -> Iterator[Rule]:
    sign, _, client, size, bits, inside, smallest, pointers, page_bits = struct.unpack_from("<4s8B", mapped, address)
    yield "sign", int.from_bytes(sign, "big"), *_sign_twice(b"EAHD")
    yield "kind", client, *[_is_filtered(dataset)] * 2
    yield "bytes of an entry", size, entry, entry
    names = ("bits of a number", "entries of its first block", "least pointers", "least entries", "bits of a page")
    for what, found, expected in zip(names, (bits, inside, pointers, smallest, page_bits), given, strict=False):
        yield what, found, expected, expected
    (last,) = struct.unpack_from("<Q", mapped, address + 12 + 4 * 8)
    yield "last entry", last, 0, _most_chunks(dataset) + len(mapped) + _FEW_ENTRIES


def _rules_of_tree(mapped: memoryview, dataset: Any, address: int, given: bytes, entry: int) -> Iterator[Rule]:
    head = struct.unpack_from("<4sBBIHHBBQHQ", mapped, address)
    sign, _, kind, node, record, depth, _, _, _, in_root, records = head
    (node_given,) = struct.unpack_from("<I", given)
    filtered, size = _is_filtered(dataset), entry + 8 * dataset.ndim
    yield "sign", int.from_bytes(sign, "big"), *_sign_twice(b"BTHD")
    yield "kind", kind, 10 + filtered, 10 + filtered
    yield "bytes of a node", node, node_given, node_given
    yield "bytes of a node", node, 10 + size, len(mapped)
    yield "bytes of a record", record, size, size
    yield "records of its root", in_root, 0, (node - 10) // size
    yield "number of records", records, in_root, len(mapped) // size if depth else in_root
    yield "depth", depth, 0, max(0, records.bit_length() - 1)


def _sign_twice(sign: bytes) -> tuple[int, int]:
    number = int.from_bytes(sign, "big")
    return number, number


def _is_filtered(dataset: Any) -> int:
    return int(dataset.id.get_create_plist().get_nfilters() > 0)


def _entry_bytes(dataset: Any, version: int) -> int:
    """Bytes of an entry: the chunk's offset; with filters, also its length and the filters that it skipped."""
    if not _is_filtered(dataset):
        return 8
    if version == 5:
        return 8 + 8 + 4
    chunk_bytes = int(prod(dataset.chunks)) * int(dataset.id.get_type().get_size())
    return 8 + min(8, 1 + (chunk_bytes.bit_length() + 7) // 8) + 4


def _most_chunks(dataset: Any) -> int:
    """Chunks of the largest shape that the dataset may have; along unlimited axes, of its present shape."""
    sizes = (most or size for most, size in zip(dataset.maxshape, dataset.shape, strict=True))
    return prod(-(-size // step) for size, step in zip(sizes, dataset.chunks, strict=True))
