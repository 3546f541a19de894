"""LMDB databases, a value a sample and field: one walk over the tree's pages, then every value by its position.

Values are arrays (npy), pictures or whole numbers, told by what they begin with, or plain bytes that the caller
declares. Which keys make a sample is told in ``lmdbkeys``; named databases with the same keys are fields.
"""

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from penstock import lmdbkeys, lmdbwalk, members, tarindex
from penstock.errors import ConfigError, DataError, Missing, SchemaMismatch, Unsafe
from penstock.extents import Extents, FileId, Members
from penstock.fileio import identify
from penstock.picture_headers import read_header
from penstock.store import ExtentStore, Store
from penstock.tarindex import NOT_THERE, MemberTable, SampleTable

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions

DATA_FILE = "data.mdb"
"""The file that holds everything, where a database is a folder."""

SAVED_AS = "samples of an LMDB database"

# Values that are looked at to tell what a field holds, evenly spread: the first text may happen to be a number.
LOOKED_AT = 8

_NUMBER = re.compile(rb"[+-]?[0-9]{1,19}")
_PICKLED = re.compile(rb"\x80[\x02-\x05]")


def is_database(folder: str) -> bool:
    """Whether a folder is an LMDB database."""
    return os.path.isfile(os.path.join(folder, DATA_FILE))


def open_file(path: str, options: "OpenOptions") -> Store:
    """The samples of one database: a file, or a folder with ``data.mdb`` in it."""
    file = identify(os.path.join(path, DATA_FILE) if os.path.isdir(path) else path)
    table = _table(file, options)
    if not table.samples:
        raise Missing(f"{file.path}: an LMDB database without samples")
    names = lmdbkeys.field_names(table.fields)
    if names == [""]:
        return ExtentStore(_only_field(file, table, options), options.files)
    for name in (*(options.fields or ()), *(options.raw if isinstance(options.raw, Mapping) else ())):
        if name not in names:
            raise Missing(f"{file.path}: no field {name!r}; its keys make {', '.join(map(repr, names))}")
    wanted = options.fields or names
    kinds = {name: _kind(file, table, names.index(name), _declared(name, wanted, options), options) for name in wanted}
    known = {name: kind for name, kind in kinds.items() if kind is not None}
    if not known or (options.fields and len(known) < len(kinds)):
        unknown = next(name for name, kind in kinds.items() if kind is None)
        raise _unknown(file, table, names.index(unknown), unknown, options)
    return ExtentStore(
        {name: _members(file, table, names.index(name), name, kind, options) for name, kind in known.items()},
        options.files,
    )


def _only_field(file: FileId, table: SampleTable, options: "OpenOptions") -> dict[str, Extents]:
    """Where keys are samples, their values have no name of their own."""
    if options.fields is not None and len(options.fields) != 1:
        raise ConfigError(
            f"{file.path}: has one field, a value a key, and {len(options.fields)} were asked for: "
            f"{', '.join(options.fields)}"
        )
    given = options.fields[0] if options.fields else None
    kind = _kind(file, table, 0, _declared(given or "data", ("data",), options), options)
    if kind is None:
        raise _unknown(file, table, 0, given or "data", options)
    name = given or ("image" if isinstance(kind, members.Picture) else "data")
    return {name: _members(file, table, 0, name, kind, options)}


def _table(file: FileId, options: "OpenOptions") -> SampleTable:
    """Which values make which samples: as saved, or found out."""
    folder = options.index_folder
    as_chosen = f"{SAVED_AS}: {options.fields!r}"
    if folder is not None:
        saved = tarindex.load(folder, file, SAVED_AS) or tarindex.load(folder, file, as_chosen)
        if saved is not None:
            return saved
    with options.files.lend(file) as handle:
        databases = lmdbwalk.walk(handle, options.fields)
    named = list(databases) != [""]
    table = _side_by_side(file, databases) if named else lmdbkeys.group(databases[""], members.is_known)
    return table if folder is None else tarindex.save(folder, file, table, as_chosen if named else SAVED_AS)


def _side_by_side(file: FileId, databases: Mapping[str, MemberTable]) -> SampleTable:
    found = lmdbkeys.side_by_side(list(databases.items()))
    if found is None:
        told = ", ".join(f"{name!r} ({len(each):,} keys)" for name, each in databases.items())
        raise SchemaMismatch(
            f"{file.path}: its databases hold different keys: {told}. Open one of them with "
            f"fields=({next(iter(databases))!r},)"
        )
    return found


def _members(
    file: FileId, table: SampleTable, column: int, name: str, kind: members.Kind, options: "OpenOptions"
) -> Members:
    offsets, lengths = table.offsets[:, column], table.lengths[:, column]
    lacking = np.flatnonzero(offsets == NOT_THERE)
    if len(lacking) and options.on_error == "raise":
        raise SchemaMismatch(
            f"{file.path}: sample {table.key(int(lacking[0]))!r} has no {name!r}, and {len(lacking) - 1:,} others have "
            f'none either. Leave the field out with fields=(…), or pass on_error="skip" to open and Loader'
        )
    return Members(
        file, name, kind.dtype, kind.shape, table.samples, offsets, lengths, table.keys, kind, table.index_bytes,
        table.fields[column], "values of a database",
    )  # fmt: skip


def _declared(name: str, wanted: "tuple[str, ...] | list[str]", options: "OpenOptions") -> np.dtype | None:
    """What the caller says the plain bytes of a field are."""
    given = options.raw
    if isinstance(given, Mapping):
        given = given.get(name)
    elif given is not None and len(wanted) > 1:
        raise ConfigError(f"raw={given!r}: there are several fields; say which: raw={{{wanted[0]!r}: {given!r}}}")
    if given is None:
        return None
    try:
        dtype: np.dtype = np.dtype(given)
    except (TypeError, ValueError):
        raise ConfigError(f'raw={given!r}: expected a dtype or a pair such as ("float32", (64, 64))') from None
    if dtype.base.kind not in "biufc":
        raise ConfigError(f"raw={given!r}: expected numbers")
    return dtype


def _kind(
    file: FileId, table: SampleTable, column: int, declared: np.dtype | None, options: "OpenOptions"
) -> members.Kind | None:
    """What the values of a field are, by some of them; None where they are nothing that is known."""
    there = np.flatnonzero(table.offsets[:, column] != NOT_THERE)
    some = there[np.linspace(0, len(there) - 1, min(LOOKED_AT, len(there)), dtype=np.int64)]
    first_error: DataError | None = None
    for number, sample in enumerate(some.tolist()):
        value = _value(file, table, column, sample, options)
        try:
            kind = _kind_of(table.fields[column], value, declared)
        except DataError as error:
            where = table.fields[column].replace("*", table.key(sample), 1)
            first_error = first_error or type(error)(f"{file.path}: {where}: {error}")
            if options.on_error == "raise":
                raise first_error from error
            continue
        if isinstance(kind, members.Number):
            rest = (_value(file, table, column, other, options) for other in some.tolist()[number + 1 :])
            return kind if all(map(_NUMBER.fullmatch, rest)) else None
        return kind
    raise first_error or Missing(f"{file.path}: no sample has {table.fields[column]!r}")


def _value(file: FileId, table: SampleTable, column: int, sample: int, options: "OpenOptions") -> bytes:
    value = np.empty(int(table.lengths[sample, column]), np.uint8)
    with options.files.lend(file) as handle:
        handle.read_into(int(table.offsets[sample, column]), value)
    return value.tobytes()


def _kind_of(pattern: str, value: bytes, declared: np.dtype | None) -> members.Kind | None:
    if declared is not None:
        return _raw(declared, len(value))
    if pattern.startswith("*.") and members.is_known(pattern[2:].lower()):
        return members.kind_of(pattern[2:].lower(), value)
    if value.startswith(b"\x93NUMPY"):
        return members.kind_of("npy", value)
    if read_header(value) is not None:
        return members.Picture.of(value)
    return members.Number() if _NUMBER.fullmatch(value) else None


def _raw(declared: np.dtype, length: int) -> members.Raw:
    base, shape = declared.base, declared.shape
    if not shape and length != base.itemsize:
        if length % base.itemsize:
            raise SchemaMismatch(f"{length:,} bytes, which is no whole number of {base} ({base.itemsize} bytes each)")
        shape = (length // base.itemsize,)
    kind = members.Raw(base, shape)
    kind.check(length)
    return kind


def _unknown(file: FileId, table: SampleTable, column: int, name: str, options: "OpenOptions") -> DataError:
    sample = int(np.argmax(table.offsets[:, column] != NOT_THERE))
    value = _value(file, table, column, sample, options)
    where = f"{file.path}: the value of {table.fields[column].replace('*', table.key(sample), 1)!r}"
    if _PICKLED.match(value):
        return Unsafe(
            f"{where} is a pickled Python object ({len(value):,} bytes), which only unpickling could read, and "
            f"unpickling runs what the file says. Write the database again with values saved by numpy.save, or as "
            f"plain bytes (array.tobytes())"
        )
    return SchemaMismatch(
        f"{where} is neither an array (npy), a picture nor a whole number: {len(value):,} bytes that begin with "
        f'{value[:12]!r}. If they are those of an array, say so: open(…, raw={{{name!r}: ("float32", (64, 64))}})'
    )
