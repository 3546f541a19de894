"""Small files with more paths, chunks or entries than anybody can visit: read or refused in bounded time."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr

import penstock as ps
from penstock.errors import LimitExceeded

VALUES = np.arange(12, dtype="i4").reshape(6, 2)


@pytest.mark.case(48)
@pytest.mark.timeout(30)
def test_groups_of_hdf5_with_many_links_to_each(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        below = file.create_group("bottom")
        below["x"] = VALUES
        for level in range(11):
            group = file.create_group(f"level{level}")
            for number in range(6):
                group[f"{number}"] = below
            below = group
        below["ring"] = file["/"]
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["level10/ring/level10/5/4/3/2/1/0/5/4/3/2/0/x"].shape == VALUES.shape, "they are there"
    ds = ps.open(tmp_path / "a.h5")
    assert list(ds.fields) == ["bottom/x"]
    np.testing.assert_array_equal(ds[:]["bottom/x"], VALUES)


@pytest.mark.case(48)
def test_a_dataset_with_two_names_has_both(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a"] = VALUES
        file["b"] = file["a"]
        file["group/c"] = file["a"]
    assert sorted(ps.open(tmp_path / "a.h5").fields) == ["a", "b", "group/c"]


@pytest.mark.case(48)
def test_groups_thousands_deep(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file["/"]
        for _ in range(2000):
            group = group.create_group("g")
        group["x"] = VALUES
    assert [name.count("/") for name in ps.open(tmp_path / "a.h5").fields] == [2000]


@pytest.mark.case(48)
@pytest.mark.timeout(30)
@pytest.mark.slow
def test_virtual_datasets_made_of_virtual_datasets_many_times(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["d0"] = VALUES
        for level in range(1, 13):
            layout = h5py.VirtualLayout(VALUES.shape, "i4")
            for name in range(6):
                slashes = "/" * name  # names of the same dataset, so that each is a source of its own
                layout[name] = h5py.VirtualSource(".", f"{slashes}d{level - 1}", VALUES.shape)[name]
            file.create_virtual_dataset(f"d{level}", layout)
    np.testing.assert_array_equal(ps.open(tmp_path / "a.h5", fields=["d2"])[:]["d2"], VALUES)
    with pytest.raises(LimitExceeded, match="10,000 sources"):
        ps.open(tmp_path / "a.h5", fields=["d12"])


def declared(path: Path, shape: list[int], chunks: list[int]) -> Path:
    """A Zarr array of which only the metadata were written."""
    array = zarr.create_array(str(path), shape=(1,), chunks=(1,), dtype="i1")
    array[:] = 1
    document = json.loads((path / "zarr.json").read_text())
    document |= {"shape": shape}
    document["chunk_grid"]["configuration"]["chunk_shape"] = chunks
    (path / "zarr.json").write_text(json.dumps(document))
    return path


@pytest.mark.case(48)
@pytest.mark.timeout(30)
@pytest.mark.parametrize(("shape", "chunks"), [([2**32, 4], [2, 4]), ([10, 10**8], [1, 1]), ([2**40, 2**22], [1, 1])])
def test_grids_of_more_chunks_than_can_be_counted(tmp_path: Path, shape: list[int], chunks: list[int]) -> None:
    with pytest.raises(LimitExceeded, match=r"chunks.*larger chunks"):
        ps.open(declared(tmp_path / "a.zarr", shape, chunks), allow_fill=True)


@pytest.mark.case(48)
@pytest.mark.timeout(30)
def test_a_loader_of_billions_of_rows_that_are_chunks(tmp_path: Path) -> None:
    ds = ps.open(declared(tmp_path / "a.zarr", [2**31, 4], [1, 4]), allow_fill=True)
    with ps.Loader(ds, batch_size=4, memory="64MiB", shuffle=True, output="numpy") as loader:
        assert len(next(iter(loader))) == 1
    assert not ds[2**31 - 1]["data"].any()


@pytest.mark.case(48)
@pytest.mark.timeout(30)
def test_groups_of_zarr_with_many_links_to_each(tmp_path: Path) -> None:
    root = tmp_path / "a.zarr"
    zarr.create_group(str(root))
    zarr.create_group(str(root / "g0")).create_array("x", data=VALUES)
    for level in range(1, 20):
        zarr.create_group(str(root / f"g{level}"))
        for number in range(6):
            (root / f"g{level}" / f"l{number}").symlink_to(f"../g{level - 1}")
    (root / "g0/ring").symlink_to("..")
    ds = ps.open(root)
    assert list(ds.fields) == ["g0/x"]
    np.testing.assert_array_equal(ds[:]["g0/x"], VALUES)


@pytest.mark.slow
@pytest.mark.case(48)
def test_lists_of_more_arrays_than_anybody_means(tmp_path: Path) -> None:
    group = zarr.create_group(str(tmp_path / "a.zarr"))
    group.create_array("x", data=VALUES)
    document = json.loads((tmp_path / "a.zarr/zarr.json").read_text())
    about = json.loads((tmp_path / "a.zarr/x/zarr.json").read_text())
    document["consolidated_metadata"] = {"metadata": {f"x{number}": about for number in range(100_001)}}
    (tmp_path / "a.zarr/zarr.json").write_text(json.dumps(document))
    with pytest.raises(LimitExceeded, match=r"100,000 arrays.*fields="):
        ps.open(tmp_path / "a.zarr")
    np.testing.assert_array_equal(ps.open(tmp_path / "a.zarr", fields=["x"])[:]["x"], VALUES)
