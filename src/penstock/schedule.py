"""Which reads fill which batches, in the order in which they will be done. Opens batches as it goes; reads nothing.

Where each row can be read by itself, a read is a part of a batch, or several batches. Where rows come in blocks, a read
is all of a block's rows that this rank will deliver, scattered over the batches of a window: each block is read once.
Fields joined to it whose rows can each be read by itself are left for later, batch by batch: a first batch need not
wait for the pictures of its whole window.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from penstock.deal import Deal
from penstock.order import PIECE, InWindows, Order
from penstock.pieces import WHOLE, Share
from penstock.planning import Plan


@dataclass
class Batch:
    """One batch on its way: its slot, its rows, and the reads still missing."""

    step: int
    slot: int
    rows: np.ndarray
    reads_left: int = 1
    error: BaseException | None = None
    left_out: list[tuple[int, Exception]] = field(default_factory=list)
    """Places of samples that could not be read, and why."""
    not_finite: dict[str, int] = field(default_factory=dict)
    """Values that are NaN or infinite, by field, where they are looked for."""


@dataclass(frozen=True)
class Part:
    """Rows of one batch, and their places in it."""

    batch: Batch
    rows: np.ndarray
    places: np.ndarray


@dataclass(frozen=True)
class Read:
    """What one thread does in one go."""

    parts: list[Part]
    scattered: bool = False
    """Whether the places lie all over the batches, rather than one after another."""
    share: Share = WHOLE
    fields: tuple[str, ...] | None = None
    """Which are read; None for all."""
    again: bool = False
    """Whether other fields of the same rows were read before."""


@dataclass(frozen=True)
class Later:
    """Fields that are read when their block was."""

    blocked: tuple[str, ...]
    free: tuple[str, ...]
    rows_per_read: int


@dataclass(frozen=True)
class Epoch:
    """What is to be read: one rank's share of one epoch."""

    number: int
    order: Order
    deal: Deal


TakeSlot = Callable[[], int | None]
"""A free slot; None when there is none just now."""


def reads(epoch: Epoch, plan: Plan, take_slot: TakeSlot, later: Later | None = None) -> Iterator[Read | None]:
    """All reads of the epoch, each with its slots taken; None where it must wait for one: ask again then."""
    if isinstance(epoch.order, InWindows):
        return _block_reads(epoch, epoch.order, plan, take_slot, later)
    return _row_reads(epoch, plan, take_slot)


def _steps(epoch: Epoch, together: int, batch_rows: int) -> Iterator[list[tuple[int, np.ndarray]]]:
    """Steps by ``together``: the first position of each, and its rows. An order is asked for thousands at a time."""
    deal = epoch.deal
    stride = together * max(1, PIECE // (together * batch_rows))
    for first in range(0, deal.steps, stride):
        last = min(first + stride, deal.steps)
        positions, bounds = deal.positions(first, last)
        rows = epoch.order.at(epoch.number, positions)
        each = [(int(positions[begin]), rows[begin:end]) for begin, end in pairwise(bounds.tolist())]
        yield from (each[begin : begin + together] for begin in range(0, len(each), together))


def _row_reads(epoch: Epoch, plan: Plan, take_slot: TakeSlot) -> Iterator[Read | None]:
    step = 0
    for together in _steps(epoch, plan.batches_per_read, plan.batch_rows):
        batches = []
        for _, rows in together:
            while (slot := take_slot()) is None:
                yield None
            batches.append(Batch(step, slot, rows))
            step += 1
        yield from _split(batches, plan.rows_per_read)


def _split(batches: list[Batch], rows_per_read: int) -> Iterator[Read]:
    """Several batches as one read, or one batch as one or several."""
    if len(batches) > 1:
        yield Read([Part(batch, batch.rows, np.arange(len(batch.rows))) for batch in batches])
        return
    parts = _in_parts(batches[0], rows_per_read)
    batches[0].reads_left = len(parts)
    for part in parts:
        yield Read([part])


def _in_parts(batch: Batch, rows_per_read: int) -> list[Part]:
    """A batch by so many rows at a time."""
    ends = [(begin, min(begin + rows_per_read, len(batch.rows))) for begin in range(0, len(batch.rows), rows_per_read)]
    return [Part(batch, batch.rows[begin:end], np.arange(begin, end)) for begin, end in ends]


def _block_reads(
    epoch: Epoch, order: InWindows, plan: Plan, take_slot: TakeSlot, later: Later | None
) -> Iterator[Read | None]:
    """Window by window: open the batches that reach into it, read its blocks, then what was left for later."""
    deal, windows, shares = epoch.deal, order.windows(epoch.number), plan.shares
    fields = None if later is None else later.blocked
    waiting: dict[int, list[Part]] = {}
    left: list[Part] = []
    steps = _steps(epoch, 1, plan.batch_rows)
    step, ahead = 0, next(steps, None)
    for window in range(int(np.searchsorted(windows, deal.start, side="right")) - 1, len(windows) - 1):
        while ahead is not None and ahead[0][0] < windows[window + 1]:
            while (slot := take_slot()) is None:
                yield None
            batch = Batch(step, slot, ahead[0][1])
            for block, part in _by_block(batch, order, shares):
                waiting.setdefault(block, []).append(part)
            if later is not None:
                parts = _in_parts(batch, later.rows_per_read)
                batch.reads_left += len(parts)
                left += parts
            step, ahead = step + 1, next(steps, None)
        for block in order.blocks_of(epoch.number, window).tolist():
            if block in waiting:  # or else all of its rows are another rank's, or came before the start
                parts = waiting.pop(block)
                for number in range(shares):
                    yield Read(parts, scattered=True, share=(number, shares), fields=fields)
        if later is not None:
            for part in left:
                yield Read([part], fields=later.free, again=True)
            left = []


def _by_block(batch: Batch, order: InWindows, shares: int) -> list[tuple[int, Part]]:
    """A batch's rows apart by block; there will be so many reads for each."""
    blocks = np.searchsorted(order.starts, batch.rows, side="right") - 1
    distinct = sorted(set(blocks.tolist()))
    batch.reads_left = len(distinct) * shares
    return [
        (block, Part(batch, batch.rows[here], here)) for block in distinct for here in [np.flatnonzero(blocks == block)]
    ]
