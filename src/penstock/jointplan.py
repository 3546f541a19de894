"""How one budget is spent on several datasets that are read together. Arithmetic only."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.budget import MemoryBudget
from penstock.errors import BudgetExceeded
from penstock.planning import Plan, Request, Spent, holders, least, spend
from penstock.sizes import format_size


@dataclass(frozen=True)
class JointPlan:
    """What a loader of several datasets will use. ``print(loader.plan)`` shows it as a table."""

    limit_bytes: int
    holders: Mapping[str, int]
    """Bytes by holder: each dataset's batches, then what all share."""
    plans: Mapping[str, Plan]
    """Of each dataset, by name; its holders are its own alone."""
    threads: int
    smallest_bytes: int
    """The smallest budget that would do."""
    limit_note: str = ""

    @property
    def planned_bytes(self) -> int:
        return sum(self.holders.values())

    @property
    def short_of_slots(self) -> bool:
        """Whether a larger budget would let reading run further ahead."""
        return any(plan.slots < plan.slots_wanted for plan in self.plans.values())

    def __str__(self) -> str:
        rows = [(holder, format_size(bytes_), self._explain(holder)) for holder, bytes_ in self.holders.items()]
        rows.append(("planned", format_size(self.planned_bytes), ""))
        rows.append(("budget", format_size(self.limit_bytes), self.limit_note))
        wide = max(len(holder) for holder, _, _ in rows)
        table = [f"{holder:<{wide}}  {size:>9}  {why}".rstrip() for holder, size, why in rows]
        return "\n".join([*table, *(f"{name}: {said}" for name, plan in self.plans.items() for said in plan.advice)])

    def _explain(self, holder: str) -> str:
        for name, plan in self.plans.items():
            if holder == _batches(name):
                return f"{plan.slots} of {plan.batch_rows} rows, {format_size(plan.batch_bytes)} each"
        return f"{self.threads} threads for all" if holder == "reading" else ""


def make_joint_plan(requests: Mapping[str, Request]) -> JointPlan:
    """Decide; raise ``BudgetExceeded`` if nothing fits. Limit, note and threads are the same in every request."""
    any_request = next(iter(requests.values()))
    smallest = _by_name({name: least(request) for name, request in requests.items()}, threads=1)
    smallest_bytes = sum(smallest.values())
    if smallest_bytes > any_request.limit_bytes:
        raise BudgetExceeded(_refusal(requests, smallest, any_request.limit_bytes))
    threads, found = spend(list(requests.values()))
    spent = dict(zip(requests, found, strict=True))
    ledger = MemoryBudget(any_request.limit_bytes)
    for holder, bytes_ in _by_name(spent, threads).items():
        ledger.reserve(holder, bytes_)
    plans = {
        name: one.plan(threads, {"batches": ledger.holders[_batches(name)]}, smallest_bytes, others=len(spent) - 1)
        for name, one in spent.items()
    }
    return JointPlan(any_request.limit_bytes, ledger.holders, plans, threads, smallest_bytes, any_request.limit_note)


def _batches(name: str) -> str:
    """The holder of a dataset's batches; no dataset's name makes it one of those that all share."""
    return f"{name} batches"


def _by_name(spent: Mapping[str, Spent], threads: int) -> dict[str, int]:
    shared = holders(list(spent.values()), threads)
    del shared["batches"]
    return {**{_batches(name): one.slots * one.batch_bytes for name, one in spent.items()}, **shared}


def _refusal(requests: Mapping[str, Request], smallest: Mapping[str, int], limit_bytes: int) -> str:
    needed = sum(smallest.values())
    told = ", ".join(f"{holder} {format_size(bytes_)}" for holder, bytes_ in smallest.items() if bytes_)
    costliest = max(requests, key=lambda name: smallest[_batches(name)])
    request, one = requests[costliest], least(requests[costliest])
    field, spec = max(request.fields.items(), key=lambda item: item[1].row_bytes)
    window = (
        f", since {request.window_rows:,} rows that come in blocks are in memory together; "
        f"window={request.block_rows:,} mixes less and takes less memory"
        if request.window_rows
        else ""
    )
    return (
        f"memory={format_size(limit_bytes)} is too little for these {len(requests)} datasets together: the smallest "
        f"that works is {format_size(needed)} ({needed:,} bytes: {told}). Most goes to {costliest!r}: "
        f"{one.slots} batches of {request.batch_rows} rows, {format_size(one.batch_bytes)} each, of which "
        f"{format_size(request.batch_rows * spec.row_bytes)} is {field!r} ({spec}){window}. Raise memory, or lower "
        f"batch_size, or leave fields out with columns"
    )
