"""What stands in the place of a file and is none: refused at once, never waited for, never taken for absent."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr

import penstock as ps
import penstock.webdataset as wds
from penstock.errors import Missing, PenstockError, Unavailable

VALUES = np.arange(1, 13, dtype="i4").reshape(6, 2)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def link_to_nowhere(path: Path) -> None:
    path.symlink_to("nowhere")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(path.parent)  # the length of its address is limited
        made.bind(path.name)


ODD = [pipe, folder, link_to_nowhere, link_to_itself, link_to_a_device, bound_socket]


@pytest.fixture(autouse=True)
def _stay_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def zarr_3(path: Path, **options: object) -> None:
    array = zarr.create_array(str(path), shape=VALUES.shape, dtype="i4", chunks=(1, 2), fill_value=0, **options)
    array[...] = VALUES


def instead(path: Path, odd: Callable[[Path], None]) -> None:
    path.unlink()
    odd(path)


@pytest.mark.case(46)
@pytest.mark.timeout(30)
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(
    ("options", "chunk"),
    [
        ({}, "c/3/0"),
        ({"shards": (2, 2)}, "c/1/0"),
        ({"zarr_format": 2, "compressors": numcodecs.BZ2()}, "3.0"),
    ],
    ids=["read here", "shards", "read by zarr-python"],
)
def test_a_chunk_of_zarr(tmp_path: Path, odd: Callable[[Path], None], options: dict[str, object], chunk: str) -> None:
    path = tmp_path / "a.zarr"
    zarr_3(path, **options)
    instead(path / chunk, odd)
    for allow_fill in (False, True):
        with pytest.raises(Unavailable, match=chunk):
            ps.open(path, allow_fill=allow_fill)[:]


@pytest.mark.case(46)
def test_a_file_in_the_place_of_a_folder_of_chunks(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    zarr_3(path)
    (path / "c/3/0").unlink()
    (path / "c/3").rmdir()
    (path / "c/3").write_bytes(b"")
    with pytest.raises(Unavailable, match="c/3/0"):
        ps.open(path, allow_fill=True)[:]


@pytest.mark.case(46)
def test_a_folder_of_chunks_that_is_a_link_to_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    zarr_3(path)
    (path / "c/3/0").unlink()
    (path / "c/3").rmdir()
    (path / "c/3").symlink_to("nowhere")
    with pytest.raises(Unavailable, match="link to nowhere"):
        ps.open(path, allow_fill=True)[:]
    (path / "c/3").unlink()
    assert not ps.open(path, allow_fill=True)[3]["data"].any(), "what is really not there is the fill value"


@pytest.mark.case(46)
@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("options", [{}, {"zarr_format": 2, "compressors": numcodecs.BZ2()}])
def test_chunks_that_may_not_be_read(tmp_path: Path, options: dict[str, object]) -> None:
    path = tmp_path / "a.zarr"
    zarr_3(path, **options)
    path.chmod(0o400)
    try:
        with pytest.raises(Unavailable):
            ps.open(path, allow_fill=True)[:]
    finally:
        path.chmod(0o700)


def a_zarr_group(path: Path) -> Path:
    group = zarr.create_group(str(path / "a.zarr"))
    for name in ("x", "y"):
        group.create_array(name, data=VALUES)
    return path / "a.zarr/x/zarr.json"


def a_zarr(path: Path) -> Path:
    zarr_3(path / "a.zarr")
    return path / "a.zarr/zarr.json"


def an_lmdb(path: Path) -> Path:
    import lmdb

    with lmdb.open(str(path / "a.lmdb"), map_size=1 << 20) as env, env.begin(write=True) as transaction:
        transaction.put(b"0001", b"1")
    return path / "a.lmdb/data.mdb"


def a_tiledb_schema(path: Path) -> Path:
    import tiledb

    tiledb.ctx._needs_fork_wrapper = False  # it wraps os.fork, to warn; tests of other modules fork
    tiledb.from_numpy(str(path / "a.tiledb"), VALUES)
    return next(each for each in (path / "a.tiledb/__schema").iterdir() if each.is_file())


def a_table_of_files(path: Path, name: str = "metadata.csv") -> Path:
    from PIL import Image

    (path / "a.pictures").mkdir()
    Image.new("RGB", (2, 2)).save(path / "a.pictures/a.png")
    (path / "a.pictures" / name).write_text("file,label\na.png,1\n")
    return path / "a.pictures" / name


def a_table_in_parquet(path: Path) -> Path:
    return a_table_of_files(path, "metadata.parquet")


def an_npy(path: Path) -> Path:
    np.save(path / "a.npy", VALUES)
    return path / "a.npy"


def a_tar(path: Path) -> Path:
    return _written(path / "a.tar", b"")


def a_compressed_tar(path: Path) -> Path:
    return _written(path / "a.tar.gz", b"")


def an_hdf5(path: Path) -> Path:
    return _written(path / "a.h5", b"")


def an_npz(path: Path) -> Path:
    return _written(path / "a.npz", b"")


def a_parquet(path: Path) -> Path:
    return _written(path / "a.parquet", b"")


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


MAKERS = [
    a_zarr, a_zarr_group, an_lmdb, a_tiledb_schema, a_table_of_files, a_table_in_parquet, an_npy, a_tar,
    a_compressed_tar, an_hdf5, an_npz, a_parquet,
]  # fmt: skip


@pytest.mark.case(46)
@pytest.mark.timeout(30)
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("make", MAKERS)
def test_what_tells_of_the_data(tmp_path: Path, make: Callable[[Path], Path], odd: Callable[[Path], None]) -> None:
    place = make(tmp_path)
    instead(place, odd)
    opened = next(iter(sorted(tmp_path.glob("a.*"))), place)
    with pytest.raises(PenstockError):
        ps.open(opened)[:]


@pytest.mark.case(46)
@pytest.mark.timeout(30)
@pytest.mark.parametrize("odd", ODD)
def test_a_shard_of_webdataset_and_a_manifest(tmp_path: Path, odd: Callable[[Path], None]) -> None:
    odd(tmp_path / "a.tar")
    with pytest.raises(PenstockError, match=r"a\.tar"):
        list(wds.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False))
    np.save(tmp_path / "a.npy", VALUES)
    with pytest.raises(PenstockError):
        ps.open(tmp_path / "a.npy", manifest=tmp_path / "a.tar")


@pytest.mark.case(46)
@pytest.mark.timeout(30)
def test_a_file_replaced_by_a_pipe_after_it_was_opened(tmp_path: Path) -> None:
    path = an_npy(tmp_path)
    ds = ps.open(path, max_open_files=0)
    instead(path, pipe)
    with pytest.raises(PenstockError, match=r"a\.npy"):
        ds[:]


@pytest.mark.case(46)
def test_an_array_of_a_group_that_is_a_link_to_nowhere(tmp_path: Path) -> None:
    a_zarr_group(tmp_path)
    (tmp_path / "a.zarr/z").symlink_to("nowhere")
    with pytest.raises(Unavailable, match="link to nowhere"):
        ps.open(tmp_path / "a.zarr")


@pytest.mark.case(46)
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("ending", ["npy", "zarr"])
def test_what_a_pattern_matches_is_not_passed_over(tmp_path: Path, odd: Callable[[Path], None], ending: str) -> None:
    np.save(tmp_path / "1.npy", VALUES)
    zarr_3(tmp_path / "1.zarr")
    odd(tmp_path / f"2.{ending}")
    (tmp_path / "3").mkdir()
    with pytest.raises(Missing, match=rf"2\.{ending}: "):
        ps.open(tmp_path / f"*.{ending}")
    ds = ps.open(tmp_path / f"*.{ending}", on_error="skip")
    assert (len(ds), [type(each) for each in ds.left_out]) == (6, [Missing])
