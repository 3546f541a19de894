"""Where the members of a tar archive lie, found by walking its headers once.

Only regular files are members; folders, links and devices are passed over.

Rules:
1. Nothing in a header is believed before its checksum holds.
2. An archive ends with blocks of zeros and nothing after them. Anything else that stops the walk is an error: a cut
   archive must not pass for a shorter one, nor a damaged header for the end.
3. Names are bytes that name samples. They are never used as paths.
4. The bodies of large members are not read.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn
from zlib import adler32

import numpy as np

from penstock import tarheader
from penstock.errors import ConfigError, Corrupt, LimitExceeded, Truncated
from penstock.fileio import Files
from penstock.handles import Handle, identify
from penstock.tarblocks import usual
from penstock.tarheader import BLOCK, EXTENDED, FILES, HEADER, IN_PIECES, QUICK_HEADER, USTAR, WITHOUT_BODY, low_adler
from penstock.texts import Texts, decoded

# The archive is read a window at a time while headers are near each other, in steps that grow: large enough to make
# calls cheap, to the system and to numpy, small enough to stay in a core's cache. Where the next header is far away,
# only a page is read there: copying 32 KiB costs about as much as another call.
WINDOW_BYTES = 1024 * 1024
FIRST_BYTES = 64 * 1024
PAGE_BYTES = 4096
NEAR_BYTES = 32 * 1024

# So much of a window is worth looking at for many usual headers at a time. Where it has too few of them, the next ones
# are understood one by one: at first so many, and twice as many each time.
WORTH_BYTES = 64 * 1024
WORTH_MEMBERS = 64
ALONE_AT_FIRST = 32
ALONE_AT_MOST = 4096

# Long names and pax records have a body of their own. The longest path that a system takes has 4 KiB.
LONGEST_RECORDS = 128 * 1024

_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclass(frozen=True)
class MemberTable:
    """The regular files of one archive, in its order."""

    path: str
    """The archive, for messages."""
    names: Texts
    offsets: np.ndarray
    """Where the bytes of each begin (int64)."""
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        """Name, offset and length of each."""
        for index, name in enumerate(self.names):
            yield name, int(self.offsets[index]), int(self.lengths[index])


class MemberList:
    """A ``MemberTable`` in the making."""

    def __init__(self) -> None:
        self.names, self.ends = bytearray(), array("q")
        self.offsets, self.lengths = array("q"), array("q")

    def add(self, name: bytes, offset: int, length: int) -> None:
        self.names += name
        self.ends.append(len(self.names))
        self.offsets.append(offset)
        self.lengths.append(length)

    def extend(self, names: np.ndarray, name_lengths: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> None:
        self.ends.frombytes((np.cumsum(name_lengths) + len(self.names)).tobytes())
        self.names += names.tobytes()
        self.offsets.frombytes(offsets.tobytes())
        self.lengths.frombytes(lengths.tobytes())

    def last(self) -> bytes | None:
        """The name of the last member."""
        return bytes(self.names[self.ends[-2] if len(self.ends) > 1 else 0 :]) if self.ends else None

    def table(self, path: str) -> MemberTable:
        return MemberTable(
            path,
            Texts(np.frombuffer(self.names, np.uint8), np.frombuffer(self.ends, np.int64)),
            np.frombuffer(self.offsets, np.int64),
            np.frombuffer(self.lengths, np.int64),
        )


def walk(archive: str | Handle) -> MemberTable:
    """The members of an uncompressed archive, given by its path or by a handle lent from ``Files``."""
    if isinstance(archive, Handle):
        return _Walk(archive).to_end()
    with Files(max_open=0).lend(identify(archive)) as handle:
        return _Walk(handle).to_end()


class _Window:
    """The bytes of an archive around the place where the walk is: ``view`` holds those from ``begin`` to ``end``."""

    def __init__(self, handle: Handle) -> None:
        self._handle, self._size = handle, handle.file.size
        self._bytes = np.empty(WINDOW_BYTES, np.uint8)
        self.view = self._bytes.data
        self.begin = self.end = 0
        self._near_bytes = min(FIRST_BYTES, WINDOW_BYTES)

    def move(self, at: int, length: int, *, seen: int) -> None:
        """Ahead to bytes that are in the file; ``seen`` is where those begin that were looked at last."""
        if at - seen <= NEAR_BYTES:
            read = max(length, self._near_bytes)
            self._near_bytes = min(2 * self._near_bytes, WINDOW_BYTES)
        else:
            read, self._near_bytes = max(length, PAGE_BYTES), min(FIRST_BYTES, WINDOW_BYTES)
        end = min(at + read, self._size)
        self._handle.read_into(at, self._bytes[: end - at])
        self.begin, self.end = at, end

    def take(self, at: int, length: int) -> memoryview:
        """Bytes that are in the file, until the window moves on."""
        if at + length > self.end:
            self.move(at, length, seen=at)
        begin = at - self.begin
        return self.view[begin : begin + length]


class _Walk:
    """One pass over one archive: what it has found, and what it was told of members to come."""

    def __init__(self, handle: Handle) -> None:
        self.path, self.size = handle.file.path, handle.file.size
        self.window = _Window(handle)
        self.members = MemberList()
        self.told: dict[bytes, bytes] = {}
        """Path and size of the next member, as far as extended headers gave them."""
        self.told_of_all: dict[bytes, bytes] = {}
        """The same of every member to come; part of ``told``."""

    def to_end(self) -> MemberTable:
        """All members.

        Where usual headers are near each other, many are understood at a time. Alone, the usual header (a file, a short
        name, a size in digits, nothing told before) is understood in place, as a call for every step would halve the
        speed. ``_entry`` understands that one and all others.
        """
        window, unpack, size = self.window, QUICK_HEADER.unpack_from, self.size
        add = self.members.add
        at, seen, alone, patience = 0, 0, 0, ALONE_AT_FIRST
        while True:
            if alone == 0 and not self.told:
                found, at = self._usual(at)
                seen = at
                if found < WORTH_MEMBERS:
                    alone, patience = patience, min(2 * patience, ALONE_AT_MOST)
                continue
            alone = max(0, alone - 1)
            if at + BLOCK > window.end:
                self._move(at, seen)
            begin = at - window.begin
            block = window.view[begin : begin + BLOCK]
            name, digits, digits_end, checksum, kind, prefix = unpack(block)
            if adler32(block) & 0xFFFF != low_adler(checksum) and self._is_end(at, block):
                return self.members.table(self.path)
            try:
                length = int(digits, 8) if digits_end <= b" " else -1
            except ValueError:
                length = -1  # not in 11 digits
            seen, body = at, at + BLOCK
            if kind == b"0" and prefix == b"\0" and name[99] == 0 and not self.told and 0 <= length <= size - body:
                add(name[: name.find(0)], body, length)
            elif kind in EXTENDED and length >= 0:
                self._learn(kind, body, length)
            else:
                length = self._entry(block, body)
            at = body + -(-length // BLOCK) * BLOCK

    def _usual(self, at: int) -> tuple[int, int]:
        """Take in the usual members from ``at`` on, as far as the window goes; how many, and where the next stands."""
        window = self.window
        if at + WORTH_BYTES > window.end and at + BLOCK <= self.size:
            self._move(at, at)
        if at + BLOCK > window.end:
            return 0, at
        found = usual(
            np.frombuffer(window.view[at - window.begin : window.end - window.begin], np.uint8),
            (self.size - at) // BLOCK,
        )
        self.members.extend(found.names, found.name_lengths, at + found.bodies * BLOCK, found.lengths)
        return len(found), at + found.used * BLOCK

    def _entry(self, block: memoryview, body: int) -> int:
        """Take in any header, and say how long its body is."""
        name, size, kind, magic, prefix = HEADER.unpack(block)
        at = body - BLOCK
        try:
            length = tarheader.number(size)
        except ValueError:
            raise Corrupt(f"{self._place(at)}: the size is {size!r}, not an octal number") from None
        if kind in EXTENDED:
            self._learn(kind, body, length)
            return length
        name = tarheader.text(name)
        if prefix[0] and magic == USTAR:
            name = tarheader.text(prefix) + b"/" + name
        if kind == b"\0":  # v7 told folders by their names
            kind = b"5" if name.endswith(b"/") else b"0"
        name, length = self._corrected(name, length)
        if kind in WITHOUT_BODY:
            return 0
        if kind in IN_PIECES:
            self._in_pieces(at, kind)
        if body + length > self.size:
            self._cut(body, f"inside member {decoded(name)!r}", length)
        if kind in FILES:
            self.members.add(name, body, length)
        return length

    def _move(self, at: int, seen: int) -> None:
        if at + BLOCK > self.size:
            self._cut(at, "inside a header" if at < self.size else "with no end-of-archive (blocks of zeros)", BLOCK)
        self.window.move(at, BLOCK, seen=seen)

    def _is_end(self, at: int, block: memoryview) -> bool:
        """Whether a block without the usual checksum ends the archive. If not, it has that of some old programs."""
        stored, unsigned, signed = tarheader.checksums(block)
        if low_adler(stored) >= 0 and tarheader.number(stored) == signed:
            return False
        if not any(block):
            self._check_end(at)
            return True
        for magic, how in _COMPRESSED.items():
            if at == 0 and block[: len(magic)] == magic:
                raise ConfigError(f"{self.path}: is compressed with {how}, so its members cannot be found: expand it")
        raise Corrupt(
            f"{self._place(at)}: the header checksum does not hold: {stored!r} is stored, its bytes add up to "
            f"{unsigned:06o} (octal). The archive is damaged there, or is no tar: fetch it again, or leave it out"
        )

    def _check_end(self, end: int) -> None:
        """Nothing but zeros up to the end of the file: more means another archive, or a hole in this one."""
        for at in range(end, self.size, WINDOW_BYTES):
            rest = np.frombuffer(self.window.take(at, min(WINDOW_BYTES, self.size - at)), np.uint8)
            if rest.any():
                raise Corrupt(
                    f"{self._place(end)}: zeros end the archive here, but more follows at offset "
                    f"{at + int((rest != 0).argmax()):,}. Either bytes were lost: fetch it again. Or archives were "
                    f"put one behind the other: keep each in a file of its own"
                )
        if self.told != self.told_of_all:
            raise Corrupt(f"{self._place(end)}: the archive ends after the name of a member that is not there")

    def _learn(self, kind: bytes, body: int, length: int) -> None:
        """Take in a long name, or pax records."""
        if length > LONGEST_RECORDS:
            raise LimitExceeded(
                f"{self._place(body - BLOCK)}: an extended header of {length:,} bytes; at most {LONGEST_RECORDS:,} are "
                f"read. Write the archive again without extended attributes, or leave it out"
            )
        if body + length > self.size:
            self._cut(body, "inside an extended header", length)
        said = self.window.take(body, length).tobytes()
        if kind == b"L":
            self.told[b"path"] = tarheader.text(said)
        elif kind != b"K":  # the long name of a link
            try:
                records = tarheader.pax_records(said)
            except ValueError as error:
                raise Corrupt(f"{self._place(body - BLOCK)}: a damaged pax header: {error}") from None
            if b"GNU.sparse" in records:
                self._in_pieces(body - BLOCK, b"S")
            self.told |= records
            if kind == b"g":
                self.told_of_all |= records

    def _corrected(self, name: bytes, length: int) -> tuple[bytes, int]:
        """A member's name and length, as told by extended headers if they did."""
        told, self.told = self.told, self.told_of_all.copy()
        return told.get(b"path") or name, int(told.get(b"size") or length)

    def _place(self, offset: int) -> str:
        """Where, for messages."""
        last = self.members.last()
        after = "before any whole member" if last is None else f"after {decoded(last)!r}, the last whole member"
        return f"{self.path}, offset {offset:,} ({after})"

    def _cut(self, at: int, where: str, wanted: int) -> NoReturn:
        raise Truncated(
            f"{self._place(at)}: the file ends {where}: {wanted:,} bytes were wanted from there, "
            f"{max(0, self.size - at):,} are there. It was cut short, perhaps by an unfinished download or copy: fetch "
            f"it again"
        )

    def _in_pieces(self, at: int, kind: bytes) -> NoReturn:
        raise ConfigError(
            f"{self._place(at)}: the member here {IN_PIECES[kind]}, so its bytes are not in one piece: write the "
            f"archive again without that option"
        )
