"""Fields as lazy Dask arrays, in chunks that follow those of the files.

Each chunk is read by one task. Where files store rows in blocks, a chunk is whole blocks: no block is read twice. Where
a block is larger than a chunk may be, as in files that hold one voxel of all trials together, chunks also cut the other
axes, along the chunks of the file.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.base.requirements import needs
from penstock.base.sizes import parse_size
from penstock.dataset.explain import read_paths
from penstock.errors import ConfigError

if TYPE_CHECKING:
    import dask.array

    from penstock.dataset.dataset import Dataset

ChunkSizes = tuple[tuple[int, ...], ...]
"""The lengths of the chunks along each axis, as Dask writes them."""


def to_dask(ds: "Dataset", chunk: int | str = "64MiB") -> dict[str, "dask.array.Array"]:
    """The fields of a dataset as Dask arrays, rows first, in chunks of about ``chunk`` bytes.

    A dataset can be sent to Dask's workers if its files can be opened there under the same paths. Texts and other
    values of no fixed size are left out: they have no place in an array.
    """
    with needs("dask", "2024.5", "dask"):
        import dask.array
    size = parse_size(chunk, argument="chunk")
    arrays = {}
    for name, spec in ds.fields.items():
        if not spec.is_list:
            field = LazyField(ds.only(name), name)
            arrays[name] = dask.array.from_array(
                field, chunks=field_chunks(field.ds, name, size), name=f"penstock-{ds.fingerprint}-{name}-{size}",
                asarray=False, meta=spec.empty(0),
            )  # fmt: skip
    return arrays


def field_chunks(ds: "Dataset", name: str, size: int) -> ChunkSizes:
    """Chunks of at most ``size`` bytes, if the file's own are not larger."""
    spec = ds.fields[name]
    row_bytes = max(1, spec.row_bytes)
    edges = row_edges(ds, size // row_bytes)
    rows, part = np.diff(edges), spec.shape
    most = int(rows.max(initial=1))
    if most * row_bytes > size and name not in ds.axes:
        part = _part_of_row(spec.shape, _stored_part(ds, name), size // (most * spec.dtype.itemsize))
    return tuple(rows.tolist()), *(_cut(length, step) for length, step in zip(spec.shape, part, strict=True))


def row_edges(ds: "Dataset", most: int) -> np.ndarray:
    """The first row of each chunk, and the end: ``most`` rows per chunk, and whole blocks where rows are stored so."""
    blocks, end, most = ds.delivered.blocks, len(ds), max(1, most)
    if blocks is None:
        return np.append(np.arange(0, end, most), end)
    begins, edges = np.append(np.asarray(blocks), end), [0]
    while edges[-1] < end:
        last = int(np.searchsorted(begins, edges[-1] + most, side="right")) - 1
        if begins[last] <= edges[-1]:  # a block of more rows
            last = int(np.searchsorted(begins, edges[-1], side="right"))
        edges.append(int(begins[last]))
    return np.array(edges)


def _stored_part(ds: "Dataset", name: str) -> tuple[int, ...]:
    """The part of a row that one chunk of the files holds; all of it where that is not known."""
    shape = ds.fields[name].shape
    paths = [path for path in read_paths(ds.delivered) if path.spec.shape == shape and len(path.chunk) == len(shape)]
    return tuple(min(pair) for pair in zip(shape, paths[0].chunk, strict=True)) if paths else shape


def _part_of_row(shape: tuple[int, ...], stored: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The largest part within the limit that is made of whole stored parts; the last axis grows first."""
    part = list(stored)
    for axis in reversed(range(len(shape))):
        others = int(np.prod(part, dtype=np.int64)) // part[axis]
        times = max(1, most // max(1, others * part[axis]))
        part[axis] = min(shape[axis], part[axis] * times)
    return tuple(part)


def _cut(length: int, step: int) -> tuple[int, ...]:
    step = max(1, step)
    return (*(step for _ in range(length // step)), *([length % step] if length % step or not length else []))


class LazyField:
    """One field as something that can be sliced like an array: what Dask asks for."""

    def __init__(self, ds: "Dataset", name: str) -> None:
        self.ds, self._name = ds, name
        spec = ds.fields[name]
        self.shape, self.dtype, self.ndim = (len(ds), *spec.shape), spec.dtype, 1 + len(spec.shape)

    def __getitem__(self, index: Any) -> np.ndarray:
        rows, *others = index if isinstance(index, tuple) else (index,)
        whole = tuple(slice(0, length) for length in self.shape[1 : 1 + len(others)])
        if all(isinstance(each, slice) for each in others) and tuple(others) != whole:
            try:
                return np.asarray(self.ds.select_within(self._name, tuple(others))[rows][self._name])
            except ConfigError:  # steps that a part of a row cannot have: take them from whole rows
                pass
        found = self.ds[rows][self._name]
        return np.asarray(found[(slice(None), *others)] if others else found)
