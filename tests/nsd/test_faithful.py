"""What the published loaders do, to the letter: splits, stacks, means, regions, columns, partial downloads."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pytest
import torch

from penstock.dataset.store import digest
from penstock.errors import BudgetExceeded, ConfigError, DataError, Missing, SchemaMismatch
from penstock.nsd import NSD, NSDDataset, Pictures, get_dataloaders, subjects, synthesize
from penstock.nsd.synthetic import Scale
from penstock.nsd.synthetic.shards import write_shards
from penstock.read.part import elements, everything

SESSIONS = 8
SCALE = Scale((5, 7, 6), 24, SESSIONS, {1: SESSIONS}, shared=8, picture=9, region_voxels=27)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A subject with eight sessions, by trial."""
    root = tmp_path_factory.mktemp("whole")
    synthesize(root, SCALE, stored="trial-major")
    return root


@pytest.fixture(scope="module")
def partial(whole, tmp_path_factory):
    """Sessions on disk -> the root of a download that has only those."""
    made = {}
    for count in (1, 3, SESSIONS):
        root = tmp_path_factory.mktemp(f"first{count}") / "nsd"
        shutil.copytree(whole, root)
        for session in range(count + 1, SESSIONS + 1):
            os.remove(NSD(root).layout.session(session, ".hdf5"))
        made[count] = root
    return made


# Splits.


@pytest.mark.parametrize("split", ["berg/test", "berg/val", "random-90/train", "mindeye1-val/val", "mindeye1/train"])
def test_membership_does_not_depend_on_what_is_on_disk(partial, split):
    """Sessions that are not there are only absent."""
    try:
        full = NSD(partial[SESSIONS]).dataset(("trial",), split=split)[:][0]
    except ConfigError:
        full = np.array([], int)  # every shared picture was seen three times
    for count in (1, 3):
        here = NSD(partial[count])
        try:
            got = here.dataset(("trial",), split=split)[:][0]
        except ConfigError:
            got = np.array([], int)
        assert got.tolist() == full[full < count * SCALE.trials].tolist()


@pytest.mark.parametrize("sessions", [5, 15, 40])
def test_published_splits_over_partial_downloads_at_true_size(sessions):
    """Subject 1's 30,000 trials: the same pictures are held out with 5, 15 and 40 sessions."""
    import pandas

    from penstock.nsd.splits import choose
    from penstock.nsd.synthetic import SCALES, Experiment

    experiment = Experiment(SCALES["full"])
    planned = pandas.DataFrame({
        "subject": 1, "session": np.arange(30000) // 750 + 1, "stim_id": experiment.stimuli(1),
        "shared1000": experiment.ordering <= 1000,
    })  # fmt: skip
    here = planned[planned["session"] <= sessions]
    for split in ("berg/test", "berg/val", "random-90/train", "random-90/test", "mindeye1-val/val"):
        whole = choose(planned, split, seed=3)
        assert np.array_equal(choose(here, split, seed=3, planned=planned), whole[: len(here)])


def test_drawn_splits_need_the_design(partial, tmp_path):
    shutil.copytree(partial[3], tmp_path / "nsd")
    nsd = NSD(tmp_path / "nsd")
    os.remove(nsd.layout.design)
    os.remove(nsd.layout.stim_info)
    with pytest.raises(Missing, match=r"split='berg/test': .*nsd_expdesign\.mat"):
        NSD(tmp_path / "nsd").dataset(("trial",), split="berg/test")


# Repetitions.


@pytest.mark.parametrize("count", [1, 3, SESSIONS])
def test_n_reps_counts_the_trials_that_are_stacked(partial, count):
    nsd = NSD(partial[SESSIONS])
    options = {"sessions": range(1, count + 1), "split": "shared1000/test"}
    for kind in ("stack", "mean", "random"):
        ds = nsd.dataset(("coco", "n_reps"), reps=kind, **options)
        trials = nsd.trials[(nsd.trials["session"] <= count) & nsd.trials["shared1000"]]
        wanted = trials.groupby("stim_id").size()
        coco, n_reps = ds[:]
        assert n_reps.tolist() == wanted.loc[coco].tolist()
        assert ds.trials["n_reps"].tolist() == n_reps.tolist()


@pytest.mark.parametrize("padding", ["mindeye1", "mindeye2"])
def test_stacks_are_padded_as_each_mindeye_does(partial, padding):
    nsd = NSD(partial[3])
    single = nsd.dataset(("voxels",))[:][0]
    ds = nsd.dataset(("voxels", "coco", "n_reps"), reps="stack", stack_padding=padding)
    seen = set()
    for voxels, coco, n_reps in (ds[row] for row in range(len(ds))):
        rows = torch.tensor(np.flatnonzero(nsd.trials["stim_id"] == coco))
        seen.add(int(n_reps))
        if padding == "mindeye2":  # as its recon_inference does
            if len(rows) == 1:
                rows = rows.repeat(3)
            elif len(rows) == 2:
                rows = rows.repeat(2)[:3]
            wanted = single[rows.numpy()]
        else:  # as MindEye's shards were made
            found = list(single[rows.numpy()])
            wanted = np.stack(found * 3 if len(found) == 1 else [*found, np.mean(found, axis=0)][:3])
        np.testing.assert_allclose(voxels, wanted, rtol=1e-5)
    assert seen == {1, 2, 3}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("count", [1, 3, SESSIONS])
def test_means_are_normalized_before_or_after_averaging(partial, when, count):
    nsd = NSD(partial[count])
    raw, trials = nsd.dataset(("voxels",))[:][0].astype(np.float64), nsd.trials
    shared = trials["shared1000"].to_numpy()

    def means(values, rows):
        ids = trials["stim_id"].to_numpy()
        return {coco: values[rows & (ids == coco)].mean(axis=0) for coco in np.unique(ids[rows])}

    if when == "after":  # brain-diffuser: average, then mean and std (ddof 1) over the training pictures
        train, test = means(raw, ~shared), means(raw, shared)
        fitted = np.stack(list(train.values()))
        wanted = {coco: (value - fitted.mean(axis=0)) / fitted.std(axis=0, ddof=1) for coco, value in test.items()}
    else:
        wanted = means((raw - raw[~shared].mean(axis=0)) / raw[~shared].std(axis=0), shared)
    ds = nsd.dataset(("voxels", "coco"), reps="mean", zscore="train", zscore_when=when, split="shared1000/test")
    for voxels, coco in (ds[row] for row in range(len(ds))):
        np.testing.assert_allclose(voxels, wanted[int(coco)], rtol=2e-3, atol=2e-4)


def test_after_averaging_needs_means(whole):
    with pytest.raises(ConfigError, match='zscore_when="after"'):
        NSD(whole).dataset(zscore="session", zscore_when="after")


def test_a_budget_too_small_for_all_sessions_advises_copies(roots):
    advice = "\n".join(NSD(roots["voxel-major"]).dataset(("voxels",)).loader(4, shuffle=True, window=1).plan.advice)
    assert "nsd.prepare()" in advice
    assert "h5repack" not in advice


# Tables.


def test_responses_older_than_the_betas(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "nsd")
    before = NSD(tmp_path / "nsd").trials
    path = Path(NSD(tmp_path / "nsd").layout.responses)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: 1 + 3 * 24 + 5]))
    assert any("behaviour of sessions 4-8" in line for line in NSD(tmp_path / "nsd").missing)  # 4 is not whole
    path.write_text("".join(lines[: 1 + 3 * 24]))
    nsd = NSD(tmp_path / "nsd")
    assert len(nsd.trials) == SESSIONS * 24
    for column in ("session", "run", "trial_in_run", "stim_id", "rep", "n_reps", "shared1000"):
        assert nsd.trials[column].tolist() == before[column].tolist()
    assert nsd.trials["isold"][: 3 * 24].notna().all()
    assert nsd.trials["isold"][3 * 24 :].isna().all()
    assert any("behaviour of sessions 4-8" in line and "responses.tsv" in line for line in nsd.missing)
    for name in ("design", "stim_info"):
        os.remove(getattr(nsd.layout, name))
    with pytest.raises(SchemaMismatch, match=r"session 4\) has betas, but .*responses\.tsv \(72 trials\)"):
        _ = NSD(tmp_path / "nsd").trials


# Regions.


def save(path, volume):
    nibabel.save(nibabel.Nifti1Image(np.asarray(volume, np.float32), np.eye(4)), path)


@pytest.fixture
def atlas(root):
    """A release with hemispheres, HCP_MMP1 and Kastner2015 beside prf-visualrois."""
    regions = Path(NSD(root).layout.regions)
    visual = nibabel.load(regions / "prf-visualrois.nii.gz").get_fdata()
    left = np.arange(5)[:, None, None] < 2
    for name in ("prf-visualrois", "HCP_MMP1", "Kastner2015"):
        volume = visual if name == "prf-visualrois" else np.where(visual > 0, 8 - visual, visual)
        save(regions / f"{name}.nii.gz", volume)
        save(regions / f"lh.{name}.nii.gz", np.where(left, volume, 0))
        save(regions / f"rh.{name}.nii.gz", np.where(left, 0, volume))
    labels = Path(NSD(root).layout.label_tables("HCP_MMP1")[0]).parent
    (labels / "HCP_MMP1.mgz.ctab").write_text("0 Unknown\n1 V1\n2 MST\n3 V6\n4 V2\n5 V3A\n6 4\n7 6\n")
    (labels / "Kastner2015.mgz.ctab").write_text("0 Unknown\n1 V1v\n2 V1d\n3 V2v\n4 V2d\n5 hV4\n6 V3A\n7 VO1\n")
    return NSD(root), visual, left


def test_a_label_alone_means_the_bilateral_visual_rois(atlas):
    nsd, visual, left = atlas
    voxels = nsd.voxels("V1")
    assert np.array_equal(voxels.mask, np.isin(visual, [1, 2]))
    assert voxels.source == "prf-visualrois.nii.gz: V1v, V1d"
    assert "prf-visualrois" in repr(voxels)
    assert np.array_equal(nsd.voxels("lh.V1").mask, np.isin(visual, [1, 2]) & left)
    assert np.array_equal(nsd.voxels(["V1", "hV4"]).mask, np.isin(visual, [1, 2, 7]))
    assert np.array_equal(nsd.voxels(np.array(["V1", "hV4"])).mask, np.isin(visual, [1, 2, 7]))
    assert nsd.voxels("MST").source == "HCP_MMP1.nii.gz: MST"
    with pytest.raises(ConfigError, match="'HCP_MMP1:V3A', 'Kastner2015:V3A'"):
        nsd.voxels("V3A")


def test_a_region_of_one_hemisphere_does_not_stand_for_both(atlas):
    nsd, _, _ = atlas
    os.remove(f"{nsd.layout.regions}/Kastner2015.nii.gz")
    os.remove(f"{nsd.layout.regions}/lh.Kastner2015.nii.gz")
    assert nsd.voxels("V3A").source == "HCP_MMP1.nii.gz: V3A"
    with pytest.raises(Missing, match=r"lh\.Kastner2015\.nii\.gz is not there.*roi='rh\.Kastner2015'"):
        nsd.voxels("Kastner2015:V3A")


def test_labels_that_are_digits_are_names_first(atlas):
    nsd, _, _ = atlas
    hcp = nibabel.load(f"{nsd.layout.regions}/HCP_MMP1.nii.gz").get_fdata()
    assert np.array_equal(nsd.voxels("HCP_MMP1:4").mask, hcp == 6)
    assert np.array_equal(nsd.voxels("HCP_MMP1:6").mask, hcp == 7)
    assert np.array_equal(nsd.voxels("HCP_MMP1:3").mask, hcp == 3)


def test_hemispheres_alone_are_united(atlas):
    nsd, visual, _ = atlas
    os.remove(f"{nsd.layout.regions}/prf-visualrois.nii.gz")
    assert np.array_equal(nsd.voxels("V1").mask, np.isin(visual, [1, 2]))
    assert np.array_equal(nsd.voxels("prf-visualrois").mask, visual > 0)
    os.remove(f"{nsd.layout.regions}/rh.prf-visualrois.nii.gz")
    with pytest.raises(Missing, match=r"rh\.prf-visualrois\.nii\.gz is not there.*roi='lh\.prf-visualrois'"):
        nsd.voxels("prf-visualrois:V1")


@pytest.mark.parametrize("name", ["/nowhere/mine.nii.gz", "mine.nii", Path("mine")], ids=str)
def test_a_path_that_does_not_exist_is_named(roots, name):
    with pytest.raises(Missing, match=r"mine.*: no such file"):
        NSD(roots["voxel-major"]).voxels(name)


# MindEye's call.


def test_the_default_tuple_is_mindeyes(roots):
    train, *_ = get_dataloaders(4, root=roots["prepared"], memory="64MiB")
    voxels, images, trial = next(iter(train))
    assert voxels.shape[1:] == (3, 27)
    assert images.shape[1:] == (3, 256, 256)
    first = NSD(roots["prepared"]).trials.groupby("stim_id")["global_trial"].min()
    assert set(trial.flatten().tolist()) <= set(first.tolist())


def test_both_backends_have_the_same_shapes_by_default(roots, tmp_path):
    shutil.copytree(roots["trial-major"], tmp_path / "nsd")
    write_shards(tmp_path / "nsd", picture="png", size=12)
    shapes = []
    for backend in ("tar", "hdf5"):
        train, *_ = get_dataloaders(4, root=tmp_path / "nsd", backend=backend, memory="64MiB")
        shapes.append([(column.dtype, column.shape) for column in next(iter(train))])
    assert shapes[0] == shapes[1]
    assert shapes[0][1][1] == (4, 3, 256, 256)


@pytest.mark.parametrize(
    ("key", "shape"), [("nsdgeneral.npy", (3, 27)), ("wholebrain_3d.npy", (3, 5, 7, 6)), ("V1.npy", (3, 8))]
)
def test_voxels_key_names_the_voxels(roots, key, shape):
    train, *_ = get_dataloaders(4, root=roots["prepared"], voxels_key=key, memory="64MiB", image_size=None)
    assert next(iter(train))[0].shape[1:] == shape


def test_voxels_key_that_names_nothing(roots):
    with pytest.raises(Missing, match=r"voxels_key='nonsense\.npy': .*no such region"):
        get_dataloaders(4, root=roots["prepared"], voxels_key="nonsense.npy", memory="64MiB")
    with pytest.raises(ConfigError, match="both choose voxels"):
        get_dataloaders(4, root=roots["prepared"], voxels_key="V1.npy", roi="V1", memory="64MiB")


@pytest.mark.parametrize("backend", ["tar", "hdf5"])
def test_a_budget_too_small_for_both_loaders_names_the_smallest(roots, tmp_path, backend):
    shutil.copytree(roots["prepared"], tmp_path / "nsd")
    write_shards(tmp_path / "nsd", picture="png")
    options = {"root": tmp_path / "nsd", "backend": backend, "val_batch_size": 2}
    with pytest.raises(BudgetExceeded, match=r"memory=1\.00 MiB is too small for both loaders") as refused:
        get_dataloaders(4, memory="1MiB", **options)
    assert str(refused.value).count("memory=") == 1, "one budget, the caller's"
    for loader in get_dataloaders(4, memory=refused.value.smallest_bytes, **options)[:2]:
        loader.close()
    with pytest.raises(BudgetExceeded):
        get_dataloaders(4, memory=refused.value.smallest_bytes - 1, **options)


@pytest.mark.parametrize("backend", ["tar", "hdf5"])
def test_what_cannot_be_opened_is_skipped(roots, tmp_path, backend):
    root = tmp_path / "nsd"
    shutil.copytree(roots["trial-major"], root)
    write_shards(root, picture="png", per_shard=6)
    broken = NSD(root).layout.session(2, ".hdf5")
    if backend == "tar":
        broken = root / "webdataset_avg_split" / "train" / "train_subj01_0.tar"
    Path(broken).write_bytes(b"nothing")
    options = {"root": root, "backend": backend, "memory": "64MiB", "image_size": None}
    with pytest.raises(DataError, match=os.path.basename(broken)):
        get_dataloaders(4, **options)
    train, _, count, _ = get_dataloaders(4, on_error="skip", **options)
    assert 0 < sum(len(batch[0]) for batch in train) == count


# Files.


def open_files(root):
    found = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum(path.startswith(str(root)) for path in found)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted in /proc")
def test_few_files_are_open_at_once(whole):
    for most in (2, 5):
        ds = NSD(whole).dataset(max_open_files=most)
        with ds.loader(16, shuffle=True, memory="64MiB") as loader:
            for _ in loader:
                assert open_files(whole) <= most
    train, *_ = get_dataloaders(8, root=whole, memory="64MiB", image_size=None, max_open_files=3)
    for _ in train:
        assert open_files(whole) <= 3
    train.close()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted in /proc")
@pytest.mark.parametrize("most", [1, 3])
def test_few_shards_are_open_at_once(whole, tmp_path, monkeypatch, most):
    """Of both loaders together, and while they are opened too."""
    shutil.copytree(whole, tmp_path / "nsd")
    root = os.path.realpath(tmp_path / "nsd")
    write_shards(root, picture="png", per_shard=40)
    open_, seen = os.open, []

    def counting(*arguments, **options):
        descriptor = open_(*arguments, **options)
        seen.append(open_files(root))
        return descriptor

    monkeypatch.setattr(os, "open", counting)
    train, val, *_ = get_dataloaders(8, root=root, backend="tar", memory="64MiB", image_size=None, max_open_files=most)
    for _ in zip(train, val, strict=False):
        pass
    assert len(seen) > 8
    assert max(seen) <= most
    train.close()
    val.close()


def test_the_constructor_of_the_documents(whole):
    nsd = NSD(whole)
    wanted = nsd.dataset(sessions=[1, 2], zscore="session")
    for folder in (whole, nsd.layout.beta_folder):
        ds = NSDDataset(folder, sessions=[1, 2], zscore="session", max_open_files=5)
        assert isinstance(ds, NSDDataset)
        assert ds.fingerprint == wanted.fingerprint
        assert all(np.array_equal(a, b) for a, b in zip(ds[3], wanted[3], strict=True))
        assert ds.trial_map == wanted.trial_map
    with pytest.raises(Missing, match="subj02"):
        NSDDataset(whole, subject=2)


def test_surface_betas_are_named_as_such(roots, tmp_path):
    folder = tmp_path / "nsddata_betas" / "ppdata" / "subj01" / "fsaverage" / "betas_fithrf_GLMdenoise_RR"
    folder.mkdir(parents=True)
    (folder / "lh.betas_session01.mgh").write_bytes(b"")
    said = r"lh\.betas_session01\.mgh, which are not read.*func1pt8mm"
    with pytest.raises(Missing, match=said):
        NSD(tmp_path, space="fsaverage")
    for anywhere in (folder, shutil.copytree(folder, tmp_path / "loose")):
        with pytest.raises(Missing, match=said):
            NSDDataset(anywhere)
    with pytest.raises(Missing, match="surfaces, such as nativesurface, are not read"):
        NSD(roots["prepared"], space="nativesurface", prepared=tmp_path / "none")


def test_another_space_or_version_is_offered(root):
    for options, told in (
        ({"space": "func1mm"}, r"There is no func1mm in .* Pass space='func1pt8mm', or fetch func1mm$"),
        ({"betas": "b2"}, r"There is no betas_fithrf in .* Pass betas='betas_fithrf_GLMdenoise_RR', or fetch"),
    ):
        with pytest.raises(Missing, match=told):
            NSD(root, **options)


def test_empty_folders_are_no_subjects(root):
    for name in ("subj05", "subj07/func1pt8mm/betas_fithrf_GLMdenoise_RR"):
        (root / "nsddata_betas" / "ppdata" / name).mkdir(parents=True)
    assert subjects(root) == [1, 2]


def test_errors_name_the_file_that_is_the_cause(root):
    nsd = NSD(root)
    region = f"{nsd.layout.regions}/streams.nii.gz"
    save(region, np.ones((3, 3, 3)))
    with pytest.raises(SchemaMismatch, match=r"roi/streams\.nii\.gz: has shape \(3, 3, 3\), but .*brainmask"):
        nsd.dataset(roi="streams")
    os.remove(nsd.layout.noise_ceiling)
    with pytest.raises(Missing, match=r"min_ncsnr=0\.2: .*ncsnr\.nii\.gz is not there"):
        nsd.dataset(min_ncsnr=0.2)
    with h5py.File(nsd.layout.session(3, ".hdf5"), "r+") as file:
        smaller = file["betas"][:, :5]
        del file["betas"]
        file["betas"] = smaller
    with pytest.raises(SchemaMismatch, match=r"betas_session03\.hdf5: has volumes of \(5, 7, 5\), but .*session01"):
        NSD(root).dataset()


def test_missing_sessions_are_ranges(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "nsd")
    for session in (2, 3, 4, 6):
        os.remove(NSD(tmp_path / "nsd").layout.session(session, ".hdf5"))
    assert any("sessions 2-4, 6 of 8" in line for line in NSD(tmp_path / "nsd").missing)


def test_all_sessions_in_one_file(root):
    before = NSD(root).dataset(("voxels", "trial"), dtype="int16")
    wanted = before[:]
    NSD(root).prepare(sessions=[2])
    folder = NSD(root).prepare()
    assert sorted(os.listdir(folder)) == ["subject.json", "subject.npy"]
    assert np.load(f"{folder}/subject.npy").shape == (72, 27)
    for sessions in (None, [2], [1, 3]):
        ds = NSD(root).dataset(("voxels", "trial"), dtype="int16", sessions=sessions)
        assert ds.store.blocks is None
        here = np.isin(wanted[1], ds[:][1])
        assert np.array_equal(ds[:][0], wanted[0][here])
    assert NSD(root).prepare() == folder
    with h5py.File(NSD(root).layout.session(2, ".hdf5"), "r+") as file:
        file["betas"][...] = file["betas"][:] + 1
        file.create_dataset("note", data=np.zeros(5000))
    NSD(root).prepare()
    assert np.array_equal(NSD(root).dataset(("voxels",), dtype="int16")[:][0][24:48], wanted[0][24:48] + 1)
    assert sorted(os.listdir(folder)) == ["subject.json", "subject.npy"]


# States saved by earlier versions.


@dataclass(frozen=True)
class Header:
    shape: tuple
    stored: np.dtype
    offset: int


def test_fingerprints_of_compressed_sessions_stay(roots):
    nsd = NSD(roots["nifti"])
    path = nsd.layout.session(1, ".nii.gz")
    header = Header((24, 6, 7, 5), np.dtype("<i2"), 352)
    about = ("nifti", "betas_session01.nii.gz", os.path.getsize(path), header)
    assert nsd.betas(None, [1]).fingerprint == digest(*about, everything((6, 7, 5)).describe())
    numbers = np.ravel_multi_index(nsd.voxels("V1").coordinates.T[::-1], (6, 7, 5))
    assert nsd.betas(nsd.voxels("V1"), [1]).fingerprint == digest(*about, elements((6, 7, 5), numbers).describe())


def test_fingerprints_of_folders_of_pictures_stay(roots, tmp_path):
    from PIL import Image

    nsd = NSD(roots["trial-major"])
    for number in range(164):
        Image.new("RGB", (9, 9), (number, 0, 0)).save(tmp_path / f"{number}.png")
    names = sorted(os.listdir(tmp_path))
    about = [(name, os.path.getsize(tmp_path / name)) for name in names]
    from penstock.files.files import Files
    from penstock.nsd.stimuli import find_pictures

    for size in (None, 5):
        found = find_pictures(nsd.layout, Pictures(tmp_path, size), Files())
        assert found.pictures.store.fingerprint == digest("pictures", size, 164, about)
