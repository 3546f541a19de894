"""Values of no fixed size in HDF5: texts and lists of numbers, in datasets with an attribute that names their kind."""

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.base.text_column import TextColumn
from penstock.dataset.held_values import HOLDS, collect
from penstock.read.objects import NAMED, ObjectDecoder, vector_decoder

# Values that are read at a time.
AT_ONCE = 1024


def decoder_of_values(dataset: Any) -> ObjectDecoder | None:
    """How the values of a dataset are decoded; None if their kind is not declared, or is another."""
    import h5py

    if dataset.shape is None or dataset.ndim != 1 or dataset.dtype.kind != "O":
        return None
    holds, inner = dataset.attrs.get(HOLDS), h5py.check_vlen_dtype(dataset.dtype)
    if h5py.check_string_dtype(dataset.dtype) is not None:
        return NAMED.get(holds) if holds in ("text", "json") else None
    if inner is None or isinstance(inner, type) or inner.kind not in "biuf":
        return None
    return vector_decoder(inner) if holds == "array" else NAMED["bytes"] if holds == "bytes" else None


def read_values(dataset: Any, where: str) -> tuple[ObjectDecoder, TextColumn]:
    """All values of a dataset, and how they are decoded."""
    decoder = decoder_of_values(dataset)
    assert decoder is not None
    return decoder, collect(_read_pieces(dataset), where)


def _read_pieces(dataset: Any) -> Iterator[Sequence[bytes]]:
    for begin in range(0, len(dataset), AT_ONCE):
        values = dataset[begin : begin + AT_ONCE]
        yield [value if isinstance(value, bytes) else value.tobytes() for value in values]
