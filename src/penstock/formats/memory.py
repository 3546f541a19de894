"""Arrays already in memory: labels and tables for a join, and the oracle other stores are compared with."""

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.coalesce import consecutive
from penstock.errors import ConfigError, SchemaMismatch
from penstock.memory import aligned, borrow
from penstock.spec import IN_MEMORY, Fields, FieldSpec, Origin, ReadPath
from penstock.store import Out, check_rows, digest


class MemoryStore:
    """Rows of arrays that are already there."""

    blocks = None
    index_bytes = 0  # the caller's arrays were there before
    takes_rows_apart = True

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = {name: np.asarray(array) for name, array in arrays.items()}
        if not self.arrays:
            raise ConfigError("no arrays given: expected at least one, by name")
        for name, array in self.arrays.items():
            if array.ndim == 0 or array.dtype.hasobject:
                raise SchemaMismatch(
                    f"array {name!r} is {array.dtype} {array.shape}: expected numbers with one row a sample"
                )
        lengths = {name: len(array) for name, array in self.arrays.items()}
        if len(set(lengths.values())) > 1:
            raise SchemaMismatch(f"arrays must have as many rows as each other, but have {lengths}")
        self.arrays = {name: a.astype(a.dtype.newbyteorder("="), copy=False) for name, a in self.arrays.items()}
        self.fields: Fields = {name: FieldSpec(array.dtype, array.shape[1:]) for name, array in self.arrays.items()}

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    @property
    def fingerprint(self) -> str:
        return digest("memory", *((n, str(a.dtype), a.shape, _sum(a)) for n, a in self.arrays.items()))

    def scratch_bytes(self, rows: int) -> int:
        return max(aligned(rows * spec.row_bytes) for spec in self.fields.values())

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        check_rows(rows, self)
        for name, target in out.items():
            if len(rows) and consecutive(at) and target.flags.c_contiguous:
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

    def close(self) -> None:
        """Nothing is open."""


def _sum(array: np.ndarray) -> str:
    """A cheap check that two arrays hold the same numbers: a hash of up to 4,096 of them, evenly spread."""
    flat = array.reshape(-1)
    return digest(flat[:: max(1, len(flat) // 4096)].tobytes())
