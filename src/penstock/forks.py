"""Locks that a forked child finds open.

A child has one thread, the one that forked; whatever another held of its parent's locks would stay locked for ever.
Only for what a child can go on with wherever the other thread was: look-ups that are kept, turns at a library.
"""

import os
import threading
import weakref
from types import TracebackType


class Lock:
    """``threading.Lock``, for a ``with``."""

    def __init__(self) -> None:
        self._renew()
        _EVERY.add(self)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.release()


_EVERY: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for lock in list(_EVERY):
        lock._renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
