"""Messages between a loader and its reader processes: pickles over Unix sockets, with descriptors beside them.

Both ends are penstock's own processes of one user, connected before the first byte of data is read: nothing that a
message holds comes from data unparsed.
"""

import os
import pickle
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock.base.counters import Counters
from penstock.base.dataclass import dataclass
from penstock.read.pieces import Share

CAN_SEND_DESCRIPTORS = hasattr(os, "memfd_create") and hasattr(socket, "send_fds")
"""Whether this system has what reader processes need."""

_LENGTH = struct.Struct("<Q")

_NONE: Mapping[Any, Any] = {}


class ReadTask(NamedTuple):
    """A read, for a process that has the same stores. A tuple: the training process pickles thousands per second."""

    generation: int
    """Which epoch it is for; reads of an epoch that was left are given up."""
    source: int
    """Which of the loader's datasets."""
    seed: int
    epoch: int
    slots: Sequence[int]
    """Of the read's batches."""
    rows: bytes
    """``int64`` numbers as bytes, and so are the places: arrays take four times as long to pickle."""
    places: bytes
    bounds: Sequence[int]
    scattered: bool
    share: Share
    fields: tuple[str, ...] | None
    scratch_bytes: int
    """What a read of this dataset may borrow."""
    is_watched: bool
    """Whether each read from a file is to be reported."""
    is_look: bool = False
    """Nothing is read: values that are NaN or infinite are looked for in the first rows of the slot."""
    memory: "SharedBlock | None" = None
    """The slots, where this process has not mapped them yet; their descriptor comes beside."""


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """The layout of slots in shared memory."""

    key: int
    rows: int
    slots: int


class ReadAnswer(NamedTuple):
    """The result of a read."""

    reading: float
    computing: float
    tally: Counters
    errors: Mapping[int, "SentError"] = _NONE
    """By the number of the batch in the read."""
    left_out: Mapping[int, list[tuple[int, "SentError"]]] = _NONE
    objects: dict[str, list[Any]] | None = None
    """Fields of Python objects, which cannot lie in shared memory: the values of all rows, by field."""
    notes: Sequence[tuple[str, Any, int]] = ()
    """Reads from files, where they are watched."""
    not_finite: Mapping[str, dict[int, int]] = _NONE
    """By field and place: how many values are NaN or infinite, where they were looked for."""


class ReaderTraceback(Exception):
    """The traceback of an error in a reader process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, slots=True)
class SentError:
    """An exception on its way to another process."""

    pickled: bytes
    trace: str

    def rebuild(self) -> Exception:
        """The exception, with the traceback of the other process as its cause."""
        error: Exception = pickle.loads(self.pickled)  # noqa: S301  # made by our own process
        if self.trace:
            error.__cause__ = ReaderTraceback(self.trace)
        return error


def send(sock: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Send a message, and descriptors beside it."""
    data = message_bytes(message)
    if descriptors:
        data = data[socket.send_fds(sock, [data], descriptors) :]
    if data:
        sock.sendall(data)


def message_bytes(message: Any) -> bytes:
    """A message as it is sent."""
    return framed(pickle.dumps(message, protocol=5))


def framed(payload: bytes) -> bytes:
    """A pickled message as it is sent."""
    return _LENGTH.pack(len(payload)) + payload


def receive(sock: socket.socket) -> tuple[Any, list[int]]:
    """The next message and the descriptors beside it; ``EOFError`` if the other end is gone."""
    header, descriptors, _, _ = socket.recv_fds(sock, _LENGTH.size, 4)
    if len(header) < _LENGTH.size:
        header += _exactly(sock, _LENGTH.size - len(header))
    payload = _exactly(sock, _LENGTH.unpack(header)[0])
    return pickle.loads(payload), descriptors  # noqa: S301  # from our own process


def take_messages(received: bytearray) -> list[Any]:
    """The messages that have come whole, which are removed from what was received."""
    found, begin = [], 0
    while len(received) - begin >= _LENGTH.size:
        end = begin + _LENGTH.size + _LENGTH.unpack_from(received, begin)[0]
        if end > len(received):
            break
        with memoryview(received) as view:
            found.append(pickle.loads(view[begin + _LENGTH.size : end]))  # noqa: S301  # from our own process
        begin = end
    del received[:begin]
    return found


def _exactly(sock: socket.socket, length: int) -> bytes:
    found = sock.recv(length, socket.MSG_WAITALL)
    while len(found) < length:  # a signal came in between, or the other end is gone
        more = sock.recv(length - len(found), socket.MSG_WAITALL)
        if not more:
            raise EOFError("the other process is gone")
        found += more
    return found
