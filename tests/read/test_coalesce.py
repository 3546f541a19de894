"""Merging wanted rows into few reads."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.read.coalesce import limit_runs, merge_neighbours

patient = settings(deadline=None)  # a busy machine is no failure

# (sources, targets) -> (source, target, rows) of each read
BY_HAND = [
    ([], [], []),
    ([5], [0], [(5, 0, 1)]),
    ([0], [0], [(0, 0, 1)]),
    ([5, 6, 7], [0, 1, 2], [(5, 0, 3)]),
    ([5, 6, 7], [0, 2, 3], [(5, 0, 1), (6, 2, 2)]),
    ([5, 7, 8], [0, 1, 2], [(5, 0, 1), (7, 1, 2)]),
    ([7, 6, 5], [0, 1, 2], [(7, 0, 1), (6, 1, 1), (5, 2, 1)]),
    ([7, 6, 5], [2, 1, 0], [(7, 2, 1), (6, 1, 1), (5, 0, 1)]),
    ([5, 5, 6], [0, 1, 2], [(5, 0, 1), (5, 1, 2)]),
    ([5, 6, 5, 6], [0, 1, 2, 3], [(5, 0, 2), (5, 2, 2)]),
    ([0, 1], [1, 0], [(0, 1, 1), (1, 0, 1)]),
]


@pytest.mark.parametrize(("sources", "targets", "reads"), BY_HAND)
def test_by_hand(sources, targets, reads):
    assert merge_neighbours(np.array(sources, np.int64), np.array(targets, np.int64)) == reads


LIMITED = [
    ([5, 6, 7, 8, 9], 5, [(5, 0, 5)]),
    ([5, 6, 7, 8, 9], 2, [(5, 0, 2), (7, 2, 2), (9, 4, 1)]),
    ([5, 6, 7, 1, 3, 4], 2, [(5, 0, 2), (7, 2, 1), (1, 3, 1), (3, 4, 2)]),
    ([5, 6, 7], 1, [(5, 0, 1), (6, 1, 1), (7, 2, 1)]),
    ([], 3, []),
]


@pytest.mark.parametrize(("sources", "most", "reads"), LIMITED)
def test_limited_by_hand(sources, most, reads):
    assert limit_runs(merge_neighbours(np.array(sources, np.int64), np.arange(len(sources))), most) == reads


# Rows with runs in them: a few starting points, each followed for a while, in source and target alike or not.
STRETCHES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(1, 12)), max_size=12)


def columns(stretches):
    sources = [begin + k for begin, _, length in stretches for k in range(length)]
    targets = [begin + k for _, begin, length in stretches for k in range(length)]
    return np.array(sources, np.int64), np.array(targets, np.int64)


def executed(runs):
    """What a reader does with the runs: from the first row of each, on and on."""
    return [(run.source + k, run.target + k) for run in runs for k in range(run.rows)]


@patient
@given(STRETCHES)
def test_reading_the_runs_reads_what_was_wanted(stretches):
    sources, targets = columns(stretches)
    runs = merge_neighbours(sources, targets)
    assert executed(runs) == list(zip(sources.tolist(), targets.tolist(), strict=True))
    assert all(run.rows >= 1 for run in runs)


@patient
@given(STRETCHES)
def test_no_two_runs_could_be_one(stretches):
    for run, later in pairwise(merge_neighbours(*columns(stretches))):
        assert (later.source, later.target) != (run.source + run.rows, run.target + run.rows)


@patient
@given(STRETCHES, st.integers(1, 15))
def test_limited_runs_read_the_same_and_never_too_much(stretches, most):
    runs = merge_neighbours(*columns(stretches))
    fewer = limit_runs(runs, most)
    assert executed(fewer) == executed(runs)
    assert all(1 <= run.rows <= most for run in fewer)
    assert len(fewer) == sum(-(-run.rows // most) for run in runs), "no more reads than needed"
