"""The members of an archive as columns: names, offsets and lengths."""

from array import array
from collections.abc import Iterator

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.text_column import TextColumn
from penstock.errors import DataError


@dataclass(frozen=True)
class MemberTable:
    """The files of one archive, in its order."""

    path: str
    """The archive, for messages."""
    names: TextColumn
    offsets: np.ndarray
    """Where the bytes of each begin (int64)."""
    lengths: np.ndarray
    left_out: tuple[tuple[bytes, DataError], ...] = ()
    """Names of members that are not in it, and why."""
    archives: tuple[int, ...] = ()
    """The first member of each archive but the first, where several were joined into one file."""

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        """Name, offset and length of each."""
        for index, name in enumerate(self.names):
            yield name, int(self.offsets[index]), int(self.lengths[index])


class MemberList:
    """Builds a ``MemberTable``."""

    def __init__(self) -> None:
        self.names, self.ends = bytearray(), array("q")
        self.offsets, self.lengths = array("q"), array("q")
        self.left_out: list[tuple[bytes, DataError]] = []
        self.archives: list[int] = []

    def __len__(self) -> int:
        return len(self.ends)

    def add(self, name: bytes, offset: int, length: int) -> None:
        self.names += name
        self.ends.append(len(self.names))
        self.offsets.append(offset)
        self.lengths.append(length)

    def table(self, path: str) -> MemberTable:
        return MemberTable(
            path,
            TextColumn(np.frombuffer(self.names, np.uint8), np.frombuffer(self.ends, np.int64)),
            np.frombuffer(self.offsets, np.int64),
            np.frombuffer(self.lengths, np.int64),
            left_out=tuple(self.left_out),
            archives=tuple(self.archives),
        )
