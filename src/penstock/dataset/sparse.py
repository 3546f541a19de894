"""Rows of a sparse matrix in compressed rows (CSR), delivered dense.

The values of all rows lie one after another, and beside each the column it belongs to. So a row is a range of elements,
and neighbouring rows are read together. If elements are stored in chunks, a block is the rows that begin in one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from penstock.base.scratch import aligned, borrow
from penstock.base.spec import Fields, FieldSpec, Origin, ReadPath
from penstock.dataset.explain import read_paths
from penstock.dataset.store import Out, StoreBase, check_rows, digest
from penstock.errors import Corrupt

# Elements that are read at a time, unless a row has more.
ELEMENTS_AT_ONCE = 64 * 1024
# Rows are read together across this many unwanted elements; in chunks, which are decoded whole, across any.
GAP_ELEMENTS = 1024

VALUES, COLUMNS = "values", "columns"
"""The fields of the store of elements."""


class SparseRows(StoreBase):
    """One field, whose rows are made of a store of elements: values, and the column of each."""

    fields: Fields

    def __init__(self, name: str, elements: StoreBase, ends: np.ndarray, columns: int) -> None:
        """``ends``: where the elements of each row end, after the 0 at which the first begins."""
        self.name, self.elements, self.ends, self.columns = name, elements, ends, columns
        self.fields = {name: FieldSpec(elements.fields[VALUES].dtype, (columns,))}
        self._longest = int(np.diff(ends).max(initial=0))

    def __len__(self) -> int:
        return len(self.ends) - 1

    @property
    def fingerprint(self) -> str:
        return digest("sparse rows", self.elements.fingerprint, len(self), self.columns)

    @property
    def index_bytes(self) -> int:
        return self.ends.nbytes + self.elements.index_bytes

    @property
    def shared_index(self) -> dict[int, int]:
        return self.elements.shared_index

    @property
    def blocks(self) -> np.ndarray | None:
        chunks = self.elements.blocks
        if chunks is None:
            return None
        first = np.unique(np.searchsorted(self.ends[:-1], chunks))
        starts = np.union1d([0], first[first < len(self)])
        return starts if len(starts) < len(self) else None

    def scratch_bytes(self, rows: int) -> int:
        count = max(1, min(int(self.ends[-1]), max(ELEMENTS_AT_ONCE, self._longest)))
        spec, columns = self.elements.fields[VALUES], self.elements.fields[COLUMNS]
        own = aligned(count * spec.row_bytes) + aligned(count * columns.row_bytes)
        return own + self.elements.scratch_bytes(count) + 4 * 8 * count  # numbers of elements, and numpy's comparisons

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        check_rows(rows, self)
        if self.name not in out:
            return
        order = np.argsort(rows, kind="stable")
        rows, at = rows[order], at[order]
        for begin, end in self._runs(rows):
            self._read_run(rows[begin:end].tolist(), at[begin:end].tolist(), out[self.name])

    def _runs(self, rows: np.ndarray) -> Iterator[tuple[int, int]]:
        """Parts of ascending rows that lie close enough to be read together."""
        first, last = self.ends[rows], self.ends[rows + 1]
        gap = GAP_ELEMENTS if self.elements.blocks is None else ELEMENTS_AT_ONCE
        begin = 0
        for end in range(1, len(rows) + 1):
            if end == len(rows) or last[end] - first[begin] > ELEMENTS_AT_ONCE or first[end] - last[end - 1] > gap:
                yield begin, end
                begin = end

    def _read_run(self, rows: list[int], places: list[int], target: np.ndarray) -> None:
        first, last = int(self.ends[rows[0]]), int(self.ends[rows[-1] + 1])
        count, fields = last - first, self.elements.fields
        with borrow(count * fields[VALUES].row_bytes) as one, borrow(count * fields[COLUMNS].row_bytes) as other:
            values, columns = one.view(fields[VALUES].dtype), other.view(fields[COLUMNS].dtype)
            if count:
                self.elements.read_into(np.arange(first, last), np.arange(count), {VALUES: values, COLUMNS: columns})
                self._check(columns, rows)
            for row, place in zip(rows, places, strict=True):
                here = slice(int(self.ends[row]) - first, int(self.ends[row + 1]) - first)
                _place(columns[here], values[here], target[place])

    def _check(self, columns: np.ndarray, rows: list[int]) -> None:
        if int(columns.min()) < 0 or int(columns.max()) >= self.columns:
            raise Corrupt(
                f"{self.origin(rows[0])} to [{rows[-1]}]: columns from {int(columns.min()):,} to "
                f"{int(columns.max()):,}, but the matrix has {self.columns:,}. The file is damaged there: restore it"
            )

    def read_paths(self) -> Sequence[ReadPath]:
        paths = read_paths(self.elements)
        path, stored = paths[0], sum(each.stored_bytes for each in paths)
        blocks = self.blocks
        rows = 1 if blocks is None else int(np.diff(np.append(blocks, len(self))).max())
        return [
            replace(
                path, field=self.name, spec=self.fields[self.name], rows=len(self), block_rows=rows, amplification=1.0,
                layout=f"sparse rows; {path.layout}", stored_bytes=stored, chunk=(),
                remedy="a dense copy (penstock convert)" if rows > 1 else "",
            )
        ]  # fmt: skip

    def origin(self, row: int) -> Origin:
        return Origin(self.elements.origin(0).url, f"{self.name}[{row}]")

    def close(self) -> None:
        self.elements.close()


def _place(columns: np.ndarray, values: np.ndarray, row: np.ndarray) -> None:
    """One dense row. Values that name the same column are added up, as the format defines it."""
    row[:] = 0
    if len(columns) < 2 or bool((columns[1:] > columns[:-1]).all()):
        row[columns] = values
    else:
        np.add.at(row, columns, values)
