"""Rows that a caller chose, as numbers."""

from typing import Any

import numpy as np

from penstock.base.checks import shown
from penstock.errors import ConfigError, OutOfRange


def row_numbers(index: Any, length: int) -> np.ndarray:
    """Row numbers from 0, for rows given in any way; negative numbers count from the end."""
    if isinstance(index, slice):
        try:
            return np.arange(*index.indices(length), dtype=np.int64)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"rows {shown(index)}: {error}") from None
    rows = np.asarray(index)
    if rows.dtype == bool and rows.shape == (length,):
        return np.flatnonzero(rows)
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        raise ConfigError(
            f"rows must be whole numbers, a slice, or {length:,} booleans; got {rows.dtype} of shape {rows.shape}"
        )
    outside = rows >= length if rows.dtype.kind == "u" else (rows < -length) | (rows >= length)
    if outside.any():
        bad = rows[outside][0]
        raise OutOfRange(f"row {bad} is out of range: the dataset has {length:,} rows, 0 to {length - 1:,}")
    rows = rows.astype(np.int64)
    return np.where(rows < 0, rows + length, rows)
