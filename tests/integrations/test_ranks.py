"""Two ranks (gloo) in each engine: every row once per epoch, the order of a plain loop, resumes that lose nothing."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import penstock as ps

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
CHILD = Path(__file__).with_name("ranks_child.py")
ROWS, BATCH, EPOCHS, WORLD = 46, 4, 2, 2
NEEDS = {"plain": "torch", "accelerate": "accelerate", "lightning": "lightning"}


def run(engine, folder, stop_after=0, resume=False, world=WORLD):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    words = [str(CHILD), engine, str(folder), str(stop_after), "resume" if resume else "fresh"]
    ran = subprocess.run([*command, *words], capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr[-3000:]
    name = "resumed" if resume else "first"
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(world)]


def plain(world=WORLD):
    """Per rank, the batches of all epochs."""
    ds = ps.from_arrays(row=np.arange(ROWS))
    found = []
    for rank in range(world):
        options = {"batch_size": BATCH, "shuffle": True, "seed": 3, "memory": "64MiB", "output": "numpy"}
        with ps.Loader(ds, rank=rank, world_size=world, **options) as loader:
            found.append([batch["row"].tolist() for _ in range(EPOCHS) for batch in loader])
    return found


@pytest.mark.parametrize("engine", NEEDS)
def test_every_row_once_and_in_order(tmp_path, engine):
    pytest.importorskip(NEEDS[engine])
    found = run(engine, tmp_path)
    assert found == plain()
    per_epoch = len(found[0]) // EPOCHS
    for epoch in range(EPOCHS):
        rows = [row for rank in found for batch in rank[epoch * per_epoch : (epoch + 1) * per_epoch] for row in batch]
        assert sorted(rows) == list(range(ROWS))


@pytest.mark.parametrize("engine", NEEDS)
@pytest.mark.parametrize("stop_after", [2])
def test_stopped_and_resumed(tmp_path, engine, stop_after):
    pytest.importorskip(NEEDS[engine])
    first = run(engine, tmp_path, stop_after)
    rest = run(engine, tmp_path, resume=True)
    whole = plain()
    assert [before[:stop_after] for before in first] == [each[:stop_after] for each in whole]
    assert rest == [each[stop_after:] for each in whole]


def test_stopped_on_two_ranks_and_resumed_on_three(tmp_path):
    first = run("plain", tmp_path, stop_after=2)
    rest = run("plain", tmp_path, resume=True, world=3)
    rows = [row for rank in first for batch in rank for row in batch]
    per_rank = [[row for batch in rank for row in batch] for rank in rest]
    in_epoch = ROWS - len(rows)
    later = sorted(row for rank in per_rank for row in rank)
    assert len(later) == in_epoch + ROWS
    assert sorted(rows + later) == sorted([*range(ROWS), *range(ROWS)])
