"""Every sample once over all ranks and workers, however few the shards."""

from itertools import chain, islice
from random import Random

import pytest

import penstock.webdataset as wds
from penstock.errors import ConfigError
from penstock.webdataset import run as place
from penstock.webdataset import wids
from penstock.webdataset.run import Place
from penstock.webdataset.splitting import Share, share_of


@pytest.fixture
def stand(monkeypatch):
    """Pretend to be somebody else."""

    def at(rank, ranks, worker, workers):
        monkeypatch.setattr(place, "_ranks", lambda group: (rank, ranks))
        monkeypatch.setattr(place, "_workers", lambda: (worker, workers) if workers else None)

    return at


def everywhere(stand, ranks, workers, read):
    """What each rank and worker reads, in the order of ranks and workers."""
    found = []
    for rank in range(ranks):
        for worker in range(max(workers, 1)):
            stand(rank, ranks, worker, workers)
            found.append(read())
    return found


def labels(dataset):
    return [sample["cls"] for sample in dataset.decode()]


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("counts", [[5, 4], [7], [1] * 9, [3, 0, 2, 5, 1]], ids=repr)
def test_every_sample_once(numbered, stand, counts, ranks, workers, shuffled):
    pattern = numbered(counts)

    def read():
        dataset = wds.WebDataset(pattern, nodesplitter=wds.split_by_node, shardshuffle=shuffled and 100)
        return labels(dataset.shuffle(3) if shuffled else dataset)

    parts = everywhere(stand, ranks, workers, read)
    assert sorted(chain(*parts)) == list(range(sum(counts)))
    if len(counts) < ranks * workers:
        sizes = [sum(map(len, parts[rank * workers : (rank + 1) * workers])) for rank in range(ranks)]
        assert max(sizes) - min(sizes) <= len(counts), "nobody waits for a share that never comes"


@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 1), (2, 2), (3, 2)])
def test_shards_are_shared_out_as_by_the_peer_where_there_are_enough(
    numbered, stand, peer, ranks, workers, monkeypatch
):
    pattern = numbered([2] * 7)

    def theirs():
        here = place.here()
        info = (here.rank, here.ranks, here.worker, here.workers)
        monkeypatch.setattr(peer.utils, "pytorch_worker_info", lambda group=None: info)
        dataset = peer.WebDataset(pattern, nodesplitter=peer.split_by_node, shardshuffle=False)
        return [int(sample["cls"]) for sample in dataset]

    def ours():
        return labels(wds.WebDataset(pattern, nodesplitter=wds.split_by_node))

    assert everywhere(stand, ranks, workers, ours) == everywhere(stand, ranks, workers, theirs)


def test_stages_split_too(numbered, stand):
    pattern = numbered([5, 5])

    def read():
        stages = [wds.split_by_node, wds.split_by_worker, wds.tarfile_to_samples(), wds.decode()]
        return [sample["cls"] for sample in wds.DataPipeline(wds.SimpleShardList(pattern), *stages)]

    assert sorted(chain(*everywhere(stand, 3, 2, read))) == list(range(10))


def test_one_rank_only_unless_told_how_to_split(numbered, stand):
    stand(1, 2, 0, 1)
    with pytest.raises(ConfigError, match=r"rank 1 of 2: .*nodesplitter=penstock.webdataset.split_by_node"):
        list(wds.WebDataset(numbered([2])))
    assert len(list(wds.WebDataset(numbered([2]), nodesplitter=None))) == 2


def test_a_splitter_of_ones_own(numbered, stand):
    stand(1, 2, 0, 1)
    pattern = numbered([2, 2])
    assert labels(wds.WebDataset(pattern, nodesplitter=lambda shards: shards)) == [0, 1, 2, 3]
    last = wds.WebDataset(pattern, nodesplitter=lambda shards: (each for each in shards if "001" in each["url"]))
    assert labels(last) == [2, 3]


def test_resampling_differs_by_rank_and_worker_and_needs_no_splitting(numbered, stand):
    pattern = numbered([1] * 50)
    drawn = everywhere(stand, 2, 2, lambda: labels(wds.WebDataset(pattern, resampled=True).slice(30)))
    assert len({tuple(each) for each in drawn}) == 4
    stand(1, 2, 0, 1)
    split = wds.WebDataset(pattern, resampled=True, nodesplitter=wds.split_by_node).slice(30)
    assert len(labels(split)) == 30, "a list without end can be split"


@pytest.mark.parametrize("workers", [0, 1, 2, 3, 7])
def test_an_epoch_is_per_worker_unless_it_is_shared(numbered, stand, workers):
    pattern = numbered([10, 10, 10])
    for limit in (1, 5, 50):
        each = everywhere(stand, 1, workers, lambda limit=limit: labels(wds.WebDataset(pattern).with_epoch(limit)))
        assert [len(part) for part in each] == [limit] * max(1, workers)
        repeated = wds.WebDataset(pattern).repeat(nbatches=limit)
        assert {len(part) for part in everywhere(stand, 1, workers, lambda ds=repeated: labels(ds))} == {limit}
        shared = wds.WebDataset(pattern).with_shared_epoch(limit)
        assert sum(len(part) for part in everywhere(stand, 1, workers, lambda ds=shared: labels(ds))) == limit


SHUFFLES_OF_SHARDS = {
    "detshuffle": lambda urls: [wds.SimpleShardList(urls), wds.detshuffle(100)],
    "detshuffle by its own seed": lambda urls: [wds.SimpleShardList(urls), wds.detshuffle(100, seed=7)],
    "shuffle by its own seed": lambda urls: [wds.SimpleShardList(urls), wds.shuffle(100, seed=7)],
    "shuffle": lambda urls: [wds.SimpleShardList(urls), wds.shuffle(100)],
    "a seed of the list": lambda urls: [wds.SimpleShardList(urls, seed=7)],
    "any order of the list": lambda urls: [wds.SimpleShardList(urls, seed=True)],
}


@pytest.mark.parametrize("make", SHUFFLES_OF_SHARDS.values(), ids=SHUFFLES_OF_SHARDS)
@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shards_that_are_shuffled_before_they_are_split(numbered, stand, ranks, workers, make):
    pattern, count = numbered([2] * 13), 26
    ds = wds.DataPipeline(*make(pattern), wds.split_by_node, wds.split_by_worker, wds.tarfile_to_samples())
    orders = []
    for _ in range(2):
        parts = everywhere(stand, ranks, workers, lambda: labels(wds.DataPipeline(*ds.pipeline)))
        assert sorted(chain(*parts)) == list(range(count))
        orders.append(parts)
    assert orders[0] == orders[1]
    stand(0, 1, 0, 0)
    ds = ds.decode()
    first, second = ([sample["cls"] for sample in ds] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(count))
    assert (first != second) == (make is not SHUFFLES_OF_SHARDS["a seed of the list"]), "epochs differ"


def test_an_empty_share_is_not_an_empty_dataset(numbered, stand):
    pattern = numbered([0, 3, 0])
    assert sorted(chain(*everywhere(stand, 1, 3, lambda: labels(wds.WebDataset(pattern))))) == [0, 1, 2]
    nothing = numbered([0, 0, 0], name="nothing")
    stand(0, 1, 2, 3)
    with pytest.raises(ConfigError, match="no samples in"):
        labels(wds.WebDataset(nothing))


def test_a_file_object_is_read_by_one_worker(numbered, stand):
    def read():
        with open(numbered([4]).replace("{000..000}", "000"), "rb") as stream:
            return labels(wds.WebDataset(stream))

    assert everywhere(stand, 1, 3, read) == [[0, 1, 2, 3], [], []]


def test_standard_input_is_not_for_workers(stand):
    stand(0, 1, 0, 2)
    with pytest.raises(ConfigError, match="num_workers=0"):
        list(wds.WebDataset("-"))


def test_shares_of_shares():
    mine = [[Share(rank, 3, 5).split(worker, 2, 9).has(sample) for sample in range(60)]
            for rank in range(3) for worker in range(2)]  # fmt: skip
    assert [sum(column) for column in zip(*mine, strict=True)] == [1] * 60
    assert share_of({"url": "x"}).has(7)


def test_ranks_from_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert place.here() == Place(2, 5, 0, 1)
    shards = ({"url": str(number)} for number in range(12))
    assert [shard["url"] for shard in wds.split_by_node(shards)] == ["2", "7"]


def test_a_list_without_end_is_not_read_to_its_end(stand):
    def endless():
        number = 0
        while True:
            yield {"url": str(number)}
            number += 1

    stand(1, 2, 1, 2)
    mine = wds.split_by_worker(wds.split_by_node(endless()))
    assert [shard["url"] for shard in islice(mine, 3)] == ["3", "7", "11"]


def by_steps(source):
    """Shards to samples as programs do that open, expand and group for themselves."""
    steps = wds.tariterators
    return steps.group_by_keys(steps.tar_file_expander(steps.url_opener(source)))


def split_then(*stages):
    return [wds.split_by_node, wds.split_by_worker, *stages]


PIPELINES = {
    "shuffled shards, then samples": lambda urls: wds.WebDataset(
        urls, nodesplitter=wds.split_by_node, shardshuffle=100
    ).shuffle(3),
    "a seed for all": lambda urls: wds.WebDataset(
        urls, nodesplitter=wds.split_by_node, shardshuffle=100, seed=5, detshuffle=True
    ).shuffle(3, seed=4),
    "detshuffle, split, samples": lambda urls: wds.DataPipeline(
        wds.SimpleShardList(urls), wds.detshuffle(), *split_then(wds.tarfile_to_samples(), wds.shuffle(3))
    ),
    "split, then shuffled shards": lambda urls: wds.DataPipeline(
        wds.SimpleShardList(urls), *split_then(wds.shuffle(10), wds.tarfile_to_samples(), wds.detshuffle(3))
    ),
    "a shuffle with an rng": lambda urls: wds.DataPipeline(
        wds.SimpleShardList(urls), *split_then(wds.tarfile_to_samples(), wds.shuffle(3, rng=Random(1)))
    ),
    "opened, expanded, grouped": lambda urls: wds.DataPipeline(
        wds.SimpleShardList(urls, seed=2), *split_then(by_steps)
    ),
    "several lists": lambda urls: wds.DataPipeline(
        wds.shardspec({"datasets": [{"shards": urls}]}), *split_then(wds.tarfile_to_samples())
    ),
    "by random access": lambda urls: wds.FluidWrapper(by_random_access(urls)),
}


def by_random_access(urls):
    shards = [{"url": url, "nsamples": sum(1 for _ in wds.WebDataset(url, nodesplitter=None, workersplitter=None,
                                                                    empty_check=False))}
              for url in wds.expand_urls(urls)]  # fmt: skip
    samples = wids.ShardListDataset(shards, transformations=[])
    here = place.here()
    mine = islice(wids.DistributedChunkedSampler(samples, chunksize=3), here.worker, None, here.workers)
    return [{"cls": samples[number][".cls"].getvalue()} for number in mine]


@pytest.mark.parametrize("make", PIPELINES.values(), ids=PIPELINES)
@pytest.mark.parametrize("counts", [[5, 4], [2] * 13], ids=["few shards", "many shards"])
def test_every_pipeline_gives_every_sample_once(numbered, stand, counts, make):
    pattern = numbered(counts)
    for ranks in (1, 2, 3):
        for workers in (0, 1, 2, 4):
            parts = everywhere(stand, ranks, workers, lambda: labels(make(pattern)))
            assert sorted(chain(*parts)) == list(range(sum(counts))), f"{ranks} ranks, {workers} workers"
