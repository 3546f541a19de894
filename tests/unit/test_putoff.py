"""Normalizing on a device gives what normalizing on the way into the batch gives, to the last bit."""

import numpy as np
import pytest
import torch

import penstock as ps
from penstock import loader as loaders
from penstock.face import DeviceFace

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
            patch.setattr(loaders, "make_face", lambda *_: DeviceFace(torch.device("cpu")))
            return ps.Loader(ds, **options)

    return load


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
    [("plain", "a"), ("chosen rows", "a"), ("renamed", "b"), ("joined", "x.a"), ("permuted", "a"), ("stacked", "a")],
)
def test_slots_hold_rows_as_stored(base, tables, on_device, case, field):
    ds = CASES[case](base.normalize("a", *tables), ps.from_arrays(other=np.arange(ROWS)))
    loader = on_device(ds, batch_size=7, memory="64MiB")
    assert loader.request.fields[field].dtype == np.int16
    assert loader.request.index_bytes == ps.Loader(ds, batch_size=7, memory="64MiB").request.index_bytes


def test_what_would_be_more_to_copy_is_normalized_before(base, on_device):
    ds = base.normalize("d", np.zeros(5), np.ones(5))
    assert on_device(ds, batch_size=7, memory="64MiB").request.fields["d"].dtype == np.float32


def test_two_in_a_row(base, tables, on_device):
    ds = (
        base.normalize("a", *tables)
        .normalize("a", np.full(SHAPE, 0.5), np.full(SHAPE, 3))
        .normalize("b", *np.ones((2, 5)))
    )
    loader = on_device(ds, batch_size=60, memory="64MiB")
    assert {name: str(spec.dtype) for name, spec in loader.request.fields.items()} == {
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
