"""Finds where the values of an LMDB database are, in one walk through its tree of pages.

An LMDB file is a B+ tree of pages. A value is one run of bytes: inside a leaf, or on its own pages if it is large. So
values can be read by position like the members of an archive: without a lock file or a reader table, and across forks.

Rules:
1. Pages are read one level of the tree at a time, many together; no value is read.
2. Every number in a page is checked against the page size, the file size, and the database's own counts of pages and
   entries. A damaged tree gives an error that names the page, never a shorter list.
3. Unsupported files are refused by name: several values under one key, files of 32-bit or big-endian machines.

The layout is that of LMDB 0.9, as ``mdb.c`` declares it: page headers of 16 bytes, nodes with headers of 8.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.text_column import TextColumn, decoded
from penstock.errors import Corrupt, Missing, SchemaMismatch, Truncated
from penstock.files.handles import Handle
from penstock.formats.tar.members import MemberTable
from penstock.read import coalesce

MAGIC = b"\xde\xc0\xef\xbe"
VERSION = 1

PAGE_HEADER, NODE_HEADER = 16, 8
BRANCH, LEAF = 0x01, 0x02
ON_ITS_OWN_PAGES, A_DATABASE, SEVERAL_VALUES = 0x01, 0x02, 0x04
WHOLE_NUMBERS_AS_KEYS = 0x08

# Pages parsed together: enough to make the cost of numpy calls small.
PAGES_AT_ONCE = 512

_META = np.dtype({
    "names": ["magic", "version", "free", "main", "last_page", "transaction"],
    "formats": ["<u4", "<u4", "V48", "V48", "<u8", "<u8"],
    "offsets": [16, 20, 40, 88, 136, 144],
    "itemsize": 152,
})  # fmt: skip
_DATABASE = np.dtype([
    ("page_size", "<u4"), ("flags", "<u2"), ("depth", "<u2"), ("branches", "<u8"), ("leaves", "<u8"),
    ("overflow", "<u8"), ("entries", "<u8"), ("root", "<u8"),
])  # fmt: skip


@dataclass(frozen=True)
class Database:
    """A tree as its record describes it."""

    name: str
    page_size: int
    flags: int
    depth: int
    branches: int
    leaves: int
    entries: int
    root: int

    @classmethod
    def of(cls, name: str, record: bytes, page_size: int) -> "Database":
        found = np.frombuffer(record, _DATABASE)[0]
        numbers = {each: int(found[each]) for each in ("flags", "depth", "branches", "leaves", "entries", "root")}
        return cls(name, page_size, **numbers)


@dataclass(frozen=True)
class _Nodes:
    """The nodes of some pages, one row per node."""

    bytes: np.ndarray
    """The pages."""
    begins: np.ndarray
    """Where each node begins in them."""
    room: np.ndarray
    """Bytes from there to the end of its page."""
    positions: np.ndarray
    """Where each begins in the file."""
    low: np.ndarray
    """Size of a leaf's value; lower bits of a branch's page."""
    flags: np.ndarray
    key_sizes: np.ndarray


@dataclass(frozen=True)
class _Entries:
    """Keys one after another, and where their values are."""

    keys: np.ndarray
    key_sizes: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    inner: np.ndarray
    """Whether a value is the record of another database."""

    def key(self, index: int) -> bytes:
        begin = int(self.key_sizes[:index].sum())
        return self.keys[begin : begin + int(self.key_sizes[index])].tobytes()


def walk(handle: Handle, names: Sequence[str] | None = None) -> Mapping[str, MemberTable]:
    """The entries of each named database, in the order of their keys; of the unnamed one (``""``) if there are none."""
    main = _find_main(handle)
    found = _Tree(handle, main).entries()
    if not found.inner.any():
        return {"": _make_table(handle.file.path, main, found)}
    inner = {database.name: database for database in _list_inner(handle, main, found)}
    unknown = [name for name in names or () if name not in inner]
    if unknown:
        raise Missing(f"{handle.file.path}: no database {unknown[0]!r}; it has {', '.join(map(repr, inner))}")
    return {
        name: _make_table(handle.file.path, inner[name], _Tree(handle, inner[name]).entries())
        for name in names or inner
    }


def _list_inner(handle: Handle, main: Database, entries: _Entries) -> Iterator[Database]:
    for index in np.flatnonzero(entries.inner).tolist():
        record = np.empty(_DATABASE.itemsize, np.uint8)
        if entries.lengths[index] != len(record):
            raise Corrupt(f"{handle.file.path}: the record of database {decoded(entries.key(index))!r} is damaged")
        handle.read_into(int(entries.offsets[index]), record)
        yield Database.of(decoded(entries.key(index)), record.tobytes(), main.page_size)


def _make_table(path: str, database: Database, entries: _Entries) -> MemberTable:
    keys, ends = entries.keys, np.cumsum(entries.key_sizes, dtype=np.int64)
    if database.flags & WHOLE_NUMBERS_AS_KEYS:
        width = int(entries.key_sizes[0]) if len(ends) else 8
        if width not in (4, 8) or (entries.key_sizes != width).any():
            raise Corrupt(f"{path}: database {database.name!r} has whole numbers as keys, of several sizes")
        texts = [b"%d" % number for number in keys.view(f"<u{width}").tolist()]
        keys = np.frombuffer(b"".join(texts), np.uint8)
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    return MemberTable(path, TextColumn(keys, ends), entries.offsets, entries.lengths)


def _find_main(handle: Handle) -> Database:
    """The unnamed database, from the newer of the two meta pages."""
    first = _read_meta(handle, 0)
    if first is None:
        raise Corrupt(
            f"{handle.file.path}: not an LMDB database: its first page lacks the magic number; fetch it again"
        )
    page_size = int(np.frombuffer(first["free"].tobytes(), _DATABASE)[0]["page_size"])
    if not (256 <= page_size <= 32768 and page_size & (page_size - 1) == 0):
        raise Corrupt(f"{handle.file.path}: pages of {page_size:,} bytes; expected a power of two; fetch it again")
    second = _read_meta(handle, page_size)
    newer = first if second is None or first["transaction"] >= second["transaction"] else second
    return Database.of("", newer["main"].tobytes(), page_size)


def _read_meta(handle: Handle, offset: int) -> np.void | None:
    page = np.zeros(_META.itemsize, np.uint8)
    if offset + len(page) > handle.file.size:
        raise Truncated(f"{handle.file.path}: {handle.file.size:,} bytes, less than an empty LMDB database has")
    handle.read_into(offset, page)
    found: np.void = page.view(_META)[0]
    if found["magic"].tobytes() == MAGIC and found["version"] == VERSION:
        return found
    if found["magic"].tobytes() == MAGIC[::-1] or found["magic"].tobytes() == MAGIC:
        raise SchemaMismatch(
            f"{handle.file.path}: an LMDB database of data version {found['version']}, or written on a big-endian "
            f"machine; expected version {VERSION}: copy it with mdb_dump and mdb_load of LMDB 0.9"
        )
    return None


class _Tree:
    """One database's pages."""

    def __init__(self, handle: Handle, database: Database) -> None:
        self.handle, self.database, self.page_size = handle, database, database.page_size
        self.path = handle.file.path
        pages = handle.file.size // self.page_size
        if max(database.leaves, database.branches) > pages:
            self._damaged(f"it claims {database.leaves:,} leaf pages, and the file has {pages:,} in all")
        if database.entries and database.root >= pages:
            self._damaged(f"its root is page {database.root:,}, and the file has {pages:,}: it was cut short")

    def entries(self) -> _Entries:
        database = self.database
        leaves = self._read(self._leaves(), LEAF) if database.entries else []
        found = [self._leaf(nodes) for nodes in leaves]
        columns = [np.concatenate(column) for column in zip(*found, strict=True)]
        columns = columns or [np.empty(0, dtype) for dtype in (np.uint8, np.int64, np.int64, np.int64, bool)]
        if len(columns[1]) != database.entries:
            self._damaged(f"{len(columns[1]):,} entries were found, and it claims {database.entries:,}")
        return _Entries(*columns)

    def _leaves(self) -> np.ndarray:
        """The numbers of the leaf pages, in order."""
        database = self.database
        level, branches = np.array([database.root], np.int64), 0
        for _ in range(database.depth - 1):
            branches += len(level)
            level = np.concatenate([self._children(nodes) for nodes in self._read(level, BRANCH)])
            if branches + len(level) > database.branches + database.leaves:
                self._damaged(f"more pages than the {database.branches + database.leaves:,} that it claims")
        if (branches, len(level)) != (database.branches, database.leaves):
            self._damaged(
                f"{branches:,} branch and {len(level):,} leaf pages were found, and it claims {database.branches:,} "
                f"and {database.leaves:,}"
            )
        return level

    def _children(self, nodes: _Nodes) -> np.ndarray:
        children: np.ndarray = nodes.low | nodes.flags << 32
        return children

    def _read(self, pages: np.ndarray, kind: int) -> Iterator[_Nodes]:
        for begin in range(0, len(pages), PAGES_AT_ONCE):
            some = pages[begin : begin + PAGES_AT_ONCE]
            yield self._nodes(some, self._pages(some), kind)

    def _pages(self, numbers: np.ndarray) -> np.ndarray:
        size = self.page_size
        outside = (numbers < 2) | (numbers >= self.handle.file.size // size)
        if outside.any():
            number = int(numbers[outside][0])
            raise Truncated(
                f"{self.path}: page {number:,} at offset {number * size:,} is part of {self._shown}, but the file has "
                f"only {self.handle.file.size:,} bytes. It was cut short or damaged: fetch it again"
            )
        found = np.empty((len(numbers), size), np.uint8)
        for first, place, count in coalesce.merge_neighbours(numbers, np.arange(len(numbers))):
            self.handle.read_into(first * size, found[place : place + count])
        return found

    def _nodes(self, numbers: np.ndarray, pages: np.ndarray, kind: int) -> _Nodes:
        size, flat = self.page_size, pages.reshape(-1).view("<u2")
        headers = pages[:, :PAGE_HEADER].copy()
        lower = headers[:, 12:14].copy().view("<u2")[:, 0].astype(np.int64)
        wrong = (headers[:, :8].copy().view("<i8")[:, 0] != numbers) | (headers[:, 10] & 0x7F != kind)
        wrong |= (lower <= PAGE_HEADER) | (lower > size) | (lower % 2 != 0)
        if wrong.any():
            self._damaged_page(int(numbers[np.argmax(wrong)]), "its header is not that of a page of the tree")
        counts = (lower - PAGE_HEADER) // 2
        page = np.repeat(np.arange(len(pages)), counts)
        within = np.arange(len(page)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = flat[(page * size + PAGE_HEADER) // 2 + within].astype(np.int64)
        wrong = (starts < lower[page]) | (starts + NODE_HEADER > size) | (starts % 2 != 0)
        if wrong.any():
            self._damaged_page(int(numbers[page[np.argmax(wrong)]]), "it has a node outside itself")
        begins = page * size + starts
        low, high, flags, key_sizes = (flat[begins // 2 + field].astype(np.int64) for field in range(4))
        positions = numbers[page] * size + starts
        low |= high << 16
        return _Nodes(pages.reshape(-1), begins, size - starts, positions, low, flags=flags, key_sizes=key_sizes)

    def _leaf(self, nodes: _Nodes) -> tuple[np.ndarray, ...]:
        """Keys, their sizes, offsets and lengths of values, and which are databases."""
        sizes, lengths = nodes.key_sizes, nodes.low
        apart = (nodes.flags & ON_ITS_OWN_PAGES) != 0
        heads = NODE_HEADER + sizes
        wrong = heads + np.where(apart, 8, lengths) > nodes.room
        if wrong.any():
            page = int(nodes.positions[np.argmax(wrong)]) // self.page_size
            self._damaged_page(page, "a node reaches beyond its end")
        ends = np.cumsum(sizes)
        keys = nodes.bytes[np.repeat(nodes.begins + NODE_HEADER - (ends - sizes), sizes) + np.arange(sizes.sum())]
        offsets = nodes.positions + heads
        if apart.any():
            pages = nodes.bytes[(nodes.begins + heads)[apart, None] + np.arange(8)].view("<i8")[:, 0]
            offsets[apart] = pages * self.page_size + PAGE_HEADER
        found = _Entries(keys, sizes, offsets, lengths, (nodes.flags & A_DATABASE) != 0)
        self._check_values(found, (nodes.flags & SEVERAL_VALUES) != 0)
        return found.keys, found.key_sizes, found.offsets, found.lengths, found.inner

    def _check_values(self, found: _Entries, several: np.ndarray) -> None:
        if several.any():
            raise SchemaMismatch(
                f"{self.path}: key {decoded(found.key(int(np.argmax(several))))!r} of {self._shown} has several values "
                f"(MDB_DUPSORT); expected one per key: write the samples under keys of their own"
            )
        end = self.handle.file.size
        beyond = (found.offsets < 0) | (found.offsets > end) | (found.offsets + found.lengths > end)
        if beyond.any():
            at = int(np.argmax(beyond))
            raise Truncated(
                f"{self.path}: the value of key {decoded(found.key(at))!r}, {int(found.lengths[at]):,} bytes at offset "
                f"{int(found.offsets[at]):,}, reaches beyond the file's end ({end:,} bytes). It was cut short, perhaps "
                f"by an unfinished download or copy: fetch it again"
            )

    @property
    def _shown(self) -> str:
        return f"database {self.database.name!r}" if self.database.name else "the database"

    def _damaged_page(self, number: int, why: str) -> NoReturn:
        self._damaged(f"page {number:,} at offset {number * self.page_size:,}: {why}")

    def _damaged(self, why: str) -> NoReturn:
        raise Corrupt(f"{self.path}: the tree of {self._shown} is damaged: {why}; fetch it again, or leave it out")
