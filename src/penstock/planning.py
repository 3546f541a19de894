"""How a budget is spent, decided before anything is read. Arithmetic only.

The unit a thread works on is a *read*: part of a batch where batches are large (so that all threads help with the next
one), several batches where they are small (so that handing over costs little).

Memory goes to, in this order of need: the smallest set-up that works at all (one batch in the caller's hands, one being
filled, one thread), then as many threads as were asked for, then slots, until more would not help. The budget is a
limit, not a goal. Several datasets that are read by the same threads share one budget, each with slots of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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

# Memory for threads that are started only where files turn out to be slow is at most this share of everything else, so
# that a plan stays near what is used.
SPARE_SHARE = 1 / 16

# Measured: library code first touched (h5py, codecs), queues, the order's tables, allocator slack.
BASE_BYTES = 5 * MiB
# Measured: a thread's stack and its arena in the allocator.
THREAD_BYTES = 256 * KiB

MOST_BATCHES_PER_READ = 64

SPARE = "spare"
"""The holder of what is reserved for threads that may be started later."""


@dataclass(frozen=True)
class Request:
    """What is to be loaded, and with what."""

    fields: Fields
    """The fields as they lie in a slot."""
    batch_rows: int
    steps: int
    threads: int
    """How many are to begin with."""
    limit_bytes: int
    scratch_bytes: Callable[[int], int]
    """What one read of so many rows borrows."""
    index_bytes: int = 0
    shared_index: Mapping[int, int] = field(default_factory=dict)
    """Further bytes, by what is shared with other indices."""
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
    most_threads: int = 0
    """How many may be tried where files turn out to be slow; 0 tries none beyond ``threads``."""
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
    spare_threads: int = 0
    """Threads that memory is reserved for, and that are started where files turn out to be slow."""

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
        if holder == SPARE:
            return f"for up to {_counted(self.spare_threads, 'more thread')}, should files be slow"
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


@dataclass(frozen=True)
class Spent:
    """What of a budget goes to one request."""

    request: Request
    rows_per_read: int
    slots: int

    @property
    def batch_bytes(self) -> int:
        return slot_bytes(self.request.fields, self.request.batch_rows)

    def slots_wanted(self, threads: int) -> int:
        """How many slots would be used if memory allowed, with so many threads at work on this request."""
        wanted = min(_slots_wanted(self.request, threads, self.rows_per_read), self.request.steps + 1)
        return max(_least_slots(self.request, self.rows_per_read), wanted)

    def plan(self, threads: int, holders: Mapping[str, int], smallest_bytes: int, *, others: int = 0) -> Plan:
        """This as a plan, where the threads work for so many others too."""
        request, wanted = self.request, self.slots_wanted(_at_work(threads, 1 + others))
        return Plan(
            request.limit_bytes, holders, request.batch_rows, self.batch_bytes, self.slots, wanted,
            threads, self.rows_per_read, smallest_bytes, request.window_rows, _window_batches(request),
            request.limit_note, request.shuffle_quality, request.amplification, request.advice,
        )  # fmt: skip


def make_plan(request: Request) -> Plan:
    """Decide; raise ``BudgetExceeded`` if nothing fits."""
    smallest = holders([least(request)], threads=1)
    if sum(smallest.values()) > request.limit_bytes:
        raise BudgetExceeded(_refusal(request, smallest, least(request).batch_bytes))
    threads, spent = spend([request])
    ledger = MemoryBudget(request.limit_bytes)
    for holder, bytes_ in holders(spent, threads).items():
        ledger.reserve(holder, bytes_)
    spare, each = _spare_threads(spent[0], threads, ledger), _thread_bytes(spent)
    if spare:
        ledger.reserve(SPARE, spare * each)
    return replace(spent[0].plan(threads, ledger.holders, sum(smallest.values())), spare_threads=spare)


def _spare_threads(spent: Spent, threads: int, ledger: MemoryBudget) -> int:
    """Threads to keep memory for, where everything else has all it wants."""
    request = spent.request
    if threads < request.threads or spent.slots < spent.slots_wanted(threads):
        return 0
    planned = sum(ledger.holders.values())
    room = min(request.limit_bytes - planned, int(planned * SPARE_SHARE))
    return max(0, min(request.most_threads - threads, room // _thread_bytes([spent])))


def spend(requests: Sequence[Request]) -> tuple[int, list[Spent]]:
    """Threads, and what each request gets of one budget; the smallest set-up must fit.

    Each wish in turn, and the next only when this one has all it wants: more memory never means less of anything.
    """
    limit_bytes, wanted = requests[0].limit_bytes, requests[0].threads
    spent = [least(request) for request in requests]

    def fits(spent: list[Spent], threads: int) -> bool:
        return sum(holders(spent, threads).values()) <= limit_bytes

    threads = next(number for number in range(wanted, 0, -1) if number == 1 or fits(spent, number))
    if threads < wanted:
        return threads, spent
    for number, request in enumerate(requests):
        sizes = _read_sizes(request)
        for rows in sizes:
            one = Spent(request, rows, _least_slots(request, rows))
            if rows == sizes[-1] or fits([*spent[:number], one, *spent[number + 1 :]], threads):
                break
        spent[number] = one
        if one.rows_per_read < sizes[0]:
            return threads, spent
    free_bytes = limit_bytes - sum(holders(spent, threads).values())
    more = _more_slots(spent, threads, free_bytes)
    return threads, [replace(one, slots=one.slots + extra) for one, extra in zip(spent, more, strict=True)]


def _more_slots(spent: Sequence[Spent], threads: int, free_bytes: int) -> list[int]:
    """Slots beyond the least, one each in turn until one does not fit."""
    wanted = [one.slots_wanted(_at_work(threads, len(spent))) - one.slots for one in spent]
    more = [0] * len(spent)
    while more != wanted:
        for number, one in enumerate(spent):
            if more[number] < wanted[number]:
                free_bytes -= one.batch_bytes
                if free_bytes < 0:
                    return more
                more[number] += 1
    return more


def _at_work(threads: int, requests: int) -> int:
    """Threads at work on one of so many requests at a time."""
    return -(-threads // requests)


def least(request: Request) -> Spent:
    """The smallest set-up that works at all."""
    rows = _read_sizes(request)[-1]
    return Spent(request, rows, _least_slots(request, rows))


def holders(spent: Sequence[Spent], threads: int) -> dict[str, int]:
    """Bytes by what they are for. A thread's scratch serves whatever it reads; what indices share counts once."""
    shared = {which: size for one in spent for which, size in one.request.shared_index.items()}
    return {
        "batches": sum(one.slots * one.batch_bytes for one in spent),
        "reading": threads * _thread_bytes(spent),
        "index": sum(one.request.index_bytes for one in spent) + sum(shared.values()),
        "base": BASE_BYTES,
    }


def _thread_bytes(spent: Sequence[Spent]) -> int:
    return max(one.request.scratch_bytes(one.rows_per_read) for one in spent) + THREAD_BYTES


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
