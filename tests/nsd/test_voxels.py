"""Every voxel that is delivered proves its session, trial and place, from every layout, in the order promised."""

import contextlib
import gzip
import json
import os
import random
import warnings
from dataclasses import replace
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pytest

from penstock.conversion import fill
from penstock.errors import BudgetExceeded, ConfigError, ConvertFailed, Corrupt, DataError, Missing, SchemaMismatch
from penstock.files import locks
from penstock.files.files import Files
from penstock.formats.nifti import open_stored_volumes
from penstock.nsd import NSD, NSDDataset, Pictures, subjects, synthesize
from penstock.nsd.betas import HeldSessions
from penstock.nsd.prepared import Stale
from penstock.nsd.synthetic import SCALES, Anatomy, Betas, Scale
from penstock.testing import check_store

TINY = SCALES["tiny"]
LAYOUTS = ("voxel-major", "trial-major", "rechunked", "nifti", "prepared")
RAW = {"dtype": "int16", "columns": ("voxels", "session", "trial_in_session")}


def expected(nsd, index, sessions=None):
    betas = Betas(TINY, nsd.subject)
    brain = Anatomy(TINY).brain.reshape(-1)[index]
    parts = [betas.values(session, np.arange(24), index) * brain for session in sessions or nsd.sessions]
    return np.concatenate(parts)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("subject", [1, 2])
@pytest.mark.parametrize("roi", ["nsdgeneral", "streams:ventral", "V1", "brainmask"])
def test_values_prove_their_place(roots, layout, subject, roi):
    nsd = NSD(roots[layout], subject)
    ds = nsd.dataset(roi=roi, **RAW)
    assert nsd.sessions == tuple(range(1, TINY.sessions[subject] + 1))
    voxels, session, trial = ds[:]
    for value, s, t in zip(voxels, session, trial, strict=True):
        for number, (x, y, z) in zip(value.tolist(), ds.voxels.coordinates.tolist(), strict=True):
            assert number == 5040 * (s - 1) + 210 * t + (x * 42 + y * 6 + z)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_volumes(roots, layout):
    nsd = NSD(roots[layout])
    ds = nsd.dataset(roi=None, **RAW)
    assert ds.fields["voxels"].shape == TINY.volume
    whole = expected(nsd, np.arange(TINY.voxels)).reshape(-1, *TINY.volume)
    assert np.array_equal(ds[:][0], whole)
    with ds.loader(7, shuffle=True, memory="64MiB", columns=("voxels", "__index__"), output="numpy") as loader:
        for volumes, rows in loader:
            assert np.array_equal(volumes, whole[rows])


def test_order_is_that_of_nifti_or_of_hdf5(roots):
    nsd = NSD(roots["voxel-major"])
    mask = nibabel.load(f"{nsd.layout.regions}/nsdgeneral.nii.gz").get_fdata() > 0
    nifti = np.asanyarray(nibabel.load(NSD(roots["nifti"]).layout.session(2, ".nii.gz")).dataobj)
    with h5py.File(nsd.layout.session(2, ".hdf5")) as file:
        hdf5 = file["betas"][:]
    as_nifti = nsd.dataset(sessions=[2], **RAW)
    as_hdf5 = nsd.dataset(sessions=[2], voxel_order="hdf5", **RAW)
    assert np.array_equal(as_nifti[:][0], nifti[mask].T)
    assert np.array_equal(as_hdf5[:][0], hdf5[:, mask.T])
    assert not np.array_equal(as_nifti[:][0], as_hdf5[:][0])
    assert np.array_equal(as_nifti.voxels.index, np.flatnonzero(mask))
    assert np.array_equal(as_hdf5.voxels.mask, mask)


def test_minus_one_is_no_voxel(roots):
    labels = nibabel.load(f"{NSD(roots['voxel-major']).layout.regions}/nsdgeneral.nii.gz").get_fdata()
    assert len(NSD(roots["voxel-major"]).voxels("nsdgeneral")) == (labels > 0).sum() == 27 < (labels != 0).sum()


def test_values_go_back_where_they_were(roots):
    voxels = NSD(roots["voxel-major"]).voxels("V1")
    volume = voxels.volume(np.arange(len(voxels)) + 1)
    assert np.array_equal(volume.reshape(-1)[voxels.index], np.arange(len(voxels)) + 1)
    assert (volume > 0).sum() == len(voxels)


def test_regions_by_any_way_of_naming_them(roots):
    nsd = NSD(roots["voxel-major"])
    path = f"{nsd.layout.regions}/prf-visualrois.nii.gz"
    labels = nibabel.load(path).get_fdata()
    same = [
        (nsd.voxels("V1"), np.isin(labels, [1, 2])),
        (nsd.voxels("V1v"), labels == 1),
        (nsd.voxels("prf-visualrois:V1"), np.isin(labels, [1, 2])),
        (nsd.voxels("prf-visualrois:3"), labels == 3),
        (nsd.voxels(path), labels > 0),
        (nsd.voxels(labels == 2), labels == 2),
        (nsd.voxels(["V1", "hV4"]), np.isin(labels, [1, 2, 7])),
    ]
    for voxels, mask in same:
        assert np.array_equal(voxels.mask, mask)
    assert nsd.regions["streams"][4] == "ventral"


def test_names_of_labels_are_known_without_their_tables(root):
    nsd = NSD(root)
    before = nsd.voxels("streams:lateral").index
    for path in (root / "nsddata" / "freesurfer").rglob("*.ctab"):
        path.unlink()
    assert np.array_equal(NSD(root).voxels("streams:lateral").index, before)


def test_noise_ceiling(roots):
    nsd = NSD(roots["trial-major"])
    ceiling = nibabel.load(nsd.layout.noise_ceiling).get_fdata()
    mask = nibabel.load(f"{nsd.layout.regions}/nsdgeneral.nii.gz").get_fdata() > 0
    ds = nsd.dataset(min_ncsnr=0.2, **RAW)
    assert np.array_equal(ds.voxels.mask, mask & (ceiling >= 0.2))
    assert np.isnan(ceiling[mask]).any()
    assert np.array_equal(nsd.voxels(min_ncsnr=0.9).mask, ceiling >= 0.9)


def test_percent_of_signal_change(roots):
    nsd = NSD(roots["trial-major"])
    stored, percent = nsd.dataset(**RAW)[:][0], nsd.dataset(("voxels",))[:][0]
    assert percent.dtype == np.float32
    assert np.array_equal(percent, stored.astype(np.float32) / np.float32(300))
    assert nsd.dataset(("voxels",), dtype="float16").fields["voxels"].dtype == np.float16


# Z-scores.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["session", "run", "train"])
def test_zscores_equal_numpys(roots, layout, kind):
    nsd = NSD(roots[layout])
    raw = nsd.dataset(**RAW)[:][0] / 300.0
    trials = nsd.trials
    fitted = ~trials["shared1000"].to_numpy()
    ds = nsd.dataset(
        ("voxels",), split="shared1000/test", zscore=kind, zscore_fit="train" if kind == "train" else "all"
    )
    if kind != "train":
        fitted = np.ones(len(trials), bool)
    keys = {"session": trials["session"], "run": trials["session"] * 100 + trials["run"], "train": trials["subject"]}
    wanted = np.empty_like(raw)
    for key in keys[kind].unique():
        here = (keys[kind] == key).to_numpy()
        wanted[here] = (raw[here] - raw[here & fitted].mean(axis=0)) / raw[here & fitted].std(axis=0)
    np.testing.assert_allclose(ds[:][0], wanted[trials["shared1000"].to_numpy()], rtol=1e-4, atol=1e-5)


def test_zscores_by_default_never_see_the_shared_pictures(roots):
    nsd = NSD(roots["trial-major"])
    raw, trials = nsd.dataset(**RAW)[:][0] / 300.0, nsd.trials
    ds = nsd.dataset(("voxels",), split="shared1000/test", zscore="session")
    train = ~trials["shared1000"].to_numpy()
    first = (trials["session"] == 1).to_numpy()
    wanted = (raw - raw[first & train].mean(axis=0)) / raw[first & train].std(axis=0)
    got = ds[: (first & ~train).sum()][0]
    np.testing.assert_allclose(got, wanted[first & ~train], rtol=1e-4, atol=1e-5)


def test_voxels_that_do_not_vary_come_as_zero(root):
    nsd = NSD(root)
    x, y, z = nsd.voxels("nsdgeneral").coordinates[3]
    with h5py.File(nsd.layout.session(2, ".hdf5"), "r+") as file:
        file["betas"][:, z, y, x] = -32767
    ds = NSD(root).dataset(("voxels", "session"), zscore="session")
    voxels, session = ds[:]
    assert not voxels[session == 2][:, 3].any()
    assert voxels[session != 2][:, 3].all()
    assert np.isfinite(voxels).all()


def test_sessions_without_trials_to_fit_on_are_refused(roots):
    nsd = NSD(roots["trial-major"])
    own = (nsd.trials["session"] == 1).to_numpy()
    with pytest.raises(ConfigError, match=r'first being that of session 2, run 1: .*zscore_fit="all"'):
        nsd.dataset(zscore="session", zscore_fit=own)
    assert nsd.dataset(("voxels",), sessions=[1], zscore="session", zscore_fit=own)[0]


# Sessions that are missing, cut or odd.


def test_a_missing_session_is_told_and_the_others_work(root):
    os.remove(NSD(root).layout.session(2, ".hdf5"))
    nsd = NSD(root)
    assert nsd.sessions == (1, 3)
    assert any("sessions 2 of 3" in line and "betas_session02.hdf5" in line for line in nsd.missing)
    assert nsd.trials["session"].unique().tolist() == [1, 3]
    ds = nsd.dataset(**RAW)
    assert np.array_equal(ds[:][0], expected(nsd, ds.voxels.index, [1, 3]))
    with pytest.raises(Missing, match=r"sessions 2: .*betas_session02\.hdf5"):
        nsd.dataset(sessions=[1, 2])


def test_a_truncated_session_is_named(root):
    path = NSD(root).layout.session(3, ".hdf5")
    os.truncate(path, os.path.getsize(path) // 2)
    with pytest.raises(DataError, match=r"session 3: .*betas_session03\.hdf5.*pass sessions=\[1, 2\]"):
        NSD(root).dataset()
    ds = NSD(root).dataset(sessions=[1, 2])
    assert len(ds) == 48


def test_a_truncated_nifti_is_named(roots, tmp_path):
    synthesize(tmp_path, stored=None, nifti=True, stimuli=False)
    path = NSD(tmp_path).layout.session(3, ".nii.gz")
    os.truncate(path, os.path.getsize(path) // 2)
    ds = NSD(tmp_path).dataset(("voxels", "session"))
    with pytest.raises(DataError, match=r"betas_session03\.nii\.gz"):
        ds[:]


def test_a_nifti_that_is_none(tmp_path):
    bad = tmp_path / "betas_session01.nii.gz"
    bad.write_bytes(gzip.compress(b"x" * 1000))
    with pytest.raises(Corrupt, match="not a whole NIfTI header"):
        open_stored_volumes(str(bad), "betas", Files())


def test_no_trial_of_a_damaged_nifti_comes(tmp_path):
    """Its checksum stands at the end of the stream, behind the last trial, and covers the first one too."""
    synthesize(tmp_path, stored=None, nifti=True, stimuli=False)
    path = Path(NSD(tmp_path).layout.session(3, ".nii.gz"))
    data = bytearray(path.read_bytes())
    data[-8] ^= 1
    path.write_bytes(data)
    betas = open_stored_volumes(str(path), "betas", Files())
    out = {name: spec.empty(1) for name, spec in betas.fields.items()}
    with pytest.raises(Corrupt, match=r"betas_session03\.nii\.gz.*data check"):
        betas.read_into(np.array([0]), np.array([0]), out)


@pytest.mark.parametrize("offset", [np.nan, -1.0, 1e12])
def test_a_nifti_with_data_at_no_place(tmp_path, offset):
    synthesize(tmp_path, stored=None, nifti=True, stimuli=False)
    path = Path(NSD(tmp_path).layout.session(3, ".nii.gz"))
    data = bytearray(gzip.decompress(path.read_bytes()))
    data[108:112] = np.float32(offset).tobytes()
    path.write_bytes(gzip.compress(data, 1))
    with pytest.raises(DataError, match=r"betas_session03\.nii\.gz"):
        NSD(tmp_path).dataset(("voxels", "session"))[:]


def test_a_session_of_another_length_is_named(root):
    path = NSD(root).layout.session(2, ".hdf5")
    with h5py.File(path, "w") as file:
        file["betas"] = np.zeros((23, 6, 7, 5), np.int16)
    with pytest.raises(
        SchemaMismatch, match=r"betas_session02\.hdf5: has 23 trials, but .*betas_session01\.hdf5 has 24"
    ):
        NSD(root).dataset()


def test_a_region_of_another_space_is_refused(root):
    nibabel.save(nibabel.Nifti1Image(np.ones((5, 7, 9), np.float32), np.eye(4)), root / "other.nii.gz")
    with pytest.raises(
        SchemaMismatch,
        match=r"other\.nii\.gz: has shape \(5, 7, 9\), but .*brainmask\.nii\.gz has \(5, 7, 6\)",
    ):
        NSD(root).dataset(roi=str(root / "other.nii.gz"))
    os.remove(NSD(root).layout.brainmask)
    told = r"betas_session01\.hdf5: .*\(5, 7, 6\), but .*'other' \(.*other\.nii\.gz\) is of \(5, 7, 9\)"
    with pytest.raises(SchemaMismatch, match=told):
        NSD(root).dataset(roi=str(root / "other.nii.gz"))


def test_sessions_lying_in_the_root_itself(roots, tmp_path):
    source = NSD(roots["trial-major"])
    for session in (1, 2):
        (tmp_path / f"betas_session{session:02d}.hdf5").symlink_to(source.layout.session(session, ".hdf5"))
    os.symlink(roots["trial-major"] / "nsddata", tmp_path / "nsddata")
    ds = NSD(tmp_path).dataset(**RAW)
    assert np.array_equal(ds[:][0], expected(source, ds.voxels.index, [1, 2]))


def test_volumes_stored_as_x_y_z(roots, tmp_path):
    source = NSD(roots["trial-major"])
    os.symlink(roots["trial-major"] / "nsddata", tmp_path / "nsddata")
    for session in (1, 2, 3):
        with h5py.File(source.layout.session(session, ".hdf5")) as file:
            turned = file["betas"][:].transpose(0, 3, 2, 1)
        with h5py.File(tmp_path / f"betas_session{session:02d}.hdf5", "w") as file:
            file["betas"] = turned
    for roi in ("nsdgeneral", None):
        assert np.array_equal(NSD(tmp_path).dataset(roi=roi, **RAW)[:][0], source.dataset(roi=roi, **RAW)[:][0])


def test_float_betas_are_not_divided(roots, tmp_path):
    os.symlink(roots["trial-major"] / "nsddata", tmp_path / "nsddata")
    values = np.random.default_rng(0).normal(size=(24, 6, 7, 5)).astype(np.float32)
    for session in (1, 2, 3):
        with h5py.File(tmp_path / f"betas_session{session:02d}.hdf5", "w") as file:
            file["betas"] = values
    ds = NSD(tmp_path).dataset(("voxels",), roi=None)
    assert np.array_equal(ds[2][0], values[2].T)


# The compressed store keeps the protocol's promises.


def test_conformance_of_compressed_sessions(roots):
    nsd = NSD(roots["nifti"])
    whole = nsd.betas(None, [1])
    check_store(lambda: NSD(roots["nifti"]).betas(None, [1]).store, {"betas": whole[:]["betas"]})
    voxels = nsd.voxels("V1")
    some = nsd.betas(voxels, [1])
    check_store(lambda: nsd.betas(voxels, [1]).store, {"betas": some[:]["betas"]})


@pytest.mark.parametrize("layout", ["voxel-major", "nifti"])
def test_conformance_of_held_sessions(roots, layout):
    nsd = NSD(roots[layout])
    voxels = nsd.voxels("nsdgeneral")
    whole = nsd.betas(voxels)
    assert whole.store.blocks is not None
    check_store(lambda: HeldSessions(NSD(roots[layout]).betas(voxels).store), {"betas": whole[:]["betas"]})


def test_a_session_is_read_once_and_held(roots):
    store = NSD(roots["voxel-major"]).betas(NSD(roots["voxel-major"]).voxels("V1")).store
    held, reads = HeldSessions(store), []
    store.read_into = lambda rows, at, out: reads.append(rows.tolist()) or type(store).read_into(store, rows, at, out)
    out = {name: spec.empty(4) for name, spec in held.fields.items()}
    for rows in ([70, 1, 2, 71], [1, 1, 70, 49]):
        held.read_into(np.array(rows), np.arange(4), out)
    assert sorted(map(len, reads)) == [24, 24], "session 2 is not needed"
    assert held.index_bytes >= 72 * held.fields["betas"].row_bytes


def test_held_sessions_are_read_by_threads(roots, monkeypatch):
    """Each reader process would hold them once more."""
    ds = NSD(roots["voxel-major"]).dataset(("voxels", "coco"), reps="mean")
    for name, value in (("cores", lambda: 8), ("WORTH_BYTES", 0)):
        monkeypatch.setattr(f"penstock.loader.placement.{name}", value)
    assert ds.loader(4, memory="2GiB").plan.processes > 1
    monkeypatch.setattr("penstock.loader.placement.MOST_PROCESS_BYTES", 1)
    plan = ds.loader(4, memory="2GiB").plan
    assert plan.processes == 0
    assert "each process would hold" in plan.placement_note


# Copies by trial.


def test_copies_are_used_when_there_and_checked(root):
    before = NSD(root).dataset(**RAW)
    assert before.store.blocks is not None
    seen = []
    folder = NSD(root).prepare(progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == 72 * 27 * 2
    assert sorted(os.listdir(folder)) == ["subject.json", "subject.npy"]
    assert np.array_equal(np.load(f"{folder}/subject.npy"), before[:][0])
    after = NSD(root).dataset(**RAW)
    assert after.store.blocks is None
    assert np.array_equal(after[:][0], before[:][0])
    other = NSD(root).dataset(roi="V1", **RAW)
    assert other.store.blocks is not None


def test_preparing_goes_on_where_it_stopped(root, monkeypatch):
    nsd = NSD(root)

    class Stop(Exception):
        pass

    def stop(done, total):
        if done > total // 2:
            raise Stop

    with pytest.raises(Stop):
        nsd.prepare(progress=stop)
    (folder,) = list((root / "penstock").rglob("nsdgeneral*"))
    whole = len(np.load(folder / "subject.npy")) // 24
    assert 0 < whole < 3, "what is not whole takes no room"
    totals = []
    nsd.prepare(progress=lambda done, total: totals.append(total))
    assert set(totals) == {(3 - whole) * 24 * 27 * 2}, "what is whole is not copied again"
    ds = NSD(root).dataset(**RAW)
    assert np.array_equal(ds[:][0], expected(nsd, ds.voxels.index))
    assert sorted(os.listdir(folder)) == ["subject.json", "subject.npy"]


@pytest.mark.parametrize("seed", range(3))
def test_copies_are_right_whatever_came_before(root, seed):
    """Sessions copied in any order, added, outdated, and interrupted."""
    rng, paths = random.Random(seed), {s: NSD(root).layout.session(s, ".hdf5") for s in (1, 2, 3)}

    def stop(done, total):
        if done > total * rng.random():
            raise KeyboardInterrupt

    for _ in range(8):
        for session in rng.sample([1, 2, 3], rng.randint(0, 2)):
            with h5py.File(paths[session], "r+") as file:
                file["betas"][...] = file["betas"][:] + rng.randint(1, 9)
                file.create_dataset(f"note{len(file)}", data=np.zeros(5000))
        chosen, interrupted = rng.sample([1, 2, 3], rng.randint(1, 3)), rng.random() < 0.3
        with contextlib.suppress(KeyboardInterrupt):
            NSD(root).prepare(sessions=chosen, **({"progress": stop} if interrupted else {}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Stale)
            copies, raw = NSD(root).dataset(**RAW), NSD(root, prepared=root / "none").dataset(**RAW)
            assert np.array_equal(copies[:][0], raw[:][0])
    NSD(root).prepare()
    assert NSD(root).dataset(**RAW).store.blocks is None
    (path,) = (root / "penstock").rglob("subject.npy")
    assert np.load(path).shape == (72, 27), "rows of outdated copies are used again"


def test_two_processes_do_not_prepare_the_same_voxels_at_once(root):
    folder = Path(NSD(root).prepare(sessions=[1]))
    with open(folder / "subject.npy", "r+b") as file:
        assert locks.try_lock(file.fileno())
        with pytest.raises(ConvertFailed, match=r"subject\.npy: another process is preparing the same voxels"):
            NSD(root).prepare()
        NSD(root).prepare("V1")
    assert len(NSD(root).dataset(**RAW)) == 72
    NSD(root).prepare()
    assert np.load(folder / "subject.npy").shape == (72, 27)


def prepare_apart(root, sessions):
    """Copies of sessions as earlier versions made them: a file each."""
    folder = Path(NSD(root).prepare(sessions=sessions))
    rows, note = np.load(folder / "subject.npy"), json.loads((folder / "subject.json").read_text())
    for session in sessions:
        entry = note["sessions"][str(session)]
        first = entry.pop("first")
        np.save(folder / f"session{session:02d}.npy", rows[first : first + 24])
        (folder / f"session{session:02d}.json").write_text(json.dumps({"version": 1, **entry}))
    for name in ("subject.npy", "subject.json"):
        (folder / name).unlink()
    return folder


def test_copies_that_earlier_versions_made_are_used(root):
    before = NSD(root).dataset(**RAW)[:][0]
    folder = prepare_apart(root, [1, 2])
    assert np.array_equal(NSD(root).dataset(**RAW)[:][0], before)
    NSD(root).prepare()
    assert np.load(folder / "subject.npy").shape == (24, 27), "session 3 alone"
    for sessions in (None, [2, 3]):
        ds = NSD(root).dataset(sessions=sessions, **RAW)
        assert ds.store.blocks is None
        assert np.array_equal(ds[:][0], before[-len(ds) :])
    with h5py.File(NSD(root).layout.session(2, ".hdf5"), "r+") as file:
        file["betas"][...] = file["betas"][:] + 1
        file.create_dataset("note", data=np.zeros(5000))
    NSD(root).prepare()
    assert not (folder / "session02.npy").exists()
    assert np.array_equal(NSD(root).dataset(**RAW)[24:48][0], before[24:48] + 1)


def test_a_copy_of_another_source_is_left_aside(root):
    NSD(root).prepare()
    with h5py.File(NSD(root).layout.session(2, ".hdf5"), "r+") as file:
        file["betas"][...] = file["betas"][:] + 1
        file.create_dataset("note", data=np.zeros(5000))
    with pytest.warns(Stale, match=r"subject\.npy: was made of .*betas_session02\.hdf5 before that file changed"):
        ds = NSD(root).dataset(**RAW)
    assert (ds[24:48][0] == expected(NSD(root), ds.voxels.index, [2]) + 1).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NSD(root).prepare()
        NSD(root).dataset(**RAW)


def test_copies_of_another_subject_are_not_used(root, tmp_path):
    NSD(root, 1, prepared=tmp_path / "copies").prepare(None)
    other = NSD(root, 2, prepared=tmp_path / "copies")
    assert other.dataset(roi=None, **RAW).store.blocks is not None
    with pytest.raises(ConfigError, match=r"holds copies of subj01/func1pt8mm/.*name another folder for subj02/func"):
        other.prepare(None)
    for session in (1, 2):
        os.remove(other.layout.session(session, ".hdf5"))
    with pytest.raises(Missing, match="no betas of subject 2"):
        NSD(root, 2, prepared=tmp_path / "copies")
    assert NSD(root, 1, prepared=tmp_path / "copies").dataset(roi=None, **RAW).store.blocks is None


def test_copies_stand_for_sessions_that_are_gone(root):
    nsd = NSD(root)
    nsd.prepare()
    for session in nsd.sessions:
        os.remove(nsd.layout.session(session, ".hdf5"))
    ds = NSD(root).dataset(**RAW)
    assert np.array_equal(ds[:][0], expected(nsd, ds.voxels.index))
    with pytest.raises(Missing, match="only copies of other voxels are there, none of V1"):
        NSD(root).dataset(roi="V1")


@pytest.mark.parametrize("layout", ["voxel-major", "rechunked", "trial-major"])
def test_copies_made_part_by_part(tmp_path, layout, monkeypatch):
    made = fill.cut_array

    def cut_small(ds, name, options, room):
        """Parts of a few voxels, or of a few trials."""
        cut = made(ds, name, options, room)
        box = cut.box if ds.store.blocks is None else tuple(-(-n // 2) for n in cut.box)
        rows = 7 if ds.store.blocks is None else cut.rows
        return replace(cut, box=box, read_rows=rows, shard_rows=rows)

    monkeypatch.setattr(fill, "cut_array", cut_small)
    synthesize(tmp_path, stored=layout, stimuli=False)
    nsd = NSD(tmp_path)
    nsd.prepare()
    nsd.prepare(None)
    ds = NSD(tmp_path).dataset(**RAW)
    assert np.array_equal(ds[:][0], expected(nsd, ds.voxels.index))
    whole = NSD(tmp_path).dataset(roi=None, **RAW)[:][0]
    assert np.array_equal(whole.reshape(72, -1), expected(nsd, np.arange(TINY.voxels)))


def test_preparing_refuses(root, monkeypatch):
    with pytest.raises(BudgetExceeded, match=r"memory=1\.00 MiB is too small: the smallest that works is"):
        NSD(root).prepare(memory="1MiB")
    (root / "taken").write_text("a file")
    with pytest.raises(ConfigError, match="prepared=folder"):
        NSD(root, prepared=root / "taken" / "x").prepare()


# What is refused, and how.


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"roi": "V5"}, r"fetch .*roi/V5\.nii\.gz\. There are: nsdgeneral; prf-visualrois \(V1v"),
        ({"roi": "nsdgenral"}, r"no such region. Did you mean 'nsdgeneral'\?"),
        ({"roi": "v1D"}, r"no such region. Did you mean 'V1d'\?"),
        ({"roi": "streams:ventrall"}, r"no such label. Did you mean 'streams:ventral'\?"),
        ({"roi": "stream:ventral"}, r"no such region. Did you mean 'streams:ventral'\?"),
        ({"roi": "streams:dorsal"}, "Labels of streams: Unknown, early"),
        ({"roi": np.zeros((5, 7, 6), bool)}, "selects no voxel"),
        ({"roi": np.ones((6, 7, 5), bool)}, r"pass mask\.T"),
        ({"roi": np.ones((5, 7, 6))}, "labels > 0"),
        ({"voxel_order": "matlab"}, '"nifti" or "hdf5"'),
        ({"zscore": "week"}, '"session", "run", "train" or None'),
        ({"zscore": "session", "dtype": "int16"}, "z-scores need a float"),
        ({"zscore_fit": "some", "zscore": "run"}, '"own", "train", "all"'),
        ({"roi": ["V1", None]}, "roi=None: expected a region's name"),
        ({"roi": 5}, "roi=5: expected a region's name"),
        ({"min_ncsnr": "high"}, "min_ncsnr='high': expected a number"),
        ({"sessions": 2}, "sessions=2: expected their numbers"),
        ({"sessions": ["2"]}, "sessions='2': expected whole numbers"),
        ({"context": 3}, "context=3: expected how many trials before"),
        ({"where": 3}, "where=3: expected a dict"),
        ({"split": "random-50/train", "split_seed": -1}, "split_seed=-1: expected a whole number"),
        ({"dtype": "uint8"}, "dtype=uint8: cannot hold all values of int16"),
        ({"extra": "clip.npy"}, "extra='clip.npy': expected arrays by name"),
        ({"extra": {"clip": {"a": 1}}, "columns": ("clip",)}, r"keys \['a'\]: expected the numbers of pictures"),
        ({"images": 5}, r"images=5: expected where pictures are, .* Pictures\(size=224"),
        ({"roi": []}, r"roi=\[\]: expected at least one region"),
        ({"roi": "nsdgeneral.nii.gz"}, "no such file; for the region of the release, pass 'nsdgeneral'"),
        ({"split": "random-100/train"}, "no such split; there are .*, with .* a percentage P from 1 to 99"),
    ],
    ids=str,
)
def test_refusals(roots, options, told):
    with pytest.raises((ConfigError, Missing), match=told):
        NSD(roots["voxel-major"]).dataset(**options)


def test_a_wrong_root_is_explained(roots, tmp_path):
    with pytest.raises(Missing, match="no such folder; expected the folder that holds nsddata_betas"):
        NSD(tmp_path / "nowhere")
    with pytest.raises(Missing, match="is a file; expected the folder that holds nsddata_betas"):
        NSD(NSD(roots["voxel-major"]).layout.design)
    with pytest.raises(Missing, match="nowhere: no such folder"):
        subjects(tmp_path / "nowhere")
    with pytest.raises(Missing, match=r"There is no nsddata_betas in .*, which has: nothing"):
        NSD(tmp_path)
    with pytest.raises(Missing, match=r"There is no subj03 in .*ppdata, which has: subj01, subj02"):
        NSD(roots["voxel-major"], 3)
    with pytest.raises(Missing, match=r"There is no func1mm in .*, which has: func1pt8mm"):
        NSD(roots["voxel-major"], space="func1mm")
    with pytest.raises(Missing, match=r"There is no betas_fithrf in .*, which has: betas_fithrf_GLMdenoise_RR"):
        NSD(roots["voxel-major"], betas="b2")
    with pytest.raises(ConfigError, match="from 1 to 8"):
        NSD(roots["voxel-major"], 9)
    with pytest.raises(ConfigError, match="root=5: expected a path"):
        NSD(5)
    with pytest.raises(ConfigError, match="space=None: expected the name of a folder"):
        NSD(roots["voxel-major"], space=None)
    with pytest.raises(ConfigError, match="images: size=0: expected a whole number, at least 1"):
        Pictures(size=0)


@pytest.mark.parametrize("inner", ["nsddata_betas", "nsddata_betas/ppdata/subj02", "nsddata/experiments", ".."])
def test_a_root_that_is_too_deep_or_too_high_names_the_right_one(root, inner):
    with pytest.raises(Missing, match=rf"nsddata_betas is in {root}: pass that folder as root"):
        NSD(os.path.normpath(root / inner))


def test_a_folder_of_betas_is_not_taken_for_a_root(roots):
    """Its sessions would be taken for those of subject 1."""
    folder = NSD(roots["voxel-major"], 2).layout.beta_folder
    with pytest.raises(ConfigError, match=rf"root='{folder}': .*Pass NSD\('.*', 2, 'func1pt8mm', 'betas_fithrf_GLM"):
        NSD(folder)
    assert len(NSDDataset(folder)) == 48
    with pytest.raises(ConfigError, match=r"subject=1: but .* is a folder of subject 2"):
        NSDDataset(folder, subject=1)


def test_a_subject_with_surfaces_alone(root):
    space = root / "nsddata_betas" / "ppdata" / "subj01" / "func1pt8mm"
    space.rename(space.with_name("fsaverage"))
    with pytest.raises(Missing, match=r"which has: fsaverage\. Betas on surfaces \(fsaverage\) are not read"):
        NSD(root)


def test_larger_than_one_read(tmp_path):
    scale = Scale((12, 14, 13), 60, 3, {1: 3}, region_voxels=400)
    synthesize(tmp_path, scale, stimuli=False)
    nsd = NSD(tmp_path)
    ds = nsd.dataset(**RAW)
    betas = Betas(scale, 1)
    assert not betas.exact
    wanted = np.concatenate([betas.values(session, np.arange(60), ds.voxels.index) for session in (1, 2, 3)])
    with ds.loader(16, shuffle=True, memory="64MiB", columns=("voxels", "__index__"), output="numpy") as loader:
        for voxels, rows in loader:
            assert np.array_equal(voxels, wanted[rows])
