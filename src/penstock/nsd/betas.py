"""Session files -> one dataset with a row for each trial: what is on disk, in whatever layout, in one voxel order."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from penstock.dataset import Dataset
from penstock.errors import DataError, Missing, SchemaMismatch
from penstock.fileio import Files
from penstock.nsd.layout import FIELD, Layout
from penstock.nsd.nifti import open_nifti
from penstock.nsd.prepared import stored_numbers
from penstock.nsd.regions import Voxels
from penstock.opening import open
from penstock.within import Mask, elements

SUFFIXES = (".hdf5", ".h5", ".mat", ".nii", ".nii.gz")
"""Of files of a session, best first."""
NAME = re.compile(r"betas_session(\d+)(\.hdf5|\.h5|\.mat|\.nii|\.nii\.gz)")


@dataclass(frozen=True)
class SessionFiles:
    """The files of the sessions that are there: session -> path."""

    folder: str
    paths: dict[int, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of ``open``, for files on other machines."""

    @classmethod
    def listed(cls, folder: str, urls: Sequence[str], options: Mapping[str, Any]) -> "SessionFiles":
        """Files on another machine."""
        matched = ((NAME.fullmatch(url.rpartition("/")[2]), url) for url in urls)
        return cls(folder, {int(found[1]): url for found, url in matched if found}, options)

    @classmethod
    def find(cls, layout: Layout) -> "SessionFiles":
        """In the release's place, or else in the root itself."""
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
    """Sessions as they are stored, opened once each."""

    def __init__(self, files: SessionFiles, volume: tuple[int, ...] | None) -> None:
        self.files, self._volume = files, volume
        self._handles = Files()
        self._opened: dict[int, Dataset] = {}
        self._elements: dict[str, Mask] = {}

    def stored(self, session: int) -> Dataset:
        """One session: rows are trials, of the shape in which volumes are stored."""
        if session not in self._opened:
            path = self.files.paths[session]
            try:
                if path.endswith((".nii", ".nii.gz")):
                    made = Dataset(open_nifti(path, FIELD, self._handles))
                else:
                    made = open(path, fields=[FIELD], **self.files.options)
            except DataError as error:
                others = [number for number in self.files.paths if number != session]
                left = f"sessions={others}" if len(others) < 6 else f"sessions= all but {session}"
                raise type(error)(f"session {session}: {error}. To go on without it, pass {left}") from error
            if len(made.fields[FIELD].shape) != 3:
                shape = made.fields[FIELD].shape
                raise SchemaMismatch(f"{path}: volumes have shape {shape}, expected three axes: (trials, Z, Y, X)")
            self._opened[session] = made
        return self._opened[session]

    @cached_property
    def first(self) -> Dataset:
        """Any session, to learn from."""
        return self.stored(next(iter(self.files.paths)))

    @property
    def trials(self) -> int:
        """Trials of a session."""
        return len(self.first)

    @property
    def dtype(self) -> np.dtype:
        return self.first.fields[FIELD].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in which a volume is stored."""
        return self.first.fields[FIELD].shape

    @property
    def reversed(self) -> bool:
        """Whether volumes are stored as (Z, Y, X), which they are as released."""
        return self._volume is None or self.shape == self._volume[::-1] or self.shape != self._volume

    @property
    def volume(self) -> tuple[int, ...]:
        """X, Y, Z."""
        return self.shape[::-1] if self.reversed else self.shape

    def chosen(self, session: int, voxels: Voxels | None) -> Dataset:
        """One session with these voxels, in their order; whole volumes as they are stored for None."""
        whole = self.stored(session)
        if len(whole) != self.trials:
            raise SchemaMismatch(
                f"{self.files.paths[session]}: has {len(whole)} trials, but other sessions have {self.trials}; fetch "
                f"it again, or leave it out with sessions="
            )
        return whole if voxels is None else whole.select_within(FIELD, self._numbers(voxels))

    def _numbers(self, voxels: Voxels) -> Mask:
        """The voxels' places in a stored volume; one value for all sessions, which share what is worked out from it."""
        if voxels.key not in self._elements:
            if voxels.shape != self.volume:
                raise SchemaMismatch(
                    f"{self.files.folder}: volumes of {self.volume}, but the region {voxels.name!r} is of "
                    f"{voxels.shape}: of another space or subject"
                )
            numbers = stored_numbers(voxels, self.shape, reverse=self.reversed)
            self._elements[voxels.key] = elements(self.shape, numbers)
        return self._elements[voxels.key]


def check_sessions(wanted: Sequence[int], there: Sequence[int], folder: str) -> None:
    """Refuse sessions that are not on disk."""
    gone = sorted(set(wanted) - set(there))
    if gone:
        raise Missing(
            f"sessions {gone}: no betas of them in {folder}, which has {_runs(sorted(there))}. Fetch "
            f"betas_session{gone[0]:02d}.hdf5 there, or ask for sessions that are there"
        )


def _runs(numbers: list[int]) -> str:
    """``1-37, 39``."""
    told, begin = [], 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            first, last = numbers[begin], numbers[place - 1]
            told.append(str(first) if first == last else f"{first}-{last}")
            begin = place
    return ", ".join(told) or "none"
