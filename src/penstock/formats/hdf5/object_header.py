"""Object headers of HDF5 files: blocks of messages about one dataset."""

from collections.abc import Iterator
from struct import Struct

LAYOUT, CONTINUED = 0x08, 0x10
"""The messages that say where a dataset's chunks are, and where the next block of messages is."""

MOST_BLOCKS = 256

NOWHERE = 2**64 - 1
"""The address of what was never written."""


def messages(block: bytes, head: Struct) -> Iterator[tuple[int, bytes]]:
    """The kind and the content of each message. ``head`` comes before each, and begins with its kind and its size."""
    at = 0
    while at + head.size <= len(block):
        kind, size = head.unpack_from(block, at)
        at += head.size
        yield kind, block[at : at + size]
        at += size
