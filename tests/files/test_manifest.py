"""Manifests: written and read again, compared as files are read, and refused where they are not what they should be."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.base import scratch
from penstock.cli.main import main
from penstock.errors import ConfigError, Corrupt, LimitExceeded, Missing, PenstockError, Truncated, Unsafe
from penstock.files import manifest
from penstock.files.mapping import map_file
from penstock.formats.hdf5 import btree
from penstock.testing import check_store

VALUES = np.arange(3000, dtype=np.float32).reshape(30, 100)


@pytest.fixture
def file(tmp_path):
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "a.npy", VALUES)
    return tmp_path / "data" / "a.npy"


def test_it_moves_with_the_data(file, tmp_path):
    written = ps.write_manifest(file)
    assert written == str(file.parent / "penstock-manifest.json")
    os.rename(file.parent, tmp_path / "moved")
    moved = tmp_path / "moved"
    assert np.array_equal(ps.open(moved / "a.npy", manifest=moved / "penstock-manifest.json")[:]["data"], VALUES)
    assert ps.verify(moved / "a.npy", manifest=moved / "penstock-manifest.json").sound


def test_a_dataset_with_one_keeps_the_promises_of_a_store(file):
    written = ps.write_manifest(file)
    check_store(lambda: ps.open(file, manifest=written).store, {"data": VALUES})


def test_what_comparing_takes_is_declared(file):
    np.save(file, np.zeros((30, 100_000), np.float32))  # more than one block: opening it compares the first
    written = ps.write_manifest(file)
    plain, compared = ps.open(file), ps.open(file, manifest=written)
    assert compared.store.scratch_bytes(4) >= plain.store.scratch_bytes(4) + manifest.PIECE_BYTES
    assert sum(compared.store.shared_index.values()) >= manifest.DIGEST_BYTES
    scratch.prepare(compared.store.scratch_bytes(1))
    compared.store.read_into(np.array([20]), np.array([0]), {"data": np.empty((1, 100_000), np.float32)})
    assert scratch.peak_bytes() > 0
    assert scratch.overflow_bytes() == 0
    scratch.release()


def test_what_comparing_a_stream_takes_is_declared(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    path = tmp_path / "a.nii.gz"
    nibabel.Nifti1Image(np.ones((5, 4, 3, 2), np.int16), np.eye(4)).to_filename(path)
    plain, compared = ps.open(path), ps.open(path, manifest=ps.write_manifest(path))
    assert compared.store.scratch_bytes(1) >= plain.store.scratch_bytes(1) + manifest.PIECE_BYTES
    assert sum(compared.store.shared_index.values()) >= manifest.DIGEST_BYTES


def test_a_block_is_compared_once_by_each_process(file):
    ds = ps.open(file, manifest=ps.write_manifest(file))
    known = ds.store._files.manifest
    assert known.seen.tolist() == [True]  # by reading the header
    assert pickle.loads(pickle.dumps(ds)).store._files.manifest.seen.tolist() == [False]


def test_other_sizes_and_files_are_refused(file):
    written = ps.write_manifest(file)
    np.save(file.parent / "b.npy", VALUES)
    with pytest.raises(Corrupt, match="does not list it"):
        ps.open(file.parent / "b.npy", manifest=written)
    with open(file, "ab") as longer:
        longer.write(b"more")
    with pytest.raises(Corrupt, match=r"has 12,132 bytes, and 12,128 in the manifest "):
        ps.open(file, manifest=written)
    os.truncate(file, 12_000)
    with pytest.raises(Truncated, match=r"has 12,000 bytes, and 12,128 in the manifest "):
        ps.open(file, manifest=written)
    with pytest.raises(Missing, match="no such manifest"):
        ps.open(file, manifest=file.parent / "none.json")
    with pytest.raises(ConfigError, match="swmr"):
        ps.open(file, manifest=written, swmr=True)
    with pytest.raises(ConfigError, match="expected the files themselves"):
        ps.verify(ps.from_arrays(x=VALUES), manifest=written)


def test_it_does_not_lie_below_its_files(file):
    (file.parent / "below").mkdir()
    with pytest.raises(ConfigError, match="write it further up"):
        ps.write_manifest(file, file.parent / "below" / "manifest.json")
    assert os.listdir(file.parent / "below") == []


def entry(size=10, blocks="00" * 32):
    return {"size": size, "blocks": blocks}


def document(**changed):
    whole = {"penstock manifest": 1, "digest": "sha256", "block_bytes": 1 << 20, "files": {"a.npy": entry()}}
    return {**whole, **changed}


HOSTILE = {
    "nothing": b"",
    "not JSON": b"\x00\xff",
    "a list": b"[]",
    "lists in lists": b"[" * 100_000,
    "a number without end": b'{"penstock manifest": ' + b"9" * 10_000 + b"}",
    "a name twice": b'{"files": {"a": 1, "a": 2}}',
    "another version": document(**{"penstock manifest": 2}),
    "an unknown entry": document(run="me"),
    "another digest": document(digest="md5"),
    "blocks of nothing": document(block_bytes=0),
    "blocks of a text": document(block_bytes="1"),
    "blocks of a truth": document(block_bytes=True),
    "blocks without end": document(block_bytes=2**70),
    "files in a list": document(files=[]),
    "a file that is a number": document(files={"a.npy": 3}),
    "no size": document(files={"a.npy": {"blocks": ""}}),
    "a negative size": document(files={"a.npy": entry(-1)}),
    "a size without end": document(files={"a.npy": entry(2**62)}),
    "half a size": document(files={"a.npy": entry(1.5)}),
    "too few digests": document(files={"a.npy": entry(1 << 40)}),
    "too many digests": document(files={"a.npy": entry(10, "00" * 64)}),
    "digests of spaces": document(files={"a.npy": entry(10, " " * 64)}),
    "digests of letters": document(files={"a.npy": entry(10, "xy" * 32)}),
    "digests in a list": document(files={"a.npy": entry(10, ["00" * 32])}),
}

OUTSIDE = ["../a.npy", "/etc/passwd", "b/../../a.npy", "", ".", "a//b", "b\\..\\a.npy", "a\0b"]


@pytest.mark.case(24)
@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_manifest_is_refused(file, what):
    given = HOSTILE[what]
    path = file.parent / "hostile.json"
    path.write_bytes(given if isinstance(given, bytes) else json.dumps(given).encode())
    with pytest.raises(Corrupt, match=r"hostile\.json: "):
        manifest.load(path)


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_outside_its_folder_are_refused(file, name):
    path = file.parent / "hostile.json"
    path.write_text(json.dumps(document(files={name: entry()})))
    with pytest.raises(Unsafe, match="inside its own folder"):
        ps.open(file, manifest=path)


def test_one_that_is_too_large_is_not_read(file):
    written = ps.write_manifest(file)
    with pytest.raises(LimitExceeded, match="is not read"):
        manifest.load(written, most_bytes=100)


def test_a_failed_write_leaves_the_old_one(file, monkeypatch):
    written = ps.write_manifest(file)
    before = Path(written).read_text()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(PenstockError, match="errno 28"):
        ps.write_manifest(file)
    assert Path(written).read_text() == before
    assert sorted(os.listdir(file.parent)) == ["a.npy", "penstock-manifest.json"]


def test_the_command_writes_compares_and_lists(file, capsys):
    assert main(["verify", str(file)]) == 0
    assert "not checked: data: the format has no checksum there" in capsys.readouterr().out
    assert main(["verify", str(file), "--write"]) == 0
    out, err = capsys.readouterr()
    assert "written: " in out
    assert "hashing: 100%" in err
    assert main(["verify", str(file)]) == 0
    out, err = capsys.readouterr()
    assert "nothing has changed" in out
    assert "comparing: 100%" in err
    about = os.stat(file)
    with open(file, "r+b") as changed:
        changed.seek(9000)
        changed.write(b"?")
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert main(["verify", str(file)]) == 1
    out, _ = capsys.readouterr()
    assert f"changed: {file}: bytes 0 to 12,128 differ from" in out
    assert "places that changed: 1" in out
    assert main(["verify", str(file), "--manifest", str(file.parent / "none.json")]) == 2
    assert main(["verify", str(file.parent / "none.npy")]) == 2
    os.unlink(file)
    np.save(file, VALUES)
    assert main(["verify", str(file), "--write", str(file.parent.parent / "up.json")]) == 0
    assert json.loads((file.parent.parent / "up.json").read_text())["files"].keys() == {"data/a.npy"}
    assert main(["verify", str(file), "--manifest", str(file.parent.parent / "up.json")]) == 0


def test_files_that_say_nothing_of_themselves(tmp_path):
    VALUES.tofile(tmp_path / "a.bin")
    written = ps.write_manifest(tmp_path / "a.bin")
    assert np.array_equal(ps.open_raw(tmp_path / "a.bin", "f4", (100,), manifest=written)[:]["data"], VALUES)
    about = os.stat(tmp_path / "a.bin")
    with open(tmp_path / "a.bin", "r+b") as changed:
        changed.seek(5000)
        changed.write(b"?")
    os.utime(tmp_path / "a.bin", ns=(about.st_atime_ns, about.st_mtime_ns))
    assert ps.open_raw(tmp_path / "a.bin", "f4", (100,))[12]
    with pytest.raises(Corrupt, match="bytes 0 to 12,000"):
        ps.open_raw(tmp_path / "a.bin", "f4", (100,), manifest=written)[12]


def test_an_index_of_chunks_is_not_taken_from_a_mapping_that_nobody_compares(tmp_path, monkeypatch):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as made:
        made.create_dataset("x", data=VALUES, chunks=(1, 50))
    written = ps.write_manifest(tmp_path / "a.h5")
    mapped = []
    monkeypatch.setattr(btree, "map_file", lambda path: mapped.append(path) or map_file(path))
    assert np.array_equal(ps.open(tmp_path / "a.h5", index_dir=False, manifest=written)[:]["x"], VALUES)
    assert mapped == []
    assert np.array_equal(ps.open(tmp_path / "a.h5", index_dir=False)[:]["x"], VALUES)
    assert mapped
