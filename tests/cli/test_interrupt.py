"""Ctrl-C on a terminal, at any time: exit code 130, one line, and the terminal as it was."""

import os
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest

pty = pytest.importorskip("pty")
termios = pytest.importorskip("termios")

# The child takes the terminal for its own, and a handler that whoever started the tests may have taken from it. It says
# when a command is about to be imported, which takes longer than anything that comes before.
PROGRAM = """
import os, signal, sys
terminal = os.open(sys.argv.pop(1), os.O_RDWR)
for number in range(3):
    os.dup2(terminal, number)
signal.signal(signal.SIGINT, signal.default_int_handler)
from penstock.cli.main import main

class Begun:
    def find_spec(name, path, target=None):
        if name.startswith("penstock.cli."):
            print("begun", flush=True)

sys.meta_path.insert(0, Begun)
sys.exit(main())
"""
DEADLINE_S = 30


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    path = tmp_path_factory.mktemp("session") / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("betas", data=np.zeros((400, 20_000), np.int16), chunks=(1, 200))
    return str(path)


def read_until(terminal, found, wanted):
    """What was written so far, when that has ``wanted`` in it or nobody writes any more."""
    until = time.monotonic() + DEADLINE_S
    while wanted not in found:
        assert time.monotonic() < until, found
        try:
            found += os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
    return found


@pytest.mark.parametrize(
    ("arguments", "shown", "later"),
    [
        (["inspect"], "begun", 0),
        (["inspect"], "begun", 0.03),
        (["inspect", "--deep"], "%", 0),
        (["plan", "--memory", "64MiB"], "begun", 0),
        (["plan", "--memory", "64MiB"], "begun", 0.05),
        (["bench", "--memory", "64MiB", "--step", "20", "--batch-size", "2", "--seconds", "60"], "%", 0),
    ],
    ids=lambda each: " ".join(each[:2]) if isinstance(each, list) else None,
)
def test_the_terminal_is_as_it_was(session, tmp_path, arguments, shown, later):
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    command = [sys.executable, "-c", PROGRAM, os.ttyname(slave), *arguments, session]
    env = os.environ | {"PENSTOCK_CACHE": str(tmp_path)}
    with subprocess.Popen(command, start_new_session=True, env=env) as child:
        said = read_until(master, b"", shown.encode())
        time.sleep(later)
        os.write(master, b"\x03")
        after = termios.tcgetattr(slave)
        os.close(slave)
        said = read_until(master, said, b"nobody writes this")
        code = child.wait(DEADLINE_S)
    os.close(master)
    assert code == 130, said
    assert after == before
    assert b"Traceback" not in said
    assert said.endswith(b"interrupted\r\n"), said
    assert said.count(b"\x1b[?25l") == said.count(b"\x1b[?25h")  # the cursor is not hidden
