"""Values -> bytes of a chunk, and a file of many chunks with an index at its end: Zarr's shard."""

import zlib
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from penstock.base.sizes import MiB
from penstock.conversion.work import Output, read_at
from penstock.errors import ConfigError, ConvertFailed

LEVELS = {"zstd": 1, "gzip": 1, "none": 0}
"""What each compression uses: quick ones, for data are written once and read many times."""

# Measured: the tables of a compressor.
CODEC_BYTES = 8 * MiB

Encode = Callable[[memoryview], Any]
Decode = Callable[[Any], Any]


def coder(compression: str) -> tuple[Encode, Decode]:
    """How a chunk is compressed, and the way back."""
    if compression == "none":
        return memoryview, memoryview
    if compression == "gzip":
        return lambda data: zlib.compress(data, LEVELS["gzip"]), zlib.decompress
    codecs = _needed("imagecodecs")
    return lambda data: codecs.zstd_encode(data, level=LEVELS["zstd"]), codecs.zstd_decode


def checksum(data: Any) -> bytes:
    """Zarr's crc32c."""
    found: int = _needed("google_crc32c").value(bytes(data))
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
    """What encoding chunks one after another takes: one filled up, encoded, read again and decoded."""
    return 5 * (chunk_bytes + chunk_bytes // 8) + CODEC_BYTES


class Shard:
    """Chunks of equal shape, appended in any order."""

    def __init__(self, output: Output, shape: tuple[int, ...], chunk: tuple[int, ...], compression: str) -> None:
        self.output, self.shape, self.chunk = output, shape, chunk
        self._encode, self._decode = coder(compression)
        self.counts = tuple(n // step for n, step in zip(shape, chunk, strict=True))
        self.index = np.full((prod(self.counts), 2), 2**64 - 1, "<u8")

    def add(self, at: int, values: np.ndarray, *, verify: bool) -> None:
        """The chunk number ``at``; at the edges of the array it is filled up with zeros."""
        if values.shape != self.chunk:
            whole = np.zeros(self.chunk, values.dtype)
            whole[tuple(slice(0, n) for n in values.shape)] = values
            values = whole
        plain = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        encoded = self._encode(plain)
        begin = self.output.write(encoded)
        self.output.write(checksum(encoded))
        self.index[at] = begin, self.output.size - begin
        if verify:
            self._compare(plain, len(encoded), begin)

    def _compare(self, plain: memoryview, length: int, begin: int) -> None:
        """Read it again, decode it, and compare it with what it was made of."""
        again = np.empty(length + 4, np.uint8)
        read_at(self.output.file.fileno(), again.data, begin)
        payload, stored = again[:-4], again[-4:].tobytes()
        if checksum(payload.data) != stored or self._decode(payload.tobytes()) != plain:
            raise ConvertFailed(
                f"bytes {begin:,} to {self.output.size:,} came back otherwise than they were written: the disk or the "
                f"memory is damaged. Nothing of this file is used"
            )

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
