"""Any layout, any part, any rows: what penstock reads of an HDF5 file is what h5py and numpy make of it."""

import pickle
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
from hypothesis import Phase, given, note, reject, settings
from hypothesis import strategies as st
from tests.property.chunk_laws import (
    NAME,
    SMALL,
    Written,
    assert_same,
    check_reads_within_scratch,
    check_shares,
    reading_by,
    wanted_rows,
)

from penstock.base import policy
from penstock.base.policy import ReadPolicy
from penstock.dataset import second_pass, sliced
from penstock.formats.hdf5 import layout as hdf5_layout
from penstock.read import convert

usual = settings(deadline=None, max_examples=150, phases=(Phase.explicit, Phase.generate, Phase.shrink))
fewer = settings(usual, max_examples=60)

DTYPES = ["u1", "<i2", ">i2", "<f4", ">f8", "f2", "c8", "bool"]
CONTIGUOUS = "contiguous"
FILTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gzip": {"compression": "gzip"},
    "shuffle": {"shuffle": True},
    "gzip + shuffle": {"compression": "gzip", "shuffle": True},
    "lzf": {"compression": "lzf"},
    "lzf + shuffle": {"compression": "lzf", "shuffle": True},
    "fletcher32": {"fletcher32": True},
    "shuffle + fletcher32": {"shuffle": True, "fletcher32": True},
    "gzip + shuffle + fletcher32": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "zstd": {**hdf5plugin.Zstd()},
    "zstd + shuffle": {"shuffle": True, **hdf5plugin.Zstd()},
    "lz4": {**hdf5plugin.LZ4()},
    "blosc lz4": {**hdf5plugin.Blosc("lz4", shuffle=hdf5plugin.Blosc.SHUFFLE)},
    "blosc zstd": {**hdf5plugin.Blosc("zstd", shuffle=hdf5plugin.Blosc.BITSHUFFLE)},
    "bitshuffle lz4": {**hdf5plugin.Bitshuffle(cname="lz4")},
    "bitshuffle zstd": {**hdf5plugin.Bitshuffle(cname="zstd")},
    "bitshuffle alone": {**hdf5plugin.Bitshuffle(cname="none")},
    "blosc2": {**hdf5plugin.Blosc2("zstd")},
    "scale-offset": {"scaleoffset": 0},
    "szip": {"compression": "szip", "compression_opts": ("nn", 4)},
}
if not h5py.h5z.filter_avail(h5py.h5z.FILTER_SZIP):
    del FILTERS["szip"]


def made(shape, dtype, seed):
    """Some smooth, so that it compresses, some noise, so that filters give up on chunks of it."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=shape) * 50
    values = np.cumsum(noise.reshape(-1)).reshape(shape) * 0.1 if seed % 2 else noise
    if np.dtype(dtype).kind == "u":
        return np.abs(values).astype(dtype)
    return (values > 0) if dtype == "bool" else values.astype(dtype)


def usable(filters, dtype):
    if filters == "scale-offset":
        return np.dtype(dtype).kind in "iu"
    return filters != "szip" or np.dtype(dtype).kind in "iuf"


@st.composite
def files(draw, folder):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    dtype = draw(st.sampled_from(DTYPES))
    values = made(shape, dtype, draw(st.integers(0, 20)))
    row_axis = draw(st.integers(0, len(shape) - 1))
    filters = draw(st.sampled_from([CONTIGUOUS, *(each for each in FILTERS if usable(each, dtype))]))
    options: dict[str, Any] = {}
    written = tuple(slice(None) for _ in shape)
    if filters != CONTIGUOUS:
        chunks = tuple(draw(st.integers(1, size + 2)) for size in shape)
        if draw(st.integers(0, 3)) == 0:  # a row each
            chunks = (*shape[:row_axis], 1, *shape[row_axis + 1 :])
        # Only an axis without a limit may have chunks longer than itself.
        unlimited = draw(st.sampled_from([(), range(len(shape)), *((axis,) for axis in range(len(shape)))]))
        maxshape = tuple(
            None if chunk > size or axis in unlimited else size
            for axis, (chunk, size) in enumerate(zip(chunks, shape, strict=True))
        )
        fill = draw(st.sampled_from([0, 1, 1 if dtype == "bool" else 101]))
        options = {"chunks": chunks, "maxshape": maxshape, "fillvalue": fill, **FILTERS[filters]}
        if draw(st.integers(0, 3)) == 0:  # chunks beyond it are never written
            written = tuple(slice(0, draw(st.integers(1, size))) for size in shape)
    path = Path(tempfile.mkdtemp(dir=folder)) / "session.h5"
    note(f"{dtype} {shape}, rows on axis {row_axis}, {filters} {options}, written {written}")
    with h5py.File(path, "w", libver=draw(st.sampled_from(["earliest", "latest"]))) as file:
        try:
            dataset = file.create_dataset(NAME, shape, dtype, **options)
        except ValueError:  # szip refuses some of the smallest chunks
            reject()
        dataset[written] = values[written]
    with h5py.File(path) as file:
        found = np.moveaxis(file[NAME][()], row_axis, 0)
    return Written(path, row_axis, np.ascontiguousarray(found.astype(found.dtype.newbyteorder("="))))


# What is done to a dataset, and to the array it should equal.


@st.composite
def slices(draw, size):
    """A slice along an axis of this size that selects something, spelt in one of its ways."""
    start = draw(st.integers(0, size - 1))
    stop, step = draw(st.integers(start + 1, size + 2)), draw(st.integers(1, 4))
    starts = [start, start - size, *([None] if start == 0 else [])]
    stops = [stop, *([stop - size] if stop < size else [None])]
    return slice(draw(st.sampled_from(starts)), draw(st.sampled_from(stops)), draw(st.sampled_from([step, None])))


@st.composite
def boxes(draw, row):
    index = [draw(slices(size) | st.integers(-size, size - 1) | st.just(slice(None))) for size in row]
    if draw(st.booleans()):
        begin = draw(st.integers(0, len(index)))
        index[begin : draw(st.integers(begin, len(index)))] = [Ellipsis]
    elif draw(st.booleans()):
        del index[draw(st.integers(0, len(index))) :]
    return index[0] if len(index) == 1 and draw(st.booleans()) else tuple(index)


@st.composite
def masks(draw, row):
    mask = np.random.default_rng(draw(st.integers(0, 50))).random(row) < draw(st.sampled_from([0.02, 0.3, 0.8, 1]))
    mask.reshape(-1)[draw(st.integers(0, mask.size - 1))] = True
    return mask


def part_taken(draw, ds, rows):
    row = rows.shape[1:]
    wanted = draw(boxes(row) | masks(row) if row else boxes(row))
    note(f"select_within {wanted!r}")
    index = wanted if isinstance(wanted, tuple) else (wanted,)
    return ds.select_within(NAME, wanted), rows[(slice(None), *index)]


def converted(draw, ds, rows):
    targets = ["complex64", "complex128"] if rows.dtype.kind == "c" else ["float16", "float32", "float64"]
    target = np.dtype(draw(st.sampled_from(targets)))
    scale, offset = draw(st.sampled_from([1.0, 1 / 300, -0.5])), draw(st.sampled_from([0.0, 0.1]))
    note(f"cast to {target}, scale {scale}, offset {offset}")
    return ds.cast(NAME, target, scale, offset), scaled(rows, target, scale, offset)


def scaled(values, target, scale, offset):
    """In the target's precision; half is scaled in single, and rounded once."""
    if target == np.float16 and (scale, offset) != (1, 0):
        return scaled(values, np.dtype(np.float32), scale, offset).astype(target)
    values = values.astype(target)
    if scale != 1:
        values = values * target.type(scale)
    return values + target.type(offset) if offset else values


def rows_chosen(draw, ds, rows):
    chosen = draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=12) | slices(len(rows)))
    note(f"select {chosen}")
    return ds.select(chosen), rows[chosen]


@st.composite
def steps(draw):
    """What is done, in any order: up to two parts, a conversion, a choice of rows."""
    wanted = [part_taken] * draw(st.sampled_from([0, 1, 2, 2]))
    wanted += [step for step in (converted, rows_chosen) if draw(st.booleans())]
    return draw(st.permutations(wanted))


# How it is read.


@st.composite
def thresholds(draw):
    """One way of reading chunks or the other, in groups and pieces of any size."""
    in_groups = draw(st.booleans())
    thresholds: dict[str, int] = {"group_chunks_below_bytes": 1 << 40 if in_groups else 0}
    for name in (
        *("group_bytes", "group_elements", "chunk_span_bytes", "chunk_gap_bytes", "scatter_rows_below_bytes"),
        *("gather_bytes", "row_gap_bytes"),
    ):
        if draw(st.booleans()):
            thresholds[name] = draw(SMALL)
    if draw(st.booleans()):
        thresholds["map_rows_below_bytes"] = 0
    chosen: dict[tuple[Any, str], Any] = {(policy, "DEFAULT"): ReadPolicy(**thresholds)}
    for module, name in [
        (second_pass, "CONVERT_BYTES"),
        (sliced, "READ_BYTES"),
        (hdf5_layout, "TURNED_BYTES"),
    ]:
        if draw(st.booleans()):
            chosen[module, name] = draw(SMALL)
    if not in_groups and draw(st.booleans()):  # groups are never larger than a block of elements
        chosen[convert, "BLOCK_ELEMENTS"] = draw(SMALL)
    return chosen


def composed(draw, file):
    ds, rows = file.open(), file.rows
    for step in draw(steps()):
        ds, rows = step(draw, ds, rows)
    return ds, rows


@usual
@given(st.data())
def test_rows_are_those_that_h5py_reads(folder, data):
    file = data.draw(files(folder))
    with reading_by(data.draw(thresholds())):
        ds, expected = composed(data.draw, file)
        assert len(ds) == len(expected)
        rows = wanted_rows(data.draw, len(ds))
        assert_same(ds[rows][NAME], expected[rows])
        if len(rows):
            assert_same(np.asarray(ds[int(rows[0])][NAME]), np.asarray(expected[rows[0]]))


@usual
@given(st.data())
def test_reads_go_anywhere_within_the_scratch_declared(folder, data):
    file = data.draw(files(folder))
    with reading_by(data.draw(thresholds())):
        check_reads_within_scratch(data.draw, *composed(data.draw, file))


@fewer
@given(st.data(), st.integers(1, 5))
def test_shares_of_a_read_are_together_the_whole(folder, data, shares):
    file = data.draw(files(folder))
    with reading_by(data.draw(thresholds())):
        check_shares(data.draw, *composed(data.draw, file), shares)


@fewer
@given(st.data())
def test_both_ways_of_reading_chunks_agree(folder, data):
    file = data.draw(files(folder))
    chosen = data.draw(thresholds())
    for below in (0, 1 << 40):
        with reading_by(
            {**chosen, (policy, "DEFAULT"): replace(chosen[policy, "DEFAULT"], group_chunks_below_bytes=below)}
        ):
            ds, expected = composed(data.draw, file)
            again = pickle.loads(pickle.dumps(ds))
            assert_same(again[:][NAME], expected)
            assert again.fingerprint == ds.fingerprint
