"""A field shifted and scaled element by element, by tables that depend on a row's group: z-scores per session, say.

``(value - mean[group of the row]) / spread[group of the row]``, in single precision, on the way into the batch. An
element whose spread is 0 does not vary, and comes as 0.
"""

from collections.abc import Sequence

import numpy as np

from penstock.base.scratch import aligned, borrow
from penstock.base.spec import FieldSpec
from penstock.dataset.second_pass import SecondPass
from penstock.dataset.store import Filled, StoreBase, digest
from penstock.errors import ConfigError, SchemaMismatch


class Normalized(SecondPass):
    """One field normalized; the others as they are."""

    def __init__(
        self,
        store: StoreBase,
        field: str,
        *,
        mean: np.ndarray,
        spread: np.ndarray,
        group_of_row: np.ndarray,
        dtype: np.dtype,
    ) -> None:
        super().__init__(store, {field: np.dtype(dtype)})
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

    def rebuild(self, children: Sequence[StoreBase]) -> StoreBase:
        again = object.__new__(Normalized)
        again.__dict__.update(self.__dict__, store=children[0])
        return again

    def change_spec(self, name: str, spec: FieldSpec) -> FieldSpec:
        return FieldSpec(self.dtype, spec.shape)

    @property
    def fingerprint(self) -> str:
        tables = (self.mean, self.factor, self.group_of_row)
        return digest("normalized", self.store.fingerprint, self.field, str(self.dtype), *map(_digest, tables))

    @property
    def table_bytes(self) -> int:
        return self.mean.nbytes + self.factor.nbytes + self.group_of_row.nbytes

    @property
    def index_bytes(self) -> int:
        return super().index_bytes + self.table_bytes

    def placing_bytes(self, name: str, rows: int) -> int:
        return aligned(4 * self.mean.shape[1])

    def place_row(self, name: str, row: int, values: np.ndarray, goal: np.ndarray, filled: Filled) -> None:
        group = self.group_of_row[row]
        flat = filled if isinstance(filled, bool) else filled.reshape(-1)
        target, stored = goal.reshape(-1), values.reshape(-1)
        with borrow(4 * len(stored)) as scratch:
            work = target if self.dtype == np.float32 else scratch.view(np.float32)
            np.copyto(work, stored, casting="unsafe", where=flat)
            np.subtract(work, self.mean[group], out=work, where=flat)
            np.multiply(work, self.factor[group], out=work, where=flat)
            if work is not target:
                np.copyto(target, work, casting="same_kind", where=flat)


def _inverse(spread: np.ndarray) -> np.ndarray:
    inverse = np.zeros_like(spread)
    np.divide(1, spread, out=inverse, where=spread != 0)
    return inverse


def _digest(table: np.ndarray) -> str:
    return digest(table.shape, table.tobytes())
