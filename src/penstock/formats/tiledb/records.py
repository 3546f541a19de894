"""TileDB's own records, checked before its library reads them: it allocates any size that they declare, and reads
beyond the end of what decodes to less.

A record ("generic tile") is a header, a list of filters, and chunks; each with its size. A schema is a file with one
record. The metadata of a fragment is a file of many, one after another, with a footer: the first record is an index of
tiles, and the next ones say where the tiles of each attribute begin, in its file ``aN.tdb``.
"""

import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from penstock.base.sizes import MiB, format_size
from penstock.errors import Corrupt, LimitExceeded, Unavailable
from penstock.files.retry import one_line, open_for_parser

# Version, stored bytes, decoded bytes, type, bytes per cell, encryption, bytes of the list of filters.
_HEADER = struct.Struct("<IQQBQBI")
_COUNT = struct.Struct("<Q")
# Decoded bytes, stored bytes, bytes of the filters' own notes.
_CHUNK = struct.Struct("<III")
# The largest chunk, how many filters, and the first of them.
_FILTERS = struct.Struct("<IIB")
_GZIP = 1
# Compressed parts of a chunk, which are a filter's own notes: of other notes, of data.
_PARTS = struct.Struct("<II")
# Of each part: decoded bytes, stored bytes.
_PART = struct.Struct("<II")

# A record that decodes to more than this is refused, unless it is stored almost uncompressed.
MOST_BYTES = 64 * MiB
MOST_EXPANSION = 16

# The library takes some 40 bytes for each chunk that a tile declares.
MOST_CHUNKS = 250_000

# The first version whose fragments end with the length of their footer.
_FOOTER_SINCE = 10

SCHEMAS, FRAGMENTS, ABOUT_FRAGMENT = "__schema", "__fragments", "__fragment_metadata.tdb"
OLD_SCHEMA = "__array_schema.tdb"


def check_records(array: str) -> None:
    """Refuse an array whose schemas or fragments declare sizes that they do not have."""
    try:
        for path in _list_schemas(array):
            with open_for_parser(str(path)) as file:
                _check_record(file, 0, os.fstat(file.fileno()).st_size)
        for path in sorted(Path(array, FRAGMENTS).glob(f"*/{ABOUT_FRAGMENT}")):
            with open_for_parser(str(path)) as file:
                _check_fragment(file)
    except OSError as error:
        raise Unavailable(f"{error.filename or array}: cannot be read ({one_line(error)})") from error


def _list_schemas(array: str) -> Iterator[Path]:
    if Path(array, OLD_SCHEMA).is_file():
        yield Path(array, OLD_SCHEMA)
    if Path(array, SCHEMAS).is_dir():
        yield from sorted(path for path in Path(array, SCHEMAS).iterdir() if path.is_file())


def _check_fragment(file: BinaryIO) -> None:
    size = os.fstat(file.fileno()).st_size
    (version,) = struct.unpack("<I", _read(file, 0, 4, size))
    if version < _FOOTER_SINCE:
        return
    (footer,) = _COUNT.unpack(_read(file, size - _COUNT.size, _COUNT.size, size))
    end = size - _COUNT.size - footer
    if end < 0:
        raise _damaged(file, f"its footer has {footer:,} bytes, the file {size:,}")
    attributes = _list_attribute_files(os.path.dirname(file.name))
    at = number = 0
    while at < end:
        if path := attributes.get(number - 1):
            with open_for_parser(path) as tiles:
                at = _check_record(file, at, end, _Tiles(tiles).check)
        else:
            at = _check_record(file, at, end)
        number += 1


def _list_attribute_files(fragment: str) -> dict[int, str]:
    """The file of each attribute, by the attribute's number."""
    found = ((re.fullmatch(r"a([0-9]{1,9})\.tdb", entry.name), entry.path) for entry in os.scandir(fragment))
    return {int(match[1]): path for match, path in found if match}


class _Tiles:
    """Refuses tiles that declare more chunks than they have room for, if the library would take much memory."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size = file, os.fstat(file.fileno()).st_size
        self._skipped, self._rest = False, b""

    def check(self, offsets: bytes) -> None:
        """Look at the tiles of the next part of a record: how many there are, then where each begins."""
        offsets = self._rest + offsets
        end = len(offsets) // _COUNT.size * _COUNT.size
        begins, self._rest = offsets[:end], offsets[end:]
        if begins and not self._skipped:
            begins, self._skipped = begins[_COUNT.size :], True
        descriptor, last = self.file.fileno(), self.size - _COUNT.size
        for (begin,) in _COUNT.iter_unpack(begins):
            if begin > last:
                return  # the library refuses it
            (count,) = _COUNT.unpack(os.pread(descriptor, _COUNT.size, begin))
            if count > MOST_CHUNKS and count * _CHUNK.size > self.size - begin:
                problem = f"a tile at byte {begin:,} declares {count:,} chunks in {self.size - begin:,} bytes"
                raise _damaged(self.file, problem)


def _check_record(file: BinaryIO, at: int, end: int, check: Callable[[bytes], None] = lambda content: None) -> int:
    """Where the next record begins; ``check`` gets the pieces of this one, if it can be decoded here."""
    _, stored, decoded, _, _, _, filters = _HEADER.unpack(_read(file, at, _HEADER.size, end))
    begin = at + _HEADER.size + filters
    if begin + stored > end:
        raise _damaged(file, f"a record at byte {at:,} declares {filters + stored:,} bytes, {end - at:,} are there")
    if decoded > max(MOST_BYTES, MOST_EXPANSION * stored):
        raise LimitExceeded(
            f"{file.name}: a record of {stored:,} bytes at byte {at:,} would take {format_size(decoded)} in memory; "
            f"{format_size(MOST_BYTES)} is the limit. The file is damaged or malicious: leave the array out"
        )
    is_gzip = _is_gzip(_read(file, at + _HEADER.size, filters, end))
    found = 0
    for length, chunk in _list_chunks(file, begin, begin + stored):
        found += length
        if found > decoded:
            break
        if is_gzip:
            check(_expand(file, length, *chunk))
    if found != decoded:
        raise _damaged(file, f"a record at byte {at:,} declares {decoded:,} bytes, its chunks {found:,}")
    return int(begin + stored)


def _is_gzip(filters: bytes) -> bool:
    """Whether records are stored as the library stores them: compressed, and nothing else."""
    return len(filters) >= _FILTERS.size and _FILTERS.unpack_from(filters)[1:] == (1, _GZIP)


def _list_chunks(file: BinaryIO, begin: int, end: int) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Decoded bytes of each chunk of a record; and where it lies, the bytes of its notes, and those stored."""
    if begin == end:
        return
    (count,) = _COUNT.unpack(_read(file, begin, _COUNT.size, end))
    at = begin + _COUNT.size
    if count * _CHUNK.size > end - at:
        raise _damaged(file, f"a record at byte {begin:,} declares {count:,} chunks in {end - begin:,} bytes")
    for _ in range(count):
        decoded, stored, notes = _CHUNK.unpack(_read(file, at, _CHUNK.size, end))
        at += _CHUNK.size + stored + notes
        if at > end:
            raise _damaged(file, f"a chunk of a record at byte {begin:,} ends at byte {at:,} instead of {end:,}")
        yield decoded, (at - stored - notes, notes, stored)
    if at != end:
        raise _damaged(file, f"the chunks of a record at byte {begin:,} end at byte {at:,} instead of {end:,}")


def _expand(file: BinaryIO, decoded: int, at: int, notes: int, stored: int) -> bytes:
    """A compressed chunk, which must decode to as many bytes as it declares."""
    about, data = _read(file, at, notes, at + notes), _read(file, at + notes, stored, at + notes + stored)
    parts = list(_PART.iter_unpack(about[_PARTS.size :])) if len(about) % _PART.size == 0 else []
    lengths, sizes = [length for length, _ in parts], [size for _, size in parts]
    if about[: _PARTS.size] != _PARTS.pack(0, len(parts)) or (sum(lengths), sum(sizes)) != (decoded, stored):
        raise _damaged(file, f"a chunk at byte {at:,} and its parts differ in their sizes")
    out = b""
    for length, size in parts:
        expander = zlib.decompressobj()
        try:
            part = expander.decompress(data[:size], length + 1)
        except zlib.error as error:
            raise _damaged(file, f"a chunk at byte {at:,} cannot be decoded ({error})") from error
        if len(part) != length or not expander.eof:
            raise _damaged(file, f"a chunk at byte {at:,} decodes to other than {length:,} bytes")
        out, data = out + part, data[size:]
    return out


def _read(file: BinaryIO, at: int, length: int, end: int) -> bytes:
    if not 0 <= at <= end - length:
        raise _damaged(file, f"{length} bytes at byte {at:,} are beyond byte {end:,}")
    file.seek(at)
    return file.read(length)


def _damaged(file: BinaryIO, what: str) -> Corrupt:
    return Corrupt(f"{file.name}: {what}; the file is damaged: restore it, or leave the array out")
