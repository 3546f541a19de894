"""A disk that fails: reads that the system cannot do, once or for ever, or does in part.

A library that is loaded before all others spoils the reads of files in one folder, from a certain read on. Each trial
is a process of its own, forked from one in which everything is imported.
"""

import json
import shutil
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import h5py
import numpy as np
import pytest

COMPILER = shutil.which("gcc") or shutil.which("cc")
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler"),
    pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux"),
]

TRIALS = """
import hashlib, json, os, sys, zipfile
import numpy as np
import penstock as ps
from penstock.errors import PenstockError

def outcome(path):
    digest, rows = hashlib.sha256(), 0
    try:
        ds = ps.open(path, index_dir=False)
        with ps.Loader(ds, batch_size=4, memory="64MiB", output="numpy", threads=2) as loader:
            for batch in loader:
                rows += len(batch[next(iter(batch))])
                for values in batch.values():
                    digest.update(np.ascontiguousarray(values))
    except PenstockError as error:
        return [type(error).__name__, str(error)]
    return ["read", rows, digest.hexdigest()]

def apart(path, **faults):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.environ.update({"FAULT_" + name.upper(): str(value) for name, value in faults.items()})
        try:
            said = outcome(path)
        except BaseException as error:
            said = ["other", repr(error)]
        os.write(writing, json.dumps(said).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        told = said.read()
    os.wait()
    return json.loads(told or '["died"]')

folder, path, trials = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
print(json.dumps([outcome(path), *(apart(path, under=folder, **trial) for trial in trials)]))
"""


@pytest.fixture(scope="module")
def spoiler(tmp_path_factory):
    made = tmp_path_factory.mktemp("library") / "faulty_reads.so"
    source = Path(__file__).with_name("faulty_reads.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", made, source, "-ldl"], check=True, timeout=60)
    return made


VALUES = np.arange(40 * 10_000, dtype=np.float32).reshape(40, 10_000)


def npy(path):
    np.save(path, VALUES)


def small_npy(path):
    np.save(path, VALUES[:, :50])


def npz(path):
    np.savez(path, x=VALUES)


def compressed_npz(path):
    np.savez_compressed(path, x=VALUES)


def hdf5(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=VALUES, chunks=(4, 5000), compression="gzip")


def hdf5_through_h5py(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=VALUES, chunks=(4, 5000), scaleoffset=2)


def tar(path):
    with tarfile.open(path, "w") as archive:
        for number, row in enumerate(VALUES):
            stream = BytesIO()
            np.save(stream, row)
            info = tarfile.TarInfo(f"k{number:03d}.npy")
            info.size = stream.tell()
            stream.seek(0)
            archive.addfile(info, stream)


def parquet(path):
    tables, files = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    files.write_table(tables.table({"x": np.arange(100), "y": np.arange(100.0)}), path)


FORMATS = [
    (npy, "a.npy"),
    (small_npy, "b.npy"),
    (npz, "a.npz"),
    (compressed_npz, "b.npz"),
    (hdf5, "a.h5"),
    (hdf5_through_h5py, "b.h5"),
    (tar, "a.tar"),
    (parquet, "a.parquet"),
]

FIRST = (1, 2, 3, 7, 15, 23)


@pytest.mark.case(27)
@pytest.mark.parametrize(
    ("make", "name"),
    [each if each[0] in (npy, hdf5, tar) else pytest.param(*each, marks=pytest.mark.slow) for each in FORMATS],
    ids=[make.__name__ for make, _ in FORMATS],
)
def test_reads_that_fail(tmp_path, apart, spoiler, make, name):
    folder = tmp_path / "data"
    folder.mkdir()
    make(folder / name)
    broken = [{"kind": "eio", "first": first, "times": 0} for first in FIRST]
    passing = [{"kind": "eio", "first": first, "times": times} for first in FIRST for times in (1, 2)]
    passing += [{"kind": "eintr", "first": 1, "times": 40}] if make not in (hdf5, hdf5_through_h5py, parquet) else []
    passing += [{"kind": "short", "first": first, "times": 0} for first in (1, 4)]
    ended = apart(
        TRIALS, folder, folder / name, json.dumps(broken + passing), deadline=60, env={"LD_PRELOAD": str(spoiler)}
    )
    assert ended.code == 0, ended.err
    right, *rest = json.loads(ended.out)
    assert right[0] == "read"
    for trial, got in zip(passing, rest[len(broken) :], strict=True):
        assert got == right, trial
    assert rest[0][0] == "Unavailable", "the first read is one that fails"
    for trial, got in zip(broken, rest, strict=False):
        if got != right:  # the last may be beyond all reads
            assert got[0] == "Unavailable", (trial, got)
            assert str(folder / name) in got[1]
            assert "failed 3 times: Input/output error (errno 5)" in got[1]
    if make in (npy, hdf5, tar):
        assert any("bytes at offset" in got[1] for got in rest[1 : len(broken)]), "read by penstock itself"
