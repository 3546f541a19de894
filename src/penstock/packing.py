"""Compressed streams: told by their first bytes, and read from beginning to end.

Only ``read`` is asked of a source, so that a pipe, a socket or an HTTP answer will do.
"""

import bz2
import gzip
import lzma
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from penstock.errors import ConfigError, Corrupt, LimitExceeded, PenstockError, Truncated, Unavailable
from penstock.sizes import MiB


class Readable(Protocol):
    """All that is asked of a stream."""

    def read(self, size: int, /) -> bytes:
        """At most so many bytes; none at the end."""


MAX_EXPANSION = 500
"""Data that compress to less than a five-hundredth are taken for a mistake, or for an attack."""

# So much may come out of anything.
ALWAYS_MAY_EXPAND_TO = 64 * MiB


class Rest:
    """A source with the bytes that were already taken from it put back."""

    def __init__(self, source: Readable, begun: bytes) -> None:
        self._source, self._begun = source, begun
        self.taken = 0
        """Bytes that were read of it."""

    def read(self, size: int = -1, /) -> bytes:
        if self._begun:
            size = len(self._begun) if size < 0 else size
            piece, self._begun = self._begun[:size], self._begun[size:]
        else:
            piece = self._source.read(size)
        self.taken += len(piece)
        return piece

    def check(self, expanded: int, most: int, name: str) -> None:
        """Refuse what expands to more than ``most`` times its size."""
        if expanded > ALWAYS_MAY_EXPAND_TO and expanded > most * self.taken:
            raise LimitExceeded(
                f"{name}: its first {self.taken:,} bytes expand to {expanded:,} and more, over {most} times as much. "
                f"Raise max_expansion={most} if the data are so uniform"
            )

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


def pieces(source: Readable, name: str, piece_bytes: int, max_expansion: int) -> Iterator[bytes]:
    """What a compressed stream holds, in pieces of at most so many bytes."""
    begun = source.read(MAGIC_BYTES)
    unpack = next((unpack for magic, unpack in COMPRESSED.items() if begun.startswith(magic)), None)
    if unpack is None:
        raise Corrupt(f"{name}: begins with {begun!r}, which is neither gzip, bzip2, xz nor zstd")
    packed = Rest(source, begun)
    reader = unpack(packed, name)
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
        packed.check(done, max_expansion, name)
        yield piece


def words(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
