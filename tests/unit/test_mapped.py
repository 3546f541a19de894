"""A caller's function over whole reads."""

import numpy as np
import pytest

from penstock.errors import OutOfRange, SchemaMismatch, TransformFailed
from penstock.formats.memory import MemoryStore
from penstock.mapped import Mapped


def read(store, rows):
    out = {name: spec.empty(len(rows)) for name, spec in store.fields.items()}
    store.read_into(np.asarray(rows, np.int64), np.arange(len(rows)), out)
    return out


def failing(batch):
    if (batch["label"] == 13).any():
        raise KeyError("no thirteen")
    return {"x": batch["label"]}


def nothing(batch):
    return None


def one_number(batch):
    return {"x": batch["label"].sum()}


def too_few(batch):
    return {"x": batch["label"][:1]}


def words(batch):
    return {"x": np.array([object()] * len(batch["label"]))}


def numbered(rows):
    return MemoryStore({"label": np.arange(rows)})


def test_a_function_that_raises_is_named_with_its_rows():
    store = Mapped(numbered(20), failing)
    with pytest.raises(TransformFailed) as failed:
        read(store, [11, 12, 13, 14, 15])
    for told in ("failing", "KeyError", "no thirteen", "11, 12, 13, 14", "5 of them", "label"):
        assert told in str(failed.value)
    assert isinstance(failed.value.__cause__, KeyError)
    assert read(store, [11, 12])["x"].tolist() == [11, 12]


def test_a_function_that_raises_on_trial_is_refused_at_once():
    with pytest.raises(TransformFailed, match="failing raised KeyError"):
        Mapped(MemoryStore({"label": np.array([1, 13])}), failing)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (nothing, "nothing must return a dict .* returned NoneType"),
        (one_number, r"one_number was given 2 rows and returned 'x' of shape \(\)"),
        (too_few, r"too_few was given 2 rows and returned 'x' of shape \(1,\)"),
        (words, "words returned 'x' as Python objects"),
    ],
)
def test_a_function_that_returns_nonsense_is_refused_at_once(function, told):
    with pytest.raises(TransformFailed, match=told):
        Mapped(numbered(5), function)


def changing_shape(batch):
    wide = 3 if (batch["label"] == 13).any() else 2
    return {"x": np.repeat(batch["label"][:, None], wide, axis=1)}


def changing_dtype(batch):
    return {"x": batch["label"].astype(np.float64 if (batch["label"] == 13).any() else np.int64)}


def dropping_a_row(batch):
    return {"x": batch["label"][batch["label"] != 13]}


def dropping_a_field(batch):
    return {} if (batch["label"] == 13).any() else {"x": batch["label"]}


@pytest.mark.parametrize("function", [changing_shape, changing_dtype, dropping_a_row, dropping_a_field])
def test_output_that_changes_is_refused_where_it_changes(function):
    store = Mapped(numbered(20), function)
    assert len(read(store, [5, 6])["x"]) == 2
    with pytest.raises(SchemaMismatch) as refused:
        read(store, [12, 13])
    for told in (function.__name__, "'x'", "12, 13", "trial run", "same for every row"):
        assert told in str(refused.value)


def big_endian(batch):
    return {"x": batch["label"].astype(">f4")}


def test_output_in_another_byte_order_is_delivered_in_ours():
    store = Mapped(numbered(5), big_endian)
    got = read(store, [3, 1])
    assert got["x"].dtype == np.dtype("=f4")
    assert got["x"].tolist() == [3, 1]


def test_lists_are_arrays_too():
    store = Mapped(numbered(5), lambda batch: {"x": [[float(value)] for value in batch["label"]]})
    assert read(store, [3, 1])["x"].tolist() == [[3.0], [1.0]]


def test_a_function_may_write_into_its_input():
    def in_place(batch):
        batch["label"] += 1
        return batch

    store = Mapped(numbered(5), in_place)
    for _ in range(2):
        assert read(store, [0, 4])["label"].tolist() == [1, 5]


def test_a_function_sees_each_row_it_is_asked_for_once():
    seen = []

    def watch(batch):
        seen.append(batch["label"].tolist())
        return batch

    store = Mapped(numbered(9), watch)
    read(store, [7, 7, 2])
    assert seen == [[0, 1], [7, 7, 2]], "two rows on trial, then what is read"


def test_a_penstock_error_inside_a_function_is_passed_on():
    def refusing(batch):
        if len(batch["label"]) == 3:
            raise OutOfRange("row 99 of the table is not there")
        return batch

    with pytest.raises(OutOfRange, match="row 99 of the table"):
        read(Mapped(numbered(9), refusing), [0, 1, 2])


def test_no_rows_need_no_function():
    def below_the_largest(batch):
        return {"x": batch["label"].max() - batch["label"]}

    assert read(Mapped(numbered(9), below_the_largest), [])["x"].shape == (0,)
