"""Zarr stores on a web server: what local ones give. Only "there is none" means that a chunk was never written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import penstock as ps
from penstock.errors import ConfigError, Missing, Unavailable
from penstock.remote.ranges import RemoteOptions
from penstock.testing import check_store

OPTIONS = RemoteOptions(retries=2, deadline_s=20, stall_timeout_s=2)
VALUES = (np.cumsum(np.random.default_rng(0).normal(size=(8, 30, 40)), axis=-1) * 20).astype("i2")


def served(server: Any, folder: Path) -> str:
    for path in folder.rglob("*"):
        if path.is_file():
            server.put(f"{folder.name}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return f"{server.url}/{folder.name}"


@pytest.mark.parametrize(
    ("options", "cached"),
    [
        ({"chunks": (1, 30, 40)}, False),
        ({"chunks": (2, 30, 20), "zarr_format": 2}, True),
        ({"chunks": (1, 15, 40), "shards": (4, 30, 40)}, False),
    ],
    ids=str,
)
def test_arrays(server: Any, tmp_path: Path, options: dict[str, Any], cached: bool) -> None:
    zarr.create_array(tmp_path / "a.zarr", shape=VALUES.shape, dtype="i2", **options)[...] = VALUES
    url = served(server, tmp_path / "a.zarr")
    cache: dict[str, Any] = {"cache_dir": tmp_path / "cache"} if cached else {}
    check_store(lambda: ps.open(url, remote=OPTIONS, **cache).store, {"data": VALUES})


@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part:UserWarning")
def test_groups(server: Any, tmp_path: Path) -> None:
    folder = tmp_path / "all.zarr"
    zarr.create_group(folder)
    zarr.create_array(folder, name="deep/betas", data=VALUES, chunks=(1, 30, 40))
    zarr.create_array(folder, name="labels", data=np.arange(8))
    url = served(server, folder)
    with pytest.raises(ConfigError, match=r"cannot be listed.*fields="):
        ps.open(url, remote=OPTIONS)
    expected = {"deep/betas": VALUES, "labels": np.arange(8)}
    check_store(lambda: ps.open(url, fields=tuple(expected), remote=OPTIONS).store, expected)
    zarr.consolidate_metadata(folder)
    served(server, folder)
    assert set(ps.open(url, remote=OPTIONS).fields) == set(expected)


@pytest.mark.case(12)
def test_a_server_in_trouble_is_not_an_absent_chunk(server: Any, tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a.zarr", shape=VALUES.shape, dtype="i2", chunks=(1, 30, 40))[...] = VALUES
    ds = ps.open(served(server, tmp_path / "a.zarr"), remote=OPTIONS)
    del server.files["/a.zarr/c/3/0/0"]
    with pytest.raises(Missing, match=r"c/3/0/0.* fill value 0.*allow_fill=True"):
        ds[3]
    assert (ps.open(f"{server.url}/a.zarr", remote=OPTIONS, allow_fill=True)[3]["data"] == 0).all()
    server.always = lambda handler, data, wanted: handler.answer(500, {}, b"")
    with pytest.raises(Unavailable, match="c/4/0/0"):
        ds[4]
    server.always = None
    np.testing.assert_array_equal(ds[4]["data"], VALUES[4])


def test_what_is_not_there(server: Any, tmp_path: Path) -> None:
    with pytest.raises(Missing, match="no Zarr array"):
        ps.open(f"{server.url}/none.zarr", remote=OPTIONS)
    server.put("a.npz", b"PK\x03\x04" + bytes(100))
    with pytest.raises(ConfigError, match="can only be read from a local disk"):
        ps.open(f"{server.url}/a.npz", remote=OPTIONS)
