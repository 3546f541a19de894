"""500,000 shuffled records of 4 KiB, batch 256: penstock against bare gathers by one and by two threads."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

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


def bare(folder: str, threads: int) -> Iterator[int]:
    """What no loader can beat: each thread gathers rows from a mapping into one batch of memory of its own."""
    vectors = np.load(Path(folder, "vectors.npy"), mmap_mode="r")
    labels = np.load(Path(folder, "labels.npy"))
    done: SimpleQueue[int] = SimpleQueue()

    def gather(order: np.ndarray, share: int) -> None:
        out, label = np.empty((BATCH, data.WIDTH), np.float32), np.empty(BATCH, np.int64)
        for begin in range(share * BATCH, data.RECORDS - BATCH + 1, threads * BATCH):
            rows = order[begin : begin + BATCH]
            np.take(vectors, rows, axis=0, out=out, mode="clip")
            np.take(labels, rows, out=label, mode="clip")
            done.put(BATCH)

    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(data.RECORDS)
        with ThreadPoolExecutor(threads) as pool:
            for share in range(threads):
                pool.submit(gather, order, share)
            for _ in range(data.RECORDS // BATCH):
                yield done.get()


def contestants(folder: Path) -> list[Contestant]:
    return [
        Contestant("penstock, npy", f"{__name__}:penstock", {"folder": str(folder), "file": "vectors.npy"}),
        Contestant("penstock, HDF5", f"{__name__}:penstock", {"folder": str(folder), "file": "vectors.hdf5"}),
        Contestant("bare gather, one thread", f"{__name__}:bare", {"folder": str(folder), "threads": 1}),
        Contestant("bare gather, two threads", f"{__name__}:bare", {"folder": str(folder), "threads": 2}),
    ]
