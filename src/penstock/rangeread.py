"""Contiguous rows: read where each is worth a system call, gathered from a mapping where it is not.

Of rows of which only a part is wanted, the ranges worth reading are read: those that hold wanted elements, with the
gaps between them that cost less to read than another call would.
"""

import time
from itertools import repeat
from math import prod

import numpy as np

from penstock import coalesce, tally
from penstock.codecs import BLOCK_ELEMENTS, convert, convert_piece, convert_scratch_bytes
from penstock.extents import Array, Contiguous
from penstock.fileio import Files
from penstock.handles import Handle
from penstock.memory import aligned, borrow
from penstock.sizes import KiB
from penstock.spec import Cast, FieldSpec
from penstock.within import Mask, Within, ascending

# Below this a system call a row costs more than the copy: gather from a mapping instead (0.8 against 2.5 million
# rows of 4 KiB a second). Above it, reads keep the page tables small and notice a file that was cut short.
MAP_BELOW_BYTES = 32 * KiB

# From here on rows go into place one by one: a copy each, where smaller ones take less time gathered in one call.
ALONE_FROM_BYTES = 8 * KiB

# Rows gathered at a time when they must pass through scratch.
GATHER_BYTES = 512 * KiB

# Wanted ranges of a row with a smaller gap between them are read in one call.
GAP_BYTES = 4 * KiB

# Elements looked at together when ranges are worked out.
TABLE_PIECE = 65536

# Measured: what knowing one range takes.
RANGE_BYTES = 150


def range_reader(
    array: Contiguous, files: Files, cast: Cast | None, part: Within | None
) -> "RangeReader | GatherReader | PartReader":
    """The reader that suits the size of the rows."""
    if array.row_bytes < MAP_BELOW_BYTES and array.file.can_be_mapped:
        return GatherReader(array, files, cast, part)
    return RangeReader(array, files, cast) if part is None else PartReader(array, files, cast, part)


def read_converted(handle: Handle, offset: int, stored: np.dtype, target: np.ndarray, cast: Cast) -> None:
    """Stored elements from ``offset`` on, converted into the flat ``target``, through a piece that stays in cache."""
    width = stored.itemsize
    with borrow(width * min(len(target), BLOCK_ELEMENTS)) as scratch:
        piece = scratch.view(stored)
        for begin in range(0, len(target), BLOCK_ELEMENTS):
            goal = target[begin : begin + BLOCK_ELEMENTS]
            handle.read_into(offset + begin * width, piece[: len(goal)])
            convert_piece(piece[: len(goal)], goal, cast)


def convert_bytes(array: Array, rows: int, cast: Cast | None) -> int:
    """What ``read_converted`` of so many rows borrows."""
    if cast is None:
        return 0
    elements = rows * prod(array.shape)
    return aligned(array.stored.itemsize * min(elements, BLOCK_ELEMENTS)) + convert_scratch_bytes(elements, cast)


def _spec(array: Array, cast: Cast | None, part: Within | None) -> FieldSpec:
    return FieldSpec(cast.dtype if cast else array.stored, array.shape if part is None else part.shape)


def _flat(part: Within) -> tuple[np.ndarray, int]:
    """The elements wanted; a mask has them already."""
    return part.flat, 0 if isinstance(part, Mask) else part.flat.nbytes


class RangeReader:
    """Rows worth a system call each, read straight into place."""

    part = None

    def __init__(self, array: Contiguous, files: Files, cast: Cast | None) -> None:
        self.array, self.files, self.cast, self.spec = array, files, cast, _spec(array, cast, None)

    def scratch_bytes(self, rows: int) -> int:
        return convert_bytes(self.array, rows, self.cast)

    def read(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        array = self.array
        with self.files.lend(array.file) as handle:
            whole = target.flags.c_contiguous
            runs = coalesce.neighbours(rows, at) if whole else zip(rows.tolist(), at.tolist(), repeat(1), strict=False)
            for first, place, count in runs:
                offset = array.offset + first * array.row_bytes
                goal = target[place : place + count]
                if self.cast:
                    read_converted(handle, offset, array.stored, goal.reshape(-1), self.cast)
                else:
                    handle.read_into(offset, goal)


class PartReader:
    """Part of each row: the ranges worth reading, packed into scratch, then the elements wanted."""

    def __init__(self, array: Contiguous, files: Files, cast: Cast | None, part: Within) -> None:
        self.array, self.files, self.cast, self.spec = array, files, cast, _spec(array, cast, part)
        self.part = part
        width = array.stored.itemsize
        self.ranges, self.packed = part.tables.get(("ranges", width), lambda: _worth_reading(part, width))
        self.packed_bytes = sum(length for _, length in self.ranges)

    def scratch_bytes(self, rows: int) -> int:
        wanted = len(self.packed)
        converting = convert_scratch_bytes(wanted, self.cast) if self.cast else 0
        taken = aligned(wanted * self.array.stored.itemsize) if self.cast else 0
        return aligned(self.packed_bytes) + taken + converting

    def read(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        array = self.array
        with self.files.lend(array.file) as handle, borrow(self.packed_bytes) as packed:
            elements = packed.view(array.stored)
            for row, place in zip(rows.tolist(), at.tolist(), strict=True):
                offset, done = array.offset + row * array.row_bytes, 0
                for begin, length in self.ranges:
                    handle.read_into(offset + begin, packed[done : done + length])
                    done += length
                goal = target[place : place + 1].reshape(-1)
                if self.cast is None:
                    np.take(elements, self.packed, out=goal, mode="clip")
                    continue
                with borrow(len(goal) * array.stored.itemsize) as scratch:
                    taken = scratch.view(array.stored)
                    np.take(elements, self.packed, out=taken, mode="clip")
                    convert(taken, goal, self.cast)


def _worth_reading(part: Within, width: int) -> tuple[tuple[list[tuple[int, int]], np.ndarray], int]:
    """Byte offsets in the row and lengths; where each wanted element lies in what is read; and the size of both."""
    flat, order = part.flat, None
    if not ascending(flat):  # delivered in an order of their own
        order = np.argsort(flat, kind="stable")
        flat = flat[order]
    breaks = [0]
    for begin in range(0, len(flat), TABLE_PIECE):  # piece by piece: a mask may name millions
        steps = np.diff(flat[begin : begin + TABLE_PIECE + 1])
        breaks += (np.flatnonzero(steps * width > GAP_BYTES + width) + begin + 1).tolist()
    ends = [*breaks[1:], len(flat)]
    ranges, packed, done = [], np.empty_like(flat), 0
    for begin, end in zip(breaks, ends, strict=True):
        first, count = int(flat[begin]), int(flat[end - 1]) + 1 - int(flat[begin])
        ranges.append((first * width, count * width))
        np.subtract(flat[begin:end], first - done, out=packed[begin:end])
        done += count
    if order is not None:
        in_order, packed = packed, np.empty_like(packed)
        packed[order] = in_order
    return (ranges, packed), packed.nbytes + RANGE_BYTES * len(ranges)


class Gathering:
    """Rows too small for a system call each, gathered from a mapping of the file; who derives says how."""

    def __init__(self, array: Array, files: Files, cast: Cast | None, part: Within | None) -> None:
        self.array, self.files, self.cast, self.spec = array, files, cast, _spec(array, cast, part)
        self.part = part
        self.flat = None if part is None else part.tables.get("flat", lambda: _flat(part))
        self.group = max(1, GATHER_BYTES // max(1, array.row_bytes, self.spec.row_bytes))

    def scratch_bytes(self, rows: int) -> int:
        group = min(rows, self.group)
        wanted = group * prod(self.spec.shape)
        raw, ready = aligned(group * self.array.row_bytes), aligned(group * self.spec.row_bytes)
        part = 0 if self.flat is None else aligned(wanted * self.array.stored.itemsize)
        converting = ready + convert_scratch_bytes(wanted, self.cast) if self.cast else 0
        return raw + part + converting

    def read(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        array = self.array
        if array.row_bytes == 0 or len(rows) == 0:
            return
        tally.mine().bytes_read += len(rows) * array.row_bytes
        with self.files.lend(array.file, mapped=True) as handle:
            if self._in_one_go(at, target):
                goal = target[int(at[0]) : int(at[0]) + len(at)].reshape(len(at), -1).view(np.uint8)
                self._gather_timed(handle, rows, goal)
                return
            for begin in range(0, len(rows), self.group):
                group = slice(begin, begin + self.group)
                self._through_scratch(handle, rows[group], at[group], target)

    def _in_one_go(self, at: np.ndarray, target: np.ndarray) -> bool:
        """Whether rows go as they are to places that follow each other."""
        as_stored = self.cast is None and self.flat is None
        return as_stored and bool(target.flags.c_contiguous) and coalesce.consecutive(at)

    def _gather_timed(self, handle: Handle, rows: np.ndarray, goal: np.ndarray) -> None:
        began = time.perf_counter()
        self._gather(handle, rows, goal)
        tally.note(handle.file.path, self._places(rows), self.array.row_bytes)
        tally.mine().file_seconds += time.perf_counter() - began

    def _gather(self, handle: Handle, rows: np.ndarray, goal: np.ndarray) -> None:
        """Rows as stored, one after another, into ``goal``: bytes, a row each."""
        raise NotImplementedError

    def _places(self, rows: np.ndarray) -> np.ndarray:
        """Where rows begin in the file."""
        raise NotImplementedError

    def _through_scratch(self, handle: Handle, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        array, count = self.array, len(rows)
        wanted = count * prod(self.spec.shape)
        with borrow(count * array.row_bytes) as raw:
            self._gather_timed(handle, rows, raw.reshape(count, -1))
            elements = raw.view(array.stored).reshape(count, -1)
            with borrow(0 if self.flat is None else wanted * array.stored.itemsize) as part:
                if self.flat is not None:
                    chosen = part.view(array.stored).reshape(count, -1)
                    np.take(elements, self.flat, axis=1, out=chosen, mode="clip")
                    elements = chosen
                if self.cast is None:
                    target[at] = elements.reshape(count, *self.spec.shape)
                    return
                with borrow(count * self.spec.row_bytes) as converted:
                    ready = converted.view(self.spec.dtype)
                    convert(elements.reshape(-1), ready, self.cast)
                    target[at] = ready.reshape(count, *self.spec.shape)


class GatherReader(Gathering):
    """Rows that follow each other."""

    def __init__(self, array: Contiguous, files: Files, cast: Cast | None, part: Within | None) -> None:
        super().__init__(array, files, cast, part)
        self._begin, self._size = array.offset, array.rows * array.row_bytes

    def read(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        array, mine = self.array, tally.mine()
        if len(rows) == 0:
            return
        if self.flat is not None or array.row_bytes < ALONE_FROM_BYTES or self._in_one_go(at, target):
            super().read(rows, at, target)
            return
        mine.bytes_read += len(rows) * array.row_bytes
        with self.files.lend(array.file, mapped=True) as handle:
            began, began_computing = time.perf_counter(), time.thread_time()
            stored = handle.bytes[self._begin : self._begin + self._size].view(array.stored)
            stored = stored.reshape(array.rows, *array.shape)
            for row, place in zip(rows.tolist(), at.tolist(), strict=True):
                if self.cast is None:
                    target[place] = stored[row]
                else:
                    convert(stored[row].reshape(-1), target[place].reshape(-1), self.cast)
            seconds = time.perf_counter() - began
            if self.cast is not None:  # what was not spent on converting was waited for
                seconds = max(0.0, seconds - (time.thread_time() - began_computing))
            mine.file_seconds += seconds
            tally.note(handle.file.path, self._places(rows), array.row_bytes)

    def _gather(self, handle: Handle, rows: np.ndarray, goal: np.ndarray) -> None:
        stored = handle.bytes[self._begin : self._begin + self._size].reshape(self.array.rows, self.array.row_bytes)
        np.take(stored, rows, axis=0, out=goal, mode="clip")  # clip: the one mode that copies straight to out

    def _places(self, rows: np.ndarray) -> np.ndarray:
        return self._begin + rows * self.array.row_bytes
