"""Dense TileDB arrays, against TileDB's own reading of the same arrays."""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
import tiledb
from penstock.testing import check_store

# Its own writing and reading, below, would put a warning into os.fork for the rest of this process.
tiledb.ctx._needs_fork_wrapper = False

DTYPES = ["u1", "i2", "f4", "f8", "c8", "c16", "bool", "u8"]
FILTERS: dict[str, list[Any]] = {
    "none": [],
    "zstd": [tiledb.ByteShuffleFilter(), tiledb.ZstdFilter(3)],
    "gzip": [tiledb.GzipFilter(4)],
    "bitshuffle, lz4": [tiledb.BitShuffleFilter(), tiledb.LZ4Filter()],
}


def values(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return (np.random.default_rng(len(shape)).normal(size=shape) * 50).astype(dtype)


def write(
    path: Path, attributes: dict[str, np.ndarray], tiles: tuple[int, ...], begin: int = 0, filters: Any = ()
) -> Path:
    shape = next(iter(attributes.values())).shape
    dimensions = [
        tiledb.Dim(f"d{axis}", domain=(begin, begin + size - 1), tile=min(tile, size), dtype=np.int64)
        for axis, (size, tile) in enumerate(zip(shape, tiles, strict=True))
    ]
    attrs = [
        tiledb.Attr(name, dtype=each.dtype, filters=tiledb.FilterList(filters)) for name, each in attributes.items()
    ]
    tiledb.Array.create(str(path), tiledb.ArraySchema(tiledb.Domain(*dimensions), attrs, sparse=False))
    with tiledb.open(str(path), "w") as array:
        array[:] = attributes if list(attributes) != [""] else attributes[""]
    return path


def read(path: Path, name: str) -> np.ndarray:
    with tiledb.open(str(path)) as array:
        found = array.query(attrs=[name])[:]
    return found[name] if isinstance(found, dict) else found


SHAPES = [((17,), (5,)), ((9, 6), (1, 6)), ((11, 6, 5), (4, 3, 5))]


@pytest.mark.parametrize(
    ("shape", "tiles", "dtype"),
    [*((*SHAPES[0], dtype) for dtype in DTYPES), *((*each, dtype) for each in SHAPES[1:] for dtype in ("i2", "c16"))],
    ids=str,
)
def test_one_attribute(tmp_path: Path, dtype: str, shape: tuple[int, ...], tiles: tuple[int, ...]) -> None:
    path = write(tmp_path / "a", {"x": values(shape, dtype)}, tiles)
    check_store(lambda: ps.open(path).store, {"x": read(path, "x")})


@pytest.mark.parametrize("filters", FILTERS)
def test_filters_and_large_rows(tmp_path: Path, filters: str) -> None:
    path = write(tmp_path / "a", {"x": values((12, 60, 70), "i2")}, (1, 60, 70), 3, FILTERS[filters])
    check_store(lambda: ps.open(path).store, {"x": read(path, "x")})


def test_several_attributes_one_without_a_name(tmp_path: Path) -> None:
    attributes = {"": values((13, 4), "f4"), "label": values((13, 4), "i8")}
    path = write(tmp_path / "a", attributes, (3, 4))
    check_store(lambda: ps.open(path).store, {"data": attributes[""], "label": attributes["label"]})
    assert list(ps.open(path, fields=["label"]).fields) == ["label"]


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_rows_along_another_dimension(tmp_path: Path, axis: int) -> None:
    path = write(tmp_path / "a", {"x": values((5, 7, 11), "f4")}, (5, 2, 3), 4)
    check_store(lambda: ps.open(path, row_axis=axis).store, {"x": np.moveaxis(read(path, "x"), axis, 0)})


def test_parts_and_casts(tmp_path: Path) -> None:
    path = write(tmp_path / "a", {"x": values((9, 8, 10), "i2")}, (2, 4, 5))
    whole = read(path, "x")
    mask = np.random.default_rng(1).random((8, 10)) < 0.3
    check_store(lambda: ps.open(path).select_within("x", mask).store, {"x": whole[:, mask]})
    box = (slice(2, 7), slice(1, 9, 2))
    check_store(lambda: ps.open(path).select_within("x", box).store, {"x": whole[:, 2:7, 1:9:2]})
    scaled = whole.astype(np.float32) * np.float32(0.5)
    check_store(lambda: ps.open(path).cast("x", "float32", scale=0.5).delivered, {"x": scaled})


@pytest.mark.parametrize("first", [0, 2, 3])
def test_a_domain_larger_than_what_was_written(tmp_path: Path, first: int) -> None:
    """Rows are those that were written; blocks are tiles, wherever they begin."""
    rows = tiledb.Dim("row", domain=(0, 10**6), tile=3, dtype=np.int64)
    schema = tiledb.ArraySchema(
        tiledb.Domain(rows, tiledb.Dim("x", domain=(0, 3), tile=4, dtype=np.int64)), [tiledb.Attr("v", dtype="f4")]
    )
    path = str(tmp_path / "a")
    tiledb.Array.create(path, schema)
    written = values((10, 4), "f4")
    with tiledb.open(path, "w") as array:
        array[first : first + 6] = written[:6]
    with tiledb.open(path, "w") as array:
        array[first + 6 : first + 10] = written[6:]
    check_store(lambda: ps.open(path).store, {"v": written})
    blocks = ps.open(path).store.blocks
    assert blocks is not None
    assert all((first + block) % 3 == 0 for block in blocks[1:].tolist())


def test_it_is_read_as_it_was_when_it_was_opened(tmp_path: Path) -> None:
    before = values((6, 4), "f4")
    path = write(tmp_path / "a", {"x": before}, (2, 4))
    ds = ps.open(path)
    seen = ds[:]["x"].tobytes()
    with tiledb.open(str(path), "w") as array:
        array[:] = before + 1
    ds.store.close()
    assert ds[:]["x"].tobytes() == seen == before.tobytes()
    again = ps.open(path)
    assert np.array_equal(again[:]["x"], before + 1)
    assert again.fingerprint != ds.fingerprint


@pytest.mark.parametrize("workers", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_in_workers_of_torch(tmp_path: Path, workers: str) -> None:
    path = write(tmp_path / "a", {"x": np.arange(40.0)[:, None] + np.zeros(30)}, (1, 30))
    ds = ps.open(path)
    ds[3]  # read from before it is sent
    loaded = torch.utils.data.DataLoader(ds, batch_size=4, num_workers=2, multiprocessing_context=workers)
    assert [batch["x"][:, -1].tolist() for batch in loaded] == np.arange(40).reshape(10, 4).tolist()


def test_one_context_of_few_threads(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{n}.tiledb", {"x": values((6, 4), "f4")}, (2, 4)) for n in range(12)]
    ps.open(paths[0])[:]
    before = threading.active_count(), len(os.listdir("/proc/self/task")) if os.path.isdir("/proc") else 0
    assert len(ps.open(tmp_path / "*.tiledb")[:]["x"]) == 72
    assert before == (threading.active_count(), len(os.listdir("/proc/self/task")) if os.path.isdir("/proc") else 0)


def test_a_shuffled_epoch_of_tiles(tmp_path: Path) -> None:
    path = write(tmp_path / "a", {"x": np.arange(60)[:, None] + np.zeros(5, int)}, (8, 5))
    with ps.Loader(ps.open(path), batch_size=7, shuffle=True, memory="64MiB", output="numpy") as loader:
        seen = [row for batch in loader for row in batch["x"][:, 0].tolist()]
    assert sorted(seen) == list(range(60))
    assert seen != sorted(seen)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_shape_and_tiling(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    tiles = tuple(data.draw(st.integers(1, size)) for size in shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    dtype = data.draw(st.sampled_from(DTYPES))
    path = write(
        tmp_path_factory.mktemp("tiledb") / "a", {"x": values(shape, dtype)}, tiles, data.draw(st.integers(0, 5))
    )
    ds = ps.open(path, row_axis=axis)
    want = np.moveaxis(read(path, "x"), axis, 0)
    rows = data.draw(st.lists(st.integers(0, len(want) - 1), min_size=1, max_size=12))
    assert ds[rows]["x"].tobytes() == np.ascontiguousarray(want[rows]).tobytes()
