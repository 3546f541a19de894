"""Seeded synthetic data with the geometry of the Natural Scenes Dataset, and small records.

Values are smooth random fields with white noise on top: they compress and decode like measurements.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

VOLUME = (150, 150, 100)
IMAGE = 425
SESSIONS, TRIALS, STIMULI = 12, 40, 300
RECORDS, WIDTH = 500_000, 1024
GZIP = {"chunks": (1, *VOLUME), "compression": "gzip", "compression_opts": 4, "shuffle": True}
LAYOUTS = {"contiguous": {}, "gzip": GZIP}


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, made on first use; an interrupted making is begun again."""
    if not folder.exists():
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        print(f"making {folder.name} …", flush=True)
        make(partial)
        partial.rename(folder)
    return folder


def volume(rng: np.random.Generator) -> np.ndarray:
    """One int16 volume: a smooth field (standard deviation 300) plus noise (12)."""
    field = rng.standard_normal((26, 26, 18), dtype=np.float32)
    for axis, size in enumerate(VOLUME):
        at = np.linspace(0, field.shape[axis] - 1.001, size, dtype=np.float32)
        low = at.astype(np.int64)
        weight = (at - low).reshape([-1 if each == axis else 1 for each in range(3)])
        field = np.take(field, low, axis) * (1 - weight) + np.take(field, low + 1, axis) * weight
    field *= 300 / field.std()
    field += 12 * rng.standard_normal(VOLUME, dtype=np.float32)
    return np.clip(np.rint(field), -32768, 32767).astype(np.int16)


def volumes(root: Path) -> Path:
    """Sessions of volumes in each layout, pictures, and a trial table."""

    def make(folder: Path) -> None:
        rng = np.random.default_rng(1)
        for layout in LAYOUTS:
            (folder / layout).mkdir()
        for session in range(1, SESSIONS + 1):
            trials = np.stack([volume(rng) for _ in range(TRIALS)])
            for layout, options in LAYOUTS.items():
                with h5py.File(folder / layout / f"betas_session{session:02d}.hdf5", "w") as file:
                    file.create_dataset("betas", data=trials, **options)
        with h5py.File(folder / "nsd_stimuli.hdf5", "w") as file:
            file["imgBrick"] = rng.integers(0, 256, (STIMULI, IMAGE, IMAGE, 3), np.uint8)
        np.save(folder / "stimulus_of_trial.npy", rng.integers(0, STIMULI, SESSIONS * TRIALS))

    return once(root / "volumes", make)


def records(root: Path) -> Path:
    """4 KiB records with a label each, as npy and as contiguous HDF5."""

    def make(folder: Path) -> None:
        rng = np.random.default_rng(2)
        vectors = np.lib.format.open_memmap(folder / "vectors.npy", "w+", np.float32, (RECORDS, WIDTH))
        with h5py.File(folder / "vectors.hdf5", "w") as file:
            dataset = file.create_dataset("vectors", (RECORDS, WIDTH), np.float32)
            for begin in range(0, RECORDS, 10_000):
                part = rng.standard_normal((10_000, WIDTH), dtype=np.float32)
                vectors[begin : begin + 10_000] = dataset[begin : begin + 10_000] = part
            file["labels"] = np.arange(RECORDS)
        np.save(folder / "labels.npy", np.arange(RECORDS))

    return once(root / "records", make)


def picture(rng: np.random.Generator, size: int) -> np.ndarray:
    """Patches of several sizes, the finer the fainter: it compresses as a photograph does."""
    from PIL import Image

    whole = np.full((size, size, 3), 127.5, np.float32)
    for patches, weight in ((4, 0.8), (12, 0.5), (40, 0.27), (130, 0.15)):
        coarse = Image.fromarray(rng.integers(0, 256, (patches, patches, 3), np.uint8))
        whole += weight * (np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC), np.float32) - 127.5)
    return whole.clip(0, 255).astype(np.uint8)
