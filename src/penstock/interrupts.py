"""A Ctrl-C that lands in a finalizer, where Python drops exceptions, is raised again once that is over.

Whoever leaves a loop by ``break`` runs a finalizer that waits for reader threads: a moment, or as long as a disk does
not answer, which is just when people press Ctrl-C.
"""

import _thread
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

# Longer than what is left of the finalizer takes, and shorter than anybody notices.
AGAIN_AFTER_S = 0.02


def heard(function: Callable[..., None], *arguments: object) -> None:
    """Call a function from a finalizer."""
    try:
        function(*arguments)
    except KeyboardInterrupt:
        with suppress(RuntimeError):  # the interpreter is at its end, and starts no more threads
            threading.Thread(target=_again, name="penstock-interrupt", daemon=True).start()


def _again() -> None:
    time.sleep(AGAIN_AFTER_S)
    main = threading.main_thread().ident
    if main is not None and hasattr(signal, "pthread_kill"):  # a real one: it also ends what waits for the system
        signal.pthread_kill(main, signal.SIGINT)
    else:
        _thread.interrupt_main()
