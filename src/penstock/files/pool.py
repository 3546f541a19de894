"""A bounded, least-recently-used set of open handles, lent to several threads at once.

Never more than ``max_open`` descriptors are open; with 0, each request opens and closes its own. No thread borrows two
handles, so that waiting for one cannot deadlock.
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

# Enough for one handle per session and thread, far below the limits of macOS (256) and Linux (1024).
MAX_OPEN_FILES = 64

IDLE: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Whose idle descriptors are closed if the process has none left: everything here has ``close``."""


class Pool:
    """The open handles of one ``Files``."""

    def __init__(self, max_open: int, policy: ReadPolicy, manifest: Manifest | None) -> None:
        self.max_open, self.policy, self.manifest = max_open, policy, manifest
        self._reset()

    def _reset(self) -> None:
        self._open: OrderedDict[tuple[FileId, bool], Handle] = OrderedDict()
        self._once_open: set[Handle] = set()  # for one loan each
        self._most = min(self.max_open or MAX_OPEN_FILES, max(1, descriptor_limit() // 2))  # others need some too
        self._changed = threading.Condition()

    def after_fork(self) -> None:
        """Close inherited descriptors; the child opens its own."""
        inherited = [*self._open.values(), *self._once_open]
        self._reset()
        for handle in inherited:
            handle.close()

    def close(self) -> None:
        """Close the descriptors that are not lent right now.

        Mappings have none, and stay while they are among the most recently used: a new mapping costs a page fault for
        every page that is touched again.
        """
        with self._changed:
            for key in [key for key, handle in self._open.items() if handle.users == 0 and handle.descriptor >= 0]:
                self._close(*key)
            self._changed.notify_all()

    @contextmanager
    def lend_once(self, file: FileId) -> Iterator[Handle]:
        """A file opened for this loan alone; others do not wait while it is opened."""
        handle = UnseenHandle(file, self.manifest, self.policy)
        with self._changed:
            while not self._has_room():
                pass
            self._once_open.add(handle)
        try:
            handle.open()
            yield handle
        finally:
            handle.close()
            with self._changed:
                self._once_open.discard(handle)
                self._changed.notify()

    def take(self, file: FileId, mapped: bool) -> Handle:
        """A handle that counts as lent. If the process has no descriptors left, idle ones are closed first."""
        for left in range(TRIES - 1, -1, -1):
            try:
                return self._take_once(file, mapped)
            except Unavailable as error:
                if not left or not _out_of_descriptors(error):
                    raise
            for each in list(IDLE):
                each.close()
            stop.sleep(AGAIN_AFTER_S)
        raise AssertionError

    def _take_once(self, file: FileId, mapped: bool) -> Handle:
        with self._changed:
            while (handle := self._open.get((file, mapped))) is None:
                if self._has_room():
                    handle = self._opened(file, mapped)
                    break
            self._open.move_to_end((file, mapped))
            handle.users += 1
            return handle

    def give_back(self, handle: Handle, file: FileId, mapped: bool) -> None:
        with self._changed:
            handle.users -= 1
            if handle.users == 0:
                if self.max_open == 0:
                    self._close(file, mapped)
                self._changed.notify()

    def _has_room(self) -> bool:
        """Whether one more may be open; if not, close an idle one, or wait until something changes."""
        if len(self._open) + len(self._once_open) < self._most:
            return True
        idle = next((key for key, handle in self._open.items() if handle.users == 0), None)
        if idle:
            self._close(*idle)
        else:
            self._changed.wait()
        return False

    def _opened(self, file: FileId, mapped: bool) -> Handle:
        try:
            handle = self._open[file, mapped] = Handle(file, mapped, self.manifest, self.policy)
        except BaseException:
            self._changed.notify()  # somebody else may use the room that was made for it
            raise
        return handle

    def _close(self, file: FileId, mapped: bool) -> None:
        self._open.pop((file, mapped)).close()


class Loan:
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


def _out_of_descriptors(error: Unavailable) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.EMFILE, errno.ENFILE)
