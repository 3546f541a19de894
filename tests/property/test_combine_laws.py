"""Whatever is done to a dataset gives what the same would give done to plain arrays."""

import pickle
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.base.scratch import overflow_bytes, prepare, release

patient = settings(deadline=None)  # a busy machine is no failure

# Small whole numbers, and factors that are powers of two: every float type holds every result exactly, so results must
# be equal, not close.
DTYPES = [np.int8, np.int16, np.int64, np.float32, np.float64, ">i2", ">f4"]
SHAPES = [(), (3,), (2, 2), (0,)]


@pytest.fixture(scope="module")
def folder():
    made = tempfile.mkdtemp()
    yield Path(made)
    shutil.rmtree(made)


@st.composite
def bases(draw, folder):
    """A dataset in memory or in files, and its arrays."""
    rows = draw(st.integers(1, 12))
    arrays = {}
    for name in draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True)):
        shape = (rows, *draw(st.sampled_from(SHAPES)))
        seed = draw(st.integers(0, 100))
        values = np.random.default_rng(seed).integers(-50, 50, shape)
        arrays[name] = values.astype(draw(st.sampled_from(DTYPES)))
    delivered = {name: array.astype(array.dtype.newbyteorder("=")) for name, array in arrays.items()}
    if draw(st.booleans()):
        return ps.from_arrays(**arrays), delivered
    parts = {}
    for name, array in arrays.items():
        path = Path(tempfile.mkdtemp(dir=folder)) / "field.npy"  # each example has files of its own
        np.save(path, array)
        parts[name] = ps.open(path)
    return ps.join(**parts), delivered


@st.composite
def slices(draw):
    bounds = st.none() | st.integers(-15, 15)
    return slice(draw(bounds), draw(bounds), draw(st.none() | st.sampled_from([-3, -2, -1, 1, 2, 5, 100])))


def take(arrays, rows):
    return {name: array[rows] for name, array in arrays.items()}


def length(arrays):
    return len(next(iter(arrays.values())))


def row_numbers(draw, count, **sizes):
    return draw(st.lists(st.integers(-count, count - 1), **sizes)) if count else []


def selected(draw, ds, arrays):
    count = length(arrays)
    rows = draw(
        st.one_of(
            st.just(row_numbers(draw, count, max_size=15)),
            slices(),
            st.lists(st.booleans(), min_size=count, max_size=count).map(lambda mask: np.array(mask, bool)),
        )
    )
    wanted = np.array(rows, np.int64) if isinstance(rows, list) else rows
    return ds.select(rows), take(arrays, wanted)


def selected_by_range(draw, ds, arrays):
    chosen = range(length(arrays))[draw(slices())]
    return ds.select(chosen), take(arrays, np.array(chosen, np.int64))


def concatenated(draw, ds, arrays):
    other, others = selected(draw, ds, arrays)
    parts = [(ds, arrays), (other, others)]
    if draw(st.booleans()):
        parts.reverse()
    return ps.concat(part for part, _ in parts), {
        name: np.concatenate([values[name] for _, values in parts]) for name in arrays
    }


def joined(draw, ds, arrays):
    rows = row_numbers(draw, length(arrays), max_size=15)
    single = len(arrays) == 1
    got = ps.join(p=(ds, rows), n=np.arange(len(rows)))
    wanted = take(arrays, np.array(rows, np.int64))
    return got, {**{"p" if single else f"p.{name}": v for name, v in wanted.items()}, "n": np.arange(len(rows))}


def renamed(draw, ds, arrays):
    old = draw(st.sampled_from(sorted(arrays)))
    new = old + "x"
    if new in arrays:
        return ds, arrays
    return ds.rename(**{new: old}), {new if name == old else name: array for name, array in arrays.items()}


def only(draw, ds, arrays):
    names = draw(st.lists(st.sampled_from(sorted(arrays)), min_size=1, unique=True))
    return ds.only(*names), {name: arrays[name] for name in names}


def converted(draw, ds, arrays):
    name = draw(st.sampled_from(sorted(arrays)))
    dtype = np.dtype(draw(st.sampled_from([np.float32, np.float64])))
    scale, offset = draw(st.sampled_from([1.0, 0.5, 2.0, -1.0])), draw(st.sampled_from([0.0, 1.0, -3.0]))
    values = arrays[name].astype(dtype) * dtype.type(scale) + dtype.type(offset)
    return ds.cast(name, dtype, scale, offset), {**arrays, name: values}


def negated(batch):
    return {name: -values for name, values in batch.items()}


def mapped(draw, ds, arrays):
    return ds.map(negated), negated(arrays)


STEPS = st.sampled_from(
    [selected, selected_by_range, concatenated, joined, renamed, only, converted, converted, mapped]
)


@st.composite
def compositions(draw, folder):
    ds, arrays = draw(bases(folder))
    for _ in range(draw(st.integers(0, 5))):
        step = draw(STEPS)
        if step is mapped and length(arrays) == 0:
            continue
        note(step.__name__)
        ds, arrays = step(draw, ds, arrays)
    return ds, arrays


def assert_same(got, expected):
    assert list(got) == list(expected)
    for name, values in expected.items():
        assert got[name].dtype == values.dtype, name
        assert got[name].shape == values.shape, name
        assert np.array_equal(got[name], values), name


@patient
@given(st.data())
def test_rows_are_those_of_the_arrays(folder, data):
    ds, arrays = data.draw(compositions(folder))
    assert len(ds) == length(arrays)
    assert_same(ds[:], arrays)
    rows = np.array(row_numbers(data.draw, len(ds), max_size=10), np.int64)
    assert_same(ds[rows], take(arrays, rows))
    for row in rows[:3]:
        assert_same(ds[int(row)], {name: array[row] for name, array in arrays.items()})


@patient
@given(st.data())
def test_reads_go_anywhere_within_the_scratch_declared(folder, data):
    ds, arrays = data.draw(compositions(folder))
    rows = np.array(row_numbers(data.draw, len(ds), max_size=10), np.int64) % max(1, len(ds))
    at = np.array(data.draw(st.permutations(range(len(rows)))), np.int64)
    out = {name: spec.empty(len(rows)) for name, spec in ds.fields.items()}
    prepare(ds.delivered.scratch_bytes(len(rows)))
    ds.delivered.read_into(rows, at, out)
    overflow = overflow_bytes()
    release()
    assert overflow == 0
    assert_same({name: array[at] for name, array in out.items()}, take(arrays, rows))


@patient
@given(st.data())
def test_pickling_changes_nothing(folder, data):
    ds, arrays = data.draw(compositions(folder))
    again = pickle.loads(pickle.dumps(ds))
    assert_same(again[:], arrays)
    assert again.fingerprint == ds.fingerprint


@patient
@given(st.data())
def test_a_loader_delivers_the_same(folder, data):
    ds, arrays = data.draw(compositions(folder))
    if len(ds) == 0:
        return
    batch_size = data.draw(st.integers(1, 5))
    loader = ps.Loader(ds, batch_size=batch_size, memory="64MiB", threads=2, output="numpy")
    batches = [{name: array.copy() for name, array in batch.items()} for batch in loader]
    assert [length(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert_same({name: np.concatenate([batch[name] for batch in batches]) for name in arrays}, arrays)
