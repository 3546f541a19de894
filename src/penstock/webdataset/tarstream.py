"""A tar read once from beginning to end: its members in order, each read or skipped as the caller decides.

A tar is blocks of 512 bytes: a header, then as many as its content needs, and two of zeros at the end. Rules:

1. **The end is an end only if it says so.** A stream that ends without a block of zeros was cut; a header whose
   checksum does not hold is damage, never the end. Both are errors with the byte where it happened, after everything
   before it was handed out.
2. **Names are names.** They are never used as paths, so ``../x`` is as good as any.
3. **Lengths are believed only as far as there are bytes**, and up to a limit.

ustar, GNU's long names and large sizes, and pax headers are read; sparse members are refused.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import LimitExceeded
from penstock.kinds import MAX_MEMBER_BYTES
from penstock.packing import MAX_EXPANSION, Readable
from penstock.webdataset.compressed import Stream, open_stream
from penstock.webdataset.faults import CorruptShard, TruncatedShard

BLOCK = 512
ZEROS = bytes(BLOCK)

# Name and long-name blocks are text of at most a few paths; more would be memory for nothing.
MAX_META_BYTES = 1 << 20

# The letter in a header that says what follows it.
_REGULAR = frozenset(b"0\x007")
_HAS_NO_CONTENT = frozenset(b"123456")  # links, devices, folders and pipes: whatever size they state
_PAX = frozenset(b"xgX")
_LONG_NAMES = frozenset(b"LK")
_SPARSE = frozenset(b"S")


@dataclass
class Member:
    """A file in a tar, whose content has not been read yet."""

    name: str
    size: int
    offset: int
    """Where its header begins, in the stream as decompressed."""
    stream: Stream
    unread: int
    """Bytes of content and padding that were not taken yet."""

    def check(self, max_bytes: int) -> None:
        """Refuse a member of more bytes than this."""
        if self.size > max_bytes:
            raise LimitExceeded(
                f"{self.stream.name}: member {self.name!r} has {self.size:,} bytes, more than "
                f"max_member_bytes={max_bytes:,}; give a larger one if it is meant"
            )

    def read(self, max_bytes: int = MAX_MEMBER_BYTES) -> bytes:
        """Its content; once."""
        self.check(max_bytes)
        content = self.stream.take(self.size)
        self.unread -= len(content)
        if len(content) < self.size:
            raise TruncatedShard(
                f"{self.stream.name}: cut short inside member {self.name!r} at byte {self.offset:,}: "
                f"{self.size:,} bytes expected, {len(content):,} came; fetch the shard again"
            )
        return content


def read_members(source: Readable, name: str, max_expansion: int = MAX_EXPANSION) -> Iterator[Member]:
    """The plain files of a tar, compressed or not. A member must be read before the next is asked for."""
    stream = open_stream(source, name, max_expansion)
    extra: dict[str, str] = {}
    general: dict[str, str] = {}
    last = ""
    while True:
        begin = stream.offset
        block = stream.take(BLOCK)
        if len(block) < BLOCK:
            raise _cut(stream, begin, block, last)
        if block == ZEROS:
            _check_end(stream, begin)
            return
        header = _parse(block, stream, begin)
        if header.kind in _PAX:
            (general if header.kind == ord("g") else extra).update(_pax_records(_meta(stream, header), stream, begin))
        elif header.kind in _LONG_NAMES:
            text = _meta(stream, header).rstrip(b"\0").decode("utf-8", "surrogateescape")
            extra |= {"path": text} if header.kind == ord("L") else {}
        elif header.kind in _HAS_NO_CONTENT:
            extra = {}
        else:
            name, size = _described(header, {**general, **extra}, stream)
            extra = {}
            member = Member(name, size, begin, stream, unread=size + -size % BLOCK)
            # Very old writers mark a folder by the last letter of its name alone.
            if header.kind in _REGULAR and not name.endswith("/"):
                yield member
            stream.skip(member.unread)
            last = name


@dataclass(frozen=True)
class _Header:
    name: str
    size: int
    kind: int


_FIELDS = struct.Struct("100s24x12s12x8sc100s6s2x80x155s12x")


def _parse(block: bytes, stream: Stream, begin: int) -> _Header:
    name, size, checksum, kind, _, magic, prefix = _FIELDS.unpack(block)
    stated = _number(checksum, stream, begin)
    # Taken with its own place blank.
    found = sum(block) - sum(checksum) + len(checksum) * ord(" ")
    if stated != found and stated != found - 256 * _negatives(block, checksum):
        raise CorruptShard(
            f"{stream.name}: not a tar header at byte {begin:,}: its header checksum is {stated}, expected {found}; "
            + ("fetch the shard again" if begin else "is it a tar?")
        )
    path = _text(name)
    if magic == b"ustar\0" and prefix[0]:
        path = f"{_text(prefix)}/{path}"
    return _Header(path, _number(size, stream, begin), kind[0])


def _negatives(block: bytes, checksum: bytes) -> int:
    """Some old writers added up signed bytes: how many would have counted as negative."""
    return sum(byte > 127 for byte in block) - sum(byte > 127 for byte in checksum)


def _number(field: bytes, stream: Stream, begin: int) -> int:
    """Octal digits; or, with the first bit set, the bytes of the number itself."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    digits = field.split(b"\0", 1)[0].strip()
    if digits.strip(b"01234567"):
        raise CorruptShard(
            f"{stream.name}: not a tar header at byte {begin:,}: {field!r} is not a number; fetch the shard again"
        )
    return int(digits or b"0", 8)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _meta(stream: Stream, header: _Header) -> bytes:
    """The content of a header that describes the next one."""
    if header.size > MAX_META_BYTES:
        raise LimitExceeded(
            f"{stream.name}: a header of {header.size:,} bytes at byte {stream.offset:,}; at most {MAX_META_BYTES:,} "
            f"are read"
        )
    begin, padded = stream.offset, header.size + -header.size % BLOCK
    content = stream.take(padded)
    if len(content) < padded:
        raise _cut(stream, begin, content, "a long header")
    return content[: header.size]


def _pax_records(text: bytes, stream: Stream, begin: int) -> dict[str, str]:
    """Lines of ``length key=value``, the length counting the whole line."""
    found = {}
    at = 0
    while at < len(text):
        digits, _, _ = text[at : at + 20].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        line = text[at + len(digits) + 1 : at + length]
        key, equals, value = line.partition(b"=")
        if length <= len(digits) + 1 or not equals or not value.endswith(b"\n"):
            raise CorruptShard(f"{stream.name}: a pax header at byte {begin:,} that cannot be read; fetch it again")
        found[key.decode("utf-8", "surrogateescape")] = value[:-1].decode("utf-8", "surrogateescape")
        at += length
    return found


def _described(header: _Header, extra: dict[str, str], stream: Stream) -> tuple[str, int]:
    """Name and size, where headers before this one may have given others."""
    if header.kind in _SPARSE or any(key.startswith("GNU.sparse.") for key in extra):
        raise CorruptShard(f"{stream.name}: member {header.name!r} is sparse; write it again without --sparse")
    size = extra.get("size", str(header.size))
    if not size.isdecimal():
        raise CorruptShard(f"{stream.name}: member {header.name!r} has size {size!r}")
    return extra.get("path", header.name), int(size)


def _check_end(stream: Stream, begin: int) -> None:
    """One block of zeros ends a tar if another follows, or nothing; zeros amid data are a hole in the file."""
    if stream.take(BLOCK).strip(b"\0"):
        raise CorruptShard(
            f"{stream.name}: a block of zeros at byte {begin:,}, and then data: a hole in the file, not its end; "
            f"fetch the shard again"
        )
    stream.finish()


def _cut(stream: Stream, begin: int, got: bytes, last: str) -> TruncatedShard:
    """What can be said about a stream that ended where a header should be."""
    if begin == 0 and not got:
        return TruncatedShard(f"{stream.name}: is empty: 0 bytes, not even an end-of-archive block")
    if got:
        where = f"inside the header at byte {begin:,}"
    elif last and stream.went_beyond():
        where = f"inside member {last!r}, which should end at byte {begin:,}"
    else:
        where = f"at byte {begin:,}, after {f'member {last!r}' if last else 'a header'}"
    return TruncatedShard(f"{stream.name}: cut short {where}: no end-of-archive block; fetch the shard again")
