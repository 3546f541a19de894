"""What reading did, counted by each thread for itself and collected by whoever runs the thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any


@dataclass
class Tally:
    """Counts since the last collection."""

    bytes_read: int = 0
    """From files, gaps between wanted ranges included."""
    chunks_read: int = 0
    """Chunks read and decoded, each as often as it was."""
    chunks_filled: int = 0
    """Chunks that were never written and read as the fill value."""
    file_seconds: float = 0.0
    """Waiting for files: for the disk, the network, or the page cache's copy."""
    function_seconds: float = 0.0
    """In functions of the caller's own."""

    def add(self, other: "Tally") -> None:
        """Take over another's counts."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


Watcher = Callable[[str, Any, int], None]
"""Told of reads: of which file, at which bytes they begin (a tuple or an array), how many bytes each has."""

_watcher: Watcher | None = None


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Tell somebody of every read from files while this lasts, whoever reads; one at a time."""
    global _watcher
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = None


def note(path: str, begins: Any, count: int) -> None:
    """Reads of ``count`` bytes each."""
    watcher = _watcher
    if watcher is not None:
        watcher(path, begins, count)


class _Mine(threading.local):
    def __init__(self) -> None:
        self.tally = Tally()


_mine = _Mine()


def mine() -> Tally:
    """This thread's counts."""
    return _mine.tally


def collect() -> Tally:
    """This thread's counts, which begin anew."""
    counted, _mine.tally = _mine.tally, Tally()
    return counted
