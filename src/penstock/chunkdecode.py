"""One chunk, from a file into memory: found, read, decoded, converted, or filled where it was never written."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from penstock import tally
from penstock.chunkfiles import Found, index_scratch_bytes, spread
from penstock.codecs import (
    BLOCK_ELEMENTS,
    Checksum,
    Decoder,
    Unshuffle,
    convert,
    convert_piece,
    decoder,
)
from penstock.errors import Corrupt, DecodeFailed, LimitExceeded, Missing, Truncated
from penstock.extents import NEVER_WRITTEN, Chunks
from penstock.fileio import Files
from penstock.handles import NOT_SEEN, Handle
from penstock.memory import aligned, borrow
from penstock.rangeread import convert_bytes, read_converted
from penstock.spec import Cast

FILL_WAY_OUT = (
    "Restore it if it was lost. Where nobody wrote it on purpose (a writer may leave out chunks that hold nothing but "
    "the fill value), pass allow_fill=True to open: what is filled is then counted"
)


class Place(NamedTuple):
    """One chunk, and where it lies."""

    block: int
    piece: int
    offset: int
    length: int


class Decoding:
    """One chunk at a time, from a file into memory.

    The handle that is passed around is that of the array's one file, or None where chunks lie in many: then the file of
    each is lent while it is read.
    """

    def __init__(self, array: Chunks, files: Files) -> None:
        self.array, self.files = array, files
        self.spread = spread(array)
        self.decoders = [decoder(codec) for codec in reversed(array.codecs)]

    def scratch_bytes(self, cast: Cast | None) -> int:
        """What ``read`` or ``decode`` borrows, the stored chunk included."""
        array = self.array
        encoded = aligned(array.table.longest) if self.decoders else 0
        between = sum(not isinstance(decode, Checksum) for decode in self.decoders[:-1])
        # Between decoding and converting; where some are left out, the last one may be any of them.
        apart = cast is not None and bool(self.decoders)
        apart = apart and (not _piecewise(self.decoders[-1]) or array.table.some_skipped)
        converted = aligned(array.stored.itemsize * min(array.chunk_bytes // array.stored.itemsize, BLOCK_ELEMENTS))
        decoded = aligned(array.chunk_bytes) * (between + apart)
        reading = encoded + decoded + (converted + convert_bytes(array, 1, cast) if cast else 0)
        return max(reading, index_scratch_bytes(array))

    @contextmanager
    def lent(self) -> Iterator[Handle | None]:
        """What ``read`` takes."""
        with self.files.lend(self.array.file) as handle:
            if self.spread is None:
                yield handle
                return
        yield None  # looked at, and let go of: a thread borrows one file at a time

    def read(self, handle: Handle | None, block: int, piece: int, goal: np.ndarray, cast: Cast | None) -> None:
        """A chunk into ``goal``, flat and contiguous."""
        tally.mine().chunks_read += 1
        if self.spread is None:
            assert handle is not None
            offsets, lengths, skipped = self.array.table.find(block, slice(piece, piece + 1))
            decoders = self._without(int(skipped[0])) if skipped is not None else self.decoders
            self._read_at(handle, Place(block, piece, int(offsets[0]), int(lengths[0])), decoders, goal, cast)
            return
        for found in self.spread.locate(self.files, block, np.array([piece])):
            with self.files.lend(found.file) as own:
                offsets, lengths = self.present(own, found)
                self._read_at(own, Place(block, piece, int(offsets[0]), int(lengths[0])), self.decoders, goal, cast)

    def present(self, handle: Handle, found: Found) -> tuple[np.ndarray, np.ndarray]:
        """Offsets and lengths of chunks, now that it is known whether their file is there, and how long it is."""
        if handle.size == NOT_SEEN:
            return np.full(len(found.lines), NEVER_WRITTEN), np.zeros(len(found.lines), np.int64)
        lengths = np.where(found.lengths < 0, handle.size - found.offsets, found.lengths)
        longest = self.array.table.longest
        if (lengths > longest).any():
            raise LimitExceeded(
                f"{handle.file.path}: a chunk of {int(lengths.max()):,} bytes, but chunks of {self.array.name!r} hold "
                f"{self.array.chunk_bytes:,} and are never stored in more than {longest:,}. The file is damaged, or "
                f"another: restore it"
            )
        return found.offsets, lengths

    def _read_at(
        self, handle: Handle, place: Place, decoders: list[Decoder], goal: np.ndarray, cast: Cast | None
    ) -> None:
        array, offset, length = self.array, place.offset, place.length
        if offset == NEVER_WRITTEN:
            self.fill(place.block, place.piece, goal, cast)
            return
        try:
            if not decoders:
                self._check_plain(length)
                if cast:
                    read_converted(handle, offset, array.stored, goal, cast)
                else:
                    handle.read_into(offset, goal)
                return
            with borrow(length) as encoded:
                handle.read_into(offset, encoded)
                self._decode(encoded, decoders, goal, cast)
        except (Corrupt, DecodeFailed, Truncated) as error:
            raise self.explained(error, handle, place) from error

    def decode(self, encoded: np.ndarray, skipped: int, goal: np.ndarray) -> None:
        """A stored chunk that is in memory already, into ``goal``."""
        decoders = self._without(skipped) if skipped else self.decoders
        if not decoders:
            self._check_plain(len(encoded))
            np.copyto(goal.view(np.uint8), encoded)
        else:
            self._decode(encoded, decoders, goal, None)

    def fill(self, block: int, piece: int, goal: np.ndarray, cast: Cast | None) -> None:
        """What stands for a chunk that was never written."""
        array = self.array
        if array.fill is None:
            told = f", and would read as the fill value {array.fill_told}" if array.fill_told else ""
            raise Missing(
                f"{self._path(block, piece)}: {array.piece_place(block, piece)} was never written{told}. {FILL_WAY_OUT}"
            )
        tally.mine().chunks_filled += 1
        value = np.empty(1, goal.dtype)
        convert_piece(np.frombuffer(array.fill, array.stored), value, cast or Cast(goal.dtype))
        goal[:] = value

    def explained(self, error: Exception, handle: Handle, place: Place) -> Corrupt | DecodeFailed | Truncated:
        """The same error, with its place and the way out."""
        kind = type(error) if isinstance(error, Corrupt | DecodeFailed | Truncated) else Corrupt
        where = f"{self.array.piece_place(place.block, place.piece)} at offset {place.offset:,}"
        return kind(
            f"{handle.file.path}: {where} of {place.length:,} bytes: {error}. "
            f'The file is damaged there: restore it, or leave those rows out with select or on_error="skip"'
        )

    def _path(self, block: int, piece: int) -> str:
        """The file that has a chunk, or would have it."""
        if self.spread is None:
            return self.array.file.path
        return next(self.spread.locate(self.files, block, np.array([piece]))).file.path

    def _check_plain(self, length: int) -> None:
        if length != self.array.chunk_bytes:
            raise Corrupt(f"an uncompressed chunk has {length:,} bytes, expected {self.array.chunk_bytes:,}")

    def _without(self, skipped: int) -> list[Decoder]:
        last = len(self.decoders) - 1
        return [decode for number, decode in enumerate(self.decoders) if not skipped >> (last - number) & 1]

    def _decode(self, source: np.ndarray, decoders: list[Decoder], goal: np.ndarray, cast: Cast | None) -> None:
        decode, *later = decoders
        if isinstance(decode, Checksum) and later:
            self._decode(decode.checked(source), later, goal, cast)
        elif later:
            with borrow(self.array.chunk_bytes) as between:
                decode(source, between)
                self._decode(between, later, goal, cast)
        elif cast is None:
            decode(source, goal.view(np.uint8))
        elif isinstance(decode, Unshuffle) and decode.piecewise:
            self._unshuffle_converting(decode, source, goal, cast)
        else:
            with borrow(self.array.chunk_bytes) as decoded:
                decode(source, decoded)
                convert(decoded.view(self.array.stored), goal, cast)

    def _unshuffle_converting(self, unshuffle: Unshuffle, source: np.ndarray, goal: np.ndarray, cast: Cast) -> None:
        with borrow(unshuffle.width * min(len(goal), BLOCK_ELEMENTS)) as scratch:
            for begin in range(0, len(goal), BLOCK_ELEMENTS):
                end = min(begin + BLOCK_ELEMENTS, len(goal))
                piece = scratch[: (end - begin) * unshuffle.width]
                unshuffle.piece(source, begin, end, piece)
                convert_piece(piece.view(self.array.stored), goal[begin:end], cast)


def _piecewise(decode: Decoder) -> bool:
    return isinstance(decode, Unshuffle) and decode.piecewise
