"""Interrupted at any moment and started again: only what is missing is done, and the bytes are the same."""

import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.convert.sources import read_back, tree, voxel_major

import penstock as ps
from penstock.base.machine import children
from penstock.conversion import tasks
from penstock.errors import ConvertFailed

GOALS = {
    "zarr": ("out.zarr", {"memory": "56MiB"}), "npy": ("out.npy", {"memory": "49MiB"}),
    "hdf5": ("out.h5", {"memory": "49MiB"}), "hdf5, zstd": ("out.h5", {"compression": "zstd", "memory": "56MiB"}),
}  # fmt: skip

CHILD = """
import json, sys
import penstock as ps

if __name__ == "__main__":
    source, goal, options = sys.argv[1:]
    print("begun", flush=True)
    ps.convert(ps.open(source, row_axis=1), goal, **json.loads(options))
"""


class Interrupted(Exception):
    pass


def outputs(folder):
    return {name: data for name, data in tree(folder).items() if name != "in.h5"}


@pytest.fixture
def source(tmp_path):
    expected = voxel_major(tmp_path / "in.h5", voxels=60_000, trials=100)
    return ps.open(tmp_path / "in.h5", row_axis=1), expected


@pytest.mark.parametrize("kind", GOALS)
def test_what_is_done_is_not_done_again_and_bytes_are_the_same(tmp_path, source, kind, monkeypatch):
    ds, expected = source
    goal, options = GOALS[kind]
    whole = ps.convert(ds, tmp_path / goal, executor="serial", **options)
    undisturbed = outputs(tmp_path)
    for path in outputs(tmp_path):
        (tmp_path / path).unlink()
    shutil.rmtree(tmp_path / goal, ignore_errors=True)
    assert whole.plan.tasks >= 3

    run, count = tasks.run_task, 0

    def stops(job, task):
        nonlocal count
        count += 1
        if count == 3:
            raise Interrupted
        return run(job, task)

    monkeypatch.setattr("penstock.conversion.attempt.run_task", stops)
    with pytest.raises(Interrupted):
        ps.convert(ds, tmp_path / goal, executor="serial", **options)
    assert not (tmp_path / goal).exists()
    monkeypatch.undo()
    again = ps.convert(ds, tmp_path / goal, executor="serial", **options)
    assert (again.found_done, again.done) == (2, whole.plan.tasks - 2)
    assert outputs(tmp_path) == undisturbed
    np.testing.assert_array_equal(read_back(tmp_path / goal), expected)


KILLED = {
    **{kind: (goal, {**options, "executor": "serial"}) for kind, (goal, options) in GOALS.items()},
    "tar": ("out-%02d.tar", {"memory": "100MiB", "shard_bytes": "1MiB", "executor": "serial"}),
    "parquet": ("out-%02d.parquet", {"memory": "400MiB", "shard_bytes": "2MiB", "executor": "serial"}),
    "zarr, processes": ("out.zarr", {"memory": "400MiB", "shard_bytes": "1MiB", "workers": 2}),
}  # fmt: skip
KILLS = 2


def kill_at_random_moments(folder, kind, seed):
    """Convert undisturbed; then again with kills, each at a moment of its own; both must leave the same files."""
    goal, options = KILLED[kind]
    for name in ("one", "two"):
        (folder / name).mkdir()
    began = time.perf_counter()
    assert wait_for(convert_child(folder, folder / "one" / goal, options)) == 0
    seconds = time.perf_counter() - began
    rng = np.random.default_rng([seed, *kind.encode()])
    for _ in range(KILLS):
        child = convert_child(folder, folder / "two" / goal, options)
        child.stdout.readline()
        time.sleep(rng.uniform(0, seconds))  # the moment is what is tried
        workers = children(child.pid)
        child.kill()
        wait_for(child)
        wait_until_gone(workers)
    assert wait_for(convert_child(folder, folder / "two" / goal, options)) == 0
    assert tree(folder / "two") == tree(folder / "one")
    assert set(os.listdir(folder / "two")) == set(os.listdir(folder / "one"))


def convert_child(folder, goal, options):
    call = [sys.executable, "-c", CHILD, str(folder / "in.h5"), str(goal), json.dumps(options)]
    return subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def wait_for(child):
    child.communicate()
    return child.returncode


def wait_until_gone(processes):
    """Workers end with the process that started them."""
    for _ in range(1000):
        if not any(is_running(pid) for pid in processes):
            return
        time.sleep(0.01)
    raise AssertionError("a worker outlived the process that started it")


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("kind", KILLED)
def test_killed_at_random_moments(tmp_path, source, kind, any_seed):
    kill_at_random_moments(tmp_path, kind, any_seed)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KILLED)
def test_killed_at_many_random_moments(tmp_path, source, kind, any_seed):
    kill_at_random_moments(tmp_path, kind, 1000 + any_seed)


@pytest.mark.parametrize("moment", ["put in place", "manifest", "provenance", "remove"])
@pytest.mark.parametrize("goal", ["out.zarr", "out.npy", "out-%d.tar"])
def test_interrupted_while_names_are_given(tmp_path, goal, moment, monkeypatch):
    def stop(*_):
        raise Interrupted

    where = {
        "put in place": "penstock.conversion.attempt.Attempt._put_in_place",
        "manifest": "penstock.conversion.attempt.manifests.write",
        "provenance": "penstock.conversion.attempt.Attempt._write_provenance",
        "remove": "penstock.conversion.work.Work.remove",
    }[moment]
    ds = ps.from_arrays(x=np.arange(500.0).reshape(50, 10))
    with monkeypatch.context() as patched:
        patched.setattr(where, stop)
        with pytest.raises(Interrupted):
            ps.convert(ds, tmp_path / goal, shard_bytes=1000)
    again = ps.convert(ds, tmp_path / goal, shard_bytes=1000)
    assert (again.done, again.finished) == (0, True)
    assert not list(tmp_path.glob(".*"))
    found = ps.open(tmp_path / goal.replace("%d", "*"))
    np.testing.assert_array_equal(found[:][next(iter(found.fields))], ds[:]["x"])


def test_parts_and_engines_write_the_same_bytes(tmp_path, source):
    ds, _ = source
    folders = {name: tmp_path / name for name in ("one", "parts", "threads", "processes")}
    for folder in folders.values():
        folder.mkdir()
    options = {"memory": "56MiB"}
    ps.convert(ds, folders["one"] / "out.zarr", executor="serial", **options)
    for part in (4, 2, 1, 3):
        goal = folders["parts"] / "out.zarr"
        assert not ps.convert(ds, goal, part=(part, 4), executor="serial", **options).finished
        assert not goal.exists()
    assert ps.convert(ds, goal, only_finish=True, **options).found_done == 0
    with ThreadPoolExecutor(2) as pool:
        ps.convert(ds, folders["threads"] / "out.zarr", executor=pool, workers=2, **options)
    for name in ("parts", "threads"):
        assert tree(folders[name]) == tree(folders["one"])


def test_finishing_early_names_what_is_missing(tmp_path, source):
    ds, _ = source
    ps.convert(ds, tmp_path / "out.npy", part=(1, 2), memory="49MiB")
    with pytest.raises(ConvertFailed, match="tasks are not done"):
        ps.convert(ds, tmp_path / "out.npy", only_finish=True, memory="49MiB")
    assert not (tmp_path / "out.npy").exists()
    assert ps.convert(ds, tmp_path / "out.npy", memory="49MiB").finished
