"""A loader's statistics in TensorBoard and Prometheus, where they are installed.

```python
for batch in hooks.watched(loader, hooks.TensorBoard(SummaryWriter("runs/7"))):
    ...
REGISTRY.register(hooks.Prometheus(loader))
```

Any function of ``Stats`` is a hook. TensorBoard receives numbers every few seconds; Prometheus asks for them.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from penstock.errors import ConfigError
from penstock.loader.loader import Loader
from penstock.loader.multi import MultiLoader
from penstock.loader.stats import Stats

Hook = Callable[[Stats], None]

# Name (ending with its unit, as in Prometheus), meaning, and value.
_NUMBERS: tuple[tuple[str, str, Callable[[Stats], float]], ...] = (
    ("samples_per_second", "samples delivered per second, over the epoch", lambda stats: stats.samples_per_s),
    ("bytes_per_second", "bytes delivered per second, over the epoch", lambda stats: stats.bytes_per_s),
    ("waiting_ratio", "share of the time in which the training step waited", lambda stats: stats.waiting_share),
    ("memory_peak_bytes", "the most by which the process grew", lambda stats: stats.peak_bytes),
    ("memory_planned_bytes", "bytes that the loader reserved", lambda stats: stats.planned_bytes),
    ("memory_budget_bytes", "bytes that it may hold", lambda stats: stats.budget_bytes),
    ("read_bytes", "bytes read from files in the epoch", lambda stats: stats.bytes_read),
    ("threads", "threads that read", lambda stats: stats.threads),
    ("left_out_samples", "samples of the epoch that could not be read", lambda stats: stats.left_out_samples),
    ("epoch", "the epoch under way, from 0", lambda stats: stats.epoch),
    ("epoch_samples", "samples delivered in it", lambda stats: stats.samples),
)


def numbers(stats: Stats) -> dict[str, float]:
    """The numbers worth watching, by name."""
    return {name: float(value(stats)) for name, _, value in _NUMBERS}


def watched(loader: Loader | MultiLoader, *hooks: Hook, every_s: float = 10.0) -> Iterator[Any]:
    """One epoch of a loader; calls the hooks every ``every_s`` seconds and at its end."""
    batches, due = iter(loader), time.monotonic() + every_s
    while True:
        try:
            yield next(batches)  # kept under no name here: its memory is free when the caller drops it
        except StopIteration:
            break
        if time.monotonic() >= due:
            due = time.monotonic() + every_s
            _call(hooks, loader.stats())
    _call(hooks, loader.stats())


def _call(hooks: tuple[Hook, ...], stats: Stats) -> None:
    for hook in hooks:
        hook(stats)


class Writer(Protocol):
    """The part of ``torch.utils.tensorboard.SummaryWriter`` (or ``tensorboardX``) that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class TensorBoard:
    """Scalars under ``penstock/``, by the number of batches delivered in all epochs."""

    def __init__(self, writer: Writer, prefix: str = "penstock/") -> None:
        self._writer, self._prefix = writer, prefix
        self._epoch, self._before, self._latest = -1, 0, 0

    def __call__(self, stats: Stats) -> None:
        if stats.epoch != self._epoch:
            self._epoch, self._before, self._latest = stats.epoch, self._before + self._latest, 0
        self._latest = stats.batches
        for name, value in numbers(stats).items():
            self._writer.add_scalar(self._prefix + name, value, self._before + self._latest)


class Prometheus:
    """A collector: ``registry.register(Prometheus(loader))``. ``name`` distinguishes several loaders of one process."""

    def __init__(self, loader: Loader | MultiLoader, name: str = "train") -> None:
        self._loader, self._name = loader, name

    def collect(self) -> Iterator[Any]:
        """The current metrics; called by the registry."""
        try:
            from prometheus_client.core import GaugeMetricFamily
        except ImportError:
            raise ConfigError("watching with Prometheus needs its client: pip install prometheus-client") from None
        stats = self._loader.stats()
        for name, meaning, value in _NUMBERS:
            family = GaugeMetricFamily(f"penstock_{name}", meaning, labels=["loader"])
            family.add_metric([self._name], float(value(stats)))
            yield family
