"""Tar archives as WebDataset writes them: one pass over the headers, then every sample by its position.

Arrays (npy), pictures and whole numbers become arrays; text, JSON and other things of no fixed size come in lists. What
is not known by its name is read if it is asked for, as bytes.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from penstock import members, pictures, savedcolumns, tarindex
from penstock.errors import DataError, Missing, SchemaMismatch
from penstock.extents import Extents, FileId, Members
from penstock.fileio import Handle
from penstock.members import Picture
from penstock.store import ExtentStore, Store
from penstock.tarindex import NOT_THERE, SampleTable

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions

# Sizes stand within these first bytes of a picture, unless it begins with a thumbnail or a colour profile.
PICTURE_HEAD_BYTES = 2048

# With on_error="skip", so many samples are tried until one tells what a field holds.
MOST_TRIED = 100


def open_file(path: str, options: "OpenOptions") -> Store:
    """The samples of one archive."""
    file = options.files.identify(path)
    table = _table(file, options)
    names = options.fields or tuple(name for name in table.fields if members.is_known(name, options.members))
    if not names:
        raise Missing(
            f"{path}: no arrays, pictures, numbers or text; its members are {_told(table)}. Choose some of them with "
            f"fields=, to have their bytes"
        )
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
            kind = members.kind_of(name, data.tobytes(), options.members)
            wanted = options.members
            if isinstance(kind, Picture) and wanted.size is not None:
                largest = _largest_picture(file, table, name, options)
                kind = replace(kind, shape=(*wanted.size, 3), fit=wanted.fit, largest=largest)
            return kind
        except DataError as error:
            where = f"{file.path}: {table.key(sample)}.{name} at offset {offset:,}"
            first_error = first_error or type(error)(f"{where}: {error}")
    raise first_error or Missing(f"{file.path}: no sample has {name!r}")


def _largest_picture(file: FileId, table: SampleTable, name: str, options: "OpenOptions") -> int:
    """Pixels of the largest picture of a field. Every header is read, once: the answer is kept with the index."""
    what = f"pixels of the largest {name}"
    saved = None if options.index_folder is None else savedcolumns.load(options.index_folder, file, what)
    if saved is not None and isinstance(largest := saved.header.get("pixels"), int):
        return min(largest, options.members.max_pixels)
    column = table.fields.index(name)
    largest = 0
    with options.files.lend_in_order(file) as handle:
        for offset, length in zip(table.offsets[:, column].tolist(), table.lengths[:, column].tolist(), strict=True):
            if offset != NOT_THERE:
                largest = max(largest, _pixels(handle, offset, length))
    if options.index_folder is not None:
        savedcolumns.save(options.index_folder, file, what, {"pixels": largest}, {})
    return min(largest, options.members.max_pixels)


def _pixels(handle: Handle, offset: int, length: int) -> int:
    """What a picture's header declares; 0 for one that cannot be read, which is an error when it is wanted."""
    for most in (PICTURE_HEAD_BYTES, length):
        data = np.empty(min(most, length), np.uint8)
        handle.read_into(offset, data)
        try:
            return pictures.count_pixels(data.tobytes())
        except DataError:
            continue
    return 0


def _told(table: SampleTable) -> str:
    return ", ".join(map(repr, table.fields)) or "none that belong to a sample"
