"""Memory that is taken once and used again: aligned buffers, and each thread's scratch.

Fresh pages cost as much as the copy into them, and freed ones may stay with the allocator, where no plan counts them.
So buffers come straight from the system, page-aligned (a read into memory that is misaligned to the file runs at half
speed), and go straight back.

Scratch is lent as a stack. A thread that has called ``prepare(bytes)`` borrows from one block of that size; whatever
is borrowed beyond it is allocated on the spot and counted in ``overflow_bytes``, which the conformance suite requires
to be 0: that is how a store's declared ``scratch_bytes`` is held to what it really uses.
"""

import ctypes
import mmap
import os
import threading
import time
from contextlib import suppress

import numpy as np

from penstock.base.sizes import format_size
from penstock.errors import Unavailable

ALIGNMENT = 64

LARGE_PAGE = 2 << 20
CAN_RETURN_PAGES = hasattr(mmap, "MADV_HUGEPAGE")  # Linux: the only system that returns pages immediately


def aligned(bytes_: int) -> int:
    """Rounded up to a cache line."""
    return -(-bytes_ // ALIGNMENT) * ALIGNMENT


def buffer(bytes_: int) -> np.ndarray:
    """Private, page-aligned memory as uint8, returned to the system with its last view."""
    try:
        return np.frombuffer(_map_private(max(1, bytes_)), np.uint8, bytes_)
    except OSError as error:
        raise Unavailable(
            f"the system refuses {format_size(bytes_)} of memory: {error.strerror}. Lower memory=, or raise the limit "
            f"of this process (ulimit -d, ulimit -v) or of its container"
        ) from error


def _map_private(bytes_: int) -> mmap.mmap:
    """Memory that a forked child gets a copy of: it must not write into its parent's batches."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, bytes_)
    return mmap.mmap(-1, bytes_, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def page_bytes(row_bytes: int) -> int:
    """The size of pages for rows of this size, in memory that is returned to the system and used again."""
    return LARGE_PAGE if row_bytes >= 2 * LARGE_PAGE else mmap.PAGESIZE


def use_large_pages(memory: np.ndarray) -> None:
    """Let the system use pages of 2 MiB for memory that was not touched yet, where it has them."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(memory, mmap.MADV_HUGEPAGE)


def return_pages(memory: np.ndarray) -> None:
    """Return all whole pages of private memory to the system: their content is lost, the next use takes new ones."""
    _advise(memory, mmap.MADV_DONTNEED)


def _advise(memory: np.ndarray, advice: int) -> None:
    """Call ``madvise`` for all whole pages of this memory, without the interpreter's lock. It may be ignored."""
    first = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (memory.ctypes.data + memory.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice)


def shared_buffer(bytes_: int) -> tuple[np.ndarray, int]:
    """Memory that several processes can share, without a name, and the descriptor by which others can map it."""
    descriptor = os.memfd_create("penstock", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, max(1, bytes_))
        return map_shared(descriptor, bytes_), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def map_shared(descriptor: int, bytes_: int, *, is_private: bool = False) -> np.ndarray:
    """Memory that another process made; with ``is_private``, other processes do not see what is written here."""
    flags = mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED
    return np.frombuffer(mmap.mmap(descriptor, max(1, bytes_), flags=flags), np.uint8, bytes_)


def trim() -> None:
    """Return freed memory to the system: each thread allocates from its own heap, which would keep it."""
    with suppress(OSError, AttributeError, TypeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


# Trimming takes some milliseconds.
TRIM_EVERY_S = 0.1
_next_trim = 0.0


def trim_now_and_then() -> None:
    """Trim, at most so often: of tensors, glibc keeps ever more memory that it cannot use again."""
    global _next_trim
    if time.monotonic() >= _next_trim:
        _next_trim = time.monotonic() + TRIM_EVERY_S
        trim()


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.block = np.empty(0, np.uint8)
        self.used = 0
        self.peak = 0
        self.overflow = 0


_scratch = _Scratch()


def prepare(bytes_: int) -> None:
    """Give this thread a scratch block of this size, and forget what was measured before."""
    _scratch.__init__()  # type: ignore[misc]
    _scratch.block = buffer(bytes_)
    use_large_pages(_scratch.block)  # chunks decoded here come an eighth faster


def prepared_bytes() -> int:
    """The size of this thread's scratch block."""
    return len(_scratch.block)


def release() -> None:
    """Return this thread's scratch block."""
    _scratch.__init__()  # type: ignore[misc]


class borrow:  # noqa: N801  # a generator would take as long as the reads of small rows
    """Uninitialised scratch for the length of a ``with``."""

    __slots__ = ("_begin", "_bytes")

    def __init__(self, bytes_: int) -> None:
        self._bytes = bytes_

    def __enter__(self) -> np.ndarray:
        mine = _scratch
        self._begin = begin = mine.used
        end = mine.used = begin + aligned(self._bytes)
        if end > mine.peak:
            mine.peak = end
        if end <= len(mine.block):
            return mine.block[begin : begin + self._bytes]
        mine.overflow = max(mine.overflow, end - len(mine.block))
        return np.empty(self._bytes, np.uint8)

    def __exit__(self, *error: object) -> None:
        _scratch.used = self._begin


def peak_bytes() -> int:
    """The most this thread borrowed at a time since ``prepare``."""
    return _scratch.peak


def overflow_bytes() -> int:
    """Bytes that this thread borrowed beyond what it prepared."""
    return _scratch.overflow
