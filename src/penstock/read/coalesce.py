"""Wanted rows -> few reads. Pure: the result is the plan that a caller executes.

Two neighbours become one read when the file *and* the memory they go to run on without a gap, so that the merged read
needs no copy afterwards. Reads of large rows are few, so this is a plain loop: numpy's fixed cost for a handful of
numbers is ten times as much, and it is paid under the interpreter's lock, where all threads wait for it.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np


class RowRun(NamedTuple):
    """``rows`` rows from ``source`` on, to the places from ``target`` on."""

    source: int
    target: int
    rows: int


def merge_neighbours(sources: np.ndarray, targets: np.ndarray) -> list[RowRun]:
    """Merge items whose source and target numbers both go up by one."""
    runs: list[RowRun] = []
    source, target, count = 0, 0, 0
    for next_source, next_target in zip(sources.tolist(), targets.tolist(), strict=True):
        if count and next_source == source + count and next_target == target + count:
            count += 1
            continue
        if count:
            runs.append(RowRun(source, target, count))
        source, target, count = next_source, next_target, 1
    if count:
        runs.append(RowRun(source, target, count))
    return runs


def are_consecutive(numbers: np.ndarray) -> bool:
    """Whether they follow each other, so that a slice can stand for them."""
    if len(numbers) == 1:
        return True
    return bool(numbers[-1] - numbers[0] == len(numbers) - 1 and (numbers[1:] - numbers[:-1] == 1).all())


def limit_runs(runs: Iterable[RowRun], most: int) -> list[RowRun]:
    """Runs cut so that none has more than ``most`` rows."""
    return [
        RowRun(run.source + done, run.target + done, min(most, run.rows - done))
        for run in runs
        for done in range(0, run.rows, most)
    ]


class ReadSpan(NamedTuple):
    """One read that serves several wanted ranges."""

    which: np.ndarray
    """Numbers of the ranges, in the order of the file."""
    begin: int
    end: int


def plan_spans(
    offsets: np.ndarray, lengths: np.ndarray, wanted: np.ndarray, gap_bytes: int, most_bytes: int
) -> Iterator[ReadSpan]:
    """Ranges ``wanted`` of those given -> reads in the order of the file.

    Ranges are read together where no more than ``gap_bytes`` lie between them, up to ``most_bytes`` a read; a longer
    range is a read of its own.
    """
    order = wanted[np.argsort(offsets[wanted], kind="stable")]
    begins = offsets[order]
    ends = np.maximum.accumulate(begins + lengths[order]) if len(order) else begins
    apart = np.flatnonzero(begins[1:] - ends[:-1] > gap_bytes) + 1
    for first, after in zip([0, *apart.tolist()], [*apart.tolist(), len(order)], strict=True):
        while first < after:
            begin = int(begins[first])
            fit = first + int(np.searchsorted(ends[first:after], begin + most_bytes, side="right"))
            last = max(first + 1, fit)
            yield ReadSpan(order[first:last], begin, int(ends[last - 1]))
            first = last
