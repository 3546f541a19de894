"""How many rows one read has: what a thread does at a time. Arithmetic only."""

from penstock.base.sizes import KiB, MiB
from penstock.base.spec import row_bytes
from penstock.loader.plan_request import Request

# A read should last long enough to hide its fixed cost, some 100 microseconds with the hand-over: small batches are
# read several at a time, up to 8 MiB (about 2 milliseconds).
JOIN_BELOW_BYTES = 8 * MiB
# A batch is split so that every thread has a part of it, and no part is much larger than this. Each part costs some
# Python, which large rows drive out of a core's cache.
SPLIT_ABOVE_BYTES = 64 * MiB
# The same in processes, where many threads must find work in few batches.
SPLIT_IN_PROCESSES_BYTES = 16 * MiB

# Every read of a process costs the training process some work: batches are divided into no more reads than this.
PARTS_FOR_PROCESSES = 4

# Even in the smallest set-up a read has as many rows as this allows: one by one, 65,536 small rows took 5 seconds.
CHEAP_READ_BYTES = 128 * KiB

# Row numbers are int64. A read has rows, places in the batch and places in the slots, and the schedule works out the
# next while threads still read.
READ_ROW_BYTES = 48

# A thread that asks for the interpreter's lock may wait 5 milliseconds for it, while the caller takes hundreds of small
# batches: so many must be ready.
MOST_BATCHES_PER_READ = 256


def read_sizes(request: Request) -> list[int]:
    """Rows per read, from the most that helps down to the least that works. Blocks are read whole or not at all."""
    if request.window_rows:
        return [request.block_rows]
    sizes = [_whole_share(min(_rows_per_read(request), request.most_rows), request.batch_rows)]
    while sizes[-1] > 1:
        sizes.append(_whole_share(sizes[-1] // 2, request.batch_rows))
    cheap_bytes = read_bytes(request, 1) + CHEAP_READ_BYTES
    while len(sizes) > 1 and sizes[-2] <= request.batch_rows and read_bytes(request, sizes[-2]) <= cheap_bytes:
        del sizes[-1]
    return sizes


def read_bytes(request: Request, rows: int) -> int:
    """What a thread needs for a read of ``rows`` rows."""
    return request.scratch_bytes(rows) + READ_ROW_BYTES * rows


def _rows_per_read(request: Request) -> int:
    """Rows worth a read of their own, as a share of a batch or a number of whole batches."""
    row, batch = max(1, row_bytes(request.fields)), request.batch_rows
    if request.far:
        return _whole_share(-(-batch // request.threads), batch)
    if row * batch < JOIN_BELOW_BYTES:
        together = min(JOIN_BELOW_BYTES // (row * batch), MOST_BATCHES_PER_READ, request.steps // (2 * request.threads))
        return batch * max(1, together)
    parts, most_bytes = request.threads, SPLIT_ABOVE_BYTES
    if request.placement.processes:
        parts, most_bytes = min(parts, PARTS_FOR_PROCESSES), SPLIT_IN_PROCESSES_BYTES
    return _whole_share(min(-(-batch // parts), max(1, most_bytes // row)), batch)


def _whole_share(rows: int, batch_rows: int) -> int:
    """Rounded so that reads divide a batch evenly, or batches a read."""
    if rows >= batch_rows:
        return rows // batch_rows * batch_rows
    return -(-batch_rows // -(-batch_rows // rows))
