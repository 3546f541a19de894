"""Tables beside files: a CSV or Parquet file whose rows name and describe the files.

The column of names is the first whose first entry is a file of the folder: by its path from there, by its name alone,
or by its name without ending. The other columns become fields: whole numbers, numbers, or text.
"""

import csv
import io
import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.spec import Fields, FieldSpec, Origin, ReadPath
from penstock.base.text_column import TextColumn, decoded
from penstock.dataset.memory import sample_digest
from penstock.dataset.store import Out, StoreBase, check_rows, digest
from penstock.errors import ConfigError, Corrupt, DataError, Missing, SchemaMismatch
from penstock.files.retry import open_for_parser
from penstock.formats.arrow import arrow_bytes, arrow_library, describe_arrow_type, errors_of_arrow, numbers_of
from penstock.formats.folder.listing import FileList
from penstock.read.objects import TEXT

NAMES = ("metadata.csv", "metadata.parquet")
ENDINGS = (".csv", ".parquet")

# Measured: memory per file for finding files by their names while a table is read.
LOOKUP_BYTES = 512

Column = np.ndarray | TextColumn


class ColumnStore(StoreBase):
    """Columns in memory, of numbers or of text, that belong to the files of a folder."""

    fields: Fields
    classes: tuple[str, ...] = ()

    def __init__(
        self,
        columns: Mapping[str, Column],
        rows: int,
        classes: tuple[str, ...] = (),
        checked_by: str = "",
        shared_index: Mapping[int, int] | None = None,
    ) -> None:
        self.columns, self._rows, self.checked_by = dict(columns), rows, checked_by
        self._shared_index = dict(shared_index or {})
        """Memory that reading them took: the allocator may keep it."""
        self.classes = classes
        """The meaning of labels, if folders are classes."""
        self.fields = {name: _make_spec(column) for name, column in columns.items()}

    def __len__(self) -> int:
        return self._rows

    @property
    def shared_index(self) -> dict[int, int]:
        return self._shared_index

    @property
    def index_bytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())

    @property
    def fingerprint(self) -> str:
        flat = {name: each if isinstance(each, np.ndarray) else each.buffer for name, each in self.columns.items()}
        return digest("columns", self._rows, *((name, sample_digest(values)) for name, values in flat.items()))

    def with_fields(self, names: Sequence[str]) -> "ColumnStore":
        return ColumnStore(
            {name: self.columns[name] for name in names}, self._rows, self.classes, self.checked_by, self.shared_index
        )

    def scratch_bytes(self, rows: int) -> int:
        return max((rows * spec.dtype.itemsize for spec in self.fields.values()), default=0)

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        check_rows(rows, self)
        for name, target in out.items():
            column = self.columns[name]
            if isinstance(column, np.ndarray):
                target[at] = column[rows]
                continue
            for row, place in zip(rows.tolist(), at.tolist(), strict=True):
                target[place] = column[row]

    def read_paths(self) -> Sequence[ReadPath]:
        return [
            ReadPath(name, spec, self._rows, "a column", "in memory already", checked_by=self.checked_by)
            for name, spec in self.fields.items()
        ]

    def origin(self, row: int) -> Origin:
        return Origin("", f"[{row}]")


def _make_spec(column: Column) -> FieldSpec:
    if isinstance(column, np.ndarray):
        return FieldSpec(column.dtype)
    return FieldSpec(np.dtype(object), (), TEXT.name, TEXT.most_bytes(column.longest))


def find_table(root: str) -> str | None:
    """The table of a folder: ``metadata.csv`` or ``metadata.parquet``, or the only file of that kind."""
    there = sorted(each for each in os.listdir(root) if each.endswith(ENDINGS) and not each.startswith("."))
    named = [each for each in there if each in NAMES]
    if len(named) > 1 or (not named and len(there) > 1):
        raise ConfigError(
            f"{root}: {', '.join(named or there)}: expected one table; name the one to use metadata.csv or "
            f"metadata.parquet"
        )
    found = named or there
    return os.path.join(root, found[0]) if found else None


@dataclass(frozen=True)
class Table:
    """The rows of a table that name files."""

    rows: np.ndarray
    """The number of each row's file."""
    columns: Mapping[str, Column]
    left_out: tuple[DataError, ...] = ()
    """Why rows are left out."""
    fields_left_out: Mapping[str, str] = field(default_factory=dict)
    """Why columns are left out."""


def reading_bytes(path: str, files: FileList) -> dict[int, int]:
    """Memory that ``read`` takes besides the columns: entries of ``shared_index``."""
    lookup = {id(files): LOOKUP_BYTES * len(files) + 2 * os.path.getsize(path)}
    return {**lookup, **arrow_bytes()} if path.endswith(".parquet") else lookup


def read_table(path: str, files: FileList) -> Table:
    """The table of a folder's files."""
    columns, others = _read_parquet(path) if path.endswith(".parquet") else (_read_csv(path), {})
    if not columns or not len(next(iter(columns.values()))):
        raise Missing(f"{path}: a table without rows")
    name, places = _find_names(path, files, columns)
    rows = np.array([places.get(each, -1) for each in _iterate_texts(columns.pop(name))], np.int64)
    if path.endswith(".csv"):
        columns = {each: _parse_numbers(column) for each, column in columns.items() if isinstance(column, TextColumn)}
    lost = np.flatnonzero(rows < 0)
    if not len(lost):
        return Table(rows, columns, (), others)
    kept = np.flatnonzero(rows >= 0)
    why = Missing(
        f"{path}: row {int(lost[0]) + 1:,} names a file that is not among the {len(files):,} of the folder, and "
        f'{len(lost) - 1:,} others do too. Restore them, or pass on_error="skip" to leave such rows out'
    )
    return Table(rows[kept], {each: _take(column, kept) for each, column in columns.items()}, (why,), others)


def _find_names(path: str, files: FileList, columns: Mapping[str, Column]) -> tuple[str, dict[str, int]]:
    """The column that names files, and which file each name is."""
    for places in _make_lookups(files):
        for name, column in columns.items():
            first = next(iter(_iterate_texts(column)), None)
            if first is not None and first in places:
                return name, places
    found = ", ".join(f"{name!r} ({next(iter(_iterate_texts(column)), '')!r} …)" for name, column in columns.items())
    raise SchemaMismatch(
        f"{path}: no column names the files of {files.root} (such as {files.names[0]!r}); it has {found}. Repair "
        f"the names, or move the table elsewhere"
    )


def _make_lookups(files: FileList) -> Iterator[dict[str, int]]:
    """Tables from names to rows: by path; or by the file's own name or its stem, if no two files share it."""
    yield {name: row for row, name in enumerate(files.names)}
    for short in (os.path.basename, _stem):
        found = {short(name): row for row, name in enumerate(files.names)}
        if len(found) == len(files):
            yield found


def _stem(name: str) -> str:
    return os.path.splitext(os.path.basename(name))[0]


def _read_csv(path: str) -> dict[str, Column]:
    try:
        with io.TextIOWrapper(open_for_parser(path), newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file)
            header = next(lines, [])
            texts, ends = [bytearray() for _ in header], [array("q") for _ in header]
            for line in lines:
                if not line:
                    continue
                if len(line) != len(header):
                    raise Corrupt(
                        f"{path}: line {lines.line_num:,} has {len(line)} entries, and the header has {len(header)}"
                    )
                for cell, text, end in zip(line, texts, ends, strict=True):
                    text += cell.encode()
                    end.append(len(text))
    except (UnicodeDecodeError, csv.Error) as error:
        raise Corrupt(f"{path}: not a CSV table in UTF-8 ({error})") from error
    if len(set(header)) != len(header):
        raise Corrupt(f"{path}: two columns have the same name: {', '.join(header)}")
    buffers = [
        TextColumn(np.frombuffer(t, np.uint8), np.frombuffer(e, np.int64)) for t, e in zip(texts, ends, strict=True)
    ]
    return dict(zip(header, buffers, strict=True))


def _parse_numbers(column: TextColumn) -> Column:
    """Whole numbers if all are; otherwise numbers if all are (an empty cell is NaN); otherwise text."""
    try:
        if len(column.buffer):
            return np.fromiter(map(int, column.raws()), np.int64, len(column))
    except (ValueError, OverflowError):
        pass
    try:
        if len(column.buffer):
            numbers = (float(raw) if raw else np.nan for raw in column.raws())
            return np.fromiter(numbers, np.float64, len(column))
    except ValueError:
        pass
    return column


def _read_parquet(path: str) -> tuple[dict[str, Column], dict[str, str]]:
    """The columns that can be fields, and why the others cannot."""
    pa, pq = arrow_library("pyarrow"), arrow_library("pyarrow.parquet")
    with (
        errors_of_arrow(path, "not a whole Parquet file ({})", Corrupt),
        open_for_parser(path) as file,
        pq.ParquetFile(file, page_checksum_verification=True) as opened,
    ):
        table = opened.read(use_threads=False)
    found: dict[str, Column] = {}
    others: dict[str, str] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type):
            found[name] = np.array(numbers_of(_fill_nulls(column), f"{path}: column {name!r}"))
        elif pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            found[name] = _make_text_column(column.to_pylist())
        else:
            others[name] = describe_arrow_type(column.type)
    return found, others


def _fill_nulls(column: Any) -> Any:
    """Replace nulls by NaN."""
    if not column.null_count:
        return column
    pa = arrow_library("pyarrow")
    return (column if pa.types.is_floating(column.type) else column.cast(pa.float64())).fill_null(math.nan)


def _make_text_column(texts: Sequence[str | None]) -> TextColumn:
    raws = [(text or "").encode() for text in texts]
    return TextColumn(np.frombuffer(b"".join(raws), np.uint8), np.cumsum([len(raw) for raw in raws], dtype=np.int64))


def _iterate_texts(column: Column) -> Iterator[str]:
    return map(str, column.tolist()) if isinstance(column, np.ndarray) else map(decoded, column.raws())


def _take(column: Column, rows: np.ndarray) -> Column:
    return column[rows] if isinstance(column, np.ndarray) else column.take(rows)
