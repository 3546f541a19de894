"""The caller's functions: how they are called, and on how many rows at a time.

1. Every call counts as the caller's time, so that a slow function is not mistaken for slow files or codecs.
2. No call begins once the loader was closed.
3. A call gets as many rows as take some tens of milliseconds, so that the first batch comes soon and leaving a loop
   is quick. The number is found by timing a few calls. The cost per call is separated from the cost per row: a
   function with a high cost per call should get many rows.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from penstock.base import counters, stop
from penstock.errors import Unavailable

Given = TypeVar("Given")
Made = TypeVar("Made")

# How long one call should take: much longer than the 100 microseconds that handing over a read costs.
CALL_S = 0.05

# Rows of the calls that are timed, until one shows the time per row, or all together took TIMED_S.
TIMED_ROWS = (1, 2, 8, 32, 128)
TIMED_S = 0.25

NO_LIMIT = 2**31
"""Rows per call, if no function sets a limit."""


def call(function: Callable[[Given], Made], given: Given) -> Made:
    """Call the caller's function, unless this thread was asked to stop."""
    if stop.is_asked():
        raise Unavailable("was interrupted: the loader was closed")
    began = time.perf_counter()
    try:
        return function(given)
    finally:
        counters.mine().function_seconds += time.perf_counter() - began


def rows_at_once(timed: Callable[[int], float], most: int) -> int:
    """Rows per call of a function: a power of two, so that the next measurement usually gives the same.

    ``timed`` calls the function on a number of rows, at most ``most``, and returns the seconds that took.
    """

    def shortest(rows: int) -> float:
        """Of two calls, as another program may take the core in one of them; of one where it takes long anyway."""
        seconds = timed(rows)
        return seconds if seconds > TIMED_S else min(seconds, timed(rows))

    first = shortest(1)
    rows, seconds, spent = 1, first, first
    for rows in (rows for rows in TIMED_ROWS if 1 < rows <= most):
        seconds = shortest(rows)
        spent += seconds
        if seconds - first > CALL_S / 2 or spent > TIMED_S:
            break
    row_s = (seconds - first) / (rows - 1) if rows > 1 else first
    fixed_s = first - row_s
    if row_s * NO_LIMIT <= CALL_S:
        return NO_LIMIT
    return 1 << (max(1, int(max(CALL_S, fixed_s) / row_s)).bit_length() - 1)
