"""One pass over a pipeline: its number, its place, its random numbers, and what it left out.

Torch's loader copies a dataset into worker processes, anew for each epoch unless they are kept; a copy cannot know how
many went before it. So the counts lie in memory that forked copies share, one slot for each worker and written by that
worker alone. Workers that are started anew instead get their number with the dataset when it is sent to them.
"""

import mmap
import random
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.errors import ConfigError, PenstockError
from penstock.webdataset.handlers import Handler
from penstock.webdataset.place import Place, here

SLOTS = 256
"""One for the process that made the dataset, and one for each worker."""


class Counts:
    """Passes begun and things left out, by worker, seen by all forked copies of this process."""

    def __init__(self, sent_before: int = 0) -> None:
        self._memory = memoryview(mmap.mmap(-1, 2 * SLOTS * 8)).cast("q")
        self._sent_before = sent_before
        self.sent = 0
        """How often the dataset was sent to workers that were started anew."""

    def begin(self, place: Place) -> int:
        """The number of the pass that begins here, from 0."""
        slot = _slot(place)
        self._memory[slot] += 1
        # Each epoch is sent to all workers, in the order of their numbers.
        return self._sent_before // place.workers + self._memory[slot] - 1

    def leave_out(self, place: Place) -> None:
        """One thing more was left out."""
        self._memory[SLOTS + _slot(place)] += 1

    @property
    def left_out(self) -> int:
        """How much was left out, by all."""
        return sum(self._memory[SLOTS:])


def _slot(place: Place) -> int:
    return 1 + place.worker % (SLOTS - 1) if place.in_worker else 0


@dataclass(frozen=True)
class Run:
    """One pass over a pipeline, as its stages see it."""

    seed: int = 0
    epoch: int = 0
    place: Place = field(default_factory=here)
    stage: int = 0
    counts: Counts | None = None

    def at(self, stage: int) -> "Run":
        """The same pass, for another stage."""
        return replace(self, stage=stage)

    def seeded(self, seed: int) -> "Run":
        """The same pass, with another seed."""
        return replace(self, seed=seed)

    def rng(self) -> random.Random:
        """Random numbers of this stage, in this pass, in this process: the same whenever these are."""
        place = self.place
        # A text is hashed, so that neighbours have nothing in common: seeds are never added.
        return random.Random(f"{self.seed}/{self.epoch}/{place.rank}/{place.worker}/{self.stage}")  # noqa: S311

    def excuse(self, handler: Handler, error: Exception) -> bool:
        """Ask the handler about an error, and count what it lets pass; True to go on.

        A mistake in the program is nobody's to excuse: it would be made again with every sample.
        """
        if isinstance(error, ConfigError):
            raise error
        go_on = handler(error)
        if self.counts is not None:
            self.counts.leave_out(self.place)
        return bool(go_on)


def explained(error: Exception, stage: str, sample: Any) -> Exception:
    """An error of the caller's own function, with the sample it was about; its type is left as it is."""
    if not isinstance(error, PenstockError) and isinstance(sample, dict) and "__key__" in sample:
        error.add_note(f"in {stage}, at sample {sample['__key__']!r} of {sample.get('__url__', 'an unnamed source')}")
    return error
