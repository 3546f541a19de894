"""Tasks on an engine: processes of this machine, this process, or any ``concurrent.futures.Executor``.

A task that fails for a reason of the data or the disk ends the conversion; what is done stays done. A worker that dies
costs its task, which is begun again: tasks only ever replace what they wrote themselves.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from multiprocessing import connection
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

from penstock.conversion.plan import Task
from penstock.conversion.tasks import Done, Job, run_task
from penstock.errors import PenstockError, WorkerDied

TRIES = 3
"""So often in a row workers may die with no task done."""


def run_here(job: Job, tasks: Iterable[Task]) -> Iterator[Done]:
    """One after another, in this process."""
    return (run_task(job, task) for task in tasks)


def run_in_processes(job: Job, tasks: Iterable[Task], workers: int) -> Iterator[Done]:
    """In processes that are started for it. If one dies, the others are replaced too: they look the same."""
    left = {task.number: task for task in tasks}
    tries = TRIES
    while tries:
        pool = ProcessPoolExecutor(min(workers, max(1, len(left))), _context(job), _keep, (job,))
        try:
            for done in _gathered(pool.submit, _run_kept, list(left.values()), 2 * workers):
                del left[done.number]
                tries = TRIES
                yield done
            return
        except BrokenExecutor:
            tries -= 1
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    raise WorkerDied(
        f"worker processes ended without an error message, {TRIES} times; {len(left):,} tasks are left. They may have "
        f"been killed for memory (lower memory=), or the script that calls convert lacks "
        f'if __name__ == "__main__": before the call; executor="serial" needs neither'
    )


def can_be_sent(job: Job) -> bool:
    """Whether other processes can have it: a function that was written on the spot cannot go there."""
    try:
        ForkingPickler.dumps(job)
    except Exception:  # whatever an object of the caller's raises
        return False
    return True


def _context(job: Job) -> SpawnContext:
    """How processes are started: they import the caller's script only if the job needs something that is in it.

    So a script without ``if __name__ == "__main__":`` does not begin again in each of them.
    """
    return SpawnContext() if b"__main__" in bytes(ForkingPickler.dumps(job)) else _ContextWithoutScript()


class _ProcessWithoutScript(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  # multiprocessing's name
        script = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # without a file to import
        try:
            return SpawnProcess._Popen(process_obj)
        finally:
            sys.modules["__main__"] = script


class _ContextWithoutScript(SpawnContext):
    Process = _ProcessWithoutScript


def run_on(executor: Executor, job: Job, tasks: Iterable[Task], workers: int) -> Iterator[Done]:
    """On somebody else's engine, so many tasks at a time."""
    tries: dict[int, int] = {}

    def again(task: Task, error: BaseException) -> bool:
        tries[task.number] = tries.get(task.number, 1) + 1
        return not isinstance(error, PenstockError | BrokenExecutor) and tries[task.number] <= TRIES

    def submit(function: Callable[..., Done], task: Task) -> "Future[Done]":
        return executor.submit(function, job, task)

    return _gathered(submit, run_task, list(tasks), workers, again)


def _never(task: Task, error: BaseException) -> bool:
    return False


def _gathered(
    submit: Callable[..., "Future[Done]"],
    function: Callable[..., Done],
    tasks: list[Task],
    at_once: int,
    again: Callable[[Task, BaseException], bool] = _never,
) -> Iterator[Done]:
    """What tasks did, as they end; only so many are with the engine at a time."""
    waiting, running = list(reversed(tasks)), dict[Any, Task]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                task = waiting.pop()
                running[submit(function, task)] = task
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                task, error = running.pop(future), future.exception()
                if error is None:
                    yield future.result()
                elif again(task, error):
                    waiting.append(task)
                else:
                    raise error
    finally:
        for future in running:
            future.cancel()


_kept: list[Job] = []


def _keep(job: Job) -> None:
    """In each process, once: the job is sent once and not with every task."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the process that asked
    threading.Thread(target=_end_with_parent, name="penstock-parent-watch", daemon=True).start()
    _kept[:] = [job]


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, however: it would wait for tasks for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _run_kept(task: Task) -> Done:
    return run_task(_kept[0], task)
