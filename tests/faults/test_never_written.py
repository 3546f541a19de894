"""Chunks that were never written, or were lost: an error that names the chunk and what it would read as, or counted."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numcodecs
import numpy as np
import pytest
import zarr

import penstock as ps
import tiledb
from penstock.errors import Missing

# It wraps os.fork, to warn; tests of other modules fork.
tiledb.ctx._needs_fork_wrapper = False

FILL = -7
VALUES = np.arange(1, 49, dtype="i4").reshape(8, 6)


class Made(NamedTuple):
    """A dataset with a hole, as its own library reads it."""

    path: Path
    expected: np.ndarray
    told: str
    """How the first chunk that is not there is named."""


def hdf5(folder: Path, written: Callable[[Any], None], **options: Any) -> Path:
    path = folder / "a.h5"
    with h5py.File(path, "w") as file:
        written(file.create_dataset("data", VALUES.shape, "i4", fillvalue=FILL, **options))
    return path


def by_h5py(path: Path) -> np.ndarray:
    with h5py.File(path) as file:
        return file["data"][:]


def hdf5_chunks(folder: Path) -> Made:
    path = hdf5(folder, lambda data: data.__setitem__(slice(0, 4), VALUES[:4]), chunks=(2, 3))
    return Made(path, by_h5py(path), r"a\.h5.*data\[4:6\], chunk \(4, 0\)")


def hdf5_that_h5py_reads(folder: Path) -> Made:
    path = hdf5(folder, lambda data: data.__setitem__(slice(0, 4), VALUES[:4]), chunks=(2, 3), scaleoffset=0)
    return Made(path, by_h5py(path), r"a\.h5.*'data'.*4 of 8 chunks")


def hdf5_without_chunks(folder: Path) -> Made:
    path = hdf5(folder, lambda data: None)
    return Made(path, by_h5py(path), r"a\.h5.*'data'.*no data")


def zarr_array(folder: Path, name: str = "a.zarr", **options: Any) -> tuple[Path, Any]:
    path = folder / name
    array = zarr.create_array(
        str(path), shape=VALUES.shape, dtype="i4", fill_value=FILL, **{"chunks": (1, 6), **options}
    )
    return path, array


def by_zarr(path: Path) -> np.ndarray:
    return zarr.open_array(str(path), mode="r")[...]


def zarr_without_a_file(folder: Path) -> Made:
    path, array = zarr_array(folder)
    array[...] = VALUES
    os.unlink(path / "c/3/0")
    return Made(path, by_zarr(path), r"a\.zarr/c/3/0: data\[3\], chunk \(3, 0\)")


def zarr_2_without_a_file(folder: Path) -> Made:
    path, array = zarr_array(folder, zarr_format=2, chunks=(4, 3))
    array[...] = VALUES
    os.unlink(path / "1.1")
    return Made(path, by_zarr(path), r"a\.zarr/1\.1: data\[4:8\], chunk \(4, 3\)")


def zarr_shard_without_an_entry(folder: Path) -> Made:
    path, array = zarr_array(folder, shards=(4, 6))
    array[:5], array[6:] = VALUES[:5], VALUES[6:]
    return Made(path, by_zarr(path), r"a\.zarr/c/1/0: data\[5\], chunk \(5, 0\)")


def zarr_without_a_shard(folder: Path) -> Made:
    path, array = zarr_array(folder, shards=(4, 6))
    array[...] = VALUES
    os.unlink(path / "c/1/0")
    return Made(path, by_zarr(path), r"a\.zarr/c/1/0: data\[4\], chunk \(4, 0\)")


def zarr_that_zarr_reads(folder: Path) -> Made:
    path, array = zarr_array(folder, zarr_format=2, compressors=numcodecs.BZ2())
    array[...] = VALUES
    os.unlink(path / "6.0")
    return Made(path, by_zarr(path), r"a\.zarr/6\.0: data, chunk \(6, 0\)")


def zarr_in_a_zip(folder: Path) -> Made:
    path = folder / "a.zarr.zip"
    with zarr.storage.ZipStore(path, mode="w") as store:
        array = zarr.create_array(store, shape=VALUES.shape, dtype="i4", chunks=(1, 6), fill_value=FILL)
        array[:5], array[6:] = VALUES[:5], VALUES[6:]
        expected = array[...]
    return Made(path, expected, r"a\.zarr\.zip: data\[5\], chunk \(5, 0\)")


def tiledb_cells(folder: Path) -> Made:
    path = folder / "a.tiledb"
    domain = tiledb.Domain(
        tiledb.Dim("row", (0, 7), tile=2, dtype="u4"), tiledb.Dim("column", (0, 5), tile=6, dtype="u4")
    )
    attribute = tiledb.Attr("data", dtype="i4", fill=FILL)
    tiledb.Array.create(str(path), tiledb.ArraySchema(domain, [attribute]))
    for rows in (slice(0, 4), slice(6, 8)):
        with tiledb.open(str(path), "w") as array:
            array[rows] = VALUES[rows]
    with tiledb.open(str(path)) as array:
        return Made(path, array[:]["data"], r"a\.tiledb: cells from \(4, 0\) on")


MAKERS = [
    hdf5_chunks, hdf5_that_h5py_reads, hdf5_without_chunks, zarr_without_a_file, zarr_2_without_a_file,
    zarr_shard_without_an_entry, zarr_without_a_shard, zarr_that_zarr_reads, zarr_in_a_zip, tiledb_cells,
]  # fmt: skip


@pytest.mark.case(12)
@pytest.mark.parametrize("make", MAKERS)
def test_what_was_never_written_is_refused_or_counted(tmp_path: Path, make: Callable[[Path], Made]) -> None:
    path, expected, told = make(tmp_path)
    assert (expected == FILL).any(), "its own library fills without a word"
    with pytest.raises(Missing, match=told) as refused:
        ps.open(path)[:]
    assert re.search(rf"fill value \[?{FILL}.*allow_fill=True", str(refused.value))

    ds = ps.open(path, allow_fill=True)
    loader = ps.Loader(ds, batch_size=3, columns=("data",), memory="256MiB", output="numpy")
    delivered = np.concatenate([data.copy() for (data,) in loader])
    np.testing.assert_array_equal(delivered, expected)
    assert loader.stats().chunks_filled > 0
    assert "never written came as fill values" in str(loader.stats())


@pytest.mark.case(12)
def test_only_the_rows_that_lack_a_chunk_are_left_out_on_request(tmp_path: Path) -> None:
    path = zarr_without_a_file(tmp_path).path
    loader = ps.Loader(ps.open(path), batch_size=3, columns=("data", "__index__"), on_error="skip", output="numpy")
    there = [row for _, rows in loader for row in rows.tolist()]
    assert there == [0, 1, 2, 4, 5, 6, 7]
    assert [(each.row, "allow_fill=True" in each.why) for each in loader.stats().left_out] == [(3, True)]


@pytest.mark.case(12)
def test_what_was_written_in_full_counts_nothing(tmp_path: Path) -> None:
    path, array = zarr_array(tmp_path)
    array[...] = VALUES
    loader = ps.Loader(ps.open(path, allow_fill=True), batch_size=3, columns=("data",), output="numpy")
    np.testing.assert_array_equal(np.concatenate([data.copy() for (data,) in loader]), VALUES)
    assert loader.stats().chunks_filled == 0
