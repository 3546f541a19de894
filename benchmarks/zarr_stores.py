"""Zarr (version 3, zstd) volumes of 4.5 MB, shuffled, batch 32, int16 -> float32, page cache warm.

penstock against zarr-python and tensorstore under torch's ``DataLoader``, with every number of workers; with one row a
chunk, and with sixteen.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import data
from benchmarks.runner import Contestant
from benchmarks.volumes import touch
from penstock.base.sizes import format_count

ROWS = 320
BATCH = 32
CHUNK_ROWS = {"rows": 1, "sixteens": 16}
MEMORY = {"rows": "768MiB", "sixteens": "3GiB"}
WORKERS = (0, 1, 2, 4)


def make(root: Path) -> Path:
    """The same volumes, one and sixteen a chunk."""

    def write(folder: Path) -> None:
        import zarr

        rng = np.random.default_rng(5)
        made = {
            layout: zarr.create_array(
                folder / f"{layout}.zarr", shape=(ROWS, *data.VOLUME), dtype="int16", chunks=(rows, *data.VOLUME)
            )
            for layout, rows in CHUNK_ROWS.items()
        }
        for begin in range(0, ROWS, 16):
            volumes = np.stack([data.volume(rng) for _ in range(16)])
            for array in made.values():
                array[begin : begin + 16] = volumes

    return data.once(root / "zarr", write)


def penstock(path: str, memory: str, epochs: int) -> Iterator[int]:
    import penstock as ps

    ds = ps.open(path).cast("data", "float32")
    with ps.Loader(ds, batch_size=BATCH, shuffle=True, memory=memory, columns=("data",)) as loader:
        for _ in range(epochs):
            for (betas,) in loader:
                touch(betas)
                yield len(betas)


class Rows(torch.utils.data.Dataset):
    """The array opened on first use, in each worker; one row read, cast and returned."""

    def __init__(self, path: str, rows: int) -> None:
        self.path, self.rows, self.array = path, rows, None

    def __len__(self) -> int:
        return self.rows

    def open(self) -> Any:
        raise NotImplementedError

    def read(self, row: int) -> np.ndarray:
        raise NotImplementedError

    def __getitem__(self, number: int) -> np.ndarray:
        if self.array is None:
            self.array = self.open()
        return self.read(number).astype(np.float32)


class ZarrPython(Rows):
    def open(self) -> Any:
        import zarr

        return zarr.open_array(self.path, mode="r")

    def read(self, row: int) -> np.ndarray:
        return self.array[row]


class TensorStore(Rows):
    def open(self) -> Any:
        import tensorstore

        place = {"driver": "file", "path": self.path}
        return tensorstore.open({"driver": "zarr3", "kvstore": place}, read=True, open=True).result()

    def read(self, row: int) -> np.ndarray:
        return self.array[row].read().result()


LIBRARIES = {"zarr-python": ZarrPython, "tensorstore": TensorStore}


def dataloader(path: str, library: str, workers: int, rows: int) -> Iterator[int]:
    """One epoch, or as much of one as ``rows`` says, each taken from anywhere in the array."""
    dataset = LIBRARIES[library](path, ROWS)
    chosen = torch.randperm(ROWS)[:rows].tolist()
    batch = min(BATCH, rows // 2)
    for betas in torch.utils.data.DataLoader(dataset, batch, sampler=chosen, num_workers=workers):
        touch(betas)
        yield len(betas)


def contestants(folder: Path, layout: str) -> list[Contestant]:
    """Time counts from the start: workers begin with a batch each, so that the first batch is not the first work."""
    path = {"path": str(folder / f"{layout}.zarr")}
    rows = BATCH if layout == "sixteens" else ROWS  # rows of large chunks are slow to get one by one
    theirs = [
        Contestant(
            f"DataLoader + {library}, {format_count(workers, 'worker')}",
            f"{__name__}:dataloader",
            {**path, "library": library, "workers": workers, "rows": rows},
            whole=True,
        )
        for library in LIBRARIES
        for workers in WORKERS
    ]
    ours = {**path, "memory": MEMORY[layout], "epochs": 1}
    return [Contestant(f"penstock, {MEMORY[layout]}", f"{__name__}:penstock", ours, whole=True), *theirs]


BENCHMARKS: dict[str, Callable[[Path], list[Contestant]]] = {
    **{f"zarr-{layout}": lambda root, layout=layout: contestants(make(root), layout) for layout in CHUNK_ROWS},
}
