"""Rows filled up to one length: straight into place where the store can, through scratch where it cannot."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import penstock as ps
from penstock.base import scratch as memory
from penstock.dataset.second_pass import Padded
from penstock.errors import ConfigError, SchemaMismatch
from penstock.testing import check_store

ROWS, LENGTH, TO = 23, 37, 50
VALUES = np.random.default_rng(0).integers(-300, 300, (ROWS, LENGTH)).astype("<i2")
WIDE = np.random.default_rng(1).normal(size=(5, 9_000)).astype("<f4")  # rows worth a system call each
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "row-chunks": {"chunks": (1, LENGTH), "compression": "gzip"},
    "blocks": {"chunks": (5, 20), "compression": "gzip", "shuffle": True},
    "time-courses": {"chunks": (ROWS, 1)},
    "through-h5py": {"chunks": (5, LENGTH), "scaleoffset": 0},
}


def padded(values: np.ndarray, to: int, value: float = 0) -> np.ndarray:
    return np.pad(values, [(0, 0), (0, to - values.shape[1])] + [(0, 0)] * (values.ndim - 2), constant_values=value)


@pytest.fixture(params=[*LAYOUTS, "array", "npy", "wide npy", "big-endian", "map", "joined", "two files"])
def case(request: Any, tmp_path: Path, read_policy: Any) -> tuple[ps.Dataset, np.ndarray]:
    """A dataset with one field ``x``, and what it holds."""
    if request.param in LAYOUTS:
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file.create_dataset("x", data=VALUES, **LAYOUTS[request.param])
        return ps.open(tmp_path / "a.h5"), VALUES
    if request.param == "array":
        return ps.from_arrays(x=VALUES), VALUES
    if request.param == "map":
        return ps.from_arrays(x=VALUES).map(dict), VALUES
    if request.param == "joined":
        rows = np.arange(ROWS)[::-1]
        return ps.join(x=(ps.from_arrays(y=VALUES), rows)), VALUES[rows]
    if request.param == "two files":
        read_policy(group_chunks_below_bytes=0)
        for number, part in enumerate(np.array_split(VALUES, 2)):
            with h5py.File(tmp_path / f"{number}.h5", "w") as file:
                file.create_dataset("x", data=part, **LAYOUTS["blocks"])
        return ps.open(tmp_path / "*.h5"), VALUES
    values = {"npy": VALUES, "wide npy": WIDE, "big-endian": VALUES.astype(">i2")}[request.param]
    np.save(tmp_path / "a.npy", values)
    return ps.open(tmp_path / "a.npy").rename(x="data"), values.astype(values.dtype.newbyteorder("="))


def test_a_padded_store_is_a_store(case: tuple[ps.Dataset, np.ndarray]) -> None:
    ds, values = case
    to = values.shape[1] + 13
    check_store(lambda: ds.pad("x", to=to, value=7).delivered, {"x": padded(values, to, 7)})
    check_store(
        lambda: ds.pad("x", to=to).cast("x", "float32", 2).delivered, {"x": padded(values * 2.0, to).astype("f4")}
    )


@pytest.mark.parametrize("mode", ["in order", "shuffled"])
def test_loaded(case: tuple[ps.Dataset, np.ndarray], mode: str) -> None:
    ds, values = case
    to = values.shape[1] + 1
    labelled = ps.join(x=ds.pad("x", to=to, value=-1), row=np.arange(len(ds)))
    with ps.Loader(labelled, batch_size=4, shuffle=mode == "shuffled", memory="64MiB", output="numpy") as batches:
        seen = []
        for batch in batches:
            assert np.array_equal(batch["x"], padded(values, to, -1)[batch["row"]])
            seen += batch["row"].tolist()
    assert sorted(seen) == list(range(len(ds)))


def test_nothing_is_copied_where_rows_can_lie_apart(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=VALUES, **LAYOUTS["blocks"])
    ds = ps.open(tmp_path / "a.h5")
    assert ds.store.accepts_strided
    assert ds.pad("x", to=TO).store.scratch_bytes(ROWS) == ds.store.scratch_bytes(ROWS)
    stacked = ds.gather(np.arange(ROWS)[:, None])
    assert not stacked.store.accepts_strided
    assert stacked.pad("x", to=2).store.scratch_bytes(ROWS) > stacked.store.scratch_bytes(ROWS)


def test_a_block_is_decoded_once_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.dataset.second_pass.CONVERT_BYTES", 2 * LENGTH * 2)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=VALUES, **LAYOUTS["blocks"])
    for ds in (ps.open(tmp_path / "a.h5"), ps.open(tmp_path / "a.h5").map(lambda batch: batch)):
        with ps.Loader(ds.pad("x", to=TO), batch_size=4, shuffle=True, memory="64MiB", output="numpy") as batches:
            for _ in batches:
                pass
            assert batches.stats().chunks_read == 5 * 2


def test_rows_of_several_axes() -> None:
    values = np.arange(4 * 3 * 2, dtype=np.float32).reshape(4, 3, 2)
    check_store(lambda: ps.from_arrays(x=values).pad("x", to=5, value=0.5).delivered, {"x": padded(values, 5, 0.5)})


def test_other_fields_stay(tmp_path: Path) -> None:
    ds = ps.from_arrays(x=VALUES, y=VALUES[:, 0], z=VALUES[:, :2]).pad("x", to=TO)
    assert np.array_equal(ds[3]["z"], VALUES[3, :2])
    assert np.array_equal(ds.only("y")[:]["y"], VALUES[:, 0])
    assert np.array_equal(ds.only("z", "x")[:]["x"], padded(VALUES, TO))
    assert np.array_equal(ds.select_within("z", np.s_[1:])[:]["z"], VALUES[:, 1:2])
    assert np.array_equal(ds.select_within("x", np.s_[30:45])[:]["x"], padded(VALUES, TO)[:, 30:45])
    with ps.Loader(ds, batch_size=5, columns=("y", "x"), memory="64MiB", output="numpy") as batches:
        y, x = next(iter(batches))
        assert np.array_equal(x[:, 0], y)
        assert x.shape == (5, TO)


@pytest.mark.parametrize(
    ("cast", "value"),
    [
        ({"dtype": "float32", "scale": 1 / 300}, 0),
        ({"dtype": "float32", "scale": 1 / 300}, 0.5),
        ({"dtype": "float32", "offset": 2.0}, 0),
        ({"dtype": "float16", "divisor": 300}, -1),
        ({"dtype": "float64"}, float("nan")),
        ({"dtype": "int32"}, 70_000),
    ],
    ids=str,
)
def test_the_value_is_the_one_delivered(cast: dict[str, Any], value: float) -> None:
    ds = ps.from_arrays(x=VALUES).cast("x", **cast)
    found = ds.pad("x", to=TO, value=value)
    expected = padded(ds[:]["x"], TO, value)
    assert found.fields["x"].dtype == expected.dtype
    assert np.array_equal(found[:]["x"], expected, equal_nan=True)
    with ps.Loader(found, batch_size=ROWS, memory="64MiB", output="numpy") as batches:
        assert np.array_equal(next(iter(batches))["x"], expected, equal_nan=True)


def test_conversions_stay_declared_where_they_can() -> None:
    ds = ps.from_arrays(x=VALUES).cast("x", "float32", divisor=300)
    assert "x" in ds.pad("x", to=TO).casts
    assert isinstance(ds.pad("x", to=TO).store, Padded)


def test_datasets_of_different_lengths_in_one_loader() -> None:
    subjects = [ps.from_arrays(x=np.full((6, width), width, np.int16)) for width in (9, 12, 5)]
    with pytest.raises(SchemaMismatch):
        ps.concat(subjects)
    ds = ps.concat(each.pad("x", to=12) for each in subjects).cast("x", "float32")
    assert (ds[:]["x"] != 0).sum(axis=1).tolist() == [9] * 6 + [12] * 6 + [5] * 6
    assert (
        ds.fingerprint != ps.concat(each.pad("x", to=12, value=1) for each in subjects).cast("x", "float32").fingerprint
    )


@pytest.mark.parametrize(
    ("field", "options", "told"),
    [
        ("x", {"to": LENGTH - 1}, "to=36.*at least 37"),
        ("x", {"to": 41.5}, "whole number"),
        ("x", {"to": TO, "value": 0.5}, "int16 has no such value"),
        ("x", {"to": TO, "value": 40_000}, "no such value"),
        ("x", {"to": TO, "value": float("nan")}, "no such value"),
        ("x", {"to": TO, "value": "none"}, "no such value"),
        ("y", {"to": TO}, "single numbers"),
        ("w", {"to": TO}, "no field 'w'"),
        ("z", {"to": TO}, "pad first"),
    ],
)
def test_what_cannot_be_meant(field: str, options: dict[str, Any], told: str) -> None:
    ds = ps.from_arrays(x=VALUES, y=VALUES[:, 0], z=VALUES.reshape(ROWS, LENGTH, 1)).permute("z", 1, 0)
    with pytest.raises(ConfigError, match=told):
        ds.pad(field, **options)


def test_rows_apart_are_read_right_by_every_reader(case: tuple[ps.Dataset, np.ndarray]) -> None:
    """Rows that are the first part of longer ones, read without a wrapper in between."""
    store, values = case[0].store, case[1]
    if not store.accepts_strided:
        assert type(store).__name__ in ("Mapped", "H5pyStore")
        return
    for rows, at in ((np.arange(5), np.arange(5)), (np.array([4, 0, 0, 2]), np.array([6, 1, 2, 4]))):
        whole = np.full((8, values.shape[1] + 3), 99, values.dtype)
        memory.prepare(store.scratch_bytes(len(rows)))
        try:
            store.read_into(rows, at, {"x": whole[:, : values.shape[1]]})
            assert memory.overflow_bytes() == 0
        finally:
            memory.release()
        expected = np.full_like(whole, 99)
        expected[at, : values.shape[1]] = values[rows]
        assert np.array_equal(whole, expected)
