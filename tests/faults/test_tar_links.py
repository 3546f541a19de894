"""Members of a tar that are links, or no files at all: delivered, or told of by name."""

import io
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
import penstock.webdataset as wds
from penstock.errors import Corrupt, DataError, Missing, Unsafe

HARD, SYMBOLIC = tarfile.LNKTYPE, tarfile.SYMTYPE


def write(path: Path, *members: tuple[str, bytes | tuple[bytes, str]], mode: str = "w") -> Path:
    """Files by their content, and others by their kind and what they lead to."""
    with tarfile.open(path, mode) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            else:
                info.type, info.linkname = content
                archive.addfile(info)
    return path


def streamed(path: Path, **options: Any) -> list[tuple[str, bytes]]:
    return [(each["__key__"], each["txt"]) for each in wds.WebDataset(str(path), shardshuffle=False, **options)]


GOOD: list[tuple[str, bytes | tuple[bytes, str]]] = [
    ("d/a.txt", b"one"),
    ("d/b.txt", b"two"),
    ("d/c.txt", (HARD, "d/a.txt")),
    ("d/e.txt", (SYMBOLIC, "b.txt")),
    ("d/f.txt", (SYMBOLIC, "../d/./c.txt")),
    ("g.txt", (SYMBOLIC, "d/later.txt")),
    ("h.txt", (HARD, "./d/b.txt")),
    ("d/later.txt", b"three"),
]
VALUES = ["one", "two", "one", "two", "one", "three", "two", "three"]


@pytest.mark.case(49)
@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_links_have_the_bytes_of_what_they_lead_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tar_format: int
) -> None:
    monkeypatch.setattr(tarfile.TarFile, "format", tar_format)
    path = write(tmp_path / "a.tar", *GOOD)
    for _ in range(2):  # the second time by its index
        assert [ds["txt"] for ds in map(ps.open(path).__getitem__, range(8))] == VALUES
    assert streamed(path) == [
        (name.removesuffix(".txt"), value.encode()) for (name, _), value in zip(GOOD, VALUES, strict=True)
    ]


@pytest.mark.case(49)
@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_links_with_long_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tar_format: int) -> None:
    monkeypatch.setattr(tarfile.TarFile, "format", tar_format)
    long = "x" * 60 + "/" + "y" * 150
    path = write(tmp_path / "a.tar", (f"{long}.txt", b"one"), (f"{long}2.txt", (HARD, f"{long}.txt")))
    assert ps.open(path)[:]["txt"] == ["one", "one"]
    assert [content for _, content in streamed(path)] == [b"one", b"one"]


@pytest.mark.case(49)
def test_files_that_tar_has_seen_before(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(str(number))
    os.link(tmp_path / "1.txt", tmp_path / "5.txt")
    os.link(tmp_path / "2.txt", tmp_path / "6.txt")
    path, names = tmp_path / "a.tar", sorted(each.name for each in tmp_path.iterdir())
    subprocess.run(["tar", "cf", path, *names], cwd=tmp_path, check=True)
    assert ps.open(path)[:]["txt"] == ["0", "1", "2", "3", "1", "2"]
    assert len(streamed(path)) == 6


@pytest.mark.case(49)
def test_links_among_absolute_names(tmp_path: Path) -> None:
    """As ``tar --absolute-names`` writes them."""
    members = [("/d/a.txt", b"one"), ("/d/b.txt", (HARD, "/d/a.txt")), ("/d/c.txt", (SYMBOLIC, "a.txt"))]
    members += [("d.txt", (SYMBOLIC, "/d/b.txt")), ("../e.txt", b"two"), ("d/f.txt", (SYMBOLIC, "../../e.txt"))]
    path = write(tmp_path / "a.tar", *members)
    assert ps.open(path)[:]["txt"] == ["one", "one", "one", "one", "two", "two"]
    assert len(streamed(path)) == 6


BAD = [
    (("b.txt", (HARD, "nothing.txt")), Missing, "not in the archive"),
    (("b.txt", (HARD, "z.txt")), Missing, "not in the archive"),
    (("b.txt", (SYMBOLIC, "/etc/passwd")), Unsafe, "outside of the archive"),
    (("b.txt", (SYMBOLIC, "../a.txt")), Unsafe, "outside of the archive"),
    (("b.txt", (SYMBOLIC, "b.txt")), Corrupt, "ring"),
    (("b.txt", (tarfile.FIFOTYPE, "")), Corrupt, "pipe"),
    (("b.txt", (tarfile.CHRTYPE, "")), Corrupt, "device"),
    (("b.txt", (b"Z", "")), Corrupt, "of kind b'Z'"),
]


@pytest.mark.case(49)
@pytest.mark.parametrize(("member", "kind", "told"), BAD, ids=lambda each: str(each)[:40])
def test_what_leads_nowhere_is_told_by_name(tmp_path: Path, member: Any, kind: type[DataError], told: str) -> None:
    path = write(tmp_path / "a.tar", ("a.txt", b"one"), member, ("z.txt", b"two"))
    with pytest.raises(kind, match=rf"a\.tar.*b\.txt.*{told}"):
        ps.open(path)
    ds = ps.open(path, on_error="skip")
    assert ds[:]["txt"] == ["one", "two"]
    assert [type(each) for each in ds.left_out] == [kind]

    with pytest.raises(Corrupt, match=rf"b\.txt.*{told}"):
        streamed(path)
    pipeline = wds.WebDataset(str(path), shardshuffle=False, handler=wds.ignore_and_continue)
    assert [each["txt"] for each in pipeline] == [b"one", b"two"]


@pytest.mark.case(49)
def test_links_of_other_names_are_nobodys(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", ("a.txt", b"one"), ("latest", (SYMBOLIC, "/elsewhere")), ("pipe", (b"6", "")))
    assert ps.open(path)[:]["txt"] == ["one"]
    assert len(streamed(path)) == 1


@pytest.mark.case(49)
def test_a_stream_that_cannot_go_back_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar.gz", ("a.txt", b"one"), ("b.txt", (HARD, "a.txt")), mode="w:gz")
    with pytest.raises(Corrupt, match=r"b\.txt.*hard link.*a\.txt.*penstock\.open"):
        streamed(path)
    assert ps.open(path, cache_dir=tmp_path / "cache")[:]["txt"] == ["one", "one"]


@pytest.mark.case(49)
def test_long_chains_and_rings_of_links(tmp_path: Path) -> None:
    chain = [(f"{n:05d}.txt", (SYMBOLIC, f"{n + 1:05d}.txt")) for n in range(5000)]
    path = write(tmp_path / "a.tar", *chain, ("05000.txt", b"end"))
    assert set(ps.open(path)[:]["txt"]) == {"end"}
    path = write(tmp_path / "b.tar", ("0.txt", b"x"), *chain, ("05000.txt", (SYMBOLIC, "00000.txt")))
    assert len(ps.open(path, on_error="skip").left_out) == 5001
