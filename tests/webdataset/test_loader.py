"""Under torch's own DataLoader: forked, kept and started anew, with more workers than shards."""

import gc
import json
import os
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import penstock.webdataset as wds
from penstock.errors import Truncated

imagecodecs = pytest.importorskip("imagecodecs")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


def loaded(dataset, workers, **how):
    return list(DataLoader(dataset, batch_size=None, num_workers=workers, **how))


@pytest.mark.case(15)
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("counts", [[8], [5, 4], [2] * 5], ids=repr)
def test_every_sample_once(numbered, counts, workers):
    dataset = wds.WebDataset(numbered(counts)).shuffle(3).decode().to_tuple("cls")
    assert sorted(int(sample[0]) for sample in loaded(dataset, workers)) == list(range(sum(counts)))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_epoch_is_per_worker_unless_it_is_shared(numbered, workers):
    dataset = wds.WebDataset(numbered([5, 5, 5]), resampled=True).decode().to_tuple("cls").batched(2)
    assert len(loaded(dataset.with_shared_epoch(7), workers)) == 7
    assert len(loaded(dataset.with_epoch(7), workers)) == 7 * max(1, workers)


@pytest.mark.parametrize("kept", [False, True])
def test_epochs_differ_and_come_again(numbered, kept):
    pattern = numbered([1] * 20)

    def epochs():
        dataset = wds.WebDataset(pattern, shardshuffle=100, seed=3).shuffle(5).decode().to_tuple("cls")
        loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=kept)
        return [[int(sample[0]) for sample in loader] for _ in range(3)]

    first = epochs()
    assert all(sorted(each) == list(range(20)) for each in first)
    assert len({tuple(each) for each in first}) == 3, "a new order each epoch, also in new workers"
    torch.manual_seed(random.randrange(1000))
    assert epochs() == first, "and the same in another program"


@pytest.mark.slow  # each imports torch
def test_workers_that_are_started_anew(numbered):
    dataset = wds.WebDataset(numbered([1] * 24), shardshuffle=100).decode().to_tuple("cls")
    epochs = [[int(sample[0]) for sample in loaded(dataset, 2, multiprocessing_context="spawn")] for _ in range(2)]
    assert [sorted(each) for each in epochs] == [list(range(24))] * 2
    assert epochs[0] != epochs[1]


def test_what_workers_leave_out_is_counted(numbered):
    pattern = numbered([4, 4])
    missing = pattern.replace("{000..001}", "none")
    dataset = wds.WebDataset(f"{pattern}::{missing}", handler=wds.ignore_and_continue)
    checked = dataset.decode().map(lambda sample: (1 // (sample["cls"] - 2) and None) or (sample["cls"],),
                                   handler=wds.ignore_and_continue)  # fmt: skip
    assert len(loaded(checked, 2)) == 7
    assert checked.skipped == 2


@pytest.mark.slow  # torch waits five seconds for a worker that raised
def test_an_error_arrives_with_its_type(numbered):
    pattern = numbered([4])
    with open(pattern.replace("{000..000}", "000"), "rb+") as stream:
        stream.truncate(3000)
    with pytest.raises(Truncated, match="cut short"):
        loaded(wds.WebDataset(pattern), 1)
    gc.collect()


def test_verbs_after_the_loader(numbered):
    dataset = wds.WebDataset(numbered([6, 6])).decode().to_tuple("cls", "txt").batched(5)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=2).unbatched().shuffle(100).batched(4).with_epoch(3)
    batches = list(loader)
    assert [len(batch[1]) for batch in batches] == [4, 4, 4]
    assert sorted(int(each) for batch in batches for each in batch[0]) == list(range(12))


def test_lengths_are_what_the_loader_says(numbered):
    dataset = wds.WebDataset(numbered([6])).with_length(42)
    assert len(DataLoader(dataset, batch_size=None)) == 42


# A pipeline of a published program (MindEye's), word for word but for the import.

HIGH, VOXELS, TRAIN, VAL = 24, 40, [8, 5], [7]


def photo(number):
    slope = np.add.outer(np.arange(HIGH) * 4, np.arange(HIGH) * 3 + number)
    return np.stack([slope, slope[::-1], slope[:, ::-1]], -1).astype(np.uint8)


@pytest.fixture
def brain(tmp_path):
    """Shards as theirs: a picture, voxels of three repetitions, a whole brain that is not asked for, and numbers."""
    rng = np.random.default_rng(0)
    truth, number = [], 0
    for split, counts in (("train", TRAIN), ("val", VAL)):
        for shard, count in enumerate(counts):
            with wds.TarWriter(tmp_path / f"{split}_subj01_{shard}.tar") as writer:
                for _ in range(count):
                    sample = {
                        "__key__": f"sample{number:09d}",
                        "jpg": photo(number),
                        "nsdgeneral.npy": rng.normal(size=(3, VOXELS)).astype(np.float16),
                        "wholebrain_3d.npy": np.zeros((3, 4, 5, 6), np.float16),
                        "coco73k.npy": np.array([number]),
                        "trial.npy": np.array([3 * number]),
                        "num_uniques.npy": np.array([1 + number % 3]),
                    }
                    writer.write(sample)
                    truth.append(sample)
                    number += 1
    (tmp_path / "metadata_subj01.json").write_text(json.dumps({"totals": {"train": sum(TRAIN), "val": sum(VAL)}}))
    return tmp_path, truth


def get_dataloaders(wds, folder, batch_size, num_workers):
    train_url = f"{folder}/train_subj01_{{0..{len(TRAIN) - 1}}}.tar"
    val_url = f"{folder}/val_subj01_0.tar"
    to_tuple = ["voxels", "images", "coco"]
    with open(f"{folder}/metadata_subj01.json") as stream:
        metadata = json.load(stream)
    num_train, num_val = metadata["totals"]["train"], metadata["totals"]["val"]
    num_worker_batches = max(1, num_train // batch_size)

    def my_split_by_node(urls):
        return urls

    train_data = (
        wds.WebDataset(train_url, resampled=True, cache_dir=folder, nodesplitter=my_split_by_node)
        .shuffle(500, initial=500, rng=random.Random(42))
        .decode("torch")
        .rename(
            images="jpg;png",
            voxels="nsdgeneral.npy",
            trial="trial.npy",
            coco="coco73k.npy",
            reps="num_uniques.npy",
        )
        .to_tuple(*to_tuple)
        .batched(batch_size, partial=True)
        .with_epoch(num_worker_batches)
    )
    train_dl = torch.utils.data.DataLoader(train_data, batch_size=None, num_workers=num_workers, shuffle=False)
    val_data = (
        wds.WebDataset(val_url, resampled=False, cache_dir=folder, nodesplitter=my_split_by_node, shardshuffle=False)
        .decode("torch")
        .rename(
            images="jpg;png",
            voxels="nsdgeneral.npy",
            trial="trial.npy",
            coco="coco73k.npy",
            reps="num_uniques.npy",
        )
        .to_tuple(*to_tuple)
        .batched(num_val, partial=False)
    )
    val_dl = torch.utils.data.DataLoader(val_data, batch_size=None, num_workers=num_workers, shuffle=False)
    return train_dl, val_dl, num_train, num_val


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_published_program(brain, num_workers):
    folder, truth = brain
    train, val, num_train, num_val = get_dataloaders(wds, str(folder), 4, num_workers)
    assert (num_train, num_val) == (13, 7)
    for _ in range(2):
        batches = list(train)
        assert len(batches) == 3
        for voxels, images, coco in batches:
            assert (voxels.shape, voxels.dtype) == ((4, 3, VOXELS), torch.float16)
            assert (images.shape, images.dtype) == ((4, 3, HIGH, HIGH), torch.float32)
            assert (coco.shape, coco.dtype) == ((4, 1), torch.int64)
            for voxel, image, number in zip(voxels, images, coco, strict=True):
                sample = truth[int(number)]
                assert np.array_equal(voxel.numpy(), sample["nsdgeneral.npy"])
                assert abs(image.permute(1, 2, 0).numpy() * 255 - sample["jpg"]).mean() < 3
    ((voxels, images, coco),) = val
    assert coco[:, 0].tolist() == list(range(13, 20))
    assert float(images.min()) >= 0
    assert float(images.max()) <= 1


@pytest.mark.filterwarnings("ignore:WebDataset:UserWarning")
def test_a_published_program_validates_as_with_the_peer(brain, peer):
    pytest.importorskip("PIL")
    folder, _ = brain
    ((voxels, images, coco),) = get_dataloaders(wds, str(folder), 4, 0)[1]
    ((their_voxels, their_images, their_coco),) = get_dataloaders(peer, str(folder), 4, 0)[1]
    assert torch.equal(voxels, their_voxels)
    assert torch.equal(images, their_images)
    assert torch.equal(coco, their_coco)


def test_nothing_is_left_behind(brain):
    folder, _ = brain
    before = sorted(os.listdir(folder))
    for loader in get_dataloaders(wds, str(folder), 4, 1)[:2]:
        list(loader)
    assert sorted(os.listdir(folder)) == before
