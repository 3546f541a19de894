"""Memory for batches: allocated once, lent with a batch, returned when the last array over it dies.

A slot holds one batch. The planned slots lie in one block, field by field, so that a read may fill several of them at
once. A loan is an object that the lent arrays (and tensors made of them, and views of those) keep alive; when the last
of them dies, the slot is free again.

A caller who keeps batches keeps their memory: ``ensure`` then adds slots beyond the plan, so that the loader can
continue, and returns them to the system when they come back unneeded. Never a hang, never an overwritten batch.

A loan may end at any moment, in any thread, inside any lock, and an exception raised there is dropped: a Ctrl-C that
landed in a finalizer would be lost. So no Python runs when a loan ends: weak references call ``SimpleQueue.put``, which
is C and reentrant, and the next call that needs a slot does the rest.
"""

import itertools
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from penstock.base import stop
from penstock.base.scratch import (
    LARGE_PAGE,
    aligned,
    buffer,
    page_bytes,
    return_pages,
    shared_buffer,
    use_large_pages,
)
from penstock.base.sizes import KiB
from penstock.base.spec import Fields
from penstock.errors import Unavailable

Pin = Callable[[np.ndarray], Callable[[], None]]
"""Locks a block of memory for device copies; returns a function that unlocks it."""


# Measured: the Python objects that describe one batch, in the schedule and in queues.
BATCH_RECORD_BYTES = 512
# Row numbers are int64.
BATCH_ROW_BYTES = 8

# Handing out a batch this small takes longer than reading it, and a thread that reads at the same time takes the
# interpreter's lock from the caller. Threads that were woken rest so long, unless the caller waits for a batch.
SMALL_BATCH_BYTES = 64 * KiB
REST_S = 0.02

_KEYS = itertools.count()


def slot_bytes(fields: Fields, rows: int) -> int:
    """The memory of one batch of ``rows`` rows."""
    return sum(aligned(rows * spec.row_bytes) for spec in fields.values())


def record_bytes(batch_rows: int) -> int:
    """Bytes that the schedule keeps per batch."""
    return BATCH_RECORD_BYTES + BATCH_ROW_BYTES * batch_rows


def shared_memory(bytes_: int) -> tuple[np.ndarray, int]:
    """Memory for reader processes too, and its descriptor."""
    try:
        return shared_buffer(bytes_)
    except OSError as error:
        raise Unavailable(
            f"{bytes_:,} bytes that processes share cannot be had: {error.strerror}. Let this process have more open "
            f"files (ulimit -n) or memory; processes=0 needs neither"
        ) from error


class Slots:
    """``planned`` buffers of ``rows`` rows, and more while the caller keeps batches.

    Planned slots have the numbers from 0; those added later, each with memory of its own, have higher ones.
    """

    def __init__(
        self,
        fields: Fields,
        rows: int,
        planned: int,
        pin: Pin | None = None,
        *,
        is_shared: bool = False,
        is_tight: bool = False,
        wake_from: int = 1,
    ) -> None:
        self.fields, self.rows, self.planned, self._is_tight = fields, rows, planned, is_tight
        self._wake_from = wake_from
        """So many free slots are worth waking a thread for."""
        self._rest_s = REST_S if slot_bytes(fields, rows) <= SMALL_BATCH_BYTES else 0.0
        self._rest_until = 0.0
        self.key = next(_KEYS)
        """Tells the memory of these slots from that of others."""
        self.added_peak = 0
        """The most slots that were in use beyond the plan at once."""
        size = block_bytes(fields, rows * planned)
        self._descriptor: int | None = None
        if is_shared:
            memory, self._descriptor = shared_memory(size)
        else:
            memory = buffer(size)
        self._block: SlotBlock | None = SlotBlock(fields, rows, 0, memory, planned)
        self._block.use_large_pages()
        if self._descriptor is not None:
            close = weakref.finalize(self._block, stop.call_in_finalizer, os.close, self._descriptor)
            close.atexit = False
        self._added: dict[int, SlotBlock] = {}
        self._unpin: Callable[[], object] = lambda: None
        if pin is not None:
            # Only planned slots live long enough to be worth pinning. They must be unpinned whenever the memory is
            # freed: a device would take whatever comes to lie at the same address for the same memory.
            self._unpin = unpin = weakref.finalize(self._block, stop.call_in_finalizer, pin(self._block.memory))
            unpin.atexit = False
        self._free: SimpleQueue[int] = SimpleQueue()
        self._returned: SimpleQueue[int] = SimpleQueue()
        self._wake_ups: SimpleQueue[None] = SimpleQueue()
        self._wake_up = partial(self._wake_ups.put, None)
        self._lent: dict[int, tuple[weakref.ref[_Loan], ...]] = {}
        self._next_number = planned
        for number in range(planned):
            self._free.put(number)

    @property
    def lent(self) -> int:
        """Slots in the caller's hands."""
        self._take_back()
        return len(self._lent)

    @property
    def count(self) -> int:
        """Slots that have memory."""
        self._take_back()
        return (0 if self._block is None else self.planned) + len(self._added)

    def wake(self, wake_ups: "SimpleQueue[None]") -> None:
        """From now on, put an item into this queue when slots become free; several datasets may share one."""
        self._wake_ups, self._wake_up = wake_ups, partial(wake_ups.put, None)
        for number, (loan, *_) in list(self._lent.items()):
            self._watch(number, loan())

    def take(self) -> int | None:
        """A free slot, if there is one."""
        if self._free.empty():
            self._take_back()
        try:
            return None if self._free.empty() else self._free.get_nowait()
        except Empty:
            return None

    def ensure(self, available: int) -> bool:
        """Add slots until ``available`` are not held by the caller; whether any were added."""
        if not self._added and self.planned - len(self._lent) + self._returned.qsize() >= available:
            if self._wake_from > 1:  # or else the end of each loan does
                self._wake()
            return False
        self._take_back()
        missing = available - (self.planned + len(self._added) - len(self._lent))
        for _ in range(missing):
            memory = buffer(block_bytes(self.fields, self.rows))
            self._added[self._next_number] = SlotBlock(self.fields, self.rows, self._next_number, memory)
            self._free.put(self._next_number)
            self._next_number += 1
        if missing > 0:
            self._wake()
        self.added_peak = max(self.added_peak, len(self._added))
        return missing > 0

    @property
    def descriptor(self) -> int | None:
        """Of the planned slots' memory, if other processes can map it."""
        return None if self._block is None else self._descriptor

    @property
    def shared_bytes(self) -> int:
        """Memory that any process has touched, of slots that other processes can map."""
        return 0 if self.descriptor is None else os.fstat(self.descriptor).st_blocks * 512

    def memory(self, number: int) -> tuple[dict[str, np.ndarray], int]:
        """The arrays that hold a slot, and the row of them at which it begins."""
        return self._block_of(number).memory_of(number)

    def lend(self, number: int, rows: int) -> dict[str, np.ndarray]:
        """The first rows of a slot, as arrays whose death returns it."""
        block, loan = self._block_of(number), _Loan()
        self._watch(number, loan)
        place = number - block.first_slot
        lent = {
            name: np.asarray(_LentMemory(block, {**interface, "data": (address + place * step, False)}, loan))
            for name, (interface, address, step) in block.interfaces.items()
        }
        for name in block.unnamed:
            lent[name] = lent[name].view(self.fields[name].dtype)
        if rows != self.rows:
            lent = {name: array[:rows] for name, array in lent.items()}
        if not block.objects:
            return lent
        begin = place * self.rows
        lists = {name: objects[begin : begin + rows].copy() for name, objects in block.objects.items()}
        return {name: lists[name] if name in lists else lent[name] for name in self.fields}

    def give_back(self, number: int) -> None:
        """Return a slot: for the next read, or to the system if it was added and is not needed any more."""
        self._put_back(number)
        self._wake()

    def reclaim(self) -> None:
        """Free all slots that are not lent, while no thread reads: an interrupt may lose one between two owners."""
        while self.take() is not None:
            pass
        for number in [*range(self.planned), *self._added]:
            if number not in self._lent:
                self.give_back(number)

    def close(self) -> None:
        """Free the memory that is not lent; lent memory goes with its last array."""
        self._unpin()
        self._block = None
        self._added.clear()

    def wake_at_once(self) -> None:
        """Wake a thread: the caller waits."""
        self._rest_until = time.monotonic() + self._rest_s
        self._wake_ups.put(None)

    def _block_of(self, number: int) -> "SlotBlock":
        block = self._block if number < self.planned else self._added[number]
        if block is None:
            raise KeyError(number)
        return block

    def _watch(self, number: int, loan: "_Loan | None") -> None:
        """Let the end of a loan put its number into a queue, then wake a reader. References made last are called first.

        Each is called with a weak reference, which ``put`` takes for its second argument and ignores.
        """
        if loan is not None:
            wake_ups = (weakref.ref(loan, self._wake_up),) if self._wake_from == 1 else ()
            self._lent[number] = (weakref.ref(loan, partial(self._returned.put, number)), *wake_ups)

    def _take_back(self) -> None:
        """Take back the slots of loans that have ended, of which threads know already."""
        with suppress(Empty):  # another thread was quicker
            while not self._returned.empty():
                self._put_back(self._returned.get_nowait())

    def _put_back(self, number: int) -> None:
        self._lent.pop(number, None)
        if number >= self.planned and len(self._added) > len(self._lent) - self._returned.qsize():
            self._added.pop(number, None)
            return
        if self._is_tight and self._block is not None and number < self.planned:
            self._block.return_pages(number)
        self._free.put(number)

    def _wake(self) -> None:
        """Wake a thread if there are enough slots for it; one look of a thread sees all of them."""
        is_enough = self._free.qsize() + self._returned.qsize() >= self._wake_from
        if is_enough and self._wake_ups.empty() and (not self._rest_s or time.monotonic() >= self._rest_until):
            self.wake_at_once()


def block_bytes(fields: Fields, places: int) -> int:
    """The memory of ``places`` places, field by field; Python objects lie elsewhere."""
    return sum(aligned(places * spec.row_bytes) for spec in fields.values() if not spec.is_list)


class SlotBlock:
    """One block of memory for one slot or several, field by field."""

    def __init__(self, fields: Fields, rows: int, first_slot: int, memory: np.ndarray, slots: int = 1) -> None:
        self.first_slot, self.rows = first_slot, rows
        self.objects = {name: spec.empty(slots * rows) for name, spec in fields.items() if spec.is_list}
        """Python objects, which no block of bytes may hold."""
        sizes = {name: slots * rows * spec.row_bytes for name, spec in fields.items() if not spec.is_list}
        self.memory = memory
        self.arrays: dict[str, np.ndarray] = {}
        self.interfaces: dict[str, tuple[dict[str, Any], int, int]] = {}
        """By field: numpy's description of the first slot's array, its address, and the bytes from slot to slot."""
        begin = 0
        for name, size in sizes.items():
            values = self.memory[begin : begin + size].view(fields[name].dtype)
            self.arrays[name] = array = values.reshape(slots * rows, *fields[name].shape)
            interface = array[:rows].__array_interface__
            self.interfaces[name] = interface, interface["data"][0], rows * fields[name].row_bytes
            begin += aligned(size)
        self.unnamed = [name for name, array in self.arrays.items() if array.dtype.kind == "V"]
        """Fields whose dtype numpy's description of memory has no name for."""
        self.arrays |= self.objects

    def use_large_pages(self) -> None:
        """Let large rows come in large pages: filled up to a tenth quicker, and few where pages come and go.

        A virtual machine that has to ask its host for them fills each slot for the first time at 1 GB/s. Small pages
        would take less then, and more in every epoch.
        """
        for array in self.arrays.values():
            if array.dtype != object and page_bytes(array[:1].nbytes) == LARGE_PAGE:
                use_large_pages(array)

    def return_pages(self, number: int) -> None:
        """Return the memory of a slot to the system; it comes back row by row as the slot is filled."""
        begin = (number - self.first_slot) * self.rows
        for array in self.arrays.values():
            if array.dtype != object:
                return_pages(array[begin : begin + self.rows])

    def memory_of(self, number: int) -> tuple[dict[str, np.ndarray], int]:
        """The arrays that hold a slot, and the row of them at which it begins."""
        return self.arrays, (number - self.first_slot) * self.rows


class _Loan:
    """Alive as long as any array of a lent batch."""

    __slots__ = ("__weakref__",)


class _LentMemory:
    """The object that numpy regards as the owner of a lent array's memory."""

    __slots__ = ("__array_interface__", "block", "loan")

    def __init__(self, block: SlotBlock, interface: dict[str, Any], loan: _Loan) -> None:
        self.block, self.loan, self.__array_interface__ = block, loan, interface
