"""Laws of several datasets in one loader, over random lengths, batch sizes, ranks, numbers of samples and stops."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.base.spec import FieldSpec
from penstock.loader.interleave import Interleaved
from penstock.loader.order import BlockShuffled, InBlocks, InOrder, Shuffled, repeated
from penstock.loader.plan import make_joint_plan, make_plan
from penstock.loader.plan_request import Request
from penstock.loader.slots import slot_bytes

patient = settings(deadline=None)  # a busy machine is no failure

LENGTHS = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 17), min_size=1)


def dataset(name, rows):
    width = 3 + ord(name) - ord("a")
    return ps.from_arrays(voxels=np.arange(rows, dtype=np.int16)[:, None].repeat(width, 1), row=np.arange(rows))


@st.composite
def set_ups(draw):
    lengths = draw(LENGTHS)
    size = st.integers(1, 6)
    numbers = st.fixed_dictionaries({name: st.integers(1, 30) for name in lengths})
    return lengths, {
        "datasets": {name: dataset(name, rows) for name, rows in lengths.items()},
        "mode": draw(st.sampled_from(["together", "alternate"])),
        "batch_size": draw(st.one_of(size, st.fixed_dictionaries(dict.fromkeys(lengths, size)))),
        "samples": draw(st.one_of(st.just("all"), st.sampled_from(["all", "shortest", "longest"]), numbers)),
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 3)),
    }


def run(loader):
    """The steps of an epoch, as (name, rows) pairs."""
    steps = []
    for step in loader:
        pairs = step.items() if loader.mode == "together" else [step]
        steps.append([(name, batch["row"].tolist()) for name, batch in pairs])
        for _, batch in pairs:
            assert (batch["voxels"] == batch["row"][:, None]).all()
    return steps


def make(set_up, **options):
    return ps.MultiLoader(**set_up, memory="64MiB", output="numpy", **options)


@settings(patient, max_examples=40)
@given(set_ups(), st.integers(1, 4), st.integers(1, 3))
def test_ranks_share_exact_epochs(case, world, threads):
    lengths, set_up = case
    per_epoch = [Counter() for _ in range(2)]
    names = []
    for rank in range(world):
        with make(set_up, rank=rank, world_size=world, threads=threads, tail="drop") as loader:
            epochs = [run(loader) for _ in range(2)]
            assert [len(steps) for steps in epochs] == [len(loader)] * 2
        names.append([[[name for name, _ in step] for step in steps] for steps in epochs])
        for counter, steps in zip(per_epoch, epochs, strict=True):
            counter.update((name, row) for step in steps for name, rows in step for row in rows)
    assert all(each == names[0] for each in names), "every rank gets the same datasets at each step"
    if set_up["samples"] == "all":
        for counter in per_epoch:
            assert set(counter.values()) <= {1}
            for name, rows in lengths.items():
                came = sum(count for (dataset, _), count in counter.items() if dataset == name)
                assert rows - world < came <= rows, "fewer than ranks are left out, and only they"
    elif world == 1:  # passes are exact, across epochs too
        both = per_epoch[0] + per_epoch[1]
        for name, rows in lengths.items():
            counts = {both[name, row] for row in range(rows)}
            assert max(counts) - min(counts) <= 1


@settings(patient, max_examples=25)
@given(set_ups(), st.data())
def test_stopping_anywhere_is_invisible(case, data):
    _, set_up = case
    with make(set_up) as loader:
        whole = [run(loader) for _ in range(2)]
        steps = len(loader)
    stop = data.draw(st.integers(0, steps))
    with make(set_up) as loader:
        running = iter(loader)
        for _ in range(stop):
            next(running)
        state = json.loads(json.dumps(loader.state_dict(), sort_keys=True))
    with make(set_up, threads=data.draw(st.integers(1, 3))) as loader:
        loader.load_state_dict(state)
        rest = [run(loader) for _ in range(2 if stop < steps else 1)]
    assert rest == ([whole[0][stop:], whole[1]] if stop < steps else [whole[1]])


# The parts they are made of.


@st.composite
def orders(draw):
    rows = draw(st.integers(1, 40))
    starts = sorted({0, *draw(st.lists(st.integers(0, rows - 1), max_size=8))})
    seed, window = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["plain", "shuffled", "blocks", "block-shuffled"]))
    return {
        "plain": InOrder(rows),
        "shuffled": Shuffled(rows, seed),
        "blocks": InBlocks(rows, np.array(starts)),
        "block-shuffled": BlockShuffled(rows, np.array(starts), window, seed),
    }[kind]


@patient
@given(orders(), st.integers(1, 100), st.integers(0, 5))
def test_repeated_orders_are_the_passes_one_after_another(order, length, epoch):
    again = repeated(order, length)
    rows = len(order)
    begin = epoch * length
    passes = range(begin // rows, (begin + length) // rows + 1)
    endless = np.concatenate([order.rows(number, 0, rows) for number in passes])
    skipped = begin - passes[0] * rows
    assert np.array_equal(again.rows(epoch, 0, length), endless[skipped : skipped + length])
    assert len(again) == length


@patient
@given(orders(), st.integers(1, 100), st.integers(0, 5))
def test_windows_of_repeated_orders_hold_the_blocks_of_their_rows(order, length, epoch):
    if not isinstance(order, InBlocks | BlockShuffled):
        return
    again = repeated(order, length)
    windows = again.windows(epoch)
    assert (windows[0], windows[-1]) == (0, length)
    assert (np.diff(windows) > 0).all()
    for number in range(len(windows) - 1):
        rows = again.rows(epoch, int(windows[number]), int(windows[number + 1]))
        blocks = np.searchsorted(order.starts, rows, side="right") - 1
        assert set(blocks.tolist()) <= set(again.blocks_of(epoch, number).tolist())
        assert len(rows) <= again.window_blocks * again.block_rows


@patient
@given(
    st.integers(1, 10**9), st.integers(1, 10**4), st.one_of(st.none(), st.integers(0, 9)), st.integers(0, 3), st.data()
)
def test_times_keep_the_order_and_their_length(length, step_samples, seed, epoch, data):
    times = Interleaved("a", length, step_samples, seed)
    position = data.draw(st.integers(0, length - 1))
    at = times.time(epoch, position)
    assert position / length <= at <= min(position + step_samples, length) / length
    if position + step_samples < length:
        assert at <= times.time(epoch, position + step_samples)


@st.composite
def requests(draw):
    threads, scratch, shared = draw(st.integers(1, 8)), draw(st.integers(0, 10**6)), draw(st.integers(0, 10**7))
    found = {}
    for name in draw(st.lists(st.sampled_from("abcd"), min_size=1, unique=True)):
        spec = FieldSpec(np.dtype(np.float32), (draw(st.integers(0, 10**5)),))
        found[name] = Request(
            fields={"voxels": spec}, batch_rows=draw(st.integers(1, 64)), steps=draw(st.integers(0, 10**6)),
            threads=threads, limit_bytes=2**60, scratch_bytes=(draw(st.integers(1, 3)) * scratch).__add__,
            index_bytes=draw(st.integers(0, 10**6)), shared_index={1: shared},
        )  # fmt: skip
    return found


@patient
@given(requests(), st.one_of(st.just(0), st.integers(1, 10**7), st.integers(0, 2**34)), st.integers(0, 2**30))
def test_one_budget_for_all(found, extra, more):
    smallest = make_joint_plan(found).smallest_bytes
    plans = [
        make_joint_plan({name: replace(request, limit_bytes=limit) for name, request in found.items()})
        for limit in (smallest + extra, smallest + extra + more)
    ]
    for plan in plans:
        assert plan.planned_bytes == sum(plan.holders.values()) <= plan.limit_bytes
        used = sum(each.slots * slot_bytes(found[name].fields, each.batch_rows) for name, each in plan.plans.items())
        reading = max(found[name].scratch_bytes(each.rows_per_read) for name, each in plan.plans.items())
        index = sum(request.index_bytes for request in found.values()) + next(iter(found.values())).shared_index[1]
        assert plan.planned_bytes >= used + plan.threads * reading + index
        for name, each in plan.plans.items():
            assert each.slots >= min(1 + each.batches_per_read, max(1, found[name].steps))
        assert all(each.threads == plan.threads for each in plan.plans.values())
    less, larger = plans
    assert larger.threads >= less.threads, "more memory never means less of anything"
    for name in found:
        assert larger.plans[name].rows_per_read >= less.plans[name].rows_per_read
        assert larger.plans[name].slots >= less.plans[name].slots
    if len(found) == 1:
        name, request = next(iter(found.items()))
        alone = make_plan(replace(request, limit_bytes=plans[0].limit_bytes))
        assert alone.planned_bytes == less.planned_bytes
