"""Tar archives by random access, against numpy's, Pillow's and Python's own reading of the same members."""

import io
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import penstock as ps
from penstock import webdataset
from penstock.base import counters
from penstock.dataset.extent_store import ExtentStore
from penstock.formats.tar import store as tar_store
from penstock.testing import check_resume, check_store

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
SAMPLES = 7
SIZE = (18, 23)
DTYPES = ["u1", "<i2", ">i2", "<f4", ">f8", "f2", "c8", "bool", "<u8"]
SHAPES = [(), (1,), (5,), (3, 4), (2, 3, 5), (0, 3), (130, 70)]

Members = Mapping[str, bytes]
Sample = tuple[str, Members]


def npy(values: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def picture(number: int, kind: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = SIZE, **options: Any) -> bytes:
    height, width = size
    rng = np.random.default_rng(number)
    smooth = np.cumsum(rng.integers(-9, 10, (height, width, 3)), axis=1) + rng.integers(0, 256, 3)
    stream = io.BytesIO()
    Image.fromarray(smooth.astype(np.uint8)).convert(mode).save(stream, kind, **options)
    return stream.getvalue()


def made(number: int, dtype: str = "<f4", shape: tuple[int, ...] = (3, 4)) -> np.ndarray:
    return np.asarray(np.random.default_rng(number).normal(size=shape) * 50).astype(dtype)


def write(path: Path, samples: Sequence[Sample], layout: str = "pax") -> None:
    with tarfile.open(path, "w", format=FORMATS[layout]) as archive:
        for key, members in samples:
            for field, content in members.items():
                info = tarfile.TarInfo(f"{key}.{field}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


def read_member(field: str, content: bytes) -> np.ndarray:
    if field.endswith("npy"):
        values = np.load(io.BytesIO(content))
        return values.astype(values.dtype.newbyteorder("="))
    if field in ("cls", "id"):
        return np.array(int(content), np.int64)
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def expected(path: Path, fields: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """What the standard library and the formats' own libraries make of an archive."""
    found: dict[str, list[np.ndarray]] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            field = member.name.rsplit("/", 1)[-1].split(".", 1)[1]
            if fields is None or field in fields:
                found.setdefault(field, []).append(read_member(field, archive.extractfile(member).read()))
    return {name: np.stack(found[name]) for name in fields or found}


def usual(first: int = 0, count: int = SAMPLES) -> list[Sample]:
    """A picture, an array and a number, as most archives have them."""
    return [
        (f"{n:06d}", {"jpg": picture(n), "npy": npy(made(n)), "cls": str(n).encode()})
        for n in range(first, first + count)
    ]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two shards of 13 and 8 samples; ``cls`` is the row."""
    write(tmp_path / "train-000.tar", usual(0, 13))
    write(tmp_path / "train-001.tar", usual(13, 8))
    return tmp_path / "train-*.tar"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3, 4)], ids=str)
def test_arrays_of_every_dtype(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    path = tmp_path / "a.tar"
    write(path, [(f"s{n}", {"npy": npy(made(n, dtype, shape))}) for n in range(SAMPLES)])
    assert isinstance(ps.open(path).store, ExtentStore)
    check_store(lambda: ps.open(path).store, expected(path))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["<f4", ">i2"])
def test_arrays_of_every_shape(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    path = tmp_path / "a.tar"
    write(path, [(f"s{n}", {"a.npy": npy(made(n, dtype, shape)), "id": b"%d" % n}) for n in range(SAMPLES)])
    check_store(lambda: ps.open(path).store, expected(path))


PICTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "jpeg": ("jpg", {"kind": "JPEG"}),
    "jpeg, fine": ("jpeg", {"kind": "JPEG", "quality": 95, "subsampling": 0}),
    "jpeg, progressive": ("jpg", {"kind": "JPEG", "progressive": True}),
    "jpeg, grey": ("jpg", {"kind": "JPEG", "mode": "L"}),
    "jpeg, inks": ("jpg", {"kind": "JPEG", "mode": "CMYK"}),
    "jpeg, red green blue": ("jpg", {"kind": "JPEG", "keep_rgb": True}),
    "png": ("png", {"kind": "PNG"}),
    "png, alpha": ("png", {"kind": "PNG", "mode": "RGBA"}),
    "png, grey": ("png", {"kind": "PNG", "mode": "L"}),
    "png, palette": ("png", {"kind": "PNG", "mode": "P"}),
    "png, black and white": ("png", {"kind": "PNG", "mode": "1"}),
    "webp": ("webp", {"kind": "WEBP"}),
    "webp, lossless": ("webp", {"kind": "WEBP", "lossless": True}),
    "webp, alpha": ("webp", {"kind": "WEBP", "mode": "RGBA"}),
    "bmp": ("bmp", {"kind": "BMP"}),
    "gif": ("gif", {"kind": "GIF"}),
    "tiff": ("tiff", {"kind": "TIFF"}),
    "ppm": ("ppm", {"kind": "PPM"}),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(tmp_path: Path, name: str) -> None:
    field, how = PICTURES[name]
    path = tmp_path / "a.tar"
    write(path, [(f"s{n}", {field: picture(n, **how)}) for n in range(SAMPLES)])
    check_store(lambda: ps.open(path).store, expected(path))


def test_pictures_of_several_kinds_under_one_name(tmp_path: Path) -> None:
    """Files named jpg often are not: what they are is told by their first bytes."""
    path = tmp_path / "a.tar"
    kinds = [how for _, how in PICTURES.values()]
    write(path, [(f"s{n}", {"jpg": picture(n, **how)}) for n, how in enumerate(kinds)])
    check_store(lambda: ps.open(path).store, expected(path))


@pytest.mark.parametrize("text", [b"0", b"-17", b" 42\n", b"9223372036854775807", b"-9223372036854775808", b"007"])
def test_numbers(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.tar"
    write(path, [("a", {"cls": text, "id": b"1"}), ("b", {"cls": b"5", "id": text})])
    check_store(lambda: ps.open(path).store, expected(path))


@pytest.mark.parametrize("layout", FORMATS)
def test_archives_of_the_standard_library(tmp_path: Path, layout: str) -> None:
    path = tmp_path / "a.tar"
    folder = "some/rather/deep/folder/" * (1 if layout == "ustar" else 9)
    write(path, [(f"{folder}{key}", members) for key, members in usual()], layout)
    check_store(lambda: ps.open(path).store, expected(path))
    assert ps.open(path).origin(3).key == f"{folder}000003"


def test_keys_beyond_ascii(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write(path, [(f"größe/Ω-{n}", {"npy": npy(made(n))}) for n in range(SAMPLES)])
    check_store(lambda: ps.open(path).store, expected(path))
    assert ps.open(path).origin(2).key == "größe/Ω-2"


def written_by(writer: Callable[..., Any], folder: Path, **options: Any) -> Path:
    with writer(str(folder / "train-%03d.tar"), maxcount=4, verbose=0, **options) as shards:
        for n in range(SAMPLES):
            pixels = np.random.default_rng(n).integers(0, 256, (*SIZE, 3), np.uint8)
            values = {"jpg": pixels / 255, "png": pixels / 255, "a.npy": made(n, "f2"), "cls": n}
            shards.write({"__key__": f"{n:06d}", **values})
    return folder / "train-*.tar"


def check_shards(pattern: Path) -> None:
    paths = sorted(pattern.parent.glob(pattern.name))
    fields = list(ps.open(pattern).fields)
    assert sorted(fields) == ["a.npy", "cls", "jpg", "png"]
    parts = [expected(path, fields) for path in paths]
    check_store(
        lambda: ps.open(pattern).store, {name: np.concatenate([part[name] for part in parts]) for name in fields}
    )


def test_shards_of_our_own_writer(tmp_path: Path) -> None:
    check_shards(written_by(webdataset.ShardWriter, tmp_path))


@pytest.mark.filterwarnings("ignore")
def test_shards_of_the_webdataset_package(tmp_path: Path) -> None:
    theirs = pytest.importorskip("webdataset")
    check_shards(written_by(theirs.ShardWriter, tmp_path))


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_casts(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "a.tar"
    samples = [
        (f"s{n}", {"jpg": picture(n), "a.npy": npy(made(n, ">i2")), "b.npy": npy(made(n, "f2", ())), "cls": b"%d" % n})
        for n in range(SAMPLES)
    ]
    write(path, samples)
    ds = ps.open(path)
    for field in ds.fields:
        ds = ds.cast(field, dtype, scale=1 / 255, offset=0.5)
    target = np.dtype(dtype)
    inner = np.dtype("f4") if dtype == "float16" else target  # halves are computed in singles, and rounded once
    want = {
        name: (values.astype(inner) * inner.type(1 / 255) + inner.type(0.5)).astype(target)
        for name, values in expected(path).items()
    }
    check_store(lambda: ds.delivered, want)


def test_casts_to_whole_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write(path, usual())
    want = expected(path)
    want["jpg"], want["cls"] = want["jpg"].astype("i2"), want["cls"].astype("i4")
    check_store(lambda: ps.open(path).cast("jpg", "i2").cast("cls", "i4").delivered, want)


MASK = np.random.default_rng(5).random((3, 4)) < 0.4
PICTURE_MASK = np.random.default_rng(6).random((*SIZE, 3)) < 0.1


@pytest.mark.parametrize(
    ("field", "part"),
    [
        ("npy", MASK),
        ("npy", (slice(1, 3), slice(None, None, 2))),
        ("npy", (1, slice(2))),
        ("npy", (2, 3)),
        ("npy", ...),
        ("jpg", PICTURE_MASK),
        ("jpg", (slice(2, 12), slice(4, 20, 3))),
        ("jpg", (..., 1)),
        ("jpg", (0, 0, 0)),
    ],
    ids=lambda each: "mask" if isinstance(each, np.ndarray) else str(each),
)
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_parts_of_each_row(tmp_path: Path, field: str, part: Any, dtype: str | None) -> None:
    path = tmp_path / "a.tar"
    write(path, usual())
    want = expected(path)
    want[field] = np.stack([row[part] for row in want[field]])
    ds = ps.open(path).select_within(field, part)
    if dtype:
        want[field] = (want[field].astype("f4") * np.float32(1 / 255)).astype(dtype)
        ds = ds.cast(field, dtype, scale=1 / 255)
    check_store(lambda: ds.delivered, want)


def test_part_of_an_array_in_another_byte_order(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write(path, [(f"s{n}", {"npy": npy(made(n, ">i2"))}) for n in range(SAMPLES)])
    want = expected(path)["npy"]
    check_store(lambda: ps.open(path).select_within("npy", MASK).store, {"npy": want[:, MASK]})
    twice = ps.open(path).select_within("npy", (slice(1, 3),)).select_within("npy", (slice(None), 2))
    check_store(lambda: twice.store, {"npy": want[:, 1:3, 2]})


def test_chosen_rows(shards: Path) -> None:
    rows = [20, 0, 13, 12, 0]
    ds = ps.open(shards)
    whole = ds[:]
    check_store(lambda: ds.select([20, 0, 13, 12]).store, {name: each[rows[:4]] for name, each in whole.items()})
    check_store(lambda: ds.select(slice(3, 18, 2)).store, {name: each[3:18:2] for name, each in whole.items()})
    assert ds.select(rows)[:]["cls"].tolist() == rows
    assert ds.select(whole["cls"] % 5 == 0)[:]["cls"].tolist() == [0, 5, 10, 15, 20]


def test_several_shards_are_one_dataset(shards: Path) -> None:
    ds = ps.open(shards)
    first, second = (expected(Path(shards.parent / f"train-00{n}.tar")) for n in range(2))
    assert len(ds) == 21
    check_store(lambda: ps.open(shards).store, {name: np.concatenate([first[name], second[name]]) for name in first})
    listed = ps.open([shards.parent / "train-001.tar", shards.parent / "train-000.tar"])
    assert listed[:]["cls"].tolist() == [*range(13, 21), *range(13)]


def test_fields_in_any_order_within_samples(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    for shard, first in (("a", 0), ("b", 9)):
        shuffled = []
        for key, members in usual(first, 9):
            names = rng.permutation(list(members)).tolist()
            shuffled.append((key, {name: members[name] for name in names}))
        write(tmp_path / f"{shard}.tar", shuffled)
    parts = [expected(tmp_path / "a.tar", ["cls", "npy", "jpg"]), expected(tmp_path / "b.tar", ["cls", "npy", "jpg"])]
    want = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    check_store(lambda: ps.open(tmp_path / "*.tar", fields=["cls", "npy", "jpg"]).store, want)
    got = ps.open(tmp_path / "*.tar")[:]
    assert all(np.array_equal(got[name], want[name]) for name in want)


@pytest.mark.filterwarnings("ignore::penstock.FieldsLeftOut")
def test_members_of_unknown_kinds_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    others = {"pyd": b"{}", "mp4": b"\0" * 700}
    write(path, [("__meta__/version", {"txt": b"1"}), *((key, {**others, **members}) for key, members in usual())])
    assert list(ps.open(path).fields) == ["jpg", "npy", "cls"]
    check_store(lambda: ps.open(path).store, expected_of(usual()))


def expected_of(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    fields = samples[0][1]
    return {name: np.stack([read_member(name, members[name]) for _, members in samples]) for name in fields}


@pytest.mark.parametrize("fields", [["cls"], ["npy"], ["npy", "cls"], ["jpg"]], ids=str)
def test_fields_that_are_not_wanted_are_not_read(shards: Path, fields: list[str]) -> None:
    ds = ps.open(shards).only(*fields)
    wanted = sum(len(members[name]) for _, members in usual(0, 21) for name in fields)
    counters.collect()
    got = ds[:]
    counted = counters.collect()
    assert list(got) == fields
    assert counted.bytes_read == wanted
    assert counted.chunks_read == 21 * len(fields)
    with ps.Loader(ps.open(shards), batch_size=4, columns=tuple(fields), memory="64MiB", output="numpy") as loader:
        list(loader)
        assert loader.stats().bytes_read == wanted


def test_a_sample_is_named_by_its_shard_and_key(shards: Path) -> None:
    ds = ps.open(shards)
    for row in (0, 12, 13, 20, -1):
        place = ds.origin(row)
        assert (place.url, place.key) == (str(shards.parent / f"train-00{int(row % 21 > 12)}.tar"), f"{row % 21:06d}")
    columns = ("cls", "__key__", "__url__", "__index__")
    with ps.Loader(ds, batch_size=5, shuffle=True, memory="64MiB", columns=columns, output="numpy") as loader:
        for numbers, keys, urls, rows in loader:
            assert numbers.tolist() == rows.tolist()
            assert keys == [f"{n:06d}" for n in numbers]
            assert urls == [str(shards.parent / f"train-00{int(n > 12)}.tar") for n in numbers]


def loader(ds: ps.Dataset, **options: Any) -> ps.Loader:
    given = {"batch_size": 2, "shuffle": True, "seed": 3, "memory": "64MiB", "threads": 2, "output": "numpy"}
    return ps.Loader(ds, **{**given, **options})


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_sample_once_an_epoch(shards: Path, world_size: int, threads: int) -> None:
    ds = ps.open(shards)
    whole = ds[:]
    for epoch in range(2):
        seen: list[int] = []
        steps = set()
        for rank in range(world_size):
            with loader(ds, rank=rank, world_size=world_size, threads=threads) as batches:
                for _ in range(epoch):
                    list(batches)
                delivered = 0
                for batch in batches:
                    rows = batch["cls"]
                    assert all(np.array_equal(batch[name], whole[name][rows]) for name in whole)
                    seen += rows.tolist()
                    delivered += 1
                steps.add(delivered)
        left = 21 % (2 * world_size)
        padded = world_size - left if 0 < left < world_size else 0
        assert len(steps) == 1
        assert len(seen) == 21 + padded
        assert set(seen) == set(range(21))


def test_the_order_is_that_of_the_seed(shards: Path) -> None:
    ds = ps.open(shards)
    with loader(ds) as batches:
        seen = [row for batch in batches for row in batch["cls"].tolist()]
    assert seen == ps.Shuffled(21, 3).rows(0, 0, 21).tolist()
    assert seen != sorted(seen)


def test_resuming_is_invisible(shards: Path) -> None:
    check_resume(lambda: loader(ps.open(shards), batch_size=4, columns=("jpg", "npy", "cls", "__key__")))


@pytest.mark.parametrize("workers", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_workers_of_torchs_own_loader(shards: Path, workers: str) -> None:
    ds = ps.open(shards).cast("jpg", "float32", scale=1 / 255)
    whole = ds[:]
    batches = torch.utils.data.DataLoader(ds, batch_size=4, num_workers=2, multiprocessing_context=workers)
    seen = []
    for batch in batches:
        rows = batch["cls"].numpy()
        assert all(np.array_equal(batch[name].numpy(), whole[name][rows]) for name in whole)
        seen += rows.tolist()
    assert seen == list(range(21))


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The archives whose headers were walked."""
    seen: list[str] = []
    walk = tar_store.walk

    def noted(archive: Any) -> Any:
        seen.append(os.path.basename(archive.file.path))
        return walk(archive)

    monkeypatch.setattr(tar_store, "walk", noted)
    return seen


def test_headers_are_walked_once(shards: Path, tmp_path: Path, walks: list[str]) -> None:
    index = tmp_path / "index"
    first = ps.open(shards, index_dir=index)
    assert walks == ["train-000.tar", "train-001.tar"]
    second = ps.open(shards, index_dir=index)
    assert walks == ["train-000.tar", "train-001.tar"]
    assert first.fingerprint == second.fingerprint
    check_store(lambda: ps.open(shards, index_dir=index).store, first[:])
    assert [second.origin(row) for row in range(21)] == [first.origin(row) for row in range(21)]


def test_no_index_is_kept_where_none_is_wanted(shards: Path, tmp_path: Path, walks: list[str]) -> None:
    for _ in range(2):
        check_store(lambda: ps.open(shards, index_dir=False).store, ps.open(shards)[:])
    assert walks.count("train-000.tar") > 2


def test_a_rewritten_archive_is_walked_again(tmp_path: Path, walks: list[str]) -> None:
    path, index = tmp_path / "a.tar", tmp_path / "index"
    write(path, usual(0, 5))
    os.utime(path, ns=(0, 10**18))
    assert ps.open(path, index_dir=index)[:]["cls"].tolist() == list(range(5))
    write(path, usual(5, 5))  # as long as before
    os.utime(path, ns=(0, 10**18 + 1))
    assert ps.open(path, index_dir=index)[:]["cls"].tolist() == list(range(5, 10))
    write(path, usual(5, 3))
    assert len(ps.open(path, index_dir=index)) == 3
    assert len(walks) == 3
    check_store(lambda: ps.open(path, index_dir=index).store, expected(path))
    assert len(walks) == 3


def test_a_damaged_index_is_made_anew(shards: Path, tmp_path: Path, walks: list[str]) -> None:
    index = tmp_path / "index"
    whole = ps.open(shards, index_dir=index)[:]
    for saved in index.iterdir():
        content = bytearray(saved.read_bytes())
        content[-5] ^= 0xFF
        saved.write_bytes(content)
    again = ps.open(shards, index_dir=index)[:]
    assert len(walks) == 4
    assert all(np.array_equal(again[name], whole[name]) for name in whole)
