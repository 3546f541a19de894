"""How a budget is spent on one or several datasets, decided before anything is read. Arithmetic only.

The unit a thread works on is a *read*: part of a batch where batches are large (so that all threads help with the next
one), several batches where they are small (so that handing over costs little).

Memory goes to, in this order: the smallest set-up that works at all (one batch in the caller's hands, one being
filled, one thread), then as many threads as requested, then slots, until more would not help. An epoch of one batch
works with one slot, if the caller drops the batch before the next epoch; the second slot is its first wish. The budget
is a limit, not a goal. Several datasets that the same threads read share one budget; each has its own slots.

Every reservation has a named holder. Nothing waits for memory while the loader runs, so nothing can deadlock on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.base.dataclass import dataclass
from penstock.base.sizes import KiB, MiB
from penstock.base.user_functions import NO_LIMIT
from penstock.errors import BudgetExceeded
from penstock.loader import plan_text
from penstock.loader.plan_request import Request
from penstock.loader.read_sizes import read_bytes, read_sizes
from penstock.loader.slots import record_bytes, slot_bytes

# A slot that becomes free during a step is filled again only when the next batch is asked for.
SLOTS_FOR_PROCESSES = 2

# Threads share the reading of blocks larger than this, so that a window is ready sooner.
SHARE_ABOVE_BYTES = 8 * MiB

# Memory for threads that are started only if files turn out to be slow is at most this share of everything else, so
# that a plan stays close to what is used.
SPARE_SHARE = 1 / 16

# Measured: library code first touched (h5py, codecs), queues, allocator slack.
BASE_BYTES = 5 * MiB
# Measured: a thread's stack and its arena in the allocator.
THREAD_BYTES = 256 * KiB

# Measured at the peak, while the rows of a window are sorted by block: up to 64, 8 in the sort itself, and a margin.
WINDOW_ROW_BYTES = 80


@dataclass(frozen=True, repr=False, kw_only=True)
class _Reservations:
    """What plans of one and of several datasets have in common."""

    limit_bytes: int
    holders: Mapping[str, int]
    """Bytes by holder; where there are several datasets, the batches of each, then what all share."""
    threads: int
    spare_threads: int = 0
    """Threads that memory is reserved for, and that start only if files turn out to be slow."""
    smallest_bytes: int
    """The smallest budget that would work."""
    limit_note: str = ""
    processes: int = 0
    """Processes that the threads are in; 0 where they are threads of this process."""
    placement_note: str = ""
    """Why this number of processes, if the caller gave none."""

    @property
    def planned_bytes(self) -> int:
        return sum(self.holders.values())

    def __str__(self) -> str:
        return plan_text.as_text(*plan_text.describe(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return plan_text.as_html(*plan_text.describe(self))


@dataclass(frozen=True, repr=False, kw_only=True)
class Plan(_Reservations):
    """What a loader of one dataset will use. ``print(loader.plan)`` shows it as a table."""

    batch_rows: int
    batch_bytes: int
    slots: int
    slots_wanted: int
    """How many slots would be used if memory allowed."""
    rows_per_read: int
    window_rows: int
    """Rows that are mixed together where rows come in blocks; 0 where each can be read by itself."""
    window_batches: int
    """Batches that a window may reach into."""
    is_tight: bool = False
    """Whether the memory of free slots goes back to the system: not all of them fit at the same time."""
    shuffle_quality: float | None = None
    """1.0 is a uniform shuffle; None without shuffling."""
    amplification: float = 1.0
    """Bytes that a reader of single rows would decode per byte delivered."""
    advice: Sequence[str] = ()
    """Remarks on how the data are stored and mixed, in sentences."""

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
    def short_of_slots(self) -> bool:
        """Whether a larger budget would let reading run further ahead."""
        return self.slots < self.slots_wanted

    @property
    def wake_from(self) -> int:
        """How many free slots are worth waking a thread for: all that its read needs, if others are filled already."""
        return 1 if self.window_rows or self.short_of_slots else self.batches_per_read


@dataclass(frozen=True, repr=False, kw_only=True)
class JointPlan(_Reservations):
    """What a loader of several datasets will use. ``print(loader.plan)`` shows it as a table."""

    plans: Mapping[str, Plan]
    """The plan of each dataset, by name; its holders are its own batches alone."""

    @property
    def short_of_slots(self) -> bool:
        """Whether a larger budget would let reading run further ahead."""
        return any(plan.short_of_slots for plan in self.plans.values())

    @property
    def advice(self) -> list[str]:
        """Remarks on how the data are stored and mixed, in sentences."""
        return [f"{name}: {remark}" for name, plan in self.plans.items() for remark in plan.advice]


@dataclass(frozen=True)
class BudgetShare:
    """The share of a budget that one request gets."""

    request: Request
    rows_per_read: int
    slots: int
    is_tight: bool = False
    """Whether only rows that are filled take memory, and not whole slots."""

    @property
    def batch_bytes(self) -> int:
        return slot_bytes(self.request.fields, self.request.batch_rows)

    @property
    def slots_bytes(self) -> int:
        """The most bytes that all slots hold."""
        return self.request.tight_bytes(self.slots) if self.is_tight else self.slots * self.batch_bytes

    @property
    def thread_bytes(self) -> int:
        return read_bytes(self.request, self.rows_per_read) + THREAD_BYTES

    def slots_wanted(self, threads: int) -> int:
        """How many slots would be used if memory allowed, with ``threads`` threads at work on this request.

        One more than the epoch has batches: its last one may still be kept when the next epoch begins.
        """
        wanted = min(_slots_wanted(self.request, threads, self.rows_per_read), self.request.steps + 1)
        return max(_usual_slots(self.request, self.rows_per_read), wanted)


def make_plan(request: Request) -> Plan:
    """Plan for one dataset; raises ``BudgetExceeded`` if nothing fits."""
    joint = make_joint_plan({plan_text.ALONE: request})
    return replace(joint.plans[plan_text.ALONE], holders=joint.holders, spare_threads=joint.spare_threads)


def make_joint_plan(requests: Mapping[str, Request]) -> JointPlan:
    """Plan for several datasets; raises ``BudgetExceeded`` if nothing fits. Limit and threads are the same in all."""
    first = next(iter(requests.values()))
    smallest = _by_name({name: least(request) for name, request in requests.items()}, threads=1)
    threads, found = spend(list(requests.values()))
    if sum(holders(found, threads).values()) > first.limit_bytes:
        refusal, reason = plan_text.refusal(requests, smallest, first.limit_bytes)
        raise BudgetExceeded(f"{refusal} {reason}", smallest_bytes=sum(smallest.values()), reason=reason)
    smallest_bytes = min(sum(smallest.values()), first.limit_bytes)
    if not first.placement.is_asked_for:  # in a smaller budget, threads would read here
        smallest_bytes -= smallest.get(plan_text.PROCESSES, 0)
    spent = dict(zip(requests, found, strict=True))
    held = _by_name(spent, threads)
    spare = _spare_threads(found, threads, sum(held.values()))
    if spare:
        held[plan_text.SPARE] = spare * _thread_bytes(found)
    working = _at_work(threads, len(spent))
    common: dict[str, Any] = {
        "limit_bytes": first.limit_bytes, "limit_note": first.limit_note, "smallest_bytes": smallest_bytes,
        "threads": threads, "processes": first.placement.processes, "placement_note": first.placement.why,
    }  # fmt: skip
    plans = {
        name: Plan(
            **common, holders={plan_text.BATCHES: one.slots_bytes}, batch_rows=one.request.batch_rows,
            batch_bytes=one.batch_bytes, slots=one.slots, slots_wanted=one.slots_wanted(working),
            rows_per_read=one.rows_per_read, window_rows=one.request.window_rows,
            window_batches=one.request.window_batches, is_tight=one.is_tight,
            shuffle_quality=one.request.shuffle_quality,
            amplification=one.request.amplification, advice=one.request.advice,
        )
        for name, one in spent.items()
    }  # fmt: skip
    return JointPlan(**common, holders=held, plans=plans, spare_threads=spare)


def _by_name(spent: Mapping[str, BudgetShare], threads: int) -> dict[str, int]:
    """Bytes by holder, where each dataset's batches are a holder."""
    shared = holders(list(spent.values()), threads)
    del shared[plan_text.BATCHES]
    return {**{plan_text.batches_of(name): one.slots_bytes for name, one in spent.items()}, **shared}


def _spare_threads(spent: Sequence[BudgetShare], threads: int, planned_bytes: int) -> int:
    """Threads to keep memory for, where everything else has all it wants."""
    request, each = spent[0].request, _at_work(threads, len(spent))
    if threads < request.threads or any(one.slots < one.slots_wanted(each) for one in spent):
        return 0
    room = min(request.limit_bytes - planned_bytes, int(planned_bytes * SPARE_SHARE))
    return max(0, min(request.most_threads - threads, room // _thread_bytes(spent)))


def spend(requests: Sequence[Request]) -> tuple[int, list[BudgetShare]]:
    """Threads, and what each request gets of one budget: more than that, if not even the smallest set-up fits.

    One wish after another, and the next only when this one has all it wants: more memory never means less of anything.
    """
    limit_bytes, wanted = requests[0].limit_bytes, requests[0].threads
    smallest = [least(request) for request in requests]

    def fits(spent: list[BudgetShare], threads: int) -> bool:
        return sum(holders(spent, threads).values()) <= limit_bytes

    spent = [replace(one, slots=_usual_slots(one.request, one.rows_per_read)) for one in smallest]
    if not fits(smallest, 1):
        # How many rows a function gets may have been timed anew: a budget that was named before is still enough.
        return 1, [least(request, one_by_one=request.most_rows < NO_LIMIT) for request in requests]
    if not fits(spent, 1):
        return 1, smallest
    threads = next(number for number in range(wanted, 0, -1) if number == 1 or fits(spent, number))
    if threads < wanted:
        return threads, spent
    tight, spent = spent, [replace(one, is_tight=False) for one in spent]
    if not fits(spent, threads):
        return threads, tight
    for number, request in enumerate(requests):
        sizes = read_sizes(request)
        for rows in sizes:
            one = BudgetShare(request, rows, _usual_slots(request, rows))
            if rows == sizes[-1] or fits([*spent[:number], one, *spent[number + 1 :]], threads):
                break
        spent[number] = one
        if one.rows_per_read < sizes[0]:
            return threads, spent
    free_bytes = limit_bytes - sum(holders(spent, threads).values())
    more = _more_slots(spent, threads, free_bytes)
    return threads, [replace(one, slots=one.slots + extra) for one, extra in zip(spent, more, strict=True)]


def _more_slots(spent: Sequence[BudgetShare], threads: int, free_bytes: int) -> list[int]:
    """Slots beyond the least, one for each dataset in turn until one does not fit."""
    wanted = [one.slots_wanted(_at_work(threads, len(spent))) - one.slots for one in spent]
    costs = [one.batch_bytes + record_bytes(one.request.batch_rows) for one in spent]
    # Rounds in which every dataset still wants one and all fit, at once: there may be millions.
    rounds = min(*wanted, free_bytes // sum(costs))
    more = [rounds] * len(spent)
    free_bytes -= rounds * sum(costs)
    while more != wanted:
        for number, cost in enumerate(costs):
            if more[number] < wanted[number]:
                free_bytes -= cost
                if free_bytes < 0:
                    return more
                more[number] += 1
    return more


def _at_work(threads: int, requests: int) -> int:
    """Threads at work on one of ``requests`` requests at a time."""
    return -(-threads // requests)


def least(request: Request, *, one_by_one: bool = False) -> BudgetShare:
    """The smallest set-up that works at all: of an epoch of one batch, nothing is filled while the caller has it."""
    rows = 1 if one_by_one and not request.window_rows else read_sizes(request)[-1]
    if request.steps <= 1:
        return BudgetShare(request, rows, 1)
    loose = BudgetShare(request, rows, _usual_slots(request, rows))
    tight = replace(loose, is_tight=True)
    return tight if request.can_be_tight and tight.slots_bytes < loose.slots_bytes else loose


def holders(spent: Sequence[BudgetShare], threads: int) -> dict[str, int]:
    """Bytes by what they are for. A thread's scratch serves whatever it reads; what indices share counts once."""
    shared = {which: size for one in spent for which, size in one.request.shared_index.items()}
    return {
        plan_text.BATCHES: sum(one.slots_bytes for one in spent),
        plan_text.READING: threads * _thread_bytes(spent),
        plan_text.SCHEDULE: sum(
            one.slots * record_bytes(one.request.batch_rows) + WINDOW_ROW_BYTES * one.request.window_rows
            for one in spent
        ),
        plan_text.INDEX: sum(one.request.index_bytes for one in spent) + sum(shared.values()),
        plan_text.BASE: BASE_BYTES,
        **_process_holder(spent),
    }


def _process_holder(spent: Sequence[BudgetShare]) -> dict[str, int]:
    """What reader processes hold besides scratch: each has every dataset, and they share one copy of the tables."""
    count = spent[0].request.placement.processes
    if not count:
        return {}
    placements = [one.request.placement for one in spent]
    each = max(one.process_bytes for one in placements)
    return {plan_text.PROCESSES: count * each + sum(one.shared_bytes for one in placements)}


def _thread_bytes(spent: Sequence[BudgetShare]) -> int:
    return max(one.thread_bytes for one in spent)


def _slots_wanted(request: Request, threads: int, rows_per_read: int) -> int:
    """Beyond these, more slots would only hold batches that are not needed yet."""
    in_flight = request.window_batches or -(-threads * rows_per_read // request.batch_rows)
    unnoticed = SLOTS_FOR_PROCESSES if request.placement.processes else 0
    return 2 * in_flight + 2 + unnoticed + request.spare_slots


def _usual_slots(request: Request, rows_per_read: int) -> int:
    """One batch in the caller's hands, which may be the last of an epoch that is over, and those filled together."""
    together = request.window_batches or max(1, rows_per_read // request.batch_rows)
    return 1 + min(together, request.steps) + (request.spare_slots if request.steps > 1 else 0)
