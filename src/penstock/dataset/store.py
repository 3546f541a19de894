"""Stores: finite, read-only rows that many threads can read at once.

``Store`` is the protocol for other people's stores. Inside, every store is a ``StoreBase``: it answers every question
that a loader, a plan or another store asks, and its defaults hold for any store. ``as_base`` adapts a foreign store.

A store holds nothing open that ``close`` does not close, and can be read again after ``close``. It pickles, and works
after a fork.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from penstock.base.spec import Cast, Fields, Origin, ReadPath
from penstock.base.user_functions import NO_LIMIT
from penstock.errors import DataError, OutOfRange
from penstock.read.part import RowPart
from penstock.read.pieces import WHOLE, Share

Out = Mapping[str, np.ndarray]
"""The caller's memory: arrays of shape (places, *field shape) and the field's dtype, rows contiguous."""

Filled = np.ndarray | bool
"""Which elements of a row a share fills: flags of the row's shape, or True for all and False for none."""

ReadCall = tuple["StoreBase", np.ndarray, np.ndarray, Out]
"""A store, and the rows, places and memory to read from it."""

Branch = tuple["StoreBase", Mapping[str, str]]
"""A store that another one is made of, and the names that its fields have there: ``{new name: old name}``."""


@runtime_checkable
class Store(Protocol):
    """The protocol of a store: what a format must provide."""

    @property
    def fields(self) -> Fields:
        """The fields of one sample."""

    @property
    def blocks(self) -> np.ndarray | None:
        """First rows of the blocks that are read whole, ascending; None where each row can be read by itself."""

    @property
    def fingerprint(self) -> str:
        """Differs when the data differ; does not depend on the machine or the path."""

    @property
    def index_bytes(self) -> int:
        """Bytes of memory that the tables of this store take for as long as it lives."""

    def __len__(self) -> int: ...

    def scratch_bytes(self, rows: int) -> int:
        """The most memory that one ``read_into`` of ``rows`` rows borrows besides ``out``."""

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        """Put sample ``rows[k]`` at ``out[field][at[k]]`` for each field in ``out``; any order, repeats allowed."""

    def origin(self, row: int) -> Origin:
        """Where a sample comes from."""

    def close(self) -> None:
        """Close open files; the store can still be read, and opens them again."""


class StoreBase:
    """A store inside penstock. A subclass overrides ``read_into``, or ``read`` if several threads can share a read.

    A store made of others names them in ``branches``; every default below then follows from them.
    """

    if TYPE_CHECKING:  # a subclass has each of these, as an attribute or as a property

        @property
        def fields(self) -> Fields: ...
        @property
        def fingerprint(self) -> str: ...
        def __len__(self) -> int: ...
        def scratch_bytes(self, rows: int) -> int: ...
        def origin(self, row: int) -> Origin: ...

    classes: tuple[str, ...] = ()
    """The meaning of labels, if folders are classes."""
    left_out: tuple[DataError, ...] = ()
    """Why files or members of a store that was just opened are not in it, with ``on_error="skip"``."""

    def branches(self) -> Sequence[Branch]:
        """The stores that this one is made of."""
        return ()

    def rebuild(self, children: "Sequence[StoreBase]") -> "StoreBase":
        """The same store made of other stores, one for each branch."""
        raise NotImplementedError

    @property
    def children(self) -> "list[StoreBase]":
        return [store for store, _ in self.branches()]

    @property
    def blocks(self) -> np.ndarray | None:
        return None

    @property
    def index_bytes(self) -> int:
        return sum(child.index_bytes for child in self.children)

    @property
    def shared_index(self) -> dict[int, int]:
        """Bytes of tables that other stores use too, by the table's ``id``, so that each is counted once."""
        return {which: size for child in self.children for which, size in child.shared_index.items()}

    @property
    def rows_at_once(self) -> int:
        """The most rows per read; more would keep a caller's function busy for too long."""
        return min((child.rows_at_once for child in self.children), default=NO_LIMIT)

    @property
    def accepts_strided(self) -> bool:
        """Whether rows of ``out`` may lie apart in memory, such as the first part of longer rows."""
        children = self.children
        return bool(children) and all(child.accepts_strided for child in children)

    @property
    def free_fields(self) -> frozenset[str]:
        """Fields whose rows can be read one by one, even if other fields come in blocks."""
        return frozenset(self.fields if self.blocks is None else ())

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        self.read(rows, at, out)

    def read(self, rows: np.ndarray, at: np.ndarray, out: Out, share: Share = WHOLE) -> None:
        """Do this share of the read; all shares together do what ``read_into`` does."""
        if share[0] == 0:
            self.read_into(rows, at, out)

    def filled(self, field: str, rows: np.ndarray, share: Share) -> Iterator[tuple[np.ndarray, Filled]]:
        """Which elements a share of a read fills: positions in ``rows``, and what is filled of each of those rows."""
        yield np.arange(len(rows)), share[0] == 0

    def find(self, key: str) -> int | None:
        """The first row of this name; None if there is none, or if samples have no names."""
        return None

    def read_paths(self) -> Sequence[ReadPath]:
        """How each field is read, for a store that is not made of others."""
        return ()

    def epoch_bytes(self) -> Mapping[str, int]:
        """Bytes read for each field if each block (or row, without blocks) is read once."""
        return {path.field: path.stored_bytes for path in self.read_paths()}

    def with_casts(self, casts: Mapping[str, Cast]) -> "StoreBase | None":
        """The same rows with fields converted while they are read; None if this store cannot do that."""
        return None

    def with_axes(self, axes: Mapping[str, tuple[int, ...]]) -> "StoreBase | None":
        """The same rows with other orders of axes; None if a second pass is as good."""
        return None

    def with_part(self, field: str, part: RowPart) -> "StoreBase | None":
        """The same rows with part of a field, the rest unread; None if this store cannot do that."""
        return None

    def with_fields(self, names: Sequence[str]) -> "StoreBase | None":
        """The same rows with these fields alone, the others unread; None if this store cannot do that."""
        return None

    def close(self) -> None:
        for child in self.children:
            child.close()


class Wrapper(StoreBase):
    """A store made of one other: whatever a subclass does not override comes from that store."""

    def __init__(self, store: Any) -> None:
        self.store: StoreBase = store

    def branches(self) -> Sequence[Branch]:
        return [(self.store, {name: name for name in self.store.fields})]

    @property
    def fields(self) -> Fields:
        return self.store.fields

    @property
    def blocks(self) -> np.ndarray | None:
        return self.store.blocks

    @property
    def fingerprint(self) -> str:
        return self.store.fingerprint

    def __len__(self) -> int:
        return len(self.store)

    def scratch_bytes(self, rows: int) -> int:
        return self.store.scratch_bytes(rows)

    def origin(self, row: int) -> Origin:
        return self.store.origin(row)

    def find(self, key: str) -> int | None:
        return self.store.find(key)

    def describe_path(self, path: ReadPath) -> ReadPath:
        """How a field is read, from how the store below reads it."""
        return path


class ForeignStore(Wrapper):
    """A ``Store`` of another package, with defaults for everything that the protocol does not have."""

    store: Store  # type: ignore[assignment]

    def branches(self) -> Sequence[Branch]:
        return ()

    @property
    def index_bytes(self) -> int:
        return self.store.index_bytes

    def find(self, key: str) -> int | None:
        return None

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        self.store.read_into(rows, at, out)

    def close(self) -> None:
        self.store.close()


def as_base(store: Store) -> StoreBase:
    """The store itself, or an adapter around a store of another package."""
    return store if isinstance(store, StoreBase) else ForeignStore(store)


def check_rows(rows: np.ndarray, store: Store) -> None:
    """Refuse rows that do not exist, and negative ones, which numpy would count from the end."""
    unsigned: np.ndarray = np.asarray(rows, np.int64).view(np.uint64)  # where a negative number is the largest
    if len(rows) and unsigned.max() >= len(store):
        bad = rows[(rows < 0) | (rows >= len(store))][0]
        raise OutOfRange(f"row {bad} is out of range: there are {len(store):,} rows, 0 to {len(store) - 1:,}")


def describe_rows(rows: np.ndarray) -> str:
    """The first few rows, for a message."""
    shown = ", ".join(str(row) for row in rows[:4])
    return f"{shown} … ({len(rows)} of them)" if len(rows) > 4 else shown


def digest(*parts: object) -> str:
    """A short, stable hash of values with a faithful ``repr``."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
