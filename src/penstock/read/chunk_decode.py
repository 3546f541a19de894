"""One chunk, from a file into memory: found, read, checked, decoded, converted; or filled if it was never written."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeGuard
from zlib import crc32

import numpy as np

from penstock.base import counters
from penstock.base.scratch import aligned, borrow
from penstock.base.spec import Cast
from penstock.errors import Corrupt, DecodeFailed, LimitExceeded, Missing, Truncated
from penstock.files.files import Files
from penstock.files.handles import NOT_SEEN, Handle
from penstock.read.chunk_files import ChunksInFile, index_scratch_bytes, table_of_files
from penstock.read.codecs import Checksum, ChunkDecoder, Unshuffle, decoder
from penstock.read.convert import (
    block_bytes,
    blocks,
    convert,
    convert_piece,
    read_converted,
    read_converted_scratch_bytes,
)
from penstock.read.extents import NEVER_WRITTEN, Chunks

FILL_WAY_OUT = (
    "Restore it if it was lost. Where nobody wrote it on purpose (a writer may leave out chunks that hold nothing but "
    "the fill value), pass allow_fill=True to open: what is filled is then counted"
)


class ChunkPlace(NamedTuple):
    """One chunk, and where it lies."""

    block: int
    piece: int
    offset: int
    length: int
    skipped: int = 0
    """A mask of the codecs that were left out when it was written."""
    crc32: int | None = None
    """The checksum of its stored bytes, if the table has one."""
    is_checked: bool = False
    """Whether it was compared with its own checksum before, in this process."""


class Decoding:
    """Reads one chunk at a time.

    ``handle`` is that of the array's one file. It is None if chunks lie in many files: then the file of each is lent
    while it is read.
    """

    def __init__(self, array: Chunks, files: Files) -> None:
        self.array, self.files = array, files
        self.many_files = table_of_files(array)
        self.decoders = [decoder(codec) for codec in reversed(array.codecs)]
        self.is_checked = bool(array.table.checked_by)

    def scratch_bytes(self, cast: Cast | None) -> int:
        """Scratch that ``read`` or ``decode`` borrows, the stored chunk included."""
        array = self.array
        if not self.decoders and self.is_checked and cast is not None:  # converted after the whole chunk was checked
            return aligned(array.chunk_bytes) + read_converted_scratch_bytes(array, 1, cast)
        encoded = aligned(array.table.longest) if self.decoders else 0
        between = sum(not isinstance(decode, Checksum) for decode in self.decoders[:-1])
        # Between decoding and converting. If some chunks skip codecs, any codec may be the last one.
        apart = cast is not None and bool(self.decoders)
        apart = apart and (not _is_piecewise(self.decoders[-1]) or array.table.has_skipped)
        converted = aligned(block_bytes(array.chunk_bytes // array.stored.itemsize, array.stored.itemsize))
        decoded = aligned(array.chunk_bytes) * (between + apart)
        reading = encoded + decoded + (converted + read_converted_scratch_bytes(array, 1, cast) if cast else 0)
        return max(reading, index_scratch_bytes(array))

    @contextmanager
    def lend_file(self) -> Iterator[Handle | None]:
        """The ``handle`` argument of ``read``."""
        with self.files.lend(self.array.file) as handle:
            if self.many_files is None:
                yield handle
                return
        yield None  # the file was checked and returned: a thread borrows one file at a time

    def read(self, handle: Handle | None, block: int, piece: int, goal: np.ndarray, cast: Cast | None) -> None:
        """Read a chunk into ``goal``, flat and contiguous."""
        counters.mine().chunks_read += 1
        if self.many_files is None:
            assert handle is not None
            self.read_at(handle, self._place(block, piece), goal, cast)
            return
        found = self.many_files.locate_one(self.files, block, piece)
        with self.files.lend(found.file) as own:
            offset, length = self._present_one(own, found.offset, found.length)
            place = ChunkPlace(block, piece, offset, length, is_checked=found.is_checked)
            self.read_at(own, place, goal, cast)
            found.set_checked()

    def _place(self, block: int, piece: int) -> ChunkPlace:
        one, table = slice(piece, piece + 1), self.array.table
        offsets, lengths, skipped = table.find(block, one)
        mask = 0 if skipped is None else int(skipped[0])
        sums = table.sums(block, one) if self.is_checked else None
        crc32 = None if sums is None else int(sums[0])
        return ChunkPlace(block, piece, int(offsets[0]), int(lengths[0]), mask, crc32=crc32)

    def present(self, handle: Handle, found: ChunksInFile) -> tuple[np.ndarray, np.ndarray]:
        """Offsets and lengths of chunks, now that their file is open, or known to be absent."""
        if handle.size == NOT_SEEN:
            return np.full(len(found.lines), NEVER_WRITTEN), np.zeros(len(found.lines), np.int64)
        lengths = np.where(found.lengths < 0, handle.size - found.offsets, found.lengths)
        self.check_longest(handle, int(lengths.max(initial=0)))
        return found.offsets, lengths

    def _present_one(self, handle: Handle, offset: int, length: int) -> tuple[int, int]:
        """``present`` for one chunk."""
        if handle.size == NOT_SEEN:
            return NEVER_WRITTEN, 0
        length = handle.size - offset if length < 0 else length
        self.check_longest(handle, length)
        return offset, length

    def check_longest(self, handle: Handle, length: int) -> None:
        longest = self.array.table.longest
        if length > longest:
            raise LimitExceeded(
                f"{handle.file.path}: a chunk of {length:,} bytes, but chunks of {self.array.name!r} hold "
                f"{self.array.chunk_bytes:,} and are never stored in more than {longest:,}. The file is damaged, or "
                f"another: restore it"
            )

    def read_at(self, handle: Handle, place: ChunkPlace, goal: np.ndarray, cast: Cast | None) -> None:
        if place.offset == NEVER_WRITTEN:
            self.fill(place.block, place.piece, goal, cast)
            return
        decoders = self._decoders(place.skipped)
        if place.is_checked and isinstance(decoders[0] if decoders else None, Checksum):
            decoders, place = decoders[1:], place._replace(length=place.length - Checksum.BYTES)
        try:
            if not decoders:
                self._read_plain(handle, place, goal, cast)
                return
            if cast is None and _is_only_checked(decoders, place, goal):
                stored_sum = np.empty(Checksum.BYTES, np.uint8)
                handle.read_into(place.offset, goal, stored_sum)
                decoders[0].check(goal.view(np.uint8), stored_sum)
                return
            with borrow(place.length) as encoded:
                handle.read_into(place.offset, encoded)
                check_crc32(encoded, place.crc32)
                self._decode(encoded, decoders, goal, cast)
        except (Corrupt, DecodeFailed, Truncated) as error:
            raise self.explained(error, handle, place) from error

    def _read_plain(self, handle: Handle, place: ChunkPlace, goal: np.ndarray, cast: Cast | None) -> None:
        self._check_plain(place.length)
        if cast is None:
            handle.read_into(place.offset, goal)
            check_crc32(goal, place.crc32)
        elif place.crc32 is None:
            read_converted(handle, place.offset, self.array.stored, goal, cast)
        else:
            with borrow(place.length) as stored:
                handle.read_into(place.offset, stored)
                check_crc32(stored, place.crc32)
                convert(stored.view(self.array.stored), goal, cast)

    def decode(self, encoded: np.ndarray, skipped: int, goal: np.ndarray) -> None:
        """Decode a stored chunk that is in memory already into ``goal``."""
        decoders = self._decoders(skipped)
        if not decoders:
            self._check_plain(len(encoded))
            np.copyto(goal.view(np.uint8), encoded)
        else:
            self._decode(encoded, decoders, goal, None)

    def fill(self, block: int, piece: int, goal: np.ndarray, cast: Cast | None) -> None:
        """Put the fill value in place of a chunk that was never written."""
        array = self.array
        if array.fill is None:
            value = f", and would read as the fill value {array.fill_text}" if array.fill_text else ""
            raise Missing(
                f"{self._path(block, piece)}: {array.piece_place(block, piece)} was never written{value}. "
                f"{FILL_WAY_OUT}"
            )
        counters.mine().chunks_filled += 1
        element = np.empty(1, goal.dtype)
        convert_piece(np.frombuffer(array.fill, array.stored), element, cast or Cast(goal.dtype))
        goal[:] = element

    def explained(self, error: Exception, handle: Handle, place: ChunkPlace) -> Corrupt | DecodeFailed | Truncated:
        """The same error, with its place and the way out."""
        kind = type(error) if isinstance(error, Corrupt | DecodeFailed | Truncated) else Corrupt
        where = f"{self.array.piece_place(place.block, place.piece)} at offset {place.offset:,}"
        return kind(
            f"{handle.file.path}: {where} of {place.length:,} bytes: {error}. "
            f'The file is damaged there: restore it, or leave those rows out with select or on_error="skip"'
        )

    def _path(self, block: int, piece: int) -> str:
        """The file that has a chunk, or would have it."""
        if self.many_files is None:
            return self.array.file.path
        return next(self.many_files.locate(self.files, block, np.array([piece]))).file.path

    def _check_plain(self, length: int) -> None:
        if length != self.array.chunk_bytes:
            raise Corrupt(f"an uncompressed chunk has {length:,} bytes, expected {self.array.chunk_bytes:,}")

    def _decoders(self, skipped: int) -> list[ChunkDecoder]:
        if not skipped:
            return self.decoders
        last = len(self.decoders) - 1
        return [decode for number, decode in enumerate(self.decoders) if not skipped >> (last - number) & 1]

    def _decode(self, source: np.ndarray, decoders: list[ChunkDecoder], goal: np.ndarray, cast: Cast | None) -> None:
        decode, *later = decoders
        if isinstance(decode, Checksum) and later:
            self._decode(decode.checked(source), later, goal, cast)
        elif later:
            with borrow(self.array.chunk_bytes) as between:
                decode(source, between)
                self._decode(between, later, goal, cast)
        elif cast is None:
            decode(source, goal.view(np.uint8))
        elif _is_piecewise(decode):
            self._unshuffle_converting(decode, source, goal, cast)
        else:
            with borrow(self.array.chunk_bytes) as decoded:
                decode(source, decoded)
                convert(decoded.view(self.array.stored), goal, cast)

    def _unshuffle_converting(self, unshuffle: Unshuffle, source: np.ndarray, goal: np.ndarray, cast: Cast) -> None:
        with borrow(block_bytes(len(goal), unshuffle.width)) as scratch:
            for block in blocks(len(goal)):
                piece = scratch[: (block.stop - block.start) * unshuffle.width]
                unshuffle.piece(source, block, piece)
                convert_piece(piece.view(self.array.stored), goal[block], cast)


def check_crc32(stored: np.ndarray, expected: int | None) -> None:
    """Refuse a stored chunk whose CRC-32 differs from that in the table."""
    if expected is not None and (found := crc32(stored.view(np.uint8).data)) != expected:
        raise Corrupt(f"its CRC-32 is {found:08x}, but the archive's directory says {expected:08x}")


def _is_only_checked(decoders: list[ChunkDecoder], place: ChunkPlace, goal: np.ndarray) -> TypeGuard[list[Checksum]]:
    """Whether a chunk is stored as it is, before a checksum: then it is read straight into its place."""
    only = len(decoders) == 1 and isinstance(decoders[0], Checksum) and place.crc32 is None
    return only and place.length == goal.nbytes + Checksum.BYTES


def _is_piecewise(decode: ChunkDecoder) -> TypeGuard[Unshuffle]:
    return isinstance(decode, Unshuffle) and decode.is_piecewise
