"""Many rows that are smaller than their row numbers, in many small batches: what describes them counts too."""

import json
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

CHILD = Path(__file__).with_name("array_child.py")


def write(path: Path, rows: int) -> None:
    values = np.arange(rows, dtype=np.float32)
    if path.suffix == ".npy":
        np.save(path, values)
    else:
        with h5py.File(path, "w") as file:
            file.create_dataset("data", data=values, chunks=(5000,), compression="gzip")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "batch_size"),
    [
        ("in-chunks.h5", 40_000, 1),
        ("in-chunks.h5", 400_000, 100),
        ("in-chunks.h5", 2_000_000, 5000),
        ("one-by-one.npy", 40_000, 1),
        ("one-by-one.npy", 2_000_000, 4096),
    ],
)
def test_small_rows(tmp_path: Path, name: str, rows: int, batch_size: int) -> None:
    write(tmp_path / name, rows)
    write(tmp_path / f"first-{name}", 5000)
    job = {"path": str(tmp_path / name), "first": str(tmp_path / f"first-{name}"), "field": "data"}
    job |= {"batch_size": batch_size, "threads": 2, "memory": 2**30}
    done = subprocess.run([sys.executable, CHILD, json.dumps(job)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    held = json.loads(done.stdout)
    assert held["rows"] == 2 * rows
    assert held["samples"] > 5
    assert 0 < held["peak"] <= held["planned"] < held["limit"]
