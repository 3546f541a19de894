"""What a forked child renews: a registry of objects, and locks that are open in a child.

A child has one thread, the one that forked. A lock that another thread of the parent held would stay locked forever,
and open descriptors and library handles belong to the parent. Objects in the registry are renewed in the child.
"""

import os
import threading
import weakref
from types import TracebackType
from typing import Protocol


class Renewable(Protocol):
    """Something that a child cannot use as it inherited it."""

    def after_fork(self) -> None:
        """Make it usable in the child."""


# Locks come first: other objects may need one when they are renewed.
_LOCKS: "weakref.WeakSet[Lock]" = weakref.WeakSet()
_OTHERS: "weakref.WeakSet[Renewable]" = weakref.WeakSet()


def register(renewable: Renewable) -> None:
    """Call ``renewable.after_fork()`` in every forked child, for as long as the object lives."""
    _OTHERS.add(renewable)


class Lock:
    """``threading.Lock``, for a ``with``; open in a forked child.

    Only for state that is valid in a child whatever the other thread was doing: caches, turns at a library.
    """

    def __init__(self) -> None:
        self.after_fork()
        _LOCKS.add(self)

    def after_fork(self) -> None:
        self._lock: threading.Lock | threading.RLock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.release()


class ReentrantLock(Lock):
    """``threading.RLock``, for a ``with``: a signal handler may run while its own thread holds the lock."""

    def after_fork(self) -> None:
        self._lock = threading.RLock()


def _after_fork_in_child() -> None:
    for lock in list(_LOCKS):
        lock.after_fork()
    for renewable in list(_OTHERS):
        renewable.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
