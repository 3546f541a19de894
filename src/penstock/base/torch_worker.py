"""Workers of torch's loader that cannot send what they have made.

A queue of Python's sends in a thread of its own, and drops what cannot be pickled or what there is no memory for: the
worker goes on, and its parent waits for ever. Here such a worker says why and ends, which its parent notices.

At its end a worker waits until all is sent. If its parent was killed, nobody reads, and it would wait for ever; here it
does not.
"""

import multiprocessing
import os
import sys
import threading
import traceback
import weakref
from typing import Any

CHECK_EVERY_S = 0.5

_looked_in = 0
"""The process that was last checked for being a worker."""


def fail_worker_on_lost_batch() -> None:
    """In a torch worker: end the process instead of losing a batch silently. Cheap to call again."""
    global _looked_in
    if _looked_in == os.getpid():
        return
    _looked_in = os.getpid()
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and torch_data.get_worker_info() is not None:
        from multiprocessing import queues  # of which a worker has one, and others need none

        # Named as private, but kept for others to override: concurrent.futures does.
        queues.Queue._on_queue_feeder_error = staticmethod(_end)  # type: ignore[attr-defined]
        queues.Queue._finalize_join = staticmethod(_wait_for_sender)  # type: ignore[attr-defined]


def _wait_for_sender(sender: "weakref.ref[threading.Thread]") -> None:
    """Wait until all is sent, for as long as there is a parent to send it to."""
    thread, parent = sender(), multiprocessing.parent_process()
    while thread is not None and thread.is_alive() and parent is not None and parent.is_alive():
        thread.join(CHECK_EVERY_S)


def _end(error: Exception, thing: Any) -> None:
    traceback.print_exception(error)
    print("penstock: what a worker made cannot be sent to its parent; the worker ends", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(1)
