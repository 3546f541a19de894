"""Rows that h5py must read: exact for every layout, and one thread at a time."""

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from math import prod
from typing import Any

import numpy as np

from penstock import forks
from penstock.errors import ConfigError, Corrupt, PenstockError, Truncated, Unavailable
from penstock.extents import FileId
from penstock.fileio import Files
from penstock.formats import sliced
from penstock.formats.pagedfile import PAGED_BYTES, PagedFile
from penstock.formats.sliced import SlicedStore
from penstock.sizes import MiB
from penstock.urls import is_remote

# The largest chunk cache that h5py is given: enough to decode a chunk once for all its rows in a read, where chunks are
# of a reasonable size.
CACHE_BYTES = 64 * MiB

# What HDF5 allocates of its own in a read, measured: type conversion buffer and metadata cache, and for each chunk its
# stored form and an inflated one that grows by doubling.
LIBRARY_BYTES = 4 * MiB
CHUNK_COPIES = 3

DAMAGED = (OSError, RuntimeError, KeyError, ValueError, TypeError, IndexError, OverflowError, NotImplementedError)
"""What h5py raises when a file's structures do not hold; each place in it has its own."""


@contextmanager
def opened(file: FileId, files: Files, cache_bytes: int = 0) -> Iterator[Any]:
    """The file for h5py; one on another machine, or held against a manifest, is read through a Python file object."""
    if not file.compared and not is_remote(file.path):
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
    if failure is None:
        with h5:
            try:
                yield h5
            except PenstockError:
                raise
            except DAMAGED as error:
                failure = Corrupt(
                    f"{file.path}: HDF5 cannot make sense of it ({type(error).__name__}: {error}); the file is "
                    f"damaged: fetch it again"
                )
    if failure is not None:
        # Not as a consequence of h5py's: its traceback holds the file object, and where that outlives h5py, the process
        # crashes at its end.
        raise failure


def _explained(file: FileId, error: OSError) -> PenstockError:
    if "truncated" in str(error):
        return Truncated(f"{file.path}: HDF5 file cut short ({error}); fetch it again")
    if error.errno in (errno.EACCES, errno.EPERM, errno.ENOENT):
        return Unavailable(f"{file.path}: cannot be read ({error}); check the path and its permissions")
    return Corrupt(
        f"{file.path}: not a whole HDF5 file ({file.size:,} bytes; {error}); fetch it again, or leave it out"
    )


def _beside(h5: Any, path: str, name: str) -> Any:
    """A dataset whose other files, if it has any, are looked for beside the file: else it is where the process runs."""
    import h5py

    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    if not is_remote(path):
        folder = os.fsencode(os.path.dirname(os.path.realpath(path)))
        access.set_efile_prefix(folder)
        access.set_virtual_prefix(folder)
    return h5py.Dataset(h5py.h5d.open(h5.id, name.encode(), access))


class Layout(sliced.Layout):
    """What reading one dataset through h5py takes."""

    @property
    def how(self) -> str:
        return f"read by h5py, one thread at a time: {self.why}"

    @property
    def remedy(self) -> str:
        whole = "x".join(str(1 if axis == self.row_axis else size) for axis, size in enumerate(self.shape))
        return f"h5repack -l {{name}}:CHUNK={whole} OLD NEW"

    @property
    def cache_bytes(self) -> int:
        row_of_chunks = self.chunk_rows * prod(self.row_shape) * self.stored.itemsize
        return row_of_chunks if self.chunks and row_of_chunks <= CACHE_BYTES else 0

    @property
    def library_bytes(self) -> int:
        return self.cache_bytes + CHUNK_COPIES * self.chunk_bytes + LIBRARY_BYTES


# h5py serialises itself; this lock keeps one file open at a time and one chunk cache in memory.
_ONE_AT_A_TIME = forks.Lock()


class H5pyStore(SlicedStore):
    """Datasets of one file, open only while a read lasts."""

    kind = "h5py"
    layouts: dict[str, Layout]  # type: ignore[assignment]

    def __init__(self, file: FileId, files: Files, rows: int, layouts: Mapping[str, sliced.Layout]) -> None:
        super().__init__(file, rows, layouts)
        self._files = files

    def with_layouts(self, layouts: Mapping[str, sliced.Layout]) -> "H5pyStore":
        return H5pyStore(self.file, self._files, self._rows, layouts)

    def scratch_bytes(self, rows: int) -> int:
        paged = PAGED_BYTES if self.file.compared or is_remote(self.file.path) else 0
        return super().scratch_bytes(rows) + paged + self._files.scratch_bytes

    @property
    def shared_index(self) -> dict[int, int]:
        return self._files.shared_index

    @contextmanager
    def opened(self, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        cache_bytes = max((self.layouts[name].cache_bytes for name in names), default=0)
        with _ONE_AT_A_TIME, opened(self.file, self._files, cache_bytes) as h5:
            yield {name: _beside(h5, self.file.path, name) for name in names}

    def read_slice(self, array: Any, wanted: tuple[slice, ...], goal: np.ndarray, where: str) -> None:
        try:
            array.read_direct(goal, wanted)
        except OSError as error:
            raise Corrupt(
                f"{where}: {error}. The file is damaged there, or needs a filter that is not installed (pip install "
                f"hdf5plugin)"
            ) from error
