"""Columns of numbers about a data file, saved on disk so that the file is walked through once and not at every start.

One small file per table: a line of JSON that identifies the data file, then the columns. The table is used only while
the data file has the same size, time, first and last bytes. A table with a bad header counts as absent. Columns are
mapped, and compared with their checksums, when they are first needed.

Saving is optional: if the folder cannot be written, or other users could replace its files, nothing is saved.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.file_id import FileId
from penstock.base.urls import is_remote
from penstock.errors import Corrupt
from penstock.files import locks
from penstock.files.atomic import atomic_write
from penstock.files.mapping import map_file
from penstock.files.retry import open_regular

MAGIC = b"penstock saved columns 1\n"
ENDS_BYTES = 4096
COLUMNS_AT = 64 * 1024
"""Columns begin here, page-aligned, so that the header can be read without them."""
_ALIGNMENT = 64


@dataclass(frozen=True)
class SavedTable:
    """A table on disk: its header, and its columns on demand."""

    path: str
    header: Mapping[str, Any]
    """As given to ``save``."""
    _columns: Mapping[str, tuple[str, list[int], int, int]]
    """Dtype, shape, offset and checksum of each."""

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def columns(self) -> dict[str, np.ndarray]:
        """The columns, mapped, so that the system may drop them from memory. A damaged table is removed."""
        found: dict[str, np.ndarray] = {}
        try:
            mapped = map_file(self.path)
            for name, (dtype, shape, begin, checksum) in self._columns.items():
                stored = mapped[begin : begin + prod(shape) * np.dtype(dtype).itemsize]
                if zlib.crc32(stored.data) != checksum:
                    raise Corrupt(f"checksum of {name}")
                found[name] = stored.view(dtype).reshape(shape)
        except (OSError, ValueError, TypeError, Corrupt) as error:
            with suppress(OSError):
                os.unlink(self.path)
            raise Corrupt(
                f"{self.path}: the saved table is damaged ({error}) and was removed; open the dataset again to make a "
                f"new one"
            ) from error
        return found


def load(folder: str, file: FileId, name: str, *, of_any_version: bool = False) -> SavedTable | None:
    """The table saved under this name for this file, if it is complete and the file has not changed."""
    path = _path(folder, file, name)
    if locks.why_distrusted(folder):
        return None
    try:
        with open(path, "rb", opener=open_regular) as saved:
            magic, header = saved.read(len(MAGIC)), saved.readline(COLUMNS_AT)
            found = os.fstat(saved.fileno())
        size = found.st_size
        if magic != MAGIC or not locks.is_trusted(found):
            return None
        checksum, line = header.rstrip(b"\n").split(b" ", 1)
        if int(checksum, 16) != zlib.crc32(line):
            return None
        about = json.loads(line)
        if about["size"] != size or not (of_any_version or about["key"] == _key(file, name)):
            return None
        return SavedTable(path, about["header"], about["columns"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # not there, or not ours
        return None


def save(
    folder: str, file: FileId, name: str, header: Mapping[str, Any], columns: Mapping[str, np.ndarray]
) -> SavedTable | None:
    """Save columns and a small JSON header for the next time; None if that is not possible."""
    arrays = {key: np.ascontiguousarray(column) for key, column in columns.items()}
    described: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    end = COLUMNS_AT
    for key, array in arrays.items():
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        described[key] = (str(array.dtype), array.shape, begin, zlib.crc32(array.data))
        end = begin + array.nbytes
    path = _path(folder, file, name)
    try:
        about = {"key": _key(file, name), "size": end, "header": dict(header), "columns": described}
        line = json.dumps(about).encode()
        head = MAGIC + b"%08x %s\n" % (zlib.crc32(line), line)
        if len(head) > COLUMNS_AT:
            return None
        locks.make_folder(folder)
        if locks.why_distrusted(folder):
            return None
        with atomic_write(path) as saved:
            saved.write(head)
            for key, array in arrays.items():
                saved.seek(described[key][2])
                saved.write(array.data)
            saved.truncate(end)
    except OSError:
        return None
    return load(folder, file, name)


def _key(file: FileId, name: str) -> str:
    """Identifies a version of a file: path, size, time, first and last bytes (for remote files: ETag), table name."""
    if is_remote(file.path):
        if not file.etag and not file.mtime_ns:
            raise OSError("without ETag and time, a remote file may be another one tomorrow")
        return hashlib.sha256(repr((file.kept_as, file.size, file.mtime_ns, file.etag, name)).encode()).hexdigest()
    head = tail = b""  # for a folder, its table shows whether it is current
    if not os.path.isdir(file.path):
        with open(file.path, "rb", opener=open_regular) as data:
            head = data.read(ENDS_BYTES)
            data.seek(max(0, file.size - ENDS_BYTES))
            tail = data.read(ENDS_BYTES)
    parts = (file.kept_as, file.size, file.mtime_ns, name, head, tail)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _path(folder: str, file: FileId, name: str) -> str:
    which = hashlib.sha256(repr((file.kept_as, name)).encode()).hexdigest()[:32]
    return os.path.join(folder, f"{which}.table")


def forget(saved: str) -> None:
    """Remove a saved table that turned out to be outdated."""
    with suppress(OSError):
        os.unlink(saved)
