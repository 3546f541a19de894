"""Elements of a row by number, in the order in which they are named, whatever the layout."""

import h5py
import numpy as np
import pytest

import penstock as ps
from penstock.errors import ConfigError
from penstock.read.part import elements
from penstock.testing import check_store

ROWS, ROW = 9, (12, 11, 40)

LAYOUTS = {
    "contiguous": {},
    "an element a chunk": {"chunks": (ROWS, 1, 1, 1)},
    "small chunks": {"chunks": (3, 2, 3, 4)},
    "large chunks": {"chunks": (4, 6, 11, 40)},
    "gzip": {"chunks": (1, *ROW), "compression": "gzip"},
    "through h5py": {"chunks": (3, 6, 11, 40), "scaleoffset": 0},
}


@pytest.fixture
def values():
    return np.random.default_rng(0).integers(-500, 500, (ROWS, *ROW)).astype(np.int16)


@pytest.fixture(params=["shuffled", "backwards", "columns first", "with repeats"])
def numbers(request):
    count = int(np.prod(ROW))
    some = np.random.default_rng(1).choice(count, 300, replace=False)
    if request.param == "backwards":
        return np.sort(some)[::-1]
    if request.param == "columns first":
        return np.arange(count).reshape(ROW).T.reshape(-1)[::7]
    return np.append(some, some[:5]) if request.param == "with repeats" else some


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [2, 8])
def test_as_numpy_takes_them(tmp_path, values, numbers, layout, width):
    values = values.astype(f"i{width}")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("data", data=values, **LAYOUTS[layout])
    ds = ps.open(tmp_path / "a.h5", index_dir=False).select_within("data", elements(ROW, numbers))
    expected = values.reshape(ROWS, -1)[:, numbers]
    for cast in (None, "float32"):
        made = ds if cast is None else ds.cast("data", cast)
        rows = np.array([4, 0, 8, 4])
        assert np.array_equal(made[rows]["data"], expected[rows].astype(cast or expected.dtype))
    check_store(lambda: ds.store, {"data": expected})


def test_refusals():
    ds = ps.from_arrays(data=np.zeros((3, 4, 5)))
    for wrong in ([], [20], [-1], [[1]]):
        with pytest.raises(ConfigError, match="from 0 to 19"):
            elements((4, 5), np.array(wrong, int))
    with pytest.raises(ConfigError, match=r"shape \(5, 4\)"):
        ds.select_within("data", elements((5, 4), np.array([1])))
