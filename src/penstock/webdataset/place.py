"""Where this process stands: which rank of those that train together, which worker of torch's own loader."""

import os
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """One process among ranks, and among the workers of its rank."""

    rank: int = 0
    ranks: int = 1
    worker: int = 0
    workers: int = 1
    in_worker: bool = False
    """Whether this is a worker process, even a single one."""

    def part_of(self, total: int) -> int:
        """This worker's part of a number of things that its rank's workers do together."""
        return total // self.workers + (self.worker < total % self.workers)


def here(group: Any = None) -> Place:
    """The place of this process, now.

    Launchers tell ranks in the environment, also to worker processes that are started anew and know nothing of torch's
    process group; where they do not, the group is asked, and last what a dataset was told when it was sent here.
    """
    rank, ranks = _ranks(group)
    found = _workers()
    worker, workers = found or (0, 1)
    return Place(rank, ranks, worker, workers, in_worker=found is not None)


def _ranks(group: Any) -> tuple[int, int]:
    if group is None and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if sys.modules.get("torch") is not None:
        from penstock.pytorch import rank_and_world

        rank, ranks = rank_and_world(group)
        if ranks > 1:
            return rank, ranks
    return _told or (0, 1)


def _workers() -> tuple[int, int] | None:
    if sys.modules.get("torch") is None:
        return None
    from penstock.pytorch import worker_and_workers

    return worker_and_workers()


_told: tuple[int, int] | None = None


def tell(rank: int, ranks: int) -> None:
    """Say which rank this process belongs to, where nothing else does: a worker started by a rank."""
    global _told
    _told = (rank, ranks)
