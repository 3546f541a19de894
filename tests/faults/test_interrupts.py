"""Ctrl-C: KeyboardInterrupt where the program is, never lost, never needed twice, and nothing left behind."""

import os
import shutil
import signal
import subprocess
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")

# Interrupts are to end a program within three seconds; a machine that is busy with other tests gets some more.
DEADLINE_S = 15

BEGIN = """
import signal, sys, threading, time
import numpy as np
import penstock as ps
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may have it ignored

def say(*words):
    print(*words, flush=True)

def stuck_at_25(batch):
    if (batch["data"][:, 0] == 25).any():
        say("ready")
        time.sleep(600)
    return batch

stuck = threading.Event()

def stuck_behind_the_first(batch):
    if threading.current_thread() is not threading.main_thread() and not (batch["data"][:, 0] == 0).any():
        stuck.set()
        time.sleep(600)
    return batch
"""

COMPUTING = """
say("ready")
for batch in ps.Loader(ps.open(sys.argv[1]), batch_size=1, memory="64MiB", threads=3, output="numpy"):
    time.sleep(60)
"""

TORCH_WORKERS = """
from torch.utils.data import DataLoader
if __name__ == "__main__":
    for batch in DataLoader(ps.open(sys.argv[1]), batch_size=1, num_workers=2, multiprocessing_context="fork"):
        say("ready")
        time.sleep(60)
"""

STUCK_FUNCTION = """
ds = ps.open(sys.argv[1]).map(stuck_at_25)
for batch in ps.Loader(ds, batch_size=1, memory="64MiB", threads=3, output="numpy"):
    pass
"""

STUCK_READ = """
threading.Timer(1, say, ["ready"]).start()
for batch in ps.Loader(ps.open(sys.argv[1]), batch_size=1, memory="64MiB", threads=3, output="numpy"):
    pass
"""

# The loop is left, which waits for the threads, of which one is stuck.
SHUTDOWN = """
ds = ps.open(sys.argv[1]).map(stuck_behind_the_first)
for batch in ps.Loader(ds, batch_size=1, memory="64MiB", threads=3, output="numpy"):
    assert stuck.wait(20)
    say("ready")
    break
time.sleep(60)
"""

SHUTDOWN_OF_SEVERAL = """
datasets = {name: ps.open(sys.argv[1]).map(stuck_behind_the_first) for name in ("a", "b")}
for step in ps.MultiLoader(datasets, mode="alternate", batch_size=1, memory="64MiB", threads=3, output="numpy"):
    assert stuck.wait(20)
    say("ready")
    break
time.sleep(60)
"""

CLOSING = """
ds = ps.open(sys.argv[1]).map(stuck_behind_the_first)
with ps.Loader(ds, batch_size=1, memory="64MiB", threads=3, output="numpy") as loader:
    iterator = iter(loader)
    next(iterator)
    assert stuck.wait(20)
    say("ready")
time.sleep(60)
"""


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    np.save(folder / "a.npy", np.arange(100 * 10_000, dtype=np.float32).reshape(10_000, 100).T.copy())
    return folder / "a.npy"


def interrupted(child, end_of, after_s=0.3):
    """Ctrl-C, as a terminal sends it: to the whole group."""
    assert child.stdout.readline() == "ready\n", child.stderr.read()
    time.sleep(after_s)
    begun = time.monotonic()
    os.killpg(child.pid, signal.SIGINT)
    ended = end_of(child, DEADLINE_S, begun)
    assert ended.code == -signal.SIGINT, ended.err
    assert ended.err.rstrip().endswith("KeyboardInterrupt"), ended.err
    assert "Exception ignored" not in ended.err, ended.err
    assert ended.left == ()
    return ended


PROGRAMS = {
    "computing": COMPUTING,
    "workers of torch": TORCH_WORKERS,
    "stuck function": STUCK_FUNCTION,
    "shutdown": SHUTDOWN,
    "shutdown of several": SHUTDOWN_OF_SEVERAL,
    "closing": CLOSING,
}


@pytest.mark.case(29)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_ctrl_c(data, start, end_of, tmp_path, program):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    ended = interrupted(start(BEGIN + program, data, env={"TMPDIR": str(temporary)}), end_of)
    assert list(temporary.iterdir()) == []
    assert "while" not in ended.out


@pytest.mark.case(29)
@pytest.mark.skipif(shutil.which("gcc") is None or not Path("/proc/self/fd").is_dir(), reason="needs gcc and Linux")
def test_ctrl_c_while_the_disk_does_not_answer(data, start, end_of, tmp_path):
    library = tmp_path / "faulty_reads.so"
    source = Path(__file__).with_name("faulty_reads.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=60)
    stalls = {"FAULT_UNDER": str(data.parent), "FAULT_KIND": "stall", "FAULT_FIRST": "6", "FAULT_TIMES": "0"}
    interrupted(start(BEGIN + STUCK_READ, data, env={"LD_PRELOAD": str(library), **stalls}), end_of)


@pytest.fixture
def stalling(data):
    """A server that answers until it is told to stall."""
    content, stall, over = data.read_bytes(), Event(), Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            begin, _, end = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            part = content[int(begin) : int(end) + 1 if end else None]
            self.send_response(206)
            self.send_header("ETag", '"one"')
            self.send_header("Content-Range", f"bytes {begin}-{int(begin) + len(part) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            if stall.is_set():
                self.wfile.write(part[:10])
                over.wait(60)
            else:
                self.wfile.write(part)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    serving = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    serving.start()
    yield f"http://127.0.0.1:{server.server_port}/a.npy", stall
    over.set()
    server.shutdown()
    server.server_close()
    serving.join()


@pytest.mark.case(29)
def test_ctrl_c_while_a_server_does_not_answer(start, end_of, stalling):
    url, stall = stalling
    program = """
ds = ps.open(sys.argv[1])
say("open")
sys.stdin.readline()
threading.Timer(1, say, ["ready"]).start()
for batch in ps.Loader(ds, batch_size=1, memory="64MiB", threads=3, output="numpy"):
    pass
"""
    child = start(BEGIN + program, url, stdin=subprocess.PIPE)
    assert child.stdout.readline() == "open\n", child.stderr.read()
    stall.set()
    child.stdin.write("go on\n")
    child.stdin.flush()
    interrupted(child, end_of)


# Interrupts come at any moment of a loop, and each that is delivered must be an exception there: none is dropped by a
# finalizer. Batches are of one number, so that loans begin and end all the time. (Not while the loop begins or ends:
# Python's own threading drops some there, in a callback of a WeakSet; those that it drops here are counted apart.)
NEVER_LOST = """
unheard, delivered, raised = [], 0, 0

def hear(told):
    global raised
    at = told.exc_traceback
    while at.tb_next is not None and at.tb_next.tb_frame.f_code.co_name != "ring":
        at = at.tb_next
    if at.tb_frame.f_code.co_filename.endswith("_weakrefset.py"):
        raised += 1
    else:
        unheard.append(repr(told))

sys.unraisablehook = hear

class Alarm(KeyboardInterrupt):
    pass

def ring(*_):
    global delivered
    delivered += 1
    raise Alarm

signal.signal(signal.SIGALRM, ring)
pauses = np.random.default_rng(int(sys.argv[1])).uniform(1e-4, 4e-3, 600).tolist()
loader = ps.Loader(ps.from_arrays(x=np.arange(10**6)), batch_size=1, memory="64MiB", threads=1, output="numpy")
left = 10_000  # takes longer than any pause
for pause in pauses:
    iterator = iter(loader)
    next(iterator)
    try:
        signal.setitimer(signal.ITIMER_REAL, pause)
        for batch in iterator:
            pass
        signal.setitimer(signal.ITIMER_REAL, 0)  # the loop was quicker
    except Alarm:
        raised += 1
    loader.load_state_dict(loader.state_dict() | {"epoch": 0, "samples": 10**6 - left})
rest = [int(batch["x"][0]) for batch in loader]
assert rest == list(range(10**6 - left, 10**6)), "and everything is in order"
say(delivered >= 500, delivered - raised, unheard[:3])
"""


@pytest.mark.slow
@pytest.mark.case(29)
def test_no_interrupt_is_lost(apart, any_seed):
    ended = apart(BEGIN + NEVER_LOST, any_seed, deadline=100)
    assert ended.code == 0, ended.err
    assert ended.out == "True 0 []\n"


@pytest.mark.soak
def test_no_interrupt_is_lost_for_many_seeds(apart, any_seed):
    test_no_interrupt_is_lost(apart, any_seed)


# What a terminal's Ctrl-C does to a process that is still importing.
INTERRUPTED_AT_ONCE = """
import os, signal, sys
if any(word in argument for argument in sys.orig_argv for word in ("reader_process", "multiprocessing.spawn")):
    os.kill(os.getpid(), signal.SIGINT)
"""

READER_PROCESSES = """
import os

def with_process(batch):
    return {**batch, "process": np.full(len(batch["data"]), os.getpid())}

ds = ps.open(sys.argv[1]).map(with_process)
with ps.Loader(ds, batch_size=10, memory="256MiB", threads=2, processes=2, output="numpy") as loader:
    while all((batch["process"] == os.getpid()).all() for batch in loader):
        pass
"""

CONVERSION = """
ps.convert(ps.open(sys.argv[1]), sys.argv[1] + ".zarr", memory="256MiB", workers=2)
"""


@pytest.mark.parametrize("program", [READER_PROCESSES, CONVERSION], ids=["reader processes", "conversion"])
def test_processes_ignore_ctrl_c_from_their_first_moment(data, start, end_of, tmp_path, program):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED_AT_ONCE)
    ended = end_of(start(BEGIN + program, data, env={"PYTHONPATH": str(tmp_path)}), DEADLINE_S, time.monotonic())
    assert (ended.code, ended.err) == (0, "")
