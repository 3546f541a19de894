"""Values of no fixed size (texts, lists) from HDF5, Zarr and Parquet, decoded once and held in memory.

These formats pack such values so that one cannot be read without its neighbours. They are usually captions and labels,
and small beside the arrays they belong to.
"""

from collections.abc import Iterable, Mapping, Sequence
from zlib import crc32

import numpy as np

from penstock.base.file_id import FileId
from penstock.base.spec import MANIFEST, Fields, FieldSpec, Origin, ReadPath
from penstock.base.text_column import TextColumn
from penstock.base.urls import base_name
from penstock.dataset.memory import check_can_be_held
from penstock.dataset.store import Out, StoreBase, check_rows, digest
from penstock.read.objects import ObjectDecoder

HOLDS = "penstock_holds"
"""The attribute that says what the values of a field are: ``text``, ``json`` …"""

WAY_OUT = "Leave it out with fields=(…), or write the data as .tar, whose values are read one by one"


def collect(pieces: Iterable[Sequence[bytes]], where: str) -> TextColumn:
    """All values of a field, which come some at a time; refused when they become too large."""
    buffers: list[bytes] = []
    lengths: list[np.ndarray] = []
    size = 0
    for values in pieces:
        buffers.append(b"".join(values))
        lengths.append(np.fromiter(map(len, values), np.int64, len(values)))
        size += len(buffers[-1]) + lengths[-1].nbytes
        check_can_be_held(where, size, "its values have no fixed size", WAY_OUT)
    ends = np.cumsum(np.concatenate(lengths)) if lengths else np.empty(0, np.int64)
    return TextColumn(np.frombuffer(b"".join(buffers), np.uint8), ends)


class HeldValues(StoreBase):
    """Fields whose values are held in memory, which counts as the store's index."""

    fields: Fields

    def __init__(self, file: FileId, columns: Mapping[str, tuple[ObjectDecoder, TextColumn]]) -> None:
        self.file, self.columns = file, dict(columns)
        self.fields = {
            name: FieldSpec(np.dtype(object), (), decoder.name, decoder.most_bytes(column.longest))
            for name, (decoder, column) in self.columns.items()
        }

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))[1])

    @property
    def index_bytes(self) -> int:
        return sum(column.nbytes for _, column in self.columns.values())

    @property
    def fingerprint(self) -> str:
        sums = [(name, crc32(column.buffer.data), len(column)) for name, (_, column) in self.columns.items()]
        return digest("held values", base_name(self.file.path), sums)

    def scratch_bytes(self, rows: int) -> int:
        return 0

    def with_fields(self, names: Sequence[str]) -> "HeldValues":
        return HeldValues(self.file, {name: self.columns[name] for name in names})

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        check_rows(rows, self)
        for name, target in out.items():
            decoder, column = self.columns[name]
            for row, place in zip(rows.tolist(), at.tolist(), strict=True):
                target[place] = decoder.decode(column.raw(row))

    def read_paths(self) -> Sequence[ReadPath]:
        how, by = "held in memory: values have no fixed size", MANIFEST if self.file.is_compared else ""
        return [ReadPath(name, spec, len(self), "values", how, checked_by=by) for name, spec in self.fields.items()]

    def origin(self, row: int) -> Origin:
        return Origin(self.file.path, f"{next(iter(self.columns))}[{row}]")
