"""python -m benchmarks.foretold [--data FOLDER] [--only ours|others]: estimates of ``penstock plan``, and measurements.

Twelve combinations of format, layout, batch size, budget and threads: peak memory, bytes read and time of an epoch.
Then torch's DataLoader and WebDataset: peak memory, with a training step that lets their queues fill. Each is planned
in one process and run in another, from the page cache. Makes 4 GB of data. Run it on a quiet machine.

Of five times the median for seconds, the most for memory.
"""

import argparse
import io
import json
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import data, results

ROWS, VOLUME = 720, (96, 60, 50)  # rows of 1.15 MB
RECORDS, WIDTH = 200_000, 256
SHARDS = 8
STEP_S = 0.05

# Memory that a virtual machine has given back to its host costs tenfold when it is next touched, and whether it has is
# chance: an epoch of a quarter of a second may then take one. So each is planned and run so often, for the median.
TIMES = 5


@dataclass(frozen=True)
class Combination:
    name: str
    path: str
    options: dict[str, Any] = field(default_factory=dict)
    masked: bool = False


OURS = [
    Combination("npy, batch 32", "rows.npy", {"batch_size": 32, "memory": "512MiB"}),
    Combination("npy, batch 64, 1 thread", "rows.npy", {"batch_size": 64, "memory": "512MiB", "threads": 1}),
    Combination("npy records, batch 2048", "records.npy", {"batch_size": 2048, "memory": "256MiB", "threads": 2}),
    Combination("HDF5 contiguous, 4 threads", "contiguous.h5", {"batch_size": 16, "memory": "1GiB", "threads": 4}),
    Combination("HDF5 contiguous, tight", "contiguous.h5", {"batch_size": 64, "memory": "160MiB", "threads": 2}),
    Combination("HDF5 gzip, one row per chunk", "gzip.h5", {"batch_size": 32, "memory": "256MiB", "threads": 2}),
    Combination("HDF5 gzip, 8 rows per chunk", "eights.h5", {"batch_size": 32, "memory": "1GiB", "threads": 2}),
    Combination("the same, a small window", "eights.h5", {"batch_size": 16, "memory": "192MiB", "window": 32}),
    Combination("HDF5 gzip, masked", "gzip.h5", {"batch_size": 128, "memory": "256MiB"}, masked=True),
    Combination("Zarr zstd, 4 rows per chunk", "rows.zarr", {"batch_size": 32, "memory": "1GiB", "threads": 2}),
    Combination("tar shards", "*.tar", {"batch_size": 32, "memory": "512MiB", "threads": 2}),
    Combination("tar shards, 1 thread", "*.tar", {"batch_size": 64, "memory": "512MiB", "threads": 1}),
]

TORCH = [("rows.npy", 32, 0), ("rows.npy", 32, 2), ("rows.npy", 32, 4), ("contiguous.h5", 64, 2)]
WEBDATASET = [(32, 0, 100), (32, 2, 100), (16, 2, 200), (16, 4, 50)]
"""Batch size, workers, shuffle buffer."""


def make(root: Path) -> Path:
    """The same rows in every format."""
    import h5py
    import zarr

    def write(folder: Path) -> None:
        rng = np.random.default_rng(5)
        smooth = np.cumsum(rng.normal(size=(ROWS, *VOLUME)).astype(np.float32), axis=-1)
        rows = smooth.round(1)
        np.save(folder / "rows.npy", rows)
        np.save(folder / "records.npy", rng.normal(size=(RECORDS, WIDTH)).astype(np.float32))
        gzip = {"compression": "gzip", "compression_opts": 4, "shuffle": True}
        for name, options in (
            ("contiguous", {}),
            ("gzip", {"chunks": (1, *VOLUME), **gzip}),
            ("eights", {"chunks": (8, *VOLUME), **gzip}),
        ):
            with h5py.File(folder / f"{name}.h5", "w") as file:
                file.create_dataset("data", data=rows, **options)
        zarr.create_array(
            str(folder / "rows.zarr"), data=rows, chunks=(4, *VOLUME), compressors=zarr.codecs.ZstdCodec(level=3)
        )
        for shard in range(SHARDS):
            with tarfile.open(folder / f"shard-{shard}.tar", "w") as file:
                for row in range(shard, ROWS, SHARDS):
                    written = io.BytesIO()
                    np.save(written, rows[row])
                    member = tarfile.TarInfo(f"{row:05d}.npy")
                    member.size = written.tell()
                    written.seek(0)
                    file.addfile(member, written)

    return data.once(root / "foretold", write)


def opened(folder: Path, combination: Combination) -> Any:
    import penstock as ps

    ds = ps.open(str(folder / combination.path))
    if not combination.masked:
        return ds
    mask = np.zeros(VOLUME, bool)
    mask[20:60, 10:40, 5:30] = True
    return ds.select_within(next(iter(ds.fields)), mask)


# In a child.


def told(folder: Path, combination: Combination) -> dict[str, Any]:
    import penstock as ps

    return ps.plan(opened(folder, combination), **combination.options).as_json()


def ran(folder: Path, combination: Combination) -> dict[str, Any]:
    import penstock as ps
    from penstock.testing.measure import measure

    ds = opened(folder, combination)
    found = measure(lambda: ps.Loader(ds, shuffle=True, output="numpy", **combination.options))
    return {"peak": found.peak_bytes, "read": found.stats.bytes_read, "seconds": found.seconds}


def other_told(folder: Path, library: str, arguments: list[Any]) -> dict[str, Any]:
    import penstock as ps
    from penstock.loader.rivals import Habits

    path, batch, workers, buffer = ("*.tar", *arguments) if library == "webdataset" else (*arguments, 50)
    forecast = ps.plan(str(folder / path), batch_size=batch, habits=Habits(workers, buffer), measure=0, memory="2GiB")
    return {"peak": forecast.rivals[library == "webdataset"].peak_bytes}


def other_ran(folder: Path, library: str, arguments: list[Any]) -> dict[str, Any]:
    import penstock as ps
    from penstock.cli.contenders import CONTENDERS, BenchJob
    from penstock.testing.measure import MemoryWatch

    path, batch, workers, buffer = ("*.tar", *arguments) if library == "webdataset" else (*arguments, 50)
    ds = ps.open(str(folder / path))
    _, loader = CONTENDERS[library](
        BenchJob(
            ds=ds, columns=tuple(ds.fields), batch_size=batch, workers=workers, shuffle_buffer=buffer, whole_rows=True
        )
    )
    with MemoryWatch(0.02) as watch:
        for _ in loader:
            time.sleep(STEP_S)
    return {"peak": watch.peak_bytes}


CHILDREN: dict[str, Callable[..., dict[str, Any]]] = {
    "told": lambda folder, job: told(folder, Combination(**job)),
    "ran": lambda folder, job: ran(folder, Combination(**job)),
    "other told": lambda folder, job: other_told(folder, *job),
    "other ran": lambda folder, job: other_ran(folder, *job),
}


def child(what: str, folder: Path, job: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", __spec__.name, "--child", json.dumps([what, str(folder), job])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{what} of {job} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def run_child(what: str, folder: str, job: Any) -> None:
    import h5py  # noqa: F401  # libraries are imported before memory is counted
    import torch  # noqa: F401

    print(json.dumps(CHILDREN[what](Path(folder), job)))


# The tables.


def ours(folder: Path) -> Iterator[dict[str, Any]]:
    for combination in OURS:
        job = asdict(combination)
        before, after = zip(
            *((child("told", folder, job), child("ran", folder, job)) for _ in range(TIMES)), strict=True
        )
        peak, read = before[0]["planned_bytes"], before[0]["epoch_read_bytes"]
        held, was_read = max(each["peak"] for each in after), after[0]["read"]
        told_s = statistics.median(each["epoch_seconds"] or 0 for each in before)
        took_s = statistics.median(each["seconds"] for each in after)
        yield {
            "label": combination.name,
            "planned_bytes": peak, "held_bytes": held, "memory_ratio": peak / held,
            "planned_read_bytes": read, "read_bytes": was_read, "read_ratio": read / max(1, was_read),
            "planned_epoch_s": told_s, "epoch_s": took_s, "time_ratio": told_s / took_s,
        }  # fmt: skip


def others(folder: Path) -> Iterator[dict[str, Any]]:
    jobs = [("torch", list(job)) for job in TORCH] + [("webdataset", list(job)) for job in WEBDATASET]
    for library, arguments in jobs:
        before = child("other told", folder, [library, arguments])["peak"]
        after = child("other ran", folder, [library, arguments])["peak"]
        label = f"{library} {', '.join(map(str, arguments))}"
        yield {"label": label, "planned_bytes": before, "held_bytes": after, "memory_ratio": before / after}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.foretold", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parent / "data")
    parser.add_argument("--only", choices=["ours", "others"])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_child(*json.loads(args.child))
        return
    folder = make(args.data)
    for path in folder.rglob("*"):  # from the page cache, all of them
        if path.is_file():
            path.read_bytes()
    for which, name, rows in (("ours", "foretold", ours), ("others", "foretold-others", others)):
        if args.only in (None, which):
            results.write(name, f"python -m benchmarks.foretold --only {which}", list(rows(folder)))
            print(f"{results.table(results.read(name))}\n", flush=True)


if __name__ == "__main__":
    main()
