"""Dask and xarray: fields as lazy arrays, in chunks that follow the blocks of the files.

    fields = to_dask(penstock.open("betas_session*.hdf5"))
    mean = fields["betas"].mean(axis=0).compute()

Each chunk is some rows of one field, read by one task. Where files store rows in blocks, a chunk is whole blocks: no
block is read twice.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.base.sizes import MiB, parse_size
from penstock.dataset.dataset import Dataset
from penstock.errors import ConfigError

if TYPE_CHECKING:
    import dask.array

CHUNK_BYTES = 64 * MiB


def to_dask(ds: Dataset, chunk: int | str = CHUNK_BYTES) -> dict[str, "dask.array.Array"]:
    """The fields of a dataset as Dask arrays, rows first, in chunks of about ``chunk`` bytes.

    A dataset can be sent to Dask's workers if its files can be opened there under the same paths.
    """
    try:
        import dask.array
    except ImportError:
        raise ConfigError('to_dask needs dask: pip install "penstock[dask]"') from None
    size = parse_size(chunk, argument="chunk")
    arrays = {}
    for name, spec in ds.fields.items():
        if spec.is_list:
            continue  # values of no fixed size have no place in an array
        rows = tuple(np.diff(chunk_edges(ds, max(1, spec.row_bytes), size)).tolist())
        token = f"penstock-{ds.fingerprint}-{name}-{size}"
        arrays[name] = dask.array.from_array(
            FieldOfRows(ds.only(name), name), chunks=(rows, *spec.shape), name=token, asarray=False, meta=spec.empty(0)
        )
    return arrays


def chunk_edges(ds: Dataset, row_bytes: int, size: int) -> np.ndarray:
    """The first row of each chunk, and the end: of blocks where rows are stored in blocks, else of rows."""
    blocks = ds.delivered.blocks
    begins = np.arange(len(ds)) if blocks is None else np.asarray(blocks)
    most = max(1, size // row_bytes)
    edges = [0]
    for begin, end in zip(begins, [*begins[1:], len(ds)], strict=True):
        if end - edges[-1] > most and begin > edges[-1]:
            edges.append(int(begin))
    return np.array([*edges, len(ds)])


class FieldOfRows:
    """One field as something that can be sliced like an array: what Dask asks for."""

    def __init__(self, ds: Dataset, name: str) -> None:
        self._ds, self._name = ds, name
        spec = ds.fields[name]
        self.shape, self.dtype, self.ndim = (len(ds), *spec.shape), spec.dtype, 1 + len(spec.shape)

    def __getitem__(self, index: Any) -> np.ndarray:
        first, *others = index if isinstance(index, tuple) else (index,)
        rows = self._ds[first][self._name]
        return np.asarray(rows[(slice(None), *others)] if others else rows)
