"""Arrays inside a member of an archive, whose one checksum covers all of it."""

import zlib

from penstock.base.scratch import borrow
from penstock.base.sizes import KiB, MiB
from penstock.errors import Corrupt
from penstock.files.handles import Handle

# Read at a time to compare a member.
PIECE_BYTES = 256 * KiB

# Members up to this size are compared: some 50 ms. The first row of a larger one would take too long.
MOST_BYTES = 64 * MiB


class MemberSum:
    """The CRC-32 of a member, compared once in each process, before the first of its rows is read."""

    def __init__(self, name: str, begin: int, length: int, crc32: int) -> None:
        self.name, self._begin, self._length, self._crc32 = name, begin, length, crc32
        self._found: int | None = None

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.name, self._begin, self._length, self._crc32)

    @property
    def is_sound(self) -> bool:
        """Whether it was compared, and is what was packed."""
        return self._found == self._crc32

    def check(self, handle: Handle) -> None:
        """Refuse a member that is not what was packed. Threads that come at the same time all compare it."""
        if self._found is None:
            self._found = self._sum(handle)
        if not self.is_sound:
            raise Corrupt(
                f"{handle.file.path}: {self.name}: its CRC-32 is not the one in the archive's directory (offset "
                f"{self._begin:,}); the archive is damaged there: fetch it again"
            )

    def _sum(self, handle: Handle) -> int:
        found, end = 0, self._begin + self._length
        with borrow(min(PIECE_BYTES, self._length)) as piece:
            for begin in range(self._begin, end, PIECE_BYTES):
                part = piece[: end - begin]
                handle.read_into(begin, part)
                found = zlib.crc32(part.data, found)
        return found
