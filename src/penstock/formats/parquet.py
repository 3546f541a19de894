"""Tables in Parquet and Arrow files: columns of numbers, and of lists of one length, as fields.

Small tables, such as labels, are held in memory. In large ones, row groups (Parquet) or record batches (compressed
Arrow) are decoded whole, so these are the blocks; uncompressed Arrow is read from a mapping, row by row.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.base.file_id import FileId
from penstock.base.scratch import aligned
from penstock.base.sizes import KiB, MiB
from penstock.base.spec import MANIFEST, Fields, FieldSpec, Origin, ReadPath
from penstock.base.urls import base_name, check_local
from penstock.dataset.held_values import HeldValues, collect
from penstock.dataset.memory import HeldStore
from penstock.dataset.rewrite import side_by_side
from penstock.dataset.store import Out, Store, StoreBase, check_rows, digest
from penstock.errors import Corrupt, DecodeFailed, Missing, SchemaMismatch
from penstock.files.handles import check_unchanged
from penstock.files.retry import retry_library
from penstock.formats.arrow import (
    arrow_bytes,
    arrow_library,
    decoder_of_values,
    describe_arrow_type,
    errors_of_arrow,
    numbers_of,
    raw_values,
    spec_of,
)
from penstock.read.objects import ObjectDecoder

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions

# Smaller tables are held in memory.
HELD_BYTES = 64 * MiB

# What Arrow itself allocates in a read, measured, besides the stored part and what decoding takes.
LIBRARY_BYTES = 16 * MiB

# Measured: what Arrow holds for each value besides the value, where these are in lists: levels and wider integers.
VALUE_BYTES = 13

# A table that is held in memory is decoded in pieces of this many bytes, from this many stored ones.
PIECE_BYTES = 1 * MiB
STREAM_BYTES = 64 * KiB

# Values of no fixed size that are decoded at a time.
VALUES_AT_ONCE = 1024

DAMAGED = '{}. The file is damaged there: fetch it again, or leave those rows out with select or on_error="skip"'


def open_parquet(path: str, options: "OpenOptions") -> Store:
    """The columns of one Parquet file."""
    check_local(path, "tables")
    return _open_table(Parquet(options.files.identify(path)), options)


def open_arrow(path: str, options: "OpenOptions") -> Store:
    """The columns of one Arrow IPC (or Feather) file."""
    check_local(path, "tables")
    return _open_table(Arrow(options.files.identify(path)), options)


def _open_table(table: "Parquet | Arrow", options: "OpenOptions") -> Store:
    path, schema = table.file.path, table.schema
    known = {column.name: spec for column in schema if (spec := spec_of(column.type)) is not None}
    values = {column.name: found for column in schema if (found := decoder_of_values(column)) is not None}
    names = options.fields or tuple(column.name for column in schema if column.name in known or column.name in values)
    if not names:
        raise Missing(f"{path}: no column of numbers; the file has {_describe(schema)}")
    if options.fields is None:
        for column in schema:
            if column.name not in names:
                options.leave_out(column.name, describe_arrow_type(column.type))
    for name in names:
        if name not in schema.names:
            raise Missing(f"{path}: no column {name!r}; the file has {_describe(schema)}")
        if name not in known and name not in values:
            raise SchemaMismatch(
                f"{path}: column {name!r} is {schema.field(name).type}; expected numbers, or lists of numbers of one "
                f"length. Leave it out with fields=(…), or write it as codes"
            )
    stores: list[StoreBase] = []
    if numbers := {name: known[name] for name in names if name in known}:
        stores.append(_open_numbers(table, numbers))
    if listed := {name: values[name] for name in names if name in values}:
        stores.append(_hold_values(table, listed))
    return side_by_side(stores, names)


def _open_numbers(table: "Parquet | Arrow", fields: Fields) -> StoreBase:
    store = TableStore(table, fields)
    size = len(store) * sum(spec.row_bytes for spec in store.fields.values())
    if len(store) == 0 or size > HELD_BYTES:
        return store
    return HeldTable(table.file, store.all_rows(), "a small table", decoding_bytes=store.held_decoding_bytes)


def _hold_values(table: "Parquet | Arrow", listed: Mapping[str, ObjectDecoder]) -> StoreBase:
    columns = {}
    for name, decoder in listed.items():
        where = f"{table.file.path}: column {name!r}"
        with errors_of_arrow(where, DAMAGED, DecodeFailed):
            pieces = (raw_values(piece.column(name), where) for piece in table.pieces(name, VALUES_AT_ONCE))
            columns[name] = (decoder, collect(pieces, where))
    return HeldValues(table.file, columns)


def _describe(schema: Any) -> str:
    return ", ".join(f"{column.name!r} ({column.type})" for column in schema) or "no columns"


class Parquet:
    """A Parquet file: its row groups are decoded whole."""

    kind = "parquet"
    whole = True

    def __init__(self, file: FileId) -> None:
        self.file = file
        self._about  # noqa: B018  a damaged file is an error now

    def __reduce__(self) -> tuple[type, tuple[FileId]]:
        return type(self), (self.file,)

    @cached_property
    def _about(self) -> Any:
        pq = arrow_library("pyarrow.parquet")
        damaged = errors_of_arrow(self.file.path, "not a whole Parquet file ({}); fetch it again", Corrupt)
        with damaged, pq.ParquetFile(self.file.path) as opened:
            return opened.metadata, opened.schema_arrow

    @property
    def schema(self) -> Any:
        return self._about[1]

    @cached_property
    def rows(self) -> list[int]:
        about = self._about[0]
        return [about.row_group(number).num_rows for number in range(about.num_row_groups)]

    @cached_property
    def stored_bytes(self) -> int:
        """The largest part, as stored or encoded."""
        about = self._about[0]
        return max((about.row_group(number).total_byte_size for number in range(about.num_row_groups)), default=0)

    def _opened(self, **how: Any) -> Any:
        """The file, whose pages are compared with their CRC-32 where they have one."""
        pq = arrow_library("pyarrow.parquet")
        return pq.ParquetFile(
            self.file.path, metadata=self._about[0], pre_buffer=False, page_checksum_verification=True, **how
        )

    def part(self, number: int, names: Sequence[str]) -> Any:
        with self._opened() as opened:
            return opened.read_row_group(number, columns=list(names), use_threads=False)

    def pieces(self, name: str, rows: int) -> Iterator[Any]:
        """A column from its beginning, in pieces of a few rows."""
        with self._opened(buffer_size=STREAM_BYTES) as opened:
            yield from opened.iter_batches(batch_size=rows, columns=[name], use_threads=False)


class Arrow:
    """An Arrow file: its record batches are mapped, or decoded whole if they are compressed."""

    kind = "arrow"

    def __init__(self, file: FileId) -> None:
        self.file = file
        self.schema, self.rows, self.whole = self._look()
        self.stored_bytes = self.file.size // max(1, len(self.rows))

    def __reduce__(self) -> tuple[type, tuple[FileId]]:
        return type(self), (self.file,)

    def _look(self) -> tuple[Any, list[int], bool]:
        pa = arrow_library("pyarrow")
        with errors_of_arrow(self.file.path, "not a whole Arrow file ({}); fetch it again", Corrupt):
            with pa.memory_map(self.file.path) as mapped, pa.ipc.open_file(mapped) as reader:
                schema, count = reader.schema, reader.num_record_batches
                whole = count > 0 and not _is_mapped(reader.get_batch(0), mapped)
            with self._reader([0] if whole and len(schema) else None) as reader:
                rows = [reader.get_batch(number).num_rows for number in range(count)]
            return schema, rows, whole

    @contextmanager
    def _reader(self, included: list[int] | None) -> Iterator[Any]:
        """Columns by their numbers, or all. Only included columns are decoded; they are copied even if they could be
        mapped."""
        pa = arrow_library("pyarrow")
        chosen = pa.ipc.IpcReadOptions(included_fields=included, use_threads=False)
        with pa.memory_map(self.file.path) as mapped, pa.ipc.open_file(mapped, options=chosen) as reader:
            yield reader

    def part(self, number: int, names: Sequence[str]) -> Any:
        included = [self.schema.get_field_index(name) for name in names] if self.whole else None
        with self._reader(included) as reader:
            return reader.get_batch(number)

    def pieces(self, name: str, rows: int) -> Iterator[Any]:
        """A column from its beginning, in pieces of a few rows; compressed batches are decoded whole."""
        for number in range(len(self.rows)):
            batch = self.part(number, [name])
            for begin in range(0, batch.num_rows, rows):
                yield batch.slice(begin, rows)


def _is_mapped(batch: Any, mapped: Any) -> bool:
    """Whether a batch is uncompressed in the file, and so takes no memory."""
    mapped.seek(0)
    everything = mapped.read_buffer()
    begin, end = everything.address, everything.address + everything.size
    held = (buffer for column in batch.columns for buffer in column.buffers() if buffer is not None and buffer.size)
    return all(begin <= buffer.address < end for buffer in held)


class HeldTable(HeldStore):
    """A small table in memory; Arrow's own memory counts once for all of them."""

    @property
    def shared_index(self) -> dict[int, int]:
        return arrow_bytes()


class TableStore(StoreBase):
    """Columns of a table, read part by part."""

    fields: Fields

    def __init__(self, table: Parquet | Arrow, fields: Fields) -> None:
        self.table, self.fields = table, dict(fields)
        self._begins = np.concatenate([[0], np.cumsum(table.rows)]).astype(np.int64)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.table, self.fields)

    @property
    def blocks(self) -> np.ndarray | None:
        return self._begins[:-1] if self.table.whole and max(self.table.rows, default=0) > 1 else None

    @property
    def fingerprint(self) -> str:
        return digest(self.table.kind, base_name(self.table.file.path), self.table.file.size, list(self.fields))

    def __len__(self) -> int:
        return int(self._begins[-1])

    def with_fields(self, names: Sequence[str]) -> "TableStore":
        return TableStore(self.table, {name: self.fields[name] for name in names})

    def scratch_bytes(self, rows: int) -> int:
        taken = max(aligned(rows * spec.row_bytes) for spec in self.fields.values())
        if not self.table.whole:
            return 2 * taken + LIBRARY_BYTES
        longest = max(self.table.rows, default=0)
        decoded = longest * sum(_decoding_bytes(spec) for spec in self.fields.values())
        return 2 * taken + self.table.stored_bytes + decoded + LIBRARY_BYTES

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        check_rows(rows, self)
        if not out or len(rows) == 0:
            return
        check_unchanged(self.table.file)
        parts = np.searchsorted(self._begins, rows, side="right") - 1
        for number in np.unique(parts).tolist():
            here = np.flatnonzero(parts == number)
            columns = self._part(number, list(out))
            for name, target in out.items():
                values = self._values(columns, name, number)
                target[at[here]] = values[rows[here] - self._begins[number]]

    def _part(self, number: int, names: Sequence[str]) -> Any:
        try:
            return retry_library(self.table.file.path, partial(self._decoded, number, names))
        except DecodeFailed:
            check_unchanged(self.table.file)  # a replaced file is the likelier cause
            raise

    def _decoded(self, number: int, names: Sequence[str]) -> Any:
        with errors_of_arrow(self._where(number), DAMAGED, DecodeFailed):
            part = self.table.part(number, names)
            part.validate()  # otherwise values could come from beyond the end of a short buffer
            return part

    @property
    def held_decoding_bytes(self) -> int:
        """What opening takes at once besides the rows: of Arrow files, a compressed batch."""
        if not self.table.whole or isinstance(self.table, Parquet):
            return 0
        return max(self.table.rows, default=0) * sum(spec.row_bytes for spec in self.fields.values())

    def all_rows(self) -> dict[str, np.ndarray]:
        """Every row of every field, decoded in small pieces to save memory."""
        held = {name: spec.empty(len(self)) for name, spec in self.fields.items()}
        for name, values in held.items():
            retry_library(self.table.file.path, partial(self._fill, name, values))
        arrow_library("pyarrow").default_memory_pool().release_unused()
        return held

    def _fill(self, name: str, goal: np.ndarray) -> None:
        spec, at, where = self.fields[name], 0, f"{self.table.file.path}: column {name!r}"
        release = arrow_library("pyarrow").default_memory_pool().release_unused
        with errors_of_arrow(where, DAMAGED, DecodeFailed):
            for piece in self.table.pieces(name, max(1, PIECE_BYTES // max(1, spec.row_bytes))):
                here = f"{self.table.file.path}: rows {at:,} to {at + piece.num_rows - 1:,}, column {name!r}"
                values = numbers_of(piece.column(name), here)
                if values.size != piece.num_rows * prod(spec.shape) or at + piece.num_rows > len(goal):
                    break
                goal[at : at + piece.num_rows] = values.reshape(-1, *spec.shape)
                at += piece.num_rows
                del piece, values
                release()
        if at != len(goal):
            raise _too_few(f"{self.table.file.path}: rows 0 to {len(goal) - 1:,}, column {name!r}", at, len(goal))

    def _values(self, columns: Any, name: str, number: int) -> np.ndarray:
        spec = self.fields[name]
        values = numbers_of(columns.column(name), f"{self._where(number)}, column {name!r}")
        declared = int(self._begins[number + 1] - self._begins[number]) * prod(spec.shape)
        if values.size != declared:
            raise _too_few(f"{self._where(number)}, column {name!r}", values.size, declared)
        return values.reshape(-1, *spec.shape)

    def _where(self, number: int) -> str:
        first, after = self._begins[number : number + 2].tolist()
        return f"{self.table.file.path}: rows {first:,} to {after - 1:,}"

    def read_paths(self) -> Sequence[ReadPath]:
        whole = self.table.whole
        longest = max(self.table.rows, default=1)
        how = "decoded by Arrow" if whole else "taken from a mapping of the file"
        layout = f"{'parts' if whole else 'batches'} of {longest:,} rows"
        remedy = "a copy with smaller row groups" if whole else ""
        block, times = (longest, float(longest)) if whole else (1, 1.0)
        by = MANIFEST if self.table.file.is_compared else ""
        return [
            ReadPath(
                name, spec, len(self), layout, how, block_rows=block, amplification=times, remedy=remedy, checked_by=by
            )
            for name, spec in self.fields.items()
        ]

    def origin(self, row: int) -> Origin:
        return Origin(self.table.file.path, f"{next(iter(self.fields))}[{row}]")


def _too_few(where: str, found: int, declared: int) -> Corrupt:
    return Corrupt(
        f"{where}: {declared:,} values were declared, but {found:,} are there. The file is damaged: fetch it again"
    )


def _decoding_bytes(spec: FieldSpec) -> int:
    """What Arrow holds for a row while it decodes a row group."""
    if spec.is_list or not spec.shape:
        return 3 * spec.row_bytes
    return max(3 * spec.row_bytes, spec.row_bytes + VALUE_BYTES * prod(spec.shape))
