"""Does reads: fills slots from a store, and finds the samples that cannot be read.

The same code runs in threads of the training process and in reader processes.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import field

import numpy as np

from penstock.base import counters
from penstock.base import stop as stopping
from penstock.base.counters import Counters
from penstock.base.dataclass import dataclass
from penstock.dataset.store import Out, StoreBase
from penstock.errors import DataError, SourceError, WorkerDied
from penstock.loader.schedule import BatchRows, Read
from penstock.read.pieces import Share

BAD_INPUT = (DataError, SourceError)
"""Faults of a sample, as opposed to faults of the program."""

Arrays = dict[str, np.ndarray]
SlotMemory = Callable[[int], tuple[Arrays, int]]
"""From a slot's number to the arrays that hold it, and the row of them at which it begins."""


@dataclass
class ReadCosts:
    """What one read took; times in seconds."""

    reading: float = 0.0
    computing: float = 0.0
    """Of reading: on a core, rather than waiting."""
    tally: Counters = field(default_factory=Counters)
    """What was read and decoded."""

    def add(self, other: "ReadCosts") -> None:
        """Add the costs of another read."""
        self.reading += other.reading
        self.computing += other.computing
        self.tally.add(other.tally)


class SlotWriter:
    """Fills slots from one store. Faults are recorded in the batches that they belong to."""

    def __init__(self, store: StoreBase, memory: SlotMemory, *, skip: bool) -> None:
        self._store, self._memory, self._skip = store, memory, skip

    def do(self, read: Read) -> ReadCosts:
        """Do a read, and measure it."""
        began, began_computing = time.perf_counter(), time.thread_time()
        for first, last, arrays, begins in self._groups(read):
            failed: BaseException | None = None
            try:  # without a call in between: reads are many, and deep
                self._store.read(*self._arguments(read, first, last, arrays, begins))
            except BaseException as error:
                failed = error
            if failed is not None:  # outside of "except": reading again would show this error in every traceback
                self._record_error(failed, read, first, last)
        reading, computing = time.perf_counter() - began, time.thread_time() - began_computing
        return ReadCosts(reading, computing, counters.collect())

    def _record_error(self, error: BaseException, read: Read, first: int, last: int) -> None:
        """Find out which of these batches, or which of their samples, an error belongs to."""
        if stopping.is_asked():  # these batches are not needed any more
            return
        is_alone = last - first == 1
        if self._skip and isinstance(error, BAD_INPUT):
            for number in range(first, last):
                self._skip_bad(read.of_batch(number), read.fields, known_bad=is_alone)
        elif is_alone:
            read.batches[first].error = _as_exception(error)
        else:
            for number in range(first, last):
                try:
                    self._read_one(read, number)
                except BaseException as own:
                    self._record_error(own, read, number, number + 1)

    def _groups(self, read: Read) -> Iterator[tuple[int, int, Arrays, list[int]]]:
        """Batches that one call can fill: in the same arrays and, unless scattered, one after another.

        The first and the last of them, their arrays, and the row of these at which each begins.
        """
        first, before, begins, end = 0, None, [], 0
        for number, batch in enumerate(read.batches):
            arrays, begin = self._memory(batch.slot)
            if before is not None and not (before is arrays and (read.scattered or end == begin)):
                yield first, number, before, begins
                first, begins = number, []
            begins.append(begin)
            before, end = arrays, begin + read.bounds[number + 1] - read.bounds[number]
        if before is not None:
            yield first, len(read.batches), before, begins

    def _arguments(
        self, read: Read, first: int, last: int, arrays: Arrays, begins: list[int]
    ) -> tuple[np.ndarray, np.ndarray, Out, Share]:
        """What the store needs to read these batches: rows, places, memory, and the share of a read."""
        bounds = read.bounds[first : last + 1]
        rows, places = read.rows[bounds[0] : bounds[-1]], read.places[bounds[0] : bounds[-1]]
        offsets = begins[0] if len(begins) == 1 else np.repeat(np.array(begins), np.diff(bounds))
        if read.fields is not None:
            arrays = {name: arrays[name] for name in read.fields}
        return rows, np.add(places, offsets, dtype=np.int64), arrays, read.share

    def _read_one(self, read: Read, number: int) -> None:
        """Read what belongs to one of the batches."""
        arrays, begin = self._memory(read.batches[number].slot)
        self._store.read(*self._arguments(read, number, number + 1, arrays, [begin]))

    def _skip_bad(self, part: BatchRows, fields: tuple[str, ...] | None, *, known_bad: bool = False) -> None:
        """Read the samples that can be read, and leave out the others, which are found by halves."""
        if stopping.is_asked():
            return
        if known_bad and len(part.rows) > 1:
            middle = len(part.rows) // 2
            for half in (slice(None, middle), slice(middle, None)):
                self._skip_bad(BatchRows(part.batch, part.rows[half], part.places[half]), fields)
            return
        try:
            bounds = (0, len(part.rows))
            again = Read(batches=[part.batch], rows=part.rows, places=part.places, bounds=bounds, fields=fields)
            self._read_one(again, 0)
        except BAD_INPUT as error:
            if len(part.rows) == 1:
                part.batch.leave_out((int(part.places[0]), error))
            else:
                self._skip_bad(part, fields, known_bad=True)
        except BaseException as error:
            part.batch.error = _as_exception(error)


def _as_exception(error: BaseException) -> Exception:
    """The error that the caller gets: an exit in a thread must not end the caller's program."""
    if isinstance(error, Exception):
        return error
    died = WorkerDied(f"{type(error).__name__} was raised in a reader thread: {error}")
    died.__cause__ = error
    return died
