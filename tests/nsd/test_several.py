"""Subjects of different voxel counts in one loader: exact epochs, ranks, resuming, padding."""

import json

import numpy as np
import pytest

import penstock as ps
from penstock.nsd import NSD, synthesize
from penstock.nsd.synthetic import Scale

COUNTS = {1: 27, 2: 23, 5: 31, 7: 19}
SESSIONS = {1: 3, 2: 2, 5: 3, 7: 1}
COLUMNS = ("voxels", "image", "coco", "global_trial")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Four subjects; each has a release of its own, so that their regions differ in size."""
    made = {}
    for subject, count in COUNTS.items():
        root = tmp_path_factory.mktemp(f"subj{subject}")
        synthesize(root, Scale(sessions={subject: SESSIONS[subject]}, region_voxels=count))
        made[f"subj{subject:02d}"] = NSD(root, subject).dataset(COLUMNS, zscore="session")
    return made


def loader(datasets, mode="together", **options):
    options = {"batch_size": 4, "shuffle": True, "seed": 3, "memory": "128MiB", "output": "numpy", **options}
    return ps.MultiLoader(datasets, mode=mode, columns=COLUMNS, **options)


def steps(loader):
    """What each step gave, by subject."""
    for step in loader:
        yield step if isinstance(step, dict) else dict([step])


def check_whole(datasets, shares):
    """Every trial of every subject once, with its own voxels and picture."""
    for name, ds in datasets.items():
        batches = [step[name] for share in shares for step in share if name in step]
        trials = np.concatenate([trial for *_, trial in batches])
        assert sorted(trials.tolist()) == sorted(ds.trials["global_trial"])
        row_of = {int(trial): row for row, trial in enumerate(ds.trials["global_trial"])}
        voxels, images, coco = (np.concatenate([batch[k] for batch in batches]) for k in range(3))
        assert voxels.shape[1] == ds.fields["voxels"].shape[0]
        for place, trial in enumerate(trials.tolist()):
            want = ds[row_of[trial]]
            assert np.array_equal(voxels[place], want[0])
            assert np.array_equal(images[place], want[1])
            assert coco[place] == want[2]


@pytest.mark.parametrize("mode", ["together", "alternate"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_trial_of_every_subject_once(datasets, mode, world_size):
    shares = []
    for rank in range(world_size):
        with loader(datasets, mode, rank=rank, world_size=world_size, tail="drop") as one:
            shares.append(list(steps(one)))
            assert len(shares[-1]) == len(one)
    assert len({len(share) for share in shares}) == 1
    assert [list(step) for step in shares[0]] == [list(step) for step in shares[-1]]
    dropped = any(len(ds) % world_size for ds in datasets.values())
    if not dropped:
        check_whole(datasets, shares)
    else:
        trials = [
            (name, int(t)) for share in shares for step in share for name, batch in step.items() for t in batch[3]
        ]
        assert len(trials) == len(set(trials))
        assert len(trials) >= sum(len(ds) - len(ds) % world_size for ds in datasets.values())


@pytest.mark.parametrize("mode", ["together", "alternate"])
def test_it_goes_on_anywhere(datasets, mode):
    with loader(datasets, mode) as one:
        whole = list(steps(one))
    for stop in range(0, len(whole), 5):
        with loader(datasets, mode) as one:
            for _, _ in zip(range(stop), one, strict=False):
                pass
            state = json.loads(json.dumps(one.state_dict()))
        with loader(datasets, mode, threads=1) as other:
            other.load_state_dict(state)
            rest = list(steps(other))
        assert len(rest) == len(whole) - stop
        for found, wanted in zip(rest, whole[stop:], strict=True):
            assert list(found) == list(wanted)
            assert all(np.array_equal(found[n][k], wanted[n][k]) for n in wanted for k in range(len(COLUMNS)))


def test_padded_to_one_length_they_are_one_dataset(datasets):
    longest = max(COUNTS.values())
    ds = ps.concat(ds.only(*COLUMNS).pad("voxels", to=longest) for ds in datasets.values())
    assert ds.fields["voxels"].shape == (longest,)
    row = 0
    for each, count in zip(datasets.values(), COUNTS.values(), strict=True):
        first = ds[row]["voxels"]
        assert np.array_equal(first[:count], each[0][0])
        assert not first[count:].any()
        row += len(each)
