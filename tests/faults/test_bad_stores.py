"""Damaged Zarr stores, absent libraries and folders of nothing known: the right error, with the file and a way out."""

import json
import shutil
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr

import penstock as ps
from penstock.errors import (
    Changed,
    ConfigError,
    Corrupt,
    DataError,
    DecodeFailed,
    LimitExceeded,
    Missing,
    SchemaMismatch,
    Truncated,
    Unavailable,
    Unsafe,
)

VALUES = (np.cumsum(np.random.default_rng(0).normal(size=(12, 40)), axis=1) * 20).astype("i4")


def write(path: Path, **options: Any) -> Path:
    array = zarr.create_array(path, shape=VALUES.shape, dtype=VALUES.dtype, **{"chunks": (1, 40), **options})
    array[...] = VALUES
    return path


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def edit(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, **changes}))


# Chunks.


@pytest.mark.parametrize("at", [0, 5, -1])
@pytest.mark.parametrize("version", [2, 3])
def test_a_damaged_chunk_is_named(tmp_path: Path, at: int, version: int) -> None:
    codec: Any = numcodecs.GZip() if version == 2 else [zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()]
    path = write(tmp_path / "a.zarr", compressors=codec, zarr_format=version)
    chunk = path / ("7.0" if version == 2 else "c/7/0")
    flip(chunk, at if version == 3 else {5: -5}.get(at, at))  # gzip does not look at its own time
    ds = ps.open(path)
    np.testing.assert_array_equal(ds[[6, 8]]["data"], VALUES[[6, 8]])
    with pytest.raises((Corrupt, DecodeFailed), match=rf"{chunk}: data\[7\], chunk \(7, 0\) at offset 0.*restore"):
        ds[[6, 7]]


def test_every_flipped_bit_of_a_checked_chunk_is_seen(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", compressors=[zarr.codecs.Crc32cCodec()])
    chunk = path / "c/3/0"
    whole = chunk.read_bytes()
    for at in range(0, len(whole), 7):
        flip(chunk, at)
        with pytest.raises(Corrupt, match="crc32c"):
            ps.open(path)[[3]]
        chunk.write_bytes(whole)
    np.testing.assert_array_equal(ps.open(path)[3]["data"], VALUES[3])


@pytest.mark.parametrize("keep", [0, 3, 50])
@pytest.mark.parametrize("compressors", [None, "auto"])
def test_a_chunk_cut_short(tmp_path: Path, keep: int, compressors: Any) -> None:
    path = write(tmp_path / "a.zarr", compressors=compressors)
    chunk = path / "c/4/0"
    chunk.write_bytes(chunk.read_bytes()[:keep])
    with pytest.raises(DataError, match=rf"{chunk}: data\[4\]"):
        ps.open(path)[[4]]


def test_a_chunk_longer_than_any_codec_makes_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr")
    (path / "c/4/0").write_bytes(bytes(10**6))
    with pytest.raises(LimitExceeded, match=r"c/4/0: a chunk of 1,000,000 bytes.*restore"):
        ps.open(path)[[4]]


@pytest.mark.case(8)
def test_a_chunk_that_unpacks_to_more_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", compressors=numcodecs.Zstd(), zarr_format=2)
    (path / "4.0").write_bytes(numcodecs.Zstd().encode(bytes(10**8)))  # a few kilobytes
    with pytest.raises(DecodeFailed, match="do not decode to the expected 160"):
        ps.open(path)[[4]]


def test_bad_rows_are_left_out_on_request(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr")
    (path / "c/4/0").write_bytes(b"nothing")
    loader = ps.Loader(ps.open(path), batch_size=4, memory="32MiB", on_error="skip", columns=("data",))
    rows = np.concatenate([np.asarray(batch) for (batch,) in loader])
    np.testing.assert_array_equal(rows, np.delete(VALUES, 4, axis=0))


def test_an_unreadable_chunk_is_not_an_absent_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr")
    (path / "c/4/0").unlink()
    (path / "c/4/0").mkdir()
    with pytest.raises(Unavailable, match="c/4/0"):
        ps.open(path)[[4]]


def test_a_chunk_of_blosc_cut_short(tmp_path: Path) -> None:
    """The library takes the length from the chunk's header, and would go on with what was decoded before."""
    path = write(tmp_path / "a.zarr", compressors=zarr.codecs.BloscCodec())
    chunk = path / "c/4/0"
    whole = chunk.read_bytes()
    for content, told in ((whole[:-1], f"{len(whole) - 1:,} bytes, where its header says {len(whole):,}"), (b"", "")):
        chunk.write_bytes(content)
        ds = ps.open(path)
        for _ in range(3):
            ds[[3]]
            with pytest.raises(DecodeFailed, match=rf"c/4/0.*blosc: .*{told}"):
                ds[[4]]


# Shards.


def sharded(path: Path, **options: Any) -> Path:
    return write(path, chunks=(1, 20), shards=(4, 40), **options)


@pytest.mark.parametrize("keep", [0, 20, 131])
def test_a_shard_too_short_for_its_index(tmp_path: Path, keep: int) -> None:
    shard = sharded(tmp_path / "a.zarr") / "c/1/0"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(Truncated, match=rf"{shard}: the shard \(1, 0\) has {keep} bytes.*index of 132.*restore"):
        ps.open(tmp_path / "a.zarr")[[5]]
    np.testing.assert_array_equal(ps.open(tmp_path / "a.zarr")[[3, 8]]["data"], VALUES[[3, 8]])


def test_an_index_larger_than_its_shard_takes_no_memory(tmp_path: Path) -> None:
    document = sharded(tmp_path / "a.zarr") / "zarr.json"
    found = json.loads(document.read_text())
    found["chunk_grid"]["configuration"]["chunk_shape"][0] = 2**22  # an index of 128 MiB
    document.write_text(json.dumps(found))
    ds = ps.open(tmp_path / "a.zarr")
    tracemalloc.start()
    try:
        with pytest.raises(Truncated, match="too few for its index of 134,217,732"):
            ds[[3]]
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


def test_a_shard_cut_short_has_no_index_that_checks(tmp_path: Path) -> None:
    shard = sharded(tmp_path / "a.zarr") / "c/1/0"
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(Corrupt, match=rf"{shard}: the index of shard \(1, 0\) is damaged \(crc32c"):
        ps.open(tmp_path / "a.zarr")[[5]]


def test_an_index_that_points_outside(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    codec = zarr.codecs.ShardingCodec(
        chunk_shape=(1, 20), codecs=[zarr.codecs.BytesCodec()], index_codecs=[zarr.codecs.BytesCodec()]
    )
    array = zarr.create_array(
        path, shape=VALUES.shape, dtype="i4", chunks=(4, 40), serializer=codec, compressors=None, filters=None
    )
    array[...] = VALUES
    np.testing.assert_array_equal(ps.open(path)[:]["data"], VALUES)
    shard = path / "c/1/0"
    data = bytearray(shard.read_bytes())
    for begin, value in [(-128, 2**40), (-120, 2**63), (-128, 2**64 - 2)]:
        damaged = bytearray(data)
        damaged[begin : begin + 8 or None] = value.to_bytes(8, "little")
        shard.write_bytes(damaged)
        with pytest.raises((Truncated, LimitExceeded), match=rf"{shard}.*restore"):
            ps.open(path)[[4]]


# Metadata.


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"zarr_format": 4}', '{"zarr_format": 3}', "[" * 10**5])
@pytest.mark.parametrize("name", ["zarr.json", ".zarray"])
def test_metadata_that_are_none(tmp_path: Path, name: str, text: str) -> None:
    path = write(tmp_path / "a.zarr", zarr_format=3 if name == "zarr.json" else 2)
    (path / name).write_text(text)
    with pytest.raises((Corrupt, Missing), match=r"a\.zarr"):
        ps.open(path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"shape": "x"}, "is not a shape"),
        ({"shape": [12, -1]}, "is not a shape"),
        ({"shape": [12]}, "in an array of shape"),
        ({"codecs": []}, ""),
        ({"codecs": 5}, "not the metadata"),
        ({"fill_value": "much"}, ""),
        ({"fill_value": 2**70}, "not the metadata"),
        ({"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 40]}}}, "is not a shape"),
        ({"chunk_key_encoding": {"name": "default", "configuration": {"separator": "../"}}}, "separator"),
        ({"data_type": "string"}, "expected numbers"),
        ({"data_type": {"name": "numpy.datetime64"}}, "expected numbers"),
        ({"node_type": None}, "node_type is None"),
        ({"unheard_of": 5}, "unheard_of"),
        ({"codecs": [{"name": "bytes", "configuration": {"endian": "little", "level": 3}}]}, "level"),
    ],
)
def test_metadata_that_cannot_be(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    path = write(tmp_path / "a.zarr")
    edit(path / "zarr.json", **changes)
    with pytest.raises((Corrupt, Missing, SchemaMismatch, ConfigError), match=f"a.zarr.*{told}"):
        ps.open(path)


@pytest.mark.case(8)
def test_a_store_of_four_tebibytes_takes_no_memory_to_open(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr")
    edit(path / "zarr.json", shape=[2**30, 40])
    ds = ps.open(path, allow_fill=True)
    assert len(ds) == 2**30
    assert ds.store.index_bytes == 0
    assert (ds[2**30 - 1]["data"] == 0).all()
    edit(path / "zarr.json", shape=[12, 2**40], chunk_grid=_grid(12, 2**40))
    with pytest.raises(ps.errors.BudgetExceeded):
        ps.Loader(ps.open(path), batch_size=1, memory="1GiB")


def _grid(*sizes: int) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(sizes)}}


@pytest.mark.case(17)
def test_pickles_are_not_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", zarr_format=2)
    edit(path / ".zarray", filters=[{"id": "pickle", "protocol": 4}])
    with pytest.raises(Unsafe, match="pickle"):
        ps.open(path)


def test_a_codec_that_nobody_has(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", zarr_format=2)
    edit(path / ".zarray", compressor={"id": "squeeze"})
    with pytest.raises(ConfigError, match=r"zarr-python cannot open it.*squeeze"):
        ps.open(path)


def test_groups_in_a_ring(tmp_path: Path) -> None:
    zarr.create_group(tmp_path / "a.zarr", zarr_format=2)
    zarr.create_group(tmp_path / "a.zarr", path="b", zarr_format=2)
    (tmp_path / "a.zarr/b/again").symlink_to(tmp_path / "a.zarr", target_is_directory=True)
    with pytest.raises(Missing, match="no Zarr array in it"):
        ps.open(tmp_path / "a.zarr")


@pytest.mark.case(10)
def test_metadata_that_change_while_the_store_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr")
    ds = ps.open(path, max_open_files=0)
    ds[0]
    edit(path / "zarr.json", shape=[12, 41])
    with pytest.raises(Changed, match=r"zarr\.json"):
        ds[1]


def test_arrays_of_other_lengths_and_names(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    zarr.create_group(path)
    zarr.create_array(path, name="x", data=np.zeros((4, 2)))
    zarr.create_array(path, name="y", data=np.zeros(5))
    with pytest.raises(SchemaMismatch, match=r"x has 4, y has 5.*fields="):
        ps.open(path)
    with pytest.raises(SchemaMismatch, match="the fields differ"):
        ps.open(path, fields=["x", "y"])
    with pytest.raises(Missing, match="no array 'z'; it has 'x', 'y'"):
        ps.open(path, fields=["z"])
    with pytest.raises(ConfigError, match=r"row_axis=2 for 'x'.*expected 0 to 1"):
        ps.open(path, fields=["x"], row_axis=2)
    zarr.create_group(tmp_path / "empty.zarr")
    with pytest.raises(Missing, match="no Zarr array"):
        ps.open(tmp_path / "empty.zarr")


@pytest.mark.parametrize("form", [2, 3])
def test_an_array_that_lost_its_metadata_is_named(tmp_path: Path, form: Any) -> None:
    group = zarr.create_group(tmp_path / "a.zarr", zarr_format=form)
    group.create_array("x", data=np.ones((4, 2)))
    group.create_array("y", data=np.ones(4))
    (tmp_path / "a.zarr/y" / ("zarr.json" if form == 3 else ".zarray")).unlink()
    with pytest.warns(ps.FieldsLeftOut, match=r"'y': no metadata: expected zarr.json, .zarray or .zgroup"):
        ds = ps.open(tmp_path / "a.zarr")
    assert tuple(ds.fields_left_out) == ("y",)
    assert tuple(ps.open(tmp_path / "a.zarr", fields=["x"]).fields_left_out) == ()


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("kind", ["group?", None, 5])
def test_a_node_of_no_known_kind(tmp_path: Path, consolidated: bool, kind: Any) -> None:
    group = zarr.create_group(tmp_path / "a.zarr")
    group.create_array("x", data=np.ones((4, 2)))
    group.create_array("y", data=np.ones(4))
    if consolidated:
        with pytest.warns(zarr.errors.ZarrUserWarning):
            zarr.consolidate_metadata(tmp_path / "a.zarr")
    document = tmp_path / "a.zarr" / ("zarr.json" if consolidated else "y/zarr.json")
    found = json.loads(document.read_text())
    if consolidated:
        found["consolidated_metadata"]["metadata"]["y"]["node_type"] = kind
    else:
        found["node_type"] = kind
    document.write_text(json.dumps(found))
    with pytest.raises(Corrupt, match=r"y: node_type is .*, expected 'array'"):
        ps.open(tmp_path / "a.zarr")


# Libraries that are not there.


@pytest.mark.parametrize("library", ["zarr", "google_crc32c", "imagecodecs"])
def test_an_absent_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    options: dict[str, Any] = {
        "zarr": {"zarr_format": 2, "compressors": numcodecs.BZ2()},
        "google_crc32c": {"compressors": [zarr.codecs.Crc32cCodec()]},
        "imagecodecs": {},
    }[library]
    path = write(tmp_path / "a.zarr", **options)
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=r"pip install .*penstock\[zarr\]"):
        ps.open(path)[0]


def test_tables_without_their_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"penstock\[parquet\]"):
        ps.open(tmp_path / "a.parquet")


# What is recognised.


def test_folders_and_files_of_nothing_known(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"folder: is a folder.*tried: hdf5 .*zarr \(.*Name the files in it"):
        ps.open(tmp_path / "folder")
    (tmp_path / "a.bin").write_bytes(bytes(600))
    with pytest.raises(ConfigError, match=r"of no known format.*Expected one of: hdf5 .*parquet"):
        ps.open(tmp_path / "a.bin")
    (tmp_path / "broken.zarr").mkdir()
    with pytest.raises(Missing, match=r"broken\.zarr: no Zarr array in it"):
        ps.open(tmp_path / "broken.zarr")


def test_content_is_believed_before_the_name(tmp_path: Path) -> None:
    path = write(tmp_path / "betas.zarr")
    shutil.move(path, tmp_path / "betas.h5")
    np.testing.assert_array_equal(ps.open(tmp_path / "betas.h5")[:]["data"], VALUES)
    np.save(tmp_path / "a.npy", VALUES)
    shutil.move(tmp_path / "a.npy", tmp_path / "a.parquet")
    np.testing.assert_array_equal(ps.open(tmp_path / "a.parquet")[:]["data"], VALUES)


def test_a_zip_archive_of_other_things(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("note.txt", "x")
    with pytest.raises(ConfigError, match=r"a\.zip: of no known format"):
        ps.open(tmp_path / "a.zip")
    (tmp_path / "cut.zip").write_bytes((tmp_path / "a.zip").read_bytes()[:40])
    with pytest.raises(Truncated, match=r"cut\.zip: not a whole zip archive"):
        ps.open(tmp_path / "cut.zip")


@pytest.mark.case(24)
def test_a_member_of_an_archive_without_a_name(tmp_path):
    """As a flipped byte makes it: the directory takes the name for a further field."""
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("abcd", b"content")
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")
    content[entry + 28 : entry + 32] = (0).to_bytes(2, "little") + (4).to_bytes(2, "little")
    content[entry + 46 : entry + 50] = b"ab\0\0"
    path.write_bytes(content)
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == [""]
    with pytest.raises(Truncated, match=r"a\.npz: its directory lists a member without a name"):
        ps.open(path)
