"""Ray Data over what penstock opens: all rows, in blocks of the declared size."""

import io
import tarfile

import h5py
import numpy as np
import pytest

import penstock as ps

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

VALUES = np.arange(40 * 6, dtype=np.int32).reshape(40, 6)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def hdf5(folder):
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", data=VALUES, chunks=(4, 6))
    return folder / "a.h5"


def zarr3(folder):
    zarr = pytest.importorskip("zarr")
    zarr.create_group(str(folder / "a.zarr")).create_array("x", data=VALUES, chunks=(4, 6), shards=(8, 6))
    return folder / "a.zarr"


def tar(folder):
    with tarfile.open(folder / "a.tar", "w") as archive:
        for row, values in enumerate(VALUES):
            file = io.BytesIO()
            np.save(file, values)
            member = tarfile.TarInfo(f"{row:03d}.x.npy")
            member.size = file.tell()
            file.seek(0)
            archive.addfile(member, file)
    return folder / "a.tar"


@pytest.mark.parametrize("write", [hdf5, zarr3, tar])
def test_all_rows_in_blocks_that_fit(tmp_path, write):
    from penstock.integrations.ray import Datasource

    ds = ps.open(str(write(tmp_path)))
    (field,) = ds.fields
    source = Datasource(ds, block=8 * 24)
    tasks = source.get_read_tasks(4)
    assert sum(task.metadata.num_rows for task in tasks) == 40
    assert max(task.metadata.size_bytes for task in tasks) <= 8 * 24
    rows = ray.data.read_datasource(source).take_all()
    assert sorted(row[field].tolist() for row in rows) == VALUES.tolist()
