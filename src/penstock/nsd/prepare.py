"""Sessions rewritten from the order in which they are stored into copies by trial, in bounded memory.

A session is read once and written once, by ``penstock.conversion``: where it is stored by voxel, as many voxels of all
its trials at a time as memory allows. The copies of all sessions are rows of one file. Its note lists those that are
whole, and is renewed after each: preparing can stop at any moment, and goes on there. A session is not copied again
while its source stays the same.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.sizes import format_size
from penstock.conversion.fill import fill_rows
from penstock.conversion.work import write_at
from penstock.dataset.dataset import Dataset
from penstock.errors import ConfigError, ConvertFailed, SchemaMismatch
from penstock.files import locks
from penstock.files.atomic import atomic_write
from penstock.nsd.betas import Sessions
from penstock.nsd.layout import FIELD
from penstock.nsd.prepared import NOTE_VERSION, SUBJECT, VOLUMES, Prepared, fingerprint
from penstock.nsd.regions import Voxels

Report = Callable[[int, int], None]

HEADER_BYTES = 128
"""Of the npy file: enough for any number of rows, so that the file can grow."""


@dataclass(frozen=True)
class PrepareRequest:
    """Which copies to make."""

    stored: Sessions
    prepared: Prepared
    voxels: Voxels | None
    sessions: Sequence[int]
    limit_bytes: int

    @property
    def key(self) -> str:
        return VOLUMES if self.voxels is None else self.voxels.key

    @property
    def path(self) -> str:
        return self.prepared.path(self.key, SUBJECT)

    def missing(self) -> list[int]:
        """Sessions without a current copy."""
        notes, paths = self.prepared.notes(self.key), self.stored.files.paths
        return [s for s in self.sessions if s not in notes or not self.prepared.is_current(notes[s], paths[s])]

    def is_one_stream(self, session: int) -> bool:
        """Whether a session can only be read from its beginning: it is then written row after row."""
        return self.stored.files.paths.get(session, "").endswith(".nii.gz")


def prepare(request: PrepareRequest, progress: Report) -> str:
    """Make the copies that do not exist yet; return their folder."""
    folder = os.path.dirname(request.path)
    if request.missing():
        _make_folder(folder)
        with _locked(request.path) as descriptor:
            _copy(request, descriptor, progress)
    return folder


def _copy(request: PrepareRequest, descriptor: int, progress: Report) -> None:
    todo = request.missing()
    if not todo:  # another process made them meanwhile
        return
    file = _File(request, todo, descriptor)
    each = file.trials * file.row_bytes
    _check_room(request.path, each * sum(session not in file.entries for session in todo))
    with _explained(request.path, file):
        first_rows = file.make_room(todo)
        for done, session in enumerate(todo):
            rows = request.stored.chosen(session, request.voxels)

            def report(bytes_: int, before: int = done * each) -> None:
                progress(before + bytes_, len(todo) * each)

            file.fill(session, rows, first_rows[session], report)
            source = request.stored.files.paths[session]
            about = {"source": fingerprint(source, request.prepared.files), "made of": os.path.basename(source)}
            file.add(session, {**about, "reversed": request.stored.reversed, "first": first_rows[session]})
            _remove_own_file(request.prepared, request.key, session)


class _File:
    """The file of all sessions, while nobody else writes to it. What its note lists is whole."""

    def __init__(self, request: PrepareRequest, todo: Sequence[int], descriptor: int) -> None:
        self.request, self.descriptor, self.path = request, descriptor, request.path
        self.note = request.prepared.path(request.key, SUBJECT, ".json")
        spec = request.stored.chosen(todo[0], request.voxels).fields[FIELD]
        self.dtype, self.shape, self.row_bytes = spec.dtype, spec.shape, spec.row_bytes
        self.trials = request.stored.trials
        self.entries: dict[int, dict[str, Any]] = request.prepared.entries(request.key, SUBJECT)
        others = {entry.get("of", request.prepared.of) for entry in self.entries.values()} - {request.prepared.of}
        if others:
            raise ConfigError(
                f"{self.path}: holds copies of {', '.join(others)}; name another folder for {request.prepared.of}: "
                f"NSD(…, prepared=folder)"
            )
        self.offset = self._check_header() if self.entries else HEADER_BYTES

    def _check_header(self) -> int:
        """Where rows begin in the file that is there."""
        there = np.load(self.path, mmap_mode="r", allow_pickle=False)
        if (there.dtype, there.shape[1:]) != (self.dtype, self.shape):
            raise SchemaMismatch(
                f"{self.path}: has rows of {there.dtype} {there.shape[1:]}, but the sessions have {self.dtype} "
                f"{self.shape}; remove the file and its note to copy all sessions again"
            )
        return int(there.offset)

    @property
    def rows(self) -> int:
        """Up to the last row of a whole copy."""
        return max((int(entry["first"]) + self.trials for entry in self.entries.values()), default=0)

    def make_room(self, sessions: Sequence[int]) -> dict[int, int]:
        """The first row of each session. Disk space is reserved, so that a full disk is found now."""
        if not self.entries.keys().isdisjoint(sessions):  # outdated copies, whose rows are free from now on
            self._write_note({number: entry for number, entry in self.entries.items() if number not in sessions})
        used = {int(entry["first"]) for entry in self.entries.values()}
        free = (first for first in count(0, self.trials) if first not in used)
        first_rows = {session: next(free) for session in sessions}
        rows = max(self.rows, *(first + self.trials for first in first_rows.values()))
        begin, end = self._place(min(first_rows.values())), self._place(rows)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.descriptor, begin, end - begin)
        os.ftruncate(self.descriptor, end)
        self._write_header(rows)
        return first_rows

    def fill(self, session: int, rows: Dataset, first: int, report: Callable[[int], None]) -> None:
        """Write the trials of a session, from this row on."""
        if rows.store.blocks is not None and self.request.is_one_stream(session):
            goal = np.memmap(
                self.path, self.dtype, mode="r+", offset=self._place(first), shape=(len(rows), *self.shape)
            )
            rows.store.read_into(np.arange(len(rows)), np.arange(len(rows)), {FIELD: goal})
            goal.flush()
            report(len(rows) * self.row_bytes)
        else:
            fill_rows(rows, self.path, self._place(first), limit_bytes=self.request.limit_bytes, report=report)

    def add(self, session: int, entry: dict[str, Any]) -> None:
        """Note a session as whole, once it is on the disk."""
        os.fsync(self.descriptor)
        voxels = "all" if self.request.voxels is None else self.request.voxels.name
        about = {"of": self.request.prepared.of, "trials": self.trials, "voxels": voxels}
        self._write_note({**self.entries, session: {**entry, **about}})

    def cut(self) -> None:
        """Remove what is not whole."""
        if self.entries:
            self._write_header(self.rows)
            os.ftruncate(self.descriptor, self._place(self.rows))
        else:
            os.unlink(self.path)

    def _place(self, row: int) -> int:
        return self.offset + row * self.row_bytes

    def _write_header(self, rows: int) -> None:
        write_at(self.descriptor, memoryview(npy_header(self.dtype, (rows, *self.shape), self.offset)), 0)

    def _write_note(self, entries: Mapping[int, dict[str, Any]]) -> None:
        self.entries = dict(sorted(entries.items()))
        with atomic_write(self.note, mode=0o644, durable=True) as file:
            note = {"version": NOTE_VERSION, "sessions": {str(number): each for number, each in self.entries.items()}}
            file.write(json.dumps(note, indent=1).encode())


def npy_header(dtype: np.dtype, shape: tuple[int, ...], length: int) -> bytes:
    """The header of a npy file, padded to a length."""
    about = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    text = repr(about).encode()
    return b"\x93NUMPY\x01\x00" + (length - 10).to_bytes(2, "little") + text.ljust(length - 11) + b"\n"


@contextmanager
def _locked(path: str) -> Iterator[int]:
    """A descriptor of the file, which is made where it is not there; one process at a time."""
    with open(path, "ab"):
        pass
    with open(path, "r+b", buffering=0) as file:
        if locks.is_taken(file.fileno()) or not os.fstat(file.fileno()).st_nlink:
            raise ConvertFailed(
                f"{path}: another process is preparing the same voxels; wait until it has ended, and prepare again for "
                f"what it did not copy"
            )
        try:
            yield file.fileno()
        finally:
            about = os.fstat(file.fileno())
            if about.st_size == 0 and about.st_nlink:  # nothing came of it
                os.unlink(path)


@contextmanager
def _explained(path: str, file: _File) -> Iterator[None]:
    """Remove what is not whole where preparing fails, and say so."""
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            file.cut()
        cause = error.__cause__ if isinstance(error, ConvertFailed) else error
        if not isinstance(cause, OSError):
            raise
        raise ConvertFailed(
            f"{path}: could not be written ({cause.strerror or cause}, errno {cause.errno}). Copies that were whole "
            f"before are kept: make room, and prepare again to continue"
        ) from error


def _remove_own_file(prepared: Prepared, key: str, session: int) -> None:
    """Remove a copy of the session alone, as earlier versions made it: it is older."""
    for suffix in (".json", ".npy"):
        with suppress(FileNotFoundError):
            os.unlink(prepared.path(key, session, suffix))


def _make_folder(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be made ({error.strerror}); name another place: NSD(…, prepared=folder)"
        ) from error


def _check_room(path: str, bytes_: int) -> None:
    free = shutil.disk_usage(os.path.dirname(path)).free
    if free < bytes_:
        raise ConvertFailed(
            f"{path}: the copies take {format_size(bytes_)}, and {format_size(free)} are free; make room, prepare "
            f"fewer sessions or voxels, or name another place: NSD(…, prepared=folder)"
        )
