"""Orders: refusals, pinned values, statistics of the permutation, and sizes that no table could hold."""

import json
import time
import tracemalloc
from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from penstock.base.spec import FieldSpec
from penstock.errors import ConfigError
from penstock.loader.order import BlockShuffled, InOrder, Order, Resampled, Shuffled
from penstock.loader.partition import Partition
from penstock.loader.permutation import SMALL_SET, permutation
from penstock.loader.plan import make_plan
from penstock.loader.plan_request import Request

BILLION = 10**9


def whole(order, epoch=0):
    return order.rows(epoch, 0, len(order))


# A saved position means something only as long as orders stay what they are.
PINNED = [
    (InOrder(4), 0, [0, 1, 2, 3]),
    (Shuffled(10, seed=0), 0, [1, 7, 5, 9, 3, 2, 8, 0, 4, 6]),
    (Shuffled(10, seed=0), 1, [7, 2, 8, 0, 1, 3, 5, 6, 4, 9]),
    (Shuffled(10, seed=7), 0, [0, 6, 1, 3, 2, 8, 9, 5, 7, 4]),
    (BlockShuffled(10, np.array([0, 3, 4, 8]), 2, seed=0), 0, [3, 0, 2, 1, 4, 6, 7, 9, 5, 8]),
]


@pytest.mark.parametrize(("order", "epoch", "rows"), PINNED, ids=lambda value: str(value)[:40])
def test_pinned(order, epoch, rows):
    assert whole(order, epoch).tolist() == rows


def test_pinned_in_a_large_set():
    assert Shuffled(100_000, seed=5).rows(2, 50_000, 50_006).tolist() == [96291, 79823, 62687, 75047, 89181, 75871]


@pytest.mark.parametrize(
    "order",
    [InOrder(0), Shuffled(0), Resampled(1, 0), BlockShuffled(0, np.array([0]), 1)],
    ids=lambda o: type(o).__name__,
)
def test_nothing_to_order(order):
    assert len(order) == 0
    assert whole(order).tolist() == []


@pytest.mark.parametrize("order", [InOrder(1), Shuffled(1), Resampled(1, 1), BlockShuffled(1, np.array([0]), 3)])
def test_one_row(order):
    assert whole(order, 5).tolist() == [0]
    assert whole(order).dtype == np.int64


def test_resampled_draws_a_given_number():
    order = Resampled(population=3, length=1000)
    assert len(order) == 1000
    assert set(whole(order).tolist()) == {0, 1, 2}


REFUSED = [
    (lambda: Shuffled(10, seed=-1), "seed=-1"),
    (lambda: Shuffled(10, seed=1.5), "seed=1.5"),
    (lambda: Shuffled(10, seed="7"), "seed='7'"),
    (lambda: Shuffled(10, seed=None), "seed=None"),
    (lambda: Resampled(10, 10, seed=-1), "seed=-1"),
    (lambda: Resampled(0, 10), "at least 1 row"),
    (lambda: BlockShuffled(10, np.array([0, 5]), 1, seed=-1), "seed=-1"),
    (lambda: BlockShuffled(10, np.array([0, 5]), 0), "window_blocks=0"),
    (lambda: BlockShuffled(10, np.array([], int), 1), "starts=.*expected the first rows of blocks"),
    (lambda: BlockShuffled(10, np.array([1, 5]), 1), "starts=.*expected the first rows of blocks"),
    (lambda: BlockShuffled(10, np.array([0, 5, 5]), 1), "starts=.*expected the first rows of blocks"),
    (lambda: BlockShuffled(10, np.array([0, 6, 5]), 1), "starts=.*expected the first rows of blocks"),
    (lambda: BlockShuffled(10, np.array([0, 10]), 1), "starts=.*expected the first rows of blocks"),
]


@pytest.mark.parametrize(("make", "told"), REFUSED)
def test_refused(make, told):
    with pytest.raises(ConfigError, match=told):
        make()


DIFFERENT = [
    InOrder(100),
    InOrder(101),
    Shuffled(100),
    Shuffled(101),
    Shuffled(100, seed=1),
    Resampled(100, 100),
    Resampled(100, 101),
    Resampled(101, 100),
    Resampled(100, 100, seed=1),
    BlockShuffled(100, np.array([0, 50]), 1),
    BlockShuffled(100, np.array([0, 49]), 1),
    BlockShuffled(100, np.array([0, 50]), 2),
    BlockShuffled(100, np.array([0, 50]), 1, seed=1),
    BlockShuffled(101, np.array([0, 50]), 1),
]


def test_described_in_json_that_tells_orders_apart():
    described = [json.dumps(order.describe(), sort_keys=True) for order in DIFFERENT]
    same = [texts for texts, times in Counter(described).items() if times > 1]
    assert same == []


def test_equal_orders_are_described_alike():
    one, other = (BlockShuffled(100, np.array([0, 50]), 2, seed=3) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one.describe() == other.describe()
    assert one != BlockShuffled(100, np.array([0, 51]), 2, seed=3)


def test_an_order_of_ones_own_needs_three_methods():
    class Backwards(Order):
        def __len__(self):
            return 10

        def at(self, epoch, positions):
            return 9 - positions

        def describe(self):
            return {"order": "backwards"}

    assert Backwards().rows(0, 2, 5).tolist() == [7, 6, 5]


# Statistics, with fixed seeds: thresholds of six standard deviations fail by chance once in a billion.


def chi_square_is_plausible(counts, expected):
    counts = np.asarray(counts, float)
    freedom = counts.size - 1
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return chi_square < freedom + 6 * np.sqrt(2 * freedom) + 6


@pytest.mark.parametrize("length", [30_000, 10**6, 10**9])
def test_steps_from_row_to_row_are_of_any_size(length):
    rows = Shuffled(length, seed=2).rows(0, 0, 30_000)
    steps = np.diff(rows) % length
    assert chi_square_is_plausible(np.bincount(steps * 50 // length, minlength=50), len(steps) / 50)
    assert chi_square_is_plausible(np.bincount(rows[: len(rows) // 4] % 16, minlength=16), len(rows) // 4 / 16)


@pytest.mark.parametrize("length", [2, 3, 10, 17, 64])
def test_every_row_is_equally_likely_at_every_position(length):
    draws = 600
    counts = np.zeros((length, length))
    for draw in range(draws):
        counts[np.arange(length), whole(Shuffled(length, seed=draw // 2), draw % 2)] += 1
    for at_one_position in counts:
        assert chi_square_is_plausible(at_one_position, draws / length)
    assert chi_square_is_plausible(counts, draws / length)


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_every_permutation_of_a_small_set_is_equally_likely(length):
    draws = 2400
    found = Counter(tuple(whole(Shuffled(length, seed=seed)).tolist()) for seed in range(draws))
    every = list(permutations(range(length)))
    assert chi_square_is_plausible([found[each] for each in every], draws / len(every))


@pytest.mark.parametrize("length", [SMALL_SET, SMALL_SET + 1, 30_000])
def test_neighbouring_positions_have_unrelated_rows(length):
    rows = whole(Shuffled(length, seed=1)).astype(float)
    rows = (rows - rows.mean()) / rows.std()
    for lag in (1, 2, 3, 7, 64, 173, 174):  # 174: the digits' radix for 30,000
        correlation = (rows[:-lag] * rows[lag:]).mean()
        assert abs(correlation) < 6 / np.sqrt(length), lag


def test_epochs_and_seeds_are_unrelated():
    length = 30_000
    base = whole(Shuffled(length, seed=1), 1)
    for other in (Shuffled(length, seed=1).rows(2, 0, length), Shuffled(length, seed=2).rows(1, 0, length)):
        assert abs(np.corrcoef(base, other)[0, 1]) < 6 / np.sqrt(length)
        assert (base == other).sum() < 12, "a pair of random permutations agrees in one place on average"


def test_no_position_prefers_rows_nearby():
    length = 30_000
    rows = whole(Shuffled(length, seed=4))
    distance = np.abs(rows - np.arange(length)).mean()
    assert abs(distance / (length / 3) - 1) < 0.03


def test_each_sixteenth_of_an_epoch_has_its_share_of_each_sixteenth_of_the_rows():
    length = 32_000
    rows = whole(Shuffled(length, seed=5))
    cells = np.zeros((16, 16))
    np.add.at(cells, (np.arange(length) * 16 // length, rows * 16 // length), 1)
    assert chi_square_is_plausible(cells, length / 256)


@pytest.mark.parametrize("population", [2, 3, 10, 16, 100, 128])
@pytest.mark.parametrize("lag", [1, 2, 16])
def test_resampled_rows_are_equally_likely_and_unrelated(population, lag):
    draws = whole(Resampled(population, 100_000, seed=3))
    assert chi_square_is_plausible(np.bincount(draws, minlength=population), len(draws) / population)
    pairs = np.zeros((population, population))
    np.add.at(pairs, (draws[:-lag], draws[lag:]), 1)
    assert chi_square_is_plausible(pairs, (len(draws) - lag) / population**2)


def test_resampled_repeats_as_often_as_chance_has_it():
    draws = whole(Resampled(10_000, 10_000, seed=0))
    assert len(np.unique(draws)) / 10_000 == pytest.approx(1 - 1 / np.e, abs=0.02)


# Sizes that no table could hold.


@pytest.fixture
def traced():
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


def test_a_billion_rows_need_no_table(traced):
    rows = Shuffled(BILLION).rows(0, BILLION // 2, BILLION // 2 + 1000)
    assert len(np.unique(rows)) == 1000
    assert rows.min() >= 0
    assert rows.max() < BILLION
    assert rows.max() - rows.min() > BILLION // 2, "over the whole set"
    assert traced() < 5 * 2**20


@pytest.mark.parametrize("order", [Resampled(BILLION, BILLION), InOrder(BILLION)], ids=lambda o: type(o).__name__)
def test_other_orders_of_a_billion(traced, order):
    rows = order.rows(3, BILLION - 1000, BILLION)
    assert len(rows) == 1000
    assert rows.min() >= 0
    assert rows.max() < BILLION
    assert traced() < 5 * 2**20


def test_blocks_of_a_billion_rows_take_memory_by_the_block(traced):
    order = BlockShuffled(BILLION, np.arange(0, BILLION, 100_000), 16)
    rows = order.rows(0, BILLION // 2, BILLION // 2 + 1000)
    assert len(np.unique(rows)) == 1000
    assert rows.max() < BILLION
    assert traced() < 5 * 2**20


def test_a_billion_rows_dealt_to_1024_ranks(traced):
    order = Shuffled(BILLION, seed=3)
    seen = []
    for rank in (0, 1, 511, 1023):
        partition = Partition(len(order), 256, rank, 1024)
        assert partition.steps == -(-BILLION // (256 * 1024))
        for step in (0, partition.steps // 2, partition.steps - 1):
            positions, _ = partition.positions(step, step + 1)
            seen.append(order.at(1, positions))
    rows = np.concatenate(seen)
    assert len(np.unique(rows)) == len(rows)
    assert traced() < 5 * 2**20


def test_a_billion_rows_are_planned_in_no_time(traced):
    began = time.process_time()
    partition = Partition(BILLION, 256, 1023, 1024)
    plan = make_plan(
        Request(
            fields={"betas": FieldSpec(np.dtype(np.float32), (1000,)), "label": FieldSpec(np.dtype(np.int64))},
            batch_rows=256,
            steps=partition.steps,
            threads=64,
            limit_bytes=2**30,
            scratch_bytes=lambda rows: 4096 * rows,
        )
    )
    assert time.process_time() - began < 1
    assert plan.planned_bytes <= 2**30
    assert traced() < 5 * 2**20


def test_a_thousand_batches_of_a_billion_rows_are_ordered_in_no_time():
    began = time.process_time()
    permutation.cache_clear()
    Shuffled(BILLION).rows(0, 0, 100_000)
    assert time.process_time() - began < 1
