"""Small chunks, of which a row may have hundreds of thousands (one time course per chunk, say), read in groups.

Neighbours in the file are read together. A group is turned from chunk order into row order in a core's cache, and each
row's share of it is put into place in one call.
"""

from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.base import counters
from penstock.base.scratch import aligned, borrow
from penstock.base.spec import Cast
from penstock.errors import Corrupt, DecodeFailed, Truncated
from penstock.files.files import Files
from penstock.files.handles import Handle
from penstock.read.chunk_blocks import BlockReader, WantedRows, place_elements
from penstock.read.chunk_decode import ChunkPlace, check_crc32
from penstock.read.chunk_files import locating_bytes
from penstock.read.coalesce import are_consecutive, plan_spans
from penstock.read.convert import convert, convert_scratch_bytes
from penstock.read.extents import NEVER_WRITTEN, Chunks
from penstock.read.part import RowPart
from penstock.read.pieces import Share, groups, share_of

# Groups from which the bytes of a read of all groups, gaps included, are estimated.
SAMPLED_GROUPS = 8


class SmallChunks(BlockReader):
    """Chunks in groups, in the order in which their elements are wanted."""

    def __init__(self, array: Chunks, files: Files, cast: Cast | None, part: RowPart | None) -> None:
        super().__init__(array, files, cast, part)
        policy = self.policy
        self.group = max(1, min(policy.group_bytes // array.chunk_bytes, policy.group_elements // array.piece_elements))
        self._wanted = groups(array, self.part)
        self.pieces_per_row = len(self._wanted)

    @cached_property
    def epoch_bytes(self) -> int:
        """Bytes that are read if each block is read once, gaps between chunks included; estimated from some groups."""
        table, groups = self.array.table, range(0, len(self._wanted), self.group)
        if self.decoding.many_files is not None or len(self._wanted) == table.shape[1] or not table.shape[0]:
            return super().epoch_bytes
        some = groups[:: -(-len(groups) // SAMPLED_GROUPS)]
        return sum(map(self._span_bytes, some)) * len(groups) // max(1, len(some)) * table.shape[0]

    def _span_bytes(self, begin: int) -> int:
        """Bytes that are read for the first block's group from piece ``begin`` on."""
        pieces = self._wanted.pieces(begin, min(begin + self.group, len(self._wanted)))
        offsets, lengths, _ = self.array.table.find(0, pieces)
        written = np.flatnonzero(offsets != NEVER_WRITTEN)
        gap, most = self.policy.chunk_gap_bytes, self.policy.chunk_span_bytes
        return sum(end - first for _, first, end in plan_spans(offsets, lengths, written, gap, most))

    def scratch_bytes(self, rows: int) -> int:
        array = self.array
        group = min(self.group, len(self._wanted))
        elements = group * array.piece_elements
        decoded = 2 * aligned(group * array.chunk_bytes)  # in chunk order and in row order
        span = aligned(max(self.policy.chunk_span_bytes, array.table.longest))
        placing = aligned(elements * array.stored.itemsize) + aligned(elements * self.spec.dtype.itemsize)
        if self.cast:
            converted = aligned(array.rows_per_chunk * elements * self.spec.dtype.itemsize)
            placing = max(placing, converted) + convert_scratch_bytes(array.rows_per_chunk * elements, self.cast)
        tables = 48 * elements  # numpy's own: where the elements of a group lie and go
        reading = span + self.decoding.scratch_bytes(None) + locating_bytes(array, group)
        return decoded + max(reading, placing) + tables

    def _read_block(self, handle: Handle | None, block: int, wanted: WantedRows, share: Share) -> None:
        array = self.array
        goal = wanted.target.reshape(len(wanted.target), -1)
        rows, places = wanted.inner.tolist(), wanted.at.tolist()
        mine = share_of(len(self._wanted), share)
        in_one_piece = self.cast is None and are_consecutive(wanted.inner) and are_consecutive(wanted.at)
        for begin in mine[:: self.group]:
            end = min(begin + self.group, mine.stop)
            pieces = self._wanted.pieces(begin, end)
            local, to = self._wanted.elements(begin, end, pieces)
            size = len(pieces) * array.chunk_bytes
            with borrow(size) as decoded, borrow(size) as turned:
                self._read_group(handle, block, pieces, decoded.reshape(len(pieces), -1))
                if in_one_piece and local is None and isinstance(to, slice):
                    together = goal[places[0] : places[0] + len(rows), to].reshape(len(rows), len(pieces), *array.chunk)
                    np.copyto(together, np.moveaxis(self._by_rows(decoded), 1, 0)[rows[0] : rows[0] + len(rows)])
                    continue
                by_row = turned.view(array.stored).reshape(array.rows_per_chunk, len(pieces), *array.chunk)
                np.copyto(by_row, np.moveaxis(self._by_rows(decoded), 1, 0))
                by_row = by_row.reshape(array.rows_per_chunk, -1)
                if self.cast is None or local is not None or 2 * len(rows) < array.rows_per_chunk:
                    for row, place in zip(rows, places, strict=True):
                        place_elements(by_row[row], local, goal[place], to, self.cast)
                    continue
                with borrow(by_row.size * goal.itemsize) as scratch:
                    ready = scratch.view(goal.dtype).reshape(by_row.shape)
                    convert(by_row.reshape(-1), ready.reshape(-1), self.cast)  # at once: rows of a group are short
                    for row, place in zip(rows, places, strict=True):
                        goal[place][to] = ready[row]

    def filled(self, share: Share) -> np.ndarray:
        flags = np.zeros(self.spec.shape, bool)
        mine = share_of(len(self._wanted), share)
        for begin in mine[:: self.group]:
            end = min(begin + self.group, mine.stop)
            flags.reshape(-1)[self._wanted.elements(begin, end, self._wanted.pieces(begin, end))[1]] = True
        return flags

    def _read_group(self, handle: Handle | None, block: int, pieces: np.ndarray, decoded: np.ndarray) -> None:
        """Read each piece into its line of ``decoded`` (pieces, bytes of a chunk), file by file."""
        counters.mine().chunks_read += len(pieces)
        if self.decoding.many_files is None:
            assert handle is not None
            offsets, lengths, skipped = self.array.table.find(block, pieces)
            sums = self.array.table.sums(block, pieces)
            lines = _Lines(block, pieces, np.arange(len(pieces)), offsets, lengths, skipped=skipped, sums=sums)
            self._read_lines(handle, lines, decoded)
            return
        for found in self.decoding.many_files.locate(self.files, block, pieces):
            with self.files.lend(found.file) as own:
                offsets, lengths = self.decoding.present(own, found)
                self._read_lines(own, _Lines(block, pieces, found.lines, offsets, lengths), decoded)

    def _read_lines(self, handle: Handle, wanted: "_Lines", decoded: np.ndarray) -> None:
        """Read some pieces into their lines, in the order of the file."""
        array, decoding = self.array, self.decoding
        offsets, lengths = wanted.offsets, wanted.lengths
        for line in wanted.numbers[offsets == NEVER_WRITTEN].tolist():
            decoding.fill(wanted.block, int(wanted.pieces[line]), decoded[line].view(array.stored), None)
        written = np.flatnonzero(offsets != NEVER_WRITTEN)
        as_stored = not decoding.decoders and wanted.sums is None
        gap, most = self.policy.chunk_gap_bytes, self.policy.chunk_span_bytes
        for some, begin, end in plan_spans(offsets, lengths, written, gap, most):
            lines, starts = wanted.numbers[some], offsets[some] - begin
            with borrow(end - begin) as read:
                try:
                    handle.read_into(begin, read)
                except Truncated as error:
                    raise decoding.explained(error, handle, wanted.place(int(some[-1]))) from error
                if as_stored and bool((lengths[some] == array.chunk_bytes).all()):
                    _copy_lines(read, starts, decoded, lines)
                    continue
                columns = (some, lines, starts, lengths[some], wanted.masks[some], wanted.checks[some])
                for each, line, start, length, mask, check in zip(*(each.tolist() for each in columns), strict=True):
                    try:
                        check_crc32(read[start : start + length], check)
                        decoding.decode(read[start : start + length], mask, decoded[line].view(array.stored))
                    except (Corrupt, DecodeFailed) as error:
                        raise decoding.explained(error, handle, wanted.place(each)) from error


class _Lines(NamedTuple):
    """Some pieces of a group, all in one file: their lines in the group, and where they lie."""

    block: int
    pieces: np.ndarray
    """Of the whole group."""
    numbers: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    skipped: np.ndarray | None = None
    sums: np.ndarray | None = None

    @property
    def masks(self) -> np.ndarray:
        return np.zeros(len(self.offsets), np.int64) if self.skipped is None else self.skipped

    @property
    def checks(self) -> np.ndarray:
        return np.full(len(self.offsets), None) if self.sums is None else self.sums

    def place(self, each: int) -> ChunkPlace:
        piece = int(self.pieces[self.numbers[each]])
        return ChunkPlace(self.block, piece, int(self.offsets[each]), int(self.lengths[each]))


def _copy_lines(read: np.ndarray, starts: np.ndarray, decoded: np.ndarray, lines: np.ndarray) -> None:
    """Copy uncompressed chunks from a read into their lines; runs without a gap in one copy."""
    width = decoded.shape[1]
    breaks = np.flatnonzero((np.diff(starts) != width) | (np.diff(lines) != 1)) + 1
    for first, after in pairwise([0, *breaks.tolist(), len(lines)]):
        start, line, count = int(starts[first]), int(lines[first]), after - first
        decoded[line : line + count] = read[start : start + count * width].reshape(count, width)
