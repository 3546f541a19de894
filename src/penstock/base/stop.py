"""How a waiting thread learns that it should stop: by a flag, or by Ctrl-C.

Flags are plain attributes, since finalizers set them, and these run at any moment, in any thread, inside any lock.

Python drops exceptions that are raised in a finalizer. Leaving a loop with ``break`` runs a finalizer that waits for
reader threads, for as long as a disk does not answer, which is just when people press Ctrl-C. Such an interrupt is
raised again once the finalizer has ended.
"""

import _thread
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from penstock.base.dataclass import dataclass

CHECK_EVERY_S = 0.25

# Longer than the rest of a finalizer takes, and too short to notice.
INTERRUPT_AGAIN_AFTER_S = 0.02


@dataclass
class Flag:
    """Whether to stop."""

    is_set: bool = False


class _Mine(threading.local):
    def __init__(self) -> None:
        self.flag = Flag()


_mine = _Mine()


def watch(flag: Flag) -> None:
    """End this thread's waits once ``flag`` is set."""
    _mine.flag = flag


def is_asked() -> bool:
    """Whether this thread was asked to stop."""
    return _mine.flag.is_set


def sleep(seconds: float) -> None:
    """Sleep; end early if this thread is asked to stop."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and not is_asked():
        time.sleep(min(left, CHECK_EVERY_S))


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Ctrl-C waits until the end of the block, if only this thread can take it. A process that starts here ignores it.

    A terminal sends Ctrl-C to all processes. One that is interrupted while it imports modules prints a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def call_in_finalizer(function: Callable[..., None], *arguments: object) -> None:
    """Call a function; if Ctrl-C interrupts it, raise ``KeyboardInterrupt`` in the main thread a moment later."""
    try:
        function(*arguments)
    except KeyboardInterrupt:
        with suppress(RuntimeError):  # the interpreter is shutting down and starts no threads
            threading.Thread(target=_interrupt_main, name="penstock-interrupt", daemon=True).start()


def _interrupt_main() -> None:
    time.sleep(INTERRUPT_AGAIN_AFTER_S)
    main = threading.main_thread().ident
    if main is not None and hasattr(signal, "pthread_kill"):  # a real signal also ends a blocking system call
        signal.pthread_kill(main, signal.SIGINT)
    else:
        _thread.interrupt_main()
