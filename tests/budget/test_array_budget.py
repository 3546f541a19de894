"""The budget holds in every format as it does in HDF5: at any sample, in a fresh process."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import nibabel
import numcodecs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr

CHILD = Path(__file__).with_name("array_child.py")
VOLUME = (150, 150, 100)
ROWS = 8
ZARR: dict[str, dict[str, Any]] = {
    "rows": {"chunks": (1, *VOLUME)},
    "small-shards": {"chunks": (1, 25, 25, 20), "shards": (4, 150, 150, 100)},
    "through-zarr": {"chunks": (1, 50, 50, 40), "zarr_format": 2, "compressors": numcodecs.LZMA(preset=0)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("formats")
    rng = np.random.default_rng(0)
    smooth = np.cumsum(rng.integers(-20, 21, (ROWS, *VOLUME), np.int16), axis=-1, dtype=np.int16)
    for layout, options in ZARR.items():
        rows = 4 if layout.startswith("through") else ROWS
        zarr.create_array(root / f"{layout}.zarr", shape=(rows, *VOLUME), dtype="i2", **options)[...] = smooth[:rows]
        first = {**options, "chunks": (1, 8, 8, 8), "shards": (1, 8, 8, 8) if "shards" in options else None}
        zarr.create_array(root / f"{layout}-first.zarr", shape=(1, 8, 8, 8), dtype="i2", **first)[...] = 1
    volumes = np.moveaxis(smooth, 0, 3)
    nibabel.Nifti1Image(volumes, np.eye(4)).to_filename(root / "bold.nii")
    (root / "bold.nii.gz").write_bytes(gzip.compress((root / "bold.nii").read_bytes(), 1))
    vectors = rng.random((18_000, 1024), np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), 1024)
    pq.write_table(pa.table({"data": column}), root / "vectors.parquet", row_group_size=2000, compression=None)
    pq.write_table(pa.table({"data": column[:10]}), root / "vectors-first.parquet")
    return root


def run(folder: Path, name: str, **job: Any) -> dict[str, int]:
    path = folder / name
    first = path.with_name(f"{path.stem}-first{path.suffix}")
    job |= {"path": str(path), "field": "data", "first": str(first) if first.exists() else ""}
    done = subprocess.run([sys.executable, CHILD, json.dumps(job)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mask"),
    [
        *((f"{layout}.zarr", False) for layout in ZARR),
        ("small-shards.zarr", True),
        ("bold.nii", False),
        ("bold.nii.gz", True),
    ],
)
def test_volumes(folder: Path, name: str, mask: bool) -> None:
    held = run(folder, name, mask=mask, cast=True, batch_size=4, threads=2)
    assert held["samples"] > 5
    assert held["peak"] <= held["limit"]
    assert held["peak"] > held["batch"], "a peak below one batch cannot have been measured right"
    assert held["rows"] == 2 * (4 if name.startswith("through") else ROWS)


@pytest.mark.slow
def test_epochs_of_one_batch_that_the_loop_keeps(folder: Path) -> None:
    """The refusal of the second epoch names the budget in which both batches fit."""
    name = "through-zarr.zarr"
    held = run(folder, name, cast=True, batch_size=4, threads=2, keep=True)
    assert held["refused"] > held["limit"]
    held = run(folder, name, cast=True, batch_size=4, threads=2, keep=True, memory=held["refused"])
    assert 2 * held["batch"] < held["peak"] <= held["limit"]
    assert (held["rows"], held["refused"]) == (8, 0)


@pytest.mark.slow
def test_vectors_of_a_table(folder: Path) -> None:
    held = run(folder, "vectors.parquet", batch_size=256, threads=2)
    assert held["peak"] <= held["limit"]
    assert held["rows"] == 36_000
