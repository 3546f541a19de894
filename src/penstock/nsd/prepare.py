"""Sessions rewritten from the order in which they are stored into copies by trial, in bounded memory.

A session is read once and written once, by ``penstock.conversion``: where it is stored by voxel, as many voxels of all
its trials at a time as memory allows. Each copy gets its name when it is whole, and is not made again while its source
stays the same. All sessions of a subject can share one file.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.base.sizes import format_size
from penstock.conversion.fill import fill_rows
from penstock.dataset.dataset import Dataset
from penstock.errors import ConfigError, ConvertFailed
from penstock.files.atomic import atomic_write
from penstock.formats.open import open_with
from penstock.nsd.betas import Sessions
from penstock.nsd.layout import FIELD
from penstock.nsd.prepared import NOTE_VERSION, SUBJECT, VOLUMES, Note, Prepared, fingerprint
from penstock.nsd.regions import Voxels

Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Job:
    """Which copies to make."""

    stored: Sessions
    prepared: Prepared
    voxels: Voxels | None
    sessions: Sequence[int]
    limit_bytes: int

    @property
    def key(self) -> str:
        return VOLUMES if self.voxels is None else self.voxels.key

    def missing(self) -> list[int]:
        """Sessions without a current copy."""
        notes, paths = self.prepared.notes(self.key), self.stored.files.paths
        return [s for s in self.sessions if s not in notes or not self.prepared.is_current(notes[s], paths[s])]

    def is_one_stream(self, session: int) -> bool:
        """Whether a session can only be read from its beginning: it is then written row after row."""
        return self.stored.files.paths.get(session, "").endswith(".nii.gz")


def prepare(job: Job, *, one_file: bool, progress: Report) -> str:
    """Make the copies that do not exist yet; return their folder."""
    folder = os.path.join(job.prepared.folder, job.key)
    if one_file:
        _put_into_one_file(job, progress)
        return folder
    todo, each = job.missing(), 0
    if todo:
        each = job.stored.trials * job.stored.chosen(todo[0], job.voxels).fields[FIELD].row_bytes
        _make_room(folder, each * len(todo))
    for done, session in enumerate(todo):

        def report(bytes_: int, before: int = done * each) -> None:
            progress(before + bytes_, len(todo) * each)

        _copy_session(job, session, report)
    return folder


def _copy_session(job: Job, session: int, report: Callable[[int], None]) -> None:
    path = job.prepared.path(job.key, session)
    with _written(path, f"session {session}") as part:
        _fill(part, job, {session: job.stored.chosen(session, job.voxels)}, report)
        _put_in_place(part, path)
    _write_note(job.prepared.path(job.key, session, ".json"), {"version": NOTE_VERSION, **_entry(job, session)})


def _entry(job: Job, session: int) -> dict[str, Any]:
    """What is noted of a session that was copied just now."""
    source = job.stored.files.paths[session]
    return {
        "source": fingerprint(source, job.prepared.files), "trials": job.stored.trials, "reversed": job.stored.reversed,
        "voxels": "all" if job.voxels is None else job.voxels.name, "made of": os.path.basename(source),
    }  # fmt: skip


def _put_into_one_file(job: Job, progress: Report) -> None:
    """All copies of these voxels in one file, in the order of sessions; what there was before is then removed."""
    prepared, key = job.prepared, job.key
    todo, notes, path = job.missing(), prepared.notes(key), prepared.path(key, SUBJECT)
    if not todo and all(note.path == path for note in notes.values()):
        _remove_single_files(prepared, key, notes)  # of a call that was interrupted
        return
    parts = {session: _rows_of(job, note) for session, note in notes.items() if session not in todo}
    parts |= {session: job.stored.chosen(session, job.voxels) for session in todo}
    parts = dict(sorted(parts.items()))
    bytes_ = sum(len(part) * part.fields[FIELD].row_bytes for part in parts.values())
    _make_room(os.path.dirname(path), bytes_)
    with _written(path, "the file of all sessions") as part:
        _fill(part, job, parts, lambda done: progress(done, bytes_))
        with suppress(OSError):
            os.unlink(prepared.path(key, SUBJECT, ".json"))  # the new file is not what the old note describes
        _put_in_place(part, path)
    entries, first = {}, 0
    for session, rows in parts.items():
        kept = _kept_entry(notes[session]) if session not in todo else _entry(job, session)
        entries[str(session)] = {**kept, "first": first}
        first += len(rows)
    _write_note(prepared.path(key, SUBJECT, ".json"), {"version": NOTE_VERSION, "sessions": entries})
    _remove_single_files(prepared, key, parts)


def _kept_entry(note: Note) -> dict[str, Any]:
    return {"source": note.source, "trials": note.trials, "reversed": note.reversed}


def _rows_of(job: Job, note: Note) -> Dataset:
    """The copy of a session, wherever it is."""
    whole = open_with(job.stored.handles, note.path, [FIELD])
    return whole.select(np.arange(note.first, note.first + note.trials))


def _fill(part: str, job: Job, sessions: Mapping[int, Dataset], report: Callable[[int], None]) -> None:
    """A npy file of some sessions, one after another."""
    spec = next(iter(sessions.values())).fields[FIELD]
    shape = (sum(len(rows) for rows in sessions.values()), *spec.shape)
    values = np.lib.format.open_memmap(part, "w+", spec.dtype, shape)
    offset, first = int(values.offset), 0
    _take_room(part)
    for session, rows in sessions.items():
        done = first * spec.row_bytes
        if rows.store.blocks is not None and job.is_one_stream(session):
            at = np.arange(len(rows))
            rows.store.read_into(at, at, {FIELD: values[first : first + len(rows)]})
            report(done + len(rows) * spec.row_bytes)
        else:
            fill_rows(rows, part, offset + done, limit_bytes=job.limit_bytes, report=_after(done, report))
        first += len(rows)
    values.flush()


def _after(before: int, report: Callable[[int], None]) -> Callable[[int], None]:
    return lambda done: report(before + done)


@contextmanager
def _written(path: str, what: str) -> Iterator[str]:
    """A file beside ``path`` to write; removed where that fails."""
    part = f"{path}.part"
    try:
        yield part
    except BaseException as error:
        with suppress(OSError):
            os.unlink(part)
        cause = error.__cause__ if isinstance(error, ConvertFailed) else error
        if not isinstance(cause, OSError):
            raise
        raise ConvertFailed(
            f"{path}: {what} could not be written ({cause.strerror or cause}, errno {cause.errno}). Copies that were "
            f"whole before are kept: make room, and prepare again to continue"
        ) from error


def _remove_single_files(prepared: Prepared, key: str, sessions: Iterable[int]) -> None:
    """Remove the own files of sessions that are in the file of all sessions."""
    for session in sessions:
        for suffix in (".json", ".npy"):
            with suppress(FileNotFoundError):
                os.unlink(prepared.path(key, session, suffix))


def _make_room(folder: str, bytes_: int) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be made ({error.strerror}); name another place: NSD(…, prepared=folder)"
        ) from error
    free = shutil.disk_usage(folder).free
    if free < bytes_:
        raise ConvertFailed(
            f"{folder}: the copies take {format_size(bytes_)}, and {format_size(free)} are free; make room, prepare "
            f"fewer sessions or voxels, or name another place: NSD(…, prepared=folder)"
        )


def _write_note(path: str, note: dict[str, object]) -> None:
    try:
        with atomic_write(path, mode=0o644, durable=True) as file:
            file.write(json.dumps(note, indent=1).encode())
    except OSError as error:
        raise ConvertFailed(
            f"{path}: the note could not be written ({error.strerror or error}, errno {error.errno}). Copies that were "
            f"whole before are kept: make room, and prepare again to continue"
        ) from error


def _take_room(part: str) -> None:
    """Reserve disk space before writing through a mapping, where a full disk would end the process."""
    if hasattr(os, "posix_fallocate"):
        with open(part, "r+b", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)


def _put_in_place(part: str, path: str) -> None:
    """Give a file its name once it is on the disk."""
    with open(part, "r+b", buffering=0) as file:
        os.fsync(file.fileno())
    os.replace(part, path)
