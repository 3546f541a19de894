"""Session files of synthetic betas, in every layout that people have. Memory is bounded by a slab of one session."""

import gzip
import os
from typing import Any, Literal, get_args

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.files.atomic import atomic_write
from penstock.nsd.layout import SubjectLayout
from penstock.nsd.libraries import needed
from penstock.nsd.synthetic.scale import Scale
from penstock.nsd.synthetic.values import Betas
from penstock.nsd.synthetic.volumes import Anatomy

Stored = Literal["voxel-major", "trial-major", "rechunked"]
STORED = get_args(Stored)
"""One time course per chunk, as released; contiguous trials; gzipped chunks of some trials and part of the volume."""

Written = Literal["brain", "region", "nothing"]
WRITTEN = get_args(Written)
"""What is filled with values; the rest of the file is a hole that takes no room on disk and reads as zeros."""

SLAB_BYTES = 64 * 2**20
GZIP_LEVEL = 1


@dataclass(frozen=True)
class SyntheticSession:
    """One session of one subject: its values, and what of them is written."""

    betas: Betas
    anatomy: Anatomy
    number: int
    written: Written

    @property
    def scale(self) -> Scale:
        return self.betas.scale

    @property
    def shape(self) -> tuple[int, ...]:
        """As h5py sees it: trials, Z, Y, X."""
        return (self.scale.trials, *self.scale.volume[::-1])

    @property
    def filled(self) -> np.ndarray:
        """(X, Y, Z): voxels that are not zero."""
        if self.written == "nothing":
            return np.zeros(self.scale.volume, bool)
        return self.anatomy.brain if self.written == "brain" else self.anatomy.nsdgeneral

    def slab(self, trials: np.ndarray, layers: slice) -> np.ndarray:
        """Some trials of some layers: (trials, Z, Y, X)."""
        filled = self.filled[:, :, layers]
        numbers = np.arange(self.scale.voxels).reshape(self.scale.volume)[:, :, layers]
        out = np.zeros((len(trials), *filled.T.shape), np.int16)
        inside = filled.T
        out[:, inside] = self.betas.values(self.number, trials, numbers.T[inside])
        return out


def write_session(path: str, session: SyntheticSession, stored: Stored) -> None:
    """One ``betas_sessionNN.hdf5``, under its name when it is whole."""
    h5py = needed("h5py")
    part = f"{path}.part"
    with h5py.File(part, "w") as file:
        if stored == "voxel-major":
            _voxel_major(file, session)
        elif stored == "trial-major":
            _trial_major(file, session)
        else:
            _rechunked(file, session)
    os.replace(part, path)


def _dataset(file: Any, session: SyntheticSession, chunks: tuple[int, ...] | None) -> Any:
    """All of its room set aside, none of it written."""
    h5py = needed("h5py")
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if chunks:
        create.set_chunk(chunks)
    create.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    create.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    space = h5py.h5s.create_simple(session.shape)
    return h5py.Dataset(h5py.h5d.create(file.id, b"betas", h5py.h5t.STD_I16LE, space, create))


def _voxel_major(file: Any, session: SyntheticSession) -> None:
    betas = _dataset(file, session, (session.scale.trials, 1, 1, 1))
    trials = np.arange(session.scale.trials)
    for z in range(session.shape[1]):
        filled = session.filled[:, :, z].T
        if not filled.any():
            continue
        courses = session.slab(trials, slice(z, z + 1))[:, 0]
        if filled.all() or session.written == "brain":
            betas[:, z] = courses
            continue
        for y, x in np.argwhere(filled).tolist():
            betas.id.write_direct_chunk((0, z, y, x), courses[:, y, x].tobytes())


def _trial_major(file: Any, session: SyntheticSession) -> None:
    betas = _dataset(file, session, None)
    if session.written != "nothing":
        for trials in _groups(session):
            betas[trials[0] : trials[-1] + 1] = session.slab(trials, slice(None))


def _rechunked(file: Any, session: SyntheticSession) -> None:
    chunk = tuple(max(1, size // 4) for size in session.shape)
    betas = file.create_dataset("betas", session.shape, "<i2", chunks=chunk, compression="gzip", shuffle=True)
    for first in range(0, session.scale.trials, chunk[0]):
        trials = np.arange(first, min(first + chunk[0], session.scale.trials))
        betas[first : first + len(trials)] = session.slab(trials, slice(None))


def write_nifti_session(path: str, session: SyntheticSession) -> None:
    """``betas_sessionNN.nii.gz``: (X, Y, Z, trials), one trial after another in one compressed stream."""
    header = needed("nibabel").Nifti1Header()
    header.set_data_dtype(np.int16)
    header.set_data_shape((*session.scale.volume, session.scale.trials))
    header.set_zooms((1.8, 1.8, 1.8, 1.0))
    header.set_sform(np.diag([1.8, 1.8, 1.8, 1.0]), code=1)
    header["vox_offset"] = 352
    with atomic_write(path, mode=0o644) as raw, gzip.GzipFile("", "wb", GZIP_LEVEL, raw, mtime=0) as file:
        file.write(header.binaryblock + bytes(4))
        for trials in _groups(session):
            file.write(session.slab(trials, slice(None)).tobytes())


def _groups(session: SyntheticSession) -> list[np.ndarray]:
    """Trials that are made together."""
    step = max(1, SLAB_BYTES // (2 * session.scale.voxels))
    return [np.arange(session.scale.trials)[first : first + step] for first in range(0, session.scale.trials, step)]


def write_sessions(layout: SubjectLayout, session: SyntheticSession, stored: Stored | None, nifti: bool) -> None:
    """One session in the forms asked for; ``stored=None`` leaves HDF5 out."""
    os.makedirs(layout.beta_folder, exist_ok=True)
    if stored is not None:
        write_session(layout.session(session.number, ".hdf5"), session, stored)
    if nifti:
        write_nifti_session(layout.session(session.number, ".nii.gz"), session)
