"""A disk that is full while something is written, and writers that are killed: nothing under a final name that is not
whole, and the same bytes when it is done again.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs tmpfs, fork and SIGKILL")

PREPARE = """
import os, shutil, sys, types
from penstock.errors import ConvertFailed
from penstock.nsd import NSD

root, folder = sys.argv[1:]
shutil.disk_usage = lambda path: types.SimpleNamespace(free=10**12)  # as if somebody else filled the disk meanwhile
try:
    NSD(root, 1, prepared=folder).prepare(None)
except ConvertFailed as error:
    print(error)
print(sorted(name for _, _, names in os.walk(folder) for name in names))
"""

SHARDS = """
import os, sys
from penstock.errors import ConvertFailed
from penstock.webdataset import ShardWriter

folder, ending = sys.argv[1:]
try:
    with ShardWriter(f"{folder}/a-%02d.tar{ending}", maxcount=4, index_dir=False) as writer:
        for number in range(100):
            writer.write({"__key__": f"{number:04d}", "bin": os.urandom(150_000)})
except ConvertFailed as error:
    print(error)
print(sorted(os.listdir(folder)))
"""


def on_a_small_disk(folder: Path, size: str, program: str, *arguments: object) -> str:
    """What a program printed that had this folder on a disk of its own; skips where none can be made."""
    folder.mkdir()
    mount = f"mount -t tmpfs -o size={size},mode=700 none {folder}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    python = [sys.executable, "-c", program, *map(str, arguments)]
    command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", *python]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def releases(tmp_path_factory):
    """Small releases of the Natural Scenes Dataset, as they are stored in different ways."""
    from penstock.nsd import synthesize

    folder = tmp_path_factory.mktemp("releases")
    for stored in ("voxel-major", "trial-major", "nifti"):
        options = {"stored": None, "nifti": True} if stored == "nifti" else {"stored": stored}
        synthesize(folder / stored, subjects=[1], stimuli=False, **options)
    return folder


@pytest.mark.case(42)
@pytest.mark.parametrize("stored", ["voxel-major", "trial-major", "nifti"])
def test_a_full_disk_ends_preparing_with_an_error(releases, tmp_path, stored):
    out = on_a_small_disk(tmp_path / "small", "24k", PREPARE, releases / stored, tmp_path / "small")
    assert "errno 28" in out
    assert "could not be written" in out
    assert out.splitlines()[-1] == "[]", "what was not finished takes no room"


@pytest.mark.case(42)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_full_disk_ends_writing_shards_with_an_error(tmp_path, ending):
    out = on_a_small_disk(tmp_path / "small", "2m", SHARDS, tmp_path / "small", ending)
    assert "errno 28" in out
    assert json.loads(out.splitlines()[-1].replace("'", '"')) == [f"a-{n:02d}.tar{ending}" for n in range(3)]


KILLED = """
import hashlib, json, os, shutil, signal, sys
import numpy as np
import penstock as ps
from penstock.nsd import NSD
from penstock.webdataset import ShardWriter

root, count = sys.argv[1], int(sys.argv[2])

def prepare(folder):
    NSD(root, 1, prepared=folder).prepare(None)
    NSD(root, 1, prepared=folder).prepare()

def in_two_steps(folder):
    NSD(root, 1, prepared=folder).prepare(sessions=[2])
    NSD(root, 1, prepared=folder).prepare()

def shards(folder):
    os.makedirs(folder, exist_ok=True)
    rng = np.random.default_rng(0)
    with ShardWriter(f"{folder}/a-%02d.tar", maxcount=20, index_dir=False) as writer:
        for number in range(100):
            writer.write({"__key__": f"{number:04d}", "npy": rng.integers(0, 9, 30_000, np.int16)})

def digests(folder):
    return {
        os.path.relpath(os.path.join(home, name), folder): hashlib.sha256(
            open(os.path.join(home, name), "rb").read()
        ).hexdigest()
        for home, _, names in os.walk(folder) for name in names
    }

def finished(folder):
    "Sessions that a note lists, and files under their final names."
    found = digests(folder)
    for name in [name for name in found if name.endswith("subject.json")]:
        path = os.path.join(folder, name)
        del found[name]
        rows = np.load(path[:-5] + ".npy", mmap_mode="r")
        for session, entry in json.load(open(path))["sessions"].items():
            values = rows[entry["first"] : entry["first"] + entry["trials"]].tobytes()
            found[f"{name} {session}"] = hashlib.sha256(values).hexdigest() + entry["source"]
    return {name: each for name, each in found.items() if not name.endswith((".npy", ".partial"))}

FILE_CALLS = {
    "open", "mkstemp", "write", "pwrite", "posix_fallocate", "truncate", "ftruncate", "flush", "fsync", "chmod",
    "replace", "close", "mkdir", "unlink",
}

def in_a_child(work, folder, kill_at=0):
    "The number of its calls that have to do with files; it is killed before call number kill_at."
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        calls = 0
        def count(frame, event, function):
            nonlocal calls
            if event == "c_call" and function.__name__ in FILE_CALLS:
                calls += 1
                if calls == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
        try:
            sys.setprofile(count)
            work(folder)
            sys.setprofile(None)
            os.write(sender, str(calls).encode())
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    os.close(sender)
    calls = os.read(receiver, 20)
    os.close(receiver)
    assert os.waitpid(child, 0)[1] == (signal.SIGKILL if kill_at else 0)
    return int(calls or 0)

told = {}
for work in (prepare, in_two_steps, shards):
    name = work.__name__
    work(f"{name}-first")  # imports what it needs
    calls = in_a_child(work, f"{name}-right")
    right, known, whole, same = digests(f"{name}-right"), finished(f"{name}-right"), 0, 0
    chosen = sorted({1 + calls * number // count for number in range(count)})
    for kill_at in chosen:
        folder = f"{name}-{kill_at}"
        in_a_child(work, folder, kill_at)
        whole += finished(folder).items() <= known.items()
        in_a_child(work, folder)
        found = digests(folder)
        same += found == right
        if found != right:
            print(name, kill_at, sorted(set(found.items()) ^ set(right.items())), file=sys.stderr)
        shutil.rmtree(folder)
    told[name] = [len(chosen), whole, same, len(right)]
print(json.dumps(told))
"""


def check_kills(done, count):
    assert done.code == 0, done.err
    for name, (killed, whole, same, files) in json.loads(done.out).items():
        assert killed == count, name
        assert (whole, same) == (count, count), (name, done.err)
        assert files > 1


@pytest.mark.slow
@pytest.mark.case(42)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_killed_conversion_gives_the_same_bytes_when_run_again(apart, releases):
    check_kills(apart(KILLED, releases / "voxel-major", 16, deadline=100), 16)


@pytest.mark.soak
@pytest.mark.case(42)
@pytest.mark.parametrize("stored", ["voxel-major", "trial-major", "nifti"])
def test_conversions_killed_at_many_points(apart, releases, stored):
    check_kills(apart(KILLED, releases / stored, 100, deadline=600), 100)
