"""Wanted byte ranges -> few reads. Pure: the result is the plan that a caller executes.

Two neighbours become one read when the file *and* the memory they go to run on without a gap, so that the merged read
needs no copy afterwards.
"""

from typing import NamedTuple

import numpy as np


class Runs(NamedTuple):
    """Merged reads, as columns: items ``firsts[i]`` up to ``firsts[i] + counts[i]`` of the input become one read."""

    firsts: np.ndarray
    counts: np.ndarray


def neighbours(source: np.ndarray, target: np.ndarray) -> Runs:
    """Merge items whose source and target numbers both go up by one."""
    if len(source) == 0:
        return Runs(np.empty(0, np.int64), np.empty(0, np.int64))
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    first = np.concatenate([[0], breaks])
    return Runs(first, np.diff(first, append=len(source)))


def limited(runs: Runs, most: int) -> Runs:
    """The same, with no read of more than ``most`` items."""
    pieces = -(-runs.counts // most)
    if len(pieces) == 0 or pieces.max() == 1:
        return runs
    index = np.repeat(np.arange(len(pieces)), pieces)
    within = np.arange(len(index)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = runs.firsts[index] + within * most
    return Runs(first, np.minimum(runs.counts[index] - within * most, most))
