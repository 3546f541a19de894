"""Arrays in TileDB, pictures in LMDB and in a folder, labels in memory: one dataset, one loader."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

import lmdb
import penstock as ps
import tiledb
from penstock.testing import check_store

# Its own writing, below, would put a warning into os.fork for the rest of this process.
tiledb.ctx._needs_fork_wrapper = False


def png(number: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((6, 5, 3), number, np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def test_any_combination_joins(tmp_path: Path) -> None:
    betas = np.random.default_rng(0).normal(size=(20, 4, 3)).astype(np.float32)
    tiledb.from_numpy(str(tmp_path / "betas"), betas).close()
    with lmdb.open(str(tmp_path / "seen"), map_size=1 << 24) as env, env.begin(write=True) as transaction:
        for number in range(7):
            transaction.put(b"%d" % number, png(number))
    (tmp_path / "imagined").mkdir()
    for number in range(5):
        (tmp_path / "imagined" / f"{number}.png").write_bytes(png(100 + number))
    seen, imagined = np.arange(20) % 7, np.arange(20) * 3 % 5
    ds = ps.join(
        betas=ps.open(tmp_path / "betas"),
        seen=(ps.open(tmp_path / "seen"), seen),
        imagined=(ps.open(tmp_path / "imagined"), imagined),
        label=np.arange(20) % 2,
    )
    shape = np.ones((1, 6, 5, 3), np.uint8)
    expected = {
        "betas": betas,
        "seen": seen.astype(np.uint8)[:, None, None, None] * shape,
        "imagined": (100 + imagined).astype(np.uint8)[:, None, None, None] * shape,
        "label": np.arange(20) % 2,
    }
    check_store(lambda: ds.store, expected)
    with ps.Loader(ds, batch_size=6, shuffle=True, memory="64MiB", columns=("betas", "seen", "__index__")) as loader:
        for values, pictures, index in loader:
            assert np.array_equal(values.numpy(), betas[index.numpy()])
            assert np.array_equal(pictures[:, 0, 0, 0].numpy(), seen[index.numpy()])
