"""HDF5 in the layouts people have: one shuffled epoch each, page cache warm, int16 rows of 4.5 MB.

Beside penstock run h5py's own ``ds[i]`` at random in one thread, and where there is one, the bare limit: two threads
that read, decode and convert into memory they use again, with no loader around them.
"""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import hdf5plugin
import numpy as np
import torch

from benchmarks import data
from benchmarks.runner import Contestant
from benchmarks.volumes import touch

ROWS = 96
BY_ROWS = 188
GUESSED = (47, 10, 19, 13)  # h5py's own guess for (750, 150, 150, 100) int16
GZIP4 = {"compression": "gzip", "compression_opts": 4, "shuffle": True}
LAYOUTS = {
    "contiguous": {},
    "gzip": {"chunks": (1, *data.VOLUME), **GZIP4},
    "guessed": {"chunks": GUESSED, "compression": "gzip", "compression_opts": 4},
    "eights": {"chunks": (8, *data.VOLUME), **GZIP4},
    "zstd": {"chunks": (1, *data.VOLUME), "shuffle": True, **hdf5plugin.Zstd()},
    "blosc-lz4": {"chunks": (1, *data.VOLUME), **hdf5plugin.Blosc("lz4")},
    "lzf": {"chunks": (1, *data.VOLUME), "compression": "lzf", "shuffle": True},
    "bitshuffle-lz4": {"chunks": (1, *data.VOLUME), **hdf5plugin.Bitshuffle()},
}
MEMORY = "1GiB"
EPOCHS = {"guessed": 2, "eights": 2, "contiguous": 12, "blosc-lz4": 8, "bitshuffle-lz4": 8}
BATCH = 8

VOXELS = (83, 104, 81)
TRIALS, MASKED = 750, 15_724


def make_layouts(root: Path) -> Path:
    """The same volumes in every layout."""

    def make(folder: Path) -> None:
        rng = np.random.default_rng(3)
        for layout, options in LAYOUTS.items():
            rows = BY_ROWS if layout == "guessed" else ROWS
            with h5py.File(folder / f"{layout}.h5", "w") as file:
                betas = file.create_dataset("betas", (rows, *data.VOLUME), "i2", **options)
                step = betas.chunks[0] if betas.chunks else 8
                for begin in range(0, rows, step):
                    betas[begin : begin + step] = np.stack([data.volume(rng) for _ in range(min(step, rows - begin))])

    return data.once(root / "hdf5", make)


def make_voxel_major(root: Path) -> Path:
    """A session as the Natural Scenes Dataset stores it: one time course of 750 trials a chunk."""

    def make(folder: Path) -> None:
        rng = np.random.default_rng(4)
        with h5py.File(folder / "betas_session01.hdf5", "w") as file:
            betas = file.create_dataset("betas", (TRIALS, *VOXELS), "i2", chunks=(TRIALS, 1, 1, 1))
            for z in range(VOXELS[0]):
                betas[:, z] = rng.integers(-3000, 3000, (TRIALS, *VOXELS[1:]), dtype=np.int16)

    return data.once(root / "voxel-major", make)


def region() -> np.ndarray:
    """A region of 15,724 voxels, in one lump as regions are."""
    z, y, x = np.ogrid[: VOXELS[0], : VOXELS[1], : VOXELS[2]]
    distance = ((z - 40) / 20) ** 2 + ((y - 20) / 14) ** 2 + ((x - 40) / 32) ** 2
    return distance <= np.sort(distance.reshape(-1))[MASKED - 1]


def penstock(
    path: str, dtype: str | None = None, masked: bool = False, memory: str = MEMORY, threads: int = 2, epochs: int = 1
) -> Iterator[int]:
    import penstock as ps

    ds = ps.open(path)
    if masked:
        ds = ds.select_within("betas", region())
    if dtype:
        ds = ds.cast("betas", dtype)
    with ps.Loader(ds, batch_size=BATCH, shuffle=True, memory=memory, columns=("betas",), threads=threads) as loader:
        for _ in range(epochs):
            for (betas,) in loader:
                touch(betas)
                yield len(betas)


def h5py_random(path: str, rows: int, dtype: str | None = None, masked: bool = False) -> Iterator[int]:
    mask = region() if masked else None
    with h5py.File(path) as file:
        betas = file["betas"]
        for row in np.random.default_rng(0).permutation(len(betas))[:rows].tolist():
            values = betas[row]
            values = values if mask is None else values[mask]
            touch(torch.from_numpy(values.astype(dtype) if dtype else values))
            yield 1


def bare(path: str, layout: str) -> Iterator[int]:
    """Two threads, each with a batch of memory that it uses again and again; nothing is handed over."""
    with h5py.File(path) as file:
        betas = file["betas"].id
        count = len(file["betas"])
        if layout == "contiguous":
            size = int(np.prod(data.VOLUME)) * 2
            places = [(betas.get_offset() + row * size, size) for row in range(count)]
        else:
            infos = [betas.get_chunk_info(number) for number in range(count)]
            places = [(info.byte_offset, info.size) for info in infos]
    order = np.tile(np.random.default_rng(0).permutation(count), 12 if layout == "contiguous" else 4)
    work = _bare_contiguous if layout == "contiguous" else _bare_gzip
    threads = [threading.Thread(target=work, args=(path, [places[row] for row in order[half::2]])) for half in range(2)]
    yield 0  # time counts from here
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield len(order)


def _bare_gzip(path: str, places: list[tuple[int, int]]) -> None:
    import imagecodecs

    size = int(np.prod(data.VOLUME)) * 2
    stored, inflated = np.zeros(2 * size, np.uint8), np.zeros(size, np.uint8)
    slots = np.zeros((BATCH, size // 2), np.uint16)
    descriptor = os.open(path, os.O_RDONLY)
    for number, (offset, length) in enumerate(places):
        words = slots[number % BATCH]
        os.preadv(descriptor, [stored[:length].data], offset)
        imagecodecs.deflate_decode(stored[:length], out=inflated)
        low, high = inflated.reshape(2, -1)
        np.copyto(words, high)
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, low, out=words)
    os.close(descriptor)


def _bare_contiguous(path: str, places: list[tuple[int, int]]) -> None:
    size = int(np.prod(data.VOLUME))
    stored, slots = np.zeros(size, np.int16), np.zeros((BATCH, size), np.float32)
    descriptor = os.open(path, os.O_RDONLY)
    for number, (offset, _) in enumerate(places):
        os.preadv(descriptor, [stored.view(np.uint8).data], offset)
        np.copyto(slots[number % BATCH], stored)
    os.close(descriptor)


def contestants(folder: Path, layout: str, h5py_rows: int) -> list[Contestant]:
    path = {"path": str(folder / f"{layout}.h5")}
    dtype = {"dtype": "float32"} if layout == "contiguous" else {}
    in_windows = layout in ("guessed", "eights")  # much is read before the first batch: time counts from the start
    epochs = {"epochs": EPOCHS.get(layout, 4)}
    ours = {**path, **dtype, **epochs}
    found = [Contestant(f"penstock, {MEMORY}", f"{__name__}:penstock", ours, whole=in_windows)]
    if not in_windows and layout != "contiguous":
        found.append(Contestant("penstock, 1 thread", f"{__name__}:penstock", {**ours, "threads": 1}))
    theirs = {**path, **dtype, "rows": h5py_rows}
    found.append(Contestant("h5py ds[i], 1 thread", f"{__name__}:h5py_random", theirs, whole=in_windows))
    if layout in ("gzip", "contiguous"):
        found.append(Contestant("bare, 2 threads", f"{__name__}:bare", {**path, "layout": layout}))
    return found


def masked_contestants(folder: Path) -> list[Contestant]:
    path = {"path": str(folder / "betas_session01.hdf5"), "masked": True}
    return [
        Contestant("penstock, 256 MiB", f"{__name__}:penstock", {**path, "memory": "256MiB"}, whole=True),
        Contestant("h5py ds[i][mask]", f"{__name__}:h5py_random", {**path, "rows": 3}, whole=True),
    ]


BENCHMARKS: dict[str, Callable[[Path], list[Contestant]]] = {
    **{
        f"hdf5-{layout}": lambda root, layout=layout: contestants(
            make_layouts(root), layout, {"guessed": 5, "eights": 12}.get(layout, 48)
        )
        for layout in LAYOUTS
    },
    "voxel-major": lambda root: masked_contestants(make_voxel_major(root)),
}
