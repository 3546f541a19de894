"""One subject of the Natural Scenes Dataset: what is on disk, and datasets made of it."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from penstock.dataset import Dataset, concat
from penstock.errors import ConfigError, Missing
from penstock.fileio import Files, remote_files
from penstock.nsd import bucket
from penstock.nsd.betas import SessionFiles, Sessions, check_sessions
from penstock.nsd.dataset import NSDDataset
from penstock.nsd.layout import BETAS, STIMULI, SUBJECTS, TRIALS, Layout
from penstock.nsd.prepare import prepare
from penstock.nsd.prepared import Prepared
from penstock.nsd.regions import Order, Region, Voxels, find_voxels, region_names, volume_shape
from penstock.nsd.repetitions import Reps
from penstock.nsd.samples import Choice, Samples, Wanted, booleans
from penstock.nsd.splits import LEAST_SESSIONS, choose
from penstock.nsd.stimuli import Pictures
from penstock.nsd.trials import Sources, read_trials
from penstock.nsd.zscore import Moments
from penstock.urls import is_remote

if TYPE_CHECKING:
    from penstock.remote import RemoteOptions

Where = Mapping[str, Any] | Callable[[Any], Any] | None


class NSD:
    """A subject's betas, trials, regions and pictures, as far as they are on disk.

    root:       the folder that holds ``nsddata_betas``, ``nsddata`` and ``nsddata_stimuli``; or a bucket,
                ``s3://natural-scenes-dataset``, whose tables and regions are copied to the user's cache folder and
                whose betas and pictures are read where they are
    subject:    1 to 8
    space:      "func1pt8mm" or "func1mm"
    betas:      the version, by its name or as "b1", "b2", "b3"
    prepared:   where ``prepare`` keeps its copies; a folder ``penstock`` in the root by default
    remote:     how to reach a bucket: ``penstock.remote.RemoteOptions``
    cache_dir:  a folder for copies of a bucket's files; betas and pictures are copied there too, when they are read
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        subject: int = 1,
        space: str = "func1pt8mm",
        betas: str = "b3",
        *,
        prepared: str | os.PathLike[str] | None = None,
        remote: "RemoteOptions | None" = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if subject not in SUBJECTS:
            raise ConfigError(f"subject={subject!r}: expected a whole number from 1 to 8")
        self.layout = Layout(os.fspath(root), int(subject), space, BETAS.get(betas, betas))
        self.stimuli: str | None = None
        """The address of the pictures, in a bucket."""
        self.options: dict[str, Any] = {}
        """Of ``open``, for files in a bucket."""
        files = None
        if is_remote(self.layout.root):
            self.options = {"remote": remote, "cache_dir": cache_dir}
            files = remote_files(cache_dir, None, remote)
            self._files, self.layout = self._in_bucket(files, cache_dir)
        elif not os.path.isdir(self.layout.root):
            raise Missing(f"{self.layout.root}: no such folder; expected the one that holds nsddata_betas and nsddata")
        else:
            self._files = SessionFiles.find(self.layout)
        self._prepared = Prepared(self.layout.prepared if prepared is None else os.fspath(prepared), files)
        self.sessions: tuple[int, ...] = tuple(sorted({*self._files.paths, *self._prepared.sessions()}))
        """Those that are there."""
        if not self.sessions:
            raise Missing(_nothing_there(self.layout))
        self.moments: dict[str, Moments] = {}
        """What z-scores were fitted: once for training and validation alike."""

    def _in_bucket(self, files: Files, cache_dir: Any) -> tuple[SessionFiles, Layout]:
        there = self.layout
        found = SessionFiles.listed(there.beta_folder, bucket.sessions(there, files), self.options)
        if not found.paths:
            raise Missing(f"no betas of subject {self.subject}: no betas_sessionNN.hdf5 in {there.beta_folder}")
        folder = bucket.default_mirror(there.root) if cache_dir is None else os.path.join(os.fspath(cache_dir), "nsd")
        self.stimuli = bucket.address(there, STIMULI)
        return found, bucket.mirrored(there, folder, files)

    @property
    def subject(self) -> int:
        return self.layout.subject

    @cached_property
    def _stored(self) -> Sessions:
        return Sessions(self._files, volume_shape(self.layout))

    @cached_property
    def _sources(self) -> Sources:
        return Sources(self.layout)

    @property
    def trials_per_session(self) -> int:
        note = self._prepared.notes()
        return self._stored.trials if note is None else note.trials

    @property
    def stored_reversed(self) -> bool:
        """Whether volumes are stored as (Z, Y, X), as released."""
        note = self._prepared.notes()
        return self._stored.reversed if note is None else note.reversed

    @cached_property
    def trials(self) -> Any:
        """A DataFrame with a row for each trial of the sessions that are there; ids count from 0.

        subject, session, run, trial_in_run (the three from 1), trial_in_session, global_trial, stim_id, cocoId,
        rep (times the picture was shown before), n_reps (times it is shown in this table), shared1000, and the
        columns of ``responses.tsv`` in lower case.
        """
        return read_trials(self._sources, self.sessions, self.trials_per_session)

    @cached_property
    def regions(self) -> dict[str, tuple[str, ...]]:
        """Regions that there is a file of, and the names of their labels."""
        return region_names(self.layout)

    @property
    def missing(self) -> tuple[str, ...]:
        """What is not there, in words: sessions, tables, regions, pictures."""
        layout, told = self.layout, []
        known = self._sources.responses
        last = max(self.sessions) if known is None else int(np.asarray(known["SESSION"]).max())
        gone = sorted(set(range(1, last + 1)) - set(self.sessions))
        if gone:
            told.append(f"sessions {gone} of {last}: {layout.session(gone[0], '.hdf5')}")
        for what, path in (
            ("behaviour", layout.responses),
            ("the design", layout.design),
            ("what is known of each picture", layout.stim_info),
            ("regions", layout.regions),
            ("the brain mask", layout.brainmask),
            ("the noise ceiling", layout.noise_ceiling),
            ("pictures", layout.stimuli),
        ):
            if not os.path.exists(path) and (what != "pictures" or self.stimuli is None):
                told.append(f"{what}: {path}")
        return tuple(told)

    def voxels(self, roi: Region = None, *, min_ncsnr: float | None = None, order: Order = "nifti") -> Voxels | None:
        """Which voxels a region has, in which order; None for all, as whole volumes."""
        return find_voxels(self.layout, roi, min_ncsnr, order)

    def betas(self, voxels: Voxels | None, sessions: Sequence[int] | None = None) -> Dataset:
        """``betas`` as stored, a row for each row of ``trials`` (of these sessions): what ``prepare`` made, or raw."""
        chosen = self.sessions if sessions is None else tuple(sessions)
        parts = []
        for session in chosen:
            source = self._files.paths.get(session)
            copy = self._prepared.find(session, voxels, source)
            if copy is None and source is None:
                name = "whole volumes" if voxels is None else voxels.name
                raise Missing(
                    f"session {session}: only copies of other voxels are there, none of {name}, and no betas to make "
                    f"it of in {self._files.folder}"
                )
            parts.append(self._stored.chosen(session, voxels) if copy is None else copy)
        return parts[0] if len(parts) == 1 else concat(parts)

    def dataset(
        self,
        columns: Sequence[str] = ("voxels", "image", "coco"),
        *,
        roi: Region = "nsdgeneral",
        min_ncsnr: float | None = None,
        voxel_order: Order = "nifti",
        sessions: Iterable[int] | None = None,
        split: str | np.ndarray | None = None,
        split_seed: int = 0,
        where: Where = None,
        reps: Reps = "single",
        context: tuple[int, int] = (0, 0),
        zscore: Literal["session", "run", "train"] | None = None,
        zscore_fit: Literal["own", "train", "all"] | np.ndarray | None = None,
        dtype: str = "float32",
        images: Pictures | str | os.PathLike[str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> NSDDataset:
        """Samples to train on.

        columns:      what a sample consists of: "voxels", "image", "coco" (or "stim_id"), any column of ``trials``,
                      "behav", "past_behav", "future_behav", "olds_behav" as MindEye2 has them, "past_voxels" and
                      "future_voxels" with ``context``, and the names of ``extra``
        roi:          "nsdgeneral", "streams:ventral", "V1", a NIfTI file, booleans of shape (X, Y, Z), a list of such
                      (their union), or None for whole volumes
        min_ncsnr:    leave out voxels with a noise ceiling below this, or none
        voxel_order:  "nifti" as ``nifti[mask]`` has them (MindEye's), or "hdf5" as ``h5[:, mask.T]``
        sessions:     these sessions alone
        split:        "mindeye2/train", "shared1000/test", "first-10/train" …, or booleans, one for each row of
                      ``trials``; see ``penstock.nsd.splits``
        where:        ``{"iscorrect": 1, "run": [1, 2]}``, or a function of the trial table that gives booleans
        reps:         "single" trials; or samples are pictures: the "mean" of their trials, a "stack" (3, voxels)
                      padded as MindEye does, or a "random" one of them each epoch
        context:      trials before and after, for "past_voxels" and "future_voxels"; zeros beyond a session's ends
        zscore:       by "session", by "run", or by all "train"ing trials; None for percent of signal change
        zscore_fit:   what it is fitted on: the dataset's "own" trials (without a split, the default), "train" (all
                      whose picture is not shared; with a split, the default), "all", or booleans, one for each row of
                      ``trials``
        dtype:        of voxels; an integer type gives them as stored, 300 to the percent
        images:       a ``Pictures``, or where they are; what the root has by default
        extra:        further arrays, one row a picture: ``{"clip": "clip.npy", "caption": "captions.json"}``
        """
        if isinstance(columns, str) or not columns or len(set(columns)) != len(columns):
            raise ConfigError(f'columns={columns!r}: expected a tuple of names, such as ("voxels", "image", "coco")')
        choice = self._choice(sessions, split, split_seed, where)
        wanted = Wanted(
            tuple(columns), self.voxels(roi, min_ncsnr=min_ncsnr, order=voxel_order), reps, context, zscore,
            _fitted_on(zscore_fit, split is not None, choice), np.dtype(dtype),
            images if isinstance(images, Pictures) else Pictures(images), extra or {},
        )  # fmt: skip
        return Samples(self, choice, wanted).dataset()

    def prepare(
        self,
        roi: Region = "nsdgeneral",
        *,
        min_ncsnr: float | None = None,
        voxel_order: Order = "nifti",
        sessions: Iterable[int] | None = None,
        memory: int | str = "256MiB",
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> str:
        """Copy sessions by trial, for these voxels (None: whole volumes), so that each trial can be read by itself.

        One pass, in bounded memory. Sessions that are there already are not made again, so it can be stopped and gone
        on with. ``dataset`` uses the copies from then on, for as long as their sources stay as they are. Returns the
        folder; ``progress`` is told bytes done, and in all.
        """
        voxels = self.voxels(roi, min_ncsnr=min_ncsnr, order=voxel_order)
        wanted = list(self._files.paths if sessions is None else sessions)
        check_sessions(wanted, list(self._files.paths), self._files.folder)
        return prepare(self._stored, self._prepared, voxels, wanted, memory=memory, progress=progress)

    def _choice(self, sessions: Iterable[int] | None, split: Any, seed: int, where: Where) -> Choice:
        """The trials that are asked for, among those of the sessions that are."""
        trials, wanted = self.trials, self.sessions if sessions is None else tuple(sessions)
        check_sessions(wanted, self.sessions, self._files.folder)
        keep = np.array(trials["session"].isin(wanted))
        inside = np.flatnonzero(keep)
        if isinstance(split, str):
            least = LEAST_SESSIONS if self.trials_per_session == TRIALS else max(self.sessions)
            keep &= choose(trials, split, seed=seed, least_sessions=least)
        elif split is not None:
            keep &= booleans(split, trials, "split")
        keep &= _where(trials, where)
        if not keep.any():
            raise ConfigError("no trial is left: what sessions=, split= and where= ask for excludes all of them")
        return Choice(trials, inside, np.flatnonzero(keep[inside]))

    def __repr__(self) -> str:
        kind = sorted({os.path.basename(path).partition(".")[2] for path in self._files.paths.values()})
        told = f"<NSD subject {self.subject}, {self.layout.space}, {self.layout.betas}: {len(self.sessions)} sessions"
        return "; missing ".join([f"{told} ({', '.join(kind) or 'prepared'})", *self.missing[:3]]) + ">"


def _fitted_on(given: Any, with_split: bool, choice: Choice) -> np.ndarray:
    """Rows of the chosen sessions that z-scores are fitted on."""
    kind = ("train" if with_split else "own") if given is None else given
    if not isinstance(kind, str):
        return np.flatnonzero(booleans(kind, choice.everything, "zscore_fit")[choice.inside])
    if kind not in ("own", "train", "all"):
        raise ConfigError(f'zscore_fit={kind!r}: expected "own", "train", "all", or booleans')
    unshared = np.flatnonzero(~np.asarray(choice.trials["shared1000"], bool))
    return {"own": choice.rows, "train": unshared, "all": np.arange(len(choice.trials))}[kind]


def _where(trials: Any, where: Where) -> np.ndarray:
    if where is None:
        return np.ones(len(trials), bool)
    if callable(where):
        return booleans(where(trials), trials, "where")
    keep = np.ones(len(trials), bool)
    for name, wanted in where.items():
        if name not in trials:
            raise ConfigError(f"where: no column {name!r}; the trial table has {', '.join(trials.columns)}")
        values = wanted if isinstance(wanted, list | tuple | set | range | np.ndarray) else [wanted]
        keep &= np.asarray(trials[name].isin(list(values)))
    return keep


def _nothing_there(layout: Layout) -> str:
    """Why there are no betas, and what there is instead."""
    told = f"no betas of subject {layout.subject}: no betas_sessionNN.hdf5 or .nii.gz in {layout.beta_folder}"
    here = layout.root
    for step in ("nsddata_betas", "ppdata", layout.name, layout.space, layout.betas):
        inner = os.path.join(here, step)
        if not os.path.isdir(inner):
            found = ", ".join(sorted(os.listdir(here))[:12]) or "nothing"
            return f"{told}. There is no {step} in {here}, which has: {found}. Check root, subject, space and betas"
        here = inner
    return f"{told}. The folder is there, without sessions; fetch them"


def subjects(root: str | os.PathLike[str]) -> list[int]:
    """Subjects that there are betas of."""
    folder = os.path.join(os.fspath(root), "nsddata_betas", "ppdata")
    names = os.listdir(folder) if os.path.isdir(folder) else ()
    return sorted(int(name[4:]) for name in names if name.startswith("subj") and name[4:].isdecimal())
