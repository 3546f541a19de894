"""A synthetic subject as MindEye's tar shards, and as MindEye2's files."""

import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from penstock.nsd import behaviour
from penstock.nsd.libraries import needed
from penstock.nsd.splits import FIRST_RELEASE
from penstock.nsd.stimuli import Pictures
from penstock.nsd.subject import NSD
from penstock.webdataset import ShardWriter, TarWriter

FOLDER = "webdataset_avg_split"
JPEG_QUALITY = 90
PARTS = {"train": "mindeye1-val/train", "val": "mindeye1-val/val", "test": "mindeye1-val/test"}
"""Folder of shards -> the split that they hold."""


def write_shards(
    root: str | os.PathLike[str],
    subject: int = 1,
    *,
    per_shard: int = 500,
    picture: Literal["jpg", "png"] = "jpg",
    size: int | None = None,
    wholebrain: bool = False,
) -> dict[str, int]:
    """``webdataset_avg_split`` of a subject that is there already; returns how many samples each part has.

    picture:     "jpg" as published; "png" keeps every pixel
    wholebrain:  the whole volumes too, as published: nearly all of the bytes
    """
    counts = {}
    with tempfile.TemporaryDirectory(prefix="penstock-") as copies:
        nsd = NSD(root, subject, prepared=copies)
        nsd.prepare()
        if wholebrain:
            nsd.prepare(None)
        for part, split in PARTS.items():
            folder = os.path.join(os.fspath(root), FOLDER, part)
            os.makedirs(folder, exist_ok=True)
            counts[part] = 0
            with ShardWriter(os.path.join(folder, f"{part}_{nsd.layout.name}_%d.tar"), maxcount=per_shard) as writer:
                for sample in _samples(nsd, split, picture, size, wholebrain):
                    writer.write({"__key__": f"sample{counts[part]:09d}", **sample})
                    counts[part] += 1
    with open(os.path.join(os.fspath(root), FOLDER, f"metadata_{nsd.layout.name}.json"), "w") as file:
        json.dump({"totals": counts}, file)
    return counts


def _samples(
    nsd: NSD, split: str, picture: str, size: int | None, wholebrain: bool
) -> Iterator[dict[str, bytes | np.ndarray]]:
    columns = ("voxels", "image", "coco", "trial", "n_reps")
    unshared = ~np.asarray(nsd.trials["shared1000"], bool)  # validation pictures too: MindEye trains on them
    options: dict[str, Any] = {
        "reps": "stack", "zscore": "session", "zscore_fit": unshared, "dtype": "float16", "split": split,
    }  # fmt: skip
    ds = nsd.dataset(columns, images=Pictures(size=size), **options)
    whole = nsd.dataset(("voxels",), roi=None, **options) if wholebrain else None
    for row in range(len(ds)):
        voxels, image, coco, trial, n_reps = ds[row]
        yield {
            "coco73k.npy": np.array([coco]),
            picture: _encoded(image.transpose(1, 2, 0), picture),
            "nsdgeneral.npy": voxels,
            "num_uniques.npy": np.array([n_reps]),
            "trial.npy": np.array([trial]),
            **({} if whole is None else {"wholebrain_3d.npy": whole[row][0]}),
        }


def _encoded(pixels: np.ndarray, picture: str) -> bytes:
    codecs = needed("imagecodecs")
    pixels = np.ascontiguousarray(pixels)
    made = codecs.png_encode(pixels) if picture == "png" else codecs.jpeg8_encode(pixels, level=JPEG_QUALITY)
    return bytes(made)


def write_mindeye2(root: str | os.PathLike[str], subject: int = 1) -> None:
    """MindEye2's betas and behaviour of a subject that is there already; its pictures are ``synthesize(coco=224)``."""
    nsd = NSD(root, subject)
    folder = os.fspath(root)
    voxels = nsd.dataset(("voxels",), zscore="session", zscore_fit="train")
    with needed("h5py").File(os.path.join(folder, f"betas_all_{nsd.layout.name}_fp32_renorm.hdf5"), "w") as file:
        betas = file.create_dataset("betas", (len(voxels), *voxels.fields["voxels"].shape), np.float32)
        with voxels.loader(256, memory="256MiB", output="numpy") as loader:
            done = 0
            for (batch,) in loader:
                betas[done : done + len(batch)] = batch
                done += len(batch)
    trials = nsd.trials
    session, shared = np.asarray(trials["session"]), np.asarray(trials["shared1000"], bool)
    home = os.path.join(folder, "wds", nsd.layout.name)
    for number in nsd.sessions:
        _write_behaviour(nsd, np.flatnonzero((session == number) & ~shared), f"{home}/train/{number - 1}.tar")
    early = session <= FIRST_RELEASE[subject]
    _write_behaviour(nsd, np.flatnonzero(shared & early), f"{home}/test/0.tar")
    _write_behaviour(nsd, np.flatnonzero(shared), f"{home}/new_test/0.tar")


def _write_behaviour(nsd: NSD, rows: np.ndarray, path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    found = behaviour.behaviour(nsd.all_trials(), np.asarray(nsd.trials["global_trial"])[rows])
    with TarWriter(path) as writer:
        for sample in range(len(rows)):
            values = {f"{name}.npy": found[name][sample] for name in behaviour.FIELDS}
            writer.write({"__key__": f"sample{sample:09d}", **values})
