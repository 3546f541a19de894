"""500,000 shuffled records of 4 KiB, batch 256: penstock against a bare gather by one thread into reused memory."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks import data
from benchmarks.runner import Contestant

BATCH = 256


def penstock(folder: str, file: str) -> Iterator[int]:
    import penstock as ps

    if file.endswith(".npy"):
        ds = ps.join(vector=ps.open(Path(folder, file)), label=np.load(Path(folder, "labels.npy")))
    else:
        ds = ps.open(Path(folder, file), fields=["vectors", "labels"]).rename(vector="vectors", label="labels")
    loader = ps.Loader(ds, batch_size=BATCH, shuffle=True, memory="256MiB", columns=("vector", "label"))
    for _ in range(2):  # the first epoch maps the file's pages; the runner counts both
        for _, label in loader:
            yield len(label)


def bare(folder: str) -> Iterator[int]:
    """What no loader can beat with one thread: gather rows from a mapping into one batch of memory."""
    vectors = np.load(Path(folder, "vectors.npy"), mmap_mode="r")
    labels = np.load(Path(folder, "labels.npy"))
    out, label = np.empty((BATCH, data.WIDTH), np.float32), np.empty(BATCH, np.int64)
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(data.RECORDS)
        for begin in range(0, data.RECORDS - BATCH + 1, BATCH):
            rows = order[begin : begin + BATCH]
            np.take(vectors, rows, axis=0, out=out, mode="clip")
            np.take(labels, rows, out=label, mode="clip")
            yield BATCH


def contestants(folder: Path) -> list[Contestant]:
    return [
        Contestant("penstock, npy", f"{__name__}:penstock", {"folder": str(folder), "file": "vectors.npy"}),
        Contestant("penstock, HDF5", f"{__name__}:penstock", {"folder": str(folder), "file": "vectors.hdf5"}),
        Contestant("bare gather, one thread", f"{__name__}:bare", {"folder": str(folder)}),
    ]
