"""The budget is a law: nothing the loader does takes more than it was given, at any sample, in any configuration.

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

CHILD = Path(__file__).with_name("child.py")
VOLUME = (150, 150, 100)
GIB = 2**30
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "gzip": {"chunks": (1, *VOLUME), "compression": "gzip", "compression_opts": 1, "shuffle": True},
    "chunks-of-rows": {"chunks": (3, *VOLUME), "compression": "gzip", "compression_opts": 1},
    "small-chunks": {"chunks": (4, 50, 50, 40), "compression": "gzip", "compression_opts": 1, "shuffle": True},
    "through-h5py": {"chunks": (3, *VOLUME), "scaleoffset": 0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("volumes")
    rng = np.random.default_rng(0)
    smooth = np.cumsum(rng.integers(-20, 21, (12, *VOLUME), np.int16), axis=-1, dtype=np.int16)
    for layout, options in LAYOUTS.items():
        (root / layout).mkdir()
        for session in range(3):
            with h5py.File(root / layout / f"betas_session{session:02d}.hdf5", "w") as file:
                file.create_dataset("betas", data=smooth, **options)
    (root / "time-courses").mkdir()
    for session in range(3):
        with h5py.File(root / "time-courses" / f"betas_session{session:02d}.hdf5", "w") as file:
            part = smooth[:, :40, :50, :30]
            file.create_dataset("betas", data=part, chunks=(len(part), 1, 1, 1))
    with h5py.File(root / "stimuli.hdf5", "w") as file:
        file["imgBrick"] = rng.integers(0, 256, (20, 425, 425, 3), np.uint8)
    return root


def run(folder: Path, layout: str, **job: Any) -> dict[str, int]:
    job |= {"betas": str(folder / layout / "*.hdf5"), "stimuli": str(folder / "stimuli.hdf5")}
    done = subprocess.run([sys.executable, CHILD, json.dumps(job)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "gzip"])
@pytest.mark.parametrize(
    ("batch_size", "memory", "threads"),
    [(1, None, 8), (8, None, 1), (32, None, 2), (1, 4 * GIB, 8), (8, 400 * 2**20, 4), (32, 4 * GIB, 8)],
)
def test_volumes(folder: Path, layout: str, batch_size: int, memory: int | None, threads: int) -> None:
    held = run(folder, layout, batch_size=batch_size, memory=memory, threads=threads)
    assert held["samples"] > 5
    assert held["peak"] <= held["limit"]
    assert held["peak"] > held["batch"], "a peak below one batch cannot have been measured right"
    if memory is None:
        assert held["limit"] <= 1.3 * (2 * held["batch"] + held["reading"]), "the smallest budget is not small"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "gzip", "small-chunks", "through-h5py", "time-courses"])
def test_part_of_each_row(folder: Path, layout: str) -> None:
    held = run(folder, layout, batch_size=4, memory=None, threads=2, mask=True)
    assert held["peak"] <= held["limit"]
    assert held["peak"] > held["batch"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["chunks-of-rows", "small-chunks", "through-h5py", "time-courses"])
def test_rows_in_blocks(folder: Path, layout: str) -> None:
    held = run(folder, layout, batch_size=4, memory=None, threads=2)
    assert held["peak"] <= held["limit"]
    assert held["peak"] > held["batch"]


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("function", ["arrays", "tensors"])
def test_a_function_that_allocates(folder: Path, batch_size: int, function: str) -> None:
    """What a mapped function takes is measured on trial, and planned for."""
    held = run(folder, "gzip", batch_size=batch_size, memory=None, threads=2, map=function, processes=0)
    assert held["peak"] <= held["limit"]


@pytest.mark.slow
@pytest.mark.parametrize("memory", [None, 2 * GIB])
@pytest.mark.parametrize("job", [{"layout": "contiguous"}, {"layout": "gzip"}, {"layout": "small-chunks"},
                                 {"layout": "through-h5py"}, {"layout": "gzip", "map": "arrays"}], ids=str)  # fmt: skip
def test_reader_processes(folder: Path, job: dict[str, Any], memory: int | None) -> None:
    """The whole process tree, with what each process imports and the memory that they share."""
    held = run(folder, **job, batch_size=8, memory=memory, threads=4, processes=2)
    assert held["processes"] == 2
    assert held["peak"] <= held["planned"]
    assert held["peak"] > 0.5 * held["planned"], "planned far beyond what is used"
    assert abs(held["seen"] - held["peak"]) < 0.15 * held["peak"], "stats() counts other memory than there is"
