"""The members of one sample, read at once where they lie together: one request of the file instead of one a field."""

from collections.abc import Mapping
from itertools import pairwise
from operator import itemgetter

import numpy as np

from penstock import tally
from penstock.extents import LooseFiles
from penstock.handles import Handle
from penstock.kinds import Held, Npy, Raw
from penstock.membergather import WORTH_GATHERING, GatherMembers
from penstock.members import MemberReader
from penstock.memory import aligned, borrow
from penstock.sizes import KiB

# Arrays go straight into the batch. What is decoded passes through scratch, up to so many bytes a sample.
MOST_BYTES = 256 * KiB

# What may lie between two members: less than a page, which the system reads with its neighbours in any case.
GAP_BYTES = 4 * KiB


class _Field:
    """How one field of a sample is read with the others."""

    def __init__(self, reader: MemberReader) -> None:
        self.reader, self.offsets, self.lengths = reader, reader.array.offsets, reader.array.lengths
        self.head, self.straight_bytes = b"", 0
        """What an array begins with as a rule, and how many bytes then follow; 0 for what must be decoded."""
        if reader.straight and isinstance(reader.kind, Npy | Raw):
            self.head, self.straight_bytes = reader.kind.head, reader.kind.bytes
        self.whole = len(self.head) + self.straight_bytes


class Together:
    """Fields of one archive."""

    def __init__(self, readers: Mapping[str, MemberReader | GatherMembers]) -> None:
        self._gathering = {name for name, reader in readers.items() if isinstance(reader, GatherMembers)}
        self._fields = {
            name: _Field(reader.one_by_one if isinstance(reader, GatherMembers) else reader)
            for name, reader in readers.items()
        }
        one = next(iter(self._fields.values())).reader
        self._file, self._files = one.array.file, one.files
        longest = sum(
            GAP_BYTES + (len(field.head) if field.straight_bytes else field.reader.array.longest)
            for field in self._fields.values()
        )
        self._most = min(MOST_BYTES, longest)

    def scratch_bytes(self) -> int:
        return aligned(self._most) + max(field.reader.scratch_bytes(1) for field in self._fields.values())

    def suits(self, names: list[str], rows: int) -> list[str]:
        """Those of the fields that are better read together than each for itself."""
        many = rows >= WORTH_GATHERING
        found = [name for name in names if name in self._fields and not (many and name in self._gathering)]
        return found if len(found) > 1 else []

    def read(self, rows: np.ndarray, at: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """Put the members of sample ``rows[k]`` at ``out[field][at[k]]``."""
        fields = [(self._fields[name], target) for name, target in out.items()]
        with self._files.lend(self._file) as handle:
            for row, place in zip(rows.tolist(), at.tolist(), strict=True):
                if not self._read_row(handle, row, place, fields):
                    for field, target in fields:
                        field.reader.read_row(handle, row, place, target)

    def _read_row(self, handle: Handle, row: int, place: int, fields: list[tuple[_Field, np.ndarray]]) -> bool:
        """With one request: arrays into the batch, and into scratch what lies before, between and behind them.

        False where the members do not lie together.
        """
        members = [(int(field.offsets[row]), int(field.lengths[row]), field, target) for field, target in fields]
        members.sort(key=itemgetter(0))
        begin, end = members[0][0], members[-1][0] + members[-1][1]
        straight = sum(field.straight_bytes for _, length, field, _ in members if length == field.whole)
        between = end - begin - sum(length for _, length, _, _ in members)
        loose = end - begin - straight
        apart = all(before[0] + before[1] <= after[0] for before, after in pairwise(members))  # links may share bytes
        if begin < 0 or loose > self._most or between > GAP_BYTES * (len(members) - 1) or not apart:
            return False
        with borrow(loose) as scratch:
            pieces: list[np.ndarray] = []
            arrays, others = [], []
            done, ahead = 0, begin  # how far scratch is given away, and how far the file's bytes are ahead of it
            for offset, length, field, target in members:
                if field.straight_bytes and length == field.whole:
                    data = offset - ahead + len(field.head)
                    pieces += (scratch[done:data], target[place : place + 1])
                    arrays.append((scratch[offset - ahead : data], field, target))
                    done, ahead = data, ahead + field.straight_bytes
                else:
                    others.append((Held(ahead, scratch), field, target))
            handle.read_into(begin, *pieces, scratch[done:])
            mine = tally.mine()
            mine.bytes_read -= between
            mine.chunks_read += len(arrays)
            for head, field, target in arrays:
                if head.tobytes() != field.head:
                    field.reader.read_row(handle, row, place, target)
            for held, field, target in others:
                field.reader.read_row(held, row, place, target)
        return True


def together(readers: Mapping[str, object]) -> Together | None:
    """A reader of several fields of one archive; None where they are not that."""
    found = {
        name: reader
        for name, reader in readers.items()
        if isinstance(reader, MemberReader | GatherMembers) and not isinstance(reader.array, LooseFiles)
    }
    files = {reader.array.file for reader in found.values()}
    return Together(found) if len(found) > 1 and len(files) == 1 else None
