"""Archives cut anywhere, files that are not there, sessions that differ, files that change in use, nothing at all."""

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

import lmdb
import penstock as ps
import penstock.webdataset as wds
from penstock.base.policy import DEFAULT as POLICY
from penstock.errors import Changed, ConfigError, Corrupt, DataError, Missing, PenstockError, SchemaMismatch, Truncated

SAMPLES = 20


def saved(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def write_tar(path: Path, samples: int = SAMPLES, size: int = 900) -> tuple[Path, list[int]]:
    """An archive, and where the last member of each sample ends."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for number in range(samples):
            for field, content in (("txt", b"%d" % number), ("bin", bytes([number]) * size)):
                info = tarfile.TarInfo(f"{number:03d}.{field}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    with tarfile.open(path) as archive:
        members = list(archive)
    return path, [-(-(each.offset_data + each.size) // 512) * 512 for each in members if each.name.endswith("bin")]


def streamed(path: Path) -> tuple[list[str], BaseException | None]:
    keys = []
    try:
        for sample in wds.WebDataset(str(path)):
            assert set(sample) >= {"txt", "bin"}, "samples are whole"
            assert len(sample["bin"]) == 900
            keys.append(sample["__key__"])
    except PenstockError as error:
        return keys, error
    return keys, None


@pytest.mark.case(1, 2)
def test_an_archive_cut_anywhere(tmp_path: Path) -> None:
    """Every end before that of its last member's padding is an error, and what was whole before it was delivered."""
    path, ends = write_tar(tmp_path / "a.tar")
    whole = path.read_bytes()
    end_of_data = ends[-1]
    cuts = {*range(0, end_of_data + 1, 512), *range(100, end_of_data, 1700), end_of_data - 700}
    for cut in sorted(cuts):
        path.write_bytes(whole[:cut])
        keys, error = streamed(path)
        assert isinstance(error, Truncated), f"cut at {cut:,}: {len(keys)} samples and {error!r}"
        assert f"{path}" in str(error)
        before = sum(end <= cut for end in ends)
        # The last of those may have been going to have more fields: nobody can say that it is whole.
        assert before - 1 <= len(keys) <= before
        assert keys == [f"{number:03d}" for number in range(len(keys))]
        if cut % 512 and len(keys) < before:
            assert "which may lack fields" in str(error)
        with pytest.raises(DataError, match=r"a\.tar"):
            ps.open(path, index_dir=False)
    path.write_bytes(whole)
    assert streamed(path) == ([f"{number:03d}" for number in range(SAMPLES)], None)


@pytest.mark.case(1)
def test_a_cut_inside_a_member_is_told_with_numbers(tmp_path: Path) -> None:
    path, ends = write_tar(tmp_path / "a.tar")
    os.truncate(path, ends[7] - 700)
    keys, error = streamed(path)
    assert keys == [f"{number:03d}" for number in range(7)]
    assert "'007.bin'" in str(error)
    assert "900 bytes were wanted from there, 324 are there" in str(error)
    assert "7 whole samples, and '007', which may lack fields, came before" in str(error)
    with pytest.raises(Truncated, match=r"007\.txt.*900 bytes were wanted from there, 324 are there"):
        ps.open(path, index_dir=False)


@pytest.mark.case(2)
def test_an_index_knows_how_many_there_were(tmp_path: Path) -> None:
    path, ends = write_tar(tmp_path / "a.tar")
    fields = ("txt", "bin")
    ps.open(path, index_dir=tmp_path / "index", fields=fields)
    os.truncate(path, ends[7])
    with pytest.raises(Truncated, match=r"no end-of-archive.*8 of 20 samples are whole"):
        ps.open(path, index_dir=tmp_path / "index", fields=fields)


@pytest.mark.case(3)
@pytest.mark.parametrize("at", range(0, 512, 37))
def test_a_damaged_header_is_never_the_end(tmp_path: Path, at: int) -> None:
    path, ends = write_tar(tmp_path / "a.tar")
    data = bytearray(path.read_bytes())
    for place in range(at, min(512, at + 6)):
        data[ends[7] + place] ^= 0x55
    path.write_bytes(data)
    keys, error = streamed(path)
    assert isinstance(error, Corrupt)
    assert f"{ends[7]:,}" in str(error)
    assert keys == [f"{number:03d}" for number in range(7)]
    with pytest.raises(Corrupt, match=rf"a\.tar.*{ends[7]:,}"):
        ps.open(path, index_dir=False)


# Several files.


def session(path: Path, values: np.ndarray, name: str = "betas", **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset(name, data=values, **options)
    return path


@pytest.fixture
def sessions(tmp_path: Path) -> list[Path]:
    values = np.arange(24, dtype="f4").reshape(4, 6)
    return [session(tmp_path / f"session{number:02d}.h5", values + number) for number in range(20)]


@pytest.mark.case(9)
def test_all_files_that_cannot_be_opened_are_told_at_once(sessions: list[Path]) -> None:
    for path in sessions[2:5]:
        os.truncate(path, os.path.getsize(path) // 2)
    sessions[6].write_bytes(b"")
    sessions[8].write_text("<html>")
    for path in sessions[10:18]:
        path.unlink()
    with pytest.raises(DataError) as refused:
        ps.open(sessions)
    told = str(refused.value)
    assert "13 of 20 files cannot be opened" in told
    assert sum(f"session{number:02d}.h5" in told for number in range(20)) == 10
    assert "and 3 more" in told
    assert 'on_error="skip"' in told
    ds = ps.open(sessions, on_error="skip")
    assert (len(ds), len(ds.left_out)) == (7 * 4, 13)


@pytest.mark.case(9)
def test_one_missing_session_is_told_as_it_is(sessions: list[Path]) -> None:
    sessions[3].unlink()
    with pytest.raises(Missing, match=r"session03\.h5: no such file") as refused:
        ps.open(sessions)
    assert "files cannot be opened" not in str(refused.value)
    with pytest.raises(Missing, match=r"session03\.h5"):
        ps.open(str(sessions[0].parent / "session{00..05}.h5"))


VALUES = np.arange(24, dtype="f4").reshape(4, 6)
OTHERS = {
    "dtype": lambda path: session(path, VALUES.astype("f8")),
    "whole numbers": lambda path: session(path, VALUES.astype("i8")),
    "shape": lambda path: session(path, VALUES[:, :5]),
    "rank": lambda path: session(path, VALUES.reshape(4, 2, 3)),
    "name": lambda path: session(path, VALUES, "voxels"),
}


@pytest.mark.case(11)
@pytest.mark.parametrize("how", OTHERS)
def test_one_session_differs(sessions: list[Path], how: str) -> None:
    OTHERS[how](sessions[4])
    with pytest.raises(SchemaMismatch, match=r"session04\.h5.*betas"):
        ps.open(sessions)


@pytest.mark.case(11)
def test_a_dataset_that_only_one_session_has(sessions: list[Path]) -> None:
    with h5py.File(sessions[4], "a") as file:
        file["extra"] = np.arange(4)
    with pytest.raises(SchemaMismatch, match=r"session04\.h5.*'extra'"):
        ps.open(sessions)
    assert len(ps.open(sessions, fields=["betas"])) == 80


# Files that change while they are in use.


@pytest.mark.case(10)
def test_zarr_metadata_or_chunks_that_change(tmp_path: Path) -> None:
    values = np.arange(1, 49, dtype="i4").reshape(8, 6)
    path = tmp_path / "a.zarr"
    zarr.create_array(path, shape=values.shape, dtype="i4", chunks=(1, 6), compressors=None)[...] = values
    ds = ps.open(path)
    assert np.array_equal(ds[2]["data"], values[2])
    os.truncate(path / "c/3/0", 7)
    with pytest.raises((Truncated, Corrupt), match=r"a\.zarr/c/3/0"):
        ds[3]
    os.unlink(path / "c/4/0")
    with pytest.raises(Missing, match=r"a\.zarr/c/4/0"):
        ds[4]
    document = (path / "zarr.json").read_text()
    (path / "new.json").write_text(document)
    os.replace(path / "new.json", path / "zarr.json")
    ds.close()
    with pytest.raises(Changed, match=r"zarr\.json"):
        ds[2]


@pytest.mark.case(10)
@pytest.mark.parametrize("size", [100, 20_000], ids=["mapped", "read"])
def test_a_database_cut_while_it_is_in_use(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.mdb"
    with lmdb.open(str(path), subdir=False, map_size=1 << 24) as database, database.begin(write=True) as to:
        for number in range(60):
            to.put(b"%03d" % number, saved(np.full(size, number, "u1")))
    ds = ps.open(path, index_dir=False)
    assert ds[[3, 4, 5, 6, 7]]["data"][0, 0] == 3
    os.truncate(path, 8192)
    ds.close()
    with pytest.raises((Changed, Truncated), match=r"a\.mdb"):
        ds[list(range(50, 60))]


CUT_WHILE_MAPPED = """
import os, sys, time
import numpy as np, penstock as ps
path = sys.argv[1]
np.save(path, np.arange(400_000, dtype="f4").reshape(-1, 4))
ds = ps.open(path)
loader = ps.Loader(ds, batch_size=100, memory="8MiB", threads=1, output="numpy")
seen = 0
try:
    for batch in loader:
        assert np.array_equal(batch["data"].reshape(-1), np.arange(seen * 4, (seen + 100) * 4, dtype="f4")), seen
        seen += 100
        if seen == 1000:
            time.sleep(float(sys.argv[2]))
            os.truncate(path, 4096)
            time.sleep(float(sys.argv[2]))
except ps.errors.PenstockError as error:
    print(seen, type(error).__name__, error)
"""


@pytest.mark.case(10)
def test_an_array_cut_while_it_is_mapped(tmp_path: Path, apart: Any) -> None:
    """Small rows are copied from a mapping, which is looked at before every read; a cut during one ends the process.

    What comes is right until then in both cases, and an error afterwards; zeros never.
    """
    outcome = apart(CUT_WHILE_MAPPED, tmp_path / "a.npy", 3 * POLICY.check_file_every_s)
    assert outcome.left == ()
    assert outcome.code in (0, -7), outcome.err
    if outcome.code == 0:
        seen, kind, *_ = outcome.out.split()
        assert int(seen) >= 1000
        assert kind in ("Changed", "Truncated")
        assert "a.npy" in outcome.out


# Nothing, and little.


def no_rows(folder: Path) -> Any:
    np.save(folder / "a.npy", np.empty((0, 3)))
    return folder / "a.npy"


def no_rows_in_hdf5(folder: Path) -> Any:
    return session(folder / "a.h5", np.empty((0, 3)))


def no_rows_in_zarr(folder: Path) -> Any:
    zarr.create_array(folder / "a.zarr", shape=(0, 3), dtype="f4", chunks=(1, 3))
    return folder / "a.zarr"


def no_members(folder: Path) -> Any:
    return write_tar(folder / "a.tar", 0)[0]


def no_keys(folder: Path) -> Any:
    lmdb.open(str(folder / "a.mdb"), subdir=False).close()
    return folder / "a.mdb"


def no_files(folder: Path) -> Any:
    (folder / "photos").mkdir()
    return folder / "photos"


@pytest.mark.case(15)
@pytest.mark.parametrize("make", [no_rows, no_rows_in_hdf5, no_rows_in_zarr, no_members, no_keys, no_files])
def test_nothing_is_said_to_be_nothing(tmp_path: Path, make: Any) -> None:
    path = make(tmp_path)
    with pytest.raises((ConfigError, Missing), match=path.name):
        ps.open(path, index_dir=False)


@pytest.mark.case(15)
def test_an_empty_file_among_others(tmp_path: Path) -> None:
    values = np.arange(12.0).reshape(4, 3)
    for number, rows in enumerate((values[:2], values[:0], values[2:])):
        np.save(tmp_path / f"{number}.npy", rows)
    ds = ps.open(tmp_path / "*.npy")
    with ps.Loader(ds, batch_size=3, shuffle=True, output="numpy") as loader:
        assert sorted(row for batch in loader for row in batch["data"][:, 0].tolist()) == values[:, 0].tolist()


@pytest.mark.case(15)
@pytest.mark.parametrize("samples", [1, 2, 3, 5])
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_fewer_samples_than_ranks_or_threads(tmp_path: Path, samples: int, world: int, tail: Any) -> None:
    ds = ps.from_arrays(x=np.arange(samples))
    steps, seen = set(), []
    for rank in range(world):
        given = {"batch_size": 1, "shuffle": True, "threads": 8, "tail": tail, "output": "numpy"}
        with ps.Loader(ds, rank=rank, world_size=world, **given) as loader:
            batches = [batch["x"].tolist() for batch in loader]
        steps.add(len(batches))
        seen += [each for batch in batches for each in batch]
    assert len(steps) == 1, "as many steps on every rank"
    whole = set(range(samples))
    assert set(seen) == whole if tail == "pad" else set(seen) <= whole
    assert tail == "pad" or len(seen) == len(set(seen)) == samples // world * world
