"""Copies of sessions by trial: where they are, and whether they still match their source.

A copy is a ``.npy`` of int16 with a row per trial. Sessions have a file each, or share one file per subject. A note
beside each file says what it was made of. The note is written last: where there is a note, the copy is whole. A copy
whose source has changed is not used, and a warning says so.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

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

    def __init__(self, folder: str, files: Files | None = None) -> None:
        self.folder, self.files = folder, files

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
        found = self._entries(key, SUBJECT)
        for stem in stems:
            found.update(self._entries(key, stem))
        return dict(sorted(found.items()))

    def note(self, key: str, session: int) -> Note | None:
        """The copy of one session."""
        return self._entries(key, f"session{session:02d}").get(session) or self._entries(key, SUBJECT).get(session)

    def _entries(self, key: str, stem: str) -> dict[int, Note]:
        """What one note says: of one session, or of all sessions of the subject."""
        if not os.path.isfile(self.path(key, stem)):
            return {}
        try:
            with open_for_parser(self.path(key, stem, ".json")) as file:
                note = json.load(file)
            if note["version"] != NOTE_VERSION:
                return {}
            entries = note["sessions"] if stem == SUBJECT else {stem.removeprefix("session"): note}
            return {int(session): _note(self.path(key, stem), entry) for session, entry in entries.items()}
        except (Unavailable, OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def is_current(self, note: Note, source: str | None) -> bool:
        """Whether the source is as it was. Without its source, a copy is used as it is."""
        return source is None or note.source == fingerprint(source, self.files)

    def find(self, session: int, voxels: Voxels | None, source: str | None, handles: Files) -> Copy | None:
        """A session's copy with these voxels: a copy of just these voxels, or of whole volumes."""
        if voxels is not None and (note := self._usable(voxels.key, session, source)):
            return _copy(note, open_with(handles, note.path, [FIELD]))
        note = self._usable(VOLUMES, session, source)
        if note is None:
            return None
        whole = open_with(handles, note.path, [FIELD])
        if voxels is None:
            return _copy(note, whole)
        shape = whole.fields[FIELD].shape
        part = elements(shape, stored_numbers(voxels, shape, reverse=note.reversed))
        return _copy(note, whole.select_within(FIELD, part))

    def _usable(self, key: str, session: int, source: str | None) -> Note | None:
        note = self.note(key, session)
        if note is None or self.is_current(note, source):
            return note
        warnings.warn(
            f"{note.path}: was made of {source} before that file changed; prepare again, or remove the copy. Session "
            f"{session} is read from its source",
            Stale,
            stacklevel=4,
        )
        return None

    def _keys(self) -> list[str]:
        return sorted(os.listdir(self.folder)) if os.path.isdir(self.folder) else []


def _note(path: str, entry: Mapping[str, Any]) -> Note:
    return Note(path, str(entry["source"]), int(entry["trials"]), bool(entry["reversed"]), int(entry.get("first", 0)))


def _copy(note: Note, dataset: Dataset) -> Copy:
    return Copy(dataset, note.path, note.first, note.trials)


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
