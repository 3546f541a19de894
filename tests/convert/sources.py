"""Datasets to convert, and what the formats' own libraries read of the outputs."""

from io import BytesIO

import h5py
import hdf5plugin  # noqa: F401  # registers zstd
import numpy as np
import zarr

import lmdb
import penstock as ps


def voxel_major(path, voxels=3000, trials=40, **options):
    """A file stored by voxel; returns its values by trial."""
    values = np.random.default_rng(7).integers(-3000, 3000, (voxels, trials)).astype(np.int16)
    with h5py.File(path, "w") as file:
        file.create_dataset("betas", data=values, **options)
    return values.T


def trial_major(path, rows=50, shape=(6, 7, 8), **options):
    values = np.random.default_rng(8).normal(size=(rows, *shape)).astype(np.float32)
    with h5py.File(path, "w") as file:
        file.create_dataset("betas", data=values, **options)
    return values


def read_back(path, field="betas"):
    """All values, by the library of the format."""
    name = str(path)
    if name.endswith(".zarr"):
        return zarr.open_group(name, mode="r")[field][:]
    if name.endswith(".npy"):
        return np.load(name)
    if name.endswith(".h5"):
        with h5py.File(name) as file:
            return file[field][:]
    if name.endswith(".lmdb"):
        with lmdb.open(name, subdir=False, readonly=True, lock=False) as database, database.begin() as transaction:
            return np.stack([np.load(BytesIO(value)) for key, value in transaction.cursor() if field.encode() in key])
    return ps.open(name)[:][f"{field}.npy"]


def tree(folder):
    """Every file below a folder, and its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
