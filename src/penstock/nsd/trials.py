"""The trial table: which picture each trial showed, and how the subject answered.

Three files describe it, each in part: ``responses.tsv`` (trials that were done, ids from 1), ``nsd_expdesign.mat``
(trials that were planned, ids from 1) and ``nsd_stim_info_merged.csv`` (pictures, ids from 0, trials from 1). Files
that are present are checked against each other; ids come out from 0. ``responses.tsv`` may be older than the betas:
trials that it does not have come from the design, without behaviour.
"""

import os
from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.errors import Corrupt, Missing, SchemaMismatch
from penstock.nsd.layout import REPS, RUNS, SESSIONS, SubjectLayout
from penstock.nsd.libraries import loadmat
from penstock.nsd.parsed import Columns, parsed
from penstock.nsd.table import TrialTable
from penstock.nsd.text_table import read_columns

BEHAVIOUR = (
    "TIME", "ISOLD", "ISCORRECT", "RT", "CHANGEMIND", "MEMORYRECENT", "MEMORYFIRST", "ISOLDCURRENT",
    "ISCORRECTCURRENT", "TOTAL1", "TOTAL2", "BUTTON", "MISSINGDATA",
)  # fmt: skip
"""Columns of ``responses.tsv`` that are in the table, in lower case."""

NUMBERED = ("SESSION", "RUN", "TRIAL", "73KID", "10KID")
"""Columns of ``responses.tsv`` that number trials and pictures."""
INFO_COLUMNS = ("cocoId", "nsdId", "shared1000")
SHARED = 1000


@dataclass(frozen=True)
class Sources:
    """The three files of one subject, as far as they exist."""

    layout: SubjectLayout

    @cached_property
    def design(self) -> Columns | None:
        """``nsd_expdesign.mat``, as plain whole numbers."""
        path = self.layout.design
        return parsed(path, "design", _parse_design) if os.path.isfile(path) else None

    @cached_property
    def responses(self) -> Columns | None:
        """``responses.tsv``: its columns of numbers."""
        path = self.layout.responses
        return parsed(path, "responses", _parse_responses) if os.path.isfile(path) else None

    @cached_property
    def stim_info(self) -> Columns | None:
        """``nsd_stim_info_merged.csv``: ``cocoId`` and ``shared1000`` by picture, ``pictures`` (from 0) by trial."""
        path, subject = self.layout.stim_info, self.layout.subject
        if not os.path.isfile(path):
            return None
        return parsed(path, f"pictures of subject {subject}", partial(_parse_stim_info, subject))

    def planned(self) -> dict[str, np.ndarray]:
        """0-based picture of each planned trial, by the file that lists them."""
        found = {}
        if self.design is not None:
            ordering = self.design["masterordering"].reshape(-1)
            found[self.layout.design] = self.design["subjectim"][self.layout.subject - 1, ordering - 1] - 1
        if self.stim_info is not None and "pictures" in self.stim_info:
            found[self.layout.stim_info] = self.stim_info["pictures"]
        return found

    @cached_property
    def answered(self) -> int:
        """Trials in ``responses.tsv``."""
        return 0 if self.responses is None else len(self.responses["SESSION"])

    @cached_property
    def sessions_answered(self) -> int:
        """Sessions that ``responses.tsv`` has whole."""
        if self.responses is None or not self.answered:
            return 0
        counts = np.bincount(np.asarray(self.responses["SESSION"], np.int64))
        return int((counts == counts.max()).sum())

    def shared(self, pictures: np.ndarray) -> np.ndarray:
        """Whether each trial showed a shared picture, given the picture of each trial."""
        found = {}
        if self.design is not None:
            found[self.layout.design] = np.isin(pictures, self.design["sharedix"].reshape(-1) - 1)
        if self.stim_info is not None:
            found[self.layout.stim_info] = self.stim_info["shared1000"][pictures]
        if not found:
            assert self.responses is not None, "one of the three lists the pictures"
            return np.asarray(self.responses["10KID"] <= SHARED)[: len(pictures)]
        (first, shared), *others = found.items()
        for other, theirs in others:
            if not np.array_equal(shared, theirs):
                trial = int(np.argmin(shared == theirs))
                raise SchemaMismatch(
                    f"picture {pictures[trial]} is {'' if shared[trial] else 'not '}shared according to {first}, and "
                    f"{'' if theirs[trial] else 'not '}according to {other}: they are not of the same release; fetch "
                    f"both again"
                )
        return shared


@dataclass(frozen=True)
class SessionLength:
    """Trials per session, and the file that says so."""

    trials: int
    path: str


def read_trials(sources: Sources, sessions: Sequence[int], session: SessionLength) -> TrialTable:
    """A row per trial of these sessions, in the order of the betas."""
    whole = read_all_trials(sources, sessions, session)
    found = whole.take(np.isin(whole["session"], list(sessions))).columns
    counts = np.bincount(found["stim_id"])[found["stim_id"]]
    after = list(found).index("rep") + 1
    names = [*list(found)[:after], "n_reps", *list(found)[after:]]
    return TrialTable({name: found.get(name, counts) for name in names})


def read_all_trials(sources: Sources, sessions: Sequence[int], session: SessionLength) -> TrialTable:
    """A row per trial that was answered or is in these sessions; row numbers are ``global_trial``."""
    count = max(sources.answered, max(sessions) * session.trials)
    pictures, trial = _pictures(sources, count, session), np.arange(count)
    runs, in_run = _runs(sources, count, session.trials)
    info = {} if sources.stim_info is None else {"cocoId": sources.stim_info["cocoId"][pictures]}
    answers = {
        name.lower(): np.concatenate([values, np.full(count - sources.answered, np.nan)])
        for name, values in (sources.responses or {}).items()
        if name in BEHAVIOUR
    }
    columns = {
        "subject": np.full(count, sources.layout.subject),
        "session": trial // session.trials + 1,
        "run": runs,
        "trial_in_run": in_run,
        "trial_in_session": trial % session.trials,
        "global_trial": trial,
        "stim_id": pictures,
        **info,
        "rep": _shown_before(pictures),
        "shared1000": sources.shared(pictures),
        **answers,
    }
    return TrialTable(columns)


def _shown_before(pictures: np.ndarray) -> np.ndarray:
    """How often the picture of each trial was shown before it."""
    order = np.argsort(pictures, kind="stable")
    begins = np.flatnonzero(np.diff(pictures[order], prepend=-1))
    before = np.empty_like(order)
    before[order] = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
    return before


def planned_trials(sources: Sources, per_session: int) -> TrialTable | None:
    """Session, picture and shared1000 of each trial that the subject was to do, whatever is on disk.

    Subjects did the first 30 to 40 planned sessions. Without a design, a complete ``responses.tsv`` will
    do; None without that too.
    """
    planned = next(iter(sources.planned().values()), None)
    most = SESSIONS[sources.layout.subject]
    if planned is None:
        if sources.responses is None or sources.sessions_answered < most:
            return None
        planned = np.asarray(sources.responses["73KID"], np.int64) - 1
    pictures = planned[: most * per_session]
    session = (np.arange(len(pictures)) // per_session + 1).astype(np.int16)
    return TrialTable({"session": session, "stim_id": pictures, "shared1000": sources.shared(pictures)})


def _pictures(sources: Sources, count: int, session: SessionLength) -> np.ndarray:
    """0-based picture of each trial; all files that list it must agree."""
    found, layout = sources.planned(), sources.layout
    if sources.responses is not None:
        _check_responses(sources.responses, layout.responses, session)
        found = {layout.responses: np.asarray(sources.responses["73KID"], np.int64) - 1, **found}
    if not found:
        raise Missing(
            f"no file lists which trial showed which picture: neither {layout.responses} nor {layout.design} nor "
            f"{layout.stim_info} is there, none of them; fetch at least one"
        )
    pictures, known_by = np.full(count, -1, np.int64), np.full(count, "", object)
    for path, listed in found.items():
        here = np.flatnonzero(listed[:count] >= 0)
        wrong = here[(pictures[here] >= 0) & (pictures[here] != listed[here])]
        if len(wrong):
            trial = int(wrong[0])
            raise SchemaMismatch(
                f"trial {trial} (from 0) of subject {layout.subject} showed picture {pictures[trial]} (from 0) "
                f"according to {known_by[trial]}, but {listed[trial]} according to {path}: they are not of the same "
                f"release; fetch both again"
            )
        pictures[here], known_by[here] = listed[here], path
    unknown = np.flatnonzero(pictures < 0)
    if len(unknown):
        first = int(unknown[0])
        listed_by = " and ".join(f"{path} ({len(listed):,} trials)" for path, listed in found.items())
        raise SchemaMismatch(
            f"trial {first} (from 0, session {first // session.trials + 1}) has betas, but {listed_by} do not list "
            f"which picture it showed. Fetch {layout.responses} again, or {layout.design}, or leave later sessions out"
        )
    return pictures


def _check_responses(responses: Columns, path: str, session: SessionLength) -> None:
    sessions = np.asarray(responses["SESSION"], np.int64)
    expected = np.arange(len(sessions)) // session.trials + 1
    if not np.array_equal(sessions, expected):
        row = int(np.argmin(sessions == expected))
        raise SchemaMismatch(
            f"{path}: row {row} belongs to session {sessions[row]}, but {session.path} has "
            f"{session.trials} trials per session, so it should be session {expected[row]}; one of the two files is "
            f"not whole"
        )


def _runs(sources: Sources, count: int, per_session: int) -> tuple[np.ndarray, np.ndarray]:
    """1-based run of each trial, and its 1-based number in the run: as answered, and beyond that as planned."""
    ends = np.ceil(per_session * np.arange(1, RUNS + 1) / RUNS)
    runs = np.searchsorted(ends, np.arange(count) % per_session, side="right") + 1
    begins = np.flatnonzero(np.diff(runs, prepend=0))
    in_run = np.arange(count) - np.repeat(begins, np.diff(begins, append=count)) + 1
    if sources.responses is not None:
        answered = min(count, sources.answered)
        runs[:answered] = np.asarray(sources.responses["RUN"], np.int64)[:answered]
        in_run[:answered] = np.asarray(sources.responses["TRIAL"], np.int64)[:answered]
    return runs, in_run


def _parse_design(path: str) -> Columns:
    found, wanted = loadmat(path), ("masterordering", "subjectim", "sharedix")
    if absent := [name for name in wanted if name not in found]:
        raise Corrupt(f"{path}: no {absent[0]!r} in it, but {', '.join(found)}; fetch it again")
    # Stored in small types, in which sums would overflow.
    return {name: np.asarray(found[name]).astype(np.int64) for name in wanted}


def _parse_responses(path: str) -> Columns:
    return read_columns(path, "\t", {*NUMBERED, *BEHAVIOUR}, NUMBERED)


def _parse_stim_info(subject: int, path: str) -> Columns:
    reps = tuple(f"subject{subject}_rep{rep}" for rep in range(REPS))
    found = read_columns(path, ",", {*INFO_COLUMNS, *reps}, INFO_COLUMNS)
    by_id = np.argsort(found["nsdId"], kind="stable")
    found = {name: values[by_id] for name, values in found.items()}
    if not np.array_equal(found["nsdId"], np.arange(len(by_id))):
        raise Corrupt(f"{path}: nsdId does not run from 0 to {len(by_id) - 1:,}; fetch it again")
    columns = {"cocoId": found["cocoId"], "shared1000": found["shared1000"] != 0}
    if reps[0] in found:
        trials = np.stack([found[rep] for rep in reps], axis=1)
        columns["pictures"] = np.full(int(trials.max()), -1, np.int64)
        picture, rep = np.nonzero(trials > 0)
        columns["pictures"][trials[picture, rep] - 1] = picture
    return columns
