"""What a user holds: every way of asking for rows, and every method, compared with plain arrays."""

import gc
import os
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import penstock as ps
from penstock.errors import ConfigError, Missing, OutOfRange, SchemaMismatch, TransformFailed
from penstock.formats import paths
from penstock.formats.paths import _natural_key

ROWS = 31
MASK = np.arange(ROWS) % 3 == 1


def arrays(rows=ROWS, seed=0):
    chance = np.random.default_rng(seed)
    return {
        "betas": chance.standard_normal((rows, 5)).astype(np.float32),
        "image": chance.integers(0, 256, (rows, 60, 70, 9), np.uint8),  # large enough to be read row by row
        "label": chance.integers(-100, 100, rows).astype(np.int16),
    }


def in_memory(values, folder):
    return ps.from_arrays(**values)


def in_files(values, folder):
    """One .npy file a field, joined."""
    parts = {}
    for name, array in values.items():
        path = folder / f"{name}{len(os.listdir(folder))}.npy"
        np.save(path, array)
        parts[name] = ps.open(path)
    return ps.join(**parts)


@pytest.fixture(params=[in_memory, in_files], ids=["memory", "files"])
def make(request, tmp_path):
    return lambda values: request.param(values, tmp_path)


@pytest.fixture
def ds(make):
    return make(arrays())


def assert_same(got, expected):
    assert list(got) == list(expected)
    for name, values in expected.items():
        assert np.asarray(got[name]).dtype == values.dtype, name
        assert np.array_equal(got[name], values), name


def assert_holds(ds, expected):
    """The dataset holds these arrays, however it is asked."""
    length = len(next(iter(expected.values())))
    assert len(ds) == length
    assert [(name, spec.dtype, spec.shape) for name, spec in ds.fields.items()] == [
        (name, array.dtype, array.shape[1:]) for name, array in expected.items()
    ]
    assert_same(ds[:], expected)
    for row in {0, length // 2, length - 1} if length else ():
        assert_same(ds[row], {name: array[row] for name, array in expected.items()})
    backwards = list(range(length))[::-1]
    assert_same(ds[backwards], {name: array[::-1] for name, array in expected.items()})


def taken(values, rows):
    return {name: array[rows] for name, array in values.items()}


# Asking for rows.


def test_holds_what_was_given(ds):
    assert_holds(ds, arrays())


@pytest.mark.parametrize("index", [0, 5, ROWS - 1, -1, -ROWS, np.int64(3), np.uint8(4), np.int16(-2)], ids=repr)
def test_one_row(ds, index):
    sample = ds[index]
    assert_same(sample, taken(arrays(), int(index)))
    assert sample["label"].shape == ()


INDICES = {
    "list": [7, 3, 7],
    "negative": [-1, 0, -31],
    "tuple": (1, 2),
    "array": np.array([30, 0]),
    "uint8 array": np.array([30, 0], np.uint8),
    "range": range(4, 20, 3),
    "empty": [],
    "empty array": np.array([], np.int64),
    "mask": MASK,
    "mask as list": MASK.tolist(),
    "slice": slice(10, 20),
    "stepped": slice(2, None, 7),
    "backwards": slice(None, None, -1),
    "beyond the end": slice(25, 1000),
    "nothing": slice(5, 5),
    "from the end": slice(-3, None),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_many_rows(ds, index):
    if isinstance(index, slice):
        expected = taken(arrays(), index)
    else:
        rows = np.asarray(index)
        expected = taken(arrays(), rows if rows.size else rows.astype(np.int64))
    assert_same(ds[index], expected)


@pytest.mark.parametrize(
    "index",
    [ROWS, -ROWS - 1, 10**9, [0, ROWS], [-ROWS - 1], np.array([2**63 - 1]), np.array([2**64 - 1], np.uint64)],
    ids=repr,
)
def test_rows_that_are_not_there(ds, index):
    with pytest.raises(OutOfRange, match="out of range: the dataset has 31 rows, 0 to 30"):
        ds[index]
    with pytest.raises(IndexError):
        ds[index]


def test_a_field_is_no_sample(ds):
    with pytest.raises(ConfigError, match=r"ds\['betas'\]: that is a field, not a sample; ds\[rows\]\['betas'\]"):
        ds["betas"]
    with pytest.raises(Missing, match="no sample 'nobody' among 31"):
        ds["nobody"]


@pytest.mark.parametrize("index", [1.5, [1.5], None, [[1, 2]], MASK[:-1], ["a"], {}], ids=str)
def test_what_is_no_row(ds, index):
    with pytest.raises(ConfigError, match="rows must be whole numbers, a slice, or 31 booleans"):
        ds[index]


def test_iteration_gives_every_sample(ds):
    samples = list(ds)
    assert len(samples) == ROWS
    for row, sample in enumerate(samples):
        assert_same(sample, taken(arrays(), row))


def test_many_samples_in_one_read(ds):
    samples = ds.__getitems__([3, 1, 3])
    assert [type(sample) for sample in samples] == [dict, dict, dict]
    for row, sample in zip([3, 1, 3], samples, strict=True):
        assert_same(sample, taken(arrays(), row))


def test_what_is_returned_is_the_callers(ds):
    first = ds[:]
    for array in first.values():
        array[:] = 0
    assert_holds(ds, arrays())


def test_shown_with_its_rows_and_fields(ds):
    text = repr(ds)
    for told in ("31 rows", "betas: float32 (5,)", "label: int16", "MiB"):
        assert told in text


# Choosing rows.

SELECTIONS = {
    **{name: index for name, index in INDICES.items() if name not in ("tuple",)},
    "all": slice(None),
    "range backwards": range(30, -1, -5),
    "range from the end": range(-3, 0),
    "range of a giant step": range(4, 20, 2**70),
    "slice of a giant step": slice(4, None, 2**70),
}


@pytest.mark.parametrize("rows", SELECTIONS.values(), ids=SELECTIONS)
def test_selected(ds, rows):
    wanted = rows if isinstance(rows, slice) else np.asarray(rows)
    if isinstance(wanted, np.ndarray) and not wanted.size:
        wanted = wanted.astype(np.int64)
    assert_holds(ds.select(rows), taken(arrays(), wanted))


def test_selected_from_what_was_selected(ds):
    nested = (
        ds.select(slice(1, None, 2)).select([-1, 0, 3, 3]).select(range(1, 4)).select(np.array([True, False, True]))
    )
    expected = taken(arrays(), np.arange(1, ROWS, 2))
    expected = taken(taken(taken(expected, [-1, 0, 3, 3]), slice(1, 4)), [0, 2])
    assert_holds(nested, expected)


@pytest.mark.parametrize("rows", [[ROWS], [-ROWS - 1], range(ROWS + 1), range(5, 50, 44)], ids=str)
def test_selecting_rows_that_are_not_there(ds, rows):
    with pytest.raises(OutOfRange, match="out of range"):
        ds.select(rows)


@pytest.mark.parametrize("rows", [3, "betas", [0.5], MASK[:-1]], ids=str)
def test_selecting_what_is_no_row(ds, rows):
    with pytest.raises(ConfigError, match="31 booleans"):
        ds.select(rows)


def test_selecting_leaves_the_original_alone(ds):
    ds.select([1])
    assert_holds(ds, arrays())


# One after another.


def test_concatenated(make):
    parts = [arrays(5, seed=1), arrays(1, seed=2), arrays(9, seed=3)]
    whole = ps.concat(make(part) for part in parts)
    assert_holds(whole, {name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def test_concatenated_with_itself_and_selected(ds):
    both = ps.concat([ds, ds.select(slice(None, None, -1))]).select([0, -1, 30, 31])
    assert_holds(both, taken(arrays(), [0, 0, 30, 30]))


def test_concatenated_conversions_are_kept(make):
    one, two = make(arrays(4, seed=1)), make(arrays(4, seed=2))
    for first, second in (
        (one.cast("label", "f4", 0.5), two.cast("label", "f4", 0.5)),
        (one.cast("label", "f4", 0.5), two.cast("label", "f4", 2.0)),
    ):
        expected = {name: np.concatenate([first[:][name], second[:][name]]) for name in first.fields}
        assert_holds(ps.concat([first, second]), expected)


def test_concatenated_when_only_the_conversions_agree(make):
    """Stored as different types, delivered as the same: their fields agree."""
    one = make({"x": np.arange(3, dtype=np.int16)}).cast("x", "float32")
    two = make({"x": np.arange(4, dtype=np.uint8)}).cast("x", "float32")
    assert_holds(ps.concat([one, two]), {"x": np.array([0, 1, 2, 0, 1, 2, 3], np.float32)})


def test_concatenating_what_does_not_fit(make):
    with pytest.raises(SchemaMismatch, match=r"'x' is float64, but in .* it is int64"):
        ps.concat([make({"x": np.arange(3)}), make({"x": np.arange(3.0)})])
    with pytest.raises(ConfigError, match="nothing to concatenate"):
        ps.concat([])


def test_what_does_not_fit_is_named_though_it_is_in_memory():
    with pytest.raises(SchemaMismatch) as refused:
        ps.concat([ps.from_arrays(x=np.arange(3)), ps.from_arrays(x=np.arange(3.0))])
    assert not str(refused.value).startswith(":"), "says which dataset, not an empty file name"


# Side by side.


def test_joined(make):
    images, words = make({"pixels": arrays()["image"]}), make({"a": np.arange(8), "b": np.arange(8.0)})
    image_rows, word_rows = [3, 3, 0, -1], np.array([7, 0, 0, 1])
    joined = ps.join(image=(images, image_rows), word=(words, word_rows), label=np.array([1, 0, 1, 0], np.int8))
    assert_holds(
        joined,
        {
            "image": arrays()["image"][image_rows],
            "word.a": np.arange(8)[word_rows],
            "word.b": np.arange(8.0)[word_rows],
            "label": np.array([1, 0, 1, 0], np.int8),
        },
    )


def test_joined_with_lists_masks_and_itself(ds):
    joined = ps.join(all=(ds, MASK), number=list(range(MASK.sum())))
    expected = {f"all.{name}": array[MASK] for name, array in arrays().items()}
    assert_holds(joined, {**expected, "number": np.arange(MASK.sum())})
    assert_holds(ps.join(x=ds.only("label"), y=ds.only("label")), {"x": arrays()["label"], "y": arrays()["label"]})


def test_joined_array_with_rows():
    assert_holds(ps.join(x=(np.arange(5.0), [4, 4])), {"x": np.array([4.0, 4.0])})


def test_joined_conversions_are_kept(ds):
    joined = ps.join(one=ds.only("label").cast("label", "f8", 2), two=ds.only("label"), all=ds.cast("label", "f4"))
    assert joined[3]["one"] == arrays()["label"][3] * 2
    assert joined.fields["two"].dtype == np.int16
    assert joined.fields["all.label"].dtype == np.float32


REFUSED_JOINS = [
    (lambda ds: ps.join(), ConfigError, "nothing to join"),
    (lambda ds: ps.join(a=ds, b=np.arange(3)), SchemaMismatch, "a has 31, b has 3"),
    (lambda ds: ps.join(a=(ds, [0, 31])), OutOfRange, "join: a: row 31"),
    (lambda ds: ps.join(a=(ds, [0.5])), ConfigError, "join: a: rows must be"),
    (lambda ds: ps.join(a=ds, b=np.array(["x", None] * 20, object)[:31]), SchemaMismatch, "'b' is object"),
    (lambda ds: ps.join(a=(ds, [0], [1])), ConfigError, "a"),
]


@pytest.mark.parametrize(("make_join", "kind", "told"), REFUSED_JOINS)
def test_joining_what_does_not_fit(ds, make_join, kind, told):
    with pytest.raises(kind, match=told):
        make_join(ds)


# Fields.


def test_renamed(ds):
    expected = arrays()
    assert_holds(
        ds.rename(voxels="betas"),
        {"voxels": expected["betas"], "image": expected["image"], "label": expected["label"]},
    )
    swapped = ds.rename(label="betas", betas="label")
    assert_holds(swapped, {"label": expected["betas"], "image": expected["image"], "betas": expected["label"]})
    assert_holds(swapped.rename(label="betas", betas="label"), expected)
    assert_holds(ds.rename(), expected)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ({"x": "nope"}, "no field 'nope': the dataset has 'betas', 'image', 'label'"),
        ({"label": "betas"}, "two fields would have the same name"),
        ({"x": "betas", "y": "betas"}, "betas"),
    ],
)
def test_renaming_what_cannot_be(ds, names, told):
    with pytest.raises(ConfigError, match=told):
        ds.rename(**names)


def test_only_some_fields(ds):
    expected = arrays()
    assert_holds(ds.only("label"), {"label": expected["label"]})
    assert_holds(ds.only("label", "betas"), {"label": expected["label"], "betas": expected["betas"]})
    assert_holds(ds.rename(x="betas").only("x"), {"x": expected["betas"]})
    assert_holds(ds.only("label").select([1, 1]), {"label": expected["label"][[1, 1]]})
    assert_holds(ds.select([2]).only("label", "betas"), {name: expected[name][[2]] for name in ("label", "betas")})


def test_only_what_is_not_there(ds):
    with pytest.raises(ConfigError, match="no field 'nope': the dataset has 'betas'"):
        ds.only("label", "nope")


def test_only_nothing(ds):
    with pytest.raises(ConfigError):
        ds.only()


# Conversions.


def test_converted(ds):
    image = arrays()["image"].astype(np.float32) * np.float32(1 / 255) + np.float32(-0.5)
    assert_holds(ds.cast("image", "float32", 1 / 255, -0.5), {**arrays(), "image": image})
    assert_holds(ds.cast("label", np.float64), {**arrays(), "label": arrays()["label"].astype(np.float64)})
    assert_holds(ds.cast("label", "i4"), {**arrays(), "label": arrays()["label"].astype(np.int32)})
    assert_holds(ds.cast("label", "complex64", 2.0), {**arrays(), "label": arrays()["label"].astype("c8") * 2})


def test_converted_to_half_precision_rounds_once(ds):
    single = arrays()["image"].astype(np.float32) * np.float32(1 / 255)
    assert_holds(ds.cast("image", "f2", 1 / 255), {**arrays(), "image": single.astype(np.float16)})


def test_converted_before_and_after_everything_else(ds):
    label = arrays()["label"].astype(np.float32) * np.float32(0.5)
    expected = {**arrays(), "label": label}
    early, late = ds.cast("label", "f4", 0.5), lambda made: made.cast("label", "f4", 0.5)
    rows = [5, 0, 5]
    assert_holds(early.select(rows), taken(expected, rows))
    assert_holds(late(ds.select(rows)), taken(expected, rows))
    assert_holds(early.rename(y="label").only("y"), {"y": label})
    assert_holds(ds.rename(y="label").cast("y", "f4", 0.5).only("y"), {"y": label})
    assert_holds(late(ps.concat([ds, ds])).only("label"), {"label": np.concatenate([label, label])})


# Factors that a float holds exactly, so that one conversion equals two.
CHAINS = [
    [("f4", 0.5, 0.0), ("f4", 4.0, 1.0)],
    [("f4", 0.5, 1.0), ("f8", 2.0, -3.0), ("f4", 0.25, 0.0)],
    [("f8", 1.0, 0.0), ("f4", 1.0, 0.0)],
    [("i4", 1.0, 0.0), ("f4", 0.5, 0.0)],
    [("i8", 1.0, 0.0), ("i4", 1.0, 0.0), ("f8", 1.0, 0.5)],
    # what the first conversion loses stays lost
    [("i1", 1.0, 0.0), ("f4", 1.0, 0.0)],
    [("u1", 1.0, 0.0), ("f4", 1.0, 0.0)],
    [("?", 1.0, 0.0), ("f4", 1.0, 0.0)],
    [("f4", 0.5, 0.0), ("i2", 1.0, 0.0), ("f4", 1.0, 0.0)],
    [("f4", 0.5, 0.25), ("i4", 1.0, 0.0)],
]


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_converted_again_and_again(make, chain):
    values = np.arange(-300, 300, dtype=np.int16)
    ds, expected = make({"x": values, "y": values}), values
    for dtype, scale, offset in chain:
        ds = ds.cast("x", dtype, scale, offset)
        expected = expected.astype(dtype)
        if (scale, offset) != (1, 0):
            expected = expected * expected.dtype.type(scale) + expected.dtype.type(offset)
    assert_holds(ds, {"x": expected, "y": values})


REFUSED_CASTS = [
    (("nope", "f4"), {}, "no field 'nope'"),
    (("label", "flot32"), {}, "'flot32'"),
    (("label", "i4"), {"scale": 0.5}, "scaling into whole numbers would round"),
    (("label", "u1"), {"offset": 1}, "scaling into whole numbers would round"),
    (("label", "f4"), {"scale": "half"}, "scale"),
    (("label", "f4"), {"scale": None}, "scale"),
    (("label", object), {}, "object"),
    (("label", "U5"), {}, "U5"),
    (("label", "i4,f4"), {}, "f4"),
]


@pytest.mark.parametrize(("given", "options", "told"), REFUSED_CASTS, ids=str)
def test_conversions_that_cannot_be_meant(ds, given, options, told):
    with pytest.raises(ConfigError, match=told):
        ds.cast(*given, **options)


# Functions.


def doubled(batch):
    return {"twice": batch["betas"] * 2, "label": batch["label"]}


def never_thirteen(batch):
    if (batch["number"] == 13).any():
        raise ArithmeticError("thirteen is unlucky")
    return batch


def wider_at_thirteen(batch):
    return {"x": np.zeros((len(batch["number"]), 3 if (batch["number"] == 13).any() else 2))}


def test_mapped(ds):
    assert_holds(ds.map(doubled), {"twice": arrays()["betas"] * 2, "label": arrays()["label"]})
    assert_holds(ds.select([4, 2]).map(doubled).select([1]), taken(doubled(arrays()), [2]))


def test_mapped_after_a_conversion_sees_what_is_delivered(ds):
    mapped = ds.cast("label", "f8", 0.5).only("label").map(lambda batch: {"x": batch["label"] + 1})
    assert_holds(mapped, {"x": arrays()["label"] * 0.5 + 1})
    assert_holds(mapped.cast("x", "f4"), {"x": (arrays()["label"] * 0.5 + 1).astype(np.float32)})


def test_a_function_that_raises_is_named_with_its_rows(make):
    ds = make({"number": np.arange(20)}).map(never_thirteen)
    assert ds[[11, 12]]["number"].tolist() == [11, 12]
    with pytest.raises(TransformFailed) as failed:
        ds[10:15]
    for told in ("never_thirteen", "ArithmeticError", "thirteen is unlucky", "10, 11, 12, 13"):
        assert told in str(failed.value)


def test_output_that_changes_shape_is_refused(make):
    ds = make({"number": np.arange(20)}).map(wider_at_thirteen)
    assert ds.fields["x"].shape == (2,)
    assert ds[[12, 14]]["x"].shape == (2, 2)
    with pytest.raises(
        SchemaMismatch, match=r"wider_at_thirteen returned 'x' as float64 \(1, 3\).*promised float64 \(1, 2\)"
    ):
        ds[13]


# From files.


def test_files_of_a_pattern_come_in_natural_order(tmp_path):
    for session in (10, 2, 1, 33):
        np.save(tmp_path / f"session{session}.npy", np.full(2, session))
    opened = ps.open(str(tmp_path / "session*.npy"))
    assert opened[:]["data"].tolist() == [1, 1, 2, 2, 10, 10, 33, 33]
    given = ps.open([tmp_path / "session33.npy", str(tmp_path / "session1*.npy")])
    assert given[:]["data"].tolist() == [33, 33, 1, 1, 10, 10]


@pytest.mark.parametrize(
    ("one", "other"), [("s2", "s10"), ("s2b", "s10a"), ("a1", "b0"), ("2", "a"), ("x9y10", "x9y11"), ("s٢", "s10")]
)
def test_natural_order(one, other):
    assert sorted([other, one], key=_natural_key) == [one, other]


def test_names_with_signs_of_a_pattern_are_names_first(tmp_path):
    np.save(tmp_path / "a[1].npy", np.arange(3))
    np.save(tmp_path / "a1.npy", np.arange(4))
    assert len(ps.open(tmp_path / "a[1].npy")) == 3


def test_origin_names_file_and_place(tmp_path):
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.arange(4))
    ds = ps.concat([ps.open(tmp_path / "a.npy"), ps.open(tmp_path / "b.npy")]).select([6, 0])
    assert (ds.origin(0).url, ds.origin(0).key) == (str(tmp_path / "b.npy"), "[2]")
    assert ds.origin(-1).url == str(tmp_path / "a.npy")
    with pytest.raises(OutOfRange):
        ds.origin(2)


def test_fields_may_be_named_on_opening(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(4))
    assert list(ps.open(tmp_path / "a.npy", fields=["x"]).fields) == ["x"]
    with pytest.raises(ConfigError, match=r"a\.npy.*one field"):
        ps.open(tmp_path / "a.npy", fields=("x", "y"))
    with pytest.raises(Missing, match="list of paths is empty"):
        ps.open([])


def test_fields_as_one_text_are_one_field_or_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(4))
    with pytest.raises(ConfigError, match=r"fields='data'.*\('data',\)"):
        ps.open(tmp_path / "a.npy", fields="data")


def test_read_again_after_close(ds):
    ds[0]
    ds.close()
    assert_holds(ds, arrays())


def open_files(folder):
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(link) and os.readlink(link).startswith(str(folder)) for link in links)


PROC = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")


@PROC
def test_a_dataset_that_is_gone_keeps_no_files_open(tmp_path):
    for _ in range(5):
        ds = in_files(arrays(), tmp_path)
        ds[0]
        assert open_files(tmp_path) > 0
        del ds
        gc.collect()
        assert open_files(tmp_path) == 0


@PROC
@pytest.mark.parametrize("max_open_files", [0, 1, 2])
def test_few_files_stay_open(tmp_path, max_open_files):
    for number in range(6):
        np.save(tmp_path / f"{number}.npy", np.full((2, 3), number))
    ds = ps.open(str(tmp_path / "*.npy"), max_open_files=max_open_files)
    assert ds[::-1]["data"][:, 0].tolist() == [5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0]
    assert open_files(tmp_path) <= max_open_files
    ds.close()


# Other processes.


def composed(make):
    """Something of everything that pickles without our help."""
    ds = make(arrays())
    table = ps.join(all=(ds, [5, 5, *range(20)]), number=np.arange(22))
    return ps.concat([table, table.select(slice(None, None, 3))]).cast("all.image", "f4", 1 / 255).rename(n="number")


def test_pickled(make):
    whole = composed(make)
    again = pickle.loads(pickle.dumps(whole))
    assert again.fingerprint == whole.fingerprint
    assert_holds(again, whole[:])
    mapped = pickle.loads(pickle.dumps(make(arrays()).map(doubled)))
    assert_holds(mapped, doubled(arrays()))


def test_fingerprint_follows_the_data_and_not_the_place(tmp_path):
    for folder in ("one", "two"):
        os.mkdir(tmp_path / folder)
        np.save(tmp_path / folder / "a.npy", np.arange(5))
    one, two = ps.open(tmp_path / "one" / "a.npy"), ps.open(tmp_path / "two" / "a.npy")
    assert one.fingerprint == two.fingerprint
    different = [
        one,
        one.select([0]),
        one.select([1]),
        one.cast("data", "f4"),
        one.rename(x="data"),
        ps.concat([one, one]),
    ]
    assert len({each.fingerprint for each in different}) == len(different)


WORKERS = [
    pytest.param(0, None, id="none"),
    pytest.param(2, "fork", id="fork", marks=pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")),
    pytest.param(2, "spawn", id="spawn", marks=pytest.mark.slow),
]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(("workers", "context"), WORKERS)
def test_torch_reads_it_with_workers(tmp_path, workers, context):
    whole = composed(lambda values: in_files(values, tmp_path))
    expected = whole[:]  # files are open when workers fork
    loader = DataLoader(whole, batch_size=4, num_workers=workers, multiprocessing_context=context)
    batches = list(loader)
    assert [len(batch["n"]) for batch in batches] == [4] * 7 + [2]
    for name, values in expected.items():
        got = torch.cat([batch[name] for batch in batches]).numpy()
        assert got.dtype == values.dtype
        assert np.array_equal(got, values), name


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_errors_cross_from_torch_workers(make):
    ds = make({"number": np.arange(20)}).map(never_thirteen)
    batches = iter(DataLoader(ds, batch_size=4, num_workers=1, multiprocessing_context="fork"))
    assert [next(batches)["number"].tolist() for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    with pytest.raises(TransformFailed, match="thirteen is unlucky"):
        next(batches)


def test_braces_in_names(tmp_path, monkeypatch):
    for number in range(8, 12):
        np.save(tmp_path / f"part{number:02d}.npy", np.full((2, 3), number))
    values = [8, 8, 9, 9, 10, 10]
    assert ps.open(tmp_path / "part{08..10}.npy")[:]["data"][:, 0].tolist() == values
    assert ps.open(str(tmp_path / "part{08,09,10}.np{y,}*"))[:]["data"][:2, 0].tolist() == values[:2]
    with pytest.raises(Missing, match=r"part12\.npy"):
        ps.open(tmp_path / "part{11..12}.npy")
    monkeypatch.setattr(paths, "MOST_FILES", 1000)
    with pytest.raises(ConfigError, match="more than 1,000 files"):
        ps.open(tmp_path / "part{1..99999999}.npy")


def test_braces_that_belong_to_the_name(tmp_path):
    np.save(tmp_path / "{a}.npy", np.zeros((2, 3)))
    assert len(ps.open(tmp_path / "{a}.npy")) == 2
    with pytest.raises(Missing, match=r"no such file"):
        ps.open(tmp_path / "{b}.npy")


def test_axes_in_another_order(tmp_path):
    values = np.arange(2 * 3 * 4 * 5, dtype=np.int16).reshape(2, 3, 4, 5)
    np.save(tmp_path / "a.npy", values)
    ds = ps.open(tmp_path / "a.npy").permute("data", 2, 0, 1)
    expected = values.transpose(0, 3, 1, 2)
    assert ds.fields["data"].shape == (5, 3, 4)
    assert np.array_equal(ds[[1, 0]]["data"], expected[[1, 0]])
    assert np.array_equal(ds.permute("data", 1, 2, 0)[:]["data"], values), "back again"
    made = [
        ds.cast("data", "float32", scale=2),
        ds.rename(x="data").rename(data="x").cast("data", "float32", scale=2),
        ps.join(data=ds.cast("data", "float32", scale=2)),
        ps.concat([ds, ds]).select([2, 1]).cast("data", "float32", scale=2),
        ds.map(lambda batch: {"data": batch["data"].astype(np.float32) * 2}),
    ]
    for each in made:
        for output in ("numpy", "torch"):
            with ps.Loader(each, batch_size=2, memory="64MiB", output=output) as loader:
                (batch,) = loader
            assert np.array_equal(np.asarray(batch["data"]), 2 * expected)
        assert np.array_equal(each[:]["data"], 2 * expected)
    assert ds.fingerprint != ps.open(tmp_path / "a.npy").fingerprint


@pytest.mark.parametrize("axes", [(0, 1), (0, 1, 1), (1, 2, 3), ()])
def test_axes_that_are_not_there(tmp_path, axes):
    np.save(tmp_path / "a.npy", np.zeros((2, 3, 4, 5)))
    with pytest.raises(ConfigError, match="expected each of the 3 axes"):
        ps.open(tmp_path / "a.npy").permute("data", *axes)


def test_select_within_comes_before_permute(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 3, 4, 5)))
    with pytest.raises(ConfigError, match="select first, then permute"):
        ps.open(tmp_path / "a.npy").permute("data", 2, 0, 1).select_within("data", 0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_dividing_is_not_multiplying_by_the_inverse(tmp_path, dtype):
    values = np.arange(256, dtype=np.uint8).reshape(1, 256)
    np.save(tmp_path / "a.npy", values)
    got = ps.open(tmp_path / "a.npy").cast("data", dtype, divisor=255)[:]["data"]
    exact = np.float64 if dtype == "float64" else np.float32
    assert np.array_equal(got, (values.astype(exact) / exact(255)).astype(dtype))
    with pytest.raises(ConfigError, match="divisor=0"):
        ps.open(tmp_path / "a.npy").cast("data", dtype, divisor=0)


def test_a_folder_of_data_files_says_how_to_name_them(tmp_path):
    for name in ("a.h5", "b.h5", "c.npy", "d.tar.gz", "notes.txt", ".hidden.h5"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError) as refused:
        ps.open(tmp_path)
    suggested = [
        f"{str(tmp_path / pattern)!r} ({count})" for pattern, count in (("*.h5", 2), ("*.npy", 1), ("*.tar.gz", 1))
    ]
    told = str(refused.value)
    assert f"for example {suggested[0]}, or " in told
    assert all(pattern in told for pattern in suggested)


# Codecs.


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"compressors": None}, ""),
        ({"compressors": "gzip"}, "gzip"),
        ({"compressors": "gzip", "shards": (4, 4)}, "gzip"),
    ],
    ids=["uncompressed", "gzip", "gzip in shards"],
)
def test_stats_name_the_codecs_that_chunks_were_written_with(tmp_path, options, expected):
    zarr = pytest.importorskip("zarr", minversion="3")
    if options["compressors"] == "gzip":
        options = {**options, "compressors": zarr.codecs.GzipCodec()}
    array = zarr.create_array(tmp_path / "x.zarr", shape=(8, 4), chunks=(2, 4), dtype="i4", **options)
    array[:] = np.arange(32).reshape(8, 4)
    with ps.Loader(ps.open(tmp_path / "x.zarr"), batch_size=4, memory="64MiB", output="numpy") as loader:
        assert sum(len(next(iter(batch.values()))) for batch in loader) == 8
        assert loader.stats().codecs == expected
