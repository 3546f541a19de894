"""Stores made of stores, each compared with the same thing done to plain arrays."""

import pickle

import numpy as np
import pytest

from penstock.base.scratch import overflow_bytes, prepare, release
from penstock.base.spec import Cast, Origin
from penstock.dataset.combine import Columns, Concat, Joined, Part, Subset
from penstock.dataset.extent_store import ExtentStore
from penstock.dataset.map import Mapped
from penstock.dataset.memory import MemoryStore
from penstock.dataset.rewrite import cast_fields, choose_fields
from penstock.dataset.second_pass import Recast
from penstock.dataset.store import Store
from penstock.errors import ConfigError, OutOfRange, SchemaMismatch
from penstock.files.files import Files
from penstock.files.handles import identify
from penstock.read.extents import Contiguous

ROWS = 23
F4, F8, F2 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16)


def arrays(rows=ROWS, seed=0):
    chance = np.random.default_rng(seed)
    return {
        "betas": chance.standard_normal((rows, 5)).astype(np.float32),
        "image": chance.integers(0, 256, (rows, 3, 2), np.uint8),
        "label": chance.integers(-100, 100, rows, np.int16),
    }


def taken(values, rows):
    return {name: array[rows] for name, array in values.items()}


def doubled(batch):
    return {"twice": batch["betas"] * 2, "label": batch["label"]}


def shifted(values):
    return {name: array + array.dtype.type(1) for name, array in values.items()}


PICKED = np.array([4, 4, 0, 22, 7])
HALF = Cast(F4, 0.5, 1.0)

# A store made of these arrays, and what it should hold.
CASES = {
    "memory": (lambda a: MemoryStore(a), lambda a: a),
    "subset of numbers": (lambda a: Subset(MemoryStore(a), PICKED), lambda a: taken(a, PICKED)),
    "subset of a range": (lambda a: Subset(MemoryStore(a), range(3, 20, 4)), lambda a: taken(a, slice(3, 20, 4))),
    "subset backwards": (
        lambda a: Subset(MemoryStore(a), range(22, -1, -1)),
        lambda a: taken(a, slice(None, None, -1)),
    ),
    "subset of a subset": (
        lambda a: Subset(Subset(MemoryStore(a), range(1, 23, 2)), np.array([10, 0, 0])),
        lambda a: taken(a, [21, 1, 1]),
    ),
    "columns": (
        lambda a: Columns(MemoryStore(a), {"y": "label", "x": "betas"}),
        lambda a: {"y": a["label"], "x": a["betas"]},
    ),
    "swapped columns": (
        lambda a: Columns(MemoryStore(a), {"label": "betas", "betas": "label"}),
        lambda a: {"label": a["betas"], "betas": a["label"]},
    ),
    "concat": (
        lambda a: Concat([MemoryStore(a), MemoryStore(arrays(7, seed=1)), MemoryStore(a)]),
        lambda a: {name: np.concatenate([a[name], arrays(7, seed=1)[name], a[name]]) for name in a},
    ),
    "concat with nothing between": (
        lambda a: Concat([MemoryStore(a), Subset(MemoryStore(a), range(0)), MemoryStore(a)]),
        lambda a: {name: np.concatenate([a[name], a[name]]) for name in a},
    ),
    "concat of one": (lambda a: Concat([MemoryStore(a)]), lambda a: a),
    "joined": (
        lambda a: Joined(
            {
                "one": Part(MemoryStore(a), PICKED, {"b": "betas", "l": "label"}),
                "two": Part(MemoryStore({"n": np.arange(5)}), None, {"n": "n"}),
                "three": Part(MemoryStore(a), PICKED[::-1].copy(), {"i": "image"}),
            }
        ),
        lambda a: {"b": a["betas"][PICKED], "l": a["label"][PICKED], "n": np.arange(5), "i": a["image"][PICKED[::-1]]},
    ),
    "converted": (
        lambda a: Recast(MemoryStore(a), {"image": HALF, "label": Cast(F8)}),
        lambda a: {**a, "image": a["image"].astype(F4) * F4.type(0.5) + F4.type(1), "label": a["label"].astype(F8)},
    ),
    "converted to half": (
        lambda a: Recast(MemoryStore(a), {"image": Cast(F2, 1 / 255)}),
        lambda a: {**a, "image": (a["image"].astype(F4) * F4.type(1 / 255)).astype(F2)},
    ),
    "converted twice": (
        lambda a: cast_fields(Recast(MemoryStore(a), {"label": HALF}), {"label": Cast(F8, 4.0), "image": HALF}),
        lambda a: {
            **a,
            "image": a["image"].astype(F4) * F4.type(0.5) + F4.type(1),
            "label": (a["label"].astype(F8) * 0.5 + 1) * 4,
        },
    ),
    "mapped": (lambda a: Mapped(MemoryStore(a), doubled), lambda a: doubled(a)),
    "mapped twice": (
        lambda a: Mapped(Mapped(MemoryStore(a), shifted), doubled),
        lambda a: doubled(shifted(a)),
    ),
    "all together": (
        lambda a: Mapped(
            cast_fields(
                Concat([Subset(MemoryStore(a), PICKED), Subset(MemoryStore(a), range(2))]), {"betas": Cast(F8, 2.0)}
            ),
            doubled,
        ),
        lambda a: {
            "twice": a["betas"][[*PICKED, 0, 1]].astype(F8) * 2 * 2,
            "label": a["label"][[*PICKED, 0, 1]],
        },
    ),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request):
    make, oracle = request.param
    return make(arrays()), oracle(arrays())


def read(store, rows, names=None):
    out = {name: store.fields[name].empty(len(rows)) for name in names or store.fields}
    store.read_into(np.asarray(rows, np.int64), np.arange(len(rows)), out)
    return out


def assert_same(got, expected):
    assert list(got) == list(expected)
    for name, values in expected.items():
        assert got[name].dtype == values.dtype, name
        assert np.array_equal(got[name], values), name


def test_fields_are_those_of_the_arrays(case):
    store, expected = case
    assert isinstance(store, Store)
    assert [(name, spec.dtype, spec.shape) for name, spec in store.fields.items()] == [
        (name, array.dtype, array.shape[1:]) for name, array in expected.items()
    ]
    assert len(store) == len(next(iter(expected.values())))


def test_all_rows(case):
    store, expected = case
    assert_same(read(store, range(len(store))), expected)


@pytest.mark.parametrize("rows", [[0], [1, 0], [1, 1, 1], [0, 2, 1, 2, 0], []], ids=str)
def test_any_rows_in_any_order(case, rows):
    store, expected = case
    rows = [row % len(store) for row in rows]
    assert_same(read(store, rows), taken(expected, np.array(rows, np.int64)))


def test_into_any_places_and_no_others(case):
    store, expected = case
    rows, at = np.array([1, 0, 1, 0]), np.array([6, 2, 0, 3])
    out = {name: spec.empty(8) for name, spec in store.fields.items()}
    for array in out.values():
        array[:] = 77
    store.read_into(rows, at, out)
    for name, array in out.items():
        assert np.array_equal(array[at], expected[name][rows])
        assert (array[[1, 4, 5, 7]] == 77).all()


def test_each_field_alone(case):
    store, expected = case
    for name in store.fields:
        assert_same(read(store, range(len(store)), [name]), {name: expected[name]})


def test_scratch_is_what_was_declared(case):
    store, _ = case
    chance = np.random.default_rng(0)
    for count in (1, 3, 50):
        rows, at = chance.integers(0, len(store), count), chance.permutation(count)
        out = {name: spec.empty(count) for name, spec in store.fields.items()}
        prepare(store.scratch_bytes(count))
        store.read_into(rows, at, out)
        overflow = overflow_bytes()
        release()
        assert overflow == 0


def test_rows_that_are_not_there(case):
    store, _ = case
    for row in (-1, len(store), 10**12):
        with pytest.raises(OutOfRange, match=f"row {row} "):
            read(store, [0, row])


def test_chosen_and_renamed(case):
    store, expected = case
    name, *_, last = store.fields
    assert_same(read(choose_fields(store, {"new": last}), range(len(store))), {"new": expected[last]})
    both = choose_fields(store, {last: last, "new": name}) if last != name else choose_fields(store, {last: last})
    assert list(both.fields) == [last, "new"] or last == name
    assert_same({last: read(both, range(len(store)))[last]}, {last: expected[last]})


def test_converted_again(case):
    store, expected = case
    name = list(store.fields)[-1]
    again = cast_fields(store, {name: Cast(F8, 2.0, -1.0)})
    got = read(again, range(len(store)))
    assert got[name].dtype == F8
    assert np.allclose(got[name], expected[name].astype(F8) * 2 - 1, rtol=1e-3 if expected[name].dtype == F2 else 1e-6)
    others = [field for field in expected if field != name]
    assert_same({field: got[field] for field in others}, {field: expected[field] for field in others})


def test_pickled(case):
    store, expected = case
    again = pickle.loads(pickle.dumps(store))
    assert_same(read(again, range(len(again))), expected)
    assert again.fingerprint == store.fingerprint


def test_read_again_after_close(case):
    store, expected = case
    store.close()
    assert_same(read(store, range(len(store))), expected)


def test_origin_of_every_row(case):
    store, _ = case
    for row in range(len(store)):
        assert isinstance(store.origin(row), Origin)


# Fingerprints.


def test_fingerprints_tell_what_differs():
    a, b = MemoryStore(arrays()), MemoryStore(arrays(seed=1))
    stores = [
        a,
        b,
        Subset(a, range(5)),
        Subset(a, range(6)),
        Subset(a, np.array([0, 2])),
        Subset(a, np.array([2, 0])),
        Columns(a, {"x": "betas"}),
        Columns(a, {"y": "betas"}),
        Concat([a, b]),
        Concat([b, a]),
        Joined({"a": Part(a, None, {"x": "betas"})}),
        Joined({"a": Part(a, None, {"x": "image"})}),
        Joined({"a": Part(b, None, {"x": "betas"})}),
        Joined({"a": Part(a, np.arange(ROWS)[::-1].copy(), {"x": "betas"})}),
        Recast(a, {"label": Cast(F4)}),
        Recast(a, {"label": Cast(F8)}),
        Recast(a, {"label": Cast(F4, 2.0)}),
        Recast(a, {"label": Cast(F4, 1.0, 2.0)}),
        Mapped(a, doubled),
        Mapped(b, doubled),
        Mapped(a, shifted),
    ]
    prints = [store.fingerprint for store in stores]
    assert len(set(prints)) == len(prints)


def test_fingerprints_of_the_same_are_the_same():
    for make, _ in CASES.values():
        assert make(arrays()).fingerprint == make(arrays()).fingerprint


# Only what is wanted is read, and conversions go where the bytes are.


class Watched(MemoryStore):
    """Remembers which fields were asked for."""

    def __init__(self, values):
        super().__init__(values)
        self.asked = []

    def read_into(self, rows, at, out):
        self.asked.append(sorted(out))
        super().read_into(rows, at, out)


@pytest.mark.parametrize(
    "around",
    [
        lambda store: Subset(store, range(5)),
        lambda store: Concat([store]),
        lambda store: Joined({"a": Part(store, None, {name: name for name in store.fields})}),
        lambda store: Recast(store, {"image": HALF}),
        lambda store: Columns(store, {name: name for name in store.fields}),
    ],
    ids=["subset", "concat", "joined", "converted", "columns"],
)
def test_fields_left_out_are_not_read(around):
    inner = Watched(arrays())
    read(choose_fields(around(inner), {"x": "label"}), [0, 1])
    assert inner.asked == [["label"]]


def test_joined_parts_without_wanted_fields_are_not_touched():
    one, two = Watched(arrays()), Watched(arrays())
    joined = Joined({"one": Part(one, None, {"x": "betas"}), "two": Part(two, None, {"y": "label"})})
    read(joined, [0], ["x"])
    assert (one.asked, two.asked) == ([["betas"]], [])


def extent_store(tmp_path):
    path = tmp_path / "rows"
    values = np.arange(20, dtype=np.int16).reshape(10, 2)
    path.write_bytes(values.tobytes())
    return ExtentStore({"x": Contiguous(identify(str(path)), "x", values.dtype, (2,), 10, 0)}, Files()), values


def converts_in_a_second_pass(store):
    inside = [*getattr(store, "stores", ()), *(part.store for part in getattr(store, "parts", {}).values())]
    if hasattr(store, "store"):
        inside.append(store.store)
    return isinstance(store, Recast) or any(map(converts_in_a_second_pass, inside))


@pytest.mark.parametrize(
    "around",
    [
        lambda store: store,
        lambda store: Subset(store, range(10)),
        lambda store: Concat([store]),
        lambda store: Joined({"a": Part(store, None, {"x": "x"})}),
        lambda store: Columns(store, {"x": "x"}),
        lambda store: Subset(Concat([Columns(store, {"x": "x"})]), range(10)),
    ],
)
def test_conversions_travel_inwards(tmp_path, around):
    store, values = extent_store(tmp_path)
    converted = cast_fields(around(store), {"x": Cast(F4, 0.5)})
    assert not converts_in_a_second_pass(converted)
    assert np.array_equal(read(converted, range(10))["x"], values.astype(F4) * F4.type(0.5))


# Blocks.


class Blocked(MemoryStore):
    blocks = None

    def __init__(self, rows, block):
        super().__init__({"x": np.arange(rows)})
        self.blocks = np.arange(0, rows, block)


def test_blocks_of_stores_in_a_row():
    plain = MemoryStore({"x": np.arange(3)})
    assert Concat([plain, plain]).blocks is None
    assert Concat([Blocked(10, 4), plain, Blocked(4, 2)]).blocks.tolist() == [0, 4, 8, 10, 11, 12, 13, 15]


# Refusals.


def test_concat_refuses_fields_that_differ():
    one = MemoryStore(arrays())
    for changed, told in (
        ({**arrays(), "label": arrays()["label"].astype(np.int32)}, ["'label'", "int32", "int16"]),
        ({**arrays(), "betas": arrays()["betas"][:, :4]}, ["'betas'", "(4,)", "(5,)"]),
        ({"betas": arrays()["betas"], "label": arrays()["label"]}, ["'image'", "absent"]),
        ({**arrays(), "more": arrays()["label"]}, ["'more'", "absent"]),
    ):
        with pytest.raises(SchemaMismatch) as refused:
            Concat([one, one, MemoryStore(changed)])
        for text in told:
            assert text in str(refused.value)


def test_concat_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="nothing to concatenate"):
        Concat([])


def test_joined_parts_of_other_lengths_are_refused():
    with pytest.raises(SchemaMismatch, match=r"a has 3, b has 4.*\(dataset, rows\)"):
        Joined(
            {
                "a": Part(MemoryStore({"x": np.arange(3)}), None, {"x": "x"}),
                "b": Part(MemoryStore({"y": np.arange(4)}), None, {"y": "y"}),
            }
        )


@pytest.mark.parametrize("row", [-1, 3])
def test_joined_rows_that_are_not_there_are_refused(row):
    with pytest.raises(OutOfRange, match=f"join: a .*row {row} "):
        Joined({"a": Part(MemoryStore({"x": np.arange(3)}), np.array([0, row]), {"x": "x"})})


@pytest.mark.parametrize("rows", [range(24), range(-1, 3), np.array([0, 23]), np.array([-1])], ids=str)
def test_subsets_of_rows_that_are_not_there_are_refused(rows):
    with pytest.raises(OutOfRange):
        Subset(MemoryStore(arrays()), rows)
