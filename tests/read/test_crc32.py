"""Chunks of a zip archive are compared with the CRC-32 of its directory when they are read, whole or in groups."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import Corrupt
from penstock.testing import check_store

zarr = pytest.importorskip("zarr")

VALUES = np.arange(8 * 6 * 10, dtype=np.int16).reshape(8, 6, 10)
WAYS = {
    "whole rows": {"group_chunks_below_bytes": 0},
    "in pieces": {"group_chunks_below_bytes": 0},
    "in groups": {"group_chunks_below_bytes": 1 << 40},
}


@pytest.fixture(params=WAYS)
def way(request: Any, read_policy: Any) -> str:
    read_policy(**WAYS[request.param])
    return str(request.param)


def write(path: Path, way: str, **options: Any) -> None:
    chunks = (1, 6, 10) if way == "whole rows" else (2, 3, 10)
    with zarr.storage.ZipStore(path, mode="w") as store:
        made = zarr.create_array(store, name="x", shape=VALUES.shape, dtype=VALUES.dtype, chunks=chunks, **options)
        made[:] = VALUES


def damage(path: Path) -> None:
    """Change one byte in the middle of the last rows' chunk."""
    with zipfile.ZipFile(path) as archive:
        last = max((info for info in archive.infolist() if "/c/" in info.filename), key=lambda info: info.filename)
    data = bytearray(path.read_bytes())
    begin = last.header_offset + 30 + int.from_bytes(data[last.header_offset + 26 : last.header_offset + 28], "little")
    data[begin + last.compress_size // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("cast", [None, "float32", "float16"])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_damaged_chunk_is_refused(tmp_path: Path, way: str, compressed: bool, cast: str | None) -> None:
    write(tmp_path / "a.zarr.zip", way, **({} if compressed else {"compressors": None}))

    def opened() -> ps.Dataset:
        ds = ps.open(tmp_path / "a.zarr.zip", fields=["x"])
        return ds if cast is None else ds.cast("x", cast, scale=2)

    expected = VALUES if cast is None else (VALUES.astype("f4") * 2).astype(cast)
    check_store(lambda: opened().delivered, {"x": expected})
    assert [path.checked_by for path in opened().store.read_paths()] == ["crc32"]
    damage(tmp_path / "a.zarr.zip")
    with pytest.raises(Corrupt, match=r"a\.zarr\.zip: x\[.*its CRC-32 is [0-9a-f]{8}, but .* says [0-9a-f]{8}"):
        opened()[:]
    assert opened()[:2]["x"].tolist() == expected[:2].tolist()
