"""Part of every row: a box of it, or the elements under a mask. Frozen values that know nothing of storage.

Both say which elements of a row are wanted, in the row's own order, and what shape they come in.
"""

import hashlib
from collections.abc import Callable
from dataclasses import field
from functools import cached_property, lru_cache
from math import prod
from types import EllipsisType
from typing import Any, TypeVar

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.errors import ConfigError

Shape = tuple[int, ...]
T = TypeVar("T")


class TableCache:
    """Tables that readers derive from a part of a row: one per storage geometry, shared by all files."""

    def __init__(self) -> None:
        self._made: dict[Any, tuple[Any, int]] = {}

    def get(self, geometry: Any, make: Callable[[], tuple[T, int]]) -> T:
        """The table for a geometry; ``make`` gives it and its size in bytes."""
        if geometry not in self._made:
            self._made[geometry] = make()
        table: T = self._made[geometry][0]
        return table

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self._made.values())

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return TableCache, ()  # made again when needed


@dataclass(frozen=True)
class Box:
    """A range along each axis of the row."""

    row: Shape
    ranges: tuple[range, ...]
    """What is wanted along each axis; steps are positive, and none is empty."""
    dropped: frozenset[int] = frozenset()
    """Axes given as one number, which the result does not have."""
    tables: TableCache = field(default_factory=TableCache, compare=False, repr=False)

    @property
    def full_shape(self) -> Shape:
        """The box with all axes of the row."""
        return tuple(len(each) for each in self.ranges)

    @property
    def shape(self) -> Shape:
        return tuple(len(each) for axis, each in enumerate(self.ranges) if axis not in self.dropped)

    @property
    def is_everything(self) -> bool:
        return not self.dropped and self.full_shape == self.row

    @property
    def index(self) -> tuple[slice, ...]:
        """As numpy takes it; axes given as one number are kept with length 1."""
        return tuple(slice(each.start, each.stop, each.step) for each in self.ranges)

    @property
    def bounds(self) -> tuple[slice, ...]:
        """The smallest box without steps around it."""
        return tuple(slice(each[0], each[-1] + 1) if len(each) else slice(0, 0) for each in self.ranges)

    @property
    def flat(self) -> np.ndarray:
        """Numbers of the elements wanted, in C order over the row."""
        strides = element_strides(self.row)
        numbers = np.zeros((1,) * len(self.row), np.int64)
        for axis, each in enumerate(self.ranges):
            along = np.arange(each.start, each.stop, each.step, dtype=np.int64) * strides[axis]
            numbers = numbers + along.reshape([-1 if a == axis else 1 for a in range(len(self.row))])
        return numbers.reshape(-1)

    @property
    def index_bytes(self) -> int:
        """Memory of it and of all tables derived from it."""
        return self.tables.nbytes

    def describe(self) -> tuple[object, ...]:
        return ("box", self.row, self.ranges, tuple(sorted(self.dropped)))


@dataclass(frozen=True, eq=False)
class Mask:
    """Single elements of the row, delivered as one axis."""

    row: Shape
    flat: np.ndarray
    """Their numbers in C order over the row, in the order in which they are delivered."""
    is_single: bool = False
    """Whether it is one element, delivered without an axis."""
    tables: TableCache = field(default_factory=TableCache, repr=False)

    @property
    def shape(self) -> Shape:
        return () if self.is_single else (len(self.flat),)

    @property
    def bounds(self) -> tuple[slice, ...]:
        return tuple(slice(int(each.min()), int(each.max()) + 1) for each in coordinates(self.flat, self.row))

    @property
    def index_bytes(self) -> int:
        """Memory of it and of all tables derived from it."""
        return self.flat.nbytes + self.tables.nbytes

    def describe(self) -> tuple[object, ...]:
        return ("mask", self.row, self.shape, self._digest)

    @cached_property
    def _digest(self) -> str:
        """Worked out once: a mask may be shared by many files, and belongs to the fingerprint of each."""
        return hashlib.sha256(self.flat.tobytes()).hexdigest()[:16]


RowPart = Box | Mask


def elements(row: Shape, numbers: np.ndarray) -> Mask:
    """Single elements by their numbers in C order over the row, delivered in the order in which they are named."""
    flat: np.ndarray = np.ascontiguousarray(numbers, np.int64)
    if flat.ndim != 1 or len(flat) == 0 or flat.min() < 0 or flat.max() >= prod(row):
        raise ConfigError(
            f"elements of a row of shape {row}: expected numbers from 0 to {prod(row) - 1:,}, at least one"
        )
    return Mask(row, flat)


@lru_cache(maxsize=64)
def everything(row: Shape) -> Box:
    """The whole row."""
    return Box(row, tuple(range(size) for size in row))


def row_part(row: Shape, wanted: Any) -> RowPart:
    """The part that a caller wants: a boolean array of the row's shape, or numpy's basic indexing."""
    if isinstance(wanted, Box | Mask):
        if wanted.row != row:
            raise ConfigError(f"part of a row of shape {wanted.row}, but rows have shape {row}")
        return wanted
    if isinstance(wanted, slice | int | np.integer | EllipsisType):
        wanted = (wanted,)
    if isinstance(wanted, tuple):
        return _make_box(row, wanted)
    try:
        mask = np.asarray(wanted)
    except ValueError as error:
        raise ConfigError(
            f"expected booleans of shape {row}, or slices; got {type(wanted).__name__} ({error})"
        ) from None
    if mask.dtype != bool or mask.shape != row:
        way_out = ". Numbers become a mask by a comparison, such as roi > 0" if mask.shape == row else ""
        raise ConfigError(
            f"expected booleans of shape {row}, one for each element of a row, or slices; got {mask.dtype} of shape "
            f"{mask.shape}{way_out}"
        )
    flat = np.flatnonzero(mask)
    if len(flat) == 0:
        raise ConfigError("the mask selects nothing: all of its values are False")
    return Mask(row, flat)


def _make_box(row: Shape, wanted: tuple[Any, ...]) -> Box:
    if any(not isinstance(each, slice | int | np.integer | EllipsisType) or isinstance(each, bool) for each in wanted):
        raise ConfigError(f"expected slices and whole numbers, or a mask of shape {row}; got {wanted!r}")
    if wanted.count(Ellipsis) > 1 or len(wanted) - (Ellipsis in wanted) > len(row):
        raise ConfigError(f"{len(wanted)} slices for a row of shape {row}: one for each axis at most")
    at = wanted.index(Ellipsis) if Ellipsis in wanted else len(wanted)
    after = wanted[at + 1 :]
    rest = (slice(None),) * (len(row) - at - len(after))
    ranges, dropped = [], set()
    for axis, (each, size) in enumerate(zip((*wanted[:at], *rest, *after), row, strict=True)):
        if isinstance(each, slice):
            try:
                chosen = range(size)[each]
            except (TypeError, ValueError) as error:
                raise ConfigError(f"axis {axis} of {size}: {each}: {error}") from None
            if chosen.step < 0 or not len(chosen):
                raise ConfigError(f"axis {axis} of {size}: {each} selects nothing, or runs backwards")
        else:
            if not -size <= each < size:
                raise ConfigError(f"axis {axis} of {size}: there is no {each}")
            chosen = range(int(each) % size, int(each) % size + 1)
            dropped.add(axis)
        ranges.append(_shortest_range(chosen))
    return Box(row, tuple(ranges), frozenset(dropped))


def _shortest_range(chosen: range) -> range:
    """The range with the smallest end and step that has these numbers, so that equal ranges are written alike."""
    return range(chosen[0], chosen[-1] + 1, chosen.step if len(chosen) > 1 else 1)


def compose(first: RowPart, then: RowPart) -> RowPart:
    """Part of a part."""
    if isinstance(first, Box) and isinstance(then, Box):
        kept = [axis for axis in range(len(first.row)) if axis not in first.dropped]
        ranges, dropped = list(first.ranges), set(first.dropped)
        for place, axis in enumerate(kept):
            inner = then.ranges[place]
            ranges[axis] = _shortest_range(first.ranges[axis][inner.start : inner.stop : inner.step])
            if place in then.dropped:
                dropped.add(axis)
        return Box(first.row, tuple(ranges), frozenset(dropped))
    return Mask(first.row, first.flat[then.flat], is_single=then.shape == ())


def is_ascending(numbers: np.ndarray) -> bool:
    """Whether each is larger than the one before; looked at in pieces, since a mask may name millions."""
    piece = 65536
    return all(bool((np.diff(numbers[begin : begin + piece + 1]) > 0).all()) for begin in range(0, len(numbers), piece))


def coordinates(flat: np.ndarray, shape: Shape) -> tuple[np.ndarray, ...]:
    """Numbers of elements in C order -> where they are along each axis; a row of one number has none."""
    return np.unravel_index(flat, shape) if shape else ()


def element_strides(shape: Shape) -> Shape:
    """How many elements apart neighbours along each axis are, in C order."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
