"""Samples -> a batch: numbers and arrays stacked, tensors too, and the rest in lists."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.errors import SchemaMismatch

Batch = Any


def default_collation_fn(samples: Sequence[Any], combine_tensors: bool = True, combine_scalars: bool = True) -> Batch:
    """Dicts -> a dict of columns; tuples or lists -> a tuple of columns."""
    first = samples[0]
    rows = [row if isinstance(row, dict) else dict(enumerate(row)) for row in samples]
    for row in rows[1:]:
        if row.keys() != rows[0].keys():
            raise SchemaMismatch(
                f"samples of one batch have different fields: {_names(rows[0])}, and {_names(row)}; select those that "
                f"have all, or pick fields with to_tuple()"
            )
    columns = {name: _column(name, [row[name] for row in rows], combine_tensors, combine_scalars) for name in rows[0]}
    return columns if isinstance(first, dict) else tuple(columns[place] for place in range(len(columns)))


def _column(name: Any, values: list[Any], combine_tensors: bool, combine_scalars: bool) -> Any:
    first = values[0]
    if isinstance(first, int | float):
        return np.array(values) if combine_scalars else values
    tensors = _is_tensor(first)
    if not combine_tensors or not (tensors or isinstance(first, np.ndarray)):
        return values
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) > 1:
        one, other = sorted(shapes)[:2]
        raise SchemaMismatch(
            f"field {name!r}: values of shape {one} and {other} cannot be stacked into one batch; make them equal with "
            f"map_dict() or map_tuple(), or give batched() a collation_fn="
        )
    if tensors:
        from penstock.pytorch import stack

        return stack(values)
    return np.stack(values)


def _is_tensor(value: Any) -> bool:
    if sys.modules.get("torch") is None:
        return False
    from penstock.pytorch import is_tensor

    return is_tensor(value)


def _names(row: dict[Any, Any]) -> str:
    key = row.get("__key__")
    fields = ", ".join(str(name) for name in row if not str(name).startswith("__"))
    return f"({fields})" + ("" if key is None else f" of {key!r}")
