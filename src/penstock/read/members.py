"""Files inside an archive, one per sample and field, read into a batch by one of three strategies.

1. One by one: any kind of member (``MemberReader``).
2. Gathered from a mapping of the file: small arrays of one size, without a system call or a line of Python per member.
   Members lie anywhere, so numpy sees the file as if a row of that size began at every byte, and copies the wanted ones
   (``MemberGatherReader``).
3. Together: the members of one sample that lie next to each other, in one request instead of one per field
   (``AdjacentMembers``).
"""

from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from math import prod
from operator import itemgetter

import numpy as np

from penstock.base import counters
from penstock.base.scratch import aligned, borrow
from penstock.base.sizes import KiB
from penstock.base.spec import Cast, FieldSpec, permuted
from penstock.errors import Changed, DataError, Missing, SchemaMismatch
from penstock.files import saved
from penstock.files.files import Files
from penstock.files.handles import Handle
from penstock.read.convert import convert, convert_axes, convert_scratch_bytes
from penstock.read.extents import LooseFiles, Members
from penstock.read.kinds import Kind, MemoryFile, Npy, Number, Raw, Readable, Value, check_length
from penstock.read.part import Box, RowPart
from penstock.read.rows import GatherReader, gather_places, rows_at_bytes, rows_per_piece

# With fewer rows, numpy's calls take longer than a system call per row.
WORTH_GATHERING = 4

# Numbers as text that are read at a time, and how many digits always fit 64 bits.
NUMBERS_AT_ONCE = 1024
MOST_DIGITS = 18

# Arrays are read straight into the batch. Members to decode pass through scratch, up to this many bytes per sample.
MOST_BYTES = 256 * KiB

# The most between two members that are read together: less than a page, which the system reads anyway.
GAP_BYTES = 4 * KiB


def member_reader(
    array: Members, files: Files, cast: Cast | None, part: RowPart | None, axes: tuple[int, ...] | None
) -> "MemberReader | MemberGatherReader | NumberGatherReader":
    """The reader that suits the members."""
    kind, can_be_mapped = array.kind, not isinstance(array, LooseFiles) and array.file.can_be_mapped
    if can_be_mapped and axes is None:
        if isinstance(kind, Npy | Raw) and len(kind.head) + kind.nbytes < files.policy.map_rows_below_bytes:
            return MemberGatherReader(array, files, cast, part)
        if isinstance(kind, Number) and cast is None and part is None:
            return NumberGatherReader(array, files)
    return MemberReader(array, files, cast, part, axes)


class MemberReader:
    """One member per row, one after another."""

    def __init__(
        self,
        array: Members,
        files: Files,
        cast: Cast | None,
        part: RowPart | None,
        axes: tuple[int, ...] | None = None,
    ) -> None:
        self.array, self.files, self.cast, self.part, self.axes = array, files, cast, part, axes
        self.kind: Kind = array.kind
        self.straight = cast is None and part is None and axes is None
        self.spec = (
            array.spec
            if self.straight
            else FieldSpec(cast.dtype if cast else array.stored, array.shape if part is None else part.shape)
        )
        self.spec = permuted(self.spec, axes)

    def scratch_bytes(self, rows: int) -> int:
        own = self.kind.scratch_bytes(self.array.longest)
        if self.straight:
            return own
        whole = aligned(self.array.row_bytes)
        elements = prod(self.spec.shape)
        chosen = aligned(elements * self.array.stored.itemsize) if self.part is not None else 0
        return whole + max(own, chosen + (convert_scratch_bytes(elements, self.cast) if self.cast else 0))

    def read(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        array, pairs = self.array, zip(rows.tolist(), at.tolist(), strict=True)
        if isinstance(array, LooseFiles):
            for row, place in pairs:
                try:
                    with self.files.lend(array.file_at(row)) as handle:
                        self.read_row(handle, row, place, target)
                except Changed:
                    saved.forget(array.saved)  # so that opening the dataset again lists the files anew
                    raise
            return
        with self.files.lend(array.file) as handle:
            for row, place in pairs:
                self.read_row(handle, row, place, target)

    def read_row(self, handle: Readable, row: int, place: int, target: np.ndarray) -> None:
        """Read the member of ``row`` into ``target[place]``."""
        array, kind = self.array, self.kind
        offset, length = int(array.offsets[row]), int(array.lengths[row])
        if offset < 0:
            raise Missing(f"{array.file.path}: sample {array.keys[row]!r} has no {array.name!r}")
        counters.mine().chunks_read += 1
        try:
            check_length(length, array.max_bytes)
            if isinstance(kind, Value):
                target[place] = kind.value(handle, offset, length)
                return
            goal = target[place : place + 1].reshape(self.spec.shape)
            if self.straight:
                kind.read(handle, offset, length, goal)
                return
            with borrow(array.row_bytes) as scratch:
                whole = scratch.view(array.stored).reshape(array.shape)
                kind.read(handle, offset, length, whole)
                if self.axes is not None:
                    convert_axes(whole, goal, self.cast or Cast(goal.dtype), self.axes)
                else:
                    self._take(whole.reshape(-1), goal.reshape(-1))
        except DataError as error:
            first = f" (the first sample is {array.keys[0]!r})" if isinstance(error, SchemaMismatch) else ""
            raise type(error)(
                f"{array.file.path}: {array.place(row)} at offset {offset:,} of {length:,} bytes: {error}{first}. "
                f'Repair or leave out that sample, with select or on_error="skip"'
            ) from error

    def _take(self, whole: np.ndarray, goal: np.ndarray) -> None:
        if self.part is None:
            assert self.cast is not None
            convert(whole, goal, self.cast)
            return
        with borrow(len(goal) * whole.itemsize) as scratch:
            chosen = scratch.view(whole.dtype)
            if isinstance(self.part, Box):
                np.copyto(chosen.reshape(self.part.full_shape), whole.reshape(self.array.shape)[self.part.index])
            else:
                np.take(whole, self.part.flat, out=chosen, mode="clip")
            convert(chosen, goal, self.cast or Cast(goal.dtype))


class MemberGatherReader(GatherReader):
    """Arrays that all have the same header, or none."""

    least_rows = WORTH_GATHERING

    def __init__(self, array: Members, files: Files, cast: Cast | None, part: RowPart | None) -> None:
        super().__init__(array, files, cast, part)
        self.members, self.head, self.length = array, array.kind.head, len(array.kind.head) + array.kind.nbytes
        self._piece = rows_per_piece(array.row_bytes)
        self.one_by_one = MemberReader(array, files, cast, part)

    def scratch_bytes(self, rows: int) -> int:
        taken = aligned(min(rows, self._piece) * self.length)
        return max(super().scratch_bytes(rows) + taken, self.one_by_one.scratch_bytes(rows))

    def read_from(self, handle: Handle, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        if not self._have_same_header(handle, rows):  # some are absent or unlike the first: errors come one by one
            self.one_by_one.read(rows, at, target)
            return
        mine = counters.mine()
        mine.chunks_read += len(rows)
        mine.bytes_read += len(rows) * len(self.head)
        super().read_from(handle, rows, at, target)

    @cached_property
    def _are_alike(self) -> bool:
        """Whether all members are there, and as long as the first."""
        lengths = self.members.lengths
        return bool(lengths.min() == lengths.max() == self.length and self.members.offsets.min() >= 0)

    def _have_same_header(self, handle: Handle, rows: np.ndarray) -> bool:
        members = self.members
        if not self._are_alike and ((members.lengths[rows] != self.length).any() or (members.offsets[rows] < 0).any()):
            return False
        if not self.head:
            return True
        head = np.frombuffer(self.head, np.uint8)
        pieces = (rows[begin : begin + self._piece] for begin in range(0, len(rows), self._piece))
        return all((rows_at_bytes(handle, len(head))[members.offsets[piece]] == head).all() for piece in pieces)

    def _gather(self, handle: Handle, rows: np.ndarray, goal: np.ndarray) -> None:
        gather_places(handle, self.members.offsets[rows] + len(self.head), goal)

    def _places(self, rows: np.ndarray) -> np.ndarray:
        places: np.ndarray = self.members.offsets[rows]
        return places


class NumberGatherReader(GatherReader):
    """Whole numbers as text, if they are plain digits."""

    least_rows = WORTH_GATHERING

    def __init__(self, array: Members, files: Files) -> None:
        super().__init__(array, files, None, None)
        self.members, self.one_by_one = array, MemberReader(array, files, None, None)

    def scratch_bytes(self, rows: int) -> int:
        return self.one_by_one.scratch_bytes(rows)

    def read_from(self, handle: Handle, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        mine = counters.mine()
        for begin in range(0, len(rows), NUMBERS_AT_ONCE):
            piece = slice(begin, begin + NUMBERS_AT_ONCE)
            numbers = self._numbers(handle, rows[piece])
            if numbers is None:  # some are absent, signed, or no numbers: errors come one by one
                self.one_by_one.read(rows[piece], at[piece], target)
                continue
            target[at[piece]] = numbers
            mine.chunks_read += len(numbers)
            mine.bytes_read += int(self.members.lengths[rows[piece]].sum())
            if counters.is_watched():
                for row in rows[piece].tolist():
                    counters.note(handle.file.path, (int(self.members.offsets[row]),), int(self.members.lengths[row]))

    @cached_property
    def _size_of_all(self) -> int | None:
        """The bytes that hold any of the numbers, if all of them are there and have few digits."""
        return _digits(self.members.offsets, self.members.lengths, self.members.file.size)

    def _numbers(self, handle: Handle, rows: np.ndarray) -> np.ndarray | None:
        offsets, lengths = self.members.offsets[rows], self.members.lengths[rows]
        size = self._size_of_all or _digits(offsets, lengths, len(handle.mapping))
        if size is None:
            return None
        text = rows_at_bytes(handle, size)[offsets]
        is_digit = text - ord("0") < 10  # unsigned: what is smaller becomes large
        beyond = np.arange(size) >= lengths[:, None]
        if not (is_digit | beyond).all():
            return None
        text[beyond] = 0  # which ends a text
        return text.view(f"S{size}")[:, 0].astype(np.int64)


def _digits(offsets: np.ndarray, lengths: np.ndarray, file_bytes: int) -> int | None:
    """The most digits of these members; None if some are absent, empty, too long, or too close to the file's end."""
    most = int(lengths.max())
    are_there = 0 < most <= MOST_DIGITS and lengths.min() >= 1 and offsets.min() >= 0
    return most if are_there and offsets.max() + most <= file_bytes else None


class _Field:
    """How one field is read together with others."""

    def __init__(self, reader: MemberReader) -> None:
        self.reader, self.offsets, self.lengths = reader, reader.array.offsets, reader.array.lengths
        self.head, self.straight_bytes = b"", 0
        """The usual header of an array, and the bytes after it; 0 for members that must be decoded."""
        if reader.straight and isinstance(reader.kind, Npy | Raw):
            self.head, self.straight_bytes = reader.kind.head, reader.kind.nbytes
        self.whole = len(self.head) + self.straight_bytes


class AdjacentMembers:
    """Several fields of one archive."""

    def __init__(self, readers: Mapping[str, MemberReader | MemberGatherReader | NumberGatherReader]) -> None:
        self._arrays = {name for name, reader in readers.items() if isinstance(reader, MemberGatherReader)}
        self._numbers = {name for name, reader in readers.items() if isinstance(reader, NumberGatherReader)}
        self._fields = {
            name: _Field(reader if isinstance(reader, MemberReader) else reader.one_by_one)
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

    def choose(self, names: list[str], rows: int) -> list[str]:
        """The fields that are better read together than one by one.

        Of many samples, arrays are gathered; numbers too, unless they lie beside members that are read anyway.
        """
        many = rows >= WORTH_GATHERING
        found = [name for name in names if name in self._fields and not (many and name in self._arrays)]
        return found if len(found) > 1 and not (many and self._numbers.issuperset(found)) else []

    def read(self, rows: np.ndarray, at: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """Read the members of sample ``rows[k]`` into ``out[field][at[k]]``."""
        fields = [(self._fields[name], target) for name, target in out.items()]
        with self._files.lend(self._file) as handle:
            for row, place in zip(rows.tolist(), at.tolist(), strict=True):
                if not self._read_row(handle, row, place, fields):
                    for field, target in fields:
                        field.reader.read_row(handle, row, place, target)

    def _read_row(self, handle: Handle, row: int, place: int, fields: list[tuple[_Field, np.ndarray]]) -> bool:
        """In one request: arrays go into the batch, everything before, between and after them into scratch.

        Returns False if the members do not lie together.
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
            done, ahead = 0, begin  # scratch that is in use; file offset of scratch[0] after the arrays so far
            for offset, length, field, target in members:
                if field.straight_bytes and length == field.whole:
                    data = offset - ahead + len(field.head)
                    pieces += (scratch[done:data], target[place : place + 1])
                    arrays.append((scratch[offset - ahead : data], field, target))
                    done, ahead = data, ahead + field.straight_bytes
                else:
                    others.append((MemoryFile(ahead, scratch), field, target))
            handle.read_into(begin, *pieces, scratch[done:])
            mine = counters.mine()
            mine.bytes_read -= between
            mine.chunks_read += len(arrays)
            for head, field, target in arrays:
                if head.tobytes() != field.head:
                    field.reader.read_row(handle, row, place, target)
            for held, field, target in others:
                field.reader.read_row(held, row, place, target)
        return True


def adjacent_members(readers: Mapping[str, object]) -> AdjacentMembers | None:
    """A reader of several fields of one archive; None if they are not in one."""
    found = {
        name: reader
        for name, reader in readers.items()
        if isinstance(reader, MemberReader | MemberGatherReader | NumberGatherReader)
        and not isinstance(reader.array, LooseFiles)
    }
    files = {reader.array.file for reader in found.values()}
    return AdjacentMembers(found) if len(found) > 1 and len(files) == 1 else None
