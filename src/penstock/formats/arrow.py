"""The Arrow library: found, its types and columns as ours, its memory and its errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from penstock.base.sizes import MiB
from penstock.base.spec import FieldSpec
from penstock.dataset.held_values import HOLDS
from penstock.errors import ConfigError, Corrupt, DataError, Missing, PenstockError, Unavailable
from penstock.files.retry import describe_refusal
from penstock.read.objects import NAMED, ObjectDecoder, vector_decoder

# What loading Arrow and decoding a held table takes, measured: up to 24 MiB, and a margin. Most of it stays with its
# allocator, which is asked to return the rest after every piece.
HELD_LIBRARY_BYTES = 32 * MiB


def arrow_library(name: str) -> Any:
    """Import it; if it is missing, the error says how to install it."""
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        raise ConfigError(f'reading tables needs {name}: pip install "penstock[parquet]"') from None


def arrow_bytes() -> dict[int, int]:
    """Memory that Arrow keeps after decoding held tables, counted once for all: an entry of ``shared_index``."""
    return {id(arrow_library("pyarrow")): HELD_LIBRARY_BYTES}


def spec_of(kind: Any) -> FieldSpec | None:
    """The field of a column of this type; None if it cannot be one."""
    import pyarrow as pa

    if isinstance(kind, pa.FixedShapeTensorType):
        inner = spec_of(kind.value_type)
        plain = kind.permutation is None or list(kind.permutation) == sorted(kind.permutation)
        return FieldSpec(inner.dtype, tuple(kind.shape)) if inner and plain else None
    if pa.types.is_fixed_size_list(kind):
        inner = spec_of(kind.value_type)
        return FieldSpec(inner.dtype, (kind.list_size, *inner.shape)) if inner else None
    if pa.types.is_boolean(kind):
        return FieldSpec(np.dtype(bool))
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return FieldSpec(np.dtype(kind.to_pandas_dtype()))
    return None


def decoder_of_values(column: Any) -> ObjectDecoder | None:
    """How values of no fixed size are decoded, in a column that was written with a note of what they are."""
    import pyarrow as pa

    holds = (column.metadata or {}).get(HOLDS.encode(), b"").decode()
    if holds == "array" and pa.types.is_list(column.type):
        return vector_decoder(column.type.value_type.to_pandas_dtype())
    is_known = pa.types.is_string(column.type) or pa.types.is_binary(column.type)
    return NAMED.get(holds) if is_known and holds != "array" else None


def raw_values(column: Any, where: str) -> list[bytes]:
    """The bytes of each value of a column."""
    import pyarrow as pa

    if column.null_count:
        raise Missing(f"{where} has {column.null_count:,} nulls; fill them, or leave the column out with fields=(…)")
    if not pa.types.is_list(column.type):
        return [value.as_buffer().to_pybytes() for value in column]
    flat, ends = numbers_of(column.flatten(), where), np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))
    return [values.tobytes() for values in np.split(flat, ends[:-1])] if len(ends) else []


def describe_arrow_type(kind: Any) -> str:
    """The kind of a column that cannot be a field."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return f"a dictionary ({kind})"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"lists of any length ({kind})"
    return "text" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else f"{kind}, no numbers"


def numbers_of(column: Any, where: str) -> np.ndarray:
    """A column's numbers, one after another."""
    chunks = column.chunks if isinstance(column, arrow_library("pyarrow").ChunkedArray) else [column]
    for chunk in chunks:
        chunk.validate()  # its lengths fit each other; takes microseconds
    found = [_numbers_of_chunk(chunk, where) for chunk in chunks]
    return np.concatenate(found) if len(found) > 1 else found[0] if found else np.empty(0)


def _numbers_of_chunk(column: Any, where: str) -> np.ndarray:
    """A chunk's numbers, one after another; without a copy if possible.

    Read from its buffer: Arrow's own conversion to numpy imports pandas if it is installed, which takes 30 MiB.
    """
    pa = arrow_library("pyarrow")
    if column.null_count:
        raise Missing(f"{where} has {column.null_count:,} nulls; fill them, or leave the column out with fields=(…)")
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_fixed_size_list(column.type):
        return _numbers_of_chunk(column.flatten(), where)
    begin, count, buffer = column.offset, len(column), column.buffers()[1]
    if pa.types.is_boolean(column.type):
        bits = np.frombuffer(b"" if buffer is None else buffer, np.uint8)
        return np.unpackbits(bits, count=begin + count, bitorder="little")[begin:].view(bool)
    dtype = np.dtype(column.type.to_pandas_dtype())
    return np.frombuffer(b"" if buffer is None else buffer, dtype, count, begin * dtype.itemsize)


@contextmanager
def errors_of_arrow(where: str, text: str, kind: type[DataError]) -> Iterator[None]:
    """Turn errors of the library into ours: the system refused something, or the file is damaged."""
    try:
        yield
    except PenstockError:
        raise
    except (OSError, ValueError, MemoryError, arrow_library("pyarrow").ArrowException) as error:
        if why := describe_refusal(error):
            raise Unavailable(f"{where}: cannot be read: {why}") from error
        if "CRC checksum verification failed" in str(error):
            raise Corrupt(
                f"{where}: a page's CRC-32 is not that of its bytes ({error}); fetch the file again"
            ) from error
        raise kind(f"{where}: {text.format(error)}") from error
