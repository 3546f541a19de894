"""Threads that fill slots, in the order in which batches will be wanted.

Reads are handed out one at a time under one lock; whoever holds it may wait there for a free slot, since everybody else
would have to wait for the same. Slots go to batches in order, so the batch the caller waits for always has one.
Results and errors travel to the caller with their step; an error is raised where its batch would have come.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np

from penstock import memory
from penstock.deal import Deal
from penstock.errors import WorkerDied
from penstock.order import PIECE, Order
from penstock.plan import Plan
from penstock.slots import Slots
from penstock.store import Store


@dataclass
class Batch:
    """One batch on its way: its slot, its rows, and the reads still missing."""

    step: int
    slot: int
    rows: np.ndarray
    reads_left: int = 1
    error: BaseException | None = None


@dataclass(frozen=True)
class Read:
    """What one thread does in one go: rows ``begin`` up to ``end`` of a batch, or several batches whole."""

    batches: list[Batch]
    begin: int
    end: int


@dataclass(frozen=True)
class Epoch:
    """What is to be read: one rank's share of one epoch."""

    number: int
    order: Order
    deal: Deal


@dataclass
class ReaderTimes:
    """Seconds spent by all reader threads together."""

    reading: float = 0.0
    waiting_for_slots: float = 0.0


class Readers:
    """The threads of one epoch."""

    def __init__(self, store: Store, epoch: Epoch, plan: Plan, slots: Slots) -> None:
        self.store, self.epoch, self.plan, self.slots = store, epoch, plan, slots
        self.times = ReaderTimes()
        self._scratch_bytes = store.scratch_bytes(plan.rows_per_read)
        self._turn = threading.Lock()
        self._counting = threading.Lock()
        self._reads = self._make_reads()
        self._done: SimpleQueue[list[Batch] | BaseException] = SimpleQueue()
        self._ready: dict[int, Batch] = {}
        self._held: set[int] = set()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._work, name=f"penstock-reader-{number}", daemon=True)
            for number in range(plan.threads)
        ]
        for thread in self._threads:
            thread.start()

    def get(self, step: int) -> Batch:
        """The batch of this step, when it is there. Its slot is then the caller's to lend or give back."""
        while step not in self._ready:
            self._receive(self._done.get())
        return self._hand_over(step)

    def get_if_ready(self, step: int) -> Batch | None:
        """The same without waiting."""
        try:
            while step not in self._ready:
                self._receive(self._done.get_nowait())
        except Empty:
            return None
        return self._hand_over(step)

    def stop(self) -> None:
        """End the threads, take back their slots, close the files. Safe to call twice."""
        self._stopping = True
        self.slots.free.put(None)
        for thread in self._threads:
            thread.join()
        while self._held:
            self.slots.give_back(self._held.pop())
        self.store.close()

    def _receive(self, posted: list[Batch] | BaseException) -> None:
        if isinstance(posted, BaseException):
            self._done.put(posted)
            raise WorkerDied(
                f"a reader thread ended: {type(posted).__name__}: {posted}. Batches delivered so far are right; "
                f"load the loader's last state_dict to go on from there"
            ) from posted
        for batch in posted:
            self._ready[batch.step] = batch

    def _hand_over(self, step: int) -> Batch:
        batch = self._ready.pop(step)
        self._held.discard(batch.slot)
        return batch

    def _make_reads(self) -> Iterator[Read]:
        """All reads of the epoch, each with its slots taken; ends early when stopping."""
        order, deal, plan = self.epoch.order, self.epoch.deal, self.plan
        together = plan.batches_per_read
        stride = together * max(1, PIECE // (together * plan.batch_rows))
        for first in range(0, deal.steps, stride):
            last = min(first + stride, deal.steps)
            positions, bounds = deal.positions(first, last)
            rows = order.at(self.epoch.number, positions)
            for begin in range(first, last, together):
                batches = []
                for step in range(begin, min(begin + together, last)):
                    slot = self._free_slot()
                    if slot is None:
                        return
                    batches.append(Batch(step, slot, rows[bounds[step - first] : bounds[step - first + 1]]))
                yield from self._split(batches)

    def _split(self, batches: list[Batch]) -> Iterator[Read]:
        if len(batches) > 1:
            yield Read(batches, 0, self.plan.batch_rows)
            return
        size = len(batches[0].rows)
        begins = range(0, size, self.plan.rows_per_read)
        batches[0].reads_left = len(begins)
        for begin in begins:
            yield Read(batches, begin, min(begin + self.plan.rows_per_read, size))

    def _free_slot(self) -> int | None:
        began = time.perf_counter()
        while not self._stopping:
            number = self.slots.free.get()
            if number is not None:
                self._held.add(number)
                self.times.waiting_for_slots += time.perf_counter() - began
                return number
        return None

    def _work(self) -> None:
        memory.prepare(self._scratch_bytes)
        try:
            while (read := self._next_read()) is not None:
                began = time.perf_counter()
                self._fill(read)
                self._post(read, time.perf_counter() - began)
        except BaseException as error:  # whatever it is, the caller must hear of it
            self._done.put(error)
        finally:
            memory.release()

    def _next_read(self) -> Read | None:
        with self._turn:
            return None if self._stopping else next(self._reads, None)

    def _fill(self, read: Read) -> None:
        for batches in self._neighbours(read.batches):
            try:
                self._read(batches, read.begin, read.end)
            except Exception as error:
                if len(batches) == 1:
                    batches[0].error = error
                else:  # find out whose error it is: batches before it are whole
                    for batch in batches:
                        self._fill(Read([batch], read.begin, read.end))

    def _neighbours(self, batches: list[Batch]) -> list[list[Batch]]:
        """Batches grouped so that each group fills consecutive places of the same arrays."""
        groups: list[list[Batch]] = []
        after: tuple[object, int] | None = None
        for batch in batches:
            arrays, first = self.slots.memory(batch.slot)
            if after is not None and after[0] is arrays and after[1] == first:
                groups[-1].append(batch)
            else:
                groups.append([batch])
            after = arrays, first + len(batch.rows)
        return groups

    def _read(self, batches: list[Batch], begin: int, end: int) -> None:
        """Rows ``begin`` up to ``end`` of each batch, whose slots follow each other."""
        rows = np.concatenate([batch.rows[begin:end] for batch in batches])
        arrays, first = self.slots.memory(batches[0].slot)
        self.store.read_into(rows, np.arange(first + begin, first + begin + len(rows)), arrays)

    def _post(self, read: Read, seconds: float) -> None:
        with self._counting:
            self.times.reading += seconds
            read.batches[0].reads_left -= 1
            if read.batches[0].reads_left:
                return
        self._done.put(read.batches)
