"""python -m benchmarks.conversion [--voxels 700000] [--trials 750] [--data FOLDER] [--rechunker PYTHON]

A session stored by voxel becomes one stored by trial. Each contestant runs in a process of its own, with the source in
the page cache, in turns: reading once and writing once with nothing in between, penstock, h5repack (of hdf5-tools), and
rechunker with Dask on as many threads as there are cores, where PYTHON has both. All write uncompressed values, and all
are ended with sync, so that nobody is quicker for having left its bytes in memory. What a contestant wrote is compared
with the source. A contestant is stopped after --limit seconds: its time is then a lower bound.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import results

HERE = Path(__file__).resolve().parent
BLOCK_BYTES = 8 << 20

BARE = f"""
import os, sys
source, goal = sys.argv[1:]
block = bytearray({BLOCK_BYTES})
with open(source, "rb", buffering=0) as read, open(goal, "wb", buffering=0) as write:
    while count := read.readinto(block):
        write.write(memoryview(block)[:count])
    os.fsync(write.fileno())
"""

PENSTOCK = """
import json, os, sys
import penstock as ps
if __name__ == "__main__":
    source, goal, memory, compression, verify = sys.argv[1:]
    ds = ps.open(source, row_axis=1)
    done = ps.convert(ds, goal, memory=memory, compression=compression or None, verify=verify == "verify")
    print(json.dumps(done.as_json()))
"""

RECHUNKER = """
import os, sys
import dask, rechunker, zarr
source, goal, memory = sys.argv[1:]
array = zarr.open(source, mode="r")
plan = rechunker.rechunk(array, (array.shape[0], 1), memory, goal, temp_store=goal + ".temporary",
                         target_options={"compressor": None}, temp_options={"compressor": None})
with dask.config.set(scheduler="threads", num_workers=os.cpu_count()):
    plan.execute()
"""

MAKE_ZARR = """
import sys
import numpy as np, zarr
source, goal, offset, voxels, trials = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
values = np.memmap(source, np.int16, "r", offset, (voxels, trials))
array = zarr.open(goal, mode="w", shape=values.shape, chunks=(-(-voxels // 16), trials), dtype="i2", compressor=None)
for begin in range(0, voxels, array.chunks[0]):
    array[begin : begin + array.chunks[0]] = values[begin : begin + array.chunks[0]]
"""


def source_file(folder: Path, voxels: int, trials: int) -> tuple[Path, int]:
    """The session, and where its values begin in the file."""
    import h5py

    path = folder / f"session-{voxels}-{trials}.h5"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        with h5py.File(f"{path}.part", "w") as file:
            data = file.create_dataset("betas", (voxels, trials), np.int16)
            for begin in range(0, voxels, 10_000):
                count = min(10_000, voxels - begin)
                data[begin : begin + count] = rng.integers(-3000, 3000, (count, trials), np.int16)
        os.rename(f"{path}.part", path)
    with h5py.File(path) as file:
        return path, int(file["betas"].id.get_offset())


def trials_are_right(read: Callable[[int], np.ndarray], source: Path, offset: int, shape: tuple[int, int]) -> bool:
    """Whether a few trials are those of the source."""
    values = np.memmap(source, np.int16, "r", offset, shape)
    return all(np.array_equal(read(trial), values[:, trial]) for trial in (0, shape[1] // 3, shape[1] - 1))


def read_hdf5(path: Path) -> Callable[[int], np.ndarray]:
    import h5py

    def read(trial: int) -> np.ndarray:
        with h5py.File(path) as file:
            data = file["betas"]
            return data[trial] if data.shape[0] < data.shape[1] else data[:, trial]

    return read


def read_zarr(path: Path) -> Callable[[int], np.ndarray]:
    import zarr

    found = zarr.open(str(path), mode="r")
    array = found["betas"] if isinstance(found, zarr.Group) else found
    return lambda trial: array[trial] if array.shape[0] < array.shape[1] else array[:, trial]


def run(command: list[str], limit_s: float) -> tuple[float, str]:
    """Seconds until its bytes are on the disk; infinite where it failed or took too long."""
    os.sync()
    began = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return float("inf"), f"stopped after {limit_s:.0f} s"
    os.sync()
    seconds = time.perf_counter() - began
    return (seconds, done.stdout) if not done.returncode else (float("inf"), done.stderr.strip()[-300:])


def warm(path: Path) -> None:
    for file in [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]:
        with open(file, "rb", buffering=0) as read:
            while read.read(BLOCK_BYTES):
                pass


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conversion", description=__doc__)
    parser.add_argument("--voxels", type=int, default=700_000)
    parser.add_argument("--trials", type=int, default=750)
    parser.add_argument("--data", type=Path, default=HERE / "data" / "conversion")
    parser.add_argument("--memory", default="64MiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=600, help="seconds until a contestant is stopped")
    parser.add_argument("--rechunker", metavar="PYTHON", help="an interpreter that has rechunker, dask and zarr")
    args = parser.parse_args()
    source, offset = source_file(args.data, args.voxels, args.trials)
    out = args.data / "out"
    ours = [sys.executable, "-c", PENSTOCK, str(source)]
    contestants: dict[str, tuple[list[str], str]] = {
        "read once, write once": ([sys.executable, "-c", BARE, str(source), str(out / "bare")], ""),
        f"penstock, npy, {args.memory}": ([*ours, str(out / "out.npy"), args.memory, "", ""], "out.npy"),
        f"penstock, HDF5, {args.memory}": ([*ours, str(out / "out.h5"), args.memory, "none", ""], "out.h5"),
        "penstock, HDF5, 512MiB": ([*ours, str(out / "out.h5"), "512MiB", "none", ""], "out.h5"),
        "penstock, HDF5, 512MiB, verified": ([*ours, str(out / "out.h5"), "512MiB", "none", "verify"], "out.h5"),
        "penstock, Zarr, 512MiB": ([*ours, str(out / "out.zarr"), "512MiB", "none", ""], "out.zarr"),
    }  # fmt: skip
    slow: dict[str, tuple[list[str], str]] = {}
    if shutil.which("h5repack"):
        chunks = f"betas:CHUNK={args.voxels}x1"
        slow["h5repack"] = (["h5repack", "-l", chunks, str(source), str(out / "out.h5")], "out.h5")
    if args.rechunker:
        copy = args.data / f"{source.stem}.zarr"
        if not copy.exists():
            made = [str(source), str(copy), str(offset), str(args.voxels), str(args.trials)]
            subprocess.run([args.rechunker, "-c", MAKE_ZARR, *made], check=True)
        warm(copy)
        call = [args.rechunker, "-c", RECHUNKER, str(copy), str(out / "out.zarr"), "256MB"]
        slow["rechunker, Dask, 256 MB per thread"] = (call, "out.zarr")
    warm(source)
    seconds: dict[str, list[float]] = {}
    notes: dict[str, str] = {}
    for number in range(args.rounds):
        for label, (command, goal) in {**contestants, **(slow if number == 0 else {})}.items():
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir(parents=True)
            took, told = run(command, args.limit)
            seconds.setdefault(label, []).append(took)
            notes[label] = _note(told, source, offset, args, out / goal if goal and np.isfinite(took) else None)
            print(f"{label}: {took:.2f} s {notes[label]}", file=sys.stderr, flush=True)
    shutil.rmtree(out)
    _write(seconds, notes, args)


def _note(told: str, source: Path, offset: int, args: argparse.Namespace, goal: Path | None) -> str:
    import json

    notes = []
    if told.startswith("{"):
        done, size = json.loads(told), args.voxels * args.trials * 2
        notes.append(f"read {done['bytes_read'] / size:.3f} x, written {done['bytes_written'] / size:.3f} x")
    elif told:
        notes.append(told)
    if goal is not None:
        read = np.load(goal, mmap_mode="r").__getitem__ if goal.suffix == ".npy" else None
        read = read or (read_hdf5(goal) if goal.suffix == ".h5" else read_zarr(goal))
        notes.append("values equal" if trials_are_right(read, source, offset, (args.voxels, args.trials)) else "WRONG")
    return "; ".join(notes)


def _write(seconds: dict[str, list[float]], notes: dict[str, str], args: argparse.Namespace) -> None:
    middles = {label: statistics.median(found) for label, found in seconds.items()}
    bare = next(iter(middles.values()))
    rows = []
    for label, middle in middles.items():
        ended = bool(np.isfinite(middle))
        times = {"time_s": middle if ended else None, "bare_ratio": middle / bare if ended else None}
        rows.append({"label": label, **times, "notes": notes[label]})
    about = f"{args.voxels:,} x {args.trials} int16. The first row only reads and writes everything once."
    command = f"python -m benchmarks.conversion --voxels {args.voxels} --trials {args.trials}"
    results.write("conversion", command, rows, about=about)
    print(results.table(results.read("conversion")))


if __name__ == "__main__":
    main()
