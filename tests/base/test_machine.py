"""What the kernel says of this process and this machine."""

import mmap
import os
import subprocess
import sys

import pytest

from penstock.base import machine

LINUX = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
MiB = 2**20


@LINUX
def test_held_bytes_rise_and_fall_with_touched_memory():
    text = b"x" * MiB
    before = machine.held_bytes()
    block = mmap.mmap(-1, 64 * MiB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert machine.held_bytes() - before < 8 * MiB, "memory that was never touched is not held"
    for _ in range(64):
        block.write(text)
    assert 60 * MiB < machine.held_bytes() - before < 72 * MiB
    block.close()
    assert machine.held_bytes() - before < 8 * MiB


@LINUX
def test_held_bytes_count_shared_memory_but_not_file_pages(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(b"x" * 32 * MiB)
    before = machine.held_bytes()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert sum(pages[at] for at in range(0, len(pages), machine.PAGE)) > 0
        assert machine.held_bytes() - before < 8 * MiB, "the kernel can drop file pages"
    shared = mmap.mmap(-1, 32 * MiB)
    for _ in range(32):
        shared.write(b"x" * MiB)
    assert machine.held_bytes() - before > 30 * MiB
    shared.close()


@LINUX
def test_held_bytes_of_another_process_and_of_none():
    assert machine.held_bytes(os.getpid()) == pytest.approx(machine.held_bytes(), rel=0.1)
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert machine.held_bytes(child.pid) == 0


@LINUX
def test_children_are_found_with_their_children():
    grandchild = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    with subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True) as process:
        try:
            inner = int(process.stdout.readline())
            found = machine.children(os.getpid())
            assert process.pid in found
            assert inner in found
            assert machine.children(process.pid) == [inner]
            assert machine.children(inner) == []
        finally:
            for pid in machine.children(process.pid):
                os.kill(pid, 9)
            process.kill()
    assert process.pid not in machine.children(os.getpid())


def test_free_bytes_are_some_of_the_machine():
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < machine.free_bytes() <= whole


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinity")
def test_cores_are_those_this_process_may_use():
    allowed = os.sched_getaffinity(0)
    assert 1 <= machine.cores() <= len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert machine.cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
