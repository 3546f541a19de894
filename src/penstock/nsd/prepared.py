"""Copies of sessions by trial: where they are, and whether they still match their source.

A copy is rows of a ``.npy`` of int16, one per trial. The sessions of a subject share one file; in earlier versions each
had its own. A note beside the file says what it was made of. The note is written last: copies that it lists are whole.
A copy whose source has changed is not used, and a warning says so.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.sizes import KiB
from penstock.base.urls import is_remote
from penstock.dataset.dataset import Dataset
from penstock.errors import Unavailable
from penstock.files.files import Files
from penstock.files.retry import open_for_parser
from penstock.formats.open import open_with
from penstock.nsd.layout import FIELD
from penstock.nsd.regions import Voxels
from penstock.read.part import elements

VOLUMES = "volumes"
SUBJECT = "subject"
"""The name of the file that holds all sessions."""
SAMPLED_BYTES = 64 * KiB
"""How much of the beginning and of the end of a source is compared, to notice that it has changed."""
NOTE_VERSION = 1


class Stale(UserWarning):
    """A copy was made of a file that has changed since; the file itself is read instead."""


@dataclass(frozen=True)
class Note:
    """What is known of the copy of one session."""

    path: str
    """The file that holds it."""
    source: str
    """The fingerprint of what it was made of."""
    trials: int
    reversed: bool
    """Whether volumes are (Z, Y, X), as in the release."""
    first: int = 0
    """The row of its first trial."""


@dataclass(frozen=True)
class Copy:
    """Rows of a file that are one session."""

    dataset: Dataset
    path: str
    first: int
    trials: int


class Prepared:
    """The copies of one subject, in one folder: a folder per set of voxels."""

    def __init__(self, folder: str, of: str, files: Files | None = None) -> None:
        self.folder, self.of, self.files = folder, of, files
        """``of`` names subject, space and version of betas: copies of others are not used."""

    def sessions(self) -> set[int]:
        """Sessions with any copy."""
        return {session for key in self._keys() for session in self.notes(key)}

    def any_note(self) -> Note | None:
        """Any of the notes: all copies have as many trials and the same axes."""
        return next((note for key in self._keys() for note in self.notes(key).values()), None)

    def path(self, key: str, session: int | str, suffix: str = ".npy") -> str:
        name = session if isinstance(session, str) else f"session{session:02d}"
        return os.path.join(self.folder, key, f"{name}{suffix}")

    def notes(self, key: str) -> dict[int, Note]:
        """The whole copies of these voxels, by session; a file of its own is newer than the one per subject."""
        folder = os.path.join(self.folder, key)
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        stems = [name.removesuffix(".json") for name in names if name.endswith(".json") and name != f"{SUBJECT}.json"]
        found: dict[int, Note] = {}
        for stem in (SUBJECT, *stems):
            with suppress(KeyError, ValueError, TypeError):
                entries = {n: each for n, each in self.entries(key, stem).items() if each.get("of", self.of) == self.of}
                found |= {number: _note(self.path(key, stem), entry) for number, entry in entries.items()}
        return dict(sorted(found.items()))

    def entries(self, key: str, stem: str) -> dict[int, dict[str, Any]]:
        """What one note says, by session: of one session, or of all sessions of the subject."""
        if not os.path.isfile(self.path(key, stem)):
            return {}
        try:
            with open_for_parser(self.path(key, stem, ".json")) as file:
                note = json.load(file)
            if note["version"] != NOTE_VERSION:
                return {}
            entries = note["sessions"] if stem == SUBJECT else {stem.removeprefix("session"): note}
            return {int(session): entry for session, entry in entries.items()}
        except (Unavailable, OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def is_current(self, note: Note, source: str | None) -> bool:
        """Whether the source is as it was. Without its source, a copy is used as it is."""
        return source is None or note.source == fingerprint(source, self.files)

    def copies(self, voxels: Voxels | None, handles: Files) -> "Copies":
        """The copies that hold these voxels: of just these, or of whole volumes."""
        return Copies(self, voxels, handles)

    def _keys(self) -> list[str]:
        return sorted(os.listdir(self.folder)) if os.path.isdir(self.folder) else []


def _note(path: str, entry: Mapping[str, Any]) -> Note:
    return Note(path, str(entry["source"]), int(entry["trials"]), bool(entry["reversed"]), int(entry.get("first", 0)))


class Copies:
    """The copies that hold some voxels, found session by session. Notes are read once, and each file is opened once."""

    def __init__(self, prepared: Prepared, voxels: Voxels | None, handles: Files) -> None:
        self._prepared, self._voxels, self._handles = prepared, voxels, handles
        keys = [VOLUMES] if voxels is None else [voxels.key, VOLUMES]
        self._notes = {key: prepared.notes(key) for key in keys}
        self._opened: dict[str, Dataset] = {}

    def find(self, session: int, source: str | None) -> Copy | None:
        """A session's copy; None where there is none that matches its source."""
        for key, notes in self._notes.items():
            note = notes.get(session)
            if note is None:
                continue
            if self._prepared.is_current(note, source):
                return Copy(self._open(key, note), note.path, note.first, note.trials)
            warnings.warn(
                f"{note.path}: was made of {source} before that file changed; prepare again, or remove the copy. "
                f"Session {session} is read from its source",
                Stale,
                stacklevel=4,
            )
        return None

    def _open(self, key: str, note: Note) -> Dataset:
        if note.path not in self._opened:
            whole = open_with(self._handles, note.path, [FIELD])
            if key == VOLUMES and self._voxels is not None:
                shape = whole.fields[FIELD].shape
                part = elements(shape, stored_numbers(self._voxels, shape, reverse=note.reversed))
                whole = whole.select_within(FIELD, part)
            self._opened[note.path] = whole
        return self._opened[note.path]


def one_file(copies: Sequence[Copy]) -> Dataset:
    """Sessions that are in one file, as one dataset."""
    whole = copies[0].dataset
    rows = np.concatenate([np.arange(copy.first, copy.first + copy.trials) for copy in copies])
    return whole if np.array_equal(rows, np.arange(len(whole))) else whole.select(rows)


def stored_numbers(voxels: Voxels, shape: tuple[int, ...], *, reverse: bool) -> np.ndarray:
    """The voxels' positions in a volume as stored."""
    if not reverse:
        return voxels.index
    along = np.unravel_index(voxels.index, voxels.shape)
    return np.asarray(np.ravel_multi_index(along[::-1], shape))


def fingerprint(path: str, files: Files | None = None) -> str:
    """Differs when the file does, without reading all of it."""
    if is_remote(path):
        remote = (files or Files()).identify(path)
        return hashlib.sha256(repr((remote.size, remote.etag, remote.mtime_ns)).encode()).hexdigest()[:32]
    size = os.stat(path).st_size
    found = hashlib.sha256(f"{size}".encode())
    with open_for_parser(path) as file:
        found.update(file.read(SAMPLED_BYTES))
        file.seek(max(0, size - SAMPLED_BYTES))
        found.update(file.read(SAMPLED_BYTES))
    return found.hexdigest()[:32]
