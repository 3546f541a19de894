"""Which dataset's batch comes next, where batches of several datasets alternate. Pure.

Each batch of a dataset has a time between 0 and 1: its place in the dataset's own epoch, moved at random within its own
length. Batches come in the order of these times, so every dataset is spread evenly over the epoch, in no fixed rhythm.
A time follows from (seed, epoch, dataset, position) alone: the positions of all datasets determine what comes next, on
every rank and after resuming, in constant time.
"""

from functools import lru_cache

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.loader.permutation import generator

# Times drawn at a time.
PIECE = 1024


@dataclass(frozen=True)
class Interleaved:
    """The times of one dataset's batches."""

    name: str
    length: int
    """Positions in the dataset's epoch."""
    step_samples: int
    """Samples per step on all ranks together."""
    seed: int | None
    """None: each batch comes in the middle of its length."""

    def time(self, epoch: int, position: int) -> float:
        """When the batch that begins at this position comes."""
        moved = 0.5
        if self.seed is not None:
            piece, place = divmod(position // self.step_samples, PIECE)
            moved = float(_draws(self.seed, epoch, self.name, piece)[place])
        return (position + moved * min(self.step_samples, self.length - position)) / self.length


@lru_cache(maxsize=64)
def _draws(seed: int, epoch: int, name: str, piece: int) -> np.ndarray:
    return generator(seed, epoch, "interleave", name, piece).random(PIECE)
