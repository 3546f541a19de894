"""Laws of reading chunks, for files of any format whose own library gives the rows that are expected."""

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import note
from hypothesis import strategies as st

import penstock as ps
from penstock.base import scratch

NAME = "group/betas"
SMALL = st.sampled_from([1, 40, 300])


@dataclass(frozen=True)
class Written:
    """A file, and the rows that the library of its format finds in it."""

    path: Path
    row_axis: int
    rows: np.ndarray

    def open(self) -> ps.Dataset:
        return ps.open(self.path, fields=(NAME,), row_axis=self.row_axis, allow_fill=True)


@contextmanager
def reading_by(chosen):
    note(", ".join(f"{name} = {value}" for (_, name), value in chosen.items()))
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), value in chosen.items():
            patch.setattr(module, name, value)
        yield


def wanted_rows(draw, count):
    rows = draw(st.lists(st.integers(0, count - 1), max_size=12) | st.just(list(range(count))))
    return np.array(rows, np.int64)


@contextmanager
def declared_scratch(store, rows):
    """A read of so many rows may borrow what the store declares for it, and no more."""
    scratch.prepare(store.scratch_bytes(rows))
    try:
        yield
        overflow = scratch.overflow_bytes()
    finally:
        scratch.release()
    assert overflow == 0, f"scratch_bytes({rows}) declares {store.scratch_bytes(rows):,}, {overflow:,} too few"


def assert_same(got, expected):
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    if got.tobytes() != np.ascontiguousarray(expected).tobytes():
        np.testing.assert_array_equal(got, expected)


def check_reads_within_scratch(draw, ds, expected):
    """Rows go to any places, others stay as they were, and no more is borrowed than was declared."""
    rows = wanted_rows(draw, len(ds))
    at = np.array(draw(st.permutations(range(len(rows) + 2))), np.int64)[: len(rows)]
    out = np.ones((len(rows) + 2, *expected.shape[1:]), expected.dtype)
    wanted = out.copy()
    wanted[at] = expected[rows]
    with declared_scratch(ds.delivered, len(rows)):
        ds.delivered.read_into(rows, at, {NAME: out})
    assert_same(out, wanted)


def check_shares(draw, ds, expected, shares):
    """The shares of a read, in any order, are together the whole read."""
    rows = wanted_rows(draw, len(ds))
    out = np.ones((len(rows), *expected.shape[1:]), expected.dtype)
    for number in draw(st.permutations(range(shares))):
        with declared_scratch(ds.delivered, len(rows)):
            ds.delivered.read(rows, np.arange(len(rows)), {NAME: out}, (number, shares))
    assert_same(out, expected[rows])
