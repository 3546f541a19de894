"""The lines of other loaders in ``benchmarks.small_machine``."""

import glob
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from benchmarks.small_data import ROWS_PER_FILE, TRIALS
from benchmarks.volumes import BATCH, touch


class Volumes(torch.utils.data.Dataset):
    """Handles opened on first use, one per file and worker."""

    def __init__(self, folder: str) -> None:
        self.paths = sorted(glob.glob(f"{folder}/contiguous/*.hdf5"))
        self.stimuli, self.stimulus = f"{folder}/nsd_stimuli.hdf5", np.load(f"{folder}/stimulus_of_trial.npy")
        self.files: dict[str, h5py.File] = {}

    def __len__(self) -> int:
        return len(self.stimulus)

    def read(self, path: str, name: str, at: int) -> Any:
        if path not in self.files:
            self.files[path] = h5py.File(path, "r")
        return self.files[path][name][at]

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        betas = self.read(self.paths[number // TRIALS], "betas", number % TRIALS).astype(np.float32)
        return betas, self.read(self.stimuli, "imgBrick", int(self.stimulus[number]))


def torch_volumes(folder: str, workers: int) -> Iterator[int]:
    loader = torch.utils.data.DataLoader(Volumes(folder), BATCH, shuffle=True, num_workers=workers)
    while True:
        for betas, images in loader:
            touch(betas, images)
            yield len(betas)


def grain_volumes(folder: str) -> Iterator[int]:
    import grain

    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2 * BATCH)
    ds = grain.MapDataset.source(Volumes(folder)).shuffle(seed=0).repeat()
    for betas, images in ds.to_iter_dataset(options).batch(BATCH):
        touch(torch.from_numpy(betas), torch.from_numpy(images))
        yield len(betas)


def grain_pictures(folder: str) -> Iterator[int]:
    import grain

    from benchmarks.shards import _unpack

    source = grain.sources.ArrayRecordDataSource(sorted(glob.glob(f"{folder}/*.array_record")))
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=64)
    ds = grain.MapDataset.source(source).shuffle(seed=0).repeat().map(_unpack)
    for voxels, images in ds.to_iter_dataset(options).batch(32):
        touch(torch.from_numpy(voxels), torch.from_numpy(images))
        yield len(voxels)


class Records(torch.utils.data.Dataset):
    """Rows of a mapping, a batch at a time."""

    def __init__(self, path: str) -> None:
        self.stored = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.stored)

    def __getitems__(self, rows: list[int]) -> torch.Tensor:
        return torch.from_numpy(self.stored[rows])


def torch_records(path: str, batch: int) -> Iterator[int]:
    loader = torch.utils.data.DataLoader(Records(path), batch, shuffle=True, collate_fn=lambda rows: rows)
    while True:
        for rows in loader:
            touch(rows)
            yield len(rows)


class ManyFiles(torch.utils.data.Dataset):
    """Every file opened once, and kept open."""

    def __init__(self, folder: str) -> None:
        self.files = [h5py.File(path, "r") for path in sorted(Path(folder).glob("*.h5"))]
        self.arrays = [(file["x"], file["y"]) for file in self.files]

    def __len__(self) -> int:
        return len(self.files) * ROWS_PER_FILE

    def __getitem__(self, number: int) -> tuple[np.ndarray, Any]:
        x, y = self.arrays[number // ROWS_PER_FILE]
        return x[number % ROWS_PER_FILE], y[number % ROWS_PER_FILE]


def torch_many_files(folder: str) -> Iterator[int]:
    loader = torch.utils.data.DataLoader(ManyFiles(folder), 64, shuffle=True)
    while True:
        for x, y in loader:
            touch(x, y)
            yield len(y)


def many_shards(folder: str) -> Iterator[int]:
    import webdataset

    shards = sorted(map(str, Path(folder).glob("*.tar")))
    ds = webdataset.WebDataset(shards, resampled=True).shuffle(500).decode().to_tuple("x.npy", "y.cls").batched(64)
    for x, y in torch.utils.data.DataLoader(ds, batch_size=None, num_workers=2):
        touch(torch.as_tensor(x))
        yield len(y)


def cold_volumes(folder: str) -> float:
    """MB/s of an epoch from files that are not in memory."""
    from benchmarks.small_ours import drop_from_memory

    loader = torch.utils.data.DataLoader(Volumes(folder), BATCH, shuffle=True, num_workers=2)
    total, began = drop_from_memory(folder), time.perf_counter()
    for betas, _ in loader:
        touch(betas)
    return total / (time.perf_counter() - began) / 1e6


def cold_rows(folder: str) -> float:
    """MB/s of all rows, read in a random order by two threads that do nothing else with them."""
    from benchmarks.small_ours import drop_from_memory

    files, rows = [], []
    for path in sorted(glob.glob(f"{folder}/contiguous/*")):
        with h5py.File(path) as file:
            betas = file["betas"]
            begin, size = betas.id.get_offset(), betas.dtype.itemsize * int(np.prod(betas.shape[1:]))
            rows += [(len(files), begin + number * size) for number in range(len(betas))]
        files.append(os.open(path, os.O_RDONLY))
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    total, began = drop_from_memory(folder), time.perf_counter()

    def work(mine: list[int]) -> None:
        buffer = np.zeros(size, np.uint8)
        for number in mine:
            file, offset = rows[number]
            os.preadv(files[file], [buffer], offset)

    threads = [threading.Thread(target=work, args=(order[share::2],)) for share in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return total / (time.perf_counter() - began) / 1e6


def cold_sequential(folder: str) -> float:
    """MB/s of plain reads of 8 MiB, one file after another."""
    from benchmarks.small_ours import drop_from_memory

    buffer = np.zeros(8 << 20, np.uint8)
    total, began = drop_from_memory(folder), time.perf_counter()
    for path in glob.glob(f"{folder}/contiguous/*"):
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while file.readinto(buffer.data):
                pass
    return total / (time.perf_counter() - began) / 1e6
