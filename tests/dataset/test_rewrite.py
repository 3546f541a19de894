"""Trees of stores rewritten. Normalizing later, on a device, gives the same values to the last bit."""

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.dataset.dataset import Dataset
from penstock.dataset.rewrite import defer_normalizing, select_part
from penstock.dataset.second_pass import Cropped
from penstock.loader import runtime
from penstock.loader.loader import runtime_of
from penstock.loader.outputs import DeviceOutput
from penstock.loader.plan_text import ALONE
from penstock.read.part import row_part

ROWS, SHAPE, GROUPS = 60, (3, 7), 4


@pytest.fixture
def base():
    rng = np.random.default_rng(3)
    return ps.from_arrays(
        a=rng.integers(-3000, 3000, (ROWS, *SHAPE)).astype(np.int16),
        b=rng.normal(size=(ROWS, 5)).astype(np.float32),
        d=rng.normal(size=(ROWS, 5)),
    )


@pytest.fixture
def tables():
    rng = np.random.default_rng(4)
    spread = rng.uniform(1, 50, (GROUPS, *SHAPE)).astype(np.float32)
    spread[1, 2] = 0
    return rng.normal(size=(GROUPS, *SHAPE)).astype(np.float32), spread, rng.integers(0, GROUPS, ROWS)


NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NO_CUDA)])
def on_device(monkeypatch, request):
    """A loader with a device; the processor will do, as if it were one."""

    def load(ds, **options):
        if request.param == "cuda":
            return ps.Loader(ds, device="cuda", **options)
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "make_output", lambda *_: DeviceOutput(torch.device("cpu")))
            return ps.Loader(ds, **options)

    return load


def shifted(ds):
    """The same rows as other values, normalized by other tables."""
    stored = ds.store.store
    tables = np.full((2, *SHAPE), 3), np.full((2, *SHAPE), 7)
    return Dataset(stored).normalize("a", *tables, np.arange(ROWS) % 2, ds.fields["a"].dtype)


def request_of(loader):
    return runtime_of(loader).sources[ALONE].request


CASES = {
    "plain": lambda ds, other: ds,
    "chosen rows": lambda ds, other: ds.select(np.arange(0, ROWS, 3)[::-1].copy()).select(slice(2, 15)),
    "renamed": lambda ds, other: ds.only("b", "a").rename(a="b", b="a"),
    "joined": lambda ds, other: ps.join(x=(ds, np.arange(ROWS - 1, -1, -1)), y=other),
    "cast afterwards": lambda ds, other: ds.cast("a", "float64", scale=2, offset=1),
    "padded": lambda ds, other: ds.pad("a", to=5, value=9),
    "gathered": lambda ds, other: ds.gather(np.arange(ROWS).reshape(-1, 2), mean=True),
    "stacked": lambda ds, other: ds.gather(np.arange(ROWS).reshape(-1, 2)[:, ::-1].copy()),
    "stacked, some zeros": lambda ds, other: ds.gather(
        np.where(np.arange(ROWS) % 7, np.arange(ROWS), -1).reshape(-1, 2), absent="zeros"
    ),
    "put together": lambda ds, other: ps.concat([ds, ds]),
    "different tables put together": lambda ds, other: ps.concat([ds, shifted(ds), ds.select([3, 1])]),
    "padded and put together": lambda ds, other: ps.concat([ds.pad("a", to=5, value=9), shifted(ds).pad("a", to=5)]),
    "joined parts put together": lambda ds, other: ps.join(
        x=(ps.concat([ds, shifted(ds)]).select(slice(5, 100)), np.arange(ROWS)[::-1]), y=other
    ),
    "stacked from several": lambda ds, other: ps.concat([ds, shifted(ds)]).gather(
        np.arange(2 * ROWS).reshape(2, -1).T.copy()
    ),
    "several stacked": lambda ds, other: ps.concat(
        [each.gather(np.arange(ROWS).reshape(-1, 2)) for each in (ds, shifted(ds))]
    ),
    "cropped": lambda ds, other: ds.select_within("a", np.s_[1:, ::3]),
    "masked": lambda ds, other: ds.select_within("a", np.arange(21).reshape(SHAPE) % 4 == 1),
    "another field changed": lambda ds, other: Dataset(Cropped(ds.store, "b", row_part((5,), np.s_[1:4]))).pad(
        "d", to=8, value=4
    ),
    "permuted": lambda ds, other: ds.permute("a", 1, 0),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_values(base, tables, on_device, case, dtype):
    ds = CASES[case](base.normalize("a", *tables, dtype), ps.from_arrays(other=np.arange(ROWS)))
    options = {"batch_size": 7, "shuffle": True, "seed": 5, "memory": "64MiB"}
    there = [dict(batch) for batch in on_device(ds, **options)]
    here = [dict(batch) for batch in ps.Loader(ds, **options)]
    assert len(there) == len(here)
    for one, other in zip(there, here, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == other[name].dtype
            assert torch.equal(one[name].cpu(), other[name])


@pytest.mark.parametrize(
    ("case", "field"),
    [
        ("plain", "a"),
        ("chosen rows", "a"),
        ("renamed", "b"),
        ("joined", "x.a"),
        ("permuted", "a"),
        ("stacked", "a"),
        ("padded", "a"),
        ("put together", "a"),
        ("different tables put together", "a"),
        ("padded and put together", "a"),
        ("joined parts put together", "x.a"),
        ("stacked from several", "a"),
        ("several stacked", "a"),
        ("cropped", "a"),
        ("masked", "a"),
        ("another field changed", "a"),
    ],
)
def test_slots_hold_rows_as_stored(base, tables, on_device, case, field):
    ds = CASES[case](base.normalize("a", *tables), ps.from_arrays(other=np.arange(ROWS)))
    loader = on_device(ds, batch_size=7, memory="64MiB")
    assert request_of(loader).fields[field].dtype == np.int16
    assert request_of(loader).index_bytes == request_of(ps.Loader(ds, batch_size=7, memory="64MiB")).index_bytes


def test_what_would_be_more_to_copy_is_normalized_before(base, on_device):
    ds = base.normalize("d", np.zeros(5), np.ones(5))
    assert request_of(on_device(ds, batch_size=7, memory="64MiB")).fields["d"].dtype == np.float32


def test_two_in_a_row(base, tables, on_device):
    ds = (
        base.normalize("a", *tables)
        .normalize("a", np.full(SHAPE, 0.5), np.full(SHAPE, 3))
        .normalize("b", *np.ones((2, 5)))
    )
    loader = on_device(ds, batch_size=60, memory="64MiB")
    assert {name: str(spec.dtype) for name, spec in request_of(loader).fields.items()} == {
        "a": "float32", "b": "float32", "d": "float64",
    }  # fmt: skip
    (there,), (here,) = loader, ps.Loader(ds, batch_size=60, memory="64MiB")
    assert all(torch.equal(there[name].cpu(), here[name]) for name in here)


def test_samples_left_out(base, tables, on_device):
    data = base.normalize("b", np.zeros(5), np.ones(5)).normalize("a", *tables)
    broken = ps.from_arrays(b=np.where(np.arange(ROWS)[:, None] % 5 == 2, np.nan, 1.0), n=np.arange(ROWS))
    ds = ps.join(a=data.only("a"), y=broken)
    loader = on_device(ds, batch_size=7, memory="64MiB", on_error="skip", nan="raise")
    seen = 0
    for batch in loader:
        rows = batch["y.n"].cpu().numpy()
        assert torch.equal(batch["a"].cpu(), torch.from_numpy(data[rows]["a"]))
        seen += len(rows)
    assert seen == ROWS - 12


# The rewrite alone: what is left for later, and the rows without it.


def finished(store, steps, rows):
    """The rows of a store, normalized as a device would."""
    out = {name: spec.empty(len(rows)) for name, spec in store.fields.items()}
    store.read_into(rows, np.arange(len(rows)), out)
    for name, step in steps.items():
        groups = step.groups(rows)
        values = out[name].astype(np.float32).reshape(*groups.shape, -1)
        values = (values - step.mean[groups]) * step.factor[groups]
        out[name] = values.reshape(out[name].shape).astype(step.dtype)
    return out


@pytest.mark.parametrize("case", CASES)
def test_what_is_left_for_later_is_all_that_is_missing(base, tables, case):
    ds = CASES[case](base.normalize("a", *tables), ps.from_arrays(other=np.arange(ROWS)))
    store, steps = defer_normalizing(ds.store)
    rows = np.random.default_rng(1).integers(0, len(ds), 40)
    expected = {name: spec.empty(len(rows)) for name, spec in ds.store.fields.items()}
    ds.store.read_into(rows, np.arange(len(rows)), expected)
    found = finished(store, steps, rows)
    assert bool(steps) == (case not in ("gathered", "stacked, some zeros"))
    for name in expected:
        assert np.array_equal(found[name], expected[name], equal_nan=True), name


def test_a_field_that_only_some_files_normalize_stays_as_it_is(base, tables):
    plain = base.cast("a", "float32")
    ds = ps.concat([base.normalize("a", *tables).normalize("b", np.zeros(5), np.ones(5)), plain])
    store, steps = defer_normalizing(ds.store)
    assert not steps
    assert store.fields == ds.store.fields


def test_of_two_fields_the_one_that_all_files_normalize_is_left_for_later(base, tables):
    both = base.normalize("a", *tables).normalize("b", np.zeros(5), np.ones(5))
    ds = ps.concat([both, base.normalize("a", *tables)])
    store, steps = defer_normalizing(ds.store)
    assert set(steps) == {"a"}
    rows = np.arange(len(ds))
    assert all(np.array_equal(values, ds[:][name]) for name, values in finished(store, steps, rows).items())


def test_files_with_the_same_tables_have_them_once(base, tables):
    one = base.normalize("a", *tables)
    _, steps = defer_normalizing(ps.concat([one, one.select(slice(0, 10)), one]).store)
    assert steps["a"].mean is one.store.mean


def test_a_fill_that_single_precision_lacks_is_not_left_for_later(base, tables):
    ds = base.normalize("a", *tables, "float64")
    assert set(defer_normalizing(ds.pad("a", to=5, value=0.5).store)[1]) == {"a"}
    assert not defer_normalizing(ds.pad("a", to=5, value=0.1).store)[1]


@pytest.mark.parametrize(
    "around",
    [
        lambda ds: ps.concat([ds, ds]),
        lambda ds: ds.select([3, 1]),
        lambda ds: ds.rename(z="b"),
        lambda ds: ds.pad("b", to=9),
    ],
    ids=["concat", "select", "rename", "pad"],
)
def test_a_part_is_selected_below_every_combination(tmp_path, around):
    np.save(tmp_path / "a.npy", np.arange(24.0).reshape(4, 6))
    ds = around(ps.join(a=ps.open(tmp_path / "a.npy"), b=np.zeros((4, 2))))
    store = select_part(ds.store, "a", row_part((6,), np.s_[1:3]))

    def classes(each):
        return {type(each)}.union(*map(classes, each.children))

    assert Cropped not in classes(store)
    out = {"a": np.zeros((2, 2))}
    store.read_into(np.array([1, 0]), np.arange(2), out)
    assert np.array_equal(out["a"], ds[[1, 0]]["a"][:, 1:3])
