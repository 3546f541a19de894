"""The memory budget holds over the network too: 16 threads read straight into batches, and a cache is on disk."""

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

MIB = 2**20
BUDGET = Path(__file__).resolve().parents[1] / "budget"

# Libraries are loaded before the first look, as in a program that trains.
CHILD = "import json, sys, penstock.remote.ranges; sys.path.insert(0, sys.argv[1]); import files_child; "
CHILD += "files_child.main(json.loads(sys.argv[2]))"


@pytest.fixture
def volumes(server):
    rng = np.random.default_rng(0)
    for shard in range(2):
        held = io.BytesIO()
        with tarfile.open(fileobj=held, mode="w") as tar:
            for number in range(40):
                content = io.BytesIO()
                np.save(content, rng.normal(size=(64, 64, 32)).astype(np.float32))
                about = tarfile.TarInfo(f"{shard}{number:03}.npy")
                about.size = content.tell()
                content.seek(0)
                tar.addfile(about, content)
        server.put(f"{shard}.tar", held.getvalue())
    return f"{server.url}/{{0..1}}.tar"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("memory", [None, 40 * MIB])
def test_the_budget_holds(volumes, memory):
    job = {"path": volumes, "batch_size": 8, "memory": memory, "threads": "auto"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(BUDGET), json.dumps(job)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    held = json.loads(done.stdout)
    assert held["rows"] == 2 * 80
    assert held["samples"] > 5
    assert held["batch"] < held["peak"] <= held["limit"], held
    assert held["threads"] == (1 if memory is None else 16)
