"""Which trials are for training and which are not, as published. Pure: trial tables in, booleans out.

| name | train | val | test |
|---|---|---|---|
| ``shared1000`` | pictures of this subject alone | – | the shared pictures |
| ``mindeye1`` | the same, first 37 sessions (29, 27 where fewer were scanned) | – | shared, the same sessions |
| ``mindeye1-val`` | the same less 300 pictures drawn by a seed (MindEye's are unpublished) | those 300 | as above |
| ``mindeye2`` | the same, all sessions | – | shared, all sessions |
| ``berg`` | the same | shared, not seen three times by all | shared, seen three times by all eight subjects |
| ``first-N`` | the same, sessions 1 to N | – | shared, all sessions |
| ``random-P`` | P percent of all pictures, drawn by a seed | – | the others |

Pictures are never divided: all trials that show one are on the same side. Which side that is follows from the design of
the experiment and the seed alone, not from the sessions that are on disk: a picture that is held out stays held out
when more sessions are added. Z-scores are fitted without the pictures that are held out, see ``fitting``.
"""

import re

import numpy as np

from penstock.errors import ConfigError
from penstock.nsd.table import TrialTable

PARTS = ("train", "val", "test")
FIRST_RELEASE = {1: 37, 2: 37, 3: 29, 4: 27, 5: 37, 6: 29, 7: 37, 8: 27}
"""Sessions that were public before the last three of each subject came out."""
LEAST_SESSIONS = 30
"""Sessions that every subject did."""
VAL_PICTURES = 300

NAMES = ("shared1000", "mindeye1", "mindeye1-val", "mindeye2", "berg", "first-N", "random-P")


def needs_design(split: str) -> bool:
    """Whether a split depends on trials of the experiment that may not be on disk."""
    return split.startswith(("mindeye1-val/", "berg/", "random-"))


def choose(trials: TrialTable, split: str, *, seed: int, planned: TrialTable | None = None) -> np.ndarray:
    """Whether each trial belongs to this part: ``"mindeye2/train"``.

    ``planned`` is the table of all trials of the subject's experiment; None where ``trials`` is that table.
    """
    name, _, part = split.partition("/")
    if part not in PARTS:
        raise ConfigError(f"split={split!r}: expected a name and a part, such as 'shared1000/train' or 'mindeye2/test'")
    parts = _parts(trials, trials if planned is None else planned, name, seed)
    if part not in parts:
        raise ConfigError(f"split={split!r}: {name} has {' and '.join(parts)} only")
    chosen = np.asarray(parts[part])
    if not chosen.any():
        raise ConfigError(f"split={split!r}: none of the {len(trials):,} trials on disk belongs to it")
    return chosen


def fitting(
    trials: TrialTable, split: str, zscore: str | None, *, seed: int, planned: TrialTable | None = None
) -> np.ndarray:
    """Whether z-scores are fitted on each trial: never on a picture that the split holds out.

    Over all training trials ("train"), these are the training trials of the split. Per session or run, each needs
    trials of its own: all whose picture is not held out, also where the split trains on fewer sessions.
    """
    parts = _parts(trials, trials if planned is None else planned, split.partition("/")[0], seed)
    train, pictures = parts["train"], trials["stim_id"]
    if zscore == "train":
        return train
    held_out = np.isin(pictures, pictures[np.any([part for name, part in parts.items() if name != "train"], axis=0)])
    return np.asarray(~held_out & (train | ~trials["shared1000"]))


def _parts(trials: TrialTable, planned: TrialTable, name: str, seed: int) -> dict[str, np.ndarray]:
    shared, session = trials["shared1000"], trials["session"]
    if name in ("shared1000", "mindeye2"):
        return {"train": ~shared, "test": shared}
    if name in ("mindeye1", "mindeye1-val"):
        last = FIRST_RELEASE[int(trials["subject"][0])] if len(trials) else 0
        public = session <= last
        if name == "mindeye1":
            return {"train": ~shared & public, "test": shared & public}
        own = planned["stim_id"][~planned["shared1000"] & (planned["session"] <= last)]
        held_out = _drawn(own, VAL_PICTURES, seed)
        val = np.isin(trials["stim_id"], held_out) & public
        return {"train": ~shared & public & ~val, "val": val, "test": shared & public}
    if name == "berg":
        early = planned["stim_id"][planned["shared1000"] & (planned["session"] <= LEAST_SESSIONS)]
        pictures, times = np.unique(early, return_counts=True)
        thrice = np.isin(trials["stim_id"], pictures[times == 3])
        return {"train": ~shared, "val": shared & ~thrice, "test": shared & thrice}
    if found := re.fullmatch(r"first-(\d+)", name):
        return {"train": ~shared & (session <= int(found[1])), "test": shared}
    if (found := re.fullmatch(r"random-(\d+)", name)) and 0 < int(found[1]) < 100:
        count = round(len(np.unique(planned["stim_id"])) * int(found[1]) / 100)
        train = np.isin(trials["stim_id"], _drawn(planned["stim_id"], count, seed))
        return {"train": train, "test": ~train}
    raise ConfigError(
        f"split={name!r}: no such split; there are {', '.join(NAMES)}, with a session N or a percentage P from 1 to 99"
    )


def _drawn(stim_ids: np.ndarray, count: int, seed: int) -> np.ndarray:
    """This many of the pictures, whatever the order of the trials."""
    pictures = np.unique(stim_ids)
    if count >= len(pictures):
        count = len(pictures) // 10  # a small set keeps the proportions, not the number
    return np.random.default_rng([seed, len(pictures)]).choice(pictures, count, replace=False)
