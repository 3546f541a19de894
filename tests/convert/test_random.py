"""Random conversions between all pairs of formats: the process tree stays within ``memory``, and every value is that of
the source, by the library of each format.
"""

import itertools
import json
import os
import subprocess
import sys
import tarfile
import threading
from io import BytesIO
from pathlib import Path

import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zarr

import penstock as ps
from penstock.base.machine import children, held_bytes, proportional_bytes
from penstock.base.sizes import MiB
from penstock.errors import BudgetExceeded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not say what is held"),
]

FORMATS = ("hdf5", "zarr", "npy", "tar", "parquet")
PAIRS = [*itertools.product(FORMATS, FORMATS), *((kind, "hdf5") for kind in FORMATS)]
"""HDF5 twice as often: it is written in three ways."""
DTYPES = ("int16", "float32", "float64", "uint8")
SOURCE_MB = 24

CHILD = """
import json, sys
import penstock as ps

if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    ds = ps.open(job["source"], **job["open"])
    print(ps.convert(ds, job["goal"], memory=job["memory"], **job["options"]).plan.workers)
"""


def write(kind, folder, values, rng):
    """A source by the library of its format, in a random layout; the arguments to open it."""
    path = folder / f"in.{kind}"
    chunks = tuple(int(rng.integers(1, n + 1)) for n in values.shape)
    if kind == "hdf5":
        by_voxel = bool(rng.integers(2))
        stored = np.ascontiguousarray(np.moveaxis(values, 0, -1)) if by_voxel else values
        layout = [{}, {"chunks": True, "compression": "gzip", "compression_opts": 1}, {"chunks": True}]
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=stored, **layout[rng.integers(3)])
        return path, {"row_axis": values.ndim - 1 if by_voxel else 0}
    if kind == "zarr":
        chunks = (chunks[0], *(max(1, n // 2) for n in values.shape[1:]))
        zarr.create_group(str(path)).create_array("x", data=values, chunks=chunks)
    elif kind == "npy":
        np.save(path, values)
    elif kind == "tar":
        write_tar(path, values)
    else:
        column = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.reshape(-1)), values[0].size)
        pyarrow.parquet.write_table(
            pyarrow.table({"x": column}), path, row_group_size=int(rng.integers(1, len(values) + 1))
        )
    return path, {}


def write_tar(path, values):
    with tarfile.open(path, "w") as archive:
        for row, value in enumerate(values):
            file = BytesIO()
            np.save(file, value)
            member = tarfile.TarInfo(f"{row:06d}.npy")
            member.size = file.tell()
            file.seek(0)
            archive.addfile(member, file)


def read(kind, goal):
    """All values, by the library of the format; a generator where they come file by file."""
    if kind == "hdf5":
        import hdf5plugin  # noqa: F401  # registers zstd

        with h5py.File(goal) as file:
            (name,) = file
            return file[name][:]
    if kind == "zarr":
        (array,) = (array for _, array in zarr.open_group(str(goal), mode="r").arrays())
        return array[:]
    if kind == "npy":
        return np.load(goal)
    if kind == "tar":
        with tarfile.open(goal) as archive:
            members = sorted(archive.getmembers(), key=lambda member: member.name)
            return np.stack([np.load(BytesIO(archive.extractfile(member).read())) for member in members])
    (column,) = pyarrow.parquet.read_table(goal).columns
    return np.array(column.combine_chunks().flatten().to_numpy()).reshape(len(column), -1)


def smallest_budget(ds, goal, options):
    with pytest.raises(BudgetExceeded) as refused:
        ps.convert(ds, goal, memory=1, dry_run=True, **options)
    return int(str(refused.value).split("(")[1].split(" bytes")[0].replace(",", ""))


def command_of(pid):
    """A child that has the command of its parent is about to start another program, and shares all memory with it."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def peak_of(command):
    """The most that a command and its descendants hold, sampled every 5 ms from outside: libraries and all."""
    over, peak = threading.Event(), 0

    def watch(pid):
        nonlocal peak
        while not over.wait(0.005):
            workers = [each for each in children(pid) if command_of(each) != command_of(pid)]
            held = sum(proportional_bytes(each) for each in (pid, *workers)) if workers else held_bytes(pid)
            peak = max(peak, held)

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        watcher = threading.Thread(target=watch, args=(child.pid,))
        watcher.start()
        told, complaint = child.communicate(timeout=200)
        over.set()
        watcher.join()
    assert child.returncode == 0, complaint
    return peak, told


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=lambda at: f"{at}: {PAIRS[at][0]} to {PAIRS[at][1]}")
def test_a_random_conversion(tmp_path, number, any_seed):
    kind, other = PAIRS[number]
    rng = np.random.default_rng([any_seed, number])
    dtype = np.dtype(DTYPES[rng.integers(len(DTYPES))])
    flat = "parquet" in (kind, other)
    row_values = int(np.exp(rng.uniform(np.log(200), np.log(200_000))))
    shape = (row_values,) if flat or rng.integers(2) else (-(-row_values // 40), 8, 5)
    rows = max(2, SOURCE_MB * 2**20 // (int(np.prod(shape)) * dtype.itemsize))
    rows = min(rows, 3000) if "tar" in (kind, other) else rows
    values = rng.integers(0, 200, (rows, *shape)).astype(dtype)
    source, opening = write(kind, tmp_path, values, rng)
    options = {"shard_bytes": int(rng.integers(1, 64)) * MiB}
    if other == "hdf5":
        options["compression"] = ["none", "zstd", "gzip"][rng.integers(3)]
    goal = tmp_path / f"out.{other}"
    ds = ps.open(source, **opening)
    least = smallest_budget(ds, goal, options)
    memory = int(least * [1, rng.uniform(1, 2), rng.uniform(2, 8)][rng.integers(3)])
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    job = {"source": str(source), "open": opening, "goal": str(goal), "memory": memory, "options": options}
    peak, workers = peak_of([sys.executable, str(script), json.dumps(job)])
    held = f"{peak / MiB:.0f} of {memory / MiB:.0f} MiB, the least {least / MiB:.0f}"
    print(f"{rows} x {shape} {dtype}, {options}: {held}, workers {workers}")
    assert peak <= memory
    found = read(other, goal)
    np.testing.assert_array_equal(found.reshape(values.shape), values)
    assert found.dtype == values.dtype
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
