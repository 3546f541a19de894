"""Hooks: told how it goes, in the words of the tools they are for, without a hold on any batch."""

import sys
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import hooks

ROWS, BATCH = 64, 4


@pytest.fixture
def loader():
    ds = ps.from_arrays(x=np.arange(ROWS))
    with ps.Loader(ds, batch_size=BATCH, memory="64MiB", output="numpy", threads=1) as made:
        yield made


class Writer:
    """As much of SummaryWriter as is needed."""

    def __init__(self) -> None:
        self.written: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.written.setdefault(tag, []).append((global_step, scalar_value))


def test_tensorboard_counts_batches_over_epochs(loader: ps.Loader) -> None:
    writer = Writer()
    hook = hooks.TensorBoard(writer)
    for _ in range(2):
        seen = [int(row) for batch in hooks.watched(loader, hook) for row in batch["x"]]
        assert seen == list(range(ROWS))
    assert writer.written.keys() == {f"penstock/{name}" for name in hooks.numbers(loader.stats())}
    assert writer.written["penstock/epoch_samples"] == [(16, ROWS), (32, ROWS)]
    assert writer.written["penstock/epoch"] == [(16, 0), (32, 1)]
    assert writer.written["penstock/memory_budget_bytes"][0][1] == 64 * 2**20


def test_hooks_are_told_meanwhile(loader: ps.Loader) -> None:
    told: list[int] = []
    for _ in hooks.watched(loader, lambda stats: told.append(stats.batches), every_s=0):
        pass
    assert told == [*range(1, 17), 16]


def test_a_batch_is_the_callers_alone(loader: ps.Loader) -> None:
    for batch in hooks.watched(loader):
        assert sys.getrefcount(batch) == 2  # here, and in the question
    assert loader.stats().kept_batches == 0


def test_an_epoch_that_is_left_ends(loader: ps.Loader) -> None:
    told: list[Any] = []
    batches = hooks.watched(loader, told.append)
    next(batches)
    batches.close()
    assert told == []


def test_prometheus(loader: ps.Loader) -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    registry.register(hooks.Prometheus(loader, "validation"))
    for _ in loader:
        pass
    told = client.generate_latest(registry).decode()
    assert f'penstock_epoch_samples{{loader="validation"}} {ROWS}.0\n' in told
    assert 'penstock_memory_budget_bytes{loader="validation"} 6.7108864e+07\n' in told
    for name in hooks.numbers(loader.stats()):
        assert registry.get_sample_value(f"penstock_{name}", {"loader": "validation"}) is not None


def test_prometheus_without_its_client(loader: ps.Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(ps.errors.ConfigError, match="pip install prometheus-client"):
        list(hooks.Prometheus(loader).collect())


def test_tensorboard_itself(loader: ps.Loader, tmp_path: Any) -> None:
    pytest.importorskip("tensorboard")
    writers = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with writers.SummaryWriter(str(tmp_path)) as writer:
        for _ in hooks.watched(loader, hooks.TensorBoard(writer)):
            pass
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    (event,) = read.Scalars("penstock/epoch_samples")
    assert (event.step, event.value) == (16, ROWS)
