"""The whole process tree stays within ``memory``, whatever is converted to what."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.convert.sources import trial_major, voxel_major

from penstock.base.sizes import parse_size

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not say what is held"),
]

CHILD = Path(__file__).with_name("budget_child.py")


def by_voxel(folder):
    voxel_major(folder / "in.h5", voxels=300_000, trials=100)
    return folder / "in.h5", 1


def in_chunks(folder):
    trial_major(folder / "in.h5", rows=200, shape=(60, 50, 20), chunks=(20, 10, 10, 20), compression="gzip")
    return folder / "in.h5", 0


def plain(folder):
    np.save(folder / "in.npy", np.random.default_rng(0).normal(size=(300, 20_000)))
    return folder / "in.npy", 0


def vectors(folder):
    np.save(folder / "in.npy", np.random.default_rng(0).normal(size=(60_000, 100)))
    return folder / "in.npy", 0


def noise(folder):
    np.save(folder / "in.npy", np.random.default_rng(0).integers(0, 256, (450, 200_000), np.uint8))
    return folder / "in.npy", 0


def tiny(folder):
    np.save(folder / "in.npy", np.arange(1_200_000, dtype=np.int32).reshape(300_000, 4))
    return folder / "in.npy", 0


CASES = [
    *((by_voxel, goal, "64MiB", {}) for goal in ("out.zarr", "out.npy", "out.h5")),
    (by_voxel, "out.npy", None, {}),
    (by_voxel, "out.zarr", None, {}),
    (by_voxel, "out.h5", "64MiB", {"compression": "zstd"}),
    (by_voxel, "out-%03d.tar", "256MiB", {}),
    *((in_chunks, goal, "96MiB", {}) for goal in ("out.zarr", "out.npy", "out.h5", "out.tar")),
    (in_chunks, "out.h5", None, {"compression": "gzip"}),
    (plain, "out.zarr", None, {}),
    (plain, "out.zarr", "320MiB", {"shard_bytes": "8MiB", "workers": 2}),
    (plain, "out.npy", "300MiB", {"shard_bytes": "8MiB", "workers": 2}),
    (plain, "out.h5", "360MiB", {"compression": "zstd", "shard_bytes": "8MiB", "workers": 2}),
    (vectors, "part-%02d.parquet", None, {"shard_bytes": "16MiB"}),
    (vectors, "out.parquet", "256MiB", {}),
    (noise, "out.parquet", None, {}),
    (noise, "out.parquet", None, {"verify": "source"}),
    (vectors, "out.parquet", None, {"verify": "source"}),
    (vectors, "out.lmdb", None, {}),
    (in_chunks, "out.lmdb", "96MiB", {}),
    (tiny, "out.lmdb", None, {}),
]


@pytest.mark.parametrize(("make", "goal", "memory", "options"), CASES)
def test_the_process_tree_stays_within_memory(tmp_path, make, goal, memory, options):
    source, row_axis = make(tmp_path)
    limit = None if memory is None else parse_size(memory, argument="memory")
    job = {
        "source": str(source), "row_axis": row_axis, "goal": str(tmp_path / goal), "memory": limit, "options": options
    }  # fmt: skip
    ran = subprocess.run([sys.executable, str(CHILD), json.dumps(job)], capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    print(told["limit"] / 2**20, told["peak"] / 2**20, told)
    assert told["peak"] <= told["limit"]
    assert told["workers"] == options.get("workers", 1)
