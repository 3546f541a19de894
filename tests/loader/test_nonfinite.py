"""What is NaN or infinite is counted as numpy would count it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loader import nonfinite
from penstock.loader.nonfinite import not_finite

BAD = [np.nan, np.inf, -np.inf]


@given(
    shape=st.sampled_from([(0, 3), (1, 1), (5, 3), (3, 40), (40, 3), (2, 5, 7), (7,), (4, 0)]),
    dtype=st.sampled_from(["f2", "f4", "f8", "c8"]),
    bad=st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(BAD)), max_size=9),
    block=st.sampled_from([1, 7, 16, 10**6]),
)
def test_as_numpy_counts(shape, dtype, bad, block):
    values = np.linspace(-9, 9, int(np.prod(shape))).reshape(shape).astype(dtype)
    for place, what in bad:
        if values.size:
            values.reshape(-1)[place % values.size] = what
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nonfinite, "BLOCK", block)
        found = not_finite(values)
    rows = (~np.isfinite(values)).reshape(len(values), -1).sum(axis=1) if values.size else np.zeros(len(values))
    assert found == {row: count for row, count in enumerate(rows.tolist()) if count}


def test_large_numbers_are_numbers():
    assert not_finite(np.array([[np.finfo("f4").max, np.finfo("f4").tiny, -0.0]], "f4")) == {}
