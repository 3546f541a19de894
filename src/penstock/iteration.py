"""One epoch of a loader, batch by batch."""

import os
import time
import warnings
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import interrupts
from penstock.errors import ConfigError, KeptBatches, StateMismatch
from penstock.face import Face, HandOver
from penstock.progress import Bar
from penstock.reader import Readers, Team
from penstock.schedule import Batch
from penstock.sizes import format_size
from penstock.spec import row_bytes
from penstock.stats import LeftOut, Meter
from penstock.store import told_rows
from penstock.tuning import Counts, Tuner

if TYPE_CHECKING:
    from penstock.loader import Loader


class Iteration:
    """One epoch, batch by batch. Its end, however it comes, ends the threads and closes the files."""

    def __init__(self, loader: "Loader", readers: Readers, face: Face, meter: Meter) -> None:
        self._loader, self._readers, self._face, self._meter = loader, readers, face, meter
        self._deal = readers.epoch.deal
        self._steps = self._deal.steps
        self._started: deque[tuple[HandOver, np.ndarray]] = deque()
        self._next_start = self._next_delivery = 0
        self._row_bytes = row_bytes(readers.store.fields)
        self._why_ended = ""
        self._bar: Bar | None = None
        self._tuning: tuple[Tuner, Team] | None = None
        self._process = os.getpid()
        self._left_alone = weakref.finalize(self, interrupts.heard, _shut_down, readers, face, self._process)

    def __iter__(self) -> "Iteration":
        return self

    def __next__(self) -> Any:
        batch, samples = self.deliver()
        while not samples and self.alone:  # nothing of it could be read, and no other rank waits for us
            batch, samples = self.deliver()
        return batch

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self._deal.world_size == 1

    @property
    def steps_left(self) -> int:
        return self._steps - self._next_delivery

    @property
    def rows_read(self) -> int:
        """Rows read so far; some of them may belong to batches that are not whole yet."""
        return int(self._readers.times.rows)

    @property
    def position(self) -> int:
        """Samples of the epoch that were delivered, on all ranks together."""
        return self._deal.position_after(self._next_delivery)

    def deliver(self) -> tuple[Any, int]:
        """The next batch, and how many samples it has."""
        if self._why_ended:
            raise StateMismatch(self._why_ended)
        if self._process != os.getpid():
            raise ConfigError(
                f"this iteration began in process {self._process}, whose threads a forked child has not got. Begin one "
                f"here: iter(loader), after loader.load_state_dict(…) if it should go on from there; or fork before"
            )
        if self._next_delivery >= self._steps or not self._left_alone.alive:
            self._shut_down()
            self._stop_showing(whole=self._next_delivery >= self._steps)
            raise StopIteration
        began = time.perf_counter()
        try:
            self._make_room()
            if not self._started:
                self._start(wait=True)
            hand_over, rows = self._started.popleft()
            while len(self._started) < self._face.spare_slots and self._start(wait=False):
                pass
            batch = self._loader.shape(hand_over(), rows)
        except BaseException:
            self._shut_down()
            self._stop_showing(whole=False)
            raise
        self._next_delivery += 1
        self._loader.delivered(self.position)
        self._meter.count(len(rows), len(rows) * self._row_bytes, time.perf_counter() - began)
        self._tune()
        if self._bar is not None:
            self._bar.add(1)
        return batch, len(rows)

    def tune(self, tuner: Tuner, team: Team) -> None:
        """Let the number of threads follow what is measured."""
        self._tuning = tuner, team
        tuner.begin()
        self._readers.times.threads = tuner.threads

    def _tune(self) -> None:
        if self._tuning is None:
            return
        tuner, team = self._tuning
        meter, times = self._meter, self._readers.times
        if tuner.look(Counts(meter.samples, meter.waited, times.reading, times.computing)):
            times.threads = tuner.threads = team.resize(tuner.threads)
        if tuner.settled:
            self._tuning = None

    def show(self, bar: Bar) -> None:
        """Say on this how far it is."""
        self._bar = bar

    def _stop_showing(self, *, whole: bool) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()
            if whole:
                bar.say(str(self._loader.stats()))

    def pass_over(self, wait_s: float) -> int:
        """Let go of the batches that are ready, waiting no longer than that for one; how many samples they had."""
        samples, readers = 0, self._readers
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

    def end(self, why: str) -> None:
        """End now; whoever asks for another batch is told why."""
        if self._left_alone.alive:
            self._why_ended = why
            self._started.clear()
            self._shut_down()
            self._stop_showing(whole=False)

    def _shut_down(self) -> None:
        if self._left_alone.detach():
            _shut_down(self._readers, self._face, self._process)

    def _start(self, *, wait: bool) -> bool:
        """Begin to deliver the next batch, if there is one and it is ready or worth waiting for."""
        if self._next_start >= self._steps:
            return False
        readers = self._readers
        batch = readers.get(self._next_start) if wait else readers.get_if_ready(self._next_start)
        if batch is None:
            return False
        if batch.error is not None:
            readers.slots.give_back(batch.slot)
            batch.error.add_note(
                f"while reading batch {batch.step} of epoch {readers.epoch.number}, rows {told_rows(batch.rows)}"
            )
            raise batch.error
        arrays, rows = readers.slots.lend(batch.slot, len(batch.rows)), batch.rows
        if batch.left_out:
            arrays, rows = self._without(batch, arrays)
        self._meter.not_finite.update(batch.not_finite)
        self._started.append((self._face.start(arrays, rows), rows))
        self._next_start += 1
        return True

    def _without(self, batch: Batch, arrays: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """A batch without the samples that could not be read; the others move up."""
        for place, error in sorted(dict(batch.left_out).items()):  # threads that share a read may each say it
            row = int(batch.rows[place])
            origin = self._loader.origin(row)
            self._meter.leave_out(LeftOut(row, origin.url, origin.key, str(error)))
            most = self._loader.max_errors
            if most is not None and self._meter.left_out_samples > most:
                error.add_note(f"more than max_errors={most} samples could not be read in this epoch; this is the next")
                raise error
        kept = np.delete(np.arange(len(batch.rows)), [place for place, _ in batch.left_out])
        for array in arrays.values():
            for to, place in enumerate(kept.tolist()):
                if to != place:
                    array[to : to + 1] = array[place : place + 1]
        return {name: array[: len(kept)] for name, array in arrays.items()}, batch.rows[kept]

    def _make_room(self) -> None:
        """Go on although the caller keeps batches, and say once when that goes beyond the budget."""
        slots, plan = self._readers.slots, self._readers.plan
        slots.ensure(plan.batches_filled_together)
        if plan.planned_bytes + self._loader.added_bytes > plan.limit_bytes and not self._loader.told_kept:
            self._loader.told_kept = True
            warnings.warn(
                f"{slots.lent} batches are being kept, each of {format_size(plan.batch_bytes)}. Their memory is yours, "
                f"and goes beyond memory={format_size(plan.limit_bytes)}; keep copies of what you need, or fewer",
                KeptBatches,
                stacklevel=3,
            )


def _shut_down(readers: Readers, face: Face, process: int) -> None:
    if process == os.getpid():
        face.finish()
        readers.stop()
