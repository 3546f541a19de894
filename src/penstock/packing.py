"""Compressed streams: told by their first bytes, and read from beginning to end.

Only ``read`` is asked of a source, so that a pipe, a socket or an HTTP answer will do.
"""

import bz2
import gzip
import lzma
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from penstock.errors import ConfigError, Corrupt, PenstockError, Truncated, Unavailable


class Readable(Protocol):
    """All that is asked of a stream."""

    def read(self, size: int, /) -> bytes:
        """At most so many bytes; none at the end."""


class Rest:
    """A source with the bytes that were already taken from it put back."""

    def __init__(self, source: Readable, begun: bytes) -> None:
        self._source, self._begun = source, begun

    def read(self, size: int = -1, /) -> bytes:
        if not self._begun:
            return self._source.read(size)
        size = len(self._begun) if size < 0 else size
        piece, self._begun = self._begun[:size], self._begun[size:]
        return piece

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


def _zstd(source: Any, name: str) -> Readable:
    reader: Readable
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


COMPRESSED: dict[bytes, Callable[[Any, str], Readable]] = {
    b"\x1f\x8b": lambda source, name: gzip.GzipFile(fileobj=source),
    b"BZh": lambda source, name: bz2.BZ2File(source),
    b"\xfd7zXZ\x00": lambda source, name: lzma.LZMAFile(source),  # noqa: SIM115
    b"\x28\xb5\x2f\xfd": _zstd,
}
"""What decompresses, by what a stream begins with."""

MAGIC_BYTES = max(map(len, COMPRESSED))


def pieces(source: Readable, name: str, piece_bytes: int) -> Iterator[bytes]:
    """What a compressed stream holds, in pieces of at most so many bytes."""
    begun = source.read(MAGIC_BYTES)
    unpack = next((unpack for magic, unpack in COMPRESSED.items() if begun.startswith(magic)), None)
    if unpack is None:
        raise Corrupt(f"{name}: begins with {begun!r}, which is neither gzip, bzip2, xz nor zstd")
    reader = unpack(Rest(source, begun), name)
    done = 0
    while True:
        try:
            piece = reader.read(piece_bytes)
        except PenstockError:
            raise
        except EOFError as error:
            raise Truncated(f"{name}: ends inside its compressed data ({words(error)}); fetch it again") from error
        except Exception as error:  # each library says it in its own way
            if getattr(error, "errno", None) is None:
                raise Corrupt(f"{name}: does not decompress after byte {done:,} ({words(error)})") from error
            raise Unavailable(f"{name}: reading failed ({words(error)})") from error
        if not piece:
            return
        done += len(piece)
        yield piece


def words(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
