"""One call over tar shards and over the release: the same tuples for the same pictures, and those of the original."""

import gc
import random
import shutil
import tarfile

import h5py
import numpy as np
import pytest
import torch

import penstock as ps
from penstock.errors import ConfigError, Missing
from penstock.nsd import NSD, get_dataloaders, mindeye2, synthesize
from penstock.nsd.synthetic import Scale, pictures
from penstock.nsd.synthetic.shards import write_mindeye2, write_shards

TUPLE = ("voxels", "images", "coco", "trial", "reps")


@pytest.fixture(scope="module")
def both(roots, tmp_path_factory):
    """A release by trial with its shards beside it; pixels are kept, so that both can be equal."""
    root = tmp_path_factory.mktemp("both") / "nsd"
    shutil.copytree(roots["trial-major"], root)
    for subject in (1, 2):
        write_shards(root, subject, per_shard=6, picture="png", wholebrain=subject == 1)
    return root


def by_id(batches):
    found = {}
    for batch in batches:
        for place, coco in enumerate(batch[2].flatten().tolist()):
            assert coco not in found
            found[coco] = [column[place].clone() for column in batch]
    return found


def loaders(root, **options):
    return get_dataloaders(
        **{"batch_size": 5, "root": root, "to_tuple": TUPLE, "memory": "200MiB", "image_size": None, **options}
    )


@pytest.mark.parametrize("subject", [1, 2])
def test_both_backends_give_the_same_tuples(both, subject):
    tar = loaders(both, backend="tar", subj=subject)
    hdf5 = loaders(both, backend="hdf5", subj=subject)
    assert tar[2:] == hdf5[2:]
    assert sum(tar[2:]) == NSD(both, subject).trials["stim_id"].nunique()
    for ours, theirs in zip(tar[:2], hdf5[:2], strict=True):
        one, other = by_id(ours), by_id(theirs)
        assert one.keys() == other.keys()
        for coco, columns in one.items():
            for a, b in zip(columns, other[coco], strict=True):
                assert (a.dtype, a.shape) == (b.dtype, b.shape)
                assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("backend", ["tar", "hdf5"])
def test_samples_are_those_of_the_original_pipeline(both, backend):
    other = pytest.importorskip("webdataset")
    paths = [
        str(path) for part in ("train", "val") for path in sorted((both / "webdataset_avg_split" / part).glob("*01_*"))
    ]
    pipeline = (
        other.WebDataset(paths, resampled=False, shardshuffle=False)
        .shuffle(500, initial=500, rng=random.Random(42))
        .decode("torch")
        .rename(
            images="jpg;png", voxels="nsdgeneral.npy", trial="trial.npy", coco="coco73k.npy", reps="num_uniques.npy"
        )
        .to_tuple(*TUPLE)
        .batched(5, partial=True)
    )
    expected = by_id(torch.utils.data.DataLoader(pipeline, batch_size=None, num_workers=0))
    got = by_id(loaders(both, backend=backend)[0])
    assert got.keys() == expected.keys()
    for coco, columns in got.items():
        for ours, theirs in zip(columns, expected[coco], strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            assert torch.equal(ours, theirs)
    del pipeline
    gc.collect()


def test_shards_hold_what_numpy_makes_of_the_release(both):
    nsd = NSD(both)
    raw = nsd.dataset(("voxels",))[:][0].astype(np.float64)
    trials = nsd.trials
    train = ~trials["shared1000"].to_numpy()
    scored = np.empty_like(raw)
    for session in (1, 2, 3):
        here = (trials["session"] == session).to_numpy()
        scored[here] = (raw[here] - raw[here & train].mean(axis=0)) / raw[here & train].std(axis=0)
    for voxels, images, coco, trial, reps in zip(
        *(column for column in collected(loaders(both, backend="tar")[1])), strict=True
    ):
        rows = trials.index[trials["stim_id"] == int(coco)].to_numpy()
        assert (int(trial), int(reps)) == (rows[0], len(rows))
        np.testing.assert_allclose(voxels.float().numpy(), scored[rows], atol=2e-3)
        assert np.array_equal(images.numpy(), pictures(coco.numpy(), 9)[0].transpose(2, 0, 1) / np.float32(255))
    with tarfile.open(both / "webdataset_avg_split" / "test" / "test_subj01_0.tar") as tar:
        assert any(name.endswith("wholebrain_3d.npy") for name in tar.getnames())


def collected(loader):
    batches = [[column.clone() for column in batch] for batch in loader]
    return [torch.cat(columns) for columns in zip(*batches, strict=True)]


def test_shards_alone_are_named_by_what_needs_betas(both, tmp_path):
    shutil.copytree(both / "webdataset_avg_split", tmp_path / "webdataset_avg_split")
    with pytest.raises(Missing, match=r"has tar shards: read them with nsd\.get_dataloaders"):
        NSD(tmp_path)
    with pytest.raises(Missing, match=r"read them with nsd\.get_dataloaders\(…, root=…\)$"):
        loaders(tmp_path, backend="hdf5")
    with pytest.raises(Missing, match=r"There is no nsddata_betas in .*; and no shards train_subj04_"):
        loaders(tmp_path, subj=4)


def test_the_backend_is_what_is_on_disk(both, roots, tmp_path):
    def kind(loader):
        return loader.origin(0).url

    assert ".tar" in kind(loaders(both)[0])
    assert ".hdf5" in kind(loaders(roots["trial-major"])[0])
    shutil.copytree(both / "webdataset_avg_split", tmp_path / "webdataset_avg_split")
    assert ".tar" in kind(loaders(tmp_path)[0])
    assert loaders(tmp_path)[2:] == (20, 4)
    shards = f"{both}/webdataset_avg_split/train/train_subj01_{{0..1}}.tar"
    assert loaders(None, train_url=shards, val_url=shards)[2] == 12


def test_order_ranks_and_options(both):
    def ids(**options):
        return list(by_id(loaders(both, backend="hdf5", **options)[0]))

    assert ids(seed=3) == ids(seed=3) != ids(seed=4)
    shares = [ids(local_rank=rank, world_size=2) for rank in range(2)]
    assert set(shares[0]) | set(shares[1]) == set(ids())
    train, val, num_train, num_val = loaders(
        both, backend="hdf5", reps="single", zscore=None, dtype="float32", image_size=6, val_batch_size=7
    )
    assert (num_train, num_val) == (60, 12)
    assert [tuple(column.shape) for column in next(iter(val))] == [(7, 27), (7, 3, 6, 6), (7, 1), (7, 1), (7, 1)]
    assert train.plan.batch_rows == 5


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"root": None}, ConfigError, "neither root= nor train_url="),
        ({"backend": "lmdb"}, ConfigError, '"auto", "tar" or "hdf5"'),
        ({"backend": "hdf5", "root": None, "train_url": "x.tar"}, ConfigError, "expected root="),
        ({"backend": "tar", "subj": 3}, Missing, "no shards train_subj03"),
        ({"backend": "tar", "reps": "mean"}, ConfigError, "reps: only from the release"),
        ({"subj": 3}, Missing, "no betas of subject 3"),
        ({"backend": "tar", "split": "berg"}, ConfigError, "split: only from the release"),
        (
            {"backend": "tar", "to_tuple": ("voxels", "session")},
            Missing,
            "^to_tuple: 'session' is none of voxels, images",
        ),
        ({"nonsense": 3}, ConfigError, "nonsense: not an argument of get_dataloaders"),
        ({"backend": "hdf5", "columns": ("voxels",)}, ConfigError, "columns: not an argument .* to_tuple chooses"),
        ({"backend": "hdf5", "voxels_key": None}, ConfigError, "voxels_key=None: expected 'nsdgeneral.npy'"),
        ({"root": 5}, ConfigError, "root=5: expected a path"),
        ({"batch_size": "nsd"}, ConfigError, "batch_size='nsd': expected a whole number of samples, at least 1"),
        ({"val_batch_size": 0}, ConfigError, "val_batch_size=0: expected a whole number of samples, at least 1"),
        ({"local_rank": 2}, ConfigError, "local_rank=2: expected a rank in world_size=1, from 0 to 0"),
        ({"backend": "hdf5", "split": "mindeye2/train"}, ConfigError, "expected the name of a split alone"),
        ({"backend": "hdf5", "device": "cuda:99"}, ConfigError, "device='cuda:99'"),
        ({"backend": "tar", "device": "cuda:99"}, ConfigError, "device='cuda:99'"),
        ({"subj": 4}, Missing, r"no betas of subject 4.*; and no shards train_subj04_\*\.tar"),
    ],
    ids=str,
)
def test_refusals(both, options, error, told):
    with pytest.raises(error, match=told):
        loaders(**{"root": both, **options})


def test_sessions_are_mixed_as_memory_allows(tmp_path):
    """Single trials straight from sessions stored by voxel: two sessions at a time, or more."""
    synthesize(tmp_path, Scale((5, 7, 6), 60, 6, {1: 6}, shared=9, picture=64, region_voxels=27))
    options = {"backend": "hdf5", "reps": "single", "image_size": 128, "to_tuple": ("voxels", "images", "trial")}
    rows = []
    for memory in ("60MiB", "400MiB"):
        train, *_, count, _ = loaders(tmp_path, **options, memory=memory)
        rows.append(train.plan.window_rows)
        assert len(np.unique(torch.cat([trial.clone() for _, _, trial in train]).numpy())) == count
        train.close()
    assert rows[0] < 120
    assert rows[1] > 180


@pytest.mark.parametrize("backend", ["tar", "hdf5"])
def test_pictures_go_by_either_name(both, backend):
    for names in (("images", "coco"), ("image", "coco")):
        train, *_ = loaders(both, backend=backend, to_tuple=names)
        assert tuple(next(iter(train))[0].shape) == (5, 3, 9, 9)


@pytest.mark.parametrize("backend", ["tar", "hdf5"])
def test_tuples_without_voxels(both, backend):
    train, *_ = loaders(both, backend=backend, to_tuple=("images", "coco"))
    assert [tuple(column.shape) for column in next(iter(train))] == [(5, 3, 9, 9), (5, 1)]


def test_prepared_and_voxel_major_sessions_give_the_same(roots):
    one, other = (by_id(loaders(roots[layout])[0]) for layout in ("voxel-major", "prepared"))
    assert one.keys() == other.keys()
    for coco, columns in one.items():
        assert all(torch.equal(a, b) for a, b in zip(columns, other[coco], strict=True))


# MindEye2's files.


@pytest.fixture(scope="module")
def theirs(both):
    write_mindeye2(both, 1)
    return both


@pytest.mark.parametrize("part", ["train", "test", "new_test"])
def test_mindeye2s_files(theirs, part):
    nsd = NSD(theirs)
    columns = ("voxels", "image", "coco", "trial", "behav", "past_behav", "future_behav", "olds_behav")
    ds = mindeye2(theirs, 1, part, columns)
    split = "mindeye2/train" if part == "train" else "mindeye2/test"
    same = nsd.dataset(columns, split=split, zscore="session", images=theirs / "coco_images_224_float16.hdf5")
    one, other = ds[:], dict(zip(columns, same[:], strict=True))
    for name in columns:
        assert one[name].dtype == other[name].dtype
        assert np.array_equal(one[name], other[name]), name
    with h5py.File(theirs / "betas_all_subj01_fp32_renorm.hdf5") as file:
        assert file["betas"].shape == (72, 27)


def test_mindeye2s_sessions_and_refusals(theirs, tmp_path):
    first = mindeye2(theirs, 1, "train", ("behav",), sessions=[2])
    assert set(first[:]["behav"][:, 0, 2]) == {2}
    with ps.Loader(mindeye2(theirs), batch_size=8, shuffle=True, memory="64MiB") as loader:
        assert sum(len(batch["voxels"]) for batch in loader) == 60
    for arguments, told in (
        ((theirs, 1, "val"), "train, test, new_test"),
        ((theirs, 1, "train", ("voxel",)), "expected names among voxels"),
    ):
        with pytest.raises(ConfigError, match=told):
            mindeye2(*arguments)
    with pytest.raises(Missing, match="no shards"):
        mindeye2(tmp_path)
    with pytest.raises(Missing, match="3 shards"):
        mindeye2(theirs, sessions=[4])
    shutil.copytree(theirs / "wds", tmp_path / "wds")
    with pytest.raises(Missing, match=r"betas_all_subj01_fp32_renorm\.hdf5: no such file"):
        mindeye2(tmp_path)
