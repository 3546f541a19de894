"""Contiguous rows: read if each is worth a system call, else gathered from a mapping.

If only a part of each row is wanted, ranges with wanted elements are read, together with gaps between them that cost
less to read than another call.
"""

import time
from math import prod
from typing import Any

import numpy as np

from penstock.base import counters
from penstock.base.scratch import aligned, borrow
from penstock.base.sizes import KiB
from penstock.base.spec import Cast, FieldSpec
from penstock.files.files import Files
from penstock.files.handles import Handle
from penstock.read import coalesce
from penstock.read.convert import convert, convert_scratch_bytes, read_converted, read_converted_scratch_bytes
from penstock.read.extents import Array, Contiguous
from penstock.read.part import Mask, RowPart, is_ascending

# Larger rows go into place one by one, a copy each; smaller ones take less time gathered in one call.
ALONE_FROM_BYTES = 8 * KiB

# Reads of fewer bytes pass through memory that numpy allocates, which takes less time than borrowing scratch.
FEW_BYTES = 16 * KiB

# Elements looked at together when ranges are worked out.
TABLE_PIECE = 65536

# Measured: memory per range.
RANGE_BYTES = 150


def row_reader(
    array: Contiguous, files: Files, cast: Cast | None, part: RowPart | None
) -> "RowReader | MappedReader | PartReader":
    """The reader that suits the size of the rows."""
    if array.row_bytes < files.policy.map_rows_below_bytes and array.file.can_be_mapped:
        return MappedReader(array, files, cast, part)
    return RowReader(array, files, cast) if part is None else PartReader(array, files, cast, part)


def _make_spec(array: Array, cast: Cast | None, part: RowPart | None) -> FieldSpec:
    return FieldSpec(cast.dtype if cast else array.stored, array.shape if part is None else part.shape)


def _flatten(part: RowPart) -> tuple[np.ndarray, int]:
    """The wanted elements, and the memory they take; a mask has them already."""
    return part.flat, 0 if isinstance(part, Mask) else part.flat.nbytes


class RowReader:
    """Rows worth a system call each, read straight into place."""

    part = None

    def __init__(self, array: Contiguous, files: Files, cast: Cast | None) -> None:
        self.array, self.files, self.cast, self.spec = array, files, cast, _make_spec(array, cast, None)

    def scratch_bytes(self, rows: int) -> int:
        return read_converted_scratch_bytes(self.array, rows, self.cast)

    def read(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        array = self.array
        with self.files.lend(array.file) as handle:
            runs = coalesce.merge_neighbours(rows, at)
            if not target.flags.c_contiguous:
                runs = coalesce.limit_runs(runs, 1)
            for first, place, count in runs:
                offset = array.offset + first * array.row_bytes
                goal = target[place : place + count]
                if self.cast:
                    read_converted(handle, offset, array.stored, goal.reshape(-1), self.cast)
                else:
                    handle.read_into(offset, goal)


class PartReader:
    """Part of each row: the ranges worth reading, packed into scratch, then the elements wanted."""

    def __init__(self, array: Contiguous, files: Files, cast: Cast | None, part: RowPart) -> None:
        self.array, self.files, self.cast, self.spec = array, files, cast, _make_spec(array, cast, part)
        self.part = part
        width, gap = array.stored.itemsize, files.policy.row_gap_bytes
        self.ranges, self.packed = part.tables.get(("ranges", width, gap), lambda: _plan_ranges(part, width, gap))
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


def _plan_ranges(part: RowPart, width: int, gap_bytes: int) -> tuple[tuple[list[tuple[int, int]], np.ndarray], int]:
    """(offset, length) in bytes of ranges of the row; where wanted elements lie in what is read; memory of both."""
    flat, order = part.flat, None
    if not is_ascending(flat):  # delivered in an order of their own
        order = np.argsort(flat, kind="stable")
        flat = flat[order]
    breaks = [0]
    for begin in range(0, len(flat), TABLE_PIECE):  # piece by piece: a mask may name millions
        steps = np.diff(flat[begin : begin + TABLE_PIECE + 1])
        breaks += (np.flatnonzero(steps * width > gap_bytes + width) + begin + 1).tolist()
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


class GatherReader:
    """Rows too small for a system call each, gathered from a mapping of the file; subclasses say how."""

    least_rows = 1
    one_by_one: Any = None
    """The reader of fewer rows than these, if there is one."""

    def __init__(self, array: Array, files: Files, cast: Cast | None, part: RowPart | None) -> None:
        self.array, self.files, self.cast, self.spec = array, files, cast, _make_spec(array, cast, part)
        self.part = part
        self.flat = None if part is None else part.tables.get("flat", lambda: _flatten(part))
        self.group = max(1, files.policy.gather_bytes // max(1, array.row_bytes, self.spec.row_bytes))

    def scratch_bytes(self, rows: int) -> int:
        group = min(rows, self.group)
        wanted = group * prod(self.spec.shape)
        raw, ready = aligned(group * self.array.row_bytes), aligned(group * self.spec.row_bytes)
        part = 0 if self.flat is None else aligned(wanted * self.array.stored.itemsize)
        converting = ready + convert_scratch_bytes(wanted, self.cast) if self.cast else 0
        return raw + part + converting

    def read(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        if self.array.row_bytes and len(rows) >= self.least_rows:
            with self.files.lend(self.array.file, mapped=True) as handle:
                self.read_from(handle, rows, at, target)
        elif self.one_by_one is not None:
            self.one_by_one.read(rows, at, target)

    def read_from(self, handle: Handle, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        """Read at least one row from a mapping of the file, which several fields may share."""
        counters.mine().bytes_read += len(rows) * self.array.row_bytes
        if self._in_one_go(at, target):
            goal = target[int(at[0]) : int(at[0]) + len(at)].reshape(len(at), -1).view(np.uint8)
            self._gather_timed(handle, rows, goal)
            return
        if self.cast is None and self.flat is None and len(rows) * self.array.row_bytes <= FEW_BYTES:
            raw = np.empty((len(rows), self.array.row_bytes), np.uint8)
            self._gather_timed(handle, rows, raw)
            target[at] = raw.view(self.array.stored).reshape(len(rows), *self.array.shape)
            return
        for begin in range(0, len(rows), self.group):
            group = slice(begin, begin + self.group)
            self._through_scratch(handle, rows[group], at[group], target)

    def _in_one_go(self, at: np.ndarray, target: np.ndarray) -> bool:
        """Whether rows go unchanged to places that follow each other."""
        as_stored = self.cast is None and self.flat is None
        return as_stored and bool(target.flags.c_contiguous) and coalesce.are_consecutive(at)

    def _gather_timed(self, handle: Handle, rows: np.ndarray, goal: np.ndarray) -> None:
        began = time.perf_counter()
        self._gather(handle, rows, goal)
        if counters.is_watched():
            counters.note(handle.file.path, self._places(rows), self.array.row_bytes)
        counters.mine().file_seconds += time.perf_counter() - began

    def _gather(self, handle: Handle, rows: np.ndarray, goal: np.ndarray) -> None:
        """Rows as stored, one after another, into ``goal``: bytes, a row each."""
        raise NotImplementedError

    def _places(self, rows: np.ndarray) -> np.ndarray:
        """Where rows begin in the file."""
        raise NotImplementedError

    def _through_scratch(self, handle: Handle, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        array, count = self.array, len(rows)
        with borrow(count * array.row_bytes) as raw:
            self._gather_timed(handle, rows, raw.reshape(count, -1))
            elements = raw.view(array.stored).reshape(count, -1)
            if self.flat is None:
                self._put(elements, at, target)
                return
            with borrow(count * len(self.flat) * array.stored.itemsize) as part:
                chosen = part.view(array.stored).reshape(count, -1)
                np.take(elements, self.flat, axis=1, out=chosen, mode="clip")
                self._put(chosen, at, target)

    def _put(self, elements: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        """Rows of elements as stored, into their places of a batch."""
        count, shape = len(elements), self.spec.shape
        if self.cast is None:
            target[at] = elements.reshape(count, *shape)
            return
        with borrow(count * self.spec.row_bytes) as converted:
            ready = converted.view(self.spec.dtype)
            convert(elements.reshape(-1), ready, self.cast)
            target[at] = ready.reshape(count, *shape)


class MappedReader(GatherReader):
    """Rows that follow each other. A run of them is read by one call: no pages of the file stay mapped then."""

    def __init__(self, array: Contiguous, files: Files, cast: Cast | None, part: RowPart | None) -> None:
        super().__init__(array, files, cast, part)
        self._begin, self._size = array.offset, array.rows * array.row_bytes
        self._straight = RowReader(array, files, cast)

    def read(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        is_long = len(rows) * self.array.row_bytes >= self.files.policy.map_rows_below_bytes
        if is_long and self._in_one_go(at, target) and coalesce.are_consecutive(rows):
            self._straight.read(rows, at, target)
        else:
            super().read(rows, at, target)

    def read_from(self, handle: Handle, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        array, mine = self.array, counters.mine()
        if self.flat is not None or array.row_bytes < ALONE_FROM_BYTES or self._in_one_go(at, target):
            super().read_from(handle, rows, at, target)
            return
        mine.bytes_read += len(rows) * array.row_bytes
        began, began_computing = time.perf_counter(), time.thread_time()
        stored = handle.mapping[self._begin : self._begin + self._size].view(array.stored)
        stored = stored.reshape(array.rows, *array.shape)
        for row, place in zip(rows.tolist(), at.tolist(), strict=True):
            if self.cast is None:
                target[place] = stored[row]
            else:
                convert(stored[row].reshape(-1), target[place].reshape(-1), self.cast)
        seconds = time.perf_counter() - began
        if self.cast is not None:  # time that was not spent on converting was spent waiting
            seconds = max(0.0, seconds - (time.thread_time() - began_computing))
        mine.file_seconds += seconds
        counters.note(handle.file.path, self._places(rows), array.row_bytes)

    def _gather(self, handle: Handle, rows: np.ndarray, goal: np.ndarray) -> None:
        stored = handle.mapping[self._begin : self._begin + self._size].reshape(self.array.rows, self.array.row_bytes)
        stored.take(rows, 0, goal, "clip")  # clip: the only mode that copies straight to out

    def _places(self, rows: np.ndarray) -> np.ndarray:
        return self._begin + rows * self.array.row_bytes


PIECE_BYTES = 128 * KiB
"""Gathered at a time through memory that numpy allocates, which stays in the core's cache."""


def rows_at_bytes(handle: Handle, size: int) -> np.ndarray:
    """A mapped file as if a row of ``size`` bytes began at each of its bytes."""
    whole = handle.mapping
    return np.ndarray((len(whole) - size + 1, size), np.uint8, whole, strides=(1, 1))


def gather_places(handle: Handle, places: np.ndarray, goal: np.ndarray) -> None:
    """Rows of a mapped file that begin at these bytes, one after another into ``goal``: bytes, a row each.

    A row is one item to numpy, which moves items faster than rows of bytes.
    """
    whole, row = handle.mapping, np.dtype((np.void, goal.shape[1]))
    source = np.ndarray(len(whole) - row.itemsize + 1, row, whole, strides=(1,))
    items, step = goal.view(row)[:, 0], rows_per_piece(row.itemsize)
    for begin in range(0, len(places), step):
        items[begin : begin + step] = source[places[begin : begin + step]]


def rows_per_piece(row_bytes: int) -> int:
    """How many rows ``gather_places`` copies at a time."""
    return max(1, PIECE_BYTES // max(1, row_bytes))
