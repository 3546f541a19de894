"""Volumes onto a CUDA device: every value checked there, then the rate against torch's ``DataLoader`` with pinning.
Then rows of voxels as z-scores by session: made there, each bit as on the CPU, against made here and copied.

python -m benchmarks.device [--volumes 512] [--workers 12]

Needs a GPU and torch; makes its data (int16 volumes of 4.5 MB whose values follow from their row) in a
temporary folder.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import penstock as ps
from benchmarks import results
from penstock.base.sizes import format_count

VOLUME = (150, 150, 100)
ELEMENTS = 150 * 150 * 100
BATCH = 32
FILES = 8
TRIALS, VOXELS, SESSIONS = 6000, 15_724, 40


def values(rows: np.ndarray | torch.Tensor, ramp: Any) -> Any:
    """What row ``r`` holds: a ramp that begins elsewhere in each row."""
    return (ramp[None, :] + rows[:, None] * 37) % 20011


def make(folder: Path, volumes: int) -> None:
    for number, rows in enumerate(np.array_split(np.arange(volumes), FILES)):
        part = values(rows, np.arange(ELEMENTS)).astype(np.int16)
        np.save(folder / f"session{number}.npy", part.reshape(len(rows), *VOLUME))


def penstock(folder: Path, memory: str) -> ps.Loader:
    ds = ps.open(folder / "session*.npy").cast("data", "float32", scale=1 / 300)
    return ps.Loader(
        ds, batch_size=BATCH, shuffle=True, memory=memory, columns=("data", "__index__"), device="cuda", drop_last=True
    )


class ByHand(torch.utils.data.Dataset):
    """Memory-mapped files, a row at a time, cast on the CPU."""

    def __init__(self, folder: Path) -> None:
        self.parts = [np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def __getitem__(self, row: int) -> tuple[np.ndarray, int]:
        part, at = divmod(row, len(self.parts[0]))
        return self.parts[part][at].astype(np.float32) * np.float32(1 / 300), row


def by_hand(folder: Path, workers: int) -> Iterator[Any]:
    options: dict[str, Any] = {"shuffle": True, "num_workers": workers, "pin_memory": True, "persistent_workers": True}
    loader = torch.utils.data.DataLoader(ByHand(folder), BATCH, **options)
    while True:
        for volumes, rows in loader:
            yield volumes.to("cuda", non_blocking=True), rows
        yield None


def check(loader: ps.Loader) -> int:
    """Every value of an epoch, compared on the device; how many batches differed."""
    ramp = torch.arange(ELEMENTS, device="cuda")
    wrong, seen = 0, 0
    for volumes, rows in loader:
        want = values(rows, ramp).float().mul_(1 / 300)
        wrong += not torch.equal(volumes.reshape(len(rows), -1), want)
        seen += len(rows)
    print(f"checked {seen} volumes on the device: {wrong} batches wrong")
    return wrong


def rate(epoch: Callable[[], Iterator[Any]], step: torch.nn.Module, epochs: int = 3) -> float:
    """Volumes a second over some epochs, each batch used by a small step on the device."""
    best = 0.0
    for _ in range(epochs):
        torch.cuda.synchronize()
        began, count = time.perf_counter(), 0
        for volumes, _rows in epoch():
            step(volumes.reshape(len(volumes), -1)[:, :4096])
            count += len(volumes)
        torch.cuda.synchronize()
        best = max(best, count / (time.perf_counter() - began))
    return best


def voxels(folder: Path) -> ps.Dataset:
    """Trials of whole numbers, declared as z-scores by session; some voxels of one session do not vary."""
    rng = np.random.default_rng(0)
    np.save(folder / "voxels.npy", rng.integers(-3000, 3000, (TRIALS, VOXELS)).astype(np.int16))
    mean = rng.normal(size=(SESSIONS, VOXELS)).astype(np.float32)
    spread = rng.uniform(50, 300, (SESSIONS, VOXELS)).astype(np.float32)
    spread[3, :9] = 0
    return ps.open(folder / "voxels.npy").normalize("data", mean, spread, rng.integers(0, SESSIONS, TRIALS))


def zscores(folder: Path, step: torch.nn.Module) -> list[dict[str, Any]]:
    ds = voxels(folder)
    options: dict[str, Any] = {"batch_size": 64, "shuffle": True, "memory": "512MiB", "columns": ("data", "__index__")}
    with ps.Loader(ds, device="cuda", **options) as there, ps.Loader(ds, **options) as here:
        assert there.request.fields["data"].dtype == np.int16, "the bus carries rows as stored"
        pairs = zip(there, here, strict=True)
        wrong = sum(not torch.equal(one[0].cpu(), other[0]) for one, other in pairs)
        print(f"checked {TRIALS} rows of z-scores: {wrong} batches wrong")
        if wrong:
            raise SystemExit("z-scores made on the device are wrong")
        ours = rate(lambda: iter(there), step)
        before = rate(lambda: ((rows.to("cuda"), index) for rows, index in here), step)
    return [
        {"label": "penstock, z-scores made on the device", "rates": [ours]},
        {"label": "penstock, z-scores made on the CPU, then copied", "rates": [before]},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--volumes", type=int, default=512)
    parser.add_argument("--workers", type=int, default=12)
    args = parser.parse_args()
    step = torch.nn.Linear(4096, 64).cuda()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, args.volumes)
        for memory in ("768MiB", "2GiB"):
            with penstock(folder, memory) as loader:
                print(loader.plan)
                wrong = sum(check(loader) for _ in range(3))
                ours = rate(lambda loader=loader: iter(loader), step)
                rows.append({"label": f"penstock, volumes, {memory}", "rates": [ours]})
                print(loader.stats())
            if wrong:
                raise SystemExit("device copies are wrong")
        batches = by_hand(folder, args.workers)
        theirs = rate(lambda: iter(lambda: next(batches), None), step)
        rows.append(
            {"label": f"DataLoader, volumes, {format_count(args.workers, 'worker')}, pinned", "rates": [theirs]}
        )
        rows += zscores(folder, step)
    gpu = torch.cuda.get_device_name()
    results.write("device", "python -m benchmarks.device", rows, about=f"int16 on the bus, float32 on one {gpu}.")
    print(results.table(results.read("device")))


if __name__ == "__main__":
    main()
