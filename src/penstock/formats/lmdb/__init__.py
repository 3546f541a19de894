"""LMDB databases, with one value per sample and field: one walk over the tree's pages, then reads by position.

The kind of a value follows from the suffix of its key or from its first bytes (npy array, picture, whole number, text),
or from the caller (``decoders``). ``lmdb/keys.py`` groups keys into samples; named databases with the same keys are
fields.
"""

import os
import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from penstock.base.file_id import FileId
from penstock.dataset.extent_store import ExtentStore
from penstock.dataset.store import Store
from penstock.errors import ConfigError, DecodeFailed, LimitExceeded, Missing, SchemaMismatch, Unsafe
from penstock.formats.lmdb import keys, pages
from penstock.formats.sample_fields import PICTURE_HEAD_BYTES, SampleFields
from penstock.formats.tar import samples as tar_samples
from penstock.formats.tar.members import MemberTable
from penstock.formats.tar.samples import NOT_THERE, SampleTable
from penstock.read import kinds, objects
from penstock.read.extents import Extents
from penstock.read.picture_headers import read_header

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions

DATA_FILE = "data.mdb"
"""The file of a database that is a folder."""

SAVED_AS = "samples of an LMDB database"

# Values that are compared to distinguish numbers from text, evenly spread: the first text may look like a number.
LOOKED_AT = 16

_NUMBER = re.compile(rb"[+-]?[0-9]{1,18}")
_TEXT = re.compile(r"[^\x00-\x08\x0e-\x1f\x7f]+")
_PICKLED = re.compile(rb"\x80[\x02-\x05]")


def is_database(path: str) -> bool:
    """Whether a folder is an LMDB database; a file with its first bytes always is."""
    return not os.path.isdir(path) or os.path.isfile(os.path.join(path, DATA_FILE))


def open_file(path: str, options: "OpenOptions") -> Store:
    """The samples of one database: a file, or a folder with ``data.mdb`` in it."""
    file = options.files.identify(os.path.join(path, DATA_FILE) if os.path.isdir(path) else path)
    table = _load_table(file, options)
    if not table.samples:
        raise Missing(f"{file.path}: an LMDB database without samples")
    samples = SampleFields(file, table, options, "values of a database", has_patterns=True)
    columns = _choose_columns(samples)
    arrays: dict[str, Extents] = {
        name: samples.members(name, column, partial(_find_kind, samples, name, column))
        for name, column in columns.items()
    }
    return ExtentStore(arrays, options.files)


def _choose_columns(samples: SampleFields) -> dict[str, int]:
    """The fields to read, and their columns in the table."""
    path, fields = samples.file.path, samples.options.fields
    names = keys.field_names(samples.table.fields)
    if names == [""]:  # each key is a sample: the one field has no name, and may be given one
        if fields is not None and len(fields) != 1:
            raise ConfigError(f"{path}: has one field, with one value per key, but fields names {len(fields)}")
        return {fields[0] if fields else "image" if _is_picture(samples) else "data": 0}
    for name in fields or ():
        if name not in names:
            raise Missing(f"{path}: no field {name!r}; its keys make {', '.join(map(repr, names))}")
    return {name: names.index(name) for name in fields or names}


def _is_picture(samples: SampleFields) -> bool:
    try:
        return read_header(samples.value(0, 0)[:PICTURE_HEAD_BYTES]) is not None
    except LimitExceeded:  # reported later, with the kind of the field
        return False
    except DecodeFailed:  # a picture with a longer header
        return True


def _load_table(file: FileId, options: "OpenOptions") -> SampleTable:
    """The table of samples: as saved, or from a walk through the database."""
    folder = options.index_folder
    as_chosen = f"{SAVED_AS}: {options.fields!r}"
    if folder is not None:
        saved = tar_samples.load(folder, file, SAVED_AS) or tar_samples.load(folder, file, as_chosen)
        if saved is not None:
            return saved
    with options.files.lend(file) as handle:
        databases = pages.walk(handle, options.fields)
    named = list(databases) != [""]
    table = _join_databases(file, databases) if named else keys.group(databases[""], kinds.is_known)
    return table if folder is None else tar_samples.save(folder, file, table, as_chosen if named else SAVED_AS)


def _join_databases(file: FileId, databases: Mapping[str, MemberTable]) -> SampleTable:
    found = keys.side_by_side(list(databases.items()))
    if found is None:
        counts = ", ".join(f"{name!r} ({len(each):,} keys)" for name, each in databases.items())
        raise SchemaMismatch(
            f"{file.path}: its databases have different keys: {counts}. Open one of them with "
            f"fields=({next(iter(databases))!r},)"
        )
    return found


def _find_kind(samples: SampleFields, name: str, column: int, value: bytes) -> kinds.Kind:
    """The kind of a field: as the caller says, else by the suffix of its keys, else by its first value."""
    wanted = samples.options.members
    ending = samples.table.fields[column].removeprefix("*.").lower()
    if wanted.decoder(name) is not None:
        return kinds.kind_of(name, value, wanted)
    if samples.table.fields[column].startswith("*.") and kinds.is_known(ending, wanted):
        return kinds.kind_of(ending, value, wanted)
    if value.startswith(b"\x93NUMPY"):
        return kinds.kind_of("npy", value)
    if read_header(value) is not None:
        return kinds.Picture.of(value, wanted.max_pixels)
    if _NUMBER.fullmatch(value) and all(map(_NUMBER.fullmatch, _sample_values(samples, column))):
        return kinds.Number()
    if all(map(_is_text, _sample_values(samples, column))):
        return kinds.Value(objects.TEXT)
    if _PICKLED.match(value):
        raise Unsafe(
            f"a pickled Python object ({len(value):,} bytes), and unpickling runs code from the "
            f"file. Write the database again with values saved by numpy.save, or as plain bytes "
            f'(array.tobytes()); decoders={{{name!r}: "bytes"}} delivers the raw bytes'
        )
    raise SchemaMismatch(
        f"neither an array (npy), a picture, a number nor text: {len(value):,} bytes that begin with {value[:12]!r}. "
        f"Say what they are: for the plain bytes of arrays "
        f'decoders={{{name!r}: ("float32", (64, 64))}}, for others a function of your own'
    )


def _sample_values(samples: SampleFields, column: int) -> list[bytes]:
    there = np.flatnonzero(samples.table.offsets[:, column] != NOT_THERE)
    at = np.linspace(0, len(there) - 1, min(LOOKED_AT, len(there)), dtype=np.int64)
    return [samples.value(sample, column) for sample in there[at].tolist()]


def _is_text(value: bytes) -> bool:
    try:
        return _TEXT.fullmatch(value.decode("utf-8")) is not None or not value
    except UnicodeDecodeError:
        return False
