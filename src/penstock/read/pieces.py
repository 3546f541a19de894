"""Which chunks contain the wanted elements of a row, and where those go. Pure: nothing here reads anything.

For chunks that are read one by one this is a list of pieces. For chunks that are read in groups it is worked out group
by group: a group's elements are numbered in the order in which its pieces' shares of a row follow each other.
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise, product
from typing import Protocol

import numpy as np

from penstock.read.coalesce import are_consecutive
from penstock.read.extents import Chunks
from penstock.read.part import Box, Mask, RowPart, coordinates, element_strides, is_ascending

# Measured: memory per piece.
PIECE_BYTES = 600
# Memory per element of a mask while elements are sorted into pieces.
WORKING_BYTES = 56
# Elements of a mask located at a time.
LOCATED_TOGETHER = 65536

ElementPlaces = slice | np.ndarray

Share = tuple[int, int]
"""(number, of): threads share the pieces of a block, and each reads its share of every row."""
WHOLE: Share = (0, 1)


def share_of(count: int, share: Share) -> range:
    """One thread's share of ``count`` pieces."""
    number, of = share
    return range(count * number // of, count * (number + 1) // of)


class Groups(Protocol):
    """Wanted pieces, taken some at a time."""

    def __len__(self) -> int:
        """How many pieces are wanted."""

    def pieces(self, begin: int, end: int) -> np.ndarray:
        """The numbers of wanted pieces ``begin`` up to ``end``."""

    def elements(self, begin: int, end: int, pieces: np.ndarray) -> tuple[np.ndarray | None, ElementPlaces]:
        """Which elements of those pieces are wanted (None: all), and where in the part of the row they go."""


def groups(array: Chunks, part: RowPart) -> Groups:
    """The pieces with elements of a part of the row."""
    if isinstance(part, Box):
        return _BoxGroups(array, part)
    if array.piece_elements == 1:
        return part.tables.get("elements", partial(_element_groups, part))
    return part.tables.get(("groups", array.chunk), partial(_mask_groups, array, part))


def _mask_groups(array: Chunks, mask: Mask) -> "tuple[_MaskGroups, int]":
    return _MaskGroups(array, mask), WORKING_BYTES * len(mask.flat)


def _element_groups(mask: Mask) -> "tuple[_ElementGroups, int]":
    made = _ElementGroups(mask)
    return made, made.index_bytes


def box_pieces(array: Chunks, box: Box) -> "list[BoxPiece]":
    """The chunks that a box reaches into, as a list."""
    return box.tables.get(("pieces", array.chunk), partial(_box_pieces, array, box))


def mask_pieces(array: Chunks, mask: Mask) -> "list[MaskPiece]":
    """The chunks with elements of a mask, as a list."""
    return mask.tables.get(("pieces", array.chunk), partial(_mask_pieces, array, mask))


class BoxPiece:
    """A chunk that a box reaches into."""

    __slots__ = ("number", "of", "to")

    def __init__(self, number: int, of: tuple[slice, ...], to: tuple[slice, ...]) -> None:
        self.number, self.of, self.to = number, of, to
        """Its number, the part of it that is wanted, and where in the box that goes."""


def _box_pieces(array: Chunks, box: Box) -> tuple[list[BoxPiece], int]:
    strides = element_strides(array.grid)
    along = [list(_cut_axis(each, step)) for each, step in zip(box.ranges, array.chunk, strict=True)]
    pieces = []
    for crossing in product(*along):
        number = sum(piece * stride for (piece, _, _), stride in zip(crossing, strides, strict=True))
        pieces.append(BoxPiece(number, tuple(of for _, of, _ in crossing), tuple(to for _, _, to in crossing)))
    return pieces, PIECE_BYTES * len(pieces)


def _cut_axis(wanted: range, step: int) -> Iterator[tuple[int, slice, slice]]:
    """Along one axis: the pieces that hold something wanted, what of each, and where it goes."""
    done = 0
    while done < len(wanted):
        piece, first = divmod(wanted[done], step)
        count = min(-(-(step - first) // wanted.step), len(wanted) - done)
        yield piece, slice(first, first + (count - 1) * wanted.step + 1, wanted.step), slice(done, done + count)
        done += count


class MaskPiece:
    """A chunk that holds elements of a mask."""

    __slots__ = ("local", "number", "places")

    def __init__(self, number: int, local: np.ndarray, places: ElementPlaces) -> None:
        self.number, self.local, self.places = number, local, places
        """Its number, the elements of one row's share that are wanted, and where they go."""


def _mask_pieces(array: Chunks, mask: Mask) -> tuple[list[MaskPiece], int]:
    found = _MaskGroups(array, mask)
    pieces = [
        MaskPiece(number, found.local[begin:end], _as_slice(found.order[begin:end]))
        for number, (begin, end) in zip(found.numbers.tolist(), pairwise(found.begins.tolist()), strict=True)
    ]
    return pieces, PIECE_BYTES * len(pieces) + WORKING_BYTES * len(mask.flat)


def _locate(array: Chunks, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Elements of a row -> the piece that holds each, and its number in one row's share of that."""
    numbers, local = np.zeros(len(flat), np.int64), np.zeros(len(flat), np.int64)
    grid, inner = element_strides(array.grid), element_strides(array.chunk)
    for begin in range(0, len(flat), LOCATED_TOGETHER):
        here = slice(begin, begin + LOCATED_TOGETHER)
        along = coordinates(flat[here], array.shape)
        for at, step, grid_stride, local_stride in zip(along, array.chunk, grid, inner, strict=True):
            numbers[here] += at // step * grid_stride
            local[here] += at % step * local_stride
    return numbers, local


def _as_slice(places: np.ndarray) -> ElementPlaces:
    """A slice where the places follow each other."""
    return slice(int(places[0]), int(places[-1]) + 1) if are_consecutive(places) else places


class _ElementGroups:
    """Chunks of one element of each row, so that the elements wanted and the pieces wanted are the same numbers."""

    def __init__(self, mask: Mask) -> None:
        self.order = None if is_ascending(mask.flat) else np.argsort(mask.flat, kind="stable")
        self.flat = mask.flat if self.order is None else mask.flat[self.order]

    @property
    def index_bytes(self) -> int:
        return 0 if self.order is None else self.order.nbytes + self.flat.nbytes

    def __len__(self) -> int:
        return len(self.flat)

    def pieces(self, begin: int, end: int) -> np.ndarray:
        return self.flat[begin:end]

    def elements(self, begin: int, end: int, pieces: np.ndarray) -> tuple[np.ndarray | None, ElementPlaces]:
        here = slice(begin, begin + len(pieces))
        return None, here if self.order is None else _as_slice(self.order[here])


class _MaskGroups:
    """The pieces that hold elements of a mask, ascending, and those elements."""

    def __init__(self, array: Chunks, mask: Mask) -> None:
        self.width = array.piece_elements
        numbers, local = _locate(array, mask.flat)
        self.order = np.argsort(numbers, kind="stable")
        self.local = local[self.order]
        self.numbers, self.begins = np.unique(numbers[self.order], return_index=True)
        self.begins = np.append(self.begins, len(local))

    def __len__(self) -> int:
        return len(self.numbers)

    def pieces(self, begin: int, end: int) -> np.ndarray:
        return self.numbers[begin:end]

    def elements(self, begin: int, end: int, pieces: np.ndarray) -> tuple[np.ndarray | None, ElementPlaces]:
        bounds = self.begins[begin : begin + len(pieces) + 1]
        here = slice(int(bounds[0]), int(bounds[-1]))
        first_of_each = np.repeat(np.arange(len(pieces)) * self.width, np.diff(bounds))
        return first_of_each + self.local[here], _as_slice(self.order[here])


class _BoxGroups:
    """The pieces that a box reaches into, and the elements of it that they hold, worked out as they are needed."""

    def __init__(self, array: Chunks, box: Box) -> None:
        self.array, self.box = array, box
        self.along: list[np.ndarray] = []
        """The numbers of the pieces along each axis."""
        for each, step in zip(box.ranges, array.chunk, strict=True):
            numbers = np.arange(each.start, each.stop, each.step) // step
            self.along.append(numbers[np.diff(numbers, prepend=-1) > 0])  # they ascend, and repeat
        self.crossings = tuple(map(len, self.along))

    def __len__(self) -> int:
        return int(np.prod(self.crossings, dtype=np.int64))

    def pieces(self, begin: int, end: int) -> np.ndarray:
        crossing = np.unravel_index(np.arange(begin, min(end, len(self))), self.crossings)
        at = [each[where] for each, where in zip(self.along, crossing, strict=True)]
        return np.asarray(np.ravel_multi_index(at, self.array.grid))

    def elements(self, begin: int, end: int, pieces: np.ndarray) -> tuple[np.ndarray | None, ElementPlaces]:
        array = self.array
        corners = np.unravel_index(pieces, array.grid)
        inside = np.unravel_index(np.arange(array.piece_elements), array.chunk)
        places = np.zeros((len(pieces), array.piece_elements), np.int64)
        wanted = np.ones(places.shape, bool)
        strides = element_strides(self.box.full_shape)
        for corner, local, step, each, stride in zip(
            corners, inside, array.chunk, self.box.ranges, strides, strict=True
        ):
            at = (corner * step - each.start)[:, None] + local
            wanted &= (at >= 0) & (at < each.stop - each.start)
            if each.step > 1:
                wanted &= at % each.step == 0
                at //= each.step
            at *= stride
            places += at
        if wanted.all():
            return None, _as_slice(places.reshape(-1))
        local = np.flatnonzero(wanted)
        return local, _as_slice(places.reshape(-1)[local])
