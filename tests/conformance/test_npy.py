"""NumPy files, one and many, against the arrays that were saved."""

from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.testing import check_store

SHAPES = [(23,), (23, 7), (5, 60, 100), (3, 40, 50, 30), (1, 1), (4, 0)]
DTYPES = ["u1", "<i2", ">i2", "<f4", ">f8", "f2", "c8", "bool"]


def values(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return (np.random.default_rng(len(shape)).normal(size=shape) * 50).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_file(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    saved = values(shape, dtype)
    np.save(tmp_path / "a.npy", saved)
    native = saved.astype(saved.dtype.newbyteorder("="))
    check_store(lambda: ps.open(tmp_path / "a.npy").store, {"data": native})


@pytest.mark.parametrize("row", [(10,), (100, 100)], ids=str)
@pytest.mark.parametrize("max_open_files", [0, 1, 64])
def test_many_files_cast(tmp_path: Path, row: tuple[int, ...], max_open_files: int) -> None:
    parts = [values((n, *row), "<i2") for n in (3, 1, 12)]
    for number, part in enumerate(parts):
        np.save(tmp_path / f"part{number + 8}.npy", part)  # 8, 9, 10: natural order is not the alphabet's
    expected = np.concatenate(parts).astype(np.float32) * np.float32(1 / 300)

    def opened() -> ps.Store:
        ds = ps.open(tmp_path / "part*.npy", max_open_files=max_open_files)
        return ds.cast("data", "float32", scale=1 / 300).delivered

    check_store(opened, {"data": expected})
