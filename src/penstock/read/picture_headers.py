"""How large a picture is, read from its first bytes, before anything is decoded.

A few hundred bytes can declare a picture of gigabytes, so every decoder asks here first. JPEG, PNG, WebP, GIF and BMP
are recognised by their first bytes, never by a name; of anything else this module says that it does not know.
"""

import struct
from collections.abc import Callable

from penstock.base.dataclass import dataclass
from penstock.errors import DecodeFailed


@dataclass(frozen=True)
class PictureHeader:
    """What the first bytes of a picture declare."""

    kind: str
    """``jpeg``, ``png``, ``webp``, ``gif`` or ``bmp``."""
    width: int
    height: int
    channels: int = 0
    """Of a JPEG: 1 grey, 3 colour, 4 inks for print; 0 where it was not looked for."""
    scan: int = 0
    """Of a JPEG: where its pixels begin."""
    is_animated: bool = False

    @property
    def is_plain(self) -> bool:
        """One picture in grey or colour: neither an animation nor inks."""
        return not self.is_animated and self.channels in (0, 1, 3)


def read_header(data: bytes) -> PictureHeader | None:
    """What ``data`` declares; None for kinds that are not known here. Raises ``DecodeFailed`` if it ends too early."""
    for kind, (magic, parse) in _KINDS.items():
        if data.startswith(magic) and (kind != "webp" or data[8:12] == b"WEBP"):
            try:
                return parse(data)
            except (struct.error, IndexError):
                raise DecodeFailed(f"{kind} of {len(data):,} bytes: ends inside its header") from None
    return None


# Start-of-frame markers, which carry the size: all of C0 to CF but the tables C4 and CC, and C8, which means nothing.
_SIZE_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_START_OF_SCAN = 0xDA
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD9)})


def _jpeg(data: bytes) -> PictureHeader:
    """Markers follow each other, each with its length, up to the first scan; one of them has the size."""
    at, size = 2, None
    while True:
        if data[at] != 0xFF:
            raise DecodeFailed(f"jpeg of {len(data):,} bytes: no marker at byte {at}")
        while data[at] == 0xFF:  # a marker may be padded with more of these
            at += 1
        marker, at = data[at], at + 1
        if marker in _WITHOUT_LENGTH:
            continue
        (length,) = struct.unpack_from(">H", data, at)
        if marker in _SIZE_MARKERS:
            size = struct.unpack_from(">xHHB", data, at + 2)
        if marker == _START_OF_SCAN:
            break
        at += length
    if size is None:
        raise DecodeFailed(f"jpeg of {len(data):,} bytes: declares no size before its pixels")
    height, width, channels = size
    return PictureHeader("jpeg", width, height, channels, scan=at + length)


def _png(data: bytes) -> PictureHeader:
    kind, width, height = struct.unpack_from(">4sII", data, 12)
    if kind != b"IHDR":
        raise DecodeFailed(f"png of {len(data):,} bytes: begins with {kind!r} instead of a header")
    return PictureHeader("png", width, height)


def _webp(data: bytes) -> PictureHeader:
    """Three forms: lossy, lossless, and extended, which gives the size of the canvas."""
    form = data[12:16]
    if form == b"VP8X":
        flags, wide, high = data[20], data[24:27], data[27:30]
        size = 1 + int.from_bytes(wide, "little"), 1 + int.from_bytes(high, "little")
        return PictureHeader("webp", *size, is_animated=bool(flags & 0x02))
    if form == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return PictureHeader("webp", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    width, height = struct.unpack_from("<HH", data, 26)
    return PictureHeader("webp", width & 0x3FFF, height & 0x3FFF)


def _gif(data: bytes) -> PictureHeader:
    return PictureHeader("gif", *struct.unpack_from("<HH", data, 6))


def _bmp(data: bytes) -> PictureHeader:
    (header_bytes,) = struct.unpack_from("<I", data, 14)
    width, height = struct.unpack_from("<HH" if header_bytes == 12 else "<ii", data, 18)
    return PictureHeader("bmp", abs(width), abs(height))


_KINDS: dict[str, tuple[bytes, Callable[[bytes], PictureHeader]]] = {
    "jpeg": (b"\xff\xd8\xff", _jpeg),
    "png": (b"\x89PNG\r\n\x1a\n", _png),
    "webp": (b"RIFF", _webp),
    "gif": (b"GIF8", _gif),
    "bmp": (b"BM", _bmp),
}
