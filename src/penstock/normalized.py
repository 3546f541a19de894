"""A field shifted and scaled element by element, by tables that its rows' groups choose: z-scores by session, say.

``(value - mean[group of the row]) / spread[group of the row]``, in single precision, on the way into the batch. Where
the spread is 0 the element does not vary, and comes as 0.
"""

import numpy as np

from penstock.errors import ConfigError, SchemaMismatch
from penstock.memory import aligned, borrow
from penstock.spec import Fields, FieldSpec
from penstock.store import Out, Store, digest
from penstock.wrap import CONVERT_BYTES, Wrapper


class Normalized(Wrapper):
    """One field normalized; the others as they are."""

    def __init__(
        self, store: Store, field: str, mean: np.ndarray, spread: np.ndarray, group_of_row: np.ndarray, dtype: np.dtype
    ) -> None:
        super().__init__(store)
        self.field, self.dtype = field, np.dtype(dtype)
        shape = store.fields[field].shape
        for name, table in (("mean", mean), ("spread", spread)):
            if np.shape(table)[1:] != shape:
                raise SchemaMismatch(
                    f"normalize {field!r}: {name} has shape {np.shape(table)}, expected (groups, *{shape})"
                )
        self.mean = np.ascontiguousarray(mean, np.float32).reshape(len(mean), -1)
        self.factor = _inverse(np.asarray(spread, np.float32)).reshape(self.mean.shape)
        self.group_of_row = np.asarray(group_of_row, np.int32)
        if len(self.group_of_row) != len(store):
            raise SchemaMismatch(
                f"normalize {field!r}: {len(self.group_of_row):,} groups of rows for {len(store):,} rows: one for each"
            )
        if len(store) and not 0 <= self.group_of_row.min() <= self.group_of_row.max() < len(mean):
            raise ConfigError(f"normalize {field!r}: groups of rows run from 0 to {len(mean) - 1}, the rows of mean")
        if self.dtype.kind != "f":
            raise ConfigError(f"normalize {field!r}: dtype={self.dtype}: expected a float")

    @property
    def fields(self) -> Fields:
        spec = FieldSpec(self.dtype, self.store.fields[self.field].shape)
        return {name: spec if name == self.field else other for name, other in self.store.fields.items()}

    @property
    def fingerprint(self) -> str:
        tables = (self.mean, self.factor, self.group_of_row)
        return digest("normalized", self.store.fingerprint, self.field, str(self.dtype), *map(_digest, tables))

    @property
    def index_bytes(self) -> int:
        return self.store.index_bytes + self.mean.nbytes + self.factor.nbytes + self.group_of_row.nbytes

    def _rows_together(self, rows: int) -> int:
        """Blocks are read once for all their rows; single rows in pieces that stay in a core's cache."""
        if self.store.blocks is not None:
            return rows
        return min(rows, max(1, CONVERT_BYTES // max(1, self.store.fields[self.field].row_bytes)))

    def scratch_bytes(self, rows: int) -> int:
        group = self._rows_together(rows)
        raw, row = aligned(group * self.store.fields[self.field].row_bytes), aligned(4 * self.mean.shape[1])
        return max(raw + max(row, self.store.scratch_bytes(group)), self.store.scratch_bytes(rows))

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        plain = {name: target for name, target in out.items() if name != self.field}
        if plain:
            self.store.read_into(rows, at, plain)
        if self.field not in out:
            return
        step = max(1, self._rows_together(len(rows)))
        for begin in range(0, len(rows), step):
            self._read_some(rows[begin : begin + step], at[begin : begin + step], out[self.field])

    def _read_some(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        spec, count = self.store.fields[self.field], len(rows)
        with borrow(count * spec.row_bytes) as raw:
            stored = raw.view(spec.dtype).reshape(count, *spec.shape)
            self.store.read_into(rows, np.arange(count), {self.field: stored})
            stored = stored.reshape(count, -1)
            groups = self.group_of_row[rows].tolist()
            with borrow(4 * self.mean.shape[1]) as scratch:
                single = scratch.view(np.float32)
                for values, group, place in zip(stored, groups, at.tolist(), strict=True):
                    goal = target[place : place + 1].reshape(-1)
                    work = goal if self.dtype == np.float32 else single
                    np.copyto(work, values, casting="unsafe")
                    np.subtract(work, self.mean[group], out=work)
                    np.multiply(work, self.factor[group], out=work)
                    if work is not goal:
                        np.copyto(goal, work, casting="same_kind")


def _inverse(spread: np.ndarray) -> np.ndarray:
    inverse = np.zeros_like(spread)
    np.divide(1, spread, out=inverse, where=spread != 0)
    return inverse


def _digest(table: np.ndarray) -> str:
    return digest(table.shape, table.tobytes())
