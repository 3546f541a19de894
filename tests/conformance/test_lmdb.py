"""LMDB databases, against the lmdb library's own reading of the same files."""

import io
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import lmdb
import penstock as ps
from penstock.files.files import Files
from penstock.files.handles import identify
from penstock.formats.lmdb import pages as lmdb_pages
from penstock.testing import check_store

SAMPLES = 12
DTYPES = ["u1", "<i2", ">i2", "<f4", ">f8", "f2", "c8", "bool"]
SHAPES = [(), (5,), (3, 4), (0, 3), (130, 70)]  # inside a leaf, on pages of their own, beyond what is mapped

Items = Iterable[tuple[bytes, bytes]]


def write(path: Path, items: Items, name: bytes | None = None, subdir: bool = False, **options: Any) -> Path:
    with lmdb.open(str(path), map_size=1 << 28, subdir=subdir, max_dbs=8) as env:
        database = env.open_db(name, **options) if name else None
        with env.begin(write=True, db=database) as transaction:
            for key, value in items:
                transaction.put(key, value)
    return path


def read(path: Path, name: bytes | None = None) -> dict[bytes, bytes]:
    """All that the library finds, in its order."""
    with lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False, max_dbs=8) as env:
        database = env.open_db(name) if name else None
        with env.begin(db=database) as transaction:
            return dict(transaction.cursor())


def npy(values: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def picture(number: int, kind: str = "JPEG") -> bytes:
    smooth = np.cumsum(np.random.default_rng(number).integers(-9, 10, (18, 23, 3)), axis=1)
    stream = io.BytesIO()
    Image.fromarray((smooth + 128).astype(np.uint8)).save(stream, kind)
    return stream.getvalue()


def pixels(value: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(value)).convert("RGB"))


def made(number: int, dtype: str = "<f4", shape: tuple[int, ...] = (3, 4)) -> np.ndarray:
    return np.asarray(np.random.default_rng(number).normal(size=shape) * 50).astype(dtype)


def native(values: np.ndarray) -> np.ndarray:
    return values.astype(values.dtype.newbyteorder("="))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_npy_values(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    path = write(tmp_path / "a.lmdb", ((b"%08d" % n, npy(made(n, dtype, shape))) for n in range(SAMPLES)))
    expected = np.stack([np.load(io.BytesIO(value)) for value in read(path).values()])
    check_store(lambda: ps.open(path).store, {"data": native(expected)})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (3, 4), (130, 70)], ids=str)
def test_plain_bytes(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    path = write(tmp_path / "a.lmdb", ((b"%08d" % n, made(n, dtype, shape).tobytes()) for n in range(SAMPLES)))
    expected = np.stack([np.frombuffer(value, dtype).reshape(shape) for value in read(path).values()])
    check_store(lambda: ps.open(path, decoders={"data": (dtype, shape)}).store, {"data": native(expected)})


def test_plain_bytes_of_a_dtype_are_a_vector_or_one_number(tmp_path: Path) -> None:
    items = [(b"x-%d" % n, made(n, "<f4", (7,)).tobytes()) for n in range(SAMPLES)]
    items += [(b"y-%d" % n, np.int64(n - 5).tobytes()) for n in range(SAMPLES)]
    path = write(tmp_path / "a.lmdb", items)
    expected = {"x": np.stack([made(n, "<f4", (7,)) for n in range(SAMPLES)]), "y": np.arange(SAMPLES) - 5}
    check_store(lambda: ps.open(path, decoders={"x": "float32", "y": "<i8"}).store, expected)


@pytest.mark.parametrize("shape", [(40,), (100, 100)], ids=str)
def test_casts_and_parts(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = write(tmp_path / "a.lmdb", ((b"%08d" % n, npy(made(n, "<i2", shape))) for n in range(SAMPLES)))
    values = np.stack([made(n, "<i2", shape) for n in range(SAMPLES)])
    scaled = values.astype(np.float32) * np.float32(1 / 300)
    check_store(lambda: ps.open(path).cast("data", "float32", scale=1 / 300).delivered, {"data": scaled})
    mask = np.random.default_rng(0).random(shape) < 0.4
    check_store(lambda: ps.open(path).select_within("data", mask).store, {"data": values[:, mask]})


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_pictures_under_any_keys(tmp_path: Path, kind: str) -> None:
    keys = [np.random.default_rng(n).bytes(20).hex().encode() + b"x" for n in range(SAMPLES)]
    path = write(tmp_path / "a.lmdb", ((key, picture(n, kind)) for n, key in enumerate(keys)))
    check_store(lambda: ps.open(path).store, {"image": np.stack([pixels(value) for value in read(path).values()])})
    assert ps.open(path).origin(3).key == sorted(keys)[3].decode()
    assert list(ps.open(path, fields=["photo"]).fields) == ["photo"]


def test_numbered_fields(tmp_path: Path) -> None:
    """As text recognition keeps them, but with numbers for labels."""
    items = [(b"num-samples", b"%d" % SAMPLES)]
    for n in range(1, SAMPLES + 1):
        items += [(b"image-%09d" % n, picture(n)), (b"label-%09d" % n, b"%d" % (n * n))]
    path = write(tmp_path / "lmdb", items, subdir=True)
    images = [pixels(value) for key, value in read(path).items() if key.startswith(b"image")]
    labels = [int(value) for key, value in read(path).items() if key.startswith(b"label")]
    check_store(lambda: ps.open(path).store, {"image": np.stack(images), "label": np.array(labels)})
    assert ps.open(path).origin(4).key == "000000005"
    assert list(ps.open(path, fields=["label"]).fields) == ["label"]


def test_text_comes_in_lists(tmp_path: Path) -> None:
    """The first label looks like a number, and is none."""
    words = ["2024", "naïve", "", "tab\tand\nline", "7"] * 4
    items = [(b"image-%09d" % n, picture(n)) for n in range(20)]
    items += [(b"label-%09d" % n, word.encode()) for n, word in enumerate(words)]
    ds = ps.open(write(tmp_path / "a.lmdb", items))
    assert ds[:]["label"] == words
    with ps.Loader(ds, batch_size=8, memory="64MiB", columns=("image", "label")) as loader:
        assert [word for _, label in loader for word in label] == words
    assert ds["000000003"]["label"] == words[3]


def test_decoders_of_ones_own(tmp_path: Path) -> None:
    path = write(tmp_path / "a.lmdb", ((b"%d" % n, b"%d,%d" % (n, n + 1)) for n in range(11)))
    ds = ps.open(path, fields=["pair"], decoders={"pair": pair})
    assert ds[:]["pair"].tolist() == [[n, n + 1] for n in range(11)]
    assert ps.open(path, decoders={"data": "bytes"})[:]["data"] == [b"%d,%d" % (n, n + 1) for n in range(11)]


def pair(value: bytes) -> np.ndarray:
    return np.array([int(part) for part in value.split(b",")])


def test_pictures_of_several_sizes(tmp_path: Path) -> None:
    sizes = [(18 + n, 23 + 2 * n) for n in range(9)]
    pixels_of = [np.random.default_rng(n).integers(0, 256, (*size, 3), np.uint8) for n, size in enumerate(sizes)]
    items = []
    for n, values in enumerate(pixels_of):
        stream = io.BytesIO()
        Image.fromarray(values).save(stream, "PNG")
        items.append((b"%d" % n, stream.getvalue()))
    path = write(tmp_path / "a.lmdb", items)
    bilinear = Image.Resampling.BILINEAR
    expected = [np.asarray(Image.fromarray(values).resize((20, 16), bilinear)) for values in pixels_of]
    check_store(lambda: ps.open(path, size=(16, 20)).store, {"image": np.stack(expected)})


def test_counted_keys_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.lmdb", [(b"%d" % n, npy(np.array([n]))) for n in range(120)] + [(b"__len__", b"120")])
    check_store(lambda: ps.open(path).store, {"data": np.arange(120)[:, None]})


def test_keys_like_names_of_files(tmp_path: Path) -> None:
    items = [(b"a/%03d.%s" % (n, end), value) for n in range(9) for end, value in parts(n).items()]
    path = write(tmp_path / "a.lmdb", items)
    expected = {
        "cls": np.arange(9),
        "jpg": np.stack([pixels(picture(n)) for n in range(9)]),
        "vec.npy": np.stack([made(n) for n in range(9)]),
    }
    check_store(lambda: ps.open(path).store, expected)


def parts(number: int) -> Mapping[bytes, bytes]:
    return {b"jpg": picture(number), b"cls": b"%d" % number, b"vec.npy": npy(made(number))}


def test_named_databases_are_fields(tmp_path: Path) -> None:
    path = tmp_path / "a.lmdb"
    write(path, ((b"%d" % n, npy(made(n))) for n in range(30)), b"vectors")
    write(path, ((b"%d" % n, b"%d" % (n * n)) for n in range(30)), b"labels")
    write(path, ((b"%d" % n, b"0") for n in range(7)), b"few")
    both = {"labels": np.arange(30) ** 2, "vectors": np.stack([made(n) for n in range(30)])}
    check_store(lambda: ps.open(path, fields=["labels", "vectors"]).store, both)
    check_store(lambda: ps.open(path, fields=["few"]).store, {"few": np.zeros(7, np.int64)})


@pytest.mark.parametrize("width", [4, 8])
def test_whole_numbers_as_keys(tmp_path: Path, width: int) -> None:
    items = [(n.to_bytes(width, "little"), npy(np.float64(n))) for n in (0, 3, 256, 70_000)]
    path = write(tmp_path / "a.lmdb", items, b"numbers", integerkey=True)
    ds = ps.open(path)
    assert ds[:]["numbers"].tolist() == [0, 3, 256, 70_000]
    assert [ds.origin(row).key for row in range(4)] == ["0", "3", "256", "70000"]


def test_several_databases_are_one_dataset(tmp_path: Path) -> None:
    for part in range(3):
        folder = tmp_path / f"part{part}.lmdb"
        write(folder, ((b"%05d" % n, npy(np.array([part, n]))) for n in range(5)), subdir=True)
    expected = np.array([[part, n] for part in range(3) for n in range(5)])
    check_store(lambda: ps.open(tmp_path / "part*.lmdb", max_open_files=1).store, {"data": expected})


@pytest.mark.parametrize("workers", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_in_workers_of_torch(tmp_path: Path, workers: str) -> None:
    path = write(tmp_path / "a.lmdb", ((b"%08d" % n, npy(np.full(600, n))) for n in range(40)))
    ds = ps.open(path)
    ds[3]  # read from before it is sent
    loaded = torch.utils.data.DataLoader(ds, batch_size=4, num_workers=2, multiprocessing_context=workers)
    assert [batch["data"][:, -1].tolist() for batch in loaded] == np.arange(40).reshape(10, 4).tolist()


def test_more_readers_than_a_database_has_room_for(tmp_path: Path) -> None:
    """A library's reader takes a place in the lock file, of which there are 126; ours take none."""
    path = write(tmp_path / "lmdb", ((b"%d" % n, npy(np.array([n]))) for n in range(10)), subdir=True)
    os.remove(path / "lock.mdb")
    (path / "data.mdb").chmod(0o444)
    path.chmod(0o555)
    try:
        datasets = [ps.open(path) for _ in range(200)]
        assert [int(ds[n % 10]["data"][0]) for n, ds in enumerate(datasets)] == [n % 10 for n in range(200)]
        assert sorted(os.listdir(path)) == ["data.mdb"]
    finally:
        path.chmod(0o755)


def test_no_descriptor_stays_open(tmp_path: Path, open_in: Callable[[Path], int]) -> None:
    path = write(tmp_path / "a.lmdb", ((b"%08d" % n, npy(np.full(20_000, n))) for n in range(10)))
    ds = ps.open(path, max_open_files=0)
    assert ds[:]["data"][:, 0].tolist() == list(range(10))
    assert open_in(tmp_path) == 0


def test_the_list_of_keys_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.lmdb", ((b"%08d" % n, npy(np.array([n]))) for n in range(100)))
    first = ps.open(path, index_dir=tmp_path / "index")
    monkeypatch.setattr(lmdb_pages, "walk", lambda *_: pytest.fail("walked again"))
    second = ps.open(path, index_dir=tmp_path / "index")
    assert second[:]["data"].tolist() == first[:]["data"].tolist()
    assert sum(second.store.shared_index.values()) == 0
    monkeypatch.undo()
    write(path, [(b"%08d" % 100, npy(np.array([100])))])
    assert len(ps.open(path, index_dir=tmp_path / "index")) == 101


steps = st.lists(
    st.tuples(
        st.binary(min_size=1, max_size=80),
        st.none() | st.sampled_from([0, 1, 40, 1000, 2020, 2030, 2040, 4080, 4081, 9000]),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_the_walk_finds_what_the_library_finds(tmp_path_factory: pytest.TempPathFactory, steps: list[Any]) -> None:
    """After any puts and deletions, in transactions of their own: every key in order, and every value's bytes."""
    path = tmp_path_factory.mktemp("walk") / "a.lmdb"
    with lmdb.open(str(path), map_size=1 << 26, subdir=False, sync=False) as env:
        for number, (key, size) in enumerate(steps):
            with env.begin(write=True) as transaction:
                if size is None:
                    transaction.delete(key)
                else:
                    transaction.put(key, bytes([number % 256]) * size)
    whole = path.read_bytes()
    with Files().lend(identify(str(path))) as handle:
        table = lmdb_pages.walk(handle)[""]
    places = zip(table.names.raws(), table.offsets.tolist(), table.lengths.tolist(), strict=True)
    assert [(key, whole[begin : begin + size]) for key, begin, size in places] == list(read(path).items())


def test_deep_trees(tmp_path: Path) -> None:
    """Long keys make branches of few children: four levels of 10,000 entries."""
    items = [(b"%05d" % n + b"k" * 400, b"v%d" % n) for n in np.random.default_rng(0).permutation(10_000)]
    path = write(tmp_path / "a.lmdb", items)
    whole = path.read_bytes()
    with Files().lend(identify(str(path))) as handle:
        table = lmdb_pages.walk(handle)[""]
    found = {key: whole[o : o + n] for key, o, n in zip(table.names.raws(), table.offsets, table.lengths, strict=True)}
    assert list(found.items()) == sorted(items)
