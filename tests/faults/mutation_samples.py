"""Small files for ``test_mutations.py``: ``python mutation_samples.py FOLDER`` writes them, and what is known of each.

``FOLDER/FORMAT/`` has the dataset, and ``FOLDER/FORMAT.json`` says by file (its path within the dataset, "" for a
dataset of one file) which bytes are values (``data``) and which are covered by a checksum that a reader must look at
(``covered``; ``true`` for a whole file of whatever length). One program of its own, because TileDB and zarr leave
threads behind in the process they ran in.
"""

import gzip
import io
import json
import re
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zarr
from mutations import sealed_spans
from PIL import Image

import lmdb
import tiledb

ROWS, WIDTH = 12, 120
# No 0 and no -1 among them: Fletcher's sum cannot tell the two from each other.
VALUES = np.random.default_rng(11).integers(1, 50, (ROWS, WIDTH), dtype=np.int16)


def npy(values: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def hdf5(path: Path, covered: bool = False, version: str = "earliest", **options) -> dict:
    weak = "fletcher32" in options and "compression" not in options
    with h5py.File(path, "w", libver=version) as file:
        dataset = file.create_dataset("x", data=VALUES, **options)
        if dataset.chunks:
            chunks = [dataset.id.get_chunk_info(number) for number in range(dataset.id.get_num_chunks())]
            data = [[chunk.byte_offset, chunk.byte_offset + chunk.size] for chunk in chunks]
        else:
            data = [[dataset.id.get_offset(), dataset.id.get_offset() + VALUES.nbytes]]
    sealed = sealed_spans(path.read_bytes()) if version == "latest" else []
    return {"data": {"": data}, "covered": {"": [*sealed, *(data if covered else [])]}, "sealed": sealed, "weak": weak}


def zarr_array(path: Path, covered: bool = False, **options) -> dict:
    zarr.create_array(path, shape=VALUES.shape, dtype="i2", **{"chunks": (4, 60), **options})[:] = VALUES
    files = [str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()]
    chunks = {name: True for name in files if not name.endswith((".json", ".zarray", ".zattrs", ".zgroup"))}
    return {"data": chunks, "covered": chunks if covered else {}}


def zarr_zip(path: Path) -> dict:
    """Packed by hand: zarr would write the time of day into it, and a seed would not make the same file again."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path, "w") as archive:
        zarr_array(Path(folder) / "a")
        for each in sorted((Path(folder) / "a").rglob("*")):
            if each.is_file():
                archive.writestr(zipfile.ZipInfo(str(each.relative_to(f"{folder}/a"))), each.read_bytes())
    return {**of_members(path, "c/"), "covered": {}}


def of_members(path: Path, begins: str) -> dict:
    """What lies in a zip archive: the members' bytes. ``verify`` compares all of them with their CRC-32; a loader
    does where it reads a whole member at once (``covered``)."""
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        spans = []
        for member in archive.infolist():
            name, extra = np.frombuffer(data[member.header_offset + 26 : member.header_offset + 30], "<u2").tolist()
            begin = member.header_offset + 30 + name + extra
            if member.filename.startswith(begins):
                spans.append([begin, begin + member.compress_size])
    return {"data": {"": spans}, "covered": {"": spans}, "verified": {"": spans}}


def npz(path: Path, save) -> dict:
    save(path, x=VALUES, y=VALUES[:, :3].astype("f4"))
    return of_members(path, "")


def plain_npy(path: Path) -> dict:
    np.save(path, VALUES)
    return {"data": {"": [[128, 128 + VALUES.nbytes]]}, "covered": {}}


def tar(path: Path, form: int) -> dict:
    data = []
    with tarfile.open(path, "w", format=form) as archive:
        for row, values in enumerate(VALUES[:6]):
            for kind, content in (("npy", npy(values)), ("cls", b"%d" % row)):
                member = tarfile.TarInfo(f"{'long' * 30 if form != tarfile.USTAR_FORMAT else ''}{row:04d}.{kind}")
                member.size = len(content)
                if form == tarfile.PAX_FORMAT:
                    member.pax_headers = {"size": str(len(content)), "mtime": "1.5"}
                archive.addfile(member, io.BytesIO(content))
                begin = archive.offset - -(-len(content) // 512) * 512
                data.append([begin + (128 if kind == "npy" else 0), archive.offset])
    return {"data": {"": data}, "covered": {}}


def database(path: Path) -> dict:
    with lmdb.open(str(path), map_size=1 << 20, subdir=False, lock=False) as env, env.begin(write=True) as transaction:
        for row, values in enumerate(VALUES):
            transaction.put(f"{row:04d}.npy".encode(), npy(values))
        transaction.put(b"0003.txt", b"long" * 3000)
        transaction.delete(b"0003.txt")
    return {"data": {}, "covered": {}}


def tile(path: Path, *filters) -> dict:
    dimensions = [
        tiledb.Dim(name, domain=(0, size - 1), tile=extent, dtype=np.int64)
        for name, size, extent in (("row", ROWS, 4), ("column", WIDTH, WIDTH))
    ]
    attribute = tiledb.Attr("x", dtype=np.int16, filters=tiledb.FilterList(filters))
    tiledb.Array.create(str(path), tiledb.ArraySchema(tiledb.Domain(*dimensions), [attribute]))
    with tiledb.open(str(path), "w") as array:
        array[:] = VALUES
    return {"data": {}, "covered": {}}


def table() -> pa.Table:
    return pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(VALUES.reshape(-1)), WIDTH), "y": range(ROWS)})


def parquet(path: Path) -> dict:
    pq.write_table(table(), path, row_group_size=5)
    return {"data": {}, "covered": {}}


def arrow(path: Path) -> dict:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table().schema) as writer:
        writer.write_table(table(), max_chunksize=5)
    data = path.read_bytes()
    spans = []
    for begin in range(0, ROWS, 5):
        content = VALUES[begin : begin + 5].tobytes()
        spans.append([data.find(content), data.find(content) + len(content)])
    return {"data": {"": spans}, "covered": {}}


def nifti(path: Path, packed: bool) -> dict:
    image = nibabel.Nifti1Image(np.moveaxis(VALUES.reshape(ROWS, 4, 5, 6), 0, 3), np.eye(4))
    plain = image.to_bytes()
    path.write_bytes(gzip.compress(plain, 6, mtime=0) if packed else plain)
    if packed:
        return {"data": {}, "covered": {"": [[10, path.stat().st_size]]}}
    return {"data": {"": [[352, len(plain)]]}, "covered": {}}


def pictures(path: Path, kind: str, covered: bool = False) -> dict:
    path.mkdir()
    for row in range(4):
        pixels = np.random.default_rng(row).integers(0, 255, (20, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path / f"{row}.{kind}")
    return {"data": {}, "covered": {each.name: png_spans(each) for each in path.iterdir()} if covered else {}}


def png_spans(path: Path) -> list[list[int]]:
    """Names, contents and checksums of its parts, and not their lengths."""
    data = path.read_bytes()
    begins = [match.start() for match in re.finditer(b"IHDR|IDAT|IEND", data)]
    return [[at, at + 8 + int.from_bytes(data[at - 4 : at], "big")] for at in begins]


CRC = zarr.codecs.Crc32cCodec()

FORMATS = {
    "hdf5-contiguous": ("a.h5", hdf5, {}),
    "hdf5-btree1": ("a.h5", hdf5, {"chunks": (3, 60)}),
    "hdf5-btree1-gzip": ("a.h5", hdf5, {"chunks": (3, 60), "compression": "gzip", "shuffle": True, "covered": True}),
    "hdf5-btree1-fletcher": ("a.h5", hdf5, {"chunks": (3, 60), "fletcher32": True, "covered": True}),
    "hdf5-new-contiguous": ("a.h5", hdf5, {"version": "latest"}),
    "hdf5-fixed-array": ("a.h5", hdf5, {"version": "latest", "chunks": (3, 60), "fletcher32": True, "covered": True}),
    "hdf5-extensible-array": (
        "a.h5", hdf5, {"version": "latest", "chunks": (3, 60), "maxshape": (None, WIDTH), "compression": "gzip",
        "shuffle": True, "covered": True},
    ),
    "hdf5-btree2": ("a.h5", hdf5, {"version": "latest", "chunks": (3, 60), "maxshape": (None, None)}),
    "zarr2": ("a.zarr", zarr_array, {"zarr_format": 2}),
    "zarr3": ("a.zarr", zarr_array, {}),
    "zarr3-crc32c": ("a.zarr", zarr_array, {"compressors": [CRC], "covered": True}),
    "zarr3-shards": ("a.zarr", zarr_array, {"shards": (8, 120), "compressors": [CRC], "covered": True}),
    "zarr-zip": ("a.zarr.zip", zarr_zip, {}),
    "npz": ("a.npz", npz, {"save": np.savez}),
    "npz-compressed": ("a.npz", npz, {"save": np.savez_compressed}),
    "npy": ("a.npy", plain_npy, {}),
    "tar-ustar": ("a.tar", tar, {"form": tarfile.USTAR_FORMAT}),
    "tar-pax": ("a.tar", tar, {"form": tarfile.PAX_FORMAT}),
    "tar-gnu": ("a.tar", tar, {"form": tarfile.GNU_FORMAT}),
    "lmdb": ("a.mdb", database, {}),
    "tiledb": ("a.tiledb", tile, {}),
    "parquet": ("a.parquet", parquet, {}),
    "arrow": ("a.arrow", arrow, {}),
    "nii": ("a.nii", nifti, {"packed": False}),
    "nii-gz": ("a.nii.gz", nifti, {"packed": True}),
    "jpeg": ("pictures", pictures, {"kind": "jpg"}),
    "png": ("pictures", pictures, {"kind": "png", "covered": True}),
    "tiff": ("pictures", pictures, {"kind": "tiff"}),
    "ppm": ("pictures", pictures, {"kind": "ppm"}),
    "bmp": ("pictures", pictures, {"kind": "bmp"}),
    "webp": ("pictures", pictures, {"kind": "webp"}),
}  # fmt: skip


if __name__ == "__main__":
    for name, (file, make, options) in FORMATS.items():
        folder = Path(sys.argv[1]) / name
        folder.mkdir()
        known = make(folder / file, **options)
        Path(f"{folder}.json").write_text(json.dumps(known | {"path": file}))
