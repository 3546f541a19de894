"""One pass over a pipeline: its number, its process among all, its random numbers, and what it left out.

Torch's loader copies a dataset into worker processes, anew for each epoch unless they are kept; a copy cannot know how
many went before it. So the counts lie in memory that forked copies share, one slot per worker and written by that
worker alone. Workers that are started anew instead get their number with the dataset when it is sent to them.
"""

import mmap
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field, replace
from typing import Any

from penstock.base.dataclass import dataclass
from penstock.errors import ConfigError, PenstockError
from penstock.loader.ranks import group_place, launched
from penstock.webdataset.handlers import Handler

SLOTS = 256
"""One for the process that made the dataset, and one per worker."""


@dataclass(frozen=True)
class Place:
    """One process among the ranks that train together, and among the workers of torch's loader on its rank."""

    rank: int = 0
    ranks: int = 1
    worker: int = 0
    workers: int = 1
    in_worker: bool = False
    """Whether this is a worker process, even a single one."""

    def part_of(self, total: int) -> int:
        """This worker's part of a number of samples that its rank's workers deliver together."""
        return total // self.workers + (self.worker < total % self.workers)


def here(group: Any = None) -> Place:
    """The place of this process, now.

    Launchers set the rank in the environment, also for worker processes that are started anew and know nothing of
    torch's process group. Where they do not, the group is asked, and last what came with the dataset.
    """
    rank, ranks = _ranks(group)
    found = _workers()
    worker, workers = found or (0, 1)
    return Place(rank, ranks, worker, workers, in_worker=found is not None)


def _ranks(group: Any) -> tuple[int, int]:
    rank, ranks = launched() if group is None else (None, 1)
    if rank is not None:
        return rank, ranks
    found = group_place(group)
    if found is not None and found[1] > 1:
        return found
    if found is None and _sent is None and ranks > 1:
        raise ConfigError(
            f"the environment has WORLD_SIZE={ranks} and no RANK, and torch.distributed is not started: which shards "
            f"are this process's cannot be known. Set RANK, or call torch.distributed.init_process_group() first"
        )
    return _sent or (0, 1)


def _workers() -> tuple[int, int] | None:
    if sys.modules.get("torch") is None:
        return None
    from penstock.loader.pytorch import worker_and_workers

    return worker_and_workers()


_sent: tuple[int, int] | None = None


def set_rank(rank: int, ranks: int) -> None:
    """Set the rank of this process where nothing else does: in a worker that a rank started anew."""
    global _sent
    _sent = (rank, ranks)


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
        """Count one thing that was left out."""
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

    def rng(self, seed: int | None = None) -> random.Random:
        """Random numbers of this stage in this pass.

        They differ by rank and worker, except with an explicit seed. That one is for an order on which all processes
        agree: each shuffles the whole list of shards, and then takes its part. In the first epoch it gives the numbers
        that programs for tar shards get from it.
        """
        if seed is not None and self.epoch == 0:
            return random.Random(seed)  # noqa: S311
        place = self.place if seed is None else Place()
        # A text is hashed, so that neighbours have nothing in common: seeds are never added.
        return random.Random(  # noqa: S311
            f"{self.seed if seed is None else seed}/{self.epoch}/{place.rank}/{place.worker}/{self.stage}"
        )

    def excuse(self, handler: Handler, error: Exception) -> bool:
        """Ask the handler about an error, and count what it lets pass; True to go on.

        A mistake in the program is always raised: it would be made again with every sample.
        """
        if isinstance(error, ConfigError):
            raise error
        go_on = handler(error)
        if self.counts is not None:
            self.counts.leave_out(self.place)
        return bool(go_on)

    def each(
        self, samples: Iterable[Any], function: Callable[[Any], Any], handler: Handler, verb: str
    ) -> Iterator[Any]:
        """``function`` of each sample; where it raises, the handler decides."""
        for sample in samples:
            try:
                result = function(sample)
            except Exception as error:
                if self.excuse(handler, _with_note(error, verb, sample)):
                    continue
                return
            yield result
            del sample, result  # they may be batches, and the next ones take as much


def _with_note(error: Exception, verb: str, sample: Any) -> Exception:
    """An error of the caller's own function, with the sample it was about; its type stays as it is."""
    if not isinstance(error, PenstockError) and isinstance(sample, dict) and "__key__" in sample:
        error.add_note(f"in {verb}, at sample {sample['__key__']!r} of {sample.get('__url__', 'an unnamed source')}")
    return error
