"""What is compressed unless somebody says otherwise: what becomes so small that slow decoding pays."""

import json

import numpy as np
import pytest
import zarr

import penstock as ps

ROWS, WIDTH = 40, 20_000
RNG = np.random.default_rng(5)
FIELDS = {
    "noise": (RNG.normal(size=(ROWS, WIDTH)).astype("float32"), "none"),
    "small integers": (RNG.integers(0, 100, (ROWS, WIDTH)).astype("int16"), "none"),  # zstd makes them half as large
    "sparse": (np.where(RNG.random((ROWS, WIDTH)) < 0.01, RNG.normal(size=(ROWS, WIDTH)), 0).astype("float32"), "zstd"),
    "labels": (np.repeat(RNG.integers(0, 9, (ROWS, WIDTH // 100)), 100, axis=1).astype("int32"), "zstd"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_compressed_if_a_tenth_is_left(tmp_path, name):
    values, expected = FIELDS[name]
    done = ps.convert(ps.from_arrays(x=values), tmp_path / "out.zarr", executor="serial")
    assert done.plan.cuts["x"].compression == expected
    np.testing.assert_array_equal(zarr.open_group(str(tmp_path / "out.zarr"), mode="r")["x"][:], values)
    codecs = json.loads((tmp_path / "out.zarr" / "x" / "zarr.json").read_text())["codecs"][0]["configuration"]["codecs"]
    assert ("zstd" in [codec["name"] for codec in codecs]) == (expected == "zstd")
    assert (done.plan.cuts["x"].chunk_rows == 1) == (expected == "none")  # rows that are not compressed are chunks


def test_the_plan_says_why(tmp_path):
    chosen = {name: FIELDS[name][0] for name in ("small integers", "labels")}
    plan = ps.convert(ps.from_arrays(**chosen), tmp_path / "out.zarr", dry_run=True).plan
    integers, labels = str(plan).splitlines()[1:3]
    assert "compression: none (zstd makes a sample of it 5" in integers
    assert "reading it from memory several times as slow" in integers
    assert "compression: zstd (zstd makes a sample of it" in labels
    assert plan.as_json()["fields"]["small integers"]["zstd_share"] == pytest.approx(0.54, abs=0.05)
