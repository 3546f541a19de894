"""The budget is a law for several datasets together: batches of all, and one team of threads.

Each case runs in a fresh process, so that no memory freed by an earlier test can hide what is taken.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

CHILD = Path(__file__).with_name("multi_child.py")
MIB = 2**20
# Voxels, rows, and how they are stored.
SUBJECTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "subj01": (699_192, 24, {}),
    "subj02": (610_000, 17, {"chunks": (1, 610_000), "compression": "gzip", "compression_opts": 1, "shuffle": True}),
    "subj05": (530_000, 20, {"chunks": (4, 265_000), "compression": "gzip", "compression_opts": 1}),
    "subj07": (6_000, 30, {"chunks": (30, 1)}),
}
ROWS = sum(rows for _, rows, _ in SUBJECTS.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("subjects")
    rng = np.random.default_rng(0)
    for name, (voxels, rows, options) in SUBJECTS.items():
        smooth = np.cumsum(rng.integers(-20, 21, (rows, voxels), np.int16), axis=-1, dtype=np.int16)
        with h5py.File(root / f"{name}.hdf5", "w") as file:
            file.create_dataset("betas", data=smooth, **options)
    with h5py.File(root / "stimuli.hdf5", "w") as file:
        file["imgBrick"] = rng.integers(0, 256, (20, 425, 425, 3), np.uint8)
    return root


def run(folder: Path, **job: Any) -> dict[str, int]:
    job = {"folder": str(folder), "mode": "together", "samples": "all", "threads": 2, "pad": False, **job}
    done = subprocess.run([sys.executable, CHILD, json.dumps(job)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(held: dict[str, int]) -> None:
    assert held["samples"] > 5
    assert held["planned"] <= held["limit"]
    assert held["peak"] <= held["limit"], held
    assert held["peak"] > held["batch"], "a peak below one batch of each cannot have been measured right"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "batch_size", "memory", "threads"),
    [("alternate", 1, None, 1), ("together", 8, None, 2), ("together", 4, 600 * MIB, 4)],
)
def test_several_datasets(folder: Path, mode: str, batch_size: int, memory: int | None, threads: int) -> None:
    held = run(folder, mode=mode, batch_size=batch_size, memory=memory, threads=threads)
    check(held)
    assert held["rows"] == 2 * ROWS
    assert held["threads"] <= threads


@pytest.mark.slow
def test_pass_after_pass(folder: Path) -> None:
    held = run(folder, mode="alternate", samples="longest", batch_size=8, memory=400 * MIB)
    check(held)
    assert held["rows"] == 2 * 4 * 30


@pytest.mark.slow
def test_padded_to_one_length(folder: Path) -> None:
    held = run(folder, pad=True, batch_size=4, memory=None)
    check(held)
    assert held["rows"] == 2 * ROWS
