"""A shuffle of local shards holds samples that were not read yet; nothing else changes."""

import gzip
import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock.webdataset as wds
from penstock.base.policy import DEFAULT as POLICY
from penstock.errors import Changed, LimitExceeded, Truncated

SAMPLES = 60


@pytest.fixture
def shards(tmp_path: Path) -> str:
    with wds.ShardWriter(str(tmp_path / "train-%d.tar"), maxcount=20) as writer:
        for number in range(SAMPLES):
            writer.write(
                {"__key__": f"s{number:04d}", "npy": np.full(50_000, number), "cls": number, "txt": "x" * number}
            )
    return str(tmp_path / "train-{0..2}.tar")


def rows(samples: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(sample["__key__"], sample) for sample in samples]


@pytest.mark.parametrize("options", [{}, {"resampled": True}, {"shardshuffle": 2}])
@pytest.mark.parametrize("shuffles", [[20], [5, 30]])
def test_samples_and_their_order_are_the_same(shards: str, options: dict[str, Any], shuffles: list[int]) -> None:
    def epoch(ds: Any) -> list[tuple[str, dict[str, Any]]]:
        for size in shuffles:
            ds = ds.shuffle(size, initial=size, rng=random.Random(7))
        return rows(ds.with_epoch(SAMPLES))

    unread = epoch(wds.WebDataset(shards, **options))
    assert unread == epoch(wds.WebDataset(shards, **options).map(dict)), "which reads before the shuffle"
    assert all(isinstance(sample["npy"], bytes) for _, sample in unread)


def test_the_buffer_holds_no_content(shards: str) -> None:
    def peak(ds: Any) -> int:
        tracemalloc.start()
        for _ in ds:
            pass
        held = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return held

    sample = 50_000 * 8
    assert peak(wds.WebDataset(shards).shuffle(50, initial=50)) < 8 * sample
    assert peak(wds.WebDataset(shards).map(dict).shuffle(50, initial=50)) > 40 * sample, "content that was asked for"


def test_compressed_shards_and_streams_are_read_at_once(shards: str, tmp_path: Path) -> None:
    plain = (tmp_path / "train-0.tar").read_bytes()
    (tmp_path / "packed.tar.gz").write_bytes(gzip.compress(plain, 1))
    expected = rows(wds.WebDataset(str(tmp_path / "train-0.tar")).shuffle(9, rng=random.Random(1)))
    packed = rows(wds.WebDataset(str(tmp_path / "packed.tar.gz")).shuffle(9, rng=random.Random(1)))
    with open(tmp_path / "train-0.tar", "rb") as stream:
        streamed = rows(wds.WebDataset([stream]).shuffle(9, rng=random.Random(1)))
    assert [key for key, _ in expected] == [key for key, _ in packed] == [key for key, _ in streamed]
    assert [sample["npy"] for _, sample in expected] == [sample["npy"] for _, sample in packed]
    assert [sample["npy"] for _, sample in expected] == [sample["npy"] for _, sample in streamed]


def test_a_shard_that_is_replaced_meanwhile(shards: str, tmp_path: Path) -> None:
    samples = iter(wds.WebDataset(str(tmp_path / "train-0.tar")).shuffle(20, initial=20))
    next(samples)
    (tmp_path / "train-1.tar").rename(tmp_path / "train-0.tar")
    time.sleep(2 * POLICY.check_file_every_s)
    with pytest.raises(Changed, match=r"train-0\.tar"):
        list(samples)


def test_handlers_see_what_cannot_be_read(shards: str, tmp_path: Path) -> None:
    ds = wds.WebDataset(str(tmp_path / "train-0.tar"), handler=wds.ignore_and_continue).shuffle(20, initial=20)
    samples = iter(ds)
    next(samples)
    (tmp_path / "train-1.tar").rename(tmp_path / "train-0.tar")
    time.sleep(2 * POLICY.check_file_every_s)
    assert len(list(samples)) + ds.skipped == 19
    assert ds.skipped > 0


def test_a_shard_that_is_cut(shards: str, tmp_path: Path) -> None:
    path = tmp_path / "train-0.tar"
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) - 200_000])
    with pytest.raises(Truncated):
        list(wds.WebDataset(str(path)).shuffle(100))
    whole = list(wds.WebDataset(str(path), handler=wds.ignore_and_continue).shuffle(100))
    assert {len(sample["npy"]) for sample in whole} == {50_000 * 8 + 128}


def test_what_is_too_large_is_refused(shards: str) -> None:
    assert len(list(wds.WebDataset(shards, max_member_bytes=500_000).shuffle(10))) == SAMPLES
    with pytest.raises(LimitExceeded, match="max_member_bytes"):
        list(wds.WebDataset(shards, max_member_bytes=1000).shuffle(10))


def test_a_small_buffer_still_mixes_the_whole_epoch(shards: str) -> None:
    """Where only places are held, samples of the last shard may come first."""
    firsts = [next(iter(wds.WebDataset(shards, seed=seed).shuffle(4, initial=1)))["__key__"] for seed in range(60)]
    from_shards = [int(key[1:]) // 20 for key in firsts]
    assert min(map(from_shards.count, range(3))) >= 8
    keys = [sample["__key__"] for sample in wds.WebDataset(shards).shuffle(4)]
    assert sorted(keys) == [f"s{number:04d}" for number in range(SAMPLES)]


def test_content_is_never_held_beyond_the_buffer(shards: str, tmp_path: Path) -> None:
    packed = tmp_path / "packed.tar.gz"
    packed.write_bytes(gzip.compress((tmp_path / "train-1.tar").read_bytes(), 1))
    for order in ([tmp_path / "train-0.tar", packed], [packed, tmp_path / "train-0.tar"]):
        ds = wds.WebDataset([str(path) for path in order]).shuffle(5, initial=5)
        tracemalloc.start()
        assert len({sample["__key__"] for sample in ds}) == 40
        assert tracemalloc.get_traced_memory()[1] < 15 * 50_000 * 8
        tracemalloc.stop()
