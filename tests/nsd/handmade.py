"""A release made by hand, without ``synthesize``: other sizes, random betas, repeats that cluster, several subjects.

Everything that the published procedures read is kept here as arrays, so that they can be retyped on it.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pandas
import scipy.io

VOLUME = (6, 4, 5)
TRIALS = 36
PLANNED = 40
PICTURES = TRIALS * PLANNED // 3
SHARED = 60
DONE = {3: 32, 5: 40}
LAST_PUBLIC = {3: 29, 5: 37}
"""Sessions that brain-diffuser and MindEye could read: all but the last three."""
BETAS = "betas_fithrf_GLMdenoise_RR"


def place(root, *names):
    path = Path(root, *names)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@dataclass(frozen=True)
class Handmade:
    """One subject."""

    root: Path
    subject: int
    present: int
    """Sessions on disk: 1 to this."""

    @cached_property
    def design(self):
        """``nsd_expdesign.mat``: numbers from 1. Two of three showings of a picture are close together."""
        rng = np.random.default_rng(77)
        first = rng.uniform(0, 1, PICTURES)
        when = np.stack([first, first + rng.exponential(0.01, PICTURES), rng.uniform(0, 1, PICTURES)], axis=1)
        shared = np.sort(rng.choice(PICTURES * 8, SHARED, replace=False)) + 1
        others = rng.permutation(np.setdiff1d(np.arange(1, PICTURES * 8 + 1), shared))[: 8 * (PICTURES - SHARED)]
        own = others.reshape(8, -1)
        return {
            "masterordering": (np.argsort(when, axis=None) // 3 + 1)[None].astype(np.uint16),
            "subjectim": np.concatenate([np.tile(shared, (8, 1)), own], axis=1).astype(np.int32),
            "sharedix": shared[None].astype(np.int32),
        }

    @cached_property
    def shown(self):
        """The picture of each planned trial, from 0, as brain-diffuser computes it."""
        order = self.design["masterordering"].squeeze().astype(int)
        return self.design["subjectim"][self.subject - 1].astype(int)[order - 1] - 1

    @cached_property
    def is_shared(self):
        return self.design["masterordering"].squeeze() <= SHARED

    @cached_property
    def mask(self):
        labels = np.random.default_rng([self.subject, 1]).integers(-1, 2, VOLUME)
        labels[2, 3, 4] = 1
        return labels.astype(np.float32)

    @cached_property
    def nifti(self):
        """(sessions, X, Y, Z, trials): what nibabel reads, session by session."""
        rng = np.random.default_rng([self.subject, 2])
        done = DONE[self.subject]
        level, spread = rng.normal(0, 400, (done, *VOLUME, 1)), rng.uniform(50, 900, (1, *VOLUME, 1))
        values = level + spread * rng.normal(size=(done, *VOLUME, TRIALS))
        return np.clip(np.rint(values), -32767, 32767).astype(np.int16)

    @cached_property
    def masked(self):
        """(trials, voxels) of the sessions on disk, in the order of ``nifti[mask > 0]``."""
        return np.concatenate([self.nifti[number][self.mask > 0].T for number in range(self.present)])

    @cached_property
    def behaviour(self):
        """``responses.tsv`` of all sessions that were done."""
        rng = np.random.default_rng([self.subject, 3])
        trials = np.arange(DONE[self.subject] * TRIALS)
        run = trials % TRIALS // 3
        table = {
            "SUBJECT": self.subject, "SESSION": trials // TRIALS + 1, "RUN": run + 1, "TRIAL": trials % 3 + 1,
            "73KID": self.shown[trials] + 1, "10KID": self.design["masterordering"].squeeze()[trials],
            "TIME": 0.5 + trials / 7, "ISOLD": rng.integers(0, 2, len(trials)),
        }  # fmt: skip
        for name in (
            "ISCORRECT", "RT", "CHANGEMIND", "MEMORYRECENT", "MEMORYFIRST", "ISOLDCURRENT", "ISCORRECTCURRENT",
            "TOTAL1", "TOTAL2", "BUTTON",
        ):  # fmt: skip
            column = np.round(rng.uniform(0, 9, len(trials)), 2)
            column[rng.random(len(trials)) < 0.1] = np.nan
            table[name] = column
        return pandas.DataFrame({**table, "MISSINGDATA": 0})

    def write(self):
        name = f"subj{self.subject:02d}"
        scipy.io.savemat(place(self.root, "nsddata", "experiments", "nsd", "nsd_expdesign.mat"), self.design)
        responses = place(self.root, "nsddata", "ppdata", name, "behav", "responses.tsv")
        self.behaviour.to_csv(responses, sep="\t", index=False, na_rep="NaN")
        region = place(self.root, "nsddata", "ppdata", name, "func1pt8mm", "roi", "nsdgeneral.nii.gz")
        nibabel.save(nibabel.Nifti1Image(self.mask, np.eye(4)), region)
        for number in range(self.present):
            folder = ("nsddata_betas", "ppdata", name, "func1pt8mm", BETAS)
            with h5py.File(place(self.root, *folder, f"betas_session{number + 1:02d}.hdf5"), "w") as file:
                file.create_dataset("betas", data=self.nifti[number].T, chunks=(TRIALS, 1, 1, 1))
        return self


def handmade(folder, subject, present):
    """A release with this many sessions of this subject."""
    return Handmade(Path(os.fspath(folder)), subject, present).write()
