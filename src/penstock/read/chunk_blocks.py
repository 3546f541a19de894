"""What all readers of chunks share: rows are read block by block, and wanted elements of a row are put into place."""

from typing import NamedTuple

import numpy as np

from penstock.base.dtypes import is_half
from penstock.base.scratch import aligned, borrow
from penstock.base.spec import Cast, FieldSpec
from penstock.errors import DataError
from penstock.files.files import Files
from penstock.files.handles import Handle
from penstock.read.chunk_decode import Decoding
from penstock.read.convert import convert_piece
from penstock.read.extents import Chunks
from penstock.read.part import RowPart, everything
from penstock.read.pieces import WHOLE, ElementPlaces, Share


class WantedRows(NamedTuple):
    """The wanted rows of one block: their numbers in it, and their places in the target."""

    inner: np.ndarray
    at: np.ndarray
    target: np.ndarray


class BlockReader:
    """Reads rows block by block; a block that failed once fails again unread."""

    pieces_per_row = 1
    """Chunks with wanted elements of a row."""

    def __init__(self, array: Chunks, files: Files, cast: Cast | None, part: RowPart | None) -> None:
        self.array, self.files, self.cast, self.policy = array, files, cast, files.policy
        self.part: RowPart = everything(array.shape) if part is None else part
        self.spec = FieldSpec(cast.dtype if cast else array.stored, self.part.shape)
        self.decoding = Decoding(array, files)
        self._failed: dict[int, dict[Share, DataError]] = {}

    def read(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray, share: Share = WHOLE) -> None:
        if len(rows) == 0 or self.spec.row_bytes == 0:
            return
        with self.decoding.lend_file() as handle:
            blocks, inner = np.divmod(rows, self.array.rows_per_chunk)
            for block in sorted(set(blocks.tolist())):
                here = np.flatnonzero(blocks == block)
                self._raise_again(block, share)
                try:
                    self._read_block(handle, block, WantedRows(inner[here], at[here], target), share)
                except DataError as error:
                    self._failed.setdefault(block, {})[share] = type(error)(str(error))
                    raise

    def _raise_again(self, block: int, share: Share) -> None:
        """A share that failed fails again, and so does the whole of which a share failed."""
        known = self._failed.get(block, {})
        failure = known.get(share) or (next(iter(known.values()), None) if share == WHOLE else None)
        if failure is not None:
            raise type(failure)(str(failure))

    def _read_block(self, handle: Handle | None, block: int, wanted: WantedRows, share: Share) -> None:
        raise NotImplementedError

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
        return aligned(4 * elements) if self.cast is not None and is_half(self.cast.dtype) else 0

    def _by_rows(self, chunks: np.ndarray) -> np.ndarray:
        """Decoded chunks (how many, *stored chunk) -> (how many, rows, *chunk), as a view."""
        array = self.array
        shaped = chunks.view(array.stored).reshape(-1, *array.stored_chunk)
        return shaped.transpose(0, *(1 + axis for axis in array.rows_first))


def place_elements(
    row: np.ndarray, local: np.ndarray | None, goal: np.ndarray, places: ElementPlaces, cast: Cast | None
) -> None:
    """``goal[places] = row[local]``, converted; both flat. None stands for all of ``row``."""
    if local is None:
        _place(row, goal, places, cast)
        return
    with borrow(len(local) * row.itemsize) as taken:
        values = taken.view(row.dtype)
        np.take(row, local, out=values, mode="clip")  # clip: the only mode that copies straight to out
        _place(values, goal, places, cast)


def _place(values: np.ndarray, goal: np.ndarray, places: ElementPlaces, cast: Cast | None) -> None:
    if isinstance(places, slice):
        convert_piece(values, goal[places], cast or Cast(goal.dtype))
    elif cast is None:
        goal[places] = values
    else:
        with borrow(values.size * goal.itemsize) as scratch:
            ready = scratch.view(goal.dtype)
            convert_piece(values, ready, cast)
            goal[places] = ready
