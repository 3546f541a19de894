"""Conversions on engines of others: two workers of Dask, two of Ray, four array jobs; same bytes as one process."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from tests.convert.sources import tree

import penstock as ps
from penstock.errors import PenstockError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

OPTIONS = {"memory": "200MiB", "shard_bytes": 400_000}
"""As many tasks as make a worker that dies in the middle likely to have one."""


@pytest.fixture
def source(tmp_path):
    np.save(tmp_path / "in.npy", np.random.default_rng(0).integers(0, 99, (2000, 5000)).astype(np.int16))
    (tmp_path / "one").mkdir()
    ps.convert(ps.open(tmp_path / "in.npy"), tmp_path / "one" / "out.zarr", executor="serial", **OPTIONS)
    (tmp_path / "other").mkdir()
    return ps.open(tmp_path / "in.npy")


def workers_of(goal):
    """The processes that write to the folder of a conversion, by the names of what they write."""
    folder = goal.parent / f".{goal.name}.penstock" / "partial"
    return {int(path.suffix[1:]) for path in folder.glob("*") if path.suffix[1:].isdecimal()} - {os.getpid()}


def kill_a_worker(goal, killed, over):
    """Kill one process that is writing; a few tasks are done before, so that they can be counted."""
    done = goal.parent / f".{goal.name}.penstock" / "done"
    while not over.wait(0.001):
        found = workers_of(goal) if done.is_dir() and len(list(done.iterdir())) > 3 else ()
        for pid in found:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
            return


def convert_and_kill(source, tmp_path, executor):
    goal, killed, over = tmp_path / "other" / "out.zarr", [], threading.Event()
    killer = threading.Thread(target=kill_a_worker, args=(goal, killed, over))
    killer.start()
    try:
        done = ps.convert(source, goal, executor=executor, workers=2, **OPTIONS)
    finally:
        over.set()
        killer.join()
    assert killed
    assert (done.done, done.found_done) == (done.plan.tasks, 0)  # none was lost, and none was counted twice
    assert done.plan.tasks > 20
    assert tree(tmp_path / "other") == tree(tmp_path / "one")


def test_two_workers_of_dask_one_of_which_is_killed(tmp_path, source):
    distributed = pytest.importorskip("distributed")
    with distributed.Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        convert_and_kill(source, tmp_path, client.get_executor())


def test_two_workers_of_ray_one_of_which_is_killed(tmp_path, source):
    ray = pytest.importorskip("ray")
    from penstock.integrations.ray import RayExecutor

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        convert_and_kill(source, tmp_path, RayExecutor(num_cpus=1))
    finally:
        ray.shutdown()


def test_four_array_jobs_one_of_which_is_killed(tmp_path, source):
    goal = tmp_path / "other" / "out.zarr"
    call = [sys.executable, "-m", "penstock", "convert", str(tmp_path / "in.npy"), str(goal), "--memory", "200MiB"]
    call += ["--shard-bytes", "400000", "--workers", "1"]
    jobs = [subprocess.Popen([*call, "--part", f"{number}/4"], stderr=subprocess.DEVNULL) for number in range(1, 5)]
    time.sleep(0.5)
    jobs[2].kill()
    assert [job.wait() for job in jobs][:2] == [0, 0]
    finish = [*call, "--finish"]
    if subprocess.run(finish, stderr=subprocess.PIPE, check=False).returncode:  # it was killed before its last task
        assert subprocess.run([*call, "--part", "3/4"], stderr=subprocess.DEVNULL, check=False).returncode == 0
        assert subprocess.run(finish, stderr=subprocess.DEVNULL, check=False).returncode == 0
    assert tree(tmp_path / "other") == tree(tmp_path / "one")


def test_what_fails_for_the_data_is_an_error_of_ours(tmp_path, source):
    distributed = pytest.importorskip("distributed")
    with distributed.Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        os.truncate(tmp_path / "in.npy", 10_000_000)
        with pytest.raises(PenstockError):
            ps.convert(source, tmp_path / "other" / "out.zarr", executor=client.get_executor(), workers=2, **OPTIONS)
    assert not (tmp_path / "other" / "out.zarr").exists()
