"""Epochs, ranks, positions, and clean ends."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import penstock as ps
from penstock.errors import BudgetExceeded, KeptBatches, StateMismatch
from penstock.testing import check_resume

ROWS = 53
MEMORY = "64MiB"


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    """Five files whose values name their row: ``data[row] == row`` everywhere."""
    for number, rows in enumerate(np.array_split(np.arange(ROWS), 5)):
        np.save(tmp_path / f"session{number}.npy", np.repeat(rows[:, None], 30, 1).astype("<i2"))
    return tmp_path


@pytest.fixture
def ds(sessions: Path) -> ps.Dataset:
    return ps.open(sessions / "session*.npy").cast("data", "float32")


def loader(ds: ps.Dataset, **options: Any) -> ps.Loader:
    return ps.Loader(ds, **{"batch_size": 8, "shuffle": True, "memory": MEMORY, **options})


def rows_of(batch: Any) -> list[int]:
    values = batch["data"] if isinstance(batch, dict) else batch[0]
    assert (values == values[:, :1]).all()
    return [int(row) for row in values[:, 0]]


def reader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-reader")]


def open_data_files(folder: Path) -> int:
    descriptors = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(str(each.resolve()).startswith(str(folder)) for each in descriptors)


@pytest.mark.parametrize("batch_size", [1, 7, 8, 53, 60])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_sample_once_an_epoch(ds: ps.Dataset, batch_size: int, threads: int) -> None:
    with loader(ds, batch_size=batch_size, threads=threads) as batches:
        epochs = [[rows_of(batch) for batch in batches] for _ in range(3)]
    for epoch in epochs:
        assert len(epoch) == len(batches) == -(-ROWS // batch_size)
        assert sorted(chain(*epoch)) == list(range(ROWS))
    assert epochs[0] != epochs[1] != epochs[2]


def test_order_does_not_depend_on_threads_memory_or_output(ds: ps.Dataset) -> None:
    def run(**options: Any) -> list[list[int]]:
        with loader(ds, seed=3, **options) as batches:
            return [rows_of(batch) for batch in batches]

    assert run(threads=1) == run(threads=5) == run(memory="1GiB") == run(output="numpy") != run(threads=1, batch_size=9)


def test_in_order_and_drop_last(ds: ps.Dataset) -> None:
    with loader(ds, shuffle=False, drop_last=True) as batches:
        assert [rows_of(batch) for batch in batches] == [list(range(b, b + 8)) for b in range(0, 48, 8)]


def test_values_are_tensors_of_the_declared_type(ds: ps.Dataset) -> None:
    with loader(ds) as batches:
        batch = next(iter(batches))
    assert isinstance(batch["data"], torch.Tensor)
    assert batch["data"].dtype == torch.float32
    assert batch["data"].shape == (8, 30)


def test_columns_name_every_sample(ds: ps.Dataset, sessions: Path) -> None:
    labelled = ps.join(data=ds, label=np.arange(ROWS) * 10)
    with loader(labelled, columns=("label", "__index__", "__url__", "__key__", "data")) as batches:
        for label, index, urls, keys, data in batches:
            assert (label == index * 10).all()
            assert torch.equal(data[:, 0], index.float())
            assert all(Path(url).parent == sessions for url in urls)
            assert len(keys) == len(index)


@pytest.mark.case(15)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_ranks_share_an_epoch(ds: ps.Dataset, world_size: int, batch_size: int) -> None:
    loaders = [loader(ds, batch_size=batch_size, rank=r, world_size=world_size) for r in range(world_size)]
    shares = [[rows_of(batch) for batch in each] for each in loaders]
    assert len({len(share) for share in shares}) == 1, "equal steps on every rank"
    seen = [row for share in shares for batch in share for row in batch]
    left = ROWS % (batch_size * world_size)
    padded = world_size - left if 0 < left < world_size else 0
    assert len(seen) == ROWS + padded
    assert set(seen) == set(range(ROWS))
    with loader(ds, batch_size=batch_size * world_size) as alone:
        whole = [rows_of(batch) for batch in alone]
    for step, batch in enumerate(whole[:-1]):
        assert [row for share in shares for row in share[step]] == batch, "the global order does not depend on ranks"


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": False}, {"drop_last": True}, {"rank": 1, "world_size": 3}], ids=str
)
def test_resume_after_any_batch(ds: ps.Dataset, options: dict[str, Any]) -> None:
    check_resume(lambda: loader(ds, columns=("data", "__index__", "__key__"), **options))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 3), (3, 1), (1, 8)])
def test_resume_on_another_number_of_ranks(ds: ps.Dataset, before: int, after: int) -> None:
    first = [loader(ds, batch_size=3, rank=r, world_size=before) for r in range(before)]
    iterators = [iter(each) for each in first]
    seen = [row for _ in range(2) for each in iterators for row in rows_of(next(each))]
    states = [each.state_dict() for each in first]
    assert all(state == states[0] for state in states), "every rank saves the same position"
    second = [loader(ds, batch_size=3, rank=r, world_size=after) for r in range(after)]
    for each in second:
        each.load_state_dict(states[0])
    shares = [[rows_of(batch) for batch in each] for each in second]
    rest = [row for step in range(len(shares[0])) for share in shares for row in share[step]]
    order = ps.Shuffled(ROWS, 0).rows(0, 0, ROWS).tolist()
    assert (seen + rest)[:ROWS] == order, "the same global order goes on"
    for each in (*first, *second):
        each.close()


def test_state_is_small_json_and_epochs_go_on(ds: ps.Dataset) -> None:
    with loader(ds) as batches:
        assert batches.state_dict()["epoch"] == 0
        list(map(rows_of, batches))
        state = batches.state_dict()
        assert (state["epoch"], state["samples"]) == (1, 0)
        assert len(json.dumps(state)) < 300
        for _ in batches:
            break
        assert batches.state_dict()["samples"] == 8


def test_leaving_early_begins_the_next_epoch_next_time(ds: ps.Dataset) -> None:
    with loader(ds) as batches:
        for _ in batches:
            break
        second = [rows_of(batch) for batch in batches]
    assert list(chain(*second)) == ps.Shuffled(ROWS, 0).rows(1, 0, ROWS).tolist()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 1}, "seed"),
        ({"order": "in order"}, "order"),
        ({"data": "0" * 16}, "data"),
        ({"version": 99}, "version"),
        ({"samples": ROWS + 1}, "position"),
        ({"epoch": -1}, "position"),
        ({"more": 1}, "more"),
    ],
)
def test_a_foreign_state_is_refused(ds: ps.Dataset, change: dict[str, Any], told: str) -> None:
    with loader(ds) as batches:
        state = {**batches.state_dict(), **change}
        with pytest.raises(StateMismatch, match=told):
            batches.load_state_dict(state)


def test_loading_under_a_running_iteration_ends_it(ds: ps.Dataset) -> None:
    with loader(ds) as batches:
        running = iter(batches)
        next(running)
        batches.load_state_dict(batches.state_dict())
        with pytest.raises(StateMismatch, match="load_state_dict"):
            next(running)
        assert len(list(map(rows_of, batches))) == len(batches) - 1


def test_a_newer_iteration_ends_the_older(ds: ps.Dataset) -> None:
    with loader(ds) as batches:
        older = iter(batches)
        next(older)
        newer = iter(batches)
        rows_of(next(newer))
        with pytest.raises(StateMismatch, match="newer"):
            next(older)
        assert len(list(map(rows_of, newer))) == len(batches) - 1


@pytest.mark.parametrize("batch_size", [ROWS // 2 + 1, ROWS // 3 + 1])
@pytest.mark.parametrize("chunk_rows", [1, 7, ROWS])
def test_epochs_of_few_batches_stay_in_the_smallest_budget(tmp_path: Path, batch_size: int, chunk_rows: int) -> None:
    values = np.repeat(np.arange(ROWS)[:, None], 30_000, 1).astype("<i2")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("data", data=values, chunks=(chunk_rows, 30_000))
    ds = ps.open(tmp_path / "a.h5")
    smallest = loader(ds, batch_size=batch_size).plan.smallest_bytes
    with loader(ds, batch_size=batch_size, memory=smallest) as batches:
        assert batches.plan.slots <= 1 + len(batches)
        for _ in range(2):
            rows = []
            for batch in batches:  # which is still there when the next epoch begins
                rows += rows_of(batch)
            assert sorted(rows) == list(range(ROWS))
            assert batches.stats().kept_batches == 0


def test_an_epoch_of_one_batch_in_the_memory_of_one(ds: ps.Dataset) -> None:
    """Its second epoch begins when the batch of the first is dropped, or there is room for both."""
    smallest = loader(ds, batch_size=ROWS).plan.smallest_bytes
    with pytest.warns(KeptBatches, match=r"room for one batch.*del batch") as told:
        batches = loader(ds, batch_size=ROWS, memory=smallest, threads=3)
    assert told[0].filename == __file__
    with batches:
        for batch in batches:
            assert sorted(rows_of(batch)) == list(range(ROWS))
        with pytest.raises(BudgetExceeded, match=r"still in use.*room for one batch.*del batch") as refused:
            next(iter(batches))
        del batch
        for batch in batches:
            assert sorted(rows_of(batch)) == list(range(ROWS))
        assert batches.epoch == 2, "what was refused used up no epoch"
        assert batches.stats().kept_batches == 0
    with loader(ds, batch_size=ROWS, memory=refused.value.smallest_bytes, threads=3) as batches:
        for _ in range(3):
            for batch in batches:
                assert sorted(rows_of(batch)) == list(range(ROWS))
        assert batches.stats().kept_batches == 0


def test_kept_batches_stay_right_and_are_told_once(ds: ps.Dataset) -> None:
    smallest = loader(ds, batch_size=2).plan.smallest_bytes
    with loader(ds, batch_size=2, memory=smallest) as batches, pytest.warns(KeptBatches, match="kept") as told:
        kept = list(batches) + list(batches)
    assert len(told) == 1
    assert told[0].filename == __file__
    assert sorted(row for batch in kept[: len(batches)] for row in rows_of(batch)) == list(range(ROWS))
    assert sorted(row for batch in kept[len(batches) :] for row in rows_of(batch)) == list(range(ROWS))
    assert batches.stats().kept_batches > 0


def test_a_batch_outlives_its_loader(ds: ps.Dataset) -> None:
    with loader(ds) as batches:
        batch = next(iter(batches))["data"][:, :2]
        before = batch.clone()
    del batches
    gc.collect()
    assert torch.equal(batch, before)


class Stop(Exception):
    """Raised in a loop's body."""


def leave_by_break(batches: ps.Loader) -> None:
    for _ in batches:
        break


def leave_by_exception(batches: ps.Loader) -> None:
    with contextlib.suppress(Stop):
        for _ in batches:
            raise Stop


def drop_the_iterator(batches: ps.Loader) -> None:
    iterator = iter(batches)
    next(iterator)
    del iterator


def close_it(batches: ps.Loader) -> None:
    iterator = iter(batches)
    next(iterator)
    batches.close()


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_exception, drop_the_iterator, close_it])
def test_leaving_leaves_nothing_behind(ds: ps.Dataset, sessions: Path, leave: Callable[[ps.Loader], None]) -> None:
    batches = loader(ds)
    for _ in range(20):
        leave(batches)
        assert reader_threads() == []
        assert open_data_files(sessions) == 0


CTRL_C = """
    import signal, sys, time
    import penstock as ps
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may have it ignored
    loader = ps.Loader(ps.open(sys.argv[1]), batch_size=1, memory="64MiB", output="numpy", threads=3)
    print("ready", flush=True)
    for batch in loader:
        {body}
"""


@pytest.mark.slow
@pytest.mark.parametrize("body", ["time.sleep(0.05)", "pass"])
def test_ctrl_c_ends_the_process(tmp_path: Path, body: str) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3_000_000, 8), np.int8))
    command = [sys.executable, "-c", textwrap.dedent(CTRL_C.format(body=body)), str(tmp_path / "a.npy")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.5)
        began = time.monotonic()
        child.send_signal(signal.SIGINT)
        _, told = child.communicate(timeout=10)
    assert time.monotonic() - began < 8
    assert "KeyboardInterrupt" in told
    assert child.returncode != 0


def test_interpreter_exit_with_a_live_iterator(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((1000, 8), np.int8))
    code = textwrap.dedent(
        CTRL_C.format(body="break").replace("for batch in loader", "for batch in (it := iter(loader))")
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.npy")], timeout=20, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_stats_tell_the_bottleneck(ds: ps.Dataset) -> None:
    with loader(ds, batch_size=4) as batches:
        assert "nothing was read" in batches.stats().bottleneck
        for _ in batches:
            time.sleep(0.01)
        stats = batches.stats()
    assert stats.samples == ROWS
    assert stats.batches == len(batches)
    assert stats.samples_per_s > 0
    told = replace(stats, waited_for_data=stats.waited_for_data - stats.waited_for_first)  # which a busy machine delays
    assert told.waiting_share < 0.5
    assert "training step" in told.bottleneck
    assert str(ROWS) in str(stats)


def test_no_memory_given_takes_a_share_of_what_is_free(ds: ps.Dataset) -> None:
    with loader(ds, memory=None) as batches:
        assert "quarter" in str(batches.plan)
        assert 0 < batches.plan.planned_bytes <= batches.plan.limit_bytes


def test_resampled_and_custom_orders(ds: ps.Dataset) -> None:
    with loader(ds, shuffle=ps.Resampled(ROWS, 20, seed=1)) as batches:
        seen = [row for batch in batches for row in rows_of(batch)]
    assert seen == ps.Resampled(ROWS, 20, seed=1).rows(0, 0, 20).tolist()


def test_ranks_come_from_torch_distributed(ds: ps.Dataset, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        with loader(ds) as batches:
            assert len(batches) == -(-ROWS // 8)
    finally:
        torch.distributed.destroy_process_group()


def test_planning_a_billion_rows_for_a_thousand_ranks() -> None:
    rows = np.lib.stride_tricks.as_strided(np.zeros(1, np.int64), (10**9,), (0,))
    began = time.process_time()
    plan = loader(ps.from_arrays(x=rows), rank=1023, world_size=1024, batch_size=256)
    assert time.process_time() - began < 1
    assert len(plan) == -(-(10**9) // (256 * 1024))
