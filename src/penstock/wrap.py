"""A store over one other that changes what its fields hold: converted, cut out, turned, filled up.

Where the store below can do that on the way to the disk, it is asked to; these do it by a second pass where it cannot.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.codecs import convert, convert_scratch_bytes
from penstock.memory import aligned, borrow
from penstock.pieces import WHOLE, Share
from penstock.sizes import KiB
from penstock.spec import Cast, Fields, FieldSpec, Origin
from penstock.store import (
    Casting,
    Choosing,
    Out,
    Selecting,
    Store,
    digest,
    find_key,
    read_share,
    shared_index,
    takes_rows_apart,
)
from penstock.within import Box, Within

# Rows that pass through scratch at a time.
CONVERT_BYTES = 512 * KiB


def cast_fields(store: Store, casts: Mapping[str, Cast]) -> Store:
    """The same rows with some fields converted, as close to the disk as the store can."""
    if not casts:
        return store
    pushed_down = store.casting(casts) if isinstance(store, Casting) else None
    return pushed_down or Converted(store, casts)


def select_part(store: Store, field: str, part: Within) -> Store:
    """The same rows with this part of a field alone, read as sparingly as the store can."""
    return store.selecting(field, part) if isinstance(store, Selecting) else Cropped(store, field, part)


class Wrapper:
    """A store over one other, which answers for whatever a subclass does not change."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def fields(self) -> Fields:
        return self.store.fields

    @property
    def blocks(self) -> np.ndarray | None:
        return self.store.blocks

    @property
    def fingerprint(self) -> str:
        return self.store.fingerprint

    @property
    def index_bytes(self) -> int:
        return self.store.index_bytes

    @property
    def shared_index(self) -> dict[int, int]:
        return shared_index(self.store)

    def __len__(self) -> int:
        return len(self.store)

    def scratch_bytes(self, rows: int) -> int:
        return self.store.scratch_bytes(rows)

    def origin(self, row: int) -> Origin:
        return self.store.origin(row)

    def find(self, key: str) -> int | None:
        return find_key(self.store, key)

    def close(self) -> None:
        self.store.close()


class Cropped(Wrapper):
    """Part of each row of a field, for stores that can only read whole ones."""

    def __init__(self, store: Store, field: str, part: Within) -> None:
        super().__init__(store)
        self.field, self.part = field, part
        self.group = max(1, CONVERT_BYTES // max(1, store.fields[field].row_bytes))

    @property
    def fields(self) -> Fields:
        cropped = FieldSpec(self.store.fields[self.field].dtype, self.part.shape)
        return {name: cropped if name == self.field else spec for name, spec in self.store.fields.items()}

    @property
    def fingerprint(self) -> str:
        return digest("part", self.store.fingerprint, self.field, self.part.describe())

    @property
    def shared_index(self) -> dict[int, int]:
        return {**shared_index(self.store), id(self.part): self.part.index_bytes}

    def scratch_bytes(self, rows: int) -> int:
        group = min(rows, self.group)
        whole = aligned(group * self.store.fields[self.field].row_bytes)
        return max(whole + self.store.scratch_bytes(group), self.store.scratch_bytes(rows))

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        plain = {name: target for name, target in out.items() if name != self.field}
        if plain:
            self.store.read_into(rows, at, plain)
        if self.field not in out:
            return
        spec, target = self.store.fields[self.field], out[self.field]
        for begin in range(0, len(rows), self.group):
            group = rows[begin : begin + self.group]
            with borrow(len(group) * spec.row_bytes) as scratch:
                whole = scratch.view(spec.dtype).reshape(len(group), *spec.shape)
                self.store.read_into(group, np.arange(len(group)), {self.field: whole})
                for row, place in zip(whole, at[begin : begin + self.group].tolist(), strict=True):
                    crop(row, self.part, target[place : place + 1])


def crop(row: np.ndarray, part: Within, target: np.ndarray) -> None:
    """The part of one contiguous row into ``target``, which has a leading axis of 1."""
    if isinstance(part, Box):
        np.copyto(target.reshape(part.full_shape), row[part.index])
    else:
        np.take(row.reshape(-1), part.flat, out=target.reshape(-1), mode="clip")


class Permuted(Wrapper):
    """Fields whose axes come in another order, copied into it."""

    def __init__(self, store: Store, axes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(store)
        self.axes = dict(axes)

    @property
    def fields(self) -> Fields:
        return {name: permuted(spec, self.axes.get(name)) for name, spec in self.store.fields.items()}

    @property
    def fingerprint(self) -> str:
        return digest("axes", self.store.fingerprint, sorted(self.axes.items()))

    def scratch_bytes(self, rows: int) -> int:
        own = max(aligned(self.store.fields[name].row_bytes) for name in self.axes)
        return max(own + self.store.scratch_bytes(1), self.store.scratch_bytes(rows))

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        plain = {name: target for name, target in out.items() if name not in self.axes}
        if plain:
            self.store.read_into(rows, at, plain)
        for name in self.axes.keys() & out.keys():
            spec = self.store.fields[name]
            with borrow(spec.row_bytes) as scratch:
                row = scratch.view(spec.dtype).reshape(1, *spec.shape)
                for number, place in zip(rows.tolist(), at.tolist(), strict=True):
                    self.store.read_into(np.array([number]), np.array([0]), {name: row})
                    out[name][place] = row[0].transpose(self.axes[name])


class Padded(Wrapper):
    """Rows of a field filled up along their first axis, so that what differs in length can be put into one batch.

    The values stay the first part of each row, so a store that takes rows apart reads them straight into place.
    """

    def __init__(self, store: Store, field: str, to: int, fill: np.ndarray) -> None:
        super().__init__(store)
        self.field, self.to, self.fill = field, to, fill
        self.spec = store.fields[field]
        """Before."""
        # Blocks are read whole, and once: all rows of a read pass through scratch together.
        self.group = CONVERT_BYTES // max(1, self.spec.row_bytes) if store.blocks is None else len(store)
        self.group = max(1, self.group)

    @property
    def takes_rows_apart(self) -> bool:
        return takes_rows_apart(self.store)

    @property
    def fields(self) -> Fields:
        padded = FieldSpec(self.spec.dtype, (self.to, *self.spec.shape[1:]))
        return {name: padded if name == self.field else spec for name, spec in self.store.fields.items()}

    @property
    def fingerprint(self) -> str:
        return digest("padded", self.store.fingerprint, self.field, self.to, self.fill.item())

    def scratch_bytes(self, rows: int) -> int:
        if self.takes_rows_apart:
            return self.store.scratch_bytes(rows)
        group = min(rows, self.group)
        own = aligned(group * self.spec.row_bytes)
        return max(own + self.store.scratch_bytes(group), self.store.scratch_bytes(rows))

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        self.read_share(rows, at, out, WHOLE)

    def read_share(self, rows: np.ndarray, at: np.ndarray, out: Out, share: Share) -> None:
        if self.field not in out:
            read_share(self.store, rows, at, out, share)
            return
        target, length = out[self.field], self.spec.shape[0]
        if self.takes_rows_apart:
            read_share(self.store, rows, at, {**out, self.field: target[:, :length]}, share)
        else:
            plain = {name: to for name, to in out.items() if name != self.field}
            if plain:
                read_share(self.store, rows, at, plain, share)
            if share[0] == 0:
                self._through_scratch(rows, at, target[:, :length])
        if share[0] == 0:
            target[at, length:] = self.fill

    def _through_scratch(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        for begin in range(0, len(rows), self.group):
            group = rows[begin : begin + self.group]
            with borrow(len(group) * self.spec.row_bytes) as scratch:
                values = scratch.view(self.spec.dtype).reshape(len(group), *self.spec.shape)
                self.store.read_into(group, np.arange(len(group)), {self.field: values})
                target[at[begin : begin + self.group]] = values

    def casting(self, casts: Mapping[str, Cast]) -> Store:
        fill = self.fill
        if self.field in casts:
            fill = np.empty(1, casts[self.field].dtype)
            convert(self.fill.reshape(1), fill, casts[self.field])
        return Padded(cast_fields(self.store, casts), self.field, self.to, fill)

    def choosing(self, names: Sequence[str]) -> Store:
        inner = self.store.choosing(names) if isinstance(self.store, Choosing) else self.store
        return Padded(inner, self.field, self.to, self.fill) if self.field in names else inner

    def selecting(self, field: str, part: Within) -> Store:
        if field == self.field:
            return Cropped(self, field, part)
        return Padded(select_part(self.store, field, part), self.field, self.to, self.fill)


def permuted(spec: FieldSpec, axes: tuple[int, ...] | None) -> FieldSpec:
    """The same field with its axes in another order."""
    return spec if axes is None else FieldSpec(spec.dtype, tuple(spec.shape[axis] for axis in axes))


class Converted(Wrapper):
    """Fields converted by a second pass, for stores that cannot do it on the way."""

    def __init__(self, store: Store, casts: Mapping[str, Cast]) -> None:
        super().__init__(store)
        self.casts = dict(casts)
        largest = max(store.fields[name].row_bytes for name in casts)
        self.group = max(1, CONVERT_BYTES // max(1, largest))

    @property
    def fields(self) -> Fields:
        return {
            name: FieldSpec(self.casts[name].dtype, spec.shape) if name in self.casts else spec
            for name, spec in self.store.fields.items()
        }

    @property
    def fingerprint(self) -> str:
        return digest("cast", self.store.fingerprint, sorted(self.casts.items()))

    def selecting(self, field: str, part: Within) -> Store:
        return Converted(select_part(self.store, field, part), self.casts)

    def scratch_bytes(self, rows: int) -> int:
        group = min(rows, self.group)
        own = max(self._own_scratch(name, group) for name in self.casts)
        return max(own + self.store.scratch_bytes(group), self.store.scratch_bytes(rows))

    def _own_scratch(self, name: str, rows: int) -> int:
        raw, ready = rows * self.store.fields[name].row_bytes, rows * self.fields[name].row_bytes
        cast = self.casts[name]
        return aligned(raw) + aligned(ready) + convert_scratch_bytes(ready // cast.dtype.itemsize, cast)

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        plain = {name: target for name, target in out.items() if name not in self.casts}
        if plain:
            self.store.read_into(rows, at, plain)
        for name in self.casts.keys() & out.keys():
            for begin in range(0, len(rows), self.group):
                group = slice(begin, begin + self.group)
                self._convert(name, rows[group], at[group], out[name])

    def _convert(self, name: str, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        stored, delivered = self.store.fields[name], self.fields[name]
        count = len(rows)
        with borrow(count * stored.row_bytes) as raw, borrow(count * delivered.row_bytes) as ready:
            source = raw.view(stored.dtype).reshape(count, *stored.shape)
            self.store.read_into(rows, np.arange(count), {name: source})
            convert(source.reshape(-1), ready.view(delivered.dtype), self.casts[name])
            target[at] = ready.view(delivered.dtype).reshape(count, *delivered.shape)
