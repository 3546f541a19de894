"""Columns kept on disk: the same again, or as if they were not there."""

import os
import pickle

import numpy as np
import pytest

from penstock.errors import Corrupt
from penstock.files import saved as saved_tables
from penstock.files.handles import identify
from penstock.read import saved_chunks
from penstock.read.extents import KnownTable

COLUMNS = {
    "bytes": np.frombuffer(b"odd", np.uint8),
    "table": np.arange(12, dtype=np.int64).reshape(4, 3),
    "none": np.empty((0, 5), np.float32),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(b"0123456789" * 1000)
    return identify(str(path))


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "made" / "when needed")


def the_file_in(folder):
    (name,) = os.listdir(folder)
    return os.path.join(folder, name)


def test_the_same_again(file, folder):
    for saved in (
        saved_tables.save(folder, file, "x", {"a": 1}, COLUMNS),
        saved_tables.load(folder, file, "x"),
        pickle.loads(pickle.dumps(saved_tables.load(folder, file, "x"))),
    ):
        assert (saved.header, saved.names) == ({"a": 1}, list(COLUMNS))
        for name, column in saved.columns().items():
            assert (column.dtype, column.shape) == (COLUMNS[name].dtype, COLUMNS[name].shape)
            assert (column == COLUMNS[name]).all()
            assert column.flags.aligned
            assert not column.flags.writeable


def test_names_and_files_are_kept_apart(file, folder, tmp_path):
    saved_tables.save(folder, file, "x", {}, COLUMNS)
    assert saved_tables.load(folder, file, "y") is None
    os.rename(file.path, tmp_path / "other.bin")
    assert saved_tables.load(folder, identify(str(tmp_path / "other.bin")), "x") is None
    assert saved_tables.load(folder, file, "x") is None, "the file is gone"


def test_a_header_beyond_its_room_is_not_saved(file, folder):
    assert saved_tables.save(folder, file, "x", {"a": "b" * 70_000}, COLUMNS) is None
    assert saved_tables.load(folder, file, "x") is None


def test_only_its_owner_may_read_it(file, folder):
    saved_tables.save(folder, file, "x", {}, COLUMNS)
    if os.name == "posix":
        assert os.stat(folder).st_mode & 0o777 == 0o700
        assert os.stat(the_file_in(folder)).st_mode & 0o777 == 0o600


def test_damage_found_when_columns_are_asked_for(file, folder):
    saved = saved_tables.save(folder, file, "x", {}, COLUMNS)
    place = the_file_in(folder)
    with open(place, "r+b") as data:
        data.seek(saved_tables.COLUMNS_AT)
        data.write(b"O")
    assert saved_tables.load(folder, file, "x") is not None, "columns are not read before they are asked for"
    with pytest.raises(Corrupt, match=r"saved table is damaged \(checksum of bytes\) and was removed"):
        saved.columns()
    assert not os.path.exists(place)


@pytest.mark.parametrize("lengths", [7, np.arange(5000, dtype=np.uint32).reshape(1000, 5)])
@pytest.mark.parametrize("skipped", [None, np.ones((1000, 5), np.uint8)])
def test_chunk_tables(file, folder, lengths, skipped):
    table = KnownTable(np.arange(5000, dtype=np.int64).reshape(1000, 5), lengths, skipped)
    saved = saved_chunks.save(folder, file, "betas", table, from_chunks=5000)
    assert isinstance(saved, saved_chunks.SavedChunkTable)
    for each in (saved, saved_chunks.load(folder, file, "betas"), pickle.loads(pickle.dumps(saved))):
        for name in ("shape", "longest", "stored_bytes", "missing", "end", "has_skipped"):
            assert getattr(each, name) == getattr(table, name)
        for found, expected in zip(each.find(17, slice(1, 4)), table.find(17, slice(1, 4)), strict=True):
            assert np.array_equal(found, expected)


def test_small_chunk_tables_are_not_saved(file, folder):
    table = KnownTable(np.zeros((10, 1), np.int64), 7)
    assert saved_chunks.save(folder, file, "betas", table, from_chunks=11) is table
    assert saved_chunks.load(folder, file, "betas") is None


def test_columns_of_something_else_are_no_chunk_table(file, folder):
    saved_tables.save(folder, file, "betas", {"shape": [4, 3]}, COLUMNS)
    assert saved_chunks.load(folder, file, "betas") is None
