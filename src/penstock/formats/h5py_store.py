"""Rows that h5py must read: exact for every layout, and one thread at a time."""

import errno
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from penstock import coalesce
from penstock.errors import ConfigError, Corrupt, PenstockError, Truncated, Unavailable
from penstock.extents import FileId
from penstock.fileio import Files, check_unchanged
from penstock.formats.pagedfile import PAGED_BYTES, PagedFile
from penstock.memory import aligned, borrow
from penstock.sizes import MiB
from penstock.spec import Fields, FieldSpec, Origin, ReadPath
from penstock.store import Out, check_rows, digest
from penstock.urls import base_name, is_remote
from penstock.within import Box, Mask, Within, compose, coordinates, element_strides, everything
from penstock.wrap import crop

# Rows that pass through h5py at a time, and the largest chunk cache it is given: enough to decode a chunk once for all
# its rows in a read, where chunks are of a reasonable size.
READ_BYTES = 1 * MiB
CACHE_BYTES = 64 * MiB

# What HDF5 allocates of its own in a read, measured: type conversion buffer and metadata cache, and for each chunk its
# stored form and an inflated one that grows by doubling.
LIBRARY_BYTES = 4 * MiB
CHUNK_COPIES = 3


@contextmanager
def opened(file: FileId, files: Files, cache_bytes: int = 0) -> Iterator[Any]:
    """The file for h5py; one on another machine is read through a Python file object, or from its copy."""
    if not is_remote(file.path):
        with _opened(file, file.path, cache_bytes) as h5:
            yield h5
        return
    with files.lend(file) as handle, closing(PagedFile(handle)) as paged:
        try:
            with _opened(file, paged, cache_bytes) as h5:
                yield h5
        except Exception:
            if paged.error is None:
                raise
        if paged.error is not None:
            raise paged.error


@contextmanager
def _opened(file: FileId, source: Any, cache_bytes: int) -> Iterator[Any]:
    try:
        import h5py
    except ImportError:
        raise ConfigError('reading HDF5 needs h5py: pip install "penstock[hdf5]"') from None
    failure: PenstockError | None = None
    try:
        h5 = h5py.File(source, "r", rdcc_nbytes=cache_bytes, swmr=file.growing)
    except OSError as error:
        failure = _explained(file, error)
    if failure is not None:
        # Not as a consequence of h5py's: its traceback holds the file object, and where that outlives h5py, the process
        # crashes at its end.
        raise failure
    with h5:
        yield h5


def _explained(file: FileId, error: OSError) -> PenstockError:
    if "truncated" in str(error):
        return Truncated(f"{file.path}: HDF5 file cut short ({error}); fetch it again")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EIO, errno.ENOENT):
        return Unavailable(f"{file.path}: cannot be read ({error}); check the path and its permissions")
    return Corrupt(
        f"{file.path}: not a whole HDF5 file ({file.size:,} bytes; {error}); fetch it again, or leave it out"
    )


@dataclass(frozen=True)
class Layout:
    """What reading one dataset through h5py takes."""

    stored: np.dtype
    shape: tuple[int, ...]
    """Of the dataset, the axis of the rows included."""
    chunks: tuple[int, ...] | None
    row_axis: int
    why: str
    """Why h5py must read it."""
    part: Within | None = None

    @cached_property
    def spec(self) -> FieldSpec:
        return FieldSpec(self.stored, self.part.shape if self.part else self.row_shape)

    @property
    def row_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.row_axis], *self.shape[self.row_axis + 1 :])

    @cached_property
    def bounds(self) -> tuple[slice, ...]:
        """The box of a row that is read."""
        return (self.part or everything(self.row_shape)).bounds

    @cached_property
    def read_shape(self) -> tuple[int, ...]:
        return tuple(each.stop - each.start for each in self.bounds)

    @property
    def read_bytes(self) -> int:
        """What one row takes while it is read."""
        return prod(self.read_shape) * self.stored.itemsize

    @property
    def chunk_rows(self) -> int:
        return self.chunks[self.row_axis] if self.chunks else 1

    @property
    def cache_bytes(self) -> int:
        row_of_chunks = self.chunk_rows * prod(self.row_shape) * self.stored.itemsize
        return row_of_chunks if self.chunks and row_of_chunks <= CACHE_BYTES else 0

    @property
    def group(self) -> int:
        """Rows read at a time."""
        return max(1, READ_BYTES // max(1, self.read_bytes))

    def read_path(self, name: str, rows: int) -> ReadPath:
        delivered = max(1, self.spec.row_bytes)
        touched = prod(self.read_shape) * self.chunk_rows * self.stored.itemsize
        layout = f"chunks of {self.chunks}" if self.chunks else "not in chunks"
        whole = "x".join(str(1 if axis == self.row_axis else size) for axis, size in enumerate(self.shape))
        return ReadPath(
            name, self.spec, rows, layout, f"read by h5py, one thread at a time: {self.why}", self.chunk_rows,
            touched / delivered, 0, 0, f"h5repack -l {name}:CHUNK={whole} OLD NEW" if self.chunk_rows > 1 else "",
        )  # fmt: skip

    def scratch_bytes(self, rows: int) -> int:
        group = aligned(min(rows, self.group) * self.read_bytes)
        chunk_bytes = prod(self.chunks) * self.stored.itemsize if self.chunks else 0
        return group * (2 if self.row_axis else 1) + self.cache_bytes + CHUNK_COPIES * chunk_bytes + LIBRARY_BYTES


# h5py serialises itself; this lock keeps one file open at a time and one chunk cache in memory.
_ONE_AT_A_TIME = threading.Lock()


class H5pyStore:
    """Datasets of one file, open only while a read lasts."""

    def __init__(self, file: FileId, files: Files, rows: int, layouts: Mapping[str, Layout]) -> None:
        self.file, self._files, self._rows, self.layouts = file, files, rows, dict(layouts)
        self.fields: Fields = {name: each.spec for name, each in layouts.items()}

    index_bytes = 0

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
        parts = sorted((name, each.part.describe()) for name, each in self.layouts.items() if each.part)
        layouts = sorted((name, str(each.stored), each.shape, each.row_axis) for name, each in self.layouts.items())
        return digest("h5py", base_name(self.file.path), self.file.size, layouts, parts)

    def scratch_bytes(self, rows: int) -> int:
        paged = PAGED_BYTES if is_remote(self.file.path) else 0
        return paged + max(each.scratch_bytes(rows) for each in self.layouts.values())

    def choosing(self, names: Sequence[str]) -> "H5pyStore":
        return H5pyStore(self.file, self._files, self._rows, {name: self.layouts[name] for name in names})

    def selecting(self, field: str, part: Within) -> "H5pyStore":
        layout = self.layouts[field]
        whole = compose(layout.part, part) if layout.part else part
        return H5pyStore(self.file, self._files, self._rows, {**self.layouts, field: replace(layout, part=whole)})

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        check_rows(rows, self)
        self._check_unchanged()
        ascending = np.argsort(rows, kind="stable")
        cache_bytes = max((self.layouts[name].cache_bytes for name in out), default=0)
        try:
            with _ONE_AT_A_TIME, opened(self.file, self._files, cache_bytes) as h5:
                for name, target in out.items():
                    self._read_field(h5[name], self.layouts[name], rows[ascending], at[ascending], target)
        except (PenstockError, KeyError):
            self._check_unchanged()  # another file under its name is the likelier cause
            raise

    def _check_unchanged(self) -> None:
        if not is_remote(self.file.path):  # there, every answer tells
            check_unchanged(self.file)

    def _read_field(self, dataset: Any, layout: Layout, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        """``rows`` ascend, with repeats: read each run of neighbours once and copy it out."""
        distinct = np.unique(rows)
        part = inside(layout)
        for first, _, count in coalesce.limited(coalesce.neighbours(distinct, distinct), layout.group):
            begin, end = np.searchsorted(rows, [first, first + count])
            with borrow(count * layout.read_bytes) as scratch, borrow(len(scratch) if layout.row_axis else 0) as turned:
                read = scratch.view(layout.spec.dtype).reshape(count, *layout.read_shape)
                self._read_run(dataset, layout, first, read, turned)
                if part is None:
                    target[at[begin:end]] = read[rows[begin:end] - first]
                    continue
                for row, place in zip((rows[begin:end] - first).tolist(), at[begin:end].tolist(), strict=True):
                    crop(read[row], part, target[place : place + 1])

    def _read_run(self, dataset: Any, layout: Layout, first: int, read: np.ndarray, turned: np.ndarray) -> None:
        wanted = list(layout.bounds)
        wanted.insert(layout.row_axis, slice(first, first + len(read)))
        goal = read
        if layout.row_axis:
            as_stored = tuple(each.stop - each.start for each in wanted)
            goal = turned.view(read.dtype).reshape(as_stored)
        try:
            dataset.read_direct(goal, tuple(wanted))
        except OSError as error:
            raise Corrupt(
                f"{self.file.path}: {dataset.name}, rows {first} to {first + len(read) - 1}: {error}. The file is "
                f"damaged there, or needs a filter that is not installed (pip install hdf5plugin)"
            ) from error
        if layout.row_axis:
            np.copyto(read, np.moveaxis(goal, layout.row_axis, 0))

    def read_paths(self) -> Sequence[ReadPath]:
        return [each.read_path(name, self._rows) for name, each in self.layouts.items()]

    def origin(self, row: int) -> Origin:
        return Origin(self.file.path, f"{next(iter(self.fields))}[{row}]")

    def close(self) -> None:
        """Nothing stays open between reads."""


def inside(layout: Layout) -> Within | None:
    """The part that is wanted, seen from the box that is read; None where that is all of the box."""
    part = layout.part
    if part is None:
        return None
    if isinstance(part, Box):
        ranges = tuple(range(0, each[-1] - each[0] + 1, each.step) for each in part.ranges)
        return Box(layout.read_shape, ranges, part.dropped)
    return part.tables.get("inside its bounds", lambda: _inside(layout, part))


def _inside(layout: Layout, mask: Mask) -> tuple[Mask, int]:
    flat = np.zeros(len(mask.flat), np.int64)
    along = coordinates(mask.flat, layout.row_shape)
    for at, bound, stride in zip(along, layout.bounds, element_strides(layout.read_shape), strict=True):
        flat += (at - bound.start) * stride
    return Mask(layout.read_shape, flat, mask.single), flat.nbytes
