"""Two shards by random access: every sample once on any number of ranks, and going on is invisible."""

import io
import json

import numpy as np
import pytest

import penstock as ps
from penstock.testing import check_resume


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@pytest.fixture(params=[(20, 13), (1, 6), (9, 9)], ids=str)
def shards(request, write_tar):
    """Two shards, each sample with a number, an array of that number, and a text that says it."""
    first = 0
    for shard, count in enumerate(request.param):
        members = []
        for number in range(first, first + count):
            values = npy(np.full((2, 3), number, np.float16))
            members += [(f"{number:04d}.cls", b"%d" % number), (f"{number:04d}.npy", values)]
            members += [(f"{number:04d}.txt", b"number %d" % number)]
        path = write_tar(f"shard-{shard}.tar", members)
        first += count
    return ps.open(path.replace("-1.tar", "-*.tar")), first


def loader(ds, **options):
    defaults = {
        "batch_size": 2,
        "shuffle": True,
        "memory": "64MiB",
        "output": "numpy",
        "columns": ("cls", "npy", "txt"),
    }
    return ps.Loader(ds, **{**defaults, **options})


def numbers(batch):
    labels, values, texts = batch
    assert (values == labels[:, None, None]).all()
    assert list(texts) == [f"number {label}" for label in labels.tolist()]
    return labels.tolist()


@pytest.mark.case(15)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_sample_once_over_all_ranks(shards, world, shuffle):
    ds, count = shards
    shares = []
    for rank in range(world):
        with loader(ds, shuffle=shuffle, rank=rank, world_size=world) as batches:
            shares.append([numbers(batch) for batch in batches])
            assert len(shares[-1]) == len(batches)
    assert len({len(share) for share in shares}) == 1, "every rank takes the same steps"
    seen = [number for share in shares for batch in share for number in batch]
    left = count % (2 * world)
    assert len(seen) == count + (world - left if 0 < left < world else 0)
    assert set(seen) == set(range(count))


@pytest.mark.parametrize("place", [(0, 1), (1, 2), (2, 3)], ids=str)
def test_going_on_after_any_batch(shards, place):
    check_resume(lambda: loader(shards[0], batch_size=3, rank=place[0], world_size=place[1]))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 8), (8, 1)])
def test_going_on_with_other_ranks(shards, before, after):
    ds, count = shards
    seen, states = [], []
    for rank in range(before):
        with loader(ds, batch_size=1, rank=rank, world_size=before, tail="drop") as batches:
            running = iter(batches)
            for _ in range(min(2, len(batches))):
                seen += numbers(next(running))
            states.append(json.loads(json.dumps(batches.state_dict())))
    assert all(state == states[0] for state in states)
    if states[0]["epoch"] == 0:
        for rank in range(after):
            with loader(ds, batch_size=1, rank=rank, world_size=after, tail="drop") as batches:
                batches.load_state_dict(states[0])
                seen += [number for batch in batches for number in numbers(batch)]
    assert len(seen) == len(set(seen)), "none comes twice"
    assert count - len(seen) < max(before, after), "fewer than ranks are left out, as was asked for"


@pytest.mark.parametrize("mode", ["together", "alternate"])
def test_each_shard_a_dataset_of_its_own(shards, mode):
    ds, count = shards
    middle = ds.select(range(count // 2, count))
    with ps.MultiLoader(
        {"all": ds, "half": middle},
        mode=mode,
        batch_size=3,
        shuffle=True,
        memory="64MiB",
        columns=("cls", "npy", "txt"),
    ) as batches:
        seen = {"all": [], "half": []}
        for step in batches:
            for name, batch in step.items() if mode == "together" else [step]:
                seen[name] += numbers(batch)
    assert sorted(seen["all"]) == list(range(count))
    assert sorted(seen["half"]) == list(range(count // 2, count))
