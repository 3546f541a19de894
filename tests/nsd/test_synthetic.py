"""The synthetic release is laid out as the real one, as read by other people's libraries."""

import csv

import h5py
import nibabel
import numpy as np
import pytest
import scipy.io

from penstock.cli.main import main
from penstock.errors import ConfigError
from penstock.nsd import synthesize
from penstock.nsd.layout import SubjectLayout
from penstock.nsd.synthetic import SCALES, Anatomy, Betas, Scale, pictures

TINY = SCALES["tiny"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nsd")
    synthesize(folder, nifti=True, coco=8)
    return folder


def layout(root, subject=1):
    return SubjectLayout(str(root), subject, "func1pt8mm", "betas_fithrf_GLMdenoise_RR")


def test_sessions_are_chunked_by_voxel(root):
    with h5py.File(layout(root).session(2, ".hdf5")) as file:
        betas = file["betas"]
        assert (betas.shape, betas.dtype, betas.chunks) == ((24, 6, 7, 5), np.int16, (24, 1, 1, 1))
        assert betas.id.get_num_chunks() == TINY.voxels
        assert betas.compression is None


def test_every_value_tells_session_trial_and_voxel(root):
    brain = nibabel.load(layout(root).brainmask).get_fdata() > 0
    for session in (1, 2, 3):
        with h5py.File(layout(root).session(session, ".hdf5")) as file:
            betas = file["betas"][:]
        assert not betas[:, ~brain.T].any()
        for trial, z, y, x in np.argwhere(np.broadcast_to(brain.T, betas.shape))[::17].tolist():
            assert betas[trial, z, y, x] == 24 * 210 * (session - 1) + 210 * trial + (x * 42 + y * 6 + z)


def test_nifti_holds_the_same(root):
    found = nibabel.load(layout(root).session(2, ".nii.gz"))
    assert found.shape == (5, 7, 6, 24)
    with h5py.File(layout(root).session(2, ".hdf5")) as file:
        assert np.array_equal(np.asanyarray(found.dataobj), file["betas"][:].T)


@pytest.mark.parametrize("stored", ["trial-major", "rechunked"])
def test_other_layouts_hold_the_same(root, tmp_path, stored):
    synthesize(tmp_path, stored=stored, stimuli=False)
    with (
        h5py.File(layout(root).session(3, ".hdf5")) as one,
        h5py.File(layout(tmp_path).session(3, ".hdf5")) as other,
    ):
        assert other["betas"].chunks == (None if stored == "trial-major" else (6, 1, 1, 1))
        assert np.array_equal(one["betas"][:], other["betas"][:])


def test_larger_sets_hash_session_trial_and_voxel():
    betas = Betas(SCALES["full"], 1)
    assert not betas.exact
    trials, voxels = np.arange(750), np.arange(1000) * 600
    one, two = betas.values(1, trials, voxels), betas.values(2, trials, voxels)
    assert len(np.unique(one[:, 5])) > 600
    assert (one == two).mean() < 0.01
    assert (one[0] == one[1]).mean() < 0.01
    assert np.array_equal(betas.values(2, trials[7:8], voxels[3:4]), two[7:8, 3:4])
    assert one.std() > 1000


def test_regions_hold_what_a_careless_mask_would_take_in(root):
    region = nibabel.load(f"{layout(root).regions}/nsdgeneral.nii.gz").get_fdata()
    assert set(np.unique(region)) == {-1, 0, 1}
    assert (region > 0).sum() == TINY.region_voxels < (region != 0).sum()
    streams = nibabel.load(f"{layout(root).regions}/streams.nii.gz").get_fdata()
    assert set(np.unique(streams)) == {-1, 0, 1, 2, 3, 4, 5, 6, 7}
    assert np.array_equal(region > 0, Anatomy(TINY).nsdgeneral)


def test_ids_agree_between_tables(root):
    design = scipy.io.loadmat(f"{root}/nsddata/experiments/nsd/nsd_expdesign.mat")
    ordering, pictures_of = design["masterordering"].astype(int)[0], design["subjectim"].astype(int)
    with open(f"{root}/nsddata/experiments/nsd/nsd_stim_info_merged.csv") as file:
        info = {int(row["nsdId"]): row for row in csv.DictReader(file)}
    assert len(info) == TINY.stimuli
    shared = {number for number, row in info.items() if row["shared1000"] == "True"}
    assert shared == set(design["sharedix"][0].astype(int) - 1)
    for subject, sessions in TINY.sessions.items():
        with open(layout(root, subject).responses) as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
        assert len(rows) == 24 * sessions
        for trial, row in enumerate(rows):
            stimulus = pictures_of[subject - 1, ordering[trial] - 1] - 1
            assert int(row["73KID"]) - 1 == stimulus
            assert int(row["10KID"]) == ordering[trial]
            planned = [int(info[stimulus][f"subject{subject}_rep{rep}"]) for rep in range(3)]
            assert trial + 1 in planned
            assert int(row["SESSION"]) == trial // 24 + 1
            assert (stimulus in shared) == (ordering[trial] <= 4)


def test_pictures_are_numbered(root):
    with h5py.File(f"{root}/nsddata_stimuli/stimuli/nsd/nsd_stimuli.hdf5") as file:
        brick = file["imgBrick"][:]
    assert brick.shape == (164, 9, 9, 3)
    assert len(np.unique(brick.reshape(164, -1), axis=0)) == 164
    with h5py.File(f"{root}/coco_images_224_float16.hdf5") as file:
        small = file["images"][:]
    assert np.array_equal(small[7].transpose(1, 2, 0), (pictures(np.array([7]), 8)[0] / np.float32(255)).astype("f2"))


def test_holes_take_no_room(tmp_path):
    scale = Scale((14, 16, 15), 24, 3, {1: 1}, region_voxels=100)
    for written in ("brain", "region", "nothing"):
        synthesize(tmp_path / written, scale, written=written, stimuli=False)
    paths = {written: layout(tmp_path / written).session(1, ".hdf5") for written in ("brain", "region")}
    with h5py.File(paths["brain"]) as whole, h5py.File(paths["region"]) as part:
        assert part["betas"].id.get_num_chunks() == scale.voxels
        inside = Anatomy(scale).nsdgeneral.T
        assert np.array_equal(whole["betas"][:][:, inside], part["betas"][:][:, inside])
        assert not part["betas"][:][:, ~inside].any()


def test_the_same_seed_writes_the_same(root, tmp_path):
    synthesize(tmp_path / "again", nifti=True, coco=8)
    synthesize(tmp_path / "other", seed=1)
    name = "nsddata/ppdata/subj01/behav/responses.tsv"
    assert (root / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert (root / name).read_bytes() != (tmp_path / "other" / name).read_bytes()


def test_command(tmp_path, capsys):
    assert main(["nsd", "synthesize", str(tmp_path), "--stored", "trial-major", "--no-stimuli"]) == 0
    assert "subjects 1 (3 sessions), 2 (2 sessions)" in capsys.readouterr().out
    assert (tmp_path / "nsddata_betas").is_dir()
    assert not (tmp_path / "nsddata_stimuli").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"scale": "huge"}, "tiny, small, full"),
        ({"subjects": [1, 9]}, r"\[9\]"),
        ({"stored": "sideways"}, "voxel-major"),
    ],
)
def test_refusals(tmp_path, options, told):
    with pytest.raises(ConfigError, match=told):
        synthesize(tmp_path, **options)


@pytest.mark.parametrize(
    "wrong",
    [
        {"trials": 25, "planned_sessions": 4},
        {"trials": 6},
        {"sessions": {9: 1}},
        {"sessions": {1: 4}},
        {"shared": 24},
        {"region_voxels": 200},
    ],
    ids=str,
)
def test_scales_that_cannot_be(wrong):
    with pytest.raises(ConfigError):
        Scale(**wrong)


def test_commands_from_nothing_to_copies(tmp_path, capsys):
    root = str(tmp_path / "nsd")
    assert main(["nsd", "synthesize", root, "--shards", "--mindeye2", "--coco", "8"]) == 0
    assert (tmp_path / "nsd" / "webdataset_avg_split" / "train" / "train_subj01_0.tar").is_file()
    assert (tmp_path / "nsd" / "wds" / "subj01" / "new_test" / "0.tar").is_file()
    assert main(["nsd", "show", root]) == 0
    shown = capsys.readouterr().out
    assert "3 sessions, 72 trials of 24 pictures; 12 trials shared" in shown
    assert "region nsdgeneral: 27 voxels" in shown
    assert main(["nsd", "prepare", root, "--whole-brain"]) == 0
    assert "complete; datasets of these voxels use it" in capsys.readouterr().out
    assert main(["nsd", "prepare", root, "--whole-brain"]) == 0
    assert "was complete already" in capsys.readouterr().out
    assert main(["nsd", "prepare", root, "--roi", "V9"]) == 2
    assert "V9.nii.gz. There are: nsdgeneral" in capsys.readouterr().err
    assert main(["nsd", "show", str(tmp_path)]) == 2
    assert f"nsddata_betas is in {root}: pass that folder as root" in capsys.readouterr().err
