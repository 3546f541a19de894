"""Files mapped into memory, read-only and without a descriptor."""

import ctypes
import mmap
import os
import sys
import weakref
from functools import cache

import numpy as np

from penstock.files.retry import open_regular


def map_file(path: str) -> np.ndarray:
    """The bytes of a file, read-only, with no descriptor held."""
    descriptor = open_regular(path)
    try:
        return map_descriptor(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def map_descriptor(descriptor: int, size: int) -> np.ndarray:
    """A file's bytes, mapped read-only until the last view of them is gone, if possible without a descriptor."""
    if sys.version_info >= (3, 13):
        return np.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ, trackfd=False), np.uint8)
    if sys.platform != "linux":
        return np.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), np.uint8)
    libc = _libc()
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    block = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(block, libc.munmap, address, size).atexit = False
    mapped = np.frombuffer(memoryview(block), np.uint8)
    mapped.flags.writeable = False
    return mapped


@cache
def _libc() -> ctypes.CDLL:
    """The system's own functions; made once, since each copy of them takes 4 KB."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
