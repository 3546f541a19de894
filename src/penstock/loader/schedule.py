"""Which reads fill which batches, in the order in which they will be done. Opens batches as it goes; reads nothing.

Where each row can be read by itself, a read is a part of a batch, or several batches. Where rows come in blocks, a read
is all rows of a block that this rank will deliver, scattered over the batches of a window: each block is read once.
Joined fields whose rows can each be read by itself are deferred, and read batch by batch: the first batch need not
wait for the pictures of its whole window.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from penstock.base import fork
from penstock.base.dataclass import dataclass
from penstock.base.sizes import MiB
from penstock.loader.order import InWindows, Order
from penstock.loader.partition import Partition
from penstock.loader.permutation import PIECE
from penstock.loader.plan import Plan
from penstock.read.pieces import WHOLE, Share

# The last reads of a batch are smaller, down to this, so that threads end together: there may be no other slot.
LAST_READ_BYTES = 16 * MiB

_LEAVING_OUT = fork.Lock()


@dataclass(slots=True)
class Batch:
    """A batch that is being filled: its slot, its rows, and the number of reads still missing.

    Hundreds of small ones may be ready, so each is one object for the garbage collector.
    """

    step: int
    slot: int
    rows: np.ndarray
    reads_left: int = 1
    error: BaseException | None = None
    left_out: Sequence[tuple[int, Exception]] = ()
    """Places of samples that could not be read, and why."""
    not_finite: dict[str, int] | None = None
    """Values that are NaN or infinite, by field, where they were counted and found."""

    def leave_out(self, *found: tuple[int, Exception]) -> None:
        """Add samples that could not be read. Threads that share a read may do so at the same time."""
        with _LEAVING_OUT:
            self.left_out = (*self.left_out, *found)


@dataclass(frozen=True)
class BatchRows:
    """Rows of one batch, and their places in it."""

    batch: Batch
    rows: np.ndarray
    places: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Read:
    """What one thread does at a time: rows of one or several batches."""

    batches: Sequence[Batch]
    """By step."""
    rows: np.ndarray
    """Those of the first batch, then those of the next."""
    places: np.ndarray
    """Where each row goes in its batch."""
    bounds: Sequence[int]
    """``rows[bounds[n]:bounds[n + 1]]`` belong to ``batches[n]``."""
    scattered: bool = False
    """Whether the places lie all over the batches, rather than one after another."""
    share: Share = WHOLE
    fields: tuple[str, ...] | None = None
    """Which fields to read; None for all."""
    again: bool = False
    """Whether other fields of the same rows were read before."""

    def of_batch(self, number: int) -> BatchRows:
        """The rows that belong to one batch."""
        here = slice(self.bounds[number], self.bounds[number + 1])
        return BatchRows(self.batches[number], self.rows[here], self.places[here])


@dataclass(frozen=True)
class DeferredFields:
    """Fields that are read after their block, batch by batch."""

    blocked: tuple[str, ...]
    """The others, which come with the block."""
    free: tuple[str, ...]
    rows_per_read: int


@dataclass(frozen=True)
class Epoch:
    """What to read: one rank's share of one epoch."""

    number: int
    order: Order
    partition: Partition
    seed: int = 0
    """Seeds, with the number, the random numbers of the caller's functions."""


TakeSlot = Callable[[], int | None]
"""Returns a free slot; None if there is none at the moment."""


def reads(
    epoch: Epoch, plan: Plan, take_slot: TakeSlot, deferred: DeferredFields | None = None
) -> Iterator[Read | None]:
    """All reads of the epoch, each with its slots taken; None where a slot is missing: ask again when one is free."""
    if isinstance(epoch.order, InWindows):
        return _block_reads(epoch, epoch.order, plan, take_slot, deferred)
    return _row_reads(epoch, plan, take_slot)


class _RowsOfSteps:
    """The rows of some steps at a time; the order is asked for thousands of positions at a time."""

    def __init__(self, epoch: Epoch, together: int, batch_rows: int) -> None:
        self._epoch = epoch
        self._stride = together * max(1, PIECE // (together * batch_rows))
        """A whole number of reads, ``together`` steps each."""
        self._first = self._last = 0
        self._positions = self._rows = self._bounds = np.empty(0, np.int64)

    def __call__(self, first: int, last: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Of these steps: the lowest position, all rows, and the bounds of each step among them."""
        if last > self._last:
            partition = self._epoch.partition
            self._first, self._last = first, min(first + self._stride, partition.steps)
            self._positions, self._bounds = partition.positions(first, self._last)
            self._rows = self._epoch.order.at(self._epoch.number, self._positions)
        bounds = self._bounds[first - self._first : last - self._first + 1]
        here = slice(bounds[0], bounds[-1])
        return int(self._positions[here].min()), self._rows[here], bounds - bounds[0]


def _steps_of_reads(steps: int, together: int) -> Iterator[range]:
    """Steps that are read together: one, then two, then four, so that the first batch waits for no others."""
    first, count = 0, 1
    while first < steps:
        yield range(first, min(first + count, steps))
        first, count = first + count, min(2 * count, together)


def _row_reads(epoch: Epoch, plan: Plan, take_slot: TakeSlot) -> Iterator[Read | None]:
    together = plan.batches_per_read
    rows_of = _RowsOfSteps(epoch, together, plan.batch_rows)
    for steps in _steps_of_reads(epoch.partition.steps, together):
        slots: list[int] = []
        while len(slots) < len(steps):  # before anything is computed: the caller may have use for the core
            if (slot := take_slot()) is None:
                yield None
            else:
                slots.append(slot)
        _, rows, bounds = rows_of(steps.start, steps.stop)
        edges = bounds.tolist()
        batches = [
            Batch(step, slot, rows[begin:end])
            for step, slot, (begin, end) in zip(steps, slots, pairwise(edges), strict=True)
        ]
        if len(batches) > 1:
            places = np.arange(len(rows)) - np.repeat(bounds[:-1], np.diff(bounds))
            yield Read(batches=batches, rows=rows, places=places, bounds=edges)
        else:
            # All threads divide the first batch of an epoch, which the caller waits for.
            most = plan.rows_per_read if steps.start else min(plan.rows_per_read, -(-plan.batch_rows // plan.threads))
            edges = divide(len(rows), most, plan)
            batches[0].reads_left = len(edges) - 1
            yield from _reads_of(batches[0], edges)


def divide(rows: int, most: int, plan: Plan) -> list[int]:
    """Where the reads of a batch begin, and its end: each takes a thread's share of what is left, at most ``most``."""
    least = most if plan.processes else max(1, LAST_READ_BYTES * plan.batch_rows // max(1, plan.batch_bytes))
    edges = [0]
    while left := rows - edges[-1]:
        edges.append(edges[-1] + min(left, most, max(least, -(-left // plan.threads))))
    return edges


def _reads_of(
    batch: Batch, edges: Sequence[int], fields: tuple[str, ...] | None = None, *, again: bool = False
) -> Iterator[Read]:
    """A batch, some rows at a time."""
    for begin, end in pairwise(edges):
        rows, places = batch.rows[begin:end], np.arange(begin, end)
        yield Read(batches=[batch], rows=rows, places=places, bounds=(0, len(rows)), fields=fields, again=again)


def _block_reads(
    epoch: Epoch, order: InWindows, plan: Plan, take_slot: TakeSlot, deferred: DeferredFields | None
) -> Iterator[Read | None]:
    """Window by window: open the batches that reach into it, read its blocks, then the deferred fields."""
    partition, windows, shares = epoch.partition, order.windows(epoch.number), plan.shares
    fields = None if deferred is None else deferred.blocked
    waiting: list[_OpenRows] = []
    rows_of = _RowsOfSteps(epoch, 1, plan.batch_rows)
    steps = (rows_of(step, step + 1) for step in range(partition.steps))
    step, ahead = 0, next(steps, None)
    begins: list[int] = []  # of the batches that are not complete
    least = plan.window_batches if plan.is_tight else 0
    for window in range(int(np.searchsorted(windows, partition.start, side="right")) - 1, len(windows) - 1):
        opened = []
        after = [*begins[1:], partition.length if ahead is None else ahead[0]]  # a batch ends where the next one begins
        del begins[: sum(begin <= windows[window] for begin in after)]
        # Where memory is tight, a window begins when at most one batch is complete: the one in the caller's hands.
        while len(begins) < least or (ahead is not None and ahead[0] < windows[window + 1]):
            while (slot := take_slot()) is None:
                yield None
            if ahead is None:  # nothing will be read into this slot
                begins.append(partition.length)
                continue
            opened.append(Batch(step, slot, ahead[1]))
            begins.append(ahead[0])
            step, ahead = step + 1, next(steps, None)
        if opened:
            waiting.append(_OpenRows(opened, order.starts, shares))
        if deferred is not None:
            for batch in opened:
                batch.reads_left += len(divide(len(batch.rows), deferred.rows_per_read, plan)) - 1
        for block in order.blocks_of(epoch.number, window).tolist():
            found = [read for rows in waiting if (read := rows.take(block)) is not None]
            if found:  # or else all rows of the block belong to other ranks, or came before the start
                read = found[0] if len(found) == 1 else _joined(found)
                for number in range(shares):
                    yield replace(read, share=(number, shares), fields=fields)
        waiting = [rows for rows in waiting if rows.left]
        if deferred is not None:
            for batch in opened:
                edges = divide(len(batch.rows), deferred.rows_per_read, plan)
                yield from _reads_of(batch, edges, deferred.free, again=True)


class _OpenRows:
    """Rows of batches that were opened together, sorted by the block that they wait for.

    Plain arrays: a window may have millions of rows, and as many batches.
    """

    def __init__(self, batches: list[Batch], starts: np.ndarray, shares: int) -> None:
        self._batches = batches
        sizes = np.array([len(batch.rows) for batch in batches])
        rows = np.concatenate([batch.rows for batch in batches])
        blocks = np.searchsorted(starts, rows, side="right")
        by_block = np.argsort(blocks, kind="stable")
        self._rows = rows[by_block]
        del rows
        blocks = blocks[by_block]
        self._owners = np.repeat(np.arange(len(batches), dtype=np.int32), sizes)[by_block]
        by_block -= (np.cumsum(sizes) - sizes)[self._owners]
        self._places = by_block.astype(np.int32)
        del by_block
        first = _run_starts(blocks)
        self._blocks, self._bounds = blocks[first] - 1, np.append(first, len(blocks))
        self._taken = np.zeros(len(self._blocks), bool)
        self.left = len(self._blocks)
        """Blocks that were not taken yet."""
        first_of_batch = np.union1d(first, _run_starts(self._owners))
        reads = np.bincount(self._owners[first_of_batch], minlength=len(batches)) * shares
        for batch, count in zip(batches, reads.tolist(), strict=True):
            batch.reads_left = count

    def take(self, block: int) -> Read | None:
        """The rows that wait for a block, once: where an epoch has several passes, the block comes again."""
        at = int(np.searchsorted(self._blocks, block))
        if at == len(self._blocks) or self._blocks[at] != block or self._taken[at]:
            return None
        self._taken[at] = True
        self.left -= 1
        here = slice(self._bounds[at], self._bounds[at + 1])
        owners = self._owners[here]
        begins = _run_starts(owners)
        batches = [self._batches[owner] for owner in owners[begins].tolist()]
        bounds = [*begins.tolist(), len(owners)]
        return Read(batches=batches, rows=self._rows[here], places=self._places[here], bounds=bounds, scattered=True)


def _run_starts(values: np.ndarray) -> np.ndarray:
    """Where each run of equal values begins."""
    return np.concatenate([[0], np.flatnonzero(values[1:] != values[:-1]) + 1])


def _joined(found: list[Read]) -> Read:
    """Reads of one block as one, the older batches first."""
    bounds = [0]
    for read in found:
        bounds += [bounds[-1] + bound for bound in read.bounds[1:]]
    return Read(
        batches=[batch for read in found for batch in read.batches],
        rows=np.concatenate([read.rows for read in found]),
        places=np.concatenate([read.places for read in found]),
        bounds=bounds,
        scattered=True,
    )
