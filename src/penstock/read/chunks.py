"""Chunks -> rows: only chunks with wanted elements, each decoded once for all rows of it that a call wants.

Chunks large enough to be worth a read each are taken one by one. Small ones, of which a row may have hundreds of
thousands (one time course per chunk, say), are taken in groups: neighbours in the file in one read, the group then
turned from chunk order into row order in a core's cache, and each row's share put into place in one go.

Every reader both reads and says how much scratch that borrows, side by side, so that the two stay the same.
"""

from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from penstock.base import counters
from penstock.base.scratch import aligned, borrow
from penstock.base.spec import Cast, FieldSpec
from penstock.errors import Corrupt, DataError, DecodeFailed, Truncated
from penstock.files.files import Files
from penstock.files.handles import Handle
from penstock.read.chunk_decode import Decoding, Place, check_crc32
from penstock.read.chunk_files import locating_bytes
from penstock.read.coalesce import consecutive, spans
from penstock.read.convert import convert, convert_piece, convert_scratch_bytes
from penstock.read.extents import NEVER_WRITTEN, Chunks
from penstock.read.part import Box, Mask, Within, everything
from penstock.read.pieces import WHOLE, Places, Share, box_pieces, groups, mask_pieces, share_of

# Groups from which the bytes of a read of all groups, gaps included, are estimated.
SAMPLED_GROUPS = 8


def chunk_reader(array: Chunks, files: Files, cast: Cast | None, part: Within | None) -> "LargeChunks | SmallChunks":
    """The reader that suits the chunks and the wanted part."""
    if array.chunk_bytes < files.policy.group_chunks_below_bytes and array.table.shape[1] > 1:
        return SmallChunks(array, files, cast, part)
    if part is None and array.rows_per_chunk == 1 and array.chunk == array.shape and not array.is_turned:
        return RowChunks(array, files, cast, part)
    if isinstance(part, Mask):
        return MaskChunks(array, files, cast, part)
    return BoxChunks(array, files, cast, part)


class _Wanted(NamedTuple):
    """The wanted rows of one block: their numbers in it, and their places in the target."""

    inner: np.ndarray
    at: np.ndarray
    target: np.ndarray


class _Blocks:
    """What all readers share: rows are read block by block, and a block that failed once fails again unread."""

    def __init__(self, array: Chunks, files: Files, cast: Cast | None, part: Within | None) -> None:
        self.array, self.files, self.cast, self.policy = array, files, cast, files.policy
        self.part: Within = everything(array.shape) if part is None else part
        self.spec = FieldSpec(cast.dtype if cast else array.stored, self.part.shape)
        self.decoding = Decoding(array, files)
        self._failed: dict[int, dict[Share, DataError]] = {}

    def read(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray, share: Share = WHOLE) -> None:
        if len(rows) == 0 or self.spec.row_bytes == 0:
            return
        with self.decoding.lent() as handle:
            blocks, inner = np.divmod(rows, self.array.rows_per_chunk)
            for block in sorted(set(blocks.tolist())):
                here = np.flatnonzero(blocks == block)
                self._raise_again(block, share)
                try:
                    self._read_block(handle, block, _Wanted(inner[here], at[here], target), share)
                except DataError as error:
                    self._failed.setdefault(block, {})[share] = type(error)(str(error))
                    raise

    def _raise_again(self, block: int, share: Share) -> None:
        """A share that failed fails again, and so does the whole of which a share failed."""
        known = self._failed.get(block, {})
        failure = known.get(share) or (next(iter(known.values()), None) if share == WHOLE else None)
        if failure is not None:
            raise type(failure)(str(failure))

    def _read_block(self, handle: Handle | None, block: int, wanted: _Wanted, share: Share) -> None:
        raise NotImplementedError

    def _by_rows(self, chunks: np.ndarray) -> np.ndarray:
        """Decoded chunks (how many, *stored chunk) -> (how many, rows, *chunk), as a view."""
        array = self.array
        shaped = chunks.view(array.stored).reshape(-1, *array.stored_chunk)
        return shaped.transpose(0, *(1 + axis for axis in array.rows_first))


class LargeChunks(_Blocks):
    """Chunk by chunk."""

    pieces_per_row = 1

    @property
    def epoch_bytes(self) -> int:
        """Bytes that are read if each block is read once."""
        table = self.array.table
        return table.stored_bytes * self.pieces_per_row // max(1, table.shape[1])

    def scratch_bytes(self, rows: int) -> int:
        raise NotImplementedError

    def filled(self, share: Share) -> np.ndarray:
        """Flags for the elements of a row that a share of a read fills."""
        raise NotImplementedError

    def _half_bytes(self, elements: int) -> int:
        """Scratch for converting all these elements at once to half precision."""
        return aligned(4 * elements) if self.cast is not None and self.cast.dtype == np.float16 else 0


class RowChunks(LargeChunks):
    """One chunk is one row, decoded straight into place."""

    def scratch_bytes(self, rows: int) -> int:
        return self.decoding.scratch_bytes(self.cast)

    def filled(self, share: Share) -> np.ndarray:
        return np.full(self.spec.shape, share[0] == 0)

    def read(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray, share: Share = WHOLE) -> None:
        if share[0]:
            return
        with self.decoding.lent() as handle:
            for row, place in zip(rows.tolist(), at.tolist(), strict=True):
                self.decoding.read(handle, row, 0, target[place : place + 1].reshape(-1), self.cast)


class BoxChunks(LargeChunks):
    """Whole rows, or a box of each: a slice of every chunk."""

    def __init__(self, array: Chunks, files: Files, cast: Cast | None, part: Within | None) -> None:
        super().__init__(array, files, cast, part)
        assert isinstance(self.part, Box)
        self.pieces, self._box = box_pieces(array, self.part), self.part.full_shape
        self.pieces_per_row = len(self.pieces)
        self._at_once = array.chunk_bytes // array.rows_per_chunk < self.policy.scatter_rows_below_bytes
        """Whether all rows of a chunk are put into place in one call."""

    def scratch_bytes(self, rows: int) -> int:
        array = self.array
        chunk = aligned(array.chunk_bytes) * (2 if array.is_turned else 1)
        elements = array.piece_elements * (array.rows_per_chunk if self._at_once else 1)
        placing = aligned(elements * array.stored.itemsize)  # numpy's own
        placing += aligned(elements * self.spec.dtype.itemsize) if self.cast else 0
        return chunk + max(self.decoding.scratch_bytes(None), placing + self._half_bytes(elements))

    def filled(self, share: Share) -> np.ndarray:
        flags = np.zeros(self.spec.shape, bool)
        for number in share_of(len(self.pieces), share):
            flags.reshape(self._box)[self.pieces[number].to] = True
        return flags

    def _read_block(self, handle: Handle | None, block: int, wanted: _Wanted, share: Share) -> None:
        array, target = self.array, wanted.target.reshape(len(wanted.target), *self._box)
        order = np.argsort(wanted.inner, kind="stable")
        inner, at = wanted.inner[order], wanted.at[order]
        is_whole = len(inner) == array.rows_per_chunk and inner[0] == 0 and consecutive(inner)
        with borrow(array.chunk_bytes) as scratch:
            chunk = self._by_rows(scratch)[0]
            for number in share_of(len(self.pieces), share):
                piece = self.pieces[number]
                self.decoding.read(handle, block, piece.number, scratch.view(array.stored), None)
                if not self._at_once:
                    for row, place in zip(inner.tolist(), at.tolist(), strict=True):
                        source = chunk[row : row + 1][(slice(None), *piece.of)]
                        goal = target[place : place + 1][(slice(None), *piece.to)]
                        convert_piece(source, goal, self.cast or Cast(target.dtype))
                elif is_whole:
                    _scatter(chunk, (slice(None), *piece.of), target, (at, *piece.to), self.cast)
                else:
                    for begin in range(0, len(at), array.rows_per_chunk):  # more than one turn only if rows repeat
                        some = slice(begin, begin + array.rows_per_chunk)
                        _scatter(chunk, (inner[some], *piece.of), target, (at[some], *piece.to), self.cast)


class MaskChunks(LargeChunks):
    """Single elements of every chunk."""

    def __init__(self, array: Chunks, files: Files, cast: Cast | None, part: Within | None) -> None:
        super().__init__(array, files, cast, part)
        assert isinstance(self.part, Mask)
        self.pieces = mask_pieces(array, self.part)
        self.pieces_per_row = len(self.pieces)

    def scratch_bytes(self, rows: int) -> int:
        array = self.array
        chunk = aligned(array.chunk_bytes) * (2 if array.is_turned else 1)
        most = max(len(piece.local) for piece in self.pieces)
        placing = aligned(most * array.stored.itemsize) + aligned(most * self.spec.dtype.itemsize)
        return chunk + max(self.decoding.scratch_bytes(None), placing + self._half_bytes(most))

    def filled(self, share: Share) -> np.ndarray:
        flags = np.zeros(self.spec.shape, bool)
        for number in share_of(len(self.pieces), share):
            flags.reshape(-1)[self.pieces[number].places] = True
        return flags

    def _read_block(self, handle: Handle | None, block: int, wanted: _Wanted, share: Share) -> None:
        array, target = self.array, wanted.target.reshape(len(wanted.target), -1)
        inner, at = wanted.inner.tolist(), wanted.at.tolist()
        with borrow(array.chunk_bytes) as scratch, borrow(array.chunk_bytes if array.is_turned else 0) as turned:
            for number in share_of(len(self.pieces), share):
                piece = self.pieces[number]
                self.decoding.read(handle, block, piece.number, scratch.view(array.stored), None)
                chunk = self._by_rows(scratch)[0]
                if array.is_turned:
                    np.copyto(turned.view(array.stored).reshape(chunk.shape), chunk)
                    chunk = turned.view(array.stored)
                by_row = chunk.reshape(array.rows_per_chunk, -1)
                for row, place in zip(inner, at, strict=True):
                    _place_elements(by_row[row], piece.local, target[place], piece.places, self.cast)


class SmallChunks(_Blocks):
    """Chunks in groups, in the order in which their elements are wanted."""

    def __init__(self, array: Chunks, files: Files, cast: Cast | None, part: Within | None) -> None:
        super().__init__(array, files, cast, part)
        policy = self.policy
        self.group = max(1, min(policy.group_bytes // array.chunk_bytes, policy.group_elements // array.piece_elements))
        self._wanted = groups(array, self.part)

    @property
    def pieces_per_row(self) -> int:
        return len(self._wanted)

    @cached_property
    def epoch_bytes(self) -> int:
        """Bytes that are read if each block is read once, gaps between chunks included; estimated from some groups."""
        table, groups = self.array.table, range(0, len(self._wanted), self.group)
        if self.decoding.many_files is not None or len(self._wanted) == table.shape[1] or not table.shape[0]:
            return table.stored_bytes * len(self._wanted) // max(1, table.shape[1])
        some = groups[:: -(-len(groups) // SAMPLED_GROUPS)]
        return sum(map(self._span_bytes, some)) * len(groups) // max(1, len(some)) * table.shape[0]

    def _span_bytes(self, begin: int) -> int:
        """Bytes that are read for the first block's group from piece ``begin`` on."""
        pieces = self._wanted.pieces(begin, min(begin + self.group, len(self._wanted)))
        offsets, lengths, _ = self.array.table.find(0, pieces)
        written = np.flatnonzero(offsets != NEVER_WRITTEN)
        gap, most = self.policy.chunk_gap_bytes, self.policy.chunk_span_bytes
        return sum(end - first for _, first, end in spans(offsets, lengths, written, gap, most))

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

    def _read_block(self, handle: Handle | None, block: int, wanted: _Wanted, share: Share) -> None:
        array = self.array
        goal = wanted.target.reshape(len(wanted.target), -1)
        rows, places = wanted.inner.tolist(), wanted.at.tolist()
        mine = share_of(len(self._wanted), share)
        in_one_piece = self.cast is None and consecutive(wanted.inner) and consecutive(wanted.at)
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
                        _place_elements(by_row[row], local, goal[place], to, self.cast)
                    continue
                with borrow(by_row.size * goal.itemsize) as scratch:
                    ready = scratch.view(goal.dtype).reshape(by_row.shape)
                    convert(by_row.reshape(-1), ready.reshape(-1), self.cast)  # at once: rows of a group are short
                    for row, place in zip(rows, places, strict=True):
                        goal[place][to] = ready[row]

    def filled(self, share: Share) -> np.ndarray:
        """Flags for the elements of a row that a share of a read fills."""
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
            lines = _Lines(block, pieces, np.arange(len(pieces)), offsets, lengths, skipped, sums)
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
        for some, begin, end in spans(offsets, lengths, written, gap, most):
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

    def place(self, each: int) -> Place:
        piece = int(self.pieces[self.numbers[each]])
        return Place(self.block, piece, int(self.offsets[each]), int(self.lengths[each]))


def _scatter(
    chunk: np.ndarray, wanted: tuple[Any, ...], target: np.ndarray, places: tuple[Any, ...], cast: Cast | None
) -> None:
    """``target[places] = chunk[wanted]``, converted, for all rows in one go."""
    values = chunk[wanted]
    if cast is None:
        target[places] = values
        return
    with borrow(values.size * target.itemsize) as scratch:
        ready = scratch.view(target.dtype).reshape(values.shape)
        convert_piece(values, ready, cast)
        target[places] = ready


def _copy_lines(read: np.ndarray, starts: np.ndarray, decoded: np.ndarray, lines: np.ndarray) -> None:
    """Copy uncompressed chunks from a read into their lines; runs without a gap in one copy."""
    width = decoded.shape[1]
    breaks = np.flatnonzero((np.diff(starts) != width) | (np.diff(lines) != 1)) + 1
    for first, after in pairwise([0, *breaks.tolist(), len(lines)]):
        start, line, count = int(starts[first]), int(lines[first]), after - first
        decoded[line : line + count] = read[start : start + count * width].reshape(count, width)


def _place_elements(
    row: np.ndarray, local: np.ndarray | None, goal: np.ndarray, places: Places, cast: Cast | None
) -> None:
    """``goal[places] = row[local]``, converted; both flat. None stands for all of ``row``."""
    if local is None:
        _place_all(row, goal, places, cast)
        return
    cast = cast or Cast(goal.dtype)
    with borrow(len(local) * row.itemsize) as taken, borrow(len(local) * goal.itemsize) as converted:
        values = taken.view(row.dtype)
        np.take(row, local, out=values, mode="clip")  # clip: the only mode that copies straight to out
        if isinstance(places, slice):
            convert_piece(values, goal[places], cast)
            return
        ready = converted.view(goal.dtype)
        convert_piece(values, ready, cast)
        goal[places] = ready


def _place_all(row: np.ndarray, goal: np.ndarray, places: Places, cast: Cast | None) -> None:
    if isinstance(places, slice):
        convert_piece(row, goal[places], cast or Cast(goal.dtype))
    elif cast is None:
        goal[places] = row
    else:
        with borrow(row.size * goal.itemsize) as scratch:
            ready = scratch.view(goal.dtype)
            convert_piece(row, ready, cast)
            goal[places] = ready
