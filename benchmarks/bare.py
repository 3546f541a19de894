"""What two cores can do without a loader: threads that read, decode and convert into memory that they use again.

Each thread also reads one value per page of every batch it has filled, as the loop around a loader does. A function
yields the samples of each batch as they are done; it never ends by itself.
"""

import os
import threading
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import h5py
import imagecodecs
import numpy as np
import torch

from benchmarks.shards import VOXELS
from benchmarks.volumes import touch

THREADS = 2


Fill = Callable[[Any, int], None]
"""Puts an item into a place of a batch."""


def in_threads(items: list[Any], batch: int, make: Callable[[], tuple[Fill, Any]]) -> Iterator[int]:
    """Two threads, each with half of the items and its own ``fill(item, place)`` and tensors, made by ``make``."""
    done: SimpleQueue[int] = SimpleQueue()

    def work(mine: list[Any]) -> None:
        fill, tensors = make()
        for number, item in enumerate(cycle(mine)):
            fill(item, number % batch)
            if number % batch == batch - 1:
                touch(*tensors)
                done.put(batch)

    for share in range(THREADS):
        threading.Thread(target=work, args=(items[share::THREADS],), daemon=True).start()
    while True:
        yield done.get()


def shuffled(items: list[Any]) -> list[Any]:
    order = np.random.default_rng(0).permutation(len(items))
    return [items[number] for number in order.tolist()]


def opened(paths: list[Path]) -> dict[Path, int]:
    return {path: os.open(path, os.O_RDONLY) for path in paths}


def volumes(folder: str, batch: int) -> Iterator[int]:
    """Contiguous int16 volumes as float32, each with a picture."""
    files = opened(sorted(Path(folder, "contiguous").glob("*.hdf5")))
    rows, shape = [], ()
    for path, descriptor in files.items():
        with h5py.File(path) as file:
            betas = file["betas"]
            shape, begin = betas.shape[1:], betas.id.get_offset()
            step = int(np.prod(shape)) * 2
            rows += [(descriptor, begin + number * step) for number in range(len(betas))]
    with h5py.File(Path(folder, "nsd_stimuli.hdf5")) as file:
        begin, (count, *picture) = file["imgBrick"].id.get_offset(), file["imgBrick"].shape
    pictures, size = os.open(Path(folder, "nsd_stimuli.hdf5"), os.O_RDONLY), int(np.prod(picture))

    def make() -> tuple[Fill, Any]:
        stored, out = np.zeros(shape, np.int16), np.zeros((batch, *shape), np.float32)
        images = np.zeros((batch, *picture), np.uint8)

        def fill(row: tuple[int, int], place: int) -> None:
            os.preadv(row[0], [stored], row[1])
            np.copyto(out[place], stored)
            os.preadv(pictures, [images[place]], begin + row[1] % count * size)

        return fill, (torch.from_numpy(out), torch.from_numpy(images))

    return in_threads(shuffled(rows), batch, make)


def guessed_chunks(path: str) -> Iterator[int]:
    """Every chunk of a gzip file decoded once, and put into its rows as float32."""
    with h5py.File(path) as file:
        betas = file["betas"]
        shape, chunk, found = betas.shape, betas.chunks, []
        betas.id.chunk_iter(lambda info: found.append((info.chunk_offset, info.byte_offset, info.size)))
    descriptor = os.open(path, os.O_RDONLY)
    out = np.zeros((chunk[0], *shape[1:]), np.float32)  # threads fill different parts of it
    rows_per_chunk = shape[0] / len(found)  # a chunk is a small part of many rows

    def make() -> tuple[Fill, Any]:
        raw = np.zeros(chunk, np.int16)

        def fill(one: tuple[tuple[int, ...], int, int], place: int) -> None:
            at, offset, size = one
            imagecodecs.deflate_decode(os.pread(descriptor, size, offset), out=raw.reshape(-1).view(np.uint8))
            goal = out[(slice(0, min(chunk[0], shape[0] - at[0])), *map(slice, at[1:], np.add(at[1:], chunk[1:])))]
            np.copyto(goal, raw[tuple(map(slice, goal.shape))])

        return fill, ()

    done = 0.0
    for count in in_threads(found, 64, make):
        before, done = int(done), done + count * rows_per_chunk
        yield int(done) - before


def pictures(folder: str, batch: int, planes: bool) -> Iterator[int]:
    """JPEGs as float32, channels last or in planes, with their voxels."""
    from penstock.formats.tar.samples import group
    from penstock.formats.tar.walk import walk

    found, files = [], opened(sorted(Path(folder).glob("*.tar")))
    for path, descriptor in files.items():
        table = group(walk(str(path)))
        jpg, npy = table.fields.index("jpg"), table.fields.index("nsdgeneral.npy")
        columns = (table.offsets[:, jpg], table.lengths[:, jpg], table.offsets[:, npy], table.lengths[:, npy])
        found += [(descriptor, *place) for place in zip(*(each.tolist() for each in columns), strict=True)]
    size = imagecodecs.jpeg8_decode(os.pread(found[0][0], found[0][2], found[0][1])).shape
    voxels = 3 * VOXELS * 2

    def make() -> tuple[Fill, Any]:
        pixels, arrays = np.zeros(size, np.uint8), np.zeros((batch, voxels), np.uint8)
        images = np.zeros((batch, size[2], *size[:2]) if planes else (batch, *size), np.float32)
        source = pixels.transpose(2, 0, 1) if planes else pixels

        def fill(place: tuple[int, int, int, int, int], at: int) -> None:
            descriptor, offset, length, array_offset, array_length = place
            imagecodecs.jpeg8_decode(os.pread(descriptor, length, offset), out=pixels)
            np.copyto(images[at], source)
            np.divide(images[at], np.float32(255), out=images[at])
            os.preadv(descriptor, [arrays[at]], array_offset + array_length - voxels)

        return fill, (torch.from_numpy(images.reshape(batch, -1)), torch.from_numpy(arrays))

    return in_threads(shuffled(found), batch, make)


def records(path: str, batch: int) -> Iterator[int]:
    """Rows gathered from a mapping."""
    stored = np.load(path, mmap_mode="r")
    order = np.random.default_rng(0).permutation(len(stored))
    groups = [order[begin : begin + batch] for begin in range(0, len(order) - batch + 1, batch)]

    def make() -> tuple[Fill, Any]:
        out = np.zeros((batch, *stored.shape[1:]), stored.dtype)

        def fill(rows: np.ndarray, _: int) -> None:
            np.take(stored, rows, axis=0, out=out, mode="clip")

        return fill, (torch.from_numpy(out),)

    for _ in in_threads(groups, 1, make):
        yield batch
