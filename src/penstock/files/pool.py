"""A bounded, least-recently-used set of open handles and mappings, lent to several threads at once.

Never more than ``max_open`` are open; with 0, each request opens and closes its own. Without a number, descriptors are
bounded by the system's limit; mappings hold none, and have a bound of their own. No thread borrows two handles, so that
waiting for one cannot deadlock.
"""

import errno
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.base import stop
from penstock.base.file_id import FileId
from penstock.base.machine import descriptor_limit
from penstock.base.policy import ReadPolicy
from penstock.errors import Unavailable
from penstock.files.handles import Handle, UnseenHandle
from penstock.files.manifest import Manifest
from penstock.files.retry import AGAIN_AFTER_S, TRIES

# Unless the caller gives a number, a dataset takes this part of the descriptors that the process may have: others need
# some too. A thousand files in turns with room for 64 would be opened and closed all the time, at a third of the rate.
PART_OF_DESCRIPTORS = 1 / 4
MOST_OPEN = 4096

# Linux allows 65,530 mappings per process. One takes about 1 KB of memory here.
MOST_MAPPED = 4096

IDLE: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Whose idle descriptors are closed if the process has none left: everything here has ``close``."""


_Handles = OrderedDict[tuple[FileId, bool], Handle]
"""By file, and whether it is mapped."""


class Pool:
    """The open handles of one ``Files``."""

    def __init__(self, max_open: int | None, policy: ReadPolicy, manifest: Manifest | None) -> None:
        self.max_open, self.policy, self.manifest = max_open, policy, manifest
        self._reset()

    def _reset(self) -> None:
        self._open: _Handles = OrderedDict()
        self._mapped: _Handles = self._open if self.max_open else OrderedDict()
        self._once_open: set[Handle] = set()  # for one loan each
        self._most = self._most_open()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0

    def _most_open(self) -> int:
        limit = descriptor_limit()
        if self.max_open:
            return min(self.max_open, max(1, limit // 2))
        return max(1, min(MOST_OPEN, int(limit * PART_OF_DESCRIPTORS)))

    def after_fork(self) -> None:
        """Close inherited descriptors; the child opens its own."""
        inherited = [*self._open.values(), *self._mapped.values(), *self._once_open]
        self._reset()
        for handle in inherited:
            handle.close()

    def close(self) -> None:
        """Close the descriptors that are not lent right now.

        Mappings have none, and stay while they are among the most recently used: a new mapping costs a page fault for
        every page that is touched again.
        """
        with self._lock:
            for key in [key for key, handle in self._open.items() if handle.users == 0 and handle.descriptor >= 0]:
                self._open.pop(key).close()
            self._changed.notify_all()

    @contextmanager
    def lend_once(self, file: FileId) -> Iterator[Handle]:
        """A file opened for this loan alone; others do not wait while it is opened."""
        handle = UnseenHandle(file, self.manifest, self.policy)
        with self._lock:
            while not self._has_room(self._open):
                pass
            self._once_open.add(handle)
        try:
            handle.open()
            yield handle
        finally:
            handle.close()
            with self._lock:
                self._once_open.discard(handle)
                self._changed.notify()

    def take(self, file: FileId, mapped: bool) -> Handle:
        """A handle that counts as lent. If the process has no descriptors left, idle ones are closed first."""
        for left in range(TRIES - 1, -1, -1):
            try:
                return self._take_once(file, mapped)
            except Unavailable as error:
                if not left or not _is_out_of_descriptors(error):
                    raise
            for each in list(IDLE):
                each.close()
            stop.sleep(AGAIN_AFTER_S)
        raise AssertionError

    def _take_once(self, file: FileId, mapped: bool) -> Handle:
        handles, key = self._mapped if mapped else self._open, (file, mapped)
        with self._lock:
            while (handle := handles.get(key)) is None:
                if self._has_room(handles):
                    handle = handles[key] = self._opened(file, mapped)
                    break
            handles.move_to_end(key)
            handle.users += 1
            return handle

    def give_back(self, handle: Handle, file: FileId, mapped: bool) -> None:
        with self._lock:
            handle.users -= 1
            if handle.users == 0:
                if self.max_open == 0:
                    (self._mapped if mapped else self._open).pop((file, mapped)).close()
                if self._waiting:
                    self._changed.notify()

    def _has_room(self, handles: "_Handles") -> bool:
        """Whether one more may be open; if not, close an idle one, or wait until something changes."""
        if handles is self._open:
            has_room = len(handles) + len(self._once_open) < self._most
        else:
            has_room = len(handles) < MOST_MAPPED
        if has_room:
            return True
        idle = next((key for key, handle in handles.items() if handle.users == 0), None)
        if idle:
            handles.pop(idle).close()
            return False
        self._waiting += 1
        try:
            self._changed.wait()
        finally:
            self._waiting -= 1
        return False

    def _opened(self, file: FileId, mapped: bool) -> Handle:
        try:
            return Handle(file, mapped, self.manifest, self.policy)
        except BaseException:
            self._changed.notify()  # somebody else may use the room that was made for it
            raise


class HandleLoan:
    """A handle of a local file, for the length of a ``with``. (A generator would take twice as long.)"""

    __slots__ = ("file", "handle", "mapped", "pool")

    def __init__(self, pool: Pool, file: FileId, mapped: bool) -> None:
        self.pool, self.file, self.mapped = pool, file, mapped

    def __enter__(self) -> Handle:
        handle = self.handle = self.pool.take(self.file, self.mapped)
        try:
            handle.check()
        except BaseException:
            self.pool.give_back(handle, self.file, self.mapped)
            raise
        return handle

    def __exit__(self, *error: object) -> None:
        self.pool.give_back(self.handle, self.file, self.mapped)


def _is_out_of_descriptors(error: Unavailable) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.EMFILE, errno.ENFILE)
