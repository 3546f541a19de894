"""Tar shards of 425 x 425 JPEGs with (3, 15724) float16 voxels: shuffled epochs, pictures as float32 CHW.

penstock by random access against the ``webdataset`` package as MindEye uses it, at several numbers of workers, against
Grain where it is installed, and two bare threads that read, decode and convert into memory they use again. Besides:
what a member costs that nobody reads, and what shuffling volumes of 9 MB takes.
"""

import importlib.util
import io
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import imagecodecs
import numpy as np
import torch
from PIL import Image

from benchmarks import data
from benchmarks.runner import Contestant
from benchmarks.volumes import touch
from penstock.base.sizes import format_count

SAMPLES, EACH, SIZE, VOXELS = 1200, 100, 425, 15_724
# The slower ones need fewer for as long a run; a first batch, and what comes before it, count for nobody.
EPOCHS, SLOW_EPOCHS = 10, 3
BRAIN_BYTES = 4_000_000
VOLUME, VOLUMES, VOLUME_SHARDS = (150, 150, 100), 288, 18


def make_shards(root: Path, name: str = "shards", samples: int = SAMPLES, brain_bytes: int = 0) -> Path:
    """Pictures that compress as photographs do, about 45 KB each, voxels and a number."""

    def make(folder: Path) -> None:
        from penstock.webdataset import ShardWriter

        rng = np.random.default_rng(5)
        unread = {"wholebrain.npy": rng.integers(0, 256, brain_bytes, np.uint8)} if brain_bytes else {}
        with ShardWriter(str(folder / "train-%03d.tar"), maxcount=EACH) as writer:
            for number in range(samples):
                writer.write({
                    "__key__": f"sample{number:09d}",
                    "coco73k.npy": np.array([number]),
                    "jpg": imagecodecs.jpeg8_encode(data.picture(rng, SIZE), level=90),
                    "nsdgeneral.npy": rng.normal(size=(3, VOXELS)).astype(np.float16),
                    **unread,
                })  # fmt: skip

    return data.once(root / name, make)


def make_volumes(root: Path) -> Path:
    """18 shards of float32 volumes."""

    def make(folder: Path) -> None:
        from penstock.webdataset import ShardWriter

        rng = np.random.default_rng(6)
        with ShardWriter(str(folder / "train-%03d.tar"), maxcount=VOLUMES // VOLUME_SHARDS) as writer:
            for number in range(VOLUMES):
                writer.write({"__key__": f"{number:06d}", "betas.npy": rng.random(VOLUME, np.float32)})

    return data.once(root / "volume-shards", make)


def penstock(folder: str, batch: int, memory: str) -> Iterator[int]:
    import penstock as ps

    ds = ps.open(f"{folder}/train-*.tar").cast("jpg", "float32", divisor=255).permute("jpg", 2, 0, 1)
    columns = ("nsdgeneral.npy", "jpg", "coco73k.npy")
    with ps.Loader(ds, batch_size=batch, shuffle=True, memory=memory, columns=columns) as loader:
        for _ in range(EPOCHS):
            for voxels, images, coco in loader:
                touch(voxels, images)
                yield len(coco)


def penstock_volumes(folder: str) -> Iterator[int]:
    import penstock as ps

    with ps.Loader(ps.open(f"{folder}/train-*.tar"), batch_size=4, shuffle=True, memory="256MiB") as loader:
        for batch in loader:
            touch(batch["betas.npy"])
            yield len(batch["betas.npy"])


def pipeline_volumes(folder: str, workers: int, package: str) -> Iterator[int]:
    wds = importlib.import_module(package)
    shards = sorted(map(str, Path(folder).glob("*.tar")))
    ds = wds.WebDataset(shards, shardshuffle=False).shuffle(500, initial=500).decode().to_tuple("betas.npy").batched(4)
    for (betas,) in torch.utils.data.DataLoader(ds, batch_size=None, num_workers=workers):
        touch(torch.as_tensor(betas))
        yield len(betas)


def pipeline(folder: str, workers: int, package: str, batch: int) -> Iterator[int]:
    wds = importlib.import_module(package)
    shards = sorted(map(str, Path(folder).glob("*.tar")))
    ds = (
        wds.WebDataset(shards, resampled=True)
        .shuffle(500, initial=500, rng=random.Random(42))
        .decode("torch")
        .rename(images="jpg;png", voxels="nsdgeneral.npy", coco="coco73k.npy")
        .to_tuple("voxels", "images", "coco")
        .batched(batch, partial=True)
        .with_epoch(max(1, SLOW_EPOCHS * SAMPLES // batch // max(1, workers)))
    )
    for voxels, images, coco in torch.utils.data.DataLoader(ds, batch_size=None, num_workers=workers):
        touch(voxels, images)
        yield len(coco)


def records(folder: Path) -> Path:
    """The same samples as ArrayRecord files, which Grain reads by position: length of the picture, picture, voxels."""

    def make(goal: Path) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        from penstock.webdataset import WebDataset

        goal.mkdir(parents=True, exist_ok=True)
        for shard in sorted(folder.glob("*.tar")):
            writer = ArrayRecordWriter(str(goal / f"{shard.stem}.array_record"), "group_size:1,uncompressed")
            for sample in WebDataset(str(shard), shardshuffle=False):
                writer.write(np.int64(len(sample["jpg"])).tobytes() + sample["jpg"] + sample["nsdgeneral.npy"])
            writer.close()

    return data.once(folder.with_name("shards-records"), make)


def grain_threads(folder: str, batch: int) -> Iterator[int]:
    """Grain with two threads, of all peers the quickest with these samples."""
    import grain

    source = grain.sources.ArrayRecordDataSource(sorted(map(str, Path(folder).glob("*.array_record"))))
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2 * batch)
    ds = grain.MapDataset.source(source).shuffle(seed=0).repeat(SLOW_EPOCHS).map(_unpack)
    for voxels, images in ds.to_iter_dataset(options).batch(batch):
        touch(torch.from_numpy(voxels), torch.from_numpy(images))
        yield len(voxels)


def _unpack(record: bytes) -> tuple[np.ndarray, np.ndarray]:
    end = 8 + int(np.frombuffer(record, np.int64, 1)[0])
    with Image.open(io.BytesIO(record[8:end])) as picture:
        pixels = np.asarray(picture.convert("RGB"), np.float32) / np.float32(255)
    return np.load(io.BytesIO(record[end:])), pixels.transpose(2, 0, 1)


def bare(folder: str, batch: int) -> Iterator[int]:
    """Two threads, each with a batch of memory that it uses again and again; nothing is handed over."""
    from penstock.formats.tar.samples import group
    from penstock.formats.tar.walk import walk

    places = []
    for path in sorted(Path(folder).glob("*.tar")):
        table = group(walk(str(path)))
        at = table.fields.index("jpg")
        places += [(str(path), *place) for place in zip(table.offsets[:, at], table.lengths[:, at], strict=True)]
    random.Random(0).shuffle(places)
    places *= EPOCHS
    threads = [threading.Thread(target=_bare, args=(places[half::2], batch)) for half in range(2)]
    yield 0
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield len(places)


def _bare(places: list[tuple[str, int, int]], batch: int) -> None:
    pixels = np.zeros((SIZE, SIZE, 3), np.uint8)
    slots = np.zeros((batch, SIZE, SIZE, 3), np.float32)
    descriptors = {path: os.open(path, os.O_RDONLY) for path, _, _ in places}
    for number, (path, offset, length) in enumerate(places):
        imagecodecs.jpeg8_decode(os.pread(descriptors[path], int(length), int(offset)), out=pixels)
        goal = slots[number % batch]
        np.copyto(goal, pixels)
        np.divide(goal, np.float32(255), out=goal)


def contestants(folder: Path, batch: int, memory: str) -> list[Contestant]:
    here = {"folder": str(folder), "batch": batch}
    found = [Contestant(f"penstock, {memory}", f"{__name__}:penstock", {**here, "memory": memory})]
    for package, workers in (("penstock.webdataset", 2), ("webdataset", 0), ("webdataset", 1), ("webdataset", 2)):
        label = f"{package} verbs, {format_count(workers, 'worker')}"
        found.append(Contestant(label, f"{__name__}:pipeline", {**here, "workers": workers, "package": package}))
    if importlib.util.find_spec("grain") and importlib.util.find_spec("array_record"):
        there = {"folder": str(records(folder)), "batch": batch}
        found.append(Contestant("grain, 2 threads, ArrayRecord copies", f"{__name__}:grain_threads", there))
    return [*found, Contestant("bare, 2 threads, pictures alone", f"{__name__}:bare", here)]


def unread_member(root: Path) -> list[Contestant]:
    """The same samples with and without a whole brain of 4 MB in each."""
    with_brain = make_shards(root, "shards-brain", 400, BRAIN_BYTES)
    without = make_shards(root, "shards-plain", 400)
    return [
        Contestant(label, f"{__name__}:penstock", {"folder": str(folder), "batch": 32, "memory": "512MiB"})
        for label, folder in (
            ("penstock, 4 MB unread per sample", with_brain),
            ("penstock, nothing unread", without),
        )
    ]


def volumes(root: Path) -> list[Contestant]:
    """Shuffled volumes of 9 MB, batch 4; from the start, since a buffer that fills first has read them all by then."""
    here = {"folder": str(make_volumes(root))}
    found = [Contestant("penstock, 256 MiB", f"{__name__}:penstock_volumes", here, whole=True)]
    for package, workers in (("penstock.webdataset", 0), ("webdataset", 0), ("webdataset", 2)):
        label = f"{package} shuffle(500), {format_count(workers, 'worker')}"
        arguments = {**here, "workers": workers, "package": package}
        found.append(Contestant(label, f"{__name__}:pipeline_volumes", arguments, whole=True))
    return found


BENCHMARKS = {
    "shards": lambda root: contestants(make_shards(root), 32, "256MiB"),
    "shards-300": lambda root: contestants(make_shards(root), 300, "1536MiB"),
    "shards-unread": unread_member,
    "shards-volumes": volumes,
}
