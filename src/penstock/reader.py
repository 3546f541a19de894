"""Threads that fill slots, in the order in which batches will be wanted.

Reads are handed out one at a time under one lock; whoever holds it may wait there for a free slot, since everybody else
would have to wait for the same. Slots go to batches in order, so the batch the caller waits for always has one.
Results and errors travel to the caller with their step; an error is raised where its batch would have come.
"""

import threading
import time
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import numpy as np

from penstock import memory, stopping, tally
from penstock.errors import DataError, SourceError, WorkerDied
from penstock.pieces import WHOLE, Share
from penstock.plan import Plan
from penstock.schedule import Batch, Epoch, Part, Read, reads
from penstock.slots import Slots
from penstock.store import Store, read_share
from penstock.tally import Tally

BAD_INPUT = (DataError, SourceError)
"""What can be wrong with a sample, as against with the program."""


@dataclass
class ReaderTimes:
    """Seconds spent by all reader threads together."""

    reading: float = 0.0
    waiting_for_slots: float = 0.0
    counted: Tally = field(default_factory=Tally)
    """What was read and decoded."""


class Readers:
    """The threads of one epoch."""

    def __init__(self, store: Store, epoch: Epoch, plan: Plan, slots: Slots, *, skip: bool = False) -> None:
        self.store, self.epoch, self.plan, self.slots = store, epoch, plan, slots
        self._skip = skip
        self.times = ReaderTimes()
        self._scratch_bytes = store.scratch_bytes(plan.rows_per_read)
        self._turn = threading.Lock()
        self._counting = threading.Lock()
        self._reads = reads(epoch, plan, self._free_slot)
        self._done: SimpleQueue[list[Batch] | BaseException] = SimpleQueue()
        self._ready: dict[int, Batch] = {}
        self._held: set[int] = set()
        self._stopping = False
        self._asked_to_stop = threading.Event()
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
        self._asked_to_stop.set()
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
        stopping.watch(self._asked_to_stop)
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
        for parts in self._together(read):
            try:
                self._read(parts, read.share)
            except Exception as error:
                if self._skip and isinstance(error, BAD_INPUT):
                    self._sort_out(parts)
                elif len(parts) == 1:
                    parts[0].batch.error = error
                else:  # find out whose error it is: the other batches are whole
                    for part in parts:
                        self._fill(Read([part], read.scattered, read.share))

    def _sort_out(self, parts: list[Part]) -> None:
        """Find the samples that cannot be read, by halves, and read all others."""
        if len(parts) > 1:
            for part in parts:
                self._halve(part)
        else:
            part = parts[0]
            if len(part.rows) == 1:
                self._halve(part)
                return
            middle = len(part.rows) // 2
            for half in (slice(None, middle), slice(middle, None)):
                self._halve(Part(part.batch, part.rows[half], part.places[half]))

    def _halve(self, part: Part) -> None:
        try:
            self._read([part])
        except BAD_INPUT as error:
            if len(part.rows) == 1:
                part.batch.left_out.append((int(part.places[0]), error))
            else:
                self._sort_out([part])
        except Exception as error:
            part.batch.error = error

    def _together(self, read: Read) -> list[list[Part]]:
        """Parts that one call can read: of the same arrays, and unless scattered, one after another."""
        groups: list[list[Part]] = []
        after: tuple[object, int] | None = None
        for part in read.parts:
            arrays, first = self.slots.memory(part.batch.slot)
            if after is not None and after[0] is arrays and (read.scattered or after[1] == first):
                groups[-1].append(part)
            else:
                groups.append([part])
            after = arrays, first + len(part.rows)
        return groups

    def _read(self, parts: list[Part], share: Share = WHOLE) -> None:
        arrays = self.slots.memory(parts[0].batch.slot)[0]
        rows = np.concatenate([part.rows for part in parts])
        at = np.concatenate([part.places + self.slots.memory(part.batch.slot)[1] for part in parts])
        read_share(self.store, rows, at, arrays, share)

    def _post(self, read: Read, seconds: float) -> None:
        counted = tally.collect()
        with self._counting:
            self.times.reading += seconds
            self.times.counted.add(counted)
            for part in read.parts:
                part.batch.reads_left -= 1
            whole = [part.batch for part in read.parts if part.batch.reads_left == 0]
        if whole:
            self._done.put(whole)
