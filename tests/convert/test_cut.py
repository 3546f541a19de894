"""The arithmetic: every value in one shard, every task within its room."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.conversion.cut import CutRequest, TooLittle, boxes, cut_field, largest_divisor


def wanted(rows, shape, block, chunk, shard_bytes=4096, least=1):
    return CutRequest(
        rows=rows, shape=shape, dtype=np.dtype(np.int16), block_rows=block, source_chunk=chunk, chunk_rows=None,
        shard_bytes=shard_bytes, least_read_bytes=least,
    )  # fmt: skip


def overhead(box, read_rows, chunk_rows):
    return 100 + 2 * chunk_rows


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(1, 60), shape=st.lists(st.integers(1, 9), max_size=3).map(tuple), block=st.integers(1, 70),
    room=st.integers(150, 4000), cut_chunks=st.booleans(),
)  # fmt: skip
def test_every_value_is_in_one_shard_and_every_task_fits(rows, shape, block, room, cut_chunks):
    chunk = tuple(max(1, n // 2) for n in shape) if cut_chunks else ()
    enough = room
    try:
        cut = cut_field(wanted(rows, shape, block, chunk), room, overhead)
    except TooLittle as found:
        enough = found.need_bytes
        cut = cut_field(wanted(rows, shape, block, chunk), enough, overhead)  # what is named is enough
    assert enough >= room
    assert cut.need_bytes <= enough
    seen = np.zeros((rows, *shape), int)
    for place in np.ndindex(*cut.grid):
        these, part = cut.shard(place)
        for read in cut.reads(these):
            assert len(read) <= cut.read_rows
            seen[(slice(read.start, read.stop), *part)] += 1
    assert (seen == 1).all()
    assert cut.shard_rows % cut.read_rows == 0


def test_rows_are_cut_along_chunks_before_through_them():
    found = list(boxes((20, 6), (5, 3)))
    assert found[0] == (20, 6)
    assert {(10, 6), (5, 6)} <= set(found)
    through = [box for box in found if box[0] % 5 or box[1] % 3]
    assert found.index(through[0]) > found.index((5, 3))


def test_rows_are_not_cut_to_shreds():
    with pytest.raises(TooLittle) as refused:
        cut_field(wanted(100, (300_000,), 100, (1,), least=2**20), 1, overhead)
    cut = cut_field(wanted(100, (300_000,), 100, (1,), least=2**20), refused.value.need_bytes, overhead)
    assert np.prod(cut.grid) < 60


def test_small_rows_are_not_read_one_by_one_however_little_memory_there_is():
    small = replace(wanted(1, (4,), 1, (), shard_bytes=2**30, least=2**20), chunk_rows=1)
    for rows, expected in ((500, 500), (100_000, 1024)):
        with pytest.raises(TooLittle) as refused:
            cut_field(replace(small, rows=rows), 1, overhead)
        assert cut_field(replace(small, rows=rows), refused.value.need_bytes, overhead).read_rows == expected


@pytest.mark.parametrize(("number", "most", "expected"), [(12, 5, 4), (7, 6, 1), (10, 100, 10), (10, 0, 1)])
def test_largest_divisor(number, most, expected):
    assert largest_divisor(number, most) == expected


@pytest.mark.parametrize(
    ("values", "options", "rows_per_chunk"),
    [
        (1000, {}, 1),
        (100, {}, 2621),  # rows of 400 bytes: their places and checksums would be a twentieth of the output
        (1000, {"compression": "zstd"}, 262),
        (1000, {"rows_per_chunk": 10, "compression": "none"}, 10),
    ],
)
def test_rows_that_are_not_compressed_are_chunks_of_their_own(tmp_path, values, options, rows_per_chunk):
    rows = np.random.default_rng(0).normal(size=(4000, values)).astype(np.float32)
    plan = ps.convert(ps.from_arrays(x=rows), tmp_path / "out.zarr", dry_run=True, **options).plan
    assert plan.cuts["x"].chunk_rows == rows_per_chunk


def test_rows_whose_places_would_not_stay_in_memory_share_chunks(tmp_path, read_policy):
    rows = np.random.default_rng(0).normal(size=(400, 1000)).astype(np.float32)
    read_policy(kept_shard_index_bytes=17 * 399)
    assert ps.convert(ps.from_arrays(x=rows), tmp_path / "out.zarr", dry_run=True).plan.cuts["x"].chunk_rows == 262
