"""The connection to one thread of a reader process: a socket for reads, one after another, and their answers.

Nothing here waits but ``do_alone``: what does not fit into the socket is kept and sent later.
"""

import select
import socket
from collections import deque
from contextlib import suppress
from typing import Any

from penstock.loader import wire
from penstock.loader.processes import NoReader, ReaderDied, ReaderProcess
from penstock.loader.wire import ReadAnswer, ReadTask

# Answers that came together are received in one call.
RECEIVED_BYTES = 64 * 1024


class ReaderConnection:
    """The way to one thread of a process."""

    def __init__(self, process: ReaderProcess) -> None:
        self.process = process
        self.unanswered: deque[Any] = deque()
        """What the process was sent and has not answered, the oldest first."""
        self._socket: socket.socket | None = None
        self.life = -1
        """Of the process: which of its starts the socket belongs to."""
        self._known: dict[int, int] = {}
        """By dataset: the memory of slots that the process knows from this connection."""
        self._to_send = bytearray()
        self._received = bytearray()

    @property
    def descriptor(self) -> int:
        """Of the socket."""
        assert self._socket is not None
        return self._socket.fileno()

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    @property
    def has_more_to_send(self) -> bool:
        return len(self._to_send) > 0

    def is_ready(self) -> bool:
        """Whether the process can take a read now."""
        try:
            return self.process.is_ready() and self._connect()
        except (EOFError, NoReader):  # it died just now, or this process has no descriptor left
            return False

    def send(self, task: ReadTask, descriptor: int) -> None:
        """Send a read, or as much of it as the socket takes now; ``flush`` sends the rest.

        descriptor:  of the memory of the slots, which the process is sent with its first task
        """
        assert self._socket is not None
        assert task.memory is not None
        if self._known.get(task.source) == task.memory.key:
            self._to_send += wire.message_bytes(task._replace(memory=None))
            self.flush()
        else:
            self._socket.sendall(self._to_send)
            self._to_send.clear()
            wire.send(self._socket, task, [descriptor])
            self._known[task.source] = task.memory.key

    def flush(self) -> None:
        """Send what is left to be sent, as much as the socket takes now."""
        assert self._socket is not None
        with suppress(BlockingIOError):
            while self._to_send:
                del self._to_send[: self._socket.send(self._to_send, socket.MSG_DONTWAIT)]

    def receive(self) -> list[ReadAnswer]:
        """The answers that have come; ``EOFError`` if the process is gone."""
        assert self._socket is not None
        try:
            data = self._socket.recv(RECEIVED_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError("the reader process is gone")
        self._received += data
        return wire.take_messages(self._received)

    def do_alone(self, task: ReadTask, descriptor: int, *, deaths: int = 1) -> ReadAnswer:
        """Have a read done while the process has no other, and wait for it.

        deaths:  ``ReaderDied`` if so many processes, one after another, die of it
        """
        for left in reversed(range(deaths)):
            self.process.restart()
            try:
                return self._do_now(task, descriptor)
            except (EOFError, OSError) as error:
                self.process.died(self.life)
                self.close()
                if not left:
                    raise ReaderDied("reader processes died while they did this read") from error
        raise AssertionError("deaths: expected at least one")

    def _do_now(self, task: ReadTask, descriptor: int) -> ReadAnswer:
        self._connect()
        self.unanswered.append(None)  # if an interrupt comes, the process is known to be busy
        self.send(task, descriptor)
        answers: list[ReadAnswer] = []
        while not answers:
            poll = select.poll()
            poll.register(self.descriptor, select.POLLIN | (select.POLLOUT if self._to_send else 0))
            poll.poll()
            self.flush()
            answers = self.receive()
        self.unanswered.clear()
        return answers[0]

    def close(self) -> None:
        """Close the socket, and forget what was sent through it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for each in (self.unanswered, self._known, self._to_send, self._received):
            each.clear()

    def _connect(self) -> bool:
        """Whether there is a connection to the process as it runs now; not before what an earlier one left is known."""
        if self._socket is None or self.life != self.process.life:
            if self.unanswered:
                return False
            self.close()
            self._socket, self.life = self.process.open_connection()
        return True
