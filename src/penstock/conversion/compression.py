"""Whether a field is worth compressing, by a sample of its values.

A core decodes zstd at 1.5 to 3 GB per second, and copies what is in memory five times as fast: shuffled epochs of
compressed rows come at 0.1 to 0.5 times the rate. That pays where they become so small that memory holds all of them,
such as masks, labels and sparse matrices. For others, only the caller can know that the disk is slower than this.

The sample follows from the data alone, so that a conversion that is continued, and each of many jobs that work on one
output, decide the same.
"""

import numpy as np

from penstock.base.sizes import KiB
from penstock.conversion.cut import Cut, boxes
from penstock.conversion.encode import coder
from penstock.conversion.source import Reader, block_rows, chunk_of, part_store
from penstock.dataset.dataset import Dataset

MOST_SHARE = 0.1
"""Fields of which zstd leaves more are not compressed."""
SPOTS = 4
"""Places from the first to the last row and, where rows are cut, from the beginning to the end of them."""
SPOT_BYTES = 256 * KiB


def compressed_share(ds: Dataset, name: str, cut: Cut) -> float:
    """How large a sample of a field is by zstd, as a share of its values."""
    store = ds.only(name).delivered
    block = min(block_rows(store), cut.rows)
    rows = block if block > 1 else min(cut.chunk_rows, cut.rows, max(1, SPOT_BYTES // store.fields[name].row_bytes))
    box = small_box(cut, chunk_of(store), rows, SPOT_BYTES)
    starts = store.blocks if block > 1 and store.blocks is not None else np.arange(0, cut.rows, rows)
    encode, _ = coder("zstd", cut.dtype.itemsize)
    plain = stored = 0
    for spot in range(SPOTS):
        first = int(starts[spot * (len(starts) - 1) // (SPOTS - 1)])
        with Reader(part_store(ds, name, _part(cut.shape, box, spot)), rows) as reader:
            values = reader.read(range(first, min(first + rows, cut.rows)))[name]
            plain += values.nbytes
            stored += len(encode(values.reshape(-1).view(np.uint8).data))
    return stored / max(1, plain)


def small_box(cut: Cut, chunk: tuple[int, ...], rows: int, least_bytes: int) -> tuple[int, ...]:
    """The smallest part of a row that makes so many bytes, all rows of it together; no more than a task reads."""
    found = cut.box
    for box in boxes(cut.shape, chunk):
        size = rows * int(np.prod(box)) * cut.dtype.itemsize
        if least_bytes <= size < rows * int(np.prod(found)) * cut.dtype.itemsize:
            found = box
    return found


def _part(shape: tuple[int, ...], box: tuple[int, ...], spot: int) -> tuple[slice, ...]:
    """Where the box of a spot lies: along each axis that is cut, from the first place to the last."""
    places = [-(-n // step) for n, step in zip(shape, box, strict=True)]
    starts = [spot * (count - 1) // (SPOTS - 1) * step for count, step in zip(places, box, strict=True)]
    return tuple(slice(at, min(at + step, n)) for at, step, n in zip(starts, box, shape, strict=True))
