"""Threads that read for one dataset or several, until reader processes are up, if there are any.

Reads are handed out one at a time under one lock; the thread that holds it may wait there for a free slot, since all
others would have to wait for the same. Each dataset has slots of its own; of the datasets that can continue, the
one whose batch is wanted first comes first.

Once all reader processes are up, reads are sent there (``exchange.py``), and the threads do only what those cannot:
fill slots that were added beyond the plan, because the caller keeps batches.

Ending waits for the threads, but not forever: one may be in a read that does not return, because a disk is gone, or in
a function of the caller's. It then ends with that read, and the last thread closes the files.
"""

import sys
import threading
import time
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from penstock.base import sample_rng, torch_threads
from penstock.base import scratch as memory
from penstock.base import stop as stopping
from penstock.errors import Unavailable
from penstock.loader.exchange import Exchange

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
        self._exchange = None if processes is None else Exchange(processes, threads, self._next_now, self._read_here)
        self._are_up = False
        """Whether reads are sent to processes."""
        self._here: SimpleQueue[tuple[Readers, Read] | None] = SimpleQueue()
        """Reads for the threads while others are sent to processes; None lets a thread look what changed."""
        self.wake_ups: SimpleQueue[None] = SimpleQueue()
        """Receives an item when slots become free, or are worth another look."""
        self._readers: list[Readers] = []
        self._left = 0
        self._turn = threading.Lock()
        self._stopping = stopping.Flag()
        self._size = threads
        self._refusal: RuntimeError | None = None
        """Why the system starts no more threads."""
        self._threads: list[threading.Thread] = []
        self._countdown = deque([0])
        """The epoch and every thread take one when they end; the one that takes 0 closes the files."""

    def join(self, readers: "Readers") -> None:
        """Read for this dataset too; before ``start``."""
        self._readers.append(readers)

    def start(self) -> None:
        """Begin to read, with as many of the threads as the system can start; with none if processes are up."""
        if self._exchange is not None and self._exchange.are_up():
            self._are_up = True
            return
        self._start_threads(self._size)
        if self._size and not self._threads:
            raise Unavailable(
                f"no reader thread could be started: {self._refusal}. The system's limit of threads is reached (ulimit "
                f"-u, or pids.max of the container), or there is no memory for their stacks"
            ) from self._refusal

    def resize(self, threads: int) -> int:
        """Read with so many threads from now on, or as many as the system can start; others end after their read."""
        self._size = threads
        if self._exchange is not None:
            self._exchange.resize(threads)
        if not self._are_up:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._start_threads(threads)
            self._size = min(threads, len(self._threads))
        return self._size

    def _start_threads(self, threads: int) -> None:
        """Start threads until there are so many, or the system has no more."""
        for number in range(len(self._threads), threads):
            thread = threading.Thread(
                target=self._work, args=(number,), name=f"penstock-reader-{number}", daemon=True
            )  # fmt: skip
            self._countdown.append(len(self._countdown))
            try:
                thread.start()
            except RuntimeError as error:
                if thread.ident is not None:  # it runs: an interrupt came in between
                    raise
                self._refusal = error
                self._end_one()
                return
            self._threads.append(thread)

    def exchange(self, wait_s: float) -> bool:
        """Send reads to processes and take in their answers, waiting no longer than that for one.

        Returns whether any read is under way there: False where threads of this process read.
        """
        if self._exchange is None or self._exchange.has_ended:
            return False
        if not self._are_up:
            if not self._exchange.are_up():
                return False
            self._are_up = True
            self._wake_threads()
        elif self._exchange.has_failed:
            self._exchange.do_rest_here()
            self._are_up = False
            self._start_threads(self._size)
            self._wake_threads()
            return False
        return self._exchange.run(wait_s)

    def leave(self) -> None:
        """One dataset needs no more. When the last one leaves, the threads end and files are closed."""
        self._left += 1
        if self._left < len(self._readers):
            return
        self._stopping.is_set = True
        self._wake_threads()
        if self._exchange is not None:
            self._exchange.end()
        self._end_one()
        self.wait(END_WITHIN_S)

    @property
    def has_ended(self) -> bool:
        """Whether no thread is at work any more."""
        is_exchanging = self._exchange is not None and not self._exchange.has_ended
        return not is_exchanging and not any(thread.is_alive() for thread in self._threads)

    def wait(self, seconds: float) -> None:
        """Wait until the threads have ended, at most this long."""
        # The garbage collector ends iterations in whatever thread it runs, and no thread can wait for itself.
        if threading.current_thread() in self._threads:
            return
        until = time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None:  # or else it was never started
                thread.join(max(0.0, until - time.monotonic()))

    def _end_one(self) -> None:
        if self._countdown.pop() == 0:
            for readers in self._readers:
                readers.close_files()

    def _work(self, number: int) -> None:
        has_scratch = False
        try:
            stopping.watch(self._stopping)
            while number < self._size and not self._stopping.is_set:
                work = self._here.get() if self._are_up else self._next()
                if work is None:
                    if self._all_taken and not self._are_up:
                        break
                    continue
                readers, read = work
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
        """The next read and its dataset, for a thread; waits for slots where no dataset has one."""
        with self._turn:
            while not self._stopping.is_set and not self._are_up:
                if (work := self._left_here() or self._first_able()) is not None:
                    return work
                if self._all_taken:
                    return None
                began = time.perf_counter()
                self.wake_ups.get()
                for readers in self._readers:
                    readers.counts.waiting_for_slots += time.perf_counter() - began
        return None

    def _next_now(self) -> "tuple[Readers, Read] | None":
        """The next read and its dataset, for a process, if there is one and it has its slots."""
        if not self._turn.acquire(blocking=False):
            return None
        try:
            return self._first_able()
        finally:
            self._turn.release()

    @property
    def _all_taken(self) -> bool:
        return all(readers.all_taken for readers in self._readers)

    def _first_able(self) -> "tuple[Readers, Read] | None":
        while not self.wake_ups.empty():  # the slots that became free so far are seen below
            self.wake_ups.get()
        able = [readers for readers in self._readers if readers.can_go_on()]
        if not able:
            return None
        first = min(able, key=lambda readers: readers.wanted_at())
        return first, first.take()

    def _left_here(self) -> "tuple[Readers, Read] | None":
        """A read for the threads from when processes read."""
        with suppress(Empty):
            while (work := self._here.get_nowait()) is None:
                pass
            return work
        return None

    def _wake_threads(self) -> None:
        """Let threads that wait for a slot or a read look what changed."""
        self.wake_ups.put(None)
        for _ in self._threads:
            self._here.put(None)

    def _read_here(self, readers: "Readers", read: "Read") -> None:
        """Let a thread do a read that no process can do."""
        self._here.put((readers, read))
        if len(self._threads) < self._size:
            self._start_threads(len(self._threads) + 1)
