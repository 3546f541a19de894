"""LMDB databases that are cut, damaged, ragged or hostile: an error that says where, and nothing but the bad lost."""

import io
import pickle
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lmdb
import penstock as ps
from penstock.errors import (
    Changed,
    ConfigError,
    Corrupt,
    DataError,
    DecodeFailed,
    Missing,
    PenstockError,
    SchemaMismatch,
    Truncated,
    Unsafe,
)
from penstock.files.files import Files
from penstock.files.handles import identify
from penstock.formats.lmdb import pages as lmdb_pages

SAMPLES = 20
PAGE = 4096


def npy(values: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def write(path: Path, items: Iterable[tuple[bytes, bytes]], **options: Any) -> Path:
    with lmdb.open(str(path), map_size=1 << 26, subdir=False, max_dbs=4) as env:
        database = env.open_db(b"inner", **options) if options else None
        with env.begin(write=True, db=database) as transaction:
            for key, value in items:
                transaction.put(key, value)
    return path


def usual(path: Path, size: int = 100, **others: bytes) -> Path:
    """Arrays of doubles under counted keys; ``others`` takes the place of some."""
    values = {b"k%04d" % n: npy(np.full(size, float(n))) for n in range(SAMPLES)}
    values |= {key.encode(): value for key, value in others.items()}
    return write(path, values.items())


def changed(path: Path, at: int, bytes_: bytes) -> Path:
    whole = bytearray(path.read_bytes())
    whole[at : at + len(bytes_)] = bytes_
    path.write_bytes(whole)
    return path


def root(path: Path) -> int:
    """Where the first page of the newer tree lies."""
    whole = path.read_bytes()
    metas = [(struct.unpack_from("<Q", whole, page + 144)[0], page) for page in (0, PAGE)]
    return struct.unpack_from("<Q", whole, max(metas)[1] + 88 + 40)[0] * PAGE


def newer_meta(path: Path) -> int:
    whole = path.read_bytes()
    return max((0, PAGE), key=lambda page: struct.unpack_from("<Q", whole, page + 144)[0])


def opened(path: Path, **options: Any) -> ps.Dataset:
    return ps.open(path, index_dir=False, **options)


@pytest.mark.case(10)
@pytest.mark.parametrize("size", [0, 1, 100, 5000, 2 * PAGE, 3 * PAGE, 10 * PAGE])
def test_cut_short(tmp_path: Path, size: int) -> None:
    path = usual(tmp_path / "a.lmdb", 3000)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises((Truncated, Corrupt), match=r"a\.lmdb"):
        opened(path)


def test_a_value_beyond_the_end_is_named(tmp_path: Path) -> None:
    path = usual(tmp_path / "a.lmdb", 3000)
    whole = path.read_bytes()
    with pytest.raises(Truncated, match=r"a\.lmdb: the value of key 'k0019', 24,128 bytes at offset .*fetch it again"):
        opened(Path(tmp_path / "a.lmdb", path.write_bytes(whole[: len(whole) - 2 * PAGE]) and ""))


BAD_TREES: dict[str, tuple[Callable[[Path], int], bytes]] = {
    "another page's number": (lambda path: root(path), b"\x07"),
    "another kind of page": (lambda path: root(path) + 10, b"\x04"),
    "no entries in a page": (lambda path: root(path) + 12, struct.pack("<H", 16)),
    "more entries than fit": (lambda path: root(path) + 12, struct.pack("<H", 5000)),
    "an entry outside its page": (lambda path: root(path) + 16, struct.pack("<H", 4092)),
    "an entry among the pointers": (lambda path: root(path) + 16, struct.pack("<H", 6)),
    "a root that is not there": (lambda path: newer_meta(path) + 88 + 40, struct.pack("<Q", 10**9)),
    "a root that is a meta page": (lambda path: newer_meta(path) + 88 + 40, struct.pack("<Q", 1)),
    "more entries than there are": (lambda path: newer_meta(path) + 88 + 32, struct.pack("<Q", SAMPLES + 1)),
    "more leaves than there are": (lambda path: newer_meta(path) + 88 + 16, struct.pack("<Q", 10**12)),
    "another depth": (lambda path: newer_meta(path) + 88 + 6, struct.pack("<H", 9)),
    "pages of an odd size": (lambda path: 40, struct.pack("<I", 4000)),
}


@pytest.mark.parametrize("what", BAD_TREES)
def test_damaged_trees(tmp_path: Path, what: str) -> None:
    path = usual(tmp_path / "a.lmdb")
    at, bytes_ = BAD_TREES[what]
    with pytest.raises((Corrupt, Truncated), match=r"a\.lmdb.*(damaged|cut short|power of two).*fetch it again"):
        opened(changed(path, at(path), bytes_))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return usual(tmp_path_factory.mktemp("small") / "small.lmdb", 10)


# Where pages have their headers, their pointers and the last of their nodes.
places = st.builds(lambda page, at: page * PAGE + at % PAGE, st.integers(0, 4), st.integers(-600, 160))


@settings(max_examples=100, deadline=None)
@given(places, st.integers(1, 255), st.integers(1, 8))
@example(PAGE + 135, 255, 1)  # a root beyond 63 bits
def test_no_damage_gives_anything_but_our_errors(small: Path, at: int, bits: int, count: int) -> None:
    whole = bytearray(small.read_bytes())
    for place in range(at, min(len(whole), at + count)):
        whole[place] ^= bits
    copy = small.with_name("damaged.lmdb")
    copy.write_bytes(whole)
    try:
        with Files().lend(identify(str(copy))) as handle:
            found = lmdb_pages.walk(handle)
        assert all((table.offsets + table.lengths <= len(whole)).all() for table in found.values())
        opened(copy)[:]
    except PenstockError:
        pass


@pytest.mark.case(17)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickles_are_refused(tmp_path: Path, protocol: int) -> None:
    items = [(b"%d" % n, pickle.dumps({"x": n}, protocol)) for n in range(5)]
    with pytest.raises(Unsafe, match=r"0 at offset [0-9,]+: a pickled Python object .*runs code from the file"):
        opened(write(tmp_path / "a.lmdb", items))


def test_arrays_of_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsafe, match=r"k0000 at offset [0-9,]+: npy of Python objects"):
        opened(usual(tmp_path / "a.lmdb", k0000=npy(np.array([{}]))))


def test_several_values_under_a_key(tmp_path: Path) -> None:
    items = [(b"a", b"1"), (b"b", b"2"), (b"b", b"3")]
    with pytest.raises(SchemaMismatch, match="key 'b' of database 'inner' has several values"):
        opened(write(tmp_path / "a.lmdb", items, dupsort=True))


@pytest.mark.parametrize(("at", "bytes_"), [(20, b"\x02\0\0\0"), (16, lmdb_pages.MAGIC[::-1])])
def test_other_versions_are_named(tmp_path: Path, at: int, bytes_: bytes) -> None:
    path = usual(tmp_path / "a.lmdb")
    changed(path, at, bytes_)
    with pytest.raises(SchemaMismatch, match="expected version 1: copy it with mdb_dump"):
        opened(path)


def test_empty(tmp_path: Path) -> None:
    with pytest.raises(Missing, match="without samples"):
        opened(write(tmp_path / "a.lmdb", []))


def test_not_a_database(tmp_path: Path) -> None:
    (tmp_path / "a.lmdb").write_bytes(b"something else" * 1000)
    with pytest.raises(Corrupt, match="not an LMDB database"):
        opened(tmp_path / "a.lmdb")


BAD_VALUES: list[tuple[bytes, type[DataError], str]] = [
    (npy(np.full(99, 1.0)), SchemaMismatch, r"is float64 of shape \(99,\), but the first sample's is .*\(100,\)"),
    (npy(np.full(100, 1, np.int64)), SchemaMismatch, "is int64"),
    (npy(np.full(100, 1.0))[:-8], Corrupt, "in a member of 920"),
    (b"", DecodeFailed, "not a whole npy header"),
    (b"\x93NUMPY\x01\x00\x76\x00" + b"x" * 918, DecodeFailed, "not a whole npy header"),
]


@pytest.mark.parametrize("number", range(len(BAD_VALUES)))
def test_values_unlike_the_first(tmp_path: Path, number: int) -> None:
    value, error, words = BAD_VALUES[number]
    ds = opened(usual(tmp_path / "a.lmdb", k0006=value))
    with pytest.raises(error, match=rf"a\.lmdb: k0006 at offset [0-9,]+ of {len(value):,} bytes: .*{words}"):
        ds[:]
    good = [row for row in range(SAMPLES) if row != 6]
    assert ds[good]["k"][:, 0].tolist() == good
    with ps.Loader(ds, batch_size=5, memory="64MiB", on_error="skip", output="numpy") as loader:
        assert [row for batch in loader for row in batch["k"][:, 0].tolist()] == good
        assert loader.stats().left_out_samples == 1


def test_plain_bytes_of_another_size(tmp_path: Path) -> None:
    items = {b"%d" % n: bytes(40) for n in range(SAMPLES)} | {b"6": bytes(36)}
    path = write(tmp_path / "a.lmdb", items.items())
    with pytest.raises(SchemaMismatch, match=r"6 at offset .* 36 bytes, but float32 of shape \(10,\) takes 40"):
        opened(path, decoders={"data": "float32"})[:]
    with pytest.raises(SchemaMismatch, match=r"40 bytes, but float32 of shape \(3, 4\) takes 48"):
        opened(path, decoders={"data": ("float32", (3, 4))})
    with pytest.raises(SchemaMismatch, match="40 bytes, which is not a whole number of complex128"):
        opened(path, decoders={"data": "complex128"})


@pytest.mark.parametrize("given", ["no such thing", ("float32", "x"), "S4", object()])
def test_declarations_that_cannot_be_meant(tmp_path: Path, given: Any) -> None:
    path = write(tmp_path / "a.lmdb", [(b"a", bytes(40))])
    with pytest.raises(ConfigError, match=r"decoders: no decoder .*its dtype and shape"):
        opened(path, decoders={"data": given})


def test_bytes_that_nobody_declared(tmp_path: Path) -> None:
    path = write(tmp_path / "a.lmdb", [(b"a", b"\x01\x02" * 20)])
    with pytest.raises(SchemaMismatch, match=r"a at offset [0-9,]+: neither .*40 bytes.*decoders=\{'data'"):
        opened(path)


def test_fields_that_some_samples_lack(tmp_path: Path) -> None:
    items = {b"x-%d" % n: npy(np.array([n])) for n in range(SAMPLES)} | {b"y-%d" % n: b"%d" % n for n in range(SAMPLES)}
    del items[b"y-6"], items[b"y-9"]
    path = write(tmp_path / "a.lmdb", items.items())
    with pytest.raises(SchemaMismatch, match=r"sample '6' has no 'y' \(it has x-\*\), and 1 others"):
        opened(path)
    assert opened(path, fields=["x"])[:]["x"][:, 0].tolist() == list(range(SAMPLES))
    with ps.Loader(
        opened(path, on_error="skip"), batch_size=5, memory="64MiB", on_error="skip", output="numpy"
    ) as loader:
        kept = [row for batch in loader for row in batch["y"].tolist()]
    assert kept == [row for row in range(SAMPLES) if row not in (6, 9)]


def test_fields_that_are_not_there(tmp_path: Path) -> None:
    path = write(tmp_path / "a.lmdb", [(b"x-1", b"1"), (b"y-1", b"2")])
    with pytest.raises(Missing, match="no field 'z'; its keys make 'x', 'y'"):
        opened(path, fields=["z"])


def test_databases_with_other_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.lmdb"
    with lmdb.open(str(path), map_size=1 << 26, subdir=False, max_dbs=4) as env:
        for name, count in ((b"train", 7), (b"test", 3)):
            with env.begin(write=True, db=env.open_db(name)) as transaction:
                for n in range(count):
                    transaction.put(b"%d" % n, b"%d" % n)
    with pytest.raises(SchemaMismatch, match=r"'test' \(3 keys\), 'train' \(7 keys\).*fields=\('test',\)"):
        opened(path)
    assert len(opened(path, fields=["train"])) == 7
    with pytest.raises(Missing, match="no database 'val'; it has 'test', 'train'"):
        opened(path, fields=["val"])


@pytest.mark.case(10)
@pytest.mark.parametrize("size", [100, 20_000], ids=["mapped", "read"])
def test_written_to_while_it_is_read(tmp_path: Path, size: int) -> None:
    path = usual(tmp_path / "a.lmdb", size)
    ds = opened(path)
    assert float(ds[3]["k"][0]) == 3
    usual(path, size, k0003=npy(np.full(size, -1.0)))
    ds.store.close()
    with pytest.raises(Changed, match=r"a\.lmdb: the file was rewritten"):
        ds[3]
