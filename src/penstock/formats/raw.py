"""Rows one after another in a file without a header: the caller gives dtype and shape."""

from typing import Any

import numpy as np

from penstock.base.dtypes import numpy_dtype
from penstock.base.spec import FieldSpec
from penstock.dataset.extent_store import ExtentStore
from penstock.errors import ConfigError, Truncated
from penstock.files.files import Files
from penstock.read.extents import Contiguous


def row_spec(dtype: Any, shape: Any) -> tuple[np.dtype, tuple[int, ...]]:
    """Check the dtype and shape of a row."""
    try:
        stored, sizes = numpy_dtype(dtype), tuple(int(size) for size in shape)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"dtype={dtype!r}, shape={shape!r}: expected a dtype such as '<i2', and the shape of one row ({error})"
        ) from None
    if stored.kind not in "biufc" or any(size < 1 for size in sizes):
        raise ConfigError(f"dtype={dtype!r}, shape={shape!r}: expected numbers, and sizes of 1 or more")
    return stored, sizes


def open_file(path: str, name: str, row: tuple[np.dtype, tuple[int, ...]], offset: int, files: Files) -> ExtentStore:
    """All rows after ``offset``."""
    file, (stored, shape) = files.identify(path), row
    row_bytes = FieldSpec(stored, shape).row_bytes
    rows, rest = divmod(file.size - offset, row_bytes)
    if file.size < offset or rest:
        raise Truncated(
            f"{path}: {max(0, file.size - offset):,} bytes after offset {offset:,} are not a whole number of rows of "
            f"{row_bytes:,} bytes ({stored} {shape}): check dtype, shape and offset, or fetch the file again"
        )
    array = Contiguous(file=file, name=name, stored=stored, shape=shape, rows=rows, offset=offset)
    return ExtentStore({name: array}, files)
