"""One epoch of a loader, step by step."""

import os
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from penstock.base import stop
from penstock.base.dataclass import dataclass
from penstock.base.fork import ReentrantLock
from penstock.base.progress import Bar
from penstock.base.spec import row_bytes
from penstock.dataset.store import describe_rows
from penstock.errors import ConfigError, StateMismatch, WorkerDied
from penstock.loader.interleave import Interleaved
from penstock.loader.outputs import HandOver, Output
from penstock.loader.plan_text import prefix
from penstock.loader.readers import Readers
from penstock.loader.schedule import Batch
from penstock.loader.source import Source
from penstock.loader.state import Position
from penstock.loader.stats import MEMORY_EVERY_S, LeftOut, Meter, Stats
from penstock.loader.team import Team
from penstock.loader.tuning import Tuner, TuningCounts


class EpochIterator:
    """What ``iter(loader)`` returns: the epoch begins with the first ``next``; threads that share it take turns."""

    def __init__(self, begin: Callable[[], Iterator[Any]], turn: ReentrantLock) -> None:
        self._begin, self._turn = begin, turn
        self._steps: Iterator[Any] | None = None

    def __iter__(self) -> "EpochIterator":
        return self

    def __next__(self) -> Any:
        with self._turn:
            if self._steps is None:
                self._steps = self._begin()
            return next(self._steps)

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigError(
            "an iteration under way cannot be pickled or copied: its threads and files belong to this process. Send "
            "loader.state_dict(), and load it into a loader made there"
        )


class DatasetBatches:
    """The batches of one dataset in one epoch. When it ends, for whatever reason, so do its threads and files.

    more_slots:  called when slots were added because the caller keeps batches
    """

    def __init__(
        self, name: str, source: Source, readers: Readers, meter: Meter, more_slots: Callable[[], None]
    ) -> None:
        self.source, self.readers = source, readers
        self._prefix = prefix(name)
        self._meter, self._more_slots = meter, more_slots
        self._partition, self._output = readers.epoch.partition, source.output
        self._steps, self._together = self._partition.steps, readers.plan.batches_filled_together
        self._started: deque[tuple[HandOver, np.ndarray]] = deque()
        self._next_start = self._next_delivery = 0
        self._left_out = 0
        self._failed: Batch | None = None
        """The next batch, if it is known to have failed."""
        self.row_bytes = row_bytes(readers.store.fields)
        self._finalizer = weakref.finalize(self, stop.call_in_finalizer, _shut_down, readers, self._output, os.getpid())

    @property
    def is_open(self) -> bool:
        """Whether it was not ended, neither by ``end`` nor by the end of the interpreter."""
        return self._finalizer.alive

    @property
    def steps_left(self) -> int:
        return self._steps - self._next_delivery

    @property
    def position(self) -> int:
        """Samples of the epoch that all ranks together have delivered."""
        return self._partition.position_after(self._next_delivery)

    def deliver(self) -> tuple[Any, int]:
        """The next batch, and how many samples it has."""
        readers = self.readers
        left = self._together if readers.plan.is_tight else self._steps - self._next_start
        if readers.slots.ensure(min(self._together, left)):
            self._more_slots()
        if not self._started:
            self._start(wait=True)
        hand_over, rows = self._started.popleft()
        while len(self._started) < self._output.spare_slots and self._start(wait=False):
            pass
        batch = self.source.shape(hand_over(), rows)
        self._next_delivery += 1
        readers.counts.delivered += len(rows)
        return batch, len(rows)

    def pass_over(self, wait_s: float) -> int:
        """Drop the batches that are ready, waiting no longer than that for one; how many samples they had."""
        samples, readers = 0, self.readers
        while self._next_start < self._steps:
            batch = readers.get_if_ready(self._next_start, 0 if samples else wait_s)
            if batch is None:
                break
            readers.slots.give_back(batch.slot)
            if batch.error is not None:
                raise batch.error
            samples += len(batch.rows)
            self._next_start += 1
            self._next_delivery += 1
        return samples

    def end(self) -> None:
        """End the threads, unless they still read for others."""
        self._started.clear()
        if self._finalizer.detach():
            _shut_down(self.readers, self._output, os.getpid())

    def _start(self, *, wait: bool) -> bool:
        """Begin to deliver the next batch, if there is one and it is ready or worth waiting for."""
        if self._next_start >= self._steps:
            return False
        readers = self.readers
        batch, self._failed = self._failed, None
        if batch is None:
            batch = self._wait() if wait else readers.get_if_ready(self._next_start)
        if batch is None:
            return False
        if batch.error is not None and not wait:  # raised where it would have come, after those before it
            self._failed = batch
            return False
        if batch.error is not None:
            readers.slots.give_back(batch.slot)
            batch.error.add_note(
                f"while reading batch {batch.step} of epoch {readers.epoch.number}, rows {describe_rows(batch.rows)}"
            )
            raise batch.error
        arrays, rows = readers.slots.lend(batch.slot, len(batch.rows)), batch.rows
        if batch.left_out:
            arrays, rows = self._without_bad(batch, arrays)
        if batch.not_finite:
            self._meter.not_finite.update({self._prefix + name: count for name, count in batch.not_finite.items()})
        self._started.append((self._output.start(arrays, rows), rows))
        self._next_start += 1
        return True

    def _wait(self) -> Batch:
        """The next batch. Threads that are waited for may hold more than they do whenever a batch is complete."""
        while (batch := self.readers.get_if_ready(self._next_start, MEMORY_EVERY_S)) is None:
            self._meter.look()
        return batch

    def _without_bad(self, batch: Batch, arrays: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """A batch without the samples that could not be read; the others move up."""
        most = self.readers.faults.most
        for place, error in sorted(dict(batch.left_out).items()):  # threads that share a read may each report it
            row = int(batch.rows[place])
            origin = self.source.origin(row)
            self._meter.leave_out(LeftOut(row, origin.url, self._prefix + origin.key, str(error)))
            self._left_out += 1
            if most is not None and self._left_out > most:
                error.add_note(f"more than max_errors={most} samples could not be read in this epoch; this is the next")
                raise error
        kept = np.delete(np.arange(len(batch.rows)), [place for place, _ in batch.left_out])
        for array in arrays.values():
            for to, place in enumerate(kept.tolist()):
                if to != place:
                    array[to : to + 1] = array[place : place + 1]
        return {name: array[: len(kept)] for name, array in arrays.items()}, batch.rows[kept]


def _shut_down(readers: Readers, output: Output, process: int) -> None:
    if process == os.getpid():
        output.finish()
        readers.stop()


@dataclass(frozen=True)
class Watchers:
    """What follows an epoch from step to step: the counts, and the number of threads."""

    meter: Meter
    tuner: Tuner
    team: Team


class Steps(ABC):
    """One epoch of all datasets of a loader, step by step."""

    def __init__(self, streams: Mapping[str, DatasetBatches], position: Position, watchers: Watchers) -> None:
        self.streams = streams
        self._position, self._watchers = position, watchers
        self._first = next(iter(streams.values()))
        self._has_one_rank = self._first.source.partition.world_size == 1
        self._process = os.getpid()
        self._bar: tuple[Bar, Callable[[], Stats]] | None = None
        self._why_ended = ""
        self._is_over = False

    @property
    @abstractmethod
    def left(self) -> int:
        """Steps that remain."""

    @abstractmethod
    def _take(self) -> tuple[Any, int, int]:
        """The next step, how many samples it has, and how many bytes; ``StopIteration`` at the end."""

    def _positions(self) -> dict[str, int]:
        """Samples that all ranks together have delivered, by dataset."""
        return {name: stream.position for name, stream in self.streams.items()}

    def __iter__(self) -> "Steps":
        return self

    def __next__(self) -> Any:
        self._check_alive()
        while True:
            began = time.perf_counter()
            try:
                step, samples, bytes_ = self._take()
            except BaseException as error:
                self._close(is_complete=isinstance(error, StopIteration))
                if self._why_ended:  # by another thread
                    raise StateMismatch(self._why_ended) from error
                raise
            self._position.samples = self._positions()
            watchers = self._watchers
            watchers.meter.count(samples, bytes_, began)
            if watchers.tuner.is_due(watchers.meter.latest):
                self._tune()
            if self._bar is not None:
                self._bar[0].add(1)
            if samples or not self._has_one_rank:  # or else nothing of it could be read, and no other rank waits for us
                return step

    def show(self, bar: Bar, stats: Callable[[], Stats]) -> None:
        """Show the progress of the epoch on this bar, and a summary at its end."""
        self._bar = bar, stats

    def end(self, why: str) -> None:
        """End now; asking for another step raises this reason."""
        if not self._is_over:
            self._why_ended = why
            self._close(is_complete=False)

    def _check_alive(self) -> None:
        if self._why_ended:
            raise StateMismatch(self._why_ended)
        if self._process != os.getpid():
            raise ConfigError(
                f"this iteration began in process {self._process}, and a forked child has none of its threads. Begin "
                f"one here: iter(loader), after loader.load_state_dict(…) if it should continue; or fork before"
            )
        if self._is_over:
            raise StopIteration
        if not self._first.is_open:
            raise WorkerDied("Python is ending, and so have the reader threads: read what you need before that")

    def _close(self, *, is_complete: bool) -> None:
        self._is_over = True
        for stream in self.streams.values():
            stream.end()
        shown, self._bar = self._bar, None
        if shown is not None:
            bar, stats = shown
            bar.close()
            if is_complete:
                bar.say(str(stats()))

    def _tune(self) -> None:
        """Let the number of threads follow what is measured."""
        meter, tuner, team = self._watchers.meter, self._watchers.tuner, self._watchers.team
        counts = [stream.readers.counts for stream in self.streams.values()]
        reading, computing = sum(each.reading for each in counts), sum(each.computing for each in counts)
        if tuner.look(TuningCounts(meter.samples, meter.waited_for_data, reading, computing)):
            meter.threads = tuner.threads = team.resize(tuner.threads)


class OneDataset(Steps):
    """Each step is a batch."""

    def __init__(self, streams: Mapping[str, DatasetBatches], position: Position, watchers: Watchers) -> None:
        super().__init__(streams, position, watchers)
        ((self._name, self._stream),) = streams.items()

    @property
    def left(self) -> int:
        return self._stream.steps_left

    def _take(self) -> tuple[Any, int, int]:
        if not self._stream.steps_left:
            raise StopIteration
        batch, samples = self._stream.deliver()
        return batch, samples, samples * self._stream.row_bytes

    def _positions(self) -> dict[str, int]:
        return {self._name: self._stream.position}


class Together(Steps):
    """Each step is a dict with a batch of every dataset that has not ended, by name."""

    @property
    def left(self) -> int:
        return max(stream.steps_left for stream in self.streams.values())

    def _take(self) -> tuple[Any, int, int]:
        names = self._next_names()
        if not names:
            raise StopIteration
        found = {name: self._deliver(name) for name in names}
        samples = sum(each for _, each in found.values())
        bytes_ = sum(each * self.streams[name].row_bytes for name, (_, each) in found.items())
        return {name: batch for name, (batch, each) in found.items() if each or not self._has_one_rank}, samples, bytes_

    def _next_names(self) -> list[str]:
        return [name for name, stream in self.streams.items() if stream.steps_left]

    def _deliver(self, name: str) -> tuple[Any, int]:
        try:
            return self.streams[name].deliver()
        except Exception as error:
            error.add_note(f"of dataset {name!r}")
            raise


class Alternate(Together):
    """Each step is a pair: a dataset's name and a batch of it, the datasets spread evenly over the epoch."""

    def __init__(
        self,
        streams: Mapping[str, DatasetBatches],
        position: Position,
        watchers: Watchers,
        *,
        times: Mapping[str, Interleaved],
    ) -> None:
        super().__init__(streams, position, watchers)
        self._times = times

    @property
    def left(self) -> int:
        return sum(stream.steps_left for stream in self.streams.values())

    def _next_names(self) -> list[str]:
        going, epoch = super()._next_names(), self._position.epoch
        return sorted(going, key=lambda name: self._times[name].time(epoch, self.streams[name].position))[:1]

    def _take(self) -> tuple[Any, int, int]:
        step, samples, bytes_ = super()._take()
        return next(iter(step.items()), None), samples, bytes_
