"""Wanted rows -> few reads. Pure: the result is the plan that a caller executes.

Two neighbours become one read when the file *and* the memory they go to run on without a gap, so that the merged read
needs no copy afterwards. Reads of large rows are few, so this is a plain loop: numpy's fixed cost for a handful of
numbers is ten times as much, and it is paid under the interpreter's lock, where all threads wait for it.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Run(NamedTuple):
    """``rows`` rows from ``source`` on, to the places from ``target`` on."""

    source: int
    target: int
    rows: int


def neighbours(sources: np.ndarray, targets: np.ndarray) -> list[Run]:
    """Merge items whose source and target numbers both go up by one."""
    runs: list[Run] = []
    source, target, count = 0, 0, 0
    for next_source, next_target in zip(sources.tolist(), targets.tolist(), strict=True):
        if count and next_source == source + count and next_target == target + count:
            count += 1
            continue
        if count:
            runs.append(Run(source, target, count))
        source, target, count = next_source, next_target, 1
    if count:
        runs.append(Run(source, target, count))
    return runs


def limited(runs: Iterable[Run], most: int) -> list[Run]:
    """The same, with no read of more than ``most`` rows."""
    return [
        Run(run.source + done, run.target + done, min(most, run.rows - done))
        for run in runs
        for done in range(0, run.rows, most)
    ]
