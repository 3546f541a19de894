"""What a dataset is made of: finite, read-only, thread-safe rows.

``read_into(rows, at, out)`` puts sample ``rows[k]`` at ``out[field][at[k]]`` for each field present in ``out``: any
order, repeats allowed. Target positions make composition free of copies, and a field that is absent is not read.

A store may be read by many threads at once. It holds nothing open that ``close`` does not close, and can be read again
after ``close``. It pickles, and works after a fork.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np

from penstock.chunkfiles import spread
from penstock.chunkread import LargeChunks, SmallChunks, chunk_reader
from penstock.errors import OutOfRange
from penstock.extents import Chunks, Extents, Members
from penstock.fileio import Files
from penstock.membergather import GatherMembers, member_reader
from penstock.members import MemberReader
from penstock.pieces import WHOLE, Share
from penstock.rangeread import Gathering, GatherReader, PartReader, RangeReader, range_reader
from penstock.spec import MANIFEST, Cast, Fields, FieldSpec, Origin, ReadPath
from penstock.together import Together, together
from penstock.urls import base_name
from penstock.within import Box, Within, compose

CHECKED_BY = {"fletcher32": "fletcher32", "crc32c": "crc32c", "deflate": "adler32", "gzip": "crc32"}
"""Codecs that notice when a byte is another, and by what."""

Out = Mapping[str, np.ndarray]
"""The caller's memory: arrays of shape (places, *field shape) and the field's dtype, rows contiguous."""


@runtime_checkable
class Store(Protocol):
    """The protocol every format implements, and every combination of stores too."""

    @property
    def fields(self) -> Fields:
        """What one sample consists of."""

    @property
    def blocks(self) -> np.ndarray | None:
        """First rows of the blocks that are read whole, ascending; None where each row can be read by itself."""

    @property
    def fingerprint(self) -> str:
        """Differs when the data do; the same on another machine or under another path."""

    @property
    def index_bytes(self) -> int:
        """Memory that knowing where things lie takes for as long as the store lives, besides ``shared_index``."""

    def __len__(self) -> int: ...

    def scratch_bytes(self, rows: int) -> int:
        """The most that one ``read_into`` of so many rows borrows besides ``out``."""

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        """Put sample ``rows[k]`` at ``out[field][at[k]]``."""

    def origin(self, row: int) -> Origin:
        """Where a sample came from."""

    def close(self) -> None:
        """Let go of handles; the store can still be read, and opens them again."""


def shared_index(store: Store) -> dict[int, int]:
    """Bytes that a store's index shares with other stores, by what is shared: a mask that selects from many files."""
    found: dict[int, int] = getattr(store, "shared_index", {})
    return found


def takes_rows_apart(store: Store) -> bool:
    """Whether ``out`` may hold rows that do not follow each other in memory, such as the first part of longer ones."""
    return bool(getattr(store, "takes_rows_apart", False))


def free_fields(store: Store) -> frozenset[str]:
    """Fields whose rows can each be read by itself, also where those of others come in blocks."""
    if store.blocks is None:
        return frozenset(store.fields)
    found: frozenset[str] = getattr(store, "free_fields", frozenset())
    return found


@runtime_checkable
class Sharing(Protocol):
    """A store whose blocks several threads can read together."""

    def read_share(self, rows: np.ndarray, at: np.ndarray, out: Out, share: Share) -> None:
        """A share of what ``read_into`` does; all shares together are the whole."""


def read_share(store: Store, rows: np.ndarray, at: np.ndarray, out: Out, share: Share) -> None:
    """A share of a read. Where it cannot be shared, the first share is all of it."""
    shared = getattr(store, "read_share", None)  # asking whether it is Sharing takes as long as a small read
    if shared is not None:
        shared(rows, at, out, share)
    elif share[0] == 0:
        store.read_into(rows, at, out)


@runtime_checkable
class Casting(Protocol):
    """A store that can convert on the way, better than by a second pass."""

    def casting(self, casts: Mapping[str, Cast]) -> Store | None:
        """The same rows with these fields converted, or None where it cannot do that on the way."""


@runtime_checkable
class Choosing(Protocol):
    """A store that can leave fields out altogether."""

    def choosing(self, names: Sequence[str]) -> Store:
        """The same rows with these fields alone."""


@runtime_checkable
class Keyed(Protocol):
    """A store whose samples have names of their own."""

    def find(self, key: str) -> int | None:
        """The first row of this name."""


def find_key(store: Store, key: str) -> int | None:
    """The first row of this name; None also where samples have none."""
    return store.find(key) if isinstance(store, Keyed) else None


@runtime_checkable
class Explained(Protocol):
    """A store that reads from somewhere, and can tell how."""

    def read_paths(self) -> Sequence[ReadPath]:
        """How each field is read."""


@runtime_checkable
class Selecting(Protocol):
    """A store that can read part of each row of a field, and leave the rest unread."""

    def selecting(self, field: str, part: Within) -> Store:
        """The same rows with this part of the field alone."""


def check_rows(rows: np.ndarray, store: Store) -> None:
    """Refuse rows that are not there; negative ones too, which numpy would take from the end."""
    # As unsigned, a negative number is the largest.
    if len(rows) and np.maximum.reduce(np.asarray(rows, np.int64).view(np.uint64)) >= len(store):
        bad = rows[(rows < 0) | (rows >= len(store))][0]
        raise OutOfRange(f"row {bad} is out of range: there are {len(store):,} rows, 0 to {len(store) - 1:,}")


def told_rows(rows: np.ndarray) -> str:
    """The first few of them, for a message."""
    shown = ", ".join(str(row) for row in rows[:4])
    return f"{shown} … ({len(rows)} of them)" if len(rows) > 4 else shown


def digest(*parts: object) -> str:
    """A short, stable hash of values with a faithful ``repr``."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class ExtentStore:
    """Fields whose bytes lie at known places of one file."""

    takes_rows_apart = True

    def __init__(
        self,
        arrays: Mapping[str, Extents],
        files: Files,
        casts: Mapping[str, Cast] | None = None,
        parts: Mapping[str, Within] | None = None,
    ) -> None:
        self._arrays, self._files = dict(arrays), files
        self._casts, self._parts = dict(casts or {}), dict(parts or {})
        self._length = next(iter(arrays.values())).rows
        self.fields: Fields = {name: self._spec(name) for name in arrays}

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self._arrays, self._files, self._casts, self._parts)

    def _spec(self, name: str) -> FieldSpec:
        array, cast, part = self._arrays[name], self._casts.get(name), self._parts.get(name)
        if cast is None and part is None:
            return array.spec
        return FieldSpec(cast.dtype if cast else array.stored, part.shape if part else array.shape)

    @cached_property
    def _readers(self) -> "dict[str, _Reader]":
        """Made when they are needed: a dataset is often one of several that lead to the one that is read."""
        return {
            name: _reader(array, self._files, self._casts.get(name), self._parts.get(name))
            for name, array in self._arrays.items()
        }

    @cached_property
    def _together(self) -> "Together | None":
        return together(self._readers)

    def __len__(self) -> int:
        return self._length

    @property
    def blocks(self) -> np.ndarray | None:
        rows = max(array.rows_per_chunk if isinstance(array, Chunks) else 1 for array in self._arrays.values())
        return np.arange(0, self._length, rows) if rows > 1 else None

    @property
    def index_bytes(self) -> int:
        return sum(array.index_bytes for array in self._arrays.values())

    @property
    def shared_index(self) -> dict[int, int]:
        parts = [reader.part for reader in self._readers.values() if reader.part is not None]
        tables = [array for array in self._arrays.values() if isinstance(array, Members)]
        return {
            **{id(part): part.index_bytes for part in parts},
            **{id(array.keys): array.table_bytes for array in tables},
            **self._files.shared_index,
        }

    @property
    def fingerprint(self) -> str:
        parts = sorted((name, part.describe()) for name, part in self._parts.items())
        return digest(
            *((base_name(array.file.path), array.file.size, array.describe()) for array in self._arrays.values()),
            sorted(self._casts.items()),
            *([parts] if parts else []),
        )

    def scratch_bytes(self, rows: int) -> int:
        at_once = 0 if self._together is None else self._together.scratch_bytes()
        apart = max(at_once, *(reader.scratch_bytes(rows) for reader in self._readers.values()))
        return apart + self._files.scratch_bytes

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        self.read_share(rows, at, out, WHOLE)

    def read_share(self, rows: np.ndarray, at: np.ndarray, out: Out, share: Share) -> None:
        check_rows(rows, self)
        at_once: list[str] = []
        if self._together is not None and share[0] == 0:
            at_once = self._together.suits(list(out), len(rows))
            if at_once:
                self._together.read(rows, at, {name: out[name] for name in at_once})
        for name, target in out.items():
            reader = self._readers[name]
            if name in at_once:
                continue
            if isinstance(reader, LargeChunks | SmallChunks):
                reader.read(rows, at, target, share)
            elif share[0] == 0:
                reader.read(rows, at, target)

    def origin(self, row: int) -> Origin:
        array = next(iter(self._arrays.values()))
        return Origin(array.home, array.sample(row))

    def find(self, key: str) -> int | None:
        array = next(iter(self._arrays.values()))
        return array.keys.find(key) if isinstance(array, Members) else None

    def close(self) -> None:
        self._files.close()

    def casting(self, casts: Mapping[str, Cast]) -> "ExtentStore | None":
        if casts.keys() & self._casts.keys():  # two conversions in a row round twice; one would not
            return None
        return ExtentStore(self._arrays, self._files, {**self._casts, **casts}, self._parts)

    def choosing(self, names: Sequence[str]) -> "ExtentStore":
        return ExtentStore(
            {name: self._arrays[name] for name in names},
            self._files,
            {name: cast for name, cast in self._casts.items() if name in names},
            {name: part for name, part in self._parts.items() if name in names},
        )

    def read_paths(self) -> Sequence[ReadPath]:
        return [
            _whole_path(reader, _chunk_path(name, reader, self._length))
            if isinstance(reader, LargeChunks | SmallChunks)
            else _whole_path(reader, _range_path(name, reader, self._length))
            for name, reader in self._readers.items()
        ]

    def selecting(self, field: str, part: Within) -> "ExtentStore":
        if isinstance(part, Box) and part.is_everything:
            return self
        whole = compose(self._parts[field], part) if field in self._parts else part
        return ExtentStore(self._arrays, self._files, self._casts, {**self._parts, field: whole})


_RowReader = RangeReader | PartReader | GatherReader | MemberReader | GatherMembers
_Reader = _RowReader | LargeChunks | SmallChunks


def _reader(array: Extents, files: Files, cast: Cast | None, part: Within | None) -> _Reader:
    if cast is None and not array.stored.isnative:
        cast = Cast(array.spec.dtype)
    if isinstance(array, Chunks):
        return chunk_reader(array, files, cast, part)
    if isinstance(array, Members):
        return member_reader(array, files, cast, part)
    return range_reader(array, files, cast, part)


def _whole_path(reader: _Reader, path: ReadPath) -> ReadPath:
    """What is the same for all layouts: where the file is, and what its bytes are held against."""
    files = reader.files
    checked_by = path.checked_by if files.manifest is None else MANIFEST
    return replace(path, far=files.is_far(reader.array.file), checked_by=checked_by)


def _checksum(array: Chunks) -> str:
    """What tells a damaged chunk from a sound one, if every chunk has it."""
    if array.table.some_skipped:
        return ""
    through = {codec for codec, _ in array.codecs}
    return next((by for codec, by in CHECKED_BY.items() if codec in through), "")


def _range_path(name: str, reader: _RowReader, rows: int) -> ReadPath:
    array, mapped = reader.array, int(isinstance(reader, Gathering))
    how = "gathered from a mapping of the file" if mapped else "read straight from the file"
    if isinstance(array, Members):
        stored = int(array.lengths.sum())
        how = how if mapped else "read by position"
        return ReadPath(name, reader.spec, rows, array.layout, how, stored_bytes=stored, mapped_files=mapped)
    wanted = max(1, reader.spec.row_bytes // reader.spec.dtype.itemsize * array.stored.itemsize)
    read = reader.packed_bytes if isinstance(reader, PartReader) else array.row_bytes
    stored = array.rows * array.row_bytes
    return ReadPath(
        name, reader.spec, rows, "contiguous", how, 1, read / wanted, stored, epoch_bytes=array.rows * read,
        mapped_files=mapped,
    )  # fmt: skip


def _chunk_path(name: str, reader: LargeChunks | SmallChunks, rows: int) -> ReadPath:
    array = reader.array
    wanted = max(1, reader.spec.row_bytes // reader.spec.dtype.itemsize * array.stored.itemsize)
    decoded = reader.pieces_per_row * array.chunk_bytes
    several = array.rows_per_chunk > 1
    share = "" if array.chunk == array.shape else f", {array.chunk} of each" if several else f", {array.chunk} of it"
    filters = f"; {', '.join(codec for codec, _ in array.codecs)}" if array.codecs else ""
    layout = f"chunks of {f'{array.rows_per_chunk} rows' if several else 'a row'}{share}{filters}"
    if (table := spread(array)) is not None:
        layout += f"; {table.told}"
        layout += "" if array.fill is None else f", absent ones are {np.frombuffer(array.fill, array.stored)[0]}"
    how = "read and decoded outside the library's lock"
    if isinstance(reader, SmallChunks):
        how += ", neighbouring chunks together"
    remedy = array.remedy if several else ""
    stored = array.table.stored_bytes
    return ReadPath(
        name, reader.spec, rows, layout, how, array.rows_per_chunk, decoded / wanted, stored, array.table.missing,
        remedy, epoch_bytes=reader.epoch_bytes, checked_by=_checksum(array),
    )  # fmt: skip
