"""Small members of one size, gathered from a mapping of their file: no system call and no line of Python each.

Members lie anywhere, so numpy sees the file as if a row of that size began at every byte, and copies the rows wanted.
"""

import numpy as np

from penstock import tally
from penstock.extents import LooseFiles, Members
from penstock.fileio import Files
from penstock.handles import Handle
from penstock.kinds import Npy, Raw
from penstock.members import MemberReader
from penstock.memory import aligned
from penstock.rangeread import MAP_BELOW_BYTES, Gathering
from penstock.sizes import KiB
from penstock.spec import Cast
from penstock.within import Within

# Below so many rows, numpy's calls take longer than a system call each.
WORTH_GATHERING = 4

# Copied at a time by way of memory that numpy takes: it stays in the core's cache.
PIECE_BYTES = 256 * KiB


def member_reader(
    array: Members, files: Files, cast: Cast | None, part: Within | None
) -> "MemberReader | GatherMembers":
    """The reader that suits the members."""
    kind, can_be_mapped = array.kind, not isinstance(array, LooseFiles) and array.file.can_be_mapped
    if can_be_mapped and isinstance(kind, Npy | Raw) and len(kind.head) + kind.bytes < MAP_BELOW_BYTES:
        return GatherMembers(array, files, cast, part)
    return MemberReader(array, files, cast, part)


class GatherMembers(Gathering):
    """Arrays behind one and the same header, or behind none."""

    def __init__(self, array: Members, files: Files, cast: Cast | None, part: Within | None) -> None:
        super().__init__(array, files, cast, part)
        self.members, self.head, self.length = array, array.kind.head, len(array.kind.head) + array.kind.bytes
        self._piece = max(1, PIECE_BYTES // max(1, self.length))
        self.one_by_one = MemberReader(array, files, cast, part)

    def scratch_bytes(self, rows: int) -> int:
        taken = aligned(min(rows, self._piece) * self.length)
        return max(super().scratch_bytes(rows) + taken, self.one_by_one.scratch_bytes(rows))

    def read(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        if len(rows) >= WORTH_GATHERING and self._alike(rows):
            mine = tally.mine()
            mine.chunks_read += len(rows)
            mine.bytes_read += len(rows) * len(self.head)
            super().read(rows, at, target)
        else:  # few, or some is not there or not as the first is: that is found out, and told, one by one
            self.one_by_one.read(rows, at, target)

    def _alike(self, rows: np.ndarray) -> bool:
        members = self.members
        if (members.lengths[rows] != self.length).any() or (members.offsets[rows] < 0).any():
            return False
        if not self.head or not len(rows):
            return True
        head = np.frombuffer(self.head, np.uint8)
        with self.files.lend(members.file, mapped=True) as handle:
            pieces = (rows[begin : begin + self._piece] for begin in range(0, len(rows), self._piece))
            return all((_rows_of(handle, len(head))[members.offsets[piece]] == head).all() for piece in pieces)

    def _gather(self, handle: Handle, rows: np.ndarray, goal: np.ndarray) -> None:
        source, skipped = _rows_of(handle, self.array.row_bytes), len(self.head)
        for begin in range(0, len(rows), self._piece):
            piece = slice(begin, begin + self._piece)
            goal[piece] = source[self.members.offsets[rows[piece]] + skipped]

    def _places(self, rows: np.ndarray) -> np.ndarray:
        places: np.ndarray = self.members.offsets[rows]
        return places


def _rows_of(handle: Handle, size: int) -> np.ndarray:
    """The file as rows of ``size`` bytes that begin one byte after another."""
    whole = handle.bytes
    return np.ndarray((len(whole) - size + 1, size), np.uint8, whole, strides=(1, 1))
