"""The Natural Scenes Dataset at its true size, synthetic: subject 1, 40 sessions of 750 trials, 15,724 voxels.

Sessions are stored as released, one time course per chunk, 699,192 chunks per file. Only the region's chunks are
written. The others are holes in the file, which take no room on disk and read as zeros. Of the pictures, the subject's
10,000 are written. Whole-brain sessions by trial are all holes: they read as zeros at the page cache's speed, for all
contestants alike.
"""

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import nibabel  # noqa: F401  # as torch and h5py: libraries are loaded before memory is counted
import numpy as np
import pandas  # noqa: F401
import scipy.io  # noqa: F401
import torch

from benchmarks import data
from benchmarks.runner import Contestant
from benchmarks.volumes import touch
from penstock.base.sizes import format_count

PIXELS = 224
BATCH = 32
WHOLE = (150, 150, 100)
WHOLE_SESSIONS = 40
COLUMNS = ("voxels", "image", "coco")


def make_subject(root: Path) -> Path:
    """Subject 1 as released."""
    from penstock.nsd.synthetic import synthesize
    from penstock.nsd.synthetic.pictures import write_coco

    def make(folder: Path) -> None:
        told = synthesize(folder, "full", written="region", stimuli=False)
        write_coco(str(folder), told.scale, PIXELS, only=told.stimuli(1))

    return data.once(root / "nsd_subject", make)


def make_prepared(root: Path) -> Path:
    """The same with copies by trial."""
    from penstock.nsd import NSD

    folder = make_subject(root)
    NSD(folder).prepare()
    return folder


def make_whole(root: Path) -> Path:
    """Whole volumes by trial, 135 GB as int16 and 270 as float32, all of it holes, and some pictures."""
    from penstock.nsd.synthetic import Scale, synthesize
    from penstock.nsd.synthetic.pictures import write_coco

    def make(folder: Path) -> None:
        x, y, z = WHOLE[::-1]
        scale = Scale((x, y, z), 750, WHOLE_SESSIONS, {1: WHOLE_SESSIONS}, 1000, 8, 15_724)
        told = synthesize(folder, scale, stored="trial-major", written="nothing", stimuli=False)
        write_coco(str(folder), dataclasses.replace(told.scale), PIXELS, only=np.arange(0))

    return data.once(root / "nsd_whole", make)


def penstock(
    root: str, memory: str, copies: bool = False, batches: int = 0, batch_size: int = BATCH, **options: Any
) -> Iterator[int]:
    """A shuffled epoch, or its first batches."""
    from penstock.nsd import NSD

    nsd = NSD(root) if copies else NSD(root, prepared=os.path.join(root, "no copies"))
    ds = nsd.dataset(**{"columns": COLUMNS, **options})
    roi_is_whole = ds.voxels is None
    with ds.loader(batch_size, shuffle=True, memory=memory) as loader:
        for number, batch in enumerate(loader):
            for column in batch[:2]:
                touch(column.permute(0, 3, 2, 1) if roi_is_whole and column.shape[1] != 3 else column)
            yield len(batch[0])
            if number + 1 == batches:
                return


def first_batch(root: str, memory: str) -> Iterator[int]:
    """From nothing to the first batch; the rate is that of a window of trials."""
    for size in penstock(root, memory):
        yield size
        return


class TrialByTrial(torch.utils.data.Dataset):
    """As it is written by hand: files opened on first use, a trial a call, masked afterwards."""

    def __init__(self, root: str, roi: str | None) -> None:
        from penstock.nsd import NSD

        nsd = NSD(root)
        self.layout, self.trials = nsd.layout, nsd.trials
        self.where = self.trials[["session", "trial_in_session", "stim_id"]].to_numpy()
        self.mask = None if roi is None else nsd.voxels(roi).mask.T
        self.files: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.where)

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray, int]:
        session, trial, picture = self.where[number].tolist()
        betas = self._file(self.layout.session(session, ".hdf5"))["betas"][trial]
        voxels = (betas if self.mask is None else betas[self.mask]).astype(np.float32)
        image = self._file(os.path.join(self.layout.root, "coco_images_224_float16.hdf5"))["images"][picture]
        return voxels, image, picture

    def _file(self, path: str) -> Any:
        if path not in self.files:
            self.files[path] = h5py.File(path)
        return self.files[path]


def dataloader(root: str, roi: str | None, workers: int, batches: int, batch_size: int = BATCH) -> Iterator[int]:
    ds = TrialByTrial(root, roi)
    loader = torch.utils.data.DataLoader(ds, batch_size=batch_size, shuffle=True, num_workers=workers)
    for number, batch in enumerate(loader):
        for column in batch[:2]:
            touch(column)
        yield len(batch[0])
        if number + 1 == batches:
            return


def prepare(root: str) -> Iterator[int]:
    """All sessions copied by trial, into a place of their own."""
    from penstock.nsd import NSD

    place = os.path.join(root, "copies in the making")
    shutil.rmtree(place, ignore_errors=True)
    nsd = NSD(root, prepared=place)
    nsd.prepare()
    yield len(nsd.trials)
    shutil.rmtree(place)


def read_once(root: str, what: str) -> Iterator[int]:
    """The bytes of all sessions: whole files one after another, or with h5py the region's, session by session."""
    from penstock.nsd import NSD

    nsd = NSD(root)
    block = np.empty(1 << 23, np.uint8)
    for session in nsd.sessions:
        path = nsd.layout.session(session, ".hdf5")
        if what == "files":
            with open(path, "rb", buffering=0) as file:
                while file.readinto(block):
                    pass
        else:
            mask = nsd.voxels("nsdgeneral").mask.T
            with h5py.File(path) as file:
                _region(file["betas"], mask)
        yield 750


def _region(betas: Any, mask: np.ndarray) -> np.ndarray:
    """By runs along x, which h5py reads quickest."""
    values = np.empty((len(betas), int(mask.sum())), np.int16)
    done = 0
    for z, y in np.argwhere(mask.any(axis=2)).tolist():
        along = np.flatnonzero(mask[z, y])
        values[:, done : done + len(along)] = betas[:, z, y, along[0] : along[-1] + 1][:, along - along[0]]
        done += len(along)
    return values


def subject_contestants(root: Path) -> list[Contestant]:
    path = {"root": str(make_subject(root))}
    here = f"{__name__}:"
    return [
        Contestant("penstock, 2 GiB, an epoch", here + "penstock", {**path, "memory": "2GiB"}, whole=True),
        Contestant("penstock, 2 GiB, first batch", here + "first_batch", {**path, "memory": "2GiB"}, whole=True),
        Contestant(
            "h5py, trial by trial", here + "dataloader",
            {**path, "roi": "nsdgeneral", "workers": 0, "batches": 1, "batch_size": 2}, whole=True,
        ),
    ]  # fmt: skip


def prepare_contestants(root: Path) -> list[Contestant]:
    path = {"root": str(make_subject(root))}
    here = f"{__name__}:"
    return [
        Contestant("penstock prepare, 256 MiB", here + "prepare", path, whole=True),
        Contestant("reading the files once", here + "read_once", {**path, "what": "files"}, whole=True),
        Contestant("h5py, the region session by session", here + "read_once", {**path, "what": "region"}, whole=True),
    ]


def prepared_contestants(root: Path) -> list[Contestant]:
    path = {"root": str(make_prepared(root)), "copies": True}
    here = f"{__name__}:"
    stored = {**path, "columns": ("voxels", "coco"), "memory": "1GiB", "batch_size": 128}
    return [
        Contestant("penstock, voxels as stored", here + "penstock", {**stored, "dtype": "int16"}),
        Contestant("penstock, voxels as float32", here + "penstock", stored),
        Contestant("penstock, z-scored", here + "penstock", {**stored, "zscore": "session"}),
        Contestant("penstock, pictures too", here + "penstock", {**path, "memory": "1GiB"}),
        Contestant(
            "numpy, memory-mapped copies", here + "mapped", {"root": path["root"], "batch_size": 128},
        ),
    ]  # fmt: skip


def mapped(root: str, batch_size: int) -> Iterator[int]:
    """The copies as numpy maps them, rows taken at random into fresh batches."""
    from penstock.nsd import NSD

    trials = np.load(os.path.join(NSD(root).prepare(), "subject.npy"), mmap_mode="r")
    order = np.random.default_rng(0).permutation(len(trials))
    for begin in range(0, len(order), batch_size):
        batch = trials[order[begin : begin + batch_size]]
        touch(torch.from_numpy(batch))
        yield len(batch)


def whole_contestants(root: Path) -> list[Contestant]:
    path = {"root": str(make_whole(root))}
    here = f"{__name__}:"
    ours = {**path, "memory": "1GiB", "roi": None, "batches": 500}
    loaders = [
        Contestant(
            f"DataLoader, {format_count(workers, 'worker')}",
            here + "dataloader",
            {**path, "roi": None, "workers": workers, "batches": 40},
        )
        for workers in (0, 2, 4)
    ]
    return [Contestant("penstock, 1 GiB", here + "penstock", ours), *loaders]


BENCHMARKS: dict[str, Callable[[Path], list[Contestant]]] = {
    "nsd-voxel-major": subject_contestants,
    "nsd-prepare": prepare_contestants,
    "nsd-prepared": prepared_contestants,
    "nsd-whole-brain": whole_contestants,
}
