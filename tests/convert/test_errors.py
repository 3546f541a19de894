"""What cannot be done is refused in plain words, and nothing is destroyed."""

import errno
import os
import resource
import sys

import numpy as np
import pytest
from tests.convert.sources import tree, trial_major, voxel_major

import lmdb
import penstock as ps
from penstock.conversion.lmdb import _put
from penstock.errors import BudgetExceeded, Changed, ConfigError, ConvertFailed


@pytest.fixture
def ds():
    return ps.from_arrays(x=np.arange(200.0).reshape(20, 10))


@pytest.mark.parametrize(
    ("goal", "options", "match"),
    [
        ("out.xyz", {}, "no format that can be written"),
        ("s3://bucket/out.zarr", {}, "written to this machine"),
        ("out.npy", {"compression": "zstd"}, "npy takes none"),
        ("out.zarr", {"compression": "lz77"}, "zarr takes auto, zstd, blosc, none"),
        ("out-%d.zarr", {}, "numbered files are for"),
        ("out.zarr", {"memory": "lots"}, "not a size"),
        ("out.zarr", {"executor": "sparks"}, "executor="),
        ("out.zarr", {"executor": 3}, "expected .processes., .serial. or an Executor"),
        ("out.zarr", {"part": (3, 2)}, "third of 40"),
        ("out.zarr", {"workers": 0}, "workers=0"),
    ],
)
def test_arguments_that_cannot_be_meant(tmp_path, ds, goal, options, match):
    path = goal if "://" in goal else tmp_path / goal
    with pytest.raises(ConfigError, match=match):
        ps.convert(ds, path, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("goal", ["out.zarr", "out.npy", "out.h5", "out.tar", "out.parquet"])
def test_no_rows(tmp_path, goal):
    with pytest.raises(ConfigError, match="has no rows"):
        ps.convert(ps.from_arrays(x=np.zeros((0, 3))), tmp_path / goal)
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_is_missing_is_named_before_anything_is_written(tmp_path, ds, monkeypatch):
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    for compression in ("zstd", "blosc"):
        with pytest.raises(ConfigError, match="needs hdf5plugin"):
            ps.convert(ds, tmp_path / "out.h5", compression=compression)
    assert list(tmp_path.iterdir()) == []
    assert ps.convert(ds, tmp_path / "out.h5", compression="gzip").finished


def test_fields_that_a_format_cannot_hold(tmp_path):
    two = ps.from_arrays(x=np.zeros(5), y=np.zeros((5, 2, 2)))
    with pytest.raises(ConfigError, match="npy file has one array, and there are 2 fields"):
        ps.convert(two, tmp_path / "out.npy")
    with pytest.raises(ConfigError, match="a Parquet table has columns"):
        ps.convert(two, tmp_path / "out.parquet")
    with pytest.raises(ConfigError, match=r"'x' and 'X' would both be 'x.npy' in a tar"):
        ps.convert(two.rename(X="y"), tmp_path / "out.tar")
    voxel_major(tmp_path / "in.h5")
    with pytest.raises(ConfigError, match="come in blocks, so that it is written twice"):
        ps.convert(ps.open(tmp_path / "in.h5", row_axis=1), tmp_path / "out.npy", shuffle=1, part=(1, 2))


@pytest.mark.parametrize("goal", ["out.zarr", "out.npy", "out.h5", "out.tar", "out.parquet"])
def test_a_budget_that_is_too_little_names_one_that_works(tmp_path, goal):
    values = voxel_major(tmp_path / "in.h5", voxels=500)
    ds = ps.open(tmp_path / "in.h5", row_axis=1)
    with pytest.raises(BudgetExceeded, match="the smallest that works is") as refused:
        ps.convert(ds, tmp_path / goal, memory="1MiB")
    assert not (tmp_path / goal).exists()
    smallest = int(str(refused.value).split("(")[1].split(" bytes")[0].replace(",", ""))
    with pytest.raises(BudgetExceeded):
        ps.convert(ds, tmp_path / goal, memory=smallest - 1)
    done = ps.convert(ds, tmp_path / goal, memory=smallest)
    assert done.plan.planned_bytes <= smallest
    found = ps.open(tmp_path / goal)
    np.testing.assert_array_equal(found[:][next(iter(found.fields))], values)


@pytest.mark.parametrize("goal", ["out.zarr", "out.npy"])
def test_an_output_that_is_there_is_replaced_only_when_asked_and_only_at_the_end(tmp_path, ds, goal, monkeypatch):
    ps.convert(ps.from_arrays(x=np.zeros((3, 2))), tmp_path / goal)
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match="exists already"):
        ps.convert(ds, tmp_path / goal)
    assert tree(tmp_path) == before
    with monkeypatch.context() as patched:
        patched.setattr("penstock.conversion.attempt.run_task", lambda job, task: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ps.convert(ds, tmp_path / goal, overwrite=True)
    assert {name: data for name, data in tree(tmp_path).items() if not name.startswith(".")} == before
    ps.convert(ds, tmp_path / goal, overwrite=True)
    assert len(ps.open(tmp_path / goal)) == 20
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["in.zarr", "in.npy"])
def test_a_source_is_not_replaced_by_part_of_itself(tmp_path, ds, name):
    ps.convert(ds, tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path)
    before = tree(tmp_path)
    half = ps.open(tmp_path / name).select(range(10))
    for path in (tmp_path / name, tmp_path / "link" / name):
        for options in ({}, {"overwrite": True}):
            with pytest.raises(ConfigError, match="is what this conversion reads"):
                ps.convert(half, path, **options)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(("free_bytes", "expected"), [(100, errno.ENOSPC), (1000, errno.EIO)])
def test_a_full_disk_is_named_where_lmdb_speaks_of_input_or_output(tmp_path, monkeypatch, free_bytes, expected):
    class Database:
        def path(self):
            return str(tmp_path)

        def begin(self, write):
            raise lmdb.Error("mdb_txn_commit: Input/output error")

    monkeypatch.setattr("penstock.conversion.lmdb._free_bytes", lambda path: free_bytes)
    with pytest.raises(OSError, match="Input/output") as raised:
        _put(lmdb, Database(), [("key", bytes(500))])
    assert raised.value.errno == expected


@pytest.mark.parametrize("goal", ["out.zarr", "out.npy", "out.h5", "out.tar"])
def test_a_full_disk_loses_nothing(tmp_path, goal, monkeypatch):
    values = trial_major(tmp_path / "in.h5")
    ds = ps.open(tmp_path / "in.h5")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("penstock.conversion.work.write_at", full)
        patched.setattr("penstock.conversion.ranges.write_at", full)
        patched.setattr("penstock.conversion.rows.TarWriter.write", full)
        with pytest.raises(ConvertFailed, match="No space left"):
            ps.convert(ds, tmp_path / goal)
    assert not (tmp_path / goal).exists()
    assert list((tmp_path / f".{goal}.penstock" / "partial").iterdir()) == []
    ps.convert(ds, tmp_path / goal)
    found = ps.open(tmp_path / goal)
    np.testing.assert_array_equal(found[:][next(iter(found.fields))], values)
    assert not list(tmp_path.glob(".*"))


def test_a_place_that_cannot_be_written(tmp_path, ds):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConvertFailed, match="cannot be written"):
        ps.convert(ds, tmp_path / "file" / "out.zarr")
    with pytest.raises(ConvertFailed, match="cannot be written"):
        ps.convert(ds, "/proc/out.zarr")


def test_a_source_that_changes_meanwhile(tmp_path):
    trial_major(tmp_path / "in.h5")
    ds = ps.open(tmp_path / "in.h5")
    ps.convert(ds, tmp_path / "out.npy", part=(1, 1))
    os.utime(tmp_path / "in.h5", ns=(1, 1))
    with pytest.raises(Changed, match="was changed after the conversion began"):
        ps.convert(ds, tmp_path / "out.npy", only_finish=True)
    with pytest.raises(ConvertFailed, match="another conversion"):
        ps.convert(ps.open(tmp_path / "in.h5"), tmp_path / "out.npy")
    assert not (tmp_path / "out.npy").exists()
    assert ps.convert(ps.open(tmp_path / "in.h5"), tmp_path / "out.npy", restart=True).finished


def test_what_comes_back_otherwise_is_not_used(tmp_path, ds, monkeypatch):
    def damaged(descriptor, view, offset):
        view[:] = bytes(len(view))

    for goal in ("out.zarr", "out.npy"):
        with monkeypatch.context() as patched:
            patched.setattr("penstock.conversion.encode.read_at", damaged)
            patched.setattr("penstock.conversion.ranges.read_at", damaged)
            with pytest.raises(ConvertFailed, match="came back otherwise"):
                ps.convert(ds, tmp_path / goal)
        assert not (tmp_path / goal).exists()
        assert ps.convert(ds, tmp_path / goal).finished


@pytest.fixture
def largest_file():
    """A limit of this process that makes writing fail as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("goal", ["out.lmdb", "out.parquet", "out.tar", "out.npy"])
def test_writing_that_fails_in_a_library_is_told_in_the_same_words(tmp_path, goal, largest_file):
    rows = ps.from_arrays(x=np.random.default_rng(0).normal(size=(300, 1000)))
    largest_file(2**20)
    with pytest.raises(ConvertFailed, match=r"(cannot be written|writing failed) .*errno"):
        ps.convert(rows, tmp_path / goal)
    assert not (tmp_path / goal).exists()
    largest_file(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert ps.convert(rows, tmp_path / goal).finished
