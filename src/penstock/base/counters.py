"""What reading did, counted per thread and collected by the code that runs the thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.base.dataclass import dataclass


@dataclass
class Counters:
    """Counts since the last collection."""

    bytes_read: int = 0
    """From files, gaps between wanted ranges included."""
    chunks_read: int = 0
    """Chunks read and decoded; one that is read twice counts twice."""
    chunks_filled: int = 0
    """Chunks that were never written and read as the fill value."""
    file_seconds: float = 0.0
    """Waiting for files: for the disk, the network, or the page cache's copy."""
    function_seconds: float = 0.0
    """In the caller's own functions."""

    def __reduce__(self) -> tuple[type["Counters"], tuple[float, ...]]:
        """Reader processes send thousands per second: this is quicker to unpickle than a state."""
        return Counters, tuple(vars(self).values())

    def add(self, other: "Counters") -> None:
        """Add the counts of another."""
        mine = vars(self)
        for name, count in vars(other).items():
            mine[name] += count


Watcher = Callable[[str, Any, int], None]
"""Called for reads with the file, the offsets at which they begin, and the bytes of each."""

_watcher: Watcher | None = None


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Call ``watcher`` for every read from files, by any thread; one watcher at a time."""
    global _watcher
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = None


def is_watched() -> bool:
    """Whether anything watches ``note``: it is called often, and some arguments take time to compute."""
    return _watcher is not None


def note(path: str, begins: Any, count: int) -> None:
    """Report reads of ``count`` bytes each to the watcher, if there is one."""
    watcher = _watcher or _mine.watcher
    if watcher is not None:
        watcher(path, begins, count)


def note_to(watcher: Watcher | None) -> None:
    """Report the reads of this thread to a watcher; None ends that."""
    _mine.watcher = watcher


class _Mine(threading.local):
    def __init__(self) -> None:
        self.tally = Counters()
        self.watcher: Watcher | None = None


_mine = _Mine()


def mine() -> Counters:
    """This thread's counts."""
    return _mine.tally


def collect() -> Counters:
    """This thread's counts, which start again from zero."""
    counted, _mine.tally = _mine.tally, Counters()
    return counted
