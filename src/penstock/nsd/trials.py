"""The trial table: which picture each trial showed, and how the subject answered.

Three files tell it, each in part: ``responses.tsv`` (trials that were done, ids from 1), ``nsd_expdesign.mat`` (trials
that were planned, ids from 1) and ``nsd_stim_info_merged.csv`` (pictures, ids from 0, trials from 1). Those that are
there are checked against each other; ids come out from 0.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock.errors import Corrupt, Missing, SchemaMismatch
from penstock.nsd.layout import REPS, RUNS, Layout
from penstock.nsd.outside import loadmat, needed

BEHAVIOUR = (
    "TIME", "ISOLD", "ISCORRECT", "RT", "CHANGEMIND", "MEMORYRECENT", "MEMORYFIRST", "ISOLDCURRENT",
    "ISCORRECTCURRENT", "TOTAL1", "TOTAL2", "BUTTON", "MISSINGDATA",
)  # fmt: skip
"""Columns of ``responses.tsv`` that come into the table, in lower case."""

INFO_COLUMNS = ("cocoId", "nsdId", "shared1000")
SHARED = 1000


@dataclass(frozen=True)
class Sources:
    """The three files of one subject, as far as they are there."""

    layout: Layout

    @cached_property
    def design(self) -> Mapping[str, np.ndarray] | None:
        """``nsd_expdesign.mat``, as plain whole numbers."""
        path = self.layout.design
        if not os.path.isfile(path):
            return None
        found = loadmat(path)
        for name in ("masterordering", "subjectim", "sharedix"):
            if name not in found:
                raise Corrupt(f"{path}: no {name!r} in it, but {', '.join(found)}; fetch it again")
        # Stored in small types, in which sums would overflow.
        return {name: np.asarray(value).astype(np.int64) for name, value in found.items() if value.dtype.kind in "iuf"}

    @cached_property
    def responses(self) -> Any:
        """``responses.tsv`` as a DataFrame, or None."""
        path = self.layout.responses
        if not os.path.isfile(path):
            return None
        found = _table(path, sep="\t")
        for name in ("SESSION", "RUN", "TRIAL", "73KID", "10KID"):
            if name not in found:
                raise Corrupt(f"{path}: no column {name!r} in it, but {', '.join(found.columns)}; fetch it again")
        return found

    @cached_property
    def stim_info(self) -> Any:
        """``nsd_stim_info_merged.csv`` as a DataFrame ordered by nsdId, or None."""
        path = self.layout.stim_info
        if not os.path.isfile(path):
            return None
        subject = f"subject{self.layout.subject}_rep"
        found = _table(path, usecols=lambda name: name in INFO_COLUMNS or name.startswith(subject))
        for name in ("cocoId", "nsdId", "shared1000"):
            if name not in found:
                raise Corrupt(f"{path}: no column {name!r} in it, but {', '.join(found.columns)}; fetch it again")
        found = found.sort_values("nsdId").reset_index(drop=True)
        if not np.array_equal(found["nsdId"], np.arange(len(found))):
            raise Corrupt(f"{path}: nsdId does not run from 0 to {len(found) - 1:,}; fetch it again")
        return found

    def planned(self) -> dict[str, np.ndarray]:
        """0-based picture of each planned trial, by the file that tells it."""
        found = {}
        if self.design is not None:
            ordering = self.design["masterordering"].reshape(-1)
            found[self.layout.design] = self.design["subjectim"][self.layout.subject - 1, ordering - 1] - 1
        if self.stim_info is not None and f"subject{self.layout.subject}_rep0" in self.stim_info:
            reps = [self.stim_info[f"subject{self.layout.subject}_rep{rep}"] for rep in range(REPS)]
            trials = np.stack([np.asarray(rep, np.int64) for rep in reps], axis=1)
            pictures = np.full(int(trials.max()), -1, np.int64)
            shown = trials > 0
            pictures[trials[shown] - 1] = np.broadcast_to(np.arange(len(trials))[:, None], trials.shape)[shown]
            found[self.layout.stim_info] = pictures
        return found


def read_trials(sources: Sources, sessions: Sequence[int], per_session: int) -> Any:
    """A DataFrame with a row for each trial of these sessions, in the order of the betas."""
    pandas = needed("pandas")
    layout, responses = sources.layout, sources.responses
    done = len(responses) if responses is not None else max(sessions) * per_session
    pictures = _pictures(sources, done, per_session)
    trial = np.arange(done)
    table = pandas.DataFrame(
        {
            "subject": layout.subject,
            "session": trial // per_session + 1,
            "run": _runs(sources, done, per_session),
            "trial_in_run": _in_run(sources, done, per_session),
            "trial_in_session": trial % per_session,
            "global_trial": trial,
            "stim_id": pictures,
        }
    )
    if sources.stim_info is not None:
        table["cocoId"] = np.asarray(sources.stim_info["cocoId"])[pictures]
    table["rep"] = table.groupby("stim_id").cumcount()
    table["shared1000"] = _shared(sources, pictures, done)
    if responses is not None:
        for name in BEHAVIOUR:
            if name in responses:
                table[name.lower()] = np.asarray(responses[name], np.float64)
    table = table[table["session"].isin(list(sessions))].reset_index(drop=True)
    counts = table.groupby("stim_id")["stim_id"].transform("size")
    table.insert(table.columns.get_loc("rep") + 1, "n_reps", counts)
    return table


def _pictures(sources: Sources, done: int, per_session: int) -> np.ndarray:
    """0-based picture of each trial that was done; whoever else tells it must tell the same."""
    found = dict(sources.planned())
    if sources.responses is not None:
        path = sources.layout.responses
        sessions = np.asarray(sources.responses["SESSION"], np.int64)
        expected = np.arange(done) // per_session + 1
        if not np.array_equal(sessions, expected):
            row = int(np.argmin(sessions == expected))
            raise SchemaMismatch(
                f"{path}: row {row} belongs to session {sessions[row]}, but sessions have {per_session} trials as the "
                f"betas are stored, so it should be session {expected[row]}; one of the two files is not whole"
            )
        found = {path: np.asarray(sources.responses["73KID"], np.int64) - 1, **found}
    if not found:
        layout = sources.layout
        raise Missing(
            f"which trial showed which picture is told by {layout.responses}, {layout.design} or {layout.stim_info}, "
            f"and none of them is there; fetch at least one"
        )
    (first, pictures), *others = found.items()
    if len(pictures) < done:
        raise SchemaMismatch(f"{first}: tells of {len(pictures):,} trials, but {done:,} were done; fetch it again")
    for other, theirs in others:
        same = theirs[:done] == pictures[:done]
        if len(theirs) < done or not same.all():
            trial = int(np.argmin(same)) if len(same) == done else len(theirs)
            told = theirs[trial] if trial < len(theirs) else "none"
            raise SchemaMismatch(
                f"trial {trial} (from 0) of subject {sources.layout.subject} showed picture {pictures[trial]} (from 0) "
                f"by {first}, but {told} by {other}: they are not of the same release; fetch both again"
            )
    return pictures[:done]


def _runs(sources: Sources, done: int, per_session: int) -> np.ndarray:
    """1-based run of each trial."""
    if sources.responses is not None:
        return np.asarray(sources.responses["RUN"], np.int64)
    ends = np.ceil(per_session * np.arange(1, RUNS + 1) / RUNS)
    return np.searchsorted(ends, np.arange(done) % per_session, side="right") + 1


def _in_run(sources: Sources, done: int, per_session: int) -> np.ndarray:
    """1-based number of each trial in its run."""
    if sources.responses is not None:
        return np.asarray(sources.responses["TRIAL"], np.int64)
    runs = _runs(sources, done, per_session)
    begins = np.flatnonzero(np.diff(runs, prepend=0))
    return np.arange(done) - np.repeat(begins, np.diff(begins, append=done)) + 1


def _shared(sources: Sources, pictures: np.ndarray, done: int) -> np.ndarray:
    """Whether each trial showed one of the pictures that everybody saw."""
    told = {}
    if sources.design is not None:
        told[sources.layout.design] = np.isin(pictures, sources.design["sharedix"].reshape(-1) - 1)
    if sources.stim_info is not None:
        told[sources.layout.stim_info] = np.asarray(sources.stim_info["shared1000"]).astype(bool)[pictures]
    if not told:
        return np.asarray(sources.responses["10KID"] <= SHARED)
    (first, shared), *others = told.items()
    for other, theirs in others:
        if not np.array_equal(shared, theirs):
            trial = int(np.argmin(shared == theirs))
            raise SchemaMismatch(
                f"picture {pictures[trial]} is {'' if shared[trial] else 'not '}shared by {first}, and "
                f"{'' if theirs[trial] else 'not '}by {other}: they are not of the same release; fetch both again"
            )
    return shared


def _table(path: str, **options: Any) -> Any:
    pandas = needed("pandas")
    try:
        return pandas.read_csv(path, **options)
    except (ValueError, UnicodeDecodeError) as error:  # pandas's parser errors are ValueErrors
        raise Corrupt(f"{path}: not a table that pandas reads ({error}); fetch it again") from error
