"""One epoch of one dataset: takes reads from the schedule, fills slots, and posts the batches that are complete.

Slots go to batches in order, so the batch that the caller waits for always has one. Results and errors travel to the
caller with their step; an error is raised where its batch would have come.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from queue import Empty, SimpleQueue

import numpy as np

from penstock.base import counters, scratch
from penstock.base.counters import Counters
from penstock.base.dataclass import dataclass
from penstock.base.dtypes import is_inexact
from penstock.base.sizes import MiB
from penstock.dataset.store import StoreBase
from penstock.errors import DataError, WorkerDied
from penstock.loader.connection import ReaderConnection
from penstock.loader.nonfinite import Nan, not_finite
from penstock.loader.plan import SHARE_ABOVE_BYTES, Plan
from penstock.loader.processes import NoReader, ReaderDied
from penstock.loader.schedule import Batch, BatchRows, DeferredFields, Epoch, Read, reads
from penstock.loader.slot_writer import ReadCosts, SlotWriter
from penstock.loader.slots import Slots
from penstock.loader.team import Team
from penstock.loader.wire import ReadAnswer, ReadTask, SharedBlock

_DIED_WAY_OUT = (
    "A decoder or a function of yours crashes there, or there is too little memory: "
    'on_error="skip" leaves such samples out, and processes=0 reads in this process, where a debugger sees it'
)

# A sample is blamed if so many processes in a row die while they read nothing else: any may die for another reason.
SAMPLE_DEATHS = 3

# The schedule of a window this large is returned to the system at the end of an epoch, which takes milliseconds.
TRIM_FROM_ROWS = 10_000

# Fields that need not come with their blocks are read separately where a batch has this much of them.
DEFER_FROM_BYTES = 1 * MiB


@dataclass
class ReadCounts:
    """What reading an epoch took, summed over threads; times in seconds."""

    reading: float = 0.0
    computing: float = 0.0
    """Of reading: on a core, rather than waiting."""
    waiting_for_slots: float = 0.0
    tally: Counters = field(default_factory=Counters)
    """What was read and decoded."""
    rows: float = 0.0
    """Rows read; some of them may belong to batches that are not complete yet."""
    delivered: int = 0
    """Samples handed to the caller."""


@dataclass(frozen=True)
class Faults:
    """What to do about samples that cannot be read, and about values that are not finite."""

    skip: bool = False
    nan: Nan = "pass"
    most: int | None = None
    """Skip no more samples than this in an epoch."""


class Readers:
    """Reads one epoch of one dataset with a team's threads.

    ``wanted_at`` says when a step's batch will be wanted, on a scale shared by all datasets of the team.
    """

    def __init__(
        self,
        store: StoreBase,
        epoch: Epoch,
        plan: Plan,
        slots: Slots,
        team: Team,
        *,
        wanted_at: Callable[[int], float] = float,
        faults: Faults = Faults(),
        number: int = 0,
    ) -> None:
        self.store, self.epoch, self.plan, self.slots = store, epoch, plan, slots
        self._team, self._wanted_at, self.faults = team, wanted_at, faults
        self.number = number
        """Which of the loader's datasets this is."""
        self.writer = SlotWriter(store, slots.memory, skip=faults.skip)
        self._floats = [name for name, spec in store.fields.items() if faults.nan != "pass" and is_inexact(spec.dtype)]
        self.counts = ReadCounts()
        self._shared = SharedBlock(slots.key, slots.rows, slots.planned)
        self.scratch_bytes = store.scratch_bytes(plan.rows_per_read)
        self.all_taken = False
        self._counting = threading.Lock()
        self._reads = reads(epoch, plan, slots.take, deferred_fields(store, plan))
        self._next_read: Read | None = None
        self._posted: SimpleQueue[list[Batch] | BaseException] = SimpleQueue()
        self._complete: dict[int, Batch] = {}
        self._killer: Exception | None = None
        """A sample that no process survives, if it is not to be left out: its batch is the last one."""
        self._stopped = False
        self.have_ended = False
        """Whether the threads have ended, so that nothing writes to the slots."""
        slots.wake(team.wake_ups)
        team.join(self)

    # For the caller's thread.

    def get_if_ready(self, step: int, wait_s: float = 0) -> Batch | None:
        """The batch of this step if it is complete; waits no longer than that for it.

        Its slot is then the caller's to lend or give back.
        """
        is_under_way = self._team.exchange(0)
        self._receive_all()
        if step not in self._complete and not (wait_s and self._wait_for(step, wait_s, is_under_way)):
            return None
        return self._complete.pop(step)

    def _wait_for(self, step: int, wait_s: float, is_under_way: bool) -> bool:
        """Wait until the batch of this step is complete, no longer than that; returns whether it is."""
        until = time.monotonic() + wait_s
        while step not in self._complete and (left := until - time.monotonic()) > 0:
            if is_under_way:
                is_under_way = self._team.exchange(left)
            else:
                self.slots.wake_at_once()  # the last read of an epoch may need fewer slots than threads wake for
                with suppress(Empty):
                    self._receive(self._posted.get(timeout=left))
                is_under_way = self._team.exchange(0)
            self._receive_all()
        return step in self._complete

    def stop(self) -> None:
        """End the threads, unless they still read for others. Safe to call twice."""
        if not self._stopped:
            self._stopped = True
            self.fail(WorkerDied("reading was ended"))  # another thread may wait for a batch
            self._team.leave()

    def _receive_all(self) -> None:
        while not self._posted.empty():  # nobody else takes from it
            self._receive(self._posted.get_nowait())

    def _receive(self, posted: list[Batch] | BaseException) -> None:
        if isinstance(posted, BaseException):
            self._posted.put(posted)
            raise WorkerDied(
                f"a reader thread ended: {type(posted).__name__}: {posted}. Batches delivered so far are right; "
                f"load the loader's last state_dict to continue from there"
            ) from posted
        for batch in posted:
            self._complete[batch.step] = batch

    # For the team.

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
        return self._wanted_at(self._next_read.batches[0].step)

    def take(self) -> Read:
        """The next read, to be done."""
        assert self._next_read is not None
        read, self._next_read = self._next_read, None
        return read

    def can_send(self, read: Read) -> bool:
        """Whether other processes can write to its slots: those added beyond the plan are this process's alone."""
        return self.slots.descriptor is not None and all(batch.slot < self.slots.planned for batch in read.batches)

    def fail(self, error: BaseException) -> None:
        """Let the caller's ``get`` raise: a thread has ended."""
        self._posted.put(error)

    def close_files(self) -> None:
        """Close the files, and free the schedule, whose windows may be large; the threads have ended."""
        self.have_ended = True
        self._reads, self._next_read = iter(()), None
        if self.plan.window_rows >= TRIM_FROM_ROWS:
            scratch.trim()
        self.store.close()

    # Reads in other processes.

    def task(self, read: Read, generation: int, *, is_look: bool = False) -> ReadTask:
        """A read as it is sent to a process."""
        return ReadTask(
            generation=generation, source=self.number, seed=self.epoch.seed, epoch=self.epoch.number,
            slots=[batch.slot for batch in read.batches], rows=np.asarray(read.rows, np.int64).tobytes(),
            places=np.asarray(read.places, np.int64).tobytes(), bounds=read.bounds,
            scattered=read.scattered, share=read.share, fields=read.fields, scratch_bytes=self.scratch_bytes,
            is_watched=counters.is_watched(), is_look=is_look, memory=self._shared,
        )  # fmt: skip

    def take_answer(self, read: Read, answer: ReadAnswer, *, is_look: bool) -> Sequence[Read]:
        """Take in what came of a read, and post the batches that are complete now; returns the looks to send next.

        A look finds values that are NaN or infinite in a complete batch, in the process that has them in its cache.
        """
        if is_look:
            if answer.errors:
                self.look_here(read)
            else:
                self._post_looked_at(read.batches[0], answer.not_finite)
            return ()
        complete = self._count(read, self._take_in(read, answer))
        if not self._floats:
            if complete:
                self._posted.put(complete)
            return ()
        self._posted.put([batch for batch in complete if batch.error is not None])
        return [self._look(batch) for batch in complete if batch.error is None]

    def _look(self, batch: Batch) -> Read:
        bounds, fields = (0, len(batch.rows)), tuple(self._floats)
        return Read(batches=[batch], rows=batch.rows, places=batch.rows[:0], bounds=bounds, fields=fields)

    def look_here(self, look: Read) -> None:
        """Look for values that are NaN or infinite in this process."""
        (batch,) = look.batches
        self._post_looked_at(batch, self._not_finite(batch))

    def do_again(self, read: Read, connection: ReaderConnection, generation: int) -> None:
        """Do a read again that may have killed its processes, and find the sample that did."""
        assert self.slots.descriptor is not None
        costs = ReadCosts()
        if self._killer is not None:  # which ends the loop before these batches come
            for batch in read.batches:
                batch.error = self._killer
            self.post(read, costs)
            return
        try:
            costs = self._take_in(read, connection.do_alone(self.task(read, generation), self.slots.descriptor))
        except ReaderDied:
            for number in range(len(read.batches)):
                self._find_killer(read, read.of_batch(number), connection, generation, costs)
        except NoReader as error:  # it may kill: it is not done here
            for batch in read.batches:
                batch.error = error
        self.post(read, costs)

    def _take_in(self, read: Read, answer: ReadAnswer) -> ReadCosts:
        """Record the result of a read in its batches; returns what it cost."""
        for number, error in answer.errors.items():
            read.batches[number].error = error.rebuild()
        for number, found in answer.left_out.items():
            read.batches[number].leave_out(*((place, error.rebuild()) for place, error in found))
        for note in answer.notes:
            counters.note(*note)
        for name, values in (answer.objects or {}).items():
            arrays, _ = self.slots.memory(read.batches[0].slot)
            begins = [self.slots.memory(batch.slot)[1] for batch in read.batches]
            at = read.places + np.repeat(np.array(begins), np.diff(read.bounds))
            for place, value in zip(at.tolist(), values, strict=True):
                arrays[name][place] = value
        return ReadCosts(answer.reading, answer.computing, answer.tally)

    def _find_killer(
        self, read: Read, part: BatchRows, connection: ReaderConnection, generation: int, costs: ReadCosts
    ) -> None:
        """Do part of a read that kills processes, by halves, down to the sample that no process survives."""
        if self._killer is not None:
            part.batch.error = self._killer
            return
        assert self.slots.descriptor is not None
        some = replace(read, batches=[part.batch], rows=part.rows, places=part.places, bounds=(0, len(part.rows)))
        deaths = SAMPLE_DEATHS if len(part.rows) == 1 else 1
        try:
            answer = connection.do_alone(self.task(some, generation), self.slots.descriptor, deaths=deaths)
            costs.add(self._take_in(some, answer))
        except ReaderDied as died:
            if len(part.rows) == 1:
                self._give_up(part, died)
                return
            middle = len(part.rows) // 2
            for half in (slice(None, middle), slice(middle, None)):
                one_half = BatchRows(part.batch, part.rows[half], part.places[half])
                self._find_killer(read, one_half, connection, generation, costs)
        except NoReader as error:
            part.batch.error = error

    def _give_up(self, part: BatchRows, died: ReaderDied) -> None:
        """A sample that no process survives: leave it out, or let its batch raise."""
        row = int(part.rows[0])
        error = WorkerDied(f"{self.store.origin(row)}: {died}: row {row}. {_DIED_WAY_OUT}")
        if self.faults.skip:
            part.batch.leave_out((int(part.places[0]), error))
        else:
            part.batch.error = self._killer = error

    # Complete batches.

    def post(self, read: Read, costs: ReadCosts) -> None:
        """Take in a read that was done, and post the batches that are complete now."""
        complete = self._count(read, costs)
        if complete and self._floats:
            began = time.perf_counter()
            for batch in complete:
                if batch.error is None:
                    self._check_finite(batch, self._not_finite(batch))
            with self._counting:
                self.counts.reading += time.perf_counter() - began
        if complete:
            self._posted.put(complete)

    def _count(self, read: Read, costs: ReadCosts) -> list[Batch]:
        """Count a read; returns the batches that are complete now."""
        with self._counting:
            self.counts.reading += costs.reading
            self.counts.computing += costs.computing
            if not read.again:
                self.counts.rows += len(read.rows) / read.share[1]
            self.counts.tally.add(costs.tally)
            for batch in read.batches:
                batch.reads_left -= 1
            return [batch for batch in read.batches if batch.reads_left == 0]

    def _post_looked_at(self, batch: Batch, found: Mapping[str, dict[int, int]]) -> None:
        self._check_finite(batch, found)
        self._posted.put([batch])

    def _not_finite(self, batch: Batch) -> dict[str, dict[int, int]]:
        """How many values of each row are NaN or infinite, by field."""
        arrays, first = self.slots.memory(batch.slot)
        return {name: not_finite(arrays[name][first : first + len(batch.rows)]) for name in self._floats}

    def _check_finite(self, batch: Batch, not_finite: Mapping[str, dict[int, int]]) -> None:
        """Count the values of a complete batch that are NaN or infinite, or treat their samples as unreadable."""
        left_out = {place for place, _ in batch.left_out}
        for name, places in not_finite.items():
            found = {place: count for place, count in places.items() if place not in left_out}
            if not found:
                continue
            if self.faults.nan == "count":
                batch.not_finite = {**(batch.not_finite or {}), name: sum(found.values())}
                continue
            errors = [(place, self._is_not_finite(int(batch.rows[place]), name, found[place])) for place in found]
            if not self.faults.skip:
                batch.error = errors[0][1]
                return
            batch.leave_out(*errors)
            left_out |= found.keys()

    def _is_not_finite(self, row: int, name: str, count: int) -> DataError:
        values = "a value that is" if count == 1 else f"{count:,} values that are"
        return DataError(
            f'{self.store.origin(row)}: field {name!r} of row {row} has {values} NaN or infinite, and nan="raise". '
            f'nan="count" delivers and counts them; on_error="skip" leaves such samples out'
        )


def deferred_fields(store: StoreBase, plan: Plan) -> DeferredFields | None:
    """The fields that need not be read with their block, where they are large enough to be worth extra reads."""
    if not plan.window_rows:
        return None
    free = [name for name in store.fields if name in store.free_fields]
    blocked = [name for name in store.fields if name not in free]
    batch_bytes = plan.batch_rows * sum(store.fields[name].row_bytes for name in free)
    if not blocked or batch_bytes < DEFER_FROM_BYTES:
        return None
    shared = -(-plan.batch_rows // plan.threads) if batch_bytes > SHARE_ABOVE_BYTES else plan.batch_rows
    rows = min(shared, plan.rows_per_read, store.rows_at_once)  # scratch was planned for that many rows per read
    return DeferredFields(tuple(blocked), tuple(free), rows)
