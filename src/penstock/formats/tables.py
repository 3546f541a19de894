"""Tables of Parquet and Arrow files: columns of numbers, and of lists of one length, as fields.

Small tables, such as labels, are held in memory. Of large ones a row group (Parquet) or record batch (compressed Arrow)
is decoded whole or not at all, so these are the blocks; uncompressed Arrow is taken from a mapping, row by row.
"""

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import ConfigError, Corrupt, DecodeFailed, Missing, SchemaMismatch
from penstock.extents import FileId
from penstock.formats.held import HeldStore
from penstock.handles import check_unchanged
from penstock.memory import aligned
from penstock.sizes import MiB
from penstock.spec import MANIFEST, Fields, FieldSpec, Origin, ReadPath
from penstock.steady import steadily
from penstock.store import Out, Store, check_rows, digest
from penstock.urls import base_name, check_local

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions

# Tables that take no more than this are held.
HELD_BYTES = 64 * MiB

# What Arrow allocates of its own in a read, measured, besides the stored part and three times the decoded one.
LIBRARY_BYTES = 16 * MiB


def open_parquet(path: str, options: "OpenOptions") -> Store:
    """The columns of one Parquet file."""
    check_local(path, "tables")
    return _opened(Parquet(options.files.identify(path)), options)


def open_arrow(path: str, options: "OpenOptions") -> Store:
    """The columns of one Arrow IPC (or Feather) file."""
    check_local(path, "tables")
    return _opened(Arrow(options.files.identify(path)), options)


def _opened(table: "Parquet | Arrow", options: "OpenOptions") -> Store:
    path, schema = table.file.path, table.schema
    known = {column.name: spec for column in schema if (spec := _spec(column.type)) is not None}
    names = options.fields or tuple(known)
    if not names:
        raise Missing(f"{path}: no column of numbers; the file has {_told(schema)}")
    for name in names:
        if name not in schema.names:
            raise Missing(f"{path}: no column {name!r}; the file has {_told(schema)}")
        if name not in known:
            raise SchemaMismatch(
                f"{path}: column {name!r} is {schema.field(name).type}; expected numbers, or lists of numbers of one "
                f"length. Leave it out with fields=(…), or write it as codes"
            )
    store = TableStore(table, {name: known[name] for name in names})
    size = len(store) * sum(spec.row_bytes for spec in store.fields.values())
    if len(store) == 0 or size > HELD_BYTES:
        return store
    rows = np.arange(len(store))
    held = {name: spec.empty(len(store)) for name, spec in store.fields.items()}
    store.read_into(rows, rows, held)
    return HeldStore(table.file, held, "a small table")


def _told(schema: Any) -> str:
    return ", ".join(f"{column.name!r} ({column.type})" for column in schema) or "no columns"


def _spec(kind: Any) -> FieldSpec | None:
    """What a column of this type is as a field; None where it is none."""
    import pyarrow as pa

    if isinstance(kind, pa.FixedShapeTensorType):
        inner = _spec(kind.value_type)
        plain = kind.permutation is None or list(kind.permutation) == sorted(kind.permutation)
        return FieldSpec(inner.dtype, tuple(kind.shape)) if inner and plain else None
    if pa.types.is_fixed_size_list(kind):
        inner = _spec(kind.value_type)
        return FieldSpec(inner.dtype, (kind.list_size, *inner.shape)) if inner else None
    if pa.types.is_boolean(kind):
        return FieldSpec(np.dtype(bool))
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return FieldSpec(np.dtype(kind.to_pandas_dtype()))
    return None


def _library(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        raise ConfigError(f'reading tables needs {name}: pip install "penstock[parquet]"') from None


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
        pq = _library("pyarrow.parquet")
        try:
            with pq.ParquetFile(self.file.path) as opened:
                return opened.metadata, opened.schema_arrow
        except (OSError, ValueError) as error:
            raise Corrupt(f"{self.file.path}: not a whole Parquet file ({error}); fetch it again") from error

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

    def part(self, number: int, names: Sequence[str]) -> Any:
        pq = _library("pyarrow.parquet")
        with pq.ParquetFile(self.file.path, metadata=self._about[0], pre_buffer=False) as opened:
            return opened.read_row_group(number, columns=list(names), use_threads=False)


class Arrow:
    """An Arrow file: its record batches are mapped, or decoded whole where they are compressed."""

    kind = "arrow"

    def __init__(self, file: FileId) -> None:
        self.file = file
        self.schema, self.rows, self.whole = self._look()
        self.stored_bytes = self.file.size // max(1, len(self.rows))

    def __reduce__(self) -> tuple[type, tuple[FileId]]:
        return type(self), (self.file,)

    def _look(self) -> tuple[Any, list[int], bool]:
        pa = _library("pyarrow")
        try:
            one = pa.ipc.IpcReadOptions(included_fields=[0], use_threads=False)
            with pa.memory_map(self.file.path) as mapped, pa.ipc.open_file(mapped, options=one) as reader:
                rows = [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]
            with pa.memory_map(self.file.path) as mapped, pa.ipc.open_file(mapped) as reader:
                schema = reader.schema
                whole = bool(rows) and not _is_mapped(reader.get_batch(0), mapped)
            return schema, rows, whole
        except (OSError, ValueError) as error:
            raise Corrupt(f"{self.file.path}: not a whole Arrow file ({error}); fetch it again") from error

    def part(self, number: int, names: Sequence[str]) -> Any:
        pa = _library("pyarrow")
        chosen = pa.ipc.IpcReadOptions(
            included_fields=[self.schema.get_field_index(name) for name in names], use_threads=False
        )
        with pa.memory_map(self.file.path) as mapped, pa.ipc.open_file(mapped, options=chosen) as reader:
            return reader.get_batch(number)


def _is_mapped(batch: Any, mapped: Any) -> bool:
    """Whether a batch lies in the file as it is, and takes no memory."""
    mapped.seek(0)
    everything = mapped.read_buffer()
    begin, end = everything.address, everything.address + everything.size
    held = (buffer for column in batch.columns for buffer in column.buffers() if buffer is not None and buffer.size)
    return all(begin <= buffer.address < end for buffer in held)


class TableStore:
    """Columns of a table, read part by part."""

    index_bytes = 0

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

    def choosing(self, names: Sequence[str]) -> "TableStore":
        return TableStore(self.table, {name: self.fields[name] for name in names})

    def scratch_bytes(self, rows: int) -> int:
        taken = max(aligned(rows * spec.row_bytes) for spec in self.fields.values())
        if not self.table.whole:
            return 2 * taken + LIBRARY_BYTES
        longest = max(self.table.rows, default=0)
        decoded = longest * sum(spec.row_bytes for spec in self.fields.values())
        return 2 * taken + self.table.stored_bytes + 3 * decoded + LIBRARY_BYTES

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
            return steadily(self.table.file.path, lambda: self.table.part(number, names))
        except (OSError, ValueError) as error:
            check_unchanged(self.table.file)
            raise DecodeFailed(
                f"{self._where(number)}: {error}. The file is damaged there: fetch it again, or leave those rows out "
                f'with select or on_error="skip"'
            ) from error

    def _values(self, columns: Any, name: str, number: int) -> np.ndarray:
        pa = _library("pyarrow")
        spec, column = self.fields[name], columns.column(name)
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        found = [_flat(chunk, f"{self._where(number)}, column {name!r}") for chunk in chunks]
        values = np.concatenate(found) if len(found) > 1 else found[0] if found else np.empty(0, spec.dtype)
        declared = int(self._begins[number + 1] - self._begins[number]) * prod(spec.shape)
        if values.size != declared:
            raise Corrupt(
                f"{self._where(number)}, column {name!r}: {values.size:,} values are there, {declared:,} were "
                f"declared. The file is damaged: fetch it again"
            )
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
        by = MANIFEST if self.table.file.compared else ""
        return [
            ReadPath(name, spec, len(self), layout, how, block, times, remedy=remedy, checked_by=by)
            for name, spec in self.fields.items()
        ]

    def origin(self, row: int) -> Origin:
        return Origin(self.table.file.path, f"{next(iter(self.fields))}[{row}]")

    def close(self) -> None:
        """Nothing stays open between reads."""


def _flat(column: Any, where: str) -> np.ndarray:
    """A column's numbers, one after another; without a copy where they lie so."""
    pa = _library("pyarrow")
    if column.null_count:
        raise Missing(f"{where} has {column.null_count:,} nulls; fill them, or leave the column out with fields=(…)")
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_fixed_size_list(column.type):
        return _flat(column.flatten(), where)
    return np.asarray(column.to_numpy(zero_copy_only=False))
