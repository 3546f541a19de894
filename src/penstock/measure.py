"""Run a loader and say what it did: rate, waits, and the memory the whole process tree held meanwhile."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.loader import Loader
from penstock.machine import children, held_bytes, mapped_bytes, share_bytes, shared_bytes
from penstock.multi import MultiLoader
from penstock.stats import Stats

SAMPLE_EVERY_S = 0.005


def tree_bytes() -> int:
    """What this process and all its descendants hold that the kernel cannot drop; shared pages count once."""
    me = os.getpid()
    workers = children(me)
    return sum(share_bytes(pid) for pid in (me, *workers)) if workers else held_bytes(me)


def on_their_way(shared_before: int) -> int:
    """Shared memory that is in nobody's hands: what workers have sent and the parent has not yet received."""
    grown = shared_bytes() - shared_before
    if grown <= 0:  # as a rule: looking at what each process maps takes long
        return 0
    me = os.getpid()
    workers = children(me)
    if not workers:  # then it is somebody else's
        return 0
    return max(0, grown - sum(mapped_bytes(pid) for pid in (me, *workers)))


class MemoryWatch:
    """Samples the memory of the process tree every 5 ms inside a ``with``; ``peak_bytes`` is above the start.

    Batches that workers have sent count too, by what the machine's shared memory has grown.
    """

    def __init__(self, every_s: float = SAMPLE_EVERY_S) -> None:
        self.every_s = every_s
        self.start_bytes = 0
        self._shared_before = 0
        self.peak_bytes = 0
        self.samples = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-memory-watch", daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._shared_before = shared_bytes()
        self.start_bytes = tree_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    @property
    def held_bytes(self) -> int:
        """Held right now above the start."""
        return tree_bytes() + on_their_way(self._shared_before) - self.start_bytes

    def _run(self) -> None:
        while not self._over.wait(self.every_s):
            self._look()

    def _look(self) -> None:
        self.samples += 1
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


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
