"""A system that has no more: descriptors, threads, shared memory. What is there must do, or the error names it."""

import sys

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits")

FEW_DESCRIPTORS = """
import os, resource, sys
import numpy as np
import penstock as ps
from penstock.errors import Unavailable

files = [f"{sys.argv[1]}/{number:03d}.npy" for number in range(200)]
datasets = {name: ps.open(files) for name in ("a", "b", "c")}
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
several = {name: ps.open(files) for name in ("d", "e")} | datasets
loader = ps.MultiLoader(several, mode="together", batch_size=4, shuffle=True, memory="64MiB", threads=4, output="numpy")
seen = {name: [] for name in several}
for step in loader:
    for name, batch in step.items():
        seen[name] += batch["data"][:, 0].astype(int).tolist()
assert all(sorted(rows) == list(range(400)) for rows in seen.values())
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for ds in datasets.values():
    ds.close()
try:
    held and datasets["a"][0]
except Unavailable as error:
    print(error)
while held:
    os.close(held.pop())
print(datasets["a"][399]["data"][0])
"""


@pytest.mark.case(28)
def test_few_descriptors(tmp_path, apart):
    for number in range(200):
        np.save(tmp_path / f"{number:03d}.npy", np.repeat([[2.0 * number], [2.0 * number + 1]], 5000, axis=1))
    ended = apart(FEW_DESCRIPTORS, tmp_path, deadline=60)
    assert ended.code == 0, ended.err
    refused, fine = ended.out.splitlines()
    assert "000.npy: cannot be opened (Too many open files (errno 24). Raise the limit" in refused
    assert "(ulimit -n)" in refused
    assert "max_open_files=" in refused
    assert fine == "399.0"


THREADS = """
import os, resource, sys, threading
import numpy as np
import penstock as ps
from penstock.errors import Unavailable

loader = ps.Loader(ps.from_arrays(x=np.arange(300)), batch_size=4, memory="64MiB", threads=4, output="numpy")
LIMIT
try:
    rows = [row for batch in loader for row in batch["x"].tolist()]
    print(rows == list(range(300)))
except Unavailable as error:
    print(error)
print(threading.active_count())
"""

# Stacks of threads need addresses, of which there are no more than for one of them, or for none.
FEW_ADDRESSES = """
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
threading.stack_size(256 << 20)
resource.setrlimit(resource.RLIMIT_AS, (used + (MORE << 20),) * 2)
"""

# Only root can become somebody whose threads are counted from none.
FEW_THREADS = """
try:
    os.setresuid(*[100_000 + os.getpid()] * 3)  # nobody else's
except OSError:
    sys.exit("not root")
resource.setrlimit(resource.RLIMIT_NPROC, (MORE, MORE))
"""


@pytest.mark.case(28)
@pytest.mark.parametrize("limit", [FEW_ADDRESSES.replace("MORE", "400"), FEW_THREADS.replace("MORE", "2")])
def test_fewer_threads_than_wanted(apart, limit):
    ended = apart(THREADS.replace("LIMIT", limit), env={"OPENBLAS_NUM_THREADS": "1"})  # numpy's count too
    if "not root" in ended.err:
        pytest.skip("needs root")
    assert (ended.code, ended.out, ended.err) == (0, "True\n1\n", "")


@pytest.mark.case(28)
@pytest.mark.parametrize("limit", [FEW_ADDRESSES.replace("MORE", "100"), FEW_THREADS.replace("MORE", "1")])
def test_no_thread_at_all(apart, limit):
    ended = apart(THREADS.replace("LIMIT", limit), env={"OPENBLAS_NUM_THREADS": "1"})  # numpy's count too
    if "not root" in ended.err:
        pytest.skip("needs root")
    assert ended.code == 0, ended.err
    assert "no reader thread could be started: can't start new thread" in ended.out
    assert "ulimit -u" in ended.out
    assert ended.out.endswith("\n1\n")


# Shared memory of 4 MB, in a mount namespace of its own.
SMALL_SHM = """
import ctypes, os, subprocess, sys
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
libc = ctypes.CDLL(None, use_errno=True)
alone = libc.unshare(CLONE_NEWNS if os.getuid() == 0 else CLONE_NEWNS | CLONE_NEWUSER) == 0
mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", "/dev/shm"]
private = ["mount", "--make-rprivate", "/"]
if not alone or any(subprocess.run(each, capture_output=True).returncode for each in (private, mount)):
    sys.exit("no namespace")
import numpy as np
import penstock as ps
ds = ps.open(sys.argv[1])
"""

IN_THREADS = """
with ps.Loader(ds, batch_size=4, memory="256MiB", threads=3) as loader:
    print(sum(len(batch["data"]) for batch in loader))
print(os.listdir("/dev/shm"))
"""

IN_WORKERS = """
from torch.utils.data import DataLoader
try:
    print(sum(len(batch["data"]) for batch in DataLoader(ds, batch_size=4, num_workers=2)))
except RuntimeError as error:
    print("shared memory" in str(error) or "shm" in str(error) or "No space left" in str(error))
"""


@pytest.mark.case(28)
@pytest.mark.parametrize(
    ("body", "said"),
    [(IN_THREADS, "24\n[]\n"), pytest.param(IN_WORKERS, "True\n", marks=pytest.mark.slow)],
    ids=["threads", "workers of torch"],
)
def test_little_shared_memory(tmp_path, apart, body, said):
    np.save(tmp_path / "a.npy", np.ones((24, 2 * 2**20), np.uint8))
    ended = apart(SMALL_SHM + body, tmp_path / "a.npy", deadline=60)
    if "no namespace" in ended.err:
        pytest.skip("needs the right to mount in a namespace of its own")
    assert (ended.code, ended.out) == (0, said), ended.err
    assert ended.left == ()


NO_DESCRIPTORS = """
import os, resource, sys
import imagecodecs, pyarrow.parquet, tiledb
import penstock as ps
from penstock.errors import PenstockError

ps.open, ps.Loader, ps.Dataset
pictures = ps.open(sys.argv[1] + "/pictures", index_dir=False)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
told = []
for name in ("a.tiledb", "a.parquet", "a.arrow"):
    try:
        ps.open(f"{sys.argv[1]}/{name}", index_dir=False)[0]
    except PenstockError as error:
        told.append(type(error).__name__)
try:
    pictures[0]  # its file is open since the folder was opened, its decoder is not loaded
except PenstockError as error:
    told += [type(error).__name__, "imagecodecs" in str(error)]
while held:
    os.close(held.pop())
print(*told)
"""


@pytest.mark.case(28)
def test_libraries_that_can_open_nothing(apart, every_format):
    ended = apart(NO_DESCRIPTORS, every_format, deadline=60)
    assert ended.code == 0, ended.err
    assert ended.out.split() == [*["Unavailable"] * 4, "True"]


def test_a_path_that_tiledb_cannot_have(tmp_path):
    import penstock as ps
    from penstock.errors import ConfigError

    folder = tmp_path / "a\udcff.tiledb"
    (folder / "__schema").mkdir(parents=True)
    with pytest.raises(ConfigError, match="UTF-8"):
        ps.open(folder, index_dir=False)
