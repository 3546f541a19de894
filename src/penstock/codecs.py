"""Bytes -> elements, into memory the caller owns.

A codec decodes ``source`` into exactly ``target``; more or fewer bytes are an error. Libraries are imported where they
are used, and every call in here releases the interpreter's lock while it works.
"""

import ctypes
import struct
import sys
from dataclasses import replace
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from penstock.errors import ConfigError, Corrupt, DecodeFailed
from penstock.extents import CodecId
from penstock.memory import aligned, borrow
from penstock.spec import Cast

# Elements converted at a time: source and target pieces stay in a core's cache between the passes over them.
BLOCK_ELEMENTS = 512 * 1024

# Converted to these, values are scaled on the way, in one pass.
SINGLE_PASS = (np.dtype(np.float32), np.dtype(np.float64))


class Decoder(Protocol):
    """One codec, ready to run; ``source`` and ``target`` are contiguous uint8."""

    def __call__(self, source: np.ndarray, target: np.ndarray) -> None: ...


def decoder(codec: CodecId) -> Decoder:
    """The decoder of a codec named in a table."""
    name, parameter = codec
    if name == "shuffle":
        return Unshuffle(parameter)
    if name in CHECKSUMS:
        return CHECKSUMS[name]()
    if name in COMPRESSORS:
        return Decompress(name)
    if name in BITSHUFFLED:
        return Bitshuffled(name, parameter)
    raise ConfigError(
        f"no decoder for codec {name!r}; known: shuffle, {', '.join((*CHECKSUMS, *COMPRESSORS, *BITSHUFFLED))}"
    )


COMPRESSORS = {
    "deflate": "deflate_decode",  # libdeflate: three times zlib
    "lzf": "lzf_decode",
    "zstd": "zstd_decode",
    "lz4": "lz4h5_decode",  # in the frame that HDF5's filter writes
    "lz4-sized": "lz4_decode",  # one block behind its size, as numcodecs writes it
    "gzip": "gzip_decode",
    "blosc": "blosc_decode",
}
"""What each compressor's decoder is called in imagecodecs; all write into ``out=`` and release the lock."""

HEADED = {"lz4-sized"}
"""Those whose decoder must be told that a size comes first."""


class Decompress:
    """One of the general compressors, undone."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, source: np.ndarray, target: np.ndarray) -> None:
        try:
            import imagecodecs
        except ImportError:
            raise ConfigError(
                f'reading {self.name} chunks needs imagecodecs: pip install "penstock[hdf5]" or "penstock[zarr]"'
            ) from None
        headed = {"header": True} if self.name in HEADED else {}
        try:
            decoded = getattr(imagecodecs, COMPRESSORS[self.name])(source, out=target, **headed)
        except (RuntimeError, ValueError) as error:  # its own errors derive from the one, bad arguments are the other
            raise DecodeFailed(
                f"{self.name}: {len(source):,} bytes do not decode to the expected {len(target):,} ({error})"
            ) from error
        if len(decoded) != len(target):
            raise DecodeFailed(f"{self.name}: decodes to {len(decoded):,} bytes, expected {len(target):,}")


BITSHUFFLED = {"bitshuffle-lz4": "bshuf_decompress_lz4", "bitshuffle-zstd": "bshuf_decompress_zstd"}
"""What each decoder is called in the bitshuffle library."""


class Bitshuffled:
    """Bits of one significance stored together, block by block, each compressed: undone by bitshuffle's own library.

    Its functions take no length of what they read, so the chain of blocks is followed here first.
    """

    HEADER = struct.Struct(">QI")

    def __init__(self, name: str, width: int) -> None:
        self.name, self.width = name, width

    def __call__(self, source: np.ndarray, target: np.ndarray) -> None:
        if len(source) < self.HEADER.size:
            raise DecodeFailed(f"{self.name}: {len(source)} bytes have no room for a header")
        size, block_bytes = self.HEADER.unpack_from(source.data)
        if size != len(target):
            raise DecodeFailed(f"{self.name}: decodes to {size:,} bytes, expected {len(target):,}")
        per_block = block_bytes // self.width
        if per_block == 0 or per_block % 8 or block_bytes % self.width or len(target) % self.width:
            raise DecodeFailed(f"{self.name}: blocks of {block_bytes:,} bytes of elements of {self.width}")
        elements = len(target) // self.width
        self._follow(source, elements, per_block)
        decode = _bitshuffle_library()[BITSHUFFLED[self.name]]
        begin = source.ctypes.data + self.HEADER.size
        used = decode(begin, target.ctypes.data, elements, self.width, per_block)
        if used < 0:
            raise DecodeFailed(f"{self.name}: {len(source):,} bytes do not decode to {size:,} (error {used})")

    def _follow(self, source: np.ndarray, elements: int, per_block: int) -> None:
        """Each block is its length and so many bytes; what does not fill eight elements comes last, as it is."""
        data = source.data
        at, end = self.HEADER.size, len(data)
        for _ in range(-(-(elements - elements % 8) // per_block)):
            at += 4 + int.from_bytes(data[at : at + 4], "big")
            if at > end:
                break
        if at + elements % 8 * self.width > end:
            raise DecodeFailed(f"{self.name}: its blocks reach to byte {at:,} of {end:,}")


@cache
def _functions(library: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Functions of one of the libraries that hdf5plugin ships; empty where it has none of this name.

    Its Python is not imported: that would have HDF5 search every folder that its environment names for plug-ins.
    """
    try:
        package = find_spec("hdf5plugin")
        if package is None or not package.submodule_search_locations:
            return {}
        (path,) = Path(package.submodule_search_locations[0], "plugins").glob(f"{library}.*")
        loaded = ctypes.CDLL(str(path))  # releases the interpreter's lock in every call
        return {name: getattr(loaded, name) for name in names}
    except (ImportError, OSError, AttributeError, ValueError):
        return {}


def _bitshuffle_library() -> dict[str, Any]:
    found = _functions("libh5bshuf", tuple(BITSHUFFLED.values()))
    for function in found.values():
        function.restype = ctypes.c_int64
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_size_t] * 3]
    return found


def _native_unshuffle() -> Any | None:
    """c-blosc2's, which runs at four times the speed of numpy."""
    found = _functions("libh5blosc2", ("blosc2_unshuffle",)).get("blosc2_unshuffle")
    if found is not None:
        found.restype = ctypes.c_int32
        found.argtypes = [ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p]
    return found


def available(codec: CodecId) -> bool:
    """Whether a codec of this name can be undone here, now."""
    if codec[0] in BITSHUFFLED:
        return bool(_bitshuffle_library())
    return codec[0] in COMPRESSORS or codec[0] in CHECKSUMS or codec[0] == "shuffle"


class Checksum:
    """The last four bytes of a chunk: verified, and left off."""

    name: str
    BYTES = 4

    def __call__(self, source: np.ndarray, target: np.ndarray) -> None:
        payload = self.checked(source)
        if len(payload) != len(target):
            raise DecodeFailed(f"{self.name}: {len(payload):,} bytes before the checksum, expected {len(target):,}")
        np.copyto(target, payload)

    def checked(self, source: np.ndarray) -> np.ndarray:
        """The bytes before the checksum, if it is theirs."""
        if len(source) < self.BYTES:
            raise Corrupt(f"{self.name}: {len(source)} bytes have no room for a checksum")
        payload = source[: -self.BYTES]
        self.check(payload, source[-self.BYTES :])
        return payload

    def check(self, payload: np.ndarray, stored: np.ndarray) -> None:
        """Refuse bytes whose checksum is another."""
        raise NotImplementedError


class Crc32c(Checksum):
    """Castagnoli's cyclic redundancy check, as Zarr stores it."""

    name = "crc32c"

    def check(self, payload: np.ndarray, stored: np.ndarray) -> None:
        try:
            import google_crc32c
        except ImportError:
            raise ConfigError('checking crc32c needs google-crc32c: pip install "penstock[zarr]"') from None
        readonly = payload[:]
        readonly.flags.writeable = False  # it takes no other
        found, expected = google_crc32c.value(readonly), int.from_bytes(stored.tobytes(), "little")
        if found != expected:
            raise Corrupt(
                f"crc32c: the checksum of {len(payload):,} bytes is {found:08x}, but {expected:08x} was stored"
            )


class Fletcher32(Checksum):
    """HDF5's checksum: two sums over 16-bit words, modulo 65535: of the words, and of the running sums of the words."""

    name = "fletcher32"
    WORDS = 65536  # sums over so many words are exact in double precision, where a dot product is fastest

    def check(self, payload: np.ndarray, stored: np.ndarray) -> None:
        found = self._sums(payload)
        # HDF5 before 1.6.3 wrote the bytes of each sum the other way round.
        if found not in (_halves(stored.tobytes(), "<"), _halves(stored.tobytes(), ">")):
            raise Corrupt(f"fletcher32: the checksum of {len(payload):,} bytes does not match the stored one")

    def _sums(self, payload: np.ndarray) -> tuple[int, int]:
        odd = len(payload) % 2
        words = payload[: len(payload) - odd].view(">u2")
        first = second = 0
        for begin in range(0, len(words), self.WORDS):
            block = words[begin : begin + self.WORDS].astype(np.float64)
            second += len(block) * first + int(np.dot(np.arange(len(block), 0, -1, dtype=np.float64), block))
            first += int(block.sum())
        if odd:
            first += int(payload[-1]) << 8
            second += first
        return first % 65535, second % 65535


def _halves(stored: bytes, order: str) -> tuple[int, int]:
    low, high = np.frombuffer(stored, f"{order}u2").tolist()
    return low % 65535, high % 65535


CHECKSUMS: dict[str, type[Checksum]] = {"fletcher32": Fletcher32, "crc32c": Crc32c}


class Unshuffle:
    """HDF5's byte shuffle undone: the n-th bytes of all elements were stored together."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._native = _native_unshuffle() if 1 < width < 256 else None

    @property
    def piecewise(self) -> bool:
        """Whether it is best done piece by piece, with what comes after it done while a piece is in the cache."""
        return self._native is None

    def __call__(self, source: np.ndarray, target: np.ndarray) -> None:
        if len(source) != len(target) or len(source) % self.width:
            raise DecodeFailed(
                f"shuffle: {len(source):,} bytes of elements of {self.width}, expected {len(target):,} bytes"
            )
        if self._native is not None and len(source) < 2**31:
            self._native(self.width, len(source), source.ctypes.data, target.ctypes.data)
            return
        count = len(source) // self.width
        for begin in range(0, count, BLOCK_ELEMENTS):
            end = min(begin + BLOCK_ELEMENTS, count)
            self.piece(source, begin, end, target[begin * self.width : end * self.width])

    def piece(self, source: np.ndarray, begin: int, end: int, target: np.ndarray) -> None:
        """Elements ``begin`` up to ``end`` of the shuffled ``source``, into ``target``."""
        planes = source.reshape(self.width, -1)[:, begin:end]
        if self.width == 2 and sys.byteorder == "little":
            # Shifting whole words is twice as fast as storing every other byte.
            words = target.view(np.uint16)
            np.copyto(words, planes[1])
            np.left_shift(words, 8, out=words)
            np.bitwise_or(words, planes[0], out=words)
        else:
            for place, plane in enumerate(planes):
                target[place :: self.width] = plane


def convert(source: np.ndarray, target: np.ndarray, cast: Cast) -> None:
    """``target = source.astype(dtype) / divisor * scale + offset``, flat and contiguous.

    Where that takes several passes over the target, piece by piece.
    """
    if len(source) <= BLOCK_ELEMENTS or len(_steps(cast, target.dtype)) <= (target.dtype in SINGLE_PASS):
        convert_piece(source, target, cast)
        return
    for begin in range(0, len(source), BLOCK_ELEMENTS):
        convert_piece(source[begin : begin + BLOCK_ELEMENTS], target[begin : begin + BLOCK_ELEMENTS], cast)


def convert_piece(source: np.ndarray, target: np.ndarray, cast: Cast) -> None:
    """The same for one piece, of any shape."""
    if target.dtype == np.float16 and cast.changes_values:
        # Half precision has 11 bits: scale in single and round once.
        with borrow(4 * target.size) as scratch:
            single = scratch.view(np.float32).reshape(target.shape)
            convert_piece(source, single, replace(cast, dtype=single.dtype))
            np.copyto(target, single, casting="same_kind")
        return
    steps = _steps(cast, target.dtype)
    if target.dtype.kind == "f" and steps:  # the first on the way: a pass over the target saved
        step, value = steps[0]
        step(source, value, out=target, dtype=target.dtype, casting="unsafe")
        steps = steps[1:]
    else:
        np.copyto(target, source, casting="unsafe")
    for step, value in steps:
        step(target, value, out=target)


@lru_cache(maxsize=64)
def _steps(cast: Cast, dtype: np.dtype) -> tuple[tuple[np.ufunc, Any], ...]:
    """What is done with each value, and with which number of the target's type. Asked for with every small row."""
    asked = ((np.divide, cast.divisor, 1), (np.multiply, cast.scale, 1), (np.add, cast.offset, 0))
    return tuple((step, dtype.type(value)) for step, value, nothing in asked if value != nothing)


def convert_scratch_bytes(elements: int, cast: Cast) -> int:
    """What ``convert`` borrows for so many elements: nothing, but for half precision."""
    return aligned(4 * min(elements, BLOCK_ELEMENTS)) if cast.dtype == np.float16 else 0
