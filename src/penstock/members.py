"""Files inside an archive, one a sample and field, read one after another into a batch."""

from math import prod
from typing import Any

import numpy as np

from penstock import folderindex, tally
from penstock.codecs import convert, convert_piece, convert_scratch_bytes
from penstock.errors import Changed, DataError, Missing, SchemaMismatch
from penstock.extents import LooseFiles, Members
from penstock.fileio import Files
from penstock.kinds import Kind, Readable, Value, check_length
from penstock.memory import aligned, borrow
from penstock.spec import Cast, FieldSpec
from penstock.within import Box, Within


class MemberReader:
    """One member a row."""

    def __init__(self, array: Members, files: Files, cast: Cast | None, part: Within | None) -> None:
        self.array, self.files, self.cast, self.part = array, files, cast, part
        self.kind: Kind = array.kind
        self.spec = (
            array.spec
            if cast is None and part is None
            else FieldSpec(cast.dtype if cast else array.stored, array.shape if part is None else part.shape)
        )
        self.straight = cast is None and part is None

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
                    folderindex.forget(array.saved)  # so that opening the dataset again does help
                    raise
            return
        with self.files.lend(array.file) as handle:
            for row, place in pairs:
                self.read_row(handle, row, place, target)

    def read_row(self, handle: Readable, row: int, place: int, target: np.ndarray) -> None:
        """Put the member of ``row`` at ``target[place]``."""
        array = self.array
        if isinstance(self.kind, Value):
            target[place] = self._read_one(handle, row, target)
            return
        goal = target[place : place + 1].reshape(self.spec.shape)
        if self.straight:
            self._read_one(handle, row, goal)
            return
        with borrow(array.row_bytes) as scratch:
            whole = scratch.view(array.stored).reshape(array.shape)
            self._read_one(handle, row, whole)
            self._take(whole.reshape(-1), goal.reshape(-1))

    def _read_one(self, handle: Readable, row: int, goal: np.ndarray) -> Any:
        """Put a member into ``goal``, or return what it says where that is of no fixed size."""
        array = self.array
        offset, length = int(array.offsets[row]), int(array.lengths[row])
        if offset < 0:
            raise Missing(f"{array.file.path}: sample {array.keys[row]!r} has no {array.name!r}")
        tally.mine().chunks_read += 1
        try:
            check_length(length, array.max_bytes)
            if isinstance(self.kind, Value):
                return self.kind.value(handle, offset, length)
            return self.kind.read(handle, offset, length, goal)
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
            convert_piece(chosen, goal, self.cast or Cast(goal.dtype))
