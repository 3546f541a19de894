"""Plans as tables of text and HTML, and the refusal of a budget that is too small."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.base import html
from penstock.base.sizes import format_count, format_size

if TYPE_CHECKING:
    from penstock.loader.plan import Plan
    from penstock.loader.plan_request import Request

# Holders of memory.
BATCHES, READING, SCHEDULE, INDEX, BASE = "batches", "reading", "schedule", "index", "base"
PROCESSES = "processes"
SPARE = "spare"
"""Reserved for threads that may be started later."""

ALONE = "\0"
"""Stands for the name of a dataset that is loaded alone, and has none."""

HolderRow = tuple[str, int, str]
"""A holder of memory, its bytes, and an explanation."""


def as_text(rows: Sequence[HolderRow], remarks: Sequence[str] = ()) -> str:
    """A table of text."""
    return "\n".join([*text_lines(rows), *remarks])


def text_lines(rows: Sequence[HolderRow]) -> list[str]:
    """The lines of a table of text."""
    width = max((len(holder) for holder, _, _ in rows), default=0)
    return [f"{holder:<{width}}  {format_size(bytes_):>9}  {why}".rstrip() for holder, bytes_, why in rows]


def as_html(rows: Sequence[HolderRow], remarks: Sequence[str] = ()) -> str:
    """A table of HTML, with bars that show each size relative to the largest."""
    most = max((bytes_ for _, bytes_, _ in rows), default=0)
    table = html.share_table([(name, bytes_, format_size(bytes_), why) for name, bytes_, why in rows], most)
    return table + (html.paragraph("\n".join(remarks)) if remarks else "")


def batches_of(name: str) -> str:
    """The holder of a dataset's batches; no dataset's name makes it one of the shared holders."""
    return BATCHES if name == ALONE else f"{name} {BATCHES}"


def prefix(name: str) -> str:
    """What names of a dataset's fields and samples begin with, where there are several datasets."""
    return "" if name == ALONE else f"{name}: "


def describe(plan: Any) -> tuple[list[HolderRow], Sequence[str]]:
    """The table of a plan of one dataset or several, and the remarks below it."""
    several: Mapping[str, Plan] = getattr(plan, "plans", {})
    why = {
        **{batches_of(name): _describe_batches(one) for name, one in (several or {ALONE: plan}).items()},
        READING: f"{format_count(plan.threads, 'thread')} for all" if several else _describe_reading(plan),
        SCHEDULE: "row numbers, records of batches",
        INDEX: "where the samples are",
        BASE: "libraries, queues, tables",
        PROCESSES: f"{format_count(plan.processes, 'process')} that read, and one copy of the tables for all",
        SPARE: f"for up to {format_count(plan.spare_threads, 'more thread')} if files are slow",
    }
    rows = [(holder, bytes_, why.get(holder, "")) for holder, bytes_ in plan.holders.items()]
    totals = [("planned", plan.planned_bytes, ""), ("budget", plan.limit_bytes, plan.limit_note)]
    return [*rows, *totals], [*([plan.placement_note] if plan.placement_note else []), *plan.advice]


def _describe_reading(plan: "Plan") -> str:
    threads, rows = format_count(plan.threads, "thread"), format_count(plan.rows_per_read, "row")
    if plan.window_rows:
        return f"{threads}, blocks of {rows} read once, mixed in windows of {plan.window_rows:,}"
    return f"{threads}, {rows if plan.batches_per_read == 1 else f'{plan.batches_per_read} batches'} per read"


def _describe_batches(plan: "Plan") -> str:
    tight = ", of which only filled rows take memory" if plan.is_tight else ""
    return f"{plan.slots} of {format_count(plan.batch_rows, 'row')}, {format_size(plan.batch_bytes)} each{tight}"


def refusal(requests: "Mapping[str, Request]", smallest: Mapping[str, int], limit_bytes: int) -> tuple[str, str]:
    """That a budget is too small; and why, by holder, and what would help."""
    first, needed = next(iter(requests.values())), sum(smallest.values())
    origin = f" ({first.limit_note})" if first.limit_note else ""
    parts = ", ".join(f"{holder} {format_size(bytes_)}" for holder, bytes_ in smallest.items() if bytes_)
    several = f" for these {len(requests)} datasets together" if ALONE not in requests else ""
    costliest = max(requests, key=lambda name: smallest[batches_of(name)])
    most = max(smallest, key=lambda holder: smallest[holder])
    request = requests[costliest]
    copy = f". A copy made once with {request.remedy} needs less" if most == INDEX and request.remedy else ""
    size = (
        f"memory={format_size(limit_bytes)}{origin} is too small{several}: the smallest that works is "
        f"{format_size(needed)} ({needed:,} bytes: {parts})."
    )
    reason = (
        f"Most goes to {most}. {_describe_batch(costliest, request)}{_describe_window(request)}Raise memory, or lower "
        f"batch_size, or leave fields out with columns{copy}"
    )
    return size, reason


def _describe_batch(name: str, request: "Request") -> str:
    if not request.fields:
        return ""
    of = "" if name == ALONE else f" of {name!r}"
    field, spec = max(request.fields.items(), key=lambda item: item[1].row_bytes)
    batch_bytes = request.batch_rows * sum(each.row_bytes for each in request.fields.values())
    return (
        f"A batch{of} with {format_count(request.batch_rows, 'row')} takes {format_size(batch_bytes)}, of which "
        f"{format_size(request.batch_rows * spec.row_bytes)} is {field!r} ({spec}); reading one row borrows "
        f"{format_size(request.scratch_bytes(1))}. "
    )


def _describe_window(request: "Request") -> str:
    if not request.window_rows:
        return ""
    ways = []
    if request.window_rows > request.block_rows:
        ways.append(f"window={request.block_rows:,} mixes less and takes less memory")
    ways.append("select_within reads part of each row")
    if request.remedy:
        ways.append(f"a copy made once with {request.remedy} lets each row be read by itself")
    return (
        f"Rows come in blocks of {request.block_rows:,} that are read whole, so {request.window_rows:,} rows are in "
        f"memory together. {'; '.join(ways)}. "
    )
