"""A caller's function over whole reads."""

import re
import threading
import time

import h5py
import numpy as np
import pytest
import torch
from torch.__config__ import parallel_info

import penstock as ps
from penstock.base import stop, user_functions
from penstock.base.user_functions import NO_LIMIT, rows_at_once
from penstock.dataset.combine import Columns, Concat, Joined, Part, Subset
from penstock.dataset.gather import Gathered
from penstock.dataset.map import Mapped
from penstock.dataset.memory import MemoryStore
from penstock.errors import OutOfRange, SchemaMismatch, StateMismatch, TransformFailed, Unavailable


def read(store, rows):
    out = {name: spec.empty(len(rows)) for name, spec in store.fields.items()}
    store.read_into(np.asarray(rows, np.int64), np.arange(len(rows)), out)
    return out


def failing(batch):
    if (batch["label"] == 13).any():
        raise KeyError("no thirteen")
    return {"x": batch["label"]}


def nothing(batch):
    return None


def one_number(batch):
    return {"x": batch["label"].sum()}


def too_few(batch):
    return {"x": batch["label"][:1]}


def words(batch):
    return {"x": np.array([object()] * len(batch["label"]))}


def numbered(rows):
    return MemoryStore({"label": np.arange(rows)})


def test_a_function_that_raises_is_named_with_its_rows():
    store = Mapped(numbered(20), failing)
    with pytest.raises(TransformFailed) as failed:
        read(store, [11, 12, 13, 14, 15])
    for told in ("failing", "KeyError", "no thirteen", "11, 12, 13, 14", "5 of them", "label"):
        assert told in str(failed.value)
    assert isinstance(failed.value.__cause__, KeyError)
    assert read(store, [11, 12])["x"].tolist() == [11, 12]


def test_a_function_that_raises_on_trial_is_refused_at_once():
    with pytest.raises(TransformFailed, match="failing raised KeyError"):
        Mapped(MemoryStore({"label": np.array([1, 13])}), failing)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (nothing, "nothing must return a dict .* returned NoneType"),
        (one_number, r"one_number was given 2 rows and returned 'x' of shape \(\)"),
        (too_few, r"too_few was given 2 rows and returned 'x' of shape \(1,\)"),
        (words, "words returned 'x' as Python objects"),
    ],
)
def test_a_function_that_returns_nonsense_is_refused_at_once(function, told):
    with pytest.raises(TransformFailed, match=told):
        Mapped(numbered(5), function)


def changing_shape(batch):
    wide = 3 if (batch["label"] == 13).any() else 2
    return {"x": np.repeat(batch["label"][:, None], wide, axis=1)}


def changing_dtype(batch):
    return {"x": batch["label"].astype(np.float64 if (batch["label"] == 13).any() else np.int64)}


def dropping_a_row(batch):
    return {"x": batch["label"][batch["label"] != 13]}


def dropping_a_field(batch):
    return {} if (batch["label"] == 13).any() else {"x": batch["label"]}


@pytest.mark.parametrize("function", [changing_shape, changing_dtype, dropping_a_row, dropping_a_field])
def test_output_that_changes_is_refused_where_it_changes(function):
    store = Mapped(numbered(20), function)
    assert len(read(store, [5, 6])["x"]) == 2
    with pytest.raises(SchemaMismatch) as refused:
        read(store, [12, 13])
    for told in (function.__name__, "'x'", "12, 13", "trial run", "same for every row"):
        assert told in str(refused.value)


def big_endian(batch):
    return {"x": batch["label"].astype(">f4")}


def test_output_in_another_byte_order_is_delivered_in_ours():
    store = Mapped(numbered(5), big_endian)
    got = read(store, [3, 1])
    assert got["x"].dtype == np.dtype("=f4")
    assert got["x"].tolist() == [3, 1]


def test_lists_are_arrays_too():
    store = Mapped(numbered(5), lambda batch: {"x": [[float(value)] for value in batch["label"]]})
    assert read(store, [3, 1])["x"].tolist() == [[3.0], [1.0]]


def test_a_function_may_write_into_its_input():
    def in_place(batch):
        batch["label"] += 1
        return batch

    store = Mapped(numbered(5), in_place)
    for _ in range(2):
        assert read(store, [0, 4])["label"].tolist() == [1, 5]


def test_a_function_sees_each_row_it_is_asked_for_once():
    seen = []

    def watch(batch):
        seen.append(batch["label"].tolist())
        return batch

    store = Mapped(numbered(9), watch)
    assert {label for labels in seen for label in labels} == {0, 1}, "two rows on trial"
    seen.clear()
    read(store, [7, 7, 2])
    assert seen == [[7, 7, 2]]


def test_a_penstock_error_inside_a_function_is_passed_on():
    def refusing(batch):
        if len(batch["label"]) == 3:
            raise OutOfRange("row 99 of the table is not there")
        return batch

    with pytest.raises(OutOfRange, match="row 99 of the table"):
        read(Mapped(numbered(9), refusing), [0, 1, 2])


def test_no_rows_need_no_function():
    def below_the_largest(batch):
        return {"x": batch["label"].max() - batch["label"]}

    assert read(Mapped(numbered(9), below_the_largest), [])["x"].shape == (0,)


# How many rows a function gets at a time.


@pytest.mark.parametrize(
    ("call_s", "row_s", "least", "most"),
    [
        (0.0, 0.01, 4, 5),
        (0.0, 0.001, 32, 50),
        (0.0, 1.0, 1, 1),
        (0.0, 60.0, 1, 1),
        (20e-6, 1e-6, 2**14, 50_000),
        (20e-6, 0.0, NO_LIMIT, NO_LIMIT),
        (0.02, 0.0, NO_LIMIT, NO_LIMIT),
        (0.1, 0.001, 64, 100),
        (2.0, 0.001, 1024, 2000),
    ],
)
def test_calls_take_some_tens_of_milliseconds_or_twice_what_a_call_costs_by_itself(call_s, row_s, least, most):
    assert least <= rows_at_once(lambda rows: call_s + rows * row_s, 128) <= most


@pytest.mark.parametrize("row_s", [1e-6, 0.001, 0.3, 60.0])
def test_timing_takes_little_beside_what_one_row_takes(row_s):
    rows = []
    rows_at_once(lambda count: rows.append(count) or count * row_s, 128)
    assert sum(rows) * row_s <= max(0.5, 3 * row_s)


def test_noise_does_not_make_calls_small():
    seconds = iter([30e-6, 25e-6, 0.08, 25e-6, 24e-6, 0.08, 24e-6, 30e-6, 0.03, 25e-6])
    assert rows_at_once(lambda rows: next(seconds), 128) == NO_LIMIT


def a_blink(batch):
    time.sleep(0.02 * len(batch["label"]))
    return batch


def test_a_slow_function_gets_a_block_in_pieces_and_all_of_its_rows():
    sizes = []

    def slow(batch):
        sizes.append(len(batch["label"]))
        return a_blink(batch)

    store = Mapped(numbered(9), slow)
    assert store.rows_at_once <= 2
    sizes.clear()
    rows = [8, 1, 7, 7, 0]
    assert read(store, rows)["label"].tolist() == rows
    assert max(sizes) <= 2
    assert sum(sizes) == len(rows)


def combinations():
    slow = Mapped(numbered(9), a_blink)
    yield "subset", Subset(slow, np.arange(3)), slow.rows_at_once
    yield "columns", Columns(slow, {"x": "label"}), slow.rows_at_once
    yield "concat", Concat([numbered(4), slow]), slow.rows_at_once
    yield (
        "join",
        Joined({"a": Part(slow, None, {"x": "label"}), "b": Part(numbered(9), None, {"y": "label"})}),
        slow.rows_at_once,
    )
    yield "map", Mapped(slow, lambda batch: batch), slow.rows_at_once
    yield "gather", Gathered(slow, np.arange(8).reshape(2, 4)), 1
    yield "none", numbered(9), NO_LIMIT


def test_what_is_made_of_a_mapped_dataset_is_as_slow():
    for name, store, expected in combinations():
        assert store.rows_at_once == expected, name


def test_a_function_that_cannot_be_timed_is_taken_as_it_is():
    def of_several(batch):
        if len(batch["label"]) == 1:
            raise ValueError("one is not enough")
        return batch

    assert Mapped(numbered(9), of_several).rows_at_once == NO_LIMIT


def test_no_call_begins_once_the_loader_was_closed():
    store = Mapped(numbered(9), lambda batch: batch)
    stop.watch(stop.Flag(is_set=True))
    try:
        with pytest.raises(Unavailable, match="the loader was closed"):
            read(store, [0, 1])
    finally:
        stop.watch(stop.Flag())


# In a loader.


@pytest.fixture(params=["rows", "blocks"])
def stored(request, tmp_path):
    """2,048 small rows, each of which can be read by itself, or many to a chunk."""
    path, values = tmp_path / "a.h5", np.arange(2048)
    with h5py.File(path, "w") as file:
        file.create_dataset("label", data=values, chunks=None if request.param == "rows" else (256,))
    return ps.open(path)


def batches_of(ds, **options):
    return ps.Loader(ds, **{"batch_size": 8, "memory": "64MiB", "threads": 2, "output": "numpy", **options})


def reading_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("penstock-reader")]


def test_the_order_and_the_values_do_not_depend_on_how_long_a_function_takes(stored, monkeypatch):
    def doubled(batch):
        return {"x": 2 * batch["label"]}

    found = []
    for at_once in (1, 3, 64, NO_LIMIT):
        monkeypatch.setattr(user_functions, "rows_at_once", lambda timed, most, at_once=at_once: at_once)
        with batches_of(stored.map(doubled), shuffle=True, seed=4) as loader:
            epoch = [batch["x"].tolist() for batch in loader]
            found.append((epoch, loader.state_dict()))
    assert all(each == found[0] for each in found)
    assert sorted(value for batch in found[0][0] for value in batch) == list(range(0, 4096, 2))


def test_a_slow_function_gives_a_first_batch_soon_and_lets_go_when_the_loop_is_left(tmp_path):
    """Counted in rows, not in seconds: a busy machine is no failure."""
    np.save(tmp_path / "a.npy", np.arange(2048))
    calls = []

    def slow(batch):
        calls.append(len(batch["data"]))
        time.sleep(0.02 * len(batch["data"]))
        return batch

    ds = ps.open(tmp_path / "a.npy").map(slow)
    calls.clear()
    with batches_of(ds) as loader:
        assert loader.plan.rows_per_read <= 2
        assert next(iter(loader))["data"].tolist() == list(range(8))
        assert sum(calls) < 64, "the first batch does not wait for many others"
    assert not reading_threads(), "none goes on computing"


def wait_for_a_batch(loader):
    with pytest.raises(StateMismatch, match="closed"):
        next(iter(loader))


def test_leaving_does_not_wait_until_a_block_went_through_a_slow_function(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("label", data=np.arange(2048), chunks=(1024,))
    rows, begun = [], threading.Event()

    def slow(batch):
        rows.append(len(batch["label"]))
        begun.set()
        return a_blink(batch)

    ds = ps.open(tmp_path / "a.h5").map(slow)
    rows.clear(), begun.clear()
    with batches_of(ds) as loader:
        waiting = threading.Thread(target=wait_for_a_batch, args=(loader,))
        waiting.start()  # reading begins when a batch is asked for, and the first one takes the whole block
        assert begun.wait(20)
        loader.close()
        waiting.join(20)
        assert not reading_threads()
    assert sum(rows) < 1024


# Torch's own threads.


def test_torch_uses_one_core_in_reading_threads_and_as_many_as_before_elsewhere(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(64, dtype=np.float32))
    found = {}

    def counts():
        return tuple(map(int, re.findall(r"(?:at::get_num|(?:omp|mkl)_get_max)_threads\(\) : (\d+)", parallel_info())))

    def looked_at(batch):
        found.setdefault(threading.current_thread().name, set()).add(counts())
        return {"x": torch.from_numpy(batch["data"]).exp().numpy()}

    before = torch.get_num_threads()
    torch.set_num_threads(3)  # and so more than one on any machine
    try:
        here = counts()
        for _ in batches_of(ps.open(tmp_path / "a.npy").map(looked_at)):
            pass
        assert counts() == here
        other = threading.Thread(target=lambda: found.setdefault("other", {counts()}))
        other.start()
        other.join()
    finally:
        torch.set_num_threads(before)
    assert found.pop(threading.current_thread().name) == {here}, "the trial is the caller's own thread"
    assert max(found.pop("other").pop()) == 3, "a thread begun later has what the caller chose"
    assert found
    assert {max(each) for told in found.values() for each in told} == {1}


def test_what_the_first_call_keeps_is_no_part_of_a_row():
    """A function may import a library or fill a cache when it is first called."""
    kept = []

    def cached(batch):
        if not kept:
            kept.append(np.ones(1 << 21))
        return {"x": batch["x"] * kept[0][0]}

    ds = ps.from_arrays(x=np.ones((400, 8))).map(cached)
    assert ds.store.scratch_bytes(400) < kept[0].nbytes
