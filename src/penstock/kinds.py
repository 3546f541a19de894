"""Kinds of members, the files inside an archive: their bytes -> one element of a batch, into memory the caller owns.

What the first sample holds is what all must hold: another dtype, shape or size is an error that names both. Text and
other things of no fixed size are Python values instead, one a sample.
"""

import io
import re
import struct
import tokenize
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Protocol

import numpy as np

from penstock import pictures, values
from penstock.errors import (
    ConfigError,
    Corrupt,
    DataError,
    DecodeFailed,
    LimitExceeded,
    SchemaMismatch,
    Unsafe,
)
from penstock.memory import aligned, borrow
from penstock.picture_headers import read_header
from penstock.pictures import MAX_PIXELS, Fit
from penstock.values import Values

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

_UINT8, _INT64, _OBJECT = np.dtype(np.uint8), np.dtype(np.int64), np.dtype(object)

Decoder = str | Callable[[bytes], Any] | np.dtype
"""A function of the bytes, the name of one in ``penstock.values``, or what the bytes are an array of."""
Decoders = Mapping[str, Any]
"""The caller's own, by field or extension: see ``decoder_of``."""


MAX_MEMBER_BYTES = 4 << 30
"""A member is held in memory; one of more than this is taken for a mistake, or for an attack."""


@dataclass(frozen=True)
class Wanted:
    """What the caller of ``open`` asked of members."""

    size: tuple[int, int] | None = None
    """Height and width that pictures are brought to."""
    fit: Fit = "resize"
    max_pixels: int = MAX_PIXELS
    max_member_bytes: int = MAX_MEMBER_BYTES
    decoders: Mapping[str, Decoder] = field(default_factory=dict)

    def decoder(self, name: str) -> Decoder | None:
        """The caller's own for a field: of its whole name, or of the longest of its extensions that has one."""
        while name not in self.decoders:
            _, dot, name = name.partition(".")
            if not dot:
                return None
        return self.decoders[name]


def check_length(length: int, most: int) -> None:
    """Refuse a member of more bytes than may be held."""
    if length > most:
        raise LimitExceeded(f"{length:,} bytes, more than max_member_bytes={most:,}; raise that if it is meant")


class Readable(Protocol):
    """A file, or part of one that is in memory."""

    def read_into(self, offset: int, *targets: np.ndarray) -> None:
        """Fill ``targets`` one after another from ``offset`` on."""


# A kind of member knows its ``dtype`` and ``shape``; ``scratch_bytes(longest)``, what reading one borrows; and
# ``read(handle, offset, length, goal)``, which puts one into ``goal``, an array of that dtype and shape. ``Value`` has
# ``value(handle, offset, length)`` in its place.


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

    def read(self, handle: Readable, offset: int, length: int, goal: np.ndarray) -> None:
        with borrow(len(self.head)) as head:
            if length == len(self.head) + self.bytes:
                handle.read_into(offset, head, goal)
                if head.tobytes() == self.head:
                    return
            handle.read_into(offset + self._other_head(handle, offset, length), goal)

    def _other_head(self, handle: Readable, offset: int, length: int) -> int:
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
    fit: Fit | None = None
    """How pictures of other sizes are brought to this one; None refuses them."""
    largest: int = 0
    """Pixels of the largest before it is fitted."""

    @classmethod
    def of(cls, data: bytes, max_pixels: int) -> "Picture":
        """From a whole member."""
        header = pictures.checked_header(data, max_pixels)
        if header is not None:
            return cls((header.height, header.width, 3))
        return cls(pictures.decode(data, max_pixels=max_pixels).shape)

    @property
    def pixels(self) -> int:
        return self.shape[0] * self.shape[1]

    def scratch_bytes(self, longest: int) -> int:
        fitted = 2 * aligned(self.pixels * 4) if self.fit else 0
        return 2 * aligned(longest) + aligned(PIXEL_BYTES * max(self.pixels, self.largest)) + fitted

    def read(self, handle: Readable, offset: int, length: int, goal: np.ndarray) -> None:
        data = _whole(handle, offset, length)
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
        text = _whole(handle, offset, length)
        if not _WHOLE_NUMBER.fullmatch(text):
            raise DecodeFailed(f"{text[:40]!r} is not a whole number")
        try:
            goal[...] = int(text)
        except OverflowError:
            raise DecodeFailed(f"{text[:40]!r} does not fit 64 bits") from None


@dataclass(frozen=True)
class Decoded:
    """An array that a function of the caller's makes, always of one dtype and shape."""

    function: Callable[[bytes], Any]
    dtype: np.dtype
    shape: tuple[int, ...]

    def scratch_bytes(self, longest: int) -> int:
        return 2 * aligned(longest) + 3 * aligned(self.dtype.itemsize * prod(self.shape))

    def read(self, handle: Readable, offset: int, length: int, goal: np.ndarray) -> None:
        made = np.asarray(_called(self.function, _whole(handle, offset, length)))
        if (made.dtype, made.shape) != (self.dtype, self.shape):
            raise SchemaMismatch(
                f"{_name(self.function)} made {made.dtype} of shape {made.shape} of it, but {self.dtype} of shape "
                f"{self.shape} of the first sample's"
            )
        np.copyto(goal, made)


@dataclass(frozen=True)
class Value:
    """A Python value of any size."""

    values: Values
    dtype: np.dtype = _OBJECT
    shape: tuple[int, ...] = ()

    def scratch_bytes(self, longest: int) -> int:
        return 2 * aligned(longest)

    def value(self, handle: Readable, offset: int, length: int) -> Any:
        return self.values.decode(_whole(handle, offset, length))


@dataclass(frozen=True)
class Raw:
    """The bytes of an array and nothing else; the caller said what they mean."""

    dtype: np.dtype
    shape: tuple[int, ...]
    head: ClassVar[bytes] = b""

    @classmethod
    def of(cls, declared: np.dtype, length: int) -> "Raw":
        """A dtype that comes without a shape makes a vector of what is there, or one number."""
        base, shape = declared.base, declared.shape
        if not shape and length != base.itemsize:
            if length % base.itemsize:
                raise SchemaMismatch(f"{length:,} bytes, which is no whole number of {base} ({base.itemsize} each)")
            shape = (length // base.itemsize,)
        kind = cls(base, shape)
        kind.check(length)
        return kind

    @cached_property
    def bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)

    def scratch_bytes(self, longest: int) -> int:
        return 0

    def read(self, handle: Readable, offset: int, length: int, goal: np.ndarray) -> None:
        self.check(length)
        handle.read_into(offset, goal)

    def check(self, length: int) -> None:
        """Refuse a member of another size."""
        if length != self.bytes:
            raise SchemaMismatch(f"{length:,} bytes, but {self} takes {self.bytes:,}")

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


Kind = Npy | Picture | Number | Decoded | Value | Raw


def kind_of(name: str, first: bytes, wanted: Wanted | None = None) -> Kind:
    """How members of a field are read, from its name and the first sample's bytes."""
    wanted = wanted or Wanted()
    decoder = wanted.decoder(name)
    extension = name.rsplit(".", 1)[-1]
    if isinstance(decoder, np.dtype):
        return Raw.of(decoder, len(first))
    if isinstance(decoder, str):
        return Value(values.NAMED[decoder])
    if decoder is not None:
        return _made_by(decoder, first)
    if extension == "npy":
        array = Npy.of(first[:HEAD_BYTES])
        array.check(len(first))
        return array
    if extension in pictures.EXTENSIONS:
        return Picture.of(first, wanted.max_pixels)
    if extension in NUMBERS:
        return Number()
    if extension in values.PICKLED:
        raise Unsafe(
            f"{name!r} is pickled, and reading it would run what it says; for its bytes as they are, pass "
            f'decoders={{{extension!r}: "bytes"}}'
        )
    return Value(values.BY_EXTENSION.get(extension, values.BYTES))


def decoder_of(given: Any) -> Decoder:
    """What a caller may give: a function, the name of one of ``penstock.values``, or what the bytes are an array of."""
    if isinstance(given, str) and given in values.NAMED:
        return given
    if callable(given) and not (isinstance(given, type) and issubclass(given, np.generic)):
        function: Callable[[bytes], Any] = given
        return function
    try:
        dtype: np.dtype = np.dtype(given)
    except (TypeError, ValueError):
        dtype = _OBJECT
    if dtype.base.kind not in "biufc":
        known = ", ".join(map(repr, values.NAMED))
        raise ConfigError(
            f"decoders: no decoder {given!r}; expected a function of the bytes, one of {known}, or for plain bytes of "
            f'an array its dtype and shape, such as ("float32", (64, 64))'
        )
    return dtype


def is_known(name: str, wanted: Wanted | None = None) -> bool:
    """Whether it is known what members of this name hold, so that they are read unless fields are chosen."""
    extension = name.rsplit(".", 1)[-1]
    return (
        extension == "npy"
        or extension in pictures.EXTENSIONS
        or extension in NUMBERS
        or extension in values.BY_EXTENSION
        or (wanted is not None and wanted.decoder(name) is not None)
    )


# What a function of the caller's may make of a byte, where it makes neither an array nor a number.
VALUE_GROWTH = 40


def _made_by(function: Callable[[bytes], Any], first: bytes) -> Kind:
    made = _called(function, first)
    if isinstance(made, str | bytes | Mapping | list | tuple) or made is None:
        return Value(Values(_name(function), _Calling(function), VALUE_GROWTH))
    array = np.asarray(made)
    if array.dtype.kind not in "biufc":
        return Value(Values(_name(function), _Calling(function), VALUE_GROWTH))
    return Decoded(function, array.dtype, array.shape)


@dataclass(frozen=True)
class _Calling:
    """A caller's function, whose errors are those of the data."""

    function: Callable[[bytes], Any]

    def __call__(self, data: bytes) -> Any:
        return _called(self.function, data)


def _called(function: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return function(data)
    except DataError:
        raise
    except Exception as error:
        raise DecodeFailed(f"the decoder {_name(function)} raised {type(error).__name__}: {error}") from error


def _name(function: Callable[[bytes], Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


class Held:
    """Part of a file in memory, read as the file would be."""

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


def _whole(handle: Readable, offset: int, length: int) -> bytes:
    """A member's bytes."""
    if isinstance(handle, Held):
        return handle.whole(offset, length)
    with borrow(length) as scratch:
        handle.read_into(offset, scratch)
        return scratch.tobytes()
