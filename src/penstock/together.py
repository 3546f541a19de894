"""The members of one sample, read at once where they lie together: one request of the file instead of one a field."""

from collections.abc import Mapping

import numpy as np

from penstock import tally
from penstock.extents import LooseFiles
from penstock.handles import Handle
from penstock.membergather import WORTH_GATHERING, GatherMembers
from penstock.members import MemberReader
from penstock.memory import aligned, borrow
from penstock.sizes import KiB

# Larger samples are read straight into the batch: the copy would take longer than the requests.
MOST_BYTES = 256 * KiB

# What may lie between two members: less than a page, which the system reads with its neighbours in any case.
GAP_BYTES = 4 * KiB


class Together:
    """Fields of one archive."""

    def __init__(self, readers: Mapping[str, MemberReader | GatherMembers]) -> None:
        self._gathering = {name for name, reader in readers.items() if isinstance(reader, GatherMembers)}
        self._readers = {
            name: reader.one_by_one if isinstance(reader, GatherMembers) else reader for name, reader in readers.items()
        }
        one = next(iter(self._readers.values()))
        self._file, self._files = one.array.file, one.files
        longest = sum(reader.array.longest + GAP_BYTES for reader in self._readers.values())
        self._most = min(MOST_BYTES, longest)

    def scratch_bytes(self) -> int:
        return aligned(self._most) + max(reader.scratch_bytes(1) for reader in self._readers.values())

    def suits(self, names: list[str], rows: int) -> list[str]:
        """Those of the fields that are better read together than each for itself."""
        many = rows >= WORTH_GATHERING
        found = [name for name in names if name in self._readers and not (many and name in self._gathering)]
        return found if len(found) > 1 else []

    def read(self, rows: np.ndarray, at: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """Put the members of sample ``rows[k]`` at ``out[field][at[k]]``."""
        fields = [(self._readers[name], target) for name, target in out.items()]
        with self._files.lend(self._file) as handle:
            for row, place in zip(rows.tolist(), at.tolist(), strict=True):
                self._read_row(handle, row, place, fields)

    def _read_row(self, handle: Handle, row: int, place: int, fields: list[tuple[MemberReader, np.ndarray]]) -> None:
        spans = [(int(reader.array.offsets[row]), int(reader.array.lengths[row])) for reader, _ in fields]
        begin, end = min(spans)[0], max(offset + length for offset, length in spans)
        between = end - begin - sum(length for _, length in spans)
        if begin < 0 or end - begin > self._most or between > GAP_BYTES * (len(spans) - 1):
            _each(handle, row, place, fields)
            return
        with borrow(end - begin) as span:
            handle.read_into(begin, span)
            tally.mine().bytes_read -= between
            _each(_Held(begin, span), row, place, fields)


def _each(handle: "Handle | _Held", row: int, place: int, fields: list[tuple[MemberReader, np.ndarray]]) -> None:
    for reader, target in fields:
        reader.read_row(handle, row, place, target)


class _Held:
    """Part of a file in memory, read as the file would be."""

    def __init__(self, begin: int, span: np.ndarray) -> None:
        self._begin, self._span = begin, span

    def read_into(self, offset: int, *targets: np.ndarray) -> None:
        at = offset - self._begin
        for target in targets:
            np.copyto(target.reshape(-1).view(np.uint8), self._span[at : at + target.nbytes])
            at += target.nbytes


def together(readers: Mapping[str, object]) -> Together | None:
    """A reader of several fields of one archive; None where they are not that."""
    found = {
        name: reader
        for name, reader in readers.items()
        if isinstance(reader, MemberReader | GatherMembers) and not isinstance(reader.array, LooseFiles)
    }
    files = {reader.array.file for reader in found.values()}
    return Together(found) if len(found) > 1 and len(files) == 1 else None
