"""Rows that h5py must read: any layout, one thread at a time."""

import errno
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from math import prod
from typing import Any

import numpy as np

from penstock.base import fork
from penstock.base.file_id import FileId
from penstock.base.sizes import MiB
from penstock.base.urls import is_remote
from penstock.dataset import sliced
from penstock.dataset.sliced import SlicedStore
from penstock.errors import ConfigError, Corrupt, PenstockError, Truncated, Unavailable
from penstock.files.files import Files
from penstock.formats.hdf5.description import repack_command
from penstock.formats.hdf5.remote_file import PAGED_BYTES, PagedFile

# The largest chunk cache for h5py: it decodes a chunk once for all its rows in a read, if chunks are not huge.
CACHE_BYTES = 64 * MiB

# What HDF5 itself allocates in a read, measured: a type conversion buffer, a metadata cache, and for each chunk its
# stored form and a decoded one that grows by doubling.
LIBRARY_BYTES = 4 * MiB
CHUNK_COPIES = 3

DAMAGED = (OSError, RuntimeError, KeyError, ValueError, TypeError, IndexError, OverflowError, NotImplementedError)
"""What h5py raises for damaged files."""


@contextmanager
def open_with_h5py(file: FileId, files: Files, cache_bytes: int = 0) -> Iterator[Any]:
    """Open a file with h5py; through a Python file object if it is remote or compared with a manifest."""
    if not file.is_compared and not is_remote(file.path):
        with _open_source(file, file.path, cache_bytes) as h5:
            yield h5
        return
    with files.lend(file) as handle, closing(PagedFile(handle)) as paged:
        try:
            with _open_source(file, paged, cache_bytes) as h5:
                yield h5
        except Exception:
            if paged.error is None:
                raise
        if paged.error is not None:
            raise paged.error


@contextmanager
def _open_source(file: FileId, source: Any, cache_bytes: int) -> Iterator[Any]:
    try:
        import h5py
    except ImportError:
        raise ConfigError('reading HDF5 needs h5py: pip install "penstock[hdf5]"') from None
    failure: PenstockError | None = None
    try:
        h5 = h5py.File(source, "r", rdcc_nbytes=cache_bytes, swmr=file.is_growing)
    except OSError as error:
        failure = _explain(file, error)
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
        # Not chained to h5py's error: its traceback holds the file object, and if that outlives h5py, the process
        # crashes when it ends.
        raise failure


def _explain(file: FileId, error: OSError) -> PenstockError:
    if "truncated" in str(error):
        return Truncated(f"{file.path}: HDF5 file cut short ({error}); fetch it again")
    if error.errno in (errno.EACCES, errno.EPERM, errno.ENOENT):
        return Unavailable(f"{file.path}: cannot be read ({error}); check the path and its permissions")
    return Corrupt(
        f"{file.path}: not a whole HDF5 file ({file.size:,} bytes; {error}); fetch it again, or leave it out"
    )


# The filters of HDF5 itself, and the one that comes with h5py.
OWN_FILTERS = frozenset({1, 2, 3, 4, 5, 6, 32000})


@functools.cache
def installed_filters() -> frozenset[int]:
    """The filters of hdf5plugin, which registers them on import, and makes HDF5 search its plugin folders meanwhile."""
    with suppress(ImportError), _no_plugin_folders():
        import hdf5plugin

        return frozenset(hdf5plugin.FILTERS[name] for name in hdf5plugin.get_config().registered_filters)
    return frozenset()


@contextmanager
def _no_plugin_folders() -> Iterator[None]:
    """HDF5 has no folder to load libraries from inside this ``with``."""
    from h5py import h5pl

    folders = [h5pl.get(number) for number in range(h5pl.size())]
    for _ in folders:
        h5pl.remove(0)
    try:
        yield
    finally:
        for folder in folders:
            h5pl.append(folder)


def _register_filters(dataset: Any) -> None:
    """In a process that did not open the file: HDF5 would look for the filters in its plugin folders."""
    stored = dataset.id.get_create_plist()
    numbers = {stored.get_filter(number)[0] for number in range(stored.get_nfilters())}
    if dataset.is_virtual or not numbers <= OWN_FILTERS:
        installed_filters()


def _open_beside(h5: Any, path: str, name: str) -> Any:
    """Open a dataset so that its external files are searched beside the file, not in the working directory."""
    import h5py

    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    if not is_remote(path):
        folder = os.fsencode(os.path.dirname(os.path.realpath(path)))
        access.set_efile_prefix(folder)
        access.set_virtual_prefix(folder)
    dataset = h5py.Dataset(h5py.h5d.open(h5.id, name.encode(), access))
    _register_filters(dataset)
    return dataset


class H5pyLayout(sliced.Layout):
    """One dataset, read by h5py."""

    @property
    def how(self) -> str:
        return f"read by h5py, one thread at a time: {self.why}"

    @property
    def remedy(self) -> str:
        return repack_command("{name}", self.shape, self.row_axis)

    @property
    def cache_bytes(self) -> int:
        row_of_chunks = self.chunk_rows * prod(self.row_shape) * self.stored.itemsize
        return row_of_chunks if self.chunks and row_of_chunks <= CACHE_BYTES else 0

    @property
    def library_bytes(self) -> int:
        return self.cache_bytes + CHUNK_COPIES * self.chunk_bytes + LIBRARY_BYTES


# h5py has its own lock; this one keeps only one file open and one chunk cache in memory.
_ONE_AT_A_TIME = fork.Lock()


class H5pyStore(SlicedStore):
    """Datasets of one file, which is open only during a read."""

    kind = "h5py"
    layouts: dict[str, H5pyLayout]  # type: ignore[assignment]

    def __init__(self, file: FileId, files: Files, rows: int, layouts: Mapping[str, sliced.Layout]) -> None:
        super().__init__(file, rows, layouts)
        self._files = files

    def with_layouts(self, layouts: Mapping[str, sliced.Layout]) -> "H5pyStore":
        return H5pyStore(self.file, self._files, self._rows, layouts)

    def scratch_bytes(self, rows: int) -> int:
        paged = PAGED_BYTES if self.file.is_compared or is_remote(self.file.path) else 0
        return super().scratch_bytes(rows) + paged + self._files.scratch_bytes

    @property
    def shared_index(self) -> dict[int, int]:
        return {**super().shared_index, **self._files.shared_index}

    @contextmanager
    def opened(self, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        cache_bytes = max((self.layouts[name].cache_bytes for name in names), default=0)
        with _ONE_AT_A_TIME, open_with_h5py(self.file, self._files, cache_bytes) as h5:
            yield {name: _open_beside(h5, self.file.path, name) for name in names}

    def read_slice(self, array: Any, wanted: tuple[slice, ...], goal: np.ndarray, where: str) -> None:
        if not goal.size:  # some releases of h5py divide by it
            return
        try:
            array.read_direct(goal, wanted)
        except OSError as error:
            raise Corrupt(
                f"{where}: {error}. The file is damaged there, or needs a filter that is not installed (pip install "
                f"hdf5plugin)"
            ) from error
