"""Trees of stores rewritten: fields converted, left out, reduced to a part, or normalized later on the device.

Each rewrite goes down the tree of stores as far as it can: through every combination, to the store that reads the
bytes. Where that store cannot do it while reading, a second pass does it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.spec import Cast
from penstock.dataset.combine import Columns, Combination, Concat, Joined, Part, Subset
from penstock.dataset.gather import Gathered
from penstock.dataset.normalize import Normalized
from penstock.dataset.second_pass import Cropped, Padded, Permuted, Recast, SecondPass
from penstock.dataset.store import Branch, Out, ReadCall, StoreBase, Wrapper
from penstock.read.convert import convert
from penstock.read.part import RowPart


def cast_fields(store: StoreBase, casts: Mapping[str, Cast]) -> StoreBase:
    """The same rows with some fields converted."""
    if not casts:
        return store
    if isinstance(store, Combination):
        return store.rebuild([cast_fields(child, _translate(casts, names)) for child, names in store.branches()])
    if isinstance(store, Padded):
        fill = store.fill
        if store.field in casts:
            fill = np.empty(1, casts[store.field].dtype)
            convert(store.fill.reshape(1), fill, casts[store.field])
        return Padded(cast_fields(store.store, casts), store.field, store.to, fill)
    found = store.with_casts(casts)
    return Recast(store, casts) if found is None else found


def permute_fields(store: StoreBase, casts: Mapping[str, Cast], axes: Mapping[str, tuple[int, ...]]) -> StoreBase:
    """The same rows with some fields converted, and some laid out with another order of axes, in the same pass."""
    if not axes:
        return cast_fields(store, casts)
    if isinstance(store, Combination):
        return store.rebuild(
            [
                permute_fields(child, _translate(casts, names), _translate(axes, names))
                for child, names in store.branches()
            ]
        )
    found = store.with_axes(axes)
    if found is not None:
        return cast_fields(found, casts)
    own = {name: cast for name, cast in casts.items() if name in axes}
    others = {name: cast for name, cast in casts.items() if name not in axes}
    return Permuted(cast_fields(store, others), axes, own)


def normalize_field(store: StoreBase, field: str, mean: np.ndarray, spread: np.ndarray, dtype: np.dtype) -> StoreBase:
    """The same rows with a field normalized, every row by the same numbers."""
    if isinstance(store, Combination):
        return store.rebuild(
            [
                normalize_field(child, names[field], mean, spread, dtype) if field in names else child
                for child, names in store.branches()
            ]
        )
    groups = np.zeros(len(store), np.int32)
    return Normalized(store, field, mean=mean[None], spread=spread[None], group_of_row=groups, dtype=dtype)


def select_part(store: StoreBase, field: str, part: RowPart) -> StoreBase:
    """The same rows with part of a field."""
    if isinstance(store, Combination):
        return store.rebuild(
            [select_part(child, names[field], part) if field in names else child for child, names in store.branches()]
        )
    if isinstance(store, Recast) or (isinstance(store, Padded) and store.field != field):
        return store.rebuild([select_part(store.store, field, part)])
    found = store.with_part(field, part)
    return Cropped(store, field, part) if found is None else found


def choose_fields(store: StoreBase, names: Mapping[str, str]) -> StoreBase:
    """The same rows with these fields alone, under the names given as keys."""
    if names:
        store = _leave_out_others(store, list(dict.fromkeys(names.values())))
    unchanged = list(names) == list(store.fields) and all(new == old for new, old in names.items())
    return store if unchanged else Columns(store, names)


def _leave_out_others(store: StoreBase, names: Sequence[str]) -> StoreBase:
    """Leave out the other fields where they need not be read at all."""
    same = {name: name for name in names}
    if isinstance(store, Columns):
        return choose_fields(store.store, {name: store.names[name] for name in names})
    if isinstance(store, Joined):
        return _choose_joined(store, names)
    if isinstance(store, Subset | Concat | Gathered):
        return store.rebuild([choose_fields(child, same) for child in store.children])
    if isinstance(store, Padded):
        inner = _leave_out_others(store.store, names)
        return store.rebuild([inner]) if store.field in names else inner
    found = store.with_fields(names)
    return store if found is None else found


def _choose_joined(store: Joined, names: Sequence[str]) -> StoreBase:
    kept = {}
    for label, part in store.parts.items():
        chosen = {new: old for new, old in part.names.items() if new in names}
        if chosen:
            inner = choose_fields(part.store, {old: old for old in chosen.values()})
            kept[label] = Part(inner, part.rows, chosen)
    joined = Joined(kept)
    return joined if list(joined.fields) == list(names) else Columns(joined, {name: name for name in names})


def side_by_side(stores: Sequence[StoreBase], names: Sequence[str]) -> StoreBase:
    """The fields of stores that have the same rows, in this order."""
    if len(stores) == 1:
        return stores[0]
    parts = (Part(store, None, {name: name for name in store.fields}) for store in stores)
    return _choose_joined(Joined({str(number): part for number, part in enumerate(parts)}), names)


def _translate(changes: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {old: changes[new] for new, old in names.items() if new in changes}


# Normalizing deferred to the device: slots and the bus then carry rows as they are stored.

RowMap = Callable[[np.ndarray], np.ndarray]
"""From numbers of rows to other numbers: of rows below, or of groups."""


@dataclass(frozen=True, eq=False)
class Rescale:
    """How to normalize a field later: ``(value - mean[group]) * factor[group]`` in single precision, then ``dtype``."""

    mean: np.ndarray
    """(groups, elements per row)"""
    factor: np.ndarray
    dtype: np.dtype
    groups: RowMap
    """The group of each of these rows; several per sample where a sample is made of several rows."""


Rescales = dict[str, Rescale]


def defer_normalizing(store: StoreBase, fields: frozenset[str] | None = None) -> tuple[StoreBase, Rescales]:
    """The same rows with normalizing deferred for some fields, and what is left to do for each of them.

    ``fields`` limits which fields may be deferred.
    """
    fields = frozenset(store.fields) if fields is None else fields
    if isinstance(store, Normalized):
        return _defer_own(store, fields)
    if isinstance(store, Combination):
        return _defer_branches(store, fields)
    if isinstance(store, Gathered) and store.only_stacks:
        below, steps = defer_normalizing(store.store, fields)
        steps = {name: _renumber(step, store.rows.__getitem__) for name, step in steps.items()}
        return (store.rebuild([below]) if steps else store), steps
    if isinstance(store, Padded):
        return _defer_padded(store, fields)
    if isinstance(store, Cropped):
        below, steps = defer_normalizing(store.store, fields)
        if store.field in steps:
            steps[store.field] = _select_elements(steps[store.field], store.part.flat)
        return (select_part(below, store.field, store.part) if steps else store), steps
    if isinstance(store, SecondPass):
        below, steps = defer_normalizing(store.store, fields - store.changes.keys())
        return (store.rebuild([below]) if steps else store), steps
    return store, {}


def _defer_own(store: Normalized, fields: frozenset[str]) -> tuple[StoreBase, Rescales]:
    below, steps = defer_normalizing(store.store, fields - {store.field})
    stored = store.store.fields[store.field].dtype
    # Not where there would be more to copy than before, or tables that are small here and large on the device.
    if store.field not in fields or stored.itemsize > store.dtype.itemsize or not store.is_full:
        return (store.rebuild([below]) if steps else store), steps
    own = Rescale(store.mean, store.factor, store.dtype, store.group_of_row.__getitem__)
    return AsStored(below, store.table_bytes), {**steps, store.field: own}


def _defer_padded(store: Padded, fields: frozenset[str]) -> tuple[StoreBase, Rescales]:
    """The fill comes after normalizing. A raw 0 becomes the fill where the mean is its negative and the factor 1."""
    fill = store.fill.astype(np.float32)
    exact = np.array_equal(fill.astype(store.fill.dtype), store.fill, equal_nan=True)
    below, steps = defer_normalizing(store.store, fields if exact else fields - {store.field})
    if store.field not in steps:
        return (store.rebuild([below]) if steps else store), steps
    step, spec = steps[store.field], below.fields[store.field]
    added = (len(step.mean), (store.to - store.length) * prod(spec.shape[1:]))
    mean = np.concatenate([step.mean, np.full(added, -fill, np.float32)], axis=1)
    factor = np.concatenate([step.factor, np.ones(added, np.float32)], axis=1)
    raw = Padded(below, store.field, store.to, np.zeros(1, spec.dtype))
    return raw, {**steps, store.field: replace(step, mean=mean, factor=factor)}


def _defer_branches(store: Combination, fields: frozenset[str]) -> tuple[StoreBase, Rescales]:
    branches = store.branches()
    found = [defer_normalizing(child, _names_below(fields, names)) for child, names in branches]
    later = frozenset(name for name in fields if _all_agree(name, branches, found))
    if not later:
        return store, {}
    if later != fields:  # a field that some branches cannot defer is deferred by none
        found = [defer_normalizing(child, _names_below(later, names)) for child, names in branches]
    steps = {name: _merge_steps(store, name, branches, found) for name in later}
    return store.rebuild([below for below, _ in found]), steps


def _names_below(fields: frozenset[str], names: Mapping[str, str]) -> frozenset[str]:
    return frozenset(old for new, old in names.items() if new in fields)


def _all_agree(name: str, branches: Sequence[Branch], found: Sequence[tuple[StoreBase, Rescales]]) -> bool:
    """Whether every branch that has a field defers it, with the same dtypes before and after."""
    kinds = set()
    for (_, names), (below, steps) in zip(branches, found, strict=True):
        if name in names:
            step = steps.get(names[name])
            kinds.add(None if step is None else (str(step.dtype), below.fields[names[name]]))
    return len(kinds) == 1 and None not in kinds


def _merge_steps(
    store: Combination, name: str, branches: Sequence[Branch], found: Sequence[tuple[StoreBase, Rescales]]
) -> Rescale:
    """One step for all branches: their tables one after another, each table once."""
    steps = {
        id(child): steps[names[name]]
        for (child, names), (_, steps) in zip(branches, found, strict=True)
        if name in names
    }
    tables = {id(step.mean): step for step in steps.values()}
    sizes = [len(step.mean) for step in tables.values()]
    first_group = dict(zip(tables, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))

    def groups(rows: np.ndarray) -> np.ndarray:
        flat = rows.reshape(-1)
        result = np.zeros(0, np.int64)
        for child, inner, at, _ in store.route(flat, np.arange(len(flat)), {name: flat}):
            step = steps[id(child)]
            these = step.groups(inner)
            if not len(result):
                result = np.zeros((len(flat), *these.shape[1:]), np.int64)
            result[at] = these + first_group[id(step.mean)]
        return result.reshape(*rows.shape, *result.shape[1:])

    first, *others = tables.values()
    if not others:
        return replace(first, groups=groups)
    mean, factor = (np.concatenate([getattr(step, kind) for step in tables.values()]) for kind in ("mean", "factor"))
    return Rescale(mean, factor, first.dtype, groups)


def _renumber(step: Rescale, inner: RowMap) -> Rescale:
    """The same step for rows that have other numbers below."""
    return replace(step, groups=lambda rows: step.groups(inner(rows)))


def _select_elements(step: Rescale, flat: np.ndarray) -> Rescale:
    return replace(step, mean=step.mean[:, flat], factor=step.factor[:, flat])


class AsStored(Combination, Wrapper):
    """Rows that are not normalized yet; the tables for that still count as memory."""

    def __init__(self, store: StoreBase, table_bytes: int) -> None:
        super().__init__(store)
        self.table_bytes = table_bytes

    def rebuild(self, children: Sequence[StoreBase]) -> StoreBase:
        return AsStored(children[0], self.table_bytes)

    @property
    def index_bytes(self) -> int:
        return super().index_bytes + self.table_bytes

    def route(self, rows: np.ndarray, at: np.ndarray, out: Out) -> Iterator[ReadCall]:
        yield self.store, rows, at, out
