"""float16 and bfloat16: computed in single precision and rounded once, whatever reads them."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
import torch

import penstock as ps
from penstock.base.spec import Cast
from penstock.errors import ConfigError, DataError
from penstock.loader.pytorch import DeviceCopies

DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
VALUES = np.random.default_rng(0).integers(-32768, 32767, (40, 6, 7), np.int16)


def npy(folder: Path) -> ps.Dataset:
    np.save(folder / "x.npy", VALUES)
    return ps.open(folder / "x.npy").rename(x="data")


def contiguous(folder: Path) -> ps.Dataset:
    with h5py.File(folder / "x.h5", "w") as file:
        file["x"] = VALUES
    return ps.open(folder / "x.h5")


def in_chunks(folder: Path) -> ps.Dataset:
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("x", data=VALUES, chunks=(5, 3, 4), compression="gzip")
    return ps.open(folder / "x.h5")


def in_memory(folder: Path) -> ps.Dataset:
    return ps.from_arrays(x=VALUES)


@DTYPES
@pytest.mark.parametrize("make", [npy, contiguous, in_chunks, in_memory])
@pytest.mark.parametrize("change", [{}, {"scale": 1 / 300}, {"divisor": 300, "offset": -0.3}], ids=str)
def test_every_way_of_reading_gives_the_same_bits(
    tmp_path: Path, make: Callable[[Path], ps.Dataset], dtype: str, change: dict[str, float]
) -> None:
    ds = make(tmp_path).cast("x", dtype, **change)
    wanted = torch.from_numpy(VALUES).to(torch.float32)
    wanted = (wanted / change.get("divisor", 1) * change.get("scale", 1) + change.get("offset", 0)).to(
        getattr(torch, dtype)
    )
    seen = 0
    for x, rows in ps.Loader(ds, batch_size=7, shuffle=True, memory="32MiB", columns=("x", "__index__")):
        assert x.dtype == wanted.dtype
        assert torch.equal(x, wanted[rows])
        seen += len(rows)
    assert seen == len(VALUES)
    assert ds[3]["x"].dtype == np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


@DTYPES
def test_conversions_on_the_device_give_the_same_bits(dtype: str) -> None:
    ds = ps.from_arrays(x=VALUES).cast("x", dtype, scale=1 / 300, offset=0.1)
    (here,) = ps.Loader(ds, batch_size=len(VALUES), memory="32MiB")
    cast = Cast(ds.fields["x"].dtype, scale=1 / 300, offset=0.1)
    there = DeviceCopies(torch.device("cpu"), {"x": cast}, {}, {}).start({"x": VALUES.copy()}, np.arange(len(VALUES)))
    assert torch.equal(there()["x"], here["x"])


def test_a_torch_dtype_and_axes(tmp_path: Path) -> None:
    ds = contiguous(tmp_path).cast("x", torch.bfloat16, divisor=255).permute("x", 1, 0, contiguous=True)
    (batch,) = ps.Loader(ds, batch_size=40, memory="32MiB")
    assert batch["x"].dtype == torch.bfloat16
    assert batch["x"].is_contiguous()
    assert torch.equal(batch["x"], (torch.from_numpy(VALUES) / 255).to(torch.bfloat16).transpose(1, 2))


def test_through_reader_processes(tmp_path: Path) -> None:
    ds = contiguous(tmp_path).cast("x", "bfloat16", divisor=300)
    wanted = (torch.from_numpy(VALUES) / 300).to(torch.bfloat16)
    with ps.Loader(ds, batch_size=8, memory="512MiB", processes=1, threads=1) as loader:
        for _ in range(2):
            assert torch.equal(torch.cat([batch["x"] for batch in loader]), wanted)


def test_values_that_are_not_finite_are_found() -> None:
    ds = ps.from_arrays(x=np.array([[1.0], [np.nan], [np.inf]], np.float32)).cast("x", "bfloat16", scale=10)
    with pytest.raises(DataError, match="NaN or infinite"):
        list(ps.Loader(ds, batch_size=3, memory="32MiB", nan="raise"))


def test_without_the_package_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ConfigError, match="pip install ml_dtypes"):
        ps.from_arrays(x=VALUES).cast("x", "bfloat16")


@pytest.mark.parametrize("given", ["float8", "V2", object])
def test_other_dtypes_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError):
        ps.from_arrays(x=VALUES).cast("x", given)


@DTYPES
def test_normalized_in_the_same_pass(tmp_path: Path, dtype: str) -> None:
    mean, spread = np.full(7, 12.5, np.float32), np.linspace(50, 90, 7, dtype=np.float32)
    ds = contiguous(tmp_path)
    (single,) = ps.Loader(ds.normalize("x", mean, spread), batch_size=40, memory="32MiB")
    (half,) = ps.Loader(ds.normalize("x", mean, spread, dtype=dtype), batch_size=40, memory="32MiB")
    assert torch.equal(half["x"], single["x"].to(getattr(torch, dtype)))
    groups = np.arange(40) % 2
    tables = np.stack([np.broadcast_to(mean, (6, 7)), np.broadcast_to(mean + 3, (6, 7))])
    by_group = {"mean": tables, "spread": np.full((2, 6, 7), 70.0, np.float32), "group_of_row": groups}
    (single,) = ps.Loader(ds.normalize("x", **by_group), batch_size=40, memory="32MiB")
    (half,) = ps.Loader(ds.normalize("x", **by_group, dtype=dtype), batch_size=40, memory="32MiB")
    assert torch.equal(half["x"], single["x"].to(getattr(torch, dtype)))
