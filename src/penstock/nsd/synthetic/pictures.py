"""The pictures shown: ``nsd_stimuli.hdf5`` as released, and MindEye2's smaller copy."""

import os

import numpy as np

from penstock.nsd.layout import COCO_224, STIMULI
from penstock.nsd.libraries import needed
from penstock.nsd.synthetic.scale import Scale
from penstock.nsd.synthetic.values import pictures

GROUP_BYTES = 32 * 2**20


def write_stimuli(root: str, scale: Scale, *, chunked: bool = False, only: np.ndarray | None = None) -> None:
    """``imgBrick``: (stimuli, height, width, 3); ``only`` these numbers are written, the rest is a hole in the file."""
    size = scale.picture
    _write(os.path.join(root, STIMULI), "imgBrick", (scale.stimuli, size, size, 3), np.uint8, chunked, only)


def write_coco(root: str, scale: Scale, size: int, *, only: np.ndarray | None = None) -> None:
    """MindEye2's ``images``: (stimuli, 3, size, size), float16 from 0 to 1."""
    _write(os.path.join(root, COCO_224), "images", (scale.stimuli, 3, size, size), np.float16, False, only)


def _write(path: str, name: str, shape: tuple[int, ...], dtype: type, chunked: bool, only: np.ndarray | None) -> None:
    h5py = needed("h5py")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    size = shape[2]
    step = max(1, GROUP_BYTES // (3 * size * size * np.dtype(dtype).itemsize))
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if chunked:
        create.set_chunk((1, *shape[1:]))
    create.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    create.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    numbers = np.arange(shape[0]) if only is None else np.unique(only)
    with h5py.File(f"{path}.part", "w") as file:
        kind = h5py.h5t.py_create(np.dtype(dtype))
        brick = h5py.Dataset(h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple(shape), create))
        for begin in range(0, len(numbers), step):
            some = numbers[begin : begin + step]
            made = pictures(some, size)
            if dtype is np.float16:
                made = (made.transpose(0, 3, 1, 2).astype(np.float32) / 255).astype(np.float16)
            if some[-1] - some[0] + 1 == len(some):
                brick[some[0] : some[-1] + 1] = made
            else:
                for number, picture in zip(some.tolist(), made, strict=True):
                    brick[number] = picture
    os.replace(f"{path}.part", path)
