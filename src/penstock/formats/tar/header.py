"""The fields of a tar header: v7, ustar, GNU and pax. Pure: bytes in, values out.

A field that makes no sense raises ``ValueError``; callers add the file and the offset.
"""

import struct
from functools import lru_cache
from zlib import adler32

from penstock.base.text_column import decoded

BLOCK = 512
RECORD = 20 * BLOCK
"""Most programs fill an archive up with zeros to a multiple of this, as on tape."""

HEADER = struct.Struct("100s 24x 12s 20x s 100s 6s 82x 155s 12x")
"""Name, size, kind, target of a link, magic, prefix."""
QUICK_HEADER = struct.Struct("100s 24x 11s s 12x 8s s 188x s 166x")
"""Name, size and the byte that ends it, checksum, kind, first byte of the prefix: enough to know a usual header."""

USTAR = b"ustar\0"
"""The magic of headers whose prefix is part of the name; GNU's keeps times there."""

FILES = b"07"
WITHOUT_BODY = b"123456"
"""Links, devices, folders and pipes: nothing follows their header, whatever size it gives."""
LINKS = b"12"
"""Hard and symbolic ones."""
NOTES = b"VD"
"""The archive's own name, and lists of folders."""
LONG_NAMES = {b"L": b"path", b"K": b"linkpath"}
EXTENDED = b"LKxXg"
"""Their body is about the next member, or (g) about all that follow."""
IN_PIECES = {
    b"S": "is sparse (tar --sparse)",
    b"M": "began in another archive (tar --multi-volume)",
}

_KINDS = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe"}


def describe(name: bytes, kind: bytes, target: bytes) -> str:
    """A member that is not a file: ``'a.txt' is a hard link to 'b.txt', …``."""
    leads = f" to {decoded(target)!r:.300}" if kind in LINKS else ""
    what = _KINDS.get(kind, f"of kind {kind!r}")
    return f"{decoded(name)!r:.300} is {what}{leads}, which holds no bytes of its own"


_CHECKSUM = slice(148, 156)
_SPACES = 8 * ord(" ")
_ADLER_MODULUS = 65521


@lru_cache(maxsize=1 << 14)
def low_adler(checksum: bytes) -> int:
    """The lower half of the Adler-32 of a header with this checksum field; -1 if the field holds no number.

    That half is one more than the sum of all bytes, modulo 65521, and nothing in Python adds up bytes as fast. The
    stored checksum is the same sum with spaces in place of the field itself. Archives have few different checksums.
    """
    try:
        stored = number(checksum)
    except ValueError:
        return -1
    return (1 + stored - _SPACES + sum(checksum)) % _ADLER_MODULUS if stored else -1


def has_checksum(block: bytes) -> bool:
    """Whether the checksum of a header holds."""
    return adler32(block) & 0xFFFF == low_adler(block[_CHECKSUM])


def checksums(block: memoryview) -> tuple[bytes, int, int]:
    """The field as stored, the sum it should hold, and the sum that some old programs made of bytes with a sign."""
    signed = block.cast("b")
    return (
        block[_CHECKSUM].tobytes(),
        sum(block) - sum(block[_CHECKSUM]) + _SPACES,
        sum(signed) - sum(signed[_CHECKSUM]) + _SPACES,
    )


def number(field: bytes) -> int:
    """Octal digits among spaces and zeros or, where these have no room, a byte 0x80 and a binary number."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = text(field).strip(b" ") or b"0"
    if not digits.isdigit():
        raise ValueError("not a number")
    return int(digits, 8)


def text(field: bytes) -> bytes:
    """Up to the first zero."""
    return field.split(b"\0", 1)[0]


def pax_records(body: bytes) -> dict[bytes, bytes]:
    """``path``, ``size`` and ``linkpath`` if they are given, and ``GNU.sparse``, empty, for a file stored in pieces.

    Records are ``<length of this record> <key>=<value>`` and a line's end; values may hold anything.
    """
    records: dict[bytes, bytes] = {}
    if b"path=" not in body and b"size=" not in body and b"GNU.sparse." not in body:
        return records  # most only give the time to a fraction of a second
    body, at = body.rstrip(b"\0"), 0
    while at < len(body):
        digits = body[at : at + 20].split(b" ", 1)[0]
        if not digits.isdigit():
            raise ValueError(f"no length at byte {at:,} of its records")
        end = at + int(digits)
        key, equals, value = body[at + len(digits) + 1 : end].partition(b"=")
        if not equals or value[-1:] != b"\n" or end > len(body):
            raise ValueError(f"the record at byte {at:,} of its records does not end where it says")
        if key in (b"path", b"size", b"linkpath"):
            records[key] = value[:-1]
        elif key.startswith(b"GNU.sparse."):
            records[b"GNU.sparse"] = b""
        at = end
    size = records.get(b"size") or b"0"
    if not size.isdigit() or len(size) > 20:
        raise ValueError(f"its size is {size[:20]!r}")
    return records
