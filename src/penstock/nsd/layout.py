"""Where the files of the release are, and what they are called. Names only: nothing is opened here."""

import os
import re

from penstock.base.dataclass import dataclass

SUBJECTS = range(1, 9)
SESSIONS = {1: 40, 2: 40, 3: 32, 4: 30, 5: 40, 6: 32, 7: 40, 8: 30}
"""Sessions that each subject did."""
RUNS = 12
REPS = 3
"""Times each picture was planned to be shown."""

FIELD = "betas"
"""The dataset in a session file."""
SCALE = 300
"""Betas are stored as whole numbers: 300 is one percent of signal change."""

BETAS = {
    "b1": "betas_assumehrf",
    "b2": "betas_fithrf",
    "b3": "betas_fithrf_GLMdenoise_RR",
}
"""Short names of the versions of betas."""

EXPERIMENT = os.path.join("nsddata", "experiments", "nsd")
DESIGN = os.path.join(EXPERIMENT, "nsd_expdesign.mat")
STIM_INFO = os.path.join(EXPERIMENT, "nsd_stim_info_merged.csv")
STIMULI = os.path.join("nsddata_stimuli", "stimuli", "nsd", "nsd_stimuli.hdf5")
COCO_224 = "coco_images_224_float16.hdf5"


@dataclass(frozen=True)
class SubjectLayout:
    """The files of one subject under one root."""

    root: str
    subject: int
    space: str
    betas: str

    @classmethod
    def of_folder(cls, folder: str) -> "SubjectLayout":
        """Of a root, or of a folder of betas in one: ``…/nsddata_betas/ppdata/subj01/func1pt8mm/betas_fithrf``."""
        names = os.path.normpath(folder).split(os.sep)
        if names[-5:-3] == ["nsddata_betas", "ppdata"] and (found := re.fullmatch(r"subj0(\d)", names[-3])):
            return cls(os.sep.join(names[:-5]) or os.curdir, int(found[1]), names[-2], names[-1])
        return cls(folder, 1, "func1pt8mm", BETAS["b3"])

    @property
    def name(self) -> str:
        return f"subj{self.subject:02d}"

    @property
    def design(self) -> str:
        return os.path.join(self.root, DESIGN)

    @property
    def stim_info(self) -> str:
        return os.path.join(self.root, STIM_INFO)

    @property
    def stimuli(self) -> str:
        return os.path.join(self.root, STIMULI)

    @property
    def responses(self) -> str:
        return os.path.join(self.root, "nsddata", "ppdata", self.name, "behav", "responses.tsv")

    @property
    def functional(self) -> str:
        """Masks and regions in this space."""
        return os.path.join(self.root, "nsddata", "ppdata", self.name, self.space)

    @property
    def brainmask(self) -> str:
        return os.path.join(self.functional, "brainmask.nii.gz")

    @property
    def regions(self) -> str:
        return os.path.join(self.functional, "roi")

    @property
    def beta_folder(self) -> str:
        return os.path.join(self.root, "nsddata_betas", "ppdata", self.name, self.space, self.betas)

    @property
    def noise_ceiling(self) -> str:
        return os.path.join(self.beta_folder, "ncsnr.nii.gz")

    @property
    def version(self) -> str:
        """``subj01/func1pt8mm/betas_fithrf_GLMdenoise_RR``."""
        return f"{self.name}/{self.space}/{self.betas}"

    @property
    def prepared(self) -> str:
        """Where copies for training are kept: beside the release, never inside it."""
        return os.path.join(self.root, "penstock", self.name, self.space, self.betas)

    def session(self, number: int, suffix: str) -> str:
        """The betas of a session: ``session(7, ".hdf5")``."""
        return os.path.join(self.beta_folder, f"betas_session{number:02d}{suffix}")

    def label_tables(self, region: str) -> list[str]:
        """Where the names of a region's labels may be found, the subject's own first."""
        labels = os.path.join(self.root, "nsddata", "freesurfer")
        return [
            os.path.join(labels, self.name, "label", f"{region}.mgz.ctab"),
            os.path.join(labels, "fsaverage", "label", f"{region}.mgz.ctab"),
            os.path.join(self.root, "nsddata", "templates", f"{region}.ctab"),
        ]
