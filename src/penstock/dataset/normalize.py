"""A field shifted and scaled element by element, by tables that depend on a row's group: z-scores per session, say.

``(value - mean[group of the row]) / spread[group of the row]``, in single precision, on the way into the batch. An
element whose spread is 0 does not vary, and comes as 0. Tables have a number per element, or are small and stretched
to a row as numpy stretches arrays: a number per channel.
"""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from penstock.base.dtypes import is_float
from penstock.base.scratch import aligned, borrow
from penstock.base.spec import FieldSpec, permuted
from penstock.dataset.second_pass import SecondPass
from penstock.dataset.store import Filled, StoreBase, digest
from penstock.errors import ConfigError, SchemaMismatch
from penstock.read.convert import block_bytes, pieces
from penstock.read.pieces import Share

# Small tables are written out along the last axes up to this many numbers: numpy is slow with runs of three.
LEAST_RUN = 1024


class Normalized(SecondPass):
    """One field normalized; the others as they are."""

    axes: tuple[int, ...] | None = None
    """Another order of axes, in which the field is laid out."""

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
        self._shape = shape = store.fields[field].shape
        for name, table in (("mean", mean), ("spread", spread)):
            if not _can_stretch(np.shape(table)[1:], shape):
                raise SchemaMismatch(
                    f"normalize {field!r}: {name} has shape {np.shape(table)}, expected (groups, *{shape}), or shapes "
                    f"that numpy stretches to {shape}: (groups, {shape[-1] if shape else 1})"
                )
        self.is_full = np.shape(mean)[1:] == shape == np.shape(spread)[1:]
        """Whether the tables have a number for each element."""
        factor = _invert(np.asarray(spread, np.float32))
        self.mean, self.factor = (
            _make_table(each, shape, self.is_full) for each in (np.asarray(mean, np.float32), factor)
        )
        """(groups, elements) if they are full, else (groups, *what numpy stretches to a row)."""
        self.group_of_row = np.asarray(group_of_row, np.int32)
        if len(self.group_of_row) != len(store):
            raise SchemaMismatch(
                f"normalize {field!r}: group_of_row has {len(self.group_of_row):,} numbers; expected one for each of "
                f"{len(store):,} rows"
            )
        if len(store) and not 0 <= self.group_of_row.min() <= self.group_of_row.max() < len(mean):
            raise ConfigError(
                f"normalize {field!r}: group_of_row: expected numbers from 0 to {len(mean) - 1}, rows of mean"
            )
        if not is_float(self.dtype):
            raise ConfigError(f"normalize {field!r}: dtype={self.dtype}: expected a float")

    def rebuild(self, children: Sequence[StoreBase]) -> StoreBase:
        again = object.__new__(Normalized)
        again.__dict__.update(self.__dict__, store=children[0])
        return again

    def with_axes(self, axes: Mapping[str, tuple[int, ...]]) -> StoreBase | None:
        if set(axes) != {self.field} or self.axes is not None:
            return None
        again = object.__new__(Normalized)
        again.__dict__.update(self.__dict__, axes=axes[self.field])
        return again

    def change_spec(self, name: str, spec: FieldSpec) -> FieldSpec:
        return permuted(FieldSpec(self.dtype, spec.shape), self.axes)

    @property
    def fingerprint(self) -> str:
        tables = (self.mean, self.factor, self.group_of_row)
        axes = () if self.axes is None else (self.axes,)
        return digest(
            "normalized", self.store.fingerprint, self.field, str(self.dtype), *map(_digest_table, tables), *axes
        )

    @property
    def table_bytes(self) -> int:
        return self.mean.nbytes + self.factor.nbytes + self.group_of_row.nbytes

    @property
    def index_bytes(self) -> int:
        return super().index_bytes + self.table_bytes

    def placing_bytes(self, name: str, rows: int) -> int:
        return aligned(block_bytes(prod(self._shape), 4))

    def place_row(self, name: str, row: int, values: np.ndarray, goal: np.ndarray, filled: Filled) -> None:
        group = self.group_of_row[row]
        tables = (self.mean[group], self.factor[group])
        mean, factor = (
            each.reshape(self._shape) if self.is_full else np.broadcast_to(each, self._shape) for each in tables
        )
        stored, where = values[0], np.broadcast_to(filled, self._shape)
        if self.axes is not None:
            mean, factor, stored, where = (each.transpose(self.axes) for each in (mean, factor, stored, where))
        target = goal.reshape(stored.shape)
        for piece in pieces(target.shape):
            flags = True if filled is True else where[piece]
            self._place_piece(stored[piece], target[piece], (mean[piece], factor[piece]), flags)

    def _place_piece(
        self, stored: np.ndarray, target: np.ndarray, tables: tuple[np.ndarray, np.ndarray], flags: Filled
    ) -> None:
        with borrow(4 * target.size) as scratch:
            work = target if self.dtype == np.float32 else scratch.view(np.float32).reshape(target.shape)
            np.copyto(work, stored, casting="unsafe", where=flags)
            np.subtract(work, tables[0], out=work, where=flags)
            np.multiply(work, tables[1], out=work, where=flags)
            if work is not target:
                np.copyto(target, work, casting="same_kind", where=flags)

    def change_filled(self, name: str, flags: np.ndarray, share: Share) -> np.ndarray:
        return flags if self.axes is None else flags.transpose(self.axes)


def _can_stretch(table: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether numpy stretches an array of the one shape to the other."""
    try:
        return np.broadcast_shapes(table, shape) == shape
    except ValueError:
        return False


def _make_table(values: np.ndarray, shape: tuple[int, ...], is_full: bool) -> np.ndarray:
    """A table as it is kept; small ones with as many axes as a row, and runs of numbers along the last ones."""
    groups = len(values)
    if is_full:
        return np.ascontiguousarray(values).reshape(groups, -1)
    small = values.reshape(groups, *(1,) * (len(shape) + 1 - values.ndim), *values.shape[1:])
    kept, run = list(small.shape), 1
    for axis in range(len(shape) - 1, -1, -1):
        if run >= LEAST_RUN or prod(kept) == groups:  # long enough, or one number for everything
            break
        kept[axis + 1] = shape[axis]
        run *= shape[axis]
    return np.ascontiguousarray(np.broadcast_to(small, kept))


def _invert(spread: np.ndarray) -> np.ndarray:
    inverse = np.zeros_like(spread)
    np.divide(1, spread, out=inverse, where=spread != 0)
    return inverse


def _digest_table(table: np.ndarray) -> str:
    return digest(table.shape, table.tobytes())
