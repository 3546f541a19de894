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
from functools import partial
from pathlib import Path
from typing import Any

from penstock.base import checks
from penstock.base.dataclass import dataclass
from penstock.base.sizes import format_size, parse_size
from penstock.base.urls import is_remote, shown_name
from penstock.dataset.dataset import Dataset, OnError
from penstock.errors import BudgetExceeded, ConfigError, Corrupt, DataError, Missing, Unavailable
from penstock.files.files import Files, remote_files
from penstock.files.retry import open_for_parser
from penstock.formats.open import open_with
from penstock.loader.loader import Loader
from penstock.webdataset.shards import expand_urls

COLUMNS = {"images": ("jpg", "png"), "trial": ("trial.npy",), "coco": ("coco73k.npy",), "reps": ("num_uniques.npy",)}
"""What the columns are called in the shards; the first that exists is taken."""

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
    request = MindEyeRequest(
        batch_size=batch_size, val_batch_size=val_batch_size, to_tuple=to_tuple, image_var=image_var,
        num_train=num_train, num_val=num_val, seed=seed, local_rank=local_rank, world_size=world_size, memory=memory,
        image_size=image_size, on_error=on_error, device=device,
    )  # fmt: skip
    files = remote_files(cache_dir or None, None, None, max_open=max_open_files)
    return shard_loaders(request, train_url, val_url, meta_url, voxels_key, files)


@dataclass(frozen=True, kw_only=True)
class MindEyeRequest:
    """What MindEye's function is asked for, wherever samples come from."""

    batch_size: int
    val_batch_size: int | None
    to_tuple: Sequence[str]
    image_var: str
    num_train: int | None
    num_val: int | None
    seed: int
    local_rank: int | None
    world_size: int | None
    memory: int | str | None
    image_size: int | None
    on_error: OnError
    device: Any

    def __post_init__(self) -> None:
        checks.whole("batch_size", self.batch_size, least=1, expected="a whole number of samples")
        if self.val_batch_size is not None:
            checks.whole("val_batch_size", self.val_batch_size, least=1, expected="a whole number of samples")
        if self.image_size is not None:
            checks.whole("image_size", self.image_size, least=1, expected="a number of pixels, or None")
        checks.names("to_tuple", self.to_tuple)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a batch: pictures are called "images", or what ``image_var`` says."""
        return tuple(self.image_var if name in ("images", "image", self.image_var) else name for name in self.to_tuple)

    def loaders(
        self, train: Dataset, val: Dataset, *, make: Callable[..., Loader] = Loader, set_aside: int = 0
    ) -> tuple[Loader, Loader]:
        """One of rank and world size may be left out, as in MindEye's function; without both, torch.distributed says.

        Three quarters of the memory, less the bytes that are set aside, are for training.
        """
        rank, world_size = self.local_rank, self.world_size
        if rank is not None or world_size is not None:
            rank, world_size = rank or 0, 1 if world_size is None else world_size
            checks.whole("local_rank", rank, most=world_size - 1, expected=f"a rank in world_size={world_size}")
        common: dict[str, Any] = {
            "columns": self.columns, "on_error": self.on_error, "rank": rank, "world_size": world_size,
            "device": self.device,
        }  # fmt: skip
        val_batch_size = self.batch_size if self.val_batch_size is None else self.val_batch_size
        make_train = partial(make, train, batch_size=self.batch_size, shuffle=True, seed=self.seed, **common)
        make_val = partial(make, val, batch_size=val_batch_size, **common)
        if self.memory is None:
            return make_train(memory=None), make_val(memory=None)
        given = parse_size(self.memory, argument="memory")
        limit = max(4, given - set_aside)
        try:
            return make_train(memory=limit - limit // 4), make_val(memory=limit // 4)
        except BudgetExceeded as refusal:
            smallest = set_aside + max(-(-4 * _smallest(make_train) // 3), 4 * _smallest(make_val))
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


def shard_loaders(
    request: MindEyeRequest,
    train_url: str | Sequence[str] | None,
    val_url: str | Sequence[str] | None,
    meta_url: str | None,
    voxels_key: str,
    files: Files,
) -> tuple[Loader, Loader, int, int]:
    """The loaders of these shards, and how many samples they have."""
    if train_url is None or val_url is None:
        given = f"train_url={train_url!r}, val_url={val_url!r}"
        raise ConfigError(f"{given}: expected the shards of both, such as 'train_{{0..17}}.tar'")
    opener = _Opener(files, request.on_error)
    train, val = (_shards(url, request, voxels_key, opener) for url in (train_url, val_url))
    train_dl, val_dl = request.loaders(train, val)
    counts = [request.num_train, request.num_val]
    totals = _totals(meta_url) if meta_url is not None and None in counts else (len(train), len(val))
    num_train, num_val = (total if count is None else count for count, total in zip(counts, totals, strict=True))
    return train_dl, val_dl, num_train, num_val


def _shards(url: str | Sequence[str], request: MindEyeRequest, voxels_key: str, opener: "_Opener") -> Dataset:
    names, pictures, size = request.columns, request.image_var, request.image_size
    paths = expand_urls(url) if isinstance(url, str) else list(url)
    known = {**COLUMNS, "voxels": (voxels_key,), pictures: COLUMNS["images"]}
    fields = {name: _first_present(paths, known.get(name, (name,)), opener) for name in names}
    chosen = list(dict.fromkeys(fields.values()))
    try:
        ds = opener.dataset(paths, chosen)
    except Missing as error:
        if further := [name for name in names if name not in known]:
            expected = ", ".join(("voxels", *COLUMNS))
            raise Missing(
                f"to_tuple: {further[0]!r} is none of {expected}, so it should name a member of the shards. {error}"
            ) from error
        raise
    if pictures in names:
        # Asking for a size makes the reader look at every picture's header: only where the first has another size.
        if size is not None and ds.fields[fields[pictures]].shape[:2] != (size, size):
            ds = opener.dataset(paths, chosen, size)
        return ds.rename(**fields).cast(pictures, "float32", divisor=255).permute(pictures, 2, 0, 1)
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


def _totals(path: str) -> tuple[int, int]:
    """Samples for training and for validation, as MindEye's metadata says."""
    try:
        totals = json.loads(_text(path))["totals"]
        return int(totals["train"]), int(totals["val"])
    except (ValueError, KeyError, TypeError) as error:
        expected = '{"totals": {"train": …, "val": …}}'
        raise Corrupt(f"{shown_name(path)}: expected JSON with {expected} ({error})") from error


def _text(path: str) -> bytes:
    if is_remote(path):
        files = Files()
        with files.stream(files.remote.admit(path)) as stream:
            return stream.read(META_BYTES)
    if not Path(path).is_file():
        raise Unavailable(f"{path}: no such file; give num_train= and num_val=, or the path of the metadata")
    with open_for_parser(path) as file:
        return file.read(META_BYTES)
