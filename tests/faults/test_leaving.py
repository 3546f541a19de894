"""Loops that are left early, a hundred times, and programs that end in the middle of one: nothing stays behind."""

import os

import numpy as np
import pytest

BEGIN = """
import gc, os, sys, threading, time
import numpy as np
import penstock as ps
from penstock.base.machine import children

def count():
    gc.collect()
    maps = 0
    with open("/proc/self/maps") as file:
        maps = sum(1 for _ in file)
    return len(threading.enumerate()), len(os.listdir("/proc/self/fd")), len(children(os.getpid())), maps

def stuck_at_25(batch):
    if (batch["data"][:, 0] == 25).any():
        time.sleep(600)
    return batch

class Stop(Exception):
    pass

def by_break(batches):
    for batch in batches:
        break

def by_exception(batches):
    try:
        for batch in batches:
            raise Stop
    except Stop:
        pass

def by_dropping(batches):
    iterator = iter(batches)
    next(iterator)
    del iterator

def by_a_cycle(batches):
    holder = [iter(batches)]
    next(holder[0])
    holder.append(holder)

def by_beginning_anew(batches):
    next(iter(batches))
    next(iter(batches))
    by_break(batches)

def never_begun(batches):
    iter(batches)

options = {"batch_size": 4, "memory": "64MiB", "threads": 2, "output": "numpy"}
"""

A_HUNDRED_TIMES = """
ds = ps.open(sys.argv[1])
made = {
    "one loader": lambda loader=ps.Loader(ds, **options): loader,
    "a loader each": lambda: ps.Loader(ds, **options),
    "several datasets": lambda loader=ps.MultiLoader({"a": ds, "b": ds}, mode="together", **options): loader,
}
for how, make in made.items():
    ways = (by_break, by_exception, by_dropping, by_a_cycle, by_beginning_anew, never_begun)
    for leave in ways if how == "one loader" else ways[:2]:
        for _ in range(5):
            leave(make())
        before = count()
        for _ in range(100):
            leave(make())
        after = count()
        grown = [b - a for a, b in zip(before, after)]
        if grown[:3] != [0, 0, 0] or grown[3] > 10:
            print(how, leave.__name__, "threads, descriptors, children, maps:", before, after)
"""


@pytest.fixture
def data(tmp_path):
    for name in ("a", "b", "c"):
        np.save(tmp_path / f"{name}.npy", np.repeat(np.arange(40.0)[:, None], 10_000, axis=1))
    return tmp_path / "a.npy"


@pytest.mark.slow
@pytest.mark.case(31)
@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")
def test_a_hundred_times(data, apart):
    ended = apart(BEGIN + A_HUNDRED_TIMES, str(data.parent / "*.npy"), deadline=100)
    assert (ended.code, ended.out, ended.err) == (0, "", "")


EXITS = {
    "a live iterator": "it = iter(ps.Loader(ds, **options)); next(it)",
    "of several datasets": "it = iter(ps.MultiLoader({'a': ds, 'b': ds}, mode='alternate', **options)); next(it)",
    "in a cycle": "holder = [iter(ps.Loader(ds, **options))]; next(holder[0]); holder.append(holder)",
    "with batches kept": "loader = ps.Loader(ds, **options); it = iter(loader); kept = [next(it) for _ in range(3)]",
    "tensors": "it = iter(ps.Loader(ds, **options | {'output': 'torch'})); kept = next(it)",
    "a stuck function": "it = iter(ps.Loader(ds.map(stuck_at_25), **options)); next(it); time.sleep(0.5)",
    "sys.exit in the loop": "for batch in ps.Loader(ds, **options): sys.exit()",
}


@pytest.mark.case(31)
@pytest.mark.parametrize("body", EXITS.values(), ids=EXITS.keys())
def test_the_program_ends_with(data, apart, body, tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    ended = apart(BEGIN + f"ds = ps.open(sys.argv[1])\n{body}\n", data, env={"TMPDIR": str(temporary)})
    assert (ended.code, ended.out, ended.err, ended.left) == (0, "", "", ())
    assert list(temporary.iterdir()) == []


# A module that was imported before penstock and is still held is emptied after penstock's own modules are.
HELD_TO_THE_END = """
import json, sys
{body}
json.held = held
sys.held = list(sys.modules.values())
"""

HELD = {
    "a dataset": "held = ps.open(sys.argv[1]); held[0]",
    "a dataset's mapping": "held = ps.open(sys.argv[1]); held[0:40]",
    "an iteration": "held = iter(ps.Loader(ps.open(sys.argv[1]), **options)); next(held)",
    "several datasets": "a = ps.open(sys.argv[1])\nheld = iter(ps.MultiLoader({'a': a}, mode='together', **options))",
    "shards": "held = iter(wds.WebDataset('a.tar')); next(held)",
    "shuffled shards": "held = iter(wds.WebDataset('a.tar').shuffle(50).decode().batched(3)); next(held)",
    "shards of an epoch": "held = iter(wds.WebDataset('a.tar').with_epoch(50)); next(held)",
}
SHARDS = """
from penstock import webdataset as wds
with wds.TarWriter("a.tar") as to:
    for row in range(99):
        to.write({"__key__": f"{row:04}", "cls": row})
"""


@pytest.mark.case(31)
@pytest.mark.parametrize("body", HELD.values(), ids=HELD.keys())
def test_the_program_ends_in_silence_with(data, apart, body):
    before = BEGIN + (SHARDS if "wds" in body else "")
    ended = apart(before + HELD_TO_THE_END.format(body=body), data)
    assert (ended.code, ended.out, ended.err, ended.left) == (0, "", "", ())


AT_THE_END = """
import builtins

class Last:
    def __init__(self):
        self.loader = ps.Loader(ps.open(sys.argv[1]), **options)
        self.iterator = iter(self.loader)
        {begin}

    def __del__(self, os=os):
        for batches in (self.iterator, self.loader):
            try:
                for batch in batches:
                    pass
                os.write(1, b"nothing was said\\n")
            except BaseException as error:
                os.write(1, type(error).__name__.encode() + b"\\n")

builtins.last = Last()
"""


@pytest.mark.case(31)
@pytest.mark.parametrize(("begin", "told"), [("next(self.iterator)", "WorkerDied"), ("", "Unavailable")])
def test_a_loop_at_the_very_end_is_refused(data, apart, begin, told):
    """Its threads would never run: neither a hang, nor an epoch that is over early."""
    ended = apart(BEGIN + AT_THE_END.replace("{begin}", begin), data, deadline=20)
    assert (ended.code, ended.out, ended.left) == (0, f"{told}\nUnavailable\n", ())


@pytest.mark.case(31)
def test_an_exception_in_the_body_is_the_one_that_is_seen(data, apart):
    ended = apart(BEGIN + "for batch in ps.Loader(ps.open(sys.argv[1]), **options):\n    1 / 0\n", data)
    assert (ended.code, ended.out, ended.left) == (1, "", ())
    assert ended.err.rstrip().endswith("ZeroDivisionError: division by zero")
    assert "During handling" not in ended.err


GOES_ON = """
stuck = threading.Event()

def stuck_once(batch):
    if (batch["data"][:, 0] == 25).any() and not stuck.is_set() and len(threading.enumerate()) > 1:
        stuck.set()
        time.sleep(13)
    return batch

with ps.Loader(ps.open(sys.argv[1]).map(stuck_once), **options) as loader:
    for batch in loader:
        if stuck.wait(0.05):
            break
    # The thread is still in the function, and writes to its slot when that returns.
    rows = [int(row) for batch in loader for row in batch["data"][:, 0]]
    assert rows == list(range(40)), rows
    time.sleep(3)
    rows = [int(row) for batch in loader for row in batch["data"][:, 0]]
    assert rows == list(range(40)), rows
print(len(threading.enumerate()))
"""


@pytest.mark.slow
@pytest.mark.case(31)
def test_the_next_epoch_does_not_wait_for_ever_for_a_read_of_the_last(data, apart):
    ended = apart(BEGIN + GOES_ON, data, deadline=60)
    assert (ended.code, ended.out, ended.err) == (0, "1\n", "")
