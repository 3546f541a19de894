"""Sessions rewritten from the order in which they are stored into copies by trial, in bounded memory.

A session is read once. A session stored by voxel is rewritten in parts: as many voxels of all its trials as memory
allows are read by all cores together, then written into each trial's row. Each copy gets its name when it is whole, and
is not made again while its source stays the same.
"""

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.base import scratch
from penstock.base.machine import cores
from penstock.base.sizes import MiB, format_size
from penstock.base.urls import is_remote
from penstock.dataset.dataset import Dataset
from penstock.dataset.store import StoreBase
from penstock.errors import BudgetExceeded, ConfigError, ConvertFailed
from penstock.files.atomic import atomic_write
from penstock.nsd.betas import Sessions
from penstock.nsd.layout import FIELD
from penstock.nsd.libraries import needed
from penstock.nsd.prepared import NOTE_VERSION, SUBJECT, VOLUMES, Prepared, fingerprint
from penstock.nsd.regions import Voxels
from penstock.read.part import Box, Within, elements, within

BASE_BYTES = 32 * MiB
"""Measured: libraries, chunk tables and threads, beside the part of a session in memory and the scratch."""
MOST_TOGETHER = 96 * MiB
"""A larger part would be no faster."""
PIECE_BYTES = 4 * MiB
"""Copied at a time when sessions are put into one file."""

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


def prepare(job: Job, *, one_file: bool, progress: Report) -> str:
    """Make the copies that do not exist yet; return their folder."""
    folder = os.path.join(job.prepared.folder, job.key)
    todo, each = job.missing(), 0
    if todo:
        each = job.stored.trials * job.stored.chosen(todo[0], job.voxels).fields[FIELD].row_bytes
        _make_room(folder, each * len(todo))
    for done, session in enumerate(todo):

        def report(bytes_: int, before: int = done * each) -> None:
            progress(before + bytes_, len(todo) * each)

        _copy_session(job, session, report)
    if one_file:
        _put_into_one_file(job.prepared, job.key)
    return folder


def _copy_session(job: Job, session: int, report: Callable[[int], None]) -> None:
    stored, source = job.stored, job.stored.files.paths[session]
    _Copy(stored, session, job.voxels, job.limit_bytes).write(job.prepared.path(job.key, session), report)
    note = {
        "version": NOTE_VERSION, "source": fingerprint(source, job.prepared.files), "trials": stored.trials,
        "reversed": stored.reversed, "voxels": "all" if job.voxels is None else job.voxels.name,
        "made of": os.path.basename(source),
    }  # fmt: skip
    _write_note(job.prepared.path(job.key, session, ".json"), note)


def _put_into_one_file(prepared: Prepared, key: str) -> None:
    """All copies of these voxels in one file, in the order of sessions; their own files are then removed."""
    notes, path = prepared.notes(key), prepared.path(key, SUBJECT)
    if all(note.path == path for note in notes.values()):
        _remove_single_files(prepared, key, notes)  # of a call that was interrupted
        return
    rows = {session: np.load(note.path, mmap_mode="r", allow_pickle=False) for session, note in notes.items()}
    first = next(iter(rows.values()))
    count = sum(note.trials for note in notes.values())
    _make_room(os.path.dirname(path), count * first[0].nbytes)
    entries: dict[str, Any] = {}
    try:
        whole = np.lib.format.open_memmap(f"{path}.part", "w+", first.dtype, (count, *first.shape[1:]))
        _take_room(f"{path}.part")
        done = 0
        step = max(1, PIECE_BYTES // max(1, first[0].nbytes))
        for session, note in notes.items():
            for begin in range(0, note.trials, step):
                end = min(begin + step, note.trials)
                whole[done + begin : done + end] = rows[session][note.first + begin : note.first + end]
            entries[str(session)] = {
                "source": note.source, "trials": note.trials, "reversed": note.reversed, "first": done,
            }  # fmt: skip
            done += note.trials
        whole.flush()
        del whole, first, rows
        with suppress(OSError):
            os.unlink(prepared.path(key, SUBJECT, ".json"))  # the new file is not what the old note describes
        _put_in_place(f"{path}.part", path)
    except OSError as error:
        raise _failure(f"{path}.part", path, "the file of all sessions", error) from error
    _write_note(prepared.path(key, SUBJECT, ".json"), {"version": NOTE_VERSION, "sessions": entries})
    _remove_single_files(prepared, key, notes)


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


def _failure(part: str, path: str, what: str, error: OSError) -> ConvertFailed:
    with suppress(OSError):
        os.unlink(part)
    return ConvertFailed(
        f"{path}: {what} could not be written ({error.strerror or error}, errno {error.errno}). Copies that were whole "
        f"before are kept: make room, and prepare again to continue"
    )


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


@dataclass(frozen=True)
class _Copy:
    """The copy of one session in the making."""

    stored: Sessions
    session: int
    voxels: Voxels | None
    limit_bytes: int

    def write(self, path: str, report: Callable[[int], None]) -> None:
        source = self.stored.chosen(self.session, self.voxels)
        part = f"{path}.part"
        try:
            rows = np.lib.format.open_memmap(
                part, "w+", source.fields[FIELD].dtype, (len(source), *source.fields[FIELD].shape)
            )
            offset = int(rows.offset)
            _take_room(part)
            if self.stored.files.paths[self.session].endswith(".nii.gz"):  # one stream: row after row
                source.store.read_into(np.arange(len(source)), np.arange(len(source)), {FIELD: rows})
                report(rows.nbytes)
                rows.flush()
            else:
                del rows
                with open(part, "r+b", buffering=0) as file:
                    self._rewrite(source, file.fileno(), offset, report)
            _put_in_place(part, path)
        except OSError as error:
            raise _failure(part, path, f"session {self.session}", error) from error

    def _rewrite(self, source: Dataset, descriptor: int, offset: int, report: Callable[[int], None]) -> None:
        """Part by part: some elements of all trials, or, where each trial can be read by itself, some trials."""
        spec, trials = source.fields[FIELD], len(source)
        threads = cores()
        room = self._room(source.store, threads)
        if source.store.blocks is None:
            step = max(1, room // max(1, spec.row_bytes))
            for first in range(0, trials, step):
                rows = np.arange(first, min(first + step, trials))
                values = _read(source.store, rows, threads)
                _pwrite(descriptor, values, offset + first * spec.row_bytes)
                report((first + len(rows)) * spec.row_bytes)
            return
        done = 0
        for part, begin in self._parts(spec.shape, room // trials // spec.dtype.itemsize):
            store = source.select_within(FIELD, part).store
            values = _read(store, np.arange(trials), threads).reshape(trials, -1)
            for trial, row in enumerate(values):
                _pwrite(descriptor, row, offset + trial * spec.row_bytes + begin * spec.dtype.itemsize)
            done += values.nbytes
            report(done)

    def _parts(self, shape: tuple[int, ...], most: int) -> "list[tuple[Within, int]]":
        """Parts of a row of at most ``most`` elements each, and the first element of each."""
        if len(shape) == 1:
            step = max(1, most)
            numbers = np.arange(shape[0])
            return [(elements(shape, numbers[begin : begin + step]), begin) for begin in range(0, shape[0], step)]
        layer = int(np.prod(shape[1:]))
        chunk = self._chunk_layers()
        step = max(1, most // layer // chunk * chunk)
        parts: list[tuple[Within, int]] = []
        for first in range(0, shape[0], step):
            part = within(shape, (slice(first, min(first + step, shape[0])),))
            assert isinstance(part, Box)
            parts.append((part, first * layer))
        return parts

    def _chunk_layers(self) -> int:
        """Layers of a volume per chunk of the file: parts should not cut through chunks."""
        path = self.stored.files.paths[self.session]
        if is_remote(path):
            return 1
        with needed("h5py").File(path) as file:
            chunks = file[FIELD].chunks
        return max(1, chunks[1]) if chunks else 1

    def _room(self, store: StoreBase, threads: int) -> int:
        """Bytes of a session that may be in memory at once."""
        borrowed = threads * store.scratch_bytes(1 if store.blocks is None else len(store))
        room = self.limit_bytes - BASE_BYTES - borrowed
        least = len(store) * store.fields[FIELD].dtype.itemsize
        if room < least:
            smallest = BASE_BYTES + borrowed + least
            raise BudgetExceeded(
                f"memory={format_size(self.limit_bytes)} is too small to prepare with: the smallest that works is "
                f"{format_size(smallest)} ({smallest:,} bytes)",
                smallest_bytes=smallest,
            )
        return min(room, MOST_TOGETHER)


def _read(store: StoreBase, rows: np.ndarray, threads: int) -> np.ndarray:
    """These rows, read by all threads together."""
    spec = store.fields[FIELD]
    values = scratch.buffer(len(rows) * spec.row_bytes).view(spec.dtype).reshape(len(rows), *spec.shape)
    at, failures = np.arange(len(rows)), list[BaseException]()

    def work(number: int) -> None:
        try:
            if store.blocks is None:
                mine = at[number::threads]
                store.read_into(rows[mine], mine, {FIELD: values})
            else:
                store.read(rows, at, {FIELD: values}, (number, threads))
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failures:
        raise failures[0]
    return values


def _pwrite(descriptor: int, values: np.ndarray, offset: int) -> None:
    view, done = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data, 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)
