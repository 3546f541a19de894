"""Attributes of HDF5 datasets and files."""

from contextlib import closing
from typing import Any

import numpy as np

from penstock.dataset.held_values import HOLDS
from penstock.files.files import Files
from penstock.formats.hdf5.fallback import open_with_h5py


def hdf5_attributes(path: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a dataset, and of the file."""
    files = Files()
    with closing(files), open_with_h5py(files.identify(path), files) as h5:
        return _read_attributes(h5[name].attrs), _read_attributes(h5.attrs)


def _read_attributes(attributes: Any) -> dict[str, Any]:
    """Numbers and texts, and arrays of them; references and tables have no place elsewhere, and are left out."""
    found = {}
    for name in attributes:
        try:
            value = attributes[name]
        except (OSError, TypeError, ValueError):  # of a type that h5py does not know
            continue
        array = np.asarray(value)
        if name != HOLDS and (array.dtype.kind in "biufSU" or is_text(array)):
            found[name] = value if array.dtype.kind in "biuf" else _decode_texts(array)
    return found


def is_text(array: np.ndarray) -> bool:
    """Whether an array of objects holds texts."""
    return array.dtype.kind == "O" and all(isinstance(each, str | bytes) for each in array.reshape(-1))


def _decode_texts(array: np.ndarray) -> str | list[str]:
    texts = [each.decode("utf-8", "replace") if isinstance(each, bytes) else str(each) for each in array.reshape(-1)]
    return texts[0] if array.ndim == 0 else texts
