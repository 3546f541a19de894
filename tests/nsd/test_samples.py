"""Samples: repetitions, neighbours, pictures, filters and columns, each against numpy on the tables."""

import json
import os
import shutil

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

import penstock as ps
from penstock.errors import BudgetExceeded, ConfigError, Missing
from penstock.nsd import NSD, Pictures, subjects, synthesize, text
from penstock.nsd.behaviour import COLUMNS
from penstock.nsd.synthetic import SCALES, Scale, pictures
from penstock.testing import check_resume

TINY = SCALES["tiny"]


@pytest.fixture(scope="module")
def nsd(roots):
    return NSD(roots["trial-major"])


@pytest.fixture(scope="module")
def fewer(roots):
    """A subject with fewer sessions than were planned: pictures were seen one, two or three times."""
    return NSD(roots["prepared"], 2)


def raw(nsd):
    return nsd.dataset(("voxels",))[:][0]


# Pictures.


def test_pictures_by_their_number(nsd):
    image, coco = nsd.dataset(("image", "coco"))[:]
    assert coco.tolist() == nsd.trials["stim_id"].tolist()
    assert np.array_equal(image, pictures(coco, 9).transpose(0, 3, 1, 2))


def test_the_same_picture_twice_in_a_batch(nsd):
    ds = nsd.dataset(("image", "stim_id"), sessions=[1])
    image, stim = ds[[3, 3, 0]]
    assert np.array_equal(image, pictures(stim, 9).transpose(0, 3, 1, 2))


def test_mindeye2s_pictures(nsd, roots):
    small = nsd.dataset(("image", "coco"), images=roots["trial-major"] / "coco_images_224_float16.hdf5")
    image, coco = small[:]
    assert (image.dtype, image.shape[1:]) == (np.float16, (3, 8, 8))
    assert np.array_equal(image, (pictures(coco, 8).transpose(0, 3, 1, 2).astype(np.float32) / 255).astype(np.float16))


@pytest.mark.parametrize("dtype", ["float32", "float16", None, "uint8"])
def test_size_and_dtype_are_declared(nsd, dtype):
    ds = nsd.dataset(("image",), images=Pictures(size=6, dtype=dtype))
    assert ds.fields["image"] == ps.FieldSpec(np.dtype(dtype or "uint8"), (3, 6, 6))
    oracle = Image.fromarray(pictures(nsd.trials["stim_id"].to_numpy()[:1], 9)[0]).resize((6, 6), Image.BILINEAR)
    wanted = np.asarray(oracle).transpose(2, 0, 1)
    if dtype in ("float32", "float16"):
        wanted = (wanted.astype(np.float32) / 255).astype(dtype)
    assert np.array_equal(ds[0][0], wanted)
    with ds.loader(10, memory="64MiB", shuffle=True) as loader:
        assert sum(len(image) for (image,) in loader) == len(ds)


def test_memory_is_set_aside_for_what_opening_took(nsd):
    ds = nsd.dataset(("image",))
    for memory in (64 << 20, 4 << 30):
        plan = ds.loader(10, memory=memory).plan
        assert (plan.limit_bytes, plan.holders["opening"]) == (memory, ds.opening_bytes)
        assert plan.planned_bytes <= memory
    assert ds.loader(10, memory=plan.smallest_bytes).plan.planned_bytes <= plan.smallest_bytes
    with pytest.raises(BudgetExceeded, match="set aside for the trial table") as refused:
        ds.loader(10, memory=plan.smallest_bytes - 1)
    assert str(refused.value).count("memory=") == 1, "one budget, the caller's"


@pytest.mark.slow
def test_fewer_sessions_are_mixed_where_memory_does_not_allow_all(tmp_path):
    """All six first; where they do not fit, four, as many as are always mixed where memory allows."""
    synthesize(tmp_path, Scale((30, 40, 34), 60, 6, {1: 6}, shared=9, picture=9, region_voxels=9000), stimuli=False)
    ds = NSD(tmp_path).dataset(("voxels", "trial"))
    ample = ds.loader(8, shuffle=True, memory="256MiB")
    assert ample.plan.window_rows == 360
    with pytest.raises(BudgetExceeded):
        ds.loader(8, shuffle=True, window=ample.plan.window_rows, memory=ample.plan.smallest_bytes - (3 << 20))
    with ds.loader(8, shuffle=True, memory=ample.plan.smallest_bytes - (3 << 20)) as less:
        assert less.plan.window_rows == 240
        assert sorted(int(t) for _, trial in less for t in trial) == list(range(360))


@pytest.mark.parametrize("name", ["{}.png", "shared0001_nsd{:05d}.png"])
def test_a_folder_of_pictures(nsd, tmp_path, name):
    for number in nsd.trials["stim_id"].unique():
        shown = pictures(np.array([number]), 9)[0]
        Image.fromarray(shown).save(tmp_path / name.format(number if name.startswith("{") else number + 1))
    for size in (None, 5):
        image, coco = nsd.dataset(("image", "coco"), images=Pictures(tmp_path, size=size))[:]
        if size is None:
            assert np.array_equal(image, pictures(coco, 9).transpose(0, 3, 1, 2))
        assert image.shape[1:] == (3, size or 9, size or 9)
    os.remove(tmp_path / sorted(os.listdir(tmp_path))[0])
    with pytest.raises(Missing, match="1 pictures that were shown are not in it"):
        nsd.dataset(("image",), images=tmp_path)


def test_no_behaviour_is_explained(root):
    nsd = NSD(root)
    os.remove(nsd.layout.responses)
    with pytest.raises(ConfigError, match=r"columns: no 'rt' without .*responses\.tsv; fetch it"):
        NSD(root).dataset(("coco", "rt"))
    with pytest.raises(ConfigError, match=r"where: no column 'iscorrect' without responses\.tsv; fetch it"):
        NSD(root).dataset(("coco",), where={"iscorrect": 1})
    assert len(NSD(root).dataset(("coco", "trial"), split="mindeye2/train"))


def test_no_pictures_is_explained(root):
    shutil.rmtree(root / "nsddata_stimuli")
    os.remove(root / "coco_images_224_float16.hdf5")
    with pytest.raises(Missing, match=r'nsd_stimuli\.hdf5.*or ask for columns without "image"'):
        NSD(root).dataset()
    assert NSD(root).dataset(("voxels", "coco"))[0]
    assert any("nsd_stimuli" in told for told in NSD(root).missing)


def test_chunked_pictures(root):
    path = NSD(root).layout.stimuli
    with h5py.File(path) as file:
        brick = file["imgBrick"][:]
    with h5py.File(path, "w") as file:
        file.create_dataset("imgBrick", data=brick, chunks=(1, 9, 9, 3), compression="gzip")
    image, coco = NSD(root).dataset(("image", "coco"))[:]
    assert np.array_equal(image, brick[coco].transpose(0, 3, 1, 2))


# Further arrays.


def test_arrays_by_picture(nsd, tmp_path):
    clip = np.random.default_rng(0).normal(size=(164, 7)).astype(np.float32)
    np.save(tmp_path / "clip.npy", clip)
    with h5py.File(tmp_path / "vae.h5", "w") as file:
        file["latent"] = clip * 2
    captions = {str(number): f"picture {number} ✓" for number in range(164)}
    (tmp_path / "captions.json").write_text(json.dumps(captions))
    (tmp_path / "boxes.json").write_text(json.dumps({number: [number, 1] for number in range(164)}))
    extra = {
        "clip": tmp_path / "clip.npy", "vae": tmp_path / "vae.h5", "caption": tmp_path / "captions.json",
        "box": tmp_path / "boxes.json", "here": clip[:, 0],
    }  # fmt: skip
    ds = nsd.dataset(("coco", *extra), extra=extra)
    for coco, clip_, vae, caption, box, here in (ds[row] for row in (0, 5, 71)):
        assert np.array_equal(clip_, clip[coco])
        assert np.array_equal(vae, clip[coco] * 2)
        assert text(caption) == captions[str(coco)]
        assert box.tolist() == [coco, 1]
        assert here == clip[coco, 0]
    with pytest.raises(ConfigError, match=r"'clip': has 10 rows"):
        nsd.dataset(("clip",), extra={"clip": clip[:10]})
    with pytest.raises(Missing, match="nothing for 23 pictures"):
        nsd.dataset(("box",), extra={"box": {int(nsd.trials["stim_id"][0]): 1}})


# Repetitions.


def lines(nsd):
    return {stim: rows.index.to_numpy() for stim, rows in nsd.trials.groupby("stim_id")}


@pytest.mark.parametrize("kind", ["mean", "stack"])
def test_repetitions_together(fewer, kind):
    ds = fewer.dataset(("voxels", "coco", "n_reps", "trial"), reps=kind)
    values, by_picture = raw(fewer), lines(fewer)
    assert sorted(ds[:][1].tolist()) == sorted(by_picture)
    assert {len(rows) for rows in by_picture.values()} == {1, 2, 3}
    for row in range(len(ds)):
        voxels, coco, n_reps, trial = ds[row]
        rows = by_picture[int(coco)]
        assert (n_reps, trial) == (len(rows), rows[0])
        if kind == "mean":
            np.testing.assert_allclose(voxels, values[rows].mean(axis=0), rtol=1e-5)
        else:
            third = [values[rows[:2]].mean(axis=0)] if len(rows) == 2 else []
            padded = [*values[rows], *third] if len(rows) > 1 else [values[rows[0]]] * 3
            np.testing.assert_allclose(voxels, np.stack(padded), rtol=1e-6)


def test_one_of_each_picture_an_epoch(fewer):
    ds = fewer.dataset(("coco", "trial"), reps="random")
    by_picture = lines(fewer)
    epochs = []
    with ds.loader(5, shuffle=True, seed=1, memory="64MiB") as loader:
        for _ in range(12):
            epochs.append({int(c): int(t) for coco, trial in loader for c, t in zip(coco, trial, strict=True)})
            assert epochs[-1].keys() == by_picture.keys()
    for coco, rows in by_picture.items():
        assert {epoch[coco] for epoch in epochs} <= set(rows.tolist())
    assert any(len({epoch[coco] for epoch in epochs}) == 3 for coco, rows in by_picture.items() if len(rows) == 3)
    with ds.loader(5, shuffle=False, seed=1, memory="64MiB") as loader:
        assert {int(c): int(t) for coco, trial in loader for c, t in zip(coco, trial, strict=True)} == epochs[0]


@pytest.mark.parametrize("layout", ["voxel-major", "nifti", "rechunked"])
@pytest.mark.parametrize("kind", ["mean", "stack", "random"])
def test_repetitions_straight_from_sessions_that_are_read_whole(roots, layout, kind):
    """The same as from copies by trial, each session read once."""
    options = {"columns": ("voxels", "coco", "trial"), "reps": kind, "zscore": "session", "split": "shared1000/train"}
    batches = []
    for root in (roots[layout], roots["prepared"]):
        ds = NSD(root, 2).dataset(**options)
        with ds.loader(5, shuffle=True, seed=3, memory="64MiB") as loader:
            found = [[column.numpy().copy() for column in batch] for batch in loader]
        order = np.argsort(np.concatenate([batch[2] for batch in found]))
        batches.append([np.concatenate(columns)[order] for columns in zip(*found, strict=True)])
    for ours, theirs in zip(*batches, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


# Neighbours.


@pytest.mark.parametrize("layout", ["voxel-major", "trial-major", "prepared"])
def test_neighbours_never_cross_sessions(roots, layout):
    nsd = NSD(roots[layout])
    ds = nsd.dataset(("past_voxels", "future_voxels", "session", "trial_in_session"), context=(3, 2), dtype="int16")
    assert (ds.store.blocks is None) == (layout != "voxel-major")
    values = nsd.dataset(("voxels",), dtype="int16")[:][0]
    past, future, _, inside = ds[:]
    for row in range(len(ds)):
        for back in range(3):
            there = inside[row] - back - 1 >= 0
            assert np.array_equal(past[row, back], values[row - back - 1] if there else np.zeros(27))
        for ahead in range(2):
            there = inside[row] + ahead + 1 < 24
            assert np.array_equal(future[row, ahead], values[row + ahead + 1] if there else np.zeros(27))
    with ds.loader(7, shuffle=True, memory="64MiB", columns=("past_voxels", "__index__"), output="numpy") as loader:
        for some, rows in loader:
            assert np.array_equal(some, past[rows])


def test_context_must_be_asked_for(nsd):
    with pytest.raises(ConfigError, match=r"no 'past_voxels' without context=\(past, future\)"):
        nsd.dataset(("past_voxels",))


# Behaviour as MindEye2 has it.


def test_behaviour_as_mindeye2_writes_it(nsd):
    behav, past, future, olds = nsd.dataset(("behav", "past_behav", "future_behav", "olds_behav"))[:]
    assert (behav.shape, past.shape, olds.shape, behav.dtype) == ((72, 1, 17), (72, 15, 17), (72, 3, 17), np.float64)
    trials = nsd.trials
    for row in range(72):
        wanted = [-1 if np.isnan(trials[name][row]) else float(trials[name][row]) for name in COLUMNS]
        wanted[6] = int(wanted[6])
        assert behav[row, 0].tolist() == wanted
        inside = row % 24
        for step in range(1, 16):
            assert past[row, step - 1].tolist() == (behav[row - step, 0].tolist() if step <= inside else [-1] * 17)
            after = behav[row + step, 0].tolist() if inside + step < 24 else [-1] * 17
            assert future[row, step - 1].tolist() == after
        others = [other for other in lines(nsd)[trials["stim_id"][row]].tolist() if other != row]
        assert olds[row, : len(others)].tolist() == behav[others, 0].tolist()
        assert (olds[row, len(others) :] == -1).all()


# Which trials.


@pytest.mark.parametrize(
    ("split", "keep"),
    [
        ("shared1000/train", lambda t: ~t["shared1000"]),
        ("shared1000/test", lambda t: t["shared1000"]),
        ("mindeye2/train", lambda t: ~t["shared1000"]),
        ("mindeye1/test", lambda t: t["shared1000"]),
        ("first-1/train", lambda t: ~t["shared1000"] & (t["session"] == 1)),
        ("first-1/test", lambda t: t["shared1000"]),
        ("berg/train", lambda t: ~t["shared1000"]),
    ],
)
def test_splits(nsd, split, keep):
    ds = nsd.dataset(("trial",), split=split)
    assert ds[:][0].tolist() == nsd.trials["global_trial"][keep(nsd.trials)].tolist()


EMPTY = ("berg", "val")  # this subject saw every shared picture three times


@pytest.mark.parametrize("name", ["mindeye1-val", "berg", "random-70"])
def test_splits_never_divide_a_picture(nsd, name):
    parts = [("train", "test"), ("train", "val", "test")][name != "random-70"]
    parts = {part: nsd.dataset(("coco", "trial"), split=f"{name}/{part}")[:] for part in parts if (name, part) != EMPTY}
    seen = [set(coco.tolist()) for coco, _ in parts.values()]
    assert len(set().union(*seen)) == sum(map(len, seen)) == 24
    assert sum(len(trial) for _, trial in parts.values()) == 72


def test_seeds_draw_other_pictures(nsd):
    def drawn(seed):
        return set(nsd.dataset(("coco",), split="random-50/train", split_seed=seed)[:][0].tolist())

    assert drawn(0) == drawn(0) != drawn(1)
    assert len(drawn(0)) == 12


def test_published_numbers_of_splits():
    """On the design at its true size: 27,000 and 3,000 trials, 8,859 and 982 pictures in the first 37 sessions."""
    from penstock.nsd.libraries import needed
    from penstock.nsd.splits import choose
    from penstock.nsd.synthetic import Experiment

    experiment = Experiment(SCALES["full"])
    table = needed("pandas").DataFrame({
        "subject": 1, "session": np.arange(30000) // 750 + 1, "stim_id": experiment.stimuli(1),
        "shared1000": experiment.ordering <= 1000,
    })  # fmt: skip
    assert choose(table, "mindeye2/train", seed=0).sum() == 27_000
    assert choose(table, "mindeye2/test", seed=0).sum() == 3_000
    val = table[choose(table, "mindeye1-val/val", seed=0)]
    assert val["stim_id"].nunique() == 300
    train, test = (table[choose(table, f"mindeye1/{part}", seed=0)] for part in ("train", "test"))
    assert train["session"].max() == test["session"].max() == 37
    parts = [table[choose(table, f"berg/{part}", seed=0)]["stim_id"].nunique() for part in ("train", "val", "test")]
    assert parts[0] == 9000
    assert parts[1] + parts[2] == 1000


def test_filters(nsd):
    trials = nsd.trials
    right = nsd.dataset(("trial",), where={"iscorrect": 1, "run": [1, 2, 3]})[:][0]
    assert right.tolist() == trials["global_trial"][(trials["iscorrect"] == 1) & (trials["run"] <= 3)].tolist()
    quick = nsd.dataset(("trial",), where=lambda table: table["rt"] < 1000)[:][0]
    assert quick.tolist() == trials["global_trial"][trials["rt"] < 1000].tolist()
    mask = (trials["global_trial"] % 5 == 0).to_numpy()
    assert nsd.dataset(("trial",), split=mask)[:][0].tolist() == list(range(0, 72, 5))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"columns": "voxels"}, "expected a tuple of names"),
        ({"columns": ("voxels", "voxels")}, "expected a tuple of names"),
        ({"columns": ("voxels", "colour")}, "There are voxels, image, coco, subject"),
        ({"split": "mindeye2"}, "a name and a part"),
        ({"split": "mindeye3/train"}, "no such split; there are shared1000, mindeye1"),
        ({"split": "mindeye2/val"}, "has train and test only"),
        ({"split": [True]}, "one boolean for each of 72 trials"),
        ({"where": {"mood": 1}}, "no column 'mood'"),
        ({"where": {"iscorrect": 7}}, "no trial is left"),
        ({"reps": "all"}, '"single", "mean", "stack" or "random"'),
        ({"context": (-1, 0)}, "how many trials before"),
        ({"columns": ("coco",), "zscore": "session"}, "nothing to normalize"),
        ({"images": Pictures(dtype="int16")}, "expected that, or a float"),
    ],
    ids=str,
)
def test_refusals(nsd, options, told):
    with pytest.raises(ConfigError, match=told):
        nsd.dataset(**options)


# Loading.


def test_samples_are_tuples_and_trials_are_mapped(nsd):
    ds = nsd.dataset(sessions=[2, 3])
    voxels, image, coco = ds[5]
    assert (voxels.shape, image.shape, int(coco)) == ((27,), (3, 9, 9), int(ds.trials["stim_id"][5]))
    assert ds.trial_map[5] == (2, 5, 29)
    assert ds.trial_map[-1] == (3, 23, 71)
    assert ds.voxels.coordinates.shape == (27, 3)
    assert subjects(nsd.layout.root) == [1, 2]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("layout", ["voxel-major", "prepared"])
@pytest.mark.filterwarnings("ignore:This process", "ignore:This DataLoader")
def test_torchs_own_loader(roots, layout, workers):
    ds = NSD(roots[layout]).dataset(zscore="session")
    expected_voxels = ds[:][0]
    loader = torch.utils.data.DataLoader(ds, batch_size=10, num_workers=workers)
    begin = 0
    for voxels, image, coco in loader:
        assert np.array_equal(voxels.numpy(), expected_voxels[begin : begin + len(voxels)])
        assert image.shape[1:] == (3, 9, 9)
        assert coco.dtype == torch.int64
        begin += len(voxels)
    assert begin == 72


def test_an_epoch_is_an_epoch_and_resumes(roots):
    ds = NSD(roots["voxel-major"]).dataset(("voxels", "trial"), zscore="session", split="shared1000/train")

    def make():
        return ds.loader(7, shuffle=True, seed=3, memory="64MiB")

    with make() as loader:
        assert sorted(int(t) for _, trial in loader for t in trial) == ds.trials["global_trial"].tolist()
    check_resume(make)


def test_too_small_a_budget_is_explained(nsd):
    with pytest.raises(BudgetExceeded, match=r"memory=1\.00 MiB is too small: the smallest that works is"):
        nsd.dataset().loader(8, memory="1MiB")
