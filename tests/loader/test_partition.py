"""Dealing: small cases worked out by hand; the laws are in tests/property/test_order_laws.py."""

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.loader.partition import Partition

# (length, batch_size, world_size, options) -> the positions of each batch, rank by rank.
BY_HAND = [
    ((6, 2, 1, {}), [[[0, 1], [2, 3], [4, 5]]]),
    ((7, 3, 1, {}), [[[0, 1, 2], [3, 4, 5], [6]]]),
    ((7, 3, 1, {"drop_last": True}), [[[0, 1, 2], [3, 4, 5]]]),
    ((2, 3, 1, {}), [[[0, 1]]]),
    ((2, 3, 1, {"drop_last": True}), [[]]),
    ((0, 3, 1, {}), [[]]),
    ((0, 3, 2, {}), [[], []]),
    ((8, 2, 2, {}), [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
    # three remain for two ranks: two and one
    ((11, 2, 2, {}), [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]),
    # two remain for two ranks: one each
    ((10, 2, 2, {}), [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]),
    # one remains for two ranks
    ((9, 2, 2, {}), [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [8]]]),
    ((9, 2, 2, {"tail": "drop"}), [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
    ((9, 2, 2, {"drop_last": True}), [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
    # "drop" drops only what cannot be shared
    ((10, 2, 2, {"tail": "drop"}), [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]),
    # two remain for four ranks: they go round
    ((6, 1, 4, {}), [[[0], [4]], [[1], [5]], [[2], [4]], [[3], [5]]]),
    ((6, 1, 4, {"tail": "drop"}), [[[0]], [[1]], [[2]], [[3]]]),
    ((3, 5, 4, {}), [[[0]], [[1]], [[2]], [[0]]]),
    ((3, 5, 4, {"tail": "drop"}), [[], [], [], []]),
    # from a position reached by other ranks
    ((10, 2, 2, {"start": 3}), [[[3, 4], [7, 8]], [[5, 6], [9]]]),
    ((10, 2, 2, {"start": 10}), [[], []]),
    ((10, 2, 2, {"start": 9}), [[[9]], [[9]]]),
    # "fill": all batches have one size, and samples of the last step come again
    ((8, 2, 2, {"tail": "fill"}), [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
    ((7, 3, 1, {"tail": "fill"}), [[[0, 1, 2], [3, 4, 5], [6, 6, 6]]]),
    ((11, 3, 2, {"tail": "fill"}), [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 6]]]),
    ((9, 2, 3, {"tail": "fill"}), [[[0, 1], [6, 7]], [[2, 3], [8, 6]], [[4, 5], [7, 8]]]),
    ((3, 5, 2, {"tail": "fill"}), [[[0, 1, 2]], [[0, 1, 2]]]),
    ((10, 2, 2, {"tail": "fill", "start": 9}), [[[9, 9]], [[9, 9]]]),
    ((9, 2, 2, {"tail": "fill", "drop_last": True}), [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
]


@pytest.mark.parametrize(("case", "expected"), BY_HAND)
def test_by_hand(case, expected):
    length, batch_size, world_size, options = case
    for rank, batches in enumerate(expected):
        partition = Partition(length, batch_size, rank, world_size, **options)
        assert partition.steps == len(batches)
        assert [partition.positions(step, step + 1)[0].tolist() for step in range(partition.steps)] == batches
        assert [partition.batch_rows(step) for step in range(partition.steps)] == [len(batch) for batch in batches]


def test_positions_of_several_steps_come_with_their_bounds():
    positions, bounds = Partition(11, 2, 1, 2).positions(0, 3)
    assert positions.tolist() == [2, 3, 6, 7, 10]
    assert bounds.tolist() == [0, 2, 4, 5]


def test_no_steps_have_no_positions():
    positions, bounds = Partition(11, 2).positions(2, 2)
    assert positions.tolist() == []
    assert bounds.tolist() == [0]


def test_position_after():
    partition = Partition(11, 2, 1, 2, start=1)
    assert [partition.position_after(steps) for steps in range(partition.steps + 1)] == [1, 5, 9, 11]
    assert Partition(11, 2, drop_last=True).position_after(5) == 11, "what was left out is done with"


REFUSED = [
    ({"batch_size": 0}, "batch_size=0"),
    ({"batch_size": -1}, "batch_size=-1"),
    ({"batch_size": 2.0}, "batch_size=2.0"),
    ({"batch_size": "3"}, "batch_size='3'"),
    ({"batch_size": None}, "batch_size=None"),
    ({"rank": 2, "world_size": 2}, "rank=2 of world_size=2"),
    ({"rank": -1, "world_size": 2}, "rank=-1"),
    ({"rank": 0, "world_size": 0}, "world_size=0"),
    ({"tail": "keep"}, "tail='keep'"),
]


@pytest.mark.parametrize(("options", "told"), REFUSED)
def test_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        Partition(**{"length": 10, "batch_size": 2, **options})


def test_positions_are_int64():
    assert Partition(10, 2).positions(0, 2)[0].dtype == np.int64
