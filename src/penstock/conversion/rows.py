"""Files of whole samples: tar shards and Parquet. A task writes one file."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from penstock.base.sizes import MiB
from penstock.base.spec import Fields, row_bytes
from penstock.conversion.cut import Cut
from penstock.conversion.source import Reader
from penstock.dataset.store import Store
from penstock.errors import ConfigError, ConvertFailed
from penstock.files.manifest import BLOCK_BYTES, digest
from penstock.webdataset.writer import TarWriter

CHECK_BYTES = 1 * MiB
"""What is read again of a table at a time."""
ENDINGS = {"text": "txt", "json": "json", "bytes": "bin", "arrays": "npz"}
"""What a field of such values is called in a tar."""


def tar_names(fields: Fields) -> dict[str, str]:
    """Which member of a sample a field becomes: arrays become npy, so that every value comes back as it was."""
    return {name: f"{name.replace('/', '_')}.{ENDINGS.get(spec.holds, 'npy')}" for name, spec in fields.items()}


def write_tar(path: str, cut: Cut, store: Store, rows: range) -> str:
    """One shard; returns the digest of its values."""
    names = tar_names(store.fields)
    values_of = hashlib.sha256()
    with Reader(store, min(cut.read_rows, len(rows))) as reader, TarWriter(path, index_dir=False) as tar:
        for read in cut.reads(rows):
            values = reader.read(read)
            for at, row in enumerate(read):
                sample = {names[name]: _value(column[at]) for name, column in values.items()}
                tar.write({"__key__": f"{row:09d}", **sample})
            add_values(values_of, values)
    return values_of.hexdigest()


def _value(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, np.ndarray | np.generic) else value


def write_parquet(path: str, cut: Cut, store: Store, rows: range) -> str:
    """One file, a row group for each read; returns the digest of its values."""
    arrow, parquet = _arrow()
    schema = arrow.schema([(name, _kind(arrow, spec)) for name, spec in store.fields.items()])
    values_of = hashlib.sha256()
    with (
        Reader(store, min(cut.read_rows, len(rows))) as reader,
        parquet.ParquetWriter(path, schema, compression="zstd", compression_level=1) as file,
    ):
        for read in cut.reads(rows):
            values = reader.read(read)
            columns = [_column(arrow, values[each.name], each.type) for each in schema]
            file.write_table(arrow.Table.from_arrays(columns, schema=schema), row_group_size=len(read))
            add_values(values_of, values)
    del columns
    arrow.default_memory_pool().release_unused()  # reading it again takes memory of its own
    return values_of.hexdigest()


def check_parquet(fields: Fields) -> None:
    """Refuse what is no table."""
    for name, spec in fields.items():
        known = spec.holds in ("text", "bytes") if spec.is_list else len(spec.shape) <= 1 and spec.dtype.kind in "biuf"
        if not known:
            raise ConfigError(
                f"field {name!r} is {spec}: a Parquet table has columns of numbers, of lists of numbers of one length, "
                f"and of text. Leave it out with ds.only(…), or write .zarr, .h5 or .tar"
            )


def _arrow() -> tuple[Any, Any]:
    from penstock.formats.arrow import arrow_library

    return arrow_library("pyarrow"), arrow_library("pyarrow.parquet")


def _kind(arrow: Any, spec: Any) -> Any:
    if spec.is_list:
        return arrow.string() if spec.holds == "text" else arrow.binary()
    number = arrow.from_numpy_dtype(spec.dtype)
    return arrow.list_(number, spec.shape[0]) if spec.shape else number


def _column(arrow: Any, values: np.ndarray, kind: Any) -> Any:
    if values.ndim == 2:
        flat = arrow.array(values.reshape(-1))
        return arrow.FixedSizeListArray.from_arrays(flat, values.shape[1])
    return arrow.array(values.tolist() if values.dtype.hasobject else values, type=kind)


# Read again.


def add_values(digest_: Any, values: Mapping[str, np.ndarray]) -> None:
    """Values of some samples, field by field, sample by sample, into a digest that does not depend on reads."""
    columns = list(values.values())
    for row in range(len(columns[0])):
        for column in columns:
            value = column[row]
            if column.dtype.hasobject:
                plain = (
                    value if isinstance(value, bytes) else json.dumps(value, sort_keys=True, default=_plain).encode()
                )
                digest_.update(len(plain).to_bytes(8, "little") + plain)
            else:
                digest_.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def _plain(value: Any) -> Any:
    """An array inside a value, for a digest."""
    array = np.asarray(value)
    return [str(array.dtype), array.shape, array.tobytes().hex()]


def check_tar(path: str, expected: str, fields: Fields, read_rows: int) -> None:
    """Read a shard that was written, and compare its values with those it was made of."""
    from penstock.formats.open import open_quietly

    names = tar_names(fields)
    lists = {names[name]: spec.holds for name, spec in fields.items() if spec.is_list}
    ds = open_quietly(path, fields=tuple(names.values()), index_dir=False, decoders=lists)
    found = hashlib.sha256()
    with Reader(ds.delivered, min(read_rows, len(ds))) as reader:
        for begin in range(0, len(ds), read_rows):
            values = reader.read(range(len(ds))[begin : begin + read_rows])
            add_values(found, {name: values[name] for name in names.values()})
    _compare(path, found.hexdigest(), expected)


def check_table(path: str, expected: str, fields: Fields, read_rows: int) -> None:
    """The same of a Parquet file, a few rows at a time."""
    arrow, parquet = _arrow()
    found = hashlib.sha256()
    step = max(1, min(read_rows, CHECK_BYTES // max(1, row_bytes(fields))))
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=step, columns=list(fields)):
            add_values(found, {name: _numbers(batch.column(name), spec) for name, spec in fields.items()})
    arrow.default_memory_pool().release_unused()
    _compare(path, found.hexdigest(), expected)


def _numbers(column: Any, spec: Any) -> np.ndarray:
    if spec.is_list:
        values = np.empty(len(column), object)
        values[:] = column.to_pylist()
        return values
    flat = column.flatten() if spec.shape else column
    return np.asarray(flat.to_numpy(zero_copy_only=False), spec.dtype).reshape(len(column), *spec.shape)


def _compare(path: str, found: str, expected: str) -> None:
    if found != expected:
        raise ConvertFailed(f"{path}: the values that were read again are not those that were written; it is not used")


CHECKS = {"tar": check_tar, "parquet": check_table}


def digests_of(path: str) -> str:
    """Digests of the blocks of a file."""
    return b"".join(_digests(path)).hex()


def _digests(path: str) -> Iterator[bytes]:
    block = np.empty(BLOCK_BYTES, np.uint8)
    with open(path, "rb", buffering=0) as file:
        for begin in range(0, os.fstat(file.fileno()).st_size, BLOCK_BYTES):
            count = os.preadv(file.fileno(), [block.data], begin)
            yield digest(block[:count])
