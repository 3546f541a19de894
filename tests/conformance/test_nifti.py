"""NIfTI, plain and gzipped, against nibabel's own reading of the same file."""

import gzip
import zlib
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

import penstock as ps
from penstock.testing import check_store

DTYPES = ["u1", "i2", "<f4", ">i2", ">f8", "c8", "u2"]


def write(path: Path, shape: tuple[int, ...], dtype: str, *, version: int = 1, scaled: bool = False) -> np.ndarray:
    values = (np.random.default_rng(0).normal(size=shape) * 100).astype(np.dtype(dtype))
    kind = nibabel.Nifti1Image if version == 1 else nibabel.Nifti2Image
    header = kind.header_class(endianness=">" if dtype.startswith(">") else "<")
    header.set_data_dtype(np.dtype(dtype))
    image = kind(values, np.eye(4), header)
    if scaled:
        image.header.set_slope_inter(0.25, -3)
    image.to_filename(path)
    return values


def expected(path: Path) -> np.ndarray:
    """As nibabel reads it, with one row a volume."""
    image = nibabel.load(path)
    values = np.asanyarray(image.dataobj)
    rows = np.moveaxis(values, 3, 0) if values.ndim == 4 else values[None]
    return np.ascontiguousarray(rows.astype(rows.dtype.newbyteorder("=")))


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize(
    ("shape", "dtype", "version"),
    [
        *(((5, 4, 3, 6), dtype, 1) for dtype in DTYPES),
        *((shape, "i2", 2) for shape in [(5, 4, 3), (5, 4, 3, 1), (5, 4, 3, 2, 2), (7,), (40, 50, 30, 3)]),
    ],
)
def test_images(tmp_path: Path, suffix: str, shape: tuple[int, ...], dtype: str, version: int) -> None:
    path = tmp_path / f"bold{suffix}"
    write(path, shape, dtype, version=version)
    check_store(lambda: ps.open(path).store, {"data": expected(path)})


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_scaled(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"bold{suffix}"
    write(path, (5, 4, 3, 6), "i2", scaled=True)
    assert nibabel.load(path).dataobj.slope == 0.25
    values = nibabel.load(path).get_fdata()
    read = ps.open(path)[:]["data"]
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, np.moveaxis(values, 3, 0))
    check_store(lambda: ps.open(path).store, {"data": read})


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_parts_and_casts(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"bold{suffix}"
    write(path, (6, 5, 4, 7), "i2")
    whole = expected(path)
    mask = np.random.default_rng(2).random(whole.shape[1:]) < 0.3
    check_store(
        lambda: ps.open(path).select_within("data", mask).cast("data", "float32", 0.5).delivered,
        {"data": whole[:, mask].astype(np.float32) * np.float32(0.5)},
    )


def test_a_file_for_each_subject(tmp_path: Path) -> None:
    saved = [write(tmp_path / f"sub-{number}.nii.gz", (5, 4, 3), "<f4") + number for number in range(3)]
    for number, values in enumerate(saved):
        nibabel.Nifti1Image(values, np.eye(4)).to_filename(tmp_path / f"sub-{number}.nii.gz")
    check_store(lambda: ps.open(tmp_path / "sub-*.nii.gz", fields=["t1"]).store, {"t1": np.stack(saved)})


def test_a_gzipped_series_is_decoded_once_an_epoch(tmp_path: Path) -> None:
    path = tmp_path / "bold.nii.gz"
    write(path, (5, 4, 3, 20), "<f4")
    with ps.Loader(ps.open(path), batch_size=4, shuffle=True, memory="64MiB", columns=("data",)) as loader:
        rows = sum(len(batch) for (batch,) in loader)
        assert rows == 20
        assert loader.stats().chunks_read == 20
        assert loader.stats().bytes_read <= path.stat().st_size * 2


def test_members_of_gzip_follow_each_other(tmp_path: Path) -> None:
    write(tmp_path / "a.nii", (5, 4, 3, 6), "i2")
    data = (tmp_path / "a.nii").read_bytes()
    (tmp_path / "a.nii.gz").write_bytes(gzip.compress(data[:500]) + gzip.compress(data[500:]))
    check_store(lambda: ps.open(tmp_path / "a.nii.gz").store, {"data": expected(tmp_path / "a.nii")})


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize("keep", [3, 100, 400])
def test_a_file_cut_short(tmp_path: Path, suffix: str, keep: int) -> None:
    path = tmp_path / f"bold{suffix}"
    write(path, (5, 4, 3, 6), "i2")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises((ps.errors.Truncated, ps.errors.Corrupt), match="bold"):
        ps.open(path)[:]


def test_a_gzip_file_damaged_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "bold.nii.gz"
    write(path, (5, 4, 3, 6), "i2")
    data = bytearray(path.read_bytes())
    data[-8] ^= 1  # the checksum
    path.write_bytes(data)
    with pytest.raises(ps.errors.Corrupt, match=r"bold.*incorrect data check"):
        ps.open(path)[[5]]


@pytest.mark.parametrize(("at", "value"), [(40, 9), (42, -1), (70, 128), (108, 0)])
def test_damaged_headers(tmp_path: Path, at: int, value: int) -> None:
    path = tmp_path / "bold.nii"
    write(path, (5, 4, 3, 6), "i2")
    data = bytearray(path.read_bytes())
    data[at : at + 2] = int(value).to_bytes(2, "little", signed=True)
    if at == 108:
        data[108:112] = np.float32(1e12).tobytes()
    path.write_bytes(data)
    errors: Any = (ps.errors.Corrupt, ps.errors.Truncated, ps.errors.SchemaMismatch)
    with pytest.raises(errors, match=r"bold\.nii"):
        ps.open(path)


def test_other_gzip_files_are_no_images(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"text" * 500))
    (tmp_path / "b.gz").write_bytes(zlib.compress(b"text" * 500))
    for name in ("a.gz", "b.gz"):
        with pytest.raises(ps.errors.ConfigError, match="of no known format"):
            ps.open(tmp_path / name)


@pytest.mark.parametrize(("version", "at"), [(1, 344), (2, 4)])
@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_a_header_without_its_sign_is_not_believed(tmp_path: Path, suffix: str, version: int, at: int) -> None:
    """Analyze files have the same size of header and other fields in it; and so has a header of which a part moved."""
    write(tmp_path / "a.nii", (5, 4, 3, 6), "i2", version=version)
    data = bytearray((tmp_path / "a.nii").read_bytes())
    data[at : at + 3] = b"n+3"
    path = tmp_path / f"bold{suffix}"
    path.write_bytes(gzip.compress(data) if suffix == ".nii.gz" else data)
    with pytest.raises(ps.errors.Corrupt, match=r"bold.*n\+3" if version == 1 else "bold.*not a whole NIfTI header"):
        ps.open(path)


@pytest.mark.parametrize(("at", "value", "told"), [(108, 200, "data at 200.0"), (116, np.nan, "adds nan")])
def test_a_header_that_nibabel_refuses(tmp_path: Path, at: int, value: float, told: str) -> None:
    path = tmp_path / "bold.nii"
    write(path, (5, 4, 3, 6), "i2", scaled=True)
    data = bytearray(path.read_bytes())
    data[at : at + 4] = np.float32(value).tobytes()
    path.write_bytes(data)
    with pytest.raises(nibabel.spatialimages.HeaderDataError):
        np.asanyarray(nibabel.load(path).dataobj)
    with pytest.raises(ps.errors.Corrupt, match=told):
        ps.open(path)


@pytest.mark.parametrize("damage", ["checksum", "values", "cut"])
def test_no_row_of_a_damaged_gzip_file_comes(tmp_path: Path, damage: str) -> None:
    """The checksum at its end is that of every row, also of the first, and where bad rows are left out."""
    path = tmp_path / "bold.nii.gz"
    write(tmp_path / "a.nii", (5, 4, 3, 6), "i2")
    data = bytearray(gzip.compress((tmp_path / "a.nii").read_bytes(), 0))
    if damage == "checksum":
        data[-8] ^= 1
    elif damage == "values":
        data[-300] ^= 1
    path.write_bytes(data[:-200] if damage == "cut" else data)
    with pytest.raises((ps.errors.Corrupt, ps.errors.Truncated), match="bold"):
        ps.open(path)[0]
    ds = ps.open(path)
    with ps.Loader(ds, batch_size=2, memory="32MiB", on_error="skip", output="numpy") as loader:
        assert list(loader) == []
        assert loader.stats().left_out_samples == len(ds)
        assert loader.stats().unverified == 0
