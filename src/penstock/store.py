"""What a dataset is made of: finite, read-only, thread-safe rows.

``read_into(rows, at, out)`` puts sample ``rows[k]`` at ``out[field][at[k]]`` for each field present in ``out``: any
order, repeats allowed. Target positions make composition free of copies, and a field that is absent is not read.

A store may be read by many threads at once. It holds nothing open that ``close`` does not close, and can be read again
after ``close``. It pickles, and works after a fork.
"""

import hashlib
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import PurePath
from typing import Any, Protocol, runtime_checkable

import numpy as np

from penstock import coalesce
from penstock.codecs import (
    BLOCK_ELEMENTS,
    Decoder,
    Fletcher32,
    Unshuffle,
    convert,
    convert_piece,
    convert_scratch_bytes,
    decoder,
    rescale,
)
from penstock.errors import Corrupt, DecodeFailed, OutOfRange
from penstock.extents import Chunks, Contiguous, Extents
from penstock.fileio import Files, Handle
from penstock.memory import aligned, borrow
from penstock.sizes import KiB
from penstock.spec import Cast, Fields, FieldSpec, Origin

Out = Mapping[str, np.ndarray]
"""The caller's memory: arrays of shape (places, *field shape) and the field's dtype, rows contiguous."""

# Below this a system call a row costs more than the copy: gather from a mapping instead (0.8 against 2.5 million
# rows of 4 KiB a second). Above it, reads keep the page tables small and notice a file that was cut short.
MAP_BELOW_BYTES = 32 * KiB

# Rows gathered at a time when they must pass through scratch.
GATHER_BYTES = 512 * KiB

# Below this, a chunk's rows are put into place in one call, which copies them twice; above it, one by one.
SCATTER_BELOW_BYTES = 64 * KiB


@runtime_checkable
class Store(Protocol):
    """The protocol every format implements, and every combination of stores too."""

    @property
    def fields(self) -> Fields:
        """What one sample consists of."""

    @property
    def blocks(self) -> np.ndarray | None:
        """First rows of the blocks that are read whole, ascending; None where each row can be read by itself."""

    @property
    def fingerprint(self) -> str:
        """Differs when the data do; the same on another machine or under another path."""

    @property
    def index_bytes(self) -> int:
        """Memory that knowing where things lie takes for as long as the store lives."""

    def __len__(self) -> int: ...

    def scratch_bytes(self, rows: int) -> int:
        """The most that one ``read_into`` of so many rows borrows besides ``out``."""

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        """Put sample ``rows[k]`` at ``out[field][at[k]]``."""

    def origin(self, row: int) -> Origin:
        """Where a sample came from."""

    def close(self) -> None:
        """Let go of handles; the store can still be read, and opens them again."""


@runtime_checkable
class Casting(Protocol):
    """A store that can convert on the way, better than by a second pass."""

    def casting(self, casts: Mapping[str, Cast]) -> Store | None:
        """The same rows with these fields converted, or None where it cannot do that on the way."""


@runtime_checkable
class Choosing(Protocol):
    """A store that can leave fields out altogether."""

    def choosing(self, names: Sequence[str]) -> Store:
        """The same rows with these fields alone."""


def check_rows(rows: np.ndarray, store: Store) -> None:
    """Refuse rows that are not there; negative ones too, which numpy would take from the end."""
    if len(rows) and np.asarray(rows, np.int64).view(np.uint64).max() >= len(
        store
    ):  # as unsigned, a negative number is the largest
        bad = rows[(rows < 0) | (rows >= len(store))][0]
        raise OutOfRange(f"row {bad} is out of range: there are {len(store):,} rows, 0 to {len(store) - 1:,}")


def consecutive(at: np.ndarray) -> bool:
    """Whether the places follow each other, so that a slice can stand for them."""
    return int(at[-1]) - int(at[0]) == len(at) - 1 and bool((np.diff(at) == 1).all())


def digest(*parts: object) -> str:
    """A short, stable hash of values with a faithful ``repr``."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class ExtentStore:
    """Fields whose bytes lie at known places of one file."""

    def __init__(self, arrays: Mapping[str, Extents], files: Files, casts: Mapping[str, Cast] | None = None) -> None:
        self._arrays, self._files, self._casts = dict(arrays), files, dict(casts or {})
        self._length = next(iter(arrays.values())).rows
        self._readers = {name: _reader(array, files, self._casts.get(name)) for name, array in arrays.items()}
        self.fields: Fields = {name: reader.spec for name, reader in self._readers.items()}

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self._arrays, self._files, self._casts)

    def __len__(self) -> int:
        return self._length

    @property
    def blocks(self) -> np.ndarray | None:
        rows = max(array.rows_per_chunk if isinstance(array, Chunks) else 1 for array in self._arrays.values())
        return np.arange(0, self._length, rows) if rows > 1 else None

    @property
    def index_bytes(self) -> int:
        return sum(array.index_bytes for array in self._arrays.values())

    @property
    def fingerprint(self) -> str:
        return digest(
            *((PurePath(array.file.path).name, array.file.size, array.describe()) for array in self._arrays.values()),
            sorted(self._casts.items()),
        )

    def scratch_bytes(self, rows: int) -> int:
        return max(reader.scratch_bytes(rows) for reader in self._readers.values())

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        check_rows(rows, self)
        for name, target in out.items():
            self._readers[name].read(rows, at, target)

    def origin(self, row: int) -> Origin:
        array = next(iter(self._arrays.values()))
        return Origin(array.file.path, array.place(row))

    def close(self) -> None:
        self._files.close()

    def casting(self, casts: Mapping[str, Cast]) -> "ExtentStore | None":
        if casts.keys() & self._casts.keys():  # two conversions in a row round twice; one would not
            return None
        return ExtentStore(self._arrays, self._files, {**self._casts, **casts})

    def choosing(self, names: Sequence[str]) -> "ExtentStore":
        return ExtentStore(
            {name: self._arrays[name] for name in names},
            self._files,
            {name: cast for name, cast in self._casts.items() if name in names},
        )


class _Reader(Protocol):
    spec: FieldSpec

    def scratch_bytes(self, rows: int) -> int: ...

    def read(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None: ...


def _reader(array: Extents, files: Files, cast: Cast | None) -> _Reader:
    if cast is None and not array.stored.isnative:
        cast = Cast(array.spec.dtype)
    if isinstance(array, Chunks):
        return _ChunkReader(array, files, cast)
    if array.row_bytes < MAP_BELOW_BYTES:
        return _GatherReader(array, files, cast)
    return _RangeReader(array, files, cast)


def _delivered(array: Extents, cast: Cast | None) -> FieldSpec:
    return FieldSpec(cast.dtype, array.shape) if cast else array.spec


def _read_converted(handle: Handle, offset: int, array: Extents, target: np.ndarray, cast: Cast) -> None:
    """Stored elements from ``offset`` on, converted into the flat ``target``, through a piece that stays in cache."""
    width = array.stored.itemsize
    with borrow(width * min(len(target), BLOCK_ELEMENTS)) as scratch:
        piece = scratch.view(array.stored)
        for begin in range(0, len(target), BLOCK_ELEMENTS):
            goal = target[begin : begin + BLOCK_ELEMENTS]
            handle.read_into(offset + begin * width, piece[: len(goal)])
            convert_piece(piece[: len(goal)], goal, cast)


def _convert_bytes(array: Extents, rows: int, cast: Cast | None) -> int:
    """What converting so many rows on the way borrows."""
    if cast is None:
        return 0
    elements = rows * prod(array.shape)
    return aligned(array.stored.itemsize * min(elements, BLOCK_ELEMENTS)) + convert_scratch_bytes(elements, cast)


class _RangeReader:
    """Rows worth a system call each, read straight into place."""

    def __init__(self, array: Contiguous, files: Files, cast: Cast | None) -> None:
        self.array, self.files, self.cast, self.spec = array, files, cast, _delivered(array, cast)

    def scratch_bytes(self, rows: int) -> int:
        return _convert_bytes(self.array, rows, self.cast)

    def read(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        array = self.array
        with self.files.lend(array.file) as handle:
            for first, place, count in coalesce.neighbours(rows, at):
                offset = array.offset + first * array.row_bytes
                goal = target[place : place + count]
                if self.cast:
                    _read_converted(handle, offset, array, goal.reshape(-1), self.cast)
                else:
                    handle.read_into(offset, goal)


class _GatherReader:
    """Rows too small for a system call each, gathered from a mapping of the file."""

    def __init__(self, array: Contiguous, files: Files, cast: Cast | None) -> None:
        self.array, self.files, self.cast, self.spec = array, files, cast, _delivered(array, cast)
        self.group = max(1, GATHER_BYTES // max(1, array.row_bytes, self.spec.row_bytes))

    def scratch_bytes(self, rows: int) -> int:
        group = min(rows, self.group)
        raw, ready = aligned(group * self.array.row_bytes), aligned(group * self.spec.row_bytes)
        if self.cast is None:
            return raw
        return raw + ready + convert_scratch_bytes(group * prod(self.array.shape), self.cast)

    def read(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        array = self.array
        if array.row_bytes == 0 or len(rows) == 0:
            return
        with self.files.lend(array.file, mapped=True) as handle:
            end = array.offset + array.rows * array.row_bytes
            stored = handle.bytes[array.offset : end].reshape(array.rows, array.row_bytes)
            if self.cast is None and consecutive(at):
                goal = target[int(at[0]) : int(at[0]) + len(at)].reshape(len(at), -1).view(np.uint8)
                np.take(stored, rows, axis=0, out=goal, mode="clip")  # clip: the one mode that copies straight to out
                return
            for begin in range(0, len(rows), self.group):
                group = slice(begin, begin + self.group)
                self._through_scratch(stored, rows[group], at[group], target)

    def _through_scratch(self, stored: np.ndarray, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        with borrow(len(rows) * self.array.row_bytes) as scratch:
            np.take(stored, rows, axis=0, out=scratch.reshape(len(rows), -1), mode="clip")
            if self.cast is None:
                target[at] = scratch.view(self.array.stored).reshape(len(rows), *self.array.shape)
                return
            with borrow(len(rows) * self.spec.row_bytes) as converted:
                ready = converted.view(self.spec.dtype)
                convert(scratch.view(self.array.stored), ready, self.cast)
                target[at] = ready.reshape(len(rows), *self.array.shape)


class _ChunkReader:
    """Chunks of a row, of many, or of pieces of them: each read once a call, decoded, converted, into place."""

    def __init__(self, array: Chunks, files: Files, cast: Cast | None) -> None:
        self.array, self.files, self.cast, self.spec = array, files, cast, _delivered(array, cast)
        self.decoders = [decoder(codec) for codec in reversed(array.codecs)]
        self.whole = array.rows_per_chunk == 1 and array.chunk == array.shape
        self.piece_bytes = array.chunk_bytes // array.rows_per_chunk

    def _decoders_of(self, block: int, piece: int) -> list[Decoder]:
        if self.array.skipped is None or not self.array.skipped[block, piece]:
            return self.decoders
        mask, last = int(self.array.skipped[block, piece]), len(self.decoders) - 1
        return [decode for number, decode in enumerate(self.decoders) if not mask >> (last - number) & 1]

    def scratch_bytes(self, rows: int) -> int:
        array, cast = self.array, self.cast
        encoded = aligned(array.longest) if self.decoders else 0
        between = sum(not isinstance(decode, Fletcher32) for decode in self.decoders[:-1])
        converted_apart = cast is not None and self.decoders and not isinstance(self.decoders[-1], Unshuffle)
        decoded = aligned(array.chunk_bytes) * (between + (converted_apart or not self.whole))
        half = aligned(4 * prod(array.chunk)) if cast is not None and cast.dtype == np.float16 else 0
        gathered = 0 if self.whole else min(array.chunk_bytes, array.rows_per_chunk * SCATTER_BELOW_BYTES)
        return encoded + decoded + gathered + max(half, _convert_bytes(array, 1, cast))

    def read(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        with self.files.lend(self.array.file) as handle:
            if self.whole:
                for row, place in zip(rows.tolist(), at.tolist(), strict=True):
                    self._read_chunk(handle, row, 0, target[place : place + 1].reshape(-1), self.cast)
                return
            blocks, inner = np.divmod(rows, self.array.rows_per_chunk)
            for block in sorted(set(blocks.tolist())):
                here = np.flatnonzero(blocks == block)
                self._read_block(handle, block, inner[here], at[here], target)

    def _read_block(self, handle: Handle, block: int, inner: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        """Rows ``inner`` of a block: each of its chunks is decoded once, and its share of each row put into place."""
        array, cast = self.array, self.cast
        at_once = self.piece_bytes < SCATTER_BELOW_BYTES and self.spec.dtype != np.float16
        with borrow(array.chunk_bytes) as scratch:
            chunk = scratch.view(array.stored).reshape(array.rows_per_chunk, *array.chunk)
            for piece, (inside, part) in enumerate(array.boxes):
                self._read_chunk(handle, block, piece, chunk.reshape(-1), None)
                if at_once:
                    places: tuple[Any, ...] = (at, *inside)
                    wanted: tuple[Any, ...] = (inner, *part)
                    target[places] = chunk[wanted]
                    continue
                for row, place in zip(inner.tolist(), at.tolist(), strict=True):
                    share = chunk[row : row + 1][(slice(None), *part)]
                    convert_piece(share, target[place : place + 1][(slice(None), *inside)], cast or Cast(target.dtype))
        if at_once and cast is not None:
            for place in at.tolist():
                rescale(target[place : place + 1].reshape(-1), cast)

    def _read_chunk(self, handle: Handle, block: int, piece: int, goal: np.ndarray, cast: Cast | None) -> None:
        """A chunk into ``goal``, flat and contiguous."""
        array = self.array
        offset, length = int(array.offsets[block, piece]), int(array.lengths[block, piece])
        decoders = self._decoders_of(block, piece)
        if not decoders:
            if cast:
                _read_converted(handle, offset, array, goal, cast)
            else:
                handle.read_into(offset, goal)
            return
        with borrow(length) as encoded:
            handle.read_into(offset, encoded)
            try:
                self._decode(encoded, decoders, goal, cast)
            except (Corrupt, DecodeFailed) as error:
                raise type(error)(
                    f"{array.file.path}: {array.block_place(block)}, chunk {piece} at offset {offset:,} of {length:,} "
                    f"bytes: {error}. The file is damaged there: restore it, or leave those rows out with select"
                ) from error

    def _decode(self, source: np.ndarray, decoders: list[Decoder], goal: np.ndarray, cast: Cast | None) -> None:
        decode, *later = decoders
        if isinstance(decode, Fletcher32) and later:
            self._decode(decode.checked(source), later, goal, cast)
        elif later:
            with borrow(self.array.chunk_bytes) as between:
                decode(source, between)
                self._decode(between, later, goal, cast)
        elif cast is None:
            decode(source, goal.view(np.uint8))
        elif isinstance(decode, Unshuffle):
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
