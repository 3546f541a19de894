"""MindEye2's own files: behaviour in tar shards, which name the rows of its betas and of its pictures.

The first and sixth numbers of ``behav`` are what joins them: the picture (from 0) and the trial (from 0).
"""

import glob
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.dataset import Dataset, join
from penstock.errors import ConfigError, Missing
from penstock.loader import Loader
from penstock.nsd.behaviour import COLUMNS, FIELDS
from penstock.nsd.layout import COCO_224
from penstock.opening import open

PARTS = ("train", "test", "new_test")
PICTURE, TRIAL = COLUMNS.index("stim_id"), COLUMNS.index("global_trial")


def mindeye2(
    root: str | os.PathLike[str],
    subject: int = 1,
    part: str = "train",
    columns: Sequence[str] = ("voxels", "image", "behav"),
    *,
    sessions: Sequence[int] | None = None,
) -> Dataset:
    """Trials of a subject, as MindEye2 trains on them.

    root:      the folder of ``betas_all_subj0S_fp32_renorm.hdf5``, ``coco_images_224_float16.hdf5`` and ``wds``
    part:      "train", "test" (shared pictures, sessions that were public first) or "new_test" (all sessions)
    columns:   "voxels", "image", "coco", "trial", "behav", "past_behav", "future_behav", "olds_behav"
    sessions:  of "train": these alone, counted from 1; one shard is one session
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
            path = _there(folder, f"betas_all_subj{subject:02d}_fp32_renorm.hdf5")
            parts[name] = (open(path, fields=["betas"]), numbers[:, TRIAL])
        elif name == "image":
            parts[name] = (open(_there(folder, COCO_224), fields=["images"]), numbers[:, PICTURE])
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
        raise Missing(f"sessions={list(sessions)}: of {part}, {home} has {len(found)} shards, one for each session")
    return [found[session - 1] for session in sessions]


def _there(root: str, name: str) -> str:
    path = os.path.join(root, name)
    if not os.path.isfile(path):
        raise Missing(f"{path}: no such file; fetch it, or ask for columns that do not need it")
    return path


def _numbers(behaviour: Dataset) -> np.ndarray:
    """(samples, 17) of whole numbers: what names the rows of the other files."""
    with Loader(
        behaviour.only("behav.npy"), batch_size=1024, memory="64MiB", output="numpy", rank=0, world_size=1
    ) as loader:
        return np.concatenate([batch["behav.npy"][:, 0].astype(np.int64) for batch in loader])
