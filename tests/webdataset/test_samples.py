"""Members grouped into samples, compared with the package whose convention it is."""

import http.server
import io
import re
import sys
import threading
import urllib.request

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import penstock.webdataset as wds
from penstock.errors import ConfigError, Corrupt, LimitExceeded, Missing, Truncated, Unavailable
from penstock.formats.tar.samples import split_name

SPLITS = {
    "a.jpg": ("a", "jpg"),
    "a.nsdgeneral.npy": ("a", "nsdgeneral.npy"),
    "train/a.b.JPG": ("train/a", "b.JPG"),
    "x.y/a.jpg": ("x.y/a", "jpg"),
    "../a.jpg": ("../a", "jpg"),
    "/etc/a.jpg": ("/etc/a", "jpg"),
    "a.": ("a", ""),
    "a..b": ("a", ".b"),
    "README": None,
    "x.y/README": None,
    ".hidden.txt": None,
    "folder/._a.jpg": None,
    "": None,
}


@pytest.mark.parametrize(("name", "split"), SPLITS.items(), ids=SPLITS)
def test_names(name, split):
    assert split_name(name.encode()) == (None if split is None else tuple(part.encode() for part in split))


@settings(deadline=None)
@given(st.text(alphabet="aB.-/_ ", max_size=12))
@example("a/b.c/d.E.f")
def test_names_are_split_as_theirs(name):
    theirs = pytest.importorskip("webdataset.tariterators")
    if name.rpartition("/")[2].startswith("."):
        return  # hidden files: in a folder theirs takes them for fields of a sample that has the folder's name
    key, extension = theirs.base_plus_ext(name)
    is_note = re.match("__[^/]*__(/|$)", name)
    assert split_name(name.encode()) == (None if key is None or is_note else (key.encode(), extension.encode()))


MEMBERS = [
    ("__meta__", b"{}"),
    ("__notes__/a.txt", b"no"),
    ("README", b"no extension"),
    ("x/0.jpg", b"zero"),
    ("x/0.seg.PNG", b"seg"),
    ("x/1.cls", b"1"),
    ("y/1.cls", b"1 too"),
    ("a.txt", b"a"),
    ("b.txt", b"b"),
    ("a.cls", b"a again"),
    ("../up.txt", b"up"),
]


def test_samples_of_a_shard(write_tar):
    path = write_tar("x.tar", MEMBERS)
    samples = list(wds.WebDataset(path))
    assert [sample["__key__"] for sample in samples] == ["x/0", "x/1", "y/1", "a", "b", "a", "../up"]
    assert samples[0] == {
        "__key__": "x/0", "__url__": path, "__local_path__": path, "jpg": b"zero", "seg.png": b"seg",
    }  # fmt: skip


def test_samples_are_those_of_the_peer(write_tar, peer):
    paths = [write_tar("x.tar", MEMBERS), write_tar("y.tgz", MEMBERS, "w:gz"), write_tar("e.tar", [])]
    ours = list(wds.WebDataset(paths))
    assert ours == list(peer.WebDataset(paths, shardshuffle=False))
    assert len(ours) == 14


def test_a_sample_does_not_reach_into_the_next_shard(write_tar):
    paths = [write_tar("x.tar", [("a.txt", b"1")]), write_tar("y.tar", [("a.cls", b"2")])]
    assert [sorted(sample) for sample in wds.WebDataset(paths)] == [
        ["__key__", "__local_path__", "__url__", "txt"],
        ["__key__", "__local_path__", "__url__", "cls"],
    ]


def test_members_chosen_and_renamed(write_tar, peer):
    path = write_tar("x.tar", MEMBERS)
    how = {
        "select_files": lambda name: not name.endswith(".cls"),
        "rename_files": lambda name: name.replace("x/", "z/"),
    }
    ours = list(wds.WebDataset(path, **how))
    assert ours == list(peer.WebDataset(path, shardshuffle=False, **how))
    assert [sample["__key__"] for sample in ours] == ["z/0", "a", "b", "../up"]


def test_file_objects_and_standard_input(write_tar, monkeypatch):
    path = write_tar("x.tar", MEMBERS)
    with open(path, "rb") as stream:
        data = stream.read()
    wanted = [sample["__key__"] for sample in wds.WebDataset(path)]
    with open(path, "rb") as stream:
        samples = list(wds.WebDataset(stream))
        assert [sample["__key__"] for sample in samples] == wanted
        assert samples[0]["__url__"] == path
        assert not stream.closed, "what the caller opened the caller closes"
    dataset = wds.WebDataset([io.BytesIO(data), io.BytesIO(data)])
    assert [sample["__key__"] for sample in dataset] == wanted * 2
    with pytest.raises(Unavailable, match="<stream 0>: was read already"):
        list(dataset)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert [sample["__key__"] for sample in wds.WebDataset("-")] == wanted


def test_an_http_answer_without_ranges(write_tar):
    path = write_tar("x.tgz", MEMBERS, "w:gz")

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            with open(path, "rb") as stream:
                self.wfile.write(stream.read())

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        asked = threading.Thread(target=server.handle_request)
        asked.start()
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/x.tgz", timeout=10) as answer:
            found = list(wds.WebDataset(answer))
        asked.join()
    assert [sample["__key__"] for sample in found] == [sample["__key__"] for sample in wds.WebDataset(path)]


def test_files_named_by_url(write_tar):
    path = write_tar("x.tar", MEMBERS)
    for url in (f"file:{path}", f"file://{path}", f"file://localhost{path}"):
        (first, *_) = wds.WebDataset(url)
        assert (first["__url__"], first["__local_path__"]) == (url, path)


def test_files_are_closed_behind_an_abandoned_iterator(write_tar):
    dataset = wds.WebDataset(write_tar("x.tar", MEMBERS))
    before = open_files()
    iterators = [iter(dataset) for _ in range(5)]
    for each in iterators:
        next(each)
    if before is not None:
        assert before < open_files() <= before + 5
    del each, iterators
    assert open_files() == before


def open_files():
    import os

    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None


# What goes wrong.


def test_a_missing_shard_is_named(tmp_path):
    missing = str(tmp_path / "none.tar")
    with pytest.raises(Missing, match=r"none\.tar: no such file \(looked in "):
        list(wds.WebDataset(missing))
    with pytest.raises(FileNotFoundError):
        list(wds.WebDataset(missing))


def test_other_schemes_say_the_way_out():
    with pytest.raises(ConfigError, match=r"gopher://x/y\.tar: shards of scheme gopher: are not opened here"):
        list(wds.WebDataset("gopher://x/y.tar", handler=wds.ignore_and_continue))


def test_no_samples_at_all(write_tar, tmp_path):
    empty = write_tar("e.tar", [("README", b"x")])
    with pytest.raises(ConfigError, match=r"no samples in .*e\.tar; pass empty_check=False"):
        list(wds.WebDataset(empty))
    with pytest.raises(ValueError, match=r"no samples in .*e\.tar and 1 more shards; 1 errors were passed over"):
        list(wds.WebDataset([empty, str(tmp_path / "none.tar")], handler=wds.ignore_and_continue))
    assert list(wds.WebDataset(empty, empty_check=False)) == []
    full = write_tar("f.tar", [("a.txt", b"x")])
    assert len(list(wds.WebDataset([empty, full, empty]))) == 1


def test_drawing_from_shards_without_samples_ends(write_tar, tmp_path):
    empty = write_tar("e.tar", [])
    with pytest.raises(ConfigError, match="no samples"):
        next(iter(wds.WebDataset(empty, resampled=True)))
    with pytest.raises(ConfigError, match="errors were passed over"):
        next(iter(wds.WebDataset(str(tmp_path / "none.tar"), resampled=True, handler=wds.ignore_and_continue)))
    full = write_tar("f.tar", [("a.txt", b"x")])
    assert next(iter(wds.WebDataset([empty] * 20 + [full], resampled=True)))["__key__"] == "a"


def cut(path, left):
    with open(path, "rb+") as stream:
        stream.truncate(left)
    return path


def test_whole_samples_come_before_the_error_of_a_cut_shard(write_tar):
    members = [(f"{number}.{field}", bytes(600)) for number in range(4) for field in ("cls", "txt")]
    path = cut(write_tar("x.tar", members), 5 * 1536 + 700)
    came = []
    message = r"inside member '2.txt'.*\(2 whole samples, and '2', which may lack fields, came before\)"
    with pytest.raises(Truncated, match=message):
        came += (sample["__key__"] for sample in wds.WebDataset(path))
    assert came == ["0", "1"]


def test_a_handler_goes_on_with_the_next_shard_and_it_is_counted(write_tar, tmp_path):
    members = [(f"{number}.txt", bytes(600)) for number in range(4)]
    paths = [cut(write_tar("x.tar", members), 3000), str(tmp_path / "none.tar"), write_tar("y.tar", members)]
    seen = []

    def handler(error):
        seen.append(type(error).__mro__[1].__name__)
        return True

    dataset = wds.WebDataset(paths, handler=handler)
    assert [sample["__key__"] for sample in dataset] == ["0", "0", "1", "2", "3"]
    assert seen == ["Truncated", "Missing"]
    assert dataset.skipped == 2
    stopped = wds.WebDataset(paths, handler=wds.ignore_and_stop)
    assert [sample["__key__"] for sample in stopped] == ["0"]
    assert stopped.skipped == 1


def test_a_repeated_field(write_tar, peer):
    path = write_tar("x.tar", [("a.txt", b"1"), ("a.TXT", b"2"), ("a.cls", b"3"), ("b.txt", b"4")])
    with pytest.raises(Corrupt, match=r"x\.tar: sample 'a' has the field 'txt' twice \(member 'a.TXT' at offset 1,536"):
        list(wds.WebDataset(path))
    dataset = wds.WebDataset(path, handler=wds.ignore_and_continue)
    samples = list(dataset)
    assert dataset.skipped == 1
    assert samples == list(peer.WebDataset(path, shardshuffle=False, handler=peer.ignore_and_continue))
    assert [sample["txt"] for sample in samples] == [b"1", b"4"]
    assert list(wds.WebDataset(path, handler=wds.ignore_and_stop)) == []


def test_a_member_that_is_too_large(write_tar):
    path = write_tar("x.tar", [("a.txt", bytes(10)), ("a.bin", bytes(1000)), ("b.txt", bytes(10))])
    with pytest.raises(LimitExceeded, match=r"x\.tar: member 'a.bin' has 1,000 bytes, more than max_member_bytes=999"):
        list(wds.WebDataset(path, max_member_bytes=999))
    dataset = wds.WebDataset(path, max_member_bytes=999, handler=wds.ignore_and_continue)
    assert [sample["__key__"] for sample in dataset] == ["b"]
    assert dataset.skipped == 1
    unread = wds.WebDataset(path, max_member_bytes=999, select_files=lambda name: not name.endswith(".bin"))
    assert len(list(unread)) == 2, "what is left out is not limited"


def test_warnings(write_tar, tmp_path):
    path = write_tar("x.tar", [("a.txt", b"1")])
    with pytest.warns(UserWarning, match="left out: MissingShard"):
        assert len(list(wds.WebDataset([str(tmp_path / "no.tar"), path], handler=wds.warn_and_continue))) == 1
    with pytest.warns(UserWarning, match="ended early: MissingShard"):
        assert len(list(wds.WebDataset([path, str(tmp_path / "no.tar"), path], handler=wds.warn_and_stop))) == 1
