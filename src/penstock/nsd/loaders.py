"""MindEye's ``get_dataloaders``, from tar shards or from the release itself: the same tuples for the same pictures.

Where it differs from MindEye's own, and why, is told in ``penstock.webdataset.mindeye``: epochs are whole and seeded,
ranks share them out, validation is complete, nothing is downloaded. From the release, samples are made as the shards
were: three trials a picture, z-scored by session in half precision, pictures from 0 to 1.
"""

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.dataset import Dataset, join
from penstock.errors import ConfigError, Missing
from penstock.loader import Loader
from penstock.nsd.dataset import NSDDataset
from penstock.nsd.samples import ALIASES
from penstock.nsd.stimuli import Pictures
from penstock.nsd.subject import NSD
from penstock.sizes import parse_size
from penstock.webdataset import mindeye

Backend = Literal["auto", "tar", "hdf5"]
SHARD_FOLDERS = ("webdataset_avg_split", "webdataset_avg_new", "")
"""Where shards lie under a root, as MindEye publishes them."""


@dataclass(frozen=True)
class Shards:
    """Tar shards of one subject that a root holds."""

    train: list[str]
    """Those of training and of validation: MindEye trains on both."""
    test: list[str]

    @classmethod
    def find(cls, root: str, subject: int) -> "Shards | None":
        for folder in SHARD_FOLDERS:
            parts = {
                part: sorted(
                    glob.glob(os.path.join(glob.escape(root), folder, part, f"{part}_subj{subject:02d}_*.tar")),
                    key=lambda path: int(path.rpartition("_")[2].removesuffix(".tar")),
                )
                for part in ("train", "val", "test")
            }
            if parts["train"] and parts["test"]:
                return cls(parts["train"] + parts["val"], parts["test"])
        return None


def get_dataloaders(
    batch_size: int,
    image_var: str = "images",
    num_devices: int | None = None,
    num_workers: int | None = None,
    train_url: str | Sequence[str] | None = None,
    val_url: str | Sequence[str] | None = None,
    meta_url: str | None = None,
    num_train: int | None = None,
    num_val: int | None = None,
    cache_dir: str | None = None,
    seed: int = 0,
    voxels_key: str = "nsdgeneral.npy",
    val_batch_size: int | None = None,
    to_tuple: Sequence[str] = ("voxels", "images", "coco"),
    local_rank: int = 0,
    world_size: int = 1,
    subj: int = 1,
    *,
    root: str | os.PathLike[str] | None = None,
    backend: Backend = "auto",
    memory: int | str | None = None,
    split: str = "mindeye1",
    image_size: int | None = None,
    **options: Any,
) -> tuple[Loader, Loader, int, int]:
    """``(train_dl, val_dl, num_train, num_val)``; batches are tuples in the order of ``to_tuple``.

    root:        the folder of the release, of shards, or of both
    backend:     "tar" or "hdf5"; "auto" takes the shards that ``train_url`` names or ``root`` holds, else the release
    memory:      shared between the two: three quarters for training, one for validation
    split:       from the release: its "train" and "test" parts
    image_size:  from the release: height and width, where other than stored
    options:     from the release: of ``NSD.dataset``, such as ``reps="single"``, ``zscore="run"``, ``roi="V1"``, and
                 ``space``, ``betas`` and ``prepared`` of ``NSD``

    ``num_devices``, ``num_workers`` and ``cache_dir`` are taken and not needed: threads read, inside ``memory``.
    """
    folder = None if root is None else os.fspath(root)
    shards = None if folder is None else Shards.find(folder, subj)
    if _chosen(backend, folder, train_url, shards) == "tar":
        if options:
            raise ConfigError(f"{', '.join(options)}: only from the release; shards hold what they were made with")
        return mindeye.get_dataloaders(
            batch_size, image_var, num_devices, num_workers, train_url or (shards.train if shards else None),
            val_url or (shards.test if shards else None), meta_url, num_train, num_val, cache_dir, seed, voxels_key,
            val_batch_size, to_tuple, local_rank, world_size, subj, memory=memory,
        )  # fmt: skip
    assert folder is not None
    nsd = NSD(folder, subj, **{name: options.pop(name) for name in ("space", "betas", "prepared") if name in options})
    names = tuple(image_var if name in ("images", image_var) else name for name in to_tuple)
    given = {"reps": "stack", "zscore": "session", "dtype": "float16", **options}
    given.setdefault("images", Pictures(size=image_size, dtype="float32"))
    train, val = (_as_shards(nsd, names, image_var, f"{split}/{part}", given) for part in ("train", "test"))
    limit = None if memory is None else parse_size(memory, argument="memory")
    common: dict[str, Any] = {"columns": names, "rank": local_rank, "world_size": world_size}
    train_dl = Loader(
        train,
        batch_size=batch_size,
        shuffle=True,
        seed=seed,
        memory=None if limit is None else limit - limit // 4,
        **common,
    )
    val_dl = Loader(
        val, batch_size=val_batch_size or batch_size, memory=None if limit is None else limit // 4, **common
    )
    return train_dl, val_dl, len(train) if num_train is None else num_train, len(val) if num_val is None else num_val


def _chosen(backend: str, root: str | None, train_url: Any, shards: Shards | None) -> str:
    if backend not in ("auto", "tar", "hdf5"):
        raise ConfigError(f'backend={backend!r}: expected "auto", "tar" or "hdf5"')
    if root is None and train_url is None:
        raise ConfigError("neither root= nor train_url=: expected the folder of the release, or where shards are")
    if backend == "hdf5" and root is None:
        raise ConfigError('backend="hdf5": expected root=, the folder of the release')
    if backend == "tar" and train_url is None and shards is None:
        looked = ", ".join(os.path.join(str(root), folder, "train") for folder in SHARD_FOLDERS)
        raise Missing(f'backend="tar": no shards train_subjNN_*.tar and test_subjNN_*.tar; looked in {looked}')
    if backend == "auto":
        return "hdf5" if train_url is None and shards is None else "tar"
    return backend


def _as_shards(nsd: NSD, names: Sequence[str], image_var: str, split: str, options: dict[str, Any]) -> Dataset:
    """A part of the release with the columns of shards: numbers have an axis of their own there."""
    sources = {name: "image" if name == image_var else ALIASES.get(name, name) for name in names}
    ds: NSDDataset = nsd.dataset(tuple(dict.fromkeys(sources.values())), split=split, **options)
    parts: dict[str, Any] = {}
    for name, source in sources.items():
        plain = ds.fields[source].shape == ()
        parts[name] = np.asarray(ds.trials[source])[:, None] if plain else ds.only(source)
    return join(**parts)
