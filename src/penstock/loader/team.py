"""Threads that read for one dataset or several, by themselves or through a reader process each.

Reads are handed out one at a time under one lock; the thread that holds it may wait there for a free slot, since all
others would have to wait for the same. Each dataset has slots of its own; of the datasets that can continue, the
one whose batch is wanted first comes first.

Ending waits for the threads, but not forever: one may be in a read that does not return, because a disk is gone, or in
a function of the caller's. It then ends with that read, and the last thread closes the files.
"""

import sys
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING

from penstock.base import sample_rng, torch_threads
from penstock.base import scratch as memory
from penstock.base import stop as stopping
from penstock.errors import Unavailable
from penstock.loader.processes import GIVE_UP_WITHIN_S

if TYPE_CHECKING:
    from penstock.loader.processes import ReaderProcesses
    from penstock.loader.readers import Readers
    from penstock.loader.schedule import Read

# How long ending waits for reads that are under way. Ctrl-C should end a program within three seconds.
END_WITHIN_S = 1.5


def refuse_at_the_end() -> None:
    """Refuse to begin while Python ends: a thread would be started, and never run."""
    if sys.is_finalizing():
        raise Unavailable("Python is ending, and starts no more threads: read what you need before that")


class Team:
    """The threads of one epoch."""

    def __init__(self, threads: int, processes: "ReaderProcesses | None" = None) -> None:
        self._processes = processes
        self._generation = 0 if processes is None else processes.begin()
        self.wake_ups: SimpleQueue[None] = SimpleQueue()
        """Receives one item whenever a slot becomes free."""
        self._readers: list[Readers] = []
        self._left = 0
        self._turn = threading.Lock()
        self._stopping = stopping.Flag()
        self._size = threads
        self._threads = [self._thread(number) for number in range(threads)]
        self._countdown = deque([0])
        """The epoch and every thread take one when they end; the one that takes 0 closes the files."""

    def join(self, readers: "Readers") -> None:
        """Read for this dataset too; before ``start``."""
        self._readers.append(readers)

    def start(self) -> None:
        """Begin to read, with as many of the threads as the system can start."""
        for begun, thread in enumerate(self._threads):
            self._countdown.append(begun + 1)
            try:
                thread.start()
            except RuntimeError as error:
                if thread.ident is not None:  # it runs: an interrupt came in between
                    raise
                self._end_one()
                del self._threads[begun:]
                if not begun:
                    raise Unavailable(
                        f"no reader thread could be started: {error}. The system's limit of threads is reached (ulimit "
                        f"-u, or pids.max of the container), or there is no memory for their stacks"
                    ) from error

    def resize(self, threads: int) -> int:
        """Read with ``threads`` threads from now on, or as many as the system can start; others end after a read."""
        running = [thread for thread in self._threads if thread.is_alive()]
        self._size = threads
        for number in range(len(running), threads):
            thread = self._thread(number)
            self._countdown.append(len(self._countdown))
            try:
                thread.start()
            except RuntimeError:  # the system has no more: the others continue
                if thread.ident is None:
                    self._end_one()
                    self._size = number
                    break
                raise
            self._threads.append(thread)
        return self._size

    def leave(self) -> None:
        """One dataset needs no more. When the last one leaves, the threads end and files are closed."""
        self._left += 1
        if self._left < len(self._readers):
            return
        self._stopping.is_set = True
        self.wake_ups.put(None)
        self._end_one()
        if self._processes is not None:
            self._processes.end(self._generation)
            self.wait(GIVE_UP_WITHIN_S)
            self._processes.kill_busy()
        self.wait(END_WITHIN_S)

    @property
    def has_ended(self) -> bool:
        """Whether no thread is at work any more."""
        return not any(thread.is_alive() for thread in self._threads)

    def wait(self, seconds: float) -> None:
        """Wait until the threads have ended, at most this long."""
        # The garbage collector ends iterations in whatever thread it runs, and no thread can wait for itself.
        if threading.current_thread() in self._threads:
            return
        until = time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None:  # or else it was never started
                thread.join(max(0.0, until - time.monotonic()))

    def _thread(self, number: int) -> threading.Thread:
        return threading.Thread(target=self._work, args=(number,), name=f"penstock-reader-{number}", daemon=True)

    def _end_one(self) -> None:
        if self._countdown.pop() == 0:
            for readers in self._readers:
                readers.close_files()

    def _work(self, number: int) -> None:
        connection = None if self._processes is None else self._processes.connection(number)
        has_scratch = False
        try:
            stopping.watch(self._stopping)
            while number < self._size and (work := self._next()) is not None:
                readers, read = work
                if connection is not None and readers.can_send(read) and connection.is_ready():
                    if has_scratch:  # the process has its own from now on
                        memory.release()
                        has_scratch = False
                    readers.send(read, connection, self._generation)
                    continue
                if not has_scratch:
                    memory.prepare(max(readers.scratch_bytes for readers in self._readers))
                    has_scratch = True
                torch_threads.use_one_core()
                sample_rng.read_for(readers.epoch.seed, readers.epoch.number)
                readers.post(read, readers.writer.do(read))  # without a call in between: reads are many, and deep
        except BaseException as error:  # whatever it is, the caller must learn of it
            for readers in self._readers:
                readers.fail(error)
        finally:
            memory.release()
            self._end_one()

    def _next(self) -> "tuple[Readers, Read] | None":
        """The next read and its dataset; waits for slots where no dataset has one."""
        with self._turn:
            while not self._stopping.is_set:
                while not self.wake_ups.empty():  # the slots that became free so far are seen below
                    self.wake_ups.get()
                able = [readers for readers in self._readers if readers.can_go_on()]
                if able:
                    first = min(able, key=lambda readers: readers.wanted_at())
                    return first, first.take()
                if all(readers.all_taken for readers in self._readers):
                    return None
                began = time.perf_counter()
                self.wake_ups.get()
                for readers in self._readers:
                    readers.counts.waiting_for_slots += time.perf_counter() - began
        return None
