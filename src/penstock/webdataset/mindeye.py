"""MindEye's data loaders over tar shards, with its own arguments, on penstock's random access.

What its function was meant to do, and not these of its habits:

- **An epoch is every training sample once**, in an order that ``seed`` and the epoch decide. There, shards were drawn
  with replacement from a clock's seed, so that an epoch showed some two thirds of the samples, others in every run.
- **Ranks share the epoch out** (``local_rank``, ``world_size``). There, every rank read every shard, and the number of
  devices shortened the epoch twice.
- **Validation is complete**, in the order of the shards: the last, smaller batch comes too. There, 82 of 982 samples
  were dropped.
- **Only what is asked for is read.** There, whole-brain volumes were read and decoded to be thrown away.
- **Nothing is downloaded behind your back**: a shard that is missing is an error, not a reason to train on others.
- ``num_workers`` and ``num_devices`` are taken and not needed: threads read, inside ``memory``.

Shards may lie on other machines (``https://``, ``s3://``): ``cache_dir`` then keeps whole copies of them, which many
epochs want; without it, samples are read over the network.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.dataset import Dataset
from penstock.errors import ConfigError, Corrupt, Missing, Unavailable
from penstock.fileio import Files
from penstock.loader import Loader
from penstock.opening import open
from penstock.sizes import parse_size
from penstock.urls import is_remote, shown
from penstock.webdataset.names import expand_urls

# What the columns are called in the shards; the first that is there is taken.
COLUMNS = {
    "images": ("jpg", "png"),
    "trial": ("trial.npy",),
    "coco": ("coco73k.npy",),
    "reps": ("num_uniques.npy",),
}

META_BYTES = 1 << 20


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
    to_tuple: Sequence[str] = ("voxels", "images", "trial"),
    local_rank: int = 0,
    world_size: int = 1,
    subj: int = 1,
    *,
    memory: int | str | None = None,
) -> tuple[Loader, Loader, int, int]:
    """``(train_dl, val_dl, num_train, num_val)``, as MindEye's ``utils.get_dataloaders``.

    Batches are tuples in the order of ``to_tuple``: ``voxels`` as stored, pictures as float32 from 0 to 1 of shape
    (batch, 3, height, width), everything else as stored. ``memory`` is shared between the two: three quarters for
    training, one for validation. See this module's description for where it differs.
    """
    if train_url is None or val_url is None:
        told = f"train_url={train_url!r}, val_url={val_url!r}"
        raise ConfigError(f"{told}: expected the shards of both, such as 'train_{{0..17}}.tar'")
    names = [image_var if name in ("images", image_var) else name for name in to_tuple]
    train = _shards(train_url, names, image_var, voxels_key, cache_dir)
    val = _shards(val_url, names, image_var, voxels_key, cache_dir)
    share = _shares(memory)
    common: dict[str, Any] = {"columns": tuple(names), "rank": local_rank, "world_size": world_size}
    train_dl = Loader(train, batch_size=batch_size, shuffle=True, seed=seed, memory=share[0], **common)
    val_dl = Loader(val, batch_size=val_batch_size or batch_size, memory=share[1], **common)
    totals = _totals(meta_url) if meta_url is not None and None in (num_train, num_val) else {}
    counted_train = num_train if num_train is not None else totals.get("train", len(train))
    counted_val = num_val if num_val is not None else totals.get("val", len(val))
    return train_dl, val_dl, counted_train, counted_val


def _shards(
    url: str | Sequence[str], names: Sequence[str], image_var: str, voxels_key: str, cache_dir: str | None
) -> Dataset:
    paths = expand_urls(url) if isinstance(url, str) else list(url)
    known = {**COLUMNS, "voxels": (voxels_key,), image_var: COLUMNS["images"]}
    fields = {name: _first_there(paths[0], known.get(name, (name,)), cache_dir) for name in names}
    ds = open(paths, fields=list(dict.fromkeys(fields.values())), cache_dir=cache_dir or None).rename(**fields)
    if image_var in names:
        ds = ds.cast(image_var, "float32", divisor=255).permute(image_var, 2, 0, 1)
    return ds


def _first_there(path: str, fields: Sequence[str], cache_dir: str | None) -> str:
    """The first of these fields that a shard has."""
    for field in fields[:-1]:
        try:
            open(path, fields=[field], cache_dir=cache_dir or None)
        except Missing:
            continue
        return field
    return fields[-1]  # or it is named in the error that follows


def _shares(memory: int | str | None) -> tuple[int | None, int | None]:
    if memory is None:
        return None, None
    limit = parse_size(memory, argument="memory")
    return limit - limit // 4, limit // 4


def _totals(path: str) -> dict[str, int]:
    try:
        totals = json.loads(_text(path))["totals"]
        return {name: int(totals[name]) for name in ("train", "val")}
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(f'{shown(path)}: expected JSON with {{"totals": {{"train": …, "val": …}}}} ({error})') from error


def _text(path: str) -> bytes:
    if is_remote(path):
        files = Files()
        with files.stream(files.remote.admit(path)) as stream:
            return stream.read(META_BYTES)
    if not Path(path).is_file():
        raise Unavailable(f"{path}: no such file; give num_train= and num_val=, or the path of the metadata")
    return Path(path).read_bytes()
