"""Rows that a format's own library must read: slices of arrays, read into scratch and then put into place.

A subclass says how to open arrays and how to read one slice; its layout says how much memory the library allocates.
The rest is here: runs of neighbouring rows, rows on any axis, part of each row.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field, replace
from functools import cached_property
from math import prod
from typing import Any, Self

import numpy as np

from penstock.base import counters
from penstock.base.dataclass import dataclass
from penstock.base.file_id import FileId
from penstock.base.scratch import aligned, borrow
from penstock.base.sizes import MiB
from penstock.base.spec import MANIFEST, Fields, FieldSpec, Origin, ReadPath, without_axis
from penstock.base.urls import base_name, is_remote
from penstock.dataset.second_pass import crop
from penstock.dataset.store import Out, StoreBase, check_rows, digest
from penstock.errors import PenstockError
from penstock.files.handles import check_unchanged
from penstock.files.retry import retry_library
from penstock.read import coalesce
from penstock.read.part import Box, Mask, RowPart, compose, coordinates, element_strides, everything

# Rows that pass through a library at a time.
READ_BYTES = 1 * MiB

# The most memory that Python takes per entry of a dict from int to int.
HOLE_BYTES = 200


@dataclass(frozen=True)
class Layout:
    """How one array is read through its library."""

    stored: np.dtype
    shape: tuple[int, ...]
    """The shape of the array, with the axis of the rows."""
    chunks: tuple[int, ...] | None
    row_axis: int
    why: str
    """Why the library must read it."""
    part: RowPart | None = None
    holes: Mapping[int, int] = field(default_factory=dict)
    """Chunks that were never written and come as the fill value, by block of rows."""
    checked_by: str = field(default="", kw_only=True)
    """The library's own checksum."""

    @cached_property
    def spec(self) -> FieldSpec:
        return FieldSpec(self.stored, self.part.shape if self.part else self.row_shape)

    @property
    def row_shape(self) -> tuple[int, ...]:
        return without_axis(self.shape, self.row_axis)

    @cached_property
    def bounds(self) -> tuple[slice, ...]:
        """The part of a row that is read: a box."""
        return (self.part or everything(self.row_shape)).bounds

    @cached_property
    def read_shape(self) -> tuple[int, ...]:
        return tuple(each.stop - each.start for each in self.bounds)

    @property
    def read_bytes(self) -> int:
        """Bytes of one row while it is read."""
        return prod(self.read_shape) * self.stored.itemsize

    @property
    def chunk_rows(self) -> int:
        return self.chunks[self.row_axis] if self.chunks else 1

    @property
    def chunk_bytes(self) -> int:
        return prod(self.chunks) * self.stored.itemsize if self.chunks else 0

    @property
    def _chunk_of_row(self) -> tuple[int, ...]:
        return without_axis(self.chunks or (), self.row_axis)

    @property
    def group(self) -> int:
        """Rows read at a time."""
        return max(1, READ_BYTES // max(1, self.read_bytes))

    @property
    def how(self) -> str:
        """Which library reads it, and why."""
        raise NotImplementedError

    @property
    def remedy(self) -> str:
        """How to rewrite the file so that each row can be read by itself."""
        return ""

    @property
    def library_bytes(self) -> int:
        """Memory that the library allocates while it reads some rows."""
        raise NotImplementedError

    def read_path(self, name: str, rows: int) -> ReadPath:
        delivered = max(1, self.spec.row_bytes)
        touched = prod(self.read_shape) * self.chunk_rows * self.stored.itemsize
        layout = f"chunks of {self.chunks}" if self.chunks else "not in chunks"
        remedy = self.remedy.format(name=name) if self.chunk_rows > 1 else ""
        return ReadPath(
            name, self.spec, rows=rows, layout=layout, how=self.how, block_rows=self.chunk_rows,
            amplification=touched / delivered, stored_bytes=0, missing_chunks=sum(self.holes.values()), remedy=remedy,
            checked_by=self.checked_by, chunk=self._chunk_of_row,
        )  # fmt: skip

    def count_filled(self, first: int, count: int) -> None:
        """Count the chunks that a read of some rows delivers as the fill value."""
        if self.holes:
            blocks = range(first // self.chunk_rows, (first + count - 1) // self.chunk_rows + 1)
            counters.mine().chunks_filled += sum(self.holes.get(block, 0) for block in blocks)

    def scratch_bytes(self, rows: int) -> int:
        group = aligned(min(rows, self.group) * self.read_bytes)
        return group * (2 if self.row_axis else 1) + self.library_bytes


class SlicedStore(StoreBase):
    """Arrays of one file or folder, opened for each read."""

    kind = "sliced"
    fields: Fields

    def __init__(self, file: FileId, rows: int, layouts: Mapping[str, Layout]) -> None:
        self.file, self._rows, self.layouts = file, rows, dict(layouts)
        self.fields = {name: each.spec for name, each in layouts.items()}

    def with_layouts(self, layouts: Mapping[str, Layout]) -> Self:
        """The same rows with these fields."""
        return type(self)(self.file, self._rows, layouts)

    def opened(self, names: Sequence[str]) -> AbstractContextManager[Mapping[str, Any]]:
        """The library's own arrays, by field."""
        raise NotImplementedError

    def read_slice(self, array: Any, wanted: tuple[slice, ...], goal: np.ndarray, where: str) -> None:
        """``goal[...] = array[wanted]``; raises errors of ``penstock.errors`` that name ``where``."""
        raise NotImplementedError

    @property
    def index_bytes(self) -> int:
        return HOLE_BYTES * sum(len(each.holes) for each in self.layouts.values())

    @property
    def shared_index(self) -> dict[int, int]:
        return {id(each.part): each.part.index_bytes for each in self.layouts.values() if each.part}

    def __len__(self) -> int:
        return self._rows

    @property
    def blocks(self) -> np.ndarray | None:
        rows = max(each.chunk_rows for each in self.layouts.values())
        return np.arange(0, self._rows, rows) if rows > 1 else None

    @property
    def fingerprint(self) -> str:
        return digest(self.kind, base_name(self.file.path), self.file.size, *self.describe_layouts())

    def describe_layouts(self) -> tuple[object, object]:
        """The arrays and the parts of their rows, for a fingerprint."""
        parts = sorted((name, each.part.describe()) for name, each in self.layouts.items() if each.part)
        return sorted((name, str(each.stored), each.shape, each.row_axis) for name, each in self.layouts.items()), parts

    def scratch_bytes(self, rows: int) -> int:
        return max(each.scratch_bytes(rows) for each in self.layouts.values())

    def with_fields(self, names: Sequence[str]) -> Self:
        return self.with_layouts({name: self.layouts[name] for name in names})

    def with_part(self, field: str, part: RowPart) -> Self:
        layout = self.layouts[field]
        whole = compose(layout.part, part) if layout.part else part
        return self.with_layouts({**self.layouts, field: replace(layout, part=whole)})

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        check_rows(rows, self)
        if not out or not len(rows):
            return
        self._check_unchanged()
        try:
            retry_library(self.file.path, lambda: self._read_all(rows, at, out))
        except (PenstockError, KeyError):
            self._check_unchanged()  # the likelier cause: another file has taken its name
            raise

    def _read_all(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        ascending = np.argsort(rows, kind="stable")
        with self.opened(list(out)) as arrays:
            for name, target in out.items():
                self._read_field(arrays[name], name, rows[ascending], at[ascending], target)

    def _check_unchanged(self) -> None:
        if not is_remote(self.file.path):  # every answer of a server identifies the file
            check_unchanged(self.file)

    def _read_field(self, array: Any, name: str, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        """Read each run of neighbours once and copy it into place; ``rows`` ascend, with repeats."""
        distinct, layout = np.unique(rows), self.layouts[name]
        part = inside(layout)
        for first, _, count in coalesce.limit_runs(coalesce.merge_neighbours(distinct, distinct), layout.group):
            begin, end = np.searchsorted(rows, [first, first + count])
            with borrow(count * layout.read_bytes) as scratch, borrow(len(scratch) if layout.row_axis else 0) as turned:
                read = scratch.view(layout.spec.dtype).reshape(count, *layout.read_shape)
                self._read_run(array, name, first, read, turned)
                if part is None:
                    target[at[begin:end]] = read[rows[begin:end] - first]
                    continue
                for row, place in zip((rows[begin:end] - first).tolist(), at[begin:end].tolist(), strict=True):
                    crop(read[row], part, target[place : place + 1])

    def _read_run(self, array: Any, name: str, first: int, read: np.ndarray, turned: np.ndarray) -> None:
        layout = self.layouts[name]
        wanted = list(layout.bounds)
        wanted.insert(layout.row_axis, slice(first, first + len(read)))
        goal = read
        if layout.row_axis:
            as_stored = tuple(each.stop - each.start for each in wanted)
            goal = turned.view(read.dtype).reshape(as_stored)
        where = f"{self.file.path}: {name}, rows {first} to {first + len(read) - 1}"
        self.read_slice(array, tuple(wanted), goal, where)
        layout.count_filled(first, len(read))
        if layout.row_axis:
            np.copyto(read, np.moveaxis(goal, layout.row_axis, 0))

    def read_paths(self) -> Sequence[ReadPath]:
        found = [each.read_path(name, self._rows) for name, each in self.layouts.items()]
        return [replace(path, checked_by=MANIFEST) for path in found] if self.file.is_compared else found

    def origin(self, row: int) -> Origin:
        return Origin(self.file.path, f"{next(iter(self.fields))}[{row}]")


def inside(layout: Layout) -> RowPart | None:
    """The wanted part, relative to the box that is read; None if it is all of the box."""
    part = layout.part
    if part is None:
        return None
    if isinstance(part, Box):
        ranges = tuple(range(0, each[-1] - each[0] + 1, each.step) for each in part.ranges)
        return Box(layout.read_shape, ranges, part.dropped)
    return part.tables.get("inside its bounds", lambda: _mask_inside(layout, part))


def _mask_inside(layout: Layout, mask: Mask) -> tuple[Mask, int]:
    flat = np.zeros(len(mask.flat), np.int64)
    along = coordinates(mask.flat, layout.row_shape)
    for at, bound, stride in zip(along, layout.bounds, element_strides(layout.read_shape), strict=True):
        flat += (at - bound.start) * stride
    return Mask(layout.read_shape, flat, mask.is_single), flat.nbytes
