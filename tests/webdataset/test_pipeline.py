"""Pipelines as things to iterate over: epochs, lengths, copies, mixtures, and what importing costs."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch

import penstock.webdataset as wds
from penstock.errors import ConfigError
from penstock.webdataset.pipeline import DataPipeline


def double(number):
    return 2 * number


def labels(dataset):
    return [sample["cls"] for sample in dataset]


def test_shards_in_order(numbered):
    assert labels(wds.WebDataset(numbered([3, 0, 2])).decode()) == [0, 1, 2, 3, 4]


def test_stages_of_a_pipeline(numbered):
    dataset = wds.DataPipeline(
        wds.SimpleShardList(numbered([3, 4])),
        wds.split_by_node,
        wds.split_by_worker,
        wds.tarfile_to_samples(),
        wds.decode(),
        wds.to_tuple("cls", "txt"),
        wds.map_tuple(double, None),
        wds.batched(4),
    )
    first, second = dataset
    assert first[0].tolist() == [0, 2, 4, 6]
    assert second[0].tolist() == [8, 10, 12]
    assert second[1] == ["text 4", "text 5", "text 6"]
    assert isinstance(dataset.stage(0), wds.SimpleShardList)
    assert "batch_samples" in repr(dataset)


def test_a_stage_may_be_a_plain_function_or_have_a_run_method(numbered):
    class Negated:
        def run(self, source):
            return (-each for each in source)

    dataset = wds.DataPipeline(lambda: range(4), Negated(), lambda source: (each - 1 for each in source))
    assert list(dataset) == [-1, -2, -3, -4]
    nested = wds.DataPipeline(dataset, wds.map(double))
    assert list(nested) == [-2, -4, -6, -8]
    shards = wds.DataPipeline(wds.SimpleShardList(numbered([2])), wds.tarfile_samples)
    assert next(iter(shards))["cls"] == b"0"


@pytest.mark.parametrize("stages", [[], [7], [range(3), 7]], ids=repr)
def test_what_is_no_pipeline(stages):
    with pytest.raises(ConfigError, match=r"empty pipeline|cannot be"):
        list(DataPipeline(*stages))


def test_verbs_leave_a_pipeline_as_it_was(numbered):
    dataset = wds.WebDataset(numbered([3]))
    decoded = dataset.decode().to_tuple("cls")
    assert list(decoded) == [(0,), (1,), (2,)]
    assert len(list(dataset)) == 3
    assert isinstance(next(iter(dataset)), dict)


def test_it_is_one_of_torchs_datasets(numbered):
    dataset = wds.WebDataset(numbered([3]))
    for each in (dataset, dataset.decode(), wds.RoundRobin([dataset]), wds.RandomMix([dataset])):
        assert isinstance(each, torch.utils.data.IterableDataset)
        assert isinstance(each, wds.DataPipeline)
    assert isinstance(dataset, wds.WebDataset)
    assert type(dataset) is wds.WebDataset, "programs compare types"
    assert type(wds.DataPipeline(dataset)) is wds.DataPipeline
    assert len(list(dataset + dataset)) == 6, "torch chains them"


def test_importing_it_does_not_import_torch():
    program = """
import json, sys
import penstock.webdataset
print(json.dumps([name for name in ("torch", "PIL", "imagecodecs", "h5py") if name in sys.modules]))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(ran.stdout) == []


def test_it_works_without_torch(numbered):
    program = """
import sys
sys.modules["torch"] = None
import penstock.webdataset as wds
dataset = wds.WebDataset(sys.argv[1]).shuffle(3).decode("rgb8").to_tuple("cls", "txt").batched(2).with_epoch(4)
print([batch[0].tolist() for batch in dataset])
try:
    wds.imagehandler("torch")(".ppm", b"P6\\n1 1\\n255\\nabc")
except ValueError as error:
    assert "penstock[torch]" in str(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, numbered([5])], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.count(",") >= 3


def test_lengths(numbered):
    dataset = wds.WebDataset(numbered([3]))
    with pytest.raises(TypeError, match="with_length"):
        len(dataset)
    assert not hasattr(dataset, "__len__"), "programs ask for it before they take the length"
    assert dataset, "no length is not emptiness"
    assert len(dataset.with_length(17)) == 17
    assert hasattr(dataset, "__len__")
    assert len(dataset.decode()) == 17
    assert len(list(dataset)) == 3
    assert bool(dataset.with_length(0))


def test_epochs(numbered):
    dataset = wds.WebDataset(numbered([3, 2])).decode()
    assert labels(dataset.repeat(2)) == [0, 1, 2, 3, 4] * 2
    assert labels(wds.WebDataset(numbered([3, 2])).decode().with_epoch(7)) == [0, 1, 2, 3, 4, 0, 1]
    endless = iter(wds.WebDataset(numbered([2])).decode().repeat())
    assert [next(endless)["cls"] for _ in range(5)] == [0, 1, 0, 1, 0]
    with pytest.raises(ConfigError, match=r"with_epoch\(-1\)"):
        dataset.with_epoch()


def test_an_epoch_of_nothing_ends():
    assert list(wds.DataPipeline(lambda: iter([])).with_epoch(5)) == []


def test_with_epoch_changes_the_pipeline_itself_as_programs_expect(numbered):
    dataset = wds.WebDataset(numbered([3]), resampled=True)
    dataset.with_epoch(5)
    assert len(list(dataset)) == 5


def test_resampled(numbered):
    def drawn(seed=0, epochs=2):
        dataset = wds.WebDataset(numbered([2] * 20), resampled=True, seed=seed).decode().with_epoch(100)
        return [labels(dataset) for _ in range(epochs)]

    assert drawn() == drawn(), "seeded"
    first, second = drawn()
    assert first != second, "each epoch draws anew"
    assert drawn(1) != drawn(0)
    assert all(first[place] + 1 == first[place + 1] for place in range(0, 100, 2)), "whole shards"
    assert len(set(first)) < 100, "with replacement"
    assert labels(wds.WebDataset(numbered([2] * 20), mode="resampled").decode().with_epoch(100)) == first


def test_resampling_what_can_be_read_once():
    import io

    with pytest.raises(ConfigError, match="read once"):
        wds.WebDataset(io.BytesIO(), resampled=True)


def test_shards_shuffled(numbered):
    def order(shardshuffle, seed=0, epochs=3):
        dataset = wds.WebDataset(numbered([1] * 30), shardshuffle=shardshuffle, seed=seed).decode()
        return [labels(dataset) for _ in range(epochs)]

    for unshuffled in (None, False, 0):
        assert order(unshuffled, epochs=1) == [list(range(30))]
    for amount in (True, 100, 5):
        first, second, third = order(amount)
        assert sorted(first) == list(range(30))
        assert len({tuple(each) for each in (first, second, third)}) == 3
        assert order(amount) == [first, second, third]
    assert order(100, seed=1) != order(100, seed=0)


def test_arguments_of_programs_written_for_the_peer(numbered):
    dataset = wds.WebDataset(
        numbered([2]), handler=wds.warn_and_continue, mode=None, resampled=False, repeat=False, shardshuffle=False,
        cache_size=-1, cache_dir="/nowhere", url_to_name=None, detshuffle=True, nodesplitter=None, workersplitter=None,
        select_files=None, rename_files=None, empty_check=True, verbose=True, seed=None,
    )  # fmt: skip
    assert len(list(dataset)) == 2


def test_copies(numbered):
    dataset = wds.WebDataset(numbered([3, 3]), shardshuffle=True).shuffle(4).decode().map_dict(cls=double)
    first = [labels(dataset), labels(dataset)]
    for again in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset), copy.copy(dataset)):
        assert type(again) is type(dataset)
        assert [labels(again), labels(again)] == first, "a copy begins with the first epoch"


def test_a_class_of_ones_own(numbered):
    class Own(wds.WebDataset):
        def __init__(self, urls, extra):
            super().__init__(urls)
            self.extra = extra

    dataset = Own(numbered([3]), "x").decode()
    assert isinstance(dataset, Own)
    assert dataset.extra == "x"
    assert labels(dataset) == [0, 1, 2]


def test_as_a_context(numbered):
    with wds.WebDataset(numbered([3])).decode() as dataset:
        assert len(list(dataset)) == 3


# Mixtures.


def test_by_turns():
    parts = [[2, 2], [1], [3, 3, 3]]
    assert list(wds.RoundRobin(parts, longest=True)) == [2, 1, 3, 2, 3, 3]
    assert list(wds.RoundRobin(parts)) == [2, 1, 3, 2]
    assert list(wds.RoundRobin([[1, 2], [3, 4]]).map(double)) == [2, 6, 4, 8]


def test_by_turns_as_the_peer(peer):
    parts = [[2, 2], [1], [3, 3, 3]]
    for longest in (True, False):
        assert list(wds.RoundRobin(parts, longest)) == list(peer.RoundRobin(parts, longest))


def test_at_random():
    parts = [["a"] * 1000, ["b"] * 1000]
    mixed = list(wds.RandomMix(parts, probs=[3, 1]))
    assert 0.7 < mixed.count("a") / len(mixed) < 0.8
    assert max(mixed.count("a"), mixed.count("b")) == 1000, "it ends with the first that is at its end"
    everything = list(wds.RandomMix(parts, probs=[3, 1], longest=True))
    assert sorted(everything) == ["a"] * 1000 + ["b"] * 1000
    assert set(wds.RandomMix(parts, probs=[0, 1])) == {"b"}


def test_draws_are_seeded():
    def mixed(seed):
        mix = wds.RandomMix([["a"] * 50, ["b"] * 50], seed=seed)
        return [list(mix), list(mix)]

    assert mixed(0) == mixed(0)
    assert mixed(0)[0] != mixed(0)[1]
    assert mixed(0) != mixed(1)


@pytest.mark.parametrize("probs", [[1], [1, 2, 3], [0, 0], [-1, 2]], ids=repr)
def test_draws_without_sense(probs):
    with pytest.raises(ConfigError, match="2 numbers of at least 0"):
        wds.RandomMix([[1], [2]], probs)
