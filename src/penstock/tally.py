"""What reading did, counted by each thread for itself and collected by whoever runs the thread."""

import threading
from dataclasses import dataclass, fields


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
