"""Things of no fixed size: bytes -> one Python value each, delivered in lists.

What a value may take in memory is bounded before it is made: by so many bytes for each byte stored. A value that would
take more is an error. Nothing here unpickles.
"""

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import ConfigError, DecodeFailed, LimitExceeded, PenstockError, Unsafe

# Python's own share of any object.
OBJECT_BYTES = 128


@dataclass(frozen=True)
class Values:
    """How values of one kind are made."""

    name: str
    decode: Callable[[bytes], Any]
    growth: int
    """The most bytes that a value takes for each byte stored."""

    def most_bytes(self, stored: int) -> int:
        """The most that a value made of so many bytes takes."""
        return OBJECT_BYTES + self.growth * stored


def as_text(data: bytes) -> str:
    """UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DecodeFailed(f"text that is not UTF-8 ({error.reason} at byte {error.start:,})") from error


def as_json(data: bytes) -> Any:
    """Whatever JSON can say."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise DecodeFailed("JSON nested too deeply") from error
    except ValueError as error:
        raise DecodeFailed(f"not JSON ({error})") from error


def as_array(data: bytes) -> np.ndarray:
    """An npy file of any shape."""
    try:
        array: np.ndarray = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except ValueError as error:
        if "allow_pickle" in str(error):
            raise Unsafe("npy of Python objects, which only unpickling could read; save numbers instead") from None
        raise DecodeFailed(f"not a whole npy file ({_first_line(error)})") from error
    except Exception as error:  # numpy's parser of headers raises whatever Python's does
        raise DecodeFailed(f"not a whole npy file ({_first_line(error)})") from error
    return array


ARRAYS_GROWTH = 16


def as_arrays(data: bytes) -> dict[str, np.ndarray]:
    """The arrays of an npz file, by name."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            found = archive.infolist()
            expanded, most = sum(each.file_size for each in found), ARRAYS_GROWTH * len(data)
            if expanded > most:
                raise LimitExceeded(
                    f"npz of {len(data):,} bytes that expands to {expanded:,}, more than {ARRAYS_GROWTH} times as "
                    f"much; save it uncompressed, or give a decoder of your own with decoders="
                )
            return {each.filename.removesuffix(".npy"): as_array(archive.read(each)) for each in found}
    except PenstockError:
        raise
    except Exception as error:  # zipfile and what it unpacks with raise a dozen kinds between them
        raise DecodeFailed(f"not a whole npz file ({_first_line(error)})") from error


def as_msgpack(data: bytes) -> Any:
    """Whatever MessagePack can say."""
    try:
        import msgpack
    except ImportError:
        raise ConfigError("decoding msgpack needs its package: pip install msgpack") from None
    try:
        return msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise DecodeFailed(f"not msgpack ({_first_line(error)})") from error


# A text with one rare letter has four bytes a letter. Of what JSON can say, lists in lists take most: 88 bytes for two;
# of msgpack, dicts in dicts: 232 for two.
BYTES = Values("bytes", bytes, 1)
TEXT = Values("text", as_text, 4)
JSON = Values("json", as_json, 48)
MSGPACK = Values("msgpack", as_msgpack, 128)
ARRAY = Values("array", as_array, 2)
ARRAYS = Values("arrays", as_arrays, 2 * ARRAYS_GROWTH)

NAMED = {values.name: values for values in (BYTES, TEXT, JSON, MSGPACK, ARRAY, ARRAYS)}
"""What a caller may ask for by name."""

BY_EXTENSION = {"txt": TEXT, "text": TEXT, "transcript": TEXT, "json": JSON, "jsn": JSON, "npz": ARRAYS}

PICKLED = frozenset({"pyd", "pickle", "pkl", "pth", "pt"})
"""Extensions of files that only running their contents could read."""


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
