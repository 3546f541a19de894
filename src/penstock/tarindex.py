"""Samples in tar archives: members that share a key, as WebDataset groups them.

``a/b/000.cls.txt`` is field ``cls.txt`` of sample ``a/b/000``: the key ends at the first dot of the file's own name,
and fields are in lower case. Consecutive members of one key make a sample.

Rules:
1. Grouping follows WebDataset's, so that both see the same samples. Members without a dot, or in ``__folders__`` like
   this, belong to no sample, and are counted.
2. A field that comes twice in a sample, and a key that comes again later, are errors: a sample would be lost or torn.
3. Tables are columns. A million members take some 40 MB, or none where the table is saved and mapped.
"""

from array import array
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from penstock import savedcolumns
from penstock.errors import Corrupt, LimitExceeded, Missing
from penstock.extents import FileId
from penstock.savedcolumns import Saved
from penstock.tarwalk import MemberTable, walk
from penstock.texts import Texts, decoded

__all__ = ["MemberTable", "SampleTable", "group", "load", "save", "split_name", "walk"]

NOT_THERE = -1
"""The offset and length of a field that a sample lacks."""

# The table has a cell for every field of every sample. Where names have numbers behind a dot (``scan.0001.jpg``), each
# makes a field of its own, and the table would be mostly empty and larger than memory.
MOST_CELLS_PER_MEMBER = 16
ALWAYS_FITS = 1 << 20

_SAVED_AS = "samples of a tar archive"


@dataclass(frozen=True)
class SampleTable:
    """Where each field of each sample lies in one archive."""

    path: str
    """The archive, for messages."""
    fields: tuple[str, ...]
    """In the order of their first appearance."""
    keys: Texts
    offsets: np.ndarray
    """(samples, fields), int64; -1 where a sample lacks a field."""
    lengths: np.ndarray
    """The same shape, in bytes."""
    passed_over: int = 0
    """Members that belong to no sample."""
    mapped: bool = False
    """Whether the columns are those of a saved table, which the system may drop from memory at any time."""

    def __post_init__(self) -> None:
        if not self.offsets.shape == self.lengths.shape == (len(self.keys), len(self.fields)):
            raise ValueError("expected a row a key and a column a field")

    @property
    def samples(self) -> int:
        return len(self.keys)

    @property
    def index_bytes(self) -> int:
        """Memory that the table takes."""
        return 0 if self.mapped else self.keys.nbytes + self.offsets.nbytes + self.lengths.nbytes

    def key(self, sample: int) -> str:
        """The key of one sample; bytes that are not UTF-8 are escaped."""
        return self.keys[sample]

    def find(self, key: str) -> int:
        """The sample with this key."""
        found = self.keys.find(key)
        if found is None:
            raise Missing(f"{self.path}: no sample {key!r} among {self.samples:,}; {self._some_keys()}")
        return found

    def missing(self, field: str) -> np.ndarray:
        """The samples that lack a field."""
        if field not in self.fields:
            raise Missing(f"{self.path}: no field {field!r}; its samples have {', '.join(self.fields) or 'none'}")
        return np.flatnonzero(self.offsets[:, self.fields.index(field)] == NOT_THERE)

    def _some_keys(self) -> str:
        return f"they are {self.key(0)!r} to {self.key(-1)!r}" if self.samples else "it is empty"


def split_name(name: bytes) -> tuple[bytes, bytes] | None:
    """Key and field of a member, or None if it belongs to no sample.

    Hidden files are left out, also in folders, where WebDataset takes ``a/._x.jpg`` for a field of a sample ``a/``.
    """
    base = name.rfind(b"/") + 1
    dot = name.find(b".", base)
    if dot < 0 or (name.startswith(b"__") and _is_meta(name.split(b"/", 1)[0])):
        return None
    if dot == base:
        return None
    return name[:dot], name[dot + 1 :]


def _is_meta(first: bytes) -> bool:
    return len(first) >= 4 and first.endswith(b"__")


def group(members: MemberTable) -> SampleTable:
    """The samples that members make."""
    grouping = _Grouping(members.path)
    for name in members.names.raws():
        grouping.add(name)
    return grouping.table(members)


class _Grouping:
    """Samples so far: which row and column each member belongs to."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.rows, self.columns = array("i"), array("i")
        self.keys, self.ends = bytearray(), array("q")
        self.fields: dict[str, int] = {}
        self.spelled: dict[bytes, int] = {}
        """Fields as names spell them, in either case."""
        self.key: bytes | None = None
        self.seen: set[int] = set()
        """Fields of the present sample."""

    def add(self, name: bytes) -> None:
        split = split_name(name)
        if split is None:
            self.rows.append(NOT_THERE)
            self.columns.append(NOT_THERE)
            return
        key, spelled = split
        if key != self.key:
            self.key = key
            self.keys += key
            self.ends.append(len(self.keys))
            self.seen.clear()
        column = self.spelled.get(spelled)
        if column is None:
            column = self.spelled[spelled] = self.fields.setdefault(decoded(spelled).lower(), len(self.fields))
        if column in self.seen:
            raise Corrupt(
                f"{self.path}: sample {decoded(key)!r} has field {decoded(spelled).lower()!r} twice (the second is "
                f"member {decoded(name)!r}, number {len(self.rows):,}): write the archive again with each file once"
            )
        self.seen.add(column)
        self.rows.append(len(self.ends) - 1)
        self.columns.append(column)

    def table(self, members: MemberTable) -> SampleTable:
        """The whole table, once every member was added."""
        keys = Texts(np.frombuffer(self.keys, np.uint8), np.frombuffer(self.ends, np.int64))
        if (again := keys.first_repeat()) is not None:
            self._torn(keys, again)
        self._check_size(len(keys), len(members))
        rows, columns = np.frombuffer(self.rows, np.int32), np.frombuffer(self.columns, np.int32)
        kept = rows != NOT_THERE
        offsets = np.full((len(keys), len(self.fields)), NOT_THERE, np.int64)
        lengths = offsets.copy()
        offsets[rows[kept], columns[kept]] = members.offsets[kept]
        lengths[rows[kept], columns[kept]] = members.lengths[kept]
        return SampleTable(
            self.path, tuple(self.fields), keys, offsets, lengths, passed_over=int(np.count_nonzero(~kept))
        )

    def _torn(self, keys: Texts, again: int) -> NoReturn:
        key, first = keys[again], keys.find(keys[again])
        raise Corrupt(
            f"{self.path}: key {key!r} is not contiguous: sample {first:,} has it, and sample {again:,} again, with "
            f"others in between. Sort the files by name before writing the archive"
        )

    def _check_size(self, samples: int, members: int) -> None:
        cells = samples * len(self.fields)
        if cells > max(ALWAYS_FITS, MOST_CELLS_PER_MEMBER * members):
            some = ", ".join(list(self.fields)[:3])
            raise LimitExceeded(
                f"{self.path}: {len(self.fields):,} different fields ({some}, …) in {samples:,} samples of {members:,} "
                f"files. A field is all that follows the first dot of a name: write names without other dots before it"
            )


def load(folder: str, file: FileId, name: str = _SAVED_AS) -> SampleTable | None:
    """The table of this archive, mapped, if a whole and current one was saved."""
    return _opened(file.path, savedcolumns.load(folder, file, name))


def save(folder: str, file: FileId, table: SampleTable, name: str = _SAVED_AS) -> SampleTable:
    """Keep a table for the next time; returns it as saved and mapped, or as it was if it cannot be."""
    header = {"fields": table.fields, "passed_over": table.passed_over}
    columns = {
        "offsets": table.offsets,
        "lengths": table.lengths,
        "key_ends": table.keys.ends,
        "keys": table.keys.buffer,
    }
    return _opened(file.path, savedcolumns.save(folder, file, name, header, columns)) or table


def _opened(path: str, saved: Saved | None) -> SampleTable | None:
    if saved is None:
        return None
    try:
        fields, passed_over = tuple(saved.header["fields"]), int(saved.header["passed_over"])
        columns = saved.columns()
        keys = Texts(columns["keys"], columns["key_ends"])
        return SampleTable(path, fields, keys, columns["offsets"], columns["lengths"], passed_over, mapped=True)
    except (Corrupt, ValueError, KeyError, TypeError):
        return None
