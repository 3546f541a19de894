"""Samples of several rows, against numpy doing the same."""

import h5py
import numpy as np
import pytest

import penstock as ps
from penstock.dataset.gather import Gathered
from penstock.errors import ConfigError, OutOfRange
from penstock.testing import check_store

ROWS = np.array([[0, 1, 2], [3, -1, 4], [5, 5, 5], [6, -1, -1], [0, 9, 3]])


@pytest.fixture
def values():
    return np.random.default_rng(0).normal(size=(10, 4, 3)).astype(np.float32)


def stacked(values, rows, absent):
    made = np.zeros((len(rows), rows.shape[1], *values.shape[1:]), values.dtype)
    for sample, line in enumerate(rows):
        there = line >= 0
        made[sample, there] = values[line[there]]
        if absent == "mean":
            made[sample, ~there] = values[line[there]].mean(axis=0)
    return made


@pytest.mark.parametrize("absent", ["mean", "zeros"])
def test_stacked(values, absent):
    expected = {"data": stacked(values, ROWS, absent)}
    check_store(lambda: ps.from_arrays(data=values).gather(ROWS, absent=absent).store, expected)


def test_averaged(values):
    means = np.stack([values[line[line >= 0]].mean(axis=0) for line in ROWS])
    store = ps.from_arrays(data=values).gather(ROWS, mean=True).store
    check_store(lambda: ps.from_arrays(data=values).gather(ROWS, mean=True).store, {"data": store_values(store)})
    np.testing.assert_allclose(store_values(store), means, rtol=1e-6)


def store_values(store):
    out = {name: spec.empty(len(store)) for name, spec in store.fields.items()}
    store.read_into(np.arange(len(store)), np.arange(len(store)), out)
    return out["data"]


def test_rows_of_one_block_stay_together(tmp_path, values):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("data", data=values, chunks=(5, 2, 3))
    near = np.array([[0, 1], [4, -1], [2, 2], [-1, -1], [5, 9], [6, 5], [-1, -1]])
    ds = ps.open(tmp_path / "a.h5", index_dir=False).gather(near, absent="zeros")
    assert ds.store.blocks.tolist() == [0, 3]
    check_store(lambda: ds.store, {"data": stacked(values, near, "zeros")})
    apart = ps.open(tmp_path / "a.h5", index_dir=False).gather([[0, 1], [4, 5]])
    assert apart.store.blocks is None
    with ps.Loader(
        ds, batch_size=2, shuffle=True, memory="64MiB", columns=("data", "__index__"), output="numpy"
    ) as one:
        for data, index in one:
            assert np.array_equal(data, stacked(values, near, "zeros")[index])


def test_conversions_come_first(values):
    ds = ps.from_arrays(data=(values * 100).astype(np.int16)).cast("data", "float32", divisor=100).gather(ROWS)
    assert ds.fields["data"].shape == (3, 4, 3)
    np.testing.assert_allclose(ds[1]["data"][1], (ds[1]["data"][0] + ds[1]["data"][2]) / 2, rtol=1e-6)


def test_refusals(values):
    store = ps.from_arrays(data=values).store
    with pytest.raises(OutOfRange, match="row 10 is out of range"):
        Gathered(store, np.array([[0, 10]]))
    with pytest.raises(ConfigError, match="sample 1 has no row"):
        Gathered(store, np.array([[0, 1], [-1, -1]]))
    with pytest.raises(ConfigError, match="whole numbers"):
        ps.from_arrays(data=np.arange(10)).gather([[0, -1]])
    with pytest.raises(ConfigError, match=r"\(samples, rows per sample\)"):
        ps.from_arrays(data=values).gather([0, 1])
    with pytest.raises(ConfigError, match="absent='ones'"):
        ps.from_arrays(data=values).gather([[0]], absent="ones")
