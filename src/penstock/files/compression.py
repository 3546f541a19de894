"""Streams that may be compressed: recognised by their first bytes, and read from beginning to end.

A source needs only ``read``: a pipe, a socket or an HTTP answer will do. Data that end early or do not decompress are
an error with the stream's name; libraries report it in many ways.
"""

import bz2
import gzip
import lzma
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from penstock.base.sizes import MiB
from penstock.errors import ConfigError, Corrupt, LimitExceeded, PenstockError, Truncated, Unavailable
from penstock.files.retry import one_line


class ByteSource(Protocol):
    """What a source needs."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes; none at the end."""


MAX_EXPANSION = 500
"""Data that expand to more than this many times their size are treated as a mistake or an attack."""

ALWAYS_MAY_EXPAND_TO = 64 * MiB
"""Below this, the ratio does not matter."""

READ_BYTES = 16 * MiB
"""Read from a source at a time: a false length in a header costs no more memory than this."""

SKIP_BYTES = MiB
"""Read and dropped at a time."""


class _PeekedSource:
    """A source whose first bytes were read to recognise it, and are delivered again."""

    def __init__(self, source: ByteSource, begun: bytes) -> None:
        self._source, self._begun = source, begun
        self.bytes_read = 0

    def read(self, size: int = -1, /) -> bytes:
        if self._begun:
            size = len(self._begun) if size < 0 else size
            piece, self._begun = self._begun[:size], self._begun[size:]
        else:
            piece = self._source.read(size)
        self.bytes_read += len(piece)
        return piece

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


def _open_zstd(source: Any, name: str) -> ByteSource:
    reader: ByteSource
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]  # Python 3.14

        reader = zstd.ZstdFile(source)
        return reader
    except ImportError:
        pass
    try:
        import zstandard
    except ImportError:
        raise ConfigError(f'{name}: is compressed by zstd: pip install "penstock[webdataset]"') from None
    reader = zstandard.ZstdDecompressor().stream_reader(source, read_across_frames=True)
    return reader


class _Compression(NamedTuple):
    name: str
    magic: bytes
    open: Callable[[Any, str], ByteSource]


_COMPRESSIONS = (
    _Compression("gzip", b"\x1f\x8b", lambda source, name: gzip.GzipFile(fileobj=source)),
    _Compression("bzip2", b"BZh", lambda source, name: bz2.BZ2File(source)),
    _Compression("xz", b"\xfd7zXZ\x00", lambda source, name: lzma.LZMAFile(source)),  # noqa: SIM115
    _Compression("zstd", b"\x28\xb5\x2f\xfd", _open_zstd),
)
MAGIC_BYTES = max(len(each.magic) for each in _COMPRESSIONS)


def _compression_of(begun: bytes | memoryview) -> _Compression | None:
    return next((each for each in _COMPRESSIONS if begun[: len(each.magic)] == each.magic), None)


def name_compression(begun: bytes | memoryview) -> str:
    """``gzip``, by the first bytes of a file; empty if they are not those of a known compression."""
    found = _compression_of(begun)
    return found.name if found else ""


class DecompressedStream:
    """The bytes of a source in order, decompressed if they are compressed, and counted."""

    def __init__(self, source: ByteSource, name: str, max_expansion: int = MAX_EXPANSION) -> None:
        self.name = name
        self.size: int | None = None
        """Bytes in all, once the end was reached."""
        self._offset = 0
        self._last = b""
        self._max_expansion = max_expansion
        self._reader, self._is_compressed = source, False
        self.first_bytes = self._take(MAGIC_BYTES)
        """As they are in the source."""
        self._source = _PeekedSource(source, self.first_bytes)
        self._reader, self._offset, self.size = self._source, 0, None
        if compression := _compression_of(self.first_bytes):
            self._reader, self._is_compressed = compression.open(self._source, name), True

    def read(self, at: int, length: int, skipped: int = 0) -> bytes:
        """The bytes from offset ``at``; fewer only where the stream ends.

        Bytes before ``at`` are skipped. ``at`` never goes back, except to what was read last.
        """
        if at == self._offset - len(self._last) and length == len(self._last):
            return self._last
        self._last = b""
        while self._offset < at and self._take(min(at - self._offset, SKIP_BYTES)):
            pass
        self._last = self._take(length) if self._offset == at else b""
        return self._last

    def pieces(self, piece_bytes: int) -> Iterator[bytes]:
        """All bytes, in pieces."""
        while piece := self._take(piece_bytes):
            yield piece

    def _take(self, size: int) -> bytes:
        pieces, missing = [], size
        while missing and (piece := self._read_some(min(missing, READ_BYTES))):
            pieces.append(piece)
            missing -= len(piece)
            self._offset += len(piece)
        if missing:
            self.size = self._offset
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read_some(self, size: int) -> bytes:
        try:
            piece = self._reader.read(size)
        except PenstockError:
            raise
        except EOFError as error:
            raise Truncated(
                f"{self.name}: ends inside its compressed data ({one_line(error)}); fetch it again"
            ) from error
        except Exception as error:  # of any file object, and of any library that decompresses
            if self._is_compressed and getattr(error, "errno", None) is None:
                raise Corrupt(
                    f"{self.name}: does not decompress after byte {self._offset:,} ({one_line(error)}); fetch it again"
                ) from error
            raise Unavailable(f"{self.name}: reading failed after byte {self._offset:,} ({one_line(error)})") from error
        if isinstance(piece, str):
            raise ConfigError(f'{self.name}: gives text instead of bytes; open it with mode="rb"')
        if self._is_compressed:
            self._check_expansion(self._offset + len(piece))
        return piece

    def _check_expansion(self, expanded: int) -> None:
        most, read = self._max_expansion, self._source.bytes_read
        if expanded > ALWAYS_MAY_EXPAND_TO and expanded > most * read:
            raise LimitExceeded(
                f"{self.name}: its first {read:,} bytes expand to {expanded:,} and more, over {most} times as much. "
                f"Raise max_expansion={most} if the data are so uniform"
            )


def pieces(source: ByteSource, name: str, piece_bytes: int, max_expansion: int) -> Iterator[bytes]:
    """The content of a compressed stream, in pieces of at most ``piece_bytes``."""
    stream = DecompressedStream(source, name, max_expansion)
    if not name_compression(stream.first_bytes):
        raise Corrupt(f"{name}: begins with {stream.first_bytes!r}, which is neither gzip, bzip2, xz nor zstd")
    yield from stream.pieces(piece_bytes)
