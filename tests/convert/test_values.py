"""Texts, JSON, bytes and arrays of unequal length, in every format that can hold them, by that format's own library."""

import json
import tarfile
from io import BytesIO

import h5py
import msgpack
import numpy as np
import pyarrow.parquet
import pytest
import zarr

import lmdb
import penstock as ps
from penstock.conversion.estimate import estimate
from penstock.errors import BudgetExceeded, ConfigError, SchemaMismatch
from penstock.webdataset import TarWriter

# Releases of zarr-python before 3.1 say that texts are not part of the specification.
pytestmark = pytest.mark.filterwarnings("ignore:.*Zarr format 3 specification")

ROWS = 23
VALUES = {
    "text": [f"Straße {row} " * (row % 4) for row in range(ROWS)],
    "json": [{"row": row, "of": [None, "é", 1.5]} for row in range(ROWS)],
    "bytes": [bytes(range(row * 7 % 250)) for row in range(ROWS)],
    "array": [np.arange(row * 3 % 11, dtype="float32") / 3 for row in range(ROWS)],
    "planes": [np.full((row % 3, 2), row, "int16") for row in range(ROWS)],
    "arrays": [{"a": np.arange(row)} for row in range(ROWS)],
    "msgpack": [{"row": row} for row in range(ROWS)],
    "numbers": np.arange(ROWS * 6, dtype="int32").reshape(ROWS, 6),
}
ENDINGS = {"text": "txt", "bytes": "bin", "array": "npy", "planes": "npy", "arrays": "npz", "numbers": "npy"}
DECODERS = {"text": "text", "json": "json", "bytes": "bytes", "array": "array", "planes": "array", "arrays": "arrays"}
DECODERS["msgpack"] = "msgpack"
NUMBERS_AND_TEXTS = {"text", "json", "numbers"}
HOLDS = {
    "out.tar": set(VALUES),
    "out.lmdb": set(VALUES),
    "out.parquet": {"text", "json", "bytes", "array", "numbers"},
    "out.h5": {"text", "json", "bytes", "array", "numbers"},
    "out.zarr": NUMBERS_AND_TEXTS,
    "out.npy": {"numbers"},
}
CASES = [(goal, kind) for goal in HOLDS for kind in VALUES]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("values") / "in.tar"
    with TarWriter(str(path)) as tar:
        for row in range(ROWS):
            sample = {f"{kind}.{ENDINGS.get(kind, kind)}": values[row] for kind, values in VALUES.items()}
            tar.write({"__key__": f"{row:04d}", **sample})
    names = {kind: f"{kind}.{ENDINGS.get(kind, kind)}" for kind in VALUES}
    decoders = {names[kind]: decoder for kind, decoder in DECODERS.items()}
    return ps.open(path, fields=tuple(names.values()), decoders=decoders).rename(**names)


def by_its_library(path, kind):
    """All values of a field, as the format's own library gives them."""
    if path.suffix == ".zarr":
        found = zarr.open_group(str(path), mode="r")[kind][:].tolist()
    elif path.suffix == ".npy":
        return list(np.load(path))
    elif path.suffix == ".h5":
        with h5py.File(path) as file:
            is_text = h5py.check_string_dtype(file[kind].dtype) is not None
            found = list(file[kind].asstr()[:] if is_text else file[kind][:])
            found = [value.tobytes() for value in found] if kind == "bytes" else found
    elif path.suffix == ".parquet":
        found = pyarrow.parquet.read_table(path)[kind].to_pylist()
    else:
        return list(decoded_members(path, kind))
    return [json.loads(value) for value in found] if kind == "json" else found


def members(path):
    """The bytes of each member of a tar, or each value of a database, in order."""
    if path.suffix == ".tar":
        with tarfile.open(path) as archive:
            yield from (archive.extractfile(member).read() for member in archive)
        return
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as database, database.begin() as transaction:
        yield from (bytes(value) for _, value in transaction.cursor())


def decoded_members(path, kind):
    for raw in members(path):
        if kind in ("text", "bytes"):
            yield raw.decode() if kind == "text" else raw
        elif kind == "json":
            yield json.loads(raw)
        elif kind == "msgpack":
            yield msgpack.unpackb(raw)
        else:
            found = np.load(BytesIO(raw))
            yield dict(found) if kind == "arrays" else found


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, dict) and any(isinstance(value, np.ndarray) for value in other.values()):
            assert one.keys() == other.keys()
            np.testing.assert_array_equal(one["a"], other["a"])
        else:
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("goal", "kind"), [case for case in CASES if case[1] in HOLDS[case[0]]])
def test_every_format_that_can_hold_a_field(tmp_path, source, goal, kind):
    path = tmp_path / goal
    options = {"rows_per_chunk": 5} if goal in ("out.zarr", "out.h5") else {}
    ps.convert(source.only(kind), path, executor="serial", **options)
    assert_same(by_its_library(path, kind), VALUES[kind])
    if goal in ("out.tar", "out.lmdb"):
        return  # how members come back is up to the names that they have
    again = ps.open(path)
    (field,) = again.fields
    assert again.fields[field].holds == source.fields[kind].holds
    assert_same(again[:][field], VALUES[kind])


@pytest.mark.parametrize(("goal", "kind"), [case for case in CASES if case[1] not in HOLDS[case[0]]])
def test_a_format_that_cannot_names_those_that_can(tmp_path, source, goal, kind):
    with pytest.raises(ConfigError, match=rf"field '{kind}'.*\.tar"):
        ps.convert(source.only(kind), tmp_path / goal)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"compression": "zstd"}, pytest.param({}, marks=pytest.mark.slow)])
def test_numbers_beside_texts(tmp_path, source, options):
    kinds = ("text", "numbers", "array", "json")
    ps.convert(source.only(*kinds), tmp_path / "out.h5", rows_per_chunk=4, shard_bytes=4000, **options)
    assert ps.verify(tmp_path / "out.h5", manifest=tmp_path / "out.h5.manifest.json").sound
    with ps.Loader(ps.open(tmp_path / "out.h5"), batch_size=4, shuffle=True, memory="64MiB", output="numpy") as loader:
        seen = [
            (text, int(row[0]) // 6)
            for batch in loader
            for text, row in zip(batch["text"], batch["numbers"], strict=True)
        ]
    assert sorted(seen, key=lambda pair: pair[1]) == [(VALUES["text"][row], row) for row in range(ROWS)]


def test_texts_that_hdf5_would_cut(tmp_path):
    with TarWriter(str(tmp_path / "in.tar")) as tar:
        tar.write({"__key__": "0", "txt": "a\0b"})
    ds = ps.open(tmp_path / "in.tar")
    with pytest.raises(SchemaMismatch, match=r"zero byte.*\.zarr, \.parquet or \.tar"):
        ps.convert(ds, tmp_path / "out.h5")
    ps.convert(ds, tmp_path / "out.zarr")
    assert ps.open(tmp_path / "out.zarr")[0] == {"txt": "a\0b"}


def test_arrays_must_be_alike(tmp_path):
    with TarWriter(str(tmp_path / "in.tar")) as tar:
        tar.write({"__key__": "0", "npy": np.arange(3.0)})
        tar.write({"__key__": "1", "npy": np.arange(3)})
    ds = ps.open(tmp_path / "in.tar", decoders={"npy": "array"})
    with pytest.raises(SchemaMismatch, match=r"int64 of shape \(3,\), but the first is float64"):
        ps.convert(ds, tmp_path / "out.h5")


def test_texts_too_large_to_be_held_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.dataset.memory.MOST_BYTES", 100)
    with TarWriter(str(tmp_path / "in.tar")) as tar:
        tar.write({"__key__": "0", "txt": "x" * 200})
    ps.convert(ps.open(tmp_path / "in.tar"), tmp_path / "out.zarr")
    with pytest.raises(ps.errors.LimitExceeded, match=r"no fixed size.*\.tar"):
        ps.open(tmp_path / "out.zarr")


@pytest.mark.parametrize("goal", ["out.zarr", "out.h5", "out.parquet"])
def test_texts_that_a_comparison_holds_count(tmp_path, goal):
    with TarWriter(str(tmp_path / "in.tar")) as tar:
        for row in range(200):
            tar.write({"__key__": f"{row:03d}", "txt": "x" * 50_000})
    ds = ps.open(tmp_path / "in.tar")
    with pytest.raises(BudgetExceeded) as plain:
        ps.convert(ds, tmp_path / goal, memory=1)
    with pytest.raises(BudgetExceeded, match="held in memory") as compared:
        ps.convert(ds, tmp_path / goal, memory=plain.value.smallest_bytes, verify="source")
    assert compared.value.smallest_bytes >= plain.value.smallest_bytes + 2 * 200 * 50_000
    assert [path.name for path in tmp_path.iterdir()] == ["in.tar"]
    done = ps.convert(ds, tmp_path / goal, memory=compared.value.smallest_bytes, verify="source")
    assert done.plan.planned_bytes <= compared.value.smallest_bytes


def test_an_estimate_of_texts(tmp_path, source):
    ps.convert(source.only("text", "numbers"), tmp_path / "in.parquet")
    again = ps.open(tmp_path / "in.parquet")
    kept = {path.name for path in tmp_path.iterdir()}
    planned = ps.convert(again.select(range(ROWS)), tmp_path / "out.h5", dry_run=True)
    found = estimate(again, planned.plan)
    assert found.seconds > 0
    assert found.bytes > VALUES["numbers"].nbytes
    assert {path.name for path in tmp_path.iterdir()} == kept
