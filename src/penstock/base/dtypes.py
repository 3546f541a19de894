"""Dtypes as callers give them: numpy's, or torch's, which are recognised by name so that torch is not imported."""

from typing import Any

import numpy as np

from penstock.errors import ConfigError


def numpy_dtype(given: Any) -> np.dtype:
    """A dtype of numpy or torch, alone or with a shape; TypeError or ValueError if there is no such dtype."""
    if isinstance(given, tuple) and len(given) == 2:
        base, shape = given
        return np.dtype((numpy_dtype(base), shape))
    name = str(given)
    return np.dtype(name.removeprefix("torch.") if name.startswith("torch.") else given)


def checked_dtype(given: Any, *, argument: str) -> np.dtype:
    """The same, of plain numbers; ``argument`` names the caller's parameter in the error."""
    try:
        dtype = numpy_dtype(given)
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or dtype.kind not in "biufc":
        raise ConfigError(f'{argument}={given!r}: expected a dtype of plain numbers that NumPy has, such as "float32"')
    return dtype
