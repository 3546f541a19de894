"""How a fault is brought about apart from the tests: a child in a process group of its own, with a deadline.

Each test of the numbered cases in docs/faults.md carries ``@pytest.mark.case(n)``; ``test_cases.py`` holds both lists
to each other.
"""

import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

IN_PROCESSES = f"""
import sys
sys.path.insert(0, {os.fspath(Path(__file__).parents[2])!r})
from tests.in_processes import read_in_processes
read_in_processes({{count}})
del sys.path[0]
"""


@dataclass(frozen=True)
class Outcome:
    """How a child ended, what it said, and which processes of its group outlived it by two seconds."""

    code: int
    out: str
    err: str
    seconds: float
    left: tuple[int, ...]


def members(group: int) -> tuple[int, ...]:
    """The processes of a group that are alive, which ones without a /proc cannot say."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat") as file:
                state, _, of_group = file.read().rpartition(")")[2].split()[:3]
        except OSError:  # ended meanwhile
            continue
        if int(of_group) == group and state not in "ZX":
            found.append(int(name))
    return tuple(found)


def end_of(child: subprocess.Popen, deadline: float, begun: float | None = None) -> Outcome:
    """Waits for a child that leads its group. One that is still there at the deadline fails the test, and is killed."""
    begun = time.monotonic() if begun is None else begun
    try:
        out, err = child.communicate(timeout=deadline)
        seconds = time.monotonic() - begun
        until = time.monotonic() + 2
        while members(child.pid) and time.monotonic() < until:
            time.sleep(0.05)
        left = members(child.pid)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        pytest.fail(f"still running after {deadline} s\n--- out\n{out}\n--- err\n{err}")
    finally:
        if members(child.pid):
            os.killpg(child.pid, signal.SIGKILL)
    return Outcome(child.returncode, out, err, seconds, left)


@pytest.fixture
def start(tmp_path, reader_processes):
    """Starts a Python program, given as text, in a process group of its own."""
    started = []
    first = IN_PROCESSES.format(count=reader_processes) if reader_processes else ""

    def begin(program: str, *arguments: object, env: dict[str, str] | None = None, **more: object) -> subprocess.Popen:
        child = subprocess.Popen(
            [sys.executable, "-c", first + program, *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=tmp_path,
            env=os.environ | (env or {}), **more,
        )  # fmt: skip
        started.append(child)
        return child

    yield begin
    for child in started:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()


@pytest.fixture
def apart(start):
    """Runs a Python program, given as text, to its end: ``apart(program, *arguments, deadline=20, env={…})``."""

    def run(program: str, *arguments: object, deadline: float = 20.0, **more: object) -> Outcome:
        return end_of(start(program, *arguments, **more), deadline)

    return run


@pytest.fixture(name="end_of")
def end_of_fixture():
    return end_of


FORMATS = (
    *("contiguous.h5", "chunks.h5", "pieces.h5", "library.h5", "a.tar", "a.npy", "a.npz", "packed.npz", "a.nii"),
    *("b.nii.gz", "a.zarr", "shards.zarr", "old.zarr", "a.lmdb", "a.tiledb", "a.parquet", "a.arrow", "pictures"),
    *("arrays",),
)


@pytest.fixture(scope="session")
def every_format(tmp_path_factory):
    """A folder with a small dataset of each format, 24 rows each; to be copied by who changes it."""
    folder = tmp_path_factory.mktemp("formats")
    program = os.path.join(os.path.dirname(__file__), "samples.py")
    subprocess.run([sys.executable, program, str(folder)], check=True, capture_output=True, timeout=60)
    return folder


class Trap:
    """Unpickling it leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture
def trap(tmp_path):
    """A trap that works, and was not sprung when the test is over."""
    marker = tmp_path / "code-was-run"
    pickle.loads(pickle.dumps(Trap(marker)))
    assert marker.exists(), "the trap must work"
    marker.unlink()
    yield Trap(marker)
    assert not marker.exists(), "code from the data was run"
