"""Workers of torch's loader that cannot send a batch.

A multiprocessing queue sends in a thread of its own. If a batch cannot be pickled, or memory runs out, it drops the
batch: the worker continues, and its parent waits forever. Here such a worker prints the reason and exits, which its
parent notices.

Before it exits, a worker waits until all is sent. If its parent was killed, it would wait forever; here it does not.
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
        from multiprocessing import queues  # a worker has imported it; other processes need not

        # Named as private, but kept for others to override: concurrent.futures does.
        queues.Queue._on_queue_feeder_error = staticmethod(_end)  # type: ignore[attr-defined]
        queues.Queue._finalize_join = staticmethod(_wait_for_sender)  # type: ignore[attr-defined]


def _wait_for_sender(sender: "weakref.ref[threading.Thread]") -> None:
    """Wait until all is sent, as long as the parent is alive."""
    thread, parent = sender(), multiprocessing.parent_process()
    while thread is not None and thread.is_alive() and parent is not None and parent.is_alive():
        thread.join(CHECK_EVERY_S)


def _end(error: Exception, thing: Any) -> None:
    traceback.print_exception(error)
    print("penstock: a batch cannot be sent to its parent; the worker exits", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(1)
