"""MindEye's ``get_dataloaders``: the same tensors for the same samples, every sample once, validation whole."""

import gc
import json
import random
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
import torch

import penstock.webdataset as wds
from penstock.errors import ConfigError, Missing, Unavailable

TRAIN, VAL, VOXELS = 44, 13, 50
TUPLE = ("voxels", "images", "coco", "trial", "reps")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    for split, count, each in (("train", TRAIN, 15), ("val", VAL, 100)):
        with wds.ShardWriter(str(folder / f"{split}_subj01_%d.tar"), maxcount=each) as writer:
            for number in range(count):
                picture = rng.integers(0, 256, (24, 32, 3), np.uint8)
                writer.write({
                    "__key__": f"sample{number:09d}",
                    "coco73k.npy": np.array([1000 * (split == "val") + number]),
                    "jpg": imagecodecs.jpeg8_encode(picture, level=90),
                    "nsdgeneral.npy": rng.normal(size=(3, VOXELS)).astype(np.float16),
                    "num_uniques.npy": np.array([3]),
                    "trial.npy": np.array([number]),
                    "wholebrain_3d.npy": np.zeros((3, 20, 20), np.float16),
                })  # fmt: skip
    (folder / "metadata.json").write_text(json.dumps({"totals": {"train": TRAIN, "val": VAL, "test": 0}}))
    return folder


def loaders(folder: Path, **options: Any) -> tuple[Any, Any, int, int]:
    given = {"batch_size": 8, "to_tuple": TUPLE, "seed": 3, "memory": "200MiB"}
    urls = {"train_url": f"{folder}/train_subj01_{{0..2}}.tar", "val_url": f"{folder}/val_subj01_0.tar"}
    return wds.get_dataloaders(**{**given, **urls, **options})


def by_id(batches: Any) -> dict[int, list[torch.Tensor]]:
    found: dict[int, list[torch.Tensor]] = {}
    for batch in batches:
        for place, coco in enumerate(batch[2].flatten().tolist()):
            assert coco not in found
            found[coco] = [column[place].clone() for column in batch]
    return found


def test_every_sample_once_and_all_of_validation(shards: Path) -> None:
    train, val, num_train, num_val = loaders(shards, val_batch_size=5)
    assert (num_train, num_val) == (TRAIN, VAL)
    for _ in range(2):
        assert sorted(by_id(train)) == list(range(TRAIN))
    assert list(by_id(val)) == list(range(1000, 1000 + VAL))
    assert [len(batch[0]) for batch in val] == [5, 5, 3]


def test_the_order_follows_from_seed_and_epoch(shards: Path) -> None:
    def epochs(seed: int) -> list[list[int]]:
        train = loaders(shards, seed=seed)[0]
        return [list(by_id(train)) for _ in range(2)]

    assert epochs(3) == epochs(3)
    assert epochs(3) != epochs(4)
    assert epochs(3)[0] != epochs(3)[1]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_batches_are_what_the_pipeline_gives(shards: Path) -> None:
    other = pytest.importorskip("webdataset")
    pipeline = (
        other.WebDataset(f"{shards}/train_subj01_{{0..2}}.tar", resampled=False, shardshuffle=False)
        .shuffle(500, initial=500, rng=random.Random(42))
        .decode("torch")
        .rename(
            images="jpg;png", voxels="nsdgeneral.npy", trial="trial.npy", coco="coco73k.npy", reps="num_uniques.npy"
        )
        .to_tuple(*TUPLE)
        .batched(8, partial=True)
    )
    expected = by_id(torch.utils.data.DataLoader(pipeline, batch_size=None, num_workers=0))
    got = by_id(loaders(shards)[0])
    assert got.keys() == expected.keys()
    for coco, columns in got.items():
        for ours, theirs in zip(columns, expected[coco], strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            assert torch.equal(ours, theirs)
    del pipeline
    gc.collect()  # it leaves files open


def test_pictures_lie_channels_last(shards: Path) -> None:
    images = next(iter(loaders(shards)[0]))[1]
    assert images.shape == (8, 3, 24, 32)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert 0 <= float(images.min()) < float(images.max()) <= 1


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_epoch_out(shards: Path, world: int) -> None:
    seen: list[int] = []
    for rank in range(world):
        seen += by_id(loaders(shards, local_rank=rank, world_size=world)[0])
    assert sorted(set(seen)) == list(range(TRAIN))
    assert len(seen) <= TRAIN + world


def test_only_what_is_asked_for_is_read(shards: Path) -> None:
    train = loaders(shards, to_tuple=("voxels", "coco"))[0]
    for voxels, coco in train:
        assert voxels.dtype == torch.float16
        assert len(voxels) == len(coco)
    assert train.stats().bytes_read < TRAIN * (3 * VOXELS * 2 + 8 + 2 * 200)


def test_counts(shards: Path) -> None:
    assert loaders(shards, meta_url=str(shards / "metadata.json"))[2:] == (TRAIN, VAL)
    assert loaders(shards, num_train=40, num_val=7, meta_url="not read")[2:] == (40, 7)
    with pytest.raises(Unavailable, match=r"gone\.json"):
        loaders(shards, meta_url=str(shards / "gone.json"))


def test_refusals(shards: Path) -> None:
    with pytest.raises(ConfigError, match="train_url=None"):
        loaders(shards, train_url=None)
    with pytest.raises(Missing, match=r"train_subj01_3\.tar"):
        loaders(shards, train_url=f"{shards}/train_subj01_{{0..3}}.tar")
    with pytest.raises(Missing, match=r"no field 'v1\.npy'"):
        loaders(shards, voxels_key="v1.npy")
