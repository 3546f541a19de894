"""Glue: an order, slots, reader threads, and batches in sequence.

A loader is at a position: an epoch, and how many of its samples were delivered on all ranks together. Everything else
follows from that and the arguments, so a saved position is two numbers (and what they must be checked against).
"""

import os
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from penstock import interrupts
from penstock.combine import choose_fields
from penstock.dataset import Dataset, OnError, check_on_error
from penstock.deal import Deal, Tail
from penstock.errors import ConfigError, KeptBatches, StateMismatch
from penstock.face import Face, HandOver, make_face
from penstock.finite import Nan
from penstock.inspection import advice, codecs, read_paths, unchecked
from penstock.machine import cores, free_bytes, held_bytes
from penstock.order import BlockShuffled, InBlocks, InOrder, InWindows, Order, Repeated, Shuffled, check_seed
from penstock.planning import Plan, Request, make_plan
from penstock.progress import Bar
from penstock.reader import Readers, ReaderTimes, Team
from penstock.schedule import Batch, Epoch
from penstock.sizes import MiB, format_size, parse_size
from penstock.slots import Slots
from penstock.spec import Origin, ReadPath, row_bytes
from penstock.stats import LeftOut, Meter, Report, Stats
from penstock.store import Store, shared_index, told_rows
from penstock.tuning import Counts, Tuner

INDEX, URL, KEY = "__index__", "__url__", "__key__"
IDENTITY = (INDEX, URL, KEY)
"""Columns that name each sample: its row in the dataset, the file it came from, the place in that file."""

STATE_VERSION = 1

# Rows that come in blocks are mixed in windows of about so much, as stored. The window is part of the order, so it
# follows from the data alone: another budget, batch size or choice of columns must not change it.
WINDOW_BYTES = 256 * MiB

# With no budget given, a quarter of what is free leaves room for the model and for a second loader.
DEFAULT_SHARE = 4

# How long the next epoch waits for reads of the last that are still under way, before it takes other slots.
SLOTS_BACK_WITHIN_S = 10.0

# Threads that wait for a network: at 40 ms a request, 16 of them ask 400 times a second.
FAR_THREADS = 16

# Rows gathered from more mapped files than this come a few at a time, and threads that do nothing else would only meet
# at the interpreter's lock: one alone is half as quick again as two.
MANY_MAPPED = 8

# So many times the threads of the beginning may be tried where files turn out to be slow.
MOST_TIMES = 8


class Loader:
    """Batches of a dataset, in memory bounded by a number of bytes.

    ds:          what to load
    batch_size:  samples a batch, on each rank
    shuffle:     False, True (anew each epoch: over the whole set, or where files store many rows a chunk, by blocks
                 mixed in windows, so that each is read once), or an ``Order`` of your own
    seed:        decides the shuffled order, together with the epoch
    memory:      the most the loader may hold, as ``"2GiB"`` or bytes; None takes a quarter of what is free
    threads:     reader threads at most; "auto" begins with one a core, or 16 where files are read over the network, and
                 tries more where it is files that are waited for
    columns:     fields of a batch, in this order, as a tuple; None gives dicts of all. ``"__index__"``, ``"__url__"``
                 and ``"__key__"`` name each sample: its row, file, and place in the file
    window:      where rows come in blocks: how much is mixed together, in rows or as a size ("512MiB" as stored)
    on_error:    "raise", or "skip": samples that cannot be read are left out of their batch, which is then smaller,
                 counted and listed in ``report()``; a batch of which nothing is left is left out where there is one
                 rank, and comes empty where there are several, which must take the same steps
    max_errors:  with "skip": raise after so many in an epoch
    nan:         values that are NaN or infinite: "pass" does not look for them; "count" does, and ``stats()`` has how
                 many each field had; "raise" takes such a sample for one that cannot be read. Looking takes about as
                 long as copying the values
    drop_last:   leave out the last, smaller batch
    tail:        where fewer samples remain than ranks: "pad" repeats some, "drop" leaves them out
    rank, world_size:  this process's share; taken from torch.distributed where it is in use
    device:      copy batches to this device, and convert there
    output:      "torch" tensors or "numpy" arrays
    progress:    show how far each epoch is, with rate, memory and waits: a bar on a terminal, else lines; on rank 0
    """

    def __init__(
        self,
        ds: Dataset,
        *,
        batch_size: int,
        shuffle: bool | Order = False,
        seed: int = 0,
        memory: int | str | None = None,
        threads: int | Literal["auto"] = "auto",
        columns: Sequence[str] | None = None,
        window: int | str | None = None,
        on_error: OnError = "raise",
        max_errors: int | None = None,
        nan: Nan = "pass",
        drop_last: bool = False,
        tail: Tail = "pad",
        rank: int | None = None,
        world_size: int | None = None,
        device: Any = None,
        output: Literal["torch", "numpy"] = "torch",
        progress: bool = False,
    ) -> None:
        self._face = make_face(output, device)
        self.held_before = held_bytes()
        check_on_error(on_error)
        if nan not in get_args(Nan):
            raise ConfigError(f'nan={nan!r}: expected "pass", "count" or "raise"')
        self.on_error, self.max_errors, self.nan = on_error, max_errors, nan
        self._order = order_of(ds, shuffle, seed, window)
        self.deal = Deal(len(self._order), batch_size, *_place(self._face, rank, world_size), drop_last, tail)
        self._columns, self._axes = _check_columns(ds, columns), ds.axes
        self._store = self._face.prepare(*_chosen(ds, self._columns))
        limit, note = memory_limit(memory)
        self.request = Request(
            fields=self._store.fields,
            batch_rows=min(batch_size, len(self._order)),
            steps=self.deal.steps,
            **_threads(threads, read_paths(self._store)),
            limit_bytes=limit,
            scratch_bytes=self._store.scratch_bytes,
            index_bytes=self._store.index_bytes,
            shared_index=shared_index(self._store),
            **_blocks(self._order),
            **_layout(self._order, self._store),
            spare_slots=self._face.spare_slots,
            limit_note=note,
        )
        """What the plan was made from."""
        self.plan: Plan = make_plan(self.request)
        """What the loader will use, decided before anything is read."""
        self.identity = {"data": ds.fingerprint, **self._order.describe()}
        """What a saved position is checked against."""
        self._slots: Slots | None = None
        self._position = _Position(epoch=0, samples=0, begun=False)
        self._iteration: weakref.ref[Iteration] = lambda: None  # type: ignore[assignment]
        self._team: Team | None = None
        self._readers: Readers | None = None
        self._process = os.getpid()
        self._tuner = Tuner(self.plan.threads, self.plan.threads + self.plan.spare_threads)
        self._codecs = codecs(read_paths(self._store))
        self._unchecked = unchecked(read_paths(self._store))
        self._files_left_out = [str(why) for why in ds.left_out]
        self._account = self._new_account(0, ReaderTimes())
        self.told_kept = False
        self._shows = bool(progress) and self.deal.rank == 0

    def __len__(self) -> int:
        """Batches in a whole epoch, the same on every rank."""
        return self.deal.steps

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or go on from a loaded position. An iteration still under way ends."""
        self._end_iteration("a newer iteration of this loader began; a loader feeds one loop at a time")
        if self._team is not None:
            self._team.wait(SLOTS_BACK_WITHIN_S)
        at = self._position
        if at.begun:
            at = _Position(at.epoch + 1, 0, begun=False)
        self._team = team = Team(self._tuner.threads)
        iteration = self.begin(at.epoch, at.samples, team)
        iteration.tune(self._tuner, team)
        self._iteration = weakref.ref(iteration)
        if self._shows:
            account = self._account
            iteration.show(Bar(f"epoch {at.epoch}", iteration.steps_left, "batches", lambda: account.stats().in_short))
        team.start()
        return iteration

    def begin(self, epoch: int, samples: int, team: Team, wanted_at: Callable[[int], float] = float) -> "Iteration":
        """An epoch from a position on, to be read by a team that may read for others too."""
        self._leave_to_the_parent()
        self._position = _Position(epoch, samples, begun=True)
        if self._slots is not None and self._readers is not None:
            if self._readers.gone:
                self._slots.reclaim()
            else:
                self._slots.close()  # a read that does not return may still write to them
                self._slots = None
        if self._slots is None:
            self._slots = Slots(self._store.fields, self.plan.batch_rows, self.plan.slots, self._face.pin)
        self._readers = readers = Readers(
            self._store,
            Epoch(epoch, self._order, replace(self.deal, start=samples)),
            self.plan,
            self._slots,
            team,
            wanted_at=wanted_at,
            skip=self.on_error == "skip",
            nan=self.nan,
        )
        self._account = self._new_account(epoch, readers.times)
        return Iteration(self, readers, self._face, self._account.meter)

    def state_dict(self) -> dict[str, Any]:
        """The position after the latest batch delivered, as JSON."""
        at = self._position
        if at.samples >= len(self._order):
            at = _Position(at.epoch + 1, 0, begun=False)
        return {"version": STATE_VERSION, "epoch": at.epoch, "samples": at.samples, **self.identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position at the next ``iter``; batch size, budget, threads and ranks may differ."""
        position = _checked_state(state, self.identity, len(self._order))
        self._end_iteration("load_state_dict moved the loader while this iteration was under way; begin a new one")
        self._position = position

    def stats(self) -> Stats:
        """Rate, waits, memory and bottleneck of the current or latest epoch."""
        return self._account.stats()

    def report(self) -> Report:
        """What the current or latest epoch left out, filled in, or could not check."""
        return self.stats().report

    def close(self) -> None:
        """End the iteration under way, its threads and files, and let go of the memory that is not lent."""
        self._end_iteration("the loader was closed")
        if self._slots is not None:
            self._slots.close()
            self._slots = None

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_pinned(self) -> bool:
        """Whether batches lie in memory that a device copies from by itself."""
        return self._face.pin is not None

    @property
    def added_bytes(self) -> int:
        """Memory of batches beyond those planned for, while the caller keeps batches."""
        return 0 if self._slots is None else (self._slots.count - self._slots.planned) * self.plan.batch_bytes

    def delivered(self, samples: int) -> None:
        """Take note of how far the epoch has come; called by the iteration."""
        self._position.samples = samples

    def shape(self, values: Mapping[str, Any], rows: np.ndarray) -> Any:
        """A batch as the caller wants it: dict, or tuple in the order of ``columns``."""
        for name, axes in self._axes.items():
            if name in values:
                values = {**values, name: self._face.permute(values[name], (0, *(axis + 1 for axis in axes)))}
        if self._columns is None:
            return dict(values)
        return tuple(self._identify(name, rows) if name in IDENTITY else values[name] for name in self._columns)

    def origin(self, row: int) -> Origin:
        """Where a sample comes from."""
        return self._store.origin(row)

    def _leave_to_the_parent(self) -> None:
        """In a forked child: its parent's threads are not here, nor ever let go of the slots that they hold."""
        if self._process != os.getpid():
            self._process, self._team, self._readers, self._slots = os.getpid(), None, None, None
            self._iteration = lambda: None  # type: ignore[assignment]

    def _new_account(self, epoch: int, times: ReaderTimes) -> "_Account":
        return _Account(
            epoch, self.plan, Meter(self.held_before), times, self._slots, self._files_left_out, self.request.threads,
            self._codecs, self._unchecked,
        )  # fmt: skip

    def _identify(self, column: str, rows: np.ndarray) -> Any:
        if column == INDEX:
            return self._face.start({INDEX: rows.copy()}, rows)()[INDEX]
        places = [self.origin(int(row)) for row in rows]
        return [place.url if column == URL else place.key for place in places]

    def _end_iteration(self, why: str) -> None:
        self._leave_to_the_parent()
        iteration = self._iteration()
        if iteration is not None:
            iteration.end(why)


@dataclass
class _Position:
    epoch: int
    samples: int
    begun: bool
    """Whether an iteration began here, so that the next one belongs to the next epoch."""


@dataclass(frozen=True)
class _Account:
    """What is known of one epoch, kept when its iteration is gone."""

    epoch: int
    plan: Plan
    meter: Meter
    times: ReaderTimes
    slots: Slots | None
    files_left_out: Sequence[str]
    threads_wanted: int
    codecs: str
    unchecked: Sequence[str]

    def stats(self) -> Stats:
        meter = self.meter
        if meter.batches:
            meter.look()
        return Stats(
            epoch=self.epoch,
            batches=meter.batches,
            samples=meter.samples,
            bytes=meter.bytes,
            seconds=meter.latest - meter.began,
            waited_for_data=meter.waited,
            readers_busy=self.times.reading,
            readers_waited=self.times.waiting_for_slots,
            threads=self.times.threads or self.plan.threads,
            short_of_slots=self.plan.slots < self.plan.slots_wanted,
            peak_bytes=meter.peak_bytes,
            planned_bytes=self.plan.planned_bytes,
            budget_bytes=self.plan.limit_bytes,
            kept_batches=self.slots.added_peak if self.slots else 0,
            bytes_read=self.times.counted.bytes_read,
            chunks_read=self.times.counted.chunks_read,
            chunks_filled=self.times.counted.chunks_filled,
            not_finite=dict(meter.not_finite),
            left_out=tuple(meter.left_out),
            left_out_samples=meter.left_out_samples,
            files_left_out=self.files_left_out,
            file_seconds=self.times.counted.file_seconds,
            function_seconds=self.times.counted.function_seconds,
            waited_for_first=meter.waited_for_first,
            threads_wanted=self.threads_wanted,
            codecs=self.codecs,
            unchecked=self.unchecked,
            unverified=meter.samples * len(self.unchecked),
        )


class Iteration:
    """One epoch, batch by batch. Its end, however it comes, ends the threads and closes the files."""

    def __init__(self, loader: Loader, readers: Readers, face: Face, meter: Meter) -> None:
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


def order_of(ds: Dataset, shuffle: bool | Order, seed: int, window: int | str | None) -> Order:
    """The order that suits how the rows are stored, or the caller's own."""
    check_seed(seed)
    if window is not None:
        _window_rows(window, 1)  # wrong also where there are no blocks
    length, starts = len(ds), ds.store.blocks
    if length == 0:
        raise ConfigError("no samples: the dataset has no rows; check what was selected")
    if isinstance(shuffle, Order):
        return shuffle
    if starts is None:
        return Shuffled(length, seed) if shuffle else InOrder(length)
    if not shuffle:
        return InBlocks(length, starts)
    largest, row = int(np.diff(starts, append=length).max()), max(1, row_bytes(ds.store.fields))
    rows = WINDOW_BYTES // row if window is None else _window_rows(window, row)
    return BlockShuffled(length, starts, max(1, rows // largest), seed)


def _window_rows(window: int | str, row: int) -> int:
    if isinstance(window, str):
        return parse_size(window, argument="window") // row
    if not isinstance(window, int) or window < 1:
        raise ConfigError(f'window={window!r}: expected a number of rows, at least 1, or a size such as "512MiB"')
    return window


def _layout(order: Order, store: Store) -> dict[str, Any]:
    """What a plan says of how rows are stored and mixed."""
    in_blocks = isinstance(order, InWindows)
    mixing = order.order if isinstance(order, Repeated) else order
    quality = mixing.quality if isinstance(mixing, BlockShuffled) else 1.0 if isinstance(mixing, Shuffled) else None
    paths = read_paths(store)
    worst = max(paths, key=lambda path: path.amplification, default=None)
    return {
        "shuffle_quality": quality,
        "amplification": worst.amplification if worst else 1.0,
        "advice": advice(paths, in_blocks=in_blocks, window_rows=_blocks(order).get("window_rows", 0), quality=quality),
        "remedy": worst.remedy if worst else "",
        "far": any(path.far for path in paths),
    }


def _blocks(order: Order) -> dict[str, Any]:
    """What a plan must know of an order whose rows come in blocks."""
    if not isinstance(order, InWindows):
        return {}
    window_rows = order.window_blocks * order.block_rows
    return {"block_rows": order.block_rows, "window_rows": min(window_rows, len(order))}


def _place(face: Face, rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ConfigError(f"rank={rank}, world_size={world_size}: give both, or neither")
    return face.rank_and_world() if rank is None or world_size is None else (rank, world_size)


def _check_columns(ds: Dataset, columns: Sequence[str] | None) -> tuple[str, ...] | None:
    if columns is None:
        return None
    if isinstance(columns, str):
        raise ConfigError(f"columns={columns!r}: expected a tuple of names, such as ({columns!r},)")
    for name in columns:
        if name not in ds.fields and name not in IDENTITY:
            raise ConfigError(
                f"columns: no field {name!r}: the dataset has {', '.join(map(repr, ds.fields))}, and every sample has "
                f"{', '.join(map(repr, IDENTITY))}"
            )
    if all(name in IDENTITY for name in columns):
        raise ConfigError(f"columns={tuple(columns)}: expected at least one field of the dataset")
    return tuple(columns)


def _chosen(ds: Dataset, columns: tuple[str, ...] | None) -> tuple[Store, Mapping[str, Any]]:
    """The stored fields that are wanted, and the conversions declared on them."""
    if columns is None:
        return ds.store, ds.casts
    wanted = [name for name in dict.fromkeys(columns) if name not in IDENTITY]
    casts = {name: cast for name, cast in ds.casts.items() if name in wanted}
    return choose_fields(ds.store, {name: name for name in wanted}), casts


def memory_limit(memory: int | str | None) -> tuple[int, str]:
    """The budget in bytes, and where it comes from if not from the caller."""
    if memory is not None:
        return parse_size(memory, argument="memory"), ""
    free = free_bytes()
    return free // DEFAULT_SHARE, f"a quarter of the {format_size(free)} that are free"


def _threads(threads: int | Literal["auto"], paths: Sequence[ReadPath]) -> dict[str, Any]:
    """With how many to begin, and how many may be tried."""
    if threads == "auto":
        first = max(cores(), FAR_THREADS) if any(path.far for path in paths) else cores()
        mapped = [path.mapped_files for path in paths if path.stored_bytes]
        alone = bool(mapped) and min(mapped) > 0 and max(mapped) > MANY_MAPPED
        return {"threads": 1 if alone else first, "most_threads": first * MOST_TIMES}
    if not isinstance(threads, int) or threads < 1:
        raise ConfigError(f'threads={threads!r}: expected "auto" or a whole number, at least 1')
    return {"threads": threads}


def _checked_state(state: Mapping[str, Any], identity: Mapping[str, Any], length: int) -> _Position:
    version = state.get("version") if isinstance(state, Mapping) else None
    if type(version) is not int or version != STATE_VERSION:
        raise StateMismatch(
            f"not a state this version can read: expected a dict with version {STATE_VERSION}, got {str(state)[:200]}"
        )
    expected = {"version", "epoch", "samples", *identity}
    for name in sorted(expected ^ state.keys()):
        raise StateMismatch(f"the state {'lacks' if name in expected else 'has an unknown'} entry {name!r}")
    for name, ours in identity.items():
        if type(state[name]) is not type(ours) or state[name] != ours:
            raise StateMismatch(
                f"the state was saved for other data or another order: {name} was {state[name]!r}, here it is "
                f"{ours!r}. Open the same files with the same fields, seed and shuffle, or begin anew without the state"
            )
    epoch, samples = state["epoch"], state["samples"]
    if not (type(epoch) is type(samples) is int and epoch >= 0 and 0 <= samples <= length):
        raise StateMismatch(f"the state's position is impossible: epoch {epoch!r}, sample {samples!r} of {length:,}")
    return _Position(epoch, samples, begun=False)
