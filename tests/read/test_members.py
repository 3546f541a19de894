"""Members of a sample that lie together are read with one request of the file."""

import io
import os
import tarfile
from dataclasses import replace

import numpy as np
import pytest

import penstock as ps
from penstock.base.spec import Cast
from penstock.dataset.rewrite import cast_fields
from penstock.read.members import MOST_BYTES
from penstock.webdataset import TarWriter

pytestmark = pytest.mark.skipif(not hasattr(os, "preadv"), reason="reads are counted by that call")


@pytest.fixture
def requests(monkeypatch):
    """Where and how much was read."""
    made, read = [], os.preadv

    def counted(descriptor, views, offset):
        made.append((offset, sum(map(len, views))))
        return read(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", counted)
    return made


def written(path, samples=3, **more):
    """Arrays a, b and c, and whatever lies between."""
    rng = np.random.default_rng(0)
    content = [
        {"a.npy": rng.random(3), "c.npy": rng.integers(0, 9, (2, 2)), "e.npy": rng.random(20_000).astype("f4"), **more}
        for _ in range(samples)
    ]
    with TarWriter(str(path)) as writer:
        for number, fields in enumerate(content):
            writer.write({"__key__": f"{number:03d}", **dict(sorted(fields.items()))})
    return content


def read(path, rows, fields):
    store = ps.open(path, fields=fields).store
    out = {name: np.zeros((len(rows), *spec.shape), spec.dtype) for name, spec in store.fields.items()}
    store.read(np.array(rows), np.arange(len(rows)), out, (0, 1))
    return out


def check(out, content, rows):
    for name, values in out.items():
        assert np.array_equal(values, np.stack([content[row][name] for row in rows]))


def test_one_request_a_sample(tmp_path, requests):
    content = written(tmp_path / "x.tar")
    fields = ("e.npy", "a.npy", "c.npy")
    check(read(tmp_path / "x.tar", [2, 0], fields), content, [2, 0])
    first_of_each_field, samples = requests[:3], requests[3:]
    assert len(samples) == 2, requests
    assert all(size > sum(seen for _, seen in first_of_each_field) for _, size in samples)


def test_not_where_something_lies_between(tmp_path, requests):
    content = written(tmp_path / "x.tar", **{"d.npy": np.zeros(5_000)})
    requests.clear()
    check(read(tmp_path / "x.tar", [1], ("a.npy", "c.npy", "e.npy")), content, [1])
    assert max(size for _, size in requests) < 80_000 + 1024


def test_arrays_of_any_size_go_straight_into_the_batch(tmp_path, requests):
    content = written(tmp_path / "x.tar", **{"f.npy": np.arange(MOST_BYTES // 8)})
    requests.clear()
    check(read(tmp_path / "x.tar", [1], ("e.npy", "f.npy")), content, [1])
    assert requests[-1][1] > MOST_BYTES + 80_000


def test_not_where_much_must_be_decoded(tmp_path, requests):
    content = written(tmp_path / "x.tar", **{"f.npy": np.arange(MOST_BYTES // 8)})
    whole = ps.open(tmp_path / "x.tar", fields=("e.npy", "f.npy")).store
    store = cast_fields(whole, {"f.npy": Cast(np.dtype("float32"))})
    requests.clear()
    out = {name: np.zeros((1, *spec.shape), spec.dtype) for name, spec in store.fields.items()}
    store.read(np.array([1]), np.array([0]), out, (0, 1))
    check(out, content, [1])
    assert max(size for _, size in requests) < MOST_BYTES + 1024


def test_an_array_behind_another_header_is_read_all_the_same(tmp_path):
    """The same numbers with a header that is padded otherwise, as another program may write it."""
    rng = np.random.default_rng(1)
    values = {name: rng.random((2, 300)) for name in ("a", "b")}
    plain = io.BytesIO()
    np.save(plain, values["a"][0])
    padded = plain.getvalue()[:8] + b"\xb6\x00" + plain.getvalue()[10:127] + b" " * 64 + b"\n" + plain.getvalue()[128:]
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for row in range(2):
            for name in ("a", "b"):
                buffer = io.BytesIO()
                np.save(buffer, values[name][row])
                data = buffer.getvalue()
                if (row, name) == (1, "a"):
                    np.testing.assert_array_equal(np.load(io.BytesIO(padded)), values["a"][0])
                    data = padded
                member = tarfile.TarInfo(f"{row:03d}.{name}.npy")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    out = read(tmp_path / "x.tar", [1, 0], ("a.npy", "b.npy"))
    np.testing.assert_array_equal(out["a.npy"], values["a"][[0, 0]])
    np.testing.assert_array_equal(out["b.npy"], values["b"][[1, 0]])


def test_another_array_of_the_same_size_is_an_error(tmp_path):
    """Its bytes would fit."""
    with TarWriter(str(tmp_path / "x.tar")) as writer:
        writer.write({"__key__": "000", "a.npy": np.zeros((2, 3)), "b.npy": np.zeros(3)})
        writer.write({"__key__": "001", "a.npy": np.zeros((3, 2)), "b.npy": np.zeros(3)})
    with pytest.raises(ps.errors.SchemaMismatch, match=r"001.*\(3, 2\).*\(2, 3\)"):
        read(tmp_path / "x.tar", [1], ("a.npy", "b.npy"))


def test_many_rows_of_small_fields_are_gathered(tmp_path):
    content = written(tmp_path / "x.tar", samples=9)
    rows = [8, 0, 3, 5, 5, 1]
    check(read(tmp_path / "x.tar", rows, ("a.npy", "c.npy", "e.npy")), content, rows)


def test_gaps_are_not_counted_as_read(tmp_path):
    written(tmp_path / "x.tar", samples=12)
    ds = ps.open(tmp_path / "x.tar")
    with ps.Loader(ds, batch_size=2, memory="64MiB", threads=1) as loader:
        for _ in loader:
            pass
        assert loader.stats().bytes_read == sum(path.stored_bytes for path in ds.store.read_paths())


def test_members_that_share_their_bytes(tmp_path):
    """Two names of one file, as a link makes them, and a third behind: each is read where it lies."""
    with TarWriter(str(tmp_path / "x.tar")) as writer:
        writer.write({"__key__": "000", **{f"{name}.raw": name.encode() * 100 for name in "abe"}})
    store = ps.open(tmp_path / "x.tar", decoders={"raw": "uint8"}).store
    a, b = (store._adjacent._fields[f"{name}.raw"] for name in "ab")
    b.offsets = a.offsets
    b.reader.array = replace(b.reader.array, offsets=a.offsets)
    out = {name: np.zeros((1, *spec.shape), spec.dtype) for name, spec in store.fields.items()}
    store.read_into(np.array([0]), np.array([0]), out)
    assert [bytes(out[f"{name}.raw"][0]) for name in "abe"] == [name.encode() * 100 for name in "aae"]
