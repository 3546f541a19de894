"""NumPy's archives against np.load, and files that say nothing of themselves against np.fromfile."""

from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.dataset.extent_store import ExtentStore
from penstock.dataset.memory import HeldStore
from penstock.testing import check_store


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "betas": (rng.normal(size=(7, 5, 11)) * 50).astype(">i2"),
        "images": rng.integers(0, 256, (7, 40, 300, 3), np.uint8),
        "labels": np.arange(7),
    }


def native(saved: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.astype(array.dtype.newbyteorder("=")) for name, array in saved.items()}


@pytest.mark.parametrize("name", ["a.npz", "named-otherwise.npy"])
def test_saved_as_they_are(tmp_path: Path, name: str) -> None:
    with open(tmp_path / name, "wb") as file:
        np.savez(file, **arrays())
    assert isinstance(ps.open(tmp_path / name).store, ExtentStore)
    check_store(lambda: ps.open(tmp_path / name).store, native(arrays()))
    assert list(ps.open(tmp_path / name, fields=["labels"]).fields) == ["labels"]


def test_compressed(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, **arrays())
    store = ps.open(path).store
    assert isinstance(store, HeldStore)
    assert store.index_bytes == sum(array.nbytes for array in arrays().values()), "what is held is counted"
    check_store(lambda: ps.open(path).store, native(arrays()))


def test_arrays_of_different_length_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, rows=np.zeros((4, 3)), mean=np.zeros(3))
    with pytest.raises(ps.errors.SchemaMismatch, match="rows has 4, mean has 3"):
        ps.open(path)
    assert len(ps.open(path, fields=["rows"])) == 4


def test_python_objects_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([{}, []], object))
    with pytest.raises(ps.errors.Unsafe, match=r"x\.npy"):
        ps.open(tmp_path / "a.npz")


def test_what_cannot_be_held_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.dataset.memory.MOST_BYTES", 100)
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((50, 3)))
    with pytest.raises(ps.errors.LimitExceeded, match=r"Save it by np\.savez"):
        ps.open(tmp_path / "a.npz")


@pytest.mark.parametrize("keep", [30, 200, 1000])
def test_a_file_cut_short(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, **arrays())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ps.errors.Truncated, match=r"a\.npz"):
        ps.open(path)


@pytest.mark.parametrize(("dtype", "shape", "offset"), [("<i2", (5, 11), 0), (">f4", (), 12), ("u1", (200, 300), 7)])
def test_raw(tmp_path: Path, dtype: str, shape: tuple[int, ...], offset: int) -> None:
    values = (np.random.default_rng(1).normal(size=(9, *shape)) * 50).astype(dtype)
    for number, part in enumerate((values[:4], values[4:])):
        (tmp_path / f"part{number}.bin").write_bytes(b"x" * offset + part.tobytes())
    expected = {"betas": values.astype(values.dtype.newbyteorder("="))}
    pattern = tmp_path / "part*.bin"
    check_store(lambda: ps.open_raw(pattern, dtype, shape, offset=offset, field="betas").store, expected)


def test_raw_that_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(100))
    with pytest.raises(ps.errors.Truncated, match="not a whole number of rows of 24 bytes"):
        ps.open_raw(tmp_path / "a.bin", "f4", (2, 3))
    for dtype, shape in (("O", ()), ("f4", (0,)), ("no", ()), ("f4", "x")):
        with pytest.raises(ps.errors.ConfigError, match="expected"):
            ps.open_raw(tmp_path / "a.bin", dtype, shape)
