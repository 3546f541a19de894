"""Files of whole samples: tar shards and Parquet. A task writes one file."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from penstock.base.sizes import MiB
from penstock.base.spec import Fields, row_bytes
from penstock.conversion.cut import Cut
from penstock.conversion.source import Reader
from penstock.conversion.values import kind_of_values
from penstock.dataset.held_values import HOLDS
from penstock.dataset.store import Store
from penstock.errors import ConfigError, ConvertFailed
from penstock.files.manifest import BLOCK_BYTES, digest
from penstock.webdataset.writer import TarWriter

CHECK_BYTES = 1 * MiB
"""What is read again of a table at a time."""
ENDINGS = {"text": "txt", "json": "json", "bytes": "bin", "arrays": "npz", "msgpack": "msgpack"}
"""What a field of such values is called in a tar."""


def tar_names(fields: Fields) -> dict[str, str]:
    """Which member of a sample a field becomes: arrays become npy, so that every value comes back as it was.

    Readers of shards take capital letters for small ones.
    """
    return {name: f"{name.replace('/', '_').lower()}.{ENDINGS.get(spec.holds, 'npy')}" for name, spec in fields.items()}


def check_tar_names(fields: Fields) -> None:
    """Refuse fields whose members would have the same name."""
    seen: dict[str, str] = {}
    for name, member in tar_names(fields).items():
        if seen.setdefault(member, name) != name:
            raise ConfigError(
                f"fields {seen[member]!r} and {name!r} would both be {member!r} in a tar; use ds.rename(…)"
            )


def write_tar(path: str, cut: Cut, store: Store, rows: range) -> str:
    """One shard; returns the digest of its values."""
    names = tar_names(store.fields)
    values_of = hashlib.sha256()
    with Reader(store, min(cut.read_rows, len(rows))) as reader, TarWriter(path, index_dir=False) as tar:
        for read in cut.reads(rows):
            values = reader.read(read)
            for at, row in enumerate(read):
                tar.write({"__key__": f"{row:09d}", **sample_of(values, names, at)})
            add_values(values_of, values)
    return values_of.hexdigest()


def sample_of(values: Mapping[str, np.ndarray], names: Mapping[str, str], at: int) -> dict[str, Any]:
    """One sample of a read, by the names of its members."""
    return {names[name]: _value(column[at]) for name, column in values.items()}


def _value(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, np.ndarray | np.generic) else value


def write_parquet(path: str, cut: Cut, store: Store, rows: range) -> str:
    """One file, a row group for each read; returns the digest of its values."""
    arrow, parquet = _arrow()
    values_of = hashlib.sha256()
    with Reader(store, min(cut.read_rows, len(rows))) as reader, ExitStack() as opened:
        schema = _schema(arrow, store.fields, reader)
        file = opened.enter_context(
            parquet.ParquetWriter(path, schema, compression="zstd", compression_level=1, write_page_checksum=True)
        )
        for read in cut.reads(rows):
            values = reader.read(read)
            columns = [_column(arrow, values[each.name], each) for each in schema]
            file.write_table(arrow.Table.from_arrays(columns, schema=schema), row_group_size=len(read))
            add_values(values_of, values)
    del columns
    arrow.default_memory_pool().release_unused()  # reading it again takes memory of its own
    return values_of.hexdigest()


def check_parquet(fields: Fields) -> None:
    """Refuse what is no table."""
    for name, spec in fields.items():
        if not spec.is_list and (len(spec.shape) > 1 or spec.dtype.kind not in "biuf"):
            raise ConfigError(
                f"field {name!r} is {spec}: a Parquet table has columns of numbers, of lists of numbers of one length, "
                f"and of text. Leave it out with ds.only(…), or write .zarr, .h5 or .tar"
            )


def _arrow() -> tuple[Any, Any]:
    from penstock.formats.arrow import arrow_library

    return arrow_library("pyarrow"), arrow_library("pyarrow.parquet")


def _schema(arrow: Any, fields: Fields, reader: Reader) -> Any:
    """Names and types of the columns; fields of values say in their metadata what these are."""
    columns = []
    for name, spec in fields.items():
        if not spec.is_list:
            number = arrow.from_numpy_dtype(spec.dtype)
            columns.append(arrow.field(name, arrow.list_(number, spec.shape[0]) if spec.shape else number))
            continue
        kind = kind_of_values(name, spec, reader.read(range(1))[name].tolist(), "parquet")
        number = arrow.from_numpy_dtype(np.dtype(kind.dtype)) if kind.dtype else None
        stored = arrow.list_(number) if number else arrow.string() if kind.is_text else arrow.binary()
        columns.append(arrow.field(name, stored, metadata={HOLDS: kind.holds}))
    return arrow.schema(columns)


def _column(arrow: Any, values: np.ndarray, column: Any) -> Any:
    if values.ndim == 2:
        flat = arrow.array(values.reshape(-1))
        return arrow.FixedSizeListArray.from_arrays(flat, values.shape[1])
    if not values.dtype.hasobject:
        return arrow.array(values, type=column.type)
    if column.metadata[HOLDS.encode()] == b"json":
        return arrow.array([json.dumps(value, ensure_ascii=False) for value in values], type=column.type)
    return arrow.array(values.tolist(), type=column.type)


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


def check_members(path: str, expected: str, fields: Fields, read_rows: int) -> None:
    """Read a tar or LMDB that was written, and compare its values with those it was made of."""
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
    with parquet.ParquetFile(path, pre_buffer=False, page_checksum_verification=True) as file:
        for batch in file.iter_batches(batch_size=step, columns=list(fields), use_threads=False):
            add_values(found, {name: _numbers(batch.column(name), spec) for name, spec in fields.items()})
    arrow.default_memory_pool().release_unused()
    _compare(path, found.hexdigest(), expected)


def _numbers(column: Any, spec: Any) -> np.ndarray:
    if spec.is_list:
        values = np.empty(len(column), object)
        for at, value in enumerate(column):
            values[at] = _plain_value(value, spec.holds)
        return values
    flat = column.flatten() if spec.shape else column
    return np.asarray(flat.to_numpy(zero_copy_only=False), spec.dtype).reshape(len(column), *spec.shape)


def _plain_value(value: Any, holds: str) -> Any:
    if holds == "array":
        return value.values.to_numpy(zero_copy_only=False)
    return json.loads(value.as_py()) if holds == "json" else value.as_py()


def _compare(path: str, found: str, expected: str) -> None:
    if found != expected:
        raise ConvertFailed(f"{path}: the values that were read again are not those that were written; it is not used")


CHECKS = {"tar": check_members, "lmdb": check_members, "parquet": check_table}


def digests_of(path: str) -> str:
    """Digests of the blocks of a file."""
    return b"".join(_digests(path)).hex()


def _digests(path: str) -> Iterator[bytes]:
    block = np.empty(BLOCK_BYTES, np.uint8)
    with open(path, "rb", buffering=0) as file:
        for begin in range(0, os.fstat(file.fileno()).st_size, BLOCK_BYTES):
            count = os.preadv(file.fileno(), [block.data], begin)
            yield digest(block[:count])
