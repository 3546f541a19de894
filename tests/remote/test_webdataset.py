"""Tar shards on servers, streamed and from copies: what the same shards on disk give."""

import gzip
import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from penstock import webdataset as wds
from penstock.errors import Missing, Unavailable
from penstock.remote.ranges import RemoteOptions
from penstock.webdataset import samples
from penstock.webdataset.handlers import TruncatedShard
from penstock.webdataset.mindeye import get_dataloaders

OPTIONS = RemoteOptions(retries=3, deadline_s=20, stall_timeout_s=1)
EACH = 12


def shard(number, size=3000):
    rng = np.random.default_rng(number)
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for row in range(EACH):
            for name, content in (("cls", b"%d" % (number * EACH + row)), ("bin", rng.bytes(size))):
                about = tarfile.TarInfo(f"{number:03}{row:03}.{name}")
                about.size = len(content)
                tar.addfile(about, io.BytesIO(content))
    return held.getvalue()


@pytest.fixture
def shards(server, tmp_path):
    """The same shards here and there."""
    for number in range(3):
        server.put(f"{number}.tar", shard(number))
        (tmp_path / f"{number}.tar").write_bytes(shard(number))
    return str(tmp_path / "{0..2}.tar"), f"{server.url}/{{0..2}}.tar"


def without_place(samples):
    return [{name: value for name, value in each.items() if name not in ("__url__", "__local_path__")}
            for each in samples]  # fmt: skip


@pytest.mark.parametrize("case", ["right", "drops", "503", "no ranges", "no length", "stalls"])
def test_streamed(server, wrong, shards, case):
    here, there = shards
    server.once = {"drops": [wrong.drop(9000)], "503": [wrong.status(503)], "stalls": [wrong.stall(5000, 3)]}.get(
        case, []
    )
    server.always = {"no ranges": wrong.no_ranges, "no length": wrong.no_ranges_no_length}.get(case)
    streamed = list(wds.WebDataset(there, remote=OPTIONS))
    assert without_place(streamed) == without_place(wds.WebDataset(here))
    assert streamed[0]["__url__"] == f"{server.url}/0.tar"
    assert [server.whole_downloads(f"{number}.tar") for number in range(3)][1:] == [1, 1]


def test_compressed(server):
    url = server.put("0.tar.gz", gzip.compress(shard(0)))
    assert [int(each["cls"]) for each in wds.WebDataset(url, remote=OPTIONS)] == list(range(EACH))


@pytest.mark.parametrize("case", ["right", "no ranges", "no length"])
def test_from_copies_a_shuffle_holds_no_samples(server, wrong, shards, tmp_path, case, monkeypatch):
    here, there = shards
    server.always = {"no ranges": wrong.no_ranges, "no length": wrong.no_ranges_no_length}.get(case)
    local = wds.WebDataset(here, seed=4).shuffle(20)
    expected = [without_place(local) for _ in range(3)]
    read = []
    together = samples._read_together
    monkeypatch.setattr(samples, "_read_together", lambda *args: read.append(1) or together(*args))
    cached = wds.WebDataset(there, remote=OPTIONS, cache_dir=tmp_path / "c", cache_bytes="10MB", seed=4).shuffle(20)
    if case == "no length":  # what may be cut short unseen is not kept, and samples are held
        assert sorted(each["__key__"] for each in cached) == sorted(each["__key__"] for each in expected[0])
        assert not read
        return
    assert [without_place(cached) for _ in range(3)] == expected
    assert len(read) == 3 * 3 * EACH, "every sample was read from its place, after the shuffle"
    assert [server.whole_downloads(f"{number}.tar") for number in range(3)] == [1, 1, 1]


def test_a_cache_for_two_of_three(server, shards, tmp_path):
    here, there = shards
    limit = 2 * len(shard(0)) + 10
    cached = wds.WebDataset(there, remote=OPTIONS, cache_dir=str(tmp_path / "c"), cache_size=limit)
    for _ in range(3):
        assert without_place(cached) == without_place(wds.WebDataset(here))
    assert [server.whole_downloads(f"{number}.tar") for number in range(3)] == [1, 1, 3], "none pushes another out"
    assert sum(each.stat().st_size for each in (tmp_path / "c").glob("*.cached")) <= limit


def test_what_goes_wrong(server, wrong, shards):
    with pytest.raises(FileNotFoundError, match="404") as caught:
        list(wds.WebDataset(f"{server.url}/9.tar", remote=OPTIONS))
    assert isinstance(caught.value, Missing)
    server.put("cut.tar", shard(0)[:20_000])
    with pytest.raises(TruncatedShard, match=r"cut\.tar"):
        list(wds.WebDataset(f"{server.url}/cut.tar", remote=OPTIONS))
    server.always = wrong.status(500)
    with pytest.raises(Unavailable, match="500"):
        list(wds.WebDataset(shards[1], remote=RemoteOptions(retries=1, deadline_s=1)))


def test_a_handler_passes_over_a_shard_that_cannot_be_had(server, shards):
    del server.files["/1.tar"]
    pipeline = wds.WebDataset(shards[1], remote=OPTIONS, handler=wds.ignore_and_continue)
    assert [int(each["cls"]) for each in pipeline] == [*range(EACH), *range(2 * EACH, 3 * EACH)]
    assert pipeline.skipped == 1


@pytest.mark.case(23)
def test_secrets_are_not_shown(server, shards):
    url = f"{server.url.replace('//', '//me:hidden@')}/0.tar?X-Amz-Signature=hidden"
    assert "hidden" not in str(next(iter(wds.WebDataset(url, remote=OPTIONS)))["__url__"])
    server.put("0.tar", shard(0)[:20_000])
    with pytest.raises(TruncatedShard) as caught:
        list(wds.WebDataset(url, remote=OPTIONS))
    assert "hidden" not in str(caught.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("cache", [False, True])
def test_workers_of_torch(server, shards, tmp_path, cache):
    from torch.utils.data import DataLoader

    options = {"cache_dir": tmp_path / "c"} if cache else {}
    pipeline = wds.WebDataset(shards[1], remote=OPTIONS, **options).shuffle(5).decode().to_tuple("cls").batched(4)
    list(pipeline)  # so that there are connections to inherit
    loader = DataLoader(pipeline, batch_size=None, num_workers=2, timeout=60)
    assert sorted(int(each) for batch in loader for each in batch[0]) == list(range(3 * EACH))


def test_s3(s3, tmp_path):
    client, settings = s3
    for number in range(2):
        client.put_object(Bucket="shards", Key=f"wds/{number}.tar", Body=shard(number))
    remote = RemoteOptions(deadline_s=20, store=settings)
    for options in ({}, {"cache_dir": tmp_path / "c"}):
        found = [int(each["cls"]) for each in wds.WebDataset("s3://shards/wds/{0..1}.tar", remote=remote, **options)]
        assert found == list(range(2 * EACH))


def picture(number):
    held = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), number * 5, np.uint8)).save(held, "png")
    return held.getvalue()


def array(number):
    held = io.BytesIO()
    np.save(held, np.full((3, 20), number, np.float16))
    return held.getvalue()


@pytest.mark.parametrize("cache", [False, True])
def test_mindeye(server, tmp_path, cache):
    for name, first in (("train_0", 0), ("train_1", 6), ("val_0", 12)):
        held = io.BytesIO()
        with tarfile.open(fileobj=held, mode="w") as tar:
            for number in range(first, first + 6):
                for field, content in (("nsdgeneral.npy", array(number)), ("png", picture(number))):
                    about = tarfile.TarInfo(f"{number:03}.{field}")
                    about.size = len(content)
                    tar.addfile(about, io.BytesIO(content))
        server.put(f"{name}.tar", held.getvalue())
    meta = server.put("metadata.json", json.dumps({"totals": {"train": 12, "val": 6}}).encode())
    train, val, num_train, num_val = get_dataloaders(
        4, train_url=f"{server.url}/train_{{0..1}}.tar", val_url=f"{server.url}/val_0.tar", meta_url=meta,
        cache_dir=str(tmp_path / "c") if cache else None, to_tuple=("voxels", "images"), memory="256MiB",
    )  # fmt: skip
    assert (num_train, num_val) == (12, 6)
    assert sorted(int(each) for voxels, _ in train for each in voxels[:, 0, 0]) == list(range(12))
    for voxels, images in val:
        assert np.allclose(np.asarray(images)[:, 0, 0, 0] * 255, np.asarray(voxels[:, 0, 0]) * 5)
    assert (tmp_path / "c").exists() == cache
    if cache:
        assert server.whole_downloads("train_0.tar") == 1
