"""What runs a loader: one or several datasets, one plan, one team of threads, one position.

``Loader`` and ``MultiLoader`` are its public classes. Each dataset has its own order, partition and slots; all share
the budget, the threads, and the decision whose batch comes next.
"""

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.base.checks import flag, whole
from penstock.base.counters import Counters
from penstock.base.dataclass import dataclass
from penstock.base.fork import ReentrantLock
from penstock.base.machine import cores, held_bytes
from penstock.base.progress import Bar
from penstock.base.sizes import format_size
from penstock.dataset.dataset import Dataset
from penstock.errors import BudgetExceeded, ConfigError, KeptBatches
from penstock.loader import state as states
from penstock.loader.epoch import DatasetBatches, EpochIterator, Steps, Watchers
from penstock.loader.interleave import Interleaved
from penstock.loader.order import Order
from penstock.loader.outputs import make_output
from penstock.loader.pickled_stores import PickledStores
from penstock.loader.plan import JointPlan, Plan, make_joint_plan, make_plan
from penstock.loader.plan_request import Request
from penstock.loader.plan_text import ALONE, prefix
from penstock.loader.processes import ReaderProcesses
from penstock.loader.readers import ReadCounts
from penstock.loader.slots import Slots, record_bytes
from penstock.loader.source import LoaderOptions, Source
from penstock.loader.state import Position
from penstock.loader.stats import Meter, Stats
from penstock.loader.team import Team, refuse_at_the_end
from penstock.loader.tuning import Tuner

# How long the next epoch waits for reads of the last one that are still under way, before it takes other slots.
SLOTS_BACK_WITHIN_S = 10.0


def make_sources(
    datasets: Mapping[str, Dataset],
    orders: Mapping[str, Order],
    batch_sizes: Mapping[str, int],
    options: LoaderOptions,
) -> tuple[dict[str, Source], int]:
    """The datasets as they will be read, and the bytes that the process held before.

    Outputs are made first: they may import torch, whose memory is not the loader's.
    """
    outputs, found = {name: make_output(options.output, options.device) for name in datasets}, {}
    held_before = held_bytes()
    for name, ds in datasets.items():
        try:
            found[name] = Source(ds, orders[name], batch_sizes[name], outputs[name], options)
        except ConfigError as error:
            if name == ALONE:
                raise
            raise type(error)(f"datasets[{name!r}]: {error}") from None
    return found, held_before


def _fits(requests: Mapping[str, Request]) -> bool:
    """Whether the budget has room for reader processes besides all threads."""
    try:
        return make_joint_plan(requests).threads == next(iter(requests.values())).threads
    except BudgetExceeded:
        return False


class LoaderRuntime:
    """Datasets by name; one that is loaded alone has the name ``ALONE``.

    held_before:  the bytes that the process held before the loader was made
    make_steps:   what a step of an epoch is
    identity:     what a saved state is compared with
    times:        where datasets alternate: when the batches of each come
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        *,
        held_before: int,
        make_steps: Callable[..., Steps],
        identity: Mapping[str, Any],
        times: Mapping[str, Interleaved] | None = None,
        progress: bool = False,
    ) -> None:
        self.sources, self._held_before = sources, held_before
        self._make_steps = make_steps if times is None else partial(make_steps, times=times)
        self._identity, self._times = identity, times
        self.plan = self._make_plan()
        """What will be used, decided before anything is read."""
        self._warn_of_single_batch()
        self._tuner = Tuner(self.plan.threads, self.plan.threads + self.plan.spare_threads)
        self.lengths = {name: len(source.order) for name, source in sources.items()}
        self.position = Position(0, dict.fromkeys(sources, 0))
        self._shows = flag("progress", progress) and next(iter(sources.values())).partition.rank == 0
        self._turn = ReentrantLock()
        self._steps: weakref.ref[Steps] = lambda: None  # type: ignore[assignment]
        self._team: Team | None = None
        self._processes: ReaderProcesses | None = None
        self._process = os.getpid()
        self._warned_of_kept = False
        self._account = _Account(0, self.plan, Meter(held_before, self.plan.threads), sources, {})

    def _make_plan(self) -> Plan | JointPlan:
        requests = self._requests()
        placement = next(iter(requests.values())).placement
        if placement.processes and not placement.is_asked_for and not _fits(requests):
            why = "threads read here: the budget leaves no room for processes"
            requests = {name: request.inside(why) for name, request in requests.items()}
        if ALONE in requests:
            plan = self.sources[ALONE].plan = make_plan(requests[ALONE])
            return plan
        joint = make_joint_plan(requests)
        for name, source in self.sources.items():
            source.plan = joint.plans[name]
        return joint

    def _requests(self) -> dict[str, Request]:
        """What each dataset asks for; budget, threads and processes are the same for all."""
        requests = {name: source.request for name, source in self.sources.items()}
        first = next(iter(requests.values()))
        threads = max(request.threads for request in requests.values())
        most_threads = max(request.most_threads for request in requests.values())
        placements = [request.placement for request in requests.values()]
        fewest = min(placements, key=lambda placement: placement.processes)
        most = max(placement.processes for placement in placements)
        processes = most if fewest.processes else 0  # all datasets are sent to processes, or none is
        return {
            name: replace(
                request, threads=threads, most_threads=most_threads, limit_bytes=first.limit_bytes,
                limit_note=first.limit_note,
                placement=replace(request.placement, processes=processes, why=fewest.why),
            )
            for name, request in requests.items()
        }  # fmt: skip

    # Epochs.

    def iterate(self) -> EpochIterator:
        """The next epoch, or the rest of one from a loaded position; it begins with the first ``next``."""
        return EpochIterator(self.begin_next, self._turn)

    def begin_next(self) -> Steps:
        """Begin the next epoch, or the rest of one; ends an iteration still under way."""
        self._end_steps("a newer iteration of this loader began; a loader feeds one loop at a time")
        if self._team is not None:
            self._team.wait(SLOTS_BACK_WITHIN_S)
        self._refuse_second_batch()
        at = self._next_position()
        position = Position(at.epoch, at.samples, begun=True)
        self._team = team = self.make_team()
        steps = self.begin(position, team)
        self._steps = weakref.ref(steps)
        team.start()
        self.position = position
        return steps

    def _next_position(self) -> Position:
        return self.position.next_epoch() if self.position.begun else self.position

    def make_team(self) -> Team:
        """Threads for the next epoch, with the reader processes if the plan has some."""
        refuse_at_the_end()
        return Team(self._tuner.threads, self._ready_processes())

    def start_processes(self, seconds: float) -> None:
        """Start the reader processes, and wait until they are up, so that what is measured is what they do."""
        processes = self._ready_processes()
        if processes is not None:
            processes.wait(seconds)

    def begin(self, position: Position, team: Team) -> Steps:
        """Prepare an epoch from a position on, for a team that is started afterwards."""
        self._forget_parent()
        self._tuner.begin()
        meter = Meter(self._held_before, self._tuner.threads, self._held_elsewhere)
        streams: dict[str, DatasetBatches] = {}
        for name, source in self.sources.items():
            wanted_at = self._wanted_at(name, position)
            readers = source.begin(
                position.epoch, position.samples[name], team, wanted_at, len(streams), is_shared=self.plan.processes > 0
            )
            streams[name] = DatasetBatches(name, source, readers, meter, self._warn_of_kept)
        read = {name: (stream.readers.counts, stream.readers.slots) for name, stream in streams.items()}
        restarts = partial(_restarts_since, self._processes, self._processes.restarts) if self._processes else int
        self._account = account = _Account(position.epoch, self.plan, meter, self.sources, read, restarts=restarts)
        steps = self._make_steps(streams, position, Watchers(meter, self._tuner, team))
        if self._shows and position.begun:
            unit = "batches" if ALONE in streams else "steps"
            steps.show(
                Bar(f"epoch {position.epoch}", steps.left, unit, lambda: account.stats().in_short), account.stats
            )
        return steps

    def _ready_processes(self) -> ReaderProcesses | None:
        """The reader processes, made when they are first needed."""
        if self._team is not None and not self._team.has_ended:  # a read that does not return has a connection
            self._end_processes()
        if self._processes is None and self.plan.processes:
            pickled_stores = PickledStores([source.store for source in self.sources.values()])
            skip = next(iter(self.sources.values())).faults.skip
            self._processes = ReaderProcesses(self.plan.processes, pickled_stores, skip=skip)
        return self._processes

    def _held_elsewhere(self, touched_bytes: int) -> int:
        """What reader processes hold, and slots beyond the shared memory that this process has touched."""
        if self._processes is None:
            return 0
        filled = sum(source.slots.shared_bytes for source in self.sources.values() if source.slots is not None)
        return self._processes.held_bytes + max(0, filled - touched_bytes)

    def _end_processes(self) -> None:
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def _wanted_at(self, name: str, position: Position) -> Callable[[int], float]:
        if self._times is None:
            return float
        return partial(_time_of_step, self._times[name], position.epoch, position.samples[name])

    def _end_steps(self, why: str) -> None:
        self._forget_parent()
        steps = self._steps()
        if steps is not None:
            steps.end(why)

    def _forget_parent(self) -> None:
        """In a forked child: the parent's threads do not exist here."""
        if self._process != os.getpid():
            self._process, self._team, self._processes = os.getpid(), None, None
            self._steps = lambda: None  # type: ignore[assignment]
            for source in self.sources.values():
                source.forget_parent()

    def close(self) -> None:
        """End the iteration under way, its threads and files, and free the memory that is not lent."""
        self._end_steps("the loader was closed")
        self._end_processes()
        for source in self.sources.values():
            source.close()

    # Positions.

    @property
    def at_end(self) -> bool:
        """Whether the latest step was the last of its epoch."""
        return all(self.position.samples[name] >= length for name, length in self.lengths.items())

    @property
    def steps_ahead(self) -> int:
        """Steps of the next iteration: those of an epoch, or of the rest of one from a loaded position."""
        at = self._next_position()
        steps = [replace(source.partition, start=at.samples[name]).steps for name, source in self.sources.items()]
        return max(steps) if self._times is None else sum(steps)

    def save(self) -> dict[str, Any]:
        """The position after the latest step, as JSON."""
        return states.save(self.position.next_epoch() if self.at_end else self.position, self._identity)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with the next iteration; a loaded position inside it stays."""
        at = Position(whole("epoch", epoch), dict.fromkeys(self.lengths, 0))
        if self.position.begun or self.position.epoch != at.epoch:
            self.load(states.save(at, self._identity))

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position with the next iteration."""
        position = states.load(state, self._identity, self.lengths)
        self._end_steps("load_state_dict moved the loader while this iteration was under way; begin a new one")
        with self._turn:  # another thread may be taking its last batch
            self.position = position

    # Reports.

    def stats(self) -> Stats:
        """Rate, waits, memory and bottleneck of the current or latest epoch."""
        return self._account.stats()

    def _bytes_of_kept(self, sources: Iterable[Source]) -> int:
        """What epochs of one batch take beyond the budget while the caller keeps the batch of the epoch before."""
        single = [source.plan for source in sources if source.plan.slots == 1]
        more = sum(plan.batch_bytes + record_bytes(plan.batch_rows) for plan in single)
        return more if self.plan.planned_bytes + more > self.plan.limit_bytes else 0

    def _warn_of_single_batch(self) -> None:
        """Warn early where a second epoch may be refused."""
        if more := self._bytes_of_kept(self.sources.values()):
            warnings.warn(
                f"memory={format_size(self.plan.limit_bytes)} has room for one batch, which is the whole epoch. Drop "
                f"it before the next epoch begins (del batch), or give {format_size(self.plan.smallest_bytes + more)}",
                KeptBatches,
                stacklevel=_levels_inside(),
            )

    def _refuse_second_batch(self) -> None:
        """The budget holds: an epoch of one batch does not begin while the batch before takes up all of its memory."""
        sources = self.sources.values()
        if more := self._bytes_of_kept(each for each in sources if each.slots is not None and each.slots.lent):
            needed = self.plan.smallest_bytes + more
            raise BudgetExceeded(
                f"the batch of the epoch before is still in use, and memory={format_size(self.plan.limit_bytes)} has "
                f"room for one batch. Drop it before the next epoch begins (del batch), or give "
                f"{format_size(needed)} ({needed:,} bytes)",
                smallest_bytes=needed,
            )

    def _warn_of_kept(self) -> None:
        """Warn once when batches that the caller keeps go beyond the budget."""
        added_bytes = sum(source.added_bytes for source in self.sources.values())
        if self._warned_of_kept or self.plan.planned_bytes + added_bytes <= self.plan.limit_bytes:
            return
        self._warned_of_kept = True
        warnings.warn(
            f"batches of {format_size(added_bytes)} are being kept beyond those planned for. Their memory is yours, "
            f"and goes beyond memory={format_size(self.plan.limit_bytes)}; keep copies of what you need, or fewer",
            KeptBatches,
            stacklevel=_levels_inside(),
        )


def _restarts_since(processes: ReaderProcesses, before: int) -> int:
    return processes.restarts - before


def _time_of_step(times: Interleaved, epoch: int, start: int, step: int) -> float:
    return times.time(epoch, start + step * times.step_samples)


def _levels_inside() -> int:
    """The ``stacklevel`` of the first caller outside of penstock, for a warning of the function that calls this one."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("penstock."):
        level, frame = level + 1, frame.f_back
    return level


@dataclass(frozen=True)
class _Account:
    """What is known of one epoch, kept when its iteration has ended."""

    epoch: int
    plan: Plan | JointPlan
    meter: Meter
    sources: Mapping[str, Source]
    read: Mapping[str, tuple[ReadCounts, Slots]]
    restarts: Callable[[], int] = lambda: 0
    """How often reader processes died and were started again."""

    def stats(self) -> Stats:
        meter, tally = self.meter, Counters()
        if meter.batches:
            meter.look()
        counts = [each for each, _ in self.read.values()]
        for each in counts:
            tally.add(each.tally)
        sources = self.sources.values()
        return Stats(
            epoch=self.epoch,
            seconds=meter.latest - meter.began,
            readers_busy=sum(each.reading for each in counts),
            readers_waited=max((each.waiting_for_slots for each in counts), default=0.0),
            processes=self.plan.processes,
            restarts=self.restarts(),
            computing_seconds=sum(each.computing for each in counts),
            cores=cores(),
            threads_wanted=max(source.request.threads for source in sources),
            short_of_slots=self.plan.short_of_slots,
            planned_bytes=self.plan.planned_bytes,
            budget_bytes=self.plan.limit_bytes,
            kept_batches=sum(slots.added_peak for _, slots in self.read.values()),
            not_finite=dict(meter.not_finite),
            left_out=tuple(meter.left_out),
            files_left_out=[why for source in sources for why in source.files_left_out],
            codecs=", ".join(dict.fromkeys(source.codecs for source in sources if source.codecs)),
            unchecked=[prefix(name) + field for name, source in self.sources.items() for field in source.unchecked],
            unverified=sum(each.delivered * len(self.sources[name].unchecked) for name, (each, _) in self.read.items()),
            **{name: getattr(meter, name) for name in Meter.COUNTERS},
            **vars(tally),
        )
