"""Compressed tar archives by random access: an expanded copy in the cache, against the same archive uncompressed."""

import bz2
import gzip
import io
import lzma
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard

import penstock as ps
from penstock import errors
from penstock.testing import check_store

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "tar.gz": lambda data: gzip.compress(data, 1),
    "tgz": lambda data: gzip.compress(data[:5000], 1) + gzip.compress(data[5000:], 1),  # members one after another
    "tar.bz2": bz2.compress,
    "tar.xz": lzma.compress,
    "tar.zst": zstandard.ZstdCompressor().compress,
}


def archive(first: int = 0, count: int = 9) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number in range(first, first + count):
            content = io.BytesIO()
            np.save(content, np.full((30, 20), number, np.float32))
            for field, data in (("npy", content.getvalue()), ("cls", b"%d" % number)):
                info = tarfile.TarInfo(f"{number:03d}.{field}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("suffix", PACKERS)
def test_samples_are_those_of_the_archive(tmp_path: Path, cache: Path, suffix: str) -> None:
    for shard in range(2):
        (tmp_path / f"s-{shard}.{suffix}").write_bytes(PACKERS[suffix](archive(9 * shard)))
    want = {"npy": np.broadcast_to(np.arange(18, dtype=np.float32)[:, None, None], (18, 30, 20)), "cls": np.arange(18)}
    pattern = tmp_path / f"s-*.{suffix}"
    check_store(lambda: ps.open(pattern, cache_dir=cache).store, {name: each.copy() for name, each in want.items()})
    with ps.Loader(ps.open(pattern, cache_dir=cache), batch_size=5, shuffle=True, memory="64MiB") as loader:
        assert sorted(int(row) for batch in loader for row in batch["cls"]) == list(range(18))


def test_it_is_expanded_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(archive()))
    ps.open(path, cache_dir=cache, index_dir=tmp_path / "index")
    monkeypatch.setattr("penstock.files.compression.pieces", lambda *_: pytest.fail("expanded again"))
    assert ps.open(path, cache_dir=cache, index_dir=tmp_path / "index")[3]["cls"] == 3


def test_without_a_cache_the_ways_out_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(archive()))
    with pytest.raises(errors.ConfigError, match=r"a\.tar\.gz: is compressed.*cache_dir=.*penstock\.webdataset"):
        ps.open(path)


def test_what_expands_beyond_the_cache_is_refused(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(archive(count=5) + bytes(50_000_000)))
    with pytest.raises(errors.LimitExceeded, match=r"a\.tar\.gz: expands to more than cache_bytes=1,000,000"):
        ps.open(path, cache_dir=cache, cache_bytes=1_000_000)
    assert not list(cache.glob("*.cached"))


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda data: data[:-2000], errors.Truncated),
        (lambda data: data[:300] + b"\0\0\0\0" + data[304:], errors.Corrupt),
        (lambda data: b"no gzip at all" * 40, errors.Corrupt),
    ],
    ids=["cut", "flipped", "other"],
)
def test_damage_is_an_error_and_nothing_is_kept(
    tmp_path: Path, cache: Path, damage: Callable[[bytes], bytes], error: type
) -> None:
    path = tmp_path / "a.tar.gz"
    noise = np.random.default_rng(0).bytes(20_000)
    path.write_bytes(damage(gzip.compress(archive() + noise, 1)))
    with pytest.raises(error, match=r"a\.tar\.gz"):
        ps.open(path, cache_dir=cache)
    assert not list(cache.glob("*.cached"))


def test_a_file_rewritten_meanwhile_is_noticed(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(archive()))
    ds = ps.open(path, cache_dir=cache)
    for copy in cache.glob("*.cached"):
        copy.unlink()
    path.write_bytes(gzip.compress(archive(first=5)))
    os.utime(path, ns=(1, 1))
    with pytest.raises(errors.Changed, match=r"a\.tar\.gz: the file was rewritten"):
        ds[0]
    assert ps.open(path, cache_dir=cache)[0]["cls"] == 5
