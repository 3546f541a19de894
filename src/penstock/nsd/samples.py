"""A dataset put together of what was asked for: voxels, pictures, columns of the trial table, further arrays."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.dataset import Dataset, from_arrays, join
from penstock.errors import ConfigError, Missing
from penstock.gathered import NO_ROW
from penstock.nsd import behaviour, zscore
from penstock.nsd.dataset import NSDDataset
from penstock.nsd.layout import FIELD, SCALE
from penstock.nsd.regions import Voxels
from penstock.nsd.repetitions import REPS_KNOWN, by_picture, neighbours, stacked
from penstock.nsd.stimuli import Pictures, find_extra, find_pictures
from penstock.store import digest

if TYPE_CHECKING:
    from penstock.nsd.subject import NSD

ALIASES = {"coco": "stim_id", "trial": "global_trial", "images": "image", "reps": "n_reps"}
"""Names that MindEye's code knows columns by."""
FIT_MEMORY = "256MiB"
OF_VOXELS = ("voxels", "past_voxels", "future_voxels")


@dataclass(frozen=True, eq=False)
class Choice:
    """Trials that were chosen, among those of the sessions that were."""

    everything: Any
    """The trial table of all sessions."""
    inside: np.ndarray
    """Its rows that lie in the chosen sessions."""
    rows: np.ndarray
    """Which of those are samples, or parts of samples."""

    @cached_property
    def trials(self) -> Any:
        """The trial table of the chosen sessions."""
        return self.everything.iloc[self.inside].reset_index(drop=True)

    @property
    def sessions(self) -> list[int]:
        return [int(session) for session in self.trials["session"].unique()]


@dataclass(frozen=True, eq=False)
class Wanted:
    """How samples are wanted; see ``NSD.dataset``."""

    columns: tuple[str, ...]
    voxels: Voxels | None
    reps: str
    context: tuple[int, int]
    zscore: str | None
    fitted_on: np.ndarray
    dtype: np.dtype
    pictures: Pictures
    extra: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.reps not in REPS_KNOWN:
            raise ConfigError(f"reps={self.reps!r}: expected one of {', '.join(REPS_KNOWN)}")
        if self.zscore not in ("session", "run", "train", None):
            raise ConfigError(f'zscore={self.zscore!r}: expected "session", "run", "train" or None')
        if self.zscore is not None and self.dtype.kind != "f":
            raise ConfigError(f"dtype={self.dtype}: z-scores need a float; leave zscore out for numbers as stored")
        if self.zscore is not None and not set(OF_VOXELS) & set(self.columns):
            raise ConfigError(f"zscore={self.zscore!r}: without voxels among the columns there is nothing to do it to")
        if min(self.context) < 0:
            raise ConfigError(f"context={self.context}: expected how many trials before and how many after")


class Samples:
    """One dataset in the making."""

    def __init__(self, nsd: "NSD", choice: Choice, wanted: Wanted) -> None:
        self.nsd, self.choice, self.wanted = nsd, choice, wanted
        self.trials = choice.trials
        by_pictures = wanted.reps != "single"
        self.lines = by_picture(np.asarray(self.trials["stim_id"]), choice.rows) if by_pictures else None
        """(pictures, most): the trials of each, where samples are made of pictures."""
        whole_picture = self.lines is not None and wanted.reps != "random"
        self.rows = self.lines[:, 0] if self.lines is not None and whole_picture else choice.rows
        """The trial that stands for each sample."""

    def dataset(self) -> NSDDataset:
        parts = {name: self._part(name, ALIASES.get(name, name)) for name in self.wanted.columns}
        trials = self.trials.iloc[self.rows].reset_index(drop=True)
        made = NSDDataset(join(**parts), self.wanted.columns, trials, self.wanted.voxels)
        if self.wanted.reps == "random" and self.lines is not None:
            # Trials of the table -> places among those chosen.
            return made.one_of_each(np.where(self.lines == NO_ROW, NO_ROW, np.searchsorted(self.rows, self.lines)))
        return made

    def _part(self, column: str, name: str) -> Any:
        if name in OF_VOXELS and (name == "voxels" or self.wanted.context[name == "future_voxels"]):
            return self._turned(self._voxels(name))
        if name == "image":
            return self._pictures()
        if name in self.wanted.extra:
            return find_extra(name, self.wanted.extra[name], self._stimuli)
        if name in behaviour.FIELDS:
            return self._behaviour[name]
        if name in self.trials:
            return from_arrays(**{name: np.asarray(self.trials[name])[self.rows]})
        hint = " without context=(past, future)" if name in OF_VOXELS else ""
        known = ("voxels", "image", "coco", *self.trials.columns, *behaviour.FIELDS, *self.wanted.extra)
        raise ConfigError(f"columns: no {column!r}{hint}; there are {', '.join(dict.fromkeys(known))}")

    @cached_property
    def _stimuli(self) -> np.ndarray:
        return np.asarray(self.trials["stim_id"].iloc[self.rows])

    @cached_property
    def _behaviour(self) -> dict[str, np.ndarray]:
        """Of all sessions: a picture's other trials may lie in those that were not chosen."""
        return behaviour.behaviour(self.choice.everything, self.choice.inside[self.rows])

    def _pictures(self) -> tuple[Dataset, np.ndarray]:
        wanted = self.wanted.pictures
        if wanted.source is None and self.nsd.stimuli is not None:
            wanted = replace(wanted, source=self.nsd.stimuli)
        found = find_pictures(self.nsd.layout, wanted, self.nsd.options)
        rows = found.rows[np.minimum(self._stimuli, len(found.rows) - 1)]
        absent = (self._stimuli >= len(found.rows)) | (rows < 0)
        if absent.any():
            few = np.unique(self._stimuli[absent])
            raise Missing(
                f"{found.path}: {len(few):,} pictures that were shown are not in it, such as stim_id {few[:5].tolist()}"
            )
        return found.pictures, rows

    def _voxels(self, name: str) -> Dataset:
        base, reps, lines = self._base, self.wanted.reps, self.lines
        if name != "voxels":
            around = neighbours(np.asarray(self.trials["session"]), self.rows, *self.wanted.context)
            return base.gather(around[name == "future_voxels"], absent="zeros")
        if lines is not None:
            self._check_random_access(base)
        if lines is None or reps == "random":
            return base if len(self.rows) == len(base) else base.select(self.rows)
        return base.gather(stacked(lines) if reps == "stack" else lines, mean=reps == "mean")

    @cached_property
    def _base(self) -> Dataset:
        """A row for each trial of the chosen sessions, in percent of signal change or as z-scores.

        Either is done while a batch is filled: what is stored, and kept, are whole numbers.
        """
        base = self.nsd.betas(self.wanted.voxels, self.choice.sessions)
        stored, dtype = base.fields[FIELD].dtype, self.wanted.dtype
        if self.wanted.zscore is None:
            if dtype.kind in "iu":
                return base if dtype == stored else base.cast(FIELD, dtype)
            return base.cast(FIELD, dtype, divisor=SCALE if stored.kind in "iu" else 1)
        groups = self._groups(self.wanted.zscore)
        used = np.unique(groups[self.choice.rows])
        fitted_on = self.wanted.fitted_on[np.isin(groups[self.wanted.fitted_on], used)]
        moments = self._fitted(base, fitted_on, groups)
        unfitted = used[moments.counts[used] == 0]
        if len(unfitted):
            first = self.trials.iloc[int(np.argmax(groups == unfitted[0]))]
            raise ConfigError(
                f"zscore={self.wanted.zscore!r}: nothing to fit it on for {len(unfitted)} of {len(used)}, the first "
                f"being that of session {first['session']}, run {first['run']}: the trials chosen for fitting have "
                f'none there. Pass zscore_fit="all", or booleans of your own'
            )
        return base.normalize(FIELD, moments.mean, moments.spread, groups, dtype)

    def _groups(self, kind: str) -> np.ndarray:
        session, run = np.asarray(self.trials["session"]), np.asarray(self.trials["run"])
        if kind == "train":
            return np.zeros(len(session), np.int64)
        key = session if kind == "session" else session * 1000 + run
        return np.asarray(np.searchsorted(np.unique(key), key))

    def _fitted(self, base: Dataset, rows: np.ndarray, groups: np.ndarray) -> zscore.Moments:
        key = digest(base.fingerprint, digest(rows.tobytes()), digest(groups.tobytes()))
        if key not in self.nsd.moments:
            self.nsd.moments[key] = zscore.fit(base, rows, groups, memory=FIT_MEMORY)
        return self.nsd.moments[key]

    def _check_random_access(self, base: Dataset) -> None:
        """Trials of one picture lie in several sessions, so each must be readable by itself."""
        if base.store.blocks is None:
            return
        name = "None" if self.wanted.voxels is None else repr(self.wanted.voxels.name)
        raise ConfigError(
            f"reps={self.wanted.reps!r} reads trials from several sessions for each sample, but as stored a trial can "
            f"only be read together with all of its session ({base.origin(0).url}). Make a copy by trial once with "
            f"nsd.prepare(roi={name}), or penstock nsd prepare; it is then used by itself"
        )

    def _turned(self, part: Dataset) -> Dataset:
        """Volumes as (X, Y, Z), which are stored as (Z, Y, X); a view, in a loader's batches."""
        if self.wanted.voxels is not None or not self.nsd.stored_reversed:
            return part
        axes = len(part.fields[FIELD].shape)
        return part.permute(FIELD, *range(axes - 3), axes - 1, axes - 2, axes - 3)


def booleans(given: Any, trials: Any, argument: str) -> np.ndarray:
    """One boolean for each row of the trial table, or an error that says so."""
    found = np.asarray(given)
    if found.dtype != bool or found.shape != (len(trials),):
        raise ConfigError(
            f"{argument}: {found.dtype} of shape {found.shape}: expected one boolean for each of {len(trials):,} trials"
        )
    return found
