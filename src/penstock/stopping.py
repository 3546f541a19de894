"""How a thread that waits for the network is told to give up: by an event it looks at while it waits."""

import threading
import time

LOOK_EVERY_S = 0.25


class _Mine(threading.local):
    def __init__(self) -> None:
        self.event: threading.Event | None = None


_mine = _Mine()


def watch(event: threading.Event | None) -> None:
    """Let this thread's waits end once ``event`` is set."""
    _mine.event = event


def asked() -> bool:
    """Whether this thread was asked to stop."""
    return _mine.event is not None and _mine.event.is_set()


def sleep(seconds: float) -> None:
    """Sleep, or less where this thread is asked to stop."""
    if _mine.event is None:
        time.sleep(seconds)
    else:
        _mine.event.wait(seconds)
