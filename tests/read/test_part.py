"""Parts of rows: boxes and masks, against what numpy makes of the same index."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.read.part import Box, Mask, compose, element_strides, everything, row_part

patient = settings(deadline=None, derandomize=True)  # a busy machine is no failure


def numbered(row):
    """A row whose elements are their own numbers."""
    return np.arange(int(np.prod(row, dtype=np.int64))).reshape(row)


def assert_selects(part, row, wanted):
    """``part`` is what numpy takes with ``wanted``."""
    assert_holds(part, row, numbered(row)[wanted])


def assert_holds(part, row, taken):
    """``part`` of ``row`` is the elements with the numbers ``taken``, in that shape."""
    assert part.row == row
    assert part.shape == taken.shape
    assert part.flat.tolist() == taken.reshape(-1).tolist()
    along = np.unravel_index(taken.reshape(-1), row) if row else ()
    assert part.bounds == tuple(slice(int(each.min()), int(each.max()) + 1) for each in along)
    if isinstance(part, Box):
        assert numbered(row)[part.index].reshape(-1).tolist() == taken.reshape(-1).tolist()
        assert part.full_shape == numbered(row)[part.index].shape
        assert part.is_everything == (taken.shape == row)


BOXES = [
    ((5,), slice(None), (5,)),
    ((5,), slice(1, 4), (3,)),
    ((5,), slice(None, None, 2), (3,)),
    ((5,), slice(-2, None), (2,)),
    ((5,), slice(1, 100, 3), (2,)),
    ((5,), 2, ()),
    ((5,), -1, ()),
    ((5,), np.int64(3), ()),
    ((5,), np.uint8(3), ()),
    ((5,), slice(np.int64(1), np.int64(3)), (2,)),
    ((5,), Ellipsis, (5,)),
    ((5,), (), (5,)),
    ((), (), ()),
    ((), Ellipsis, ()),
    ((), (Ellipsis,), ()),
    ((4, 6, 5), (1,), (6, 5)),
    ((4, 6, 5), (slice(None), 2), (4, 5)),
    ((4, 6, 5), (Ellipsis, 2), (4, 6)),
    ((4, 6, 5), (1, Ellipsis, slice(0, 2)), (6, 2)),
    ((4, 6, 5), (slice(1, 3), slice(0, 6, 5), slice(4, 5)), (2, 2, 1)),
    ((4, 6, 5), (slice(1, 3), slice(0, 6, 5), 4, Ellipsis), (2, 2)),
    ((4, 6, 5), (0, -1, 2), ()),
]


@pytest.mark.parametrize(("row", "wanted", "shape"), BOXES, ids=repr)
def test_boxes_by_hand(row, wanted, shape):
    part = row_part(row, wanted)
    assert isinstance(part, Box)
    assert part.shape == shape
    assert_selects(part, row, wanted)


MASKS = [
    ((5,), [True, False, True, True, False], [0, 2, 3]),
    ((5,), [False, False, False, False, True], [4]),
    ((2, 3), [[False, True, False], [True, True, False]], [1, 3, 4]),
    ((2, 3), np.ones((2, 3), bool), [0, 1, 2, 3, 4, 5]),
    ((1, 1, 1), [[[True]]], [0]),
    ((2, 3), np.asfortranarray([[False, True, False], [True, True, False]]), [1, 3, 4]),
]


@pytest.mark.parametrize(("row", "wanted", "flat"), MASKS, ids=repr)
def test_masks_by_hand(row, wanted, flat):
    part = row_part(row, wanted)
    assert isinstance(part, Mask)
    assert part.flat.tolist() == flat
    assert part.shape == (len(flat),)
    assert part.index_bytes == part.flat.nbytes
    assert_selects(part, row, np.asarray(wanted))


def test_a_mask_of_a_row_of_one_number():
    part = row_part((), np.array(True))
    assert_selects(part, (), np.array(True))


@pytest.mark.parametrize("row", [(), (1,), (5,), (2, 3, 4)])
def test_everything(row):
    assert everything(row).is_everything
    assert_selects(everything(row), row, ())
    assert row_part(row, ...) == everything(row)


@pytest.mark.parametrize("row", [(0,), (3, 0), (0, 3)])
def test_everything_of_rows_without_elements(row):
    whole = everything(row)
    assert (whole.shape, whole.flat.tolist()) == (row, [])
    assert whole.is_everything
    assert tuple(each.stop - each.start for each in whole.bounds) == row


def test_only_the_whole_row_is_everything():
    assert row_part((4, 5), (slice(None), slice(0, 5))).is_everything
    for wanted in [0, (..., 0), (..., slice(1, None)), slice(None, None, 2)]:
        assert not row_part((4, 5), wanted).is_everything
    assert not row_part((1, 5), 0).is_everything, "one axis fewer is another shape"


@pytest.mark.parametrize(
    ("shape", "strides"), [((), ()), ((7,), (1,)), ((4, 5), (5, 1)), ((4, 5, 6), (30, 6, 1)), ((4, 1, 6), (6, 6, 1))]
)
def test_element_strides(shape, strides):
    assert element_strides(shape) == strides


# What is refused, and what the message says.
REFUSED = [
    ("numbers for a mask", (5,), [1, 0, 1, 1, 0], ["booleans of shape (5,)", "int64", "roi > 0"]),
    ("floats for a mask", (2, 2), np.ones((2, 2)), ["float64", "(2, 2)", "roi > 0"]),
    ("row numbers", (5,), [0, 2], ["booleans of shape (5,)", "slices", "shape (2,)"]),
    ("another shape", (2, 3), np.ones((3, 2), bool), ["(2, 3)", "(3, 2)"]),
    ("a mask of all rows", (2, 3), np.ones((9, 2, 3), bool), ["(2, 3)", "(9, 2, 3)"]),
    ("fewer axes", (2, 3), np.ones(2, bool), ["(2, 3)", "(2,)"]),
    ("nothing", (5,), np.zeros(5, bool), ["selects nothing", "False"]),
    ("uneven lists", (2, 2), [[True], [True, False]], ["(2, 2)"]),
    ("text", (5,), "roi", ["(5,)"]),
    ("None", (5,), None, ["(5,)"]),
    ("an empty slice", (5,), slice(3, 3), ["axis 0 of 5", "selects nothing"]),
    ("a slice beyond the end", (4, 5), (slice(None), slice(9, None)), ["axis 1 of 5", "selects nothing"]),
    ("a slice backwards", (4, 5), (slice(None, None, -1),), ["axis 0 of 4", "backwards"]),
    ("a step of nothing", (4, 5), (slice(None, None, 0),), ["axis 0 of 4"]),
    ("a slice of fractions", (4, 5), (slice(0, 1.5),), ["axis 0 of 4"]),
    ("a number beyond the end", (4, 5), (0, 5), ["axis 1 of 5", "there is no 5"]),
    ("a number before the start", (4, 5), -5, ["axis 0 of 4", "there is no -5"]),
    ("too many slices", (4, 5), (0, 0, 0), ["3 slices", "(4, 5)", "one for each axis"]),
    ("a number for a row of one", (), 0, ["1 slices", "()"]),
    ("two ellipses", (4, 5, 6), (..., 0, ...), ["(4, 5, 6)", "one for each axis"]),
    ("a new axis", (4, 5), (None, 0), ["slices and whole numbers", "None"]),
    ("a list among slices", (4, 5), ([0, 1], slice(None)), ["slices and whole numbers", "mask of shape (4, 5)"]),
    ("a mask among slices", (4, 5), (np.ones(4, bool), 0), ["slices and whole numbers"]),
    ("a boolean", (4, 5), True, ["slices and whole numbers", "True"]),
    ("a fraction", (4, 5), (1.0,), ["slices and whole numbers", "1.0"]),
]


@pytest.mark.parametrize(("row", "wanted", "told"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refusals(row, wanted, told):
    with pytest.raises(ConfigError) as refused:
        row_part(row, wanted)
    for text in told:
        assert text in str(refused.value), f"{text!r} is not in {str(refused.value)!r}"


# Any of them, against numpy.

ROWS = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)


@st.composite
def indices(draw, row):
    """What numpy would take for a row: slices and numbers, or a mask."""
    if row and draw(st.integers(0, 2)) == 0:
        mask = np.array(draw(st.lists(st.booleans(), min_size=int(np.prod(row)), max_size=int(np.prod(row)))))
        mask[draw(st.integers(0, len(mask) - 1))] = True
        return mask.reshape(row)
    index = []
    for size in row:
        start = draw(st.integers(0, size - 1))
        stop, step = draw(st.integers(start + 1, size + 3)), draw(st.integers(1, 4))
        index.append(draw(st.sampled_from([slice(start, stop, step), slice(start - size, None, step), start])))
    begin = draw(st.integers(0, len(index)))
    if draw(st.booleans()):
        return (*index[:begin], ..., *index[draw(st.integers(begin, len(index))) :])
    return tuple(index[:begin])


@st.composite
def composed(draw, steps):
    """A row, the parts taken of it one after another, and the elements that numpy takes in the same way."""
    row = draw(ROWS)
    parts, taken = [], numbered(row)
    for _ in range(steps):
        wanted = draw(indices(taken.shape))
        parts.append(row_part(taken.shape, wanted))
        taken = np.asarray(taken[wanted])
    return row, parts, taken


@patient
@given(composed(1))
def test_parts_are_what_numpy_takes(case):
    row, (part,), taken = case
    assert_holds(part, row, taken)


@patient
@given(composed(2))
def test_part_of_a_part(case):
    row, (first, then), taken = case
    assert_holds(compose(first, then), row, taken)


@patient
@given(composed(3))
def test_it_does_not_matter_which_two_are_composed_first(case):
    row, (first, then, last), taken = case
    for whole in (compose(compose(first, then), last), compose(first, compose(then, last))):
        assert_holds(whole, row, taken)


@patient
@given(composed(1))
def test_the_whole_of_a_part_is_the_part(case):
    row, (part,), taken = case
    assert_holds(compose(part, everything(part.shape)), row, taken)
    assert_holds(compose(everything(row), part), row, taken)


@patient
@given(composed(1))
def test_flat_ascends_so_that_files_are_read_forwards(case):
    _, (part,), _ = case
    assert (np.diff(part.flat) > 0).all()


@pytest.mark.parametrize("position", [0, 2, -1])
def test_one_element_of_a_mask_has_no_axis(position):
    """As ``row[mask][2]`` is one number."""
    mask = np.array([[True, False, True], [True, True, False]])
    one = compose(row_part((2, 3), mask), row_part((4,), position))
    assert one.shape == ()
    assert one.flat.tolist() == [[0, 2, 3, 4][position]]


def test_parts_are_told_apart_by_what_they_select():
    roi = np.array([[True, False, True], [True, True, False]])
    parts = [
        everything((2, 3)),
        row_part((2, 3), 0),
        row_part((2, 3), slice(0, 1)),
        row_part((2, 3), (..., slice(0, 3, 2))),
        row_part((2, 3), roi),
        row_part((2, 3), ~roi),
        row_part((3, 2), roi.reshape(3, 2)),
    ]
    assert len({part.describe() for part in parts}) == len(parts)
    assert row_part((2, 3), roi).describe() == row_part((2, 3), roi.copy()).describe()


def test_the_same_box_is_described_alike_however_it_was_made():
    at_once = row_part((10,), slice(0, 9, 6))
    in_two = compose(row_part((10,), slice(0, None, 3)), row_part((4,), slice(None, None, 2)))
    assert at_once == in_two
    assert repr(at_once.describe()) == repr(in_two.describe()), "fingerprints are made of this"


@pytest.mark.parametrize("wanted", [(0, slice(1, 3)), np.array([[True, False, True], [True, True, False]])])
def test_parts_pickle(wanted):
    part = row_part((2, 3), wanted)
    again = pickle.loads(pickle.dumps(part))
    assert again.describe() == part.describe()
    assert_selects(again, (2, 3), wanted)
