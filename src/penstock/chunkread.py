"""Chunks -> rows: only those that hold wanted elements, each decoded once for all rows of it that a call wants.

Chunks large enough to be worth a read each are taken one by one. Small ones, which may be hundreds of thousands to a
row (one time course a chunk, say), are taken in groups: neighbours in the file in one read, the group then turned from
chunk order into row order in a core's cache, and each row's share put into place in one go.
"""

from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from penstock import tally
from penstock.chunkdecode import Decoding, Place
from penstock.coalesce import consecutive, spans
from penstock.codecs import (
    convert,
    convert_piece,
    convert_scratch_bytes,
)
from penstock.errors import Corrupt, DataError, DecodeFailed, Truncated
from penstock.extents import NEVER_WRITTEN, Chunks
from penstock.fileio import Files
from penstock.handles import Handle
from penstock.memory import aligned, borrow
from penstock.pieces import WHOLE, BoxPiece, MaskPiece, Places, Share, groups, pieces, share_of
from penstock.sizes import KiB, MiB
from penstock.spec import Cast, FieldSpec
from penstock.within import Mask, Within, everything

# Below this, a chunk's rows are put into place in one call, which copies them twice; above it, one by one.
SCATTER_BELOW_BYTES = 64 * KiB

# Chunks below this are taken in groups.
GROUP_BELOW_BYTES = 32 * KiB
# So much decoded at a time stays in a core's cache, and so many elements keep the group's own tables small.
GROUP_BYTES = 1 * MiB
GROUP_ELEMENTS = 64 * 1024
# Neighbours in the file are read together across gaps up to this, in reads up to that.
GAP_BYTES = 4 * KiB
SPAN_BYTES = 1 * MiB

# Groups of chunks from which it is told how much a read of all of them takes, with the gaps between.
GROUPS_LOOKED_AT = 8


def chunk_reader(array: Chunks, files: Files, cast: Cast | None, part: Within | None) -> "LargeChunks | SmallChunks":
    """The reader that suits the size of the chunks."""
    if array.chunk_bytes < GROUP_BELOW_BYTES and array.table.shape[1] > 1:
        return SmallChunks(array, files, cast, part)
    return LargeChunks(array, files, cast, part)


class _Failure(NamedTuple):
    kind: type[DataError]
    text: str

    def again(self) -> DataError:
        return self.kind(self.text)


class _Blocks:
    """What both readers share: rows come in blocks, and a chunk that failed once is not tried again."""

    def __init__(self, array: Chunks, files: Files, cast: Cast | None, part: Within | None) -> None:
        self.array, self.files, self.cast = array, files, cast
        self.part: Within = everything(array.shape) if part is None else part
        self.spec = FieldSpec(cast.dtype if cast else array.stored, self.part.shape)
        self.decoding = Decoding(array, files)
        self._failed: dict[int, dict[Share, _Failure]] = {}

    def read(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray, share: Share = WHOLE) -> None:
        if len(rows) == 0 or self.spec.row_bytes == 0:
            return
        with self.decoding.lent() as handle:
            blocks, inner = np.divmod(rows, self.array.rows_per_chunk)
            for block in sorted(set(blocks.tolist())):
                here = np.flatnonzero(blocks == block)
                self._raise_again(block, share)
                try:
                    self._read_block(handle, block, inner[here], at[here], target, share)
                except DataError as error:
                    self._failed.setdefault(block, {})[share] = _Failure(type(error), str(error))
                    raise

    def _raise_again(self, block: int, share: Share) -> None:
        """A share that failed fails again, and so does a whole of which a share failed."""
        known = self._failed.get(block, {})
        failure = known.get(share) or (next(iter(known.values()), None) if share == WHOLE else None)
        if failure is not None:
            raise failure.again()

    def _read_block(
        self, handle: Handle | None, block: int, inner: np.ndarray, at: np.ndarray, target: np.ndarray, share: Share
    ) -> None:
        raise NotImplementedError

    def _by_rows(self, chunks: np.ndarray) -> np.ndarray:
        """Decoded chunks (how many, *stored chunk) -> (how many, rows, *chunk), as a view."""
        array = self.array
        shaped = chunks.view(array.stored).reshape(-1, *array.stored_chunk)
        return shaped.transpose(0, *(1 + axis for axis in array.rows_first))


class LargeChunks(_Blocks):
    """Chunk by chunk."""

    def __init__(self, array: Chunks, files: Files, cast: Cast | None, part: Within | None) -> None:
        super().__init__(array, files, cast, part)
        alone = array.rows_per_chunk == 1 and array.chunk == array.shape
        self.whole_rows = part is None and alone and not array.is_turned
        self.piece_bytes = array.chunk_bytes // array.rows_per_chunk
        self.pieces = [] if self.whole_rows else pieces(array, self.part)

    @property
    def pieces_per_row(self) -> int:
        return 1 if self.whole_rows else len(self.pieces)

    @property
    def epoch_bytes(self) -> int:
        """What is read when each block is read once."""
        table = self.array.table
        return table.stored_bytes * self.pieces_per_row // max(1, table.shape[1])

    def scratch_bytes(self, rows: int) -> int:
        array, cast = self.array, self.cast
        if self.whole_rows:
            return self.decoding.scratch_bytes(cast)
        chunk = aligned(array.chunk_bytes) * (2 if array.is_turned else 1)
        if isinstance(self.part, Mask):
            most = max(len(piece.local) for piece in self.pieces if isinstance(piece, MaskPiece))
            placing = aligned(most * array.stored.itemsize) + aligned(most * self.spec.dtype.itemsize)
            half = aligned(4 * most) if self._is_half else 0
        else:
            at_once = array.rows_per_chunk if self.piece_bytes < SCATTER_BELOW_BYTES else 1
            elements = at_once * array.piece_elements
            gathered = aligned(elements * array.stored.itemsize)  # numpy's own
            placing = gathered + (aligned(elements * self.spec.dtype.itemsize) if cast else 0)
            half = aligned(4 * elements) if self._is_half else 0
        return chunk + max(self.decoding.scratch_bytes(None), placing + half)

    @property
    def _is_half(self) -> bool:
        return self.cast is not None and self.cast.dtype == np.float16

    def read(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray, share: Share = WHOLE) -> None:
        if not self.whole_rows:
            super().read(rows, at, target, share)
            return
        if share[0]:
            return
        with self.decoding.lent() as handle:
            for row, place in zip(rows.tolist(), at.tolist(), strict=True):
                self.decoding.read(handle, row, 0, target[place : place + 1].reshape(-1), self.cast)

    def _read_block(
        self, handle: Handle | None, block: int, inner: np.ndarray, at: np.ndarray, target: np.ndarray, share: Share
    ) -> None:
        mine = share_of(len(self.pieces), share)
        if isinstance(self.part, Mask):
            self._read_masked(handle, block, mine, inner.tolist(), at.tolist(), target.reshape(len(target), -1))
        else:
            self._read_boxes(handle, block, mine, inner, at, target.reshape(len(target), *self.part.full_shape))

    def _read_boxes(
        self, handle: Handle | None, block: int, mine: range, inner: np.ndarray, at: np.ndarray, target: np.ndarray
    ) -> None:
        array, cast = self.array, self.cast
        order = np.argsort(inner, kind="stable")
        inner, at = inner[order], at[order]
        all_once = len(inner) == array.rows_per_chunk and inner[0] == 0 and consecutive(inner)
        with borrow(array.chunk_bytes) as scratch:
            chunk = self._by_rows(scratch)[0]
            for number in mine:
                piece = self.pieces[number]
                assert isinstance(piece, BoxPiece)
                self.decoding.read(handle, block, piece.number, scratch.view(array.stored), None)
                if self.piece_bytes < SCATTER_BELOW_BYTES and all_once:
                    _scatter(chunk, (slice(None), *piece.of), target, (at, *piece.to), cast)
                    continue
                if self.piece_bytes < SCATTER_BELOW_BYTES:
                    for begin in range(0, len(at), array.rows_per_chunk):  # more only where rows repeat
                        some = slice(begin, begin + array.rows_per_chunk)
                        _scatter(chunk, (inner[some], *piece.of), target, (at[some], *piece.to), cast)
                    continue
                for row, place in zip(inner.tolist(), at.tolist(), strict=True):
                    part = chunk[row : row + 1][(slice(None), *piece.of)]
                    goal = target[place : place + 1][(slice(None), *piece.to)]
                    convert_piece(part, goal, cast or Cast(target.dtype))

    def _read_masked(
        self, handle: Handle | None, block: int, mine: range, inner: list[int], at: list[int], target: np.ndarray
    ) -> None:
        array = self.array
        with borrow(array.chunk_bytes) as scratch, borrow(array.chunk_bytes if array.is_turned else 0) as turned:
            for number in mine:
                piece = self.pieces[number]
                assert isinstance(piece, MaskPiece)
                self.decoding.read(handle, block, piece.number, scratch.view(array.stored), None)
                chunk = self._by_rows(scratch)[0]
                if array.is_turned:
                    np.copyto(turned.view(array.stored).reshape(chunk.shape), chunk)
                    chunk = turned.view(array.stored)
                by_row = chunk.reshape(array.rows_per_chunk, -1)
                for row, place in zip(inner, at, strict=True):
                    place_elements(by_row[row], piece.local, target[place], piece.places, self.cast)


class SmallChunks(_Blocks):
    """Chunks in groups, in the order in which their elements are wanted."""

    def __init__(self, array: Chunks, files: Files, cast: Cast | None, part: Within | None) -> None:
        super().__init__(array, files, cast, part)
        self.group = max(1, min(GROUP_BYTES // array.chunk_bytes, GROUP_ELEMENTS // array.piece_elements))
        self._wanted = groups(array, self.part)

    @property
    def pieces_per_row(self) -> int:
        return len(self._wanted)

    @cached_property
    def epoch_bytes(self) -> int:
        """What is read when each block is read once, gaps between wanted chunks included: told from some groups."""
        table, groups = self.array.table, range(0, len(self._wanted), self.group)
        if self.decoding.spread is not None or len(self._wanted) == table.shape[1] or not table.shape[0]:
            return table.stored_bytes * len(self._wanted) // max(1, table.shape[1])
        some = groups[:: -(-len(groups) // GROUPS_LOOKED_AT)]
        return sum(map(self._span_bytes, some)) * len(groups) // max(1, len(some)) * table.shape[0]

    def _span_bytes(self, begin: int) -> int:
        """What is read for the first block's group from piece ``begin`` on."""
        pieces = self._wanted.pieces(begin, min(begin + self.group, len(self._wanted)))
        offsets, lengths, _ = self.array.table.find(0, pieces)
        written = np.flatnonzero(offsets != NEVER_WRITTEN)
        return sum(end - first for _, first, end in spans(offsets, lengths, written, GAP_BYTES, SPAN_BYTES))

    def scratch_bytes(self, rows: int) -> int:
        array = self.array
        group = min(self.group, len(self._wanted))
        elements = group * array.piece_elements
        decoded = 2 * aligned(group * array.chunk_bytes)  # in chunk order and in row order
        span = aligned(max(SPAN_BYTES, array.table.longest))
        placing = aligned(elements * array.stored.itemsize) + aligned(elements * self.spec.dtype.itemsize)
        if self.cast:
            converted = aligned(array.rows_per_chunk * elements * self.spec.dtype.itemsize)
            placing = max(placing, converted) + convert_scratch_bytes(array.rows_per_chunk * elements, self.cast)
        tables = 48 * elements  # numpy's own: where the elements of a group lie and go
        return decoded + max(span + self.decoding.scratch_bytes(None), placing) + tables

    def _read_block(
        self, handle: Handle | None, block: int, inner: np.ndarray, at: np.ndarray, target: np.ndarray, share: Share
    ) -> None:
        array = self.array
        goal = target.reshape(len(target), -1)
        rows, places = inner.tolist(), at.tolist()
        mine = share_of(len(self._wanted), share)
        for begin in mine[:: self.group]:
            end = min(begin + self.group, mine.stop)
            pieces = self._wanted.pieces(begin, end)
            local, to = self._wanted.elements(begin, end, pieces)
            size = len(pieces) * array.chunk_bytes
            with borrow(size) as decoded, borrow(size) as turned:
                self._read_group(handle, block, pieces, decoded.reshape(len(pieces), -1))
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

    def _read_group(self, handle: Handle | None, block: int, pieces: np.ndarray, decoded: np.ndarray) -> None:
        """Each piece into its line of ``decoded`` (pieces, bytes of a chunk), file by file."""
        tally.mine().chunks_read += len(pieces)
        every = np.arange(len(pieces))
        if self.decoding.spread is None:
            assert handle is not None
            offsets, lengths, skipped = self.array.table.find(block, pieces)
            self._read_lines(handle, block, pieces, _Lines(every, offsets, lengths, skipped), decoded)
            return
        for found in self.decoding.spread.locate(self.files, block, pieces):
            with self.files.lend(found.file) as own:
                offsets, lengths = self.decoding.present(own, found)
                self._read_lines(own, block, pieces, _Lines(found.lines, offsets, lengths, None), decoded)

    def _read_lines(
        self, handle: Handle, block: int, pieces: np.ndarray, wanted: "_Lines", decoded: np.ndarray
    ) -> None:
        """Some pieces into their lines, in the order of the file."""
        array, decoding = self.array, self.decoding
        numbers, offsets, lengths, skipped = wanted
        for line in numbers[offsets == NEVER_WRITTEN].tolist():
            decoding.fill(block, int(pieces[line]), decoded[line].view(array.stored), None)
        written = np.flatnonzero(offsets != NEVER_WRITTEN)
        for some, begin, end in spans(offsets, lengths, written, GAP_BYTES, SPAN_BYTES):
            lines, starts = numbers[some], offsets[some] - begin
            with borrow(end - begin) as read:
                try:
                    handle.read_into(begin, read)
                except Truncated as error:
                    last = some[-1]
                    place = Place(block, int(pieces[lines[-1]]), int(offsets[last]), int(lengths[last]))
                    raise decoding.explained(error, handle, place) from error
                if not decoding.decoders and bool((lengths[some] == array.chunk_bytes).all()):
                    _copy_lines(read, starts, decoded, lines)
                    continue
                masks = np.zeros(len(lines), np.int64) if skipped is None else skipped[some]
                each = zip(lines.tolist(), starts.tolist(), lengths[some].tolist(), masks.tolist(), strict=True)
                for line, start, length, mask in each:
                    try:
                        decoding.decode(read[start : start + length], mask, decoded[line].view(array.stored))
                    except (Corrupt, DecodeFailed) as error:
                        place = Place(block, int(pieces[line]), begin + start, length)
                        raise decoding.explained(error, handle, place) from error


class _Lines(NamedTuple):
    """Pieces of one file: their numbers in the group, and where they lie."""

    numbers: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    skipped: np.ndarray | None


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
    """Uncompressed chunks from a read into their lines; runs without a gap in one copy."""
    width = decoded.shape[1]
    breaks = np.flatnonzero((np.diff(starts) != width) | (np.diff(lines) != 1)) + 1
    for first, after in pairwise([0, *breaks.tolist(), len(lines)]):
        start, line, count = int(starts[first]), int(lines[first]), after - first
        decoded[line : line + count] = read[start : start + count * width].reshape(count, width)


def place_elements(
    row: np.ndarray, local: np.ndarray | None, goal: np.ndarray, places: Places, cast: Cast | None
) -> None:
    """``goal[places] = row[local]``, converted; both flat. None stands for all of ``row``."""
    if local is None:
        _place_all(row, goal, places, cast)
        return
    cast = cast or Cast(goal.dtype)
    with borrow(len(local) * row.itemsize) as taken, borrow(len(local) * goal.itemsize) as converted:
        values = taken.view(row.dtype)
        np.take(row, local, out=values, mode="clip")  # clip: the one mode that copies straight to out
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
