"""Random numbers for single samples: they follow from the seed, the epoch and the row alone.

So a sample is augmented in the same way whichever thread, process or rank reads it, and after a resume, but differently
in every epoch. A loader sets the epoch for its threads; otherwise it is epoch 0 of seed 0.
"""

import threading

import numpy as np

_PURPOSE = 0x5A3D1E
"""Keeps these numbers apart from those that decide the order."""


class _Mine(threading.local):
    seed = 0
    epoch = 0


_mine = _Mine()


def read_for(seed: int, epoch: int) -> None:
    """From now on, this thread reads for this epoch."""
    _mine.seed, _mine.epoch = seed, epoch


def generator(row: int) -> "np.random.Generator":
    """The random numbers of one row in the current epoch."""
    return np.random.default_rng([_mine.seed, _mine.epoch, row, _PURPOSE])
