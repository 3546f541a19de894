"""Kinds of members, the files inside an archive: how their bytes become one element of a batch.

All samples must have the dtype and shape of the first one; an error names both. Text and other things of no fixed size
are Python objects, one per sample.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import cached_property, partial
from math import prod
from typing import Any, ClassVar, Protocol

import numpy as np

from penstock.base import user_functions
from penstock.base.dataclass import dataclass
from penstock.base.dtypes import numpy_dtype
from penstock.base.scratch import aligned, borrow
from penstock.errors import ConfigError, Corrupt, DecodeFailed, LimitExceeded, PenstockError, SchemaMismatch, Unsafe
from penstock.read import objects, pictures
from penstock.read.npy import HEADER_BYTES, NpyHeader, decode_npy
from penstock.read.objects import ObjectDecoder
from penstock.read.picture_headers import read_header
from penstock.read.pictures import MAX_PIXELS, Fit

NUMBERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
"""Extensions of members that contain a whole number as text."""

# A number as text has no more digits than this.
NUMBER_BYTES = 64

# Measured: what decoders allocate per pixel beside the picture. Those that write into the batch allocate nothing.
PIXEL_BYTES = 24

_WHOLE_NUMBER = re.compile(rb"\s*[+-]?[0-9]+\s*")

_UINT8, _INT64, _OBJECT = np.dtype(np.uint8), np.dtype(np.int64), np.dtype(object)

MemberDecoder = str | Callable[[bytes], Any] | np.dtype
"""A function of the bytes, a name in ``penstock.read.objects``, or the dtype of plain bytes."""
Decoders = Mapping[str, Any]
"""The caller's decoders by field or extension: see ``decoder_of``."""

MAX_MEMBER_BYTES = 4 << 30
"""A member is held in memory; a larger one is treated as a mistake or an attack."""


@dataclass(frozen=True)
class MemberOptions:
    """What the caller of ``open`` wants of members."""

    size: tuple[int, int] | None = None
    """Height and width of all pictures after resizing."""
    fit: Fit = "resize"
    max_pixels: int = MAX_PIXELS
    max_member_bytes: int = MAX_MEMBER_BYTES
    decoders: Mapping[str, MemberDecoder] = field(default_factory=dict)

    def decoder(self, name: str) -> MemberDecoder | None:
        """The caller's decoder for a field: by its whole name, or by the longest of its extensions that has one."""
        while name not in self.decoders:
            _, dot, name = name.partition(".")
            if not dot:
                return None
        return self.decoders[name]


def check_length(length: int, most: int) -> None:
    """Refuse a member of more bytes than the limit."""
    if length > most:
        raise LimitExceeded(f"{length:,} bytes, more than max_member_bytes={most:,}; raise that if it is intended")


class Readable(Protocol):
    """A file, or part of one that is in memory."""

    def read_into(self, offset: int, *targets: np.ndarray) -> None:
        """Fill ``targets`` one after another from ``offset`` on."""


# Every kind has a ``dtype`` and a ``shape``, ``scratch_bytes(longest)``, which reading one member borrows, and
# ``read(handle, offset, length, goal)``, which reads one into ``goal``, an array of that dtype and shape. ``Value`` has
# ``value(handle, offset, length)`` instead.


@dataclass(frozen=True)
class Npy:
    """An array after the header that all members of the field share."""

    head: bytes
    dtype: np.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, head: bytes) -> "Npy":
        """From the first bytes of a member."""
        header = NpyHeader.parse(head)
        if header.is_fortran:
            raise SchemaMismatch(f"npy in Fortran order {header.shape}; save it with numpy.ascontiguousarray")
        if header.dtype.kind not in "biufc":
            raise SchemaMismatch(f"npy of {header.dtype}; expected numbers")
        return cls(head[: header.length], header.dtype, header.shape)

    @cached_property
    def nbytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)

    def scratch_bytes(self, longest: int) -> int:
        return aligned(len(self.head))

    def read(self, handle: Readable, offset: int, length: int, goal: np.ndarray) -> None:
        with borrow(len(self.head)) as head:
            if length == len(self.head) + self.nbytes:
                handle.read_into(offset, head, goal)
                if head.tobytes() == self.head:
                    return
            handle.read_into(offset + self._other_head(handle, offset, length), goal)

    def _other_head(self, handle: Readable, offset: int, length: int) -> int:
        """The length of a header of another version or padding before the same kind of array; else an error."""
        head = np.empty(min(length, HEADER_BYTES), np.uint8)
        handle.read_into(offset, head)
        other = Npy.of(head.tobytes())
        other.check(length)
        if (other.dtype, other.shape) != (self.dtype, self.shape):
            raise SchemaMismatch(f"is {other}, but the first sample's is {self}")
        return len(other.head)

    def check(self, length: int) -> None:
        """Refuse a member whose length does not fit its header."""
        if len(self.head) + self.nbytes != length:
            raise Corrupt(f"{self}, which is {len(self.head) + self.nbytes:,} bytes, in a member of {length:,}")

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


@dataclass(frozen=True)
class Picture:
    """A picture of rows × columns × red, green, blue."""

    shape: tuple[int, ...]
    dtype: np.dtype = _UINT8
    fit: Fit | None = None
    """How pictures of other sizes are resized; None refuses them."""
    largest: int = 0
    """Pixels of the largest picture before resizing."""

    @classmethod
    def of(cls, data: bytes, max_pixels: int) -> "Picture":
        """From a whole member."""
        return cls((*pictures.read_size(data, max_pixels), 3))

    @property
    def pixels(self) -> int:
        return self.shape[0] * self.shape[1]

    def scratch_bytes(self, longest: int) -> int:
        fitted = 2 * aligned(self.pixels * 4) if self.fit else 0
        return 2 * aligned(longest) + aligned(PIXEL_BYTES * max(self.pixels, self.largest)) + fitted

    def read(self, handle: Readable, offset: int, length: int, goal: np.ndarray) -> None:
        data = _read_whole(handle, offset, length)
        header = read_header(data)
        same_size = header is not None and (header.height, header.width, 3) == self.shape
        if self.fit is not None and not same_size:
            pictures.fit(pictures.decode(data, max_pixels=self.largest, header=header), self.fit, goal)
            return
        if header is not None and not same_size:
            raise SchemaMismatch(
                f"is {header.height} x {header.width}, but the first sample's is {self.shape[0]} x {self.shape[1]}: "
                f"pictures in a batch have one size; bring all to one with size=(height, width)"
            )
        pictures.decode(data, max_pixels=self.pixels, out=goal, header=header)


@dataclass(frozen=True)
class Number:
    """A whole number, written as text."""

    dtype: np.dtype = _INT64
    shape: tuple[int, ...] = ()

    def scratch_bytes(self, longest: int) -> int:
        return aligned(NUMBER_BYTES)

    def read(self, handle: Readable, offset: int, length: int, goal: np.ndarray) -> None:
        if length > NUMBER_BYTES:
            raise DecodeFailed(f"{length:,} bytes of text; expected a whole number")
        text = _read_whole(handle, offset, length)
        if not _WHOLE_NUMBER.fullmatch(text):
            raise DecodeFailed(f"{text[:40]!r} is not a whole number")
        try:
            goal[...] = int(text)
        except OverflowError:
            raise DecodeFailed(f"{text[:40]!r} does not fit 64 bits") from None


@dataclass(frozen=True)
class Decoded:
    """An array that the caller's function makes, always of one dtype and shape."""

    function: Callable[[bytes], Any]
    dtype: np.dtype
    shape: tuple[int, ...]

    def scratch_bytes(self, longest: int) -> int:
        return 2 * aligned(longest) + 3 * aligned(self.dtype.itemsize * prod(self.shape))

    def read(self, handle: Readable, offset: int, length: int, goal: np.ndarray) -> None:
        made = np.asarray(_call(self.function, _read_whole(handle, offset, length)))
        if (made.dtype, made.shape) != (self.dtype, self.shape):
            raise SchemaMismatch(
                f"{_name(self.function)} returned {made.dtype} of shape {made.shape}, but {self.dtype} of shape "
                f"{self.shape} for the first sample"
            )
        np.copyto(goal, made)


@dataclass(frozen=True)
class Value:
    """A Python object of any size."""

    values: ObjectDecoder
    dtype: np.dtype = _OBJECT
    shape: tuple[int, ...] = ()

    def scratch_bytes(self, longest: int) -> int:
        return 2 * aligned(longest)

    def value(self, handle: Readable, offset: int, length: int) -> Any:
        return self.values.decode(_read_whole(handle, offset, length))


@dataclass(frozen=True)
class Raw:
    """The plain bytes of an array, whose dtype the caller gave."""

    dtype: np.dtype
    shape: tuple[int, ...]
    head: ClassVar[bytes] = b""

    @classmethod
    def of(cls, declared: np.dtype, length: int) -> "Raw":
        """Without a shape in the dtype, the bytes are one number or a vector."""
        base, shape = declared.base, declared.shape
        if not shape and length != base.itemsize:
            if length % base.itemsize:
                raise SchemaMismatch(f"{length:,} bytes, which is not a whole number of {base} ({base.itemsize} each)")
            shape = (length // base.itemsize,)
        kind = cls(base, shape)
        kind.check(length)
        return kind

    @cached_property
    def nbytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)

    def scratch_bytes(self, longest: int) -> int:
        return 0

    def read(self, handle: Readable, offset: int, length: int, goal: np.ndarray) -> None:
        self.check(length)
        handle.read_into(offset, goal)

    def check(self, length: int) -> None:
        """Refuse a member of another size."""
        if length != self.nbytes:
            raise SchemaMismatch(f"{length:,} bytes, but {self} takes {self.nbytes:,}")

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


Kind = Npy | Picture | Number | Decoded | Value | Raw


def kind_of(name: str, first: bytes, wanted: MemberOptions | None = None) -> Kind:
    """How members of a field are read, from its name and the first sample's bytes."""
    wanted = wanted or MemberOptions()
    decoder = wanted.decoder(name)
    extension = name.rsplit(".", 1)[-1]
    if extension == "npy" and decoder is None and b"'fortran_order': True" in first[:HEADER_BYTES]:
        return kind_of(name, first, replace(wanted, decoders={name: decode_npy}))  # no row of it lies in one piece
    if isinstance(decoder, np.dtype):
        return Raw.of(decoder, len(first))
    if isinstance(decoder, str):
        return Value(objects.NAMED[decoder])
    if decoder is not None:
        return _kind_made_by(decoder, first)
    if extension == "npy":
        array = Npy.of(first[:HEADER_BYTES])
        array.check(len(first))
        return array
    if extension in pictures.EXTENSIONS:
        return Picture.of(first, wanted.max_pixels)
    if extension in NUMBERS:
        return Number()
    if extension in objects.PICKLED:
        raise Unsafe(
            f"{name!r} is pickled, and reading it would run code from it; for its bytes, pass "
            f'decoders={{{extension!r}: "bytes"}}'
        )
    return Value(objects.BY_EXTENSION.get(extension, objects.BYTES))


def decoder_of(given: Any) -> MemberDecoder:
    """A decoder as a caller gives it: a function, a name in ``penstock.read.objects``, or the dtype of the bytes."""
    if isinstance(given, str) and given in objects.NAMED:
        return given
    if callable(given) and not (isinstance(given, type) and issubclass(given, np.generic)):
        function: Callable[[bytes], Any] = given
        return function
    try:
        dtype = numpy_dtype(given)
    except (TypeError, ValueError):
        dtype = _OBJECT
    if dtype.base.kind not in "biufc":
        known = ", ".join(map(repr, objects.NAMED))
        raise ConfigError(
            f"decoders: no decoder {given!r}; expected a function of the bytes, one of {known}, or for plain bytes of "
            f'an array its dtype and shape, such as ("float32", (64, 64))'
        )
    return dtype


def is_known(name: str, wanted: MemberOptions | None = None) -> bool:
    """Whether members of this name can be decoded, so that they are read unless fields are chosen."""
    extension = name.rsplit(".", 1)[-1]
    return (
        extension == "npy"
        or extension in pictures.EXTENSIONS
        or extension in NUMBERS
        or extension in objects.BY_EXTENSION
        or (wanted is not None and wanted.decoder(name) is not None)
    )


def why_unknown(name: str) -> str:
    """Why members of this name are left out unless they are named, and how to name them."""
    extension = name.rsplit(".", 1)[-1]
    if extension in objects.PICKLED:
        return f'pickled; decoders={{{extension!r}: "bytes"}} gives the bytes'
    return f"no kind known here; decoders={{{extension!r}: …}} declares it, fields=(…) gives the bytes"


# Memory per stored byte that an object made by the caller's function may take.
VALUE_GROWTH = 40


def _kind_made_by(function: Callable[[bytes], Any], first: bytes) -> Kind:
    made = _call(function, first)
    if isinstance(made, str | bytes | Mapping | list | tuple) or made is None:
        return Value(ObjectDecoder(_name(function), partial(_call, function), VALUE_GROWTH))
    array = np.asarray(made)
    if array.dtype.kind not in "biufc":
        return Value(ObjectDecoder(_name(function), partial(_call, function), VALUE_GROWTH))
    return Decoded(function, array.dtype, array.shape)


def _call(function: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return user_functions.call(function, data)
    except PenstockError:
        raise
    except Exception as error:
        raise DecodeFailed(f"the decoder {_name(function)} raised {type(error).__name__}: {error}") from error


def _name(function: Callable[[bytes], Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


class MemoryFile:
    """Part of a file in memory, which reads like the file."""

    def __init__(self, begin: int, span: np.ndarray) -> None:
        self._begin, self._span = begin, span

    def read_into(self, offset: int, *targets: np.ndarray) -> None:
        at = offset - self._begin
        for target in targets:
            np.copyto(target.reshape(-1).view(np.uint8), self._span[at : at + target.nbytes])
            at += target.nbytes

    def whole(self, offset: int, length: int) -> bytes:
        at = offset - self._begin
        return self._span[at : at + length].tobytes()


def _read_whole(handle: Readable, offset: int, length: int) -> bytes:
    """A member's bytes."""
    if isinstance(handle, MemoryFile):
        return handle.whole(offset, length)
    with borrow(length) as scratch:
        handle.read_into(offset, scratch)
        return scratch.tobytes()
