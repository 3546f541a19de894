"""Frozen values: dtype and shape of a field, where a sample lies, how a field is read, and conversions."""

from collections.abc import Mapping
from dataclasses import field
from math import prod

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.dtypes import numpy_dtype
from penstock.base.sizes import format_size


@dataclass(frozen=True, repr=False)
class FieldSpec:
    """Dtype and shape of one field of one sample, as it is delivered (always in native byte order).

    Values without a fixed size (text, JSON …) are Python objects, delivered in lists.
    """

    dtype: np.dtype
    shape: tuple[int, ...] = ()
    holds: str = ""
    """What the objects are: ``text``, ``json`` …"""
    most_bytes: int = field(default=0, compare=False)
    """The most memory that one object takes; files that are opened together may differ in it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", numpy_dtype(self.dtype).newbyteorder("="))
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
        """Uninitialised memory for ``rows`` samples."""
        return np.empty((rows, *self.shape), self.dtype)

    def __str__(self) -> str:
        if self.is_list:
            return f"{self.holds} of at most {format_size(self.most_bytes)}"
        return f"{self.dtype} {self.shape}" if self.shape else str(self.dtype)

    __repr__ = __str__


Fields = Mapping[str, FieldSpec]


@dataclass(frozen=True, repr=False)
class InFull:
    """Fields written out in full: fingerprints in saved states are made of this text, so it never changes."""

    fields: Fields

    def __repr__(self) -> str:
        described = (
            f"{name!r}: FieldSpec(dtype={spec.dtype!r}, shape={spec.shape!r}, holds={spec.holds!r}, "
            f"most_bytes={spec.most_bytes!r})"
            for name, spec in self.fields.items()
        )
        return f"{{{', '.join(described)}}}"


IN_MEMORY = "in memory"
"""The value of ``ReadPath.checked_by`` for arrays that the caller gave: there is nothing to check."""
MANIFEST = "a manifest"


@dataclass(frozen=True)
class Origin:
    """Where one sample is stored: the file, and the place in it (``betas[12]``, a tar key …)."""

    url: str
    key: str

    def __str__(self) -> str:
        return f"{self.url}: {self.key}" if self.url else self.key


@dataclass(frozen=True)
class ReadPath:
    """How one field is read from its files."""

    field: str
    spec: FieldSpec
    rows: int
    layout: str
    """``chunks of 47 rows, (10, 10, 7) of each; shuffle, deflate``"""
    how: str
    block_rows: int = 1
    """Rows that can only be read together."""
    amplification: float = 1.0
    """Bytes decoded per byte delivered, if rows were read one by one."""
    stored_bytes: int = 0
    missing_chunks: int = 0
    remedy: str = ""
    """What would let each row be read by itself; empty where it can be."""
    is_far: bool = False
    """Whether each read goes over the network, so that many at a time are faster."""
    mapped_files: int = 0
    """Files whose rows are gathered from mappings; 0 where they are read."""
    checked_by: str = ""
    """The checksum that covers every delivered byte; empty if damage would go unnoticed."""
    codecs: str = ""
    """The codecs that chunks were written with: ``shuffle, deflate``; empty if they are not compressed."""
    chunk: tuple[int, ...] = ()
    """The part of a row that a chunk holds; empty if rows are not in chunks."""


@dataclass(frozen=True)
class Cast:
    """An element-wise conversion declared by the caller: ``value.astype(dtype) / divisor * scale + offset``.

    Declared, not performed: the loader runs it on the way into the batch, or on the device after the copy.
    """

    dtype: np.dtype
    scale: float = 1.0
    offset: float = 0.0
    divisor: float = 1.0
    """Division rounds differently from multiplication by the inverse."""

    @property
    def changes_values(self) -> bool:
        """Whether it does more than change the dtype."""
        return (self.scale, self.offset, self.divisor) != (1, 0, 1)


@dataclass(frozen=True)
class Axes:
    """An order of axes that the caller declared for a field."""

    order: tuple[int, ...]
    is_contiguous: bool = False
    """Whether memory is laid out in this order too, or rows keep their memory and are seen through a view."""


def permuted(spec: FieldSpec, axes: tuple[int, ...] | None) -> FieldSpec:
    """The same field with its axes in another order."""
    return spec if axes is None else FieldSpec(spec.dtype, tuple(spec.shape[axis] for axis in axes))


def without_axis(sizes: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The shape of one row, from the shape of an array."""
    return (*sizes[:axis], *sizes[axis + 1 :])


def row_bytes(fields: Fields) -> int:
    """Bytes of one sample."""
    return sum(spec.row_bytes for spec in fields.values())
