"""What was written for another library, or mistyped: the error says what to write here, and is a TypeError."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps


@pytest.fixture
def ds() -> ps.Dataset:
    return ps.from_arrays(x=np.arange(40, dtype=np.float32).reshape(10, 4))


OF_TORCH = {
    "num_workers": (4, "threads="),
    "collate_fn": (list, "ds.map("),
    "sampler": (range(3), "ds.select("),
    "batch_sampler": ([[0]], "batch_size="),
    "pin_memory": (True, "device="),
    "pin_memory_device": ("cuda", "device="),
    "prefetch_factor": (2, "memory="),
    "persistent_workers": (True, "leave it out"),
    "worker_init_fn": (print, "leave it out"),
    "multiprocessing_context": ("spawn", "leave it out"),
    "generator": (None, "seed="),
    "timeout": (3, "leave it out"),
    "in_order": (True, "leave it out"),
    "btach_size": (3, "did you mean 'batch_size'?"),
    "nonsense": (3, "expected some of d"),
}


@pytest.mark.parametrize("name", OF_TORCH)
@pytest.mark.parametrize("kind", ["Loader", "MultiLoader"])
def test_arguments_of_torch_are_explained(ds: ps.Dataset, kind: str, name: str) -> None:
    value, way_out = OF_TORCH[name]
    make: Callable[..., Any] = ps.Loader if kind == "Loader" else ps.MultiLoader
    first, options = (ds, {}) if kind == "Loader" else ({"a": ds}, {"mode": "together"})
    with pytest.raises(ps.ConfigError) as refused:
        make(first, batch_size=2, **options, **{name: value})
    assert isinstance(refused.value, TypeError)
    assert f"Loader has no argument {name!r}" in str(refused.value)
    assert way_out in str(refused.value)


class Own:
    pass


NO_DATASETS: dict[str, tuple[Callable[[], Any], str]] = {
    "a path": (lambda: "x.h5", "penstock.open('x.h5')"),
    "a Path": (lambda: Path("x.h5"), "penstock.open('x.h5')"),
    "paths": (lambda: ["a.h5", "b.h5", "c.h5"], "penstock.open(['a.h5', 'b.h5'], …)"),
    "a subset of torch": (
        lambda: torch.utils.data.Subset(torch.utils.data.TensorDataset(torch.zeros(3)), [0]),
        "ds.select(subset.indices)",
    ),
    "a dataset of torch": (lambda: torch.utils.data.TensorDataset(torch.zeros(3)), "penstock.from_arrays"),
    "an array": (lambda: np.zeros(3), "penstock.from_arrays"),
    "a tensor": (lambda: torch.zeros(3), "penstock.from_arrays"),
    "arrays": (lambda: {"x": np.zeros(3)}, "penstock.from_arrays"),
    "something": (Own, "Own"),
    "nothing": (lambda: None, "NoneType"),
}


@pytest.mark.parametrize("what", NO_DATASETS)
@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"batch_size": 2, "num_workers": 1}], ids=len)
def test_what_is_no_dataset(what: str, options: dict[str, Any]) -> None:
    make, way_out = NO_DATASETS[what]
    with pytest.raises(ps.ConfigError, match="expected a dataset, as ") as refused:
        ps.Loader(make(), **options)
    assert isinstance(refused.value, TypeError)
    assert way_out in str(refused.value)


def test_concat_takes_datasets(ds: ps.Dataset) -> None:
    with pytest.raises(ps.WrongArgument, match=r"penstock.open\('b.h5'\)"):
        ps.concat([ds, "b.h5"])  # type: ignore[list-item]


def test_what_must_be_given_is_named(ds: ps.Dataset) -> None:
    with pytest.raises(ps.WrongArgument, match=r"'batch_size'.* Write Loader\(ds, batch_size=…\)"):
        ps.Loader(ds)  # type: ignore[call-arg]
    with pytest.raises(ps.WrongArgument, match=r"too many positional .* Write Loader\(ds, batch_size=…\)"):
        ps.Loader(ds, 32)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "told"),
    [("columns", r"fields=\("), ("feilds", "did you mean 'fields'"), ("engine", "expected some of path")],
)
def test_open_explains_too(name: str, told: str) -> None:
    call: Callable[..., Any] = ps.open
    with pytest.raises(ps.WrongArgument, match=rf"open has no argument '{name}': .*{told}"):
        call("x.h5", **{name: 1})


# Dtypes.

DTYPES = ["float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool", "complex64"]


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_of_torch_are_taken(tmp_path: Path, ds: ps.Dataset, name: str) -> None:
    given, expected = getattr(torch, name), np.dtype(name)
    assert ds.cast("x", given).fields["x"].dtype == expected
    assert ps.FieldSpec(given, (3,)) == ps.FieldSpec(expected, (3,))
    (tmp_path / "a.raw").write_bytes(bytes(16 * expected.itemsize))
    assert ps.open_raw(tmp_path / "a.raw", given, (2,)).fields["data"] == ps.FieldSpec(expected, (2,))
    planned = ps.plan({"x": ((10, 4), given)}, batch_size=2, memory="64MiB")
    assert planned.contents.fields["x"].dtype == expected


def test_normalizing_takes_them_too(ds: ps.Dataset) -> None:
    made = ds.normalize("x", np.zeros(4), np.ones(4), dtype=torch.float16)
    assert made.fields["x"].dtype == np.float16


def test_decoders_take_them_too() -> None:
    from penstock.read.kinds import decoder_of

    assert decoder_of(torch.float32) == np.dtype("float32")
    assert decoder_of((torch.uint8, (2, 3))) == np.dtype(("u1", (2, 3)))


@pytest.fixture
def more_dtypes() -> None:
    """What other packages may add to NumPy's dtypes."""
    pytest.importorskip("ml_dtypes")


CALLS: dict[str, Callable[[ps.Dataset, Any], Any]] = {
    "cast": lambda ds, dtype: ds.cast("x", dtype),
    "normalize": lambda ds, dtype: ds.normalize("x", np.zeros(4), np.ones(4), dtype=dtype),
    "plan": lambda ds, dtype: ps.plan({"x": ((10, 4), dtype)}, batch_size=2),
    "open_raw": lambda ds, dtype: ps.open_raw("x.raw", dtype, (2,)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, "flaot32", object()], ids=["float8", "mistyped", "object"])
@pytest.mark.usefixtures("more_dtypes")
def test_what_is_no_dtype_here_is_refused(ds: ps.Dataset, call: str, dtype: Any) -> None:
    with pytest.raises(ps.ConfigError, match="dtype"):
        CALLS[call](ds, dtype)


# Columns that name samples.


@pytest.mark.parametrize("output", ["numpy", "torch"])
@pytest.mark.parametrize("columns", [("__index__",), ("__key__",), ("__url__", "__index__")], ids=str)
@pytest.mark.parametrize("shuffle", [False, True])
def test_names_of_samples_alone(tmp_path: Path, output: Any, columns: tuple[str, ...], shuffle: bool) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(24.0).reshape(12, 2), chunks=(5, 2), compression="gzip")
    whole = ps.open(tmp_path / "a.h5")
    options: dict[str, Any] = {"batch_size": 5, "shuffle": shuffle, "memory": "64MiB", "output": output}
    with ps.Loader(whole, columns=("x", *columns), **options) as loader:
        expected = [[list(map(str, column)) for column in batch[1:]] for batch in loader]
        planned = loader.plan.planned_bytes
    with ps.Loader(whole, columns=columns, **options) as alone:
        assert [[list(map(str, column)) for column in batch] for batch in alone] == expected
        assert alone.stats().samples == 12
        assert alone.stats().bytes_read == 0
        assert alone.plan.planned_bytes <= planned


def test_a_position_among_names_alone_is_saved(ds: ps.Dataset) -> None:
    from penstock.testing import check_resume

    check_resume(lambda: ps.Loader(ds, batch_size=3, shuffle=True, columns=("__index__",), memory="64MiB"))


def test_no_columns_at_all_are_refused(ds: ps.Dataset) -> None:
    with pytest.raises(ps.ConfigError, match=r"columns=\(\)"):
        ps.Loader(ds, batch_size=2, columns=())
