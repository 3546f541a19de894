"""How many threads read: settled within the first batches, by measurement. Decides; starts nothing.

Threads that compute need a core each, and more of them gain nothing. Threads that wait for a disk or a file server
leave cores idle, and then more of them read more. The time that they spend on a core shows which it is.

1. Reading starts with one thread per core. Only if the training step waits for data, and the threads wait for files,
   are twice as many tried, up to the number that the plan has reserved memory for.
2. More threads stay if the rate rises enough; otherwise the previous number returns for good.
3. The order of samples does not depend on it: reads are handed out in one order, whichever thread does them.
"""

import time
from collections.abc import Sequence

from penstock.base.dataclass import dataclass

# The least time and number of batches to decide by. The first batch after a change was read before it.
PERIOD_S = 0.2
PERIOD_BATCHES = 3

# If the training step waits less than this, there is nothing to gain.
LITTLE_WAIT = 0.05
# Threads that are off their cores for less than this share of a read compute rather than wait.
LITTLE_IDLE = 0.4
# How much twice the threads must raise the rate to be kept: less may be noise.
WORTH = 1.15


@dataclass(frozen=True)
class Period:
    """Measurements with one number of threads."""

    threads: int
    seconds: float = 0.0
    samples: int = 0
    waited: float = 0.0
    """Seconds in which the training step stood still for data."""
    reading: float = 0.0
    """Seconds of reads, over all threads."""
    computing: float = 0.0
    """Of these, on a core."""

    @property
    def rate(self) -> float:
        return self.samples / max(1e-9, self.seconds)

    @property
    def wants_more(self) -> bool:
        """Whether the training step waits for threads that wait for files."""
        waiting = self.waited > LITTLE_WAIT * self.seconds
        return waiting and self.reading - self.computing > LITTLE_IDLE * self.reading


def next_threads(periods: Sequence[Period], most: int) -> int | None:
    """How many threads to continue with; None if those of the last period are the right number."""
    last = periods[-1]
    if len(periods) > 1 and last.rate < WORTH * periods[-2].rate:
        return periods[-2].threads
    return min(2 * last.threads, most) if last.wants_more and last.threads < most else None


@dataclass(frozen=True)
class TuningCounts:
    """Running totals, as ``Period`` has them."""

    samples: int
    waited: float
    reading: float
    computing: float

    def since(self, before: "TuningCounts", threads: int, seconds: float) -> Period:
        """The period between two looks."""
        return Period(
            threads, seconds, samples=self.samples - before.samples, waited=self.waited - before.waited,
            reading=self.reading - before.reading, computing=self.computing - before.computing,
        )  # fmt: skip


class Tuner:
    """Decides whenever there are enough measurements."""

    def __init__(self, threads: int, most: int) -> None:
        self.threads, self._most = threads, most
        self.settled = threads >= most
        self._periods: list[Period] = []
        self._began: tuple[float, TuningCounts] | None = None
        self._batches = 0

    def begin(self) -> None:
        """Start counting again, with an epoch."""
        self._began = None

    def is_due(self, now: float) -> bool:
        """After a batch: whether a look at the counts would matter."""
        if self.settled:
            return False
        if self._began is None:
            return True
        self._batches += 1
        return now - self._began[0] >= PERIOD_S and self._batches >= PERIOD_BATCHES

    def look(self, counts: TuningCounts) -> bool:
        """When it is due: whether ``threads`` has changed."""
        now = time.perf_counter()
        if self._began is None:
            self._began, self._batches = (now, counts), 0
            return False
        seconds, since = now - self._began[0], self._began[1]
        self._periods.append(counts.since(since, self.threads, seconds))
        self._began = None
        return self._decide()

    def _decide(self) -> bool:
        wanted = next_threads(self._periods, self._most)
        before, self.threads = self.threads, wanted or self.threads
        self.settled = wanted is None or wanted <= before
        return self.threads != before
