"""The demo's dataset: sessions of gzipped measurements, the pictures shown, and which trial showed which."""

import os
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

import penstock as ps
from penstock.cli.progress import Progress
from penstock.errors import ConfigError
from penstock.machine import cores
from penstock.sizes import MiB, format_size

# 0.8 MiB as stored and 1.6 MiB as float32: large enough that reading and decoding decide, not Python.
VOLUME = (80, 80, 64)
IMAGE = (128, 128, 3)
COARSE = 8  # a smooth field is drawn on a grid this much coarser, and the model looks at means over such cells
SHOWN = 3  # times each picture is shown
LEVEL = 4  # of gzip
SCALE = 300  # measurements are stored as whole numbers, this many to the unit
TABLE, STIMULI = "trials.npz", "nsd_stimuli.hdf5"


class Trials:
    """A dataset on disk: sessions of measurements, pictures, and which picture each trial showed."""

    def __init__(self, folder: str) -> None:
        with np.load(os.path.join(folder, TABLE)) as table:
            self.per_session, self.stimulus, self.coco = int(table["per_session"]), table["stimulus"], table["coco"]
        self.stimuli = os.path.join(folder, STIMULI)
        self.sessions = [_session(folder, n) for n in range(len(self.stimulus) // self.per_session)]

    def __len__(self) -> int:
        return len(self.stimulus)

    def open(self) -> ps.Dataset:
        """As one dataset, the penstock way."""
        betas = ps.open(self.sessions, fields=["betas"]).cast("betas", "float32", scale=1 / SCALE)
        return ps.join(voxels=betas, images=(ps.open(self.stimuli), self.stimulus), coco=self.coco)

    def describe(self, limit_bytes: int) -> str:
        """Sizes in words. Reads every file once, which leaves them all equally in the page cache."""
        stored = 0
        for path in (*self.sessions, self.stimuli):
            with open(path, "rb", buffering=0) as file:
                while piece := file.read(MiB):
                    stored += len(piece)
        delivered = len(self) * (4 * int(np.prod(VOLUME)) + int(np.prod(IMAGE)))
        return (
            f"{len(self):,} trials in {len(self.sessions)} gzipped HDF5 files, and the pictures shown: "
            f"{format_size(stored)} on disk, {format_size(delivered)} as tensors,\n"
            f"{delivered / limit_bytes:.1f} times the memory budget of {format_size(limit_bytes)}"
        )


@contextmanager
def dataset_folder(chosen: str | None, sessions: int, per_session: int) -> Iterator[str]:
    """A folder with the dataset in it: the caller's, or one that goes away afterwards."""
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as temporary:
        folder = chosen or temporary
        if not os.path.exists(os.path.join(folder, TABLE)):
            _make(folder, sessions, per_session)
        found = Trials(folder)
        if (len(found.sessions), found.per_session) != (sessions, per_session):
            raise ConfigError(
                f"--folder {folder}: holds {len(found.sessions)} sessions of {found.per_session} trials, not "
                f"{sessions} of {per_session}; ask for those, or name another folder"
            )
        yield folder


def _make(folder: str, sessions: int, per_session: int) -> None:
    """Write the dataset, the table last: where there is a table, the rest is whole."""
    os.makedirs(folder, exist_ok=True)
    if os.listdir(folder):
        raise ConfigError(f"--folder {folder}: has files, but no whole demo dataset; name an empty or a new folder")
    rng = np.random.default_rng(0)
    pictures = -(-sessions * per_session // SHOWN)
    noise = 12 * rng.standard_normal(VOLUME, dtype=np.float32)
    with Progress("making the dataset", sessions * per_session, "trials") as progress:
        for number in range(sessions):
            _make_session(_session(folder, number), per_session, rng, noise, progress)
    _make_pictures(os.path.join(folder, STIMULI), pictures, rng)
    stimulus = rng.permutation(np.arange(sessions * per_session) % pictures)
    coco = np.sort(rng.choice(10 * pictures, pictures, replace=False))[stimulus]
    np.savez(os.path.join(folder, TABLE), per_session=per_session, stimulus=stimulus, coco=coco)


def _session(folder: str, number: int) -> str:
    return os.path.join(folder, f"betas_session{number + 1:02d}.hdf5")


def _make_session(path: str, trials: int, rng: np.random.Generator, noise: np.ndarray, progress: Progress) -> None:
    """One session, a trial a chunk: smooth fields with some noise, which compress like measurements."""
    import h5py

    chunk: dict[str, Any] = {"chunks": (1, *VOLUME), "compression": "gzip", "compression_opts": LEVEL, "shuffle": True}
    with h5py.File(path, "w") as file, ThreadPoolExecutor(cores()) as pool:
        betas = file.create_dataset("betas", (trials, *VOLUME), np.int16, **chunk)
        for trial, packed in enumerate(pool.map(_packed, (_volume(rng, noise) for _ in range(trials)))):
            betas.id.write_direct_chunk((trial, 0, 0, 0), packed)
            progress.add(1)


def _volume(rng: np.random.Generator, noise: np.ndarray) -> np.ndarray:
    """One trial's measurements."""
    values = SCALE * _smooth(rng, VOLUME)
    # The same noise from another corner: drawing it anew takes as long as all the rest.
    values += np.roll(noise, tuple(rng.integers(VOLUME)), (0, 1, 2))
    return values.astype(np.int16)


def _packed(volume: np.ndarray) -> bytes:
    """A chunk as HDF5's shuffle and gzip write it. Done here, where all cores help and Ctrl-C is not lost in h5py."""
    return zlib.compress(volume.reshape(-1, 1).view(np.uint8).T.tobytes(), LEVEL)


def _make_pictures(path: str, count: int, rng: np.random.Generator) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        bricks = file.create_dataset("imgBrick", (count, *IMAGE), np.uint8)
        for picture in range(count):
            for colour in range(IMAGE[2]):
                bricks[picture, ..., colour] = np.clip(128 + 60 * _smooth(rng, IMAGE[:2]), 0, 255)


def _smooth(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A random field, drawn coarsely and interpolated between the points."""
    field = rng.standard_normal([size // COARSE for size in shape], dtype=np.float32)
    weight = np.linspace(0, 1, COARSE, endpoint=False, dtype=np.float32)
    for axis in range(len(shape)):
        near, far = np.moveaxis(field, axis, -1)[..., None], np.moveaxis(np.roll(field, -1, axis), axis, -1)[..., None]
        between = near + (far - near) * weight
        field = np.moveaxis(between.reshape(*between.shape[:-2], -1), -1, axis)
    return field
