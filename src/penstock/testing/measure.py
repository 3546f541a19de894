"""Run a loader and measure it: rate, waits, and the memory that the whole process tree held meanwhile."""

import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from penstock.base.dataclass import dataclass
from penstock.base.machine import children, held_bytes, machine_shared_bytes, mapped_shared_bytes, proportional_bytes
from penstock.base.scratch import trim
from penstock.loader.loader import Loader
from penstock.loader.multi import MultiLoader
from penstock.loader.stats import Stats

SAMPLE_EVERY_S = 0.005


def tree_bytes() -> int:
    """What this process and all its descendants hold that the kernel cannot drop; shared pages count once."""
    me = os.getpid()
    workers = children(me)
    return sum(proportional_bytes(pid) for pid in (me, *workers)) if workers else held_bytes(me)


def release_freed_memory() -> None:
    """Return freed memory to the system, so that one loader's leftovers do not help the next."""
    gc.collect()
    trim()


def in_transit_bytes(shared_before: int) -> int:
    """Shared memory in transit: what workers have sent and the parent has not yet received."""
    grown = machine_shared_bytes() - shared_before
    if grown <= 0:  # as a rule: looking at what each process maps takes long
        return 0
    me = os.getpid()
    workers = children(me)
    if not workers:  # then it is somebody else's
        return 0
    return max(0, grown - sum(mapped_shared_bytes(pid) for pid in (me, *workers)))


class MemoryWatch:
    """Samples the memory of the process tree every 5 ms inside a ``with``; ``peak_bytes`` is above the start.

    Batches that workers have sent count too, by how much the machine's shared memory has grown. With ``timeline``, each
    sample is kept as (seconds since the start, bytes above the start).
    """

    def __init__(self, every_s: float = SAMPLE_EVERY_S, *, timeline: bool = False) -> None:
        self.every_s = every_s
        self.timeline: list[tuple[float, int]] | None = [] if timeline else None
        self._began = 0.0
        self.start_bytes = 0
        self._shared_before = 0
        self.peak_bytes = 0
        self.samples = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-memory-watch", daemon=True)

    def start(self) -> "MemoryWatch":
        """Start sampling; memory is counted from here."""
        self._shared_before = machine_shared_bytes()
        self.start_bytes = tree_bytes()
        self._began = time.perf_counter()
        self._thread.start()
        return self

    def stop(self) -> None:
        """Take the last sample."""
        self._over.set()
        self._thread.join()
        self._look()

    def __enter__(self) -> "MemoryWatch":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def held_bytes(self) -> int:
        """Bytes held now, above the start."""
        return tree_bytes() + in_transit_bytes(self._shared_before) - self.start_bytes

    def _run(self) -> None:
        while not self._over.wait(self.every_s):
            self._look()

    def _look(self) -> None:
        self.samples += 1
        held = self.held_bytes
        self.peak_bytes = max(self.peak_bytes, held)
        if self.timeline is not None:
            self.timeline.append((time.perf_counter() - self._began, max(0, held)))


@dataclass(frozen=True)
class Measurement:
    """What running a loader for some epochs took."""

    samples: int
    seconds: float
    peak_bytes: int
    stats: Stats
    """Of the last epoch."""

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds


def measure(
    make_loader: Callable[[], Loader | MultiLoader], *, epochs: int = 1, step: Callable[[Any], Any] | None = None
) -> Measurement:
    """Make a loader and run it, with ``step`` on each batch, counting memory from before it was made."""
    samples, seconds = 0, 0.0
    with MemoryWatch() as watch:
        loader = make_loader()
        with loader:
            for _ in range(epochs):
                began = time.perf_counter()
                for batch in loader:
                    if step is not None:
                        step(batch)
                seconds += time.perf_counter() - began
                samples += loader.stats().samples
            del batch
            stats = loader.stats()
    return Measurement(samples, seconds, watch.peak_bytes, stats)
