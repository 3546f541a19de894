"""Ray Data over what penstock opens: all rows, in blocks of the declared size."""

import io
import tarfile

import h5py
import numpy as np
import pytest

import penstock as ps

ray = pytest.importorskip("ray")
pytest.importorskip("ray.train")
from ray.data.block import BlockAccessor  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

VALUES = np.arange(40 * 6, dtype=np.int32).reshape(40, 6)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
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
    for task in tasks:
        blocks = [BlockAccessor.for_block(block) for block in task()]
        assert sum(block.num_rows() for block in blocks) == task.metadata.num_rows
        assert sum(block.to_arrow()[field].combine_chunks().storage.values.nbytes for block in blocks) <= (
            task.metadata.size_bytes
        )
    rows = ray.data.read_datasource(source, memory=source.task_bytes).take_all()
    assert sorted(row[field].tolist() for row in rows) == VALUES.tolist()


def test_texts_and_numbers_of_one_sample_stay_together(tmp_path):
    from penstock.integrations.ray import Datasource

    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for row in range(30):
            for name, content in (("txt", b"sample %d" % row * (row + 1)), ("cls", b"%d" % row)):
                member = tarfile.TarInfo(f"{row:03d}.{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    source = Datasource(ps.open(str(tmp_path / "a.tar")), block=2000)
    tasks = source.get_read_tasks(2)
    assert len(tasks) > 2
    rows = ray.data.read_datasource(source).take_all()
    assert {row["cls"]: row["txt"] for row in rows} == {row: f"sample {row}" * (row + 1) for row in range(30)}


def test_a_checkpoint_without_a_position_is_refused(tmp_path):
    from penstock.integrations.ray import load_position, save_position

    loader = ps.Loader(ps.from_arrays(x=VALUES), batch_size=4, memory="64MiB", output="numpy")
    checkpoint = ray.train.Checkpoint.from_directory(tmp_path)
    with pytest.raises(ps.ConfigError, match="save_position"):
        load_position(loader, checkpoint)
    batches = iter(loader)
    next(batches)
    save_position(loader, checkpoint)
    later = [batch["x"].tolist() for batch in batches]
    assert load_position(loader, ray.train.Checkpoint.from_directory(tmp_path))
    assert [batch["x"].tolist() for batch in loader] == later
