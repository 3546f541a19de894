"""Processes of this machine, which may die; and engines of others."""

import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from tests.convert.sources import read_back, voxel_major

import penstock as ps
from penstock.base import executors
from penstock.conversion import tasks
from penstock.conversion.tasks import run_task
from penstock.errors import Corrupt, WorkerDied

pytestmark = pytest.mark.slow  # each starts processes


@pytest.fixture
def source(tmp_path):
    expected = voxel_major(tmp_path / "in.h5", voxels=40_000, trials=100)
    return ps.open(tmp_path / "in.h5", row_axis=1), expected


def parted(ds, goal, **options):
    """As many tasks as there are parts of a row: little memory."""
    return ps.convert(ds, goal, memory="340MiB", shard_bytes="1MiB", workers=2, **options)


def test_processes_are_started_where_they_fit(tmp_path):
    rows = np.random.default_rng(0).normal(size=(64, 50_000))
    np.save(tmp_path / "in.npy", rows)
    done = parted(ps.open(tmp_path / "in.npy"), tmp_path / "out.zarr")
    assert done.plan.workers == 2
    assert done.plan.tasks > 4
    np.testing.assert_array_equal(
        read_back(tmp_path / "out.zarr", next(iter(ps.open(tmp_path / "in.npy").fields))), rows
    )


def test_somebody_elses_processes(tmp_path, source):
    ds, expected = source
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        ps.convert(ds, tmp_path / "out.npy", executor=pool, workers=2, memory="340MiB")
    np.testing.assert_array_equal(read_back(tmp_path / "out.npy"), expected)


@pytest.fixture
def job(tmp_path):
    np.save(tmp_path / "in.npy", np.arange(4000.0).reshape(40, 100))
    options = {"memory": "340MiB", "shard_bytes": 4000}
    ds = ps.open(tmp_path / "in.npy")
    plan = ps.convert(ds, tmp_path / "out.zarr", dry_run=True, **options).plan
    job = tasks.Job(ds, plan, {"": {}})
    job.work.begin({"key": "test"})
    return job


def test_a_process_that_dies_costs_its_task(job):
    every = list(job.plan.all_tasks())
    running = executors.run_in_processes(run_task, job, every, 2)
    done = [next(running)]
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    done += running
    assert sorted(each.number for each in done) == [task.number for task in every]
    assert len(every) > 3


class OnlyHere:
    """Of a module that other processes cannot import."""


def test_processes_that_cannot_begin_are_told_of(job, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "only_here", sys.modules[OnlyHere.__module__])
    monkeypatch.setattr(OnlyHere, "__module__", "only_here")
    other = replace(job, attributes={"": {"x": OnlyHere()}})
    with pytest.raises(WorkerDied, match=r"ended without an error message, 3 times.*__main__"):
        list(executors.run_in_processes(run_task, other, job.plan.all_tasks(), 2))


class Unsteady:
    """An engine whose every third task is lost, or fails as the data do."""

    def __init__(self, error):
        self.error, self.count = error, 0

    def submit(self, function, *args):
        self.count += 1
        future = Future()
        if self.count % 3 == 2:
            future.set_exception(self.error)
        else:
            future.set_result(function(*args))
        return future


def test_what_an_engine_loses_is_begun_again(job):
    every = list(job.plan.all_tasks())
    done = list(executors.run_on(Unsteady(OSError("lost")), run_task, job, every, 2))
    assert len(done) == len(every)


def test_what_fails_for_the_data_is_not_tried_again(job):
    engine = Unsteady(Corrupt("a bad chunk"))
    with pytest.raises(Corrupt):
        list(executors.run_on(engine, run_task, job, job.plan.all_tasks(), 1))
    assert engine.count == 2


def test_a_script_without_a_guard_is_not_run_again_in_each_process(tmp_path):
    np.save(tmp_path / "in.npy", np.random.default_rng(0).normal(size=(64, 50_000)))
    script = tmp_path / "script.py"
    script.write_text(
        "print('begun')\n"
        "import penstock as ps\n"
        "done = ps.convert(ps.open('in.npy'), 'out.zarr', memory='340MiB', shard_bytes='1MiB', workers=2)\n"
        "print(done.plan.workers)\n"
    )
    ran = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["begun", "2"]


def test_a_function_of_a_script_with_a_guard_goes_along(tmp_path):
    np.save(tmp_path / "in.npy", np.arange(640_000.0).reshape(64, 10_000))
    script = tmp_path / "script.py"
    script.write_text(
        "import penstock as ps\n"
        "def double(batch):\n"
        "    return {'data': batch['data'] * 2}\n"
        "if __name__ == '__main__':\n"
        "    ds = ps.open('in.npy').map(double)\n"
        "    done = ps.convert(ds, 'out.npy', memory='340MiB', shard_bytes='1MiB', workers=2)\n"
        "    print(done.plan.workers)\n"
    )
    ran = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["2"]
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), np.arange(640_000.0).reshape(64, 10_000) * 2)
