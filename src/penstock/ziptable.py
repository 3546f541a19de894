"""Where the members of a zip archive lie: those stored as they are can be read like parts of any file."""

import zipfile
from dataclasses import dataclass

import numpy as np

from penstock.errors import Corrupt, DecodeFailed, SourceError, Truncated
from penstock.extents import FileId
from penstock.fileio import Files
from penstock.handles import map_file
from penstock.steady import open_steady
from penstock.urls import check_local

STORED = zipfile.ZIP_STORED

# A member's own header: so many bytes, with the lengths of its name and of an extra field at the end, and then those.
HEADER_BYTES = 30
_MARK = np.frombuffer(b"PK\x03\x04", np.uint8)


@dataclass(frozen=True)
class ZipTable:
    """The members of an archive, in its own order."""

    file: FileId
    names: tuple[str, ...]
    offsets: np.ndarray
    lengths: np.ndarray
    """As stored."""
    compressed: np.ndarray
    """Whether each is compressed, or encrypted."""

    def read(self, number: int, most: int) -> bytes:
        """A member, or its first ``most`` bytes, whatever it is stored as."""
        if not self.compressed[number]:
            begin = int(self.offsets[number])
            return map_file(self.file.path)[begin : begin + min(most, int(self.lengths[number]))].tobytes()
        try:
            with (
                open_steady(self.file.path) as file,
                zipfile.ZipFile(file) as archive,
                archive.open(self.names[number]) as member,
            ):
                return member.read(most)
        except SourceError:
            raise
        except Exception as error:  # zipfile and what it unpacks with raise a dozen kinds between them
            raise DecodeFailed(f"{self.file.path}: {self.names[number]}: {error}; fetch the file again") from error


def zip_table(path: str, files: Files) -> ZipTable:
    """The table of an archive, from its directory and its members' own headers."""
    check_local(path, "zip archives")
    file = files.identify(path)
    try:
        with open_steady(path) as opened, zipfile.ZipFile(opened) as archive:
            infos = [info for info in archive.infolist() if not info.filename.endswith("/")]
    except SourceError:
        raise
    except Exception as error:  # as above
        words = str(error) or type(error).__name__
        raise Truncated(
            f"{path}: not a whole zip archive ({words}); it was cut short or is damaged: fetch it again"
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
    if len(begins) and int((begins + lengths).max()) > file.size:
        worst = int(np.argmax(begins + lengths))
        raise Truncated(f"{path}: its member {infos[worst].filename!r} reaches beyond its end; fetch it again")
    return ZipTable(file, tuple(info.filename for info in infos), begins, lengths, ~np.array(plain, bool))


def _header_bytes(file: FileId, headers: np.ndarray) -> np.ndarray:
    """How long each member's own header is; the directory does not say."""
    if len(headers) == 0:
        return headers
    if int(headers.max()) + HEADER_BYTES > file.size:
        raise Truncated(f"{file.path}: its directory names a member beyond its end; fetch it again")
    mapped = map_file(file.path)
    if (mapped[headers[:, None] + np.arange(4)] != _MARK).any():
        raise Corrupt(f"{file.path}: its directory names members that are not there; fetch it again")
    sizes = mapped[headers[:, None] + np.arange(26, 30)].view("<u2").astype(np.int64)
    return np.asarray(HEADER_BYTES + sizes.sum(axis=1))
