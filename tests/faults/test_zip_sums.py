"""CRC-32 of the members of zip archives: held against whole members, and by ``verify`` against all."""

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import penstock as ps
from penstock.cli.main import main
from penstock.errors import Corrupt, DataError
from penstock.formats import zip_table
from penstock.read.member_sum import MemberSum

VALUES = np.random.default_rng(0).integers(0, 100, (50, 20))


def npz(path: Path) -> Path:
    np.savez(path / "a.npz", x=VALUES, y=VALUES[::-1])
    return path / "a.npz"


def compressed_npz(path: Path) -> Path:
    np.savez_compressed(path / "a.npz", x=VALUES, y=VALUES[::-1])
    return path / "a.npz"


def zarr_zip(path: Path) -> Path:
    with zarr.storage.ZipStore(path / "a.zarr.zip", mode="w") as store:
        array = zarr.create_array(store, shape=VALUES.shape, dtype="i8", chunks=(10, 20), compressors=None)
        array[...] = VALUES
    return path / "a.zarr.zip"


def deflated_zarr_zip(path: Path) -> Path:
    with zarr.storage.ZipStore(path / "a.zarr.zip", mode="w", compression=zipfile.ZIP_DEFLATED) as store:
        array = zarr.create_array(store, shape=VALUES.shape, dtype="i8", chunks=(10, 20), compressors=None)
        array[...] = VALUES
    return path / "a.zarr.zip"


def flip(path: Path, member: str) -> None:
    with zipfile.ZipFile(path) as archive:
        info = next(each for each in archive.infolist() if member in each.filename)
    data = bytearray(path.read_bytes())
    data[info.header_offset + 30 + len(info.filename) + info.compress_size - 5] ^= 0x10
    path.write_bytes(data)


@pytest.mark.case(50)
@pytest.mark.parametrize(("make", "member"), [(npz, "y.npy"), (zarr_zip, "c/3/0"), (deflated_zarr_zip, "c/3/0")])
def test_verify_finds_a_flipped_bit(tmp_path: Path, make: Callable[[Path], Path], member: str) -> None:
    path = make(tmp_path)
    whole = ps.verify(path)
    assert whole.sound
    assert whole.unchecked == ()
    flip(path, member)
    verdict = ps.verify(path)
    assert not verdict.sound
    assert any(member in str(each) for each in verdict.damages)
    assert not ps.verify(ps.open(path)).sound
    assert main(["verify", str(path)]) == 1


@pytest.mark.case(50)
def test_a_document_of_zarr(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    with zarr.storage.ZipStore(path, mode="w") as store:
        zarr.create_array(store, data=VALUES, chunks=(10, 20), attributes={"note": "abcdefgh"})
    data = path.read_bytes()
    path.write_bytes(data.replace(b"abcdefgh", b"abcdefgi"))
    with pytest.raises(DataError, match=r"zarr\.json.*CRC-32"):
        ps.open(path)


def delivered(ds: ps.Dataset, **options: Any) -> tuple[list[tuple[np.ndarray, ...]], ps.Stats]:
    options = {"memory": "256MiB", "output": "numpy", "columns": tuple(ds.fields)} | options
    with ps.Loader(ds, batch_size=4, **options) as loader:
        return [tuple(map(np.copy, batch)) for batch in loader], loader.stats()


@pytest.mark.case(50)
@pytest.mark.parametrize("processes", [0, 2])
def test_rows_read_in_place_are_compared_before_the_first_one(tmp_path: Path, processes: int) -> None:
    path = npz(tmp_path)
    batches, stats = delivered(ps.open(path), processes=processes)
    assert np.array_equal(np.concatenate([x for x, _ in batches]), VALUES)
    assert stats.unverified == 0
    flip(path, "y.npy")
    ds = ps.open(path)
    for read in (lambda: ds[0], lambda: pickle.loads(pickle.dumps(ds))[3], lambda: delivered(ds, processes=processes)):
        with pytest.raises(Corrupt, match=r"a\.npz: y\.npy: its CRC-32 is not the one in the archive"):
            read()
    assert np.array_equal(ds.only("x")[:]["x"], VALUES), "the other member is whole"
    batches, stats = delivered(ds, on_error="skip", processes=processes)
    assert (batches, stats.left_out_samples) == ([], len(VALUES))


@pytest.mark.case(50)
def test_a_damaged_member_is_summed_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sums = []
    monkeypatch.setattr(MemberSum, "_sum", lambda self, handle: sums.append(self.name) or 0)
    ds = ps.open(npz(tmp_path))
    assert delivered(ds, on_error="skip", threads=1, processes=0)[1].left_out_samples == len(VALUES)
    assert len(sums) == 1


@pytest.mark.case(50)
def test_rows_of_large_members_are_said_to_be_unchecked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zip_table, "MOST_BYTES", VALUES.nbytes)  # less than the member, which has a header too
    assert delivered(ps.open(npz(tmp_path)))[1].unverified == 100


@pytest.mark.case(50)
def test_arrays_that_are_held_in_memory_are_checked_when_they_are_opened(tmp_path: Path) -> None:
    path = compressed_npz(tmp_path)
    assert ps.verify(path).sound
    flip(path, "y.npy")
    with pytest.raises(DataError, match=r"y\.npy"):
        ps.open(path)


@pytest.mark.case(50)
@pytest.mark.parametrize(("make", "member"), [(npz, b"y.npy"), (compressed_npz, b"y.npy"), (zarr_zip, b"c/3/0")])
def test_a_name_that_is_damaged_in_the_directory(tmp_path: Path, make: Callable[[Path], Path], member: bytes) -> None:
    """It would be a member that is not there, or one that nobody asks for."""
    path = make(tmp_path)
    before, name, after = path.read_bytes().rpartition(member)
    path.write_bytes(before + name[:-1] + b"z" + after)
    with pytest.raises(DataError, match="called otherwise where it lies"):
        ps.open(path)
