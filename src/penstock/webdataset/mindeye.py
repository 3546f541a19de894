"""MindEye's data loaders over tar shards, with MindEye's arguments, on penstock's random access.

It does what MindEye's function was meant to do, and differs from it in these points:

- **An epoch is every training sample once**, in an order that follows from ``seed`` and the epoch. MindEye draws shards
  with replacement, seeded by the clock: an epoch shows about two thirds of the samples, other ones in every run.
- **Ranks share the epoch** (``local_rank``, ``world_size``; those of torch.distributed where neither is given). In
  MindEye, every rank reads every shard, and the number of devices shortens the epoch twice.
- **Validation is complete**, in the order of the shards, with the last, smaller batch. MindEye drops 82 of 982 samples.
- **Only the columns in use are read.** MindEye reads and decodes whole-brain volumes, and throws them away.
- **Nothing is downloaded silently**: a missing shard is an error, not a reason to train on others.
- ``num_workers`` and ``num_devices`` are accepted and not needed: threads read, inside ``memory``.

Shards may be on other machines (``https://``, ``s3://``): ``cache_dir`` then keeps whole copies of them, which pays
over many epochs; without it, samples are read over the network.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from penstock.base import checks
from penstock.base.sizes import format_size, parse_size
from penstock.base.urls import is_remote, shown
from penstock.dataset.dataset import Dataset, OnError
from penstock.errors import BudgetExceeded, ConfigError, Corrupt, DataError, Missing, Unavailable
from penstock.files.files import Files, remote_files
from penstock.files.retry import open_for_parser
from penstock.formats.open import open_with
from penstock.loader.loader import Loader
from penstock.webdataset.shards import expand_urls

# What the columns are called in the shards; the first that exists is taken.
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
    local_rank: int | None = None,
    world_size: int | None = None,
    subj: int = 1,
    *,
    memory: int | str | None = None,
    image_size: int | None = None,
    on_error: OnError = "raise",
    max_open_files: int | None = None,
    device: Any = None,
) -> tuple[Loader, Loader, int, int]:
    """``(train_dl, val_dl, num_train, num_val)``, as MindEye's ``utils.get_dataloaders``.

    Batches are tuples in the order of ``to_tuple``: ``voxels`` as stored, pictures as float32 from 0 to 1 of shape
    (batch, 3, height, width), everything else as stored. ``memory`` is shared by both loaders: three quarters for
    training, one quarter for validation. Pictures are as stored (256 pixels in MindEye's shards), or of ``image_size``.
    ``max_open_files`` limits the files that both hold open together. ``on_error="skip"`` leaves out shards that cannot
    be opened and samples that cannot be read. With ``device="cuda"``, batches are on that device. The description of
    this module says where it differs from MindEye's.
    """
    if train_url is None or val_url is None:
        given = f"train_url={train_url!r}, val_url={val_url!r}"
        raise ConfigError(f"{given}: expected the shards of both, such as 'train_{{0..17}}.tar'")
    names = column_names(to_tuple, image_var)
    files = remote_files(cache_dir or None, None, None, max_open=max_open_files)
    opener = _Opener(files, on_error)
    train, val = (_shards(url, names, image_var, voxels_key, image_size, opener) for url in (train_url, val_url))
    pair = Pair(train, val, names, batch_size, batch_size if val_batch_size is None else val_batch_size)
    train_dl, val_dl = pair.loaders(
        memory=memory, seed=seed, on_error=on_error, rank=local_rank, world_size=world_size, device=device
    )
    totals = _totals(meta_url) if meta_url is not None and None in (num_train, num_val) else {}
    counted_train = num_train if num_train is not None else totals.get("train", len(train))
    counted_val = num_val if num_val is not None else totals.get("val", len(val))
    return train_dl, val_dl, counted_train, counted_val


def column_names(to_tuple: Sequence[str], image_var: str) -> tuple[str, ...]:
    """The columns of a batch: pictures are called "images", or what ``image_var`` says."""
    return tuple(image_var if name in ("images", image_var) else name for name in checks.names("to_tuple", to_tuple))


@dataclass(frozen=True)
class Pair:
    """What to train on and what to validate on."""

    train: Dataset
    val: Dataset
    columns: tuple[str, ...]
    batch_size: int
    val_batch_size: int

    def __post_init__(self) -> None:
        checks.whole("batch_size", self.batch_size, least=1, expected="a whole number of samples")
        checks.whole("val_batch_size", self.val_batch_size, least=1, expected="a whole number of samples")

    def loaders(
        self,
        *,
        memory: int | str | None,
        seed: int,
        on_error: OnError,
        rank: int | None,
        world_size: int | None,
        device: Any,
        set_aside: int = 0,
    ) -> tuple[Loader, Loader]:
        """One of rank and world size may be left out, as in MindEye's function; without both, torch.distributed says.

        Three quarters of the memory, less the bytes that are set aside, are for training.
        """
        if rank is not None or world_size is not None:
            rank, world_size = rank or 0, 1 if world_size is None else world_size
            checks.whole("local_rank", rank, most=world_size - 1, expected=f"a rank in world_size={world_size}")
        common: dict[str, Any] = {
            "columns": self.columns, "on_error": on_error, "rank": rank, "world_size": world_size,
            "device": device,
        }  # fmt: skip
        train = partial(Loader, self.train, batch_size=self.batch_size, shuffle=True, seed=seed, **common)
        val = partial(Loader, self.val, batch_size=self.val_batch_size, **common)
        if memory is None:
            return train(memory=None), val(memory=None)
        given = parse_size(memory, argument="memory")
        limit = max(4, given - set_aside)
        try:
            return train(memory=limit - limit // 4), val(memory=limit // 4)
        except BudgetExceeded as refusal:
            smallest = set_aside + max(-(-4 * _smallest(train) // 3), 4 * _smallest(val))
            raise BudgetExceeded(
                f"memory={format_size(given)} is too small for both loaders: the smallest that works is "
                f"{format_size(smallest)} ({smallest:,} bytes), three quarters for training and one for validation. "
                f"{refusal.reason}",
                smallest_bytes=smallest,
            ) from refusal


def _smallest(make: Callable[..., Loader]) -> int:
    """The smallest budget of one loader."""
    try:
        make(memory=1).close()
    except BudgetExceeded as refusal:
        return refusal.smallest_bytes or 0
    return 1


def _shards(
    url: str | Sequence[str],
    names: Sequence[str],
    image_var: str,
    voxels_key: str,
    size: int | None,
    opener: "_Opener",
) -> Dataset:
    paths = expand_urls(url) if isinstance(url, str) else list(url)
    known = {**COLUMNS, "voxels": (voxels_key,), image_var: COLUMNS["images"]}
    fields = {name: _first_present(paths, known.get(name, (name,)), opener) for name in names}
    chosen = list(dict.fromkeys(fields.values()))
    ds = opener.dataset(paths, chosen)
    if image_var in names:
        # Asking for a size makes the reader look at every picture's header: only where the first has another size.
        if size is not None and ds.fields[fields[image_var]].shape[:2] != (size, size):
            ds = opener.dataset(paths, chosen, size)
        return ds.rename(**fields).cast(image_var, "float32", divisor=255).permute(image_var, 2, 0, 1)
    return ds.rename(**fields)


@dataclass(frozen=True)
class _Opener:
    """Opens shards through handles that training and validation share."""

    files: Files
    on_error: OnError

    def dataset(self, paths: Sequence[str], fields: Sequence[str], size: int | None = None) -> Dataset:
        return open_with(self.files, paths, fields, size=size, on_error=self.on_error)


def _first_present(paths: Sequence[str], fields: Sequence[str], opener: _Opener) -> str:
    """The first of these fields that the shards have."""
    if len(fields) == 1:
        return fields[0]  # if that is missing, the error that follows names it
    for path in paths:
        for field in fields:
            try:
                open_with(opener.files, path, [field])
            except Missing:
                continue
            except DataError:
                if opener.on_error == "raise":
                    raise
                break  # with "skip", the next shard decides
            return field
    return fields[-1]


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
    with open_for_parser(path) as file:
        return file.read(META_BYTES)
