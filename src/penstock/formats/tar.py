"""Tar archives as WebDataset writes them: one pass over the headers, then every sample by its position.

Arrays (npy), pictures and whole numbers become fields; text and other things of no fixed size are for
``penstock.webdataset``, which streams them.
"""

from typing import TYPE_CHECKING

import numpy as np

from penstock import members, tarindex
from penstock.errors import DataError, Missing, SchemaMismatch
from penstock.extents import Extents, FileId, Members
from penstock.store import ExtentStore, Store
from penstock.tarindex import NOT_THERE, SampleTable

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions

# With on_error="skip", so many samples are tried until one tells what a field holds.
MOST_TRIED = 100


def open_file(path: str, options: "OpenOptions") -> Store:
    """The samples of one archive."""
    file = options.files.identify(path)
    table = _table(file, options)
    names = options.fields or tuple(name for name in table.fields if members.is_known(name))
    if not names:
        raise Missing(f"{path}: no arrays, pictures or numbers; its members are {_told(table)}")
    arrays: dict[str, Extents] = {name: _members(file, table, name, options) for name in names}
    return ExtentStore(arrays, options.files)


def _table(file: FileId, options: "OpenOptions") -> SampleTable:
    folder = options.index_folder
    found = None if folder is None else tarindex.load(folder, file)
    if found is not None:
        return found
    with options.files.lend_in_order(file) as handle:
        table = tarindex.group(tarindex.walk(handle))
    return table if folder is None else tarindex.save(folder, file, table)


def _members(file: FileId, table: SampleTable, name: str, options: "OpenOptions") -> Members:
    if name not in table.fields:
        raise Missing(f"{file.path}: no field {name!r}; its members are {_told(table)}")
    column = table.fields.index(name)
    offsets, lengths = table.offsets[:, column], table.lengths[:, column]
    there = offsets != NOT_THERE
    if not there.all() and options.on_error == "raise":
        sample = int(np.argmin(there))
        has = [field for field, offset in zip(table.fields, table.offsets[sample], strict=True) if offset != NOT_THERE]
        raise SchemaMismatch(
            f"{file.path}: sample {table.key(sample)!r} has no {name!r} (it has {', '.join(has)}), and "
            f"{np.count_nonzero(~there) - 1:,} others have none either. Leave the field out with fields=(…), or pass "
            f'on_error="skip" to open and Loader'
        )
    if not members.is_known(name):
        raise SchemaMismatch(
            f"{file.path}: {name!r} is neither an array (npy), a picture nor a whole number; text and other things of "
            f"no fixed size are read by penstock.webdataset"
        )
    kind = _kind(file, table, name, np.flatnonzero(there), options)
    return Members(
        file, name, kind.dtype, kind.shape, table.samples, offsets, lengths, table.keys, kind, table.index_bytes
    )


def _kind(file: FileId, table: SampleTable, name: str, samples: np.ndarray, options: "OpenOptions") -> members.Kind:
    """What the first sample holds, which all must hold; or the first that can be read, where bad ones are skipped."""
    column = table.fields.index(name)
    first_error: DataError | None = None
    for sample in samples[: MOST_TRIED if options.on_error == "skip" else 1].tolist():
        offset, length = int(table.offsets[sample, column]), int(table.lengths[sample, column])
        data = np.empty(length, np.uint8)
        with options.files.lend(file) as handle:
            handle.read_into(offset, data)
        try:
            return members.kind_of(name, data.tobytes())
        except DataError as error:
            where = f"{file.path}: {table.key(sample)}.{name} at offset {offset:,}"
            first_error = first_error or type(error)(f"{where}: {error}")
    raise first_error or Missing(f"{file.path}: no sample has {name!r}")


def _told(table: SampleTable) -> str:
    return ", ".join(map(repr, table.fields)) or "none that belong to a sample"
