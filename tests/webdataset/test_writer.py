"""Shards written, read back by this package, by tarfile and by the peer; whole or not there at all."""

import errno
import gzip
import io
import os
import tarfile

import numpy as np
import pytest

import penstock.webdataset as wds
from penstock.errors import ConfigError, ConvertFailed, Unsafe

imagecodecs = pytest.importorskip("imagecodecs")

PIXELS = np.random.default_rng(0).integers(0, 256, (8, 9, 3), np.uint8)
SMOOTH = np.stack([np.add.outer(np.arange(40), np.arange(50))] * 3, -1).astype(np.uint8)

SAMPLE = {
    "__key__": "a/0001",
    "__url__": "not written",
    "txt": "grüße",
    "cls": 7,
    "id": "12",
    "json": {"a": [1, None]},
    "npy": np.arange(6, dtype=np.float16).reshape(2, 3),
    "left.npy": np.array([3]),
    "npz": {"x": np.arange(3)},
    "ten": [np.ones(2), np.arange(3, dtype=np.int16)],
    "png": PIXELS,
    "grey.png": PIXELS[..., :1] / 255.0,
    "ppm": PIXELS,
    "pgm": PIXELS[..., 0],
    "jpg": SMOOTH,
    "bin": b"\0\1",
    "txt.gz": "packed",
}


def write(path, samples, **options):
    with wds.TarWriter(path, **options) as writer:
        return [writer.write(sample) for sample in samples]


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "x.tar"
    (size,) = write(path, [SAMPLE])
    with tarfile.open(path) as tar:
        members = tar.getmembers()
        assert [member.name for member in members] == sorted(f"a/0001.{name}" for name in SAMPLE if name[0] != "_")
        assert sum(member.size for member in members) == size
        assert {(each.mtime, each.uname, each.gname, each.mode) for each in members} == {
            (0, "bigdata", "bigdata", 0o444)
        }
    (sample,) = wds.WebDataset(str(path)).decode("rgb8")
    assert (sample["txt"], sample["cls"], sample["id"], sample["json"]) == ("grüße", 7, 12, {"a": [1, None]})
    assert sample["npy"].dtype == np.float16
    for name in ("npy", "left.npy", "png", "ppm"):
        assert np.array_equal(sample[name], SAMPLE[name]), name
    assert np.array_equal(sample["npz"]["x"], np.arange(3))
    assert [array.tolist() for array in sample["ten"]] == [[1, 1], [0, 1, 2]]
    assert np.array_equal(sample["pgm"], np.stack([PIXELS[..., 0]] * 3, -1))
    assert abs(sample["grey.png"][..., 0].astype(int) - PIXELS[..., 0]).max() <= 1, "floats are cut, not rounded"
    assert abs(sample["jpg"].astype(int) - SMOOTH).max() <= 3
    assert (sample["bin"], sample["txt.gz"]) == (b"\0\1", "packed")


def test_the_peer_reads_it_equally(tmp_path, peer):
    pytest.importorskip("PIL")
    path = str(tmp_path / "x.tar")
    write(path, [SAMPLE, {**SAMPLE, "__key__": "b" * 150}])
    ours, theirs = wds.WebDataset(path), peer.WebDataset(path, shardshuffle=False)
    assert list(ours) == list(theirs)
    for one, other in zip(ours.decode("rgb8"), theirs.decode("rgb8"), strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_equal(one[name], other[name])


def test_what_the_peer_writes_is_read_equally(tmp_path, peer):
    pytest.importorskip("PIL")
    writable = {name: value for name, value in SAMPLE.items() if name not in ("pgm", "grey.png")}
    with peer.ShardWriter(f"{tmp_path}/x-%03d.tar", maxcount=2, verbose=0) as writer:
        for number in range(5):
            writer.write({**writable, "__key__": f"{number}"})
    urls = f"{tmp_path}/x-{{000..002}}.tar"
    ours, theirs = wds.WebDataset(urls), peer.WebDataset(urls, shardshuffle=False)
    assert list(ours) == list(theirs)
    assert len(list(ours)) == 5


def test_encoded_fields_are_the_peers_bytes(tmp_path, peer):
    fields = {name: SAMPLE[name] for name in ("txt", "cls", "id", "json", "npy", "ten", "bin")}
    write(tmp_path / "ours.tar", [{"__key__": "a", **fields}])
    with peer.TarWriter(str(tmp_path / "theirs.tar")) as writer:
        writer.write({"__key__": "a", **fields})
    found = []
    for name in ("ours", "theirs"):
        (sample,) = wds.WebDataset(f"{tmp_path}/{name}.tar")
        found.append({key: value for key, value in sample.items() if not key.startswith("__")})
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["x.tar", "x.tgz", "x.tar.gz", "x.tar.bz2", "x.tar.xz"])
def test_the_same_samples_make_the_same_bytes(tmp_path, name):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / name, [SAMPLE])
    one, two = ((tmp_path / folder / name).read_bytes() for folder in ("one", "two"))
    assert one == two
    assert len(list(wds.WebDataset(str(tmp_path / "one" / name)))) == 1
    with tarfile.open(tmp_path / "one" / name) as tar:
        assert len(tar.getmembers()) == len(SAMPLE) - 2


def test_records_are_whole(tmp_path):
    write(tmp_path / "x.tar", [SAMPLE])
    assert (tmp_path / "x.tar").stat().st_size % 10240 == 0


def test_compression_as_asked(tmp_path):
    for compress, packed in ((True, True), ("gz", True), (False, False), (None, True)):
        write(tmp_path / "x.tgz", [SAMPLE], compress=compress)
        assert (tmp_path / "x.tgz").read_bytes().startswith(b"\x1f\x8b") == packed
    with pytest.raises(ConfigError, match="compress='rar'"):
        write(tmp_path / "y.tar", [SAMPLE], compress="rar")
    assert not list(tmp_path.glob("y.tar*"))


def test_to_a_file_object(tmp_path):
    stream = io.BytesIO()
    write(stream, [SAMPLE], compress=True)
    assert not stream.closed
    assert len(list(wds.WebDataset(io.BytesIO(stream.getvalue())))) == 1


def test_who_and_when():
    stream = io.BytesIO()
    write(stream, [{"__key__": "a", "txt": "x"}], user="me", group="us", mode=0o600, mtime=123.0)
    with tarfile.open(fileobj=io.BytesIO(stream.getvalue())) as tar:
        (member,) = tar
    assert (member.uname, member.gname, member.mode, member.mtime) == ("me", "us", 0o600, 123)
    write(stream := io.BytesIO(), [{"__key__": "a", "txt": "x"}], mtime=None)
    with tarfile.open(fileobj=io.BytesIO(stream.getvalue())) as tar:
        assert tar.getmembers()[0].mtime > 1_600_000_000


def test_long_and_foreign_names(tmp_path):
    keys = ["x" * 300, "ü/é", "a" * 90 + "/" + "b" * 90, "../up", "-dash"]
    write(tmp_path / "x.tar", [{"__key__": key, "txt": key} for key in keys])
    assert [sample["__key__"] for sample in wds.WebDataset(str(tmp_path / "x.tar"))] == keys
    assert sorted(os.listdir(tmp_path)) == ["x.tar"], "names are not paths"


def test_meta_fields():
    stream = io.BytesIO()
    write(stream, [{"__key__": "a", "__note__": "x", "txt": "y"}], keep_meta=True)
    with tarfile.open(fileobj=io.BytesIO(stream.getvalue())) as tar:
        assert tar.getnames() == ["a.__note__", "a.txt"]


def test_encoders():
    def written(sample, **options):
        stream = io.BytesIO()
        write(stream, [{"__key__": "a", **sample}], **options)
        (found,) = wds.WebDataset(io.BytesIO(stream.getvalue()))
        return {name: value for name, value in found.items() if not name.startswith("__")}

    assert written({"bin": b"1"}, encoder=False) == {"bin": b"1"}
    assert written({"foo": 3}, encoder={"foo": lambda value: b"%d" % value}) == {"foo": b"3"}
    assert written({"foo": 3}, encoder=lambda sample: {"__key__": "b", "bar": b"x"}) == {"bar": b"x"}
    assert written({"json.gz": {"a": 1}})["json.gz"] == gzip.compress(b'{"a": 1}', mtime=0)
    assert written({"bin": memoryview(np.arange(2, dtype=np.uint8)), "b": bytearray(b"x")}) == {
        "bin": b"\0\1",
        "b": b"x",
    }
    pytest.importorskip("msgpack")
    assert written({"mp": [1]}) == {"mp": b"\x91\x01"}


def test_pictures_of_pillow():
    image = pytest.importorskip("PIL.Image").fromarray(PIXELS)
    stream = io.BytesIO()
    write(stream, [{"__key__": "a", "png": image, "tif": PIXELS}])
    (sample,) = wds.WebDataset(io.BytesIO(stream.getvalue())).decode("rgb8")
    assert np.array_equal(sample["png"], PIXELS)
    assert np.array_equal(sample["tif"], PIXELS)


REFUSED = {
    "no key": ({"txt": "x"}, ConfigError, "needs a __key__"),
    "an unknown kind": ({"__key__": "a", "foo": 3}, ConfigError, "field 'foo': no encoder for .foo of int"),
    "a pickle": ({"__key__": "a", "pyd": [1]}, Unsafe, "only pickle could write"),
    "objects": ({"__key__": "a", "npy": np.array([None])}, Unsafe, "Python objects"),
    "loud floats": ({"__key__": "a", "png": PIXELS * 1.0}, ConfigError, "values from 0 to 1"),
    "no picture": ({"__key__": "a", "jpg": np.zeros((2, 2, 2), np.uint8)}, ConfigError, "a picture is"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused_leaves_no_shard(tmp_path, reason):
    sample, kind, words = REFUSED[reason]
    with pytest.raises(kind, match=words):
        write(tmp_path / "x.tar", [{"__key__": "fine", "txt": "x"}, sample])
    assert os.listdir(tmp_path) == []


def test_values_that_are_not_bytes():
    with pytest.raises(ConfigError, match="field 'a': expected bytes after encoding, got int"):
        write(io.BytesIO(), [{"__key__": "x", "a": 1}], encoder=False)
    with pytest.raises(ConfigError, match="encoder=7"):
        wds.TarWriter(io.BytesIO(), encoder=7)


def test_keys_with_dots_are_warned_of_once():
    with pytest.warns(UserWarning, match=r"key 'v1\.5': a sample's name ends at its first dot") as caught:
        write(io.BytesIO(), [{"__key__": "v1.5", "txt": "x"}, {"__key__": "v1.6", "txt": "x"}])
    assert len(caught) == 1


def test_a_shard_appears_when_it_is_whole(tmp_path):
    writer = wds.TarWriter(tmp_path / "x.tar")
    writer.write(SAMPLE)
    (beside,) = os.listdir(tmp_path)
    assert beside.startswith("x.tar.")
    assert beside.endswith(".partial")
    writer.close()
    writer.close()
    assert os.listdir(tmp_path) == ["x.tar"]
    with pytest.raises(ConfigError, match="was closed"):
        writer.write(SAMPLE)


def test_an_older_shard_stays_until_then(tmp_path):
    write(tmp_path / "x.tar", [{"__key__": "old", "txt": "x"}])
    with pytest.raises(ConfigError):
        write(tmp_path / "x.tar", [{"__key__": "new", "txt": "x"}, {"no key": "x"}])
    assert [sample["__key__"] for sample in wds.WebDataset(str(tmp_path / "x.tar"))] == ["old"]


def test_a_full_disk():
    class Full(io.BytesIO):
        def write(self, data):
            if self.tell() > 2000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    with pytest.raises(ConvertFailed, match=r"after 2,\d+ bytes .*No space left"):
        write(Full(), [SAMPLE])


def test_commands_and_places_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigError, match="commands are not run"):
        wds.TarWriter(f"pipe:cat > {tmp_path}/x.tar")
    with pytest.raises(ConvertFailed, match="cannot be written"):
        wds.TarWriter(tmp_path / "nowhere" / "x.tar")
    assert os.listdir(tmp_path) == []


# Several shards.


def numbers(count, size=0):
    return [{"__key__": f"{number:04d}", "cls": number, "bin": bytes(size)} for number in range(count)]


def shards(tmp_path, samples, **options):
    done = []
    with wds.ShardWriter(f"{tmp_path}/x-%03d.tar", post=done.append, **options) as writer:
        for sample in samples:
            writer.write(sample)
    return [os.path.basename(each) for each in done]


def test_shards_by_count(tmp_path):
    assert shards(tmp_path, numbers(7), maxcount=3) == ["x-000.tar", "x-001.tar", "x-002.tar"]
    counts = [len(list(wds.WebDataset(f"{tmp_path}/x-00{shard}.tar"))) for shard in range(3)]
    assert counts == [3, 3, 1]
    everything = wds.WebDataset(f"{tmp_path}/x-{{000..002}}.tar").decode()
    assert [sample["cls"] for sample in everything] == list(range(7))


def test_shards_by_size(tmp_path, peer):
    ours = shards(tmp_path, numbers(10, size=1000), maxsize=2500, start_shard=5)
    assert ours == ["x-005.tar", "x-006.tar", "x-007.tar", "x-008.tar"]
    theirs = []
    pattern = f"{tmp_path}/y-%03d.tar"
    with peer.ShardWriter(pattern, maxsize=2500, start_shard=5, post=theirs.append, verbose=0) as writer:
        for sample in numbers(10, size=1000):
            writer.write(sample)
    assert [each.replace("y-", "x-") for each in map(os.path.basename, theirs)] == ours
    for name in ours:
        ourselves, them = (list(wds.WebDataset(f"{tmp_path}/{each}")) for each in (name, name.replace("x-", "y-")))
        assert [each["__key__"] for each in ourselves] == [each["__key__"] for each in them]


def test_what_fails_leaves_whole_shards_only(tmp_path):
    with pytest.raises(ConfigError, match="no encoder for"):
        shards(tmp_path, [*numbers(5), {"__key__": "bad", "foo": 1}], maxcount=2)
    assert sorted(os.listdir(tmp_path)) == ["x-000.tar", "x-001.tar"]


def test_an_opener_and_options(tmp_path):
    streams = {}

    def opener(name):
        streams[name] = io.BytesIO()
        return streams[name]

    with wds.ShardWriter("s-%d.tar", maxcount=1, opener=opener, encoder=False, mtime=9) as writer:
        writer.write({"__key__": "a", "x": b"1"})
        writer.write({"__key__": "b", "x": b"2"})
    assert list(streams) == ["s-0.tar", "s-1.tar"]
    assert len(list(wds.WebDataset([io.BytesIO(each.getvalue()) for each in streams.values()]))) == 2


def test_a_pattern_without_a_number():
    for pattern in ("x.tar", "x-%s-%d.tar"):
        with pytest.raises(ConfigError, match=r"'train-%06d\.tar'"):
            wds.ShardWriter(pattern)


def test_no_samples_make_no_shard(tmp_path):
    assert shards(tmp_path, []) == []
    assert os.listdir(tmp_path) == []


def test_the_index_is_made_on_the_way(tmp_path, monkeypatch):
    import penstock
    from penstock.formats.tar import store as tar_store
    from penstock.formats.tar.samples import group

    with wds.ShardWriter(str(tmp_path / "s-%02d.tar"), maxcount=7, index_dir=tmp_path / "index") as writer:
        for number in range(20):
            writer.write({"__key__": f"{'long/' * (number % 3 * 20)}{number:04d}", "txt": "x" * number, "cls": number})
    walked = [group(tar_store.walk(str(path))) for path in sorted(tmp_path.glob("*.tar"))]
    monkeypatch.setattr(tar_store, "walk", lambda path: pytest.fail(f"{path} was walked through"))
    ds = penstock.open(tmp_path / "s-*.tar", index_dir=tmp_path / "index")
    assert ds[:]["cls"].tolist() == list(range(20))
    assert ds[:]["txt"] == ["x" * number for number in range(20)]
    assert list(ds.keys) == [key for table in walked for key in table.keys]


def test_no_index_where_none_is_wanted(tmp_path):
    with wds.TarWriter(str(tmp_path / "a.tar"), index_dir=False) as writer:
        writer.write({"__key__": "a", "txt": "b"})
    with wds.TarWriter(str(tmp_path / "a.tar.gz"), index_dir=tmp_path / "index") as writer:
        writer.write({"__key__": "a", "txt": "b"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "a.tar.gz"]
