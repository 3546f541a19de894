"""Write data.zip and saved.json: `python tests/states/make.py`.

Run it only to add to them: what they hold was saved by earlier versions, and must stay.
"""

import io
import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import zarr
from PIL import Image

import lmdb
import tiledb

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import catalog  # noqa: E402

ROWS = catalog.ROWS
VALUES = np.arange(ROWS * 24, dtype=np.int16).reshape(ROWS, 4, 6)


def write_files(root):
    np.save(root / "rows.npy", VALUES)
    np.savez(root / "rows.npz", x=VALUES, y=VALUES[:, 0])
    VALUES.astype("<f4").tofile(root / "rows.bin")
    with h5py.File(root / "rows.h5", "w") as file:
        file["x"] = VALUES
        file.create_dataset("gzip", data=VALUES, chunks=(1, 4, 6), compression="gzip", shuffle=True)
        file.create_dataset("blocks", data=VALUES, chunks=(3, 4, 6))
    zarr.create_array(str(root / "two.zarr"), data=VALUES, chunks=(2, 4, 6), zarr_format=2)
    zarr.create_array(str(root / "three.zarr"), data=VALUES, chunks=(1, 4, 6), zarr_format=3)
    zarr.create_array(str(root / "shards.zarr"), data=VALUES, chunks=(1, 4, 6), shards=(4, 4, 6))
    write_tar(root / "rows.tar")
    write_pictures(root / "pictures")
    with lmdb.open(str(root / "rows.lmdb"), map_size=1 << 20) as database, database.begin(write=True) as transaction:
        for row, values in enumerate(VALUES):
            transaction.put(f"{row:04d}.npy".encode(), as_npy(values))
    tiledb.from_numpy(str(root / "rows.tiledb"), VALUES)
    columns = {"a": np.arange(ROWS), "b": np.arange(ROWS) / 2}
    pa.parquet.write_table(pa.table(columns), root / "rows.parquet")
    for name in ("rows.nii", "rows.nii.gz"):
        nibabel.save(nibabel.Nifti1Image(VALUES.reshape(4, 6, 1, ROWS), np.eye(4)), root / name)


def as_npy(values):
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def write_tar(path):
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for row, values in enumerate(VALUES):
            for name, data in ((f"{row:04d}.npy", as_npy(values)), (f"{row:04d}.cls", str(row).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def write_pictures(folder):
    for row in range(4):
        inside = folder / ("cat" if row % 2 else "dog")
        inside.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), row * 40, np.uint8)).save(inside / f"{row}.png")


def saved(root):
    """What a user may have on disk: fingerprints, and positions of loaders."""
    found = {**catalog.datasets(root), **catalog.nsd_datasets(root)}
    blocks = found["hdf5 chunks of rows"]
    loaders = {f"{name}, {n} batches": (options, n) for name, options in catalog.ORDERS.items() for n in (0, 2)}
    states, multi = {}, {}
    for name, (options, n) in loaders.items():
        state = catalog.loader(blocks, n, **options).state_dict()
        states[name] = {"state": state, "rest": catalog.rest(blocks, state, **options)}
    for mode in ("together", "alternate"):
        loader = catalog.multi_loader(found, mode)
        next(iter(loader))
        multi[mode] = loader.state_dict()
    return {"fingerprints": {name: ds.fingerprint for name, ds in found.items()}, "states": states, "multi": multi}


if __name__ == "__main__":
    from penstock.nsd import synthesize

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "data"
        root.mkdir()
        if (HERE / "data.zip").exists():
            shutil.unpack_archive(HERE / "data.zip", root)
        else:
            write_files(root)
            synthesize(root / "nsd", "tiny", subjects=[1])
            shutil.make_archive(str(HERE / "data"), "zip", root)
        (HERE / "saved.json").write_text(json.dumps(saved(root), indent=1) + "\n")
