"""The threads end in every case, wherever it is decided."""

import threading
import time
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import Unavailable
from penstock.loader import slots
from penstock.loader.loader import runtime_of


def reader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")]


def test_an_iteration_that_dies_in_a_reader_thread_ends_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may run in any thread, and so may whatever ends an iteration."""
    unheard: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", unheard.append)
    held: list[Any] = []
    dropped_in: list[str] = []
    begun = threading.Event()

    def drop(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if threading.current_thread().name.startswith("penstock-reader"):
            assert begun.wait(20)
            if held:
                dropped_in.append(threading.current_thread().name)
                held.clear()
        return {"x": batch["x"] * 2}

    ds = ps.from_arrays(x=np.arange(500)).map(drop)
    with ps.Loader(ds, batch_size=1, memory="64MiB", output="numpy", threads=2) as loader:
        for number in range(3):
            begun.clear()
            held.append(runtime_of(loader).begin_next())
            begun.set()
            until = time.monotonic() + 20
            while (held or reader_threads()) and time.monotonic() < until:
                time.sleep(0.001)
            assert reader_threads() == []
            assert len(dropped_in) == number + 1
        assert unheard == []
        seen = [int(batch["x"][0]) for batch in loader]
    assert seen == list(range(0, 1000, 2)), "every slot came back, and none is used twice"


def several(**options: Any) -> ps.MultiLoader:
    datasets = {name: ps.from_arrays(x=np.arange(rows)) for name, rows in (("a", 50), ("b", 30))}
    return ps.MultiLoader(datasets, mode="alternate", batch_size=1, memory="64MiB", output="numpy", **options)


@pytest.mark.parametrize("started", [0, 2])
def test_a_system_that_has_no_more_threads(monkeypatch: pytest.MonkeyPatch, started: int) -> None:
    unheard: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", unheard.append)
    loader, start, calls = several(threads=3), threading.Thread.start, []

    def failing(thread: threading.Thread) -> None:
        calls.append(thread)
        if len(calls) > started:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", failing)
    if started:
        assert sum(len(batch["x"]) for _, batch in loader) == 80, "those that it has do all of it"
    else:
        with pytest.raises(Unavailable, match=r"can't start new thread.*ulimit -u"):
            next(iter(loader))
    monkeypatch.undo()
    assert sum(len(batch["x"]) for _, batch in loader) == 80, "the next try finds everything in order"
    assert reader_threads() == []
    assert unheard == []


def test_one_dataset_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others, which could, leave nothing behind."""
    unheard: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", unheard.append)
    loader = several(threads=2)
    make, calls = slots.SlotBlock.__init__, []

    def failing(arena: Any, *rest: Any) -> None:
        calls.append(arena)
        if len(calls) == 2:
            raise MemoryError
        make(arena, *rest)

    monkeypatch.setattr(slots.SlotBlock, "__init__", failing)
    with pytest.raises(MemoryError):
        next(iter(loader))
    assert sum(len(batch["x"]) for _, batch in loader) == 80
    assert reader_threads() == []
    assert unheard == []
