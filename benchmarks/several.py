"""Four subjects of different voxel counts, a batch of 24 of each a step: penstock against one torch loader a subject.

The files are as MindEye2 has them: one HDF5 dataset of float32 voxels per subject, one row per trial. An epoch takes
every trial once; steps end with the shortest subject, as zipped loaders do.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from benchmarks import data
from benchmarks.runner import Contestant
from penstock.base.sizes import format_count

VOXELS = {"subj01": 15_724, "subj02": 14_278, "subj05": 13_039, "subj07": 12_682}
TRIALS, BATCH = 4_800, 24


def subjects(root: Path) -> Path:
    def make(folder: Path) -> None:
        rng = np.random.default_rng(1)
        for name, voxels in VOXELS.items():
            with h5py.File(folder / f"betas_all_{name}_fp32_renorm.hdf5", "w") as file:
                file["betas"] = rng.standard_normal((TRIALS, voxels), np.float32)

    return data.once(root / "several", make)


def files(folder: str) -> dict[str, Path]:
    return {name: Path(folder, f"betas_all_{name}_fp32_renorm.hdf5") for name in VOXELS}


def touched(batches: Iterable[Any]) -> int:
    """Samples of a step, a value of each page of them looked at."""
    samples = 0
    for batch in batches:
        batch.reshape(-1)[::1024].sum()
        samples += len(batch)
    return samples


def penstock(folder: str, mode: str) -> Iterator[int]:
    import penstock as ps

    opened = {name: ps.open(path) for name, path in files(folder).items()}
    options = {"batch_size": BATCH, "shuffle": True}
    if mode == "several loaders":
        loaders = [ps.Loader(ds, memory="32MiB", threads=1, **options) for ds in opened.values()]
        for step in zip(*loaders, strict=True):
            yield touched(batch["betas"] for batch in step)
        return
    loader = ps.MultiLoader(opened, mode=mode, memory="128MiB", **options)
    for step in loader:
        yield touched(batch["betas"] for batch in (step.values() if mode == "together" else [step[1]]))


class Rows:
    """What people write: the file opened on first use, one row per sample."""

    def __init__(self, path: Path) -> None:
        self.path, self.betas = path, None

    def __len__(self) -> int:
        return TRIALS

    def __getitem__(self, row: int) -> Any:
        import torch

        if self.betas is None:
            self.betas = h5py.File(self.path)["betas"]
        return torch.from_numpy(self.betas[row])


def torch_loaders(folder: str, workers: int) -> Iterator[int]:
    from torch.utils.data import DataLoader

    loaders = [DataLoader(Rows(path), BATCH, shuffle=True, num_workers=workers) for path in files(folder).values()]
    for step in zip(*loaders, strict=True):
        yield touched(step)


def contestants(folder: Path) -> list[Contestant]:
    modes = {"together": "penstock, together", "alternate": "penstock, alternate"}
    several = Contestant(
        "penstock, a loader each", f"{__name__}:penstock", {"folder": str(folder), "mode": "several loaders"}
    )
    return [
        *(Contestant(label, f"{__name__}:penstock", {"folder": str(folder), "mode": m}) for m, label in modes.items()),
        several,
        *(
            Contestant(
                f"torch, a loader each, {format_count(workers, 'worker')}", f"{__name__}:torch_loaders",
                {"folder": str(folder), "workers": workers},
            )
            for workers in (0, 1)
        ),
    ]  # fmt: skip
