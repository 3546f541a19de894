"""Laws of orders and of dealing them to ranks, for whatever sizes."""

from itertools import pairwise

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.loader.order import BlockShuffled, InOrder, Resampled, Shuffled
from penstock.loader.partition import Partition
from penstock.loader.permutation import SMALL_SET, permutation

patient = settings(deadline=None)  # a busy machine is no failure

SEEDS = st.integers(0, 2**70)
EPOCHS = st.integers(0, 2**40)
LENGTHS = st.one_of(st.integers(1, 300), st.sampled_from([SMALL_SET - 1, SMALL_SET, SMALL_SET + 1, 5000, 9973]))


@st.composite
def block_shuffled(draw, lengths=LENGTHS):
    length = draw(lengths)
    inner = draw(st.sets(st.integers(1, length - 1), max_size=40)) if length > 1 else set()
    starts = np.array([0, *sorted(inner)])
    return BlockShuffled(length, starts, draw(st.integers(1, len(starts) + 2)), draw(SEEDS))


def permuting(lengths=LENGTHS):
    """Orders in which every row comes once."""
    return st.one_of(
        st.builds(InOrder, lengths),
        st.builds(Shuffled, lengths, SEEDS),
        block_shuffled(lengths),
    )


def orders():
    return st.one_of(permuting(), st.builds(Resampled, LENGTHS, st.integers(1, 500), SEEDS))


def whole(order, epoch):
    return order.rows(epoch, 0, len(order))


@patient
@given(permuting(), EPOCHS)
def test_every_row_comes_once(order, epoch):
    assert np.array_equal(np.sort(whole(order, epoch)), np.arange(len(order)))


@patient
@given(LENGTHS, st.integers(1, 500), SEEDS, EPOCHS)
def test_resampled_rows_exist(population, length, seed, epoch):
    rows = whole(Resampled(population, length, seed), epoch)
    assert len(rows) == length
    assert rows.min() >= 0
    assert rows.max() < population


@patient
@given(orders(), EPOCHS, st.data())
def test_a_stretch_is_a_slice_of_the_whole(order, epoch, data):
    start = data.draw(st.integers(0, len(order)))
    stop = data.draw(st.integers(start, len(order)))
    assert np.array_equal(order.rows(epoch, start, stop), whole(order, epoch)[start:stop])


@patient
@given(orders(), EPOCHS, st.data())
def test_any_positions_may_be_asked_for(order, epoch, data):
    positions = np.array(data.draw(st.lists(st.integers(0, len(order) - 1), max_size=50)), np.int64)
    assert np.array_equal(order.at(epoch, positions), whole(order, epoch)[positions])


@patient
@given(orders(), EPOCHS)
def test_asking_twice_gives_the_same(order, epoch):
    first = whole(order, epoch)
    whole(order, epoch + 1)
    assert np.array_equal(first, whole(order, epoch))


# Where digits outgrow a word, among others.
ANY_LENGTH = st.integers(1, 2**62) | st.sampled_from([2**16, 2**32 - 2**16, 2**32 - 1, 2**32, 2**32 + 1, 2**40, 2**62])

# Fifty rows have so many orders that no two draws agree.
ENOUGH = st.integers(50, 300)


def shuffling(seed):
    return st.one_of(
        ENOUGH.map(lambda length: Shuffled(length, seed)),
        ENOUGH.map(lambda length: Resampled(10**6, length, seed)),
        ENOUGH.map(lambda length: BlockShuffled(length, np.arange(0, length, 7), 4, seed)),
        ENOUGH.map(lambda length: BlockShuffled(length, np.array([0]), 1, seed)),
    )


def seeded(order, seed):
    if isinstance(order, Shuffled):
        return Shuffled(order.length, seed)
    if isinstance(order, Resampled):
        return Resampled(order.population, order.length, seed)
    return BlockShuffled(order.length, order.starts, order.window_blocks, seed)


@patient
@given(shuffling(0), SEEDS, EPOCHS, EPOCHS)
def test_another_epoch_is_another_order(order, seed, epoch, other):
    assume(epoch != other)
    order = seeded(order, seed)
    assert not np.array_equal(whole(order, epoch), whole(order, other))


@patient
@given(shuffling(0), SEEDS, SEEDS, EPOCHS)
def test_another_seed_is_another_order(order, seed, other, epoch):
    assume(seed != other)
    assert not np.array_equal(whole(seeded(order, seed), epoch), whole(seeded(order, other), epoch))


@patient
@given(shuffling(0), st.integers(0, 1000), st.integers(0, 1000))
def test_seed_and_epoch_do_not_add_up(order, one, other):
    assume(one != other)
    assert not np.array_equal(whole(seeded(order, one), other), whole(seeded(order, other), one))


@patient
@given(ANY_LENGTH, SEEDS, EPOCHS, st.data())
def test_a_permutation_of_any_size_never_maps_two_to_one(length, seed, epoch, data):
    positions = np.array(sorted(data.draw(st.sets(st.integers(0, length - 1), max_size=200))), np.int64)
    rows = permutation(length, seed, epoch)(positions)
    assert len(np.unique(rows)) == len(positions)
    assert ((rows >= 0) & (rows < length)).all()


@patient
@given(block_shuffled(), EPOCHS)
def test_windows_are_made_of_whole_blocks(order, epoch):
    bounds = order.windows(epoch)
    ends = np.append(order.starts[1:], order.length)
    assert bounds[0] == 0
    assert bounds[-1] == order.length
    blocks_seen = []
    for window, (begin, end) in enumerate(pairwise(bounds)):
        blocks = order.blocks_of(epoch, window)
        expected = np.concatenate([np.arange(order.starts[block], ends[block]) for block in blocks])
        assert np.array_equal(np.sort(order.rows(epoch, begin, end)), np.sort(expected))
        blocks_seen += blocks.tolist()
        last = window == len(bounds) - 2
        assert len(blocks) == order.window_blocks or (last and len(blocks) <= order.window_blocks)
    assert sorted(blocks_seen) == list(range(len(order.starts)))


# Dealing.

PARTITIONS = {
    "length": st.integers(0, 400),
    "batch_size": st.integers(1, 20),
    "world_size": st.integers(1, 9),
    "drop_last": st.booleans(),
    "tail": st.sampled_from(["pad", "drop"]),
}


@st.composite
def partitions(draw):
    """One partition per rank."""
    options = {name: draw(strategy) for name, strategy in PARTITIONS.items()}
    options["start"] = draw(st.integers(0, options["length"]))
    return [Partition(rank=rank, **options) for rank in range(options["world_size"])]


def of_step(ranks, step):
    return [partition.positions(step, step + 1)[0] for partition in ranks]


@patient
@given(partitions())
def test_all_ranks_take_the_same_steps(ranks):
    assert len({partition.steps for partition in ranks}) == 1


@patient
@given(partitions())
def test_every_position_is_dealt_as_promised(ranks):
    partition = ranks[0]
    dealt = np.concatenate([each.positions(0, each.steps)[0] for each in ranks])
    rest = (partition.length - partition.start) % partition.step_samples
    times = np.bincount(dealt, minlength=partition.length)
    assert not times[: partition.start].any()
    wanted, last = times[partition.start : partition.length - rest], times[partition.length - rest :]
    assert (wanted == 1).all(), "every sample of a full step comes once"
    if partition.drop_last or (rest < partition.world_size and partition.tail == "drop"):
        assert not last.any()
    elif rest < partition.world_size:
        assert last.sum() == (partition.world_size if rest else 0)
        assert rest == 0 or last.max() - last.min() <= 1, "repeats are spread evenly"
    else:
        assert (last == 1).all()


@patient
@given(partitions())
def test_batches_are_never_too_large_and_never_uneven(ranks):
    for step in range(ranks[0].steps):
        sizes = [partition.batch_rows(step) for partition in ranks]
        assert min(sizes) >= 1
        assert max(sizes) <= ranks[0].batch_size
        assert max(sizes) - min(sizes) <= 1
        if step < ranks[0].steps - 1 or ranks[0].drop_last:
            assert set(sizes) == {ranks[0].batch_size}


@patient
@given(partitions())
def test_a_step_is_dealt_in_rank_order(ranks):
    for step in range(ranks[0].steps):
        together = np.concatenate(of_step(ranks, step))
        rest = ranks[0].length - (ranks[0].start + step * ranks[0].step_samples)
        if rest >= ranks[0].world_size:
            begin = ranks[0].start + step * ranks[0].step_samples
            assert np.array_equal(together, np.arange(begin, begin + len(together)))


@patient
@given(partitions(), st.data())
def test_several_steps_are_the_steps_one_by_one(ranks, data):
    partition = data.draw(st.sampled_from(ranks))
    first = data.draw(st.integers(0, partition.steps))
    last = data.draw(st.integers(first, partition.steps))
    positions, bounds = partition.positions(first, last)
    singly = [partition.positions(step, step + 1)[0].tolist() for step in range(first, last)]
    assert [positions[a:b].tolist() for a, b in pairwise(bounds)] == singly
    assert bounds[0] == 0
    assert bounds[-1] == len(positions)


@patient
@given(partitions(), st.data())
def test_going_on_from_a_position_changes_nothing(ranks, data):
    done = data.draw(st.integers(0, ranks[0].steps))
    assert len({partition.position_after(done) for partition in ranks}) == 1
    for partition in ranks:
        options = {name: getattr(partition, name) for name in (*PARTITIONS, "rank")}
        later = Partition(start=partition.position_after(done), **options)
        assert later.steps == partition.steps - done
        assert np.array_equal(later.positions(0, later.steps)[0], partition.positions(done, partition.steps)[0])


@patient
@given(partitions(), st.data())
def test_other_ranks_go_on_where_these_stopped(ranks, data):
    done = data.draw(st.integers(0, ranks[0].steps))
    world_size, batch_size = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 20))
    at = ranks[0].position_after(done)
    others = [Partition(ranks[0].length, batch_size, rank, world_size, start=at) for rank in range(world_size)]
    before = {int(p) for partition in ranks for p in partition.positions(0, done)[0]}
    after = {int(p) for partition in others for p in partition.positions(0, partition.steps)[0]}
    assert not before & after
    if not (ranks[0].drop_last or ranks[0].tail == "drop") or done < ranks[0].steps:
        assert before | after == set(range(ranks[0].start, ranks[0].length))
