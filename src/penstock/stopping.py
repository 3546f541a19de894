"""How a thread that waits for the network is told to give up: by a flag it looks at while it waits.

Plain flags, as they may be set by finalizers, which run at any moment, in any thread, inside any lock.
"""

import threading
import time
from dataclasses import dataclass

LOOK_EVERY_S = 0.25


@dataclass
class Flag:
    """Whether to stop."""

    is_set: bool = False


class _Mine(threading.local):
    def __init__(self) -> None:
        self.flag = Flag()


_mine = _Mine()


def watch(flag: Flag) -> None:
    """Let this thread's waits end once ``flag`` is set."""
    _mine.flag = flag


def asked() -> bool:
    """Whether this thread was asked to stop."""
    return _mine.flag.is_set


def sleep(seconds: float) -> None:
    """Sleep, or less where this thread is asked to stop."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and not asked():
        time.sleep(min(left, LOOK_EVERY_S))
