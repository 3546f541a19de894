"""The reader processes of a loader, seen from the training process.

Each process has some threads, and each of these has a connection for its reads and answers (``connection.py``). Which
reads go where is said in ``exchange.py``.

1. Processes are fresh interpreters, never forks: the caller may have threads, or a device in use. They do not run the
   caller's ``__main__`` again.
2. They live as long as the loader, whatever happens to it: they end when their control socket closes.
3. A process that dies is started again, and its reads are sent to any other. A read that kills several is repeated
   alone, and halved, until the sample is found that no process survives.
"""

import os
import select
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.base import stop
from penstock.base.machine import anonymous_and_shared_bytes
from penstock.errors import ReadersNotStarted, WorkerDied
from penstock.loader import wire
from penstock.loader.pickled_stores import PickledStores
from penstock.loader.reader_process import EndEpoch, OpenConnection, Ready, Setup

if TYPE_CHECKING:
    from penstock.loader.connection import ReaderConnection

# How long a process may take to start again, on a machine that is busy with something else.
START_WITHIN_S = 60.0

LOOK_EVERY_S = 0.01

# Measuring the memory of many processes takes the training step's time.
MEASURE_EVERY_S = 0.25

# A process that dies this often before it is up will never come up.
EARLY_DEATHS = 10

# How long ending an epoch waits for reads under way, before it kills their processes; and how long it waits for those.
GIVE_UP_WITHIN_S = 0.5

# Libraries that would start a thread per core in each process.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "BLIS_NUM_THREADS"), "1"
)

# The path comes first: the caller's modules are found there.
_BEGIN = (
    "import sys; sys.path[:] = sys.argv[2:]; from penstock.loader.reader_process import main; main(int(sys.argv[1]))"
)


class ReaderDied(WorkerDied):
    """A read killed the processes that did it."""


class NoReader(WorkerDied):
    """There is no process to do a read that may have killed one."""


class ReaderProcesses:
    """The processes of one loader."""

    def __init__(self, count: int, pickled: PickledStores, *, skip: bool) -> None:
        setup, stores, paths = Setup(os.getpid(), pickled.layout, skip), pickled.copy_to_shared(), _import_paths()
        self.processes = [ReaderProcess(setup, stores, paths) for _ in range(count)]
        self.connections: dict[int, ReaderConnection] = {}
        """By number; they stay open from epoch to epoch."""
        self._next_generation = 0
        self._held_bytes, self._next_measurement = 0, 0.0
        self._finalizer = weakref.finalize(
            self, stop.call_in_finalizer, _shut_down, self.processes, self.connections, stores, os.getpid()
        )

    @property
    def restarts(self) -> int:
        """How often a process died and was started again."""
        return sum(process.restarts for process in self.processes)

    @property
    def held_bytes(self) -> int:
        """Memory of the processes without shared memory; measured a few times per second."""
        now = time.monotonic()
        if now >= self._next_measurement:
            self._next_measurement = now + MEASURE_EVERY_S
            found = [process.pid for process in self.processes if process.pid is not None]
            self._held_bytes = sum(anonymous_and_shared_bytes(pid)[0] for pid in found)
        return self._held_bytes

    def wait(self, seconds: float) -> None:
        """Start all processes, and wait until they are up, or failed, but no longer than that."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not all(process.is_ready() or process.failure for process in self.processes):
            time.sleep(LOOK_EVERY_S)

    def begin(self) -> int:
        """The number of a new epoch."""
        self._next_generation += 1
        return self._next_generation

    def end(self, generation: int) -> None:
        """Cancel the reads of this epoch, and close files."""
        for process in self.processes:
            process.send(EndEpoch(generation))

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        self._finalizer()


def _shut_down(
    processes: Sequence["ReaderProcess"], connections: Mapping[int, "ReaderConnection"], stores: int, pid: int
) -> None:
    if pid == os.getpid():  # or else this is a forked child, and they are its parent's
        for process in processes:
            process.close()
        for connection in connections.values():
            connection.close()
    with suppress(OSError):
        os.close(stores)


def _import_paths() -> list[str]:
    """Where a process finds modules: as this one does now, wherever either goes later; penstock itself at the end."""
    own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    try:
        return [os.path.abspath(path) for path in sys.path if isinstance(path, str)] + [own]
    except FileNotFoundError:  # the current folder is gone
        return [path for path in sys.path if isinstance(path, str) and os.path.isabs(path)] + [own]


class ReaderProcess:
    """One process: started when it is first needed, and again when it died."""

    def __init__(self, setup: Setup, stores: int, paths: Sequence[str]) -> None:
        self._setup, self._stores, self._paths = setup, stores, paths
        self._child: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._turn = threading.RLock()
        self._is_closed = False
        self.is_up = False
        """Whether it can read."""
        self._is_starting = False
        self.failure = ""
        """Why it cannot be started."""
        self._early_deaths = 0
        """How often in a row it died before it was up."""
        self.life = 0
        """Counts its starts: sockets belong to one life."""
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        child = self._child
        return None if child is None else child.pid

    # Life.

    def is_ready(self) -> bool:
        """Whether it can take a read; starts it if it is not there. Does not wait."""
        if self.is_up or self.failure or not self._turn.acquire(blocking=False):
            return self.is_up
        try:
            if self.is_up or self._is_closed:
                return self.is_up
            if not self._is_starting:
                self._start()
            return self._receive()
        finally:
            self._turn.release()

    def restart(self) -> None:
        """Start it again, if it is not up, and wait until it is."""
        until = time.monotonic() + START_WITHIN_S
        while not self.is_ready():
            if self.failure or self._is_closed or stop.is_asked() or time.monotonic() > until:
                why = self.failure or f"nothing came from the new one in {START_WITHIN_S:.0f} s"
                raise NoReader(f"a reader process died, and could not be started again: {why}")
            time.sleep(LOOK_EVERY_S)

    def kill(self) -> None:
        """End it at once; it is started again when it is needed."""
        with self._turn:
            self._reap()

    def close(self) -> None:
        """End it for good."""
        with self._turn:
            self._is_closed = True
            self._reap()

    def open_connection(self) -> tuple[socket.socket, int]:
        """A socket to a new thread of the process, and the life that it belongs to."""
        with self._turn:
            try:
                here, there = socket.socketpair()
            except OSError as error:
                raise NoReader(f"a reader process cannot be asked: {error}") from error
            with there:
                if not self.is_up or not self._try_to_send(OpenConnection(), [there.fileno()]):
                    here.close()
                    raise EOFError("the reader process is gone")
            return here, self.life

    def send(self, message: object) -> None:
        """Send a message if it is up."""
        if self.is_up:
            with self._turn:
                self._try_to_send(message)

    def died(self, life: int) -> None:
        """Somebody noticed that it is gone."""
        with self._turn:
            if life == self.life:
                self.is_up = False

    def _start(self) -> None:
        if self._child is not None:  # it died: had it been killed here, it would be forgotten
            self.restarts += 1
            self._reap()
        if not sys.executable or hasattr(sys, "frozen"):
            self._fail("this program does not say which Python runs it")
            return
        try:
            self._control, there = socket.socketpair()
            with there, stop.without_interrupts():
                self._child = subprocess.Popen(  # noqa: S603  # our own module
                    [sys.executable, "-c", _BEGIN, str(there.fileno()), *self._paths],
                    pass_fds=[there.fileno()], stdin=subprocess.PIPE, env={**os.environ, **ONE_THREAD},
                )  # fmt: skip
            self.life += 1
            self._is_starting = True
            wire.send(self._control, self._setup, [self._stores])
        except OSError as error:
            self._fail(str(error))

    def _receive(self) -> bool:
        """Whether the process has reported that it is ready."""
        if self._control is None:
            return False
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        if not poll.poll(0):
            return False
        self._is_starting = False
        try:
            ready, _ = wire.receive(self._control)
        except (EOFError, OSError):
            self._early_deaths += 1
            if self._early_deaths < EARLY_DEATHS:
                return False
            ready = Ready("it ended while it started")
        if ready.failure:
            self._fail(ready.failure)
            return False
        self.is_up, self._early_deaths = True, 0
        return True

    def _fail(self, why: str) -> None:
        self.failure = why
        self._reap()
        warnings.warn(
            f"a reader process could not be started: {why}. Threads of this process read instead, which is slower; "
            f"processes=0 asks for that",
            ReadersNotStarted,
            stacklevel=2,
        )

    def _reap(self) -> None:
        """Kill the process, if there is one, and forget it."""
        self.is_up = self._is_starting = False
        child, control, self._child, self._control = self._child, self._control, None, None
        if control is not None:
            control.close()
        if child is not None:
            assert child.stdin is not None
            child.stdin.close()
            child.kill()
            with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, in a read that does not return
                child.wait(GIVE_UP_WITHIN_S)

    def _try_to_send(self, message: object, descriptors: Sequence[int] = ()) -> bool:
        try:
            assert self._control is not None
            wire.send(self._control, message, descriptors)
        except OSError:
            self.is_up = False
            return False
        return True
