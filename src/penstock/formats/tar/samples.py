"""Samples in tar archives: members that share a key, as WebDataset groups them.

``a/b/000.cls.txt`` is field ``cls.txt`` of sample ``a/b/000``: the key ends at the first dot of the file's own name,
and fields are in lower case. Consecutive members of one key make a sample.

Rules:
1. Grouping follows WebDataset's, so that both see the same samples. Members without a dot, or in ``__folders__`` like
   this, belong to no sample, and are counted.
2. A field that comes twice in a sample, and a key that comes again later, are errors: a sample would be lost or torn.
   Where archives were joined (``cat a.tar b.tar``), each has its own samples, and their keys may be the same.
3. Tables are columns. A million members take some 40 MB, or none where the table is saved and mapped.
"""

from array import array
from itertools import pairwise
from typing import NoReturn

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.file_id import FileId
from penstock.base.text_column import TextColumn, decoded, ranges, same_as_before
from penstock.errors import Corrupt, DataError, LimitExceeded
from penstock.files import saved as saved_tables
from penstock.files.saved import SavedTable
from penstock.formats.tar.members import MemberTable

NOT_THERE = -1
"""The offset and length of a field that a sample lacks."""

# The table has a cell for every field of every sample. Where names have numbers behind a dot (``scan.0001.jpg``), each
# makes a field of its own, and the table would be mostly empty and larger than memory.
MOST_CELLS_PER_MEMBER = 16
ALWAYS_FITS = 1 << 20

# Members grouped at a time: enough to make the cost of a numpy call small, few enough to take little memory.
_AT_ONCE = 1 << 14

# Tables that were saved under an earlier name lack links.
_SAVED_AS = "samples of a tar archive, links too"


@dataclass(frozen=True)
class SampleTable:
    """Where each field of each sample lies in one archive."""

    path: str
    """The archive, for messages."""
    fields: tuple[str, ...]
    """In the order of their first appearance."""
    keys: TextColumn
    offsets: np.ndarray
    """(samples, fields), int64; -1 where a sample lacks a field."""
    lengths: np.ndarray
    """(samples, fields), in bytes."""
    passed_over: int = 0
    """Members that belong to no sample."""
    left_out: tuple[DataError, ...] = ()
    """Why members were left out of their samples."""
    is_mapped: bool = False
    """Whether the columns are those of a saved table, which the system may drop from memory at any time."""

    def __post_init__(self) -> None:
        if not self.offsets.shape == self.lengths.shape == (len(self.keys), len(self.fields)):
            raise ValueError("expected one row per key and one column per field")

    @property
    def samples(self) -> int:
        return len(self.keys)

    @property
    def index_bytes(self) -> int:
        """Memory that the table takes."""
        return 0 if self.is_mapped else self.keys.nbytes + self.offsets.nbytes + self.lengths.nbytes


def split_name(name: bytes) -> tuple[bytes, bytes] | None:
    """Key and field of a member, or None if it belongs to no sample.

    Hidden files are left out, also in folders, where WebDataset takes ``a/._x.jpg`` for a field of a sample ``a/``.
    """
    base = name.rfind(b"/") + 1
    dot = name.find(b".", base)
    top = name.split(b"/", 1)[0] if name.startswith(b"__") else b""
    if dot <= base or (len(top) >= 4 and top.endswith(b"__")):
        return None
    return name[:dot], name[dot + 1 :]


def group(members: MemberTable) -> SampleTable:
    """The samples that members make."""
    grouping = _Grouping(members)
    for first in range(0, len(members), _AT_ONCE):
        grouping.add(first, min(first + _AT_ONCE, len(members)))
    return grouping.table()


class _Fields(dict[bytes, int]):
    """The column of each field, by any spelling of it; new fields get new columns."""

    def __init__(self) -> None:
        super().__init__()
        self.columns: dict[str, int] = {}

    def __missing__(self, spelled: bytes) -> int:
        column = self.columns.setdefault(decoded(spelled).lower(), len(self.columns))
        self[spelled] = column
        return column


class _Grouping:
    """Samples so far: which row and column each member belongs to. Many members at a time, as there may be millions."""

    def __init__(self, members: MemberTable) -> None:
        self.members = members
        self.archives = np.array([first for first in members.archives if first], np.int64)
        self.rows = np.full(len(members), NOT_THERE, np.int32)
        self.columns = np.full(len(members), NOT_THERE, np.int32)
        self.keys, self.ends = bytearray(), array("q")
        self.fields = _Fields()
        self.last = b""
        """The key of the last sample; none is empty."""
        self.last_archive = 0

    def add(self, first: int, last: int) -> None:
        """Members ``first`` to ``last``, which follow those that were added before."""
        names = self.members.names
        origin = int(names.ends[first - 1]) if first else 0
        ends = names.ends[first:last] - origin
        letters = names.buffer[origin : origin + int(ends[-1])]
        starts = np.concatenate([[0], ends[:-1]])
        dots = find_dots(letters, starts, ends)
        which = np.flatnonzero(dots >= 0)
        if len(which) == 0:
            return
        starts, dots, ends = starts[which], dots[which], ends[which]
        new = ~same_as_before(letters, starts, dots)
        new[0] = letters[starts[0] : dots[0]].tobytes() != self.last
        archives = np.searchsorted(self.archives, first + which, side="right")
        new |= np.diff(archives, prepend=self.last_archive) != 0
        self.last_archive = int(archives[-1])
        self.last = letters[starts[-1] : dots[-1]].tobytes()
        self.rows[first + which] = len(self.ends) - 1 + np.cumsum(new)
        text, column = letters.tobytes(), self.fields
        self.columns[first + which] = [
            column[text[d + 1 : e]] for d, e in zip(dots.tolist(), ends.tolist(), strict=True)
        ]
        lengths = (dots - starts)[new]
        self.ends.frombytes((np.cumsum(lengths) + len(self.keys)).tobytes())
        self.keys += letters[ranges(starts[new], lengths)].tobytes()

    def table(self) -> SampleTable:
        """The whole table, once every member was added."""
        members, fields = self.members, tuple(self.fields.columns)
        keys = TextColumn(np.frombuffer(self.keys, np.uint8), np.frombuffer(self.ends, np.int64))
        self._check_size(len(keys), len(members))
        kept = self.rows != NOT_THERE
        cells = self.rows[kept].astype(np.int64) * len(fields) + self.columns[kept]
        taken = np.zeros(len(keys) * len(fields), bool)
        taken[cells] = True
        if np.count_nonzero(taken) != len(cells):
            self._raise_repeated_field(keys, kept, cells)
        self._check_keys(keys)
        offsets = np.full((len(keys), len(fields)), NOT_THERE, np.int64)
        lengths = offsets.copy()
        offsets.reshape(-1)[cells] = members.offsets[kept]
        lengths.reshape(-1)[cells] = members.lengths[kept]
        passed_over = int(np.count_nonzero(~kept))
        left_out = tuple(why for name, why in members.left_out if split_name(name) is not None)
        return SampleTable(members.path, fields, keys, offsets, lengths, passed_over=passed_over, left_out=left_out)

    def _raise_repeated_field(self, keys: TextColumn, kept: np.ndarray, cells: np.ndarray) -> NoReturn:
        order = np.argsort(cells, kind="stable")
        second = np.sort(order[1:][np.diff(cells[order]) == 0])[0]
        number = int(np.flatnonzero(kept)[second])
        field = tuple(self.fields.columns)[self.columns[number]]
        raise Corrupt(
            f"{self.members.path}: sample {keys[self.rows[number]]!r} has field {field!r} twice (the second is "
            f"member {self.members.names[number]!r}, number {number:,}): write the archive again with each file once"
        )

    def _check_keys(self, keys: TextColumn) -> None:
        """Refuse a key that comes again in the same archive."""
        bounds = [0, *(np.maximum.accumulate(self.rows)[self.archives - 1] + 1).tolist(), len(keys)]
        for first, last in pairwise(bounds):
            mine = keys if last - first == len(keys) else keys.take(np.arange(first, last))
            again = mine.first_repeat()
            if again is not None:
                before = first + next(mine.find_all(mine[again]))
                raise Corrupt(
                    f"{self.members.path}: key {mine[again]!r} is not contiguous: sample {before:,} has it, and sample "
                    f"{first + again:,} again, with others in between. Sort the files by name before writing the "
                    f"archive"
                )

    def _check_size(self, samples: int, members: int) -> None:
        fields = self.fields.columns
        cells = samples * len(fields)
        if cells > max(ALWAYS_FITS, MOST_CELLS_PER_MEMBER * members):
            some = ", ".join(list(fields)[:3])
            raise LimitExceeded(
                f"{self.members.path}: {len(fields):,} different fields ({some}, …) in {samples:,} samples of "
                f"{members:,} files. A field is all that follows the first dot of a name: write names without other "
                f"dots before it"
            )


def find_dots(letters: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The dot between key and field in each name, as in ``split_name``; -1 if the name belongs to no sample."""
    begins = starts.copy()
    slashes = np.flatnonzero(letters == ord("/"))
    if len(slashes):
        last = np.searchsorted(slashes, ends) - 1
        begins = np.maximum(begins, np.where(last >= 0, slashes[last] + 1, 0))
    places = np.append(np.flatnonzero(letters == ord(".")), len(letters))
    dots = places[np.searchsorted(places, begins)]
    found = np.where((dots > begins) & (dots < ends), dots, NOT_THERE)
    marks = np.append(letters, np.zeros(2, np.uint8)) == ord("_")
    for which in np.flatnonzero(marks[starts] & marks[starts + 1]).tolist():
        if split_name(letters[starts[which] : ends[which]].tobytes()) is None:
            found[which] = NOT_THERE
    return found


def load(folder: str, file: FileId, name: str = _SAVED_AS) -> SampleTable | None:
    """The saved table of this archive, mapped, if it is complete and current."""
    return _open_saved(file.path, saved_tables.load(folder, file, name))


def describe_left(folder: str, file: FileId) -> str:
    """``40 of 100 samples``: what is left of an archive that was longer when a table of it was saved."""
    before = _open_saved(file.path, saved_tables.load(folder, file, _SAVED_AS, of_any_version=True))
    if before is None or not before.samples:
        return ""
    ends = (before.offsets + before.lengths).max(axis=1)
    return f"{np.count_nonzero(ends <= file.size):,} of {before.samples:,} samples"


def save(folder: str, file: FileId, table: SampleTable, name: str = _SAVED_AS) -> SampleTable:
    """Save a table; returns it mapped from the file, or as it was if it cannot be saved."""
    if table.left_out:
        return table
    header = {"fields": table.fields, "passed_over": table.passed_over}
    columns = {
        "offsets": table.offsets,
        "lengths": table.lengths,
        "key_ends": table.keys.ends,
        "keys": table.keys.buffer,
    }
    return _open_saved(file.path, saved_tables.save(folder, file, name, header, columns)) or table


def _open_saved(path: str, saved: SavedTable | None) -> SampleTable | None:
    if saved is None:
        return None
    try:
        fields, passed_over = tuple(saved.header["fields"]), int(saved.header["passed_over"])
        columns = saved.columns()
        keys = TextColumn(columns["keys"], columns["key_ends"])
        offsets, lengths = columns["offsets"], columns["lengths"]
        return SampleTable(path, fields, keys, offsets, lengths, passed_over=passed_over, is_mapped=True)
    except (Corrupt, ValueError, KeyError, TypeError):
        return None
