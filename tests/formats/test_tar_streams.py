"""Tars read once, against Python's tarfile; cut and damaged ones, which that takes for the end."""

import bz2
import gzip
import io
import lzma
import os
import re
import socket
import tarfile
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, Corrupt, LimitExceeded, PenstockError, Truncated, Unavailable
from penstock.files.compression import DecompressedStream
from penstock.formats.tar.walk import Walk

NAMES = [
    "a.txt", "folder/b.jpg", "../c.txt", "/d.txt", "-e.txt", "x" * 90 + "/" + "y" * 90 + ".txt", "z" * 300 + ".npy",
    "ü/é.txt", "w" * 99 + ".t", "n" * 100 + ".t",
]  # fmt: skip
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def tar(members, form=tarfile.PAX_FORMAT, **header):
    """Members as (name, bytes); names that do not fit the format are left out."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as written:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in header.items():
                setattr(info, key, value)
            try:
                written.addfile(info, io.BytesIO(content))
            except ValueError:
                assert form == tarfile.USTAR_FORMAT
    return stream.getvalue()


def contents(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


MEMBERS = [(name, contents(77 * number, number)) for number, name in enumerate(NAMES)]
PLAIN = tar([(f"{number}.txt", contents(700, number)) for number in range(6)])


def read(source):
    """All members with their content."""
    walk = Walk(DecompressedStream(source, "x.tar"))
    return [(entry.name.decode("utf-8", "surrogateescape"), walk.content(entry)) for entry in walk]


def names(source):
    """All members, skipped."""
    return [entry.name.decode("utf-8", "surrogateescape") for entry in Walk(DecompressedStream(source, "x.tar"))]


class Dribble:
    """A source that gives a few bytes at a time and can do nothing else."""

    def __init__(self, data, most=100):
        self._stream, self._most = io.BytesIO(data), most

    def read(self, size):
        return self._stream.read(min(size, self._most))


PACKERS = {"plain": bytes, "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("source", [io.BytesIO, Dribble])
@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_members_are_those_of_tarfile(form, pack, source):
    data = tar(MEMBERS, form)
    with tarfile.open(fileobj=io.BytesIO(data)) as oracle:
        expected = [(member.name, oracle.extractfile(member).read()) for member in oracle]
    assert read(source(pack(data))) == expected
    assert names(source(pack(data))) == [name for name, _ in expected]


def test_zstd():
    zstandard = pytest.importorskip("zstandard")
    packed = zstandard.ZstdCompressor().compress(PLAIN)
    assert read(Dribble(packed)) == read(io.BytesIO(PLAIN))
    with pytest.raises((Truncated, Corrupt), match=r"x\.tar"):
        read(io.BytesIO(packed[:-20]))


def test_zstd_without_its_library(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    monkeypatch.setitem(__import__("sys").modules, "compression", None)
    with pytest.raises(ConfigError, match=r"x\.tar: is compressed by zstd: pip install .penstock"):
        read(io.BytesIO(b"\x28\xb5\x2f\xfd" + bytes(100)))


def test_several_parts_of_gzip():
    assert read(io.BytesIO(gzip.compress(PLAIN[:1000]) + gzip.compress(PLAIN[1000:]))) == read(io.BytesIO(PLAIN))


def test_folders_are_no_members_and_what_is_no_file_says_so():
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as written:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
            info = tarfile.TarInfo(f"{kind.decode()}.txt")
            info.type, info.linkname = kind, "elsewhere"
            written.addfile(info)
        info = tarfile.TarInfo("file.txt")
        info.size = 3
        written.addfile(info, io.BytesIO(b"abc"))
    kinds = {"2.txt": "symbolic link to 'elsewhere'", "1.txt": "hard link to 'elsewhere'", "6.txt": "pipe",
             "3.txt": "device"}  # fmt: skip
    walk = Walk(DecompressedStream(io.BytesIO(stream.getvalue()), "x.tar"))
    for entry in walk:
        if entry.is_file:
            assert (entry.name, walk.content(entry)) == (b"file.txt", b"abc")
        else:
            name = entry.name.decode()
            assert re.search(rf"x\.tar.*{name}.*{kinds.pop(name)}, which holds no bytes", walk.explain(entry))
    assert not kinds


def test_large_members_and_those_left_out(tmp_path):
    big = [("a.bin", contents(3_000_000)), ("b.bin", contents(2_000_001, 1)), ("c.bin", b"x")]
    path = tmp_path / "big.tar"
    path.write_bytes(tar(big))
    with path.open("rb") as source:
        assert read(source) == big
    with path.open("rb") as source:
        walk = Walk(DecompressedStream(source, "big.tar"))
        wanted = [(each.name.decode(), walk.content(each)) for each in walk if each.name != b"a.bin"]
    assert wanted == big[1:]


def test_a_pipe_and_a_socket():
    reading, writing = os.pipe()
    ends = socket.socketpair()

    def send():
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(PLAIN)
        with ends[0]:
            ends[0].sendall(PLAIN)

    sender = threading.Thread(target=send)
    sender.start()
    with open(reading, "rb") as pipe, ends[1], ends[1].makefile("rb") as answer:
        assert read(pipe) == read(io.BytesIO(PLAIN))
        assert read(answer) == read(io.BytesIO(PLAIN))
    sender.join()


def test_sizes_in_binary():
    """GNU's way to write numbers that eight digits do not hold."""
    data = bytearray(tar([("a.txt", b"hello")], tarfile.GNU_FORMAT))
    data[124:136] = b"\x80" + bytes(10) + b"\x05"
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    assert read(io.BytesIO(bytes(data))) == [("a.txt", b"hello")]


def test_checksums_of_signed_bytes():
    data = bytearray(tar([("ü.txt", b"hello")], tarfile.GNU_FORMAT))
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(byte - 256 * (byte > 127) for byte in data[:512])
    assert read(io.BytesIO(bytes(data))) == [("ü.txt", b"hello")]


# The end.


def test_an_end_of_one_block_is_enough():
    end = PLAIN.rstrip(b"\0")
    end += bytes(-len(end) % 512)
    assert len(read(io.BytesIO(end + bytes(512)))) == 6
    with pytest.raises(Truncated, match=r"x\.tar, offset 9,216 \(after '5.txt'.*no end-of-archive"):
        read(io.BytesIO(end))


def test_an_empty_tar_has_no_members_and_an_empty_file_is_none():
    assert read(io.BytesIO(tar([]))) == []
    with pytest.raises(Truncated, match=r"no end-of-archive .* 0 are there"):
        read(io.BytesIO(b""))


@pytest.mark.parametrize("source", [io.BytesIO, Dribble])
@pytest.mark.parametrize("reads", [True, False])
def test_every_cut_is_reported_after_what_came_before_it(reads, source):
    whole = read(io.BytesIO(PLAIN))
    size = 512 + 1024  # of each member
    for cut in [*range(1, 6 * size, 333), *range(512, 6 * size + 1, 512)]:
        came = []
        walk = Walk(DecompressedStream(source(PLAIN[:cut]), "x.tar"))
        with pytest.raises(Truncated, match=r"x\.tar, offset .*the file ends .*: fetch it again"):
            came.extend((entry.name.decode(), walk.content(entry) if reads else b"") for entry in walk)
        if reads:
            assert came == whole[: (cut - 512 - 700) // size + 1]


def test_a_cut_says_where_and_how_much():
    with pytest.raises(Truncated, match=r"offset 2,048 .*inside member '1.txt': 700 bytes were wanted .*152 are there"):
        read(io.BytesIO(PLAIN[:2200]))
    with pytest.raises(Truncated, match=r"offset 2,048 .*inside member '1.txt': 700 bytes were wanted .*152 are there"):
        names(io.BytesIO(PLAIN[:2200]))
    with pytest.raises(Truncated, match=r"offset 1,536 .*inside a header: 512 bytes .* 64 are there"):
        read(io.BytesIO(PLAIN[:1600]))


@pytest.mark.parametrize("at", [0, 1536, 1536 * 3])
def test_a_damaged_header_is_never_the_end(at):
    data = bytearray(PLAIN)
    data[at + 100 : at + 106] = b"\1\2\3\4\5\6"
    with pytest.raises(Corrupt, match=rf"x\.tar, offset {at:,} .*header checksum"):
        names(io.BytesIO(bytes(data)))
    data = bytearray(PLAIN)
    data[at + 148 : at + 156] = b"nonsense"
    with pytest.raises(Corrupt, match=rf"offset {at:,} .*b'nonsense' is stored"):
        read(io.BytesIO(bytes(data)))


def test_a_hole_is_not_the_end():
    data = bytearray(PLAIN)
    data[1536:2048] = bytes(512)
    with pytest.raises(Corrupt, match=r"offset 1,536 .*zeros end the archive here, but more follows at offset 2,048"):
        read(io.BytesIO(bytes(data)))


def test_what_is_no_tar():
    with pytest.raises(Corrupt, match=r"offset 0 .*is not a tar"):
        read(io.BytesIO(b"this is a text file\n" * 100))


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress], ids=["gz", "bz2", "xz"])
def test_compressed_and_cut_or_damaged(pack):
    packed = pack(PLAIN)
    for left in (len(packed) - 1, len(packed) // 2, 20):
        with pytest.raises(Truncated, match=r"x\.tar: "):
            read(io.BytesIO(packed[:left]))
    damaged = bytearray(packed)
    damaged[len(packed) // 2] ^= 0xFF
    with pytest.raises((Corrupt, Truncated), match=r"x\.tar: "):
        read(io.BytesIO(bytes(damaged)))


def test_the_checksum_of_gzip_is_looked_at():
    packed = bytearray(gzip.compress(PLAIN, mtime=0))
    packed[-6] ^= 1
    with pytest.raises(Corrupt, match=r"does not decompress .*CRC"):
        read(io.BytesIO(bytes(packed)))


# Limits, and sources that fail.


def test_a_length_is_believed_only_as_far_as_there_are_bytes():
    info = tarfile.TarInfo("huge.bin")
    info.size = 2**40
    header = info.tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(Truncated, match=r"1,099,511,627,776 bytes .* 5,000 are there"):
        read(io.BytesIO(header + bytes(5000)))


def test_long_headers_are_limited():
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 2**30
    with pytest.raises(LimitExceeded, match="an extended header of 1,073,741,824 bytes"):
        read(io.BytesIO(info.tobuf(tarfile.GNU_FORMAT) + bytes(5000)))


def test_sparse_members_are_refused():
    info = tarfile.TarInfo("holes.bin")
    info.type = tarfile.GNUTYPE_SPARSE
    with pytest.raises(Corrupt, match="is sparse"):
        read(io.BytesIO(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)))


def test_a_source_that_fails_says_where():
    class Failing(Dribble):
        def read(self, size):
            if self._stream.tell() > 2000:
                raise OSError(5, "Input/output error")
            return super().read(size)

    with pytest.raises(Unavailable, match=r"x\.tar: reading failed after byte 2,0\d\d .*Input/output error"):
        read(Failing(PLAIN))


def test_text_instead_of_bytes():
    with pytest.raises(ConfigError, match='mode="rb"'):
        read(io.StringIO("hello"))


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([tar(MEMBERS, form) for form in FORMATS.values()] + [gzip.compress(PLAIN, mtime=0)]),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
    st.floats(0, 1),
)
def test_any_damage_is_an_error_of_ours_or_none(data, changes, left):
    damaged = bytearray(data)
    for place, value in changes:
        damaged[int(place * len(damaged))] = value
    try:
        read(io.BytesIO(bytes(damaged[: int(left * len(damaged))])))
    except PenstockError as error:
        assert str(error).startswith(("x.tar: ", "x.tar, "))  # noqa: PT017
