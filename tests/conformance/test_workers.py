"""Every format of arrays in workers of torch's own loader, all joined into one dataset that was read from before."""

import gzip
import io
import tarfile
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

import penstock as ps

ROWS = 40
VALUES = np.arange(ROWS * 6, dtype=np.int16).reshape(ROWS, 2, 3)


def write_hdf5(path: Path, **options: object) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=VALUES, **options)
    return path


def write_npy(path: Path) -> Path:
    np.save(path, VALUES)
    return path


def write_npz(path: Path) -> Path:
    np.savez_compressed(path, data=VALUES)
    return path


def write_raw(path: Path) -> Path:
    VALUES.tofile(path)
    return path


def write_nifti(path: Path) -> Path:
    nibabel.Nifti1Image(np.moveaxis(VALUES[:, :, None, :], 0, -1), np.eye(4)).to_filename(path)
    return path


def table() -> pa.Table:
    column = pa.FixedSizeListArray.from_arrays(pa.array(VALUES.reshape(-1)), 6)
    return pa.table({"data": column})


def write_parquet(path: Path) -> Path:
    pyarrow.parquet.write_table(table(), path)
    return path


def write_arrow(path: Path) -> Path:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table().schema) as writer:
        writer.write_table(table())
    return path


def write_tar_gz(path: Path) -> Path:
    with gzip.open(path, "wb") as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for number, values in enumerate(VALUES):
            stream = io.BytesIO()
            np.save(stream, values)
            member = tarfile.TarInfo(f"{number:03d}.data.npy")
            member.size = stream.tell()
            stream.seek(0)
            tar.addfile(member, stream)
    return path


def formats(folder: Path) -> dict[str, ps.Dataset]:
    return {
        "npy": ps.open(write_npy(folder / "a.npy")),
        "npz": ps.open(write_npz(folder / "a.npz")),
        "raw": ps.open_raw(write_raw(folder / "a.bin"), "int16", (2, 3)),
        "contiguous": ps.open(write_hdf5(folder / "contiguous.h5")),
        "chunks": ps.open(write_hdf5(folder / "chunks.h5", chunks=(4, 2, 2), compression="gzip", shuffle=True)),
        "by_h5py": ps.open(write_hdf5(folder / "by_h5py.h5", chunks=(4, 2, 3), scaleoffset=0)),
        "nifti": ps.open(write_nifti(folder / "a.nii")),
        "nifti_gz": ps.open(write_nifti(folder / "b.nii.gz")),
        "parquet": ps.open(write_parquet(folder / "a.parquet")),
        "arrow": ps.open(write_arrow(folder / "a.arrow")),
        "tar_gz": ps.open(write_tar_gz(folder / "a.tar.gz"), cache_dir=folder / "cache"),
        "memory": ps.from_arrays(data=VALUES),
    }


@pytest.mark.parametrize("workers", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_all_in_one(tmp_path: Path, workers: str) -> None:
    found = formats(tmp_path)
    ds = ps.join(**found)
    ds[3]
    seen = 0
    for batch in torch.utils.data.DataLoader(ds, batch_size=5, num_workers=2, multiprocessing_context=workers):
        for name, values in batch.items():
            same = values.numpy().reshape(len(values), -1)
            assert np.array_equal(same, VALUES[seen : seen + len(values)].reshape(len(values), -1)), name
        seen += 5
    assert seen == ROWS
    assert len(batch) == len(found)
