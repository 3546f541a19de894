"""Glue: an order, slots, reader threads, and batches in sequence.

A loader is at a position: an epoch, and how many of its samples were delivered on all ranks together. Everything else
follows from that and the arguments, so a saved position is two numbers (and what they must be checked against).
"""

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from penstock.dataset import Dataset, OnError, check_on_error
from penstock.deal import Deal, Tail
from penstock.errors import ConfigError, StateMismatch
from penstock.face import Face, make_face
from penstock.finite import Nan
from penstock.inspection import codecs, read_paths, unchecked
from penstock.iteration import Iteration
from penstock.machine import held_bytes
from penstock.order import Order
from penstock.planning import Plan, make_plan
from penstock.progress import Bar
from penstock.reader import Readers, ReaderTimes, Team
from penstock.request import IDENTITY, INDEX, URL, check_columns, chosen, order_of, request_for
from penstock.schedule import Epoch
from penstock.slots import Slots
from penstock.spec import Origin
from penstock.stats import Meter, Report, Stats
from penstock.tuning import Tuner

STATE_VERSION = 1

# How long the next epoch waits for reads of the last that are still under way, before it takes other slots.
SLOTS_BACK_WITHIN_S = 10.0


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
        self._columns, self._axes = check_columns(ds, columns), ds.axes
        self._store = self._face.prepare(*chosen(ds, self._columns))
        self.request = request_for(
            self._store, self._order, batch_size=batch_size, steps=self.deal.steps, threads=threads, memory=memory,
            spare_slots=self._face.spare_slots,
        )  # fmt: skip
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


def _place(face: Face, rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ConfigError(f"rank={rank}, world_size={world_size}: give both, or neither")
    return face.rank_and_world() if rank is None or world_size is None else (rank, world_size)


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
