"""Codecs: stored bytes -> plain bytes, into memory the caller owns.

A codec decodes ``source`` into exactly ``target``; more or fewer bytes are an error. Libraries are imported where they
are used, and every call in here releases the interpreter's lock while it works.

A new codec is a row of ``_TABLE``, and a decoder class if imagecodecs does not decode it.
"""

import ctypes
import struct
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from penstock.errors import ConfigError, Corrupt, DecodeFailed, Unavailable
from penstock.read.convert import blocks
from penstock.read.extents import CodecId


class ChunkDecoder(Protocol):
    """One codec, ready to run; ``source`` and ``target`` are contiguous uint8."""

    def __call__(self, source: np.ndarray, target: np.ndarray) -> None: ...


# No compressor writes less. Of fewer bytes, some decoders read what lies beyond them.
LEAST_BYTES = 2


class Decompress:
    """Undoes a general compressor, by a function of imagecodecs."""

    def __init__(self, name: str, function: str, **options: Any) -> None:
        self.name, self._function, self._options = name, function, options

    def __call__(self, source: np.ndarray, target: np.ndarray) -> None:
        try:
            import imagecodecs
        except ImportError:
            raise ConfigError(
                f'reading {self.name} chunks needs imagecodecs: pip install "penstock[hdf5]" or "penstock[zarr]"'
            ) from None
        if len(source) < LEAST_BYTES:
            raise DecodeFailed(f"{self.name}: {len(source)} bytes do not decode to the expected {len(target):,}")
        try:
            decoded = getattr(imagecodecs, self._function)(source, out=target, **self._options)
        except ImportError as error:
            raise cannot_load(self._function) from error
        except (RuntimeError, ValueError) as error:  # its own errors derive from the one, bad arguments are the other
            raise DecodeFailed(
                f"{self.name}: {len(source):,} bytes do not decode to the expected {len(target):,} ({error})"
            ) from error
        if len(decoded) != len(target):
            raise DecodeFailed(f"{self.name}: decodes to {len(decoded):,} bytes, expected {len(target):,}")


class DecompressBlosc(Decompress):
    """Undoes blosc, whose library believes the sizes in a chunk's header, and would read beyond what is there."""

    HEADER = struct.Struct("<4B3I")
    """Four settings, then bytes decoded, bytes per block, and bytes stored, this header counted."""

    def __call__(self, source: np.ndarray, target: np.ndarray) -> None:
        if len(source) < self.HEADER.size:
            raise DecodeFailed(f"blosc: {len(source)} bytes have no room for a header")
        *_, decoded, _, stored = self.HEADER.unpack_from(source.data)
        if stored != len(source):
            raise DecodeFailed(f"blosc: {len(source):,} bytes, where its header says {stored:,}")
        if decoded != len(target):
            raise DecodeFailed(f"blosc: decodes to {decoded:,} bytes, expected {len(target):,}")
        super().__call__(source, target)


def cannot_load(function: str) -> Unavailable:
    """The error for a decoder that imagecodecs, which loads each on its first call, fails to load without a reason."""
    return Unavailable(
        f"imagecodecs cannot load {function}: no more files can be opened (ulimit -n), or it is not whole: install it "
        f"again"
    )


class Bitshuffled:
    """Bits of one significance stored together, block by block, each compressed: undone by bitshuffle's own library.

    Its functions take no length of what they read, so the chain of blocks is followed here first.
    """

    HEADER = struct.Struct(">QI")

    def __init__(self, name: str, function: str, width: int) -> None:
        self.name, self._function, self.width = name, function, width

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
        decode = _bitshuffle_library()[self._function]
        begin = source.ctypes.data + self.HEADER.size
        used = decode(begin, target.ctypes.data, elements, self.width, per_block)
        if used < 0:
            raise DecodeFailed(f"{self.name}: {len(source):,} bytes do not decode to {size:,} (error {used})")

    def _follow(self, source: np.ndarray, elements: int, per_block: int) -> None:
        """Each block is a length and that many bytes; fewer than eight left-over elements come last, uncompressed."""
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
    """Functions of one of the libraries that hdf5plugin ships; empty if it has none of this name.

    Its Python is not imported: that would make HDF5 search folders from the environment for plug-ins.
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


BITSHUFFLE_FUNCTIONS = {"bitshuffle-lz4": "bshuf_decompress_lz4", "bitshuffle-zstd": "bshuf_decompress_zstd"}


def _bitshuffle_library() -> dict[str, Any]:
    found = _functions("libh5bshuf", tuple(BITSHUFFLE_FUNCTIONS.values()))
    for function in found.values():
        function.restype = ctypes.c_int64
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_size_t] * 3]
    return found


def _native_unshuffle() -> Any | None:
    """The one of c-blosc2, four times as fast as numpy."""
    found = _functions("libh5blosc2", ("blosc2_unshuffle",)).get("blosc2_unshuffle")
    if found is not None:
        found.restype = ctypes.c_int32
        found.argtypes = [ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p]
    return found


class Checksum:
    """The last four bytes of a chunk: checked and removed."""

    name: str
    BYTES = 4

    def __call__(self, source: np.ndarray, target: np.ndarray) -> None:
        payload = self.checked(source)
        if len(payload) != len(target):
            raise DecodeFailed(f"{self.name}: {len(payload):,} bytes before the checksum, expected {len(target):,}")
        np.copyto(target, payload)

    def checked(self, source: np.ndarray) -> np.ndarray:
        """The bytes before the checksum, if it matches."""
        if len(source) < self.BYTES:
            raise Corrupt(f"{self.name}: {len(source)} bytes have no room for a checksum")
        payload = source[: -self.BYTES]
        self.check(payload, source[-self.BYTES :])
        return payload

    def check(self, payload: np.ndarray, stored: np.ndarray) -> None:
        """Refuse bytes whose checksum differs from the stored one."""
        raise NotImplementedError


class Crc32c(Checksum):
    """Castagnoli's cyclic redundancy check, as Zarr stores it."""

    name = "crc32c"

    def check(self, payload: np.ndarray, stored: np.ndarray) -> None:
        found = int(self.of_pieces(payload, np.zeros(1, np.int64), len(payload))[0])
        expected = int.from_bytes(stored.tobytes(), "little")
        if found != expected:
            raise Corrupt(
                f"crc32c: the checksum of {len(payload):,} bytes is {found:08x}, but {expected:08x} was stored"
            )

    @staticmethod
    def of_pieces(data: np.ndarray, offsets: np.ndarray, size: int) -> np.ndarray:
        """The checksums of pieces of ``size`` bytes."""
        try:
            from google_crc32c import value
        except ImportError:
            raise ConfigError('checking crc32c needs google-crc32c: pip install "penstock[zarr]"') from None
        readonly = data[:]
        readonly.flags.writeable = False  # it takes no other
        return np.array([value(readonly[offset : offset + size]) for offset in offsets.tolist()], np.uint32)


class Fletcher32(Checksum):
    """HDF5's checksum: two sums over 16-bit words, modulo 65535: of the words, and of the running sums of the words."""

    name = "fletcher32"
    WORDS = 65536  # sums over this many words are exact in double precision, where a dot product is fastest

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


class Unshuffle:
    """HDF5's byte shuffle undone: the n-th bytes of all elements were stored together."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._native = _native_unshuffle() if 1 < width < 256 else None

    @property
    def is_piecewise(self) -> bool:
        """Whether to do it block by block, and convert each block while it is in the cache."""
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
        for block in blocks(count):
            self.piece(source, block, target[block.start * self.width : block.stop * self.width])

    def piece(self, source: np.ndarray, block: slice, target: np.ndarray) -> None:
        """A block of elements of the shuffled ``source``, into ``target``."""
        planes = source.reshape(self.width, -1)[:, block]
        if self.width == 2 and sys.byteorder == "little":
            # Shifting whole words is twice as fast as storing every other byte.
            words = target.view(np.uint16)
            np.copyto(words, planes[1])
            np.left_shift(words, 8, out=words)
            np.bitwise_or(words, planes[0], out=words)
        else:
            for place, plane in enumerate(planes):
                target[place :: self.width] = plane


class Codec(NamedTuple):
    """One codec, and its names elsewhere."""

    name: str
    """In tables of chunks and in messages."""
    make: Callable[[int], ChunkDecoder]
    """Makes its decoder, from the codec's parameter."""
    hdf5: int | None = None
    """The number of the HDF5 filter."""
    zarr: str = ""
    """Its name in Zarr metadata: of version 2, and after ``numcodecs.`` of version 3."""
    checks: str = ""
    """The checksum by which it notices a damaged chunk; empty if it may not notice."""
    is_compressor: bool = False


def _compressor(
    name: str, function: str, hdf5: int | None = None, zarr: str = "", checks: str = "", **options: Any
) -> Codec:
    """One that imagecodecs decodes, with these options."""
    return Codec(name, lambda _: Decompress(name, function, **options), hdf5, zarr, checks, is_compressor=True)


def _bitshuffle(name: str) -> Codec:
    return Codec(name, lambda width: Bitshuffled(name, BITSHUFFLE_FUNCTIONS[name], width), BITSHUFFLE_FILTER)


BITSHUFFLE_FILTER = 32008
BITSHUFFLE_COMPRESSORS = {2: "bitshuffle-lz4", 3: "bitshuffle-zstd"}
"""By the fifth parameter of HDF5's bitshuffle filter."""

_TABLE = (
    Codec("shuffle", Unshuffle, hdf5=2, zarr="shuffle"),
    _compressor("deflate", "deflate_decode", 1, "zlib", "adler32"),  # libdeflate: three times as fast as zlib
    _compressor("gzip", "gzip_decode", None, "gzip", "crc32"),
    _compressor("zstd", "zstd_decode", 32015, "zstd"),
    Codec("blosc", lambda _: DecompressBlosc("blosc", "blosc_decode"), 32001, "blosc", is_compressor=True),
    _compressor("lzf", "lzf_decode", 32000),
    _compressor("lz4", "lz4h5_decode", 32004),  # in the frame of HDF5's filter
    _compressor("lz4-sized", "lz4_decode", None, "lz4", header=True),  # one block after its size, as numcodecs writes
    *map(_bitshuffle, BITSHUFFLE_FUNCTIONS),
    Codec("fletcher32", lambda _: Fletcher32(), hdf5=3, checks="fletcher32"),
    Codec("crc32c", lambda _: Crc32c(), zarr="crc32c", checks="crc32c"),
)
CODECS = {codec.name: codec for codec in _TABLE}
"""Every codec that is decoded here. All decoders write into ``out=`` and release the interpreter's lock."""

COMPRESSORS = frozenset(codec.name for codec in _TABLE if codec.is_compressor)
BY_HDF5_FILTER = {codec.hdf5: codec.name for codec in _TABLE if codec.hdf5 not in (None, BITSHUFFLE_FILTER)}
BY_ZARR_NAME = {codec.zarr: codec.name for codec in _TABLE if codec.zarr}


def decoder(codec: CodecId) -> ChunkDecoder:
    """The decoder of a codec in a table of chunks."""
    name, parameter = codec
    if name not in CODECS:
        raise ConfigError(f"no decoder for codec {name!r}; known: {', '.join(CODECS)}")
    return CODECS[name].make(parameter)


def is_available(codec: CodecId) -> bool:
    """Whether a codec can be decoded here and now."""
    name, _ = codec
    return name in CODECS and (name not in BITSHUFFLE_FUNCTIONS or bool(_bitshuffle_library()))


def checked_by(names: Iterable[str]) -> str:
    """The checksum that notices any damage to a chunk written through these codecs; empty if none does."""
    found = sorted((CODECS[name] for name in names if CODECS[name].checks), key=lambda codec: codec.is_compressor)
    return found[0].checks if found else ""
