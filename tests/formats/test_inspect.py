"""What a file's layout means for reading it, told beforehand."""

from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

import penstock as ps
from penstock.cli.main import main
from penstock.errors import BudgetExceeded, ConfigError


def made(tmp_path: Path, rows: int = 24, **options: Any) -> str:
    path = tmp_path / "session.h5"
    values = np.arange(rows * 60, dtype=np.int16).reshape(rows, 3, 4, 5)
    with h5py.File(path, "w") as file:
        file.create_dataset("betas", data=values, **options)
        file["labels"] = np.arange(rows)
    return str(path)


def path_of(source: Any, field: str = "betas") -> Any:
    return next(path for path in ps.inspect(source).paths if path.field == field)


def test_contiguous(tmp_path: Path) -> None:
    found = ps.inspect(made(tmp_path))
    assert (found.rows, found.files) == (24, 1)
    assert [path.field for path in found.paths] == ["betas", "labels"]
    betas = found.paths[0]
    assert (betas.layout, betas.block_rows, betas.amplification, betas.remedy) == ("contiguous", 1, 1.0, "")
    assert "24 rows in 1 file" in str(found)


def test_chunks_of_rows(tmp_path: Path) -> None:
    betas = path_of(made(tmp_path, chunks=(8, 3, 4, 5), compression="gzip", shuffle=True))
    assert betas.layout == "chunks of 8 rows; shuffle, deflate"
    assert (betas.block_rows, betas.amplification) == (8, 8.0)
    assert betas.remedy == "h5repack -l betas:CHUNK=1x3x4x5 OLD NEW"
    assert 0 < betas.stored_bytes < 24 * 120


def test_one_element_a_chunk(tmp_path: Path) -> None:
    path = made(tmp_path, chunks=(24, 1, 1, 1))
    mask = np.zeros((3, 4, 5), bool)
    mask[1, 2:] = True
    whole, masked = path_of(path), path_of(ps.open(path).select_within("betas", mask))
    assert whole.amplification == masked.amplification == 24
    assert masked.spec.shape == (10,)
    assert "neighbouring chunks together" in masked.how


def test_part_of_contiguous_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.zeros((3, 100, 1000), np.float32))
    every_line = path_of(ps.open(path).select_within("data", np.s_[:, :10]), "data")
    assert 90 < every_line.amplification < 100, "4 KB apart, it is cheaper to read on"
    every_third = path_of(ps.open(path).select_within("data", np.s_[::3, :10]), "data")
    assert every_third.amplification == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"chunks": (1, 3, 4, 5), "scaleoffset": 0}, "filter 6 (scaleoffset) has no decoder here"),
        ({"chunks": (1, 3, 4, 5), **hdf5plugin.Blosc2()}, "filter 32026"),
    ],
)
def test_through_h5py_and_why(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    how = path_of(made(tmp_path, **options)).how
    assert how.startswith("read by h5py, one thread at a time: ")
    assert why in how


def test_joined_renamed_and_concatenated(tmp_path: Path) -> None:
    path = made(tmp_path, chunks=(8, 3, 4, 5))
    betas = ps.concat([ps.open(path, fields=["betas"])] * 2).select(range(40)).rename(voxels="betas")
    ds = ps.join(brain=betas, label=np.zeros(40))
    found = ps.inspect(ds)
    assert [(each.field, each.rows) for each in found.paths] == [("brain", 40), ("label", 40)]
    assert found.paths[1].how == "in memory already"
    assert found.files == 2


def test_unwritten_chunks_are_told(tmp_path: Path) -> None:
    path = tmp_path / "holes.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("betas", (6, 4), "i2", chunks=(1, 4))[:4] = 1
    assert "2 chunks were never written" in str(ps.inspect(path, allow_fill=True))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path, chunks=(8, 3, 4, 5))
    assert main(["inspect", path]) == 0
    assert "chunks of 8 rows" in capsys.readouterr().out
    assert main(["inspect", path, str(tmp_path / "gone.h5")]) == 2
    assert "gone.h5: no such file" in capsys.readouterr().err
    assert main(["inspect", path, str(tmp_path / "gone.h5"), "--skip"]) == 1
    assert "left out: " in capsys.readouterr().out


def test_a_plan_tells_quality_and_amplification(tmp_path: Path) -> None:
    ds = ps.open(made(tmp_path, chunks=(4, 3, 4, 5)), fields=["betas"])
    options: dict[str, Any] = {"batch_size": 2, "memory": "64MiB", "output": "numpy"}
    uniform = ps.Loader(ds, shuffle=True, **options).plan
    assert (uniform.shuffle_quality, uniform.amplification, uniform.window_rows) == (1.0, 4.0, 24)
    narrow = ps.Loader(ds, shuffle=True, window=8, **options).plan
    assert narrow.window_rows == 8
    assert narrow.shuffle_quality == pytest.approx((1 - 3 / 7) / (1 - 3 / 23))
    assert "shuffle quality is 0.66" in str(narrow)
    assert "h5repack -l betas:CHUNK=1x3x4x5" in str(narrow)
    assert ps.Loader(ds, **options).plan.shuffle_quality is None
    forced = ps.Loader(ds, shuffle=ps.Shuffled(24), **options).plan
    assert forced.shuffle_quality == 1.0
    assert "decodes each chunk again for every row" in str(forced)


@pytest.mark.parametrize(("window", "rows"), [(1, 4), (8, 8), (11, 8), (10**9, 24), ("1KiB", 8), ("1GiB", 24)])
def test_windows(tmp_path: Path, window: int | str, rows: int) -> None:
    ds = ps.open(made(tmp_path, chunks=(4, 3, 4, 5)), fields=["betas"])
    with ps.Loader(ds, batch_size=3, shuffle=True, window=window, memory="64MiB", output="numpy") as loader:
        assert loader.plan.window_rows == rows
        seen = np.concatenate([batch["betas"][:, 0, 0, 0] for batch in loader])
        assert loader.stats().chunks_read == 6
    assert sorted(seen.tolist()) == [row * 60 for row in range(24)]


@pytest.mark.parametrize("window", [0, -1, 1.5, "many"])
def test_windows_that_cannot_be_meant(tmp_path: Path, window: Any) -> None:
    ds = ps.open(made(tmp_path, chunks=(4, 3, 4, 5)), fields=["betas"])
    with pytest.raises(ConfigError, match="window="):
        ps.Loader(ds, batch_size=3, shuffle=True, window=window, memory="64MiB", output="numpy")


def test_a_refusal_names_the_ways_out(tmp_path: Path) -> None:
    path = tmp_path / "large.h5"
    with h5py.File(path, "w") as file:
        ones = np.ones((600, 100, 100), np.int16)
        file.create_dataset("betas", data=ones, chunks=(600, 10, 10), compression="gzip")
    ds = ps.open(path)
    with pytest.raises(BudgetExceeded) as refused:
        ps.Loader(ds, batch_size=8, shuffle=True, memory="10MiB", output="numpy")
    for way_out in ("blocks of 600", "select_within", "h5repack -l betas:CHUNK=1x100x100"):
        assert way_out in str(refused.value)
