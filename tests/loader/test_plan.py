"""How a budget is spent: laws over many requests, and a few cases worked out by hand."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.base.sizes import format_size
from penstock.base.spec import FieldSpec
from penstock.errors import BudgetExceeded
from penstock.loader.plan import (
    BASE_BYTES,
    THREAD_BYTES,
    Request,
    holders,
    least,
    make_plan,
)
from penstock.loader.read_sizes import CHEAP_READ_BYTES, READ_ROW_BYTES
from penstock.loader.schedule import divide
from penstock.loader.slots import BATCH_RECORD_BYTES, BATCH_ROW_BYTES, Slots, slot_bytes

patient = settings(deadline=None)  # a busy machine is no failure

MiB = 2**20
PLENTY = 2**60

SPECS = st.builds(
    FieldSpec,
    st.sampled_from([np.dtype(np.float32), np.dtype(np.uint8), np.dtype(np.float64), np.dtype(np.int16)]),
    st.one_of(st.just(()), st.tuples(st.integers(0, 5000)), st.tuples(st.integers(1, 300), st.integers(1, 300))),
)


@st.composite
def scratches(draw):
    """What a store declares: something fixed, something a row, perhaps up to a number of rows only."""
    fixed, a_row, most = draw(st.integers(0, 4 * MiB)), draw(st.integers(0, 10**6)), draw(st.integers(1, 10**4))
    return lambda rows: fixed + a_row * min(rows, most)


REQUESTS = st.builds(
    Request,
    fields=st.dictionaries(st.sampled_from(["betas", "image", "label"]), SPECS, min_size=1),
    batch_rows=st.one_of(st.integers(1, 8), st.integers(1, 600)),
    steps=st.one_of(st.integers(0, 10), st.integers(0, 10**7)),
    threads=st.integers(1, 32),
    limit_bytes=st.just(PLENTY),
    scratch_bytes=scratches(),
    index_bytes=st.integers(0, 64 * MiB),
    spare_slots=st.integers(0, 2),
)

# Budgets from the smallest that works to far more than can be used.
GENEROSITY = st.one_of(st.just(0), st.integers(1, 10 * MiB), st.integers(0, 2**34))


def with_limit(request, extra_bytes):
    return replace(request, limit_bytes=make_plan(request).smallest_bytes + extra_bytes)


@patient
@given(REQUESTS, GENEROSITY)
def test_the_plan_keeps_the_budget(request, extra):
    request = with_limit(request, extra)
    plan = make_plan(request)
    assert plan.planned_bytes == sum(plan.holders.values()) <= request.limit_bytes == plan.limit_bytes
    assert plan.smallest_bytes <= request.limit_bytes


@patient
@given(REQUESTS, GENEROSITY)
def test_the_plan_counts_what_will_be_used(request, extra):
    plan = make_plan(with_limit(request, extra))
    assert plan.batch_bytes == slot_bytes(request.fields, request.batch_rows)
    assert plan.holders["batches"] == plan.slots * plan.batch_bytes
    assert plan.holders["reading"] >= plan.threads * request.scratch_bytes(plan.rows_per_read)
    assert plan.holders["index"] == request.index_bytes


@patient
@given(REQUESTS, GENEROSITY)
def test_the_plan_can_run(request, extra):
    plan = make_plan(with_limit(request, extra))
    assert 1 <= plan.threads <= request.threads
    enough = 1 + plan.batches_per_read + request.spare_slots  # one in the caller's hands, and one read's
    assert plan.slots >= min(enough, max(1, request.steps))
    assert plan.rows_per_read >= 1
    if plan.rows_per_read > plan.batch_rows:
        assert plan.rows_per_read % plan.batch_rows == 0, "whole batches a read"
    reads_per_batch = -(-plan.batch_rows // plan.rows_per_read)
    assert reads_per_batch == 1 or plan.batches_per_read == 1
    assert reads_per_batch * plan.rows_per_read >= plan.batch_rows
    if reads_per_batch > 1:
        assert (reads_per_batch - 1) * plan.rows_per_read < plan.batch_rows, "no read without rows"
    edges = divide(plan.batch_rows, plan.rows_per_read, plan)
    sizes = [end - begin for begin, end in pairwise(edges)]
    assert sum(sizes) == plan.batch_rows
    assert all(1 <= size <= plan.rows_per_read for size in sizes)


@patient
@given(REQUESTS)
def test_the_smallest_is_accepted_and_a_byte_less_refused(request):
    smallest = make_plan(request).smallest_bytes
    assert make_plan(replace(request, limit_bytes=smallest)).planned_bytes <= smallest
    with pytest.raises(BudgetExceeded) as refused:
        make_plan(replace(request, limit_bytes=smallest - 1))
    costliest = max(request.fields, key=lambda name: request.fields[name].row_bytes)
    for told in (f"{smallest:,} bytes", format_size(smallest), f"{request.batch_rows} row", "batch_size", "columns"):
        assert told in str(refused.value)
    biggest = request.fields[costliest].row_bytes
    named = [name for name, spec in request.fields.items() if repr(name) in str(refused.value)]
    assert [request.fields[name].row_bytes for name in named] == [biggest]


def simple(row_bytes, batch_rows, steps, threads):
    """A request of one field, whose reads borrow as much as they deliver."""
    fields = {"image": FieldSpec(np.dtype(np.uint8), (row_bytes,))}
    return Request(
        fields=fields,
        batch_rows=batch_rows,
        steps=steps,
        threads=threads,
        limit_bytes=PLENTY,
        scratch_bytes=lambda rows: rows * row_bytes,
    )


@patient
@given(REQUESTS, GENEROSITY, GENEROSITY)
@example(simple(10**6, batch_rows=1, steps=10**5, threads=2), 9 * MiB // 5, 2 * MiB)
def test_more_memory_never_means_fewer_threads(request, one, other):
    less, more = sorted([one, other])
    smaller, larger = make_plan(with_limit(request, less)), make_plan(with_limit(request, more))
    assert larger.threads >= smaller.threads


@patient
@given(REQUESTS, GENEROSITY, GENEROSITY)
@example(simple(10_000, batch_rows=32, steps=100, threads=4), 3 * MiB // 4, MiB)
@example(simple(100, batch_rows=256, steps=10**5, threads=4), 5 * MiB // 4, 3 * MiB // 2)
def test_more_memory_never_means_fewer_slots(request, one, other):
    less, more = sorted([one, other])
    smaller, larger = make_plan(with_limit(request, less)), make_plan(with_limit(request, more))
    assert larger.slots >= smaller.slots


@patient
@given(REQUESTS, GENEROSITY, GENEROSITY)
def test_more_memory_for_the_same_threads_never_means_fewer_slots(request, one, other):
    less, more = sorted([one, other])
    smaller, larger = make_plan(with_limit(request, less)), make_plan(with_limit(request, more))
    if (smaller.threads, smaller.rows_per_read) == (larger.threads, larger.rows_per_read):
        assert larger.slots >= smaller.slots


@patient
@given(REQUESTS)
def test_a_limit_is_not_a_goal(request):
    plan = make_plan(request)
    assert plan.threads == request.threads
    assert make_plan(replace(request, limit_bytes=2 * PLENTY)).holders == plan.holders
    assert plan.slots <= max(request.steps + 1, 1 + plan.batches_per_read + request.spare_slots)


@patient
@given(REQUESTS, GENEROSITY)
def test_printed_with_all_holders_and_the_budget(request, extra):
    plan = make_plan(replace(with_limit(request, extra), limit_note="a quarter of what is free"))
    lines = str(plan).splitlines()
    assert [line.split("  ")[0].strip() for line in lines] == [*plan.holders, "planned", "budget"]
    for line, bytes_ in zip(lines, [*plan.holders.values(), plan.planned_bytes, plan.limit_bytes], strict=True):
        assert f" {format_size(bytes_)}" in line
    assert lines[-1].endswith("a quarter of what is free")


# By hand.

ROW = FieldSpec(np.dtype(np.uint8), (MiB,))


def request(**changes):
    defaults = {
        "fields": {"image": ROW, "label": FieldSpec(np.dtype(np.int64))},
        "batch_rows": 8,
        "steps": 100,
        "threads": 4,
        "limit_bytes": PLENTY,
        "scratch_bytes": lambda rows: MiB * rows,
    }
    return Request(**{**defaults, **changes})


def test_threads_are_lowered_before_the_budget_is_refused():
    smallest = make_plan(request()).smallest_bytes
    threads = [make_plan(request(limit_bytes=smallest + extra * MiB)).threads for extra in range(60)]
    assert threads[0] == 1
    assert threads[-1] == 4
    assert set(threads) == {1, 2, 3, 4}
    assert threads == sorted(threads)


def test_large_batches_are_shared_between_threads():
    plan = make_plan(request(fields={"image": ROW}))
    assert plan.rows_per_read == 2
    assert -(-plan.batch_rows // plan.rows_per_read) == 4
    assert plan.batches_per_read == 1


def test_the_last_reads_of_a_batch_of_large_rows_are_small():
    plan = make_plan(request(fields={"image": FieldSpec(np.dtype(np.uint8), (8 * MiB,))}, batch_rows=32, threads=2))
    assert (plan.rows_per_read, plan.threads) == (8, 2)
    assert divide(32, 8, plan) == [0, 8, 16, 24, 28, 30, 32]
    assert divide(32, 8, replace(plan, processes=2)) == [0, 8, 16, 24, 32]


def test_small_batches_are_read_together():
    plan = make_plan(request(fields={"label": FieldSpec(np.dtype(np.int64))}, batch_rows=32, steps=10**6))
    assert plan.batches_per_read > 1
    assert -(-plan.batch_rows // plan.rows_per_read) == 1


def test_few_steps_are_left_to_all_threads():
    plan = make_plan(request(fields={"label": FieldSpec(np.dtype(np.int64))}, batch_rows=32, steps=8, threads=4))
    assert plan.batches_per_read == 1


def test_the_smallest_set_up_is_two_batches_and_a_thread():
    batch = 8 * MiB + 64 + BATCH_RECORD_BYTES + 8 * BATCH_ROW_BYTES
    thread = MiB + READ_ROW_BYTES + THREAD_BYTES
    assert make_plan(request()).smallest_bytes == 2 * batch + thread + BASE_BYTES
    assert make_plan(request(spare_slots=2)).smallest_bytes == 4 * batch + thread + BASE_BYTES


def test_the_refusal_says_what_to_do():
    with pytest.raises(BudgetExceeded) as refused:
        make_plan(request(limit_bytes=10 * MiB))
    for told in ("memory=10.0 MiB", "22.3 MiB", "batches 16.0 MiB", "'image'", "(1048576,)", "8.00 MiB", "batch_size"):
        assert told in str(refused.value)


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_slots_take_no_more_than_planned(rows):
    fields = {"a": FieldSpec(np.dtype(np.uint8), (3,)), "b": FieldSpec(np.dtype(np.float32), (5, 7))}
    slots = Slots(fields, rows, 5)
    arrays, _ = slots.memory(0)
    block = next(iter(arrays.values())).base
    while block.base is not None and isinstance(block.base, np.ndarray):
        block = block.base
    assert block.nbytes <= 5 * slot_bytes(fields, rows)


@patient
@given(REQUESTS)
def test_an_epoch_needs_no_more_slots_than_its_batches_and_one_of_the_epoch_before(request):
    slots = least(request).slots
    assert slots == 1 if request.steps <= 1 else slots <= 1 + request.steps + request.spare_slots


def test_an_epoch_of_one_batch_needs_the_memory_of_one_batch():
    one_batch = simple(10 * MiB, batch_rows=4, steps=1, threads=2)
    smallest = sum(holders([least(one_batch)], threads=1).values())
    plan = make_plan(replace(one_batch, limit_bytes=smallest))
    assert (plan.slots, plan.batch_bytes) == (1, 40 * MiB)
    assert make_plan(one_batch).slots == 2, "one more where there is room: the last batch of an epoch may be kept"


@patient
@given(REQUESTS, st.integers(1, 64), st.integers(1, 64))
def test_a_named_budget_is_enough_however_a_function_is_timed(request, before, after):
    """The trial of a function is run anew, and may then find that more rows, or fewer, are worth a call."""
    named = make_plan(replace(request, most_rows=before)).smallest_bytes
    plan = make_plan(replace(request, most_rows=after, limit_bytes=named))
    assert plan.planned_bytes <= named


def test_a_budget_between_row_by_row_and_the_smallest_is_used():
    few, many = (
        request(
            fields={"x": FieldSpec(np.dtype(np.uint8), (999,))},
            batch_rows=64,
            most_rows=n,
            scratch_bytes=lambda rows: rows * 999,
            steps=50,
        )
        for n in (1, 64)
    )
    named = make_plan(few).smallest_bytes
    assert named < make_plan(many).smallest_bytes < named + CHEAP_READ_BYTES
    plan = make_plan(replace(many, limit_bytes=named))
    assert (plan.rows_per_read, plan.threads) == (1, 1)
    with pytest.raises(BudgetExceeded):
        make_plan(replace(many, limit_bytes=named - 1))
