"""Threads that fill slots, in the order in which batches will be wanted.

Reads are handed out one at a time under one lock; whoever holds it may wait there for a free slot, since everybody else
would have to wait for the same. Slots go to batches in order, so the batch the caller waits for always has one.
Where one team of threads reads for several datasets, each has slots of its own, and of those that can go on, the one
whose batch is wanted first goes first.
Results and errors travel to the caller with their step; an error is raised where its batch would have come.

Ending waits for the threads, but not for ever: one may be in a read that does not return, of a disk that is gone, or in
a function of the caller's. Then it ends when that does, and whoever comes last lets go of everything.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

import numpy as np

from penstock import memory, stopping, tally
from penstock.errors import DataError, SourceError, Unavailable, WorkerDied
from penstock.finite import Nan, not_finite
from penstock.pieces import WHOLE, Share
from penstock.planning import SHARE_ABOVE_BYTES, Plan
from penstock.schedule import Batch, Epoch, Later, Part, Read, reads
from penstock.sizes import MiB
from penstock.slots import Slots
from penstock.store import Store, free_fields, read_share
from penstock.tally import Tally

BAD_INPUT = (DataError, SourceError)
"""What can be wrong with a sample, as against with the program."""

# What a batch has of fields that need not come with their blocks, from where on they come by reads of their own.
LATER_FROM_BYTES = 1 * MiB

# How long ending waits for reads that are under way. Ctrl-C should end a program within three seconds.
END_WITHIN_S = 1.5


@dataclass
class ReaderTimes:
    """Seconds spent by all reader threads together."""

    reading: float = 0.0
    computing: float = 0.0
    """Of reading: on a core, rather than waiting."""
    waiting_for_slots: float = 0.0
    counted: Tally = field(default_factory=Tally)
    """What was read and decoded."""
    rows: float = 0.0
    """Rows read; some of them may belong to batches that are not whole yet."""
    threads: int = 0
    """How many there are now; 0 where the plan says."""


class Team:
    """Threads that read for one dataset, or for several whose batches are wanted in turn."""

    def __init__(self, threads: int) -> None:
        self.bell: SimpleQueue[None] = SimpleQueue()
        """Rung by every slot that becomes free."""
        self._members: list[Readers] = []
        self._gone = 0
        self._turn = threading.Lock()
        self._stopping = stopping.Flag()
        self._size = threads
        self._threads = [self._thread(number) for number in range(threads)]
        self._remaining = deque([0])
        """One number for those it reads for and one for each thread, taken when they go: 0 is the last one's."""

    def join(self, readers: "Readers") -> None:
        """Read for these too; before ``start``."""
        self._members.append(readers)

    def start(self) -> None:
        """Begin to read, with as many of the threads as the system lets us have."""
        for begun, thread in enumerate(self._threads):
            self._remaining.append(begun + 1)
            try:
                thread.start()
            except RuntimeError as error:
                if thread.ident is not None:  # it runs: an interrupt came in between
                    raise
                self._go()
                del self._threads[begun:]
                if not begun:
                    raise Unavailable(
                        f"no reader thread could be started: {error}. The system's limit of threads is reached (ulimit "
                        f"-u, or pids.max of the container), or memory for their stacks is"
                    ) from error

    def resize(self, threads: int) -> int:
        """Read with so many from now on, or as many as the system has; those too many end after their read."""
        running = [thread for thread in self._threads if thread.is_alive()]
        self._size = threads
        for number in range(len(running), threads):
            thread = self._thread(number)
            self._remaining.append(len(self._remaining))
            try:
                thread.start()
            except RuntimeError:  # the system has no more: those that run go on
                if thread.ident is None:
                    self._go()
                    self._size = number
                    break
                raise
            self._threads.append(thread)
        return self._size

    def _thread(self, number: int) -> threading.Thread:
        return threading.Thread(target=self._work, args=(number,), name=f"penstock-reader-{number}", daemon=True)

    def leave(self) -> None:
        """Some of those it reads for need no more. With the last of them the threads end, and everything is let go."""
        self._gone += 1
        if self._gone < len(self._members):
            return
        self._stopping.is_set = True
        self.bell.put(None)
        self._go()
        self.wait(END_WITHIN_S)

    def wait(self, seconds: float) -> None:
        """Until the threads have ended, but no longer than that."""
        # The collector ends iterations wherever it happens to run, and no thread can wait for itself.
        if threading.current_thread() in self._threads:
            return
        until = time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None:  # or else it was never started
                thread.join(max(0.0, until - time.monotonic()))

    def _go(self) -> None:
        """A thread, or all those they read for, are gone; the last lets go of everything."""
        if self._remaining.pop() == 0:
            for readers in self._members:
                readers.let_go()

    def _work(self, number: int) -> None:
        try:
            memory.prepare(max(readers.scratch_bytes for readers in self._members))
            stopping.watch(self._stopping)
            while number < self._size and (work := self._next()) is not None:
                readers, read = work
                readers.do(read)
        except BaseException as error:  # whatever it is, the caller must hear of it
            for readers in self._members:
                readers.fail(error)
        finally:
            memory.release()
            self._go()

    def _next(self) -> tuple["Readers", Read] | None:
        """The next read and whose it is; waits for slots where nobody has one."""
        with self._turn:
            while not self._stopping.is_set:
                while not self.bell.empty():  # whatever became free by now is seen by what follows
                    self.bell.get()
                able = [readers for readers in self._members if readers.can_go_on()]
                if able:
                    first = min(able, key=Readers.wanted_at)
                    return first, first.take()
                if all(readers.all_taken for readers in self._members):
                    return None
                began = time.perf_counter()
                self.bell.get()
                for readers in self._members:
                    readers.times.waiting_for_slots += time.perf_counter() - began
        return None


class Readers:
    """One epoch of one dataset, read by a team's threads.

    ``wanted_at`` says when a step's batch will be wanted, on a scale that all who share the team go by.
    """

    def __init__(
        self,
        store: Store,
        epoch: Epoch,
        plan: Plan,
        slots: Slots,
        team: Team,
        *,
        wanted_at: Callable[[int], float] = float,
        skip: bool = False,
        nan: Nan = "pass",
    ) -> None:
        self.store, self.epoch, self.plan, self.slots = store, epoch, plan, slots
        self._team, self._wanted_at, self._skip, self._nan = team, wanted_at, skip, nan
        self._floats = [name for name, spec in store.fields.items() if nan != "pass" and spec.dtype.kind in "fc"]
        self.times = ReaderTimes()
        self.scratch_bytes = store.scratch_bytes(plan.rows_per_read)
        self.all_taken = False
        self._counting = threading.Lock()
        self._reads = reads(epoch, plan, slots.take, later(store, plan))
        self._next_read: Read | None = None
        self._done: SimpleQueue[list[Batch] | BaseException] = SimpleQueue()
        self._ready: dict[int, Batch] = {}
        self._stopped = False
        self.gone = False
        """Whether the threads have ended, so that nobody writes to the slots."""
        slots.ring(team.bell)
        team.join(self)

    def get(self, step: int) -> Batch:
        """The batch of this step, when it is there. Its slot is then the caller's to lend or give back."""
        while step not in self._ready:
            self._receive(self._done.get())
        return self._hand_over(step)

    def get_if_ready(self, step: int, wait_s: float = 0) -> Batch | None:
        """The same without waiting, or without waiting longer than that for anything to be done."""
        try:
            while step not in self._ready:
                self._receive(self._done.get(timeout=wait_s) if wait_s else self._done.get_nowait())
        except Empty:
            return None
        return self._hand_over(step)

    def stop(self) -> None:
        """End the threads, unless they read for others still. Safe to call twice."""
        if not self._stopped:
            self._stopped = True
            self._team.leave()

    def let_go(self) -> None:
        """Close the files; the threads have ended."""
        self.gone = True
        self.store.close()

    def can_go_on(self) -> bool:
        """Whether there is a next read that has its slots."""
        if self._next_read is None and not self.all_taken:
            try:
                self._next_read = next(self._reads)
            except StopIteration:
                self.all_taken = True
        return self._next_read is not None

    def wanted_at(self) -> float:
        """When the next read is wanted."""
        assert self._next_read is not None
        return self._wanted_at(min(part.batch.step for part in self._next_read.parts))

    def take(self) -> Read:
        """The next read, to be done."""
        assert self._next_read is not None
        read, self._next_read = self._next_read, None
        return read

    def do(self, read: Read) -> None:
        """Read it, and post the batches that are whole now."""
        began, began_computing = time.perf_counter(), time.thread_time()
        self._fill(read)
        self._post(read, time.perf_counter() - began, time.thread_time() - began_computing)

    def fail(self, error: BaseException) -> None:
        """Tell whoever waits for a batch that a thread has ended."""
        self._done.put(error)

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
        return self._ready.pop(step)

    def _fill(self, read: Read) -> None:
        for parts in self._together(read):
            try:
                self._read(parts, read.fields, read.share)
            except BaseException as error:
                if self._skip and isinstance(error, BAD_INPUT):
                    self._sort_out(parts, read.fields)
                elif len(parts) == 1:
                    parts[0].batch.error = _told(error)
                else:  # find out whose error it is: the other batches are whole
                    for part in parts:
                        self._fill(replace(read, parts=[part]))

    def _sort_out(self, parts: list[Part], fields: Sequence[str] | None) -> None:
        """Find the samples that cannot be read, by halves, and read all others."""
        if len(parts) > 1:
            for part in parts:
                self._halve(part, fields)
        else:
            part = parts[0]
            if len(part.rows) == 1:
                self._halve(part, fields)
                return
            middle = len(part.rows) // 2
            for half in (slice(None, middle), slice(middle, None)):
                self._halve(Part(part.batch, part.rows[half], part.places[half]), fields)

    def _halve(self, part: Part, fields: Sequence[str] | None) -> None:
        try:
            self._read([part], fields)
        except BAD_INPUT as error:
            if len(part.rows) == 1:
                part.batch.left_out.append((int(part.places[0]), error))
            else:
                self._sort_out([part], fields)
        except BaseException as error:
            part.batch.error = _told(error)

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

    def _read(self, parts: list[Part], fields: Sequence[str] | None, share: Share = WHOLE) -> None:
        arrays = self.slots.memory(parts[0].batch.slot)[0]
        if fields is not None:
            arrays = {name: arrays[name] for name in fields}
        rows = np.concatenate([part.rows for part in parts])
        at = np.concatenate([part.places + self.slots.memory(part.batch.slot)[1] for part in parts])
        read_share(self.store, rows, at, arrays, share)

    def _look_at(self, batch: Batch) -> None:
        """Count what is NaN or infinite in a batch that is whole, or take it for bad input."""
        arrays, first = self.slots.memory(batch.slot)
        gone = {place for place, _ in batch.left_out}
        for name in self._floats:
            found = not_finite(arrays[name][first : first + len(batch.rows)])
            found = {place: count for place, count in found.items() if place not in gone}
            if not found:
                continue
            if self._nan == "count":
                batch.not_finite[name] = sum(found.values())
                continue
            errors = [(place, self._is_not_finite(int(batch.rows[place]), name, found[place])) for place in found]
            if not self._skip:
                batch.error = errors[0][1]
                return
            batch.left_out += errors
            gone |= found.keys()

    def _is_not_finite(self, row: int, name: str, count: int) -> DataError:
        values = "a value that is" if count == 1 else f"{count:,} values that are"
        return DataError(
            f'{self.store.origin(row)}: field {name!r} of row {row} has {values} NaN or infinite, and nan="raise". '
            f'nan="count" delivers and counts them; on_error="skip" leaves such samples out'
        )

    def _post(self, read: Read, seconds: float, computing: float) -> None:
        counted = tally.collect()
        with self._counting:
            self.times.reading += seconds
            self.times.computing += computing
            if not read.again:
                self.times.rows += sum(len(part.rows) for part in read.parts) / read.share[1]
            self.times.counted.add(counted)
            for part in read.parts:
                part.batch.reads_left -= 1
            whole = [part.batch for part in read.parts if part.batch.reads_left == 0]
        if whole and self._floats:
            began = time.perf_counter()
            for batch in whole:
                if batch.error is None:
                    self._look_at(batch)
            with self._counting:
                self.times.reading += time.perf_counter() - began
        if whole:
            self._done.put(whole)


def later(store: Store, plan: Plan) -> Later | None:
    """What need not be read with its block, where that is enough to be worth reads of its own."""
    if not plan.window_rows:
        return None
    free = [name for name in store.fields if name in free_fields(store)]
    blocked = [name for name in store.fields if name not in free]
    batch_bytes = plan.batch_rows * sum(store.fields[name].row_bytes for name in free)
    if not blocked or batch_bytes < LATER_FROM_BYTES:
        return None
    shared = -(-plan.batch_rows // plan.threads) if batch_bytes > SHARE_ABOVE_BYTES else plan.batch_rows
    return Later(tuple(blocked), tuple(free), min(shared, plan.rows_per_read))  # what scratch was planned for


def _told(error: BaseException) -> Exception:
    """What the caller hears of it: nothing that is raised in a thread is meant to end the caller's program."""
    if isinstance(error, Exception):
        return error
    died = WorkerDied(f"{type(error).__name__} was raised in a reader thread: {error}")
    died.__cause__ = error
    return died
