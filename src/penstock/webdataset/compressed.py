"""Streams that may be compressed: told by their first bytes, and read from beginning to end.

Only ``read`` is asked of a stream, so that a pipe, a socket or an HTTP answer will do. What ends early or does not
decompress is an error with the stream's name; libraries say so in many ways.
"""

from typing import Any

from penstock.errors import ConfigError, PenstockError, Unavailable
from penstock.packing import COMPRESSED, MAGIC_BYTES, MAX_EXPANSION, Readable, Rest, words
from penstock.webdataset.faults import CorruptShard, TruncatedShard

READ_BYTES = 16 << 20
"""What is asked of a stream at a time: a header's lie about a length costs no more memory than this."""

SKIP_BYTES = 1 << 20
"""What is read and forgotten at a time."""

SEEK_BYTES = 64 * 1024
"""What is left out by seeking rather than reading; less than this is in the file's buffer already."""

MAX_PADDING_BYTES = 64 << 20
"""What is read behind the end of a compressed tar; there should be a few thousand zeros."""


class Stream:
    """Bytes in order, counted, from a source whose first bytes may have been looked at.

    Skipping seeks where the source can, and otherwise reads and forgets.
    """

    def __init__(
        self, source: Readable, name: str, begun: bytes = b"", packed: Rest | None = None, max_expansion: int = 1
    ) -> None:
        self.name = name
        self.offset = 0
        """How many bytes were taken or skipped."""
        self._source, self._begun, self._packed, self._max_expansion = source, begun, packed, max_expansion
        self._expanded = 0
        self.plain = packed is None
        """Whether its bytes are those of the source, at the same places."""
        self._seeks = packed is None and _can_seek(source)

    def take(self, size: int) -> bytes:
        """So many bytes; fewer only where the stream ends."""
        pieces = [self._begun[:size]] if self._begun else []
        missing = size - sum(map(len, pieces))
        self._begun = self._begun[size:]
        while missing:
            piece = self._read(min(missing, READ_BYTES))
            if not piece:
                break
            pieces.append(piece)
            missing -= len(piece)
        self.offset += size - missing
        return b"".join(pieces)

    def skip(self, size: int) -> None:
        """Go on behind so many bytes; if the stream ends before that, nothing more will come."""
        if self._seeks and size > SEEK_BYTES:
            size -= len(self.take(len(self._begun[:size])))
            self._source.seek(size, 1)  # type: ignore[attr-defined]
            self.offset += size
            return
        while size and (piece := self.take(min(size, SKIP_BYTES))):
            size -= len(piece)

    def finish(self) -> None:
        """Read what follows the end of a tar, if that is where a compressor keeps its checksum."""
        if self._packed:
            self.skip(MAX_PADDING_BYTES)

    def went_beyond(self) -> bool:
        """Whether skipping went beyond the end of a file; the last thing that can be asked."""
        if not self._seeks or self._begun:
            return False
        here = self._source.tell()  # type: ignore[attr-defined]
        return bool(self._source.seek(0, 2) < here)  # type: ignore[attr-defined]

    def _read(self, size: int) -> bytes:
        try:
            piece = self._source.read(size)
        except PenstockError:
            raise
        except EOFError as error:
            raise TruncatedShard(f"{self.name}: ends inside its compressed data ({words(error)})") from error
        except Exception as error:  # of any file object, and of any library that decompresses
            if self._packed and getattr(error, "errno", None) is None:
                raise CorruptShard(f"{self.name}: does not decompress ({words(error)})") from error
            raise Unavailable(f"{self.name}: reading failed after byte {self.offset:,} ({words(error)})") from error
        if isinstance(piece, str):
            raise ConfigError(f'{self.name}: gives text instead of bytes; open it with mode="rb"')
        if self._packed is not None:
            self._expanded += len(piece)
            self._packed.check(self._expanded, self._max_expansion, self.name)
        return piece


def open_stream(source: Readable, name: str, max_expansion: int = MAX_EXPANSION) -> Stream:
    """The bytes of a shard, decompressed if they are compressed."""
    begun = Stream(source, name).take(MAGIC_BYTES)
    for magic, decompress in COMPRESSED.items():
        if begun.startswith(magic):
            packed = Rest(source, begun)
            return Stream(decompress(packed, name), name, packed=packed, max_expansion=max_expansion)
    return Stream(source, name, begun)


def _can_seek(source: Any) -> bool:
    asked = getattr(source, "seekable", None)
    try:
        return bool(asked and asked()) and hasattr(source, "seek")
    except (OSError, ValueError):
        return False
