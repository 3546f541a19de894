"""Fields as Dask arrays: the values of the library that wrote the file, each block read by one task."""

from itertools import product

import h5py
import numpy as np
import pytest

import penstock as ps

pytest.importorskip("dask.array")

from penstock.dataset.lazy import row_edges
from penstock.integrations.dask import to_dask

VALUES = np.arange(23 * 4 * 5, dtype=np.int16).reshape(23, 4, 5)


@pytest.fixture
def path(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("betas", data=VALUES, chunks=(3, 4, 5), compression="gzip")
        file["label"] = np.arange(23)
    return str(tmp_path / "a.h5")


def test_values_and_means_are_those_of_numpy(path):
    fields = to_dask(ps.open(path), chunk=7 * 40)
    assert np.array_equal(fields["betas"].compute(scheduler="synchronous"), VALUES)
    assert np.array_equal(fields["betas"].mean(axis=0).compute(scheduler="threads"), VALUES.mean(axis=0))
    assert np.array_equal(fields["betas"][5:9, 1:3].compute(scheduler="synchronous"), VALUES[5:9, 1:3])
    assert fields["label"].sum().compute(scheduler="synchronous") == sum(range(23))


def test_chunks_are_whole_blocks(path):
    (chunks, *_) = to_dask(ps.open(path, fields=["betas"]), chunk=7 * 40)["betas"].chunks
    assert chunks == (6, 6, 6, 5)


@pytest.mark.parametrize("size", [1, 40, 100, 10**6])
def test_edges_cover_every_row_once(path, size):
    edges = row_edges(ps.open(path), size // 40)
    assert edges[0] == 0
    assert edges[-1] == 23
    assert (np.diff(edges) > 0).all()


@pytest.mark.parametrize("size", [1, 3000, 20_000, 10**6])
@pytest.mark.parametrize("chunks", [(60, 4, 6), (20, 3, 50), (60, 40, 50)])
def test_chunks_of_many_rows_are_cut_along_the_other_axes(tmp_path, chunks, size):
    """One chunk of the file holds a few voxels of all trials: each is decoded once, and no task takes them all."""
    values = np.random.default_rng(0).integers(-999, 999, (60, 40, 50)).astype(np.int16)
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_dataset("betas", data=values, chunks=chunks, compression="gzip")
    array = ps.open(tmp_path / "v.h5").to_dask(chunk=size)["betas"]
    own = int(np.prod(chunks)) * 2
    largest = max(int(np.prod(each)) * 2 for each in product(*array.chunks))
    assert largest <= max(size, own)
    for axis, lengths in enumerate(array.chunks):
        assert all(edge % chunks[axis] == 0 for edge in np.cumsum(lengths)[:-1])
    assert np.array_equal(array.mean(axis=0).compute(scheduler="synchronous"), values.mean(axis=0))
    assert np.array_equal(array[3:50:2, 5:7, ::3].compute(scheduler="synchronous"), values[3:50:2, 5:7, ::3])
    assert np.array_equal(array[[5, 2], 7, -1].compute(scheduler="synchronous"), values[[5, 2], 7, -1])


def test_fields_that_were_changed_on_the_way(path):
    ds = ps.open(path)
    ds = ds.cast("betas", np.float32, divisor=2).permute("betas", 1, 0).select(np.arange(22, 2, -3))
    array = ds.to_dask(chunk=1)["betas"]
    expected = (VALUES / np.float32(2)).astype(np.float32).transpose(0, 2, 1)[22:2:-3]
    assert np.array_equal(array.compute(scheduler="synchronous"), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_workers_of_a_cluster(path, tmp_path):
    distributed = pytest.importorskip("distributed")
    values = np.random.default_rng(1).normal(size=(90, 3000)).astype(np.float32)
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_dataset("betas", data=values, chunks=(90, 100), compression="gzip")
    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    with cluster, distributed.Client(cluster):
        by_row = ps.open(path).to_dask(chunk=200)["betas"].mean(axis=0).compute()
        array = ps.open(tmp_path / "v.h5").to_dask(chunk=200_000)["betas"]
        by_voxel = array.mean(axis=0, dtype=np.float64).compute()
    assert np.array_equal(by_row, VALUES.mean(axis=0))
    assert array.numblocks == (1, 6)
    assert np.allclose(by_voxel, values.mean(axis=0, dtype=np.float64), rtol=1e-12)


def test_xarray_takes_them(path):
    xarray = pytest.importorskip("xarray")
    fields = to_dask(ps.open(path))
    table = xarray.Dataset({"betas": (("trial", "x", "y"), fields["betas"])})
    assert int(table["betas"].max()) == VALUES.max()
