"""Zarr in every layout, against zarr-python's own reading of the same store."""

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import torch
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec
from zarr.storage import ZipStore

import penstock as ps
from penstock.dataset.extent_store import ExtentStore
from penstock.formats.zarr.fallback import ZarrStore
from penstock.read.codecs import Crc32c
from penstock.testing import check_store

DIRECT: dict[str, dict[str, Any]] = {
    "3, zarr's guess": {},
    "3, plain": {"chunks": "row", "compressors": None},
    "3, zstd": {"chunks": "row", "compressors": ZstdCodec(checksum=True)},
    "3, gzip + crc32c": {"chunks": "row", "compressors": [GzipCodec(), Crc32cCodec()]},
    "3, blosc": {"chunks": "row", "compressors": BloscCodec(cname="lz4")},
    "3, big-endian": {"chunks": "row", "serializer": BytesCodec(endian="big")},
    "3, transposed": {"chunks": "row", "filters": [TransposeCodec(order=(2, 0, 1))]},
    "3, transposed, rows": {"chunks": "rows", "filters": [TransposeCodec(order=(1, 2, 0))], "compressors": None},
    "3, named as in 2": {"chunks": "rows", "chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "3, rows": {"chunks": "rows"},
    "3, pieces": {"chunks": "pieces"},
    "3, parts": {"chunks": "parts"},
    "3, shards of rows": {"chunks": "row", "shards": "rows"},
    "3, shards of parts": {"chunks": (1, 2, 4), "shards": (4, 4, 8)},
    "3, shards, index first": {
        "chunks": (2, 6, 11),
        "shards": (4, 6, 11),
        "compressors": [ZstdCodec(), Crc32cCodec()],
        "index_first": True,
    },
    "2, zarr's guess": {"zarr_format": 2},
    "2, plain, nested names": {
        "zarr_format": 2,
        "chunks": "pieces",
        "compressors": None,
        "chunk_key_encoding": {"name": "v2", "separator": "/"},
    },
    "2, zstd": {"zarr_format": 2, "chunks": "row", "compressors": numcodecs.Zstd()},
    "2, blosc": {"zarr_format": 2, "chunks": "rows", "compressors": numcodecs.Blosc("zstd")},
    "2, zlib + shuffle": {
        "zarr_format": 2,
        "chunks": "parts",
        "filters": [numcodecs.Shuffle(1)],
        "compressors": numcodecs.Zlib(),
    },
    "2, gzip, Fortran": {"zarr_format": 2, "chunks": "parts", "order": "F", "compressors": numcodecs.GZip()},
    "2, lz4, Fortran": {"zarr_format": 2, "chunks": "row", "order": "F", "compressors": numcodecs.LZ4()},
}
THROUGH_ZARR: dict[str, dict[str, Any]] = {
    "2, bz2": {"zarr_format": 2, "chunks": "parts", "compressors": numcodecs.BZ2()},
    "3, two compressors": {"chunks": "rows", "compressors": [GzipCodec(), ZstdCodec()]},
}
LAYOUTS = {**DIRECT, **THROUGH_ZARR}
DTYPES = ["u1", "<i2", ">i2", "<f4", ">f8", "f2", "c8", "bool"]


def write(store: Any, values: np.ndarray, layout: dict[str, Any], name: str | None = None) -> None:
    options = dict(layout)
    rows, *rest = values.shape
    part = [-(-n * 2 // 3) for n in rest]  # so that the last piece reaches beyond the row
    shapes = {"row": (1, *rest), "rows": (min(4, rows), *rest), "parts": (2, *part), "pieces": (1, *part)}
    for key in ("chunks", "shards"):
        if isinstance(options.get(key), str):
            options[key] = shapes[options[key]]
    if options.get("zarr_format") != 2:  # version 3 has the byte order in its codecs
        values = values.astype(values.dtype.newbyteorder("="))
        if values.dtype.itemsize == 1:
            options.pop("serializer", None)
    if options.pop("index_first", False):
        options["shards"] = {"shape": options["shards"], "index_location": "start"}
    array = zarr.create_array(store, name=name, shape=values.shape, dtype=values.dtype, **options)
    array[...] = values


def made(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    smooth = np.cumsum(np.random.default_rng(1).normal(size=shape), axis=-1)
    return (smooth * 20).astype(dtype)


def through_zarr(path: Any, name: str | None = None) -> np.ndarray:
    values = zarr.open_array(path, path=name or "", mode="r")[...]
    return np.ascontiguousarray(values.astype(values.dtype.newbyteorder("=")))


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *(("3, zstd", dtype) for dtype in DTYPES),
        *((layout, "<i2") for layout in DIRECT),
        *((layout, "<i2") for layout in THROUGH_ZARR),
    ],
)
def test_layouts(tmp_path: Path, layout: str, dtype: str) -> None:
    path = tmp_path / "session.zarr"
    values = made((5, 6, 11), dtype)
    write(path, values, LAYOUTS[layout])
    assert isinstance(ps.open(path).store, ExtentStore if layout in DIRECT else ZarrStore)
    expected = through_zarr(path)
    np.testing.assert_array_equal(expected, values)
    check_store(lambda: ps.open(path).store, {"data": expected})


@pytest.mark.parametrize(
    ("layout", "shape", "dtype"),
    [
        *((layout, (5, 8, 13), "float32") for layout in ("3, big-endian", "3, parts", "3, shards of rows", "2, bz2")),
        *((layout, (11,), "float32") for layout in ("3, plain", "3, rows", "2, zstd")),
        ("3, transposed", (2, 13, 100), "float16"),
    ],
)
def test_shapes_cast(tmp_path: Path, layout: str, shape: tuple[int, ...], dtype: str) -> None:
    path = tmp_path / "session.zarr"
    write(path, made(shape, "<i2"), LAYOUTS[layout])
    expected = (through_zarr(path).astype(np.float32) * np.float32(1 / 300)).astype(dtype)
    check_store(lambda: ps.open(path).cast("data", dtype, scale=1 / 300).delivered, {"data": expected})


@pytest.mark.parametrize("layout", ["3, shards of parts", "3, transposed, rows", "2, bz2"])
def test_rows_on_another_axis(tmp_path: Path, layout: str) -> None:
    path = tmp_path / "session.zarr"
    write(path, made((5, 6, 11), "<i2"), LAYOUTS[layout])
    expected = np.ascontiguousarray(np.moveaxis(through_zarr(path), 2, 0))
    check_store(lambda: ps.open(path, row_axis=2).store, {"data": expected})


@pytest.mark.parametrize("layout", ["3, zstd", "3, shards of parts", "2, bz2"])
def test_part_of_each_row(tmp_path: Path, layout: str) -> None:
    path = tmp_path / "session.zarr"
    write(path, made((5, 6, 11), "<i2"), LAYOUTS[layout])
    whole = through_zarr(path)
    mask = np.random.default_rng(2).random(whole.shape[1:]) < 0.3
    check_store(lambda: ps.open(path).select_within("data", mask).delivered, {"data": whole[:, mask]})
    box = np.ascontiguousarray(whole[:, 1:5:2, 3:])
    check_store(lambda: ps.open(path).select_within("data", (slice(1, 5, 2), slice(3, None))).delivered, {"data": box})


GROUP = {"images": ("3, parts", "u1", (6, 5, 5)), "deep/er/betas": ("3, shards of rows", "<i2", (6, 4, 7))}


def write_group(store: Any, version: int = 3) -> dict[str, np.ndarray]:
    expected = {}
    for name, (layout, dtype, shape) in GROUP.items():
        values = expected[name] = made(shape, dtype)
        write(store, values, LAYOUTS[layout] if version == 3 else LAYOUTS["2, zstd"], name)
    expected["labels"] = np.arange(6)
    write(store, expected["labels"], {"zarr_format": version}, "labels")
    return expected


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part:UserWarning")
def test_groups(tmp_path: Path, version: int, consolidated: bool) -> None:
    path = tmp_path / "all.zarr"
    zarr.create_group(path, zarr_format=version)
    expected = write_group(path, version)
    if consolidated:
        zarr.consolidate_metadata(path, zarr_format=version)
    check_store(lambda: ps.open(path, fields=tuple(expected)).store, expected)
    assert set(ps.open(path).fields) == set(expected)
    assert list(ps.open(path, fields=["labels"]).fields) == ["labels"]


def test_fields_of_mixed_layouts_share_rows(tmp_path: Path) -> None:
    path = tmp_path / "mixed.zarr"
    expected = {"images": made((6, 5, 5), "u1"), "labels": np.arange(6)}
    zarr.create_group(path, zarr_format=2)
    write(path, expected["images"], LAYOUTS["2, bz2"], "images")
    write(path, expected["labels"], {"zarr_format": 2}, "labels")
    check_store(lambda: ps.open(path).store, expected)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_zip_archives(tmp_path: Path, compression: int) -> None:
    path = tmp_path / "all.zarr.zip"
    with ZipStore(path, mode="w", compression=compression) as store:
        zarr.create_group(store)
        expected = write_group(store)
    names = tuple(expected)
    check_store(lambda: ps.open(path, fields=names).store, expected)
    direct = isinstance(ps.open(path, fields=names).store, ExtentStore)
    assert direct == (compression == zipfile.ZIP_STORED)


def test_many_stores_follow_each_other(tmp_path: Path) -> None:
    parts = [made((n, 7, 5), "<i2") for n in (3, 1, 6)]
    for number, part in enumerate(parts):
        write(tmp_path / f"s{number + 8}.zarr", part, LAYOUTS["3, zstd"])
    check_store(lambda: ps.open(tmp_path / "s*.zarr").store, {"data": np.concatenate(parts)})


@pytest.mark.parametrize("shape", [(4, 0), (4, 0, 3)])
def test_rows_without_elements(tmp_path: Path, shape: tuple[int, ...]) -> None:
    zarr.create_array(tmp_path / "a.zarr", shape=shape, dtype="f4", chunks=(1,) * len(shape))
    check_store(lambda: ps.open(tmp_path / "a.zarr").store, {"data": np.empty(shape, "f4")})


# Chunks without a file.

FILLS = {"f4": [0.0, np.nan, -np.inf, 1.5], "i2": [0, -7], "bool": [True], "c8": [1 + 2j], ">f8": [np.inf]}


@pytest.mark.parametrize(("dtype", "fill"), [(dtype, fill) for dtype, fills in FILLS.items() for fill in fills])
@pytest.mark.parametrize("version", [2, 3])
def test_absent_chunks_are_the_fill_value(tmp_path: Path, dtype: str, fill: Any, version: int) -> None:
    path = tmp_path / "a.zarr"
    dtype = dtype.lstrip(">") if version == 3 else dtype
    array = zarr.create_array(path, shape=(6, 6), dtype=dtype, chunks=(3, 4), fill_value=fill, zarr_format=version)
    array[:2, :4] = dtype != "bool"
    np.testing.assert_array_equal(ps.open(path, allow_fill=True)[:]["data"], through_zarr(path))


@pytest.mark.parametrize("chunks", [(1, 6), (3, 4)])
def test_what_was_filled_is_told(tmp_path: Path, chunks: tuple[int, ...]) -> None:
    path = tmp_path / "a.zarr"
    array = zarr.create_array(path, shape=(6, 6), dtype="f4", chunks=chunks, fill_value=np.nan)
    array[:2, :4] = 1
    check_store(lambda: ps.open(path, allow_fill=True).store, {"data": through_zarr(path)})
    assert "absent ones are nan" in str(ps.inspect(path, allow_fill=True))
    loader = ps.Loader(ps.open(path, allow_fill=True), batch_size=6, memory="64MiB", columns=("data",))
    for _ in loader:
        pass
    assert loader.stats().chunks_filled == (4 if chunks == (1, 6) else 3)
    with pytest.raises(ps.errors.Missing, match=r"never written, and would read as the fill value nan"):
        ps.open(path)[:]


def test_absent_shards_and_chunks_of_shards(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    array = zarr.create_array(path, shape=(8, 6), dtype="i4", chunks=(1, 3), shards=(4, 6), fill_value=9)
    array[1, :3] = 5
    check_store(lambda: ps.open(path, allow_fill=True).store, {"data": through_zarr(path)})
    with pytest.raises(ps.errors.Missing, match="never written"):
        ps.open(path)[[2]]


def test_an_array_without_any_chunk_is_refused(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a.zarr", shape=(8, 6), dtype="i4", chunks=(1, 6), fill_value=3)
    with pytest.raises(ps.errors.Missing, match="no chunk was ever written"):
        ps.open(tmp_path / "a.zarr")
    assert (ps.open(tmp_path / "a.zarr", allow_fill=True)[:]["data"] == 3).all()


def test_no_fill_value_means_none(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    write(path, made((4, 5), "<i2"), {"zarr_format": 2, "chunks": "row"})
    document = json.loads((path / ".zarray").read_text())
    (path / ".zarray").write_text(json.dumps({**document, "fill_value": None}))
    (path / "2.0").unlink()
    with pytest.raises(ps.errors.Missing, match=r"2\.0: data\[2\]"):
        ps.open(path)[:]
    assert (ps.open(path, allow_fill=True)[2]["data"] == 0).all()


# Elsewhere.


@pytest.mark.parametrize("workers", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_workers_of_torchs_own_loader(tmp_path: Path, workers: str) -> None:
    path = tmp_path / "all.zarr"
    zarr.create_group(path)
    expected = write_group(path)
    write(path, expected["images"], LAYOUTS["3, two compressors"], "through")
    ds = ps.open(path)
    assert ds[0]["labels"] == 0  # handles and zarr-python's own thread are there before the fork
    batches = torch.utils.data.DataLoader(ds, batch_size=2, num_workers=2, multiprocessing_context=workers)
    seen = []
    for batch in batches:
        rows = batch["labels"].numpy()
        seen += rows.tolist()
        for name, values in {**expected, "through": expected["images"]}.items():
            np.testing.assert_array_equal(batch[name].numpy(), values[rows])
    assert seen == list(range(6))


def test_shuffled_epochs_have_every_row_once(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    write(path, np.arange(37 * 5, dtype="<i4").reshape(37, 5), {"chunks": (8, 3)})
    with ps.Loader(ps.open(path), batch_size=6, shuffle=True, memory="64MiB", columns=("data",)) as loader:
        for _ in range(2):
            batches = [batch.numpy().copy() for (batch,) in loader]
            rows = np.concatenate(batches)
            assert (np.sort(rows[:, 0]) == np.arange(37) * 5).all()
            assert (rows == rows[:, :1] + np.arange(5)).all()
            assert (rows[:, 0] != np.sort(rows[:, 0])).any()
            assert loader.stats().chunks_read <= 5 * 2 * 2, "each chunk once an epoch"


# What is held.


@pytest.mark.parametrize("max_open_files", [0, 1, 3])
def test_descriptors_are_bounded(tmp_path: Path, max_open_files: int, open_in: Callable[[Path], int]) -> None:
    path = tmp_path / "a.zarr"
    values = made((12, 9), "<i2")
    write(path, values, {"chunks": (1, 5)})
    check_store(lambda: ps.open(path, max_open_files=max_open_files).store, {"data": values})
    ds = ps.open(path, max_open_files=max_open_files)
    ds[:]
    assert open_in(path) <= max_open_files
    ds.close()
    assert open_in(path) == 0


def test_opening_looks_at_few_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.zarr"
    write(path, made((300, 4), "<i2"), {"chunks": (1, 4)})
    looked_at = []
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda path, *args, **kwargs: looked_at.append(path) or stat(path, *args, **kwargs))
    ps.open(path)
    assert len(looked_at) < 50


def test_the_fingerprint_is_of_the_data_and_not_of_the_place(tmp_path: Path) -> None:
    values = made((8, 400), "<i2")
    write(tmp_path / "a.zarr", values, {"chunks": "row"})
    shutil.copytree(tmp_path / "a.zarr", tmp_path / "elsewhere.zarr")
    write(tmp_path / "other.zarr", np.zeros_like(values) + 1, {"chunks": "row"})
    one, moved, other = (ps.open(tmp_path / f"{name}.zarr").fingerprint for name in ("a", "elsewhere", "other"))
    assert one == moved != other


def test_small_shard_indices_can_be_dropped_and_read_again(tmp_path: Path, read_policy: Any) -> None:
    path = tmp_path / "a.zarr"
    values = made((12, 40), "<i2")
    write(path, values, {"chunks": (1, 10), "shards": (2, 40)})
    read_policy(kept_shard_index_bytes=2 * 17 * 8)
    store = ps.open(path).store
    assert store.index_bytes == 2 * 17 * 8, "an offset, a length and a flag for each of eight chunks"
    check_store(lambda: ps.open(path).store, {"data": values})


MAPPED_OR_READ = pytest.mark.parametrize("map_rows_below_bytes", [0, 2**20], ids=["read", "mapped"])
"""How rows that are chunks of a shard are read: one by one, or gathered from a mapping."""


@MAPPED_OR_READ
def test_chunks_of_a_shard_are_checked_once_while_the_file_stays_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_policy: Any, map_rows_below_bytes: int
) -> None:
    path, values = tmp_path / "a.zarr", made((12, 40), "<i2")
    write(path, values, {"chunks": (1, 40), "shards": (4, 40), "compressors": [Crc32cCodec()]})
    read_policy(check_file_every_s=0, map_rows_below_bytes=map_rows_below_bytes)
    lengths: list[int] = []
    of_pieces = Crc32c.of_pieces

    def counted(data: np.ndarray, offsets: np.ndarray, size: int) -> np.ndarray:
        lengths.extend([size] * len(offsets))
        return of_pieces(data, offsets, size)

    monkeypatch.setattr(Crc32c, "of_pieces", staticmethod(counted))
    ds = ps.open(path)
    for _ in range(3):
        np.testing.assert_array_equal(ds[:]["data"], values)
    assert lengths.count(80) == 12
    shard = path / "c" / "1" / "0"
    flipped = bytearray(shard.read_bytes())
    flipped[50] ^= 1
    shard.write_bytes(flipped)
    os.utime(shard, ns=(0, 0))
    with pytest.raises(ps.errors.Changed):
        ds[4:8]
    with pytest.raises(ps.errors.Corrupt, match=r"data\[4\].*crc32c"):
        ps.open(path)[4:8]


@MAPPED_OR_READ
@pytest.mark.parametrize("checksum", [True, False])
def test_plain_rows_of_shards(tmp_path: Path, read_policy: Any, map_rows_below_bytes: int, checksum: bool) -> None:
    path, values = tmp_path / "a.zarr", made((300, 5, 8), ">i2")
    options = {"chunks": (1, 5, 8), "shards": (64, 5, 8), "compressors": [Crc32cCodec()] if checksum else None}
    zarr.create_array(path, data=values, fill_value=0, **options)
    read_policy(map_rows_below_bytes=map_rows_below_bytes)
    check_store(lambda: ps.open(path).store, {"data": values.astype("<i2")})
    check_store(lambda: ps.open(path).cast("data", "float32").delivered, {"data": values.astype(np.float32)})


@MAPPED_OR_READ
def test_rows_of_shards_that_were_never_written(tmp_path: Path, read_policy: Any, map_rows_below_bytes: int) -> None:
    path = tmp_path / "a.zarr"
    array = zarr.create_array(
        path, shape=(12, 40), dtype="i2", chunks=(1, 40), shards=(4, 40), compressors=None, fill_value=7
    )
    array[:3] = 1
    read_policy(map_rows_below_bytes=map_rows_below_bytes)
    with pytest.raises(ps.errors.Missing, match=r"data\[3\]|row 3"):
        ps.open(path)[:4]
    np.testing.assert_array_equal(ps.open(path, allow_fill=True)[:]["data"], array[:])


def test_small_plain_rows_of_a_shard_are_read_without_a_call_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, values = tmp_path / "a.zarr", made((256, 1000), "<f4")
    write(path, values, {"chunks": (1, 1000), "shards": (128, 1000), "compressors": [Crc32cCodec()]})
    ds, calls = ps.open(path), []
    ds[:2], ds[128:130]
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: [calls.append(args), read(*args)][1])
    np.testing.assert_array_equal(ds[::-1]["data"], values[::-1])
    assert not calls
