"""Sends reads to reader processes and takes in their answers, all of it in the thread that asks for batches.

1. Nothing runs between two batches. A thread that woke up for each answer would take the interpreter's lock from the
   training step every time, and wake-ups cost the step far more than the work itself.
2. When the caller asks for a batch, all answers that have come are taken in, and reads are sent for all slots that are
   free. Processes have them queued, so they go on during a long step.
3. What a process had to do when it died is sent again, to any process. Of each connection only the oldest read had
   begun. One that was under way in several deaths is done alone, to find out whether it kills processes.
"""

import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from penstock.loader.connection import ReaderConnection
from penstock.loader.processes import GIVE_UP_WITHIN_S, ReaderProcess, ReaderProcesses
from penstock.loader.wire import ReadAnswer

if TYPE_CHECKING:
    from penstock.loader.readers import Readers
    from penstock.loader.schedule import Read

# Reads that a connection may have at a time: enough for a long step, few enough for the buffers of a socket.
MOST_UNANSWERED = 64

# A read that was under way when so many processes died may have killed them; one may have died for another reason.
SUSPECT_DEATHS = 2


class Sent(NamedTuple):
    """A read that a process has."""

    readers: "Readers"
    read: "Read"
    is_look: bool = False
    """Nothing is read: values that are NaN or infinite are looked for."""
    deaths: int = 0
    """How many processes died while they did it."""


class Exchange:
    """The reads of one epoch that are in reader processes.

    next_read:  the next read and its dataset, if it can begin now
    read_here:  does a read in this process that no other can do
    """

    def __init__(
        self,
        processes: ReaderProcesses,
        connections: int,
        next_read: Callable[[], "tuple[Readers, Read] | None"],
        read_here: Callable[["Readers", "Read"], None],
    ) -> None:
        self._processes, self._next_read, self._read_here = processes, next_read, read_here
        self._generation = processes.begin()
        self.resize(connections)
        self._poll = select.poll()
        self._by_descriptor: dict[int, ReaderConnection] = {}
        self._unanswered = 0
        self._again: deque[Sent] = deque()
        """Reads of processes that died, to be sent again."""
        self._turn = threading.RLock()
        """A loader may be closed by another thread than the one that asks for batches."""
        self.has_ended = False

    def are_up(self) -> bool:
        """Whether all processes can read, those apart that cannot be started; and whether any can be connected to."""
        ready = [process.is_ready() for process in self._processes.processes]
        if not all(is_up or process.failure for is_up, process in zip(ready, self._processes.processes, strict=True)):
            return False
        return any(connection.is_ready() for connection in self._connections)

    @property
    def has_failed(self) -> bool:
        """Whether no process can be started."""
        return all(process.failure for process in self._processes.processes)

    def resize(self, connections: int) -> None:
        """Use so many connections from now on; others finish what they have."""
        known, processes = self._processes.connections, self._processes.processes
        for number in range(len(known), connections):
            known[number] = ReaderConnection(processes[number % len(processes)])
        self._connections = [known[number] for number in range(connections)]

    def run(self, wait_s: float) -> bool:
        """Take in answers and send reads; wait no longer than that for an answer. Whether any read was under way."""
        with self._turn:
            if self.has_ended:
                return False
            came = self._receive(0)
            self._send_reads()
            if not came and wait_s and self._unanswered:
                came = self._receive(wait_s)
                self._send_reads()
            return came or self._unanswered > 0

    def do_rest_here(self) -> None:
        """Have this process do what dead processes left, apart from reads that had begun: these are errors."""
        while self._again:
            sent = self._again.popleft()
            if sent.deaths:
                sent.readers.do_again(sent.read, self._connections[0], self._generation)
            else:
                self._read_here(sent.readers, sent.read)

    def end(self) -> None:
        """Have all reads given up; kill processes that do not answer soon."""
        with self._turn:
            self.has_ended = True
            self._processes.end(self._generation)
            until = time.monotonic() + GIVE_UP_WITHIN_S
            while self._unanswered and (left := until - time.monotonic()) > 0:
                for connection in self._ready_connections(left):
                    if not self._receive_from(connection)[1]:
                        self._forget(connection)
            connections = self._all_connections()
            for connection in connections:
                if connection.unanswered:
                    connection.process.kill()
            for connection in connections:
                self._forget(connection)

    # Reads.

    def _send_reads(self) -> None:
        while (connection := self._free_connection()) is not None and (sent := self._next()) is not None:
            if sent.readers.can_send(sent.read):
                self._send(connection, sent)
            else:
                self._read_here(sent.readers, sent.read)

    def _next(self) -> Sent | None:
        if self._again:
            return self._again.popleft()
        work = self._next_read()
        return None if work is None else Sent(*work)

    def _free_connection(self) -> ReaderConnection | None:
        """The connection with the fewest reads, of those whose process can read."""
        found: ReaderConnection | None = None
        fewest = MOST_UNANSWERED
        for connection in self._connections:
            if len(connection.unanswered) < fewest and connection.is_ready():
                found, fewest = connection, len(connection.unanswered)
                if not fewest:
                    break
        return found

    def _send(self, connection: ReaderConnection, sent: Sent) -> None:
        task = sent.readers.task(sent.read, self._generation, is_look=sent.is_look)
        connection.unanswered.append(sent)
        self._unanswered += 1
        try:
            descriptor = sent.readers.slots.descriptor
            assert descriptor is not None
            connection.send(task, descriptor)
            if connection.has_more_to_send or self._by_descriptor.get(connection.descriptor) is not connection:
                self._watch(connection)
        except (EOFError, OSError):
            connection.process.died(connection.life)
            self._unanswered -= 1
            self._again.append(connection.unanswered.pop())  # it has not begun
            self._recover(connection.process)

    # Answers.

    def _receive(self, wait_s: float) -> bool:
        """Take in the answers that have come; whether there were any."""
        came = False
        for connection in self._ready_connections(wait_s):
            if connection.is_open:  # or else its process died, which was seen on another connection
                answers, is_alive = self._receive_from(connection)
                self._take_in(answers)
                came |= bool(answers) or not is_alive
                if not is_alive:
                    self._recover(connection.process)
        return came

    def _take_in(self, answers: list[tuple[Sent, ReadAnswer]]) -> None:
        for sent, answer in answers:
            for look in sent.readers.take_answer(sent.read, answer, is_look=sent.is_look):
                self._send_look(sent.readers, look)

    def _send_look(self, readers: "Readers", look: "Read") -> None:
        connection = self._free_connection()
        if connection is None:
            readers.look_here(look)
        else:
            self._send(connection, Sent(readers, look, is_look=True))

    def _ready_connections(self, wait_s: float) -> list[ReaderConnection]:
        if not self._by_descriptor:
            return []
        return [self._by_descriptor[descriptor] for descriptor, _ in self._poll.poll(wait_s * 1000)]

    def _receive_from(self, connection: ReaderConnection) -> tuple[list[tuple[Sent, ReadAnswer]], bool]:
        """The answers of a connection with what they answer, and whether its process is alive."""
        answers: list[ReadAnswer] = []
        is_alive = True
        try:
            answers = connection.receive()
            if connection.has_more_to_send:
                connection.flush()
                self._watch(connection)
        except (EOFError, OSError):
            connection.process.died(connection.life)
            is_alive = False
        self._unanswered -= len(answers)
        return [(connection.unanswered.popleft(), answer) for answer in answers], is_alive

    def _all_connections(self) -> list[ReaderConnection]:
        """Those in use, and those that still have a read since there were more of them."""
        return list(dict.fromkeys([*self._connections, *self._by_descriptor.values()]))

    def _watch(self, connection: ReaderConnection) -> None:
        """Wait for answers of a connection, and for room if not all of a read could be sent."""
        self._by_descriptor[connection.descriptor] = connection
        self._poll.register(
            connection.descriptor, select.POLLIN | (select.POLLOUT if connection.has_more_to_send else 0)
        )

    def _forget(self, connection: ReaderConnection) -> list[Sent]:
        """Use a connection no more; returns the reads that were not answered."""
        for descriptor in [known for known, owner in self._by_descriptor.items() if owner is connection]:
            del self._by_descriptor[descriptor]
            self._poll.unregister(descriptor)
        lost = list(connection.unanswered)
        self._unanswered -= len(lost)
        if lost or not connection.process.is_up:
            connection.close()
        return lost

    # Processes that die.

    def _recover(self, process: ReaderProcess) -> None:
        """Send again what a process had to do when it died, the earliest batches first."""
        lost = []
        for connection in [each for each in self._all_connections() if each.process is process and each.is_open]:
            while answers := self._receive_from(connection)[0]:  # that it sent before it died
                self._take_in(answers)
            for number, sent in enumerate(self._forget(connection)):
                lost.append((connection, sent._replace(deaths=sent.deaths + (number == 0))))
        for connection, sent in sorted(lost, key=lambda pair: pair[1].read.batches[0].step):
            if sent.is_look:
                sent.readers.look_here(sent.read)
            elif sent.deaths < SUSPECT_DEATHS:
                self._again.append(sent)
            else:
                sent.readers.do_again(sent.read, connection, self._generation)
