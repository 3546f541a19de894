"""Threads that share the read of a block: each does its part, through whatever the dataset is made of."""

import threading
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import pytest
import zarr

import penstock as ps
from penstock.base import scratch
from penstock.base.spec import Cast
from penstock.dataset.dataset import Dataset
from penstock.dataset.second_pass import Cropped, Padded, Permuted, Recast
from penstock.dataset.store import StoreBase
from penstock.read import chunk_decode, chunk_groups, part

ROWS, SHAPE, CHUNK, SHARES = 12, (6, 7), (6, 4, 4), 3
MASK = np.zeros(SHAPE, bool)
MASK[::2, 1:6] = True
MEAN, SPREAD = np.random.default_rng(1).uniform(1, 9, (2, *SHAPE)).astype(np.float32)


@pytest.fixture(params=["chunk by chunk", "chunks in groups"], autouse=True)
def reader(request: Any, read_policy: Any) -> str:
    below = 0 if request.param == "chunk by chunk" else 2**20
    read_policy(group_chunks_below_bytes=below, group_elements=16)  # one chunk per group
    return str(request.param)


@pytest.fixture
def ds(tmp_path: Path) -> ps.Dataset:
    """One block of rows, in four pieces, in each of two files with other pieces."""
    values = np.random.default_rng(0).integers(-300, 300, (ROWS, *SHAPE)).astype(np.int16)
    for number, chunk in enumerate((CHUNK, (6, 3, 7))):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("x", data=values + number, chunks=chunk, compression="gzip")
    return ps.open(tmp_path / "*.h5")


@pytest.fixture
def chunks_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per chunk that was decoded."""
    read, read_group, found = chunk_decode.Decoding.read, chunk_groups.SmallChunks._read_group, list[int]()

    def reading(self: Any, handle: Any, block: int, piece: int, *rest: Any) -> None:
        found.append(piece)
        read(self, handle, block, piece, *rest)

    def reading_group(self: Any, handle: Any, block: int, pieces: np.ndarray, *rest: Any) -> None:
        found.extend(pieces.tolist())
        read_group(self, handle, block, pieces, *rest)

    monkeypatch.setattr(chunk_decode.Decoding, "read", reading)
    monkeypatch.setattr(chunk_groups.SmallChunks, "_read_group", reading_group)
    return found


def box(shape: tuple[int, ...]) -> part.RowPart:
    return part.row_part(shape, (slice(1, None, 2), slice(2, 7)))


def normalized(ds: ps.Dataset, dtype: str = "float32") -> ps.Dataset:
    return ds.normalize("x", MEAN, SPREAD, dtype=dtype)


def padded_half(ds: ps.Dataset) -> StoreBase:
    return Padded(Recast(normalized(ds.select(range(24))).store, {"x": HALF}), "x", 8, np.full(1, 3, np.float16))


HALF = Cast(np.dtype(np.float16), 0.5, 1.0)
IN_ORDER = np.arange(2 * ROWS).reshape(-1, 2)

WRAPPED: dict[str, Callable[[ps.Dataset], StoreBase]] = {
    "plain": lambda ds: ds.store,
    "normalize": lambda ds: normalized(ds).store,
    "normalize to half": lambda ds: normalized(ds, "float16").store,
    "normalize, masked": lambda ds: ds.select_within("x", MASK).normalize("x", MEAN[MASK], SPREAD[MASK]).store,
    "second cast": lambda ds: ds.cast("x", "float32", scale=2).cast("x", "float16", offset=1).delivered,
    "convert": lambda ds: Recast(ds.store, {"x": HALF}),
    "permute": lambda ds: ds.permute("x", 1, 0).delivered,
    "permute, contiguous": lambda ds: ds.cast("x", "float16", scale=0.5).permute("x", 1, 0, contiguous=True).delivered,
    "normalize columns": lambda ds: ds.normalize("x", MEAN[0], SPREAD[0]).store,
    "normalize, contiguous": lambda ds: normalized(ds).permute("x", 1, 0, contiguous=True).delivered,
    "crop to a box": lambda ds: Cropped(ds.store, "x", box(SHAPE)),
    "crop to a mask": lambda ds: Cropped(ds.store, "x", part.row_part(SHAPE, MASK)),
    "pad": lambda ds: ds.pad("x", to=9, value=7).store,
    "pad through scratch": lambda ds: ds.gather(np.arange(2 * ROWS)[:, None]).pad("x", to=2, value=7).store,
    "gather": lambda ds: ds.gather(IN_ORDER).store,
    "gather backwards": lambda ds: ds.gather(IN_ORDER[:, ::-1].copy()).store,
    "select": lambda ds: ds.select(range(3, 20)).store,
    "join": lambda ds: ps.join(y=(ds, np.arange(24))).store,
    "all of them": lambda ds: Permuted(Cropped(padded_half(ds), "x", box((8, 7))), {"x": (1, 0)}),
    "cast of gathered": lambda ds: ds.gather(IN_ORDER).cast("x", "float32", scale=3).delivered,
}


@pytest.mark.parametrize("case", WRAPPED)
def test_every_share_reads_its_part_and_all_of_them_the_whole(
    case: str, ds: ps.Dataset, chunks_read: list[int]
) -> None:
    store = WRAPPED[case](ds)
    rows = np.random.default_rng(3).permutation(len(store))
    at = np.random.default_rng(4).permutation(len(store))
    expected = {name: spec.empty(len(rows)) for name, spec in store.fields.items()}
    store.read_into(rows, at, expected)
    in_all = len(chunks_read)
    for order in permutations(range(SHARES)):
        out = {name: np.full_like(values, 99) for name, values in expected.items()}
        counts = []
        for number in order:
            chunks_read.clear()
            scratch.prepare(store.scratch_bytes(len(rows)))
            try:
                store.read(rows, at, out, (number, SHARES))
                assert scratch.overflow_bytes() == 0
            finally:
                scratch.release()
            counts.append(len(chunks_read))
        assert all(counts), "every share reads some chunks"
        assert sum(counts) == in_all, "each chunk is decoded once"
        assert all(np.array_equal(out[name], values) for name, values in expected.items())


def test_a_function_needs_whole_rows_so_that_one_share_reads_them(ds: ps.Dataset) -> None:
    store = ds.map(lambda batch: {"x": batch["x"][:, ::-1]}).store
    out = {"x": np.zeros((2, *SHAPE), np.int16)}
    store.read(np.arange(2), np.arange(2), out, (1, SHARES))
    assert not out["x"].any()
    store.read(np.arange(2), np.arange(2), out, (0, SHARES))
    assert np.array_equal(out["x"], ds[:2]["x"][:, ::-1])


BY_A_LOADER = ["normalize", "second cast", "permute", "permute, contiguous", "crop to a box", "pad", "gather"]


@pytest.mark.parametrize("case", BY_A_LOADER)
def test_two_threads_of_a_loader_decode_one_block_together(
    case: str, ds: ps.Dataset, tmp_path: Path, read_policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.loader.plan.SHARE_ABOVE_BYTES", 0)
    read_policy(group_chunks_below_bytes=0)
    ds = ps.open(tmp_path / "*.h5")
    both, read = threading.Barrier(2), chunk_decode.Decoding.read
    seen = threading.local()

    def reading(self: Any, *args: Any) -> None:
        if not getattr(seen, "one", False):  # the first chunk of each thread
            seen.one = True
            both.wait(10)
        read(self, *args)

    monkeypatch.setattr(chunk_decode.Decoding, "read", reading)
    # One block alone: two threads can only meet if they share it.
    alone = Dataset(WRAPPED[case](ds)).select(range(6 if case != "gather" else 3))
    with ps.Loader(alone, batch_size=6, threads=2, memory="64MiB", output="numpy") as batches:
        (batch,) = [dict(each) for each in batches]
    monkeypatch.undo()
    assert not both.broken
    assert np.array_equal(batch["x"], alone[:]["x"])


def test_rows_of_one_number_that_a_library_reads(tmp_path: Path) -> None:
    values = np.arange(1, 7, dtype=np.uint8)
    zarr.create_array(tmp_path / "a.zarr", data=values, chunks=(6,), zarr_format=2, compressors=numcodecs.BZ2())
    store = Recast(ps.open(tmp_path / "a.zarr").store, {"data": Cast(np.dtype(np.float32), 0.5)})
    out, rows = np.zeros(6, np.float32), np.arange(6)
    for share in range(SHARES):
        store.read(rows, rows, {"data": out}, (share, SHARES))
    np.testing.assert_array_equal(out, values / 2)
