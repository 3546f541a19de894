"""Training inside a real control group of 600 MiB; skipped where this user cannot make one."""

import os
from pathlib import Path

import pytest

MiB = 2**20
LIMIT_BYTES = 600 * MiB
OWN_GROUPS = Path("/sys/fs/cgroup")

TRAIN = """
import os, sys
with open(sys.argv[1], "w") as procs:
    procs.write(str(os.getpid()))
import numpy as np
import torch
import penstock as ps
from penstock.base import cgroups

if sys.argv[2] == "unseen":
    cgroups.free_bytes = lambda: None
np.lib.format.open_memmap("a.npy", "w+", "f4", (1200, 1 << 18)).flush()  # a hole: twice the limit, no disk
ds = ps.open("a.npy")
loader = ps.Loader(ds.map(lambda batch: batch), batch_size=int(sys.argv[3]), shuffle=True, seed=0)
weight, seen = torch.zeros(1, requires_grad=True), 0
for batch in loader:
    (batch["data"].mean() * weight).sum().backward()
    seen += len(batch["data"])
print(seen, loader.plan.limit_bytes, sep=",")
"""


@pytest.fixture
def group(tmp_path):
    """A group without a limit of its own, inside one that has 600 MiB: the file that takes its processes."""
    version2 = (OWN_GROUPS / "cgroup.controllers").exists()
    top = OWN_GROUPS if version2 else OWN_GROUPS / "memory"
    outer = top / f"penstock-{os.getpid()}"
    inner, limit = outer / "inner", "memory.max" if version2 else "memory.limit_in_bytes"
    try:
        if version2 and "memory" not in (top / "cgroup.subtree_control").read_text().split():
            pytest.skip("groups of this machine have no limit of memory")
        outer.mkdir()
        (outer / limit).write_text(str(LIMIT_BYTES))
        if version2:
            (outer / "cgroup.subtree_control").write_text("+memory")
        inner.mkdir()
    except OSError as error:
        if outer.is_dir():
            outer.rmdir()
        pytest.skip(f"no group can be made here: {error}")
    yield inner / "cgroup.procs"
    inner.rmdir()
    outer.rmdir()


@pytest.mark.slow
@pytest.mark.case(40)
def test_training_without_a_budget_stays_inside_a_group(apart, group):
    done = apart(TRAIN, group, "seen", 40, deadline=120)
    assert done.code == 0, done.err
    seen, limit = map(int, done.out.split(","))
    assert seen == 1200
    assert limit < LIMIT_BYTES / 4


@pytest.mark.slow
@pytest.mark.case(40)
@pytest.mark.parametrize("limit", ["seen", "unseen"])
def test_batches_that_a_group_has_no_room_for_are_refused(apart, group, limit):
    """A program that does not see the limit is killed, so that the group is a real one."""
    done = apart(TRAIN, group, limit, 240, deadline=120)
    if limit == "unseen":
        assert done.code == -9, (done.out, done.err)
    else:
        assert "BudgetExceeded: memory=" in done.err
        assert "(a quarter of the " in done.err
