"""A file object over positioned reads, for libraries that need one, with a cache of a few pages.

Metadata is read in many small pieces near each other, each of which would be a request over the network.
"""

import io
from collections import OrderedDict
from typing import Any

import numpy as np

from penstock.base.sizes import KiB, MiB
from penstock.files.handles import Handle

PAGE_BYTES = 256 * KiB
PAGES = 16
# Reads larger than a page are data, which is not read twice: they are done in pieces of this size, and not cached.
PIECE_BYTES = 1 * MiB
PAGED_BYTES = PAGES * PAGE_BYTES + PIECE_BYTES


class PagedFile(io.RawIOBase):
    """The bytes of a handle as a file.

    It never raises, because a traceback would keep a reference to the target memory, which belongs to HDF5: the process
    would crash when HDF5 frees it. After an error it returns zeros; the caller must check ``error`` before using any
    data.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle, self._size, self._at = handle, handle.file.size, 0
        self._pages: OrderedDict[int, np.ndarray] = OrderedDict()
        self.error: BaseException | None = None

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
        try:
            count, done = max(0, min(len(goal), self._size - self._at)), 0
            while done < count:
                some = self._some(self._at + done, count - done)
                goal[done : done + len(some)] = some
                done += len(some)
            self._at += count
            return count
        finally:
            del goal, target

    def _some(self, at: int, wanted: int) -> np.ndarray:
        """Bytes from an offset on, at least one."""
        if self.error is None:
            try:
                if wanted < PAGE_BYTES:
                    number, within = divmod(at, PAGE_BYTES)
                    return self._page(number)[within : within + wanted]
                piece = np.empty(min(wanted, PIECE_BYTES), np.uint8)
                self._handle.read_into(at, piece)
                return piece
            except BaseException as error:
                self.error = type(error)(*error.args)
        return np.zeros(min(wanted, PAGE_BYTES), np.uint8)

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
