"""A relative path means what it meant when it was given, wherever the program goes later."""

import os
import pickle

import h5py
import numpy as np
import pytest

import penstock as ps
import penstock.webdataset as wds
from penstock.files.files import remote_files


@pytest.fixture
def away(tmp_path, monkeypatch):
    """In a folder with data; the function leaves it for another."""
    (tmp_path / "data").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    return lambda: os.chdir(tmp_path / "other")


def write(name, rows=6):
    if name.endswith(".npy"):
        np.save(name, np.arange(rows))
    elif name.endswith(".raw"):
        np.arange(rows).tofile(name)
    elif name.endswith(".tar"):
        with wds.TarWriter(name, index_dir="index") as writer:
            for row in range(rows):
                writer.write({"__key__": f"{row}", "npy": np.array([row])})
    else:
        with h5py.File(name, "w") as file:
            file["data"] = np.arange(rows)


@pytest.mark.parametrize("kind", ["npy", "h5", "tar"])
@pytest.mark.parametrize("in_list", [False, True])
@pytest.mark.parametrize("how", ["{0}.{1}", "*.{1}", "./{0}.{1}", "../data/{0}.{1}", "{{a..a}}.{1}", "[a].{1}"])
def test_opened_files(away, kind, how, in_list):
    write(f"a.{kind}")
    path = how.format("a", kind)
    ds = ps.open([path] if in_list else path, index_dir="index")
    away()
    values = next(iter(ds[:].values()))
    assert np.ravel(values).tolist() == list(range(6))
    assert len(pickle.loads(pickle.dumps(ds))[:]) == len(ds[:])
    assert len(ds.refresh()) == 6
    assert not os.path.exists("index")
    with ps.Loader(ds, batch_size=3, memory="64MiB") as loader:
        assert len(list(loader)) == 2


def test_raw_files_and_manifests(away):
    write("a.raw")
    path = ps.write_manifest("a.raw", "m.json")
    ds = ps.open_raw("a.raw", "int64", manifest=path)
    away()
    assert ds[:]["data"].tolist() == list(range(6))


def test_a_folder_of_files(away):
    os.mkdir("photos")
    np.save("photos/a.npy", np.arange(3))
    ds = ps.open("photos", index_dir=False)
    away()
    assert len(ds[:]) == len(ds.fields)


def test_what_is_known_by_its_name_keeps_it(away, tmp_path):
    write("a.npy")
    assert ps.open("a.npy").fingerprint == ps.open(tmp_path / "data" / "a.npy").fingerprint


def test_the_cache_stays_where_it_was(away, tmp_path):
    some = remote_files("cache", None, None)
    away()
    assert some.cache.folder == str(tmp_path / "data" / "cache")


def test_shards(away):
    write("a.tar")
    shards = wds.WebDataset("a.tar", shardshuffle=False)
    away()
    samples = list(shards)
    assert [sample["__key__"] for sample in samples] == [str(row) for row in range(6)]
    assert {sample["__url__"] for sample in samples} == {"a.tar"}, "as it was named"


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_shards_are_written_where_the_program_began(away, packed):
    with wds.ShardWriter(f"%d.tar{packed}", maxcount=2, verbose=0, index_dir=False) as writer:
        writer.write({"__key__": "0", "cls": 0})
        away()
        for row in range(1, 5):
            writer.write({"__key__": f"{row}", "cls": row})
    assert os.listdir() == []
    assert sorted(os.listdir("../data")) == [f"{shard}.tar{packed}" for shard in range(3)]


def test_a_current_folder_that_was_removed(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    np.save(tmp_path / "a.npy", np.arange(6))
    (tmp_path / "here").rmdir()
    with pytest.raises(ps.Unavailable, match=r"a\.npy: the current folder, .* was removed"):
        ps.open("a.npy")
    ds = ps.open(tmp_path / "a.npy")
    with ps.Loader(ds, batch_size=3, memory="64MiB") as loader:
        assert len(list(loader)) == 2
    assert ps.verify(tmp_path / "a.npy").sound
