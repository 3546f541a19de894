"""The experiment's tables: which picture each trial shows, what subjects answered, what is known of each picture."""

import csv
import os
from functools import cached_property

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.nsd.layout import DESIGN, REPS, RUNS, STIM_INFO, SUBJECTS, SubjectLayout
from penstock.nsd.libraries import savemat
from penstock.nsd.synthetic.scale import Scale

RESPONSE_COLUMNS = (
    "SUBJECT", "SESSION", "RUN", "TRIAL", "73KID", "10KID", "TIME", "ISOLD", "ISCORRECT", "RT", "CHANGEMIND",
    "MEMORYRECENT", "MEMORYFIRST", "ISOLDCURRENT", "ISCORRECTCURRENT", "TOTAL1", "TOTAL2", "BUTTON", "MISSINGDATA",
)  # fmt: skip
COCO_ID = 9, 7  # cocoId = 9 + 7 * nsdId: unlike any other number of the picture


@dataclass(frozen=True)
class Experiment:
    """The design that all subjects share, drawn from a seed."""

    scale: Scale
    seed: int = 0

    @cached_property
    def ordering(self) -> np.ndarray:
        """1-based number of the subject's picture, for each planned trial."""
        numbers = np.repeat(np.arange(1, self.scale.images + 1), REPS)
        return np.random.default_rng([self.seed, 1]).permutation(numbers)

    @cached_property
    def shared(self) -> np.ndarray:
        """1-based numbers, among all pictures, of those that everybody sees; ascending."""
        chosen = np.random.default_rng([self.seed, 2]).choice(self.scale.stimuli, self.scale.shared, replace=False)
        return np.sort(chosen) + 1

    @cached_property
    def pictures(self) -> np.ndarray:
        """(8, images): 1-based number among all pictures of each subject's pictures, the shared ones first."""
        scale = self.scale
        others = np.setdiff1d(np.arange(1, scale.stimuli + 1), self.shared)
        own = np.random.default_rng([self.seed, 3]).permutation(others).reshape(len(SUBJECTS), -1)
        return np.concatenate([np.tile(self.shared, (len(SUBJECTS), 1)), own], axis=1)

    def stimuli(self, subject: int) -> np.ndarray:
        """0-based number of the picture that each planned trial shows."""
        return np.asarray(self.pictures[subject - 1, self.ordering - 1] - 1)

    @cached_property
    def run_ends(self) -> np.ndarray:
        """Trials of a session done at the end of each run: runs of 63 and 62 in turn, where a session has 750."""
        return np.ceil(self.scale.trials * np.arange(1, RUNS + 1) / RUNS).astype(int)


def write_design(root: str, experiment: Experiment) -> None:
    """``nsd_expdesign.mat``, in the whole-number types that scipy gives back for the real one."""
    scale, ends = experiment.scale, experiment.run_ends
    lengths = np.diff(ends, prepend=0)
    pattern = (np.arange(max(lengths.max(), 2)) < lengths[:, None]).astype(np.uint8)
    path = os.path.join(root, DESIGN)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    savemat(
        path,
        {
            "masterordering": experiment.ordering.astype(np.uint16)[None],
            "subjectim": experiment.pictures.astype(np.int32),
            "sharedix": experiment.shared.astype(np.int32)[None],
            "stimpattern": np.tile(pattern, (scale.planned_sessions, 1, 1)),
            "basiccnt": np.full((REPS, scale.planned_sessions), scale.trials // REPS, np.uint16),
        },
    )


def write_stim_info(root: str, experiment: Experiment) -> None:
    """``nsd_stim_info_merged.csv``: ids from 0, trials from 1 and as planned."""
    scale = experiment.scale
    shared = np.zeros(scale.stimuli, bool)
    shared[experiment.shared - 1] = True
    trials = np.zeros((len(SUBJECTS), scale.stimuli, REPS), int)
    for subject in SUBJECTS:
        shown = experiment.stimuli(subject)
        order = np.argsort(shown, kind="stable")
        trials[subject - 1, shown[order].reshape(-1, REPS)[:, 0]] = order.reshape(-1, REPS) + 1
    header = ["cocoId", "cocoSplit", "cropBox", "loss", "nsdId", "flagged", "BOLD5000", "shared1000"]
    subjects = [f"subject{subject}" for subject in SUBJECTS]
    reps = [f"subject{subject}_rep{rep}" for subject in SUBJECTS for rep in range(REPS)]
    with open(os.path.join(root, STIM_INFO), "w", newline="") as file:
        write = csv.writer(file)
        write.writerow(["", *header, *subjects, *reps])
        for number in range(scale.stimuli):
            here = trials[:, number]
            about = [COCO_ID[0] + COCO_ID[1] * number, "train2017", "(0, 0, 0.1, 0.1)", 0.1, number, False, False]
            write.writerow(
                [number, *about, bool(shared[number]), *(here[:, 0] > 0).astype(int).tolist(), *here.reshape(-1)]
            )


def write_responses(layout: SubjectLayout, experiment: Experiment) -> None:
    """``responses.tsv``: one row per trial that was done; missing answers are NaN."""
    scale = experiment.scale
    stimuli = experiment.stimuli(layout.subject)
    rng = np.random.default_rng([experiment.seed, 4, layout.subject])
    done = scale.sessions[layout.subject] * scale.trials
    seen: dict[int, int] = {}
    os.makedirs(os.path.dirname(layout.responses), exist_ok=True)
    with open(layout.responses, "w", newline="") as file:
        write = csv.writer(file, delimiter="\t")
        write.writerow(RESPONSE_COLUMNS)
        for trial in range(done):
            session, inside = divmod(trial, scale.trials)
            run = int(np.searchsorted(experiment.run_ends, inside, side="right"))
            before = int(experiment.run_ends[run - 1]) if run else 0
            stimulus = int(stimuli[trial])
            old = int(stimulus in seen)
            old_now = int(seen.get(stimulus, -1) == session)
            seen[stimulus] = session
            answered = rng.random() > 0.1
            right, rt = int(rng.random() < 0.8), round(float(rng.uniform(300, 2500)), 2)
            answer = [right, rt, int(rng.random() < 0.05)] if answered else ["NaN"] * 3
            recent = [trial // 2, trial] if old else ["NaN"] * 2
            now = [old_now, right if answered else "NaN"]
            counts = [1, 0, 1 + right] if answered else [0, 0, "NaN"]
            ids = [stimulus + 1, int(experiment.ordering[trial])]
            place = [layout.subject, session + 1, run + 1, inside - before + 1, *ids]
            day = round(7 * session + inside / 1e3, 4)
            write.writerow([*place, day, old, *answer, *recent, *now, *counts, 0])
