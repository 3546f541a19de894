"""How many threads read: decided by what is measured, within what was planned, and without a trace in the data."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.base.sizes import MiB
from penstock.base.spec import FieldSpec
from penstock.loader import read_sizes, tuning
from penstock.loader import runtime as runtime_module
from penstock.loader.loader import runtime_of
from penstock.loader.plan import THREAD_BYTES, make_plan
from penstock.loader.plan_request import Request
from penstock.loader.read_sizes import READ_ROW_BYTES
from penstock.loader.tuning import Period, Tuner, TuningCounts, next_threads


def period(threads: int, samples: int = 100, waited: float = 0.5, idle: float = 0.9) -> Period:
    return Period(threads, 1.0, samples, waited, float(threads), threads * (1 - idle))


@pytest.mark.parametrize(
    ("periods", "wanted"),
    [
        ([period(2)], 4),
        ([period(2, waited=0.01)], None),  # the training step does not wait
        ([period(2, idle=0.1)], None),  # threads compute
        ([period(2), period(4, 180)], 8),
        ([period(2), period(4, 180, waited=0.01)], None),  # enough
        ([period(2), period(4, 105)], 2),  # no gain: back
        ([period(2), period(4, 180), period(8, 300)], 12),  # as many as there is memory for
        ([period(6), period(12, 180)], None),
    ],
)
def test_decisions(periods: list[Period], wanted: int | None) -> None:
    assert next_threads(periods, most=12) == wanted


def test_a_number_that_was_given_up_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner, seen = Tuner(2, 8), []
    for number in range(40):  # always as slow
        monkeypatch.setattr(tuning, "time", SimpleNamespace(perf_counter=lambda now=number: now))
        if tuner.is_due(float(number)):
            tuner.look(TuningCounts(number, float(number), float(number), 0.0))
        seen.append(tuner.threads)
    assert tuner.settled
    assert seen[0] == 2
    assert seen[-1] == 2
    assert 4 in seen
    assert not Tuner(2, 2).is_due(0.0)


def request(**changes: Any) -> Request:
    values = {
        "fields": {"x": FieldSpec(np.dtype("u1"), (MiB,))}, "batch_rows": 16, "steps": 100, "threads": 2,
        "limit_bytes": 1024 * MiB, "scratch_bytes": lambda rows: MiB, "most_threads": 16,
    }  # fmt: skip
    return Request(**(values | changes))


def test_spare_threads_are_reserved_for_and_take_nothing_from_others() -> None:
    made, without = make_plan(request()), make_plan(request(most_threads=0))
    assert made.spare_threads > 0
    assert made.holders["spare"] == made.spare_threads * (MiB + READ_ROW_BYTES * made.rows_per_read + THREAD_BYTES)
    assert made.planned_bytes <= without.planned_bytes * 17 / 16
    assert {**made.holders, "spare": 0} == {**without.holders, "spare": 0}
    assert f"for up to {made.spare_threads} more threads if files are slow" in str(made)
    for limit in (without.planned_bytes, without.planned_bytes - 1):
        tight = make_plan(request(limit_bytes=limit))
        assert tight.spare_threads == 0
        assert "spare" not in tight.holders


class Slow:
    """A function that waits as a slow disk does, and counts who waits."""

    def __init__(self) -> None:
        self.at_once = self.most = 0
        self._counting = threading.Lock()

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        with self._counting:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        time.sleep(0.005)
        with self._counting:
            self.at_once -= 1
        return {"x": batch["x"]}


@pytest.mark.parametrize("threads", ["auto", 2])
def test_slow_files_get_more_threads_in_the_same_order_and_budget(
    monkeypatch: pytest.MonkeyPatch, threads: Any
) -> None:
    monkeypatch.setattr("penstock.loader.placement.cores", lambda: 2)
    monkeypatch.setattr(tuning, "PERIOD_S", 0.02)
    monkeypatch.setattr(read_sizes, "JOIN_BELOW_BYTES", 0)  # or else a few reads would be all
    slow = Slow()
    ds = ps.from_arrays(x=np.arange(32_000, dtype=np.int64).reshape(-1, 100)).map(slow)
    with ps.Loader(ds, batch_size=4, shuffle=True, seed=3, memory="64MiB", threads=threads, output="numpy") as loader:
        slow.most = 0
        seen = [batch["x"][:, 0] // 100 for batch in loader]
        stats = loader.stats()
    with ps.Loader(ds, batch_size=4, shuffle=True, seed=3, memory="64MiB", threads=1, output="numpy") as one:
        assert np.array_equal(np.concatenate(seen), np.concatenate([batch["x"][:, 0] // 100 for batch in one]))
    most = loader.plan.threads + loader.plan.spare_threads
    assert 2 <= stats.threads <= most
    assert slow.most == 2 if threads == 2 else 2 < slow.most <= most  # tried, whether it stays or not
    assert loader.plan.planned_bytes <= loader.plan.limit_bytes


def test_a_system_that_has_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.loader.placement.cores", lambda: 1)
    monkeypatch.setattr(tuning, "PERIOD_S", 0.02)
    monkeypatch.setattr(read_sizes, "JOIN_BELOW_BYTES", 0)
    refused, start = [], threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        if thread.name == "penstock-reader-1":
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", none_left)
    ds = ps.from_arrays(x=np.arange(80)).map(Slow())
    with ps.Loader(ds, batch_size=2, memory="64MiB", output="numpy") as loader:
        assert [int(row) for batch in loader for row in batch["x"]] == list(range(80))
        assert loader.stats().threads == 1
    assert refused


def test_the_next_epoch_begins_with_what_was_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.loader.placement.cores", lambda: 1)
    monkeypatch.setattr(tuning, "PERIOD_S", 0.02)
    ds = ps.from_arrays(x=np.arange(400)).map(Slow())
    with ps.Loader(ds, batch_size=400, memory="64MiB", output="numpy") as loader:
        started: list[int] = []
        original = runtime_module.Team
        monkeypatch.setattr(runtime_module, "Team", lambda threads, *rest: started.append(threads) or original(threads))
        runtime_of(loader)._tuner.threads = 3
        for _ in range(2):
            assert sum(len(batch["x"]) for batch in loader) == 400
    assert started == [3, 3]


@pytest.mark.parametrize(("files", "row_bytes", "alone"), [(12, 20_000, True), (3, 20_000, False), (12, 40_000, False)])
def test_one_thread_gathers_rows_from_many_mapped_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, row_bytes: int, alone: bool
) -> None:
    """Two would meet at the interpreter's lock. Asked for, there are two."""
    monkeypatch.setattr("penstock.loader.placement.cores", lambda: 4)
    for number in range(files):
        np.save(tmp_path / f"{number:02d}.npy", np.full((5, row_bytes), number, np.uint8))
    ds = ps.open(tmp_path / "*.npy")
    with ps.Loader(ds, batch_size=8, shuffle=True, memory="64MiB") as loader:
        assert loader.plan.threads == (1 if alone else 4)
        assert sum(len(batch["data"]) for batch in loader) == 5 * files
    with ps.Loader(ds, batch_size=8, shuffle=True, memory="64MiB", threads=2) as loader:
        assert loader.plan.threads == 2
