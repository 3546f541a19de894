"""What finding chunks in shards takes, held to what is declared."""

import tracemalloc
from types import SimpleNamespace

import google_crc32c
import numpy as np
import pytest

from penstock.base import scratch as memory
from penstock.files.files import Files
from penstock.read.chunk_files import FolderNames, Grid, ShardIndex, ShardTable, locating_bytes

KiB = 2**10


@pytest.fixture(params=[(4, 8, 8, 64), (8, 2048), (16384,)], ids=str)
def sharded(request, tmp_path):
    """One shard of 16,384 chunks of 4 bytes each."""
    counts = request.param
    index = np.stack([np.arange(16384) * 4, np.full(16384, 4)], 1).astype("<u8").tobytes()
    crc = google_crc32c.value(index).to_bytes(4, "little")
    shard = tmp_path / ".".join("0" for _ in counts)
    shard.write_bytes(bytes(4 * 16384) + index + crc)
    return ShardTable(Grid(counts, 0), FolderNames(str(tmp_path)), 4, ShardIndex(counts), kept_bytes=1 << 20)


def traced(work):
    """The most that was allocated at once, besides what is lent as scratch."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_reading_an_index_takes_what_is_declared(sharded):
    files = Files()
    memory.prepare(sharded.scratch_bytes)
    try:
        taken = traced(lambda: sharded._index(files, (0,) * len(sharded.grid.counts)))
        assert memory.overflow_bytes() == 0
    finally:
        memory.release()
        files.close()
    assert sharded.index.kept_bytes <= taken <= sharded.index.kept_bytes + 128 * KiB


def test_finding_chunks_takes_what_is_declared(sharded):
    files, pieces = Files(), np.arange(sharded.shape[1])
    list(sharded.locate(files, 0, pieces[:1]))  # its index is kept from now on
    taken = traced(lambda: [len(found.lines) for found in sharded.locate(files, 0, pieces)])
    files.close()
    declared = locating_bytes(SimpleNamespace(table=sharded), len(pieces))
    assert declared / 3 <= taken <= declared + 16 * KiB
