"""Archives that are cut, damaged, ragged or hostile: an error that says where, and nothing but the bad samples lost."""

import io
import os
import pickle
import re
import struct
import tarfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import penstock as ps
from penstock.base.policy import DEFAULT as POLICY
from penstock.errors import (
    Changed,
    ConfigError,
    Corrupt,
    DataError,
    DecodeFailed,
    LimitExceeded,
    Missing,
    SchemaMismatch,
    Truncated,
    Unsafe,
)
from penstock.testing.measure import MemoryWatch

SAMPLES = 10
BAD = 6
"""The sample that something is wrong with, where it is not the first."""
MIB = 2**20

Sample = tuple[str, Mapping[str, bytes]]


def npy(values: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values, **options)
    return stream.getvalue()


def npy_with_header(header: str, body: bytes = b"") -> bytes:
    line = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(line)) + line + body


def picture(number: int, kind: str = "JPEG", size: tuple[int, int] = (16, 24)) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def png_declaring(width: int, height: int) -> bytes:
    """A hundred bytes that promise gigabytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(64))) + chunk(b"IEND", b"")
    )


def values(number: int) -> np.ndarray:
    return np.full((3, 4), number, np.float32)


def usual(count: int = SAMPLES) -> list[Sample]:
    return [(f"k{n:03d}", {"jpg": picture(n), "npy": npy(values(n)), "cls": b"%d" % n}) for n in range(count)]


def write(path: Path, samples: Sequence[Sample]) -> dict[str, int]:
    """Write an archive; returns where the bytes of each member begin."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for key, members in samples:
            for field, content in members.items():
                info = tarfile.TarInfo(f"{key}.{field}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    with tarfile.open(path) as archive:
        return {member.name: member.offset_data for member in archive}


def with_member(sample: int, field: str, content: bytes) -> list[Sample]:
    """The usual samples, one of which has another member."""
    samples = usual()
    samples[sample] = (samples[sample][0], {**samples[sample][1], field: content})
    return samples


def loader(ds: ps.Dataset, **options: Any) -> ps.Loader:
    given = {"batch_size": 4, "shuffle": True, "memory": "64MiB", "threads": 2, "output": "numpy"}
    return ps.Loader(ds, **{**given, **options})


def keys_read(ds: ps.Dataset, columns: tuple[str, ...], **options: Any) -> tuple[list[str], Any]:
    """The keys of one epoch that leaves out what cannot be read, and its account."""
    with loader(ds, on_error="skip", columns=(*columns, "__key__"), **options) as batches:
        keys = [key for batch in batches for key in batch[-1]]
        return sorted(keys), batches.stats()


def names_without(*numbers: int) -> list[str]:
    return [f"k{n:03d}" for n in range(SAMPLES) if n not in numbers]


def check_message(error: BaseException, path: Path, member: str, offset: int | None) -> None:
    text = str(error)
    assert str(path) in text
    assert member in text
    if offset is not None:
        assert f"{offset:,}" in text, f"the offset {offset:,} is not in: {text}"


# Files that are no whole archive: found when they are opened.


def cut_inside_a_member(path: Path, offsets: Mapping[str, int]) -> None:
    os.truncate(path, offsets[f"k{BAD:03d}.npy"] + 10)


def cut_inside_a_header(path: Path, offsets: Mapping[str, int]) -> None:
    os.truncate(path, offsets[f"k{BAD:03d}.npy"] - 100)


def cut_between_members(path: Path, offsets: Mapping[str, int]) -> None:
    os.truncate(path, offsets[f"k{BAD:03d}.npy"] - 512)


def damaged_header(path: Path, offsets: Mapping[str, int]) -> None:
    with open(path, "r+b") as file:
        file.seek(offsets[f"k{BAD:03d}.npy"] - 512 + 3)
        file.write(b"\xff")


def hole_in_a_header(path: Path, offsets: Mapping[str, int]) -> None:
    with open(path, "r+b") as file:
        file.seek(offsets[f"k{BAD:03d}.npy"] - 512)
        file.write(bytes(512))


@pytest.mark.case(1, 2, 3)
@pytest.mark.parametrize(
    ("harm", "kind", "where"),
    [
        (cut_inside_a_member, Truncated, 0),
        (cut_inside_a_header, Truncated, -512),
        (cut_between_members, Truncated, -512),
        (damaged_header, Corrupt, -512),
        (hole_in_a_header, Corrupt, -512),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_an_archive_that_is_not_whole(tmp_path: Path, harm: Callable[..., None], kind: type, where: int) -> None:
    path = tmp_path / "bad.tar"
    offsets = write(path, usual())
    harm(path, offsets)
    for _ in range(2):  # nothing of it may be kept in an index
        with pytest.raises(kind) as caught:
            ps.open(path)
        check_message(caught.value, path, f"k{BAD:03d}.jpg", offsets[f"k{BAD:03d}.npy"] + where)
    write(tmp_path / "good.tar", usual())
    ds = ps.open([tmp_path / "good.tar", path], on_error="skip")
    assert [type(why) for why in ds.left_out] == [kind]
    keys, stats = keys_read(ds, ("npy",))
    assert keys == names_without()
    assert (stats.left_out_samples, len(stats.files_left_out)) == (0, 1)


@pytest.mark.case(2)
def test_an_archive_cut_after_it_was_indexed(tmp_path: Path) -> None:
    path, index = tmp_path / "a.tar", tmp_path / "index"
    offsets = write(path, usual())
    ps.open(path, index_dir=index)
    cut_inside_a_member(path, offsets)
    with pytest.raises(Truncated):
        ps.open(path, index_dir=index)


@pytest.mark.case(15)
@pytest.mark.parametrize("content", [b"", b"\0" * 10240, b"\0" * 100], ids=["no bytes", "only its end", "100 bytes"])
def test_an_empty_archive(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(str(path))):
        ps.open(path)
    write(tmp_path / "b.tar", usual())
    ds = ps.open(tmp_path / "*.tar", on_error="skip")
    assert (len(ds), len(ds.left_out)) == (SAMPLES, 1)


def test_an_archive_of_folders_and_links_alone(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, kind in (("x.npy", tarfile.DIRTYPE), ("y.npy", tarfile.SYMTYPE), ("z.npy", tarfile.LNKTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
    with pytest.raises(Unsafe, match=r"y\.npy.*/etc/passwd.*outside of the archive"):
        ps.open(tmp_path / "a.tar")
    with pytest.raises(ConfigError, match="none that belong to a sample"):
        ps.open(tmp_path / "a.tar", on_error="skip")


def test_a_compressed_archive(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", usual())
    with tarfile.open(tmp_path / "b.tar", "w:gz") as archive:
        archive.add(tmp_path / "a.tar", "a.tar")
    with pytest.raises(ConfigError, match="compressed with gzip"):
        ps.open(tmp_path / "b.tar")


# Samples that are not like the others.


@pytest.mark.case(5)
def test_a_sample_without_a_field(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    samples = usual()
    for number in (BAD, 8):
        key, members = samples[number]
        samples[number] = key, {name: members[name] for name in ("cls", "jpg")}
    write(path, samples)
    with pytest.raises(SchemaMismatch) as caught:
        ps.open(path)
    check_message(caught.value, path, "'k006' has no 'npy'", None)
    assert re.search(r"it has (jpg, cls|cls, jpg)", str(caught.value))
    assert "1 others" in str(caught.value)
    assert len(ps.open(path, fields=("jpg", "cls"))[:]["cls"]) == SAMPLES
    ds = ps.open(path, on_error="skip")
    keys, stats = keys_read(ds, ("npy", "jpg"))
    assert keys == names_without(BAD, 8)
    assert sorted((each.row, each.key) for each in stats.left_out) == [(BAD, "k006"), (8, "k008")]
    assert all("no 'npy'" in each.why and each.url == str(path) for each in stats.left_out)
    assert keys_read(ds, ("jpg", "cls"))[0] == names_without(), "where the field is not wanted, nothing is missing"
    with loader(ds) as batches, pytest.raises(Missing, match=r"k00[68]"):
        list(batches)


@pytest.mark.case(5)
def test_the_first_sample_lacks_a_field(tmp_path: Path) -> None:
    samples = usual()
    samples[0] = ("k000", {"cls": b"0"})
    write(tmp_path / "a.tar", samples)
    with pytest.raises(SchemaMismatch, match=r"'k000' has no '(npy|jpg)' \(it has cls\)"):
        ps.open(tmp_path / "a.tar")
    keys, stats = keys_read(ps.open(tmp_path / "a.tar", on_error="skip"), ("npy", "jpg"))
    assert keys == names_without(0)
    assert [each.key for each in stats.left_out] == ["k000"]


def test_a_field_that_no_sample_has(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", usual())
    with pytest.raises(Missing, match=r"a\.tar: no field 'png'; its members are 'jpg', 'npy', 'cls'"):
        ps.open(tmp_path / "a.tar", fields=["png"])


@pytest.mark.case(5)
@pytest.mark.parametrize("second", ["npy", "NPY"])
def test_a_repeated_field(tmp_path: Path, second: str) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("k0.npy", "k1.npy", f"k1.{second}", "k2.npy"):
            content = npy(values(0))
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    with pytest.raises(Corrupt, match=rf"a\.tar: sample 'k1' has field 'npy' twice.*'k1\.{second}'"):
        ps.open(tmp_path / "a.tar")


@pytest.mark.case(5)
def test_a_key_that_comes_again(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", [*usual(3), *usual(1)])
    with pytest.raises(Corrupt, match=r"a\.tar: key 'k000' is not contiguous"):
        ps.open(tmp_path / "a.tar")


# One member of one sample is bad.


def cut(number: int) -> bytes:
    return picture(number)[:-60]


def flipped(number: int) -> bytes:
    """A JPEG whose tables are damaged."""
    content = bytearray(picture(number))
    content[25:120] = bytes(95)
    return bytes(content)


BAD_MEMBERS: dict[str, tuple[str, bytes, type, str]] = {
    "jpeg of no bytes": ("jpg", b"", DecodeFailed, "0 bytes"),
    "jpeg cut in its header": ("jpg", picture(1)[:15], DecodeFailed, "15 bytes"),
    "jpeg cut in its pixels": ("jpg", cut(1), DecodeFailed, "cut short"),
    "jpeg of garbage": ("jpg", b"\xff\xd8\xff" + bytes(range(256)) * 4, DecodeFailed, "jpeg"),
    "jpeg with damaged tables": ("jpg", flipped(1), DecodeFailed, "jpeg"),
    "text for a picture": ("jpg", b"<html>404 not found</html>", DecodeFailed, "html"),
    "png cut in its pixels": ("jpg", picture(1, "PNG")[:-300], DecodeFailed, "png"),
    "webp cut in its pixels": ("jpg", picture(1, "WEBP")[:-200], DecodeFailed, "webp"),
    "picture of another size": ("jpg", picture(1, size=(17, 24)), SchemaMismatch, "17 x 24"),
    "picture of another kind and size": ("jpg", picture(1, "TIFF", (9, 9)), DataError, "9"),
    "npy of another dtype": ("npy", npy(values(1).astype("f8")), SchemaMismatch, "float64"),
    "npy of another byte order": ("npy", npy(values(1).astype(">f4")), SchemaMismatch, ">f4"),
    "npy of another shape": ("npy", npy(np.ones((4, 3), "f4")), SchemaMismatch, "(4, 3)"),
    "npy of another length": ("npy", npy(np.ones((3, 5), "f4")), SchemaMismatch, "(3, 5)"),
    "npy of no axes": ("npy", npy(np.float32(1)), SchemaMismatch, "()"),
    "npy in Fortran order": ("npy", npy(np.asfortranarray(values(1))), SchemaMismatch, "Fortran order"),
    "npy of text": ("npy", npy(np.array(["a", "b"])), SchemaMismatch, "<U1"),
    "npy of records": ("npy", npy(np.zeros(2, "i4,f4")), SchemaMismatch, "f0"),
    "npy of no bytes": ("npy", b"", DecodeFailed, "npy header"),
    "npy cut in its header": ("npy", npy(values(1))[:40], DecodeFailed, "npy header"),
    "npy cut in its values": ("npy", npy(values(1))[:-5], Corrupt, "176 bytes, in a member of 171"),
    "npy with bytes behind": ("npy", npy(values(1)) + b"more", Corrupt, "180"),
    "npy of garbage": ("npy", b"PK\x03\x04" + bytes(300), DecodeFailed, "npy header"),
    "npy that declares too much": (
        "npy", npy_with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,)}"), Corrupt,
        "4,000,000,000,0",
    ),
    "npy of a negative shape": (
        "npy", npy_with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-3, 4)}"), DataError, "-3",
    ),
    "npy with an expression for a header": ("npy", npy_with_header("-" * 9000 + "1"), DecodeFailed, "npy header"),
    "npy with a deep header": ("npy", npy_with_header("{'descr': " + "1+" * 3000 + "1}"), DecodeFailed, "npy header"),
    "number of no bytes": ("cls", b"", DecodeFailed, "whole number"),
    "number that is a word": ("cls", b"seven", DecodeFailed, "seven"),
    "number with a fraction": ("cls", b"7.0", DecodeFailed, "7.0"),
    "number with an underscore": ("cls", b"1_0", DecodeFailed, "1_0"),
    "number of more than 64 bits": ("cls", b"9223372036854775808", DecodeFailed, "9223372036854775808"),
    "number of many digits": ("cls", b"1" * 5000, DecodeFailed, "5,000 bytes"),
}  # fmt: skip


@pytest.mark.case(6)
@pytest.mark.parametrize("name", BAD_MEMBERS)
def test_one_bad_member(tmp_path: Path, name: str) -> None:
    field, content, kind, said = BAD_MEMBERS[name]
    path = tmp_path / "a.tar"
    offsets = write(path, with_member(BAD, field, content))
    ds = ps.open(path)
    with pytest.raises(kind) as caught:
        ds[BAD]
    check_message(caught.value, path, f"k006.{field}", offsets[f"k006.{field}"])
    assert said in str(caught.value)
    assert np.array_equal(ds.select(range(BAD))[:]["cls"], np.arange(BAD))
    with loader(ds) as batches, pytest.raises(kind):
        list(batches)
    keys, stats = keys_read(ds, (field,))
    assert keys == names_without(BAD)
    assert [(each.row, each.key, each.url) for each in stats.left_out] == [(BAD, "k006", str(path))]
    assert (stats.left_out_samples, stats.samples) == (1, SAMPLES - 1)
    assert said in stats.left_out[0].why
    others = tuple(other for other in ds.fields if other != field)
    assert keys_read(ds, others)[0] == names_without(), "other fields of the sample are whole"


GOOD_BY_THEMSELVES = ("npy of no axes", "npy in Fortran order")
BAD_BY_THEMSELVES = [name for name in BAD_MEMBERS if "another" not in name and name not in GOOD_BY_THEMSELVES]
"""Those that need no other sample to be seen as bad."""


@pytest.mark.case(6)
@pytest.mark.parametrize("name", BAD_BY_THEMSELVES)
def test_the_first_member_is_bad(tmp_path: Path, name: str) -> None:
    """The first sample says what all hold: if it makes no sense, opening says so, and skipping loses it alone."""
    field, content, _, _ = BAD_MEMBERS[name]
    path = tmp_path / "a.tar"
    offsets = write(path, with_member(0, field, content))
    with pytest.raises(DataError) as caught:
        ps.open(path)[0]
    check_message(caught.value, path, f"k000.{field}", offsets[f"k000.{field}"])
    keys, stats = keys_read(ps.open(path, on_error="skip"), (field,))
    assert keys == names_without(0)
    assert [each.key for each in stats.left_out] == ["k000"]


def test_the_same_array_under_another_header(tmp_path: Path) -> None:
    """Version 2 of the format, or other padding, says the same of the values: they are the same array."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, values(BAD), version=(2, 0))
    write(tmp_path / "a.tar", with_member(BAD, "npy", stream.getvalue()))
    assert np.array_equal(ps.open(tmp_path / "a.tar", fields=["npy"])[BAD]["npy"], values(BAD))


def test_several_bad_members_in_two_shards(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", with_member(BAD, "jpg", cut(1)))
    other = [(f"m{key[1:]}", members) for key, members in with_member(2, "npy", b"\x93NUMPY")]
    other[9] = ("m009", {**other[9][1], "cls": b"nine"})
    write(tmp_path / "b.tar", other)
    ds = ps.open(tmp_path / "*.tar").cast("jpg", "float32", scale=1 / 255)
    for threads in (1, 3):
        keys, stats = keys_read(ds, ("jpg", "npy", "cls"), threads=threads)
        bad = {"k006", "m002", "m009"}
        assert keys == sorted({f"{letter}{n:03d}" for letter in "km" for n in range(SAMPLES)} - bad)
        assert {each.key for each in stats.left_out} == bad
        assert {each.row for each in stats.left_out} == {6, 12, 19}
        assert "3 samples were left out" in str(stats)


def test_pictures_of_two_sizes_name_both(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", with_member(BAD, "jpg", picture(1, "PNG", (30, 7))))
    with pytest.raises(SchemaMismatch, match=r"a\.tar: k006\.jpg at offset [\d,]+.*30 x 7.*first sample's is 16 x 24"):
        ps.open(tmp_path / "a.tar")[:]


@pytest.mark.case(7)
@pytest.mark.parametrize("sample", [0, BAD])
def test_a_picture_that_declares_gigabytes(tmp_path: Path, sample: int) -> None:
    path = tmp_path / "a.tar"
    offsets = write(path, with_member(sample, "jpg", png_declaring(50_000, 50_000)))
    kinds = LimitExceeded if sample == 0 else (LimitExceeded, SchemaMismatch)
    with MemoryWatch() as watch, pytest.raises(kinds, match=r"50,?000") as caught:
        ps.open(path)[sample]
    check_message(caught.value, path, f"k{sample:03d}.jpg", offsets[f"k{sample:03d}.jpg"])
    assert watch.peak_bytes < 32 * MIB


def test_a_larger_picture_of_a_rare_kind(tmp_path: Path) -> None:
    """It is refused for its size before its pixels are decoded."""
    stream = io.BytesIO()
    Image.new("L", (6000, 6000)).save(stream, "TIFF", compression="tiff_adobe_deflate")
    write(tmp_path / "a.tar", with_member(BAD, "jpg", stream.getvalue()))
    ds = ps.open(tmp_path / "a.tar", fields=["jpg"])
    ds[0]
    with MemoryWatch() as watch, pytest.raises(DataError, match=r"k006\.jpg"):
        ds[BAD]
    assert watch.peak_bytes < 32 * MIB


@pytest.mark.case(7)
def test_every_picture_declares_gigabytes(tmp_path: Path) -> None:
    """An archive of them must not pass for a dataset that merely needs a larger budget."""
    write(tmp_path / "a.tar", [(f"k{n}", {"png": png_declaring(50_000, 50_000)}) for n in range(3)])
    with pytest.raises(LimitExceeded, match=r"k0\.png.*50,000 by 50,000"):
        ps.open(tmp_path / "a.tar")


@pytest.mark.case(8)
def test_every_array_declares_more_than_it_has(tmp_path: Path) -> None:
    content = npy_with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000,)}", bytes(40))
    write(tmp_path / "a.tar", [(f"k{n}", {"npy": content}) for n in range(3)])
    with MemoryWatch() as watch, pytest.raises(Corrupt, match=r"k0\.npy"):
        ps.open(tmp_path / "a.tar")
    assert watch.peak_bytes < 32 * MIB


def test_a_picture_of_no_width(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", [(f"k{n}", {"png": png_declaring(0, 7)}) for n in range(3)])
    with pytest.raises(DataError, match=r"k0\.png"):
        ps.open(tmp_path / "a.tar")[0]


# Members that would run code, and names that point elsewhere.


@pytest.mark.case(17)
@pytest.mark.parametrize("sample", [0, BAD])
def test_arrays_of_objects_are_not_unpickled(tmp_path: Path, trap: Any, sample: int) -> None:
    path = tmp_path / "a.tar"
    content = npy(np.array([trap, None], object), allow_pickle=True)
    offsets = write(path, with_member(sample, "npy", content))
    with pytest.raises(Unsafe) as caught:
        ps.open(path)[sample]
    check_message(caught.value, path, f"k{sample:03d}.npy", offsets[f"k{sample:03d}.npy"])
    if sample:
        keys, stats = keys_read(ps.open(path), ("npy",))
        assert keys == names_without(BAD)
        assert "unpickling" in stats.left_out[0].why


@pytest.mark.case(17)
@pytest.mark.parametrize("field", ["pyd", "pickle", "pkl", "pth", "pt"])
def test_members_that_hold_objects_are_never_read(tmp_path: Path, trap: Any, field: str) -> None:
    path = tmp_path / "a.tar"
    write(path, [(key, {field: pickle.dumps(trap), **members}) for key, members in usual()])
    with pytest.warns(ps.FieldsLeftOut, match=f"{field!r}: pickled"):
        ds = ps.open(path)
    assert list(ds.fields) == ["jpg", "npy", "cls"]
    assert len(ds[:]["cls"]) == SAMPLES
    with pytest.raises(Unsafe, match=rf"a\.tar: k000\.{field} at offset .* would run code from it"):
        ps.open(path, fields=["npy", field])


@pytest.mark.parametrize("field", ["npz", "json", "txt"])
def test_pickles_are_no_text_and_no_arrays(tmp_path: Path, trap: Any, field: str) -> None:
    path = tmp_path / "a.tar"
    write(path, [(key, {field: pickle.dumps(trap), **members}) for key, members in usual()])
    with pytest.raises(DecodeFailed, match=rf"k002\.{field}"):
        ps.open(path, fields=["npy", field])[2]


@pytest.mark.case(17)
def test_pickles_under_other_names(tmp_path: Path, trap: Any) -> None:
    """Neither numpy's nor Pillow's readers are let loose on bytes that only a pickle could explain."""
    for field in ("npy", "jpg", "cls"):
        path = tmp_path / f"{field}.tar"
        write(path, with_member(BAD, field, pickle.dumps(trap)))
        with pytest.raises(DecodeFailed, match=rf"k006\.{field}"):
            ps.open(path)[BAD]


NAMES = ["../../outside", "/etc/passwd", "a/../../b", "./here", "C:\\windows\\x", "with space", "%s{}", "~root"]


@pytest.mark.case(16)
def test_names_are_keys_and_never_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "in" / "ner"
    inner.mkdir(parents=True)
    write(inner / "a.tar", [(name, {"cls": b"%d" % n}) for n, name in enumerate(NAMES)])
    monkeypatch.chdir(inner)
    before = sorted(tmp_path.rglob("*"))
    ds = ps.open("a.tar", index_dir=False)
    assert [ds.origin(row).key for row in range(len(ds))] == NAMES
    assert {ds.origin(row).url for row in range(len(ds))} == {str(inner / "a.tar")}
    assert ds[:]["cls"].tolist() == list(range(len(NAMES)))
    assert sorted(tmp_path.rglob("*")) == before


# Archives that change while they are read.


@pytest.mark.case(10)
@pytest.mark.parametrize("how", ["replaced", "rewritten"])
def test_an_archive_that_changes_in_mid_epoch(tmp_path: Path, how: str) -> None:
    path, other = tmp_path / "a.tar", tmp_path / "other.tar"
    for archive, add in ((path, 0), (other, 1000)):
        content = npy(np.full((64, 256), add, np.float32))
        write(archive, [(f"k{n:03d}", {"npy": content, "cls": b"%04d" % (n + add)}) for n in range(300)])
    os.utime(other, ns=(0, 10**18))
    ds = ps.open(path)
    seen: list[int] = []
    with loader(ds, batch_size=2, shuffle=False, memory="8MiB") as batches:
        iterator = iter(batches)
        seen += next(iterator)["cls"].tolist()
        time.sleep(2 * POLICY.check_file_every_s)  # reading ahead comes to rest
        if how == "replaced":
            other.rename(path)
        else:
            path.write_bytes(other.read_bytes())
            os.utime(path, ns=(0, 10**18))
        with pytest.raises(Changed, match=rf"a\.tar: the file was {how} after it was opened"):
            seen += [number for batch in iterator for number in batch["cls"].tolist()]
    with pytest.raises(Changed):
        ds[0]
    assert seen == list(range(len(seen))), "what was delivered is of the old archive"
    assert ps.open(path)[0]["cls"] == 1000


def test_what_changed_is_left_out_and_listed(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", usual())
    write(tmp_path / "b.tar", [(f"m{key[1:]}", members) for key, members in usual()])
    ds = ps.open(tmp_path / "*.tar")
    ds.close()  # while it is held open, the old file can be read
    write(tmp_path / "other.tar", usual(3))
    (tmp_path / "other.tar").rename(tmp_path / "b.tar")
    keys, stats = keys_read(ds, ("cls",))
    assert keys == names_without()
    assert {each.key for each in stats.left_out} == {f"m{n:03d}" for n in range(SAMPLES)}
    assert all("after it was opened" in each.why for each in stats.left_out)


def test_an_archive_that_is_gone(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", usual())
    ds = ps.open(tmp_path / "a.tar")
    ds.close()
    (tmp_path / "a.tar").unlink()
    with pytest.raises(Missing, match=r"a\.tar"):
        ds[0]


# Shards that do not agree.


@pytest.mark.case(11)
def test_shards_that_differ(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", usual())
    write(tmp_path / "b.tar", [(f"m{n}", {"jpg": picture(n, size=(8, 8)), "cls": b"1"}) for n in range(3)])
    with pytest.raises(SchemaMismatch, match=r"b\.tar: field 'jpg' is uint8 \(8, 8, 3\).*uint8 \(16, 24, 3\)"):
        ps.open(tmp_path / "*.tar", fields=["jpg", "cls"])
    with pytest.raises(SchemaMismatch, match=r"b\.tar: field '(npy|jpg)'"):
        ps.open(tmp_path / "*.tar")
    assert len(ps.open(tmp_path / "*.tar", fields=["cls"])) == SAMPLES + 3
