"""Files that appear when they are complete: after kills, errors, and beside other writers."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from penstock.files.atomic import atomic_write

HANGING = """
import sys, time
from penstock.files.atomic import atomic_write
with atomic_write(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other_writer(tmp_path):
    """A process in the middle of writing ``tmp_path / "a.json"``."""
    child = subprocess.Popen([sys.executable, "-c", HANGING, str(tmp_path / "a.json")], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"writing\n"
    yield child
    child.kill()
    child.communicate()


def write(path, content=b"whole"):
    with atomic_write(str(path)) as file:
        file.write(content)


def test_nothing_is_left_after_an_error(tmp_path):
    with pytest.raises(TypeError, match="bytes-like"), atomic_write(str(tmp_path / "a.json")) as file:
        file.writelines([b"half", None])
    assert os.listdir(tmp_path) == []


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path, other_writer):
    os.kill(other_writer.pid, signal.SIGKILL)
    other_writer.wait()
    assert len(os.listdir(tmp_path)) == 1
    write(tmp_path / "b.json")
    assert len(os.listdir(tmp_path)) == 2, "another file's is left alone"
    write(tmp_path / "a.json")
    assert sorted(os.listdir(tmp_path)) == ["a.json", "b.json"]


def test_what_a_living_writer_has_begun_is_kept(tmp_path, other_writer):
    write(tmp_path / "a.json")
    assert len(os.listdir(tmp_path)) == 2
    assert (tmp_path / "a.json").read_bytes() == b"whole"


def test_a_pipe_in_the_place_of_a_left_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / ".a.json.x.partial")
    write(tmp_path / "a.json")
    assert (tmp_path / "a.json").read_bytes() == b"whole"


def test_threads_that_write_the_same_file(tmp_path):
    """A file that another writer takes for abandoned before it is locked is made anew."""
    failed = []

    def write_often():
        for _ in range(50):
            try:
                write(tmp_path / "a.json")
            except OSError as error:
                failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=write_often) for _ in range(8)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert (failed, os.listdir(tmp_path)) == ([], ["a.json"])
