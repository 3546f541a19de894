"""NumPy's archives. Arrays saved by ``np.savez`` are stored uncompressed and read in place.

Those saved by ``np.savez_compressed`` can only be decoded from their beginning, and are held in memory.
"""

from typing import TYPE_CHECKING

import numpy as np

from penstock.base.scratch import buffer
from penstock.dataset.extent_store import ExtentStore
from penstock.dataset.memory import HeldStore, check_can_be_held
from penstock.dataset.rewrite import side_by_side
from penstock.dataset.store import Store, StoreBase
from penstock.errors import Corrupt, DataError, DecodeFailed, Missing, SchemaMismatch
from penstock.files.retry import open_for_parser
from penstock.formats.rows import common_rows
from penstock.formats.zip_table import HEADER_BYTES, ZipTable, zip_table
from penstock.read.extents import Contiguous, Extents
from penstock.read.kinds import Npy
from penstock.read.npy import HEADER_BYTES as NPY_HEADER_BYTES
from penstock.read.npy import NpyHeader, is_cut

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions

COMPRESSED = "saved by np.savez_compressed, whose arrays can only be decoded from their beginning"


# Headers are 128 bytes as a rule. Reading a whole member checks it, and intact rows of a damaged one may be wanted.
USUAL_HEADER_BYTES = 1024


def is_npz(path: str) -> bool:
    """Whether a zip archive begins with an array."""
    with open_for_parser(path) as file:
        header = file.read(HEADER_BYTES)
        name = file.read(int.from_bytes(header[26:28], "little"))
    return name.endswith(b".npy")


def open_file(path: str, options: "OpenOptions") -> Store:
    """The rows of the arrays of one archive."""
    table = zip_table(path, options.files)
    names = options.fields or _choose_arrays(table, options)
    direct: dict[str, Extents] = {}
    held: dict[str, np.ndarray] = {}
    for name in names:
        number = _find_number(table, name)
        if table.compressed[number]:
            held[name] = _decode(table, number)
        else:
            direct[name] = _locate(table, name, number)
    counts = {name: array.rows for name, array in direct.items()} | {name: len(array) for name, array in held.items()}
    common_rows(path, counts, asked_for=True)
    stores: list[StoreBase] = [ExtentStore(direct, options.files)] if direct else []
    if held:
        stores.append(HeldStore(table.file, held, COMPRESSED, checked_by="crc32"))
    return side_by_side(stores, names)


def _choose_arrays(table: ZipTable, options: "OpenOptions") -> list[str]:
    """All arrays of numbers, which must have the same number of rows."""
    found = {}
    for number, full in enumerate(table.names):
        if not full.endswith(".npy"):
            options.leave_out(full, "not an array (.npy)")
        elif why := _explain_no_numbers(table, number):
            options.leave_out(full.removesuffix(".npy"), why)
        elif (head := _read_head(table, number)).shape:
            found[full.removesuffix(".npy")] = head.shape[0]
    if not found:
        for number, full in enumerate(table.names):
            if full.endswith(".npy"):
                _read_head(table, number)  # raises what is wrong with it, if anything is
        raise Missing(
            f"{table.file.path}: no array with one row per sample; it has {', '.join(table.names) or 'nothing'}"
        )
    common_rows(table.file.path, found, asked_for=False)
    return list(found)


def _find_number(table: ZipTable, name: str) -> int:
    if f"{name}.npy" not in table.names:
        shown = ", ".join(repr(each.removesuffix(".npy")) for each in table.names)
        raise Missing(f"{table.file.path}: no array {name!r}; the file has {shown}")
    return table.names.index(f"{name}.npy")


def _explain_no_numbers(table: ZipTable, number: int) -> str:
    """Why an array cannot be delivered; empty if it holds numbers."""
    try:
        header = NpyHeader.parse(_read_first_bytes(table, number))
    except SchemaMismatch as error:
        return str(error)
    except DataError:  # damaged or unsafe, which _read_head tells with the place
        return ""
    return "" if header.dtype.kind in "biufc" else f"{header}, no numbers"


def _read_first_bytes(table: ZipTable, number: int) -> bytes:
    head = table.read(number, USUAL_HEADER_BYTES)
    return table.read(number, NPY_HEADER_BYTES) if is_cut(head) else head


def _read_head(table: ZipTable, number: int) -> Npy:
    head = _read_first_bytes(table, number)
    try:
        return Npy.of(head)
    except DataError as error:
        raise type(error)(f"{table.file.path}: {table.names[number]}: {error}") from error


def _locate(table: ZipTable, name: str, number: int) -> Contiguous:
    head = _read_head(table, number)
    _check_rows(table, name, head)
    try:
        head.check(int(table.lengths[number]))
    except Corrupt as error:
        raise Corrupt(f"{table.file.path}: {table.names[number]}: {error}; fetch the file again") from error
    begin = int(table.offsets[number]) + len(head.head)
    return Contiguous(
        file=table.file, name=name, stored=head.dtype, shape=head.shape[1:], rows=head.shape[0], offset=begin,
        member=table.find_sum(number),
    )  # fmt: skip


def _check_rows(table: ZipTable, name: str, head: Npy) -> None:
    if not head.shape:
        raise SchemaMismatch(f"{table.file.path}: {name!r} is a single number; expected one row per sample")


def _decode(table: ZipTable, number: int) -> np.ndarray:
    head, name = _read_head(table, number), table.names[number]
    _check_rows(table, name, head)
    check_can_be_held(table.file.path, head.nbytes, f"{name} is {COMPRESSED}", "Save it by np.savez")
    data = buffer(head.nbytes)
    length = table.unpack_into(number, len(head.head), data)
    try:
        head.check(length)
    except Corrupt as error:
        raise DecodeFailed(f"{table.file.path}: {name}: {error}; fetch the file again") from error
    return _make_native(data.view(head.dtype)).reshape(head.shape)


def _make_native(array: np.ndarray) -> np.ndarray:
    """The same numbers in this machine's byte order, swapped in place: a copy would double the memory."""
    return array if array.dtype.isnative else array.byteswap(inplace=True).view(array.dtype.newbyteorder("="))
