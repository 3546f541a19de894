"""Values -> bytes of a chunk, and a file of many chunks with an index at its end: Zarr's shard."""

import zlib
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from penstock.base.sizes import MiB
from penstock.conversion.cut import Cut
from penstock.conversion.values import pack
from penstock.conversion.work import OutputFile, read_at
from penstock.errors import ConfigError, ConvertFailed

LEVELS = {"zstd": 1, "gzip": 1, "blosc": 5}
"""What each compression uses: quick ones, for data are written once and read many times."""
BLOSC = {"compressor": "lz4", "shuffle": 2}
"""Measured on noise of 16 bits: with bits shuffled, lz4 makes it smaller than zstd does, and decodes three times as
fast. Data with long repetitions become smaller by zstd."""

# Measured: the tables of a compressor.
CODEC_BYTES = 8 * MiB
GROUP_BYTES = 1 * MiB
"""Chunks are written together up to about this: rows of 4 KiB that are chunks would take a call each."""

Encode = Callable[[memoryview], Any]
Decode = Callable[[Any], Any]


def coder(compression: str, width: int) -> tuple[Encode, Decode]:
    """How a chunk of elements of ``width`` bytes is compressed, and the way back."""
    if compression == "none":
        return memoryview, memoryview
    if compression == "gzip":
        return lambda data: zlib.compress(data, LEVELS["gzip"]), zlib.decompress
    codecs = _needed("imagecodecs")
    if compression == "zstd":
        return lambda data: codecs.zstd_encode(data, level=LEVELS["zstd"]), codecs.zstd_decode

    def encode(data: memoryview) -> Any:
        values = np.frombuffer(data, f"u{shuffled_bytes(width)}")  # blosc takes the width from the array
        return codecs.blosc_encode(values, level=LEVELS["blosc"], numthreads=1, **BLOSC)

    return encode, lambda data: codecs.blosc_decode(data, numthreads=1)


def shuffled_bytes(width: int) -> int:
    """The bytes of an element among which blosc shuffles bits; a complex number is shuffled by its halves."""
    return min(width, 8)


def checksum(data: Any) -> bytes:
    """Zarr's crc32c."""
    readonly = np.frombuffer(data, np.uint8)
    readonly.flags.writeable = False  # it takes no other
    found: int = _needed("google_crc32c").value(readonly)
    return found.to_bytes(4, "little")


def _needed(library: str) -> Any:
    from importlib import import_module

    try:
        return import_module(library)
    except ImportError:
        raise ConfigError(
            f'this conversion needs {library}: pip install "penstock[zarr]", or write npy, which needs nothing'
        ) from None


def overhead_bytes(chunk_bytes: int) -> int:
    """What encoding chunks one after another takes: one filled up, encoded, decoded, and a group of them twice."""
    return 5 * (chunk_bytes + chunk_bytes // 8) + 2 * GROUP_BYTES + CODEC_BYTES


class Shard:
    """Chunks of equal shape, appended in any order."""

    def __init__(self, output: OutputFile, cut: Cut) -> None:
        self.output, self.shape, self.chunk = output, cut.shard_shape, cut.chunk_shape
        self._values, self.compresses = cut.values, cut.compression != "none"
        self._encode, self._decode = coder(cut.compression, 1 if cut.values else cut.dtype.itemsize)
        self.counts = tuple(n // step for n, step in zip(self.shape, self.chunk, strict=True))
        self.index = np.full((prod(self.counts), 2), 2**64 - 1, "<u8")

    def add(self, first: int, values: np.ndarray, *, verify: bool) -> None:
        """The chunks of some rows, of which the first has the number ``first``."""
        group = bytearray()
        for number, begin in enumerate(range(0, len(values), self.chunk[0]), first):
            plain = self._plain(values[begin : begin + self.chunk[0]])
            encoded = self._encode(plain)
            if verify and self.compresses and self._decode(encoded) != plain:
                raise ConvertFailed(
                    f"chunk {number} of {self.output.file.name} does not decode to what it was made of: the memory is "
                    f"damaged. Nothing of this file is used"
                )
            self.index[number] = self.output.size + len(group), len(encoded) + 4
            group += encoded
            group += checksum(encoded)
            if len(group) >= GROUP_BYTES:
                self._write(group, verify=verify)
                group.clear()
        self._write(group, verify=verify)

    def _write(self, group: bytearray, *, verify: bool) -> None:
        """Append some chunks, read them again, and compare."""
        begin = self.output.write(group)
        if not verify:
            return
        again = np.empty(len(group), np.uint8)
        read_at(self.output.file.fileno(), again.data, begin)
        if again.data != memoryview(group):
            raise ConvertFailed(
                f"bytes {begin:,} to {self.output.size:,} came back otherwise than they were written: the disk or the "
                f"memory is damaged. Nothing of this file is used"
            )

    def _plain(self, values: np.ndarray) -> memoryview:
        """The bytes of a chunk; at the edges of the array it is filled up with zeros, or empty values."""
        if self._values is not None:
            return memoryview(pack(self._values, values.tolist(), self.chunk[0]))
        if values.shape != self.chunk:
            whole = np.zeros(self.chunk, values.dtype)
            whole[tuple(slice(0, n) for n in values.shape)] = values
            values = whole
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data

    def finish(self) -> None:
        """Append the index."""
        raw = self.index.tobytes()
        self.output.write(raw)
        self.output.write(checksum(raw))


def chunks_of(path: str, count: int) -> np.ndarray:
    """The index of a shard on disk: offset and length of each chunk, checksums included."""
    with open(path, "rb") as file:
        file.seek(-(16 * count + 4), 2)
        raw = file.read(16 * count)
    return np.frombuffer(raw, "<u8").reshape(count, 2)
