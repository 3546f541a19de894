"""States of other data, of other programs, or of none are refused; what is left out is the same after a good one."""

import copy
import json
import zlib
from itertools import islice

import h5py
import numpy as np
import pytest

import penstock as ps
from penstock.errors import StateMismatch

ROWS = 40


def values(rows=ROWS, width=6):
    return np.arange(rows * width, dtype=np.float32).reshape(rows, width)


@pytest.fixture
def folder(tmp_path):
    for part in range(4):
        np.save(tmp_path / f"part{part}.npy", values()[10 * part : 10 * part + 10])
    return tmp_path


def loader(source, **options):
    options = {"batch_size": 4, "shuffle": True, "memory": "64MiB", "threads": 2, "output": "numpy"} | options
    return ps.Loader(ps.open(source) if isinstance(source, str) else source, **options)


def state_of(source, batches=3, **options):
    with loader(source, **options) as before:
        iterator = iter(before)
        for _ in range(batches):
            next(iterator)
        return json.loads(json.dumps(before.state_dict()))


# Case 36: when a state may be loaded.


@pytest.mark.case(36)
@pytest.mark.parametrize("several", [False, True])
def test_a_state_that_is_loaded_too_late_is_no_silent_restart(folder, several):
    ds = ps.open(str(folder / "*.npy"))
    options = {"batch_size": 4, "memory": "64MiB", "output": "numpy"}

    def make():
        if several:
            return ps.MultiLoader({"a": ds, "b": ds}, mode="together", **options)
        return ps.Loader(ds, **options)

    first = make()
    for _, _ in zip(range(3), first, strict=False):
        pass
    state = first.state_dict()
    late = make()
    iterator = iter(late)
    next(iterator)
    late.load_state_dict(state)
    with pytest.raises(StateMismatch, match="while this iteration was under way; begin a new one"):
        next(iterator)
    assert len(list(late)) == 10 - 3, "the new one goes on from the state"
    first.close()
    late.close()


# Case 37: other data, and states that are none.


def add_a_file(folder):
    np.save(folder / "part4.npy", values(10))


def remove_a_file(folder):
    (folder / "part3.npy").unlink()


def longer_file(folder):
    np.save(folder / "part1.npy", values(11))


def other_numbers(folder):
    np.save(folder / "part1.npy", values(10).astype(np.int32))


def other_names(folder):
    (folder / "part1.npy").rename(folder / "part9.npy")


CHANGES = [add_a_file, remove_a_file, longer_file, other_numbers, other_names]


@pytest.mark.case(37)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_other_data_under_a_state(folder, change):
    state = state_of(str(folder / "*.npy"))
    change(folder)
    if change is other_numbers:
        for part in range(4):
            np.save(folder / f"part{part}.npy", values(10).astype(np.int32))
    with loader(str(folder / "*.npy")) as after, pytest.raises(StateMismatch) as refused:
        after.load_state_dict(state)
    told = str(refused.value)
    assert "data was" in told
    assert repr(state["data"]) in told
    assert repr(after.state_dict()["data"]) in told
    assert "Open the same files" in told


@pytest.mark.case(37)
def test_the_same_files_in_another_order(folder):
    files = [str(folder / f"part{part}.npy") for part in range(4)]
    state = state_of(ps.open(files))
    with loader(ps.open(files[::-1])) as after, pytest.raises(StateMismatch, match="data was"):
        after.load_state_dict(state)
    with loader(ps.open(files)) as after:
        after.load_state_dict(state)
        assert len(list(after)) == 7


@pytest.mark.case(37)
@pytest.mark.parametrize(
    ("options", "told"),
    [({"seed": 9}, "seed"), ({"shuffle": False}, "order|kind|seed"), ({"shuffle": ps.Resampled(ROWS, 9)}, "was|entry")],
)
def test_another_order_under_a_state(folder, options, told):
    state = state_of(str(folder / "*.npy"))
    with loader(str(folder / "*.npy"), **options) as after, pytest.raises(StateMismatch, match=told):
        after.load_state_dict(state)


class Trap(dict):
    """Whoever asks it anything but its entries runs its code."""

    def __reduce__(self):
        raise AssertionError

    def __call__(self, *args, **kwargs):
        raise AssertionError


class Mute:
    """It cannot even be printed."""

    def __repr__(self):
        raise RuntimeError


WRONG = [None, True, -1, 2.0, 1.5, float("nan"), "1", "", [], [1], {}, {"a": 1}, Trap(), 10**9, b"1"]
WRONG += [10**18, 10**400, 10**5000, -(10**5000), [10**5000], np.arange(3), np.int64(1), Mute()]


@pytest.mark.case(37)
@pytest.mark.parametrize("several", [False, True])
def test_states_that_are_none(folder, several):
    """Cut, foreign, newer, or edited by hand: one kind of error, and the loader is as it was."""
    ds = ps.open(str(folder / "*.npy"))
    options = {"batch_size": 4, "memory": "64MiB", "output": "numpy"}
    made = ps.MultiLoader({"a": ds, "b": ds}, mode="together", **options) if several else ps.Loader(ds, **options)
    good = json.loads(json.dumps(made.state_dict()))
    bad = [
        *WRONG,
        good | {1: 2, "more": 3, None: 4},
        good | {10**5000: 1},
        {"version": 2, **{k: v for k, v in good.items() if k != "version"}},
        good | {"more": 1},
    ]
    for name in good:
        bad.append({key: value for key, value in good.items() if key != name})
        bad += [good | {name: wrong} for wrong in WRONG if name != "epoch" or type(wrong) is not int or wrong != 10**9]
    if several:
        for name in ("of", "samples"):
            for dataset in ("a", "b"):
                for wrong in WRONG:
                    broken = copy.deepcopy(good)
                    broken[name][dataset] = wrong
                    bad.append(broken)
    for state in bad:
        with pytest.raises(StateMismatch) as refused:
            made.load_state_dict(state)
        assert len(str(refused.value)) < 2000
    assert made.state_dict() == good
    assert len(list(made)) == 10
    made.close()


# Case 38: samples that one rank cannot read.


@pytest.fixture
def damaged(tmp_path):
    """Rows 5, 6, 7 and 30 cannot be decoded."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        made = file.create_dataset("x", data=values(ROWS, 600), chunks=(1, 600), compression="gzip")
        places = [made.id.get_chunk_info(row) for row in (5, 6, 7, 30)]
    with open(path, "r+b") as file:
        for place in places:
            file.seek(place.byte_offset)
            file.write(zlib.compress(b"nothing")[: place.size // 2])
    return str(path)


def ranks(source, world, **options):
    options |= {"on_error": "skip", "world_size": world, "shuffle": False}
    return [loader(source, rank=rank, **options) for rank in range(world)]


def read_on(made, batches=None):
    """In step, as ranks that train together are: rows of each batch, and what was left out, of each rank."""
    steps = list(islice(zip(*made, strict=True), batches))
    rows = [[(batch["x"][:, 0] / 600).astype(int).tolist() for batch in step] for step in steps]
    left_out = [[(each.row, each.why) for each in rank.stats().left_out] for rank in made]
    return rows, left_out


@pytest.mark.case(38)
@pytest.mark.parametrize("batch_size", [3, 4])
def test_samples_that_one_of_two_ranks_cannot_read(damaged, batch_size):
    whole, left_out = read_on(ranks(damaged, 2, batch_size=batch_size))
    assert len({len(step) for step in whole}) == 1, "as many steps on both"
    assert len(whole) == -(-ROWS // (2 * batch_size))
    assert sorted(row for step in whole for rank in step for row in rank) == sorted({*range(ROWS)} - {5, 6, 7, 30})
    assert sorted(row for rank in left_out for row, _ in rank) == [5, 6, 7, 30]
    for stop in range(len(whole) + 1):
        for threads in (1, 3):
            first = ranks(damaged, 2, batch_size=batch_size, threads=threads)
            before = read_on(first, stop)
            states = [json.dumps(rank.state_dict()) for rank in first]
            assert len(set(states)) == 1
            second = ranks(damaged, 2, batch_size=batch_size, threads=4 - threads)
            for rank in second:
                rank.load_state_dict(json.loads(states[0]))
            if stop == len(whole):
                assert second[0].state_dict()["epoch"] == 1
                continue
            after = read_on(second)
            assert before[0] + after[0] == whole
            assert [a + b for a, b in zip(before[1], after[1], strict=True)] == left_out
            for rank in (*first, *second):
                rank.close()


@pytest.mark.case(38)
def test_a_batch_of_which_one_rank_can_read_nothing(damaged):
    """It comes empty, so that both take the same steps; alone, it is left out."""
    whole, _ = read_on(ranks(damaged, 2, batch_size=1))
    assert len(whole) == ROWS // 2
    assert [len(rank) for step in whole for rank in step].count(0) == 4
    with loader(damaged, on_error="skip", batch_size=1) as alone:
        assert all(len(batch["x"]) == 1 for batch in alone)
