"""Programs that use reader processes in unusual ways: each ends, says what is wrong, and leaves no process behind."""

import os
import signal
import time

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="reader processes need Linux")

BEGIN = """
import contextlib, ctypes, gc, os, resource, signal, subprocess, sys, threading, time
import numpy as np
import penstock as ps
from penstock.loader.loader import runtime_of

HERE, ROWS = os.getpid(), 100
np.save("x.npy", np.arange(ROWS * 4).reshape(ROWS, 4))
ds = ps.open("x.npy")

def load(ds, **options):
    usual = {"batch_size": 4, "processes": 2, "threads": 2, "memory": "400MiB", "output": "numpy"}
    loader = ps.Loader(ds, **{**usual, **options})
    runtime_of(loader).start_processes(60)
    return loader

def readers(loader):
    return runtime_of(loader)._processes.processes

def rows(loader):
    return sorted(int(row) for batch in loader for row in batch["data"][:, 0] // 4)
"""

GOOD = {
    "what functions print is seen": """
def tell(batch):
    if os.getpid() != HERE:
        print(f"row {int(batch['data'][0, 0]) // 4}\\n", end="")
    return batch
with load(ds.map_each(lambda sample, rng: tell({"data": sample["data"][None]}) and sample)) as loader:
    assert rows(loader) == list(range(ROWS))
    loader.close()
print("told")
""",
    "functions find standard input empty": """
def ask(batch):
    assert os.getpid() == HERE or sys.stdin.read() == ""
    return batch
with load(ds.map(ask)) as loader:
    assert rows(loader) == list(range(ROWS))
""",
    "a module of the folder that the program has left": """
os.makedirs("elsewhere", exist_ok=True)
open("beside.py", "w").write("def same(batch):\\n    return batch\\n")
sys.path.insert(0, "")
import beside
ds = ds.map(beside.same)
loader = ps.Loader(ds, batch_size=4, processes=2, threads=2, memory="400MiB", output="numpy")
runtime_of(loader)._ready_processes()
os.chdir("elsewhere")
runtime_of(loader).start_processes(60)
assert all(process.is_up for process in readers(loader)), readers(loader)[0].failure
assert rows(loader) == list(range(ROWS))
""",
    "a module of a name that another one has": """
import importlib.util
os.makedirs("other", exist_ok=True)
open("twin.py", "w").write("def change(batch):\\n    return {'data': batch['data'] * 0}\\n")
open("other/twin.py", "w").write("def change(batch):\\n    return {'data': batch['data'] + 0}\\n")
sys.path.insert(0, os.getcwd())
spec = importlib.util.spec_from_file_location("twin", "other/twin.py")
twin = sys.modules["twin"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(twin)
with load(ds.map(twin.change)) as loader:
    assert rows(loader) == list(range(ROWS))
""",
    "objects of the program's own classes": """
import io, tarfile
class Caption:
    def __init__(self, text):
        self.text = text
with tarfile.open("a.tar", "w") as archive:
    for row in range(20):
        member = tarfile.TarInfo(f"{row:03d}.cap")
        member.size = 3
        archive.addfile(member, io.BytesIO(b"%03d" % row))
captions = ps.open("a.tar", decoders={"cap": lambda data: Caption(data.decode())}, index_dir=False)
with load(captions) as loader:
    found = [caption for batch in loader for caption in batch["cap"]]
assert all(type(caption) is Caption for caption in found)
assert [caption.text for caption in found] == [f"{row:03d}" for row in range(20)]
unlike = ps.open("a.tar", decoders={"cap": lambda data: threading.Lock()}, index_dir=False)
with load(unlike) as loader, contextlib.suppress(ps.PenstockError):
    list(loader)
    raise AssertionError("a lock was sent")
""",
    "a fork while it reads": """
with load(ds) as loader:
    batches = iter(loader)
    next(batches)
    child = os.fork()
    if child == 0:
        del batches, loader
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(batches)) == ROWS // 4 - 1
    assert all(process.is_up for process in readers(loader))
""",
    "no descriptor left for connections": """
with load(ds, on_error="skip") as loader:
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    for _ in range(3):  # two for the slots, and one to open the data file with
        os.close(taken.pop())
    found = rows(loader)
    for each in taken:
        os.close(each)
    assert found == list(range(ROWS)), len(found)
    assert len(loader.report()) == 0
""",
    "few descriptors": """
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
with load(ds, processes=2, threads=8) as loader:
    assert rows(loader) == list(range(ROWS))
""",
    "loaders in threads": """
def read(number):
    with load(ds.map(lambda batch: batch), seed=number, shuffle=True, processes=1, threads=1) as loader:
        for _ in range(2):
            done.append(rows(loader) == list(range(ROWS)))
done = []
threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert done == [True] * 8
""",
    "a loader that is dropped while it reads": """
for _ in range(2):
    loader = load(ds)
    batches = iter(loader)
    next(batches)
    pids = [process.pid for process in readers(loader)]
    del loader, batches
    gc.collect()
    until = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
""",
    "Python ends while it reads": """
loader = load(ds)
batches = iter(loader)
next(batches)
""",
}

IN_A_READER = """
def fail(batch):
    if os.getpid() != HERE:
        {what}
    return batch
list(load(ds.map(fail)))
"""

ODD = """
class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(threading.Lock())
"""

BAD = {
    "a function that ends its process": (IN_A_READER.format(what="os._exit(3)"), "reader processes died"),
    "a function that exits": (IN_A_READER.format(what="sys.exit(3)"), "raised SystemExit: 3"),
    "an error of fifty million characters": (IN_A_READER.format(what="raise OSError('x' * 50_000_000)"), "raised OSEr"),
    "an error that does not pickle": (ODD + IN_A_READER.format(what="raise Odd(1, 2)"), "raised Odd"),
    "an exit inside the loop": ("for batch in load(ds):\n    sys.exit('that is enough')", "that is enough"),
    "an error inside the loop": ("for batch in load(ds):\n    1 / 0", "ZeroDivisionError"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GOOD)
def test_programs_that_end_well(apart, name):
    done = apart(BEGIN + GOOD[name], deadline=60)
    assert (done.code, done.left) == (0, ()), done.err
    if name == "what functions print is seen":
        assert sorted(done.out.splitlines()) == sorted([*(f"row {row}" for row in range(100)), "told"])
    else:
        assert done.err == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_programs_that_fail_say_why(apart, name):
    program, told = BAD[name]
    done = apart(BEGIN + program, deadline=60)
    assert (done.code, done.left) == (1, ())
    assert told in done.err


NEVER = """
def never(batch):
    if os.getpid() != HERE:
        if {holds}:
            ctypes.PyDLL(None).usleep(60_000_000)  # holds the interpreter
        time.sleep(60)
    return batch
loader = load(ds.map(never))
print(*(process.pid for process in readers(loader)), flush=True)
list(loader)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
@pytest.mark.parametrize("holds", [False, True], ids=["sleeps", "holds the interpreter"])
def test_programs_that_are_ended_inside_a_function_that_does_not_return(start, end_of, how, holds):
    child = start(BEGIN + NEVER.format(holds=holds))
    child.stdout.readline()
    time.sleep(0.3)  # the functions have begun
    begun = time.monotonic()
    if how == signal.SIGINT:
        os.killpg(child.pid, how)
    else:
        os.kill(child.pid, how)
    done = end_of(child, 20, begun)
    assert done.code in (-how, 1)
    assert done.left == ()
    assert done.seconds < 10
