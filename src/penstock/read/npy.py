"""``.npy``, ``.npz`` and ``.ten``: the one parser of their headers, and arrays from and to bytes.

NumPy's own reader allocates what a header declares, and unpickles what a header calls objects. Neither happens here:
every length is checked against the bytes there are. A header is refused if it is not one (``DecodeFailed``), declares
an impossible shape (``Corrupt``), Python objects (``Unsafe``) or values of no bytes like ``S0`` (``SchemaMismatch``).
"""

import io
import struct
import zipfile
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.errors import Corrupt, DecodeFailed, LimitExceeded, PenstockError, SchemaMismatch, Unsafe
from penstock.files.retry import one_line

MAX_ARRAY_BYTES = 4 << 30
"""The most that a compressed archive may unpack to."""

HEADER_BYTES = 16 * 1024
"""No header is longer: numpy refuses more than 10,000 characters."""

_MAGIC = b"\x93NUMPY"
# The length of the header's text, by version; the third differs from the second only in the encoding of field names.
_LENGTHS = {(1, 0): struct.Struct("<H"), (2, 0): struct.Struct("<I"), (3, 0): struct.Struct("<I")}


@dataclass(frozen=True)
class NpyHeader:
    """The contents of an array's header."""

    dtype: np.dtype
    shape: tuple[int, ...]
    is_fortran: bool
    """In Fortran order, where that differs from C order."""
    length: int
    """Bytes of the header itself; the elements follow."""

    @classmethod
    def parse(cls, data: bytes) -> "NpyHeader":
        """From the first bytes of an array. Parsed headers are remembered: those of samples are the same."""
        return _parse(bytes(data[: min(_declared_end(data) or HEADER_BYTES, HEADER_BYTES)]))

    @classmethod
    def _parse(cls, data: bytes) -> "NpyHeader":
        stream = io.BytesIO(data)
        try:
            version = np.lib.format.read_magic(stream)
            if version not in _LENGTHS:
                raise DecodeFailed(f"npy of version {version}, expected 1.0, 2.0 or 3.0")
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(stream)
        except PenstockError:
            raise
        except Exception as error:  # a header is parsed as a Python literal, and fails in as many ways
            raise DecodeFailed(f"not a whole npy header ({one_line(error)})") from error
        header = cls(dtype, shape, fortran and sum(size > 1 for size in shape) > 1, stream.tell())
        header._check()
        return header

    def _check(self) -> None:
        if not can_be_shape(self.shape, self.dtype):
            raise Corrupt(f"npy of {self}: no array can have that shape, so the header is damaged")
        if self.dtype.hasobject:
            raise Unsafe("npy of Python objects, which only unpickling could read; save numbers instead")
        if self.dtype.itemsize == 0:
            raise SchemaMismatch(f"npy of {self.dtype}, whose values take no bytes; save numbers instead")

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.dtype.itemsize * prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


_parse = lru_cache(maxsize=256)(NpyHeader._parse)


def _declared_end(data: bytes) -> int | None:
    """Where a header that begins so ends; None if it is none, or too short to tell."""
    if len(data) < 12 or (length := _LENGTHS.get((data[6], data[7]))) is None:
        return None
    return 8 + length.size + int(length.unpack_from(data, 8)[0])


def is_cut(data: bytes) -> bool:
    """Whether these bytes, all that there are, end inside an npy header."""
    if len(data) < 12:
        return len(data) < 8 or (data.startswith(_MAGIC) and (data[6], data[7]) in _LENGTHS)
    return data.startswith(_MAGIC) and len(data) < (_declared_end(data) or 0)


def can_be_shape(shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Whether an array in memory could have this shape; numpy counts 0 as 1. If not, the file is damaged."""
    if any(isinstance(size, bool) or size < 0 for size in shape):
        return False
    return prod(max(1, size) for size in shape) * max(1, dtype.itemsize) < 2**63


def decode_npy(data: bytes) -> np.ndarray:
    """One array, in memory of its own."""
    try:
        header = NpyHeader.parse(data)
    except DecodeFailed as error:
        raise DecodeFailed(f"npy of {len(data):,} bytes: {error}") from error
    follow = len(data) - header.length
    if header.nbytes > follow:
        raise DecodeFailed(
            f"npy of {len(data):,} bytes: its header declares {header}, which is {header.nbytes:,} bytes, and "
            f"{follow:,} follow"
        )
    count = prod(header.shape)
    flat = np.frombuffer(data, header.dtype, count, header.length) if count else np.empty(0, header.dtype)
    return flat.reshape(header.shape, order="F" if header.is_fortran else "C").copy(order="K")


def decode_npz(data: bytes, max_bytes: int = MAX_ARRAY_BYTES) -> dict[str, Any]:
    """The arrays of an archive by name; members that are not arrays as bytes."""
    found: dict[str, Any] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            declared = sum(entry.file_size for entry in archive.infolist())
            if declared > max_bytes:
                raise LimitExceeded(
                    f"npz of {len(data):,} bytes declares {declared:,}; at most {max_bytes:,} are unpacked"
                )
            for entry in archive.infolist():
                content = archive.read(entry)
                name = entry.filename.removesuffix(".npy")
                found[name] = decode_npy(content) if content.startswith(_MAGIC) else content
    except PenstockError:
        raise
    except Exception as error:  # zipfile, zlib and struct have a dozen between them
        raise DecodeFailed(f"npz of {len(data):,} bytes: {one_line(error)}") from error
    return found


# A .ten file is a series of chunks: eight letters, a length, and the bytes, padded to a multiple of 64. An array takes
# two: a header of 64-bit numbers (dtype and name as text, dimensions, sizes), and the elements.
TEN_MAGIC = b"~TenBin~"
TEN_ALIGN = 64
TEN_DTYPES = {b"f2", b"f4", b"f8", b"i1", b"i2", b"i4", b"i8", b"u1", b"u2", b"u4", b"u8"}
_LENGTH = struct.Struct("<q")


def decode_ten(data: bytes) -> list[np.ndarray]:
    """The arrays of a tensor file, in order."""
    chunks = list(_ten_chunks(data))
    arrays = []
    for header, content in zip(chunks[::2], chunks[1::2], strict=False):
        name = bytes(header[:8]).rstrip(b"\0")
        numbers = np.frombuffer(header[16:], "<i8", max(len(header) - 16, 0) // 8).tolist()
        shape = numbers[1 : 1 + numbers[0]] if numbers else []
        count = int(np.prod(shape, dtype=object)) if shape else 1
        if name not in TEN_DTYPES or not numbers or len(shape) != numbers[0] or min(shape, default=0) < 0:
            raise DecodeFailed(f"ten of {len(data):,} bytes: an array header that cannot be read")
        dtype = np.dtype(f"<{name.decode()}")
        if count * dtype.itemsize > len(content):
            raise DecodeFailed(f"ten of {len(data):,} bytes: declares {dtype} of shape {tuple(shape)}, has fewer bytes")
        flat = np.frombuffer(content, dtype, count) if count else np.empty(0, dtype)
        arrays.append(flat.reshape(shape).copy())
    if len(chunks) % 2:
        raise DecodeFailed(f"ten of {len(data):,} bytes: an array header without an array")
    return arrays


def _ten_chunks(data: bytes) -> Any:
    at = 0
    while at < len(data):
        if data[at : at + 8] != TEN_MAGIC or at + 16 > len(data):
            raise DecodeFailed(f"ten of {len(data):,} bytes: no chunk at byte {at:,}")
        (length,) = _LENGTH.unpack_from(data, at + 8)
        if length < 0 or at + 16 + length > len(data):
            raise DecodeFailed(f"ten of {len(data):,} bytes: the chunk at byte {at:,} declares {length:,}")
        yield memoryview(data)[at + 16 : at + 16 + length]
        at += 16 + length + -length % TEN_ALIGN


def encode_npy(value: Any) -> bytes:
    """An array, or what makes one."""
    array = np.asarray(value)
    _refuse_objects(array)
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, allow_pickle=False)
    return stream.getvalue()


def encode_npz(arrays: Any) -> bytes:
    """A dict of arrays by name, compressed; the same bytes for the same arrays."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in arrays.items():
            # NumPy's own would note the hour of writing.
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, encode_npy(value))
    return stream.getvalue()


def encode_ten(value: Any) -> bytes:
    """An array, or a list of them."""
    pieces = []
    for each in value if isinstance(value, list | tuple) else [value]:
        array = np.asarray(each, order="C")
        name = array.dtype.str[1:].encode()
        if name not in TEN_DTYPES:
            raise Unsafe(f"ten holds plain numbers, not {array.dtype}; use npy")
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        header = name.ljust(8, b"\0") + bytes(8) + np.array([array.ndim, *array.shape], "<i8").tobytes()
        pieces += [header, little.tobytes()]
    return b"".join(TEN_MAGIC + _LENGTH.pack(len(piece)) + piece + bytes(-len(piece) % TEN_ALIGN) for piece in pieces)


def _refuse_objects(array: np.ndarray) -> None:
    if array.dtype.hasobject:
        raise Unsafe(f"an array of Python objects ({array.dtype}) would have to be pickled; write numbers, or json")
