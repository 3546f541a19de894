"""What one field of one sample looks like, and where a sample came from: frozen values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

from penstock.sizes import format_size


@dataclass(frozen=True)
class FieldSpec:
    """Dtype and shape of one field of one sample, as it is delivered (always in native byte order).

    What has no fixed size (text, JSON …) is a Python object each, and comes in lists.
    """

    dtype: np.dtype
    shape: tuple[int, ...] = ()
    holds: str = ""
    """What the objects are: ``text``, ``json`` …"""
    most_bytes: int = field(default=0, compare=False)
    """The most that one of the objects takes; files that are opened together may differ in it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype).newbyteorder("="))
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))

    @property
    def is_list(self) -> bool:
        """Whether batches hold a list of objects instead of an array."""
        return self.dtype.hasobject

    @property
    def row_bytes(self) -> int:
        """Bytes of this field in one sample."""
        return self.dtype.itemsize * prod(self.shape) + self.most_bytes

    def empty(self, rows: int) -> np.ndarray:
        """Uninitialised memory for so many samples."""
        return np.empty((rows, *self.shape), self.dtype)

    def __str__(self) -> str:
        if self.is_list:
            return f"{self.holds} of at most {format_size(self.most_bytes)}"
        return f"{self.dtype} {self.shape}" if self.shape else str(self.dtype)


Fields = Mapping[str, FieldSpec]

IN_MEMORY = "nobody: it comes from no file"
"""What ``ReadPath.checked_by`` says of arrays that the caller gave."""
MANIFEST = "a manifest"


@dataclass(frozen=True)
class Origin:
    """Where one sample lies: the file, and the place in it (``betas[12]``, a tar key …)."""

    url: str
    key: str

    def __str__(self) -> str:
        return f"{self.url}: {self.key}" if self.url else self.key


@dataclass(frozen=True)
class ReadPath:
    """How one field comes off the disk, and why so."""

    field: str
    spec: FieldSpec
    rows: int
    layout: str
    """``chunks of 47 rows, (10, 10, 7) of each; shuffle, deflate``"""
    how: str
    block_rows: int = 1
    """Rows that are read whole or not at all."""
    amplification: float = 1.0
    """Bytes decoded for a byte delivered, if rows were read one by one."""
    stored_bytes: int = 0
    missing_chunks: int = 0
    remedy: str = ""
    """What would let each row be read by itself; empty where it can be."""
    far: bool = False
    """Whether each read is a journey over the network, so that many at a time pay."""
    epoch_bytes: int = -1
    """What comes from the files when each block is read once, or each row where there are none; -1: all there is."""

    mapped_files: int = 0
    """Files whose rows are gathered from mappings; 0 where they are read."""
    checked_by: str = ""
    """What every byte that is delivered was held against; empty where a damaged one would pass for data."""

    def __post_init__(self) -> None:
        if self.epoch_bytes < 0:
            object.__setattr__(self, "epoch_bytes", self.stored_bytes)


@dataclass(frozen=True)
class Cast:
    """An element-wise conversion declared by the caller: ``value.astype(dtype) / divisor * scale + offset``.

    Declared, not performed: the loader runs it on the way into the batch, or on the device after the copy.
    """

    dtype: np.dtype
    scale: float = 1.0
    offset: float = 0.0
    divisor: float = 1.0
    """Dividing rounds otherwise than multiplying by the inverse."""

    @property
    def changes_values(self) -> bool:
        """Whether it does more than change the dtype."""
        return (self.scale, self.offset, self.divisor) != (1, 0, 1)


def row_bytes(fields: Fields) -> int:
    """Bytes of one sample."""
    return sum(spec.row_bytes for spec in fields.values())
