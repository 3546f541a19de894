"""Chunks that are one row each: decoded straight into place, or gathered from a mapping if they are small and plain.

In a shard, rows are looked up together, and the shard is lent once for all of them. A row is plain if it is stored
unchanged, with or without a checksum after it.
"""

import numpy as np

from penstock.base import counters
from penstock.base.scratch import aligned, borrow
from penstock.base.spec import Cast
from penstock.base.urls import is_remote
from penstock.errors import Truncated
from penstock.files.files import Files
from penstock.files.handles import Handle
from penstock.read.chunk_blocks import BlockReader
from penstock.read.chunk_decode import ChunkPlace
from penstock.read.chunk_files import CachedIndex, ShardTable
from penstock.read.codecs import Checksum, Crc32c
from penstock.read.extents import NEVER_WRITTEN, Chunks
from penstock.read.part import RowPart
from penstock.read.pieces import WHOLE, Share
from penstock.read.rows import GatherReader, gather_places, rows_at_bytes, rows_per_piece


class RowChunks(BlockReader):
    """One chunk is one row."""

    def __init__(self, array: Chunks, files: Files, cast: Cast | None, part: RowPart | None) -> None:
        super().__init__(array, files, cast, part)
        decoders = self.decoding.decoders
        self._has_sum = len(decoders) == 1 and isinstance(decoders[0], Crc32c)
        self._is_plain = self._has_sum or not decoders
        is_small = array.row_bytes < files.policy.map_rows_below_bytes
        can_be_mapped = array.file.can_be_mapped and files.manifest is None
        gathers = self._is_plain and is_small and can_be_mapped
        self._gatherer = GatherPlaces(array, files, cast, self.stored_bytes) if gathers else None

    @property
    def stored_bytes(self) -> int:
        """Of a plain row, its checksum included."""
        return self.array.row_bytes + (Checksum.BYTES if self._has_sum else 0)

    def scratch_bytes(self, rows: int) -> int:
        one = self.decoding.scratch_bytes(self.cast)
        return one if self._gatherer is None else max(one, self._gatherer.scratch_bytes(rows))

    def filled(self, share: Share) -> np.ndarray:
        return np.full(self.spec.shape, share[0] == 0)

    def read(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray, share: Share = WHOLE) -> None:
        if share[0] != 0 or not self.array.row_bytes:
            return
        table = self.decoding.many_files
        with self.decoding.lend_file() as handle:
            if not isinstance(table, ShardTable):
                self._read_one_by_one(handle, rows, at, target)
                return
            for lines, kept, numbers in table.locate_rows(self.files, rows):
                if kept is None:
                    self._read_one_by_one(None, rows[lines], at[lines], target)
                elif not self._gather(kept, numbers, at[lines], target):
                    self._read_shard(kept, numbers, rows[lines], at[lines], target)
                    kept.set_checked(numbers)

    def _read_one_by_one(self, handle: Handle | None, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        for row, to in zip(rows.tolist(), at.tolist(), strict=True):
            self.decoding.read(handle, row, 0, target[to : to + 1].reshape(-1), self.cast)

    def _read_shard(
        self, kept: CachedIndex, numbers: np.ndarray, rows: np.ndarray, at: np.ndarray, target: np.ndarray
    ) -> None:
        counters.mine().chunks_read += len(rows)
        table = kept.table[numbers]
        checked = kept.checked[numbers]
        straight = np.zeros(len(rows), bool)
        if self._is_plain and self.cast is None:
            straight = self._are_whole(table) & (checked | (not self._has_sum))
        columns = (rows, at, *table.T, straight, checked)
        with self.files.lend(kept.file) as handle:
            self.decoding.check_longest(handle, int(table[:, 1].max()))
            for row, to, offset, length, is_straight, is_checked in zip(*map(np.ndarray.tolist, columns), strict=True):
                goal, place = target[to : to + 1], ChunkPlace(row, 0, offset, length, is_checked=is_checked)
                if not is_straight:
                    self.decoding.read_at(handle, place, goal.reshape(-1), self.cast)
                    continue
                try:
                    handle.read_into(offset, goal)
                except Truncated as error:
                    raise self.decoding.explained(error, handle, place) from error

    def _are_whole(self, table: np.ndarray) -> np.ndarray:
        """Whether plain rows are there, in full length, by the index of their shard."""
        whole: np.ndarray = (table[:, 1] == self.stored_bytes) & (table[:, 0] != NEVER_WRITTEN)
        return whole

    def _gather(self, kept: CachedIndex, numbers: np.ndarray, at: np.ndarray, target: np.ndarray) -> bool:
        """Read rows of one shard from a mapping of it; False if they must be read one by one, which names what is wrong
        with them."""
        gatherer, table = self._gatherer, kept.table[numbers]
        if gatherer is None or is_remote(kept.file.path):
            return False
        offsets = table[:, 0]
        if not self._are_whole(table).all():
            return False
        with self.files.lend(kept.file, mapped=True) as handle:
            if self._has_sum and not self._are_right(handle, kept, numbers):
                return False
            counters.mine().chunks_read += len(numbers)
            gatherer.read_from(handle, offsets, at, target)
        return True

    def _are_right(self, handle: Handle, kept: CachedIndex, numbers: np.ndarray) -> bool:
        """Whether rows match their checksums; each is compared once."""
        new = numbers[~kept.checked[numbers]]
        if not len(new):
            return True
        offsets, size = kept.table[new, 0], self.array.row_bytes
        found = Crc32c.of_pieces(handle.mapping, offsets, size)
        stored = rows_at_bytes(handle, Checksum.BYTES)[offsets + size].view("<u4")[:, 0]
        if (found != stored).any():
            return False
        kept.set_checked(new)
        return True


class GatherPlaces(GatherReader):
    """Rows of a mapped file by the places of their first bytes, which stand for their numbers.

    Rows that lie at equal distances are items of one array to numpy, which copies those without the interpreter's lock.
    """

    def __init__(self, array: Chunks, files: Files, cast: Cast | None, stored_bytes: int) -> None:
        super().__init__(array, files, cast, None)
        self._stored_bytes = stored_bytes
        self._piece = max(1, files.policy.gather_bytes // max(1, stored_bytes))
        """How many rows pass through scratch at a time, to leave out what is stored after each."""

    def scratch_bytes(self, rows: int) -> int:
        one_by_one = aligned(min(rows, rows_per_piece(self.array.row_bytes)) * self.array.row_bytes)
        return super().scratch_bytes(rows) + max(one_by_one, aligned(min(rows, self._piece) * self._stored_bytes))

    def _gather(self, handle: Handle, rows: np.ndarray, goal: np.ndarray) -> None:
        step, size = self._stored_bytes, goal.shape[1]
        begin = int(rows[0]) % step
        numbers, rest = np.divmod(rows - begin, step)
        if rest.any():
            gather_places(handle, rows, goal)
            return
        whole = handle.mapping[begin : len(handle.mapping) - (len(handle.mapping) - begin) % step]
        stored = whole.reshape(-1, step)
        if step == size:
            stored.take(numbers, 0, goal, "clip")
            return
        for first in range(0, len(numbers), self._piece):
            some = numbers[first : first + self._piece]
            with borrow(len(some) * step) as scratch:
                taken = scratch.reshape(-1, step)
                stored.take(some, 0, taken, "clip")
                np.copyto(goal[first : first + len(some)], taken[:, :size])

    def _places(self, rows: np.ndarray) -> np.ndarray:
        return rows
