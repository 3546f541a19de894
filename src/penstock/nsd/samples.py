"""Puts a dataset together: voxels, pictures, columns of the trial table, further arrays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from penstock.base import checks
from penstock.base.dataclass import dataclass
from penstock.base.dtypes import is_float
from penstock.base.sizes import MiB
from penstock.dataset.composition import from_arrays
from penstock.dataset.dataset import Dataset, OnError
from penstock.dataset.gather import NO_ROW
from penstock.dataset.store import digest
from penstock.errors import ConfigError, Missing
from penstock.nsd import behaviour, zscore
from penstock.nsd.betas import HeldSessions, Sessions
from penstock.nsd.layout import FIELD, SCALE
from penstock.nsd.regions import Voxels
from penstock.nsd.repetitions import Padding, Reps, by_picture, neighbours, stacked
from penstock.nsd.stimuli import Pictures, find_extra, find_pictures
from penstock.nsd.table import TrialTable
from penstock.nsd.trials import BEHAVIOUR

if TYPE_CHECKING:
    from penstock.nsd.subject import NSD

ALIASES = {"coco": "stim_id", "trial": "global_trial", "images": "image", "reps": "n_reps"}
"""MindEye's names of columns."""
FIT_MEMORY = 256 * MiB
Where = Mapping[str, Any] | Callable[[Any], Any] | None
OF_VOXELS = ("voxels", "past_voxels", "future_voxels")


@dataclass(frozen=True, eq=False)
class Choice:
    """The trials that were chosen, among those of the chosen sessions."""

    everything: TrialTable
    """The trial table of all sessions."""
    inside: np.ndarray
    """Its rows that belong to the chosen sessions."""
    rows: np.ndarray
    """Which of those are samples, or parts of samples."""

    @cached_property
    def trials(self) -> TrialTable:
        """The trial table of the chosen sessions."""
        return self.everything.take(self.inside)

    @property
    def sessions(self) -> list[int]:
        return np.unique(self.trials["session"]).tolist()


@dataclass(frozen=True, eq=False, kw_only=True)
class SampleRequest:
    """How samples are made; see ``NSD.dataset``."""

    columns: tuple[str, ...]
    voxels: Voxels | None
    reps: Reps
    padding: Padding
    context: tuple[int, int]
    zscore: str | None
    zscore_when: str
    fitted_on: np.ndarray
    dtype: np.dtype
    pictures: Pictures
    extra: Mapping[str, Any]
    on_error: OnError

    def __post_init__(self) -> None:
        checks.one_of("reps", self.reps, get_args(Reps))
        checks.one_of("stack_padding", self.padding, get_args(Padding))
        checks.one_of("zscore_when", self.zscore_when, ("before", "after"))
        if self.zscore not in ("session", "run", "train", None):
            raise ConfigError(f'zscore={self.zscore!r}: expected "session", "run", "train" or None')
        if self.zscore is not None and not is_float(self.dtype):
            raise ConfigError(f"dtype={self.dtype}: z-scores need a float; leave zscore out for numbers as stored")
        if self.zscore is not None and not set(OF_VOXELS) & set(self.columns):
            raise ConfigError(f"zscore={self.zscore!r}: without voxels among the columns there is nothing to normalize")
        if self.zscore_when == "after" and (self.zscore, self.reps) != ("train", "mean"):
            raise ConfigError(
                f'zscore_when="after": normalizes the means of pictures, so it goes with reps="mean" and '
                f'zscore="train"; here reps={self.reps!r} and zscore={self.zscore!r}'
            )
        if not isinstance(self.extra, Mapping):
            raise ConfigError(
                f"extra={checks.shown(self.extra)}: expected arrays by name, such as {{'clip': 'clip.npy'}}"
            )
        if not isinstance(self.context, Sequence) or len(self.context) != 2 or not all(map(_is_count, self.context)):
            raise ConfigError(f"context={self.context!r}: expected how many trials before and how many after: (3, 2)")


class Samples:
    """One dataset in the making."""

    def __init__(self, nsd: "NSD", stored: Sessions, choice: Choice, request: SampleRequest) -> None:
        self.nsd, self.stored, self.choice, self.request = nsd, stored, choice, request
        self.trials = choice.trials
        self.lines: np.ndarray | None = None
        """(pictures, most): the trials of each, where samples are made of pictures."""
        self.rows = choice.rows
        """The trial that stands for each sample."""
        if request.reps != "single":
            self.lines = by_picture(self.trials["stim_id"], choice.rows)
            self._count_trials(self.lines)
            self.rows = choice.rows if request.reps == "random" else self.lines[:, 0]

    def _count_trials(self, lines: np.ndarray) -> None:
        """Let ``n_reps`` count the trials that samples are made of, not all that are on disk."""
        used = lines != NO_ROW
        counts = self.trials["n_reps"].copy()
        counts[lines[used]] = np.repeat(used.sum(axis=1), used.sum(axis=1))
        self.trials = self.trials.replaced(n_reps=counts)

    def parts(self) -> dict[str, Any]:
        """Column -> what ``join`` takes."""
        return {name: self._part(name, ALIASES.get(name, name)) for name in self.request.columns}

    def table(self) -> TrialTable:
        """The trial table of the samples."""
        return self.trials.take(self.rows)

    def lines_of_samples(self) -> np.ndarray | None:
        """For ``reps="random"``: (pictures, most), the samples that show each picture."""
        if self.request.reps != "random" or self.lines is None:
            return None
        return np.where(self.lines == NO_ROW, NO_ROW, np.searchsorted(self.rows, self.lines))

    def _part(self, column: str, name: str) -> Any:
        if name in OF_VOXELS and (name == "voxels" or self.request.context[name == "future_voxels"]):
            return self._as_xyz(self._voxels(name))
        if name == "image":
            return self._pictures()
        if name in self.request.extra:
            return find_extra(name, self.request.extra[name], self._stimuli)
        if name in behaviour.FIELDS:
            return self._behaviour[name]
        if name in self.trials:
            return from_arrays(**{name: self.trials[name][self.rows]})
        hint = " without context=(past, future)" if name in OF_VOXELS else ""
        if name.upper() in BEHAVIOUR:
            hint = f" without {self.nsd.layout.responses}; fetch it"
        known = ("voxels", "image", "coco", *self.trials.columns, *behaviour.FIELDS, *self.request.extra)
        near = checks.nearest(column, known)
        way = f" Did you mean {near!r}?" if near and not hint else ""
        raise ConfigError(f"columns: no {column!r}{hint}.{way} There are {', '.join(dict.fromkeys(known))}")

    @cached_property
    def _stimuli(self) -> np.ndarray:
        return self.trials["stim_id"][self.rows]

    @cached_property
    def _behaviour(self) -> dict[str, np.ndarray]:
        """Of all sessions: a picture's other trials may lie in those that were not chosen, or are not on disk."""
        return behaviour.behaviour(self.nsd.all_trials(), self.trials["global_trial"][self.rows])

    def _pictures(self) -> tuple[Dataset, np.ndarray]:
        wanted = self.request.pictures
        if wanted.source is None and self.nsd.stimuli is not None:
            wanted = replace(wanted, source=self.nsd.stimuli)
        found = find_pictures(self.nsd.layout, wanted, self.stored.handles)
        rows = found.rows[np.minimum(self._stimuli, len(found.rows) - 1)]
        absent = (self._stimuli >= len(found.rows)) | (rows < 0)
        if absent.any():
            few = np.unique(self._stimuli[absent])
            raise Missing(
                f"{found.path}: {len(few):,} pictures that were shown are not in it, such as stim_id {few[:5].tolist()}"
            )
        return found.pictures, rows

    def _voxels(self, name: str) -> Dataset:
        if name != "voxels":
            around = neighbours(self.trials["session"], self.rows, *self.request.context)
            return self._base.gather(around[name == "future_voxels"], absent="zeros")
        if self.lines is None:
            return self._base if len(self.rows) == len(self._base) else self._base.select(self.rows)
        base, lines = self._trials_of_pictures()
        if self.request.reps == "random":
            return base if len(self.rows) == len(base) else base.select(self.rows)
        if self.request.reps == "stack":
            return base.gather(stacked(lines, self.request.padding))
        means = base.gather(lines, mean=True)
        return self._normalized_means(means) if self.request.zscore_when == "after" else means

    def _trials_of_pictures(self) -> tuple[Dataset, np.ndarray]:
        """The trials that show the pictures, and which of them show each one.

        Pictures need trials of several sessions: sessions that can only be read whole are held in memory.
        """
        assert self.lines is not None
        if self._stored.store.blocks is None:
            return self._base, self.lines
        rows = np.unique(self.lines[self.lines != NO_ROW])
        chosen = self._stored.select(rows)
        held = chosen if chosen.store.blocks is None else Dataset(HeldSessions(chosen.store))
        return self._scaled(held, rows), np.where(self.lines == NO_ROW, NO_ROW, np.searchsorted(rows, self.lines))

    @cached_property
    def _stored(self) -> Dataset:
        """A row per trial of the chosen sessions, as stored."""
        return self.nsd.betas(self.request.voxels, self.choice.sessions, stored=self.stored)

    @cached_property
    def _base(self) -> Dataset:
        return self._scaled(self._stored, np.arange(len(self._stored)))

    def _scaled(self, base: Dataset, rows: np.ndarray) -> Dataset:
        """Stored trials, which are these rows of the chosen sessions, in percent of signal change or as z-scores.

        Both are computed while a batch is filled: whole numbers are what is stored, and kept in memory.
        """
        stored, dtype = base.fields[FIELD].dtype, self.request.dtype
        if self.request.zscore is None or self.request.zscore_when == "after":
            if dtype.kind in "iu":
                if not np.can_cast(stored, dtype):
                    raise ConfigError(f"dtype={dtype}: cannot hold all values of {stored}, as which voxels are stored")
                return base if dtype == stored else base.cast(FIELD, dtype)
            dtype = dtype if self.request.zscore is None else np.dtype(np.float32)
            return base.cast(FIELD, dtype, divisor=SCALE if stored.kind in "iu" else 1)
        groups = self._groups(self.request.zscore)
        moments = self._moments(groups)
        return base.normalize(FIELD, moments.mean, moments.spread, groups[rows], dtype)

    def _moments(self, groups: np.ndarray) -> zscore.Moments:
        """Of the groups that are used."""
        used = np.unique(groups[self.choice.rows])
        fitted_on = self.request.fitted_on[np.isin(groups[self.request.fitted_on], used)]
        moments = self._fitted(self._stored, fitted_on, groups)
        self._check_fitted(moments, used, groups)
        return moments

    def _normalized_means(self, means: Dataset) -> Dataset:
        """Means of pictures as z-scores, fitted on the means of the pictures for fitting, as brain-diffuser does."""
        lines = by_picture(self.trials["stim_id"], self.request.fitted_on)
        if not len(lines):
            raise ConfigError('zscore="train": there is no trial to fit it on; pass zscore_fit="all", or booleans')
        if self._base.store.blocks is None:
            fitted_on = self._base.gather(lines, mean=True)
            moments = self._fitted(fitted_on, np.arange(len(lines)), np.zeros(len(lines), np.int64), ddof=1)
        else:
            moments = self._fitted_means(lines)
        return means.normalize(FIELD, moments.mean, moments.spread, np.zeros(len(means), np.int64), self.request.dtype)

    def _check_fitted(self, moments: zscore.Moments, used: np.ndarray, groups: np.ndarray) -> None:
        unfitted = used[moments.counts[used] == 0]
        if len(unfitted):
            session, run = (self.trials[name][groups == unfitted[0]][0] for name in ("session", "run"))
            raise ConfigError(
                f"zscore={self.request.zscore!r}: nothing to fit it on for {len(unfitted)} of {len(used)}, the first "
                f"being that of session {session}, run {run}: the trials chosen for fitting have "
                f'none there. Pass zscore_fit="all", or booleans of your own'
            )

    def _groups(self, kind: str) -> np.ndarray:
        session, run = self.trials["session"], self.trials["run"]
        if kind == "train":
            return np.zeros(len(session), np.int64)
        key = session if kind == "session" else session * 1000 + run
        return np.asarray(np.searchsorted(np.unique(key), key))

    def _fitted(self, base: Dataset, rows: np.ndarray, groups: np.ndarray, ddof: int = 0) -> zscore.Moments:
        key = digest(base.fingerprint, digest(rows.tobytes()), digest(groups.tobytes()), ddof)
        fit = partial(zscore.fit, base, rows, groups, memory=FIT_MEMORY, ddof=ddof, on_error=self.request.on_error)
        return self._fitted_once(key, fit)

    def _fitted_once(self, key: str, fit: Callable[[], zscore.Moments]) -> zscore.Moments:
        """Training and validation share what was fitted on the same trials."""
        if key not in self.nsd.moments:
            self.nsd.moments[key] = fit()
        return self.nsd.moments[key]

    def _fitted_means(self, lines: np.ndarray) -> zscore.Moments:
        """The moments of the means of pictures, from sessions that can only be read whole."""
        pictures = np.full(len(self.trials), -1, np.int64)
        used = lines != NO_ROW
        pictures[lines[used]] = np.repeat(np.arange(len(lines)), used.sum(axis=1))
        key = digest("means", self._base.fingerprint, digest(pictures.tobytes()))
        fit = partial(zscore.fit_means, self._base, pictures, memory=FIT_MEMORY // 2, passes=self.stored.passes)
        return self._fitted_once(key, partial(fit, on_error=self.request.on_error))

    def _as_xyz(self, part: Dataset) -> Dataset:
        """Volumes as (X, Y, Z), which are stored as (Z, Y, X); a view, in a loader's batches."""
        if self.request.voxels is not None or not self.nsd.stored_reversed:
            return part
        axes = len(part.fields[FIELD].shape)
        return part.permute(FIELD, *range(axes - 3), axes - 1, axes - 2, axes - 3)


def _is_count(value: Any) -> bool:
    return checks.is_whole(value) and value >= 0


def matching(trials: TrialTable, where: Where) -> np.ndarray:
    """Whether each trial has the values asked for."""
    if where is None:
        return np.ones(len(trials), bool)
    if callable(where):
        return booleans(where(trials.frame), trials, "where")
    if not isinstance(where, Mapping):
        raise ConfigError(f"where={checks.shown(where)}: expected a dict of columns and values, or a function")
    keep = np.ones(len(trials), bool)
    for name, wanted in where.items():
        if name not in trials:
            hint = " without responses.tsv; fetch it" if str(name).upper() in BEHAVIOUR else ""
            raise ConfigError(f"where: no column {name!r}{hint}. The trial table has {', '.join(trials.columns)}")
        values = wanted if isinstance(wanted, list | tuple | set | range | np.ndarray) else [wanted]
        keep &= np.asarray(trials.frame[name].isin(list(values)))
    return keep


def booleans(given: Any, trials: TrialTable, argument: str) -> np.ndarray:
    """One boolean per row of the trial table, or an error that says so."""
    found = np.asarray(given)
    if found.dtype != bool or found.shape != (len(trials),):
        raise ConfigError(
            f"{argument}: {found.dtype} of shape {found.shape}: expected one boolean for each of {len(trials):,} trials"
        )
    return found
