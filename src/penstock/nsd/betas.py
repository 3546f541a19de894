"""Session files as one dataset with a row per trial: whatever their layout, voxels come in one order."""

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from penstock.base import checks, fork
from penstock.base.dataclass import dataclass
from penstock.base.spec import Cast, ReadPath, row_bytes
from penstock.dataset.dataset import Dataset
from penstock.dataset.rewrite import cast_fields, select_part
from penstock.dataset.store import Filled, Out, StoreBase, Wrapper, check_rows
from penstock.errors import ConfigError, DataError, Missing, SchemaMismatch
from penstock.files.files import Files
from penstock.formats.nifti import open_stored_volumes
from penstock.formats.open import open_with
from penstock.nsd.layout import FIELD, SubjectLayout
from penstock.nsd.prepared import stored_numbers
from penstock.nsd.regions import Voxels
from penstock.read.part import Mask, RowPart, elements
from penstock.read.pieces import WHOLE, Share

SUFFIXES = (".hdf5", ".h5", ".mat", ".nii", ".nii.gz")
"""Suffixes of session files, the preferred one first."""
NAME = re.compile(r"betas_session(\d+)(\.hdf5|\.h5|\.mat|\.nii|\.nii\.gz)")
SURFACE = re.compile(r"[lr]h\.betas_session\d+\.\w+")
"""Betas on a surface, one file per hemisphere: not read."""
MANY_PASSES = 1 << 20
SURFACE_SPACES = ("fsaverage", "nativesurface")
READ_VOLUMES = 'choose space="func1pt8mm" or "func1mm", or read them with nibabel'
CHECK = "Check root, subject, space and betas"
LEVELS = 5
"""Folders between the root and session files."""
ADVICE = "nsd.prepare() or `penstock nsd prepare`"
"""How to make copies in which each trial can be read by itself."""


@dataclass(frozen=True)
class SessionFiles:
    """The session files that exist: session -> path."""

    folder: str
    paths: dict[int, str]

    @classmethod
    def listed(cls, folder: str, urls: Sequence[str]) -> "SessionFiles":
        """Files on another machine."""
        matched = ((NAME.fullmatch(url.rpartition("/")[2]), url) for url in urls)
        return cls(folder, {int(found[1]): url for found, url in matched if found})

    @classmethod
    def find(cls, layout: SubjectLayout) -> "SessionFiles":
        """The files in the release's folder, or else those in the root itself."""
        for folder in (layout.beta_folder, layout.root):
            paths: dict[int, str] = {}
            for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
                if found := NAME.fullmatch(name):
                    session, path = int(found[1]), os.path.join(folder, name)
                    if session not in paths or _rank(path) < _rank(paths[session]):
                        paths[session] = path
            if paths:
                return cls(folder, dict(sorted(paths.items())))
        return cls(layout.beta_folder, {})


def _rank(path: str) -> int:
    return next(rank for rank, suffix in enumerate(SUFFIXES) if path.endswith(suffix))


class Sessions:
    """Sessions as they are stored; each is opened once, through handles that all of them share."""

    def __init__(self, files: SessionFiles, volume: tuple[int, ...] | None, handles: Files) -> None:
        self.files, self._volume, self.handles = files, volume, handles
        self._opened: dict[int, Dataset] = {}
        self._elements: dict[str, Mask] = {}

    def stored(self, session: int) -> Dataset:
        """One session: rows are trials, with the shape in which volumes are stored."""
        if session not in self._opened:
            try:
                self._opened[session] = self._open(self.files.paths[session])
            except DataError as error:
                others = [number for number in self.files.paths if number != session]
                rest = f"sessions={others}" if len(others) < 6 else f"sessions= all but {session}"
                raise type(error)(
                    f'session {session}: {error}. To go on without it, pass {rest}, or load with on_error="skip"'
                ) from error
        return self._opened[session]

    def _open(self, path: str) -> Dataset:
        if path.endswith((".nii", ".nii.gz")):
            made = Dataset(open_stored_volumes(path, FIELD, self.handles))
        else:
            made = open_with(self.handles, path, [FIELD])
        spec = made.fields[FIELD]
        if len(spec.shape) != 3 or spec.dtype.kind not in "iuf":
            raise SchemaMismatch(
                f"{path}: volumes have shape {spec.shape} and dtype {spec.dtype}; expected numbers with three axes: "
                f"(trials, Z, Y, X)"
            )
        return Dataset(SessionStore(made.store)) if made.store.blocks is not None else made

    @cached_property
    def _first(self) -> tuple[str, Dataset]:
        """The first session that can be opened, and its path; the others are compared with it."""
        failure: DataError | None = None
        for session, path in self.files.paths.items():
            try:
                return path, self.stored(session)
            except DataError as error:
                failure = failure or error
        raise failure or Missing(f"{self.files.folder}: no session files")

    @property
    def trials(self) -> int:
        """Trials per session."""
        return len(self._first[1])

    @property
    def passes(self) -> int:
        """How often a session may be read part by part: a compressed one is decompressed whole each time."""
        return 1 if any(path.endswith(".gz") for path in self.files.paths.values()) else MANY_PASSES

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in which a volume is stored."""
        return self._first[1].fields[FIELD].shape

    @property
    def reversed(self) -> bool:
        """Whether volumes are stored as (Z, Y, X), as in the release."""
        return self._volume is None or self.shape == self._volume[::-1] or self.shape != self._volume

    @property
    def volume(self) -> tuple[int, ...]:
        """X, Y, Z."""
        return self.shape[::-1] if self.reversed else self.shape

    def chosen(self, session: int, voxels: Voxels | None) -> Dataset:
        """One session with these voxels, in their order; None gives whole volumes as they are stored."""
        whole = self.stored(session)
        if len(whole) != self.trials:
            raise SchemaMismatch(
                f"{self.files.paths[session]}: has {len(whole)} trials, but {self._first[0]} has {self.trials}; fetch "
                f"the one that is not whole again, or leave it out with sessions="
            )
        if whole.fields[FIELD].shape != self.shape:
            raise SchemaMismatch(
                f"{self.files.paths[session]}: has volumes of {whole.fields[FIELD].shape}, but {self._first[0]} of "
                f"{self.shape}: one of them belongs to another space or subject"
            )
        return whole if voxels is None else whole.select_within(FIELD, self._numbers(voxels))

    def _numbers(self, voxels: Voxels) -> Mask:
        """The voxels' positions in a stored volume; all sessions share it, and what readers derive from it."""
        if voxels.key not in self._elements:
            if voxels.shape != self.volume:
                region = f" ({voxels.source})" if voxels.source else ""
                raise SchemaMismatch(
                    f"{self._first[0]}: has volumes of {self.volume}, but the region {voxels.name!r}{region} is of "
                    f"{voxels.shape}: it belongs to another space or subject"
                )
            numbers = stored_numbers(voxels, self.shape, reverse=self.reversed)
            self._elements[voxels.key] = elements(self.shape, numbers)
        return self._elements[voxels.key]


class SessionStore(Wrapper):
    """A session whose trials can only be read together."""

    def rebuild(self, children: Sequence[StoreBase]) -> StoreBase:
        return SessionStore(children[0])

    def describe_path(self, path: ReadPath) -> ReadPath:
        return replace(path, remedy=ADVICE)

    def read(self, rows: np.ndarray, at: np.ndarray, out: Out, share: Share = WHOLE) -> None:
        self.store.read(rows, at, out, share)

    def filled(self, field: str, rows: np.ndarray, share: Share) -> Iterator[tuple[np.ndarray, Filled]]:
        return self.store.filled(field, rows, share)

    def with_casts(self, casts: Mapping[str, Cast]) -> StoreBase:
        return SessionStore(cast_fields(self.store, casts))

    def with_part(self, field: str, part: RowPart) -> StoreBase:
        return SessionStore(select_part(self.store, field, part))


class HeldSessions(Wrapper):
    """Sessions that can only be read whole, each held in memory from the moment one of its trials is needed.

    For samples made of trials of several sessions. Trials are held as they are stored, and count as index.
    """

    def __init__(self, store: StoreBase) -> None:
        super().__init__(store)
        starts = store.blocks
        assert starts is not None, "trials that can each be read by itself need not be held"
        self._bounds = np.append(starts, len(store))
        self._held: dict[int, dict[str, np.ndarray]] = {}
        self._reading: set[int] = set()
        self._locks = [fork.Lock() for _ in starts]

    def __reduce__(self) -> tuple[type, tuple[StoreBase]]:
        return type(self), (self.store,)

    def rebuild(self, children: Sequence[StoreBase]) -> StoreBase:
        return HeldSessions(children[0])

    @property
    def blocks(self) -> None:
        return None

    def describe_path(self, path: ReadPath) -> ReadPath:
        return replace(path, how="held in memory as stored, from the first read on", block_rows=1, amplification=1.0)

    @property
    def index_bytes(self) -> int:
        return super().index_bytes + len(self) * row_bytes(self.fields)

    def scratch_bytes(self, rows: int) -> int:
        return self.store.scratch_bytes(int(np.diff(self._bounds).max()))

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        check_rows(rows, self)
        session = np.searchsorted(self._bounds, rows, side="right") - 1
        needed = np.unique(session).tolist()
        while needed:  # what another thread reads at the moment comes last
            number = next((each for each in needed if each not in self._reading), needed[0])
            needed.remove(number)
            held = self._hold(number)
            here = np.flatnonzero(session == number)
            inside = rows[here] - self._bounds[number]
            for row, place in zip(inside.tolist(), at[here].tolist(), strict=True):
                for name, target in out.items():
                    target[place] = held[name][row]

    def _hold(self, number: int) -> dict[str, np.ndarray]:
        """All trials of a session, read now unless they are held."""
        if number in self._held:
            return self._held[number]
        with self._locks[number]:
            if number not in self._held:
                self._reading.add(number)
                try:
                    rows = np.arange(self._bounds[number], self._bounds[number + 1])
                    values = {name: spec.empty(len(rows)) for name, spec in self.fields.items()}
                    self.store.read_into(rows, np.arange(len(rows)), values)
                    self._held[number] = values
                finally:
                    self._reading.discard(number)
        return self._held[number]


def chosen_sessions(given: Any, present: Sequence[int], folder: str) -> tuple[int, ...]:
    """The sessions that a caller asks for, all where None; refuses those that are not on disk."""
    if given is None:
        return tuple(present)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(f"sessions={checks.shown(given)}: expected their numbers, such as [1, 2] or range(1, 11)")
    wanted = tuple(checks.whole("sessions", number, least=1, expected="whole numbers") for number in given)
    absent = sorted(set(wanted) - set(present))
    if absent:
        raise Missing(
            f"sessions {ranges(absent)}: no betas of them in {folder}, which has {ranges(sorted(present))}. Fetch "
            f"betas_session{absent[0]:02d}.hdf5 there, or choose sessions that are there"
        )
    return wanted


def ranges(numbers: Sequence[int]) -> str:
    """``1-37, 39``."""
    parts, begin = [], 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            first, last = numbers[begin], numbers[place - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            begin = place
    return ", ".join(parts) or "none"


def why_no_sessions(layout: SubjectLayout) -> str:
    """Why there are no betas, and what there is instead."""
    text = f"no betas of subject {layout.subject}: no betas_sessionNN.hdf5 or .nii.gz in {layout.beta_folder}"
    for folder in (layout.root, layout.beta_folder):
        if surface := next((name for name in _names(folder) if SURFACE.fullmatch(name)), None):
            return f"{text}. {folder} has betas on a surface, such as {surface}, which are not read: {READ_VOLUMES}"
    if layout.space in SURFACE_SPACES:
        return f"{text}. Betas on surfaces, such as {layout.space}, are not read: {READ_VOLUMES}"
    if root := _root_near(layout.root):
        return f"{text}. nsddata_betas is in {root}: pass that folder as root"
    if _has_shards(layout):
        return f"{text}. {layout.root} has tar shards: read them with nsd.get_dataloaders(…, root=…)"
    here = layout.root
    for step in ("nsddata_betas", "ppdata", layout.name, layout.space, layout.betas):
        inner = os.path.join(here, step)
        if not os.path.isdir(inner):
            names = _names(here)
            advice = _instead(layout, step, names)
            return f"{text}. There is no {step} in {here}, which has: {', '.join(names[:12]) or 'nothing'}. {advice}"
        here = inner
    return f"{text}. The folder is there, without sessions; fetch them"


def _instead(layout: SubjectLayout, step: str, there: Sequence[str]) -> str:
    """What to do where a space or a version of betas is not there, and others are."""
    volumes = [name for name in there if name not in SURFACE_SPACES]
    argument = {layout.space: "space", layout.betas: "betas"}.get(step)
    if argument and volumes:
        return f"Pass {argument}={volumes[0]!r}, or fetch {step}"
    if argument == "space" and there:
        return f"Betas on surfaces ({', '.join(there)}) are not read"
    return CHECK


def _names(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _root_near(folder: str) -> str | None:
    """The root of a release that this folder lies in, or that lies in this folder."""
    if os.path.isdir(os.path.join(folder, "nsddata_betas")):
        return None
    near, here = [os.path.join(folder, name) for name in _names(folder)], os.path.normpath(folder)
    for _ in range(LEVELS):
        here = os.path.dirname(here)
        near.append(here)
    return next((path for path in near if os.path.isdir(os.path.join(path, "nsddata_betas"))), None)


def _has_shards(layout: SubjectLayout) -> bool:
    """Whether MindEye's shards of the subject are in the root, or two folders below, where MindEye publishes them."""
    root, name = glob.escape(layout.root), f"*_{layout.name}_*.tar"
    patterns = (os.path.join(root, *depth, name) for depth in ((), ("*",), ("*", "*")))
    return any(glob.glob(pattern) for pattern in patterns)
