"""The loaders that ``penstock bench`` and ``penstock demo`` compare with, and how each of them is timed."""

import importlib.util
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.progress import Progress
from penstock.base.sizes import MiB, format_count
from penstock.dataset.combine import Concat
from penstock.dataset.dataset import Dataset
from penstock.errors import ConfigError
from penstock.testing.measure import MemoryWatch

HDF5_ENDINGS = (".h5", ".hdf5", ".hdf", ".he5")


@dataclass(frozen=True)
class TimedEpoch:
    """One epoch, or as much of it as fitted into the time limit."""

    samples: int
    seconds: float
    waited: float

    @property
    def samples_per_s(self) -> float:
        return self.samples / max(1e-9, self.seconds)


def run_epoch(loader: Iterable[Any], step: Callable[[Any], int], seconds: float, progress: Progress) -> TimedEpoch:
    """Call ``step`` on each batch, until the time limit; it returns the number of samples in the batch."""
    samples, waited = 0, 0.0
    began = asked = time.perf_counter()
    for batch in loader:
        waited += time.perf_counter() - asked
        size = step(batch)
        samples += size
        progress.add(size)
        asked = time.perf_counter()
        if asked - began > seconds:
            break
    return TimedEpoch(samples, time.perf_counter() - began, waited)


def memory_note(watch: MemoryWatch, limit_bytes: int) -> str:
    """Memory held now, for a progress bar."""
    return f"mem {watch.held_bytes / MiB:.0f}/{limit_bytes / MiB:.0f} MiB"


class ByHand:
    """The dataset that people write over h5py: each process opens files on first use, and reads one row per call."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._open = dict[str, Any]()

    def __len__(self) -> int:
        return self._length

    def file(self, path: str) -> Any:
        import h5py

        if path not in self._open:
            self._open[path] = h5py.File(path, "r")
        return self._open[path]

    def close(self) -> None:
        """Close the files that this process has opened."""
        for file in self._open.values():
            file.close()


class RowsByHand(ByHand):
    """Rows of HDF5 files, one file after the other."""

    def __init__(self, files: Sequence[tuple[str, int]], fields: tuple[str, ...]) -> None:
        self._paths, self._fields = [path for path, _ in files], fields
        self._ends = np.cumsum([rows for _, rows in files])
        super().__init__(int(self._ends[-1]))

    def __getitem__(self, row: int) -> tuple[Any, ...]:
        number = int(np.searchsorted(self._ends, row, side="right"))
        inner = row - (int(self._ends[number - 1]) if number else 0)
        return tuple(self.file(self._paths[number])[name][inner] for name in self._fields)


class TrialsByHand(ByHand):
    """Trials of the Natural Scenes Dataset: voxels of a region, the picture, and the picture's number."""

    def __init__(
        self, sessions: dict[int, str], stimuli: str, trials: list[tuple[int, int, int]], mask: np.ndarray
    ) -> None:
        super().__init__(len(trials))
        self._sessions, self._stimuli, self._trials, self._mask = sessions, stimuli, trials, mask

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray, int]:
        session, trial, picture = self._trials[row]
        betas = self.file(self._sessions[session])["betas"][trial]
        image = self.file(self._stimuli)["imgBrick"][picture]
        return betas[self._mask].astype(np.float32) / 300, image.transpose(2, 0, 1), picture


def dataloader(dataset: Any, batch_size: int, workers: int) -> Any:
    """torch's DataLoader, shuffled."""
    from torch.utils.data import DataLoader

    return DataLoader(dataset, batch_size, shuffle=True, num_workers=workers, persistent_workers=workers > 0)


def mindeye_pipeline(paths: Sequence[str], columns: Sequence[str], batch_size: int, batches: int) -> Any:
    """MindEye's own pipeline over its shards, in one worker."""
    from torch.utils.data import DataLoader

    import webdataset as wds

    pipeline = (
        wds.WebDataset(paths, resampled=True, shardshuffle=False, nodesplitter=lambda urls: urls)
        .shuffle(500, initial=500, rng=random.Random(42))  # noqa: S311  as MindEye does
        .decode("torch")
        .rename(images="jpg;png", voxels="nsdgeneral.npy", coco="coco73k.npy")
        .to_tuple(*columns)
        .batched(batch_size, partial=True)
        .with_epoch(batches)
    )
    return DataLoader(pipeline, batch_size=None, num_workers=1)


@dataclass(frozen=True, kw_only=True)
class BenchJob:
    """The work of every loader in a bench."""

    ds: Dataset
    columns: tuple[str, ...]
    batch_size: int
    workers: int
    shuffle_buffer: int
    whole_rows: bool
    """False if a mask selects a part of each row."""

    @property
    def files(self) -> list[tuple[str, int]]:
        """Each file, and its number of rows."""
        store = self.ds.store
        stores = store.stores if isinstance(store, Concat) else [store]
        return [(each.origin(0).url, len(each)) for each in stores if len(each)]


def torch_contender(job: BenchJob) -> tuple[str, Iterable[Any]]:
    """torch's DataLoader: over h5py if all files are HDF5, otherwise over penstock's own dataset, sample by sample."""
    _need("torch", "torch")
    by_hand = job.whole_rows and all(path.lower().endswith(HDF5_ENDINGS) for path, _ in job.files)
    dataset = RowsByHand(job.files, job.columns) if by_hand else job.ds.only(*job.columns)
    name = f"DataLoader over {'h5py' if by_hand else 'ds[i]'}, {format_count(job.workers, 'worker')}"
    return name, dataloader(dataset, job.batch_size, job.workers)


def webdataset_contender(job: BenchJob) -> tuple[str, Iterable[Any]]:
    """The webdataset package as its documentation shows it: shards split over workers, shuffled, decoded, batched."""
    _need("webdataset", "webdataset")
    paths = [path for path, _ in job.files]
    if not all(".tar" in path for path in paths):
        raise ConfigError(f"--against webdataset: expected tar shards, found {paths[0]}")
    from torch.utils.data import DataLoader

    import webdataset as wds

    pipeline = (
        wds.WebDataset(paths, shardshuffle=False, empty_check=False)
        .shuffle(job.shuffle_buffer)
        .decode("torchrgb8")
        .to_tuple(*job.columns)
        .batched(job.batch_size)
    )
    name = f"WebDataset, {format_count(job.workers, 'worker')}, shuffle({job.shuffle_buffer})"
    return name, DataLoader(pipeline, batch_size=None, num_workers=min(job.workers, len(paths)))


CONTENDERS = {"torch": torch_contender, "webdataset": webdataset_contender}


def _need(library: str, name: str) -> None:
    if importlib.util.find_spec(library) is None:
        raise ConfigError(f'--against {name}: needs {library}: pip install "{library}"')
