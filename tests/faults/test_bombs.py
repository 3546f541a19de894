"""Little data that would take much memory: refused by what they declare, before anything is allocated."""

import gzip
import io
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch  # noqa: F401  before memory is measured
import zarr
import zstandard

import penstock as ps
import penstock.webdataset as wds
from penstock.errors import BudgetExceeded, LimitExceeded, Missing
from penstock.testing.measure import MemoryWatch

MIB = 2**20
MPX = {169: 13_000, 400: 20_000}


def png(side: int) -> bytes:
    """A picture of zeros, whole, of that many pixels a side."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    packer, row = zlib.compressobj(9), bytes(1 + (side + 7) // 8)
    body = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def tar(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


@pytest.mark.case(7)
@pytest.mark.parametrize("megapixels", MPX)
@pytest.mark.parametrize("where", ["tar", "folder", "stream"])
def test_pictures_of_many_pixels(tmp_path: Path, where: str, megapixels: int) -> None:
    content = png(MPX[megapixels])
    assert len(content) < 50_000
    if where == "folder":
        (tmp_path / "photos").mkdir()
        (tmp_path / "photos" / "a.png").write_bytes(content)
    else:
        (tmp_path / "a.tar").write_bytes(tar({"a.png": content}))
    side = f"{MPX[megapixels]:,}"
    read = {
        "tar": lambda: ps.open(tmp_path / "a.tar")[0],
        "folder": lambda: ps.open(tmp_path / "photos")[0],
        "stream": lambda: list(wds.WebDataset(str(tmp_path / "a.tar")).decode("rgb8")),
    }[where]
    with MemoryWatch() as watch, pytest.raises(LimitExceeded, match=rf"a\.(png|tar).*{side} by {side}.*max_pixels="):
        read()
    assert watch.peak_bytes < 16 * MIB


@pytest.mark.case(7)
def test_the_limit_of_pixels_is_an_argument(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar({"a.png": png(300)}))
    with pytest.raises(LimitExceeded, match=r"max_pixels=80,?000"):
        ps.open(tmp_path / "a.tar", max_pixels=80_000)
    assert ps.open(tmp_path / "a.tar", max_pixels=90_000)[0]["png"].shape[:2] == (300, 300)


PACKED = {"gz": lambda data: gzip.compress(data, 6), "zst": zstandard.compress}
HUGE = 100 * MIB


@pytest.mark.case(8)
@pytest.mark.parametrize(
    ("how", "by"),
    [
        *(("gz", "stream"), ("zst", "cache")),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("zst", "stream"), ("gz", "cache"))),
    ],
)
def test_compressed_shards_that_expand_beyond_measure(tmp_path: Path, how: str, by: str) -> None:
    path = tmp_path / f"a.tar.{how}"
    path.write_bytes(PACKED[how](tar({"a.bin": bytes(HUGE)})))
    assert path.stat().st_size < 300_000
    read = {
        "stream": lambda **options: len(next(iter(wds.WebDataset(str(path), **options)))["bin"]),
        "cache": lambda **options: len(
            ps.open(path, cache_dir=tmp_path / "cache", index_dir=False, fields=["bin"], **options)[0]["bin"]
        ),
    }[by]
    with MemoryWatch() as watch, pytest.raises(LimitExceeded, match=r"a\.tar.*expand to .* max_expansion=500"):
        read()
    assert watch.peak_bytes < 96 * MIB, "it stops on the way"
    assert not list(tmp_path.glob("cache/*.cached"))
    assert read(max_expansion=10**6) == HUGE


@pytest.mark.case(8)
def test_members_of_too_many_bytes(tmp_path: Path) -> None:
    """A file with a hole: little on the disk, and ten gigabytes to read."""
    (tmp_path / "photos").mkdir()
    with open(tmp_path / "photos" / "a.png", "wb") as file:
        file.truncate(10 << 30)
    with MemoryWatch() as watch, pytest.raises(LimitExceeded, match=r"a\.png.*max_member_bytes=4,294,967,296"):
        ps.open(tmp_path / "photos", index_dir=False)
    assert watch.peak_bytes < 16 * MIB
    (tmp_path / "a.tar").write_bytes(tar({"a.txt": b"x", "b.txt": bytes(2000), "c.txt": b"y"}))
    ds = ps.open(tmp_path / "a.tar", max_member_bytes=1000)
    with pytest.raises(LimitExceeded, match=r"a\.tar: b\.txt .*2,000 bytes, more than max_member_bytes=1,000"):
        ds[1]
    with ps.Loader(ds, batch_size=2, on_error="skip", memory="32MiB", output="numpy") as loader:
        assert [text for batch in loader for text in batch["txt"]] == ["x", "y"]
    with pytest.raises(LimitExceeded, match="max_member_bytes=1,000"):
        list(wds.WebDataset(str(tmp_path / "a.tar"), max_member_bytes=1000))


def hdf5_chunk(path: Path) -> Path:
    """One chunk of a gigabyte, in a few bytes."""
    with h5py.File(path / "a.h5", "w") as file:
        data = file.create_dataset("data", (2**10, 2**20), "u1", chunks=(2**10, 2**20), compression="gzip")
        data.id.write_direct_chunk((0, 0), b"x")
    return path / "a.h5"


def zarr_chunk(path: Path) -> Path:
    return zarr_of((2**10, 2**20), path)


def zarr_of(chunk: tuple[int, int], path: Path) -> Path:
    zarr.create_array(path / "a.zarr", shape=(4, chunk[1]), dtype="u1", chunks=chunk)
    (path / "a.zarr" / "c" / "0").mkdir(parents=True)
    (path / "a.zarr" / "c" / "0" / "0").write_bytes(b"x")
    return path / "a.zarr"


@pytest.mark.case(8)
@pytest.mark.parametrize("make", [hdf5_chunk, zarr_chunk])
def test_a_chunk_of_a_gigabyte_does_not_fit_a_small_budget(tmp_path: Path, make: Any) -> None:
    path = make(tmp_path)
    with MemoryWatch() as watch, pytest.raises(BudgetExceeded, match=r"smallest|at least"):
        ps.Loader(ps.open(path), batch_size=1, memory="256MiB")
    assert watch.peak_bytes < 32 * MIB


@pytest.mark.case(8)
@pytest.mark.parametrize("filters", [{}, {"scaleoffset": 0}], ids=["", "through h5py"])
def test_a_trillion_chunks_of_which_none_is_there(tmp_path: Path, filters: dict[str, Any]) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("data", (2**40,), "u1", chunks=(1,), **filters)
    assert (tmp_path / "a.h5").stat().st_size < 10_000
    with MemoryWatch() as watch:
        with pytest.raises(Missing, match=r"a\.h5.*was never written"):
            ps.open(tmp_path / "a.h5")
        if filters:
            assert ps.open(tmp_path / "a.h5", allow_fill=True)[2**40 - 1]["data"] == 0
        else:
            with pytest.raises(LimitExceeded, match=r"a\.h5.*1,099,511,627,776 chunks.*are free"):
                ps.open(tmp_path / "a.h5", allow_fill=True)
    assert watch.peak_bytes < 64 * MIB


def hdf5_shape(path: Path) -> Path:
    with h5py.File(path / "a.h5", "w") as file:
        data = file.create_dataset("data", (4, 2**40), "u1", chunks=(1, 2**31), compression="gzip")
        for row in range(4):
            for column in range(0, 2**40, 2**31):
                data.id.write_direct_chunk((row, column), b"x")
    return path / "a.h5"


def npy_shape(path: Path) -> Path:
    with open(path / "a.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (4, 2**38)})
        file.truncate(file.tell() + 2**42)
    return path / "a.npy"


def zarr_shape(path: Path) -> Path:
    return zarr_of((1, 2**40), path)


@pytest.mark.case(8)
@pytest.mark.parametrize("make", [hdf5_shape, npy_shape, zarr_shape])
def test_rows_of_a_tebibyte(tmp_path: Path, make: Any) -> None:
    try:
        path = make(tmp_path)
    except OSError:
        pytest.skip("this disk has no files of four tebibytes, even empty ones")
    with MemoryWatch() as watch:
        ds = ps.open(path)
        with pytest.raises(LimitExceeded, match=r"a\.(h5|npy|zarr).*are free"):
            ds[0]
        with pytest.raises(BudgetExceeded):
            ps.Loader(ds, batch_size=1, memory="1GiB")
    assert watch.peak_bytes < 64 * MIB


def empty_npy(folder: Path) -> Path:
    np.save(folder / "a.npy", np.zeros((10**12, 0), np.int16))
    return folder / "a.npy"


def empty_hdf5(folder: Path) -> Path:
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", (10**12, 0), "i2", maxshape=(None, None), chunks=(3, 60))
    return folder / "a.h5"


def empty_zarr(folder: Path) -> Path:
    zarr.create_array(folder / "a.zarr", shape=(10**12, 0), dtype="i2", chunks=(3, 60))
    return folder / "a.zarr"


@pytest.mark.case(8)
@pytest.mark.parametrize("make", [empty_npy, empty_hdf5, empty_zarr])
def test_a_trillion_rows_without_any_value(tmp_path: Path, make: Any) -> None:
    """They would take no memory, and an epoch of them would not end."""
    with MemoryWatch() as watch, pytest.raises(LimitExceeded, match="1,000,000,000,000 rows without any value"):
        ps.open(make(tmp_path))
    assert watch.peak_bytes < 16 * MIB
