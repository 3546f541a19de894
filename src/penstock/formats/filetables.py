"""Tables beside files: a CSV or Parquet file in which each row names a file, and says something about it.

The column of names is found by looking: the first whose first entry is a file of the folder, by its path from there, by
its name alone, or by its name without ending. The other columns become fields: whole numbers, numbers, or text.
"""

import csv
import io
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from penstock.errors import ConfigError, Corrupt, DataError, Missing, SchemaMismatch
from penstock.folderindex import FileList
from penstock.spec import Fields, FieldSpec, Origin, ReadPath
from penstock.steady import open_steady
from penstock.store import Out, check_rows, digest
from penstock.texts import Texts, decoded
from penstock.values import TEXT

NAMES = ("metadata.csv", "metadata.parquet")
ENDINGS = (".csv", ".parquet")

Column = np.ndarray | Texts


class ColumnStore:
    """Columns in memory, of numbers or of text, that belong to the files of a folder."""

    blocks = None

    def __init__(
        self, columns: Mapping[str, Column], rows: int, classes: tuple[str, ...] = (), checked_by: str = ""
    ) -> None:
        self.columns, self._rows, self.checked_by = dict(columns), rows, checked_by
        self.classes = classes
        """What labels mean, where folders are classes."""
        self.fields: Fields = {name: _spec(column) for name, column in columns.items()}

    def __len__(self) -> int:
        return self._rows

    @property
    def index_bytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())

    @property
    def fingerprint(self) -> str:
        return digest("columns", self._rows, *((name, _sum(column)) for name, column in self.columns.items()))

    def choosing(self, names: Sequence[str]) -> "ColumnStore":
        return ColumnStore({name: self.columns[name] for name in names}, self._rows, self.classes, self.checked_by)

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

    def close(self) -> None:
        """Nothing is open."""


def _spec(column: Column) -> FieldSpec:
    if isinstance(column, np.ndarray):
        return FieldSpec(column.dtype)
    longest = int(np.diff(column.ends, prepend=0).max(initial=0))
    return FieldSpec(np.dtype(object), (), TEXT.name, TEXT.most_bytes(longest))


def _sum(column: Column) -> str:
    values = column if isinstance(column, np.ndarray) else column.buffer
    return digest(values[:: max(1, len(values) // 4096)].tobytes())


def find(root: str) -> str | None:
    """The table of a folder: ``metadata.csv`` or ``metadata.parquet``, or the only file of that kind."""
    there = sorted(each for each in os.listdir(root) if each.endswith(ENDINGS) and not each.startswith("."))
    named = [each for each in there if each in NAMES]
    if len(named) > 1 or (not named and len(there) > 1):
        raise ConfigError(
            f"{root}: {', '.join(named or there)}: which of these tables is meant? Call it metadata.csv or "
            f"metadata.parquet, and leave one"
        )
    found = named or there
    return os.path.join(root, found[0]) if found else None


def read(path: str, files: FileList) -> tuple[np.ndarray, dict[str, Column], tuple[DataError, ...]]:
    """For each row of the table its file's number; the other columns; and why rows are left out."""
    columns = _parquet(path) if path.endswith(".parquet") else _csv(path)
    if not columns or not len(next(iter(columns.values()))):
        raise Missing(f"{path}: a table without rows")
    name, places = _names(path, files, columns)
    rows = np.array([places.get(each, -1) for each in _texts(columns.pop(name))], np.int64)
    if path.endswith(".csv"):
        columns = {each: _numbers(column) for each, column in columns.items() if isinstance(column, Texts)}
    lost = np.flatnonzero(rows < 0)
    if not len(lost):
        return rows, columns, ()
    kept = np.flatnonzero(rows >= 0)
    why = Missing(
        f"{path}: row {int(lost[0]) + 1:,} names a file that is not among the {len(files):,} of the folder, and "
        f'{len(lost) - 1:,} others do too. Restore them, or pass on_error="skip" to leave such rows out'
    )
    return rows[kept], {each: _taken(column, kept) for each, column in columns.items()}, (why,)


def _names(path: str, files: FileList, columns: Mapping[str, Column]) -> tuple[str, dict[str, int]]:
    """The column that names files, and which file each name is."""
    for places in _ways(files):
        for name, column in columns.items():
            first = next(iter(_texts(column)), None)
            if first is not None and first in places:
                return name, places
    told = ", ".join(f"{name!r} ({next(iter(_texts(column)), '')!r} …)" for name, column in columns.items())
    raise SchemaMismatch(
        f"{path}: no column names the files of {files.root} (such as {files.names[0]!r}); it has {told}. Mend the "
        f"names, or move the table elsewhere"
    )


def _ways(files: FileList) -> Iterator[dict[str, int]]:
    """Ways to name files: the path, the file's own name, its stem; the latter two where no two files share one."""
    yield {name: row for row, name in enumerate(files.names)}
    for short in (os.path.basename, _stem):
        found = {short(name): row for row, name in enumerate(files.names)}
        if len(found) == len(files):
            yield found


def _stem(name: str) -> str:
    return os.path.splitext(os.path.basename(name))[0]


def _csv(path: str) -> dict[str, Column]:
    try:
        with io.TextIOWrapper(open_steady(path), newline="", encoding="utf-8-sig") as file:
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
    buffers = [Texts(np.frombuffer(t, np.uint8), np.frombuffer(e, np.int64)) for t, e in zip(texts, ends, strict=True)]
    return dict(zip(header, buffers, strict=True))


def _numbers(column: Texts) -> Column:
    """Whole numbers if all are, else numbers (nothing stands for not-a-number) if all are, else the text."""
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


def _parquet(path: str) -> dict[str, Column]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError(f'{path}: reading it needs pyarrow: pip install "penstock[parquet]"') from None
    try:
        table = pq.read_table(path, use_threads=False)
    except (OSError, ValueError) as error:
        raise Corrupt(f"{path}: not a whole Parquet file ({error})") from error
    found: dict[str, Column] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type):
            if column.null_count and not pa.types.is_floating(column.type):
                column = column.cast(pa.float64())
            found[name] = np.ascontiguousarray(column.to_numpy())
        elif pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            found[name] = _of_texts(column.to_pylist())
    return found


def _of_texts(texts: Sequence[str | None]) -> Texts:
    raws = [(text or "").encode() for text in texts]
    return Texts(np.frombuffer(b"".join(raws), np.uint8), np.cumsum([len(raw) for raw in raws], dtype=np.int64))


def _texts(column: Column) -> Iterator[str]:
    return map(str, column.tolist()) if isinstance(column, np.ndarray) else map(decoded, column.raws())


def _taken(column: Column, rows: np.ndarray) -> Column:
    return column[rows] if isinstance(column, np.ndarray) else _of_texts([column[row] for row in rows.tolist()])
