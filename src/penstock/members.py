"""Files inside an archive, one a sample and field: their bytes -> one element of a batch, into memory the caller owns.

What the first sample holds is what all must hold: another dtype, shape or size is an error that names both.
"""

import io
import re
import struct
import tokenize
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import ClassVar

import numpy as np

from penstock import pictures, tally
from penstock.codecs import convert, convert_piece, convert_scratch_bytes
from penstock.errors import Corrupt, DataError, DecodeFailed, Missing, SchemaMismatch, Unsafe
from penstock.extents import Members
from penstock.fileio import Files, Handle
from penstock.memory import aligned, borrow
from penstock.picture_headers import read_header
from penstock.spec import Cast, FieldSpec
from penstock.within import Box, Within

NUMBERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
"""Extensions of members that hold a whole number as text."""

# A number as text has no more digits than this.
NUMBER_BYTES = 64

# An npy header is 128 bytes as a rule; what does not begin with one in so many is none.
HEAD_BYTES = 1024

# Measured: what decoders allocate a pixel besides the picture itself. Those that write into the batch take none.
PIXEL_BYTES = 24

BAD_NPY_HEADER = (
    ValueError, TypeError, KeyError, SyntaxError, EOFError, MemoryError, RecursionError, struct.error,
    tokenize.TokenError,
)  # fmt: skip
"""What numpy and Python's parser raise for a header that is none."""

_WHOLE_NUMBER = re.compile(rb"\s*[+-]?[0-9]+\s*")

_UINT8, _INT64 = np.dtype(np.uint8), np.dtype(np.int64)


# A kind of member knows its ``dtype`` and ``shape``; ``scratch_bytes(longest)``, what reading one borrows; and
# ``read(handle, offset, length, goal)``, which puts one into ``goal``, an array of that dtype and shape.


@dataclass(frozen=True)
class Npy:
    """An array behind the header that all members of the field share."""

    head: bytes
    dtype: np.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, head: bytes) -> "Npy":
        """From the first bytes of a member."""
        stream = io.BytesIO(head)
        try:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(stream)
        except BAD_NPY_HEADER as error:
            words = (str(error) or type(error).__name__).splitlines()[0]
            raise DecodeFailed(f"not a whole npy header ({words:.200})") from error
        if any(isinstance(size, bool) or size < 0 for size in shape):
            raise Corrupt(f"npy of shape {shape}")
        if dtype.hasobject:
            raise Unsafe("npy of Python objects, which only unpickling could read; save numbers instead")
        if fortran and len(shape) > 1:
            raise SchemaMismatch(f"npy in Fortran order {shape}; save it with numpy.ascontiguousarray")
        if dtype.kind not in "biufc":
            raise SchemaMismatch(f"npy of {dtype}; expected numbers")
        return cls(head[: stream.tell()], dtype, shape)

    @cached_property
    def bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)

    def scratch_bytes(self, longest: int) -> int:
        return aligned(len(self.head))

    def read(self, handle: Handle, offset: int, length: int, goal: np.ndarray) -> None:
        with borrow(len(self.head)) as head:
            if length >= len(self.head):
                handle.read_into(offset, head)
            begin = len(self.head)
            if length != begin + self.bytes or head.tobytes() != self.head:
                begin = self._other_head(handle, offset, length)
            handle.read_into(offset + begin, goal)

    def _other_head(self, handle: Handle, offset: int, length: int) -> int:
        """The same array may stand behind a header of another version or padding; anything else is an error."""
        head = np.empty(min(length, HEAD_BYTES), np.uint8)
        handle.read_into(offset, head)
        other = Npy.of(head.tobytes())
        other.check(length)
        if (other.dtype, other.shape) != (self.dtype, self.shape):
            raise SchemaMismatch(f"is {other}, but the first sample's is {self}")
        return len(other.head)

    def check(self, length: int) -> None:
        """Refuse a member that is not as long as its header says."""
        if len(self.head) + self.bytes != length:
            raise Corrupt(f"{self}, which is {len(self.head) + self.bytes:,} bytes, in a member of {length:,}")

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


@dataclass(frozen=True)
class Picture:
    """A picture of rows × columns × red, green, blue."""

    shape: tuple[int, ...]
    dtype: np.dtype = _UINT8

    @classmethod
    def of(cls, data: bytes) -> "Picture":
        """From a whole member."""
        header = pictures.checked_header(data)
        if header is not None:
            return cls((header.height, header.width, 3))
        return cls(pictures.decode(data).shape)

    @property
    def pixels(self) -> int:
        return self.shape[0] * self.shape[1]

    def scratch_bytes(self, longest: int) -> int:
        return 2 * aligned(longest) + aligned(PIXEL_BYTES * self.pixels)

    def read(self, handle: Handle, offset: int, length: int, goal: np.ndarray) -> None:
        with borrow(length) as scratch:
            handle.read_into(offset, scratch)
            data = scratch.tobytes()
        header = read_header(data)
        if header is not None and (header.height, header.width, 3) != self.shape:
            raise SchemaMismatch(
                f"is {header.height} x {header.width}, but the first sample's is {self.shape[0]} x {self.shape[1]}: "
                f"pictures that are read into batches must have one size"
            )
        pictures.decode(data, max_pixels=self.pixels, out=goal)


@dataclass(frozen=True)
class Number:
    """A whole number, written as text."""

    dtype: np.dtype = _INT64
    shape: tuple[int, ...] = ()

    def scratch_bytes(self, longest: int) -> int:
        return aligned(NUMBER_BYTES)

    def read(self, handle: Handle, offset: int, length: int, goal: np.ndarray) -> None:
        if length > NUMBER_BYTES:
            raise DecodeFailed(f"{length:,} bytes of text; expected a whole number")
        with borrow(length) as scratch:
            handle.read_into(offset, scratch)
            text = scratch.tobytes()
        if not _WHOLE_NUMBER.fullmatch(text):
            raise DecodeFailed(f"{text[:40]!r} is not a whole number")
        try:
            goal[...] = int(text)
        except OverflowError:
            raise DecodeFailed(f"{text[:40]!r} does not fit 64 bits") from None


@dataclass(frozen=True)
class Raw:
    """The bytes of an array and nothing else; what they mean was declared."""

    dtype: np.dtype
    shape: tuple[int, ...]
    head: ClassVar[bytes] = b""

    @cached_property
    def bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)

    def scratch_bytes(self, longest: int) -> int:
        return 0

    def read(self, handle: Handle, offset: int, length: int, goal: np.ndarray) -> None:
        self.check(length)
        handle.read_into(offset, goal)

    def check(self, length: int) -> None:
        """Refuse a member of another size."""
        if length != self.bytes:
            raise SchemaMismatch(f"{length:,} bytes, but {self} takes {self.bytes:,}")

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


Kind = Npy | Picture | Number | Raw


def kind_of(field: str, first: bytes) -> Kind:
    """How members of a field that ``is_known`` are read, from its name and the first sample's bytes."""
    extension = field.rsplit(".", 1)[-1]
    if extension == "npy":
        array = Npy.of(first[:HEAD_BYTES])
        array.check(len(first))
        return array
    return Picture.of(first) if extension in pictures.EXTENSIONS else Number()


def is_known(field: str) -> bool:
    """Whether members of this name are arrays, pictures or numbers."""
    extension = field.rsplit(".", 1)[-1]
    return extension == "npy" or extension in pictures.EXTENSIONS or extension in NUMBERS


class MemberReader:
    """One member a row."""

    def __init__(self, array: Members, files: Files, cast: Cast | None, part: Within | None) -> None:
        self.array, self.files, self.cast, self.part = array, files, cast, part
        self.kind: Kind = array.kind
        shape = array.shape if part is None else part.shape
        self.spec = FieldSpec(cast.dtype if cast else array.stored, shape)
        self.straight = cast is None and part is None

    def scratch_bytes(self, rows: int) -> int:
        own = self.kind.scratch_bytes(self.array.longest)
        if self.straight:
            return own
        whole = aligned(self.array.row_bytes)
        elements = prod(self.spec.shape)
        chosen = aligned(elements * self.array.stored.itemsize) if self.part is not None else 0
        return whole + max(own, chosen + (convert_scratch_bytes(elements, self.cast) if self.cast else 0))

    def read(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        array = self.array
        with self.files.lend(array.file) as handle:
            for row, place in zip(rows.tolist(), at.tolist(), strict=True):
                goal = target[place : place + 1].reshape(self.spec.shape)
                if self.straight:
                    self._read_one(handle, row, goal)
                    continue
                with borrow(array.row_bytes) as scratch:
                    whole = scratch.view(array.stored).reshape(array.shape)
                    self._read_one(handle, row, whole)
                    self._take(whole.reshape(-1), goal.reshape(-1))

    def _read_one(self, handle: Handle, row: int, goal: np.ndarray) -> None:
        array = self.array
        offset, length = int(array.offsets[row]), int(array.lengths[row])
        if offset < 0:
            raise Missing(f"{array.file.path}: sample {array.keys[row]!r} has no {array.name!r}")
        tally.mine().chunks_read += 1
        try:
            self.kind.read(handle, offset, length, goal)
        except DataError as error:
            raise type(error)(
                f"{array.file.path}: {array.place(row)} at offset {offset:,} of {length:,} bytes: {error}. Repair or "
                f'leave out that sample, with select or on_error="skip"'
            ) from error

    def _take(self, whole: np.ndarray, goal: np.ndarray) -> None:
        if self.part is None:
            assert self.cast is not None
            convert(whole, goal, self.cast)
            return
        with borrow(len(goal) * whole.itemsize) as scratch:
            chosen = scratch.view(whole.dtype)
            if isinstance(self.part, Box):
                np.copyto(chosen.reshape(self.part.full_shape), whole.reshape(self.array.shape)[self.part.index])
            else:
                np.take(whole, self.part.flat, out=chosen, mode="clip")
            convert_piece(chosen, goal, self.cast or Cast(goal.dtype))
