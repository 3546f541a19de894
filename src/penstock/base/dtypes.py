"""Dtypes as callers give them: numpy's, or torch's, which are recognised by name so that torch is not imported.

NumPy has no bfloat16 of its own. The package ml_dtypes adds one, which numpy counts among the dtypes of kind "V".
"""

from typing import Any

import numpy as np

from penstock.errors import ConfigError


def numpy_dtype(given: Any) -> np.dtype:
    """A dtype of numpy or torch, alone or with a shape; TypeError or ValueError if there is no such dtype."""
    if isinstance(given, tuple) and len(given) == 2:
        base, shape = given
        return np.dtype((numpy_dtype(base), shape))
    if isinstance(given, np.dtype) and given.isbuiltin == 1:
        return given  # the name of a dtype takes microseconds to make
    name = str(given).removeprefix("torch.")
    if name == "bfloat16":
        return _bfloat16()
    dtype = np.dtype(name if str(given).startswith("torch.") else given)
    if dtype.isbuiltin == 2:  # a package added it to NumPy's
        raise TypeError(f"{dtype} is not one of NumPy's own dtypes")
    return dtype


def is_half(dtype: np.dtype) -> bool:
    """Whether this is a float of 16 bits, too few to compute with."""
    # Asked for every piece that is converted: the name of a dtype takes microseconds to make.
    return dtype.itemsize == 2 and (dtype.kind == "f" or (dtype.kind == "V" and dtype.name == "bfloat16"))


def is_float(dtype: np.dtype) -> bool:
    """Whether it is a dtype of real numbers that may have fractions."""
    return dtype.kind == "f" or is_half(dtype)


def is_inexact(dtype: np.dtype) -> bool:
    """Whether values may have fractions, and may be NaN or infinite: floats and complex numbers."""
    return dtype.kind == "c" or is_float(dtype)


def is_number(dtype: np.dtype) -> bool:
    """Whether it is a dtype of plain numbers."""
    return dtype.kind in "biufc" or is_half(dtype)


def _bfloat16() -> np.dtype:
    try:
        import ml_dtypes
    except ImportError as error:
        raise TypeError(f"NumPy has no bfloat16 of its own: pip install ml_dtypes ({error})") from None
    return np.dtype(ml_dtypes.bfloat16)


def checked_dtype(given: Any, *, argument: str) -> np.dtype:
    """A dtype of plain numbers; ``argument`` names the caller's parameter in the error."""
    try:
        dtype = numpy_dtype(given)
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or not is_number(dtype):
        raise ConfigError(f'{argument}={given!r}: expected a dtype of plain numbers, such as "float32"')
    return dtype
