"""Any shape, dtype, chunks, codecs and version: what penstock reads of a Zarr store is what zarr-python makes of it."""

import pickle
import tempfile
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import zarr
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st
from tests.property.chunk_laws import (
    NAME,
    SMALL,
    Written,
    check_reads_within_scratch,
    check_shares,
    reading_by,
)
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec
from zarr.storage import ZipStore

import penstock as ps
from penstock.base import policy
from penstock.base.policy import ReadPolicy
from penstock.dataset import sliced
from penstock.dataset.extent_store import ExtentStore

usual = settings(deadline=None, max_examples=120, phases=(Phase.explicit, Phase.generate, Phase.shrink))
DTYPES = ["u1", "i2", "f4", "f8", "f2", "c8", "bool", "u8"]
COMPRESSORS = {
    2: [
        None,
        numcodecs.Zstd(),
        numcodecs.Blosc("lz4", shuffle=numcodecs.Blosc.BITSHUFFLE),
        numcodecs.Zlib(),
        numcodecs.GZip(),
        numcodecs.LZ4(),
        numcodecs.BZ2(),
    ],
    3: [
        None,
        ZstdCodec(checksum=True),
        BloscCodec(cname="zstd"),
        GzipCodec(),
        [GzipCodec(), Crc32cCodec()],
        [Crc32cCodec()],
        [Crc32cCodec(), ZstdCodec()],
    ],
}


def made(shape, dtype, seed):
    values = np.random.default_rng(seed).normal(size=shape) * 50
    if np.dtype(dtype).kind == "u":
        return np.abs(values).astype(dtype)
    return (values > 0) if dtype == "bool" else values.astype(dtype)


@st.composite
def stores(draw, folder):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    dtype, version = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([2, 3, 3]))
    row_axis = draw(st.integers(0, len(shape) - 1))
    chunks = tuple(draw(st.integers(1, size + 2)) for size in shape)
    if draw(st.integers(0, 3)) == 0:  # a row each
        chunks = (*shape[:row_axis], 1, *shape[row_axis + 1 :])
    options: dict[str, Any] = {"chunks": chunks, "zarr_format": version}
    options["compressors"] = draw(st.sampled_from(COMPRESSORS[version]))
    options["fill_value"] = draw(st.sampled_from([0, 1]))
    separator = draw(st.sampled_from("./"))
    if version == 2:
        options["order"] = draw(st.sampled_from("CF"))
        options["chunk_key_encoding"] = {"name": "v2", "separator": separator}
        dtype = draw(st.sampled_from("<>")) + np.dtype(dtype).str[1:]
        if draw(st.integers(0, 2)) == 0:
            options["filters"] = [numcodecs.Shuffle(np.dtype(dtype).itemsize)]
    else:
        if draw(st.booleans()):
            options["shards"] = tuple(step * draw(st.integers(1, 3)) for step in chunks)
        options["chunk_key_encoding"] = {"name": draw(st.sampled_from(["default", "v2"])), "separator": separator}
        if draw(st.booleans()):
            options["filters"] = [TransposeCodec(order=tuple(draw(st.permutations(range(len(shape))))))]
        if np.dtype(dtype).itemsize > 1:
            options["serializer"] = BytesCodec(endian=draw(st.sampled_from(["little", "big"])))
    values = made(shape, dtype, draw(st.integers(0, 20)))
    written = tuple(slice(None) for _ in shape)
    if draw(st.integers(0, 2)) == 0:  # chunks beyond it are never written
        written = tuple(slice(0, draw(st.integers(1, size))) for size in shape)
    zipped = draw(st.integers(0, 4)) == 0
    path = Path(tempfile.mkdtemp(dir=folder)) / ("a.zarr.zip" if zipped else "a.zarr")
    note(f"{dtype} {shape}, rows on axis {row_axis}, {options}, written {written}, zipped {zipped}")
    store = ZipStore(path, mode="w") if zipped else path
    zarr.create_group(store, zarr_format=version)
    array = zarr.create_array(store, name=NAME, shape=shape, dtype=values.dtype, **options)
    array[written] = values[written]
    found = np.moveaxis(array[...], row_axis, 0)
    if zipped:
        store.close()
    return Written(path, row_axis, np.ascontiguousarray(found.astype(found.dtype.newbyteorder("="))))


@st.composite
def thresholds(draw):
    """One way of reading chunks or the other, in groups and pieces of any size."""
    thresholds = {"group_chunks_below_bytes": draw(st.sampled_from([0, 1 << 40]))}
    for name in (
        *("group_bytes", "group_elements", "chunk_span_bytes", "chunk_gap_bytes", "scatter_rows_below_bytes"),
        "kept_shard_index_bytes",
    ):
        if draw(st.booleans()):
            thresholds[name] = draw(SMALL)
    chosen = {(policy, "DEFAULT"): ReadPolicy(**thresholds)}
    if draw(st.booleans()):
        chosen[sliced, "READ_BYTES"] = draw(SMALL)
    return chosen


def composed(draw, store):
    """A part of each row, a conversion, both or none, and what numpy makes of them."""
    ds, rows = store.open(), store.rows
    row = rows.shape[1:]
    if row and draw(st.booleans()):
        mask = np.random.default_rng(draw(st.integers(0, 50))).random(row) < draw(st.sampled_from([0.1, 0.5, 1]))
        mask.reshape(-1)[draw(st.integers(0, mask.size - 1))] = True
        ds, rows = ds.select_within(NAME, mask), rows[:, mask]
    elif row and draw(st.booleans()):
        box = tuple(slice(draw(st.integers(0, size - 1)), None, draw(st.integers(1, 2))) for size in row)
        ds, rows = ds.select_within(NAME, box), rows[(slice(None), *box)]
    if draw(st.booleans()):
        target = np.dtype("complex64" if rows.dtype.kind == "c" else "float32")
        ds, rows = ds.cast(NAME, target, 0.5), rows.astype(target) * target.type(0.5)
    return ds, np.ascontiguousarray(rows)


@usual
@given(st.data())
def test_reads_go_anywhere_within_the_scratch_declared(folder, data):
    written = data.draw(stores(folder))
    with reading_by(data.draw(thresholds())):
        check_reads_within_scratch(data.draw, *composed(data.draw, written))


@settings(usual, max_examples=50)
@given(st.data(), st.integers(1, 4))
def test_shares_of_a_read_are_together_the_whole(folder, data, shares):
    written = data.draw(stores(folder))
    with reading_by(data.draw(thresholds())):
        ds, expected = composed(data.draw, written)
        again = pickle.loads(pickle.dumps(ds))
        assert again.fingerprint == ds.fingerprint
        check_shares(data.draw, again, expected, shares)


@settings(usual, max_examples=40)
@given(st.data())
def test_most_stores_are_read_without_the_library(folder, data):
    """Only codecs that are named below leave the quick way."""
    written = data.draw(stores(folder))
    path = written.open()
    how = ps.inspect(path).paths[0].how
    if isinstance(path.store, ExtentStore):
        assert "zarr-python" not in how
    else:
        assert "'bz2'" in how or "unusual order: crc32c, zstd" in how or "does not divide" in how or "transposed" in how
