"""Processes that are killed: an error in time where one is left to tell of it, and nothing that outlives the others."""

import json
import os
import signal
import tarfile
import time
from io import BytesIO

import numpy as np
import pytest

import penstock as ps

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")

# Torch's own loader; its workers look after their parent, and it after them, every five seconds. A worker takes for its
# parent whichever process is so when its loop begins: one still importing as its parent is killed would look after
# another for ever. So each has given a batch before anything is killed.
WORKERS = """
import itertools, json, os, signal, sys, time
import numpy as np
import penstock as ps
from torch.utils.data import DataLoader

if __name__ == "__main__":
    path, method, kill_after = sys.argv[1], sys.argv[2], int(sys.argv[3])
    loader = DataLoader(ps.open(path), batch_size=4, num_workers=2, multiprocessing_context=method)
    batches, seen = iter(loader), []
    pids = [worker.pid for worker in batches._workers]

    def read():
        of_each = [next(batches) for _ in pids]
        print(json.dumps(pids), flush=True)
        for batch in itertools.chain(of_each, batches):
            seen.extend(batch["data"][:, 0].long().tolist())
            if len(seen) == 4 * kill_after:
                os.kill(pids[1], signal.SIGKILL)
            time.sleep(0.02 if kill_after >= 0 else 60)

    try:
        try:
            read()
        except OSError as error:  # a batch was on its way; what torch itself has to say comes by a signal
            time.sleep(5)
            raise RuntimeError(f"(pid(s) {pids[1]}) exited unexpectedly: {error}")
    except RuntimeError as error:
        print(json.dumps([seen, str(error), pids[1]]), flush=True)
"""


@pytest.fixture
def data(tmp_path):
    np.save(tmp_path / "a.npy", np.repeat(np.arange(400.0)[:, None], 500, axis=1))
    return tmp_path / "a.npy"


def shared_memory(pids):
    """Entries of /dev/shm that torch made for these processes."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return [name for name in names for pid in pids if f"_{pid}_" in name]


def alive(pids):
    found = []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] not in "ZX":
                    found.append(pid)
        except OSError:
            pass
    return found


def wait_for(condition, seconds):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


@pytest.mark.case(25)
@pytest.mark.parametrize(
    ("method", "after"),
    [("fork", 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("fork", 17), ("spawn", 5)))],
)
def test_a_worker_of_torch_is_killed(data, start, end_of, method, after):
    child = start(WORKERS, data, method, after)
    pids = json.loads(child.stdout.readline())
    ended = end_of(child, 40)
    assert ended.code == 0, ended.err
    seen, told, killed = json.loads(ended.out)
    assert f"(pid(s) {killed}) exited unexpectedly" in told or f"(pid {killed}) is killed by signal: Killed" in told
    assert seen == list(range(len(seen))), "what came is right, and each once"
    assert 4 * after <= len(seen) < 400
    assert ended.left == ()
    assert shared_memory([child.pid, *pids]) == []
    # The program knows how many samples it has had: a selection of the rest goes on exactly there.
    with ps.Loader(ps.open(data).select(np.arange(len(seen), 400)), batch_size=4, memory="64MiB") as rest:
        seen += [row for batch in rest for row in batch["data"][:, 0].long().tolist()]
    assert seen == list(range(400))


@pytest.mark.case(30)
@pytest.mark.parametrize(
    ("method", "busy"),
    [("fork", True), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("fork", False), ("spawn", True)))],
)
def test_the_main_process_is_killed_and_its_workers_end(data, start, method, busy):
    child = start(WORKERS, data, method, 10_000 if busy else -1)
    pids = json.loads(child.stdout.readline())
    time.sleep(0.3)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate(timeout=20)
    assert wait_for(lambda: alive(pids) == [], 20), "they look after their parent every five seconds"
    assert wait_for(lambda: shared_memory([child.pid, *pids]) == [], 5)


# Reader threads are no processes: with the one that has them they end at once. What it wrote on the way must not be in
# the way of the next.
READING = """
import os, sys
import penstock as ps
ds = ps.open(sys.argv[1] + "/*.tar")
print("ready", flush=True)
rows = 0
for epoch in range(int(sys.argv[2])):
    for batch in ps.Loader(ds, batch_size=4, memory="64MiB", threads=3, output="numpy"):
        rows += len(batch["cls"])
print(rows)
"""


@pytest.mark.case(30)
@pytest.mark.parametrize("whole_group", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_killed_in_the_middle_and_begun_again(tmp_path, start, apart, whole_group):
    shards, cache, temporary = tmp_path / "shards", tmp_path / "cache", tmp_path / "tmp"
    for folder in (shards, cache, temporary):
        folder.mkdir()
    for shard in range(3):
        with tarfile.open(shards / f"{shard}.tar", "w") as archive:
            for number in range(50):
                info = tarfile.TarInfo(f"{shard}{number:03d}.cls")
                info.size = 2
                archive.addfile(info, BytesIO(b"%02d" % number))
    places = {"PENSTOCK_CACHE": str(cache), "TMPDIR": str(temporary)}
    for pause in (0.0, 0.005, 0.02, 0.1, 0.3):
        child = start(READING, shards, 10_000, env=places)
        if pause:
            child.stdout.readline()
        time.sleep(pause)
        (os.killpg if whole_group else os.kill)(child.pid, signal.SIGKILL)
        child.communicate(timeout=20)
    ended = apart(READING, shards, 2, env=places)
    assert (ended.code, ended.out, ended.err) == (0, "ready\n300\n", "")
    assert list(temporary.iterdir()) == []
