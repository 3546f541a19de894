"""Children of a process whose threads are reading, with whatever locks they hold just then: right data, or a word."""

import os
import tarfile
from io import BytesIO

import h5py
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

ROWS = 48
VALUES = np.arange(ROWS * 12_000, dtype=np.float32).reshape(ROWS, 12_000)


def npy(path):
    np.save(path, VALUES)


def small_npy(path):
    np.save(path, VALUES[:, :60])


def hdf5(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=VALUES, chunks=(4, 3000), compression="gzip")


def hdf5_through_h5py(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=VALUES.astype(np.int64), chunks=(2, 12_000), scaleoffset=0)


def tar(path):
    with tarfile.open(path, "w") as archive:
        for number, row in enumerate(VALUES):
            stream = BytesIO()
            np.save(stream, row)
            info = tarfile.TarInfo(f"k{number:03d}.npy")
            info.size = stream.tell()
            stream.seek(0)
            archive.addfile(info, stream)


def sharded_zarr(path):
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(str(path), shape=VALUES.shape, chunks=(1, 6000), shards=(8, 12_000), dtype="f4")
    array[:] = VALUES


FORMATS = [
    (npy, "a.npy"),
    (small_npy, "a.npy"),
    (hdf5, "a.h5"),
    (hdf5_through_h5py, "a.h5"),
    (tar, "a.tar"),
    (sharded_zarr, "a.zarr"),
]

FORKS = """
import os, signal, sys
import numpy as np
import penstock as ps
from penstock.errors import ConfigError

path = sys.argv[1]
random = np.random.default_rng(int(sys.argv[2]))
ds = ps.open(path)
name = next(iter(ds.fields))
right = ds[:][name]
options = {"batch_size": 3, "shuffle": True, "memory": "64MiB", "threads": 3, "output": "numpy"}
loader = ps.Loader(ds, **options, columns=("__index__", name))

def check(batches):
    rows = []
    for index, values in batches:
        assert np.array_equal(values, right[index])
        rows += index.tolist()
    return rows

def in_the_child(iterator):
    signal.alarm(30)  # whoever hangs is killed, which is noticed
    try:
        next(iterator)
        return "went on with its parent's iteration"
    except ConfigError as error:
        if "forked" not in str(error):
            return str(error)
    del iterator
    some = random.integers(0, len(ds), 20)
    if not np.array_equal(ds[some][name], right[some]):
        return "other data"
    return "" if sorted(check(loader)) == list(range(len(ds))) else "not every sample once"

forks, seen, epoch = 0, [], None
while forks < 20:
    iterator = iter(loader)
    for index, values in iterator:
        assert np.array_equal(values, right[index])
        if forks < 20 and random.random() < 0.25:
            forks += 1
            pid = os.fork()
            if pid == 0:
                said = "died"
                try:
                    said = in_the_child(iterator)
                except BaseException as error:
                    said = repr(error)
                finally:
                    if said:
                        print("in a child:", said, flush=True)
                    os._exit(0)
            ended = os.waitpid(pid, 0)[1]
            if ended:
                print("a child ended with", ended, flush=True)
print(sorted(check(loader)) == list(range(len(ds))))
"""


@pytest.mark.case(33)
@pytest.mark.parametrize(
    ("make", "name"),
    [each if each[0] in (small_npy, hdf5) else pytest.param(*each, marks=pytest.mark.slow) for each in FORMATS],
    ids=[make.__name__ for make, _ in FORMATS],
)
def test_twenty_forks_while_threads_read(tmp_path, apart, any_seed, make, name):
    make(tmp_path / name)
    ended = apart(FORKS, tmp_path / name, any_seed, deadline=100)
    assert (ended.code, ended.out) == (0, "True\n"), ended.err
    assert ended.left == ()


@pytest.mark.soak
@pytest.mark.parametrize(("make", "name"), FORMATS, ids=[make.__name__ for make, _ in FORMATS])
def test_twenty_forks_for_many_seeds(tmp_path, apart, any_seed, make, name):
    test_twenty_forks_while_threads_read(tmp_path, apart, any_seed, make, name)


OTHER_WAYS = """
import multiprocessing, operator, sys
import numpy as np
import penstock as ps

if __name__ == "__main__":
    ds = ps.open(sys.argv[1])
    name = next(iter(ds.fields))
    right = ds[:][name]
    iterator = iter(ps.Loader(ds, batch_size=1, memory="64MiB", threads=3, output="numpy"))
    next(iterator)
    with multiprocessing.get_context(sys.argv[2]).Pool(2) as pool:
        for rows in np.random.default_rng(0).integers(0, len(ds), (20, 30)):
            got = pool.apply(operator.getitem, (ds, rows))[name]
            assert np.array_equal(got, right[rows])
    print(sum(1 for _ in iterator))
"""


@pytest.mark.case(33)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_other_ways_to_start_a_process(tmp_path, apart, method):
    hdf5(tmp_path / "a.h5")
    ended = apart(OTHER_WAYS, tmp_path / "a.h5", method, deadline=100)
    assert (ended.code, ended.out) == (0, f"{ROWS - 1}\n"), ended.err
    assert ended.left == ()


TWO_LOADERS = """
import os, signal, sys, warnings
import numpy as np
import penstock as ps
from penstock.errors import ConfigError

ds = ps.open(sys.argv[1])
loader = ps.MultiLoader({"a": ds, "b": ds}, mode="together", batch_size=4, memory="64MiB", threads=2, output="numpy")
iterator = iter(loader)
next(iterator)
warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # to fork beside threads is what is tried here
if os.fork() == 0:
    signal.alarm(30)
    try:
        next(iterator)
    except ConfigError:
        print(sum(len(step["a"]["x"]) + len(step["b"]["x"]) for step in loader), flush=True)
    sys.exit(0)  # the ordinary way out, finalizers and all
print(os.wait()[1], 1 + sum(1 for _ in iterator))
"""


@pytest.mark.case(33)
def test_several_datasets(tmp_path, apart):
    hdf5(tmp_path / "a.h5")
    ended = apart(TWO_LOADERS, tmp_path / "a.h5")
    assert (ended.code, ended.out, ended.err) == (0, f"{2 * ROWS}\n0 {ROWS // 4}\n", "")
