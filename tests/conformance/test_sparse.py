"""Sparse matrices as AnnData writes them, in HDF5 and Zarr, compared with scipy."""

import h5py
import numpy as np
import pytest
import scipy.sparse
import zarr

import penstock as ps
from penstock.errors import Corrupt, SchemaMismatch
from penstock.testing import check_store

ROWS, COLUMNS = 97, 40
LAYOUTS = {
    "hdf5": {}, "hdf5, chunks": {"chunks": (64,), "compression": "gzip"}, "hdf5, many": {"chunks": (3,)},
    "zarr": {"chunks": (50,)}, "zarr 2": {"chunks": (50,)}, "zarr, shards": {"chunks": (10,), "shards": (100,)},
}  # fmt: skip


def matrix(density=0.2):
    dense = scipy.sparse.random(ROWS, COLUMNS, density, "csr", "float32", np.random.default_rng(4)).toarray()
    dense[5] = 0
    return scipy.sparse.csr_matrix(dense)


def write(path, layout, values, kind="csr_matrix"):
    """What ``anndata.AnnData(X).write_h5ad`` or ``write_zarr`` makes of X; beside it a label per row."""
    if layout.startswith("hdf5"):
        with h5py.File(path, "w") as file:
            group = file.create_group("X")
            group.attrs.update({"encoding-type": kind, "encoding-version": "0.1.0", "shape": values.shape})
            for part in ("data", "indices", "indptr"):
                group.create_dataset(part, data=getattr(values, part), **LAYOUTS[layout])
            file["label"] = np.arange(ROWS)
        return
    root = zarr.create_group(str(path), zarr_format=2 if layout == "zarr 2" else 3)
    group = root.create_group("X")
    group.attrs.update({"encoding-type": kind, "encoding-version": "0.1.0", "shape": list(values.shape)})
    for part in ("data", "indices", "indptr"):
        group.create_array(part, data=getattr(values, part), **LAYOUTS[layout])
    root.create_array("label", data=np.arange(ROWS), chunks=(ROWS,))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_dense(tmp_path, layout):
    values = matrix()
    write(tmp_path / "a", layout, values)
    expected = {"X": values.toarray()}
    check_store(lambda: ps.open(tmp_path / "a", fields=("X",)).store, expected)
    both = ps.open(tmp_path / "a")
    assert set(both.fields) == {"X", "label"}
    with ps.Loader(both, batch_size=8, shuffle=True, memory="64MiB", output="numpy") as loader:
        for batch in loader:
            np.testing.assert_array_equal(batch["X"], expected["X"][batch["label"]])


def test_columns_in_any_order_and_twice(tmp_path):
    values = matrix()
    plain = values.toarray()
    values.indices[:4], values.data[:4] = [7, 3, 7, 1], [1, 2, 4, 8]
    ends = values.indptr[1]
    assert ends >= 4
    write(tmp_path / "a", "hdf5", values)
    np.testing.assert_array_equal(ps.open(tmp_path / "a")[0]["X"], values.toarray()[0])
    np.testing.assert_array_equal(ps.open(tmp_path / "a")[1:]["X"], plain[1:])


@pytest.mark.parametrize("goal", ["out.zarr", "out.h5", "out.npy", "out.tar"])
def test_a_dense_copy(tmp_path, goal):
    values = matrix(density=0.02)
    write(tmp_path / "a", "hdf5, chunks", values)
    done = ps.convert(ps.open(tmp_path / "a", fields=("X",)), tmp_path / goal, verify="source")
    again = ps.open(tmp_path / goal)
    np.testing.assert_array_equal(again[:][next(iter(again.fields))], values.toarray())
    if goal == "out.zarr":
        assert done.plan.cuts["X"].compression == "zstd"


@pytest.mark.parametrize("layout", ["hdf5", "zarr"])
def test_what_is_wrong_is_said(tmp_path, layout):
    write(tmp_path / "by column", layout, matrix().tocsc(), "csc_matrix")
    with pytest.raises(SchemaMismatch, match=r"stored by column.*tocsr"):
        ps.open(tmp_path / "by column", fields=("X",))
    beyond = matrix()
    beyond.indices[10] = COLUMNS + 3
    write(tmp_path / "beyond", layout, beyond)
    with pytest.raises(Corrupt, match="columns from 0 to 43, but the matrix has 40"):
        ps.open(tmp_path / "beyond", fields=("X",))[:]
    falling = matrix()
    falling.indptr[20] = 5000
    write(tmp_path / "falling", layout, falling)
    with pytest.raises(Corrupt, match=r"'X' of 97 rows has 98 entries in indptr"):
        ps.open(tmp_path / "falling", fields=("X",))
