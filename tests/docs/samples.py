"""The files that examples of the pages open, made small: each function fills the current folder."""

import os
from pathlib import Path

import h5py
import numpy as np
from PIL import Image

from penstock.nsd import synthesize
from penstock.nsd.synthetic import Scale


def photos() -> None:
    """A folder per class, pictures of different sizes."""
    rng = np.random.default_rng(0)
    for number in range(40):
        folder = Path("photos", ("cat", "dog")[number % 2])
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 255, (48 + number, 64, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:04d}.jpg")


def scans() -> None:
    """HDF5 sessions of pictures and labels."""
    rng = np.random.default_rng(0)
    os.makedirs("scans")
    for session in range(3):
        with h5py.File(f"scans/session{session}.h5", "w") as file:
            file["image"] = rng.integers(0, 255, (40, 64, 64, 3), np.uint8)
            file["label"] = rng.integers(0, 10, 40)


def shards() -> None:
    """Four shards of pictures and classes."""
    from penstock.webdataset import ShardWriter

    rng = np.random.default_rng(0)
    with ShardWriter("train-%03d.tar", maxcount=25) as writer:
        for number in range(100):
            picture = rng.integers(0, 255, (64, 80, 3), dtype=np.uint8)
            writer.write({"__key__": f"{number:06d}", "jpg": picture, "cls": number % 10})


def nsd() -> None:
    """A synthetic subject."""
    synthesize("my-nsd", Scale((9, 11, 10), 24, 3, {1: 3}, shared=4, picture=16, region_voxels=60))


def lightning() -> None:
    """A model and a dataset."""
    with h5py.File("data.h5", "w") as file:
        file["x"] = np.random.default_rng(0).random((64, 8), np.float32)
        file["y"] = np.zeros((64, 1), np.float32)
    Path("model.py").write_text(
        "import lightning.pytorch as pl\n"
        "import torch\n\n\n"
        "class Model(pl.LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(8, 1)\n\n"
        "    def training_step(self, batch, _):\n"
        "        return torch.nn.functional.mse_loss(self.layer(batch['x']), batch['y'])\n\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), 0.01)\n"
    )
