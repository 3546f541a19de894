"""Arrays that zarr-python must read: those with codecs, grids or shards that penstock does not know."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from math import prod
from typing import Any

import numpy as np

from penstock.base.file_id import FileId
from penstock.base.sizes import MiB
from penstock.base.text_column import TextColumn
from penstock.dataset import sliced
from penstock.dataset.held_values import collect
from penstock.dataset.sliced import SlicedStore
from penstock.errors import ConfigError, DecodeFailed, Missing
from penstock.formats.zarr.keys import FolderKeys, ZarrKeys
from penstock.read.chunk_decode import FILL_WAY_OUT
from penstock.read.objects import NAMED, ObjectDecoder

# What zarr-python holds in a read, measured: the slice it returns, and for each chunk in progress (ten by default) the
# stored form, the decoded one, and one more between codecs. Its threads keep some of the memory that they free.
CHUNKS_AT_ONCE = 10
CHUNK_COPIES = 3
LIBRARY_BYTES = 32 * MiB

# With more chunks than this, missing ones are not counted.
MOST_LOOKED_AT = 1_000_000


class ZarrLayout(sliced.Layout):
    """One array, read by zarr-python; ``chunks`` are shards, if it has any."""

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
        """The store, and the key of each field's array."""

    def with_layouts(self, layouts: Mapping[str, sliced.Layout]) -> "ZarrStore":
        return ZarrStore(self.file, self._rows, layouts, self.root, self.keys)

    @contextmanager
    def opened(self, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        with _open_store(self.root) as store:
            yield {name: _open_array(store, self.keys[name], f"{self.root}: {name}") for name in names}

    def read_slice(self, array: Any, wanted: tuple[slice, ...], goal: np.ndarray, where: str) -> None:
        try:
            np.copyto(goal, array[wanted])
        except Exception as error:  # each codec has its own
            raise DecodeFailed(
                f"{where}: zarr-python says {type(error).__name__}: {error}. A chunk is damaged there: restore it, or "
                f'leave those rows out with select or on_error="skip"'
            ) from error


@contextmanager
def _open_store(root: str) -> Iterator[Any]:
    try:
        from zarr.storage import LocalStore, ZipStore
    except ImportError:
        raise ConfigError(f'{root}: reading it needs zarr-python: pip install "penstock[zarr]"') from None
    if root.lower().endswith(".zip"):
        store = ZipStore(root, mode="r")
        try:
            yield store
        finally:
            with suppress(AttributeError):  # it opens at the first read, and cannot be closed before
                store.close()
    else:
        yield LocalStore(root, read_only=True)


def _open_array(store: Any, key: str, where: str) -> Any:
    import zarr

    try:
        return zarr.open_array(store=store, path=key, mode="r")
    except Exception as error:
        raise ConfigError(
            f"{where}: zarr-python cannot open it ({type(error).__name__}: {error}). Install the package of its "
            f"codecs, or copy the array with other codecs"
        ) from error


def read_values(keys: ZarrKeys, key: str, holds: str) -> tuple[ObjectDecoder, TextColumn]:
    """All texts of an array, and how they are decoded."""
    where = keys.path(key)
    if isinstance(keys, FolderKeys) and keys.is_remote:
        raise ConfigError(f"{where}: only zarr-python can read texts; copy the store to this machine first")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some releases say of texts that others may not know them
        find_absent_chunks(keys, key, key, 0, allowed=False)
        with _open_store(keys.root) as store:
            return NAMED[holds], collect(_read_texts(_open_array(store, key, where), where), where)


def _read_texts(array: Any, where: str) -> Iterator[list[bytes]]:
    step = array.chunks[0]
    for begin in range(0, array.shape[0], step):
        try:
            texts = array[begin : begin + step]
        except Exception as error:  # each codec has its own
            raise DecodeFailed(
                f"{where}: rows from {begin:,} on: zarr-python says {type(error).__name__}: {error}. A chunk is "
                f"damaged there: restore it, or leave the field out with fields=(…)"
            ) from error
        yield [str(text).encode() for text in texts.tolist()]


def find_absent_chunks(keys: ZarrKeys, key: str, name: str, row_axis: int, *, allowed: bool) -> dict[int, int]:
    """Missing files of chunks or shards, by block of rows; an error unless ``allowed``.

    zarr-python would silently read them as the fill value. An array that it cannot open is refused here as well, not in
    the middle of an epoch. Chunks missing inside a shard are not seen here: only zarr-python reads the shard.
    """
    with _open_store(keys.root) as store:
        array = _open_array(store, key, f"{keys.root}: {name}")
        steps = array.shards or array.chunks
        counts = [-(-size // step) for size, step in zip(array.shape, steps, strict=True)]
        named, fill = array.metadata.encode_chunk_key, array.fill_value
    holes: dict[int, int] = {}
    if allowed and prod(counts) > MOST_LOOKED_AT:
        return holes
    for at in product(*map(range, counts)):
        chunk = f"{key}/{named(at)}".lstrip("/")
        if keys.has(chunk):
            continue
        if not allowed:
            corner = tuple(index * step for index, step in zip(at, steps, strict=True))
            raise Missing(
                f"{keys.path(chunk)}: {name}, chunk {corner} was never written, and would read as the fill value "
                f"{fill}. {FILL_WAY_OUT}"
            )
        holes[at[row_axis]] = holes.get(at[row_axis], 0) + 1
    return holes
