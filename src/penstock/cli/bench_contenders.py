"""Who takes part in ``penstock bench``: the loader itself, and what people run instead, over the same files."""

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.combine import Concat
from penstock.dataset import Dataset
from penstock.errors import ConfigError
from penstock.rivals import counted

HDF5_ENDINGS = (".h5", ".hdf5", ".hdf", ".he5")


@dataclass(frozen=True)
class Job:
    """What everybody has to load."""

    ds: Dataset
    columns: tuple[str, ...]
    batch_size: int
    workers: int
    shuffle_buffer: int
    whole_rows: bool
    """Whether no part of each was chosen."""

    @property
    def files(self) -> list[tuple[str, int]]:
        """Where the rows lie, file by file, and how many in each."""
        store = self.ds.store
        stores = store.stores if isinstance(store, Concat) else [store]
        return [(each.origin(0).url, len(each)) for each in stores if len(each)]


class ByHand:
    """The dataset people write over h5py: files opened on first use in each process, a row a call."""

    def __init__(self, files: list[tuple[str, int]], fields: tuple[str, ...]) -> None:
        self._paths, self._fields = [path for path, _ in files], fields
        self._ends = np.cumsum([rows for _, rows in files])
        self._open = dict[int, Any]()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, row: int) -> tuple[Any, ...]:
        number = int(np.searchsorted(self._ends, row, side="right"))
        inner = row - (int(self._ends[number - 1]) if number else 0)
        if number not in self._open:
            import h5py

            self._open[number] = h5py.File(self._paths[number], "r")
        return tuple(self._open[number][name][inner] for name in self._fields)


def dataloader(job: Job) -> tuple[str, Iterable[Any]]:
    """torch's DataLoader: over h5py where files are HDF5, else over our own dataset, a sample a call."""
    _need("torch", "torch")
    from torch.utils.data import DataLoader

    by_hand = job.whole_rows and all(path.lower().endswith(HDF5_ENDINGS) for path, _ in job.files)
    over: Any = ByHand(job.files, job.columns) if by_hand else job.ds.only(*job.columns)
    name = f"DataLoader over {'h5py' if by_hand else 'ds[i]'}, {counted(job.workers)}"
    return name, DataLoader(over, job.batch_size, shuffle=True, num_workers=job.workers)


def webdataset(job: Job) -> tuple[str, Iterable[Any]]:
    """The webdataset package, as its documentation has it: shards split over workers, a buffer, decoded, batched."""
    _need("webdataset", "webdataset")
    paths = [path for path, _ in job.files]
    if not all(".tar" in path for path in paths):
        raise ConfigError(f"--against webdataset: reads tar shards, and {paths[0]} is none")
    from torch.utils.data import DataLoader

    import webdataset as wds

    pipeline = (
        wds.WebDataset(paths, shardshuffle=False, empty_check=False)
        .shuffle(job.shuffle_buffer)
        .decode("torchrgb8")
        .to_tuple(*job.columns)
        .batched(job.batch_size)
    )
    name = f"WebDataset, {counted(job.workers)}, shuffle({job.shuffle_buffer})"
    return name, DataLoader(pipeline, batch_size=None, num_workers=min(job.workers, len(paths)))


CONTENDERS = {"torch": dataloader, "webdataset": webdataset}


def _need(library: str, extra: str) -> None:
    if importlib.util.find_spec(library) is None:
        raise ConfigError(f'--against {extra}: needs {library}: pip install "{library}"')
