"""How many values of each row of a batch are NaN or infinite.

Rows are checked in pieces that fit a core's cache. That is still a pass over memory, which takes about as long as
copying the values, so it is done only on request.
"""

from typing import Literal

import numpy as np

Nan = Literal["pass", "count", "raise"]
"""What to do about them."""

# Elements checked at a time.
BLOCK = 64 * 1024


def not_finite(values: np.ndarray) -> dict[int, int]:
    """How many values of each row are NaN or infinite; rows without any are left out."""
    rows, width = len(values), int(np.prod(values.shape[1:], dtype=np.int64))
    found: dict[int, int] = {}
    if not rows or not width:
        return found
    flat = values.reshape(rows, width)
    together, across = max(1, min(rows, BLOCK // width)), min(width, BLOCK)
    scratch = np.empty((together, across), bool)
    for top in range(0, rows, together):
        for left in range(0, width, across):
            piece = flat[top : top + together, left : left + across]
            finite = np.isfinite(piece, out=scratch[: piece.shape[0], : piece.shape[1]])
            if np.count_nonzero(finite) == finite.size:
                continue
            for row in np.flatnonzero(~finite.all(axis=1)).tolist():
                bad = finite.shape[1] - int(np.count_nonzero(finite[row]))
                found[top + row] = found.get(top + row, 0) + bad
    return found
