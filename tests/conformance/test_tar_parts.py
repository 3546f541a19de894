"""Archives put one behind another: random access and the verbs read the same samples, all of them."""

import bz2
import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
import penstock.webdataset as wds
from penstock.errors import Corrupt

PACK: dict[str, Any] = {"tar": bytes, "tar.gz": gzip.compress, "tar.bz2": bz2.compress}


def part(first: int, count: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number in range(first, first + count):
            info = tarfile.TarInfo(f"{number:03d}.txt")
            info.size = len(str(number))
            tar.addfile(info, io.BytesIO(str(number).encode()))
    return out.getvalue()


def opened(path: Path, tmp_path: Path) -> list[str]:
    return ps.open(path, cache_dir=tmp_path / "cache")[:]["txt"]


def streamed(path: Path) -> list[str]:
    return [sample["txt"].decode() for sample in wds.WebDataset(str(path))]


def piped(path: Path) -> list[str]:
    with open(path, "rb") as stream:
        return [sample["txt"].decode() for sample in wds.WebDataset(stream)]


@pytest.mark.parametrize("pack", PACK)
def test_all_samples_of_all_parts(tmp_path: Path, pack: str) -> None:
    path = tmp_path / f"ab.{pack}"
    path.write_bytes(b"".join(PACK[pack](each) for each in (part(0, 5), part(5, 0), part(5, 7))))
    expected = [str(number) for number in range(12)]
    assert opened(path, tmp_path) == streamed(path) == piped(path) == expected


@pytest.mark.parametrize("pack", PACK)
@pytest.mark.parametrize("rest", [b"garbage", b"\1" * 512, part(5, 7)[512:]], ids=["bytes", "a block", "half a tar"])
def test_anything_else_behind_an_archive_is_an_error(tmp_path: Path, pack: str, rest: bytes) -> None:
    path = tmp_path / f"ab.{pack}"
    path.write_bytes(PACK[pack](part(0, 5) + rest))
    for read in (lambda: opened(path, tmp_path), lambda: streamed(path), lambda: piped(path)):
        with pytest.raises(Corrupt, match=r"after '004\.txt'.*more follows at offset 10,240"):
            read()
    passed_over = wds.WebDataset(str(path), handler=wds.ignore_and_continue)
    assert [sample["txt"] for sample in passed_over] == [b"0", b"1", b"2", b"3"]
    assert passed_over.skipped == 1
