"""The budget is a law for databases, TileDB arrays and folders too.

Each case runs in a fresh process, so that no memory freed by an earlier test can hide what is taken.
"""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import lmdb
import tiledb

# Its own writing, below, would put a warning into os.fork for the rest of this process.
tiledb.ctx._needs_fork_wrapper = False

CHILD = Path(__file__).with_name("files_child.py")
MIB = 2**20
VOLUME = (150, 150, 100)
VOLUMES, RECORDS, PICTURES = 16, 16000, 48


def volumes() -> np.ndarray:
    steps = np.random.default_rng(0).integers(-20, 21, (VOLUMES, *VOLUME), np.int16)
    return np.cumsum(steps, axis=-1, dtype=np.int16)


def write_lmdb(path: Path, values: Any) -> None:
    with lmdb.open(str(path), map_size=1 << 30, subdir=False, sync=False) as env, env.begin(write=True) as transaction:
        for number, value in enumerate(values):
            transaction.put(b"%08d" % number, value)


def write_tiledb(path: Path, values: np.ndarray, rows: int, filters: list[Any]) -> None:
    dims = [
        tiledb.Dim(f"d{axis}", domain=(0, size - 1), tile=size if axis else rows, dtype=np.int64)
        for axis, size in enumerate(values.shape)
    ]
    attribute = tiledb.Attr("betas", dtype=np.int16, filters=tiledb.FilterList(filters))
    tiledb.Array.create(str(path), tiledb.ArraySchema(tiledb.Domain(*dims), [attribute]))
    with tiledb.open(str(path), "w") as array:
        array[:] = values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, betas = tmp_path_factory.mktemp("formats"), volumes()
    write_lmdb(root / "volumes.lmdb", (each.tobytes() for each in betas))
    write_lmdb(root / "records.lmdb", (np.full(1024, n, np.float32).tobytes() for n in range(RECORDS)))
    write_tiledb(root / "rows.tiledb", betas, 1, [])
    write_tiledb(root / "zstd.tiledb", betas, 1, [tiledb.ByteShuffleFilter(), tiledb.ZstdFilter(1)])
    write_tiledb(root / "blocks.tiledb", betas, 4, [tiledb.ZstdFilter(1)])
    rng = np.random.default_rng(0)
    jpegs = []
    for _ in range(PICTURES):
        stream = io.BytesIO()
        smooth = np.cumsum(rng.integers(-9, 10, (425, 425, 3)), axis=1) + 128
        Image.fromarray(smooth.astype(np.uint8)).save(stream, "JPEG", quality=90)
        jpegs.append(stream.getvalue())
    write_lmdb(root / "pictures.lmdb", jpegs)
    for number, jpeg in enumerate(jpegs):
        inner = root / "photos" / f"class{number % 4}"
        inner.mkdir(parents=True, exist_ok=True)
        (inner / f"{number}.jpg").write_bytes(jpeg)
    return root


RECORD: dict[str, Any] = {"open": {"decoders": {"data": ["float32", [1024]]}}, "batch_size": 256}
BETAS: dict[str, Any] = {"open": {"decoders": {"data": ["int16", VOLUME]}}, "cast": ["data"], "batch_size": 4}
JOBS: dict[str, dict[str, Any]] = {
    "records.lmdb": RECORD,
    "volumes.lmdb": BETAS,
    "pictures.lmdb": {"cast": ["image"], "batch_size": 8},
    "rows.tiledb": {"cast": ["betas"], "batch_size": 4},
    "zstd.tiledb": {"cast": ["betas"], "batch_size": 4},
    "blocks.tiledb": {"batch_size": 4},
    "photos": {"cast": ["image"], "batch_size": 8},
}
ROWS = {"records.lmdb": RECORDS, "pictures.lmdb": PICTURES, "photos": PICTURES}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize(("memory", "threads"), [(None, 2), (640 * MIB, 4)])
def test_what_is_held(folder: Path, name: str, memory: int | None, threads: int) -> None:
    job = {**JOBS[name], "path": str(folder / name), "memory": memory, "threads": threads}
    job["open"] = {"index_dir": None, **job.get("open", {})}  # kept between runs, as by default
    done = subprocess.run([sys.executable, CHILD, json.dumps(job)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    held = json.loads(done.stdout)
    assert held["rows"] == 2 * ROWS.get(name, VOLUMES)
    assert held["peak"] <= held["limit"], held
    assert held["samples"] > 5
    assert held["peak"] > held["batch"], "a peak below one batch cannot have been measured right"
