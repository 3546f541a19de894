"""Fields whose bytes lie at known places of one file: the store of most formats."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from penstock.base.spec import MANIFEST, Cast, Fields, FieldSpec, Origin, ReadPath, permuted
from penstock.base.urls import base_name
from penstock.dataset.store import Filled, Out, StoreBase, check_rows, digest
from penstock.errors import ConfigError
from penstock.files.files import Files
from penstock.read.chunk_blocks import BlockReader
from penstock.read.chunk_files import table_of_files
from penstock.read.chunk_groups import SmallChunks
from penstock.read.chunks import chunk_reader
from penstock.read.codecs import checked_by
from penstock.read.extents import Array, Chunks, Contiguous, Extents, Members
from penstock.read.member_sum import PIECE_BYTES, MemberSum
from penstock.read.members import (
    AdjacentMembers,
    MemberGatherReader,
    MemberReader,
    NumberGatherReader,
    adjacent_members,
    member_reader,
)
from penstock.read.part import Box, RowPart, compose
from penstock.read.pieces import WHOLE, Share
from penstock.read.rows import GatherReader, MappedReader, PartReader, RowReader, row_reader


class ExtentStore(StoreBase):
    """Fields whose bytes lie at known places of one file."""

    accepts_strided = True
    fields: Fields

    def __init__(
        self,
        arrays: Mapping[str, Extents],
        files: Files,
        casts: Mapping[str, Cast] | None = None,
        parts: Mapping[str, RowPart] | None = None,
        axes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self._arrays, self._files = dict(arrays), files
        self._casts, self._parts, self._axes = dict(casts or {}), dict(parts or {}), dict(axes or {})
        self._length = next(iter(arrays.values())).rows
        self.fields = {name: self._spec(name) for name in arrays}

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self._arrays, self._files, self._casts, self._parts, self._axes)

    def _spec(self, name: str) -> FieldSpec:
        array, cast, part = self._arrays[name], self._casts.get(name), self._parts.get(name)
        if cast is None and part is None:
            return permuted(array.spec, self._axes.get(name))
        spec = FieldSpec(cast.dtype if cast else array.stored, part.shape if part else array.shape)
        return permuted(spec, self._axes.get(name))

    @cached_property
    def _readers(self) -> "dict[str, _Reader]":
        """Made when needed: most datasets are only steps on the way to the one that is read."""
        return {
            name: _reader(array, self._files, self._casts.get(name), self._parts.get(name), self._axes.get(name))
            for name, array in self._arrays.items()
        }

    @cached_property
    def _adjacent(self) -> "AdjacentMembers | None":
        return adjacent_members(self._readers)

    @cached_property
    def _gather_readers(self) -> dict[str, GatherReader]:
        """The readers that can share a mapping of the first one's file."""
        found = {name: reader for name, reader in self._readers.items() if isinstance(reader, GatherReader)}
        files = [reader.array.file for reader in found.values()]
        return {
            name: reader for name, reader in found.items() if reader.array.file == files[0] and reader.array.row_bytes
        }

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
            *([sorted(self._axes.items())] if self._axes else []),
        )

    def scratch_bytes(self, rows: int) -> int:
        at_once = 0 if self._adjacent is None else self._adjacent.scratch_bytes()
        if self._members:
            at_once = max(at_once, PIECE_BYTES)
        apart = max(at_once, *(reader.scratch_bytes(rows) for reader in self._readers.values()))
        return apart + self._files.scratch_bytes

    def read(self, rows: np.ndarray, at: np.ndarray, out: Out, share: Share = WHOLE) -> None:
        check_rows(rows, self)
        if self._members:
            self._check_members(out)
        at_once: list[str] = []
        if self._adjacent is not None and share[0] == 0:
            at_once = self._adjacent.choose(list(out), len(rows))
            if at_once:
                self._adjacent.read(rows, at, {name: out[name] for name in at_once})
        if share[0] == 0:
            at_once += self._read_mapped(
                rows, at, {name: target for name, target in out.items() if name not in at_once}
            )
        for name, target in out.items():
            reader = self._readers[name]
            if name in at_once:
                continue
            if isinstance(reader, BlockReader):
                reader.read(rows, at, target, share)
            elif share[0] == 0:
                reader.read(rows, at, target)

    def _check_members(self, names: Iterable[str]) -> None:
        """Compare members of archives, of which these fields are parts, before their first rows are read."""
        for name in names:
            if name in self._members and not self._members[name].is_sound:
                with self._files.lend(self._arrays[name].file) as handle:
                    self._members[name].check(handle)

    @cached_property
    def _members(self) -> Mapping[str, MemberSum]:
        found = ((name, array) for name, array in self._arrays.items() if isinstance(array, Contiguous))
        return {name: array.member for name, array in found if array.member is not None}

    def _read_mapped(self, rows: np.ndarray, at: np.ndarray, out: Out) -> list[str]:
        """Read the fields that are gathered from one mapping, and return their names; none if it is only one."""
        found = [
            name for name in out if name in self._gather_readers and len(rows) >= self._gather_readers[name].least_rows
        ]
        if len(found) > 1:
            with self._files.lend(self._gather_readers[found[0]].array.file, mapped=True) as handle:
                for name in found:
                    self._gather_readers[name].read_from(handle, rows, at, out[name])
            return found
        return []

    def filled(self, field: str, rows: np.ndarray, share: Share) -> Iterator[tuple[np.ndarray, Filled]]:
        reader = self._readers[field]
        if isinstance(reader, BlockReader):
            yield np.arange(len(rows)), reader.filled(share)
        else:
            yield from super().filled(field, rows, share)

    def origin(self, row: int) -> Origin:
        array = next(iter(self._arrays.values()))
        return Origin(array.source_path, array.sample(row))

    def find(self, key: str) -> int | None:
        array = next(iter(self._arrays.values()))
        rows = [*array.keys.find_all(key)] if isinstance(array, Members) else []
        if len(rows) > 1:
            raise ConfigError(
                f"{array.source_path}: {key!r} is the name of {len(rows):,} samples of this file, number {rows[0]:,} "
                f"and {rows[1]:,} among them; take one by its row"
            )
        return rows[0] if rows else None

    def close(self) -> None:
        self._files.close()

    def with_casts(self, casts: Mapping[str, Cast]) -> "ExtentStore | None":
        if casts.keys() & self._casts.keys():  # two conversions round twice, one would round once
            return None
        return ExtentStore(self._arrays, self._files, {**self._casts, **casts}, self._parts, self._axes)

    def with_axes(self, axes: Mapping[str, tuple[int, ...]]) -> "ExtentStore | None":
        if not all(isinstance(self._arrays[name], Members) for name in axes) or axes.keys() & self._parts.keys():
            return None
        return ExtentStore(self._arrays, self._files, self._casts, self._parts, axes)

    def with_fields(self, names: Sequence[str]) -> "ExtentStore":
        return ExtentStore(
            {name: self._arrays[name] for name in names},
            self._files,
            {name: cast for name, cast in self._casts.items() if name in names},
            {name: part for name, part in self._parts.items() if name in names},
            {name: axes for name, axes in self._axes.items() if name in names},
        )

    def read_paths(self) -> Sequence[ReadPath]:
        return [
            _whole_path(reader, _chunk_path(name, reader, self._length))
            if isinstance(reader, BlockReader)
            else _whole_path(reader, _range_path(name, reader, self._length))
            for name, reader in self._readers.items()
        ]

    def epoch_bytes(self) -> Mapping[str, int]:
        return {name: _epoch_bytes(reader) for name, reader in self._readers.items()}

    def with_part(self, field: str, part: RowPart) -> "ExtentStore | None":
        if isinstance(part, Box) and part.is_everything:
            return self
        if field in self._axes:
            return None
        whole = compose(self._parts[field], part) if field in self._parts else part
        return ExtentStore(self._arrays, self._files, self._casts, {**self._parts, field: whole}, self._axes)


_RowReader = RowReader | PartReader | MappedReader | MemberReader | MemberGatherReader | NumberGatherReader
_Reader = _RowReader | BlockReader


def _reader(
    array: Extents, files: Files, cast: Cast | None, part: RowPart | None, axes: tuple[int, ...] | None
) -> _Reader:
    if cast is None and not array.stored.isnative:
        cast = Cast(array.spec.dtype)
    if isinstance(array, Chunks):
        return chunk_reader(array, files, cast, part)
    if isinstance(array, Members):
        return member_reader(array, files, cast, part, axes)
    return row_reader(array, files, cast, part)


def _whole_path(reader: _Reader, path: ReadPath) -> ReadPath:
    """Add what all layouts have in common: where the file is, and how its bytes are checked."""
    files = reader.files
    checked_by = path.checked_by if files.manifest is None else MANIFEST
    return replace(path, is_far=files.is_far(reader.array.file), checked_by=checked_by)


def _checksum(array: Chunks) -> str:
    """The checksum that shows a damaged chunk, if every chunk has one."""
    if array.table.checked_by or array.table.has_skipped:
        return array.table.checked_by
    return checked_by(name for name, _ in array.codecs)


def _range_path(name: str, reader: _RowReader, rows: int) -> ReadPath:
    array, mapped = reader.array, int(isinstance(reader, GatherReader))
    how = "gathered from a mapping of the file" if mapped else "read straight from the file"
    if isinstance(array, Members):
        stored = int(array.lengths.sum())
        how = how if mapped else "read by position"
        return ReadPath(name, reader.spec, rows, array.layout, how, stored_bytes=stored, mapped_files=mapped)
    wanted = max(1, reader.spec.row_bytes // reader.spec.dtype.itemsize * array.stored.itemsize)
    read, stored = _bytes_per_row(reader, array), array.rows * array.row_bytes
    return ReadPath(
        name, reader.spec, rows=rows, layout="contiguous", how=how, block_rows=1, amplification=read / wanted,
        stored_bytes=stored, mapped_files=mapped,
        checked_by="crc32" if isinstance(array, Contiguous) and array.member else "",
    )  # fmt: skip


def _bytes_per_row(reader: _RowReader, array: Array) -> int:
    return reader.packed_bytes if isinstance(reader, PartReader) else array.row_bytes


def _epoch_bytes(reader: _Reader) -> int:
    if isinstance(reader, BlockReader):
        return reader.epoch_bytes
    array = reader.array
    return int(array.lengths.sum()) if isinstance(array, Members) else array.rows * _bytes_per_row(reader, array)


def _chunk_path(name: str, reader: BlockReader, rows: int) -> ReadPath:
    array = reader.array
    wanted = max(1, reader.spec.row_bytes // reader.spec.dtype.itemsize * array.stored.itemsize)
    decoded = reader.pieces_per_row * array.chunk_bytes
    several = array.rows_per_chunk > 1
    share = "" if array.chunk == array.shape else f", {array.chunk} of each" if several else f", {array.chunk} of it"
    codecs = ", ".join(codec for codec, _ in array.codecs)
    layout = f"chunks of {f'{array.rows_per_chunk} rows' if several else 'a row'}{share}{'; ' * bool(codecs)}{codecs}"
    if (table := table_of_files(array)) is not None:
        layout += f"; {table.text}"
        layout += "" if array.fill is None else f", absent ones are {np.frombuffer(array.fill, array.stored)[0]}"
    how = "read and decoded outside the library's lock"
    if isinstance(reader, SmallChunks):
        how += ", neighbouring chunks together"
    remedy = array.remedy if several else ""
    stored = array.table.stored_bytes
    return ReadPath(
        name, reader.spec, rows=rows, layout=layout, how=how, block_rows=array.rows_per_chunk,
        amplification=decoded / wanted, stored_bytes=stored, missing_chunks=array.table.missing, remedy=remedy,
        checked_by=_checksum(array), codecs=codecs, chunk=array.chunk,
    )  # fmt: skip
