"""Bytes of ``.npy``, ``.npz`` and ``.ten`` -> arrays, with every length checked against the bytes there are.

NumPy's own reader allocates what a header declares, and unpickles what a header calls objects; neither happens here.
"""

import io
import struct
import zipfile
from typing import Any

import numpy as np

from penstock.errors import DecodeFailed, LimitExceeded, PenstockError, Unsafe

MAX_ARRAY_BYTES = 4 << 30
"""What a compressed archive may unpack to."""


def decode_npy(data: bytes) -> np.ndarray:
    """One array, in memory of its own."""
    stream = io.BytesIO(data)
    shape, fortran, dtype = _npy_header(stream, len(data))
    if dtype.hasobject:
        raise Unsafe(
            "npy of Python objects, which only unpickling could read; save numbers instead, or give decode() a decoder "
            "of your own for it"
        )
    begin = stream.tell()
    count = 1
    for length in shape:
        count *= length
    if min(shape, default=0) < 0 or count * dtype.itemsize > len(data) - begin:
        raise DecodeFailed(
            f"npy of {len(data):,} bytes: its header declares {dtype} of shape {shape}, which is "
            f"{count * dtype.itemsize:,} bytes, and {len(data) - begin:,} follow"
        )
    flat = np.frombuffer(data, dtype, count, begin) if count else np.empty(0, dtype)
    return flat.reshape(shape, order="F" if fortran else "C").copy(order="K")


def _npy_header(stream: io.BytesIO, length: int) -> tuple[tuple[int, ...], bool, np.dtype]:
    try:
        version = np.lib.format.read_magic(stream)
        # The third version differs from the second only in how it writes names of fields.
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise DecodeFailed(f"npy of {length:,} bytes: version {version} of the format is not known")
        return read(stream)
    except PenstockError:
        raise
    except Exception as error:  # a header is parsed as Python's literals, and fails in as many ways
        raise DecodeFailed(f"npy of {length:,} bytes: {_first_line(error)}") from error


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
                found[name] = decode_npy(content) if content.startswith(b"\x93NUMPY") else content
    except PenstockError:
        raise
    except Exception as error:  # zipfile, zlib and struct have a dozen between them
        raise DecodeFailed(f"npz of {len(data):,} bytes: {_first_line(error)}") from error
    return found


# A .ten file is chunks: eight letters, a length, and the bytes, filled up to a multiple of 64. Arrays take two each: a
# header of 64-bit numbers (dtype and name as text, dimensions, sizes), and the elements.
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


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
