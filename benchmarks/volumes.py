"""One shuffled epoch of volumes (150 x 150 x 100, int16 -> float32) with a joined picture, batch 32, page cache warm.

penstock in 768 MiB against torch's ``DataLoader`` over h5py as people write it, with every number of workers.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from benchmarks import data
from benchmarks.runner import Contestant
from penstock.base.sizes import format_count

BATCH = 32
MEMORY = "768MiB"


def touch(*tensors: torch.Tensor) -> float:
    """Read one value of every page."""
    total = 0.0
    for tensor in tensors:
        as_stored = tensor if tensor.is_contiguous() else tensor.permute(0, 2, 3, 1)  # pictures, channels last
        flat = as_stored.reshape(-1)
        total += float(flat[:: max(1, 4096 // tensor.element_size())].sum(dtype=torch.float32))
    return total


def penstock(folder: str, layout: str, memory: str = MEMORY) -> Iterator[int]:
    import penstock as ps

    root = Path(folder)
    betas = ps.open(root / layout / "betas_session*.hdf5").cast("betas", "float32")
    stimuli = ps.open(root / "nsd_stimuli.hdf5")
    trials = ps.join(voxels=betas, images=(stimuli, np.load(root / "stimulus_of_trial.npy")))
    columns = ("voxels", "images", "__index__")
    loader = ps.Loader(trials, batch_size=BATCH, shuffle=True, memory=memory, columns=columns)
    for voxels, images, index in loader:
        touch(voxels, images)
        yield len(index)


class ByHand(torch.utils.data.Dataset):
    """Handles opened on first use, one per file and worker; a trial is read, cast, and returned with its picture."""

    def __init__(self, folder: str, layout: str) -> None:
        self.paths = sorted(Path(folder, layout).glob("*.hdf5"))
        self.stimuli = Path(folder, "nsd_stimuli.hdf5")
        self.stimulus = np.load(Path(folder, "stimulus_of_trial.npy"))
        self.files: dict[Path, h5py.File] = {}

    def __len__(self) -> int:
        return len(self.stimulus)

    def read(self, path: Path, name: str, at: int) -> Any:
        if path not in self.files:
            self.files[path] = h5py.File(path, "r")
        return self.files[path][name][at]

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray, int]:
        betas = self.read(self.paths[number // data.TRIALS], "betas", number % data.TRIALS).astype(np.float32)
        return betas, self.read(self.stimuli, "imgBrick", int(self.stimulus[number])), number


def dataloader(folder: str, layout: str, workers: int) -> Iterator[int]:
    dataset = ByHand(folder, layout)
    for betas, images, number in torch.utils.data.DataLoader(dataset, BATCH, shuffle=True, num_workers=workers):
        touch(betas, images)
        yield len(number)


def contestants(folder: Path, layout: str) -> list[Contestant]:
    here = {"folder": str(folder), "layout": layout}
    by_hand = [
        Contestant(f"DataLoader + h5py, {format_count(n, 'worker')}", f"{__name__}:dataloader", {**here, "workers": n})
        for n in (0, 1, 2, 4)
    ]
    return [Contestant(f"penstock, {MEMORY}", f"{__name__}:penstock", here), *by_hand]
