"""Which reads fill which batches, in the order in which they will be done. Opens batches as it goes; reads nothing.

Where each row can be read by itself, a read is a part of a batch, or several batches. Where rows come in blocks, a read
is all of a block's rows that this rank will deliver, scattered over the batches of a window: each block is read once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Epoch:
    """What is to be read: one rank's share of one epoch."""

    number: int
    order: Order
    deal: Deal


TakeSlot = Callable[[], int | None]
"""A free slot; None when there is none just now."""


def reads(epoch: Epoch, plan: Plan, take_slot: TakeSlot) -> Iterator[Read | None]:
    """All reads of the epoch, each with its slots taken; None where it must wait for one: ask again then."""
    if isinstance(epoch.order, InWindows):
        return _block_reads(epoch, epoch.order, plan.shares, take_slot)
    return _row_reads(epoch, plan, take_slot)


def _row_reads(epoch: Epoch, plan: Plan, take_slot: TakeSlot) -> Iterator[Read | None]:
    deal, together = epoch.deal, plan.batches_per_read
    stride = together * max(1, PIECE // (together * plan.batch_rows))
    for first in range(0, deal.steps, stride):
        last = min(first + stride, deal.steps)
        positions, bounds = deal.positions(first, last)
        rows = epoch.order.at(epoch.number, positions)
        for begin in range(first, last, together):
            batches = []
            for step in range(begin, min(begin + together, last)):
                while (slot := take_slot()) is None:
                    yield None
                batches.append(Batch(step, slot, rows[bounds[step - first] : bounds[step - first + 1]]))
            yield from _split(batches, plan.rows_per_read)


def _split(batches: list[Batch], rows_per_read: int) -> Iterator[Read]:
    """Several batches as one read, or one batch as one or several."""
    if len(batches) > 1:
        yield Read([Part(batch, batch.rows, np.arange(len(batch.rows))) for batch in batches])
        return
    batch = batches[0]
    begins = range(0, len(batch.rows), rows_per_read)
    batch.reads_left = len(begins)
    for begin in begins:
        end = min(begin + rows_per_read, len(batch.rows))
        yield Read([Part(batch, batch.rows[begin:end], np.arange(begin, end))])


def _block_reads(epoch: Epoch, order: InWindows, shares: int, take_slot: TakeSlot) -> Iterator[Read | None]:
    """Window by window: open the batches that reach into it, then read its blocks."""
    deal, windows = epoch.deal, order.windows(epoch.number)
    waiting: dict[int, list[Part]] = {}
    step = 0
    for window in range(int(np.searchsorted(windows, deal.start, side="right")) - 1, len(windows) - 1):
        while step < deal.steps and deal.positions(step, step + 1)[0][0] < windows[window + 1]:
            while (slot := take_slot()) is None:
                yield None
            rows = order.at(epoch.number, deal.positions(step, step + 1)[0])
            for block, part in _by_block(Batch(step, slot, rows), order, shares):
                waiting.setdefault(block, []).append(part)
            step += 1
        for block in order.blocks_of(epoch.number, window).tolist():
            if block in waiting:  # or else all of its rows are another rank's, or came before the start
                parts = waiting.pop(block)
                for number in range(shares):
                    yield Read(parts, scattered=True, share=(number, shares))


def _by_block(batch: Batch, order: InWindows, shares: int) -> list[tuple[int, Part]]:
    """A batch's rows apart by block; there will be so many reads for each."""
    blocks = np.searchsorted(order.starts, batch.rows, side="right") - 1
    distinct = sorted(set(blocks.tolist()))
    batch.reads_left = len(distinct) * shares
    return [
        (block, Part(batch, batch.rows[here], here)) for block in distinct for here in [np.flatnonzero(blocks == block)]
    ]
