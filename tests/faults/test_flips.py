"""One flipped bit, at 24 places of each format's data.

Where the format has a checksum, or there is a manifest, every one is an error that names the file; elsewhere the loader
says that what it delivered was held against nothing. Every flip ends in one of these, or in right data.
"""

import io
import os
import shutil
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr
from PIL import Image

import lmdb
import penstock as ps
import tiledb
from penstock.base.sizes import MiB
from penstock.errors import Corrupt, DataError
from penstock.webdataset import TarWriter

# Its own writing, below, would put a warning into os.fork for the rest of this process.
tiledb.ctx._needs_fork_wrapper = False

FLIPS = 24
ROWS = 30
VALUES = np.random.default_rng(7).integers(0, 40, (ROWS, 600), dtype=np.int32)


def hdf5(folder, **options):
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", data=VALUES, chunks=options.pop("chunks", (1, 600)), **options)
    return folder / "a.h5"


def contiguous(folder):
    return hdf5(folder, chunks=None)


def raw_chunks(folder):
    return hdf5(folder)


def lzf(folder):
    return hdf5(folder, compression="lzf")


def deflated(folder):
    return hdf5(folder, compression="gzip", shuffle=True)


def summed(folder):
    return hdf5(folder, fletcher32=True)


def deflated_and_summed(folder):
    return hdf5(folder, compression="gzip", fletcher32=True)


def zarr_array(folder, **options):
    array = zarr.create_array(str(folder / "a.zarr"), shape=VALUES.shape, chunks=(3, 600), dtype="i4", **options)
    array[:] = VALUES
    return folder / "a.zarr"


def raw_zarr(folder):
    return zarr_array(folder, compressors=None)


def zstd_zarr(folder):
    return zarr_array(folder)


def crc_zarr(folder):
    return zarr_array(folder, compressors=[zarr.codecs.Crc32cCodec()])


def tiledb_array(folder, *filters):
    rows = tiledb.Dim("row", domain=(0, ROWS - 1), tile=3, dtype=np.int64)
    columns = tiledb.Dim("column", domain=(0, 599), tile=600, dtype=np.int64)
    attribute = tiledb.Attr("x", dtype=np.int32, filters=tiledb.FilterList(filters))
    path = str(folder / "a.tiledb")
    tiledb.Array.create(path, tiledb.ArraySchema(tiledb.Domain(rows, columns), [attribute]))
    with tiledb.open(path, "w") as array:
        array[:] = VALUES
    return folder / "a.tiledb"


def plain_tiledb(folder):
    return tiledb_array(folder)


def sha_tiledb(folder):
    return tiledb_array(folder, tiledb.ChecksumSHA256Filter())


def md5_tiledb(folder):
    return tiledb_array(folder, tiledb.ChecksumMD5Filter())


def tar(folder):
    with tarfile.open(folder / "a.tar", "w") as archive:
        for row, values in enumerate(VALUES):
            stream = io.BytesIO()
            np.save(stream, values)
            member = tarfile.TarInfo(f"{row:03d}.npy")
            member.size = len(stream.getvalue())
            archive.addfile(member, io.BytesIO(stream.getvalue()))
    return folder / "a.tar"


def database(folder):
    with lmdb.open(str(folder / "a.lmdb"), map_size=1 << 22) as env, env.begin(write=True) as transaction:
        for row, values in enumerate(VALUES):
            stream = io.BytesIO()
            np.save(stream, values)
            transaction.put(f"{row:03d}.npy".encode(), stream.getvalue())
    return folder / "a.lmdb"


def npy(folder):
    np.save(folder / "a.npy", VALUES)
    return folder / "a.npy"


def pictures(folder):
    (folder / "pictures").mkdir()
    for row in range(6):
        pixels = np.random.default_rng(row).integers(0, 255, (24, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "pictures" / f"{row}.jpg")
    return folder / "pictures"


def every_value(ds):
    """What a loader delivers of all fields, and what it says of it."""
    with ps.Loader(ds, batch_size=7, memory="96MiB", threads=2, output="numpy") as loader:
        batches = [{name: np.array(values) for name, values in batch.items()} for batch in loader]
        stats = loader.stats()
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}, stats


def data_files(path: Path) -> list[Path]:
    """The files with the values in them, and not those that say how they are stored."""
    if path.is_file():
        return [path]
    files = sorted(each for each in path.rglob("*") if each.is_file())
    metadata = ("zarr.json", "lock.mdb")
    inside = [each for each in files if each.name not in metadata]
    if path.suffix == ".tiledb":
        return [each for each in inside if each.name == "a0.tdb"]
    return inside


def flips(path: Path, number: int):
    """Flips one bit after another, and puts each back; yields the file and the byte."""
    files = data_files(path)
    random = np.random.default_rng(number)
    for _ in range(FLIPS):
        file = files[random.integers(len(files))]
        whole = file.read_bytes()
        place = int(random.integers(len(whole)))
        about = os.stat(file)
        with open(file, "r+b") as changed:
            changed.seek(place)
            changed.write(bytes([whole[place] ^ (1 << int(random.integers(8)))]))
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
        yield file, place
        file.write_bytes(whole)
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))


EVERY = [
    contiguous, raw_chunks, lzf, deflated, summed, deflated_and_summed, raw_zarr, zstd_zarr, crc_zarr, plain_tiledb,
    sha_tiledb, md5_tiledb, tar, database, npy, pictures,
]  # fmt: skip

CHECKED = {
    deflated: "adler32", summed: "fletcher32", deflated_and_summed: "fletcher32", crc_zarr: "crc32c",
    sha_tiledb: "sha256", md5_tiledb: "md5",
}  # fmt: skip


@pytest.mark.case(4)
@pytest.mark.parametrize("make", EVERY, ids=lambda make: make.__name__)
def test_a_manifest_finds_every_flip(tmp_path, make):
    path = make(tmp_path)
    expected, _ = every_value(ps.open(path))
    manifest = ps.write_manifest(path)
    got, stats = every_value(ps.open(path, manifest=manifest))
    assert stats.unverified == 0
    assert all(np.array_equal(got[name], expected[name]) for name in expected)
    for file, place in flips(path, 4):
        verdict = ps.verify(path, manifest=manifest)
        assert [damage.file for damage in verdict.damages] == [str(file)]
        assert verdict.damages[0].begin <= place < verdict.damages[0].end
        with pytest.raises(Corrupt, match=f"(?s){file.name}: bytes .*sha256.*instead of"):
            every_value(ps.open(path, manifest=manifest, index_dir=False))


@pytest.mark.case(4)
@pytest.mark.parametrize("make", EVERY, ids=lambda make: make.__name__)
def test_without_a_manifest_what_is_not_checked_is_told(tmp_path, make):
    path = make(tmp_path)
    expected, stats = every_value(ps.open(path))
    assert {read.checked_by for read in ps.inspect(path).paths} == {CHECKED.get(make, "")}
    assert stats.unverified == (0 if make in CHECKED else stats.samples * len(expected))
    for file, place in flips(path, 5):
        got, stats, why = {}, None, None
        try:
            got, stats = every_value(ps.open(path, index_dir=False))
        except DataError as error:
            why = str(error)
        wrong = [name for name in got if not np.array_equal(got[name], expected[name])]
        assert path.name in (why or path.name), (file, place, why)
        assert not wrong or (make not in CHECKED and stats.unverified), (file, place)


@pytest.mark.case(4)
def test_samples_that_suffer_are_named(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((6, MiB), np.uint8))
    manifest = ps.write_manifest(tmp_path / "a.npy")
    with open(tmp_path / "a.npy", "r+b") as file:
        file.seek(3 * MiB + 500)
        file.write(b"?")
    verdict = ps.verify(tmp_path / "a.npy", manifest=manifest)
    assert [(damage.begin, damage.end) for damage in verdict.damages] == [(3 * MiB, 4 * MiB)]
    assert sorted(row for fault in verdict.faults for row in fault.rows) == [2, 3]  # the header shifts them
    ds = ps.open(tmp_path / "a.npy", manifest=manifest)
    assert not ds[1]["data"].any()
    with pytest.raises(Corrupt, match=r"bytes 3,145,728 to 4,194,304"):
        ds[3]
    with ps.Loader(ds, batch_size=2, memory="64MiB", on_error="skip", output="numpy") as loader:
        assert sum(len(batch["data"]) for batch in loader) == 4
        assert [sample.row for sample in loader.stats().left_out] == [2, 3]


@pytest.mark.case(4)
@pytest.mark.parametrize("kind", ["npy", "tar"])
def test_rows_too_small_for_a_read_each_are_compared_too(tmp_path, kind):
    """Which are gathered from a mapping otherwise, where nobody sees what is read."""
    values, path = np.ones((2000, 300), np.float32), tmp_path / f"a.{kind}"
    if kind == "npy":
        np.save(path, values)
    else:
        with TarWriter(path, index_dir=False) as writer:
            for row, each in enumerate(values):
                writer.write({"__key__": f"{row:05d}", "npy": each})
    manifest = ps.write_manifest(path)
    assert every_value(ps.open(path, manifest=manifest))[0][{"npy": "data", "tar": "npy"}[kind]].sum() == values.size
    about = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2 + 700)
        file.write(b"?")
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    ds = ps.open(path, manifest=manifest)
    assert ds[0]
    with pytest.raises(Corrupt, match="bytes 1,048,576 to"):
        every_value(ds)


@pytest.mark.case(4)
def test_files_that_are_gone_or_new_are_told(tmp_path):
    path = raw_zarr(tmp_path)
    manifest = ps.write_manifest(path)
    shutil.move(path / "c" / "3", tmp_path / "elsewhere")
    (verdict,) = ps.verify(path, manifest=manifest).damages
    assert verdict.file.endswith("c/3/0")
    with pytest.raises(DataError, match="lists it, and it is not there"):
        every_value(ps.open(path, manifest=manifest))
    shutil.move(tmp_path / "elsewhere", path / "c" / "3")
    (path / "c" / "3" / "1").write_bytes(b"new")
    (verdict,) = ps.verify(path, manifest=manifest).damages
    assert "does not list it" in str(verdict)
