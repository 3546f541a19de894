"""Tar archives as the standard library writes them, as hostile or damaged files, and as WebDataset groups them."""

import gzip
import io
import os
import pickle
import random
import re
import struct
import tarfile
import time
import tracemalloc
import warnings
from itertools import product
from posixpath import dirname, join, normpath

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import penstock as ps
import penstock.webdataset as wds
from penstock.base import counters
from penstock.base.text_column import TextColumn
from penstock.errors import ConfigError, Corrupt, LimitExceeded, Missing, PenstockError, Truncated
from penstock.files.files import Files
from penstock.files.handles import identify
from penstock.formats.tar import header as tar_header
from penstock.formats.tar import samples as tar_samples
from penstock.formats.tar import walk as tarwalk
from penstock.formats.tar.samples import NOT_THERE, SampleTable, group, load, save, split_name
from penstock.formats.tar.walk import walk

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
END = bytes(1024)


def member(name, size=0, kind=tarfile.REGTYPE, **attributes):
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    for attribute, value in attributes.items():
        setattr(info, attribute, value)
    return info


def body(size, seed=0):
    return random.Random(seed).randbytes(size)


def archive(members, tar_format="ustar"):
    """The bytes of an archive: of infos as they are, or of names with a body of some bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=FORMATS[tar_format], encoding="utf-8") as tar:
        for number, each in enumerate(members):
            info = member(*each) if isinstance(each, tuple) else member(each, 10) if isinstance(each, str) else each
            tar.addfile(info, io.BytesIO(body(info.size, number)))
    return out.getvalue()


def written(folder, data):
    path = os.path.join(folder, "some.tar")
    with open(path, "wb") as file:
        file.write(data)
    return path


def header(name=b"a.x", size=b"00000000000\0", kind=b"0", magic=b"ustar\x0000", prefix=b"", signed=False):
    """One header, made by hand."""
    block = bytearray(512)
    struct.pack_into("100s", block, 0, name)
    struct.pack_into("12s", block, 124, size)
    struct.pack_into("8s s", block, 148, b" " * 8, kind)
    struct.pack_into("8s", block, 257, magic)
    struct.pack_into("155s", block, 345, prefix)
    total = sum(memoryview(block).cast("b")) if signed else sum(block)
    struct.pack_into("8s", block, 148, b"%06o\0 " % total)
    return bytes(block)


def names_of(tmp_path, data):
    return list(walk(written(tmp_path, data)).names)


def grouped(tmp_path, names):
    return group(walk(written(tmp_path, archive(names))))


def as_tarfile_sees(path):
    with tarfile.open(path, "r:", encoding="utf-8", errors="surrogateescape") as tar:
        ends = [(info.name, end_of(tar, info)) for info in tar]
        return [(name, end.offset_data, end.size) for name, end in ends if end is not None]


def end_of(tar, info, most=20):
    """The file that a member is or, through links, leads to; None if it is none."""
    if info.isreg() or not (info.islnk() or info.issym()):
        return info if info.isreg() else None
    found = target_of(tar, info)
    return end_of(tar, found, most - 1) if most and found is not None else None


def target_of(tar, info):
    """The member that a link names. tarfile pastes the names of symbolic links together: ``a/b`` to ``/c`` is ``a//c``
    for it, and ``/a`` to ``b`` is ``//b``. A system follows them to ``/c`` and ``/b``.
    """
    if info.issym():
        return tar._getmember(join(dirname(info.name), info.linkname), normalize=True)
    return tar._getmember(info.linkname, tarinfo=info, normalize=True)


# Walking: laws


names = st.text(st.sampled_from("ab.01/_-ü文\udcff"), min_size=1, max_size=30).filter(lambda name: name[-1] != "/")
long_names = st.tuples(names, st.integers(0, 140), names).map(lambda parts: parts[0] + "/d" * parts[1] + "/" + parts[2])
files = st.builds(
    member, names | long_names, st.integers(0, 2000), mtime=st.sampled_from([0, 1.5]), uid=st.sampled_from([0, 2**40])
)
others = st.builds(
    member,
    names,
    kind=st.sampled_from([tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]),
    linkname=names | long_names,
)


@given(st.lists(files | others, max_size=12), st.sampled_from(sorted(FORMATS)))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_members_are_those_that_tarfile_finds(tmp_path, members, tar_format):
    try:
        data = archive(members, tar_format)
    except ValueError:  # ustar has no room for some names and numbers
        return
    holding_nothing = {normpath(info.name) for info in members if info.isdir() or info.isdev()}
    assume(not holding_nothing & {normpath(info.name) for info in members if not (info.isdir() or info.isdev())})
    path = written(tmp_path, data)
    assert list(walk(path)) == as_tarfile_sees(path)


@pytest.mark.parametrize("window", [1024, 4096])
@pytest.mark.parametrize("tar_format", FORMATS)
def test_headers_anywhere_in_the_window(tmp_path, tar_format, window):
    data = archive(
        [(f"{number:04d}{'x' * (number % 90)}.bin", 97 * number % 6000) for number in range(300)], tar_format
    )
    path = written(tmp_path, data)
    sizes = tarwalk.WindowSizes(most_bytes=window, first_bytes=window, page_bytes=512, near_bytes=2000)
    assert list(walk(path, sizes)) == as_tarfile_sees(path)


def test_a_lent_handle_does_too(tmp_path):
    path = written(tmp_path, archive(["a.x"]))
    with Files().lend(identify(path)) as handle:
        assert list(walk(handle)) == [("a.x", 512, 10)]


# Walking: one thing at a time


@pytest.mark.parametrize("tar_format", FORMATS)
def test_an_empty_archive_has_no_members(tmp_path, tar_format):
    found = walk(written(tmp_path, archive([], tar_format)))
    assert len(found) == 0
    assert list(found) == []
    assert group(found).samples == 0


@pytest.mark.parametrize(
    ("case", "names"),
    {
        "ustar": (header(), ["a.x"]),
        "ustar with a prefix": (header(prefix=b"some/where"), ["some/where/a.x"]),
        "a full name": (header(name=b"n" * 100), ["n" * 100]),
        "a full name and prefix": (header(name=b"n" * 100, prefix=b"p" * 155), ["p" * 155 + "/" + "n" * 100]),
        "gnu keeps times where the prefix is": (header(magic=b"ustar  \0", prefix=b"01234567"), ["a.x"]),
        "v7": (header(magic=b"", kind=b"\0"), ["a.x"]),
        "v7, and what follows the magic means nothing": (header(magic=b"", kind=b"\0", prefix=b"zz"), ["a.x"]),
        "a v7 folder": (header(name=b"a/", magic=b"", kind=b"\0"), []),
        "a v7 folder with a size": (header(name=b"a/", kind=b"\0", size=b"7777\0") + header(), ["a.x"]),
        "contiguous": (header(kind=b"7"), ["a.x"]),
        "a folder with a size": (header(kind=b"5", size=b"00000007777\0") + header(), ["a.x"]),
        "an unknown kind has a body": (header(kind=b"Z", size=b"00000000001\0") + bytes(512) + header(), ["a.x"]),
        "a size between spaces": (header(size=b"       1 \0") + bytes(512) + header(), ["a.x", "a.x"]),
        "a size of 12 digits": (header(size=b"000000000001") + bytes(512) + header(), ["a.x", "a.x"]),
        "no size": (header(size=b"") + header(), ["a.x", "a.x"]),
        "a binary size": (header(size=b"\x80" + bytes(10) + b"\x01") + bytes(512) + header(), ["a.x", "a.x"]),
        "bytes summed with a sign": (header(name=b"\xff\xfe.x", signed=True), ["\udcff\udcfe.x"]),
        "no name": (header(name=b""), [""]),
    }.items(),
)
def test_kinds_of_headers(tmp_path, case, names):
    data, expected = names
    assert names_of(tmp_path, data + END) == expected, case


def pax(records, kind=b"x"):
    return header(name=b"pax", size=b"%011o\0" % len(records), kind=kind) + records.ljust(
        -(-len(records) // 512) * 512, b"\0"
    )


def record(key, value):
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest) + 1
    while len(b"%d" % length) + len(rest) != length:
        length += 1
    return b"%d" % length + rest


@pytest.mark.parametrize(
    ("records", "found"),
    [
        (record(b"mtime", b"1.5"), [("a.x", 1), ("a.x", 0)]),
        (record(b"path", b"other.y"), [("other.y", 1), ("a.x", 0)]),
        (record(b"path", b"line\nend=.y"), [("line\nend=.y", 1), ("a.x", 0)]),
        (record(b"size", b"513"), [("a.x", 513)]),
        (record(b"path", b""), [("a.x", 1), ("a.x", 0)]),
        (record(b"mtime", b"1") + record(b"path", b"b") + record(b"comment", b"path=c"), [("b", 1), ("a.x", 0)]),
    ],
)
def test_pax_records(tmp_path, records, found):
    data = pax(records) + header(size=b"00000000001\0") + bytes(512) + header() + END
    table = walk(written(tmp_path, data))
    assert [(name, length) for name, _, length in table] == found


def test_global_pax_records_are_for_all(tmp_path):
    data = pax(record(b"path", b"all"), b"g") + header() + pax(record(b"path", b"one")) + header() + header() + END
    assert names_of(tmp_path, data) == ["all", "one", "all"]


def test_a_long_name_of_a_link_is_not_that_of_the_next_file(tmp_path):
    data = archive([member("link", kind=tarfile.SYMTYPE, linkname="l" * 300), member("a.x")], "gnu")
    assert names_of(tmp_path, data) == ["a.x"]


def test_bodies_of_large_members_are_not_read(tmp_path):
    data = archive([(f"{number}.bin", 300_000) for number in range(40)])
    counters.collect()
    assert len(walk(written(tmp_path, data))) == 40
    assert counters.collect().bytes_read < len(data) // 20


HOSTILE = [
    "/etc/passwd.x",
    "../../up.x",
    "-rf.x",
    "n" * 4000 + ".x",
    "bad\udcff\udc80.x",
    "line\nend.x",
    "\x1b[31m.x",
    "%s{}.x",
]


@pytest.mark.parametrize("tar_format", ["gnu", "pax"])
def test_hostile_names_are_keys(tmp_path, tar_format):
    path = written(tmp_path, archive(HOSTILE, tar_format))
    table = group(walk(path))
    assert list(table.keys) == [name.removesuffix(".x") for name in HOSTILE]
    assert [table.keys.find(key) for key in table.keys] == list(range(len(HOSTILE)))
    assert os.listdir(tmp_path) == ["some.tar"]


def test_a_zero_ends_a_name(tmp_path):
    assert names_of(tmp_path, header(name=b"a\0b.x") + END) == ["a"]
    assert names_of(tmp_path, pax(record(b"path", b"a\0b.x")) + header() + END) == ["a\0b.x"]


# Walking: what is wrong


WHOLE = archive([("000.cls", 1), ("000.jpg", 700), ("001.cls", 1), ("001.jpg", 700)])
ENDS_AT = 512 * (1 + 1 + 1 + 2) * 2


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (0, r"offset 0 \(before any whole member\): the file ends with no end-of-archive .*512 bytes .* 0 are there"),
        (100, r"offset 0 \(before any whole member\): the file ends inside a header: 512 bytes .* 100 are there"),
        (512, r"offset 512 \(before any .* inside member '000.cls': 1 bytes .* 0 are there"),
        (1024, r"offset 1,024 \(after '000.cls', the last whole member\).* no end-of-archive"),
        (1024 + 512 + 300, r"offset 1,536 \(after '000.cls'.* inside member '000.jpg': 700 bytes .* 300 are there"),
        (1024 + 512 + 750, r"offset 2,560 \(after '000.jpg'.* no end-of-archive"),
        (ENDS_AT, r"after '001.jpg', the last whole member\): the file ends with no end-of-archive"),
        (ENDS_AT + 500, r"inside a header: 512 bytes were wanted from there, 500 are there"),
    ],
)
def test_a_cut_archive(tmp_path, length, message):
    path = written(tmp_path, WHOLE[:length])
    with pytest.raises(Truncated, match=message) as caught:
        walk(path)
    assert str(caught.value).startswith(path)
    assert len(caught.value.args) == 1


@pytest.mark.parametrize("length", [ENDS_AT + 512, ENDS_AT + 700, ENDS_AT + 1024, len(WHOLE)])
def test_one_block_of_zeros_is_an_end(tmp_path, length):
    assert len(walk(written(tmp_path, WHOLE[:length]))) == 4


@pytest.mark.parametrize("at", [0, 3, 124, 130, 148, 156, 257, 300, 511])
@pytest.mark.parametrize("which", [0, 1024, 2560])
def test_a_damaged_header_is_not_the_end(tmp_path, which, at):
    data = bytearray(WHOLE)
    data[which + at] ^= 0x55
    with pytest.raises(Corrupt, match=rf"offset {which:,} .*header checksum"):
        walk(written(tmp_path, data))


def test_a_hole_is_not_the_end(tmp_path):
    for size in (512, 1024, 2048):
        data = bytearray(WHOLE)
        data[1024 : 1024 + size] = bytes(size)
        with pytest.raises(Corrupt, match=r"offset 1,024 \(after '000.cls'.*more follows"):
            walk(written(tmp_path, data))


PARTS = {"padded to a record": WHOLE, "two blocks of zeros": WHOLE[: ENDS_AT + 1024], "empty": archive([])}


@pytest.mark.parametrize("parts", list(product(PARTS, PARTS, PARTS)), ids=" + ".join)
def test_archives_one_behind_another_are_read_as_one(tmp_path, parts):
    path = written(tmp_path, b"".join(PARTS[part] for part in parts))
    with tarfile.open(path, ignore_zeros=True) as tar:
        expected = [(info.name, info.offset_data, info.size) for info in tar]
    assert list(walk(path)) == expected


@pytest.mark.parametrize("rest", [b"x", b"x" * 512, body(5000), WHOLE[:511], WHOLE[512:]])
@pytest.mark.parametrize("whole", [WHOLE, WHOLE[: ENDS_AT + 1024]])
def test_what_follows_the_end_and_is_no_archive(tmp_path, whole, rest):
    with pytest.raises(Corrupt, match=rf"zeros end the archive here, but more follows at offset {len(whole):,}"):
        walk(written(tmp_path, whole + rest))


def test_a_hole_of_whole_members_is_not_another_archive(tmp_path):
    data = bytearray(WHOLE)
    data[1024:2560] = bytes(1536)  # all of 000.jpg
    with pytest.raises(Corrupt, match=r"offset 1,024 .*more follows at offset 2,560"):
        walk(written(tmp_path, data))


def test_records_for_all_members_end_with_their_archive(tmp_path):
    """What a global header says is about the members of its own archive."""
    common = pax(record(b"path", b"same.x"), kind=b"g")
    path = written(tmp_path, common + header() + END + header(name=b"b.x") + END)
    assert list(walk(path).names) == ["same.x", "b.x"]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (header(size=b"0000000009x\0"), Corrupt, "the size is b'0000000009x"),
        (header(size=b"00000000089\0"), Corrupt, "the size is b'00000000089"),
        (header(size=b"-0000000001\0"), Corrupt, "the size is b'-0000000001"),
        (header(size=b"\xff" * 12), Corrupt, "the size is"),
        (header(size=b"\x80" + b"\xff" * 11), Truncated, "inside member 'a.x'"),
        (header(size=b"77777777777\0"), Truncated, "inside member 'a.x': 8,589,934,591 bytes"),
        (header(kind=b"S"), Corrupt, r"offset 0 .*sparse \(tar --sparse\)"),
        (header(kind=b"M"), Corrupt, "multi-volume"),
        (pax(record(b"GNU.sparse.major", b"1")) + header(), Corrupt, "sparse"),
        (pax(b"99 path=a\n") + header(), Corrupt, "damaged pax header: the record at byte 0"),
        (pax(b"path=a\n") + header(), Corrupt, "damaged pax header: no length"),
        (pax(b"0 path=a\n") + header(), Corrupt, "damaged pax header"),
        (pax(record(b"size", b"-1")) + header(), Corrupt, "its size is b'-1'"),
        (pax(record(b"size", b"9" * 5000)) + header(), Corrupt, "its size is"),
        (pax(record(b"size", b"9" * 20)) + header(), Truncated, "inside member"),
        (pax(record(b"path", b"a.x")), Corrupt, "a member that is not there"),
        (header(kind=b"L", size=b"00001000000\0") + bytes(2**18), LimitExceeded, "262,144 bytes; at most 131,072"),
        (header(kind=b"L", size=b"00000010000\0"), Truncated, "inside an extended header"),
        (gzip.compress(WHOLE + body(1000), mtime=0), ConfigError, "compressed with gzip"),
        (body(5000), Corrupt, "header checksum"),
    ],
    ids=lambda each: each if isinstance(each, str) else "" if isinstance(each, bytes) else each.__name__,
)
def test_bad_headers(tmp_path, data, error, message):
    with pytest.raises(error, match=message) as caught:
        walk(written(tmp_path, data + END))
    assert type(caught.value) is error
    assert len(caught.value.args) == 1


def test_no_such_file(tmp_path):
    with pytest.raises(Missing, match="no such file"):
        walk(str(tmp_path / "none.tar"))


@pytest.mark.parametrize("seed", range(3))
def test_checksums_are_sums(seed):
    block = bytearray(header(name=random.Random(seed).randbytes(100), prefix=random.Random(seed).randbytes(155)))
    stored, unsigned, _ = tar_header.checksums(memoryview(block))
    assert int(stored[:6], 8) == unsigned


@pytest.mark.parametrize("tar_format", FORMATS)
def test_mutants_give_tables_or_errors(tmp_path, tar_format):
    """Flipped bytes, cuts and doubled blocks; half of the flipped headers get their checksums put right."""
    names = [
        f"d/{number}{'long' * (number if tar_format == 'ustar' else 20 * number)}.{ext}"
        for number in range(6)
        for ext in "ab"
    ]
    whole = archive([member(name, 300, mtime=0 if tar_format == "ustar" else 0.5) for name in names], tar_format)
    assert group(walk(written(tmp_path, whole))).samples == 6
    chance = random.Random(tar_format)
    outcomes = set()
    for _ in range(300):
        path = written(tmp_path, mutant(whole, chance))
        began = time.process_time()
        try:
            table = group(walk(path))
        except PenstockError as error:
            outcomes.add((type(error).__name__, len(error.args)))
        else:
            assert (table.offsets + table.lengths).max(initial=0) <= os.path.getsize(path)
            outcomes.add("table")
        assert time.process_time() - began < 2
    assert {"table", ("Corrupt", 1), ("Truncated", 1)} <= outcomes


def mutant(whole, chance):
    data = bytearray(whole)
    at = chance.randrange(len(data))
    match chance.randrange(4):
        case 0:
            del data[at:]
        case 1:
            block = at // 512 * 512
            data[block:block] = data[block : block + 512 * chance.randrange(1, 4)]
        case _:
            header_at = chance.choice([found.start() - 257 for found in re.finditer(b"ustar", whole)])
            for _ in range(chance.choice([1, 1, 8])):
                data[header_at + chance.randrange(512)] = chance.randrange(256)
            if chance.random() < 0.5:
                data[header_at + 148 : header_at + 156] = b" " * 8
                data[header_at + 148 : header_at + 156] = b"%06o\0 " % sum(data[header_at : header_at + 512])
    return data


# Grouping


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("000.jpg", ("000", "jpg")),
        ("a/b/000.cls.txt", ("a/b/000", "cls.txt")),
        ("a.b/000.jpg", ("a.b/000", "jpg")),
        ("./000.jpg", ("./000", "jpg")),
        ("/abs/000.jpg", ("/abs/000", "jpg")),
        ("../000.jpg", ("../000", "jpg")),
        ("000.", ("000", "")),
        ("000", None),
        ("a.b/000", None),
        ("a.b/", None),
        ("", None),
        (".hidden", None),
        ("./.hidden", None),
        ("..", None),
        ("a.b/.x", None),
        ("a/.x", None),
        ("a//.x", None),
        ("/.x", None),
        ("a.b/c/.x", None),
        ("__meta__", None),
        ("__a.b__", None),
        ("__meta__/a.json", None),
        ("____/a.json", None),
        ("__/a.json", ("__/a", "json")),
        ("___/a.json", ("___/a", "json")),
        ("__meta/a.json", ("__meta/a", "json")),
        ("a/__meta__/a.json", ("a/__meta__/a", "json")),
    ],
)
def test_names_are_split_as_webdataset_does(name, split):
    found = split_name(name.encode())
    assert (found and tuple(part.decode() for part in found)) == split


def test_samples_fields_and_gaps(tmp_path):
    path = written(tmp_path, archive(["a.JPG", "a.cls", "README", "b.cls", "c.jpg", "c.seg.png", "c.CLS"]))
    members = walk(path)
    table = group(members)
    assert (table.path, table.samples, table.fields) == (path, 3, ("jpg", "cls", "seg.png"))
    assert table.passed_over == 1
    assert list(table.keys) == ["a", "b", "c"]
    places = {name: offset for name, offset, _ in members}
    assert table.offsets.tolist() == [
        [places["a.JPG"], places["a.cls"], -1],
        [-1, places["b.cls"], -1],
        [places["c.jpg"], places["c.CLS"], places["c.seg.png"]],
    ]
    assert table.lengths.tolist() == [[10, 10, -1], [-1, 10, -1], [10, 10, 10]]
    assert (table.offsets[1, 0], table.lengths[1, 0]) == (NOT_THERE, NOT_THERE)


def test_keys_are_found(tmp_path):
    table = grouped(tmp_path, [f"{number:05d}.x" for number in range(3000)])
    assert [table.keys.find(f"{number:05d}") for number in (0, 17, 2999)] == [0, 17, 2999]
    assert (table.keys[17], table.keys[-1], table.keys[5:7]) == ("00017", "02999", ["00005", "00006"])
    assert table.keys.find("3000") is None
    assert grouped(tmp_path, []).keys.find("\ud800") is None


def test_a_field_twice(tmp_path):
    with pytest.raises(Corrupt, match=r"sample 'd/a' has field 'jpg' twice .*member 'd/a.JPG'"):
        grouped(tmp_path, ["d/a.jpg", "README", "d/a.JPG"])


def test_a_key_again_later(tmp_path):
    with pytest.raises(Corrupt, match="key 'a' is not contiguous: sample 0 has it, and sample 2 again"):
        grouped(tmp_path, ["a.jpg", "b.jpg", "a.cls", "b.cls"])


@pytest.mark.parametrize("at_once", [1, 3, 1 << 14])
def test_keys_may_come_again_in_another_of_joined_archives(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(tar_samples, "_AT_ONCE", at_once)
    parts = [[], ["a.x", "b.x"], ["b.x", "a.x", "a.y"], ["README", "a.x"], [], ["a.x", "c.x"]]
    path = written(tmp_path, b"".join(map(archive, parts)))
    table = group(walk(path))
    assert list(table.keys) == ["a", "b", "b", "a", "a", "a", "c"]
    assert np.count_nonzero(table.offsets == NOT_THERE, axis=0).tolist() == [0, 6]
    assert [sample["__key__"] for sample in wds.WebDataset(path)] == list(table.keys)
    with pytest.raises(ConfigError, match=r"some\.tar: 'a' is the name of 4 samples of this file, number 0 and 3"):
        ps.open(path, fields=["x"]).keys.find("a")


@pytest.mark.parametrize("parts", [[["a.x"], ["a.x", "b.x", "a.y"]], [["a.x", "b.x", "a.y"], ["c.x"]]])
def test_keys_do_not_come_again_in_one_of_joined_archives(tmp_path, parts):
    with pytest.raises(Corrupt, match="key 'a' is not contiguous: sample"):
        group(walk(written(tmp_path, b"".join(map(archive, parts)))))


def test_links_that_lead_nowhere_do_not_move_where_archives_begin(tmp_path):
    nowhere = member("a.y", 0, type=tarfile.SYMTYPE, linkname="nothing")
    table = group(walk(written(tmp_path, archive(["a.x", nowhere]) + archive(["a.x", "b.x"]))))
    assert list(table.keys) == ["a", "a", "b"]


def test_hidden_files_belong_to_no_sample(tmp_path):
    table = grouped(tmp_path, ["d/._0.jpg", "d/0.jpg", "d/._1.jpg", "d/1.jpg"])
    assert (list(table.keys), table.passed_over) == (["d/0", "d/1"], 2)


def test_names_that_make_a_field_each_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tar_samples, "ALWAYS_FITS", 100)
    with pytest.raises(LimitExceeded, match=r"20 different fields \(0.jpg, 1.jpg, 2.jpg, …\) in 20 samples"):
        grouped(tmp_path, [f"scan{number}.{number}.jpg" for number in range(20)])
    assert grouped(tmp_path, [f"scan.{number}.jpg" for number in range(200)]).offsets.shape == (1, 200)


def webdataset():
    """The package, if there is one: it may warn, be broken, or need what is not there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("webdataset.tariterators")


dull = st.text(st.sampled_from("aB.1/_"), min_size=1, max_size=6)
likely = st.builds(
    "{}{}.{}".format, st.sampled_from(["", "d/", "./"]), st.sampled_from("abc"), st.sampled_from(["x", "X", "y.z"])
)


@given(st.lists(likely | dull | st.builds("__{}__/{}".format, dull, likely), max_size=8), st.booleans())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_samples_are_those_that_webdataset_finds(tmp_path, names, in_order):
    iterators = webdataset()
    names = [name for name in names if not name.rpartition("/")[2].startswith(".")]  # hidden ones we leave out
    path = written(tmp_path, archive(sorted(set(names)) if in_order else names, "gnu"))
    with open(path, "rb") as stream:
        try:
            expanded = iterators.tar_file_expander([{"url": path, "stream": stream}])
            expected = list(iterators.group_by_keys(expanded))
        except ValueError:  # a field twice
            expected = None
    keys = [sample["__key__"] for sample in expected or []]
    if expected is None or len(keys) != len(set(keys)):
        with pytest.raises(Corrupt, match=r"twice|not contiguous"):
            group(walk(path))
    else:
        assert contents(path, group(walk(path))) == [
            (sample.pop("__key__"), {key: value for key, value in sample.items() if key != "__url__"})
            for sample in expected
        ]


def contents(path, table):
    """Key and fields of every sample, read from the places in the table."""
    with open(path, "rb") as file:
        data = file.read()
    return [
        (
            table.keys[sample],
            {
                field: data[offset : offset + length]
                for field, offset, length in zip(
                    table.fields, table.offsets[sample], table.lengths[sample], strict=True
                )
                if offset >= 0
            },
        )
        for sample in range(table.samples)
    ]


def test_many_members_take_little_memory():
    """60 bytes a member; the names are those of an archive of 50,000, without the archive."""
    count = 50_000
    names = "".join(f"train/{number // 2:09d}.{'jpg' if number % 2 else 'cls'}" for number in range(count))
    members = tarwalk.MemberTable(
        "big.tar",
        TextColumn(np.frombuffer(names.encode(), np.uint8), np.arange(1, count + 1, dtype=np.int64) * 19),
        np.arange(count) * 1024 + 512,
        np.full(count, 300),
    )
    tracemalloc.start()
    try:
        table = group(members)
        assert table.keys.find("train/000012345") == 12345
        assert tracemalloc.get_traced_memory()[0] < 60 * count
    finally:
        tracemalloc.stop()
    assert table.samples == count // 2
    assert table.index_bytes < 60 * count


# Saving


@pytest.fixture
def saved(tmp_path):
    """A folder, an archive's identity, and its table, saved."""
    path = written(tmp_path, archive([*HOSTILE, "z.A", "z.\udcff", "README"], "gnu"))
    file, folder = identify(path), str(tmp_path / "index")
    return folder, file, save(folder, file, group(walk(path)))


def same(table, other):
    return contents(table.path, table) == contents(other.path, other) and (table.fields, table.passed_over) == (
        other.fields,
        other.passed_over,
    )


def test_a_saved_table_is_the_table(saved):
    folder, file, table = saved
    walked, loaded = group(walk(file.path)), load(folder, file)
    assert (table.is_mapped, loaded.is_mapped, walked.is_mapped) == (True, True, False)
    assert (loaded.index_bytes, walked.index_bytes > 0) == (0, True)
    assert same(table, walked)
    assert same(loaded, walked)
    assert loaded.keys.find("bad\udcff\udc80") == 4
    assert [name for name in os.listdir(folder) if not name.endswith(".table")] == []


def test_an_empty_table_is_saved_too(tmp_path):
    path = written(tmp_path, archive([]))
    assert load(str(tmp_path), identify(path)) is None
    assert save(str(tmp_path), identify(path), group(walk(path))).samples == 0
    assert load(str(tmp_path), identify(path)).samples == 0


def test_tables_travel_to_other_processes(saved):
    table = saved[2]
    assert same(pickle.loads(pickle.dumps(table)), table)


def test_another_archive_has_no_saved_table(saved, tmp_path):
    folder, file, _ = saved
    times = (file.mtime_ns, file.mtime_ns)
    with open(file.path, "r+b") as data:
        data.write(b"X")
    os.utime(file.path, ns=times)
    assert load(folder, identify(file.path)) is None, "other bytes, same size and time"
    with open(file.path, "r+b") as data:
        data.write(b"/")
    os.utime(file.path, ns=times)
    assert load(folder, identify(file.path)) is not None
    os.utime(file.path, ns=(0, 0))
    assert load(folder, identify(file.path)) is None, "another time"
    assert load(str(tmp_path / "nowhere"), file) is None


def test_any_damage_to_a_saved_table_makes_it_absent(saved):
    folder, file, table = saved
    (name,) = os.listdir(folder)
    place = os.path.join(folder, name)
    with open(place, "rb") as data:
        whole = data.read()
    head = whole.index(b"\n", 40) + 1
    assert len(whole) > 64 * 1024
    chance = random.Random(1)
    spots = [*chance.sample(range(head), 60), *chance.sample(range(64 * 1024, len(whole)), 60)]
    for damaged in [whole[:100], whole[:-1], whole + b"x", b"", *(flipped(whole, spot) for spot in spots)]:
        with open(f"{place}.new", "wb") as data:
            data.write(damaged)
        os.replace(f"{place}.new", place)  # a mapped file must not be cut
        loaded = load(folder, file)
        assert loaded is None or same(loaded, table)


def flipped(whole, at):
    return whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    path = written(tmp_path, archive(["a.x"]))
    table = group(walk(path))
    assert save(os.path.join(path, "under a file"), identify(path), table) is table


def test_too_many_fields_are_not_saved(tmp_path):
    path = written(tmp_path, archive([f"a.{number:0200d}" for number in range(400)], "gnu"))
    table = group(walk(path))
    assert save(str(tmp_path), identify(path), table) is table
    assert load(str(tmp_path), identify(path)) is None


def test_a_table_must_fit_together(saved):
    table = saved[2]
    with pytest.raises(ValueError, match="one row per key and one column per field"):
        SampleTable(table.path, table.fields[1:], table.keys, table.offsets, table.lengths)


# Long archives.


@pytest.mark.parametrize("tar_format", FORMATS)
@pytest.mark.parametrize("seed", range(4))
def test_long_archives_with_unusual_headers_among_the_usual(tmp_path, tar_format, seed):
    rng = random.Random(seed)
    members = []
    for number in range(1500):
        name = rng.choice(["", "", "", "folder/", "__meta__/", "long/" * 30]) + f"{number // 3:05d}.{number % 3}"
        kind = rng.choice([tarfile.REGTYPE] * 30 + [tarfile.DIRTYPE, tarfile.SYMTYPE])
        time_ = rng.choice([1.0, 1700000000.25])  # pax gives fractions of a second in records
        size = 0 if kind != tarfile.REGTYPE else rng.choice([0, 1, 511, 512, 513, 700, 40_000])
        members.append(member(name, size, kind, mtime=time_ if tar_format == "pax" else int(time_)))
    path = written(tmp_path, archive(members, tar_format))
    with tarfile.open(path) as tar:
        expected = [(each.name, each.offset_data, each.size) for each in tar if each.isreg()]
    assert list(walk(path)) == expected


def test_a_damaged_header_among_many_is_found(tmp_path):
    data = bytearray(archive([(f"{number:05d}.x", 700) for number in range(900)]))
    data[400 * 1536 + 3] ^= 1
    with pytest.raises(Corrupt, match=r"offset 614,400 \(after '00399\.x', the last whole member\)"):
        walk(written(tmp_path, data))


def test_names_of_members_are_not_taken_from_bytes_of_others(tmp_path):
    """Words that pax records use may stand in any member, and whole headers too."""
    inner = archive([("inner.path=size=", 10)] * 3)
    names = [f"{number:04d}.tar" for number in range(300)]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            tar.addfile(member(name, len(inner), mtime=1.5), io.BytesIO(inner))
    assert list(walk(written(tmp_path, out.getvalue())).names) == names


@given(
    names=st.lists(st.text("ab./_", min_size=1, max_size=9), max_size=30),
    at_once=st.integers(1, 5),
)
def test_grouping_many_at_a_time_is_splitting_one_by_one(names, at_once):
    texts = TextColumn(
        np.frombuffer("".join(names).encode(), np.uint8), np.cumsum([len(name) for name in names], dtype=np.int64)
    )
    members = tarwalk.MemberTable("x.tar", texts, np.arange(len(names)), np.arange(len(names)))
    expected, last, twice = [], None, False
    for name in names:
        split = split_name(name.encode())
        if split is None:
            continue
        key, field = split[0].decode(), split[1].decode()
        if key != last:
            expected.append((key, []))
        twice |= field in expected[-1][1]
        expected[-1][1].append(field)
        last = key
    torn = len({key for key, _ in expected}) < len(expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tar_samples, "_AT_ONCE", at_once)
        if twice or torn:
            with pytest.raises(Corrupt, match="twice" if twice else "not contiguous"):
                group(members)
            return
        table = group(members)
    assert list(table.keys) == [key for key, _ in expected]
    there = [{table.fields[column] for column in np.flatnonzero(row >= 0)} for row in table.offsets]
    assert there == [set(fields) for _, fields in expected]
