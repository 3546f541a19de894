"""Chunks -> rows: only chunks with wanted elements, each decoded once for all rows of it that a call wants.

Chunks large enough to be worth a read each are read one by one, here; small ones in groups (chunk_groups.py).

Every reader both reads and says how much scratch that borrows, side by side, so that the two stay the same.
"""

from typing import Any

import numpy as np

from penstock.base.scratch import aligned, borrow
from penstock.base.spec import Cast
from penstock.files.files import Files
from penstock.files.handles import Handle
from penstock.read.chunk_blocks import BlockReader, WantedRows, place_elements
from penstock.read.chunk_groups import SmallChunks
from penstock.read.coalesce import are_consecutive
from penstock.read.convert import convert_piece
from penstock.read.extents import Chunks
from penstock.read.part import Box, Mask, RowPart
from penstock.read.pieces import Share, box_pieces, mask_pieces, share_of
from penstock.read.row_chunks import RowChunks


def chunk_reader(array: Chunks, files: Files, cast: Cast | None, part: RowPart | None) -> BlockReader:
    """The reader that suits the chunks and the wanted part."""
    if array.chunk_bytes < files.policy.group_chunks_below_bytes and array.table.shape[1] > 1:
        return SmallChunks(array, files, cast, part)
    if part is None and array.rows_per_chunk == 1 and array.chunk == array.shape and not array.is_turned:
        return RowChunks(array, files, cast, part)
    if isinstance(part, Mask):
        return MaskChunks(array, files, cast, part)
    return BoxChunks(array, files, cast, part)


class BoxChunks(BlockReader):
    """Whole rows, or a box of each: a slice of every chunk."""

    def __init__(self, array: Chunks, files: Files, cast: Cast | None, part: RowPart | None) -> None:
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

    def _read_block(self, handle: Handle | None, block: int, wanted: WantedRows, share: Share) -> None:
        array, target = self.array, wanted.target.reshape(len(wanted.target), *self._box)
        order = np.argsort(wanted.inner, kind="stable")
        inner, at = wanted.inner[order], wanted.at[order]
        is_whole = len(inner) == array.rows_per_chunk and inner[0] == 0 and are_consecutive(inner)
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


class MaskChunks(BlockReader):
    """Single elements of every chunk."""

    def __init__(self, array: Chunks, files: Files, cast: Cast | None, part: RowPart | None) -> None:
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

    def _read_block(self, handle: Handle | None, block: int, wanted: WantedRows, share: Share) -> None:
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
                    place_elements(by_row[row], piece.local, target[place], piece.places, self.cast)


def _scatter(
    chunk: np.ndarray, wanted: tuple[Any, ...], target: np.ndarray, places: tuple[Any, ...], cast: Cast | None
) -> None:
    """``target[places] = chunk[wanted]``, converted, for all rows in one call."""
    values = chunk[wanted]
    if cast is None:
        _assign(target, places, np.ascontiguousarray(values))
        return
    with borrow(values.size * target.itemsize) as scratch:
        ready = scratch.view(target.dtype).reshape(values.shape)
        convert_piece(values, ready, cast)
        _assign(target, places, ready)


def _assign(target: np.ndarray, places: tuple[Any, ...], values: np.ndarray) -> None:
    """``target[places] = values``, for rows and parts of them.

    Elements that are neighbours in both are moved as one item: runs of seven take half the time.
    """
    rows, *part = places
    goal, run_bytes = target[(slice(None), *part)], values.shape[-1] * values.itemsize
    if run_bytes and goal.ndim > 1 and goal.strides[-1] == goal.itemsize:  # rows of one number have no runs
        run = np.dtype((np.void, run_bytes))
        goal.view(run)[..., 0][rows] = values.view(run)[..., 0]
    else:
        target[places] = values
