"""Fields normalized by groups of rows, against numpy doing the same."""

import h5py
import numpy as np
import pytest

import penstock as ps
from penstock.errors import ConfigError, SchemaMismatch
from penstock.testing import check_store

GROUPS = np.repeat([0, 1, 2], [4, 5, 3])


@pytest.fixture
def stored():
    values = np.random.default_rng(0).integers(-3000, 3000, (12, 2, 5)).astype(np.int16)
    values[4:9, 1, 1] = 7  # does not vary in the second group
    return values


def tables(values):
    parts = [values[group == GROUPS] for group in range(3)]
    return np.stack([part.mean(axis=0) for part in parts]), np.stack([part.std(axis=0) for part in parts])


def expected(values):
    mean, std = tables(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(std[GROUPS] > 0, (values - mean[GROUPS]) / std[GROUPS], 0).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_as_numpy_does(stored, dtype):
    def make():
        both = ps.from_arrays(data=stored, label=np.arange(12))
        return both.normalize("data", *tables(stored.astype(np.float64)), GROUPS, dtype).store

    found = read(make())
    np.testing.assert_allclose(
        found, expected(stored.astype(np.float64)), rtol=1e-3 if dtype == "float16" else 1e-5, atol=1e-6
    )
    assert found.dtype == dtype
    check_store(make, {"data": found, "label": np.arange(12)})
    assert not found[4:9, 1, 1].any()


def read(store):
    out = {"data": store.fields["data"].empty(len(store))}
    store.read_into(np.arange(len(store)), np.arange(len(store)), out)
    return out["data"]


def test_a_cast_comes_first_and_values_are_converted_once(stored):
    scaled = stored.astype(np.float64) / 300 + 5
    ds = ps.from_arrays(data=stored).cast("data", "float32", offset=5, divisor=300)
    ds = ds.normalize("data", *tables(scaled), GROUPS)
    assert ds.casts == {}
    np.testing.assert_allclose(ds[:]["data"], expected(scaled), rtol=1e-4, atol=1e-5)


def test_one_group(stored):
    ds = ps.from_arrays(data=stored).normalize("data", stored.mean(axis=0), stored.std(axis=0))
    np.testing.assert_allclose(ds[:]["data"].mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(ds[:]["data"].std(axis=0), 1, rtol=1e-5)


def test_blocks_are_read_once(tmp_path, stored):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("data", data=stored, chunks=(6, 1, 1))
    ds = ps.open(tmp_path / "a.h5", index_dir=False).normalize("data", *tables(stored.astype(float)), GROUPS)
    assert ds.store.blocks.tolist() == [0, 6]
    check_store(lambda: ds.store, {"data": read(ds.store)})
    with ps.Loader(ds, batch_size=5, shuffle=True, memory="64MiB", output="numpy") as loader:
        for _ in loader:
            pass
        assert loader.stats().chunks_read == 20


def test_refusals(stored):
    ds = ps.from_arrays(data=stored)
    mean, std = tables(stored)
    with pytest.raises(SchemaMismatch, match="group_of_row has 11 numbers; expected one for each of 12 rows"):
        ds.normalize("data", mean, std, GROUPS[1:])
    with pytest.raises(SchemaMismatch, match=r"mean has shape \(3, 2, 4\)"):
        ds.normalize("data", mean[..., 1:], std, GROUPS)
    with pytest.raises(ConfigError, match="from 0 to 2"):
        ds.normalize("data", mean, std, GROUPS + 1)
    with pytest.raises(ConfigError, match="expected a float"):
        ds.normalize("data", mean, std, GROUPS, "int16")
    with pytest.raises(ConfigError, match="permuted"):
        ds.permute("data", 1, 0).normalize("data", mean, std, GROUPS)
