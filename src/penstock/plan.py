"""How a budget is spent, decided before anything is read. Arithmetic only.

The unit a thread works on is a *read*: part of a batch where batches are large (so that all threads help with the next
one), several batches where they are small (so that handing over costs little).

Memory goes to, in this order of need: the smallest set-up that works at all (one batch in the caller's hands, one being
filled, one thread), then as many threads as were asked for, then slots, until more would not help. The budget is a
limit, not a goal.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.budget import MemoryBudget
from penstock.errors import BudgetExceeded
from penstock.sizes import KiB, MiB, format_size
from penstock.slots import slot_bytes
from penstock.spec import Fields, row_bytes

# A read should last long enough to hide its fixed cost, some 100 microseconds with the hand-over: small batches are
# read several at a time, up to 8 MiB (about 2 milliseconds).
JOIN_BELOW_BYTES = 8 * MiB
# A batch is split so that every thread has a part of it, but not into parts below 16 MiB where there are enough: with
# many threads it is their meeting at the interpreter's lock that limits them (measured on 16 cores).
SPLIT_ABOVE_BYTES = 16 * MiB

# Blocks larger than this are shared out among the threads, so that a window is there sooner.
SHARE_ABOVE_BYTES = 8 * MiB

# Measured: library code first touched (h5py, codecs), queues, the order's tables, allocator slack.
BASE_BYTES = 5 * MiB
# Measured: a thread's stack and its arena in the allocator.
THREAD_BYTES = 256 * KiB

MOST_BATCHES_PER_READ = 64


@dataclass(frozen=True)
class Request:
    """What is to be loaded, and with what."""

    fields: Fields
    """The fields as they lie in a slot."""
    batch_rows: int
    steps: int
    threads: int
    limit_bytes: int
    scratch_bytes: Callable[[int], int]
    """What one read of so many rows borrows."""
    index_bytes: int = 0
    block_rows: int = 0
    """Rows of the largest block that is read whole; 0 where each row can be read by itself."""
    window_rows: int = 0
    """Rows that are mixed together, and so must be in slots together."""
    spare_slots: int = 0
    """Slots held longer than usual (a device copy in flight)."""
    limit_note: str = ""
    shuffle_quality: float | None = None
    """1.0 is a uniform shuffle; None where nothing is shuffled."""
    amplification: float = 1.0
    """Bytes that a reader of single rows would decode for each one delivered."""
    advice: Sequence[str] = ()
    remedy: str = ""
    """What would let each row be read by itself, where it cannot be."""
    far: bool = False
    """Whether each read is a journey over the network: reads are then as small as gives every thread its share."""


@dataclass(frozen=True)
class Plan:
    """What a loader will use. ``print(loader.plan)`` shows it as a table."""

    limit_bytes: int
    holders: Mapping[str, int]
    batch_rows: int
    batch_bytes: int
    slots: int
    slots_wanted: int
    """How many slots would be used if memory allowed."""
    threads: int
    rows_per_read: int
    smallest_bytes: int
    """The smallest budget that would do."""
    window_rows: int
    """Rows that are mixed together where rows come in blocks; 0 where each can be read by itself."""
    window_batches: int
    """Batches that a window may reach into."""
    limit_note: str = ""
    shuffle_quality: float | None = None
    """1.0 is a uniform shuffle; None where nothing is shuffled."""
    amplification: float = 1.0
    """Bytes that a reader of single rows would decode for each one delivered."""
    advice: Sequence[str] = ()
    """What there is to say about it, in sentences."""

    @property
    def shares(self) -> int:
        """Threads that read a block together."""
        large = self.window_rows and self.rows_per_read * self.batch_bytes > SHARE_ABOVE_BYTES * self.batch_rows
        return self.threads if large else 1

    @property
    def batches_filled_together(self) -> int:
        """Slots without which no read could begin."""
        return self.window_batches or self.batches_per_read

    @property
    def batches_per_read(self) -> int:
        """Whole batches in one read; 1 where a batch is one read or several."""
        return max(1, self.rows_per_read // self.batch_rows)

    @property
    def planned_bytes(self) -> int:
        return sum(self.holders.values())

    def __str__(self) -> str:
        rows = [(holder, format_size(bytes_), self._explain(holder)) for holder, bytes_ in self.holders.items()]
        rows.append(("planned", format_size(self.planned_bytes), ""))
        rows.append(("budget", format_size(self.limit_bytes), self.limit_note))
        wide = max(len(holder) for holder, _, _ in rows)
        table = [f"{holder:<{wide}}  {size:>9}  {why}".rstrip() for holder, size, why in rows]
        return "\n".join([*table, *self.advice])

    def _explain(self, holder: str) -> str:
        if holder == "batches":
            return f"{self.slots} of {_counted(self.batch_rows, 'row')}, {format_size(self.batch_bytes)} each"
        if holder == "reading":
            if self.window_rows:
                return (
                    f"{_counted(self.threads, 'thread')}, blocks of {_counted(self.rows_per_read, 'row')} read once, "
                    f"mixed in windows of {self.window_rows:,}"
                )
            several = self.batches_per_read > 1
            share = f"{self.batches_per_read} batches" if several else _counted(self.rows_per_read, "row")
            return f"{_counted(self.threads, 'thread')}, {share} a read"
        return ""


def make_plan(request: Request) -> Plan:
    """Decide; raise ``BudgetExceeded`` if nothing fits."""
    batch_bytes = slot_bytes(request.fields, request.batch_rows)
    # What a read may be, from what is wanted down to what is needed.
    sizes = _read_sizes(request)
    least = _least_slots(request, sizes[-1])
    smallest = _holders(request, batch_bytes, slots=least, threads=1, rows_per_read=sizes[-1])
    smallest_bytes = sum(smallest.values())
    if smallest_bytes > request.limit_bytes:
        raise BudgetExceeded(_refusal(request, smallest, batch_bytes))

    def fits(slots: int, threads: int, rows_per_read: int) -> bool:
        holders = _holders(request, batch_bytes, slots=slots, threads=threads, rows_per_read=rows_per_read)
        return sum(holders.values()) <= request.limit_bytes

    # Each in turn, and the next only when this one has all it wants: more memory never means less of anything.
    threads = next(t for t in range(request.threads, 0, -1) if t == 1 or fits(least, t, sizes[-1]))
    rows_per_read = sizes[-1]
    if threads == request.threads:
        rows_per_read = next(r for r in sizes if r == sizes[-1] or fits(_least_slots(request, r), threads, r))
    least = _least_slots(request, rows_per_read)
    most = max(least, min(_slots_wanted(request, threads, rows_per_read), request.steps + 1))
    slots = least
    if rows_per_read == sizes[0]:
        slots = next(s for s in range(most, 0, -1) if s == least or fits(s, threads, rows_per_read))

    ledger = MemoryBudget(request.limit_bytes)
    holders = _holders(request, batch_bytes, slots=slots, threads=threads, rows_per_read=rows_per_read)
    for holder, bytes_ in holders.items():
        ledger.reserve(holder, bytes_)
    return Plan(
        request.limit_bytes, ledger.holders, request.batch_rows, batch_bytes, slots, most, threads, rows_per_read,
        smallest_bytes, request.window_rows, _window_batches(request), request.limit_note, request.shuffle_quality,
        request.amplification, request.advice,
    )  # fmt: skip


def _read_sizes(request: Request) -> list[int]:
    """Rows a read, from the most that helps down to the least that works. Blocks are read whole or not at all."""
    if request.window_rows:
        return [request.block_rows]
    sizes = [_rows_per_read(request)]
    while sizes[-1] > 1:
        sizes.append(_whole_share(sizes[-1] // 2, request.batch_rows))
    return sizes


def _window_batches(request: Request) -> int:
    """Batches that a window may reach into: it can begin and end within one."""
    if not request.window_rows:
        return 0
    return min(-(-request.window_rows // request.batch_rows) + 1, max(1, request.steps))


def _slots_wanted(request: Request, threads: int, rows_per_read: int) -> int:
    """Beyond these, more slots would only hold what nobody waits for."""
    in_flight = _window_batches(request) or -(-threads * rows_per_read // request.batch_rows)
    return 2 * in_flight + 2 + request.spare_slots


def _rows_per_read(request: Request) -> int:
    """Rows worth a read of their own, as a share of a batch or a number of whole batches."""
    row, batch = max(1, row_bytes(request.fields)), request.batch_rows
    if request.far:
        return _whole_share(-(-batch // request.threads), batch)
    if row * batch < JOIN_BELOW_BYTES:
        together = min(JOIN_BELOW_BYTES // (row * batch), MOST_BATCHES_PER_READ, request.steps // (2 * request.threads))
        return batch * max(1, together)
    return _whole_share(min(-(-batch // request.threads), max(1, SPLIT_ABOVE_BYTES // row)), batch)


def _whole_share(rows: int, batch_rows: int) -> int:
    """Rounded so that reads divide a batch evenly, or batches a read."""
    if rows >= batch_rows:
        return rows // batch_rows * batch_rows
    return -(-batch_rows // -(-batch_rows // rows))


def _least_slots(request: Request, rows_per_read: int) -> int:
    """One batch in the caller's hands, and those that are filled together."""
    together = _window_batches(request) or max(1, rows_per_read // request.batch_rows)
    return 1 + together + request.spare_slots


def _holders(request: Request, batch_bytes: int, *, slots: int, threads: int, rows_per_read: int) -> dict[str, int]:
    return {
        "batches": slots * batch_bytes,
        "reading": threads * (request.scratch_bytes(rows_per_read) + THREAD_BYTES),
        "index": request.index_bytes,
        "base": BASE_BYTES,
    }


def _refusal(request: Request, smallest: Mapping[str, int], batch_bytes: int) -> str:
    needed = sum(smallest.values())
    costliest = max(smallest, key=lambda holder: smallest[holder])
    field, spec = max(request.fields.items(), key=lambda item: item[1].row_bytes)
    told = ", ".join(f"{holder} {format_size(bytes_)}" for holder, bytes_ in smallest.items() if bytes_)
    largest = f"{format_size(request.batch_rows * spec.row_bytes)} is {field!r} ({spec})"
    window = (
        f"Rows come in blocks of {request.block_rows:,} that are read whole, so {request.window_rows:,} rows are in "
        f"memory together. {_smaller_window(request)}"
        if request.window_rows
        else ""
    )
    return (
        f"memory={format_size(request.limit_bytes)} is too little: the smallest that works is {format_size(needed)} "
        f"({needed:,} bytes: {told}). Most goes to {costliest}. A batch of {_counted(request.batch_rows, 'row')} takes "
        f"{format_size(batch_bytes)}, of which {largest}; reading one row borrows "
        f"{format_size(request.scratch_bytes(1))}. {window}Raise memory, or lower batch_size, or leave fields out with "
        f"columns"
    )


def _smaller_window(request: Request) -> str:
    ways = []
    if request.window_rows > request.block_rows:
        ways.append(f"window={request.block_rows:,} mixes less and takes less memory")
    ways.append("select_within reads part of each row")
    if request.remedy:
        ways.append(f"a copy made once with {request.remedy} lets each row be read by itself")
    return f"{'; '.join(ways)}. "


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
