"""Many texts in one buffer.

A million short texts as Python objects take some 80 MB and seconds to make. Here they take their bytes and 8 more each,
can be mapped from a file, and are decoded one by one when asked for.

Each text is kept as its bytes. Bytes that are not UTF-8 are escaped on the way out (``surrogateescape``) and
understood again on the way in, so that nothing is lost and nothing fails.
"""

import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import overload

import numpy as np

# How many texts are cut out of the buffer at a time: enough to make the cost of a numpy call small.
_AT_ONCE = 4096


class TextColumn(Sequence[str]):
    """A sequence of texts: text ``i`` is ``buffer[ends[i - 1]:ends[i]]``."""

    def __init__(self, buffer: np.ndarray, ends: np.ndarray) -> None:
        if buffer.dtype != np.uint8 or ends.dtype != np.int64 or (ends[-1] if len(ends) else 0) != len(buffer):
            raise ValueError("expected the bytes of all texts, and where each ends")
        self.buffer, self.ends = buffer, ends

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes + self.ends.nbytes

    @property
    def longest(self) -> int:
        """Bytes of the longest text."""
        return int(np.diff(self.ends, prepend=0).max(initial=0))

    @property
    def begins(self) -> np.ndarray:
        """Where each begins in the buffer."""
        return np.concatenate([[0], self.ends[:-1]]).astype(np.int64) if len(self) else self.ends

    def __len__(self) -> int:
        return len(self.ends)

    def take(self, rows: np.ndarray) -> "TextColumn":
        """Some of the texts, in this order."""
        return cut(self.buffer, self.begins[rows], self.ends[rows])

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [decoded(self.raw(each)) for each in range(*index.indices(len(self)))]
        return decoded(self.raw(range(len(self))[index]))

    def __iter__(self) -> Iterator[str]:
        return map(decoded, self.raws())

    def raw(self, index: int) -> bytes:
        """The bytes of one text."""
        begin = self.ends[index - 1] if index else 0
        return self.buffer[begin : self.ends[index]].tobytes()

    def raws(self) -> Iterator[bytes]:
        """The bytes of each, many times faster than one by one."""
        begin = 0
        for first in range(0, len(self), _AT_ONCE):
            ends = self.ends[first : first + _AT_ONCE]
            block, origin = self.buffer[begin : ends[-1]].tobytes(), begin
            for end in ends.tolist():
                yield block[begin - origin : end - origin]
                begin = end

    def find(self, text: str) -> int | None:
        """Where this text first is; the first search makes a table of 8 bytes per text."""
        return next(self.find_all(text), None)

    def find_all(self, text: str) -> Iterator[int]:
        """Everywhere that this text is, in order."""
        try:
            raw = text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # no bytes decode to it
            return
        sums, order = self._by_sum
        first = int(np.searchsorted(sums, np.uint32(zlib.crc32(raw)), "left"))
        last = int(np.searchsorted(sums, np.uint32(zlib.crc32(raw)), "right"))
        yield from (int(each) for each in order[first:last] if self.raw(each) == raw)

    def first_repeat(self) -> int | None:
        """The first text that is the same as one before it."""
        sums, order = self._sorted_sums()
        same = sums[1:] == sums[:-1]
        suspects = np.zeros(len(self), bool)
        suspects[order[1:][same]] = suspects[order[:-1][same]] = True
        seen: set[bytes] = set()
        for index in np.flatnonzero(suspects).tolist():
            raw = self.raw(index)
            if raw in seen:
                return int(index)
            seen.add(raw)
        return None

    @cached_property
    def _by_sum(self) -> tuple[np.ndarray, np.ndarray]:
        return self._sorted_sums()

    def _sorted_sums(self) -> tuple[np.ndarray, np.ndarray]:
        """Checksums of all texts, sorted, and whose they are."""
        sums = np.fromiter(map(zlib.crc32, self.raws()), np.uint32, len(self))
        order = np.argsort(sums, kind="stable").astype(np.uint32)
        return sums[order], order


def decoded(raw: bytes) -> str:
    """Bytes as text; those that are not UTF-8 are escaped."""
    return raw.decode("utf-8", "surrogateescape")


def cut(letters: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> TextColumn:
    """The texts that lie between these places of a buffer."""
    return TextColumn(letters[ranges(begins, ends - begins)], np.cumsum(ends - begins))


def same_as_before(letters: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Which pieces of a buffer hold the same letters as the one before."""
    lengths = ends - starts
    same = np.zeros(len(starts), bool)
    same[1:] = lengths[1:] == lengths[:-1]
    suspects = np.flatnonzero(same & (lengths > 0))
    if len(suspects):
        sizes = lengths[suspects]
        alike = letters[ranges(starts[suspects], sizes)] == letters[ranges(starts[suspects - 1], sizes)]
        same[suspects] = np.logical_and.reduceat(alike, np.cumsum(sizes) - sizes)
    return same


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Every number of every range, one range after another."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1] if len(ends) else 0)
