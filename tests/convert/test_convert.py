"""Values come out as they went in, by each format's own library, whatever the dataset is made of."""

import json

import h5py
import numpy as np
import pyarrow.parquet
import pytest
import zarr
from tests.convert.sources import read_back, tree, trial_major, voxel_major

import penstock as ps
from penstock.conversion import source
from penstock.errors import ConfigError, ConvertFailed

FORMATS = {
    "zarr": ("out.zarr", {}),
    "zarr, not compressed": ("out.zarr", {"compression": "none"}),
    "zarr, several rows per chunk": ("out.zarr", {"rows_per_chunk": 7}),
    "npy": ("out.npy", {}),
    "hdf5": ("out.h5", {}),
    "hdf5, zstd": ("out.h5", {"compression": "zstd"}),
    "hdf5, gzip": ("out.h5", {"compression": "gzip", "rows_per_chunk": 3}),
    "tar": ("out.tar", {}),
    "lmdb": ("out.lmdb", {}),
}
SOURCES = {
    "by voxel": (voxel_major, {}, 1),
    "by voxel, in chunks": (voxel_major, {"chunks": (70, 9), "compression": "gzip"}, 1),
    "by trial": (trial_major, {}, 0),
    "by trial, in chunks": (trial_major, {"chunks": (11, 4, 3, 8), "shuffle": True, "compression": "gzip"}, 0),
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("source", SOURCES)
def test_values_are_those_of_the_source(tmp_path, source, kind):
    make, options, axis = SOURCES[source]
    expected = make(tmp_path / "in.h5", **options)
    goal, chosen = FORMATS[kind]
    done = ps.convert(ps.open(tmp_path / "in.h5", row_axis=axis), tmp_path / goal, executor="serial", **chosen)
    assert done.finished
    np.testing.assert_array_equal(read_back(tmp_path / goal), expected)
    again = ps.open(tmp_path / goal)
    np.testing.assert_array_equal(again[:][next(iter(again.fields))], expected)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"in.h5", goal, f"{goal}.manifest.json", f"{goal}.provenance.json"}
    assert ps.verify(tmp_path / goal, manifest=tmp_path / f"{goal}.manifest.json").sound


@pytest.mark.parametrize("goal", ["out.zarr", "out.h5"])
def test_several_fields_joined_masked_and_cast(tmp_path, goal):
    values = trial_major(tmp_path / "in.h5")
    mask = values[0] > 0
    betas = ps.open(tmp_path / "in.h5").select_within("betas", mask).cast("betas", "float64", scale=2)
    rows = np.arange(50)[::-1]
    ds = ps.join(betas=(betas, rows), number=np.arange(50))
    ps.convert(ds, tmp_path / goal)
    np.testing.assert_array_equal(read_back(tmp_path / goal), values[rows][:, mask].astype(np.float64) * 2)
    np.testing.assert_array_equal(read_back(tmp_path / goal, "number"), np.arange(50))


def test_mapped_and_permuted(tmp_path):
    values = trial_major(tmp_path / "in.h5")
    ds = ps.open(tmp_path / "in.h5").map(lambda batch: {"betas": batch["betas"] + 1})
    ps.convert(ds, tmp_path / "mapped.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "mapped.npy"), values + 1)
    ps.convert(ps.open(tmp_path / "in.h5").permute("betas", 2, 0, 1), tmp_path / "permuted.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "permuted.npy"), values.transpose(0, 3, 1, 2))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float64", "complex64"])
@pytest.mark.parametrize("goal", ["out.zarr", "out.npy", "out.h5"])
def test_dtypes(tmp_path, goal, dtype):
    values = np.random.default_rng(0).integers(0, 2, (9, 4)).astype(dtype)
    ps.convert(ps.from_arrays(betas=values), tmp_path / goal)
    found = read_back(tmp_path / goal)
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values)


def test_tables_become_parquet(tmp_path):
    ds = ps.from_arrays(number=np.arange(100), vector=np.random.default_rng(0).normal(size=(100, 3)))
    done = ps.convert(ds, tmp_path / "part-%02d.parquet", shard_bytes=800)
    names = sorted(path.name for path in tmp_path.glob("*.parquet"))
    assert len(names) == done.plan.tasks > 2
    found = [pyarrow.parquet.read_table(tmp_path / name) for name in names]
    assert [number for table in found for number in table["number"].to_pylist()] == list(range(100))
    vectors = [each for table in found for each in table["vector"].to_pylist()]
    np.testing.assert_array_equal(vectors, ds[:]["vector"])


def test_text_goes_through_tar(tmp_path):
    with ps.webdataset.TarWriter(str(tmp_path / "in.tar")) as tar:
        for row in range(9):
            tar.write({"__key__": f"{row:03d}", "txt": f"caption {row}", "json": {"row": row}})
    ds = ps.open(tmp_path / "in.tar").rename(caption="txt", about="json")
    ps.convert(ds, tmp_path / "out-%d.tar")
    again = ps.open(tmp_path / "out-0.tar")
    assert again[:]["caption.txt"] == [f"caption {row}" for row in range(9)]
    assert again[3]["about.json"] == {"row": 3}


def test_numbered_tars_hold_all_samples_in_order(tmp_path):
    values = trial_major(tmp_path / "in.h5")
    ps.convert(ps.open(tmp_path / "in.h5"), tmp_path / "out-%03d.tar", shard_bytes="10kB")
    assert len(list(tmp_path.glob("out-0*.tar"))) > 3
    np.testing.assert_array_equal(ps.open(tmp_path / "out-0*.tar")[:]["betas.npy"], values)


def test_shuffled_rows_are_a_permutation_that_the_seed_decides(tmp_path):
    ds = ps.from_arrays(x=np.arange(1000))
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        ps.convert(ds, tmp_path / f"{name}.npy", shuffle=seed)
    a, b, c = (np.load(tmp_path / f"{name}.npy") for name in "abc")
    assert sorted(a) == list(range(1000))
    assert (a == b).all()
    assert (a != c).any()
    assert (a != np.arange(1000)).any()


@pytest.mark.parametrize(
    "goal", ["out.zarr", *(pytest.param(each, marks=pytest.mark.slow) for each in ("out-%02d.tar", "out.parquet"))]
)
def test_rows_in_blocks_are_shuffled_in_two_passes(tmp_path, goal):
    expected = voxel_major(tmp_path / "in.h5", voxels=3000, trials=90, chunks=(100, 40), compression="gzip")
    ds = ps.open(tmp_path / "in.h5", row_axis=1)
    ps.convert(ds, tmp_path / goal, shuffle=3, shard_bytes="100kB")
    found = ps.open(tmp_path / goal.replace("%02d", "*"))
    rows = found[:][next(iter(found.fields))]
    np.testing.assert_array_equal(rows, expected[np.random.default_rng(3).permutation(90)])
    assert not list(tmp_path.glob(".*"))
    before = tree(tmp_path)
    again = ps.convert(ds, tmp_path / goal, shuffle=3, shard_bytes="100kB")
    assert (again.done, again.finished) == (0, True)
    assert tree(tmp_path) == before


def test_attributes_are_kept(tmp_path):
    attributes = {"": {"title": "x"}, "x": {"unit": "V"}}
    ps.convert(ps.from_arrays(x=np.arange(5)), tmp_path / "out.zarr", attributes=attributes)
    ps.convert(ps.from_arrays(x=np.arange(5)), tmp_path / "out.h5", attributes=attributes)
    group = zarr.open_group(str(tmp_path / "out.zarr"), mode="r")
    assert (group.attrs["title"], group["x"].attrs["unit"]) == ("x", "V")
    with h5py.File(tmp_path / "out.h5") as file:
        assert (file.attrs["title"], file["x"].attrs["unit"]) == ("x", "V")


def test_everything_is_read_once_and_written_once_within_little_memory(tmp_path):
    expected = voxel_major(tmp_path / "in.h5", voxels=70_000, trials=100)
    ds = ps.open(tmp_path / "in.h5", row_axis=1)
    done = ps.convert(ds, tmp_path / "out.npy", memory="48MiB")
    assert done.plan.tasks > 2  # the session does not fit
    assert done.bytes_read <= 1.02 * expected.nbytes
    assert done.bytes_written <= 1.02 * expected.nbytes
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)


def test_the_same_call_again_does_nothing(tmp_path):
    trial_major(tmp_path / "in.h5")
    first = ps.convert(ps.open(tmp_path / "in.h5"), tmp_path / "out.zarr")
    before = tree(tmp_path)
    second = ps.convert(ps.open(tmp_path / "in.h5"), tmp_path / "out.zarr")
    assert (first.done, second.done, second.finished) == (1, 0, True)
    assert tree(tmp_path) == before


def test_a_plan_is_told_and_nothing_is_written(tmp_path):
    done = ps.convert(ps.from_arrays(x=np.zeros((9, 4))), tmp_path / "out.zarr", dry_run=True)
    assert list(tmp_path.iterdir()) == []
    assert not done.finished
    told = json.loads(json.dumps(done.plan.as_json()))
    assert (told["tasks"], told["bytes"]) == (1, 9 * 4 * 8)
    assert "9 rows" in str(done.plan)


def test_the_function_wins_over_its_package():
    import penstock.conversion.plan  # noqa: F401

    assert callable(ps.convert)
    assert ps.convert.__module__ == "penstock.conversion.convert"


def test_the_layout_that_the_plan_advises(tmp_path):
    expected = voxel_major(tmp_path / "in.h5", voxels=40_000, trials=60)
    ds, told = ps.open(tmp_path / "in.h5", row_axis=1), []
    planned = ps.convert(ds, tmp_path / "out", like="plan", dry_run=True)
    assert list(tmp_path.iterdir()) == [tmp_path / "in.h5"]
    done = ps.convert(ds, tmp_path / "out", like="plan", announce=told.append)
    assert "on disk" in told[0]
    assert planned.plan == done.plan
    np.testing.assert_array_equal(read_back(tmp_path / "out.zarr"), expected)
    found = ps.open(tmp_path / "out.zarr")
    assert "Keep the files as they are" in ps.plan(found, batch_size=8, measure=0).advice[0]
    written = sum(path.stat().st_size for path in (tmp_path / "out.zarr").rglob("*") if path.is_file())
    assert 0.7 * written < done.expected.bytes < 1.5 * written
    with pytest.raises(ConfigError, match="keep these files as they are"):
        ps.convert(found, tmp_path / "again", like="plan")


def test_small_rows_are_advised_to_lie_one_after_another(tmp_path):
    trial_major(tmp_path / "in.h5", shape=(9,), chunks=(10, 9))
    done = ps.convert(ps.open(tmp_path / "in.h5"), tmp_path / "out", like="plan")
    assert done.path.endswith("out.h5")
    assert "Keep the files" in ps.plan(done.path, batch_size=8, measure=0).advice[0]


def test_chunks_of_all_fields_hold_as_many_rows(tmp_path):
    ps.convert(ps.from_arrays(x=np.zeros((500, 5000)), label=np.arange(500)), tmp_path / "out.zarr")
    group = zarr.open_group(str(tmp_path / "out.zarr"), mode="r")
    assert group["x"].chunks[0] == group["label"].chunks[0] < 100


@pytest.mark.parametrize("goal", ["out.zarr", "out.h5"])
@pytest.mark.parametrize("kind", ["hdf5", "zarr", "zarr 2"])
def test_attributes_of_the_source_are_kept(tmp_path, kind, goal):
    of_array = {"unit": "V", "scale": np.float32(0.5), "range": np.array([1, 5]), "names": ["a", "b"]}
    if kind == "hdf5":
        with h5py.File(tmp_path / "in", "w") as file:
            file.create_dataset("deep/x", data=np.arange(12.0).reshape(6, 2)).attrs.update(of_array)
            file.attrs["title"] = "a title"
            file["deep/x"].attrs["elsewhere"] = file["deep"].ref  # has no meaning in another file
    else:
        group = zarr.create_group(str(tmp_path / "in"), zarr_format=3 if kind == "zarr" else 2)
        plain = {name: np.asarray(value).tolist() for name, value in of_array.items()}
        group.create_array("deep/x", data=np.arange(12.0).reshape(6, 2)).attrs.update(plain | {"nested": {"a": [1]}})
        group.attrs["title"] = "a title"
    ds = ps.open(tmp_path / "in").cast("deep/x", "float32").rename(y="deep/x").select(range(4))
    ps.convert(ds, tmp_path / goal, attributes={"y": {"unit": "mV"}})
    if goal == "out.h5":
        with h5py.File(tmp_path / goal) as file:
            kept, title = dict(file["y"].attrs), file.attrs["title"]
    else:
        group = zarr.open_group(str(tmp_path / goal), mode="r")
        kept, title = dict(group["y"].attrs), group.attrs["title"]
    assert title == "a title"
    assert kept.pop("unit") == "mV"
    assert kept.pop("nested", {"a": [1]}) in ({"a": [1]}, '{"a": [1]}')
    assert {name: np.asarray(value).tolist() for name, value in kept.items()} == {
        "scale": 0.5, "range": [1, 5], "names": ["a", "b"]
    }  # fmt: skip


@pytest.mark.parametrize("kind", [*FORMATS, "numbered tars", "parquet"])
def test_the_output_is_compared_with_the_source(tmp_path, monkeypatch, kind):
    expected = voxel_major(tmp_path / "in.h5", voxels=500, trials=30)
    goal, chosen = {
        **FORMATS, "numbered tars": ("out-%d.tar", {"shard_bytes": 9000}), "parquet": ("out.parquet", {})
    }[kind]  # fmt: skip
    ds = ps.open(tmp_path / "in.h5", row_axis=1)
    assert ps.convert(ds, tmp_path / goal, executor="serial", verify="source", **chosen).finished
    with h5py.File(tmp_path / "in.h5", "r+") as file:
        file["betas"][:] = expected.T
    reading, seen = source.Reader.read, []

    def reads_wrongly_once(reader, rows):
        values = reading(reader, rows)
        if not seen and rows.stop == 30:
            seen.append(rows)
            next(iter(values.values()))[-1] += 1
        return values

    again = ps.open(tmp_path / "in.h5", row_axis=1)
    options = {"executor": "serial", "overwrite": True, "restart": True, **chosen}
    if "compression" not in chosen and goal == "out.zarr":
        options["compression"] = "none"  # a sample of the values is read first
    monkeypatch.setattr(source.Reader, "read", reads_wrongly_once)
    with pytest.raises(ConvertFailed, match="are not those of the source"):
        ps.convert(again, tmp_path / goal, verify="source", **options)
    assert seen
