"""Arrays that a file has in no form that rows could be read from: decoded once, and held in memory.

What they take is the store's index, and so part of the memory budget; larger ones are refused, with a way out.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.errors import LimitExceeded
from penstock.extents import FileId
from penstock.formats.memory import MemoryStore
from penstock.sizes import MiB, format_size
from penstock.spec import MANIFEST, Origin, ReadPath
from penstock.store import digest
from penstock.urls import base_name

# More than this is a dataset, and not a table of labels.
MOST_BYTES = 256 * MiB


class HeldStore(MemoryStore):
    """Rows of a file's arrays, all of them in memory."""

    def __init__(self, file: FileId, arrays: Mapping[str, np.ndarray], why: str, checked_by: str = "") -> None:
        super().__init__(arrays)
        self.file, self.why, self.checked_by = file, why, checked_by

    @property
    def index_bytes(self) -> int:  # type: ignore[override]
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def fingerprint(self) -> str:
        return digest(base_name(self.file.path), self.file.size, super().fingerprint)

    def read_paths(self) -> Sequence[ReadPath]:
        how = f"held in memory: {self.why}"
        by = MANIFEST if self.file.compared else self.checked_by
        return [ReadPath(name, spec, len(self), "an array", how, checked_by=by) for name, spec in self.fields.items()]

    def origin(self, row: int) -> Origin:
        return Origin(self.file.path, f"{next(iter(self.arrays))}[{row}]")


def check_can_be_held(path: str, bytes_: int, why: str, way_out: str) -> None:
    """Refuse what is too large to be held, before it is decoded."""
    if bytes_ > MOST_BYTES:
        raise LimitExceeded(
            f"{path}: {why}, so that all of it would have to be held in memory: {format_size(bytes_)}, where "
            f"{format_size(MOST_BYTES)} is the limit. {way_out}"
        )
