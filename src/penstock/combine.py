"""Stores made of stores: chosen rows, several files in a row, fields side by side, under other names.

Each passes target positions through, so that composition copies nothing. Conversions and choices of fields travel
inwards to the store that reads the bytes, where they cost least.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from penstock.errors import ConfigError, OutOfRange, SchemaMismatch
from penstock.pieces import WHOLE, Share
from penstock.spec import Cast, Fields, Origin
from penstock.store import (
    Choosing,
    Out,
    Store,
    check_rows,
    digest,
    find_key,
    free_fields,
    read_share,
    shared_index,
    takes_rows_apart,
)
from penstock.within import Within
from penstock.wrap import Wrapper, cast_fields, select_part


def choose_fields(store: Store, names: Mapping[str, str]) -> Store:
    """The same rows with these fields alone, under the names given as keys."""
    if isinstance(store, Choosing):
        store = store.choosing(list(dict.fromkeys(names.values())))
    unchanged = list(names) == list(store.fields) and all(new == old for new, old in names.items())
    return store if unchanged else Columns(store, names)


class Columns(Wrapper):
    """Some of the fields, under other names."""

    def __init__(self, store: Store, names: Mapping[str, str]) -> None:
        super().__init__(store)
        self.names = dict(names)

    @property
    def fields(self) -> Fields:
        return {new: self.store.fields[old] for new, old in self.names.items()}

    @property
    def fingerprint(self) -> str:
        return digest("columns", self.store.fingerprint, self.names)

    @property
    def free_fields(self) -> frozenset[str]:
        free = free_fields(self.store)
        return frozenset(new for new, old in self.names.items() if old in free)

    @property
    def takes_rows_apart(self) -> bool:
        return takes_rows_apart(self.store)

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        self.read_share(rows, at, out, WHOLE)

    def read_share(self, rows: np.ndarray, at: np.ndarray, out: Out, share: Share) -> None:
        read_share(self.store, rows, at, {self.names[name]: target for name, target in out.items()}, share)

    def casting(self, casts: Mapping[str, Cast]) -> Store:
        return Columns(cast_fields(self.store, {self.names[name]: cast for name, cast in casts.items()}), self.names)

    def choosing(self, names: Sequence[str]) -> Store:
        return choose_fields(self.store, {name: self.names[name] for name in names})

    def selecting(self, field: str, part: Within) -> Store:
        return Columns(select_part(self.store, self.names[field], part), self.names)


class Subset(Wrapper):
    """Chosen rows, in the order and as often as they are named."""

    def __init__(self, store: Store, rows: range | np.ndarray) -> None:
        super().__init__(store)
        if isinstance(rows, range):
            ends = np.array([rows[0], rows[-1]] if rows else [], np.int64)
        else:
            ends = rows = np.asarray(rows, np.int64)
        check_rows(ends, store)
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def blocks(self) -> np.ndarray | None:
        """Runs of chosen rows that lie in one block; None where rows that share one are chosen far apart."""
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
    def free_fields(self) -> frozenset[str]:
        return free_fields(self.store)

    @property
    def index_bytes(self) -> int:
        return self.store.index_bytes + (0 if isinstance(self.rows, range) else self.rows.nbytes)

    @property
    def takes_rows_apart(self) -> bool:
        return takes_rows_apart(self.store)

    def inner(self, rows: np.ndarray) -> np.ndarray:
        """Rows of this store -> rows of the store below."""
        if isinstance(self.rows, range):
            return np.asarray(rows * self.rows.step + self.rows.start)
        return np.asarray(self.rows[rows])

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        self.read_share(rows, at, out, WHOLE)

    def read_share(self, rows: np.ndarray, at: np.ndarray, out: Out, share: Share) -> None:
        check_rows(rows, self)
        read_share(self.store, self.inner(rows), at, out, share)

    def origin(self, row: int) -> Origin:
        return self.store.origin(int(self.inner(np.array([row]))[0]))

    def find(self, key: str) -> int | None:
        return _position(find_key(self.store, key), self.rows)

    def casting(self, casts: Mapping[str, Cast]) -> Store:
        return Subset(cast_fields(self.store, casts), self.rows)

    def choosing(self, names: Sequence[str]) -> Store:
        return Subset(choose_fields(self.store, {name: name for name in names}), self.rows)

    def selecting(self, field: str, part: Within) -> Store:
        return Subset(select_part(self.store, field, part), self.rows)


class Concat:
    """Several stores one after another, all with the same fields."""

    def __init__(self, stores: Sequence[Store]) -> None:
        if not stores:
            raise ConfigError("nothing to concatenate: expected at least one dataset")
        self.stores = tuple(stores)
        self.starts = np.cumsum([0, *(len(store) for store in stores)])
        for number in range(1, len(stores)):
            _check_same_fields(stores[0], stores[number], number)

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

    @property
    def free_fields(self) -> frozenset[str]:
        return frozenset.intersection(*map(free_fields, self.stores))

    @property
    def index_bytes(self) -> int:
        return sum(store.index_bytes for store in self.stores)

    @property
    def takes_rows_apart(self) -> bool:
        return all(map(takes_rows_apart, self.stores))

    @property
    def shared_index(self) -> dict[int, int]:
        return {which: size for store in self.stores for which, size in shared_index(store).items()}

    def __len__(self) -> int:
        return int(self.starts[-1])

    def scratch_bytes(self, rows: int) -> int:
        return max(store.scratch_bytes(rows) for store in self.stores)

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        self.read_share(rows, at, out, WHOLE)

    def read_share(self, rows: np.ndarray, at: np.ndarray, out: Out, share: Share) -> None:
        check_rows(rows, self)
        order = np.argsort(rows, kind="stable")
        rows, at = rows[order], at[order]
        which = np.searchsorted(self.starts, rows, side="right") - 1
        begins = [0, *(np.flatnonzero(which[1:] != which[:-1]) + 1).tolist(), len(rows)] if len(rows) else []
        for begin, end in pairwise(begins):
            part = int(which[begin])
            read_share(self.stores[part], rows[begin:end] - self.starts[part], at[begin:end], out, share)

    def origin(self, row: int) -> Origin:
        part = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.stores[part].origin(row - int(self.starts[part]))

    def find(self, key: str) -> int | None:
        found = ((find_key(store, key), int(start)) for store, start in zip(self.stores, self.starts, strict=False))
        return next((row + start for row, start in found if row is not None), None)

    def close(self) -> None:
        for store in self.stores:
            store.close()

    def casting(self, casts: Mapping[str, Cast]) -> Store:
        return Concat([cast_fields(store, casts) for store in self.stores])

    def choosing(self, names: Sequence[str]) -> Store:
        return Concat([choose_fields(store, {name: name for name in names}) for store in self.stores])

    def selecting(self, field: str, part: Within) -> Store:
        return Concat([select_part(store, field, part) for store in self.stores])


@dataclass(frozen=True)
class Part:
    """One side of a join: a store, the row of it that belongs to each sample, and its fields' new names."""

    store: Store
    rows: np.ndarray | None
    names: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.store) if self.rows is None else len(self.rows)

    def inner(self, rows: np.ndarray) -> np.ndarray:
        return rows if self.rows is None else self.rows[rows]


class Joined:
    """Fields side by side: sample ``i`` takes row ``part.rows[i]`` of each part."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.parts = dict(parts)
        lengths = {name: len(part) for name, part in parts.items()}
        if len(set(lengths.values())) != 1:
            told = ", ".join(f"{name} has {length:,}" for name, length in lengths.items())
            raise SchemaMismatch(
                f"joined parts must have as many rows as each other, but {told}. "
                f"Give the longer ones as (dataset, rows) with one row number a sample"
            )
        for name, part in parts.items():
            if part.rows is not None:
                try:
                    check_rows(part.rows, part.store)
                except OutOfRange as error:
                    raise OutOfRange(f"join: {name} names rows that are not there: {error}") from None
        self.fields: Fields = {
            new: part.store.fields[old] for part in parts.values() for new, old in part.names.items()
        }

    @property
    def blocks(self) -> np.ndarray | None:
        """Those of the parts whose rows are the samples; the others are read at random whatever the order."""
        found = [part.store.blocks for part in self.parts.values() if part.rows is None]
        return max((blocks for blocks in found if blocks is not None), key=lambda blocks: -len(blocks), default=None)

    @property
    def free_fields(self) -> frozenset[str]:
        found: set[str] = set()
        for part in self.parts.values():
            free = free_fields(part.store) if part.rows is None or part.store.blocks is None else frozenset()
            found.update(new for new, old in part.names.items() if old in free)
        return frozenset(found)

    def __reduce__(self) -> tuple[type, tuple[dict[str, Part]]]:
        return type(self), (self.parts,)

    @property
    def fingerprint(self) -> str:
        def rows(part: Part) -> str:
            return "all" if part.rows is None else digest(part.rows.tobytes())

        return digest("join", *((n, p.store.fingerprint, rows(p), dict(p.names)) for n, p in self.parts.items()))

    @property
    def index_bytes(self) -> int:
        tables = sum(part.rows.nbytes for part in self.parts.values() if part.rows is not None)
        return tables + sum(part.store.index_bytes for part in self.parts.values())

    @property
    def takes_rows_apart(self) -> bool:
        return all(takes_rows_apart(part.store) for part in self.parts.values())

    @property
    def shared_index(self) -> dict[int, int]:
        return {which: size for part in self.parts.values() for which, size in shared_index(part.store).items()}

    def __len__(self) -> int:
        return len(next(iter(self.parts.values())))

    def scratch_bytes(self, rows: int) -> int:
        return max(part.store.scratch_bytes(rows) for part in self.parts.values())

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        self.read_share(rows, at, out, WHOLE)

    def read_share(self, rows: np.ndarray, at: np.ndarray, out: Out, share: Share) -> None:
        check_rows(rows, self)
        for part in self.parts.values():
            wanted = {old: out[new] for new, old in part.names.items() if new in out}
            if wanted:
                read_share(part.store, part.inner(rows), at, wanted, share)

    def origin(self, row: int) -> Origin:
        places = {name: part.store.origin(int(part.inner(np.array([row]))[0])) for name, part in self.parts.items()}
        from_files = {name: place for name, place in places.items() if place.url}
        return Origin(
            "; ".join(dict.fromkeys(place.url for place in from_files.values())),
            "; ".join(place.key for place in (from_files or places).values()),
        )

    def find(self, key: str) -> int | None:
        found = (_position(find_key(part.store, key), part.rows) for part in self.parts.values())
        return next((row for row in found if row is not None), None)

    def close(self) -> None:
        for part in self.parts.values():
            part.store.close()

    def casting(self, casts: Mapping[str, Cast]) -> Store:
        def inside(part: Part) -> Part:
            wanted = {old: casts[new] for new, old in part.names.items() if new in casts}
            return Part(cast_fields(part.store, wanted), part.rows, part.names)

        return Joined({name: inside(part) for name, part in self.parts.items()})

    def choosing(self, names: Sequence[str]) -> Store:
        kept = {}
        for label, part in self.parts.items():
            chosen = {new: old for new, old in part.names.items() if new in names}
            if chosen:
                inner = choose_fields(part.store, {old: old for old in chosen.values()})
                kept[label] = Part(inner, part.rows, chosen)
        joined = Joined(kept)
        return joined if list(joined.fields) == list(names) else Columns(joined, {name: name for name in names})

    def selecting(self, field: str, part: Within) -> Store:
        def inside(each: Part) -> Part:
            if field not in each.names:
                return each
            return Part(select_part(each.store, each.names[field], part), each.rows, each.names)

        return Joined({name: inside(each) for name, each in self.parts.items()})


def side_by_side(stores: Sequence[Store], names: Sequence[str]) -> Store:
    """The fields of stores that have the same rows, in this order."""
    if len(stores) == 1:
        return stores[0]
    parts = (Part(store, None, {name: name for name in store.fields}) for store in stores)
    return Joined({str(number): part for number, part in enumerate(parts)}).choosing(list(names))


def classes_of(store: Store) -> tuple[str, ...]:
    """What labels mean, of the first store below that knows."""
    if isinstance(store, Joined):
        below: Sequence[Store] = [part.store for part in store.parts.values()]
    else:
        below = store.stores[:1] if isinstance(store, Concat) else [store.store] if isinstance(store, Wrapper) else ()
    found: tuple[str, ...] = getattr(store, "classes", ())
    return found or next(filter(None, map(classes_of, below)), ())


def _position(row: int | None, rows: range | np.ndarray | None) -> int | None:
    """Where a row of the store below first comes among ``rows``; None stands for no row, and for all of them."""
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
