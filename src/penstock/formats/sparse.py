"""Sparse matrices as AnnData stores them, in HDF5 and Zarr: a group of ``data``, ``indices`` and ``indptr``."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from penstock.dataset.memory import check_can_be_held
from penstock.dataset.rewrite import choose_fields
from penstock.dataset.sparse import COLUMNS, VALUES, SparseRows
from penstock.dataset.store import StoreBase, as_base
from penstock.errors import Corrupt, SchemaMismatch

KIND, SHAPE = "encoding-type", "shape"
ROWS, BY_COLUMN = "csr_matrix", "csc_matrix"
PARTS = ("data", "indices", "indptr")

OpenFields = Callable[[tuple[str, ...]], Any]
"""The rows of some arrays of the file."""


def is_sparse(attributes: Mapping[str, Any]) -> bool:
    """Whether a group with these attributes is a sparse matrix."""
    return _as_text(attributes.get(KIND)) in (ROWS, BY_COLUMN)


def with_matrices(rows: Mapping[str, int], attributes_of: Callable[[str], Mapping[str, Any]]) -> dict[str, int]:
    """Arrays and their numbers of rows; those that are parts of a sparse matrix become one field."""
    found = dict(rows)
    for name in [name.removesuffix("/indptr") for name in rows if name.endswith("/indptr")]:
        parts = [f"{name}/{part}" for part in PARTS]
        if all(part in rows for part in parts) and is_sparse(attributes := attributes_of(name)):
            found = {each: count for each, count in found.items() if each not in parts}
            found[name] = rows_of(attributes)
    return found


def rows_of(attributes: Mapping[str, Any]) -> int:
    """The number of rows of a sparse matrix; -1 if its attributes do not give it."""
    sizes = np.asarray(attributes.get(SHAPE, ()))
    return int(sizes[0]) if sizes.shape == (2,) and sizes.dtype.kind in "iu" else -1


def _as_text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def open_sparse(path: str, name: str, attributes: Mapping[str, Any], open_fields: OpenFields) -> StoreBase:
    """The rows of the sparse matrix in the group ``name``."""
    if _as_text(attributes.get(KIND)) == BY_COLUMN:
        raise SchemaMismatch(
            f"{path}: {name!r} is a sparse matrix stored by column ({BY_COLUMN}), so that a row lies all over the "
            f"file; store it by row: matrix.tocsr()"
        )
    rows, columns = _check_shape(path, name, attributes.get(SHAPE))
    ends_name = f"{name}/indptr"
    table = as_base(open_fields((ends_name,)))
    check_can_be_held(path, 8 * len(table), f"{name!r} has {len(table):,} rows", "Split the file")
    ends = np.empty(len(table), table.fields[ends_name].dtype)
    table.read_into(np.arange(len(table)), np.arange(len(table)), {ends_name: ends})
    ends = ends.astype(np.int64)
    parts = as_base(open_fields((f"{name}/data", f"{name}/indices")))
    if len(ends) != rows + 1 or ends[0] != 0 or (np.diff(ends) < 0).any() or ends[-1] != len(parts):
        raise Corrupt(
            f"{path}: {name!r} of {rows:,} rows has {len(ends):,} entries in indptr, from {int(ends[0]):,} to "
            f"{int(ends[-1]):,}, and {len(parts):,} values: expected {rows + 1:,} ascending entries from 0 to the "
            f"number of values. Restore the file"
        )
    elements = choose_fields(parts, {VALUES: f"{name}/data", COLUMNS: f"{name}/indices"})
    return SparseRows(name, elements, ends, columns)


def _check_shape(path: str, name: str, given: Any) -> tuple[int, int]:
    sizes = np.asarray(given if given is not None else [])
    if sizes.shape != (2,) or sizes.dtype.kind not in "iu" or (sizes < 0).any():
        raise Corrupt(f"{path}: the sparse matrix {name!r} has the shape {given!r}; expected rows and columns")
    return int(sizes[0]), int(sizes[1])
