"""``wids``: indices, samples and samplers. Expected orders were computed from its published rules, not by our code."""

import functools
import io
import json
import operator
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import ConfigError, Corrupt, OutOfRange, Unsafe
from penstock.webdataset import wids

PNG_SIZE = (5, 4)


def png() -> bytes:
    image = pytest.importorskip("PIL.Image")
    stream = io.BytesIO()
    image.new("L", PNG_SIZE, 7).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def index(write_tar: Any, tmp_path: Path) -> str:
    """Two shards of five samples, and one of two in another index."""
    for shard in range(3):
        members = []
        for number in range(5 if shard < 2 else 2):
            key = f"{shard}{number}"
            members += [(f"{key}.cls", b"%d" % (10 * shard + number)), (f"{key}.a.PNG", png()), (f"{key}.raw", b"raw")]
        write_tar(f"part-{shard}.tar", members)
    other = {"wids_version": 1, "name": "other", "shardlist": [{"url": "part-2.tar", "nsamples": 2}]}
    (tmp_path / "other.json").write_text(json.dumps(other))
    whole = {
        "wids_version": 1,
        "name": "whole",
        "shardlist": [{"url": f"part-{shard}.tar", "nsamples": 5} for shard in range(2)],
        "datasets": [{"source_url": str(tmp_path / "other.json"), "weight": 2}],
    }
    (tmp_path / "index.json").write_text(json.dumps(whole))
    return str(tmp_path / "index.json")


def test_samples(index: str, tmp_path: Path) -> None:
    ds: Any = wids.ShardListDataset(index, transformations="numpy")
    assert len(ds) == 12
    assert [ds[number][".cls"] for number in range(12)] == [*range(5), *range(10, 15), 20, 21]
    sample = ds[11]
    assert sample["__key__"] == "21"
    assert sample["__shard__"] == str(tmp_path / "part-2.tar")
    assert (sample["__index__"], sample["__shardindex__"], sample["__dataset__"]) == (11, 1, "other")
    np.testing.assert_array_equal(sample[".a.PNG"], np.full(PNG_SIZE[::-1], 7))
    assert sample[".raw"].getvalue() == b"raw", "what nothing decodes is a stream"
    assert ds[-1][".cls"] == 21
    assert wids.ShardListDataset(index)[0][".a.PNG"].size == PNG_SIZE
    raw: Any = wids.ShardListDataset(index, transformations=[]).add_transform(sorted)
    assert raw[0][:3] == [".a.PNG", ".cls", ".raw"]
    with pytest.raises(OutOfRange, match="12 samples"):
        ds[12]


def test_few_tables_are_kept(index: str) -> None:
    ds: Any = wids.ShardListDataset(index, lru_size=2, transformations=[])
    for number in (0, 5, 10, 11, 0):
        ds[number]
    assert ds.get_stats() == (5, 4)
    assert len(ds.cache) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_in_torchs_loader(index: str, workers: int) -> None:
    from torch.utils.data import DataLoader

    ds: Any = wids.ShardListDataset(index, transformations=["PIL", lambda sample: sample[".cls"]])
    batches: Any = DataLoader(ds, batch_size=4, num_workers=workers, sampler=wids.ShardedSampler(ds))  # type: ignore[arg-type]
    assert sorted(int(each) for batch in batches for each in batch) == [*range(5), *range(10, 15), 20, 21]


def test_orders() -> None:
    rng = random.Random(3 + 1289738273)
    chunks = [[*range(4)], [*range(4, 8)], [*range(8, 10)]]
    rng.shuffle(chunks)
    expected = []
    for chunk in chunks:
        rng.shuffle(chunk)
        expected += chunk
    sampler = wids.ChunkedSampler(range(10), chunksize=4, seed=3)
    first = list(sampler)
    assert [sorted(first[:4]), sorted(first[4:8])] == [[0, 1, 2, 3], [4, 5, 6, 7]], "the first epoch keeps the chunks"
    assert list(sampler) == expected
    sampler.set_epoch(1)
    assert list(sampler) == expected
    assert len(sampler) == 10


def test_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    parts = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        parts.append(list(wids.DistributedChunkedSampler(range(10), chunksize=2)))
    assert [len(part) for part in parts] == [4, 4, 2]
    assert sorted(functools.reduce(operator.iadd, parts, [])) == list(range(10))
    with pytest.raises(ConfigError, match="rank=3"):
        wids.DistributedChunkedSampler(range(10), rank=3)


SPOILT = {
    "no list": ({"wids_version": 1}, Corrupt, "no shards"),
    "another version": ({"wids_version": 2, "shardlist": []}, Corrupt, "wids_version 1"),
    "no number": ({"wids_version": 1, "shardlist": [{"url": "a.tar"}]}, Corrupt, "nsamples"),
    "a negative number": ({"wids_version": 1, "shardlist": [{"url": "a.tar", "nsamples": -1}]}, Corrupt, "nsamples"),
    "a command": ({"wids_version": 1, "shardlist": [{"url": "pipe:touch x", "nsamples": 1}]}, Unsafe, "never run"),
    "a list": ([], Corrupt, "JSON object"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_spoilt_indices(tmp_path: Path, case: str) -> None:
    content, kind, words = SPOILT[case]
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content))
    with pytest.raises(kind, match=words):
        wids.ShardListDataset(str(path))
    with pytest.raises(kind, match=words), open(path) as file:
        wids.ShardListDataset(file)


def test_an_index_on_a_server_names_no_file_here(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"wids_version": 1, "shardlist": [{"url": "file:///etc/x.tar", "nsamples": 1}]})
    monkeypatch.setattr(wids.wids_specs, "gopen", lambda url: io.BytesIO(text.encode()))
    with pytest.raises(Unsafe, match="a file of this machine"):
        wids.ShardListDataset("https://host/index.json")


def test_a_list_that_does_not_fit_the_shards(index: str, tmp_path: Path) -> None:
    ds: Any = wids.ShardListDataset([{"url": str(tmp_path / "part-0.tar"), "nsamples": 9}])
    assert ds[4][".cls"] == 4
    with pytest.raises(Corrupt, match=r"there are 5; the list of shards"):
        ds[5]
    with pytest.raises(Corrupt, match="md5"):
        wids.IndexedTarSamples(path=str(tmp_path / "part-0.tar"), md5sum="0" * 32)
    (tmp_path / "cut.tar").write_bytes((tmp_path / "part-0.tar").read_bytes()[:700])
    with pytest.raises(Exception, match=r"cut\.tar"):
        wids.ShardListDataset([{"url": str(tmp_path / "cut.tar"), "nsamples": 5}])[0]
    assert tarfile.is_tarfile(tmp_path / "part-0.tar")
