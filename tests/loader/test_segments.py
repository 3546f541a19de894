"""Segments are lent again when nobody can look at them any more, here or in another process, and never before."""

import errno
import os
import signal
import threading
import time

import numpy as np
import pytest

from penstock.base.scratch import map_shared
from penstock.loader.segments import CAN_SHARE, MOST_KNOWN, SegmentPool, find_segment

SIZE = 10_000
shared = pytest.mark.skipif(not CAN_SHARE, reason="no shared memory without a name on this system")
both = pytest.mark.parametrize("is_shared", [False, pytest.param(True, marks=shared)])


@both
def test_used_again_when_the_last_view_is_gone(is_shared):
    segments = SegmentPool(is_shared=is_shared)
    first = segments.lend(SIZE)
    address, view = first.ctypes.data, first.view(np.float32)[3:5]
    first[:] = 7
    assert segments.lend_early(SIZE) is None
    del first
    assert segments.lend_early(SIZE) is None
    second = segments.lend(SIZE)
    assert second.ctypes.data != address
    del view
    third = segments.lend(SIZE)
    assert third.ctypes.data == address
    assert set(third) == {7}


@both
def test_those_left_over_go_back_to_the_system(is_shared):
    segments = SegmentPool(is_shared=is_shared)
    kept = [segments.lend(SIZE) for _ in range(5)]
    del kept[:]
    taken = segments.lend_early(SIZE)
    assert len(taken) == SIZE
    assert segments.lend_early(SIZE) is None
    assert len(segments._segments) == 1


@shared
def test_a_moment_of_patience(monkeypatch):
    monkeypatch.setattr("penstock.loader.segments.LONGEST_WAIT_S", 60.0)
    segments = SegmentPool(is_shared=True, is_patient=True)
    descriptor, other = send(segments, 3), segments.lend(SIZE)
    assert segments.lend_early(SIZE) is None
    threading.Timer(0.03, os.close, [descriptor]).start()
    assert segments._wait(60)
    late = segments.lend_late(SIZE)
    assert late[0] == 3
    del late
    assert segments.lend_early(SIZE) is None, "while the other is in use, one less will do soon"
    del other
    assert segments.lend_early(SIZE) is not None


@shared
def test_whoever_keeps_batches_is_seldom_waited_for(monkeypatch):
    segments, waits = SegmentPool(is_shared=True, is_patient=True), []
    monkeypatch.setattr(SegmentPool, "_wait", lambda self, seconds: bool(waits.append(seconds)))
    kept = [segments.lend_late(SIZE) for _ in range(60)]
    assert len({each.ctypes.data for each in kept}) == 60
    assert 3 <= len(waits) <= 6


@both
def test_many_batches_may_be_kept(is_shared):
    segments = SegmentPool(is_shared=is_shared)
    kept = [segments.lend(SIZE) for _ in range(2 * MOST_KNOWN)]
    for number, each in enumerate(kept):
        each[:] = number
    assert [set(each) for each in kept] == [{number} for number in range(2 * MOST_KNOWN)]
    assert len({each.ctypes.data for each in kept}) == len(kept)
    assert len(segments._segments) == MOST_KNOWN


def send(segments, value):
    """What a worker does: the array dies here, and another process may have the descriptor."""
    memory = segments.lend(SIZE)
    memory[:] = value
    return find_segment(memory.ctypes.data).locked_descriptor()


@shared
@shared
def test_memory_of_its_own_where_none_can_be_shared(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    lent = SegmentPool(is_shared=True).lend(SIZE)
    lent[:] = 7
    assert find_segment(lent.ctypes.data) is None


def test_sent_to_a_reader():
    segments = SegmentPool(is_shared=True)
    descriptor = send(segments, 3)
    assert segments.lend_early(SIZE) is None  # on its way
    received = map_shared(descriptor, SIZE)
    os.close(descriptor)
    assert segments.lend_early(SIZE) is None  # looked at
    view = received[5:]
    del received
    assert segments.lend_early(SIZE) is None
    assert set(view) == {3}
    del view
    assert set(segments.lend_early(SIZE)) == {3}


@shared
def test_a_reader_that_is_killed():
    segments = SegmentPool(is_shared=True)
    descriptor = send(segments, 3)
    child = os.fork()
    if not child:
        kept = map_shared(descriptor, SIZE)
        while len(kept):
            time.sleep(1)
    os.close(descriptor)
    assert segments.lend_early(SIZE) is None
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert segments.lend_early(SIZE) is not None


@shared
def test_a_room_outlives_its_owner_and_leaves_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    segments = SegmentPool(is_shared=True)
    descriptor = send(segments, 4)
    kept = segments.lend(SIZE)
    del segments
    received = map_shared(descriptor, SIZE)
    os.close(descriptor)
    kept[:] = 5
    assert set(received) == {4}
    assert set(kept) == {5}
    del received, kept
    assert len(os.listdir("/proc/self/fd")) == before
