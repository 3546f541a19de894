"""Thresholds of reading, as one value that is handed down from ``open`` through ``Files``.

They choose between ways of reading that deliver the same bytes, so callers have no reason to change them. Tests do.
"""

import os

from penstock.base.dataclass import dataclass
from penstock.base.sizes import KiB, MiB


@dataclass(frozen=True, kw_only=True)
class ReadPolicy:
    """When to read in which way."""

    check_file_every_s: float = 0.02
    """How long one look at a file's size and time is trusted: a look takes microseconds, and a switch of threads."""
    bytes_per_call: int = 2**30
    """The most that one system call reads; Linux reads 2 GiB - 4 KiB."""
    use_preadv: bool = hasattr(os, "preadv")
    """Otherwise (on Windows) seek and read, one thread at a time per handle."""
    group_chunks_below_bytes: int = 32 * KiB
    """Smaller chunks are read in groups."""
    group_bytes: int = 1 * MiB
    """Decoded bytes of a group, which stay in a core's cache."""
    group_elements: int = 64 * 1024
    """Elements of a group per row, so that its tables stay small."""
    chunk_gap_bytes: int = 4 * KiB
    """Chunks are read in one call across gaps up to this size."""
    chunk_span_bytes: int = 1 * MiB
    """The most bytes, gaps included, of one such call."""
    scatter_rows_below_bytes: int = 64 * KiB
    """Smaller rows of a chunk are put into place in one call, which copies them twice; larger ones one by one."""
    map_rows_below_bytes: int = 32 * KiB
    """Smaller rows are gathered from a mapping: a system call per row would cost more than the copy (0.8 against 2.5
    million rows of 4 KiB per second). Reads of larger ones keep page tables small, and notice a file that was cut."""
    gather_bytes: int = 512 * KiB
    """Rows that are gathered at a time if they pass through scratch."""
    row_gap_bytes: int = 4 * KiB
    """Wanted ranges of a row are read in one call across gaps up to this."""
    kept_shard_index_bytes: int = 64 * MiB
    """Memory per array for the indices of shards that were used last."""
    save_table_from_chunks: int = 4096
    """With fewer chunks, walking through a file takes no longer than finding its saved table."""


DEFAULT = ReadPolicy()
