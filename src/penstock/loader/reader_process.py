"""A reader process: threads that do a loader's reads, straight into the loader's slots.

``processes.py`` starts it, as a fresh interpreter. It has one control socket, and one more socket per thread (its
connection). It ends when the loader does: its standard input and the control socket are then closed. If a forked child
of the loader's process has inherited them, it ends because it has another parent.
"""

import fcntl
import io
import os
import pickle
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from penstock.base import counters, sample_rng, torch_threads
from penstock.base import scratch as memory
from penstock.base import stop as stopping
from penstock.base.dataclass import dataclass
from penstock.base.scratch import map_shared
from penstock.dataset.store import StoreBase
from penstock.errors import DecodeFailed, PenstockError, WorkerDied
from penstock.loader import wire
from penstock.loader.nonfinite import not_finite
from penstock.loader.pickled_stores import BufferLayout, load_stores, pickle_any
from penstock.loader.schedule import Batch, Read
from penstock.loader.slot_writer import SlotWriter
from penstock.loader.slots import SlotBlock, block_bytes
from penstock.loader.wire import ReadAnswer, ReadTask, SentError, SharedBlock

# A traceback is sent up to twice this length: its begin and its end.
LONGEST_TEXT = 20_000

# How often it looks whether its parent is still there: sockets may have been inherited by others.
LOOK_FOR_PARENT_EVERY_MS = 500


@dataclass(frozen=True)
class Setup:
    """The first message; the memory of the stores comes beside it."""

    parent: int
    layout: BufferLayout
    skip: bool
    """Whether samples that cannot be read are left out."""


@dataclass(frozen=True)
class Ready:
    """The answer to the set-up."""

    failure: str = ""
    """Why it cannot read."""


@dataclass(frozen=True)
class OpenConnection:
    """Do the reads that come through the socket beside this message."""


@dataclass(frozen=True)
class EndEpoch:
    """Cancel the reads of this epoch and of those before it, and close files."""

    generation: int


def main(descriptor: int) -> NoReturn:
    """Serve until the loader is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the loader decides
    _end_with_standard_input()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a function may print, and this process ends without notice
    control = socket.socket(fileno=descriptor)
    try:
        setup, (stored,) = wire.receive(control)
        reader = _start(control, setup, stored)
        reader.serve(control, setup.parent)
    except (EOFError, OSError):
        pass  # the loader is gone
    os._exit(0)


def _end_with_standard_input() -> None:
    """Let the system end this process when its standard input is closed, also while a function holds the interpreter.

    Functions find nothing in standard input.
    """
    life = os.dup(0)
    nothing, end = os.pipe()
    os.close(end)
    os.dup2(nothing, 0)
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC)  # from now on SIGIO reports it, which ends a process


def _start(control: socket.socket, setup: Setup, stored: int) -> "ReadServer":
    try:
        reader = ReadServer(load_stores(stored, setup.layout), skip=setup.skip)
    except BaseException as error:
        wire.send(control, Ready("".join(traceback.format_exception_only(error)).strip()))
        os._exit(1)
    wire.send(control, Ready())
    return reader


class ReadServer:
    """The stores of a loader, the memory of its slots, and the threads that read."""

    def __init__(self, stores: Sequence[StoreBase], *, skip: bool) -> None:
        self._stores, self._skip = stores, skip
        self._blocks: dict[int, tuple[int, SlotBlock]] = {}
        """By dataset: the slots that were mapped last, and their key."""
        self._flags: dict[int, stopping.Flag] = {}
        """By generation: whether to cancel its reads."""
        self._ended = -1
        self._busy = 0
        self._turn = threading.Lock()

    def serve(self, control: socket.socket, parent: int) -> None:
        """Open connections and end epochs until the loader is gone."""
        poll = select.poll()
        poll.register(control, select.POLLIN)
        while os.getppid() == parent:
            if not poll.poll(LOOK_FOR_PARENT_EVERY_MS):
                continue
            message, descriptors = wire.receive(control)
            if isinstance(message, OpenConnection):
                connection = socket.socket(fileno=descriptors[0])
                threading.Thread(
                    target=self._serve_connection, args=(connection,), name="penstock-connection", daemon=True
                ).start()
            elif isinstance(message, EndEpoch):
                self._end(message.generation)

    def _end(self, generation: int) -> None:
        with self._turn:
            self._ended = max(self._ended, generation)
            for number in [number for number in self._flags if number <= generation]:
                self._flags.pop(number).is_set = True
            if self._busy == 0:
                self._close()

    def _close(self) -> None:
        for store in self._stores:
            store.close()

    # Reads.

    def _serve_connection(self, connection: socket.socket) -> None:
        try:
            while True:
                task, descriptors = wire.receive(connection)
                _send(connection, task, self._answer(task, descriptors))
        except (EOFError, OSError):
            pass  # the loader needs it no more
        finally:
            memory.release()
            connection.close()

    def _answer(self, task: ReadTask, descriptors: Sequence[int]) -> ReadAnswer:
        self._begin(task)
        try:
            return self._do(task, descriptors)
        except BaseException as error:
            return _failed(task, error)
        finally:
            with self._turn:
                self._busy -= 1
                if self._busy == 0 and self._ended >= task.generation:
                    self._close()

    def _begin(self, task: ReadTask) -> None:
        with self._turn:
            self._busy += 1
            if task.generation <= self._ended:
                flag = stopping.Flag(is_set=True)
            else:
                flag = self._flags.setdefault(task.generation, stopping.Flag())
        stopping.watch(flag)
        sample_rng.read_for(task.seed, task.epoch)
        torch_threads.use_one_core()
        if memory.prepared_bytes() < task.scratch_bytes:
            memory.prepare(task.scratch_bytes)

    def _do(self, task: ReadTask, descriptors: Sequence[int]) -> ReadAnswer:
        block = self._block(task, descriptors)
        if task.is_look:
            return ReadAnswer(0.0, 0.0, counters.collect(), not_finite=_not_finite(task, block))
        rows, places = (np.frombuffer(numbers, np.int64).copy() for numbers in (task.rows, task.places))
        batches = [Batch(step=number, slot=slot, rows=rows[:0]) for number, slot in enumerate(task.slots)]
        read = Read(
            batches=batches, rows=rows, places=places, bounds=task.bounds, scattered=task.scattered,
            share=task.share, fields=task.fields,
        )  # fmt: skip
        writer = SlotWriter(self._stores[task.source], block.memory_of, skip=self._skip)
        if stopping.is_asked():
            return ReadAnswer(0.0, 0.0, counters.collect())
        notes = _ReadLog()
        if task.is_watched:
            with notes:
                costs = writer.do(read)
        else:
            costs = writer.do(read)
        return ReadAnswer(
            costs.reading, costs.computing, costs.tally,
            errors={batch.step: _sent(batch.error) for batch in batches if batch.error is not None},
            left_out={
                batch.step: [(place, _sent(error)) for place, error in batch.left_out]
                for batch in batches
                if batch.left_out
            },
            objects=_taken_objects(read, block) if block.objects else None,
            notes=list(notes),
        )  # fmt: skip

    def _block(self, task: ReadTask, descriptors: Sequence[int]) -> SlotBlock:
        """The memory of a dataset's slots. It is sent with the first read of each connection."""
        if task.memory is not None:
            self._map(task.source, task.memory, descriptors[0])
        return self._blocks[task.source][1]

    def _map(self, source: int, shared: SharedBlock, descriptor: int) -> None:
        with self._turn:
            if source not in self._blocks or self._blocks[source][0] != shared.key:
                fields = self._stores[source].fields
                found = map_shared(descriptor, block_bytes(fields, shared.rows * shared.slots))
                self._blocks[source] = shared.key, SlotBlock(fields, shared.rows, 0, found, shared.slots)
        os.close(descriptor)


class _ReadLog(list[tuple[str, Any, int]]):
    """The reads from files that this thread does inside the ``with``."""

    def __enter__(self) -> None:
        counters.note_to(lambda path, begins, count: self.append((path, begins, count)))

    def __exit__(self, *_: object) -> None:
        counters.note_to(None)


def _not_finite(task: ReadTask, block: SlotBlock) -> dict[str, dict[int, int]]:
    arrays, first = block.memory_of(task.slots[0])
    return {name: not_finite(arrays[name][first : first + task.bounds[-1]]) for name in task.fields or ()}


def _taken_objects(read: Read, block: SlotBlock) -> dict[str, list[Any]]:
    """The Python objects that a read has put into slots, which then forget them."""
    begins = [block.memory_of(batch.slot)[1] for batch in read.batches]
    at = read.places + np.repeat(np.array(begins), np.diff(read.bounds))
    taken = {}
    for name, objects in block.objects.items():
        if read.fields is None or name in read.fields:
            taken[name] = list(objects[at])
            objects[at] = None
    return taken


def _send(connection: socket.socket, task: ReadTask, answer: ReadAnswer) -> None:
    """Send an answer. Objects that the caller's decoder made may not pickle: then the read fails."""
    try:
        data = wire.framed(pickle_any(answer))
    except Exception as error:
        failed = DecodeFailed(
            f"what a decoder returned cannot be sent from a reader process ({type(error).__name__}: {error}); "
            f"processes=0 reads in the training process"
        )
        data = wire.framed(pickle.dumps(_failed(task, failed)))
    connection.sendall(data)


def _failed(task: ReadTask, error: BaseException) -> ReadAnswer:
    return ReadAnswer(0.0, 0.0, counters.collect(), errors=dict.fromkeys(range(len(task.slots)), _sent(error)))


def _sent(error: BaseException) -> SentError:
    """An error as it is sent: the exception itself if it pickles, else its text."""
    trace = "" if isinstance(error, PenstockError) and error.__cause__ is None else _trace(error)
    try:
        pickled = pickle.dumps(error)
        if isinstance(pickle.loads(pickled), Exception):  # noqa: S301  # just made
            return SentError(pickled, trace)
    except Exception:  # noqa: S110  # an exception with arguments of its own
        pass
    return SentError(pickle.dumps(WorkerDied(f"{type(error).__name__}: {error}")), trace)


def _trace(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error)).rstrip()
    return text if len(text) <= 2 * LONGEST_TEXT else f"{text[:LONGEST_TEXT]}\n…\n{text[-LONGEST_TEXT:]}"
