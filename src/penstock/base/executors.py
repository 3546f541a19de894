"""Run independent tasks: in processes of this machine, in this process, or on any ``concurrent.futures.Executor``.

A job is what all tasks share; it is sent once to each process. A task that fails because of the data or the disk ends
the run. If a worker dies, its task is run again, so tasks must be repeatable.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

from penstock.base import checks, stop
from penstock.errors import ConfigError, PenstockError, WorkerDied

TRIES = 3
"""How often in a row workers may die before any task is done."""


Function = Callable[[Any, Any], Any]
"""(job, task) -> result. It must be defined in a module, so that other processes can import it."""


def checked_executor(given: Any) -> "Executor | str":
    """The ``executor`` argument: processes if nothing was given."""
    if given is None or isinstance(given, str):
        return "processes" if given is None else checks.one_of("executor", given, ("processes", "serial"))
    if not callable(getattr(given, "submit", None)):
        raise ConfigError(f'executor={checks.shown(given)}: expected "processes", "serial" or an Executor')
    executor: Executor = given
    return executor


def run(executor: Executor | str, function: Function, job: Any, tasks: Sequence[Any], workers: int) -> Iterator[Any]:
    """The results of tasks, as they end; computed in this process if there is one task or one worker."""
    if executor == "processes" and workers > 1 and len(tasks) > 1 and _can_be_sent(job):
        return run_in_processes(function, job, tasks, workers)
    if isinstance(executor, str):
        return (function(job, task) for task in tasks)
    return run_on(executor, function, job, tasks, workers)


def run_in_processes(function: Function, job: Any, tasks: Iterable[Any], workers: int) -> Iterator[Any]:
    """In new processes. If one dies, all are replaced, because the dead one cannot be told from the others."""
    left = dict(enumerate(tasks))
    tries = TRIES
    while tries:
        pool = ProcessPoolExecutor(min(workers, max(1, len(left))), _context(function, job), _keep, (function, job))
        try:
            for number, found in _gather_results(pool.submit, (_run_kept,), dict(left), 2 * workers):
                del left[number]
                tries = TRIES
                yield found
            return
        except BrokenExecutor:
            tries -= 1
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    raise WorkerDied(
        f"worker processes ended without an error message, {TRIES} times; {len(left):,} tasks are left. They may have "
        f"been killed for memory (lower memory=), or the script that makes this call lacks "
        f'if __name__ == "__main__": before it; executor="serial" needs neither'
    )


def _can_be_sent(job: Any) -> bool:
    """Whether it can be sent to other processes; a local function cannot."""
    try:
        ForkingPickler.dumps(job)
    except Exception:  # anything that a caller's object may raise
        return False
    return True


def _context(*sent: Any) -> SpawnContext:
    """How processes are started: they import the caller's script only if the job refers to it.

    So a script without ``if __name__ == "__main__":`` does not run again in each of them.
    """
    return _ContextWithScript() if b"__main__" in bytes(ForkingPickler.dumps(sent)) else _ContextWithoutScript()


class _ProcessWithScript(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  # multiprocessing's name
        if os.name == "posix":
            resource_tracker.ensure_running()  # on some Pythons its start would let Ctrl-C in again
        with stop.without_interrupts():
            return SpawnProcess._Popen(process_obj)


class _ContextWithScript(SpawnContext):
    Process = _ProcessWithScript


class _ProcessWithoutScript(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  # multiprocessing's name
        script = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # without a file to import
        try:
            return _ProcessWithScript._Popen(process_obj)
        finally:
            sys.modules["__main__"] = script


class _ContextWithoutScript(SpawnContext):
    Process = _ProcessWithoutScript


def run_on(executor: Executor, function: Function, job: Any, tasks: Iterable[Any], workers: int) -> Iterator[Any]:
    """On the caller's executor, ``workers`` tasks at a time."""
    tries: dict[int, int] = {}

    def again(number: int, error: BaseException) -> bool:
        tries[number] = tries.get(number, 1) + 1
        return not isinstance(error, PenstockError | BrokenExecutor) and tries[number] <= TRIES

    found = _gather_results(executor.submit, (function, job), dict(enumerate(tasks)), workers, again)
    return (each for _, each in found)


def _gather_results(
    submit: Callable[..., "Future[Any]"],
    before: tuple[Any, ...],
    tasks: Mapping[int, Any],
    at_once: int,
    again: Callable[[int, BaseException], bool] = lambda number, error: False,
) -> Iterator[tuple[int, Any]]:
    """Numbers and results of tasks, as they end; at most ``at_once`` are submitted at a time.

    ``before``: what is submitted before each task: a function, and its first arguments
    """
    waiting, running = list(reversed(tasks)), dict[Any, int]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number = waiting.pop()
                running[submit(*before, tasks[number])] = number
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                number, error = running.pop(future), future.exception()
                if error is None:
                    yield number, future.result()
                elif again(number, error):
                    waiting.append(number)
                else:
                    raise error
    finally:
        for future in running:
            future.cancel()


_kept: list[Any] = []


def _keep(function: Function, job: Any) -> None:
    """Called once in each process: the job is sent once, not with every task."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    threading.Thread(target=_end_with_parent, name="penstock-parent-watch", daemon=True).start()
    _kept[:] = [function, job]


def _end_with_parent() -> None:
    """End this process when its parent has ended in any way: it would wait for tasks forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _run_kept(task: Any) -> Any:
    function, job = _kept
    return function(job, task)
