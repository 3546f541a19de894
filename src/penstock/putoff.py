"""Normalizing put off until a batch is on its device, so that slots and the bus carry rows as they are stored."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from penstock.combine import Columns, Joined, Part, Subset
from penstock.gathered import Gathered
from penstock.normalized import Normalized
from penstock.pieces import Share
from penstock.store import Out, Store, free_fields, read_share, takes_rows_apart
from penstock.wrap import Wrapper

Rows = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, eq=False)
class Rescale:
    """What is left to do for a field: ``(value - mean[group]) * factor[group]`` in single precision, then ``dtype``."""

    mean: np.ndarray
    """(groups, elements of a row)"""
    factor: np.ndarray
    dtype: np.dtype
    groups: Rows
    """The group that each of these rows belongs to; of several, where a sample is made of several."""


def put_off(store: Store) -> tuple[Store, dict[str, Rescale]]:
    """The same rows without the normalizing that was declared last, and what is then left to do, by field."""
    if isinstance(store, Normalized):
        below, steps = put_off(store.store)
        stored = store.store.fields[store.field].dtype
        if store.field in steps or stored.itemsize > store.dtype.itemsize:  # twice; or more to copy than before
            return store, {}
        own = Rescale(store.mean, store.factor, store.dtype, lambda rows: store.group_of_row[rows])
        return AsStored(below, store.index_bytes), {**steps, store.field: own}
    if isinstance(store, Subset):
        below, steps = put_off(store.store)
        return (Subset(below, store.rows), _of_rows(steps, store.inner)) if steps else (store, {})
    if isinstance(store, Gathered) and store.only_stacks:
        below, steps = put_off(store.store)
        return (Gathered(below, store.rows), _of_rows(steps, store.rows.__getitem__)) if steps else (store, {})
    if isinstance(store, Columns):
        below, steps = put_off(store.store)
        named = {new: steps[old] for new, old in store.names.items() if old in steps}
        return (Columns(below, store.names), named) if named else (store, {})
    if isinstance(store, Joined):
        parts, found = {}, {}
        for label, part in store.parts.items():
            below, steps = put_off(part.store)
            steps = _of_rows({new: steps[old] for new, old in part.names.items() if old in steps}, part.inner)
            parts[label] = Part(below, part.rows, part.names) if steps else part
            found.update(steps)
        return (Joined(parts), found) if found else (store, {})
    return store, {}


class AsStored(Wrapper):
    """A store whose tables for normalizing are held as before, and used later."""

    def __init__(self, store: Store, index_bytes: int) -> None:
        super().__init__(store)
        self._index_bytes = index_bytes

    @property
    def index_bytes(self) -> int:
        return self._index_bytes

    @property
    def free_fields(self) -> frozenset[str]:
        return free_fields(self.store)

    @property
    def takes_rows_apart(self) -> bool:
        return takes_rows_apart(self.store)

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        self.store.read_into(rows, at, out)

    def read_share(self, rows: np.ndarray, at: np.ndarray, out: Out, share: Share) -> None:
        read_share(self.store, rows, at, out, share)


def _of_rows(steps: dict[str, Rescale], inner: Rows) -> dict[str, Rescale]:
    """The same for rows that are others below."""
    return {name: replace(step, groups=_after(inner, step.groups)) for name, step in steps.items()}


def _after(first: Rows, then: Rows) -> Rows:
    return lambda rows: then(first(rows))
