"""Stored elements -> elements of the dtype, scale and order of axes that the caller wants, in memory the caller owns.

Conversions go block by block, so that the target stays in a core's cache between the passes over it. A copy that
converts, then arithmetic in place, is quicker than one call that does both: numpy converts for such a call piece by
piece, through buffers of its own.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from penstock.base.dtypes import is_half
from penstock.base.scratch import aligned, borrow
from penstock.base.spec import Cast
from penstock.files.handles import Handle
from penstock.read.extents import Array

BLOCK_ELEMENTS = 128 * 1024

# Read in one request, then converted block by block.
READ_ELEMENTS = 512 * 1024


def blocks(count: int) -> Iterator[slice]:
    """``count`` elements, block by block."""
    return (slice(begin, min(begin + BLOCK_ELEMENTS, count)) for begin in range(0, count, BLOCK_ELEMENTS))


def block_bytes(count: int, width: int) -> int:
    """Bytes of the largest block of ``count`` elements of ``width`` bytes."""
    return width * min(count, BLOCK_ELEMENTS)


def convert(source: np.ndarray, target: np.ndarray, cast: Cast) -> None:
    """``target = source.astype(dtype) / divisor * scale + offset``, flat and contiguous."""
    if len(source) <= BLOCK_ELEMENTS or not _steps(cast, target.dtype):
        convert_piece(source, target, cast)
        return
    for block in blocks(len(source)):
        convert_piece(source[block], target[block], cast)


def convert_axes(source: np.ndarray, target: np.ndarray, cast: Cast, axes: tuple[int, ...]) -> None:
    """Convert one row, and put its axes in another order: ``target`` is laid out as ``source.transpose(axes)``."""
    seen = source.transpose(axes)
    for piece in pieces(target.shape):
        convert_piece(seen[piece], target[piece], cast)


def pieces(shape: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """An array of this shape, piece by piece."""
    inner = prod(shape[1:])
    if not shape or shape[0] * inner <= BLOCK_ELEMENTS:
        yield (...,)  # an array even if it has no axes
        return
    if inner > BLOCK_ELEMENTS:
        for first in range(shape[0]):
            yield from ((first, *rest) for rest in pieces(shape[1:]))
        return
    step = BLOCK_ELEMENTS // max(1, inner)
    yield from ((slice(begin, begin + step),) for begin in range(0, shape[0], step))


def convert_piece(source: np.ndarray, target: np.ndarray, cast: Cast) -> None:
    """Convert one block, of any shape."""
    if cast.changes_values and is_half(target.dtype):
        # Half precision has 8 or 11 bits: scale in single precision and round once.
        with borrow(4 * target.size) as scratch:
            single = scratch.view(np.float32).reshape(target.shape)
            convert_piece(source, single, replace(cast, dtype=single.dtype))
            np.copyto(target, single, casting="same_kind")
        return
    np.copyto(target, source, casting="unsafe")
    for step, value in _steps(cast, target.dtype):
        step(target, value, out=target)


@lru_cache(maxsize=64)
def _steps(cast: Cast, dtype: np.dtype) -> tuple[tuple[np.ufunc, Any], ...]:
    """The operations on each value, with numbers of the target's type. Needed for every small row, so cached."""
    wanted = ((np.divide, cast.divisor, 1), (np.multiply, cast.scale, 1), (np.add, cast.offset, 0))
    return tuple((step, dtype.type(value)) for step, value, neutral in wanted if value != neutral)


def convert_scratch_bytes(elements: int, cast: Cast) -> int:
    """Scratch that ``convert`` borrows: none, except for half precision."""
    return aligned(block_bytes(elements, 4)) if is_half(cast.dtype) else 0


def read_converted(handle: Handle, offset: int, stored: np.dtype, target: np.ndarray, cast: Cast) -> None:
    """Read stored elements from ``offset`` on, converted into the flat ``target``."""
    width = stored.itemsize
    with borrow(width * min(len(target), READ_ELEMENTS)) as scratch:
        piece = scratch.view(stored)
        if len(target) > READ_ELEMENTS:
            handle.expect(offset, len(target) * width)
        for begin in range(0, len(target), READ_ELEMENTS):
            goal = target[begin : begin + READ_ELEMENTS]
            handle.read_into(offset + begin * width, piece[: len(goal)])
            convert(piece[: len(goal)], goal, cast)


def read_converted_scratch_bytes(array: Array, rows: int, cast: Cast | None) -> int:
    """Scratch that ``read_converted`` of ``rows`` rows borrows."""
    if cast is None:
        return 0
    elements = rows * prod(array.shape)
    read = aligned(array.stored.itemsize * min(elements, READ_ELEMENTS))
    return read + convert_scratch_bytes(elements, cast)
