"""Where the members of a zip archive are: uncompressed ones can be read like parts of any file."""

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.file_id import FileId
from penstock.base.sizes import KiB, MiB
from penstock.base.urls import check_local
from penstock.errors import Corrupt, DecodeFailed, SourceError, Truncated
from penstock.files.files import Files
from penstock.files.mapping import map_file
from penstock.files.retry import open_for_parser
from penstock.read.member_sum import MOST_BYTES, MemberSum

STORED = zipfile.ZIP_STORED

# Read or unpacked at a time.
PIECE_BYTES = 256 * KiB

# A member's own header: these bytes, which end with the lengths of its name and of an extra field, then those two.
HEADER_BYTES = 30
FETCH = "the archive is damaged there: fetch it again"
_WRONG_SUM = "its CRC-32 is not the one in the archive's directory"

# Any archive may expand to this, however small it is.
ALWAYS_READ = 64 * MiB

# A member's flag: its name is UTF-8.
UTF8 = 0x800

_MARK = np.frombuffer(b"PK\x03\x04", np.uint8)


@dataclass(frozen=True, kw_only=True)
class ZipTable:
    """The members of an archive, in its own order."""

    file: FileId
    names: tuple[str, ...]
    offsets: np.ndarray
    lengths: np.ndarray
    """Bytes as stored."""
    compressed: np.ndarray
    """Whether each is compressed or encrypted."""
    sums: np.ndarray
    """The CRC-32 of each, from the directory."""

    def find_sum(self, number: int) -> MemberSum | None:
        """What a member is compared with before parts of it are read; None if that would take too long."""
        begin, length = int(self.offsets[number]), int(self.lengths[number])
        if length > MOST_BYTES:
            return None
        return MemberSum(self.names[number], begin, length, int(self.sums[number]))

    def read(self, number: int, most: int) -> bytes:
        """A member, or its first ``most`` bytes, decompressed."""
        if not self.compressed[number]:
            begin, length = int(self.offsets[number]), int(self.lengths[number])
            content = map_file(self.file.path)[begin : begin + min(most, length)].tobytes()
            if most >= length and zlib.crc32(content) != self.sums[number]:
                raise Corrupt(f"{self.file.path}: {self.names[number]}: {_WRONG_SUM} (offset {begin:,}); {FETCH}")
            return content
        with self._unpacked(number) as member:
            return member.read(most)

    def unpack_into(self, number: int, begin: int, target: np.ndarray) -> int:
        """Fill ``target`` with a compressed member from ``begin`` on, without a second copy of it.

        Returns how long the member is: exactly if it ends in ``target``, else one byte more than was filled.
        """
        with self._unpacked(number) as member:
            found = len(member.read(begin))
            for at in range(0, len(target), PIECE_BYTES):
                piece = member.read(min(PIECE_BYTES, len(target) - at))
                target[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                found += len(piece)
            return found + len(member.read(1))  # zipfile compares the checksum at the end of the member

    @contextmanager
    def _unpacked(self, number: int) -> Iterator[IO[bytes]]:
        try:
            with (
                open_for_parser(self.file.path) as file,
                zipfile.ZipFile(file) as archive,
                archive.open(self.names[number]) as member,
            ):
                yield member
        except (SourceError, MemoryError):
            raise
        except Exception as error:  # zipfile and its decompressors raise a dozen kinds
            raise DecodeFailed(f"{self.file.path}: {self.names[number]}: {error}; fetch the file again") from error


def zip_table(path: str, files: Files) -> ZipTable:
    """The table of an archive, from its directory and its members' own headers."""
    check_local(path, "zip archives")
    file = files.identify(path)
    try:
        with open_for_parser(path) as opened, zipfile.ZipFile(opened) as archive:
            infos = [info for info in archive.infolist() if not info.filename.endswith("/")]
    except SourceError:
        raise
    except Exception as error:  # as above
        text = str(error) or type(error).__name__
        raise Truncated(
            f"{path}: not a whole zip archive ({text}); it was cut short or is damaged: fetch it again"
        ) from error
    for info in infos:
        if not info.filename:
            raise Truncated(f"{path}: its directory lists a member without a name; it is damaged: fetch it again")
        if not 0 <= info.header_offset < file.size or info.compress_size > file.size:
            raise Truncated(
                f"{path}: its directory says that {info.filename!r:.200} has {info.compress_size:,} bytes at "
                f"{info.header_offset:,}, but the file has {file.size:,}; fetch it again"
            )
    headers = np.array([info.header_offset for info in infos], np.int64)
    lengths = np.array([info.compress_size for info in infos], np.int64)
    plain = [info.compress_type == STORED and not info.flag_bits & 1 for info in infos]
    begins = headers + _header_bytes(file, headers)
    _check_names(file, infos)
    if len(begins) and int((begins + lengths).max()) > file.size:
        worst = int(np.argmax(begins + lengths))
        raise Truncated(f"{path}: its member {infos[worst].filename!r} reaches beyond its end; fetch it again")
    names, sums = tuple(info.filename for info in infos), np.array([info.CRC for info in infos], np.uint32)
    compressed = ~np.array(plain, bool)
    return ZipTable(file=file, names=names, offsets=begins, lengths=lengths, compressed=compressed, sums=sums)


def is_zip(path: str) -> bool:
    """Whether a file begins like an archive."""
    with open_for_parser(path) as file:
        return file.read(len(_MARK)) == _MARK.tobytes()


def damaged_members(path: str, files: Files) -> Iterator[tuple[int, int, str]]:
    """Begin and end of each member that does not match the archive's directory, and what is wrong.

    All are read, which may be more than the archive's size: members can overlap.
    """
    table, expanded = zip_table(path, files), 0
    most = max(ALWAYS_READ, files.max_expansion * table.file.size)
    for number, name in enumerate(table.names):
        begin, end = int(table.offsets[number]), int(table.offsets[number] + table.lengths[number])
        try:
            with open_for_parser(path) as opened, zipfile.ZipFile(opened) as archive, archive.open(name) as member:
                while piece := member.read(PIECE_BYTES):
                    expanded += len(piece)
                    if expanded > most:
                        yield begin, end, f"{path}: {name}: its members expand to more than {most:,} bytes"
                        return
        except SourceError:
            raise
        except Exception as error:  # as above
            what = _WRONG_SUM if "CRC-32" in str(error) else str(error) or type(error).__name__
            yield begin, end, f"{path}: {name} at offset {begin:,}: {what}; {FETCH}"


def _header_bytes(file: FileId, headers: np.ndarray) -> np.ndarray:
    """The length of each member's own header; the directory does not have it."""
    if len(headers) == 0:
        return headers
    if int(headers.max()) + HEADER_BYTES > file.size:
        raise Truncated(f"{file.path}: its directory lists a member beyond its end; fetch it again")
    mapped = map_file(file.path)
    if (mapped[headers[:, None] + np.arange(4)] != _MARK).any():
        raise Corrupt(f"{file.path}: its directory lists members that are not there; fetch it again")
    sizes = mapped[headers[:, None] + np.arange(26, 30)].view("<u2").astype(np.int64)
    return np.asarray(HEADER_BYTES + sizes.sum(axis=1))


def _check_names(file: FileId, infos: Sequence[zipfile.ZipInfo]) -> None:
    """The directory has no checksum: a member whose name is damaged there would be another one, or none."""
    mapped = map_file(file.path).data
    for info in infos:
        begin = info.header_offset + HEADER_BYTES
        expected = info.orig_filename.encode("utf-8" if info.flag_bits & UTF8 else "cp437")
        if mapped[begin : begin + len(expected)] != expected:
            raise Corrupt(
                f"{file.path}: its directory has a member {info.filename!r:.200}, which is called otherwise where it "
                f"lies (offset {info.header_offset:,}); {FETCH}"
            )
