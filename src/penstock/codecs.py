"""Bytes -> elements, into memory the caller owns.

A codec decodes ``source`` into exactly ``target``; more or fewer bytes are an error. Libraries are imported where they
are used, and every call in here releases the interpreter's lock while it works.
"""

import sys
from typing import Protocol

import numpy as np

from penstock.errors import ConfigError, DecodeFailed
from penstock.extents import CodecId
from penstock.memory import aligned, borrow
from penstock.spec import Cast

# Elements converted at a time: source and target pieces stay in a core's cache between the passes over them.
BLOCK_ELEMENTS = 512 * 1024


class Decoder(Protocol):
    """One codec, ready to run; ``source`` and ``target`` are contiguous uint8."""

    def __call__(self, source: np.ndarray, target: np.ndarray) -> None: ...


def decoder(codec: CodecId) -> Decoder:
    """The decoder of a codec named in a table."""
    name, parameter = codec
    if name == "deflate":
        return _deflate
    if name == "shuffle":
        return Unshuffle(parameter)
    raise ConfigError(f"no decoder for codec {name!r}; known: deflate, shuffle")


def _deflate(source: np.ndarray, target: np.ndarray) -> None:
    try:
        import imagecodecs
    except ImportError:
        raise ConfigError('reading deflate (gzip) chunks needs imagecodecs: pip install "penstock[hdf5]"') from None
    try:
        decoded = imagecodecs.deflate_decode(source, out=target)  # type: ignore[arg-type]  # its stubs know no arrays
    except imagecodecs.DeflateError as error:
        raise DecodeFailed(
            f"deflate: {len(source):,} bytes do not inflate to the expected {len(target):,} ({error})"
        ) from error
    if len(decoded) != len(target):
        raise DecodeFailed(f"deflate: inflates to {len(decoded):,} bytes, expected {len(target):,}")


class Unshuffle:
    """HDF5's byte shuffle undone: the n-th bytes of all elements were stored together."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, source: np.ndarray, target: np.ndarray) -> None:
        if len(source) != len(target) or len(source) % self.width:
            raise DecodeFailed(
                f"shuffle: {len(source):,} bytes of elements of {self.width}, expected {len(target):,} bytes"
            )
        count = len(source) // self.width
        for begin in range(0, count, BLOCK_ELEMENTS):
            end = min(begin + BLOCK_ELEMENTS, count)
            self.piece(source, begin, end, target[begin * self.width : end * self.width])

    def piece(self, source: np.ndarray, begin: int, end: int, target: np.ndarray) -> None:
        """Elements ``begin`` up to ``end`` of the shuffled ``source``, into ``target``."""
        planes = source.reshape(self.width, -1)[:, begin:end]
        if self.width == 2 and sys.byteorder == "little":
            # Shifting whole words is twice as fast as storing every other byte.
            words = target.view(np.uint16)
            np.copyto(words, planes[1])
            np.left_shift(words, 8, out=words)
            np.bitwise_or(words, planes[0], out=words)
        else:
            for place, plane in enumerate(planes):
                target[place :: self.width] = plane


def convert(source: np.ndarray, target: np.ndarray, cast: Cast) -> None:
    """``target = source.astype(dtype) * scale + offset``, flat and contiguous, piece by piece."""
    for begin in range(0, len(source), BLOCK_ELEMENTS):
        convert_piece(source[begin : begin + BLOCK_ELEMENTS], target[begin : begin + BLOCK_ELEMENTS], cast)


def convert_piece(source: np.ndarray, target: np.ndarray, cast: Cast) -> None:
    """The same for one piece that fits a cache."""
    if target.dtype == np.float16 and (cast.scale != 1 or cast.offset != 0):
        # Half precision has 11 bits: scale in single and round once.
        with borrow(4 * len(target)) as scratch:
            single = scratch.view(np.float32)
            convert_piece(source, single, Cast(single.dtype, cast.scale, cast.offset))
            np.copyto(target, single, casting="same_kind")
        return
    np.copyto(target, source, casting="unsafe")
    if cast.scale != 1:
        np.multiply(target, target.dtype.type(cast.scale), out=target)
    if cast.offset != 0:
        np.add(target, target.dtype.type(cast.offset), out=target)


def convert_scratch_bytes(elements: int, cast: Cast) -> int:
    """What ``convert`` borrows for so many elements: nothing, but for half precision."""
    return aligned(4 * min(elements, BLOCK_ELEMENTS)) if cast.dtype == np.float16 else 0
