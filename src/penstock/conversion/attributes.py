"""Attributes of the source's arrays and files, for formats that have them: HDF5 and Zarr."""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from penstock.base.urls import is_remote
from penstock.conversion.source import parts_of
from penstock.dataset.dataset import Dataset
from penstock.dataset.held_values import HOLDS
from penstock.dataset.sliced import SlicedStore
from penstock.errors import Unavailable
from penstock.files.retry import open_for_parser
from penstock.formats.hdf5.attributes import hdf5_attributes, is_text
from penstock.read.extents import Array

ZARR_DOCUMENTS = ("zarr.json", ".zarray")

Attributes = dict[str, dict[str, Any]]
"""Of arrays by field, and of the whole under the empty name."""


def attributes_of(ds: Dataset) -> Attributes:
    """Those of each field's array, and of its file or group; where a field is in several files, of the first."""
    found: Attributes = {"": {}}
    for field in ds.fields:
        path, name = next(_places(ds.only(field)), ("", ""))
        of_array, of_all = _read(path, name)
        found[field] = of_array
        found[""] |= {key: value for key, value in of_all.items() if key not in found[""]}
    return found


def _places(ds: Dataset) -> Iterator[tuple[str, str]]:
    """File and name of each array that is read."""
    for part in parts_of(ds.store):
        if isinstance(part, Array):
            yield part.file.path, part.name
        elif isinstance(part, SlicedStore):
            yield from ((part.file.path, name) for name in part.layouts)


def _read(path: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of an array, and of the file or group that it is in; empty where the format has none."""
    if not path or is_remote(path):
        return {}, {}
    if os.path.basename(path) in ZARR_DOCUMENTS:
        return _of_zarr(os.path.dirname(path)), _of_zarr(_root(path, name))
    with open_for_parser(path) as file:
        is_hdf5 = file.read(8) == b"\x89HDF\r\n\x1a\n"
    return hdf5_attributes(path, name) if is_hdf5 else ({}, {})


def _root(document: str, name: str) -> str:
    """The folder of a Zarr store: as far above an array as its name has parts."""
    folder = os.path.dirname(document)
    for _ in name.strip("/").split("/"):
        folder = os.path.dirname(folder)
    return folder


def _of_zarr(folder: str) -> dict[str, Any]:
    for document, key in (("zarr.json", "attributes"), (".zattrs", "")):
        try:
            with open_for_parser(os.path.join(folder, document)) as file:
                found = json.load(file)
        except (Unavailable, ValueError):
            continue
        values = found.get(key, {}) if key else found
        return {name: value for name, value in values.items() if name != HOLDS} if isinstance(values, dict) else {}
    return {}


def for_json(value: Any) -> Any:
    """A value of an attribute as JSON takes it."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def for_hdf5(value: Any) -> Any:
    """A value of an attribute as HDF5 takes it: what it has no type for becomes JSON."""
    if value is None or isinstance(value, Mapping):
        return json.dumps(value)
    try:
        array = np.asarray(value)
    except ValueError:  # lists of unequal length
        return json.dumps(value)
    return json.dumps(value) if array.dtype.kind == "O" and not is_text(array) else value
