"""Many cores: threads of the training process, reader processes, and torch's workers; and what each leaves of the step.

python -m benchmarks.cores [--data FOLDER] [--workers N] [--rounds 3]

Shards as float32 and as uint8, gzip volumes, plain volumes, and a Python function of about 1.4 ms per row. Then a
training step of 400 small operations, alone and beside each loader: by how much it is slower, waiting not counted.
"""

import argparse
import io
import os
import statistics
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import torch

import penstock as ps
from benchmarks import data, results, shards
from benchmarks.runner import Contestant, side_by_side
from benchmarks.volumes import touch
from penstock.base.machine import cores

SECONDS = 6.0
BATCH = 32


def for_a_while(loader: Any, seconds: float = SECONDS) -> Iterator[Any]:
    """Epoch after epoch, until so many seconds after the first batch."""
    until = None
    while True:
        for batch in loader:
            yield batch
            until = until or time.perf_counter() + seconds
            if time.perf_counter() > until:
                return


def dataset(folder: str, kind: str) -> ps.Dataset:
    """Shards or volumes as a training step wants them."""
    if kind.startswith("shards"):
        ds = ps.open(f"{folder}/train-*.tar").only("jpg", "nsdgeneral.npy")
        return ds.permute("jpg", 2, 0, 1) if kind == "shards uint8" else (
            ds.cast("jpg", "float32", divisor=255).permute("jpg", 2, 0, 1)
        )  # fmt: skip
    layout = "gzip" if kind == "gzip" else "contiguous"
    return ps.open(f"{folder}/{layout}/*.hdf5").cast("betas", "float32", scale=1 / 300)


def penstock(folder: str, kind: str, processes: int | str) -> Iterator[int]:
    """Batches of whatever kind."""
    batch = BATCH if kind.startswith("shards") else BATCH // 4
    ds = dataset(folder, kind)
    with ps.Loader(ds, batch_size=batch, shuffle=True, memory="4GiB", processes=processes) as loader:
        for made in for_a_while(loader):
            touch(*made.values())
            yield len(next(iter(made.values())))


class ByHand(torch.utils.data.Dataset):
    """What a careful person writes: an index of the members, one read and one decoding per sample."""

    def __init__(self, folder: str, dtype: str) -> None:
        self.dtype, self.paths = dtype, sorted(map(str, Path(folder).glob("*.tar")))
        self.members: list[tuple[int, tuple[int, int], tuple[int, int]]] = []
        self.files: dict[int, int] = {}
        for number, path in enumerate(self.paths):
            with tarfile.open(path) as archive:
                found = {info.name: (info.offset_data, info.size) for info in archive}
            for name, place in found.items():
                if name.endswith(".jpg"):
                    self.members.append((number, place, found[name.removesuffix("jpg") + "nsdgeneral.npy"]))

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        number, picture, voxels = self.members[index]
        if number not in self.files:
            self.files[number] = os.open(self.paths[number], os.O_RDONLY)
        decoded = imagecodecs.jpeg8_decode(os.pread(self.files[number], picture[1], picture[0]))
        image = np.ascontiguousarray(decoded.transpose(2, 0, 1))
        image = image.astype(np.float32) / 255 if self.dtype == "float32" else image
        return image, np.load(io.BytesIO(os.pread(self.files[number], voxels[1], voxels[0])))


def dataloader(folder: str, dtype: str, workers: int) -> Iterator[int]:
    """Torch's own loader over the same samples."""
    loader = torch.utils.data.DataLoader(
        ByHand(folder, dtype), BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    for images, voxels in for_a_while(loader):
        touch(images, voxels)
        yield len(images)


def work(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """An augmentation as people write it: about 1.4 ms of plain Python per row."""
    rows = []
    for row in next(iter(batch.values())):
        total = sum(number % 7 for number in range(20_000))
        rows.append(row[:64] + total * 0)
    return {"x": np.stack(rows)}


def function(folder: str, processes: int | str) -> Iterator[int]:
    """A Python function over small rows."""
    ds = ps.open(f"{folder}/rows.npy").map(work)
    with ps.Loader(ds, batch_size=BATCH, shuffle=True, memory="1GiB", processes=processes) as loader:
        for batch in for_a_while(loader):
            yield len(batch["x"])


class FunctionByHand(torch.utils.data.Dataset):
    """The same function, one row at a time."""

    def __init__(self, folder: str) -> None:
        self.rows = np.load(f"{folder}/rows.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> np.ndarray:
        return work({"x": self.rows[index : index + 1]})["x"][0]


def function_dataloader(folder: str, workers: int) -> Iterator[int]:
    """Torch's own loader over the function."""
    loader = torch.utils.data.DataLoader(FunctionByHand(folder), BATCH, shuffle=True, num_workers=workers)
    for batch in for_a_while(loader):
        yield len(batch)


def rows_for_function(root: Path) -> Path:
    """Rows of 4 KB."""
    return data.once(
        root / "function", lambda folder: np.save(folder / "rows.npy", np.zeros((400_000, 1024), np.float32))
    )


def slowdown(make: Any, step: Any, alone_s: float) -> dict[str, float]:
    """A training step's own time beside a loader, as a multiple of its time alone, and how long it waited."""
    steps, waits = [], []
    batches = for_a_while(make)
    for _ in range(250):
        began = time.perf_counter()
        if next(batches, None) is None:
            break
        waits.append(time.perf_counter() - began)
        steps.append(step())
    return {"step_ratio": statistics.median(steps) / alone_s, "waited_s": statistics.median(waits)}


def launch_bound_step() -> Any:
    """400 small operations, on the device if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights, start = torch.randn(256, 256, device=device) / 16, torch.randn(64, 256, device=device)

    def step() -> float:
        began, values = time.perf_counter(), start
        for _ in range(400):
            values = torch.relu(values @ weights)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for _ in range(20):
        step()
    return step


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cores", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "penstock-cores")
    parser.add_argument("--workers", type=int, default=cores())
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    tars, volumes, rows = shards.make_shards(args.data), data.volumes(args.data), rows_for_function(args.data)
    here = os.path.basename(__file__).removesuffix(".py")
    for kind in ("shards float32", "shards uint8", "gzip", "volumes", "function"):
        contestants = []
        for processes in ("auto", 0):
            label = f"penstock, processes={processes!r}"
            if kind == "function":
                arguments = {"folder": str(rows), "processes": processes}
                contestants.append(Contestant(label, f"benchmarks.{here}:function", arguments))
            else:
                folder = str(tars if kind.startswith("shards") else volumes)
                arguments = {"folder": folder, "kind": kind, "processes": processes}
                contestants.append(Contestant(label, f"benchmarks.{here}:penstock", arguments))
        label = f"DataLoader, {args.workers} workers"
        if kind == "function":
            target = f"benchmarks.{here}:function_dataloader"
            contestants.append(Contestant(label, target, {"folder": str(rows), "workers": args.workers}))
        elif kind.startswith("shards"):
            arguments = {"folder": str(tars), "dtype": kind.split()[1], "workers": args.workers}
            contestants.append(Contestant(label, f"benchmarks.{here}:dataloader", arguments))
        if kind == "shards float32":
            arguments = {"folder": str(tars), "workers": args.workers, "package": "webdataset", "batch": BATCH}
            contestants.append(
                Contestant(f"webdataset, {args.workers} workers", "benchmarks.shards:pipeline", arguments)
            )
        name = f"cores-{kind.replace(' ', '-')}"
        found = side_by_side(contestants, args.rounds)
        results.write(name, "python -m benchmarks.cores", [vars(each) for each in found], title=f"Many cores: {kind}")
        print(f"\n{name} ({results.machine()})\n\n{results.table(results.read(name))}")
    step = launch_bound_step()
    alone_s = statistics.median(step() for _ in range(200))
    measured = []
    for batch in (8, BATCH):
        for processes in ("auto", 0):
            ds = dataset(str(tars), "shards float32")
            with ps.Loader(ds, batch_size=batch, shuffle=True, memory="4GiB", processes=processes) as loader:
                label = f"penstock, batch {batch}, processes={processes!r}"
                measured.append({"label": label, **slowdown(loader, step, alone_s)})
    results.write("cores-step", "python -m benchmarks.cores", measured, title="What a loader leaves of the step")
    print(f"\nstep, {alone_s * 1e3:.2f} ms alone\n\n{results.table(results.read('cores-step'))}")


if __name__ == "__main__":
    main()
