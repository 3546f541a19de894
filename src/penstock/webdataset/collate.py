"""Samples -> a batch: numbers, arrays and tensors are stacked, everything else is listed."""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.base.sizes import KiB
from penstock.errors import SchemaMismatch, Unavailable
from penstock.loader.segments import SegmentPool
from penstock.webdataset.pixels import Pixels
from penstock.webdataset.run import Place

Batch = Any

ColumnSegments = defaultdict[Any, SegmentPool]
"""Memory of earlier batches, by field."""

SEGMENT_BYTES = 64 * KiB
"""Less is not worth keeping."""


def column_segments(place: Place) -> ColumnSegments | None:
    """Memory for the batches of a pass, shared if they are sent to another process; None where that cannot be."""
    if not place.in_worker:
        return defaultdict(partial(SegmentPool, is_shared=False))
    from penstock.loader.pytorch import send_segments

    # Whoever waits for the next batch of a single worker still holds its last one.
    return defaultdict(partial(SegmentPool, is_shared=True, is_patient=place.workers > 1)) if send_segments() else None


def default_collation_fn(samples: Sequence[Any], combine_tensors: bool = True, combine_scalars: bool = True) -> Batch:
    """Dicts -> a dict of columns; tuples or lists -> a tuple of columns."""
    rows = [_by_name(sample) for sample in samples]
    for row in rows[1:]:
        _check_same(rows[0], row)
    columns = {name: _column(name, [row[name] for row in rows], combine_tensors, combine_scalars) for name in rows[0]}
    return _as_given(columns, named=isinstance(samples[0], dict))


class Stacking:
    """``default_collation_fn`` for samples that come one by one: each array is copied into the batch at once.

    So memory holds the batch, and not the batch and its samples.
    """

    def __init__(self, most: int, segments: ColumnSegments | None = None) -> None:
        self._most, self._count, self._segments = most, 0, segments
        self._named = False
        self._fields: dict[Any, Any] = {}
        self._columns: dict[Any, _Stack] = {}

    def __len__(self) -> int:
        return self._count

    def append(self, sample: Any) -> None:
        """Add a sample."""
        row = _by_name(sample)
        if not self._count:
            self._named = isinstance(sample, dict)
            self._fields = {name: value if name == "__key__" else None for name, value in row.items()}
            segments = self._segments
            self._columns = {
                name: _Stack(name, self._most, None if segments is None else segments[name]) for name in row
            }
        _check_same(self._fields, row)
        for name, value in row.items():
            self._columns[name].append(value)
        self._count += 1

    def batch(self) -> Batch:
        """The batch that ``default_collation_fn`` would make of the samples so far, which are then forgotten."""
        columns = {name: column.taken() for name, column in self._columns.items()}
        self._columns = {}
        return _as_given(columns, named=self._named)


class _Stack:
    """The values of one field: in one array while their shapes and dtypes agree, otherwise in a list.

    Pictures that are not floats yet take a quarter of the memory. They wait until that of an earlier batch is free, but
    not longer than until the batch is full.
    """

    def __init__(self, name: Any, most: int, segments: SegmentPool | None) -> None:
        self._name, self._most, self._count, self._segments = name, most, 0, segments
        self._block: Any = None
        self._values: list[Any] = []
        self._waiting: list[Pixels] = []

    def append(self, value: Any) -> None:
        is_picture = isinstance(value, Pixels)
        if not (is_picture and self._append_picture(value)):
            self._append_any(value.value() if is_picture else value)
        self._count += 1

    def _append_picture(self, picture: Pixels) -> bool:
        """Whether it could join those before."""
        if self._block is not None:
            if not picture.fits(self._block):
                return False
            picture.write(self._block, self._count)
            return True
        if self._count > len(self._waiting) or (self._waiting and not picture.joins(self._waiting[0])):
            return False
        self._waiting.append(picture)
        free = None if self._segments is None else self._segments.lend_early(self._most * picture.nbytes)
        if free is not None:
            self._write_waiting(free)
        return True

    def _write_waiting(self, memory: np.ndarray) -> None:
        self._block = self._waiting[0].batch(memory)
        for row, picture in enumerate(self._waiting):
            picture.write(self._block, row)
        self._waiting = []

    def _append_any(self, value: Any) -> None:
        if not self._count:
            self._block = _block(value, self._most, self._segments)
        if self._block is not None and not _alike(self._block, value):
            self._values = [_copy(self._block[place, ...]) for place in range(self._count)]
            self._block = None
        self._values += [picture.value() for picture in self._waiting]
        self._waiting = []
        if self._block is None:
            self._values.append(value)
        else:
            _write(self._block, self._count, value)

    def taken(self) -> Any:
        if self._waiting:
            size = self._count * self._waiting[0].nbytes
            self._write_waiting(_memory(size, self._segments if self._count == self._most else None, late=True))
        block, values, self._block, self._values = self._block, self._values, None, []
        if block is None:
            return _column(self._name, values, combine_tensors=True, combine_scalars=True)
        if self._count == len(block):
            return block
        return _copy(block[: self._count])  # a view would keep the whole block, and send it to other processes


def _block(value: Any, rows: int, segments: SegmentPool | None) -> Any:
    """Memory for so many values like this one; None if values of this kind are listed."""
    try:
        if type(value) is np.ndarray and not value.dtype.hasobject:
            shape, size = (rows, *value.shape), rows * value.nbytes
            return _memory(size, segments).view(value.dtype).reshape(shape) if size else np.empty(shape, value.dtype)
        if _is_tensor(value):
            from penstock.loader.pytorch import is_plain, tensor_over

            shape = (rows, *value.shape)
            return tensor_over(_memory(rows * value.nbytes, segments), value.dtype, shape) if is_plain(value) else None
    except (
        MemoryError,
        OSError,
        OverflowError,
        RuntimeError,
        Unavailable,
        ValueError,
    ):  # the batch size is only an upper limit, and may be huge
        pass
    return None


def _memory(size: int, segments: SegmentPool | None, *, late: bool = False) -> np.ndarray:
    """Bytes for a column of a batch, which has begun, or of which all values have come."""
    if segments is None or size < SEGMENT_BYTES:
        return np.empty(size, np.uint8)
    return segments.lend_late(size) if late else segments.lend(size)


def _write(block: Any, row: int, value: Any) -> None:
    if type(block) is np.ndarray:
        block[row] = value
        return
    from penstock.loader.pytorch import write_row

    write_row(block, row, value)


def _copy(values: Any) -> Any:
    return values.clone() if _is_tensor(values) else values.copy()


def _alike(block: Any, value: Any) -> bool:
    return type(value) is type(block) and value.shape == block.shape[1:] and value.dtype == block.dtype


def _by_name(sample: Any) -> Mapping[Any, Any]:
    return sample if isinstance(sample, dict) else dict(enumerate(sample))


def _check_same(first: Mapping[Any, Any], row: Mapping[Any, Any]) -> None:
    if row.keys() != first.keys():
        raise SchemaMismatch(
            f"samples of one batch have different fields: {_names(first)}, and {_names(row)}; select samples that have "
            f"all, or pick fields with to_tuple()"
        )


def _as_given(columns: dict[Any, Any], *, named: bool) -> Batch:
    return columns if named else tuple(columns[place] for place in range(len(columns)))


def combine_values(b: list[Any], combine_tensors: bool = True, combine_scalars: bool = True) -> Any:
    """Values of one field, stacked if they can be."""
    return _column("", b, combine_tensors, combine_scalars)


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
        from penstock.loader.pytorch import stack

        return stack(values)
    return np.stack(values)


def _is_tensor(value: Any) -> bool:
    if sys.modules.get("torch") is None:
        return False
    from penstock.loader.pytorch import is_tensor

    return is_tensor(value)


def _names(row: Mapping[Any, Any]) -> str:
    key = row.get("__key__")
    fields = ", ".join(str(name) for name in row if not str(name).startswith("__"))
    return f"({fields})" + ("" if key is None else f" of {key!r}")
