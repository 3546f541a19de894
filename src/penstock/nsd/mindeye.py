"""MindEye's ``get_dataloaders``, from tar shards or from the release itself, and MindEye2's own files.

``penstock.webdataset.mindeye`` explains where this differs from MindEye's function: epochs are whole and seeded, ranks
share them, validation is complete, nothing is downloaded. From the release, samples are made as the shards were: three
trials per picture, z-scored per session in half precision, pictures of 256 pixels from 0 to 1.

MindEye2 keeps behaviour in tar shards. The first and the sixth number of ``behav`` are the picture and the trial (both
from 0): the rows of its pictures and of its betas.
"""

import glob
import os
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, Literal

import numpy as np

from penstock.base import checks
from penstock.base.dataclass import dataclass
from penstock.dataset.composition import join
from penstock.dataset.dataset import Dataset, OnError
from penstock.errors import ConfigError, Missing
from penstock.files.files import remote_files
from penstock.formats.open import open
from penstock.loader.loader import Loader
from penstock.nsd.behaviour import COLUMNS, FIELDS
from penstock.nsd.dataset import NSDDataset, opening_bytes
from penstock.nsd.layout import COCO_224
from penstock.nsd.samples import ALIASES
from penstock.nsd.stimuli import Pictures
from penstock.nsd.subject import NSD
from penstock.nsd.window import windowed_loader
from penstock.webdataset import mindeye

Backend = Literal["auto", "tar", "hdf5"]
SHARD_FOLDERS = ("webdataset_avg_split", "webdataset_avg_new", "")
"""Where shards are under a root, as MindEye publishes them."""
DEFAULT_KEY, WHOLE_KEY = "nsdgeneral.npy", "wholebrain_3d.npy"
OF_SUBJECT = ("space", "betas", "prepared")
"""Arguments of ``NSD``; the others are of ``NSD.dataset``."""
PARTS = ("train", "test", "new_test")
PICTURE, TRIAL = COLUMNS.index("stim_id"), COLUMNS.index("global_trial")
"""Where ``behav`` has the picture and the trial."""


@dataclass(frozen=True)
class Shards:
    """The tar shards of one subject under a root."""

    train: list[str]
    """The shards of training and of validation: MindEye trains on both."""
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
    to_tuple: Sequence[str] = ("voxels", "images", "trial"),
    local_rank: int | None = None,
    world_size: int | None = None,
    subj: int = 1,
    *,
    root: str | os.PathLike[str] | None = None,
    backend: Backend = "auto",
    memory: int | str | None = None,
    split: str | None = None,
    image_size: int | None = 256,
    on_error: OnError = "raise",
    device: Any = None,
    **options: Any,
) -> tuple[Loader, Loader, int, int]:
    """``(train_dl, val_dl, num_train, num_val)``; batches are tuples in the order of ``to_tuple``.

    root:        the folder of the release, of shards, or of both
    backend:     "tar" or "hdf5"; "auto" takes the shards that ``train_url`` names or ``root`` holds, else the release
    voxels_key:  "nsdgeneral.npy", "wholebrain_3d.npy" (whole volumes), or from the release any region: "V1.npy"
    memory:      shared by both loaders: three quarters for training, one quarter for validation
    split:       from the release: whose "train" and "test" parts; "mindeye1" by default
    image_size:  height and width of pictures, 256 as in MindEye's shards; None delivers them as stored (425 in the
                 release)
    on_error:    "skip" leaves out files that cannot be opened and samples that cannot be read
    device:      "cuda": batches come as tensors on that device
    options:     from the release: arguments of ``NSD.dataset``, such as ``reps="single"``, ``zscore="run"``,
                 ``roi="V1"``, ``max_open_files=5``, and ``space``, ``betas`` and ``prepared`` of ``NSD``

    ``num_devices`` and ``num_workers`` are accepted and not needed: threads read, inside ``memory``. ``cache_dir`` and
    ``meta_url`` are for shards.
    """
    _check_options(options)
    request = mindeye.MindEyeRequest(
        batch_size=batch_size, val_batch_size=val_batch_size, to_tuple=to_tuple, image_var=image_var,
        num_train=num_train, num_val=num_val, seed=seed, local_rank=local_rank, world_size=world_size, memory=memory,
        image_size=image_size, on_error=on_error, device=device,
    )  # fmt: skip
    folder, subj = None if root is None else checks.path("root", root), checks.whole("subj", subj, least=1)
    shards = None if folder is None else Shards.find(folder, subj)
    if _chosen(backend, folder, subj, train_url, shards) == "tar":
        most_open = options.pop("max_open_files", None)
        if of_release := [*options, *(["split"] if split is not None else [])]:
            raise ConfigError(f"{', '.join(of_release)}: only from the release; shards hold what they were made with")
        files = remote_files(cache_dir or None, None, None, max_open=most_open)
        if shards is not None:
            train_url, val_url = train_url or shards.train, val_url or shards.test
        return mindeye.shard_loaders(request, train_url, val_url, meta_url, voxels_key, files)
    assert folder is not None
    try:
        nsd = NSD(folder, subj, **_popped(options, OF_SUBJECT))
    except Missing as error:
        if shards is not None or backend == "hdf5":
            raise
        raise Missing(f"{error}; and {_no_shards(folder, subj)}") from None
    return _release_loaders(request, nsd, "mindeye1" if split is None else split, _region(nsd, voxels_key, options))


def _release_loaders(
    request: mindeye.MindEyeRequest, nsd: NSD, split: str, options: Mapping[str, Any]
) -> tuple[Loader, Loader, int, int]:
    """The loaders of the release, with samples as they are in shards, and how many samples they have."""
    if not isinstance(split, str) or "/" in split:
        raise ConfigError(f"split={split!r}: expected the name of a split alone, such as 'mindeye2', for both loaders")
    options = {
        "reps": "stack", "zscore": "session" if "voxels" in request.columns else None, "dtype": "float16",
        "on_error": request.on_error, "images": Pictures(size=request.image_size, dtype="float32"), **options,
    }  # fmt: skip
    train, val = (_as_shards(nsd, request, f"{split}/{part}", options) for part in ("train", "test"))
    opening = opening_bytes(len(nsd.table))
    train_dl, val_dl = request.loaders(train, val, make=windowed_loader, set_aside=opening)
    num_train = len(train) if request.num_train is None else request.num_train
    return train_dl, val_dl, num_train, len(val) if request.num_val is None else request.num_val


def _popped(options: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: options.pop(name) for name in names if name in options}


def _check_options(options: Mapping[str, Any]) -> None:
    known = {*signature(NSD.dataset).parameters, *OF_SUBJECT} - {"self", "columns", "split", "images"}
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)}: not an argument of get_dataloaders. to_tuple chooses columns, image_size the size "
            f"of pictures; from the release it also takes {', '.join(sorted(known))}"
        )


def _region(nsd: NSD, voxels_key: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the region that ``voxels_key`` names; ``roi=`` replaces the default one."""
    if voxels_key == DEFAULT_KEY:
        return {"roi": "nsdgeneral", **options}
    if "roi" in options:
        raise ConfigError(f"voxels_key={voxels_key!r}, roi={options['roi']!r}: both choose voxels; pass one of them")
    if voxels_key == WHOLE_KEY:
        return {"roi": None, **options}
    if not isinstance(voxels_key, str) or not voxels_key.endswith(".npy"):
        raise ConfigError(f"voxels_key={voxels_key!r}: expected {DEFAULT_KEY!r}, {WHOLE_KEY!r} or another region's")
    region = voxels_key.removesuffix(".npy")
    try:
        nsd.voxels(region)
    except (Missing, ConfigError) as error:
        raise type(error)(f"voxels_key={voxels_key!r}: {error}") from None
    return {"roi": region, **options}


def _no_shards(root: str, subject: int) -> str:
    """Where shards of a subject were looked for, and not found."""
    looked = ", ".join(os.path.join(root, folder, "train") for folder in SHARD_FOLDERS)
    name = f"subj{subject:02d}"
    return f"no shards train_{name}_*.tar and test_{name}_*.tar: looked in {looked}"


def _chosen(backend: str, root: str | None, subject: int, train_url: Any, shards: Shards | None) -> str:
    if backend not in ("auto", "tar", "hdf5"):
        raise ConfigError(f'backend={backend!r}: expected "auto", "tar" or "hdf5"')
    if root is None and train_url is None:
        raise ConfigError("neither root= nor train_url=: expected the folder of the release, or where shards are")
    if backend == "hdf5" and root is None:
        raise ConfigError('backend="hdf5": expected root=, the folder of the release')
    if backend == "tar" and train_url is None and shards is None:
        raise Missing(f'backend="tar": {_no_shards(str(root), subject)}')
    if backend == "auto":
        return "hdf5" if train_url is None and shards is None else "tar"
    return backend


def _as_shards(nsd: NSD, request: mindeye.MindEyeRequest, split: str, options: Mapping[str, Any]) -> Dataset:
    """A part of the release with the columns of shards, where numbers have an axis of their own."""
    sources = {name: "image" if name == request.image_var else ALIASES.get(name, name) for name in request.columns}
    ds: NSDDataset = nsd.dataset(tuple(dict.fromkeys(sources.values())), split=split, **options)
    parts: dict[str, Any] = {}
    for name, source in sources.items():
        plain = ds.fields[source].shape == ()
        parts[name] = ds.table[source][:, None] if plain else ds.only(source)
    return join(**parts)


def mindeye2(
    root: str | os.PathLike[str],
    subject: int = 1,
    part: str = "train",
    columns: Sequence[str] = ("voxels", "image", "behav"),
    *,
    sessions: Sequence[int] | None = None,
) -> Dataset:
    """Trials of a subject, as MindEye2 trains on them, from MindEye2's files.

    root:      the folder of ``betas_all_subj0S_fp32_renorm.hdf5``, ``coco_images_224_float16.hdf5`` and ``wds``
    part:      "train", "test" (shared pictures, sessions that were public first) or "new_test" (all sessions)
    columns:   "voxels", "image", "coco", "trial", "behav", "past_behav", "future_behav", "olds_behav"
    sessions:  for "train": only these, counted from 1; one shard is one session
    """
    if part not in PARTS:
        raise ConfigError(f"part={part!r}: expected one of {', '.join(PARTS)}")
    known = ("voxels", "image", "coco", "trial", *FIELDS)
    unknown = [name for name in columns if name not in known]
    if isinstance(columns, str) or not columns or unknown:
        raise ConfigError(f"columns={columns!r}: expected names among {', '.join(known)}")
    folder = os.fspath(root)
    shards = _shards(folder, subject, part, sessions)
    behaviour = open(shards, fields=[f"{name}.npy" for name in FIELDS if name in columns or name == "behav"])
    numbers = _numbers(behaviour)
    parts: dict[str, Any] = {}
    for name in columns:
        if name in FIELDS:
            parts[name] = behaviour.only(f"{name}.npy")
        elif name == "voxels":
            path = _existing(folder, f"betas_all_subj{subject:02d}_fp32_renorm.hdf5")
            parts[name] = (open(path, fields=["betas"]), numbers[:, TRIAL])
        elif name == "image":
            parts[name] = (open(_existing(folder, COCO_224), fields=["images"]), numbers[:, PICTURE])
        else:
            parts[name] = numbers[:, PICTURE if name == "coco" else TRIAL]
    return join(**parts)


def _shards(root: str, subject: int, part: str, sessions: Sequence[int] | None) -> list[str]:
    home = os.path.join(root, "wds", f"subj{subject:02d}", part)
    found = {
        int(os.path.basename(path)[:-4]): path for path in glob.glob(os.path.join(glob.escape(home), "[0-9]*.tar"))
    }
    if not found:
        raise Missing(f"{home}: no shards 0.tar, 1.tar …; expected MindEye2's wds folder in {root}")
    if sessions is None:
        return [found[number] for number in sorted(found)]
    gone = [session for session in sessions if session - 1 not in found]
    if gone or part != "train":
        raise Missing(f"sessions={list(sessions)}: of {part}, {home} has {len(found)} shards, one per session")
    return [found[session - 1] for session in sessions]


def _existing(root: str, name: str) -> str:
    path = os.path.join(root, name)
    if not os.path.isfile(path):
        raise Missing(f"{path}: no such file; fetch it, or ask for columns that do not need it")
    return path


def _numbers(behaviour: Dataset) -> np.ndarray:
    """(samples, 17) of whole numbers, which name the rows of the other files."""
    with Loader(
        behaviour.only("behav.npy"), batch_size=1024, memory="64MiB", output="numpy", rank=0, world_size=1
    ) as loader:
        return np.concatenate([batch["behav.npy"][:, 0].astype(np.int64) for batch in loader])
