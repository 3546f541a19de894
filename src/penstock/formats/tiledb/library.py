"""TileDB's library: its context, the arrays that it has open, and its errors.

Rules:
1. Each process has one context, with as few threads as possible and a limit on the tiles it holds at once. A context
   keeps about 12 KB of every query (measured), so a new one replaces it after some hundreds of queries.
2. Contexts and open arrays never cross a fork: their threads do not exist in the child, and closing them would wait for
   these threads. A child leaves what it inherited alone, and opens its own.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.base import fork
from penstock.base.sizes import MiB
from penstock.errors import ConfigError, Corrupt, PenstockError, Unavailable
from penstock.files.retry import describe_refusal

# The limit on tiles that the library holds together; a larger tile is held alone.
TILES_BYTES = 8 * MiB

# Queries per context: it keeps 3 MiB of them then.
MOST_QUERIES = 256

DAMAGED = (RuntimeError, ValueError, TypeError, KeyError, IndexError, OverflowError, OSError, MemoryError)
"""What the library's Python layer raises for damaged files, besides its own error."""


def library() -> Any:
    try:
        import tiledb
    except ImportError:
        raise ConfigError('reading TileDB arrays needs tiledb: pip install "penstock[tiledb]"') from None
    return tiledb


def library_errors() -> tuple[type[Exception], ...]:
    return (library().TileDBError, *DAMAGED)


def explain(where: str, error: Exception, damaged: str) -> PenstockError:
    """An error of the library as one of ours: the system refused something, or the array is ``damaged``."""
    why = describe_refusal(error)
    return Unavailable(f"{where}: cannot be read: {why}") if why else Corrupt(f"{where}: {damaged}")


class OpenArray:
    """One array as of a timestamp. Each process opens it at the first read, until ``close``."""

    def __init__(self, path: str, timestamp: int) -> None:
        self.path, self.timestamp = path, timestamp
        self._reset()
        fork.register(self)

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (self.path, self.timestamp)

    def _reset(self) -> None:
        self._array: Any = None
        self._users: dict[int, int] = {}
        self._lock = threading.Lock()

    def after_fork(self) -> None:
        _leak(self._array)
        self._reset()

    @contextmanager
    def lend(self) -> Iterator[Any]:
        """The library's array, shared by threads; opened anew if its context was replaced."""
        with self._lock:
            if self._array is not None and self._array.ctx is not context():
                self._close_if_unused(self._array)
                self._array = None
            if self._array is None:
                self._array = self._open()
            array = self._array
            self._users[id(array)] = self._users.get(id(array), 0) + 1
        try:
            yield array
        finally:
            with self._lock:
                self._users[id(array)] -= 1
                if array is not self._array:
                    self._close_if_unused(array)

    def _close_if_unused(self, array: Any) -> None:
        """Close it, unless a thread reads from it: then the last such thread closes it."""
        if self._users.get(id(array), 0) == 0:
            self._users.pop(id(array), None)
            array.close()

    def _open(self) -> Any:
        try:
            return library().open(self.path, ctx=context(), timestamp=self.timestamp)
        except library_errors() as error:
            text = f"TileDB cannot open it ({error}); restore it, or leave it out"
            raise explain(self.path, error, text) from error

    def close(self) -> None:
        """Close it, unless a thread reads from it."""
        with self._lock:
            if self._array is not None and self._users.get(id(self._array), 0) == 0:
                self._close_if_unused(self._array)
                self._array = None


class _Context:
    """The one context of this process, replaced after ``MOST_QUERIES``; arrays keep the one they were opened with."""

    def __init__(self) -> None:
        self._made: Any = None
        self._queries = 0
        self._making = fork.Lock()
        fork.register(self)

    def after_fork(self) -> None:
        _leak(self._made)
        self._made = None

    def count_query(self) -> None:
        self._queries += 1  # losing one between threads does no harm

    def get(self) -> Any:
        made = self._made
        if made is not None and self._queries < MOST_QUERIES:
            return made
        with self._making:
            if self._made is None or self._queries >= MOST_QUERIES:
                limits = {
                    "sm.compute_concurrency_level": "1",  # the loader's readers are threads already
                    "sm.io_concurrency_level": "1",
                    "sm.mem.tile_upper_memory_limit": str(TILES_BYTES),
                }
                self._made, self._queries = library().Ctx(limits), 0
            return self._made


def _leak(inherited: Any) -> None:
    """Never close it: that would wait for threads that do not exist in this child."""
    if inherited is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


_CONTEXT = _Context()
context, count_query = _CONTEXT.get, _CONTEXT.count_query
