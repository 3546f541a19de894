"""Segments: reusable memory for columns of batches. Fresh pages take as long as decoding a picture into them.

A segment is lent as an array, and is free again when the last array or tensor over it is gone. A segment in shared
memory can also be sent to the parent process; it is then free when that process has released it too. The kernel keeps
count by file locks: the owner holds one, and so does every descriptor that was sent, until the receiver unmaps it or
dies.

The parent keeps what it has mapped, since mapping again costs a quarter of what fresh pages do: until the owner has
given up the segment, or has ended.
"""

import itertools
import os
import time
import weakref
from multiprocessing import process
from typing import Any

import numpy as np

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from penstock.base import stop
from penstock.base.scratch import buffer, map_shared, shared_buffer

CAN_SHARE = fcntl is not None and hasattr(os, "memfd_create")

MOST_KNOWN = 32
"""Segments per column. A caller who keeps more batches than that gets fresh memory for each."""

MOST_MAPPED = 8
"""Segments of one process that its parent keeps mapped, with three descriptors each."""

LONGEST_WAIT_S = 2.0
"""The longest wait for a segment to come back; it never exceeds the time that the last batch took. A worker that must
end finishes its batch first, and torch kills it after five seconds."""

_NUMBERS = itertools.count()


class Segment:
    """One piece of memory; in shared memory it has a descriptor."""

    def __init__(self, memory: np.ndarray, descriptor: int = -1) -> None:
        self.memory, self.descriptor = memory, descriptor
        self.number = next(_NUMBERS)
        self.address = int(memory.ctypes.data)
        self._loan: weakref.ref[_LentSegment] | None = None
        if descriptor >= 0:
            weakref.finalize(self, stop.call_in_finalizer, os.close, descriptor).atexit = False

    @property
    def is_free(self) -> bool:
        """Whether nothing uses it any more, in any process."""
        if self._loan is not None and self._loan() is not None:
            return False
        return self.descriptor < 0 or not _is_locked(self.descriptor, then=fcntl.LOCK_SH)

    def empty(self) -> None:
        """Return its memory to the system, although others may still have it mapped; it must not be read again."""
        if self.descriptor >= 0:
            os.ftruncate(self.descriptor, 0)

    def lend(self, lock: Any = None) -> np.ndarray:
        """Its bytes, of any content, as an array that holds on to ``lock`` too."""
        loan = _LentSegment(self, lock)
        self._loan = weakref.ref(loan)
        return np.asarray(loan)

    def locked_descriptor(self) -> int:
        """Another descriptor, for another process; until all copies of it are closed, the segment is not free."""
        descriptor = _open_again(self.descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return descriptor


class _LentSegment:
    """The object that numpy regards as the owner of a lent array's memory."""

    __slots__ = ("__array_interface__", "__weakref__", "lock", "segment")

    def __init__(self, segment: Segment, lock: Any) -> None:
        self.segment, self.lock = segment, lock
        self.__array_interface__: dict[str, Any] = segment.memory.__array_interface__


def _is_locked(descriptor: int, *, then: int) -> bool:
    """Whether others hold a lock; ``then`` is what this descriptor holds or not from now on."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        fcntl.flock(descriptor, then)
    return False


def _open_again(descriptor: int) -> int:
    """A descriptor with its own locks."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


# In the process that fills them.

_SHARED: "weakref.WeakValueDictionary[int, Segment]" = weakref.WeakValueDictionary()


def find_segment(address: int) -> Segment | None:
    """The shared segment that begins at this address."""
    return _SHARED.get(address)


class SegmentPool:
    """The segments of one column."""

    def __init__(self, *, is_shared: bool, is_patient: bool = False) -> None:
        self._is_shared, self._is_patient = is_shared, is_patient
        self._segments: list[Segment] = []
        self._failed_waits = self._without_wait = 0
        self._since = time.monotonic()

    def lend(self, size: int) -> np.ndarray:
        """``size`` bytes, from a free segment if there is one."""
        free = self._take_free(size)
        if free is not None:
            return free.lend()
        segment = self._fresh(size)
        self._segments = [*self._segments[-MOST_KNOWN + 1 :], segment]
        return segment.lend()

    def _fresh(self, size: int) -> Segment:
        if not self._is_shared:
            return Segment(buffer(size))
        try:
            segment = Segment(*shared_buffer(size))
        except OSError:  # too many open files: what is sent will be copied
            return Segment(buffer(size))
        fcntl.flock(segment.descriptor, fcntl.LOCK_SH)
        _SHARED[segment.address] = segment
        return segment

    def lend_early(self, size: int) -> np.ndarray | None:
        """The same if it is not needed yet; None if there is no segment to reuse.

        A segment that another process looks at will soon be free, and then no second one is needed.
        """
        if self._is_shared and not all(segment.is_free for segment in self._segments):
            return None
        free = self._take_free(size)
        return None if free is None else free.lend()

    def lend_late(self, size: int) -> np.ndarray:
        """The same if it is needed now: first wait a moment for a segment to come back.

        If the caller keeps batches, the wait is in vain; after each such wait, it waits half as often.
        """
        self._without_wait += 1
        if self._is_patient and self._segments and self._without_wait >= 2**self._failed_waits:
            self._without_wait = 0
            self._failed_waits = 0 if self._wait(time.monotonic() - self._since) else min(self._failed_waits + 1, 6)
        self._since = time.monotonic()
        return self.lend(size)

    def _wait(self, seconds: float) -> bool:
        """Whether a segment came back."""
        until = time.monotonic() + min(seconds, LONGEST_WAIT_S)
        while not any(segment.is_free for segment in self._segments):
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
        return True

    def _take_free(self, size: int) -> Segment | None:
        free = [segment for segment in self._segments if segment.is_free]
        fitting = next((segment for segment in free if len(segment.memory) == size), None)
        for segment in free:
            if segment is not fitting:  # from a time when batches were kept, or made faster than they were used
                self._segments.remove(segment)
                segment.empty()
        return fitting


# In the process that they are sent to.

_MAPPED: "weakref.WeakKeyDictionary[process.BaseProcess, dict[int, Segment]]" = weakref.WeakKeyDictionary()
"""By the process that fills them, and their numbers there."""


def receive(descriptor: int, size: int, owner: int, number: int) -> np.ndarray:
    """A segment that process ``owner`` has sent; until the last view of it is gone, it is not used again there."""
    mapped = _mapped_of(owner)
    for each, segment in list(mapped.items()):
        if not _is_locked(segment.descriptor, then=fcntl.LOCK_UN):  # its owner has given it up
            del mapped[each]
    if number not in mapped:
        if len(mapped) >= MOST_MAPPED:
            return map_shared(descriptor, size)
        again = _open_again(descriptor)
        mapped[number] = Segment(map_shared(again, size), again)
    return mapped[number].lend(lock=map_shared(descriptor, 1))  # as long as this lives, so does the lock


def _mapped_of(owner: int) -> dict[int, Segment]:
    """The kept segments of a child process; none of a process that is not a child of this one."""
    # Python's own list of children joins those that have ended, and torch would not learn how they did.
    children = list(getattr(process, "_children", ()))
    child = next((each for each in children if each.pid == owner), None)
    return {} if child is None else _MAPPED.setdefault(child, {})


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_MAPPED.clear)
