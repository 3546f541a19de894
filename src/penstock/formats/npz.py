"""NumPy's archives. Arrays saved by ``np.savez`` lie in the file as they are, and are read in place.

Those saved by ``np.savez_compressed`` can only be decoded from their beginning, and are held in memory.
"""

from typing import TYPE_CHECKING

import numpy as np

from penstock.combine import side_by_side
from penstock.errors import Corrupt, DataError, DecodeFailed, Missing, SchemaMismatch
from penstock.extents import Contiguous, Extents
from penstock.formats.held import HeldStore, check_can_be_held
from penstock.formats.rows import common_rows
from penstock.kinds import HEAD_BYTES, Npy
from penstock.steady import open_steady
from penstock.store import ExtentStore, Store
from penstock.ziptable import HEADER_BYTES, ZipTable, zip_table

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions

COMPRESSED = "saved by np.savez_compressed, whose arrays can only be decoded from their beginning"


def is_npz(path: str) -> bool:
    """Whether a zip archive begins with an array."""
    with open_steady(path) as file:
        header = file.read(HEADER_BYTES)
        name = file.read(int.from_bytes(header[26:28], "little"))
    return name.endswith(b".npy")


def open_file(path: str, options: "OpenOptions") -> Store:
    """The rows of the arrays of one archive."""
    table = zip_table(path, options.files)
    names = options.fields or _shared_rows(table)
    direct: dict[str, Extents] = {}
    held: dict[str, np.ndarray] = {}
    for name in names:
        number = _number(table, name)
        if table.compressed[number]:
            held[name] = _decoded(table, number)
        else:
            direct[name] = _in_place(table, name, number)
    counts = {name: array.rows for name, array in direct.items()} | {name: len(array) for name, array in held.items()}
    common_rows(path, counts, asked_for=True)
    stores: list[Store] = [ExtentStore(direct, options.files)] if direct else []
    if held:
        stores.append(HeldStore(table.file, held, COMPRESSED, "crc32"))
    return side_by_side(stores, names)


def _shared_rows(table: ZipTable) -> list[str]:
    """All arrays of numbers, provided they have as many rows as each other."""
    found = {}
    for number, full in enumerate(table.names):
        head = _head(table, number)
        if head.shape and full.endswith(".npy"):
            found[full.removesuffix(".npy")] = head.shape[0]
    if not found:
        raise Missing(
            f"{table.file.path}: no array with one row a sample; it has {', '.join(table.names) or 'nothing'}"
        )
    common_rows(table.file.path, found, asked_for=False)
    return list(found)


def _number(table: ZipTable, name: str) -> int:
    if f"{name}.npy" not in table.names:
        told = ", ".join(repr(each.removesuffix(".npy")) for each in table.names)
        raise Missing(f"{table.file.path}: no array {name!r}; the file has {told}")
    return table.names.index(f"{name}.npy")


def _head(table: ZipTable, number: int) -> Npy:
    try:
        return Npy.of(table.read(number, HEAD_BYTES))
    except DataError as error:
        raise type(error)(f"{table.file.path}: {table.names[number]}: {error}") from error


def _in_place(table: ZipTable, name: str, number: int) -> Contiguous:
    head = _head(table, number)
    _check_rows(table, name, head)
    try:
        head.check(int(table.lengths[number]))
    except Corrupt as error:
        raise Corrupt(f"{table.file.path}: {table.names[number]}: {error}; fetch the file again") from error
    begin = int(table.offsets[number]) + len(head.head)
    return Contiguous(table.file, name, head.dtype, head.shape[1:], head.shape[0], begin)


def _check_rows(table: ZipTable, name: str, head: Npy) -> None:
    if not head.shape:
        raise SchemaMismatch(f"{table.file.path}: {name!r} is a single number; expected one row a sample")


def _decoded(table: ZipTable, number: int) -> np.ndarray:
    head, name = _head(table, number), table.names[number]
    _check_rows(table, name, head)
    check_can_be_held(table.file.path, head.bytes, f"{name} is {COMPRESSED}", "Save it by np.savez")
    data = table.read(number, len(head.head) + head.bytes + 1)
    try:
        head.check(len(data))
    except Corrupt as error:
        raise DecodeFailed(f"{table.file.path}: {name}: {error}; fetch the file again") from error
    return np.frombuffer(data, head.dtype, offset=len(head.head)).reshape(head.shape)
