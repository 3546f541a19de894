"""penstock's lines of ``benchmarks.small_machine``."""

import glob
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.volumes import BATCH, touch

PICTURES = ("nsdgeneral.npy", "jpg", "coco73k.npy")


def _forever(loader: Any, *names: str) -> Iterator[int]:
    while True:
        for batch in loader:
            touch(*(batch[name] for name in names))
            yield len(batch[names[0]])


def _volumes(folder: str, memory: str) -> Any:
    import penstock as ps

    betas = ps.open(Path(folder, "contiguous", "*.hdf5")).cast("betas", "float32")
    pictures = ps.open(Path(folder, "nsd_stimuli.hdf5"))
    trials = ps.join(voxels=betas, images=(pictures, np.load(Path(folder, "stimulus_of_trial.npy"))))
    return ps.Loader(trials, batch_size=BATCH, shuffle=True, memory=memory)


def volumes(folder: str, memory: str) -> Iterator[int]:
    return _forever(_volumes(folder, memory), "voxels", "images")


def guessed(folder: str, memory: str) -> Iterator[int]:
    import penstock as ps

    ds = ps.open(Path(folder, "guessed.hdf5")).cast("betas", "float32")
    return _forever(ps.Loader(ds, batch_size=BATCH, shuffle=True, memory=memory), "betas")


def _pictures(folder: str, contiguous: bool) -> Any:
    import penstock as ps

    ds = ps.open(f"{folder}/train-*.tar").cast("jpg", "float32", divisor=255)
    ds = ds.permute("jpg", 2, 0, 1, contiguous=contiguous).only(*PICTURES)
    return ps.Loader(ds, batch_size=32, shuffle=True, memory="256MiB")


def pictures(folder: str, contiguous: bool) -> Iterator[int]:
    return _forever(_pictures(folder, contiguous), *PICTURES[:2])


def records(path: str, batch: int) -> Iterator[int]:
    import penstock as ps

    return _forever(ps.Loader(ps.open(path), batch_size=batch, shuffle=True, memory="256MiB"), "data")


def many_files(pattern: str) -> Iterator[int]:
    import penstock as ps

    ds = ps.open(pattern)
    return _forever(ps.Loader(ds, batch_size=64, shuffle=True, memory="256MiB"), *ds.fields)


def first_epoch(folder: str) -> float:
    """The rate of the first epoch, its first batch included, as a part of the second's."""
    import imagecodecs

    assert imagecodecs.jpeg8_decode  # loaded before time counts
    loader, seconds = _pictures(folder, contiguous=False), []
    for _ in range(2):
        began = time.perf_counter()
        for batch in loader:
            touch(batch["jpg"], batch["nsdgeneral.npy"])
        seconds.append(time.perf_counter() - began)
    return seconds[1] / seconds[0]


def drop_from_memory(folder: str) -> int:
    """Take files out of the page cache; the bytes of them."""
    total = 0
    for path in glob.glob(f"{folder}/contiguous/*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        total += os.fstat(descriptor).st_size
        os.close(descriptor)
    return total


def cold_volumes(folder: str) -> float:
    """MB/s of an epoch, from files that are not in memory; the loader has run an epoch before."""
    loader = _volumes(folder, "768MiB")
    for _ in range(2):
        total, began = drop_from_memory(folder), time.perf_counter()
        for batch in loader:
            touch(batch["voxels"])
        seconds = time.perf_counter() - began
    return total / seconds / 1e6


def open_npy(path: str) -> float:
    """Milliseconds in a new process; numpy and torch are loaded."""
    began = time.perf_counter()
    import penstock as ps

    ps.open(path)
    return 1000 * (time.perf_counter() - began)


def first_batch(path: str) -> float:
    """Milliseconds from an open dataset to the first batch, in a new process."""
    import penstock as ps

    ds = ps.open(path)
    began = time.perf_counter()
    next(iter(ps.Loader(ds, batch_size=32, shuffle=True, memory="64MiB")))
    return 1000 * (time.perf_counter() - began)
