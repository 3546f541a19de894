"""Values of no fixed size: text, JSON, bytes, and arrays of one axis whose lengths differ.

A chunk of them is the number of values, and for each its length and its bytes: what Zarr calls ``vlen-utf8``. HDF5 and
Parquet have types of their own for them, into which such chunks are unpacked.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.spec import FieldSpec
from penstock.errors import ConfigError, SchemaMismatch

HOLDERS = {
    "text": ("zarr", "hdf5", "parquet", "tar", "lmdb"), "json": ("zarr", "hdf5", "parquet", "tar", "lmdb"),
    "bytes": ("hdf5", "parquet", "tar", "lmdb"), "array": ("hdf5", "parquet", "tar", "lmdb"),
    "arrays": ("tar", "lmdb"), "msgpack": ("tar", "lmdb"),
}  # fmt: skip
"""The formats that can hold values of a kind."""

_COUNT = struct.Struct("<I")


@dataclass(frozen=True)
class ValueKind:
    """What the values of a field are."""

    holds: str
    dtype: str = ""
    """Of arrays."""
    ends_at_zero: bool = False
    """Whether a zero byte would end a text, as it does in HDF5."""

    @property
    def is_text(self) -> bool:
        return self.holds in ("text", "json")


def check_values(name: str, spec: FieldSpec, format_: str) -> None:
    """Refuse values that a format has no place for."""
    holders = HOLDERS.get(spec.holds, ())
    if format_ in holders:
        return
    if not holders:
        raise ConfigError(
            f"field {name!r} is what the decoder {spec.holds} makes, and nothing is known that could write it. Leave "
            f'it out with ds.only(…), or open it with decoders={{{name!r}: "bytes"}}'
        )
    others = ", ".join(f".{each}" for each in ("zarr", "h5", "parquet", "tar", "lmdb") if _format(each) in holders)
    raise ConfigError(
        f"field {name!r} is {spec}: {format_} cannot hold it. Leave it out with ds.only(…) (--fields), or write "
        f"{others}"
    )


def _format(suffix: str) -> str:
    return "hdf5" if suffix == "h5" else suffix


def kind_of_values(name: str, spec: FieldSpec, first: Sequence[Any], format_: str) -> ValueKind:
    """The kind of a field; arrays are looked at, for their files do not say what they hold."""
    check_values(name, spec, format_)
    if spec.holds != "array" or format_ in ("tar", "lmdb"):
        return ValueKind(spec.holds, ends_at_zero=format_ == "hdf5" and spec.holds == "text")
    array = np.asarray(first[0])
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        raise ConfigError(
            f"field {name!r} holds arrays of unequal size, the first {array.dtype} of shape {array.shape}: {format_} "
            f"can hold such arrays of numbers with one axis. Leave it out with ds.only(…) (--fields), or write .tar"
        )
    return ValueKind("array", array.dtype.newbyteorder("=").str)


def encode_value(kind: ValueKind, value: Any) -> bytes:
    """One value as bytes."""
    if kind.holds == "array":
        return _array_bytes(kind, np.asarray(value))
    if kind.holds == "json":
        return json.dumps(value, ensure_ascii=False).encode()
    raw = value.encode() if isinstance(value, str) else bytes(value)
    if kind.ends_at_zero and b"\0" in raw:
        raise SchemaMismatch(
            f"a text has a zero byte in it, at which HDF5 would end it: {value!r:.80}. Remove it (ds.map), or write "
            f".zarr, .parquet or .tar"
        )
    return raw


def _array_bytes(kind: ValueKind, array: np.ndarray) -> bytes:
    if array.ndim != 1 or array.dtype.newbyteorder("=").str != kind.dtype:
        raise SchemaMismatch(
            f"a sample is {array.dtype} of shape {array.shape}, but the first is {np.dtype(kind.dtype)} with one axis, "
            f"and all must be alike here. Write .tar, which takes any"
        )
    return array.astype(kind.dtype, copy=False).tobytes()


def pack(kind: ValueKind, values: Sequence[Any], count: int) -> bytes:
    """A chunk of ``count`` values; those that are missing at its end are empty."""
    packed = bytearray(_COUNT.pack(count))
    for value in values:
        raw = encode_value(kind, value)
        packed += _COUNT.pack(len(raw))
        packed += raw
    packed += _COUNT.pack(0) * (count - len(values))
    return bytes(packed)


def unpack(chunk: bytes) -> Iterator[bytes]:
    """The values of a chunk, those at its end that are only there to fill it included."""
    (count,), at = _COUNT.unpack_from(chunk), _COUNT.size
    for _ in range(count):
        (length,) = _COUNT.unpack_from(chunk, at)
        yield chunk[at + _COUNT.size : at + _COUNT.size + length]
        at += _COUNT.size + length


def plain_values(kind: ValueKind, raws: Iterable[bytes]) -> list[Any]:
    """Values as a library of tables or arrays takes them."""
    if kind.is_text:
        return [raw.decode() for raw in raws]
    dtype = np.dtype(kind.dtype or np.uint8)
    return [np.frombuffer(raw, dtype) for raw in raws]
