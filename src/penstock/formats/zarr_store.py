"""Arrays that zarr-python must read: those whose codecs, grids or shards are not understood here."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from typing import Any

import numpy as np

from penstock.errors import ConfigError, DecodeFailed, Missing
from penstock.extents import FileId
from penstock.formats import sliced
from penstock.formats.sliced import SlicedStore
from penstock.sizes import MiB

# What zarr-python holds in a read, measured: the slice it returns, and for each chunk that it works on at once (ten,
# unless it is configured otherwise) the stored form, the decoded one, and one more between codecs. Its own threads keep
# some of what they have freed.
CHUNKS_AT_ONCE = 10
CHUNK_COPIES = 3
LIBRARY_BYTES = 32 * MiB


class Layout(sliced.Layout):
    """What reading one array through zarr-python takes; ``chunks`` are shards where there are any."""

    @property
    def how(self) -> str:
        return f"read by zarr-python: {self.why}"

    @property
    def remedy(self) -> str:
        whole = tuple(1 if axis == self.row_axis else size for axis, size in enumerate(self.shape))
        return f"a copy with chunks={whole}"

    @property
    def library_bytes(self) -> int:
        assert self.chunks is not None
        touched = prod(
            min(-(-size // step), -(-read // step) + 1)
            for size, read, step in zip(self.shape, self._read, self.chunks, strict=True)
        )
        returned = prod(self._read) * self.stored.itemsize
        return returned + min(touched, CHUNKS_AT_ONCE) * CHUNK_COPIES * self.chunk_bytes + LIBRARY_BYTES

    @property
    def _read(self) -> tuple[int, ...]:
        """The most that one slice reads along each axis."""
        rows = min(self.group, self.shape[self.row_axis])
        return (*self.read_shape[: self.row_axis], rows, *self.read_shape[self.row_axis :])


class ZarrStore(SlicedStore):
    """Arrays of one folder or archive, opened anew for each read."""

    kind = "zarr"

    def __init__(
        self, file: FileId, rows: int, layouts: Mapping[str, sliced.Layout], root: str, keys: Mapping[str, str]
    ) -> None:
        super().__init__(file, rows, layouts)
        self.root, self.keys = root, dict(keys)
        """The store, and where in it each field's array is."""

    def with_layouts(self, layouts: Mapping[str, sliced.Layout]) -> "ZarrStore":
        return ZarrStore(self.file, self._rows, layouts, self.root, self.keys)

    @contextmanager
    def opened(self, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        with _store(self.root) as store:
            yield {name: _array(store, self.keys[name], f"{self.root}: {name}") for name in names}

    def read_slice(self, array: Any, wanted: tuple[slice, ...], goal: np.ndarray, where: str) -> None:
        try:
            np.copyto(goal, array[wanted])
        except Exception as error:  # each codec has its own
            raise DecodeFailed(
                f"{where}: zarr-python says {type(error).__name__}: {error}. A chunk is damaged there: restore it, or "
                f'leave those rows out with select or on_error="skip"'
            ) from error


@contextmanager
def _store(root: str) -> Iterator[Any]:
    try:
        from zarr.storage import LocalStore, ZipStore
    except ImportError:
        raise ConfigError(
            f'{root}: reading it needs zarr-python, which is not installed: pip install "penstock[zarr]"'
        ) from None
    if root.lower().endswith(".zip"):
        store = ZipStore(root, mode="r")
        try:
            yield store
        finally:
            with suppress(AttributeError):  # it opens itself when it is first read, and cannot be closed before
                store.close()
    else:
        yield LocalStore(root, read_only=True)


def _array(store: Any, key: str, where: str) -> Any:
    import zarr

    try:
        return zarr.open_array(store=store, path=key, mode="r")
    except Exception as error:
        raise ConfigError(
            f"{where}: zarr-python cannot open it ({type(error).__name__}: {error}). Install what has its codecs, or "
            f"copy the array with others"
        ) from error


def check_readable(root: str, key: str, name: str, *, filled: bool) -> None:
    """Refuse an array that zarr-python cannot open, now and not in the middle of an epoch.

    It reads chunks that are not there as the fill value; where that is not ``filled`` for the caller, they are counted.
    """
    with _store(root) as store:
        array = _array(store, key, f"{root}: {name}")
        there, all_of_them = (array.nchunks_initialized, array.nchunks) if not filled else (0, 0)
    if there < all_of_them:
        raise Missing(
            f"{root}: array {name!r} was never written in full ({there:,} of {all_of_them:,} chunks are there); the "
            f"rest would read as the fill value. Pass allow_fill=True to accept that"
        )
