"""Rooms are lent again when nobody can look at them any more, here or in another process, and never before."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from penstock.base.scratch import map_shared
from penstock.loader.rooms import CAN_SHARE, MOST_KNOWN, Rooms, find_room

SIZE = 10_000
shared = pytest.mark.skipif(not CAN_SHARE, reason="no shared memory without a name on this system")
both = pytest.mark.parametrize("is_shared", [False, pytest.param(True, marks=shared)])


@both
def test_used_again_when_the_last_view_is_gone(is_shared):
    rooms = Rooms(is_shared=is_shared)
    first = rooms.lend(SIZE)
    address, view = first.ctypes.data, first.view(np.float32)[3:5]
    first[:] = 7
    assert rooms.lend_early(SIZE) is None
    del first
    assert rooms.lend_early(SIZE) is None
    second = rooms.lend(SIZE)
    assert second.ctypes.data != address
    del view
    third = rooms.lend(SIZE)
    assert third.ctypes.data == address
    assert set(third) == {7}


@both
def test_those_left_over_go_back_to_the_system(is_shared):
    rooms = Rooms(is_shared=is_shared)
    kept = [rooms.lend(SIZE) for _ in range(5)]
    del kept[:]
    taken = rooms.lend_early(SIZE)
    assert len(taken) == SIZE
    assert rooms.lend_early(SIZE) is None
    assert len(rooms._rooms) == 1


@shared
def test_a_moment_of_patience(monkeypatch):
    monkeypatch.setattr("penstock.loader.rooms.LONGEST_WAIT_S", 60.0)
    rooms = Rooms(is_shared=True, is_patient=True)
    descriptor, other = send(rooms, 3), rooms.lend(SIZE)
    assert rooms.lend_early(SIZE) is None
    threading.Timer(0.03, os.close, [descriptor]).start()
    assert rooms._wait(60)
    late = rooms.lend_late(SIZE)
    assert late[0] == 3
    del late
    assert rooms.lend_early(SIZE) is None, "while the other is in use, one less will do soon"
    del other
    assert rooms.lend_early(SIZE) is not None


@shared
def test_whoever_keeps_batches_is_seldom_waited_for(monkeypatch):
    rooms, waits = Rooms(is_shared=True, is_patient=True), []
    monkeypatch.setattr(Rooms, "_wait", lambda self, seconds: bool(waits.append(seconds)))
    kept = [rooms.lend_late(SIZE) for _ in range(60)]
    assert len({each.ctypes.data for each in kept}) == 60
    assert 3 <= len(waits) <= 6


@both
def test_many_batches_may_be_kept(is_shared):
    rooms = Rooms(is_shared=is_shared)
    kept = [rooms.lend(SIZE) for _ in range(2 * MOST_KNOWN)]
    for number, each in enumerate(kept):
        each[:] = number
    assert [set(each) for each in kept] == [{number} for number in range(2 * MOST_KNOWN)]
    assert len({each.ctypes.data for each in kept}) == len(kept)
    assert len(rooms._rooms) == MOST_KNOWN


def send(rooms, value):
    """What a worker does: the array dies here, and another process may have the descriptor."""
    memory = rooms.lend(SIZE)
    memory[:] = value
    return find_room(memory.ctypes.data).locked_descriptor()


@shared
def test_sent_to_a_reader():
    rooms = Rooms(is_shared=True)
    descriptor = send(rooms, 3)
    assert rooms.lend_early(SIZE) is None  # on its way
    received = map_shared(descriptor, SIZE)
    os.close(descriptor)
    assert rooms.lend_early(SIZE) is None  # looked at
    view = received[5:]
    del received
    assert rooms.lend_early(SIZE) is None
    assert set(view) == {3}
    del view
    assert set(rooms.lend_early(SIZE)) == {3}


@shared
def test_a_reader_that_is_killed():
    rooms = Rooms(is_shared=True)
    descriptor = send(rooms, 3)
    child = os.fork()
    if not child:
        kept = map_shared(descriptor, SIZE)
        while len(kept):
            time.sleep(1)
    os.close(descriptor)
    assert rooms.lend_early(SIZE) is None
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert rooms.lend_early(SIZE) is not None


@shared
def test_a_room_outlives_its_owner_and_leaves_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    rooms = Rooms(is_shared=True)
    descriptor = send(rooms, 4)
    kept = rooms.lend(SIZE)
    del rooms
    received = map_shared(descriptor, SIZE)
    os.close(descriptor)
    kept[:] = 5
    assert set(received) == {4}
    assert set(kept) == {5}
    del received, kept
    assert len(os.listdir("/proc/self/fd")) == before
