"""Rows written to their places in a file that is there, within a budget: what other copies by row are made with."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np

from penstock.base.machine import cores
from penstock.base.sizes import format_size
from penstock.conversion.cut import READ_BYTES, Cut, TooLittle
from penstock.conversion.plan import BASE_BYTES, Options, cut_array
from penstock.conversion.ranges import Places, fill
from penstock.conversion.source import index_bytes, part_store
from penstock.dataset.dataset import Dataset
from penstock.errors import BudgetExceeded


def fill_rows(ds: Dataset, path: str, offset: int, *, limit_bytes: int, report: Callable[[int], None]) -> None:
    """Write the only field of a dataset from ``offset`` on, row after row, in as many threads as memory allows.

    Everything is read once and written once. ``report`` is called with the bytes written so far.
    """
    (field,) = ds.fields
    cut, threads = _cut(ds, field, limit_bytes)

    def run(place: tuple[int, ...]) -> int:
        rows, part = cut.shard(place)
        return fill(Places(path, offset, False, False), cut, part_store(ds, field, part), rows, part)

    pool, done = ThreadPoolExecutor(threads, "penstock-fill"), 0
    try:
        for task in as_completed([pool.submit(run, place) for place in np.ndindex(*cut.grid)]):
            done += task.result()
            report(done)
    finally:
        pool.shutdown(cancel_futures=True)


def _cut(ds: Dataset, field: str, limit_bytes: int) -> tuple[Cut, int]:
    """The parts of it, and how many are written at a time."""
    options = Options(format="npy", compression="none", shard_bytes=READ_BYTES, verify=False)
    base = BASE_BYTES + index_bytes(ds)
    least = 0
    for threads in dict.fromkeys((cores(), 1)):
        try:
            return cut_array(ds, field, options, (limit_bytes - base) // threads), threads
        except TooLittle as found:
            least = found.need_bytes + base
    raise BudgetExceeded(
        f"memory={format_size(limit_bytes)} is too small: the smallest that works is {format_size(least)} "
        f"({least:,} bytes)"
    )
