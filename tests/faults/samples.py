"""Small datasets of every format, for tests that treat all alike: ``python samples.py FOLDER`` writes them.

One program of its own, because the libraries that write (TileDB, zarr) leave threads behind in the process they ran in.
"""

import gzip
import io
import sys
import tarfile
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zarr
from PIL import Image

import lmdb
import tiledb

ROWS, WIDTH = 24, 1500
VALUES = np.random.default_rng(3).integers(0, 50, (ROWS, WIDTH), dtype=np.int16)


def npy(values: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def jpeg(number: int) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, "JPEG")
    return stream.getvalue()


def hdf5(path: Path) -> None:
    with h5py.File(path / "contiguous.h5", "w") as file:
        file["x"] = VALUES
    with h5py.File(path / "chunks.h5", "w") as file:
        file.create_dataset("x", data=VALUES, chunks=(1, WIDTH), compression="gzip", shuffle=True, fletcher32=True)
    with h5py.File(path / "pieces.h5", "w", libver="latest") as file:
        file.create_dataset("x", data=VALUES, chunks=(5, 100))
    with h5py.File(path / "many.h5", "w") as file:  # so many chunks that their places are kept between runs
        file.create_dataset("x", data=VALUES, chunks=(1, 8))
    with h5py.File(path / "library.h5", "w") as file:
        file.create_dataset("x", data=VALUES, chunks=(3, WIDTH), scaleoffset=0)


def archives(path: Path) -> None:
    with tarfile.open(path / "a.tar", "w") as archive:
        for row, values in enumerate(VALUES):
            for name, content in (("npy", npy(values)), ("jpg", jpeg(row)), ("txt", b"text %d" % row)):
                member = tarfile.TarInfo(f"{row:04d}.{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    np.save(path / "a.npy", VALUES)
    np.savez(path / "a.npz", x=VALUES)
    np.savez_compressed(path / "packed.npz", x=VALUES)
    image = nibabel.Nifti1Image(np.moveaxis(VALUES.reshape(ROWS, 10, 15, 10), 0, 3), np.eye(4))
    image.to_filename(path / "a.nii")
    (path / "b.nii.gz").write_bytes(gzip.compress((path / "a.nii").read_bytes(), 1, mtime=0))


def stores(path: Path) -> None:
    zarr.create_array(path / "a.zarr", shape=VALUES.shape, chunks=(4, WIDTH), dtype="i2")[:] = VALUES
    shards = zarr.create_array(
        path / "shards.zarr", shape=VALUES.shape, chunks=(2, 500), shards=(8, WIDTH), dtype="i2", zarr_format=3
    )
    shards[:] = VALUES
    zarr.create_array(path / "old.zarr", shape=VALUES.shape, chunks=(4, WIDTH), dtype="i2", zarr_format=2)[:] = VALUES
    with lmdb.open(str(path / "a.lmdb"), map_size=1 << 22) as env, env.begin(write=True) as transaction:
        for row, values in enumerate(VALUES):
            transaction.put(f"{row:04d}.npy".encode(), npy(values))
            transaction.put(f"{row:04d}.jpg".encode(), jpeg(row))
    dimensions = [
        tiledb.Dim(name, domain=(0, size - 1), tile=tile, dtype=np.int64)
        for name, size, tile in (("row", ROWS, 4), ("column", WIDTH, WIDTH))
    ]
    schema = tiledb.ArraySchema(tiledb.Domain(*dimensions), [tiledb.Attr("x", dtype=np.int16)])
    tiledb.Array.create(str(path / "a.tiledb"), schema)
    with tiledb.open(str(path / "a.tiledb"), "w") as array:
        array[:] = VALUES


def tables(path: Path) -> None:
    column = pa.FixedSizeListArray.from_arrays(pa.array(VALUES.reshape(-1)), WIDTH)
    pq.write_table(pa.table({"x": column}), path / "a.parquet", row_group_size=8)
    table = pa.table({"x": column})
    with pa.OSFile(str(path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=8)
    (path / "pictures").mkdir()
    for row in range(ROWS):
        (path / "pictures" / f"{row:04d}.jpg").write_bytes(jpeg(row))
    (path / "arrays").mkdir()
    for row, values in enumerate(VALUES):
        (path / "arrays" / f"{row:04d}.npy").write_bytes(npy(values))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for make in (hdf5, archives, stores, tables):
        make(folder)
