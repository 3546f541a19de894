"""Parses the metadata of Zarr arrays, versions 2 and 3. Pure: JSON in, a frozen value out.

Unknown features are not an error: ``why`` then names the feature, and zarr-python reads the array.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.dataset.held_values import HOLDS
from penstock.errors import Corrupt
from penstock.read.chunk_files import ShardIndex
from penstock.read.codecs import BY_ZARR_NAME, COMPRESSORS
from penstock.read.extents import CodecId

DTYPES = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}

OF_ARRAYS = {
    *("zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs"),
    *("attributes", "dimension_names", "storage_transformers"),
}
"""What version 3 knows of an array."""

SETTINGS = {
    "bytes": {"endian"}, "transpose": {"order"}, "crc32c": set(), "gzip": {"level"}, "zstd": {"level", "checksum"},
    "blosc": {"typesize", "cname", "clevel", "shuffle", "blocksize"},
    "sharding_indexed": {"chunk_shape", "codecs", "index_codecs", "index_location"},
}  # fmt: skip
"""The options of version 3 codecs."""

# How much a compressor can lengthen incompressible bytes at most: deflate's bound is the largest.
MOST_LONGER = (7, 4096)  # by a seventh, and this many bytes


class NotUnderstood(Exception):
    """The array has a feature that only zarr-python can read."""


@dataclass(frozen=True)
class ZarrArray:
    """One array, as described by its metadata."""

    shape: tuple[int, ...]
    stored: np.dtype | None
    """None if its elements are not numbers."""
    kind: str
    """The data type as written in the metadata."""
    outer: tuple[int, ...] = ()
    """The shape of what one file holds: a chunk or a shard."""
    why: str = ""
    """Why only zarr-python can read it; otherwise empty."""
    chunk: tuple[int, ...] = ()
    """The shape of what is decoded at once: a chunk, or one chunk of a shard."""
    codecs: tuple[CodecId, ...] = ()
    axes: tuple[int, ...] | None = None
    fill: bytes | None = None
    """None if the metadata have no fill value."""
    index: ShardIndex | None = None
    before: str = ""
    separator: str = "."
    holds: str = ""
    """What its texts are, if it is declared: ``text`` or ``json``."""

    @property
    def files(self) -> tuple[int, ...]:
        """Chunks or shards along each axis."""
        inside = self.index.chunks if self.index else (1,) * len(self.shape)
        return tuple(
            -(-size // (step * count)) for size, step, count in zip(self.shape, self.chunk, inside, strict=True)
        )

    @property
    def chunk_bytes(self) -> int:
        assert self.stored is not None
        return int(self.stored.itemsize * np.prod(self.chunk, dtype=object))

    @property
    def fill_element(self) -> bytes:
        """The element that stands for what was never written; 0 if the metadata have none."""
        assert self.stored is not None
        return bytes(self.stored.itemsize) if self.fill is None else self.fill

    @property
    def fill_text(self) -> str:
        return str(np.frombuffer(self.fill_element, self.stored)[0])

    @property
    def longest(self) -> int:
        """The most bytes that a chunk can be stored in."""
        sums = 4 * sum(name == "crc32c" for name, _ in self.codecs)
        if not any(name in COMPRESSORS for name, _ in self.codecs):
            return self.chunk_bytes + sums
        return self.chunk_bytes + self.chunk_bytes // MOST_LONGER[0] + MOST_LONGER[1] + sums


def parse(text: bytes, where: str) -> dict[str, Any]:
    """JSON, as every document of a Zarr store is."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{where}: not whole JSON ({error}); restore the file, or the whole array") from None
    if not isinstance(found, dict):
        raise Corrupt(f"{where}: expected a JSON object, found {type(found).__name__}; restore the file")
    return found


def zarr_array(document: dict[str, Any], where: str) -> ZarrArray:
    """An array from ``.zarray`` (version 2) or ``zarr.json`` (version 3)."""
    version = document.get("zarr_format") if isinstance(document, dict) else None
    if version not in (2, 3):
        raise Corrupt(f"{where}: zarr_format is {version!r}, expected 2 or 3")
    if version == 3 and document.get("node_type") != "array":
        raise Corrupt(f"{where}: node_type is {document.get('node_type')!r}, expected 'array'")
    try:
        plain = _parse_common(document, version)
        if plain.stored is None:
            return plain
        try:
            return _parse_version2(document, plain) if version == 2 else _parse_version3(document, plain)
        except NotUnderstood as error:
            return replace(plain, why=str(error))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        text = f"{type(error).__name__}: {error}"
        raise Corrupt(f"{where}: not the metadata of a Zarr array ({text}); restore the file") from None


def _parse_common(document: dict[str, Any], version: int) -> ZarrArray:
    shape = _parse_sizes(document["shape"], least=0)
    kind = document["dtype"] if version == 2 else document["data_type"]
    if version == 3:
        grid = document["chunk_grid"]
        outer = _parse_sizes(grid["configuration"]["chunk_shape"], least=1) if grid["name"] == "regular" else shape
        stored = np.dtype(kind) if isinstance(kind, str) and kind in DTYPES else None
        return ZarrArray(shape, stored, str(kind), outer, holds=_parse_holds(document) if kind == "string" else "")
    outer = _parse_sizes(document["chunks"], least=1)
    try:
        stored = np.dtype(kind) if isinstance(kind, str) else None
    except TypeError:
        stored = None
    return ZarrArray(shape, stored if stored is not None and stored.kind in "biufc" else None, str(kind), outer)


def _parse_holds(document: dict[str, Any]) -> str:
    about = document.get("attributes")
    holds = about.get(HOLDS) if isinstance(about, dict) and len(document["shape"]) == 1 else None
    return str(holds) if holds in ("text", "json") else ""


def _parse_version2(document: dict[str, Any], array: ZarrArray) -> ZarrArray:
    assert array.stored is not None
    chunk = array.outer
    encoders = [*(document.get("filters") or []), *([document["compressor"]] if document["compressor"] else [])]
    names = [(each["id"], each) for each in encoders]
    order = document.get("order", "C")
    axes = tuple(reversed(range(len(chunk)))) if order == "F" and len(chunk) > 1 else None
    fill = document.get("fill_value")
    return _check(
        replace(
            array,
            chunk=chunk,
            codecs=_parse_codecs(names),
            axes=axes,
            fill=None if fill is None else _parse_fill(fill, array.stored),
            separator=document.get("dimension_separator", "."),
        )
    )


def _parse_version3(document: dict[str, Any], array: ZarrArray) -> ZarrArray:
    assert array.stored is not None
    for name in document.keys() - OF_ARRAYS:
        if not isinstance(document[name], dict) or document[name].get("must_understand") is not False:
            raise NotUnderstood(f"it has an extension {name!r}")
    grid, naming = document["chunk_grid"], document["chunk_key_encoding"]
    if grid["name"] != "regular":
        raise NotUnderstood(f"its chunks form a grid of kind {grid['name']!r}")
    if document.get("storage_transformers"):
        raise NotUnderstood("it has storage transformers")
    if naming["name"] not in ("default", "v2"):
        raise NotUnderstood(f"its chunks are named by {naming['name']!r}")
    separator = naming.get("configuration", {}).get("separator", "/" if naming["name"] == "default" else ".")
    array = replace(
        array,
        chunk=array.outer,
        before=f"c{separator}" if naming["name"] == "default" else "",
        separator=separator,
    )
    array = _add_codecs(array, document["codecs"])
    assert array.stored is not None
    return _check(replace(array, fill=_parse_fill(document["fill_value"], array.stored)))


def _add_codecs(array: ZarrArray, codecs: Sequence[Any]) -> ZarrArray:
    """Add the chain of codecs: transpose, then bytes (or shards of chunks), then compression."""
    steps = [(step, {}) if isinstance(step, str) else (step["name"], step.get("configuration", {})) for step in codecs]
    for name, configuration in steps:
        if unknown := sorted(configuration.keys() - SETTINGS.get(name, configuration.keys())):
            raise NotUnderstood(f"its codec {name!r} has a setting {unknown[0]!r}")
    axes = tuple(range(len(array.chunk)))
    while steps and steps[0][0] == "transpose":
        order = steps.pop(0)[1]["order"]
        if sorted(order) != sorted(axes):
            raise NotUnderstood(f"it is transposed by {order!r}")
        axes = tuple(axes[axis] for axis in order)
    if axes != tuple(range(len(array.chunk))):
        array = replace(array, axes=axes)
    if not steps:
        raise NotUnderstood("it has no codec from arrays to bytes")
    (name, configuration), *rest = steps
    if name == "sharding_indexed":
        if rest or array.axes or array.index:
            raise NotUnderstood("its shards are compressed as a whole, transposed, or nested")
        return _add_shards(array, configuration)
    if name != "bytes":
        raise NotUnderstood(f"its codec {name!r} has no decoder here")
    assert array.stored is not None
    stored = np.dtype(_byte_order(configuration) + array.stored.str[1:])
    return replace(array, stored=stored, codecs=_parse_codecs(rest))


def _byte_order(configuration: dict[str, Any]) -> str:
    return {"little": "<", "big": ">"}[configuration.get("endian") or "little"]


def _add_shards(array: ZarrArray, configuration: dict[str, Any]) -> ZarrArray:
    inner = _parse_sizes(configuration["chunk_shape"], least=1)
    if len(inner) != len(array.chunk) or any(outer % step for outer, step in zip(array.chunk, inner, strict=True)):
        raise ValueError(f"shards of {array.chunk} cannot be made of chunks of {inner}")
    count = tuple(outer // step for outer, step in zip(array.chunk, inner, strict=True))
    location = configuration.get("index_location", "end")
    if location not in ("start", "end"):
        raise ValueError(f"index_location is {location!r}")
    first, *checks = configuration["index_codecs"]
    if first["name"] != "bytes" or [each["name"] for each in checks] not in ([], ["crc32c"]):
        raise NotUnderstood("the indices of its shards are stored in an unusual way")
    index = ShardIndex(count, location == "end", _byte_order(first.get("configuration", {})), bool(checks))
    return _add_codecs(replace(array, chunk=inner, index=index), configuration["codecs"])


def _parse_codecs(steps: Sequence[tuple[str, dict[str, Any]]]) -> tuple[CodecId, ...]:
    """The codecs from bytes to bytes: shuffles, then one compressor, then checksums; each is optional."""
    found: list[CodecId] = []
    stages: list[int] = []
    for full, configuration in steps:
        name = full.removeprefix("numcodecs.")
        if name == "shuffle":
            width = configuration.get("elementsize", 4)
            found.append(("shuffle", int(width)))
            stages.append(0)
        elif BY_ZARR_NAME.get(name) in COMPRESSORS:
            found.append((BY_ZARR_NAME[name], 0))
            stages.append(1)
        elif full == "crc32c" and "id" not in configuration:
            found.append(("crc32c", 0))
            stages.append(2)
        else:
            raise NotUnderstood(f"its codec {full!r} has no decoder here")
    if stages != sorted(stages) or stages.count(1) > 1:
        raise NotUnderstood(f"its codecs are in an unusual order: {', '.join(name for name, _ in steps)}")
    return tuple(found)


def _check(array: ZarrArray) -> ZarrArray:
    if len(array.chunk) != len(array.shape):
        raise ValueError(f"chunks of {array.chunk} in an array of shape {array.shape}")
    if array.separator not in (".", "/"):
        raise ValueError(f"the separator is {array.separator!r}")
    assert array.stored is not None
    if any(name == "shuffle" and array.chunk_bytes % width for name, width in array.codecs):
        raise NotUnderstood("its chunks are shuffled by a width that does not divide their size")
    return array


def _parse_sizes(sizes: Any, least: int) -> tuple[int, ...]:
    if not isinstance(sizes, list) or any(type(size) is not int or not least <= size < 2**62 for size in sizes):
        raise ValueError(f"{sizes!r} is not a shape")
    return tuple(sizes)


_WORDS = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}


def _parse_fill(value: Any, stored: np.dtype) -> bytes:
    """The fill value as it would be stored."""
    if stored.kind == "c":
        half = np.dtype(f"{stored.byteorder}f{stored.itemsize // 2}")
        parts = value if isinstance(value, list) else [value, 0]
        real, imaginary = (_parse_fill(part, half) for part in parts)
        return real + imaginary
    if stored.kind == "f" and isinstance(value, str):
        if value in _WORDS:
            return np.asarray(_WORDS[value], stored).tobytes()
        if value.startswith("0x"):  # the bits of it
            bits = int(value, 16).to_bytes(stored.itemsize, "big")
            return np.frombuffer(bits, stored.newbyteorder(">")).astype(stored).tobytes()
    if isinstance(value, str | list | dict) or value is None:
        raise NotUnderstood(f"its fill value is {value!r}")
    return np.array(value, stored).tobytes()
