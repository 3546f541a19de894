"""Engines, ranks, accumulation, fresh and resumed: every row once per epoch, in the order of a plain loop, and as many
optimizer steps as with torch's own DataLoader."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import penstock as ps

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HERE = Path(__file__).parent
ROWS, BATCH, EPOCHS = 46, 4, 2
NEEDS = {
    "plain": "torch",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "trainer": "transformers",
    "ray": "ray",
}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
LIMIT_S = 400


def launch(engine, folder, world):
    """Run everything of an engine on so many ranks; the error, or nothing."""
    if engine == "ray":
        commands = [[sys.executable, HERE / "run_ray.py", folder, str(world)]]
    else:
        script = (HERE / "run_engine.py", engine, folder)
        commands = [[*TORCHRUN, str(world), *script, phase] for phase in ("first", "resumed")]
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    for command in commands:
        ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=LIMIT_S, env=quiet)
        if ran.returncode:
            return f"{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    return ""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Per engine and number of ranks: what each rank noted, by kind of run and batches per step."""

    @cache
    def found(engine, world):
        folder = tmp_path_factory.mktemp(f"{engine}-{world}")
        error = launch(engine, folder, world)
        if error:
            return error
        return [
            {
                name: run
                for phase in ("first", "resumed")
                for name, run in json.loads((folder / f"{phase}-{rank}.json").read_text()).items()
            }
            for rank in range(world)
        ]

    return found


def plain_loop(world):
    """Per rank, the batches of all epochs."""
    ds = ps.from_arrays(row=np.arange(ROWS))
    found = []
    for rank in range(world):
        options = {"batch_size": BATCH, "shuffle": True, "seed": 3, "memory": "64MiB", "output": "numpy"}
        with ps.Loader(ds, rank=rank, world_size=world, **options) as loader:
            found.append([batch["row"].tolist() for _ in range(EPOCHS) for batch in loader])
    return found


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("kind", ["fresh", "resumed"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("engine", NEEDS)
def test_rows_and_optimizer_steps(results, engine, world, kind, accumulate):
    if importlib.util.find_spec(NEEDS[engine]) is None:
        pytest.skip(f"needs {NEEDS[engine]}")
    ranks = results(engine, world)
    assert not isinstance(ranks, str), ranks
    parts = [f"fresh-{accumulate}"] if kind == "fresh" else [f"stopped-{accumulate}", f"resumed-{accumulate}"]
    seen = [[batch for part in parts for batch in rank[part]["batches"]] for rank in ranks]
    assert all(rank[part]["batches"] for rank in ranks for part in parts)
    assert seen == plain_loop(world)
    per_epoch = len(seen[0]) // EPOCHS
    for epoch in range(EPOCHS):
        batches = [batch for rank in seen for batch in rank[epoch * per_epoch : (epoch + 1) * per_epoch]]
        assert sorted(row for batch in batches for row in batch) == list(range(ROWS))
    for rank in ranks:
        assert sum(rank[part]["steps"] for part in parts) == rank[f"torch-{accumulate}"]["steps"]
        assert rank[f"torch-{accumulate}"]["steps"] == EPOCHS * -(-per_epoch // accumulate)
