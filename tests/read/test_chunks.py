"""HDF5 read sparingly, holes and damage named, files that grow, and what cannot be opened."""

import json
import os
import struct
import subprocess
import sys
from contextlib import contextmanager
from itertools import pairwise

import h5py
import numpy as np
import pytest

import penstock as ps
from penstock.base import counters
from penstock.base.policy import DEFAULT
from penstock.base.scratch import overflow_bytes, prepare, release
from penstock.base.sizes import KiB
from penstock.dataset.extent_store import ExtentStore
from penstock.errors import (
    Changed,
    ConfigError,
    Corrupt,
    DataError,
    Missing,
    PenstockError,
    SchemaMismatch,
    Truncated,
    Unsafe,
)
from penstock.files import files as fileio
from penstock.formats import hdf5
from penstock.formats.hdf5.fallback import H5pyStore, installed_filters
from penstock.read import convert

NAME = "betas"


def write(path, values, **options):
    with h5py.File(path, "w", libver=options.pop("libver", "earliest")) as file:
        file.create_dataset(NAME, data=values, **options)
    return path


def through_h5py(path, name=NAME):
    with h5py.File(path) as file:
        return file[name][()]


def counted(read):
    """What a call returns, and what it read."""
    counters.collect()
    result = read()
    return result, counters.collect()


def assert_told(refused, *told):
    for text in told:
        assert str(text) in str(refused.value), f"{text!r} is not in {str(refused.value)!r}"


@pytest.fixture(params=["one by one", "in groups"])
def _both_ways(request, read_policy):
    """Chunks are read one by one, or in groups."""
    read_policy(group_chunks_below_bytes=0 if request.param == "one by one" else 1 << 40)


both_ways = pytest.mark.usefixtures("_both_ways")


# Only what is wanted is read.


@pytest.fixture(scope="module")
def voxels(tmp_path_factory):
    """One time course a chunk, and the values."""
    values = np.random.default_rng(0).normal(size=(24, 20, 22, 21)).astype("<f4")
    return write(tmp_path_factory.mktemp("voxels") / "voxels.h5", values, chunks=(24, 1, 1, 1)), values


@both_ways
@pytest.mark.parametrize("share", [0.001, 0.02, 0.3])
@pytest.mark.parametrize("rows", [[7], [3, 20, 3, 0]], ids=len)
def test_a_mask_over_voxel_major_chunks_reads_those_voxels_alone(voxels, share, rows):
    path, values = voxels
    roi = np.random.default_rng(1).random(values.shape[1:]) < share
    ds = ps.open(path).select_within(NAME, roi)
    got, counts = counted(lambda: ds[rows][NAME])
    assert np.array_equal(got, values[rows][:, roi])
    assert counts.chunks_read == np.count_nonzero(roi), "each chunk that holds a voxel, once, for all rows"
    assert counts.chunks_filled == 0


def test_voxels_far_apart_cost_no_more_than_themselves(voxels):
    """Neighbours are read together, but not across gaps that cost more than another read."""
    path, values = voxels
    flat = np.zeros(values[0].size, bool)
    flat[::400] = True
    roi = flat.reshape(values.shape[1:])
    _, counts = counted(lambda: ps.open(path).select_within(NAME, roi)[:])
    assert counts.bytes_read == 24 * 4 * np.count_nonzero(roi)
    nearby = np.zeros(values.shape[1:], bool)
    nearby[5, 5, :10:2] = True
    _, counts = counted(lambda: ps.open(path).select_within(NAME, nearby)[:])
    assert counts.chunks_read == 5
    assert 24 * 4 * 5 <= counts.bytes_read <= 24 * 4 * 9 + 4 * DEFAULT.chunk_gap_bytes


CROPS = [
    (slice(0, 7), slice(0, 9)),
    (slice(0, 8), slice(0, 9)),
    (slice(6, 8), slice(8, 10)),
    (slice(0, 30, 14), slice(None)),
    (29, slice(36, 40)),
    (slice(3, 4), Ellipsis),
    (Ellipsis, 0),
    (slice(None), slice(None)),
]


def touched(size, step, wanted):
    """How many chunks along an axis hold something wanted."""
    return len({int(at) // step for at in np.atleast_1d(np.arange(size)[wanted])})


@both_ways
@pytest.mark.parametrize("crop", CROPS, ids=repr)
@pytest.mark.parametrize("rows", [[0], [5, 1], [0, 1, 2, 3, 4, 5, 6, 7, 0]], ids=len)
def test_a_crop_touches_only_chunks_it_reaches_into(tmp_path, crop, rows):
    values = np.random.default_rng(2).integers(-50, 50, (8, 30, 40)).astype("<i2")
    path = write(tmp_path / "crop.h5", values, chunks=(2, 7, 9), compression="gzip", shuffle=True)
    got, counts = counted(lambda: ps.open(path).select_within(NAME, crop)[rows][NAME])
    assert np.array_equal(got, values[rows][(slice(None), *crop)])
    down = slice(None) if crop[0] is Ellipsis else crop[0]
    across = slice(None) if crop[1] is Ellipsis else crop[1]
    blocks = len({row // 2 for row in rows})
    assert counts.chunks_read == blocks * touched(30, 7, down) * touched(40, 9, across)


@both_ways
def test_a_mask_touches_only_chunks_it_has_elements_in(tmp_path):
    values = np.random.default_rng(3).integers(-50, 50, (8, 30, 40)).astype("<i2")
    path = write(tmp_path / "mask.h5", values, chunks=(2, 7, 9), compression="gzip", shuffle=True)
    roi = np.random.default_rng(4).random((30, 40)) < 0.01
    chunks = {(int(y) // 7, int(x) // 9) for y, x in np.argwhere(roi)}
    assert 1 < len(chunks) < 25
    got, counts = counted(lambda: ps.open(path).select_within(NAME, roi)[[0, 1, 6]][NAME])
    assert np.array_equal(got, values[[0, 1, 6]][:, roi])
    assert counts.chunks_read == 2 * len(chunks)


def ranges_worth_reading(flat, width):
    """Bytes of the runs of wanted elements, read together where at most 4 KiB lie between them."""
    size = width
    for one, other in pairwise(flat.tolist()):
        gap = (other - one - 1) * width
        size += width if gap > 4 * KiB else gap + width
    return size


@pytest.mark.parametrize("share", [0.0002, 0.002, 0.02, 1.0])
@pytest.mark.parametrize("dtype", ["<f8", ">i2"])
def test_a_mask_over_large_contiguous_rows_reads_ranges(tmp_path, share, dtype):
    values = np.random.default_rng(5).normal(size=(4, 200, 110)).astype(dtype)
    assert values[0].nbytes > DEFAULT.map_rows_below_bytes
    path = write(tmp_path / "rows.h5", values)
    roi = np.random.default_rng(6).random((200, 110)) < share
    flat, width = np.flatnonzero(roi), values.itemsize
    rows = [2, 0, 2]
    got, counts = counted(lambda: ps.open(path).select_within(NAME, roi)[rows][NAME])
    assert np.array_equal(got, values[rows][:, roi])
    assert len(flat) * width * len(rows) <= counts.bytes_read <= ranges_worth_reading(flat, width) * len(rows)
    assert counts.bytes_read <= len(rows) * (len(flat) * width + (len(flat) - 1) * 4 * KiB)


def test_gaps_at_the_limit(tmp_path):
    """4 KiB between two elements are read; one element more is not."""
    values = np.arange(4 * 20_000, dtype="<f4").reshape(4, 20_000)
    path = write(tmp_path / "rows.h5", values)
    for between, expected in [(1024, 4 + 4096 + 4), (1025, 4 + 4)]:
        roi = np.zeros(20_000, bool)
        roi[[10, 10 + between + 1]] = True
        got, counts = counted(lambda roi=roi: ps.open(path).select_within(NAME, roi)[[3]][NAME])
        assert np.array_equal(got, values[[3]][:, roi])
        assert counts.bytes_read == expected


def test_a_chunk_of_many_rows_is_read_once_for_all_of_them(tmp_path):
    values = np.arange(12 * 50, dtype="<i4").reshape(12, 50)
    path = write(tmp_path / "rows.h5", values, chunks=(4, 50), compression="gzip")
    rows = [9, 0, 3, 1, 0, 11]
    got, counts = counted(lambda: ps.open(path)[rows][NAME])
    assert np.array_equal(got, values[rows])
    assert counts.chunks_read == 2


def test_counts_begin_anew_when_collected():
    counters.mine().chunks_read += 3
    assert counters.collect().chunks_read >= 3
    assert counters.collect() == counters.Counters()


# Chunks that were never written.


def with_hole(path, **options):
    """Rows 4 and 5 lack the lower half of their elements."""
    values = np.arange(8 * 6 * 10, dtype="<i4").reshape(8, 6, 10)
    with h5py.File(path, "w") as file:
        made = file.create_dataset(NAME, values.shape, values.dtype, chunks=(2, 3, 10), fillvalue=-9, **options)
        made[:4], made[6:], made[4:6, :3] = values[:4], values[6:], values[4:6, :3]
    return through_h5py(path)


HOLES = [{}, {"compression": "gzip"}, {"compression": "gzip", "shuffle": True, "fletcher32": True}]


@both_ways
@pytest.mark.parametrize("options", HOLES, ids=repr)
def test_a_hole_is_refused_and_named(tmp_path, options):
    with_hole(tmp_path / "hole.h5", **options)
    with pytest.raises(Missing) as refused:
        ps.open(tmp_path / "hole.h5")
    assert_told(refused, tmp_path / "hole.h5", repr(NAME), "7 of 8 chunks", f"{NAME}[4:6]", "(4, 3, 0)", "-9")
    assert_told(refused, "allow_fill=True")


@both_ways
@pytest.mark.parametrize("options", HOLES, ids=repr)
def test_a_hole_is_filled_where_that_is_wanted(tmp_path, options):
    values = with_hole(tmp_path / "hole.h5", **options)
    ds = ps.open(tmp_path / "hole.h5", allow_fill=True)
    got, counts = counted(lambda: ds[:][NAME])
    assert np.array_equal(got, values)
    assert np.count_nonzero(values == -9) == 60
    assert counts.chunks_filled == 1
    _, counts = counted(lambda: ds[[0, 7]])
    assert counts.chunks_filled == 0
    _, counts = counted(lambda: ds.select_within(NAME, slice(0, 3))[:])
    assert counts.chunks_filled == 0, "the hole is not in that part"


@both_ways
def test_the_rest_can_be_read_around_a_hole(tmp_path):
    values = with_hole(tmp_path / "hole.h5")
    ds = ps.open(tmp_path / "hole.h5", on_error="skip")
    assert np.array_equal(ds[[7, 0, 3]][NAME], values[[7, 0, 3]])
    for row in (4, 5):
        for _ in range(2):
            with pytest.raises(Missing) as refused:
                ds[[0, row]]
            assert_told(refused, tmp_path / "hole.h5", f"{NAME}[4:6]", "(4, 3, 0)", "allow_fill=True")
    upper = ds.select_within(NAME, slice(0, 3))
    assert np.array_equal(upper[:][NAME], values[:, :3])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("chunks", [(1, 3), (2, 3), (1, 2)], ids=repr)
@both_ways
def test_fill_values_are_converted_as_all_others(tmp_path, dtype, chunks):
    """70000 is too much for half precision, and a 300th of it is not."""
    with h5py.File(tmp_path / "fill.h5", "w") as file:
        made = file.create_dataset(NAME, (4, 3), "<i4", chunks=chunks, fillvalue=70_000)
        made[:2] = 70_000
    got = ps.open(tmp_path / "fill.h5", allow_fill=True).cast(NAME, dtype, scale=1 / 300, offset=0.1)[:][NAME]
    assert np.isfinite(got).all()
    assert np.array_equal(got[2:], got[:2]), "written or not, it is the same number"


# Chunks that a file lists as HDF5 does not find them.


GROWING_AXES = [
    ((4, 6), (1, 2), (4, None)),
    ((6, 9), (2, 10), (6, None)),
    ((2, 4, 6), (1, 2, 3), (2, None, 6)),
    ((2, 4, 6), (1, 2, 3), (2, 4, None)),
    ((3, 5, 7), (2, 2, 2), (9, None, 8)),
    ((4, 6), (2, 2), (None, 6)),
    ((4, 6), (2, 2), (None, None)),
]


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize(("shape", "chunks", "maxshape"), GROWING_AXES, ids=repr)
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_an_axis_without_a_limit_anywhere(tmp_path, shape, chunks, maxshape, libver, compression):
    values = np.arange(1, np.prod(shape) + 1, dtype="<i4").reshape(shape)
    path = write(
        tmp_path / "grows.h5", values, libver=libver, chunks=chunks, maxshape=maxshape, compression=compression
    )
    for axis in range(len(shape)):
        got = ps.open(path, row_axis=axis)[:][NAME]
        assert np.array_equal(got, np.moveaxis(values, axis, 0))


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_a_part_written_of_an_axis_without_a_limit(tmp_path, libver):
    """Nothing lies outside the dataset here that could give a wrong place away."""
    path = tmp_path / "part.h5"
    with h5py.File(path, "w", libver=libver) as file:
        made = file.create_dataset(NAME, (3, 3), "<i4", chunks=(1, 1), maxshape=(3, None), fillvalue=-1)
        made[:, 0] = [1, 2, 3]
    assert np.array_equal(ps.open(path, allow_fill=True)[:][NAME], [[1, -1, -1], [2, -1, -1], [3, -1, -1]])


# Files cut short.


def cut_short(path, by):
    """Cut bytes off the end, and let the file say that this is its length: HDF5 itself then notices nothing."""
    raw = bytearray(path.read_bytes())
    assert raw[8] == 0, "the oldest superblock has no checksum"
    assert struct.unpack_from("<Q", raw, 40)[0] == len(raw)
    del raw[-by:]
    struct.pack_into("<Q", raw, 40, len(raw))
    path.write_bytes(raw)


CUT = [
    ({"chunks": (2, 3, 10)}, 0, "betas[6:8], chunk (6, 3, 0)", [6, 7]),
    ({"chunks": (2, 3, 10), "compression": "gzip"}, 0, "betas[6:8], chunk (6, 3, 0)", [6, 7]),
    ({"chunks": (1, 6, 10)}, 0, "betas[7], chunk (7, 0, 0)", [7]),
    ({"chunks": (1, 6, 10), "compression": "gzip"}, 0, "betas[7], chunk (7, 0, 0)", [7]),
    ({"chunks": (8, 1, 2)}, 0, "betas[0:8], chunk (0, 5, 8)", [*range(8)]),
    ({"chunks": (2, 3, 10)}, 1, "betas[3:6], chunk (6, 3, 0)", [3, 4, 5]),
    ({"chunks": (2, 2, 10)}, 1, "betas[4:6], chunk (6, 4, 0)", [4, 5]),
    ({"chunks": (2, 3, 9)}, 2, "betas[9:10], chunk (6, 3, 9)", [9]),
]


@pytest.fixture(params=CUT, ids=repr)
def cut(request, tmp_path):
    """A file without its last bytes, the axis of its rows, its rows, what is cut, and the rows that have it."""
    options, axis, place, bad = request.param
    values = np.random.default_rng(7).integers(0, 10**6, (8, 6, 10)).astype("<i4")
    path = write(tmp_path / "cut.h5", values, **options)
    cut_short(path, 3)
    return path, axis, np.moveaxis(values, axis, 0), place, bad


@both_ways
def test_a_chunk_beyond_the_end_is_named_when_the_file_is_opened(cut):
    path, axis, _, place, _ = cut
    with pytest.raises(Truncated) as refused:
        ps.open(path, row_axis=axis)
    assert_told(refused, path, place, "beyond the file's end", f"{os.path.getsize(path):,}", "fetch it again")
    assert_told(refused, 'on_error="skip"')


@both_ways
def test_all_but_a_chunk_beyond_the_end_can_be_read(cut):
    path, axis, values, place, bad = cut
    ds = ps.open(path, row_axis=axis, on_error="skip")
    assert ds.left_out == ()
    good = [row for row in range(len(values)) if row not in bad]
    assert np.array_equal(ds[good][NAME], values[good])
    for row in bad:
        for _ in range(2):
            with pytest.raises(Truncated) as refused:
                ds[row]
            assert_told(refused, path, place, "on_error")
    assert np.array_equal(ds[good][NAME], values[good])


@both_ways
def test_a_part_without_the_chunk_beyond_the_end_can_be_read(tmp_path):
    values = np.arange(8 * 6 * 10, dtype="<i4").reshape(8, 6, 10)
    path = write(tmp_path / "cut.h5", values, chunks=(2, 3, 10))
    cut_short(path, 3)
    ds = ps.open(path, on_error="skip")
    assert np.array_equal(ds.select_within(NAME, slice(0, 3))[:][NAME], values[:, :3])
    roi = np.zeros((6, 10), bool)
    roi[1, 4] = True
    assert np.array_equal(ds.select_within(NAME, roi)[:][NAME], values[:, roi])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("fields", [None, (NAME,)])
def test_a_contiguous_dataset_beyond_the_end(tmp_path, axis, fields):
    """HDF5 refuses to open the dataset, though not the file."""
    path = write(tmp_path / "cut.h5", np.arange(480, dtype="<i4").reshape(8, 6, 10))
    cut_short(path, 3)
    with pytest.raises(DataError) as refused:
        ps.open(path, fields, row_axis=axis)
    assert isinstance(refused.value, Truncated | Corrupt)
    assert_told(refused, path)
    whole = write(tmp_path / "whole.h5", np.arange(480, dtype="<i4").reshape(8, 6, 10))
    ds = ps.open([whole, path], fields, row_axis=axis, on_error="skip")
    assert len(ds) == (8, 6)[axis]
    assert len(ds.left_out) == 1
    assert str(path) in str(ds.left_out[0])


# What cannot be opened.


def test_a_link_into_another_file(tmp_path):
    write(tmp_path / "elsewhere.h5", np.arange(6))
    with h5py.File(tmp_path / "links.h5", "w") as file:
        file["own"] = np.arange(6)
        file["linked"] = h5py.ExternalLink(str(tmp_path / "elsewhere.h5"), NAME)
        file["group"] = h5py.ExternalLink(str(tmp_path / "elsewhere.h5"), "/")
    for name in ("linked", f"group/{NAME}"):
        with pytest.raises(Unsafe) as refused:
            ps.open(tmp_path / "links.h5", fields=(name,))
        assert_told(refused, tmp_path / "links.h5", repr(name), tmp_path / "elsewhere.h5", "open that file itself")
    with pytest.warns(ps.FieldsLeftOut, match="'linked': a link into another file"):
        assert list(ps.open(tmp_path / "links.h5").fields) == ["own"], "links are not followed unasked"


def test_a_link_to_nowhere(tmp_path):
    with h5py.File(tmp_path / "links.h5", "w") as file:
        file["own"] = np.arange(6)
        file["linked"] = h5py.ExternalLink("nowhere.h5", NAME)
        file["soft"] = h5py.SoftLink("/nowhere")
    with pytest.raises(Missing) as refused:
        ps.open(tmp_path / "links.h5", fields=("soft",))
    assert_told(refused, tmp_path / "links.h5", "'soft'", "'own'")
    with pytest.raises(Unsafe) as refused:  # whatever is there: nobody looks
        ps.open(tmp_path / "links.h5", fields=("linked",))
    assert_told(refused, tmp_path / "links.h5", "'linked'", "'nowhere.h5'")


@pytest.fixture
def mixed(tmp_path):
    """Datasets that are no rows of numbers, beside one that is."""
    with h5py.File(tmp_path / "mixed.h5", "w") as file:
        file[NAME] = np.arange(6).reshape(3, 2)
        file["names"] = ["a", "b", "c"]
        file["codes"] = np.array([b"ab", b"cd", b"ef"])
        file["table"] = np.zeros(3, [("onset", "f4"), ("duration", "f4")])
        file["rate"] = 1.6
        file["nothing"] = h5py.Empty("f4")
        file.create_dataset("ragged", (3,), h5py.vlen_dtype("i4"))
    return tmp_path / "mixed.h5"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("names", ["text (", "penstock.join"]),
        ("codes", ["text", "penstock.join"]),
        ("table", ["a table of onset, duration", "penstock.join"]),
        ("ragged", ["of variable length", "penstock.join"]),
        ("rate", ["a single value (float64)", "read it with h5py"]),
        ("nothing", ["empty"]),
    ],
)
def test_datasets_that_are_no_rows_of_numbers(mixed, name, told):
    with pytest.raises(SchemaMismatch) as refused:
        ps.open(mixed, fields=(NAME, name))
    assert_told(refused, mixed, repr(name), "expected numbers with one row per sample", "fields=", *told)


def test_what_is_no_rows_of_numbers_is_left_out_unasked(mixed):
    with pytest.warns(ps.FieldsLeftOut):
        assert list(ps.open(mixed).fields) == [NAME]


@pytest.mark.parametrize("axis", [2, 7, -1])
@pytest.mark.parametrize("fields", [None, (NAME,)])
@pytest.mark.parametrize("per_field", [False, True])
def test_an_axis_that_is_not_there(tmp_path, axis, fields, per_field):
    path = write(tmp_path / "axis.h5", np.arange(12).reshape(3, 4))
    with pytest.raises(ConfigError) as refused:
        ps.open(path, fields, row_axis={NAME: axis} if per_field else axis)
    assert_told(refused, path, f"row_axis={axis}", repr(NAME), "(3, 4)", "0 to 1")


@pytest.mark.parametrize(
    ("options", "number"), [({"scaleoffset": 0}, 6), ({"compression": "gzip", "scaleoffset": 0}, 6)], ids=repr
)
def test_a_filter_that_is_not_installed(tmp_path, monkeypatch, options, number):
    path = write(tmp_path / "filter.h5", np.arange(12).reshape(3, 4), chunks=(1, 4), **options)
    installed_filters()  # kept for the whole process, so that it must not be asked for the first time below
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda _: False)
    with pytest.raises(ConfigError) as refused:
        ps.open(path)
    assert_told(refused, path, repr(NAME), f"filter {number} (", "pip install hdf5plugin")


def test_a_missing_file_in_a_list(tmp_path):
    values = np.arange(12).reshape(3, 4)
    one, two = write(tmp_path / "one.h5", values), write(tmp_path / "two.h5", values + 100)
    gone = tmp_path / "gone.h5"
    with pytest.raises(Missing) as refused:
        ps.open([one, gone, two])
    assert_told(refused, gone)
    ds = ps.open([one, gone, two], on_error="skip")
    assert np.array_equal(ds[:][NAME], np.concatenate([values, values + 100]))
    assert [type(error) for error in ds.left_out] == [Missing]
    assert str(gone) in str(ds.left_out[0])
    assert ds.select([0]).cast(NAME, "f4").left_out == ds.left_out, "derived datasets remember it"


def test_whatever_cannot_be_opened_is_left_out_with_its_reason(tmp_path):
    values = np.arange(12).reshape(3, 4)
    good = write(tmp_path / "good.h5", values)
    (tmp_path / "page.h5").write_text("<html>404</html>")
    whole = write(tmp_path / "cut.h5", np.arange(3000).reshape(3, 1000))
    os.truncate(whole, 5000)
    with h5py.File(tmp_path / "words.h5", "w") as file:
        file["names"] = ["a", "b"]
    ds = ps.open(sorted(tmp_path.glob("*.h5")), on_error="skip")
    assert np.array_equal(ds[:][NAME], values)
    assert sorted(type(error).__name__ for error in ds.left_out) == ["Corrupt", "Missing", "Truncated"]
    good.unlink()
    with pytest.raises(PenstockError, match=r"none of 3 files could be opened; the first error: .*cut\.h5"):
        ps.open(sorted(tmp_path.glob("*.h5")), on_error="skip")


@pytest.mark.parametrize("on_error", ["ignore", None, True])
def test_other_things_to_do_about_errors(tmp_path, on_error):
    with pytest.raises(ConfigError, match=r'expected "raise" or "skip"'):
        ps.open(write(tmp_path / "one.h5", np.arange(3)), on_error=on_error)


def test_rows_without_elements(tmp_path):
    with h5py.File(tmp_path / "none.h5", "w") as file:
        file.create_dataset(NAME, (5, 0, 3), "f4")
        file["labels"] = np.arange(5)
    got = ps.open(tmp_path / "none.h5")[[4, 0]]
    assert got[NAME].shape == (2, 0, 3)
    assert got["labels"].tolist() == [4, 0]


@pytest.mark.parametrize(
    ("options", "kind"),
    [({}, ExtentStore), ({"chunks": (2, 2)}, ExtentStore), ({"chunks": (2, 2), "scaleoffset": 0}, H5pyStore)],
    ids=["contiguous", "chunks", "through h5py"],
)
def test_rows_along_another_axis_are_other_data(tmp_path, options, kind):
    path = write(tmp_path / "square.h5", np.arange(16, dtype="<i4").reshape(4, 4), **options)
    along = [ps.open(path, row_axis=axis) for axis in (0, 1)]
    assert all(isinstance(ds.store, kind) for ds in along)
    assert not np.array_equal(along[0][:][NAME], along[1][:][NAME])
    assert along[0].fingerprint != along[1].fingerprint


def assert_within_scratch(ds, rows, expected):
    """Reading these rows borrows no more than is declared for so many."""
    out = np.empty(expected.shape, expected.dtype)
    prepare(ds.delivered.scratch_bytes(len(rows)))
    try:
        ds.delivered.read_into(np.array(rows), np.arange(len(rows)), {NAME: out})
        overflow = overflow_bytes()
    finally:
        release()
    assert np.array_equal(out, expected)
    assert overflow == 0


@both_ways
@pytest.mark.parametrize("dtype", ["<i2", "float16", "float32"])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_row_wanted_many_times_stays_within_the_scratch_declared(tmp_path, dtype, axis):
    """As often as it likes, in an order that draws rows with replacement: more often than its chunk has rows."""
    values = np.arange(6 * 40, dtype="<i2").reshape(6, 40)
    path = write(tmp_path / "rows.h5", values, chunks=(2, 8))
    rows = [0, 3, 0] * 10
    ds = ps.open(path, row_axis=axis).cast(NAME, dtype)
    assert_within_scratch(ds, rows, np.moveaxis(values, axis, 0)[rows].astype(dtype))


def test_a_chunk_without_its_shuffle_stays_within_the_scratch_declared(tmp_path, monkeypatch):
    """Of shuffle and checksum, one chunk has the checksum alone, and is larger than a conversion block."""
    values = np.arange(2 * 300, dtype="<i2").reshape(2, 300)
    donor = write(tmp_path / "donor.h5", values, chunks=(1, 300), fletcher32=True)
    with h5py.File(donor) as file:
        _, checked = file[NAME].id.read_direct_chunk((1, 0))
    path = tmp_path / "mask.h5"
    with h5py.File(path, "w") as file:
        made = file.create_dataset(NAME, values.shape, values.dtype, chunks=(1, 300), shuffle=True, fletcher32=True)
        made[0] = values[0]
        made.id.write_direct_chunk((1, 0), checked, filter_mask=0b01)
    assert np.array_equal(through_h5py(path), values)
    monkeypatch.setattr(convert, "BLOCK_ELEMENTS", 64)
    ds = ps.open(path).cast(NAME, "f4", scale=0.5)
    assert_within_scratch(ds, [0, 1], values.astype("f4") * np.float32(0.5))


# Files that are still being written.


WRITER = """
import json, sys
import h5py, numpy as np
path, axis, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
options["chunks"] = tuple(options["chunks"])
shape = [4, 3]
shape.insert(axis, 0)
limits = list(shape)
limits[axis] = None
with h5py.File(path, "w", libver="latest") as file:
    made = file.create_dataset("betas", shape, "<i4", maxshape=limits, **options)
    file.swmr_mode = True
    print("ready", flush=True)
    for line in sys.stdin:
        done, count = made.shape[axis], int(line)
        made.resize(done + count, axis)
        block = np.arange(done * 12, (done + count) * 12, dtype="<i4").reshape(count, 4, 3)
        where = [slice(None)] * 3
        where[axis] = slice(done, done + count)
        made[tuple(where)] = np.moveaxis(block, 0, axis)
        made.flush()
        print(done + count, flush=True)
"""


class Writer:
    """Another process that appends rows; element ``e`` of row ``r`` is ``12 * r + e``."""

    def __init__(self, process):
        self.process = process

    def told(self):
        return self.process.stdout.readline().strip()

    def append(self, count):
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        assert self.told().isdigit()


@contextmanager
def writing(path, axis, options):
    command = [sys.executable, "-c", WRITER, str(path), str(axis), json.dumps(options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        writer = Writer(process)
        assert writer.told() == "ready"
        writer.append(7)
        yield writer


def grown(rows):
    return np.arange(rows * 12, dtype="<i4").reshape(rows, 4, 3)


GROWN = {
    "chunk a row": (0, {"chunks": (1, 4, 3)}),
    "chunks of rows": (0, {"chunks": (5, 4, 3)}),
    "chunks of rows, gzip": (0, {"chunks": (5, 4, 3), "compression": "gzip", "shuffle": True}),
    "chunks of parts of rows": (0, {"chunks": (5, 3, 2), "compression": "gzip"}),
    "voxel-major": (0, {"chunks": (64, 1, 1)}),
    "through h5py": (0, {"chunks": (5, 4, 3), "scaleoffset": 0}),
    "along the last axis": (2, {"chunks": (2, 3, 5)}),
    "along the middle axis": (1, {"chunks": (1, 5, 3)}),
    "along the last axis, through h5py": (2, {"chunks": (2, 3, 5), "scaleoffset": 0}),
}


@pytest.fixture(params=GROWN, ids=GROWN.keys())
def growing(request, tmp_path):
    """A file of 7 rows that somebody writes to, and that somebody."""
    axis, options = GROWN[request.param]
    with writing(tmp_path / "growing.h5", axis, options) as writer:
        yield tmp_path / "growing.h5", axis, writer


def test_a_dataset_keeps_its_rows_while_its_file_grows(growing, tmp_path):
    path, axis, writer = growing
    ds = ps.open(path, row_axis=axis, swmr=True)
    assert len(ds) == 7
    assert np.array_equal(ds[:][NAME], grown(7))
    for more in (1, 2, 40):
        writer.append(more)
        assert len(ds) == 7
        assert np.array_equal(ds[[6, 0, 3]][NAME], grown(7)[[6, 0, 3]])
        assert np.array_equal(ds[:][NAME], grown(7))
    fresh = ds.refresh()
    assert len(fresh) == 50
    assert np.array_equal(fresh[:][NAME], grown(50))
    assert len(ds) == 7, "a dataset never changes"
    writer.append(3)
    assert len(fresh.refresh()) == 53


@pytest.fixture
def row_by_row(tmp_path):
    """A file of 7 rows in chunks of 5, and its writer."""
    with writing(tmp_path / "growing.h5", 0, {"chunks": (5, 4, 3)}) as writer:
        yield tmp_path / "growing.h5", writer


@pytest.mark.parametrize("moment", ["identify", "_choose_datasets", "_describe_dataset", "locate_rows"])
def test_rows_added_while_the_file_is_being_opened(row_by_row, monkeypatch, moment):
    """Before and after any step of opening it."""
    path, writer = row_by_row
    home = fileio if moment == "identify" else hdf5
    step = getattr(home, moment)

    def while_it_grows(*arguments, **options):
        writer.append(20)
        done = step(*arguments, **options)
        writer.append(20)
        return done

    monkeypatch.setattr(home, moment, while_it_grows)
    ds = ps.open(path, swmr=True)
    assert len(ds) in (7, 27, 47)
    assert np.array_equal(ds[:][NAME], grown(len(ds)))


def test_another_file_in_the_place_of_a_growing_one(row_by_row):
    path, _ = row_by_row
    ds = ps.open(path, swmr=True)
    shorter = path.with_name("shorter.h5")
    write(shorter, grown(3))
    os.replace(shorter, path)
    with pytest.raises(Changed, match="replaced"):
        ds[:]


def test_only_a_dataset_as_opened_can_be_refreshed(row_by_row):
    path, writer = row_by_row
    ds = ps.open(path, swmr=True)
    writer.append(1)
    derived = [ds.select([0]), ds.cast(NAME, "f4"), ds.only(NAME), ds.select_within(NAME, 0), ds.rename(x=NAME)]
    for each in [*derived, ps.concat([ds, ds]), ps.join(x=ds), ds.map(dict)]:
        with pytest.raises(ConfigError, match=r"refresh\(\) is for a dataset as open\(\) gave it"):
            each.refresh()
    assert np.array_equal(ds.refresh().select_within(NAME, 0)[:][NAME], grown(8)[:, 0])


def test_a_file_that_is_not_growing_can_be_refreshed(tmp_path):
    path = write(tmp_path / "one.h5", grown(3))
    ds = ps.open(tmp_path / "*.h5")
    write(tmp_path / "two.h5", grown(4))
    write(path, grown(5))
    with pytest.raises(Changed):
        ds[:]
    assert np.array_equal(ds.refresh()[:][NAME], np.concatenate([grown(5), grown(4)]))
