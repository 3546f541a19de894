"""A file object over positioned reads, for libraries that want one: a few pages of it are kept.

Metadata is read in many small pieces near each other, each of which would be a journey over the network.
"""

import io
from collections import OrderedDict
from typing import Any

import numpy as np

from penstock.errors import PenstockError
from penstock.fileio import Handle
from penstock.sizes import KiB

PAGE_BYTES = 256 * KiB
PAGES = 16
PAGED_BYTES = PAGES * PAGE_BYTES


class PagedFile(io.RawIOBase):
    """The bytes of a handle as a file; what goes wrong is also kept in ``error``, as callers in C lose it."""

    def __init__(self, handle: Handle) -> None:
        self._handle, self._size, self._at = handle, handle.file.size, 0
        self._pages: OrderedDict[int, np.ndarray] = OrderedDict()
        self.error: PenstockError | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, target: Any) -> int:
        goal = np.frombuffer(target, np.uint8)
        count = max(0, min(len(goal), self._size - self._at))
        try:
            if count >= PAGE_BYTES:  # the data themselves, which nobody wants twice
                self._handle.read_into(self._at, goal[:count])
            else:
                self._from_pages(goal[:count])
        except PenstockError as error:
            self.error = error
            raise
        self._at += count
        return count

    def _from_pages(self, goal: np.ndarray) -> None:
        done = 0
        while done < len(goal):
            number, within = divmod(self._at + done, PAGE_BYTES)
            some = self._page(number)[within : within + len(goal) - done]
            goal[done : done + len(some)] = some
            done += len(some)

    def _page(self, number: int) -> np.ndarray:
        if number not in self._pages:
            begin = number * PAGE_BYTES
            page = np.empty(min(PAGE_BYTES, self._size - begin), np.uint8)
            self._handle.read_into(begin, page)
            self._pages[number] = page
            if len(self._pages) > PAGES:
                self._pages.popitem(last=False)
        self._pages.move_to_end(number)
        return self._pages[number]

    def close(self) -> None:
        self._pages.clear()
        super().close()
