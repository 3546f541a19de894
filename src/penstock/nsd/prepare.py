"""Sessions turned from the order in which they are stored into copies by trial, in bounded memory.

A session is read once. Where it is stored by voxel, it is turned in parts: so many voxels of all its trials as memory
allows, read by all cores together, then written into each trial's row. Each copy appears under its name when it is
whole, and is not made again where it is still that of its source.
"""

import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from penstock import memory as scratch
from penstock.dataset import Dataset
from penstock.errors import BudgetExceeded, ConfigError, ConvertFailed
from penstock.machine import cores
from penstock.nsd.betas import Sessions
from penstock.nsd.layout import FIELD
from penstock.nsd.nifti import CompressedNifti
from penstock.nsd.outside import needed
from penstock.nsd.prepared import NOTE_VERSION, VOLUMES, Prepared, fingerprint
from penstock.nsd.regions import Voxels
from penstock.sizes import MiB, format_size, parse_size
from penstock.store import Store, read_share
from penstock.urls import is_remote
from penstock.within import Box, Within, elements, within

BASE_BYTES = 32 * MiB
"""Measured: libraries, chunk tables and threads, beside the part of a session that is turned and the scratch."""
MOST_TOGETHER = 96 * MiB
"""A larger part would be no faster."""

Told = Callable[[int, int], None]


def prepare(
    stored: Sessions,
    prepared: Prepared,
    voxels: Voxels | None,
    sessions: Sequence[int],
    *,
    memory: int | str,
    progress: Told,
) -> str:
    """Make the copies that are not there; return their folder."""
    key = VOLUMES if voxels is None else voxels.key
    folder = os.path.join(prepared.folder, key)
    limit = parse_size(memory, argument="memory")
    todo = [session for session in sessions if not prepared.is_current(key, session, stored.files.paths[session])]
    if not todo:
        return folder
    each = stored.trials * stored.chosen(todo[0], voxels).fields[FIELD].row_bytes
    _make_room(folder, each * len(todo))
    for done, session in enumerate(todo):

        def told(bytes_: int, before: int = done * each) -> None:
            progress(before + bytes_, len(todo) * each)

        copy = _Copy(stored, session, voxels, limit)
        copy.write(prepared.path(key, session), told)
        source = stored.files.paths[session]
        note = {
            "version": NOTE_VERSION, "source": fingerprint(source, prepared.files), "trials": stored.trials,
            "reversed": stored.reversed, "voxels": "all" if voxels is None else voxels.name,
            "made of": os.path.basename(source),
        }  # fmt: skip
        _write_note(prepared.path(key, session, ".json"), note)
    return folder


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
        with open(f"{path}.part", "w") as file:
            json.dump(note, file, indent=1)
        _put_in_place(f"{path}.part", path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(f"{path}.part")
        raise ConvertFailed(
            f"{path}: could not be written ({error.strerror or error}, errno {error.errno}); make room, and prepare "
            f"again"
        ) from error


def _take_room(part: str) -> None:
    """Have the disk's room before writing through a mapping, where a full disk would end the process."""
    if hasattr(os, "posix_fallocate"):
        with open(part, "r+b", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)


def _put_in_place(part: str, path: str) -> None:
    """Under its name when it is on the disk."""
    with open(part, "r+b", buffering=0) as file:
        os.fsync(file.fileno())
    os.replace(part, path)


@dataclass(frozen=True)
class _Copy:
    """One session on its way."""

    stored: Sessions
    session: int
    voxels: Voxels | None
    limit_bytes: int

    def write(self, path: str, told: Callable[[int], None]) -> None:
        source = self.stored.chosen(self.session, self.voxels)
        part = f"{path}.part"
        try:
            rows = np.lib.format.open_memmap(
                part, "w+", source.fields[FIELD].dtype, (len(source), *source.fields[FIELD].shape)
            )
            offset = int(rows.offset)
            _take_room(part)
            if isinstance(source.store, CompressedNifti):
                _stream(source.store, rows, told)  # row after row, each written once
                rows.flush()
            else:
                del rows
                with open(part, "r+b", buffering=0) as file:
                    self._turn(source, file.fileno(), offset, told)
            _put_in_place(part, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(part)
            raise ConvertFailed(
                f"{path}: session {self.session} could not be written ({error.strerror or error}, errno "
                f"{error.errno}); what was whole before stays, and prepare goes on from there"
            ) from error

    def _turn(self, source: Dataset, descriptor: int, offset: int, told: Callable[[int], None]) -> None:
        """Part by part: some elements of all trials, or where each can be read by itself, some trials."""
        spec, trials = source.fields[FIELD], len(source)
        by_trial = source.store.blocks is None
        threads = cores()
        room = self._room(source.store, threads)
        if by_trial:
            step = max(1, room // max(1, spec.row_bytes))
            for first in range(0, trials, step):
                rows = np.arange(first, min(first + step, trials))
                values = _read(source.store, rows, threads)
                _pwrite(descriptor, values, offset + first * spec.row_bytes)
                told((first + len(rows)) * spec.row_bytes)
            return
        done = 0
        for part, begin in self._parts(spec.shape, room // trials // spec.dtype.itemsize):
            store = source.select_within(FIELD, part).store
            values = _read(store, np.arange(trials), threads).reshape(trials, -1)
            for trial, row in enumerate(values):
                _pwrite(descriptor, row, offset + trial * spec.row_bytes + begin * spec.dtype.itemsize)
            done += values.nbytes
            told(done)

    def _parts(self, shape: tuple[int, ...], most: int) -> "list[tuple[Within, int]]":
        """Parts of a row of at most so many elements each, and the first element of each."""
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
        """Layers of a volume that a chunk of the file holds: parts should not cut through chunks."""
        path = self.stored.files.paths[self.session]
        if is_remote(path):
            return 1
        with needed("h5py").File(path) as file:
            chunks = file[FIELD].chunks
        return max(1, chunks[1]) if chunks else 1

    def _room(self, store: Store, threads: int) -> int:
        """Bytes of a session in memory together."""
        borrowed = threads * store.scratch_bytes(1 if store.blocks is None else len(store))
        room = self.limit_bytes - BASE_BYTES - borrowed
        least = len(store) * store.fields[FIELD].dtype.itemsize
        if room < least:
            needed = BASE_BYTES + borrowed + least
            raise BudgetExceeded(
                f"memory={format_size(self.limit_bytes)} is too little to prepare with: the smallest that works is "
                f"{format_size(needed)} ({needed:,} bytes)"
            )
        return min(room, MOST_TOGETHER)


def _read(store: Store, rows: np.ndarray, threads: int) -> np.ndarray:
    """These rows, by all threads together."""
    spec = store.fields[FIELD]
    values = scratch.buffer(len(rows) * spec.row_bytes).view(spec.dtype).reshape(len(rows), *spec.shape)
    at, failures = np.arange(len(rows)), list[BaseException]()

    def work(number: int) -> None:
        try:
            if store.blocks is None:
                mine = at[number::threads]
                store.read_into(rows[mine], mine, {FIELD: values})
            else:
                read_share(store, rows, at, {FIELD: values}, (number, threads))
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


def _stream(store: CompressedNifti, rows: np.ndarray, told: Callable[[int], None]) -> None:
    store.read_into(np.arange(len(store)), np.arange(len(store)), {FIELD: rows})
    told(rows.nbytes)


def _pwrite(descriptor: int, values: np.ndarray, offset: int) -> None:
    view, done = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data, 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)
