"""Copies of sessions by trial: where they are, and whether they still belong to their source.

A copy is a ``.npy`` of int16, a row a trial, with a note beside it that says what it was made of. The note is written
last: where there is one, the copy is whole. A copy whose source has changed is left aside, with a warning.
"""

import hashlib
import json
import os
import warnings
from dataclasses import dataclass

import numpy as np

from penstock.dataset import Dataset
from penstock.fileio import Files
from penstock.nsd.layout import FIELD
from penstock.nsd.regions import Voxels
from penstock.opening import open as open_dataset
from penstock.sizes import KiB
from penstock.urls import is_remote
from penstock.within import elements

VOLUMES = "volumes"
LOOKED_AT = 64 * KiB
"""Of the beginning and of the end of a source, to tell whether it is still the same."""
NOTE_VERSION = 1


class Stale(UserWarning):
    """A copy was made of a file that has changed since; the file itself is read instead."""


@dataclass(frozen=True)
class Note:
    """What is known of one copy."""

    source: str
    trials: int
    reversed: bool
    """Whether volumes are (Z, Y, X), as released."""


class Prepared:
    """The copies of one subject, in one folder: a folder for each set of voxels, a file for each session."""

    def __init__(self, folder: str, files: Files | None = None) -> None:
        self.folder, self.files = folder, files

    def sessions(self) -> set[int]:
        """Those of which there is any copy."""
        return {session for key in self._keys() for session in self._sessions(key)}

    def notes(self) -> Note | None:
        """Any one of the notes, to learn from."""
        for key in self._keys():
            for session in self._sessions(key):
                if found := self.note(key, session):
                    return found
        return None

    def path(self, key: str, session: int, suffix: str = ".npy") -> str:
        return os.path.join(self.folder, key, f"session{session:02d}{suffix}")

    def note(self, key: str, session: int) -> Note | None:
        """What a copy was made of; None where there is no whole one."""
        if not os.path.isfile(self.path(key, session)):
            return None
        try:
            with open(self.path(key, session, ".json")) as file:
                told = json.load(file)
            if told["version"] != NOTE_VERSION:
                return None
            return Note(str(told["source"]), int(told["trials"]), bool(told["reversed"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def is_current(self, key: str, session: int, source: str | None) -> bool:
        """Whether there is a copy, and its source is as it was. Without the source, a copy stands for itself."""
        note = self.note(key, session)
        return note is not None and (source is None or note.source == fingerprint(source, self.files))

    def find(self, session: int, voxels: Voxels | None, source: str | None) -> Dataset | None:
        """A session's copy with these voxels: made of just them, or of whole volumes."""
        if voxels is not None and self._usable(voxels.key, session, source):
            return open_dataset(self.path(voxels.key, session), fields=[FIELD])
        if not self._usable(VOLUMES, session, source):
            return None
        whole = open_dataset(self.path(VOLUMES, session), fields=[FIELD])
        note = self.note(VOLUMES, session)
        if voxels is None or note is None:
            return whole
        shape = whole.fields[FIELD].shape
        return whole.select_within(FIELD, elements(shape, stored_numbers(voxels, shape, reverse=note.reversed)))

    def _usable(self, key: str, session: int, source: str | None) -> bool:
        if self.note(key, session) is None:
            return False
        if self.is_current(key, session, source):
            return True
        warnings.warn(
            f"{self.path(key, session)}: was made of {source} as it was before; prepare again, or remove it. The "
            f"session is read from its source",
            Stale,
            stacklevel=4,
        )
        return False

    def _keys(self) -> list[str]:
        return sorted(os.listdir(self.folder)) if os.path.isdir(self.folder) else []

    def _sessions(self, key: str) -> list[int]:
        names = os.listdir(os.path.join(self.folder, key)) if os.path.isdir(os.path.join(self.folder, key)) else []
        numbers = [name[7:-4] for name in names if name.startswith("session") and name.endswith(".npy")]
        return sorted(int(number) for number in numbers if number.isdecimal())


def stored_numbers(voxels: Voxels, shape: tuple[int, ...], *, reverse: bool) -> np.ndarray:
    """The voxels' places in a volume as stored."""
    if not reverse:
        return voxels.index
    along = np.unravel_index(voxels.index, voxels.shape)
    return np.asarray(np.ravel_multi_index(along[::-1], shape))


def fingerprint(path: str, files: Files | None = None) -> str:
    """Differs when the file does, without reading all of it."""
    if is_remote(path):
        there = (files or Files()).identify(path)
        return hashlib.sha256(repr((there.size, there.etag, there.mtime_ns)).encode()).hexdigest()[:32]
    size = os.stat(path).st_size
    found = hashlib.sha256(f"{size}".encode())
    with open(path, "rb") as file:
        found.update(file.read(LOOKED_AT))
        file.seek(max(0, size - LOOKED_AT))
        found.update(file.read(LOOKED_AT))
    return found.hexdigest()[:32]
