"""``iter(loader)`` changes nothing: the first ``next`` begins the epoch. Threads may share what it gives."""

import copy
import itertools
import multiprocessing
import pickle
import threading
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import ConfigError, StateMismatch, Unavailable

ROWS, BATCH = 36, 4
STEPS = ROWS // BATCH


def one(ds: ps.Dataset | None = None, **options: Any) -> ps.Loader:
    ds = ps.from_arrays(x=np.arange(ROWS)) if ds is None else ds
    return ps.Loader(ds, **{"batch_size": BATCH, "memory": "64MiB", "output": "numpy", "threads": 2, **options})


def several(ds: ps.Dataset | None = None, **options: Any) -> ps.MultiLoader:
    ds = ps.from_arrays(x=np.arange(ROWS)) if ds is None else ds
    options = {"batch_size": BATCH, "memory": "64MiB", "output": "numpy", "threads": 2, **options}
    return ps.MultiLoader({"a": ds}, mode="together", **options)


def rows(step: Any) -> list[int]:
    return [int(row) for row in step.get("a", step)["x"]]


def reader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")]


def tqdm_auto(loader: Any) -> None:
    """What ``tqdm.auto`` does before its loop: ``iter`` twice."""
    bar = pytest.importorskip("tqdm.auto").tqdm(loader, disable=True)
    iter(bar.iterable)
    iter(bar)


LOOKS = {
    "iter": iter,
    "iter of iter": lambda loader: iter(iter(loader)),
    "many": lambda loader: [iter(loader) for _ in range(3)],
    "enumerate": enumerate,
    "zip": lambda loader: zip(loader, range(3), strict=False),
    "zip with nothing": lambda loader: list(zip([], loader, strict=False)),
    "islice of none": lambda loader: list(itertools.islice(loader, 0)),
    "tqdm.auto": tqdm_auto,
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
@pytest.mark.parametrize("make", [one, several])
def test_looking_takes_nothing(make: Any, look: Any) -> None:
    with make() as loader:
        before = loader.state_dict()
        held = look(loader)
        assert (loader.state_dict(), reader_threads(), loader.stats().batches) == (before, [], 0)
        got = [rows(step) for step in itertools.islice(loader, 3)]
        loader.load_state_dict(loader.state_dict())
        before = loader.state_dict()
        again = look(loader)
        assert (loader.state_dict(), reader_threads(), loader.stats().batches) == (before, [], 3)
        got += [rows(step) for step in loader]
        assert list(itertools.chain(*got)) == list(range(ROWS))
        assert loader.state_dict()["epoch"] == 1
        del held, again


LOOPS = {
    "tqdm.auto": lambda loader: list(pytest.importorskip("tqdm.auto").tqdm(loader, disable=True)),
    "enumerate": lambda loader: [step for _, step in enumerate(loader)],
    "zip": lambda loader: [step for step, _ in zip(loader, itertools.count(), strict=False)],
    "map": lambda loader: list(map(lambda step: step, loader)),  # noqa: C417
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS.keys())
@pytest.mark.parametrize("make", [one, several])
def test_loops_through_other_functions_are_epochs(make: Any, loop: Any) -> None:
    with make() as loader:
        for epoch in range(3):
            assert loader.epoch == epoch
            assert [row for step in loop(loader) for row in rows(step)] == list(range(ROWS))


@pytest.mark.parametrize("make", [one, several])
def test_a_position_counts_what_was_taken(make: Any) -> None:
    """``zip`` takes from its first argument before it finds that the second has ended."""
    for pairs, taken in ((lambda loader: zip(range(3), loader, strict=False), 3),
                         (lambda loader: zip(loader, range(3), strict=False), 4)):  # fmt: skip
        with make() as loader:
            assert len(list(pairs(loader))) == 3
            loader.load_state_dict(loader.state_dict())
            assert [row for step in loader for row in rows(step)] == list(range(taken * BATCH, ROWS))
            assert loader.epoch == 1


@pytest.mark.parametrize("make", [one, several])
def test_set_epoch(make: Any) -> None:
    with make(shuffle=True) as loader:
        epochs = [[rows(step) for step in loader] for _ in range(3)]
        loader.set_epoch(1)
        assert [rows(step) for step in itertools.islice(loader, 3)] == epochs[1][:3]
        loader.set_epoch(1)
        assert [rows(step) for step in itertools.islice(loader, 3)] == epochs[1][:3], (
            "the loop was left: from the start"
        )
        loader.load_state_dict(loader.state_dict())
        loader.set_epoch(1)
        assert [rows(step) for step in loader] == epochs[1][3:], "a loaded position stays"
        loader.set_epoch(2)
        assert [rows(step) for step in loader] == epochs[2]
        for wrong in (-1, 1.5, "2", None):
            with pytest.raises(ConfigError, match="epoch="):
                loader.set_epoch(wrong)


@pytest.mark.parametrize("make", [one, several])
def test_a_look_does_not_end_the_iteration_under_way(make: Any) -> None:
    with make() as loader:
        running = iter(loader)
        first = rows(next(running))
        iter(loader)
        assert first + [row for step in running for row in rows(step)] == list(range(ROWS))


@pytest.mark.parametrize("make", [one, several])
def test_the_first_next_begins(make: Any) -> None:
    with make() as loader:
        unused, used = iter(loader), iter(loader)
        assert len(list(used)) == STEPS
        assert loader.state_dict()["epoch"] == 1
        state = loader.state_dict()
        half = iter(loader)
        next(half)
        state = loader.state_dict()
        loader.load_state_dict(state)
        assert len(list(unused)) == STEPS - 1, "made before the state was loaded, and begun after"
        with pytest.raises(StateMismatch, match="load_state_dict"):
            next(half)
        assert list(used) == []


@pytest.mark.parametrize("make", [one, several])
def test_an_iteration_that_cannot_begin_uses_nothing_up(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(processes=0) as loader:
        list(itertools.islice(loader, 3))
        loader.load_state_dict(loader.state_dict())
        before, iterator = loader.state_dict(), iter(loader)

        def failing(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", failing)
        for _ in range(2):
            with pytest.raises(Unavailable):
                next(iterator)
            assert loader.state_dict() == before
        monkeypatch.undo()
        assert len(list(iterator)) == STEPS - 3


# Threads.


@pytest.mark.parametrize("make", [one, several])
def test_threads_share_an_iterator(make: Any) -> None:
    """Each batch goes to one of them, and each of them comes to the end."""
    with make() as loader:
        shared, seen = iter(loader), []

        def consume() -> None:
            for step in shared:
                seen.extend(rows(step))

        consumers = [threading.Thread(target=consume, daemon=True) for _ in range(6)]
        for thread in consumers:
            thread.start()
        for thread in consumers:
            thread.join(20)
        assert not any(thread.is_alive() for thread in consumers)
        assert sorted(seen) == list(range(ROWS))
        assert list(shared) == []


ENDS = {
    "close": lambda loader: loader.close(),
    "load_state_dict": lambda loader: loader.load_state_dict(loader.state_dict()),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("make", [one, several])
def test_whoever_waits_for_a_batch_hears_of_the_end(make: Any, end: Any) -> None:
    entered, leave, told = threading.Event(), threading.Event(), []

    def stuck(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if threading.current_thread().name.startswith("penstock-reader"):
            entered.set()
            leave.wait(20)
        return batch

    def consume() -> None:
        try:
            next(iterator)
        except StateMismatch as error:
            told.append(str(error))

    with make(ps.from_arrays(x=np.arange(ROWS)).map(stuck)) as loader:
        iterator = iter(loader)
        consumer = threading.Thread(target=consume, daemon=True)
        consumer.start()
        assert entered.wait(20)
        end(loader)
        consumer.join(20)
        leave.set()
        assert not consumer.is_alive()
        assert len(told) == 1
        assert "closed" in told[0] or "load_state_dict" in told[0]


# Other processes.


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("make", [one, several])
def test_a_loader_is_not_sent(make: Any, send: Any) -> None:
    with make() as loader:
        with pytest.raises(ConfigError, match=r"Make it in the process that uses it.*state_dict"):
            send(loader)
        with pytest.raises(ConfigError, match=r"state_dict"):
            send(iter(loader))


def test_a_loader_is_not_sent_to_a_process_that_is_spawned() -> None:
    with one() as loader, pytest.raises(ConfigError, match="Make it in the process"):
        multiprocessing.get_context("spawn").Process(target=len, args=(loader,)).start()
