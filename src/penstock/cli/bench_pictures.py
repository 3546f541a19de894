"""What the pictures of ``penstock bench`` are drawn from: which bytes were read when, and how samples were mixed."""

import os
import threading
import time
from typing import Any

import numpy as np

from penstock.order import Order

# A picture has room for so many points.
MOST_READS = 2000
MOST_SAMPLES = 1500


class ReadMap:
    """Which bytes of which file were read when: of so many reads, every second, fourth … once there are too many."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._reads: list[tuple[float, str, int, int]] = []
        self._every, self._passed = 1, 0
        self._noting = threading.Lock()

    def note(self, path: str, begins: Any, count: int) -> None:
        """Take note of reads of ``count`` bytes each; called by the threads that read."""
        now = time.perf_counter() - self._began
        with self._noting:
            first = -self._passed % self._every
            self._passed += len(begins)
            self._reads += [(now, path, int(begin), count) for begin in begins[first :: self._every]]
            while len(self._reads) > MOST_READS:
                del self._reads[1::2]
                self._every *= 2

    def told(self) -> dict[str, Any]:
        """Names of files, and for each read: seconds, its file's number, and where in that, as shares of its size."""
        ends: dict[str, int] = {}
        for _, path, begin, count in self._reads:
            ends[path] = max(ends.get(path, 0), begin + count)
        files = sorted(ends)
        sizes = {path: max(1, ends[path], os.path.getsize(path) if os.path.isfile(path) else 0) for path in files}
        numbers = {path: number for number, path in enumerate(files)}
        reads = [
            (seconds, numbers[path], begin / sizes[path], (begin + count) / sizes[path])
            for seconds, path, begin, count in self._reads
        ]
        return {"files": files, "reads": reads, "one_of": self._every}


def mixing(order: Order) -> dict[str, Any]:
    """Which row comes at which position of an epoch, for some positions, as shares of all."""
    rows = len(order)
    positions = np.unique(np.linspace(0, rows - 1, min(rows, MOST_SAMPLES)).astype(np.int64))
    found = order.at(0, positions)
    return {"samples": list(zip((positions / rows).tolist(), (found / rows).tolist(), strict=True))}
