"""Chunk tables kept on disk, so that a file of many chunks is walked through once and not at every start.

One small file a table: a line of JSON that says whose table it is, then its columns. A saved table is used only while
the data file has the size, the time and the first and last bytes it had; it is mapped when it is first needed, and its
columns are compared with their checksums then. Whatever is wrong with it before that, it is as if it were not there.

Saving is a courtesy: where the folder cannot be written, the table stays in memory.
"""

import hashlib
import json
import os
import tempfile
import threading
import zlib
from contextlib import suppress
from typing import Any

import numpy as np

from penstock.errors import Corrupt
from penstock.extents import ChunkTable, FileId, KnownTable
from penstock.fileio import map_file

# Below so many chunks, walking through the file takes no longer than finding a saved table.
WORTH_SAVING = 4096

MAGIC = b"penstock chunk table 1\n"
ENDS_BYTES = 4096
COLUMNS_AT = 64 * 1024
"""Columns begin here, page-aligned, so that the header can be read without them."""


def default_folder() -> str:
    """``$PENSTOCK_CACHE/index``, or the user's cache folder."""
    if chosen := os.environ.get("PENSTOCK_CACHE"):
        return os.path.join(chosen, "index")
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or os.path.expanduser(r"~\AppData\Local")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(base, "penstock", "index")


def load(folder: str, file: FileId, name: str) -> "SavedTable | None":
    """The table of this array of this file, if a whole and current one was saved."""
    path = _path(folder, file, name)
    try:
        with open(path, "rb") as saved:
            head = saved.read(COLUMNS_AT)
            size = os.fstat(saved.fileno()).st_size
    except OSError:
        return None
    if not head.startswith(MAGIC):
        return None
    try:
        header = json.loads(head[len(MAGIC) :].split(b"\n", 1)[0])
        checksum = header.pop("check")
        if checksum != _checksum(header) or header["key"] != _key(file, name) or header["size"] != size:
            return None
        return SavedTable(path, header)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):  # not a header of ours
        return None


def save(folder: str, file: FileId, name: str, table: KnownTable) -> ChunkTable:
    """Keep a table for the next time; returns it as saved, or as it was if it cannot be or need not be."""
    if table.offsets.size < WORTH_SAVING:
        return table
    columns = {"offsets": table.offsets, "lengths": table.lengths, "skipped": table.skipped}
    arrays = {key: column for key, column in columns.items() if isinstance(column, np.ndarray)}
    size = COLUMNS_AT + sum(array.nbytes for array in arrays.values())
    header = {
        "key": _key(file, name),
        "size": size,
        "shape": table.shape,
        "length": None if isinstance(table.lengths, np.ndarray) else table.lengths,
        "columns": {key: [str(array.dtype), zlib.crc32(array.data)] for key, array in arrays.items()},
        "longest": table.longest,
        "stored_bytes": table.stored_bytes,
        "missing": table.missing,
        "end": table.end,
    }
    head = MAGIC + json.dumps({**header, "check": _checksum(header)}).encode() + b"\n"
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        _write_whole(folder, _path(folder, file, name), [head.ljust(COLUMNS_AT, b" "), *arrays.values()])
    except OSError:
        return table
    return load(folder, file, name) or table


class SavedTable:
    """A table on disk, mapped when it is first asked."""

    def __init__(self, path: str, header: dict[str, Any]) -> None:
        self._path, self._header = path, header
        blocks, pieces = header["shape"]
        self.shape = (int(blocks), int(pieces))
        self.longest, self.stored_bytes = int(header["longest"]), int(header["stored_bytes"])
        self.missing, self.end = int(header["missing"]), int(header["end"])
        self.some_skipped = "skipped" in header["columns"]
        self._known: KnownTable | None = None
        self._mapping = threading.Lock()

    index_bytes = 0  # mapped: the system may drop it at any time

    def __reduce__(self) -> tuple[type, tuple[str, dict[str, Any]]]:
        return type(self), (self._path, self._header)

    def find(self, block: int, pieces: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        if self._known is None:
            with self._mapping:
                self._known = self._known or self._mapped()
        return self._known.find(block, pieces)

    def _mapped(self) -> KnownTable:
        columns: dict[str, np.ndarray] = {}
        try:
            mapped, begin = map_file(self._path), COLUMNS_AT
            for name, (dtype, checksum) in self._header["columns"].items():
                end = begin + self.shape[0] * self.shape[1] * np.dtype(dtype).itemsize
                if zlib.crc32(mapped[begin:end].data) != checksum:
                    raise Corrupt(f"checksum of {name}")
                columns[name] = mapped[begin:end].view(dtype).reshape(self.shape)
                begin = end
            length = self._header["length"]
            return KnownTable(
                columns["offsets"], columns["lengths"] if length is None else int(length), columns.get("skipped")
            )
        except (OSError, ValueError, KeyError, TypeError, Corrupt) as error:
            with suppress(OSError):
                os.unlink(self._path)
            raise Corrupt(
                f"{self._path}: the saved chunk table is damaged ({error}) and was removed; open the dataset again to "
                f"make a new one"
            ) from error


def _key(file: FileId, name: str) -> str:
    """Whose table: the file's place, size and time, what it begins and ends with, and the array's name."""
    with open(file.path, "rb") as data:
        head = data.read(ENDS_BYTES)
        data.seek(max(0, file.size - ENDS_BYTES))
        tail = data.read(ENDS_BYTES)
    parts = (os.path.abspath(file.path), file.size, file.mtime_ns, name, head, tail)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _checksum(header: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def _path(folder: str, file: FileId, name: str) -> str:
    which = hashlib.sha256(repr((os.path.abspath(file.path), name)).encode()).hexdigest()[:32]
    return os.path.join(folder, f"{which}.table")


def _write_whole(folder: str, path: str, parts: list[Any]) -> None:
    """Under its name only when it is complete."""
    descriptor, partial = tempfile.mkstemp(dir=folder, suffix=".partial")
    try:
        with os.fdopen(descriptor, "wb") as file:
            for part in parts:
                file.write(part)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
