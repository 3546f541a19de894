"""Fields as Dask arrays: the values of the library that wrote the file, each block read by one task."""

import h5py
import numpy as np
import pytest

import penstock as ps

pytest.importorskip("dask.array")

from penstock.integrations.dask import chunk_edges, to_dask

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
    edges = chunk_edges(ps.open(path), 40, size)
    assert edges[0] == 0
    assert edges[-1] == 23
    assert (np.diff(edges) > 0).all()


@pytest.mark.slow
def test_two_workers_of_a_cluster(path):
    distributed = pytest.importorskip("distributed")
    with distributed.Client(n_workers=2, threads_per_worker=1, dashboard_address=None):
        found = to_dask(ps.open(path), chunk=200)["betas"].mean(axis=0).compute()
    assert np.array_equal(found, VALUES.mean(axis=0))


def test_xarray_takes_them(path):
    xarray = pytest.importorskip("xarray")
    fields = to_dask(ps.open(path))
    table = xarray.Dataset({"betas": (("trial", "x", "y"), fields["betas"])})
    assert int(table["betas"].max()) == VALUES.max()
