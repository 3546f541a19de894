"""The members of a tar archive, found by reading its headers once, from a file or from a stream.

Files are members. Links to files of the archive are members with the bytes of those files. Folders are passed over.
Devices, pipes and unknown kinds hold no bytes: they are reported by name.

Rules:
1. Nothing in a header is believed before its checksum holds.
2. An archive ends with blocks of zeros. Another archive may follow (``cat a.tar b.tar``): its members come next.
   Anything else is an error: a cut archive must not pass for a shorter one, nor a damaged header for the end.
3. Names are bytes that name samples. They are never used as paths.
4. The bodies of large members are not read, unless the caller wants them.
"""

from collections.abc import Iterator
from typing import NamedTuple, NoReturn, Protocol
from zlib import adler32

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.file_id import FileId
from penstock.base.text_column import decoded
from penstock.errors import ConfigError, Corrupt, LimitExceeded, Truncated
from penstock.files.compression import name_compression
from penstock.files.files import Files
from penstock.files.handles import Handle, identify
from penstock.formats.tar import header
from penstock.formats.tar.header import (
    BLOCK,
    EXTENDED,
    FILES,
    HEADER,
    IN_PIECES,
    LINKS,
    LONG_NAMES,
    NOTES,
    QUICK_HEADER,
    RECORD,
    USTAR,
    WITHOUT_BODY,
    low_adler,
)
from penstock.formats.tar.links import Link, resolve_links
from penstock.formats.tar.members import MemberList, MemberTable

# Long names and pax records have a body of their own. The longest path that a system accepts has 4 KiB.
LONGEST_RECORDS = 128 * 1024

_ZEROS = bytes(BLOCK)
_FILE, _FOLDER = b"0", b"5"


class ArchiveSource(Protocol):
    """The bytes of an archive, read from its beginning to its end."""

    name: str
    """For messages."""

    @property
    def size(self) -> int | None:
        """Bytes in all; None for a stream that has not come to its end yet."""

    def read(self, at: int, length: int, skipped: int = 0) -> bytes | memoryview:
        """The bytes from offset ``at``, valid until the next read: fewer than ``length`` only at the end, and more if
        they are at hand. ``skipped`` bytes before ``at`` were passed over unread.

        ``at`` never goes back, except to the last block.
        """


class PositionedFile(Protocol):
    """A file that is read at any offset, such as a ``Handle``."""

    @property
    def file(self) -> FileId: ...

    def read_into(self, offset: int, target: np.ndarray, /) -> None:
        """Fill an array from an offset on."""


@dataclass(frozen=True)
class WindowSizes:
    """How a file is read while headers are looked for.

    While headers are near each other, the file is read in steps that grow: large enough to make system calls cheap,
    small enough to stay in a core's cache. Where the next header is far away, only a page is read there.
    """

    most_bytes: int = 1024 * 1024
    first_bytes: int = 64 * 1024
    page_bytes: int = 4096
    near_bytes: int = 32 * 1024


class Window:
    """An ``ArchiveSource`` over a file: a buffer that moves along with the walk."""

    def __init__(self, handle: PositionedFile, sizes: WindowSizes = WindowSizes()) -> None:
        self.name, self.size = handle.file.path, handle.file.size
        self._handle, self._sizes = handle, sizes
        self._bytes = np.empty(sizes.most_bytes, np.uint8)
        self._view = self._bytes.data
        self._begin = self._end = 0
        self._step = sizes.first_bytes

    def read(self, at: int, length: int, skipped: int = 0) -> memoryview:
        """See ``ArchiveSource``."""
        if at + length > self._end:
            self._move(at, length, skipped)
        return self._view[at - self._begin : self._end - self._begin]

    def _move(self, at: int, length: int, skipped: int) -> None:
        sizes = self._sizes
        if skipped <= sizes.near_bytes:
            step, self._step = self._step, min(2 * self._step, sizes.most_bytes)
        else:
            step, self._step = sizes.page_bytes, sizes.first_bytes
        self._begin = min(at, self.size)
        self._end = min(at + max(length, min(step, sizes.most_bytes)), self.size)
        if self._end - self._begin > len(self._bytes):
            self._bytes = np.empty(self._end - self._begin, np.uint8)
            self._view = self._bytes.data
        self._handle.read_into(self._begin, self._bytes[: self._end - self._begin])


class Entry(NamedTuple):
    """A member of an archive."""

    name: bytes
    offset: int
    """Where its bytes begin."""
    length: int
    kind: bytes
    """``b"0"`` for a file, otherwise as in its header."""
    target: bytes = b""
    """What a link leads to."""

    @property
    def is_file(self) -> bool:
        """Whether it has bytes of its own."""
        return self.kind == _FILE


_Columns = tuple[bytes, int, int, bytes, bytes]


class Walk:
    """The entries of an archive in their order, all but folders; iterate over it once."""

    def __init__(self, source: ArchiveSource) -> None:
        self._source = source
        self._ahead: bytes | memoryview = b""
        """What the source gave last; empty if it was asked for other bytes since."""
        self._last: _Columns | None = None
        self.begin = 0
        """Where the archive of the last entry begins, of several in one file."""
        self._extra: dict[bytes, bytes] = {}
        """Path, size and target of the next member, where extended headers give them."""
        self._common: dict[bytes, bytes] = {}
        """What extended headers give for all members that follow; part of ``_extra``."""

    def __iter__(self) -> Iterator[Entry]:
        return map(Entry._make, self.columns())

    def columns(self) -> Iterator[_Columns]:
        """The fields of each ``Entry``, in a plain tuple: archives may have millions.

        Most headers are usual ones (a file, a short name, a size in digits): they are parsed right here, quickly.
        """
        read, unpack, size = self._source.read, QUICK_HEADER.unpack_from, self._source.size
        at = origin = last = 0
        while True:
            begin = at - origin
            block = self._ahead[begin : begin + BLOCK]
            if len(block) < BLOCK:
                self._ahead, origin = read(at, BLOCK, at - last), at
                block = self._ahead[:BLOCK]
                if len(block) < BLOCK:
                    self._cut_at_header(at, len(block))
            name, digits, digits_end, checksum, kind, prefix = unpack(block)
            last = at
            if adler32(block) & 0xFFFF != low_adler(checksum) and not self._is_header(at, block):
                following = self._next_archive(at)
                if following is None:
                    return
                at = following
                continue
            try:
                length = int(digits, 8) if digits_end <= b" " else -1
            except ValueError:
                length = -1  # not in 11 digits
            body = at + BLOCK
            entry: _Columns | None
            if kind == _FILE and prefix == b"\0" and name[99] == 0 and length >= 0 and not self._extra:
                entry = name.split(b"\0", 1)[0], body, length, _FILE, b""
            else:
                length, entry = self._parse(bytes(block), body)
            if entry is not None:
                if size is not None and body + length > size:
                    self._cut(body, f"inside member {decoded(entry[0])!r}", length)
                yield entry
                self._last = entry
            at = body + -(-length // BLOCK) * BLOCK

    def content(self, entry: Entry) -> bytes:
        """The bytes of a file, before the next entry is asked for."""
        found = self._read(entry.offset, entry.length)
        if len(found) < entry.length:
            self._cut(entry.offset, f"inside member {decoded(entry.name)!r}", entry.length, len(found))
        return found

    def _read(self, at: int, length: int) -> bytes:
        self._ahead = b""
        return bytes(self._source.read(at, length)[:length])

    def explain(self, entry: Entry) -> str:
        """Why a member that is not a file has no bytes."""
        return f"{self._place(entry.offset - BLOCK)}: member {header.describe(entry.name, entry.kind, entry.target)}"

    def _parse(self, block: bytes, body: int) -> tuple[int, _Columns | None]:
        """The length of any header's body, and its entry; None if it is not a member."""
        name, digits, kind, target, magic, prefix = HEADER.unpack(block)
        try:
            length = header.number(digits)
        except ValueError:
            raise Corrupt(f"{self._place(body - BLOCK)}: the size is {digits!r}, not an octal number") from None
        if kind in EXTENDED:
            self._learn(kind, body, length)
            return length, None
        name = header.text(name)
        if prefix[0] and magic == USTAR:
            name = header.text(prefix) + b"/" + name
        if kind == b"\0":  # v7 marks folders by their names
            kind = _FOLDER if name.endswith(b"/") else _FILE
        extra, self._extra = self._extra, self._common.copy()
        name, target = extra.get(b"path") or name, extra.get(b"linkpath") or header.text(target)
        length = 0 if kind in WITHOUT_BODY else int(extra.get(b"size") or length)
        if kind in IN_PIECES:
            self._refuse_pieces(body - BLOCK, kind)
        if kind == _FOLDER or kind in NOTES:
            return length, None
        return length, (name, body, length, _FILE if kind in FILES else kind, target)

    def _learn(self, kind: bytes, body: int, length: int) -> None:
        """Take in a long name, or pax records."""
        if length > LONGEST_RECORDS:
            raise LimitExceeded(
                f"{self._place(body - BLOCK)}: an extended header of {length:,} bytes; at most {LONGEST_RECORDS:,} are "
                f"read. Write the archive again without extended attributes, or leave it out"
            )
        content = self._read(body, length)
        if len(content) < length:
            self._cut(body, "inside an extended header", length, len(content))
        if kind in LONG_NAMES:
            self._extra[LONG_NAMES[kind]] = header.text(content)
            return
        try:
            records = header.pax_records(content)
        except ValueError as error:
            raise Corrupt(f"{self._place(body - BLOCK)}: a damaged pax header: {error}") from None
        if b"GNU.sparse" in records:
            self._refuse_pieces(body - BLOCK, b"S")
        self._extra |= records
        if kind == b"g":
            self._common |= records

    def _is_header(self, at: int, block: bytes | memoryview) -> bool:
        """Whether a block without the usual checksum has that of some old programs; False if it is zeros."""
        stored, unsigned, signed = header.checksums(memoryview(block))
        if low_adler(stored) >= 0 and header.number(stored) == signed:
            return True
        if block == _ZEROS:
            return False
        if at == 0 and (how := name_compression(block)):
            raise ConfigError(
                f"{self._source.name}: is compressed with {how}, so its members cannot be found: expand it"
            )
        raise Corrupt(
            f"{self._place(at)}: the header checksum does not hold: {stored!r} is stored, its bytes add up to "
            f"{unsigned:06o} (octal). The archive is damaged there, or is not a tar: fetch it again, or leave it out"
        )

    def _next_archive(self, end: int) -> int | None:
        """Where another archive begins behind the zeros at ``end``; None if nothing follows.

        Programs write two blocks of zeros, or fill up a record with them. Any other number is a hole in the file.
        """
        if self._extra != self._common:
            raise Corrupt(f"{self._place(end)}: the archive ends after the name of a member that is not there")
        at = end
        while (block := self._read(at, BLOCK)) == _ZEROS:
            at += BLOCK
        if not block.strip(b"\0"):
            return None
        is_usual = (at - end) % RECORD == 2 * BLOCK or (at - self.begin) % RECORD == 0
        if not (is_usual and len(block) == BLOCK and header.has_checksum(block)):
            raise Corrupt(
                f"{self._place(end)}: zeros end the archive here, but more follows at offset {at:,}, which is not the "
                f"beginning of another archive. Bytes were lost or added: fetch it again, or leave it out"
            )
        self.begin, self._extra, self._common = at, {}, {}
        return at

    def _place(self, offset: int) -> str:
        """Where, for messages."""
        last = self._last
        after = "before any whole member" if last is None else f"after {decoded(last[0])!r}, the last whole member"
        return f"{self._source.name}, offset {offset:,} ({after})"

    def _cut_at_header(self, at: int, found: int) -> NoReturn:
        last, size = self._last, self._source.size or 0
        if last is not None and size < last[1] + last[2]:  # its bytes were skipped
            self._last = None
            self._cut(last[1], f"inside member {decoded(last[0])!r}", last[2])
        self._cut(at, "inside a header" if found else "with no end-of-archive (blocks of zeros)", BLOCK, found)

    def _cut(self, at: int, where: str, wanted: int, found: int | None = None) -> NoReturn:
        if found is None:
            found = max(0, (self._source.size or 0) - at)
        raise Truncated(
            f"{self._place(at)}: the file ends {where}: {wanted:,} bytes were wanted from there, {found:,} are there. "
            f"It was cut short, perhaps by an unfinished download or copy: fetch it again"
        )

    def _refuse_pieces(self, at: int, kind: bytes) -> NoReturn:
        raise Corrupt(
            f"{self._place(at)}: the member here {IN_PIECES[kind]}, so its bytes are not in one piece: write the "
            f"archive again without that option"
        )


def walk(archive: str | Handle, sizes: WindowSizes = WindowSizes()) -> MemberTable:
    """The members of an uncompressed archive, given by its path or by a handle lent from ``Files``."""
    if isinstance(archive, Handle):
        return _collect_members(Window(archive, sizes))
    with Files(max_open=0).lend(identify(archive)) as handle:
        return _collect_members(Window(handle, sizes))


def _collect_members(source: ArchiveSource) -> MemberTable:
    members, links, found = MemberList(), dict[int, Link](), Walk(source)
    add, begin = members.add, 0
    for name, offset, length, kind, target in found.columns():
        if found.begin != begin:
            begin = found.begin
            members.archives.append(len(members))
        if kind == _FILE:
            add(name, offset, length)
        elif kind in LINKS:
            links[len(members)] = Link(target, is_hard=kind == b"1")
            add(name, offset, 0)
        else:
            why = found.explain(Entry(name, offset, length, kind, target))
            way_out = 'Write the archive again without it, or pass on_error="skip" to leave it out'
            members.left_out.append((name, Corrupt(f"{why}. {way_out}")))
    table = members.table(source.name)
    return resolve_links(table, links) if links else table
