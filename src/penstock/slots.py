"""Memory for batches: taken once, lent with a batch, back when the last array of it dies.

A slot holds one batch. The planned slots lie in one block, field by field, so that a read may fill several of them at
once. A loan is an object that the lent arrays (and tensors made of them, and views of those) keep alive; when the last
of them dies, the slot is free again.

A caller who keeps batches keeps their memory: ``ensure`` then adds slots beyond the plan, so that the loader goes on,
and gives them back to the system when they return unneeded. Never a hang, never an overwritten batch.

A loan may end at any moment, in any thread, inside any lock, and an exception raised there is dropped: a Ctrl-C that
landed in a finalizer would be lost. So no Python runs when a loan ends: weak references call ``SimpleQueue.put``, which
is C and reentrant, and whoever next asks for a slot does the rest.
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from penstock import interrupts
from penstock.memory import aligned, buffer
from penstock.spec import Fields

Pin = Callable[[np.ndarray], Callable[[], None]]
"""Locks a block of memory for device copies; returns what unlocks it."""


def slot_bytes(fields: Fields, rows: int) -> int:
    """What one batch of so many rows occupies."""
    return sum(aligned(rows * spec.row_bytes) for spec in fields.values())


class Slots:
    """``count`` buffers of ``rows`` rows."""

    def __init__(self, fields: Fields, rows: int, count: int, pin: Pin | None = None) -> None:
        self.fields, self.rows, self.planned = fields, rows, count
        self.added_peak = 0
        """The most slots that were in use beyond the plan at once."""
        self._pin = pin
        self._unpin: Callable[[], object] = lambda: None
        self._arenas: dict[int, _Arena] = {}
        self._free: SimpleQueue[int] = SimpleQueue()
        self._returned: SimpleQueue[int] = SimpleQueue()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._ring = partial(self._bell.put, None)
        self._lent: dict[int, tuple[weakref.ref[_Loan], ...]] = {}
        self._next_number = 0
        self._add(count)

    @property
    def lent(self) -> int:
        """Slots in the caller's hands."""
        self._take_back()
        return len(self._lent)

    @property
    def count(self) -> int:
        self._take_back()
        return len(self._arenas)

    def ring(self, bell: "SimpleQueue[None]") -> None:
        """Put something into ``bell`` whenever a slot becomes free, from now on; several datasets may share one."""
        self._bell, self._ring = bell, partial(bell.put, None)
        for number, (loan, *_) in list(self._lent.items()):
            self._watch(number, loan())

    def take(self) -> int | None:
        """A free slot, if there is one."""
        self._take_back()
        if self._free.empty():
            return None
        try:
            return self._free.get_nowait()
        except Empty:
            return None

    def ensure(self, available: int) -> None:
        """Add slots until so many are not in the caller's hands."""
        self._take_back()
        while len(self._arenas) - len(self._lent) < available:
            self._add(1)
        self.added_peak = max(self.added_peak, len(self._arenas) - self.planned)

    def memory(self, number: int) -> tuple[dict[str, np.ndarray], int]:
        """The arrays that hold a slot, and the row of them at which it begins."""
        arena = self._arenas[number]
        return arena.arrays, (number - arena.first_slot) * self.rows

    def lend(self, number: int, rows: int) -> dict[str, np.ndarray]:
        """The first rows of a slot, as arrays whose death returns it."""
        arena, loan = self._arenas[number], _Loan()
        self._watch(number, loan)
        lent = {name: np.asarray(_Lent(arena, described, loan)) for name, described in arena.described(number).items()}
        if rows != self.rows:
            lent = {name: array[:rows] for name, array in lent.items()}
        if not arena.objects:
            return lent
        begin = (number - arena.first_slot) * self.rows
        lists = {name: objects[begin : begin + rows].copy() for name, objects in arena.objects.items()}
        return {name: lists[name] if name in lists else lent[name] for name in self.fields}

    def give_back(self, number: int) -> None:
        """A slot returns: for the next read, or to the system if it was added beyond need."""
        self._lent.pop(number, None)
        if number >= self.planned and len(self._arenas) - len(self._lent) > self.planned:
            self._arenas.pop(number, None)
        else:
            self._set_free(number)

    def reclaim(self) -> None:
        """Whatever is not lent is free; while nobody reads. An interrupt may have come between two who pass one on."""
        while self.take() is not None:
            pass
        for number in [number for number in self._arenas if number not in self._lent]:
            self.give_back(number)

    def close(self) -> None:
        """Let go of the memory that is not lent; what is lent goes with its last array."""
        self._unpin()
        self._arenas.clear()

    def _add(self, count: int) -> None:
        arena = _Arena(self.fields, self.rows, count, self._next_number)
        if self._pin and self._next_number == 0:  # only what is planned stays long enough to be worth locking
            # Unlocked when it goes, however that comes: a device takes what is next at its address for the same memory.
            self._unpin = unpin = weakref.finalize(arena, interrupts.heard, self._pin(arena.block))
            unpin.atexit = False
        for number in range(self._next_number, self._next_number + count):
            self._arenas[number] = arena
            self._set_free(number)
        self._next_number += count

    def _watch(self, number: int, loan: "_Loan | None") -> None:
        """Let the end of a loan put its number into the queue, then ring. What is made last is called first.

        Each is called with a weak reference, which ``put`` takes for its second argument, and does not look at.
        """
        if loan is not None:
            ring = weakref.ref(loan, self._ring)
            self._lent[number] = (weakref.ref(loan, partial(self._returned.put, number)), ring)

    def _take_back(self) -> None:
        while not self._returned.empty():  # asked first: several times a batch there is nothing
            with suppress(Empty):  # somebody else was quicker
                self.give_back(self._returned.get_nowait())

    def _set_free(self, number: int) -> None:
        self._free.put(number)
        self._bell.put(None)


class _Arena:
    """One block of memory for several slots, field by field."""

    def __init__(self, fields: Fields, rows: int, count: int, first_slot: int) -> None:
        self.first_slot = first_slot
        self.objects = {name: spec.empty(count * rows) for name, spec in fields.items() if spec.is_list}
        """Python's own, which no block of bytes may hold."""
        sizes = {name: count * rows * spec.row_bytes for name, spec in fields.items() if not spec.is_list}
        self.block = buffer(sum(aligned(size) for size in sizes.values()))
        self.arrays: dict[str, np.ndarray] = {}
        begin = 0
        for name, size in sizes.items():
            values = self.block[begin : begin + size].view(fields[name].dtype)
            self.arrays[name] = values.reshape(count * rows, *fields[name].shape)
            begin += aligned(size)
        self._described: dict[int, dict[str, dict[str, Any]]] = {
            number: {name: array[place : place + rows].__array_interface__ for name, array in self.arrays.items()}
            for number, place in enumerate(range(0, count * rows, rows), first_slot)
        }
        self.arrays |= self.objects

    def described(self, number: int) -> dict[str, dict[str, Any]]:
        """A slot's arrays in numpy's words, made once: making them takes longer than lending."""
        return self._described[number]


class _Loan:
    """Alive for as long as any array of a lent batch is."""

    __slots__ = ("__weakref__",)


class _Lent:
    """What numpy takes for the owner of a lent array's memory."""

    __slots__ = ("__array_interface__", "arena", "loan")

    def __init__(self, arena: _Arena, described: dict[str, Any], loan: _Loan) -> None:
        self.arena, self.loan, self.__array_interface__ = arena, loan, described
