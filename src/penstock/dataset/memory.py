"""Arrays in memory: the caller's own, and those of files that must be decoded whole."""

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.base.file_id import FileId
from penstock.base.scratch import aligned, borrow
from penstock.base.sizes import MiB, format_size
from penstock.base.spec import IN_MEMORY, MANIFEST, Fields, FieldSpec, Origin, ReadPath
from penstock.base.urls import base_name
from penstock.dataset.store import Out, StoreBase, check_rows, digest
from penstock.errors import ConfigError, LimitExceeded, SchemaMismatch
from penstock.read.coalesce import are_consecutive

# Larger arrays are refused if they can only be decoded whole: they are data, not a table of labels.
MOST_BYTES = 256 * MiB


class MemoryStore(StoreBase):
    """Rows of the caller's own arrays, which do not count as memory of penstock."""

    accepts_strided = True
    fields: Fields

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = {name: np.asarray(array) for name, array in arrays.items()}
        if not self.arrays:
            raise ConfigError("no arrays given: expected at least one, by name")
        for name, array in self.arrays.items():
            if array.ndim == 0 or array.dtype.hasobject:
                raise SchemaMismatch(
                    f"array {name!r} is {array.dtype} {array.shape}: expected numbers with one row per sample"
                )
        lengths = {name: len(array) for name, array in self.arrays.items()}
        if len(set(lengths.values())) > 1:
            raise SchemaMismatch(f"arrays must have as many rows as each other, but have {lengths}")
        self.arrays = {name: a.astype(a.dtype.newbyteorder("="), copy=False) for name, a in self.arrays.items()}
        self.fields = {name: FieldSpec(array.dtype, array.shape[1:]) for name, array in self.arrays.items()}

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    @property
    def fingerprint(self) -> str:
        return digest("memory", *((n, str(a.dtype), a.shape, sample_digest(a)) for n, a in self.arrays.items()))

    def scratch_bytes(self, rows: int) -> int:
        return max(aligned(rows * spec.row_bytes) for spec in self.fields.values())

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        check_rows(rows, self)
        for name, target in out.items():
            if len(rows) and are_consecutive(at) and target.flags.c_contiguous:
                goal = target[int(at[0]) : int(at[0]) + len(at)]
                np.take(self.arrays[name], rows, axis=0, out=goal, mode="clip")
            else:
                spec = self.fields[name]
                with borrow(len(rows) * spec.row_bytes) as scratch:
                    taken = scratch.view(spec.dtype).reshape(len(rows), *spec.shape)
                    np.take(self.arrays[name], rows, axis=0, out=taken, mode="clip")
                    target[at] = taken

    def read_paths(self) -> Sequence[ReadPath]:
        how = "in memory already"
        return [
            ReadPath(name, spec, len(self), "an array", how, checked_by=IN_MEMORY) for name, spec in self.fields.items()
        ]

    def origin(self, row: int) -> Origin:
        return Origin("", f"{next(iter(self.arrays))}[{row}]")


def sample_digest(array: np.ndarray) -> str:
    """A digest of up to 4,096 numbers, evenly spread: a cheap way to distinguish most arrays."""
    flat = array.reshape(-1)
    return digest(flat[:: max(1, len(flat) // 4096)].tobytes())


class HeldStore(MemoryStore):
    """Rows of a file's arrays, decoded once and held in memory, which counts as the store's index.

    decoding_bytes:  what decoding took besides: the allocator may keep it
    """

    def __init__(
        self, file: FileId, arrays: Mapping[str, np.ndarray], why: str, *, checked_by: str = "", decoding_bytes: int = 0
    ) -> None:
        super().__init__(arrays)
        self.file, self.why, self.checked_by, self.decoding_bytes = file, why, checked_by, decoding_bytes

    @property
    def index_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values()) + self.decoding_bytes

    @property
    def fingerprint(self) -> str:
        return digest(base_name(self.file.path), self.file.size, super().fingerprint)

    def read_paths(self) -> Sequence[ReadPath]:
        how = f"held in memory: {self.why}"
        by = MANIFEST if self.file.is_compared else self.checked_by
        return [ReadPath(name, spec, len(self), "an array", how, checked_by=by) for name, spec in self.fields.items()]

    def origin(self, row: int) -> Origin:
        return Origin(self.file.path, f"{next(iter(self.arrays))}[{row}]")


def check_can_be_held(path: str, bytes_: int, why: str, way_out: str) -> None:
    """Refuse arrays that are too large to be held, before they are decoded."""
    if bytes_ > MOST_BYTES:
        raise LimitExceeded(
            f"{path}: {why}, so that all of it would have to be held in memory: {format_size(bytes_)}, where "
            f"{format_size(MOST_BYTES)} is the limit. {way_out}"
        )
