"""The trial table: ids from 0, the same whoever tells them, and an error where they do not agree."""

import csv
import os
from pathlib import Path

import numpy as np
import pandas
import pytest
import scipy.io

from penstock.errors import Corrupt, Missing, SchemaMismatch
from penstock.nsd import NSD, regions
from penstock.nsd import trials as reading
from penstock.nsd.synthetic import SCALES, Experiment

TINY = SCALES["tiny"]
SOURCES = ("design", "stim_info", "responses")


@pytest.mark.parametrize("subject", [1, 2])
def test_ids_agree_across_mat_csv_and_tsv(roots, subject):
    nsd = NSD(roots["voxel-major"], subject)
    trials = nsd.trials
    assert len(trials) == 24 * TINY.sessions[subject]
    planned = Experiment(TINY).stimuli(subject)[: len(trials)]
    with open(nsd.layout.responses) as file:
        told = [int(row["73KID"]) - 1 for row in csv.DictReader(file, delimiter="\t")]
    assert trials["stim_id"].tolist() == planned.tolist() == told
    assert (trials["cocoId"] == 9 + 7 * trials["stim_id"]).all()
    assert trials["global_trial"].tolist() == list(range(len(trials)))
    assert (trials["session"] == trials["global_trial"] // 24 + 1).all()
    assert (trials["trial_in_session"] == trials["global_trial"] % 24).all()


def test_repetitions_are_counted(roots):
    for subject, seen in ((1, {3}), (2, {0, 1, 2, 3})):
        trials = NSD(roots["voxel-major"], subject).trials
        for _, shown in trials.groupby("stim_id"):
            assert shown["rep"].tolist() == list(range(len(shown)))
            assert (shown["n_reps"] == len(shown)).all()
        assert set(trials["n_reps"]) <= seen
    counts = NSD(roots["voxel-major"], 2).trials.groupby("stim_id").size()
    assert len(counts) < TINY.images or counts.min() < 3


@pytest.mark.parametrize("kept", [("design",), ("stim_info",), ("responses",), ("design", "responses")], ids=str)
def test_any_of_the_sources_will_do(root, kept):
    whole = NSD(root, 2).trials
    layout = NSD(root, 2).layout
    for name in set(SOURCES) - set(kept):
        os.remove(getattr(layout, name))
    nsd = NSD(root, 2)
    for column in ("session", "run", "trial_in_run", "trial_in_session", "stim_id", "rep", "n_reps"):
        assert nsd.trials[column].tolist() == whole[column].tolist(), column
    if kept != ("responses",):
        assert nsd.trials["shared1000"].tolist() == whole["shared1000"].tolist()
    assert ("rt" in nsd.trials) == ("responses" in kept)
    assert ("cocoId" in nsd.trials) == ("stim_info" in kept)
    assert len(nsd.missing) == 3 - len(kept)


def test_doubles_in_the_design_will_do(root):
    path = NSD(root).layout.design
    before = NSD(root).trials
    found = {name: value.astype(float) for name, value in scipy.io.loadmat(path).items() if name[0] != "_"}
    scipy.io.savemat(path, found)
    os.remove(NSD(root).layout.responses)
    assert NSD(root).trials["stim_id"].tolist() == before["stim_id"].tolist()


def test_without_any_source_it_is_told(root):
    layout = NSD(root).layout
    for name in SOURCES:
        os.remove(getattr(layout, name))
    with pytest.raises(Missing, match=r"responses\.tsv.*nsd_expdesign\.mat.*nsd_stim_info_merged\.csv.*none of them"):
        _ = NSD(root).trials


def test_sources_that_disagree_are_named(root):
    layout = NSD(root).layout
    text = Path(layout.responses).read_text().splitlines()
    words = text[31].split("\t")
    words[4] = str(int(words[4]) % 164 + 1)
    text[31] = "\t".join(words)
    with open(layout.responses, "w") as file:
        file.write("\n".join(text))
    with pytest.raises(SchemaMismatch, match=r"trial 30 \(from 0\) of subject 1 showed picture"):
        _ = NSD(root).trials


def test_answers_of_fewer_trials_than_betas_are_named(root):
    path = NSD(root).layout.responses
    lines = Path(path).read_text().splitlines()
    with open(path, "w") as file:
        file.write("\n".join(lines[:1] + lines[2:]))
    with pytest.raises(SchemaMismatch, match=r"responses\.tsv: row 23 belongs to session 2"):
        _ = NSD(root).trials


def test_tables_that_are_none(root):
    layout = NSD(root).layout
    for path, words in (
        (layout.responses, "a\tb\n1\t2\n"),
        (layout.stim_info, ",x\n0,1\n"),
        (layout.design, "nothing"),
    ):
        kept = Path(path).read_bytes()
        with open(path, "w") as file:
            file.write(words)
        with pytest.raises(Corrupt, match=os.path.basename(path)):
            _ = NSD(root).trials
        with open(path, "wb") as file:
            file.write(kept)


def test_what_was_not_answered_is_nan(roots):
    trials = NSD(roots["voxel-major"]).trials
    assert trials["rt"].isna().any()
    assert trials["rt"].notna().any()
    assert np.isfinite(trials["time"]).all()


def test_small_files_are_parsed_once(root, monkeypatch):
    nsd = NSD(root)
    trials, voxels = nsd.trials, nsd.voxels("V1", min_ncsnr=0.1)

    def refuse(*_, **__):
        raise AssertionError("parsed again")

    for module, name in (
        (reading, "read_columns"),
        (reading, "loadmat"),
        (regions, "load_nifti"),
        (regions, "nifti_shape"),
    ):
        monkeypatch.setattr(module, name, refuse)
    again = NSD(root)
    pandas.testing.assert_frame_equal(again.trials, trials)
    assert np.array_equal(again.voxels("V1", min_ncsnr=0.1).index, voxels.index)
    for path, use in (
        (nsd.layout.responses, lambda: NSD(root).trials),
        (nsd.layout.design, lambda: NSD(root).trials),
        (nsd.layout.stim_info, lambda: NSD(root).trials),
        (f"{nsd.layout.regions}/prf-visualrois.nii.gz", lambda: NSD(root).voxels("V1")),
        (nsd.layout.brainmask, lambda: NSD(root).voxels("V1")),
    ):
        about = os.stat(path)
        os.utime(path)
        with pytest.raises(AssertionError, match="parsed again"):
            use()
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert len(NSD(root).trials) == len(trials)
