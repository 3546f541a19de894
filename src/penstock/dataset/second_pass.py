"""Stores that change fields in a second pass: rows are read into scratch, changed, and put into place.

Several threads can share the read of a block here too: each passes on the elements that its own share filled.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from penstock.base.scratch import aligned, borrow
from penstock.base.sizes import KiB
from penstock.base.spec import Cast, Fields, FieldSpec, permuted
from penstock.dataset.store import Filled, Out, StoreBase, Wrapper, digest
from penstock.read.convert import convert, convert_axes, convert_scratch_bytes
from penstock.read.part import Box, RowPart
from penstock.read.pieces import WHOLE, Share

# Rows that pass through scratch at a time, so that they stay in a core's cache.
CONVERT_BYTES = 512 * KiB


class SecondPass(Wrapper):
    """Some fields changed by a second pass; the others are read straight into place.

    A subclass says what a changed field looks like (``change_spec``) and how rows get from scratch into place.
    """

    def __init__(self, store: StoreBase, changes: Mapping[str, Any]) -> None:
        super().__init__(store)
        self.changes = dict(changes)

    def change_spec(self, name: str, spec: FieldSpec) -> FieldSpec:
        """A changed field, from what it is below."""
        raise NotImplementedError

    def place_row(self, name: str, row: int, values: np.ndarray, goal: np.ndarray, filled: Filled) -> None:
        """Put the filled elements of one row into place. ``values`` and ``goal`` have a leading axis of length 1."""
        raise NotImplementedError

    def place_rows(self, name: str, rows: np.ndarray, values: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        """Put whole rows into place."""
        for number, (row, place) in enumerate(zip(rows.tolist(), at.tolist(), strict=True)):
            self.place_row(name, row, values[number : number + 1], target[place : place + 1], True)

    def change_filled(self, name: str, flags: np.ndarray, share: Share) -> np.ndarray:
        """Which elements of a changed row are filled, from those of the row below."""
        return flags

    def placing_bytes(self, name: str, rows: int) -> int:
        """Scratch for putting ``rows`` rows into place."""
        return 0

    @property
    def fields(self) -> Fields:
        below = self.store.fields
        return {name: self.change_spec(name, spec) if name in self.changes else spec for name, spec in below.items()}

    def rows_together(self, name: str, rows: int) -> int:
        """Blocks are read once for all their rows; single rows in pieces that stay in a core's cache."""
        if self.store.blocks is not None:
            return rows
        return min(rows, max(1, CONVERT_BYTES // max(1, self.store.fields[name].row_bytes)))

    def scratch_bytes(self, rows: int) -> int:
        return max(self.store.scratch_bytes(rows), *(self._scratch_bytes(name, rows) for name in self.changes))

    def _scratch_bytes(self, name: str, rows: int) -> int:
        group, below, changed = self.rows_together(name, rows), self.store.fields[name], self.fields[name]
        shared = 0  # numpy's own: flags, and the filled elements of a row before and after
        if self.store.blocks is not None:
            shared = below.row_bytes + changed.row_bytes + 2 * max(prod(below.shape), prod(changed.shape))
        placing = max(self.placing_bytes(name, group), self.store.scratch_bytes(group))
        return aligned(group * below.row_bytes) + placing + shared

    def read(self, rows: np.ndarray, at: np.ndarray, out: Out, share: Share = WHOLE) -> None:
        plain = {name: target for name, target in out.items() if name not in self.changes}
        if plain:
            self.store.read(rows, at, plain, share)
        for name in self.changes:
            if name in out:
                step = max(1, self.rows_together(name, len(rows)))
                for begin in range(0, len(rows), step):
                    some = slice(begin, begin + step)
                    self._pass(name, rows[some], at[some], out[name], share)

    def _pass(self, name: str, rows: np.ndarray, at: np.ndarray, target: np.ndarray, share: Share) -> None:
        spec, count = self.store.fields[name], len(rows)
        with borrow(count * spec.row_bytes) as scratch:
            values = scratch.view(spec.dtype).reshape(count, *spec.shape)
            self.store.read(rows, np.arange(count), {name: values}, share)
            if share == WHOLE:
                self.place_rows(name, rows, values, at, target)
                return
            for which, filled in self.store.filled(name, rows, share):
                if filled is not False:
                    for number in which.tolist():
                        place, row = int(at[number]), int(rows[number])
                        goal = target[place : place + 1]
                        self.place_row(name, row, values[number : number + 1], goal, filled)

    def filled(self, field: str, rows: np.ndarray, share: Share) -> Iterator[tuple[np.ndarray, Filled]]:
        for which, flags in self.store.filled(field, rows, share):
            whole = isinstance(flags, bool) or field not in self.changes
            yield which, flags if whole else self.change_filled(field, np.asarray(flags), share)


class Cropped(SecondPass):
    """Part of each row of a field, for stores that can only read whole rows."""

    changes: dict[str, RowPart]

    def __init__(self, store: StoreBase, field: str, part: RowPart) -> None:
        super().__init__(store, {field: part})
        self.field, self.part = field, part

    def rebuild(self, children: Sequence[StoreBase]) -> StoreBase:
        return Cropped(children[0], self.field, self.part)

    def change_spec(self, name: str, spec: FieldSpec) -> FieldSpec:
        return FieldSpec(spec.dtype, self.part.shape)

    @property
    def fingerprint(self) -> str:
        return digest("part", self.store.fingerprint, self.field, self.part.describe())

    @property
    def shared_index(self) -> dict[int, int]:
        return {**super().shared_index, id(self.part): self.part.index_bytes}

    def place_row(self, name: str, row: int, values: np.ndarray, goal: np.ndarray, filled: Filled) -> None:
        if isinstance(filled, bool):
            crop(values[0], self.part, goal)
            return
        wanted, taken = self.change_filled(name, filled, WHOLE), np.empty(goal.shape, goal.dtype)
        crop(values[0], self.part, taken)
        np.copyto(goal, taken, where=wanted)

    def change_filled(self, name: str, flags: np.ndarray, share: Share) -> np.ndarray:
        found = np.empty((1, *self.part.shape), bool)
        crop(flags, self.part, found)
        return np.asarray(found[0])


def crop(row: np.ndarray, part: RowPart, target: np.ndarray) -> None:
    """The part of one contiguous row into ``target``, which has a leading axis of 1."""
    if isinstance(part, Box):
        np.copyto(target.reshape(part.full_shape), row[part.index])
    else:
        np.take(row.reshape(-1), part.flat, out=target.reshape(-1), mode="clip")


class Permuted(SecondPass):
    """Fields with their axes in another order, and converted on the way if ``casts`` says so."""

    changes: dict[str, tuple[int, ...]]

    def __init__(
        self, store: StoreBase, changes: Mapping[str, tuple[int, ...]], casts: Mapping[str, Cast] | None = None
    ) -> None:
        super().__init__(store, changes)
        self.casts = dict(casts or {})

    def rebuild(self, children: Sequence[StoreBase]) -> StoreBase:
        return Permuted(children[0], self.changes, self.casts)

    def change_spec(self, name: str, spec: FieldSpec) -> FieldSpec:
        dtype = self._cast(name, spec.dtype).dtype
        return permuted(FieldSpec(dtype, spec.shape), self.changes[name])

    def _cast(self, name: str, stored: np.dtype) -> Cast:
        return self.casts.get(name) or Cast(stored)

    @property
    def fingerprint(self) -> str:
        casts = [sorted(self.casts.items())] if self.casts else []
        return digest("axes", self.store.fingerprint, sorted(self.changes.items()), *casts)

    def placing_bytes(self, name: str, rows: int) -> int:
        elements = prod(self.fields[name].shape)
        return convert_scratch_bytes(elements, self.casts[name]) if name in self.casts else 0

    def place_row(self, name: str, row: int, values: np.ndarray, goal: np.ndarray, filled: Filled) -> None:
        axes, cast = self.changes[name], self._cast(name, values.dtype)
        if filled is True:
            convert_axes(values[0], goal.reshape(goal.shape[1:]), cast, axes)
        elif filled is not False:
            taken, where = values[0].transpose(axes), np.asarray(filled).transpose(axes)
            convert_filled(taken[where], goal[0, ...], where, cast)

    def change_filled(self, name: str, flags: np.ndarray, share: Share) -> np.ndarray:
        return flags.transpose(self.changes[name])


class Padded(SecondPass):
    """Rows of a field filled up along their first axis, so that fields of different lengths fit into one batch.

    The values are the first part of each row, so a store that accepts strided memory reads them straight into place.
    """

    def __init__(self, store: StoreBase, field: str, to: int, fill: np.ndarray) -> None:
        super().__init__(store, {field: to})
        self.field, self.to, self.fill = field, to, fill
        self.length = store.fields[field].shape[0]

    def rebuild(self, children: Sequence[StoreBase]) -> StoreBase:
        return Padded(children[0], self.field, self.to, self.fill)

    def change_spec(self, name: str, spec: FieldSpec) -> FieldSpec:
        return FieldSpec(spec.dtype, (self.to, *spec.shape[1:]))

    @property
    def fingerprint(self) -> str:
        return digest("padded", self.store.fingerprint, self.field, self.to, self.fill.item())

    def scratch_bytes(self, rows: int) -> int:
        return self.store.scratch_bytes(rows) if self.accepts_strided else super().scratch_bytes(rows)

    def read(self, rows: np.ndarray, at: np.ndarray, out: Out, share: Share = WHOLE) -> None:
        if self.field in out and self.accepts_strided:
            self.store.read(rows, at, {**out, self.field: out[self.field][:, : self.length]}, share)
        else:
            super().read(rows, at, out, share)
        if self.field in out and share[0] == 0:
            out[self.field][at, self.length :] = self.fill

    def place_rows(self, name: str, rows: np.ndarray, values: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        target[:, : self.length][at] = values

    def place_row(self, name: str, row: int, values: np.ndarray, goal: np.ndarray, filled: Filled) -> None:
        np.copyto(goal[:, : self.length], values, where=filled)

    def change_filled(self, name: str, flags: np.ndarray, share: Share) -> np.ndarray:
        found = np.full((self.to, *flags.shape[1:]), share[0] == 0)
        found[: self.length] = flags
        return found


class Recast(SecondPass):
    """Fields converted by a second pass, for stores that cannot convert while they read."""

    changes: dict[str, Cast]

    def rebuild(self, children: Sequence[StoreBase]) -> StoreBase:
        return Recast(children[0], self.changes)

    def change_spec(self, name: str, spec: FieldSpec) -> FieldSpec:
        return FieldSpec(self.changes[name].dtype, spec.shape)

    @property
    def fingerprint(self) -> str:
        return digest("cast", self.store.fingerprint, sorted(self.changes.items()))

    def placing_bytes(self, name: str, rows: int) -> int:
        ready, cast = rows * self.fields[name].row_bytes, self.changes[name]
        return aligned(ready) + convert_scratch_bytes(ready // cast.dtype.itemsize, cast)

    def place_rows(self, name: str, rows: np.ndarray, values: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        with borrow(values.size * target.itemsize) as scratch:
            ready = scratch.view(target.dtype)
            convert(values.reshape(-1), ready, self.changes[name])
            target[at] = ready.reshape(values.shape)

    def place_row(self, name: str, row: int, values: np.ndarray, goal: np.ndarray, filled: Filled) -> None:
        convert_filled(values[0, filled].reshape(-1), goal[0, ...], filled, self.changes[name])


def convert_filled(taken: np.ndarray, goal: np.ndarray, where: Filled, cast: Cast) -> None:
    """The elements taken from a row, converted into their places in it."""
    with borrow(taken.size * goal.itemsize) as scratch:
        ready = scratch.view(goal.dtype)
        convert(taken, ready, cast)
        goal[where] = ready.reshape(goal[where].shape)
