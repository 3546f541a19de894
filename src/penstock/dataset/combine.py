"""Stores made of stores: chosen rows, files one after another, fields side by side or under other names.

They read nothing themselves. ``route`` gives the rows of which stores a read needs; the stores that read bytes are then
called directly, with the caller's own memory, so that composition copies nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.spec import Fields, Origin
from penstock.dataset.store import Branch, Filled, Out, ReadCall, Store, StoreBase, Wrapper, check_rows, digest
from penstock.errors import ConfigError, OutOfRange, SchemaMismatch
from penstock.read.pieces import WHOLE, Share


class Combination(StoreBase):
    """Rows of other stores, under other numbers or names."""

    def route(self, rows: np.ndarray, at: np.ndarray, out: Out) -> Iterator[ReadCall]:
        """The reads of the branches that make up this read."""
        raise NotImplementedError

    def read(self, rows: np.ndarray, at: np.ndarray, out: Out, share: Share = WHOLE) -> None:
        for store, inner, places, targets in _resolve_calls(self, rows, at, out):
            store.read(inner, places, targets, share)

    def filled(self, field: str, rows: np.ndarray, share: Share) -> Iterator[tuple[np.ndarray, Filled]]:
        places = np.arange(len(rows))
        for store, inner, at, out in _resolve_calls(self, rows, places, {field: places}):
            for which, flags in store.filled(next(iter(out)), inner, share):
                yield at[which], flags

    @property
    def free_fields(self) -> frozenset[str]:
        if self.blocks is None:
            return frozenset(self.fields)
        blocked = {
            new for store, names in self.branches() for new, old in names.items() if old not in store.free_fields
        }
        return frozenset(self.fields) - blocked


def _resolve_calls(store: StoreBase, rows: np.ndarray, at: np.ndarray, out: Out) -> Iterator[ReadCall]:
    """A read as reads of stores that are not combinations."""
    if not isinstance(store, Combination):
        yield store, rows, at, out
        return
    check_rows(rows, store)
    for branch, inner, places, targets in store.route(rows, at, out):
        yield from _resolve_calls(branch, inner, places, targets)


class Columns(Combination, Wrapper):
    """Some of the fields, under other names."""

    def __init__(self, store: StoreBase, names: Mapping[str, str]) -> None:
        super().__init__(store)
        self.names = dict(names)

    def branches(self) -> Sequence[Branch]:
        return [(self.store, self.names)]

    def rebuild(self, children: Sequence[StoreBase]) -> StoreBase:
        return Columns(children[0], self.names)

    @property
    def fields(self) -> Fields:
        return {new: self.store.fields[old] for new, old in self.names.items()}

    @property
    def fingerprint(self) -> str:
        return digest("columns", self.store.fingerprint, self.names)

    def scratch_bytes(self, rows: int) -> int:
        return self.store.scratch_bytes(rows) if self.names else 0

    def route(self, rows: np.ndarray, at: np.ndarray, out: Out) -> Iterator[ReadCall]:
        if out:  # empty if only the names of samples are wanted
            yield self.store, rows, at, {self.names[name]: target for name, target in out.items()}


class Subset(Combination, Wrapper):
    """Chosen rows, in the order given; rows may repeat."""

    def __init__(self, store: StoreBase, rows: range | np.ndarray) -> None:
        super().__init__(store)
        if isinstance(rows, range):
            ends = np.array([rows[0], rows[-1]] if rows else [], np.int64)
        else:
            ends = rows = np.asarray(rows, np.int64)
        check_rows(ends, store)
        self.rows = rows

    def rebuild(self, children: Sequence[StoreBase]) -> StoreBase:
        return Subset(children[0], self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def blocks(self) -> np.ndarray | None:
        """Runs of chosen rows that lie in one block; None if rows of one block are chosen far apart."""
        below = self.store.blocks
        if below is None or len(self) == 0:
            return None
        which = np.searchsorted(below, self.inner(np.arange(len(self))), side="right")
        starts = np.flatnonzero(np.diff(which, prepend=-1))
        return starts if len(starts) == len(np.unique(which)) < len(self) else None

    @property
    def fingerprint(self) -> str:
        chosen = self.rows if isinstance(self.rows, range) else digest(self.rows.tobytes())
        return digest("rows", self.store.fingerprint, chosen)

    @property
    def index_bytes(self) -> int:
        return super().index_bytes + (0 if isinstance(self.rows, range) else self.rows.nbytes)

    def inner(self, rows: np.ndarray) -> np.ndarray:
        """Rows of this store -> rows of the store below."""
        if isinstance(self.rows, range):
            return np.asarray(rows * self.rows.step + self.rows.start)
        return np.asarray(self.rows[rows])

    def route(self, rows: np.ndarray, at: np.ndarray, out: Out) -> Iterator[ReadCall]:
        yield self.store, self.inner(rows), at, out

    def origin(self, row: int) -> Origin:
        return self.store.origin(int(self.inner(np.array([row]))[0]))

    def find(self, key: str) -> int | None:
        return _find_position(self.store.find(key), self.rows)


class Concat(Combination):
    """Several stores one after another, all with the same fields."""

    def __init__(self, stores: Sequence[StoreBase]) -> None:
        if not stores:
            raise ConfigError("nothing to concatenate: expected at least one dataset")
        self.stores = tuple(stores)
        self.starts = np.cumsum([0, *(len(store) for store in stores)])
        for number in range(1, len(stores)):
            _check_same_fields(stores[0], stores[number], number)

    def branches(self) -> Sequence[Branch]:
        same = {name: name for name in self.stores[0].fields}
        return [(store, same) for store in self.stores]

    def rebuild(self, children: Sequence[StoreBase]) -> StoreBase:
        return Concat(children)

    @property
    def children(self) -> list[StoreBase]:
        return list(self.stores)

    @cached_property
    def fields(self) -> Fields:
        first = dict(self.stores[0].fields)
        for name, spec in first.items():
            if spec.is_list:
                most = max(store.fields[name].most_bytes for store in self.stores)
                first[name] = replace(spec, most_bytes=most)
        return first

    @property
    def blocks(self) -> np.ndarray | None:
        parts = [store.blocks for store in self.stores]
        if all(part is None for part in parts):
            return None
        whole = [np.arange(len(s)) if part is None else part for part, s in zip(parts, self.stores, strict=True)]
        return np.concatenate([part + start for part, start in zip(whole, self.starts, strict=False)])

    @property
    def fingerprint(self) -> str:
        return digest("concat", *(store.fingerprint for store in self.stores))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def scratch_bytes(self, rows: int) -> int:
        return max(store.scratch_bytes(rows) for store in self.stores)

    def route(self, rows: np.ndarray, at: np.ndarray, out: Out) -> Iterator[ReadCall]:
        order = np.argsort(rows, kind="stable")
        rows, at = rows[order], at[order]
        which = np.searchsorted(self.starts, rows, side="right") - 1
        inner = rows - self.starts[which]
        begins = [0, *(np.flatnonzero(which[1:] != which[:-1]) + 1).tolist(), len(rows)] if len(rows) else []
        for (begin, end), part in zip(pairwise(begins), which[begins[:-1]].tolist(), strict=True):
            yield self.stores[part], inner[begin:end], at[begin:end], out

    def origin(self, row: int) -> Origin:
        part = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.stores[part].origin(row - int(self.starts[part]))

    def find(self, key: str) -> int | None:
        found = ((store.find(key), int(start)) for store, start in zip(self.stores, self.starts, strict=False))
        rows = [row + start for row, start in found if row is not None]
        files = list(dict.fromkeys(self.origin(row).url for row in rows))
        if len(files) > 1:
            raise ConfigError(
                f"{key!r} is the name of samples in {len(files)} files: row {rows[0]:,} is that of {files[0]}; also "
                f"{', '.join(files[1:3])}{', …' if len(files) > 3 else ''}. Take one by its row, as ds[{rows[0]}], "
                f"or open its file alone"
            )
        return rows[0] if rows else None


@dataclass(frozen=True)
class Part:
    """One side of a join: a store, the row of it that belongs to each sample, and the new names of its fields."""

    store: StoreBase
    rows: np.ndarray | None
    names: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.store) if self.rows is None else len(self.rows)

    def inner(self, rows: np.ndarray) -> np.ndarray:
        return rows if self.rows is None else self.rows[rows]


class Joined(Combination):
    """Fields side by side: sample ``i`` takes row ``part.rows[i]`` of each part."""

    fields: Fields

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.parts = dict(parts)
        lengths = {name: len(part) for name, part in parts.items()}
        if len(set(lengths.values())) != 1:
            each = ", ".join(f"{name} has {length:,}" for name, length in lengths.items())
            raise SchemaMismatch(
                f"joined parts must have as many rows as each other, but {each}. "
                f"Give the longer ones as (dataset, rows) with one row number per sample"
            )
        for name, part in parts.items():
            if part.rows is not None:
                try:
                    check_rows(part.rows, part.store)
                except OutOfRange as error:
                    raise OutOfRange(f"join: {name} names rows that are not there: {error}") from None
        self.fields = {new: part.store.fields[old] for part in parts.values() for new, old in part.names.items()}

    def branches(self) -> Sequence[Branch]:
        return [(part.store, part.names) for part in self.parts.values()]

    def rebuild(self, children: Sequence[StoreBase]) -> StoreBase:
        parts = zip(self.parts.items(), children, strict=True)
        return Joined({label: replace(part, store=child) for (label, part), child in parts})

    @property
    def blocks(self) -> np.ndarray | None:
        """The largest blocks of the parts whose rows are the samples; the other parts are read at random anyway."""
        found = [part.store.blocks for part in self.parts.values() if part.rows is None]
        return max((blocks for blocks in found if blocks is not None), key=lambda blocks: -len(blocks), default=None)

    @property
    def free_fields(self) -> frozenset[str]:
        """Without those of parts that come in blocks but are read in another order."""
        scattered = [part for part in self.parts.values() if part.rows is not None and part.store.blocks is not None]
        if self.blocks is None:
            return super().free_fields
        return super().free_fields - {new for part in scattered for new in part.names}

    def __reduce__(self) -> tuple[type, tuple[dict[str, Part]]]:
        return type(self), (self.parts,)

    @property
    def fingerprint(self) -> str:
        def rows(part: Part) -> str:
            return "all" if part.rows is None else digest(part.rows.tobytes())

        return digest("join", *((n, p.store.fingerprint, rows(p), dict(p.names)) for n, p in self.parts.items()))

    @property
    def index_bytes(self) -> int:
        return super().index_bytes + sum(part.rows.nbytes for part in self.parts.values() if part.rows is not None)

    def __len__(self) -> int:
        return len(next(iter(self.parts.values())))

    def scratch_bytes(self, rows: int) -> int:
        return max(part.store.scratch_bytes(rows) for part in self.parts.values())

    def route(self, rows: np.ndarray, at: np.ndarray, out: Out) -> Iterator[ReadCall]:
        for part in self.parts.values():
            wanted = {old: out[new] for new, old in part.names.items() if new in out}
            if wanted:
                yield part.store, part.inner(rows), at, wanted

    def origin(self, row: int) -> Origin:
        places = {name: part.store.origin(int(part.inner(np.array([row]))[0])) for name, part in self.parts.items()}
        from_files = {name: place for name, place in places.items() if place.url}
        return Origin(
            "; ".join(dict.fromkeys(place.url for place in from_files.values())),
            "; ".join(place.key for place in (from_files or places).values()),
        )

    def find(self, key: str) -> int | None:
        found = (_find_position(part.store.find(key), part.rows) for part in self.parts.values())
        return next((row for row in found if row is not None), None)


def _find_position(row: int | None, rows: range | np.ndarray | None) -> int | None:
    """Where a row of the store below first occurs among ``rows``, which are all rows if None."""
    if row is None or rows is None:
        return row
    if isinstance(rows, range):
        return rows.index(row) if row in rows else None
    places = np.flatnonzero(rows == row)
    return int(places[0]) if len(places) else None


def _check_same_fields(one: Store, other: Store, number: int) -> None:
    if dict(one.fields) == dict(other.fields):
        return
    here, there = one.origin(0).url or "dataset 0", other.origin(0).url or f"dataset {number}"
    for name in dict.fromkeys([*one.fields, *other.fields]):
        expected, found = one.fields.get(name), other.fields.get(name)
        if expected != found:
            raise SchemaMismatch(
                f"{there}: field {name!r} is {found or 'absent'}, but in {here} it is {expected or 'absent'}. "
                f"Files opened together must agree: leave the odd one out, or choose common fields with fields="
            )
    raise SchemaMismatch(f"{there}: fields {list(other.fields)}, but in {here} {list(one.fields)}: another order")
