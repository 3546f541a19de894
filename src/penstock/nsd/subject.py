"""One subject of the Natural Scenes Dataset: what is on disk, and the datasets made of it."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from penstock.base import checks
from penstock.base.dtypes import checked_dtype
from penstock.base.sizes import parse_size
from penstock.base.urls import is_remote
from penstock.dataset.composition import concat
from penstock.dataset.dataset import Dataset, OnError, check_on_error
from penstock.errors import ConfigError, DataError, Missing
from penstock.files.files import Files, remote_files
from penstock.formats.paths import make_absolute
from penstock.nsd import bucket
from penstock.nsd.betas import SessionFiles, Sessions, chosen_sessions, ranges, why_no_sessions
from penstock.nsd.dataset import COLUMNS, NSDDataset
from penstock.nsd.layout import BETAS, STIMULI, SUBJECTS, SubjectLayout
from penstock.nsd.prepare import PrepareRequest, prepare
from penstock.nsd.prepared import Copies, Copy, Prepared, one_file
from penstock.nsd.regions import Order, Region, Voxels, find_voxels, region_names, volume_shape
from penstock.nsd.repetitions import Padding, Reps
from penstock.nsd.samples import Choice, SampleRequest, Samples, Where, booleans, matching
from penstock.nsd.splits import choose, fitting, needs_design
from penstock.nsd.stimuli import Pictures
from penstock.nsd.table import TrialTable
from penstock.nsd.trials import SessionLength, Sources, planned_trials, read_all_trials, read_trials
from penstock.nsd.zscore import Moments

if TYPE_CHECKING:
    from penstock.remote.ranges import RemoteOptions


class NSD:
    """A subject's betas, trials, regions and pictures, as far as they are on disk.

    root:       the folder that holds ``nsddata_betas``, ``nsddata`` and ``nsddata_stimuli``; or a bucket,
                ``s3://natural-scenes-dataset``: its tables and regions are copied to the user's cache folder, its betas
                and pictures are read where they are
    subject:    1 to 8
    space:      "func1pt8mm" or "func1mm"; surfaces (fsaverage, nativesurface) are not read
    betas:      the version, by its name or as "b1", "b2", "b3"
    prepared:   where ``prepare`` keeps its copies of this subject and version; by default in ``penstock`` in the root
    remote:     how to reach a bucket: ``penstock.remote.ranges.RemoteOptions``
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
        subject = checks.whole("subject", subject, least=1, most=len(SUBJECTS))
        place = make_absolute(checks.path("root", root))
        if (inner := SubjectLayout.of_folder(place)).root != place:
            raise ConfigError(
                f"root={place!r}: is the folder of one version of betas. Pass NSD({inner.root!r}, {inner.subject}, "
                f"{inner.space!r}, {inner.betas!r}), or NSDDataset with this folder"
            )
        for argument, name in (("space", space), ("betas", betas)):
            if not isinstance(name, str):
                raise ConfigError(f"{argument}={checks.shown(name)}: expected the name of a folder of the release")
        self.layout = SubjectLayout(place, subject, space, BETAS.get(betas, betas))
        self.stimuli: str | None = None
        """The address of the pictures, in a bucket."""
        self._remote, self._cache_dir = remote, None if cache_dir is None else os.path.abspath(cache_dir)
        self._opened: dict[int | None, Sessions] = {}
        files = None
        if is_remote(self.layout.root):
            files = self._handles(None)
            self._files, self.layout = self._in_bucket(files)
        elif not os.path.isdir(self.layout.root):
            what = "is a file" if os.path.exists(self.layout.root) else "no such folder"
            raise Missing(f"{self.layout.root}: {what}; expected the folder that holds nsddata_betas and nsddata")
        else:
            self._files = SessionFiles.find(self.layout)
        copies = self.layout.prepared if prepared is None else make_absolute(checks.path("prepared", prepared))
        self._prepared = Prepared(copies, self.layout.version, files)
        self.sessions: tuple[int, ...] = tuple(sorted({*self._files.paths, *self._prepared.sessions()}))
        """The sessions on disk."""
        if not self.sessions:
            raise Missing(why_no_sessions(self.layout))
        self.moments: dict[str, Moments] = {}
        """The z-scores fitted so far: training and validation share them."""

    def _in_bucket(self, files: Files) -> tuple[SessionFiles, SubjectLayout]:
        layout = self.layout
        found = SessionFiles.listed(layout.beta_folder, bucket.sessions(layout, files))
        if not found.paths:
            raise Missing(f"no betas of subject {self.subject}: no betas_sessionNN.hdf5 in {layout.beta_folder}")
        cache_dir = self._cache_dir
        folder = bucket.default_mirror(layout.root) if cache_dir is None else os.path.join(cache_dir, "nsd")
        self.stimuli = bucket.address(layout, STIMULI)
        return found, bucket.mirrored(layout, folder, files)

    def _handles(self, max_open_files: int | None) -> Files:
        return remote_files(self._cache_dir, None, self._remote, max_open=max_open_files)

    def _stored(self, max_open_files: int | None = None) -> Sessions:
        """The sessions, read through at most so many open files."""
        if max_open_files not in self._opened:
            handles = self._handles(max_open_files)
            self._opened[max_open_files] = Sessions(self._files, volume_shape(self.layout), handles)
        return self._opened[max_open_files]

    @property
    def subject(self) -> int:
        return self.layout.subject

    @cached_property
    def _sources(self) -> Sources:
        return Sources(self.layout)

    @property
    def trials_per_session(self) -> int:
        return self._session_length.trials

    @cached_property
    def _session_length(self) -> SessionLength:
        note = self._prepared.any_note()
        if note is not None:
            return SessionLength(note.trials, note.path)
        return SessionLength(self._stored().trials, next(iter(self._files.paths.values())))

    @property
    def stored_reversed(self) -> bool:
        """Whether volumes are stored as (Z, Y, X), as in the release."""
        note = self._prepared.any_note()
        return self._stored().reversed if note is None else note.reversed

    @property
    def trials(self) -> Any:
        """``table`` as a pandas DataFrame."""
        return self.table.frame

    @cached_property
    def table(self) -> TrialTable:
        """A row per trial of the sessions on disk; ids count from 0.

        subject, session, run, trial_in_run (these from 1), trial_in_session, global_trial, stim_id, cocoId,
        rep (how often the picture was shown before), n_reps (how often it is shown in this table), shared1000, and the
        columns of ``responses.tsv`` in lower case (NaN for sessions that it does not have).
        """
        return read_trials(self._sources, self.sessions, self._session_length)

    def all_trials(self) -> TrialTable:
        """The same columns, less n_reps, for all trials in ``responses.tsv`` too: row numbers are ``global_trial``."""
        return read_all_trials(self._sources, self.sessions, self._session_length)

    @cached_property
    def _planned(self) -> TrialTable | None:
        return planned_trials(self._sources, self.trials_per_session)

    @cached_property
    def regions(self) -> dict[str, tuple[str, ...]]:
        """Regions with a file, and the names of their labels."""
        return region_names(self.layout)

    @property
    def missing(self) -> tuple[str, ...]:
        """Descriptions of what is not on disk: sessions, tables, regions, pictures."""
        layout, found = self.layout, []
        answered = self._sources.sessions_answered
        last = max(*self.sessions, answered)
        gone = sorted(set(range(1, last + 1)) - set(self.sessions))
        if gone:
            found.append(f"sessions {ranges(gone)} of {last}: {layout.session(gone[0], '.hdf5')}")
        late = [session for session in self.sessions if session > answered]
        if answered and late:
            found.append(
                f"behaviour of sessions {ranges(late)}: {layout.responses} has only {ranges(range(1, answered + 1))} "
                f"and is older than the betas"
            )
        for what, path in (
            ("behaviour", layout.responses),
            ("the design", layout.design),
            ("the table of pictures", layout.stim_info),
            ("regions", layout.regions),
            ("the brain mask", layout.brainmask),
            ("the noise ceiling", layout.noise_ceiling),
            ("pictures", layout.stimuli),
        ):
            if not os.path.exists(path) and (what != "pictures" or self.stimuli is None):
                found.append(f"{what}: {path}")
        return tuple(found)

    def voxels(self, roi: Region = None, *, min_ncsnr: float | None = None, order: Order = "nifti") -> Voxels | None:
        """Which voxels a region has, in which order; None for all, as whole volumes."""
        return find_voxels(self.layout, roi, min_ncsnr, order)

    def betas(
        self, voxels: Voxels | None, sessions: Sequence[int] | None = None, *, stored: Sessions | None = None
    ) -> Dataset:
        """``betas`` as stored, a row per row of ``trials`` (of these sessions): what ``prepare`` made, or raw."""
        stored = self._stored() if stored is None else stored
        known = self._prepared.copies(voxels, stored.handles)
        chosen = self.sessions if sessions is None else sessions
        copies = map(partial(self._copy, voxels=voxels, known=known), chosen)
        parts: list[Dataset] = []
        for path, group in groupby(zip(chosen, copies, strict=True), lambda each: each[1] and each[1].path):
            if path is None:
                parts += [stored.chosen(number, voxels) for number, _ in group]
            else:
                parts.append(one_file([copy for _, copy in group if copy is not None]))
        return parts[0] if len(parts) == 1 else concat(parts)

    def _copy(self, session: int, voxels: Voxels | None, known: Copies) -> Copy | None:
        source = self._files.paths.get(session)
        copy = known.find(session, source)
        if copy is None and source is None:
            name = "whole volumes" if voxels is None else voxels.name
            raise Missing(
                f"session {session}: only copies of other voxels are there, none of {name}, and no betas to make one "
                f"from in {self._files.folder}"
            )
        return copy

    def dataset(
        self,
        columns: Sequence[str] = COLUMNS,
        *,
        roi: Region = "nsdgeneral",
        min_ncsnr: float | None = None,
        voxel_order: Order = "nifti",
        sessions: Iterable[int] | None = None,
        split: str | np.ndarray | None = None,
        split_seed: int = 0,
        where: Where = None,
        reps: Reps = "single",
        stack_padding: Padding = "mindeye1",
        context: tuple[int, int] = (0, 0),
        zscore: Literal["session", "run", "train"] | None = None,
        zscore_fit: Literal["own", "train", "all"] | np.ndarray | None = None,
        zscore_when: Literal["before", "after"] = "before",
        dtype: str = "float32",
        images: Pictures | str | os.PathLike[str] | None = None,
        extra: Mapping[str, Any] | None = None,
        max_open_files: int | None = None,
        on_error: OnError = "raise",
    ) -> NSDDataset:
        """Samples to train on.

        columns:        what a sample consists of: "voxels", "image", "coco" (or "stim_id"), any column of ``trials``,
                        "behav", "past_behav", "future_behav", "olds_behav" as MindEye2 has them, "past_voxels" and
                        "future_voxels" with ``context``, and the names of ``extra``
        roi:            "nsdgeneral", "streams:ventral", "V1", a NIfTI file, booleans of shape (X, Y, Z), a list of
                        these (their union), or None for whole volumes
        min_ncsnr:      leave out voxels whose noise ceiling is lower, or not known
        voxel_order:    "nifti" for the order of ``nifti[mask]`` (MindEye's), or "hdf5" for ``h5[:, mask.T]``
        sessions:       only these sessions
        split:          "mindeye2/train", "shared1000/test", "first-10/train" …, or booleans, one per row of
                        ``trials``; see ``penstock.nsd.splits``
        where:          ``{"iscorrect": 1, "run": [1, 2]}``, or a function of the trial table that gives booleans
        reps:           "single" trials; or samples are pictures: the "mean" of their trials, a "stack" (3, voxels),
                        or a "random" one of them in each epoch
        stack_padding:  the third row of a picture shown twice, [a, b]: "mindeye1" adds their mean, "mindeye2" adds a.
                        A picture shown once is repeated three times
        context:        trials before and after, for "past_voxels" and "future_voxels"; zeros beyond a session's ends
        zscore:         per "session", per "run", or over all "train"ing trials; None for percent of signal change
        zscore_fit:     what it is fitted on: the dataset's "own" trials (the default without a split), "train" (the
                        default with a split: its training trials; per session or run, all trials whose picture it
                        does not hold out), "all", or booleans, one per row of ``trials``
        zscore_when:    with reps="mean" and zscore="train": "before" normalizes trials, then averages them; "after"
                        averages, then normalizes the means with a standard deviation of ddof 1, as brain-diffuser does
        dtype:          of voxels; an integer type gives them as stored, 300 per percent
        images:         a ``Pictures``, or where they are; by default the file in the root, at its stored size
        extra:          further arrays with a row per picture: ``{"clip": "clip.npy", "caption": "captions.json"}``
        max_open_files: data files held open at once; 0 opens a file for each read
        on_error:       "skip" leaves out sessions that cannot be opened, and lists why in ``left_out``
        """
        if isinstance(columns, str) or not columns or len(set(columns)) != len(columns):
            raise ConfigError(
                f'columns={columns!r}: expected a tuple of names, each once, such as ("voxels", "image", "coco")'
            )
        stored = self._stored(None if max_open_files is None else checks.whole("max_open_files", max_open_files))
        voxels = self.voxels(roi, min_ncsnr=min_ncsnr, order=voxel_order)
        chosen = chosen_sessions(sessions, self.sessions, self._files.folder)
        left_out: tuple[DataError, ...] = ()
        if check_on_error(on_error) == "skip":
            chosen, left_out = self._openable(chosen, voxels, stored)
        choice = self._choice(chosen, split, checks.whole("split_seed", split_seed), where)
        request = SampleRequest(
            columns=tuple(columns), voxels=voxels, reps=reps, padding=stack_padding, context=context, zscore=zscore,
            zscore_when=zscore_when, fitted_on=self._fitted_on(zscore_fit, zscore, split, split_seed, choice),
            dtype=checked_dtype(dtype, argument="dtype"), extra={} if extra is None else extra, on_error=on_error,
            pictures=images if isinstance(images, Pictures) else Pictures(images),
        )  # fmt: skip
        return NSDDataset.of(Samples(self, stored, choice, request), left_out)

    def _openable(
        self, sessions: Sequence[int], voxels: Voxels | None, stored: Sessions
    ) -> tuple[tuple[int, ...], tuple[DataError, ...]]:
        """The sessions that can be opened, and why the others cannot."""
        errors: dict[int, DataError] = {}
        known = self._prepared.copies(voxels, stored.handles)
        for session in sessions:
            try:
                if self._copy(session, voxels, known) is None:
                    stored.chosen(session, voxels)
            except DataError as error:
                errors[session] = error
        if len(errors) == len(sessions):
            raise next(iter(errors.values()))
        return tuple(session for session in sessions if session not in errors), tuple(errors.values())

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

        One pass, in bounded memory, into one file for all sessions, ``subject.npy``. It can be interrupted and resumed:
        sessions that were copied are not copied again. ``dataset`` uses the copies from then on, for as long as their
        sources stay the same. Returns the folder; ``progress`` is called with the bytes done and the bytes in all.
        """
        voxels = self.voxels(roi, min_ncsnr=min_ncsnr, order=voxel_order)
        chosen = chosen_sessions(sessions, list(self._files.paths), self._files.folder)
        request = PrepareRequest(self._stored(), self._prepared, voxels, chosen, parse_size(memory, argument="memory"))
        return prepare(request, progress)

    def _choice(self, sessions: Sequence[int], split: Any, seed: int, where: Where) -> Choice:
        """The trials that are asked for, among those of the chosen sessions."""
        trials = self.table
        keep = np.isin(trials["session"], sessions)
        inside = np.flatnonzero(keep)
        if isinstance(split, str):
            keep &= choose(trials, split, seed=seed, planned=self._planned_for(split))
        elif split is not None:
            keep &= booleans(split, trials, "split")
        keep &= matching(trials, where)
        if not keep.any():
            raise ConfigError("no trial is left: sessions=, split= and where= exclude all of them")
        return Choice(trials, inside, np.flatnonzero(keep[inside]))

    def _planned_for(self, split: str) -> TrialTable | None:
        """The trials of the whole experiment, where the split depends on them."""
        if not needs_design(split):
            return None
        if self._planned is None:
            raise Missing(
                f"split={split!r}: depends on the whole experiment, which {self.layout.design} or "
                f"{self.layout.stim_info} describes, and neither is there; fetch one of them"
            )
        return self._planned

    def _fitted_on(self, given: Any, zscore: str | None, split: Any, seed: int, choice: Choice) -> np.ndarray:
        """Rows of the chosen sessions on which z-scores are fitted."""
        kind = ("own" if split is None else "train") if given is None else given
        if not isinstance(kind, str):
            return np.flatnonzero(booleans(kind, choice.everything, "zscore_fit")[choice.inside])
        if kind not in ("own", "train", "all"):
            raise ConfigError(f'zscore_fit={kind!r}: expected "own", "train", "all", or booleans')
        if kind != "train":
            return choice.rows if kind == "own" else np.arange(len(choice.trials))
        if isinstance(split, str):
            planned = self._planned_for(split)
            return np.flatnonzero(fitting(choice.trials, split, zscore, seed=seed, planned=planned))
        return np.flatnonzero(~choice.trials["shared1000"])

    def __repr__(self) -> str:
        kind = sorted({os.path.basename(path).partition(".")[2] for path in self._files.paths.values()})
        about = f"<NSD subject {self.subject}, {self.layout.space}, {self.layout.betas}: {len(self.sessions)} sessions"
        return "; missing ".join([f"{about} ({', '.join(kind) or 'prepared'})", *self.missing[:3]]) + ">"


def subjects(root: str | os.PathLike[str], space: str = "func1pt8mm", betas: str = "b3") -> list[int]:
    """Subjects with betas in this space and version, or with copies of them."""
    place = make_absolute(checks.path("root", root))
    if not os.path.isdir(place):
        raise Missing(f"{place}: no such folder; expected the folder of a release on this machine")
    layouts = [SubjectLayout(place, subject, space, BETAS.get(betas, betas)) for subject in SUBJECTS]
    return [each.subject for each in layouts if _has_sessions(each)]


def _has_sessions(layout: SubjectLayout) -> bool:
    files = SessionFiles.find(layout)
    return bool(files.paths and files.folder != layout.root) or bool(
        Prepared(layout.prepared, layout.version).sessions()
    )
