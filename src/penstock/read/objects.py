"""Python objects of no fixed size, decoded from bytes and delivered in lists.

The memory of an object is limited before it is made, by a number of bytes per stored byte. An object that would take
more is an error. Nothing here unpickles.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.errors import ConfigError, DecodeFailed, LimitExceeded
from penstock.files.retry import one_line
from penstock.read.npy import decode_npy, decode_npz

# What Python itself takes per object.
OBJECT_BYTES = 128


@dataclass(frozen=True)
class ObjectDecoder:
    """How objects of one kind are decoded."""

    name: str
    decode: Callable[[bytes], Any]
    growth: int
    """The most bytes of memory per byte stored."""

    def most_bytes(self, stored: int) -> int:
        """The most memory that an object decoded from ``stored`` bytes takes."""
        return OBJECT_BYTES + self.growth * stored


def as_text(data: bytes) -> str:
    """UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DecodeFailed(f"text that is not UTF-8 ({error.reason} at byte {error.start:,})") from error


def as_json(data: bytes) -> Any:
    """Any JSON document."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise DecodeFailed("JSON nested too deeply") from error
    except ValueError as error:
        raise DecodeFailed(f"not JSON ({error})") from error


ARRAYS_GROWTH = 16


def as_arrays(data: bytes) -> dict[str, np.ndarray]:
    """The arrays of an npz file, by name."""
    try:
        found = decode_npz(data, max_bytes=ARRAYS_GROWTH * len(data))
    except LimitExceeded as error:
        raise LimitExceeded(
            f"{error} ({ARRAYS_GROWTH} times as much); save it uncompressed, or give a decoder of your own with "
            f"decoders="
        ) from error
    for name, array in found.items():
        if not isinstance(array, np.ndarray):
            raise DecodeFailed(f"npz of {len(data):,} bytes: {name!r:.200} is not an array")
    return found


def as_msgpack(data: bytes) -> Any:
    """Any MessagePack document."""
    try:
        import msgpack
    except ImportError:
        raise ConfigError("decoding msgpack needs its package: pip install msgpack") from None
    try:
        return msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise DecodeFailed(f"not msgpack ({one_line(error)})") from error


def as_vector(data: bytes, dtype: np.dtype) -> np.ndarray:
    """The plain bytes of an array with one axis."""
    if len(data) % dtype.itemsize:
        raise DecodeFailed(f"{len(data):,} bytes, which is not a whole number of {dtype} ({dtype.itemsize} each)")
    return np.frombuffer(data, dtype).copy()


def vector_decoder(dtype: Any) -> "ObjectDecoder":
    """Of arrays with one axis and different lengths."""
    return ObjectDecoder("array", partial(as_vector, dtype=np.dtype(dtype)), 1)


# A text with one rare letter takes four bytes per letter. In JSON, lists in lists take most: 88 bytes for two; in
# msgpack, dicts in dicts: 232 for two.
BYTES = ObjectDecoder("bytes", bytes, 1)
TEXT = ObjectDecoder("text", as_text, 4)
JSON = ObjectDecoder("json", as_json, 48)
MSGPACK = ObjectDecoder("msgpack", as_msgpack, 128)
ARRAY = ObjectDecoder("array", decode_npy, 2)
ARRAYS = ObjectDecoder("arrays", as_arrays, 2 * ARRAYS_GROWTH)

NAMED = {values.name: values for values in (BYTES, TEXT, JSON, MSGPACK, ARRAY, ARRAYS)}
"""Names that ``decoders=`` accepts."""

BY_EXTENSION = {"txt": TEXT, "text": TEXT, "transcript": TEXT, "json": JSON, "jsn": JSON, "npz": ARRAYS}

PICKLED = frozenset({"pyd", "pickle", "pkl", "pth", "pt"})
"""Extensions of files that can be read only by running code in them."""
