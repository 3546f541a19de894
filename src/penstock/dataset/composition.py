"""Datasets made of arrays and of other datasets: ``from_arrays``, ``concat``, ``join``."""

from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from typing import Any

import numpy as np

from penstock.dataset.combine import Concat, Joined, Part
from penstock.dataset.dataset import Dataset
from penstock.dataset.memory import MemoryStore
from penstock.dataset.row_numbers import row_numbers
from penstock.errors import ConfigError, DataError, PenstockError, SourceError, WrongArgument


def check_dataset(given: Any) -> None:
    """Refuse anything but a dataset, and say how to make one from the argument."""
    if isinstance(given, Dataset):
        return
    kind = f"{type(given).__module__}.{type(given).__qualname__}".removeprefix("builtins.")
    way_out = ""
    if isinstance(given, str | PathLike):
        way_out = f". Open it first: penstock.open({fspath(given)!r})"
    elif isinstance(given, list | tuple) and given and all(isinstance(each, str | PathLike) for each in given):
        way_out = (
            f". Open them first: penstock.open({[fspath(each) for each in given[:2]]!r}{', …' * (len(given) > 2)})"
        )
    elif kind.startswith("torch.utils.data.") and hasattr(given, "indices"):
        way_out = ". Choose the rows of a dataset that penstock opened: ds.select(subset.indices)"
    elif kind.startswith("torch.utils.data."):
        way_out = ". Open the files themselves with penstock.open, or arrays with penstock.from_arrays"
    elif isinstance(given, Mapping | np.ndarray) or kind.startswith("torch."):
        way_out = ". Arrays become one by penstock.from_arrays(name=array, …)"
    raise WrongArgument(f"expected a dataset, as penstock.open gives it; got {kind}{way_out}")


def from_arrays(**arrays: Any) -> Dataset:
    """A dataset of arrays in memory, one keyword per field."""
    return Dataset(MemoryStore(arrays))


def concat(datasets: Iterable[Dataset]) -> Dataset:
    """Datasets one after another; their fields must agree."""
    parts = list(datasets) if isinstance(datasets, Iterable) and not isinstance(datasets, Dataset | str) else [datasets]
    for part in parts:
        check_dataset(part)
    left_out = [why for part in parts for why in part.left_out]
    fields_left_out = {name: why for part in reversed(parts) for name, why in part.fields_left_out.items()}
    alike = {repr((part.casts, part.axes, dict(part.store.fields))) for part in parts}
    if len(alike) == 1:
        stored = Concat([part.store for part in parts])
        return Dataset(stored, parts[0].casts, left_out, parts[0].axes, fields_left_out)
    return Dataset(Concat([part.delivered for part in parts]), None, left_out, None, fields_left_out)


def join(**parts: Any) -> Dataset:
    """Fields side by side: ``join(betas=(betas, beta_rows), image=(stimuli, image_rows), coco=ids)``.

    Each part is a dataset, a pair of a dataset and the row of it that belongs to each sample, or an array. A part with
    one field gives that field the part's name; one with several, ``part.field``.
    """
    joined, casts, axes, fields_left_out = {}, {}, {}, {}
    left_out: list[DataError | SourceError] = []
    for label, given in parts.items():
        if isinstance(given, tuple) and len(given) != 2:
            raise ConfigError(f"join: {label}: expected a dataset, (dataset, rows) or an array; got {len(given)} items")
        dataset, rows = given if isinstance(given, tuple) else (given, None)
        if not isinstance(dataset, Dataset):
            dataset = from_arrays(**{label: dataset})
        single = len(dataset.fields) == 1
        names = {label if single else f"{label}.{field}": field for field in dataset.fields}
        chosen = None if rows is None else _join_rows(label, dataset, rows)
        joined[label] = Part(dataset.store, chosen, names)
        casts.update({new: dataset.casts[old] for new, old in names.items() if old in dataset.casts})
        left_out += dataset.left_out
        fields_left_out.update({f"{label}.{name}": why for name, why in dataset.fields_left_out.items()})
        axes.update({new: dataset.axes[old] for new, old in names.items() if old in dataset.axes})
    if not joined:
        raise ConfigError("nothing to join: expected at least one part, by name")
    return Dataset(Joined(joined), casts, left_out, axes, fields_left_out)


def _join_rows(label: str, dataset: Dataset, rows: Any) -> np.ndarray:
    try:
        return row_numbers(rows, len(dataset))
    except PenstockError as error:
        raise type(error)(f"join: {label}: {error}") from None
