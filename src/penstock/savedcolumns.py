"""Columns of numbers about a data file, kept on disk so that the file is walked through once and not at every start.

One small file a table: a line of JSON that says whose table it is, then its columns. It is used only while the data
file has the size, the time and the first and last bytes it had. Whatever is wrong with it before its columns are asked
for, it is as if it were not there; they are mapped, and compared with their checksums, when they are asked for.

Saving is a courtesy: where the folder cannot be written, nothing is saved.
"""

import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import numpy as np

from penstock import owners
from penstock.errors import Corrupt
from penstock.extents import FileId
from penstock.handles import map_file
from penstock.urls import is_remote

MAGIC = b"penstock saved columns 1\n"
ENDS_BYTES = 4096
COLUMNS_AT = 64 * 1024
"""Columns begin here, page-aligned, so that the header can be read without them."""
_ALIGNMENT = 64


@dataclass(frozen=True)
class Saved:
    """A table on disk: its header, and its columns when asked for."""

    path: str
    header: Mapping[str, Any]
    """What was given to ``save``."""
    _columns: Mapping[str, tuple[str, list[int], int, int]]
    """Dtype, shape, offset and checksum of each."""

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def columns(self) -> dict[str, np.ndarray]:
        """The columns, mapped: the system may drop them from memory at any time. A damaged table is removed."""
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


def load(folder: str, file: FileId, name: str, *, of_any_version: bool = False) -> Saved | None:
    """What was saved under this name about this file, if it is whole and the file is the same (or was once there)."""
    path = _path(folder, file, name)
    try:
        with open(path, "rb") as saved:
            head = saved.read(COLUMNS_AT)
            found = os.fstat(saved.fileno())
        size = found.st_size
        if not head.startswith(MAGIC) or not owners.is_trusted(found):
            return None
        checksum, line = head[len(MAGIC) :].split(b"\n", 1)[0].split(b" ", 1)
        if int(checksum, 16) != zlib.crc32(line):
            return None
        about = json.loads(line)
        if about["size"] != size or not (of_any_version or about["key"] == _key(file, name)):
            return None
        return Saved(path, about["header"], about["columns"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # not there, or not ours
        return None


def save(
    folder: str, file: FileId, name: str, header: Mapping[str, Any], columns: Mapping[str, np.ndarray]
) -> Saved | None:
    """Keep columns, and a little that JSON can hold, for the next time; None if that cannot be done."""
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
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with _whole(path) as saved:
            saved.write(head)
            for key, array in arrays.items():
                saved.seek(described[key][2])
                saved.write(array.data)
            saved.truncate(end)
    except OSError:
        return None
    return load(folder, file, name)


def _key(file: FileId, name: str) -> str:
    """Whose table: the file's place, size and time, what it begins and ends with, and the table's name.

    What a server calls the version of a file stands for what it begins and ends with.
    """
    if is_remote(file.path):
        if not file.etag and not file.mtime_ns:
            raise OSError("a file whose server tells neither ETag nor time may be another one tomorrow")
        return hashlib.sha256(repr((file.path, file.size, file.mtime_ns, file.etag, name)).encode()).hexdigest()
    head = tail = b""  # of a folder, whose table knows itself whether it is current
    if not os.path.isdir(file.path):
        with open(file.path, "rb") as data:
            head = data.read(ENDS_BYTES)
            data.seek(max(0, file.size - ENDS_BYTES))
            tail = data.read(ENDS_BYTES)
    parts = (os.path.abspath(file.path), file.size, file.mtime_ns, name, head, tail)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _path(folder: str, file: FileId, name: str) -> str:
    place = file.path if is_remote(file.path) else os.path.abspath(file.path)
    which = hashlib.sha256(repr((place, name)).encode()).hexdigest()[:32]
    return os.path.join(folder, f"{which}.table")


@contextmanager
def _whole(path: str) -> Iterator[BinaryIO]:
    """A file to write, under its name only when it is complete."""
    descriptor, partial = tempfile.mkstemp(dir=os.path.dirname(path), suffix=".partial")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
