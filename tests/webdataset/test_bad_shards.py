"""Shards that are broken or mean harm: each a clear error, or passed over by the handler and counted."""

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest

import penstock.webdataset as wds
from penstock.errors import (
    ConfigError,
    Corrupt,
    DecodeFailed,
    LimitExceeded,
    Missing,
    PenstockError,
    SchemaMismatch,
    Truncated,
    Unsafe,
)

imagecodecs = pytest.importorskip("imagecodecs")

JPEG = imagecodecs.jpeg8_encode(np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8))


class Marker:
    """If it is ever unpickled, a file appears."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def bomb():
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(999))) + chunk(b"IEND", b"")


GOOD = [(f"{number}.{name}", content) for number in range(3) for name, content in (("jpg", JPEG), ("cls", b"1"))]
"""Three samples, six members of 1 + 2 blocks."""


def truncated(data):
    return data[: len(GOOD) * 1024 - 700]


def without_end(data):
    return data[: data.rindex(b"1") // 512 * 512 + 512]


def bad_header(data):
    at = data.index(b"1.cls")
    return data[: at + 100] + b"??????" + data[at + 106 :]


# How a shard of three good samples is spoilt, and what is said: on the first iteration, or when decoded.
SPOILT_BYTES = {
    "cut in a member": (truncated, Truncated, "cut short"),
    "cut after a member": (without_end, Truncated, "no end-of-archive"),
    "a damaged header midway": (bad_header, Corrupt, "header checksum"),
    "empty": (lambda data: b"", Truncated, "no end-of-archive .* 0 are there"),
    "not a tar": (lambda data: b"hello" * 300, Corrupt, "offset 0 .*is not a tar"),
}
SPOILT_MEMBERS = {
    "a repeated field": (("1.cls", b"2"), Corrupt, "has the field 'cls' twice"),
    "an empty picture": (("x.jpg", b""), DecodeFailed, "field 'jpg': a picture of 0 bytes"),
    "a cut picture": (("x.jpg", JPEG[:-30]), DecodeFailed, r"'x', field 'jpg': jpeg of \d+ bytes: .*cut short"),
    "half a picture": (("x.jpg", JPEG[: len(JPEG) // 2]), DecodeFailed, r"jpeg of \d+ bytes"),
    "a text for a picture": (("x.png", b"hello"), DecodeFailed, "5 bytes: not a picture"),
    "a picture of gigabytes": (("x.png", bomb()), LimitExceeded, "50,000 by 50,000 = 2,500,000,000 pixels"),
    "objects in an array": (("x.npy", npy(np.array([Marker("marker")], object))), Unsafe, "Python objects"),
    "an array that lies": (("x.npy", npy(np.zeros(9))[:-20]), DecodeFailed, "declares float64"),
    "pyd": (("x.pyd", pickle.dumps(Marker("marker"))), Unsafe, "'x', field 'pyd': only unpickling"),
    "pickle": (("x.pickle", pickle.dumps(Marker("marker"))), Unsafe, "only unpickling"),
    "pth": (("x.pth", pickle.dumps(Marker("marker"))), Unsafe, "only unpickling"),
    "a number that is none": (("x.cls", b"seven"), DecodeFailed, "invalid literal"),
    "text that is none": (("x.txt", b"\xff\xfe"), DecodeFailed, "'utf-8' codec"),
    "json that is none": (("x.json", b"{"), DecodeFailed, "JSONDecodeError"),
}


def reading(urls, **how):
    how = {"handler": wds.reraise_exception, **how}
    return wds.WebDataset(urls, **how).decode("rgb8", handler=how["handler"])


@pytest.mark.case(1, 2, 3)
@pytest.mark.parametrize("case", SPOILT_BYTES)
def test_spoilt_bytes(write_tar, case):
    spoil, kind, words = SPOILT_BYTES[case]
    path = write_tar("bad.tar", GOOD)
    with open(path, "rb+") as stream:
        data = spoil(stream.read())
        stream.seek(0)
        stream.truncate()
        stream.write(data)
    with pytest.raises(kind, match=rf"bad\.tar[:,] .*{words}"):
        list(reading(path))
    passed_over = reading([path, write_tar("good.tar", GOOD)], handler=wds.ignore_and_continue)
    keys = [sample["__key__"] for sample in passed_over]
    assert keys[-3:] == ["0", "1", "2"]
    assert keys[:-3] == ["0", "1", "2"][: len(keys) - 3]
    assert passed_over.skipped == 1


@pytest.mark.case(5, 6, 7, 17)
@pytest.mark.parametrize("case", SPOILT_MEMBERS)
def test_spoilt_members(write_tar, tmp_path, case, monkeypatch):
    monkeypatch.chdir(tmp_path)
    member, kind, words = SPOILT_MEMBERS[case]
    members = [*GOOD[:4], member, *GOOD[4:]]
    path = write_tar("bad.tar", members)
    with pytest.raises(kind, match=rf"bad\.tar[:,] .*{words}"):
        list(reading(path))
    passed_over = reading(path, handler=wds.ignore_and_continue)
    assert [sample["__key__"] for sample in passed_over] == ["0", "1", "2"]
    assert passed_over.skipped == 1
    assert sorted(os.listdir(tmp_path)) == ["bad.tar"], "nothing was run, nothing was written"


def test_undecoded_bytes_are_nobodys_business(write_tar):
    data = pickle.dumps(Marker("/nowhere/marker"))
    path = write_tar("x.tar", [("a.pyd", data), ("a.cls", b"1")])
    assert next(iter(wds.WebDataset(path)))["pyd"] == data
    assert next(iter(wds.WebDataset(path).decode(only="cls")))["cls"] == 1


@pytest.mark.case(5)
def test_a_missing_field(write_tar):
    path = write_tar("x.tar", [("a.jpg", JPEG), ("a.cls", b"1"), ("b.cls", b"2"), ("c.jpg", JPEG), ("c.cls", b"3")])
    with pytest.raises(SchemaMismatch, match=r"sample 'b' of .*x\.tar: didn't find 'jpg' or 'png'; its fields are cls"):
        list(reading(path).to_tuple("jpg;png", "cls"))
    passed_over = reading(path).to_tuple("jpg;png", "cls", handler=wds.ignore_and_continue)
    assert [label for _, label in passed_over] == [1, 3]
    assert passed_over.skipped == 1
    with pytest.raises(SchemaMismatch, match="different fields"):
        list(reading(path).batched(3))


@pytest.mark.case(16)
def test_names_that_lead_elsewhere(write_tar, tmp_path):
    names = ["../up.txt", "/etc/passwd.txt", "a/../../b.txt", "-rf.txt", "x\ny.txt", "é" * 2000 + ".txt"]
    path = write_tar("x.tar", [(name, b"x") for name in names])
    before = sorted(os.listdir(tmp_path.parent))
    samples = list(wds.WebDataset(path).decode())
    assert [sample["__key__"] + ".txt" for sample in samples] == names
    assert sorted(os.listdir(tmp_path)) == ["x.tar"]
    assert sorted(os.listdir(tmp_path.parent)) == before


def test_a_name_that_is_no_text(write_tar):
    path = write_tar("x.tar", [(b"caf\xe9.txt".decode("utf-8", "surrogateescape"), b"x")], format=1)
    (sample,) = wds.WebDataset(path)
    assert sample["__key__"].encode("utf-8", "surrogateescape") == b"caf\xe9"


@pytest.mark.case(15)
def test_an_empty_shard_among_others(write_tar):
    shards = [write_tar("e.tar", []), write_tar("x.tar", GOOD)]
    assert len(list(reading(shards))) == 3
    with pytest.raises(ConfigError, match="no samples in"):
        list(reading(shards[:1]))


def test_a_missing_shard(write_tar, tmp_path):
    shards = [str(tmp_path / "none.tar"), write_tar("x.tar", GOOD)]
    with pytest.raises(Missing, match="no such file"):
        list(reading(shards))
    passed_over = reading(shards, handler=wds.ignore_and_continue)
    assert len(list(passed_over)) == 3
    assert passed_over.skipped == 1


@pytest.mark.case(18)
@pytest.mark.parametrize("url", ["pipe:touch marker", "pipe: touch marker;", "x.tar::pipe:touch marker"])
@pytest.mark.parametrize("handler", [wds.reraise_exception, wds.ignore_and_continue])
def test_commands(url, handler, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="scheme pipe:"):
        list(wds.WebDataset(url, handler=handler))
    assert os.listdir(tmp_path) == []


WATCH = """
import json, sys
happened = []
WATCHED = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty",
           "pickle.find_class", "marshal.loads", "os.remove", "os.rename", "os.mkdir", "os.symlink")
def watch(event, arguments):
    if event in WATCHED:
        happened.append(event)
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        happened.append(f"open {arguments[0]}")
import penstock.webdataset as wds
import imagecodecs, PIL.Image
PIL.Image.init()
list(wds.WebDataset(sys.argv[1]).decode("rgb8", handler=wds.ignore_and_continue))  # libraries start up
sys.addaudithook(watch)
dataset = wds.WebDataset(sys.argv[2:], handler=wds.ignore_and_continue).decode("rgb8", handler=wds.ignore_and_continue)
keys = [sample["__key__"] for sample in dataset]
for url in ("pipe:touch marker", "|touch marker", "`touch marker`", "; touch marker", "-o/marker"):
    try:
        list(wds.WebDataset(url))
    except Exception as error:
        assert type(error).__module__.startswith("penstock."), error
print(json.dumps({"happened": happened, "keys": keys, "skipped": dataset.skipped}))
"""


@pytest.mark.case(17, 18)
def test_nothing_is_run_and_nothing_is_written(write_tar, tmp_path):
    """Python reports every process that starts, every name that is unpickled, and every file that is opened."""
    pytest.importorskip("PIL")
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n"
    hostile = [*(member for member, *_ in SPOILT_MEMBERS.values()), ("y.jpg", eps), ("z.eps", eps), ("../w.txt", b"x")]
    hostile = [(f"{number}{name[1:] if name[0] != '.' else name}", data) for number, (name, data) in enumerate(hostile)]
    paths = [write_tar("good.tar", GOOD), write_tar("bad.tar", hostile), write_tar("more.tar", GOOD)]
    ran = subprocess.run(
        [sys.executable, "-c", WATCH, paths[0], *paths[1:]], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["happened"] == []
    assert told["keys"][-3:] == ["0", "1", "2"]
    assert told["skipped"] == len(hostile) - 2, "but for a second cls and a text, which are good here"
    assert sorted(os.listdir(tmp_path)) == ["bad.tar", "good.tar", "more.tar"]


def test_every_error_of_a_spoilt_shard_is_one_of_ours(write_tar):
    rng = np.random.default_rng(0)
    path = write_tar("x.tar", [*GOOD, ("3.npy", npy(np.arange(9))), ("3.json", b"[1, 2]"), ("3.txt", b"x")])
    with open(path, "rb") as stream:
        data = stream.read()
    whole = 0
    for _ in range(200):
        spoilt = bytearray(data)
        for place in rng.integers(0, 9 * 1536, 3):
            spoilt[place] = rng.integers(256)
        try:
            whole += len(list(reading(io.BytesIO(bytes(spoilt))))) == 4
        except PenstockError as error:
            assert str(error).startswith(("<stream 0>: ", "<stream 0>, "))  # noqa: PT017
    assert 0 < whole < 200
