"""What published code computes, retyped on a release made by hand and compared number by number.

The procedures: brain-diffuser's preparation and normalization, MindEye's and MindEye2's stacks, MindEye2's dataset
creation, nsd_access's reading of betas and behaviour. Downloads end after 5 or 15 sessions, or are whole. Sessions are
stored by voxel, as released; nothing is prepared.
"""

import numpy as np
import pytest
import torch
from tests.nsd.handmade import DONE, LAST_PUBLIC, PLANNED, TRIALS, handmade

from penstock.nsd import NSD, get_dataloaders, zscore

DOWNLOADS = [(subject, sessions) for subject, done in DONE.items() for sessions in (5, 15, done)]


@pytest.fixture(scope="module")
def releases(tmp_path_factory):
    """(subject, sessions on disk) -> a release."""
    return {(s, count): handmade(tmp_path_factory.mktemp(f"subj{s}-{count}"), s, count) for s, count in DOWNLOADS}


@pytest.fixture(params=DOWNLOADS, ids=lambda download: f"subj{download[0]}-{download[1]}")
def release(request, releases):
    return releases[request.param]


def opened(release):
    return NSD(release.root, release.subject)


# nsd_access.


def test_volumes_and_behaviour(release):
    nsd = opened(release)
    volumes = nsd.dataset(("voxels", "session", "trial_in_session"), roi=None, dtype="int16")
    for row in range(0, len(volumes), 29):
        voxels, session, trial = volumes[row]
        assert np.array_equal(voxels, release.nifti[session - 1][..., trial])
    for session in nsd.sessions:
        theirs = release.behaviour[release.behaviour["SESSION"] == session]
        ours = nsd.trials[nsd.trials["session"] == session]
        for name in ("ISOLD", "ISCORRECT", "RT", "TIME", "BUTTON", "MEMORYFIRST"):
            np.testing.assert_array_equal(ours[name.lower()], theirs[name])
        np.testing.assert_array_equal(ours["stim_id"], theirs["73KID"] - 1)
        np.testing.assert_array_equal(ours[["run", "trial_in_run"]], theirs[["RUN", "TRIAL"]])


# brain-diffuser.


def brain_diffuser(release):
    """Part -> pictures in the order of their first trial, means of their trials, and these normalized."""
    count = min(release.present, LAST_PUBLIC[release.subject]) * TRIALS
    trials = {"train": {}, "test": {}}
    for trial in range(count):
        part = "test" if release.is_shared[trial] else "train"
        trials[part].setdefault(int(release.shown[trial]), []).append(trial)
    means = {
        part: np.stack([release.masked[sorted(rows)].astype(np.float64).mean(axis=0) for rows in found.values()]) / 300
        for part, found in trials.items()
    }
    centre, scale = means["train"].mean(axis=0), means["train"].std(axis=0, ddof=1)
    return {part: (list(trials[part]), means[part], (means[part] - centre) / scale) for part in trials}


@pytest.mark.parametrize("part", ["train", "test"])
def test_means_as_brain_diffuser_prepares_them(release, part):
    pictures, means, normalized = brain_diffuser(release)[part]
    options = {"split": f"mindeye1/{part}", "reps": "mean"}
    voxels, coco = opened(release).dataset(("voxels", "coco"), **options)[:]
    assert coco.tolist() == pictures
    np.testing.assert_allclose(voxels, means, rtol=1e-5, atol=1e-6)
    voxels, coco = opened(release).dataset(("voxels", "coco"), zscore="train", zscore_when="after", **options)[:]
    assert coco.tolist() == pictures
    np.testing.assert_allclose(voxels, normalized, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("roi", ["nsdgeneral", None])
@pytest.mark.parametrize("sums_bytes", [1, 9000])
def test_moments_of_means_are_fitted_part_by_part(releases, monkeypatch, roi, sums_bytes):
    release = releases[5, 15]
    options = {"split": "mindeye1/test", "reps": "mean", "zscore": "train", "zscore_when": "after", "roi": roi}
    wanted = opened(release).dataset(("voxels",), **options)[:][0]
    monkeypatch.setattr(zscore, "SUMS_BYTES", sums_bytes)
    assert np.array_equal(opened(release).dataset(("voxels",), **options)[:][0], wanted)


# MindEye and MindEye2.


def session_scores(release, rows):
    """Z-scores per session, fitted on these trials: scikit-learn's StandardScaler."""
    scores, session = np.empty(release.masked.shape), np.arange(len(release.masked)) // TRIALS
    for number in np.unique(session):
        fitted = release.masked[(session == number) & rows].astype(np.float64)
        centre, scale = fitted.mean(axis=0), fitted.std(axis=0)
        scores[session == number] = (release.masked[session == number] - centre) / np.where(scale == 0, 1, scale)
    return scores


@pytest.mark.parametrize("fit", ["all", "train"])
def test_scores_as_mindeye2_makes_them(release, fit):
    """Its published notebook fits on all trials, its paper without the shared pictures."""
    here = np.arange(len(release.masked))
    wanted = session_scores(release, np.ones(len(here), bool) if fit == "all" else ~release.is_shared[here])
    for part, rows in (("train", ~release.is_shared[here]), ("test", release.is_shared[here])):
        options = {"zscore": "session", "zscore_fit": fit, "dtype": "float16"}
        voxels, trial = opened(release).dataset(("voxels", "trial"), split=f"mindeye2/{part}", **options)[:]
        assert trial.tolist() == np.flatnonzero(rows).tolist()
        np.testing.assert_allclose(voxels, wanted[rows].astype(np.float16), rtol=1e-3, atol=1e-3)


def behaviour_line(release, trial):
    """The 17 numbers of a trial, in MindEye2's order; -1 for NaN."""
    row = release.behaviour.iloc[trial]
    plain = [row["73KID"] - 1, release.subject, row["SESSION"], row["RUN"], row["TRIAL"], trial, int(row["TIME"])]
    names = ("ISOLD", "ISCORRECT", "RT", "CHANGEMIND", "ISOLDCURRENT", "ISCORRECTCURRENT", "TOTAL1", "TOTAL2", "BUTTON")
    return [*plain, *(-1 if np.isnan(row[name]) else row[name] for name in names), release.is_shared[trial]]


def behaviour_lines(release, trials, count):
    lines = [behaviour_line(release, trial) for trial in trials]
    return np.array(lines + [[-1] * 17] * (count - len(lines)), np.float64)


def test_behaviour_as_mindeye2_stores_it(release):
    """The other trials of a picture are those of the whole experiment, whatever sessions were downloaded."""
    done = release.shown[: len(release.behaviour)]
    columns = ("trial", "behav", "past_behav", "future_behav", "olds_behav")
    ds = opened(release).dataset(columns, split="mindeye2/train")
    for row in [*range(0, len(ds), 61), len(ds) - 1]:
        trial, behav, past, future, olds = ds[row]
        begin, end = trial // TRIALS * TRIALS, trial // TRIALS * TRIALS + TRIALS
        assert np.array_equal(behav, behaviour_lines(release, [trial], 1))
        before = [trial - back for back in range(1, 16) if trial - back >= begin]
        assert np.array_equal(past, behaviour_lines(release, before, 15))
        assert np.array_equal(future, behaviour_lines(release, range(trial + 1, min(end, trial + 16)), 15))
        others = [other for other in np.flatnonzero(done == done[trial]) if other != trial]
        assert np.array_equal(olds, behaviour_lines(release, others, 3))


@pytest.mark.parametrize("padding", ["mindeye1", "mindeye2"])
def test_stacks(release, padding):
    """Three rows per picture: of two trials [a, b], MindEye makes [a, b, their mean] and MindEye2 [a, b, a]."""
    here = np.arange(len(release.masked))
    scores = session_scores(release, ~release.is_shared[here])
    options = {"reps": "stack", "stack_padding": padding, "zscore": "session", "dtype": "float16"}
    ds = opened(release).dataset(("voxels", "coco", "reps", "trial"), split="shared1000/test", **options)
    seen = set()
    for voxels, coco, reps, trial in (ds[row] for row in range(len(ds))):
        trials = torch.tensor(np.flatnonzero(release.shown[here] == coco))
        assert (reps, trial) == (len(trials), trials[0])
        seen.add(int(reps))
        if padding == "mindeye2":
            trials = trials.repeat(3) if len(trials) == 1 else trials.repeat(2)[:3] if len(trials) == 2 else trials
            wanted = scores[trials.numpy()]
        else:
            found = list(scores[trials.numpy()])
            wanted = np.stack(found * 3 if len(found) == 1 else [*found, np.mean(found, axis=0)][:3])
        np.testing.assert_allclose(voxels, wanted, rtol=2e-3, atol=2e-3)
    assert len(ds) == len(np.unique(release.shown[here][release.is_shared[here]]))
    assert seen == {3} if release.present == PLANNED else len(seen) > 1


def test_mindeyes_loaders(release):
    """Its tuples and its counts: pictures of the first release, each with the number of trials that are stacked."""
    count = min(release.present, LAST_PUBLIC[release.subject]) * TRIALS
    shown, shared = release.shown[:count], release.is_shared[:count]
    columns = ("voxels", "trial", "coco", "reps")
    loaders = get_dataloaders(7, root=release.root, subj=release.subject, to_tuple=columns, memory="64MiB")
    scores = session_scores(release, ~release.is_shared[: len(release.masked)])
    for loader, number, chosen in zip(loaders[:2], loaders[2:], (~shared, shared), strict=True):
        assert number == len(np.unique(shown[chosen]))
        got = [[column[row].numpy() for column in batch] for batch in loader for row in range(len(batch[0]))]
        assert sorted(int(coco[0]) for _, _, coco, _ in got) == np.unique(shown[chosen]).tolist()
        for voxels, trial, coco, reps in got:
            trials = np.flatnonzero(shown == coco[0])
            assert (trial.tolist(), reps.tolist()) == ([trials[0]], [len(trials)])
            np.testing.assert_allclose(voxels[0], scores[trials[0]], rtol=2e-3, atol=2e-3)
        loader.close()


# Splits.


def chosen_by_design(release, split):
    """Which of all planned trials belong to a split, by its published definition."""
    name, part = split.split("/")
    session, shared = np.arange(len(release.shown)) // TRIALS + 1, release.is_shared
    public = session <= LAST_PUBLIC[release.subject]
    counts = np.bincount(release.shown[session <= 30], minlength=release.shown.max() + 1)
    thrice = counts[release.shown] == 3
    return {
        "shared1000/train": ~shared, "shared1000/test": shared, "mindeye2/train": ~shared, "mindeye2/test": shared,
        "mindeye1/train": ~shared & public, "mindeye1/test": shared & public, "berg/train": ~shared,
        "berg/val": shared & ~thrice, "berg/test": shared & thrice, "first-3/train": ~shared & (session <= 3),
        "first-3/test": shared,
    }[f"{name}/{part}"]  # fmt: skip


@pytest.mark.parametrize("name", ["shared1000", "mindeye1", "mindeye2", "berg", "first-3"])
def test_published_splits(release, name):
    for part in ("train", "val", "test") if name == "berg" else ("train", "test"):
        wanted = np.flatnonzero(chosen_by_design(release, f"{name}/{part}")[: len(release.masked)])
        got = opened(release).dataset(("trial",), split=f"{name}/{part}")[:][0]
        assert got.tolist() == wanted.tolist()


@pytest.mark.parametrize("subject", DONE)
@pytest.mark.parametrize("split", ["random-80/train", "random-80/test", "mindeye1-val/train", "mindeye1-val/val"])
@pytest.mark.parametrize("seed", [0, 9])
def test_drawn_splits_stay_when_sessions_are_added(releases, subject, split, seed):
    whole = opened(releases[subject, DONE[subject]]).dataset(("trial",), split=split, split_seed=seed)[:][0]
    for sessions in (5, 15):
        got = opened(releases[subject, sessions]).dataset(("trial",), split=split, split_seed=seed)[:][0]
        assert got.tolist() == whole[whole < sessions * TRIALS].tolist()


@pytest.mark.parametrize("split", ["random-80", "mindeye1-val", "mindeye1", "first-3"])
@pytest.mark.parametrize("zscore", ["train", "session"])
def test_scores_are_not_fitted_on_what_is_held_out(release, split, zscore):
    nsd = opened(release)
    parts = {"train", "test"} | ({"val"} if split == "mindeye1-val" else set())
    rows = {part: nsd.dataset(("trial",), split=f"{split}/{part}")[:][0] for part in parts}
    fitted = rows["train"]
    if zscore == "session":  # all sessions, also those that the split does not train on
        held_out = np.concatenate([release.shown[rows[part]] for part in parts - {"train"}])
        here = release.shown[: len(release.masked)]
        trained = np.isin(here, here[rows["train"]]) | ~release.is_shared[: len(here)]
        fitted = np.flatnonzero(~np.isin(here, held_out) & trained)
    flags = np.isin(np.arange(len(release.masked)), fitted)
    if zscore == "session":
        wanted = session_scores(release, flags)
    else:
        centre, scale = release.masked[flags].mean(axis=0), release.masked[flags].astype(np.float64).std(axis=0)
        wanted = (release.masked - centre) / scale
    for part, chosen in rows.items():
        voxels = nsd.dataset(("voxels",), split=f"{split}/{part}", zscore=zscore)[:][0]
        np.testing.assert_allclose(voxels, wanted[chosen], rtol=1e-3, atol=1e-4)
