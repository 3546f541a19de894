"""Samples collated as they come make the batch that they make together, in half the memory."""

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock import webdataset as wds
from penstock.errors import SchemaMismatch
from penstock.webdataset.collate import Stacking, default_collation_fn

VALUES = {
    "array": lambda n: np.full((2, 3), n, np.int16),
    "another dtype": lambda n: np.full((2, 3), n, np.float64),
    "fortran": lambda n: np.asfortranarray(np.full((2, 3), n, np.int16)),
    "another shape": lambda n: np.full((3, 2), n, np.int16),
    "no axis": lambda n: np.array(n),
    "text": lambda n: np.array([str(n)]),
    "objects": lambda n: np.array([str(n), None], object),
    "tensor": lambda n: torch.full((2, 3), n),
    "turned tensor": lambda n: torch.full((3, 2), n).T,
    "half tensor": lambda n: torch.full((2, 3), n, dtype=torch.float16),
    "with gradient": lambda n: torch.full((2, 3), float(n), requires_grad=True),
    "int": lambda n: n,
    "float": lambda n: n / 2,
    "str": str,
    "numpy scalar": np.float32,
    "nothing": lambda n: None,
}


def outcome(collate):
    try:
        return collate()
    except SchemaMismatch as error:
        return str(error)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        return type(error)


def same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other) and one.stride() == other.stride()
    return one == other


@given(
    st.lists(st.lists(st.sampled_from(list(VALUES)), min_size=2, max_size=2), min_size=1, max_size=6),
    st.booleans(),
    st.integers(0, 3),
)
def test_the_same_batch(kinds, named, spare):
    rows = [tuple(VALUES[kind](number) for kind in row) for number, row in enumerate(kinds)]
    samples = [{"a": a, "__key__": b} for a, b in rows] if named else rows

    def as_they_come():
        stacking = Stacking(len(samples) + spare)
        for sample in samples:
            stacking.append(sample)
        assert len(stacking) == len(samples)
        return stacking.batch()

    assert same(outcome(as_they_come), outcome(lambda: default_collation_fn(samples)))


@pytest.mark.parametrize("make", [np.ones, torch.ones], ids=["arrays", "tensors"])
def test_a_batch_that_is_not_full_keeps_no_room(make):
    whole, part = wds.DataPipeline(lambda: [(make(100),)] * 12).batched(8)
    assert len(whole[0]) == 8
    held = part[0].untyped_storage().nbytes() if make is torch.ones else part[0].base is None and part[0].nbytes
    assert held == part[0].nbytes == 4 * part[0][0].nbytes


@pytest.mark.parametrize("most", [2**24, 2**40, 2**60])
@pytest.mark.parametrize("workers", [0, 1])
def test_more_than_memory_could_hold_may_be_allowed(most, workers):
    pipeline = wds.DataPipeline(lambda: [(np.ones(1000), torch.ones(1000))] * 3).batched(most)
    (batch,) = torch.utils.data.DataLoader(pipeline, batch_size=None, num_workers=workers)
    assert [tuple(column.shape) for column in batch] == [(3, 1000)] * 2


@pytest.mark.parametrize("make", [np.full, torch.full], ids=["arrays", "tensors"])
def test_samples_are_not_held_beside_their_batch(make):
    rows, made, held = 40, [], []

    def samples():
        for number in range(2 * rows):
            values = make((50_000,), number)
            made.append(weakref.ref(values))
            held.append(sum(each() is not None for each in made))
            yield (values,)

    for (batch,) in wds.DataPipeline(samples).batched(rows):
        assert len(batch) == rows
    assert max(held) <= 2


def test_small_batches_of_a_worker():
    rows = [(torch.full((3, 5), number, dtype=torch.float16), torch.zeros(0)) for number in range(8)]
    loader = torch.utils.data.DataLoader(wds.DataPipeline(lambda: rows).batched(4), batch_size=None, num_workers=1)
    for number, (batch, empty) in enumerate(loader):
        assert torch.equal(batch, torch.stack([values for values, _ in rows[4 * number : 4 * number + 4]]))
        assert empty.shape == (4, 0)
