"""Several calls with one output at the same time: refused, or harmless."""

import subprocess
import sys

import numpy as np
import pytest
from tests.convert.sources import read_back, trial_major

import penstock as ps
from penstock.conversion import tasks
from penstock.conversion.work import Work
from penstock.errors import ConfigError, ConvertFailed

CHILD = """
import sys
import penstock as ps
from penstock.errors import ConvertFailed

source, goal = sys.argv[1:]
ds = ps.open(source)
print("ready", flush=True)
sys.stdin.readline()
try:
    ps.convert(ds, goal, shard_bytes="10kB", executor="serial")
    print("whole")
except ConvertFailed as error:
    print("refused" if "another process is converting" in str(error) else error)
"""


@pytest.fixture
def ds(tmp_path):
    trial_major(tmp_path / "in.h5")
    return ps.open(tmp_path / "in.h5")


def hidden(folder):
    return [path.name for path in folder.glob(".*")]


def test_a_second_call_is_refused_until_the_first_has_ended(tmp_path, ds):
    goal = tmp_path / "out.zarr"
    with Work(str(goal)).locked():
        for options in ({}, {"restart": True}, {"overwrite": True}, {"part": (1, 2)}, {"only_finish": True}):
            with pytest.raises(ConvertFailed, match="another process is converting to it"):
                ps.convert(ds, goal, **options)
        assert ps.convert(ds, goal, dry_run=True).plan.tasks == 1
    assert hidden(tmp_path) == []
    assert ps.convert(ds, goal).finished


def test_parts_work_at_the_same_time_and_the_call_that_finishes_works_alone(tmp_path, ds):
    goal = tmp_path / "out.zarr"
    with Work(str(goal)).locked(shared=True):
        for part in (1, 2):
            ps.convert(ds, goal, part=(part, 2), shard_bytes="10kB")
        with pytest.raises(ConvertFailed, match="another process is converting to it"):
            ps.convert(ds, goal, shard_bytes="10kB")
    assert ps.convert(ds, goal, shard_bytes="10kB").done == 0
    assert hidden(tmp_path) == []


def test_a_part_does_not_remove_what_others_did(tmp_path, ds):
    ps.convert(ds, tmp_path / "out.zarr", part=(1, 2), shard_bytes="10kB")
    with pytest.raises(ConfigError, match="would remove what others did"):
        ps.convert(ds, tmp_path / "out.zarr", part=(2, 2), shard_bytes="10kB", restart=True)


@pytest.mark.parametrize("goal", ["out.zarr", "out.npy", "out.h5"])
def test_calls_at_the_same_moment(tmp_path, ds, goal):
    call = [sys.executable, "-c", CHILD, str(tmp_path / "in.h5"), str(tmp_path / goal)]
    children = [subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    ended = [child.communicate(timeout=100)[0].strip() for child in children]
    assert "whole" in ended, ended
    assert set(ended) <= {"whole", "refused"}
    np.testing.assert_array_equal(read_back(tmp_path / goal), ds[:]["betas"])
    assert hidden(tmp_path) == []


def test_what_was_being_written_when_a_call_was_killed_is_removed_by_the_next(tmp_path, ds):
    work = Work(str(tmp_path / "out.zarr"))
    ps.convert(ds, tmp_path / "out.zarr", part=(1, 2), shard_bytes="10kB")
    left = work.partial("shard")
    with open(left, "wb") as file:
        file.write(b"half")
    with pytest.raises(ConvertFailed, match="tasks are not done"):
        ps.convert(ds, tmp_path / "out.zarr", only_finish=True, shard_bytes="10kB")
    assert not (tmp_path / left).exists()


@pytest.mark.parametrize("goal", ["out.zarr", "out.npy", "out.h5", "out.tar"])
def test_a_task_that_ends_after_the_conversion_leaves_nothing(tmp_path, ds, goal):
    """An engine may run a task twice, or go on when the call that began it was killed."""
    plan = ps.convert(ds, tmp_path / goal).plan
    job = tasks.Job(ds, plan, {"": {}})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises((ConvertFailed, FileNotFoundError)):
        tasks.run_task(job, next(plan.all_tasks()))
    assert hidden(tmp_path) == []
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_partial_files_of_two_machines_have_different_names(tmp_path):
    """Processes of two machines, or of two containers, may have the same number."""
    work = Work(str(tmp_path / "out.zarr"))
    assert work.partial("c/0") != work.partial("c/0")
