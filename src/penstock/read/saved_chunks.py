"""Chunk tables saved on disk, so that a file of many chunks is walked through once and not at every start."""

import os
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from penstock.base import fork
from penstock.base.file_id import FileId
from penstock.files import locks
from penstock.files import saved as saved_tables
from penstock.files.saved import SavedTable
from penstock.read.extents import ChunkTable, KnownTable


def default_folder() -> str:
    """``$PENSTOCK_CACHE/index``, or the user's cache folder."""
    if chosen := os.environ.get("PENSTOCK_CACHE"):
        return os.path.join(chosen, "index")
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or os.path.expanduser(r"~\AppData\Local")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(base, "penstock", "index")


def folder_of(index_dir: str | os.PathLike[str] | Literal[False] | None) -> str | None:
    """The folder that a caller means by ``index_dir=``; one that was named must not be writable by others."""
    if index_dir is False or index_dir is None:
        return None if index_dir is False else os.path.abspath(default_folder())
    folder = os.path.abspath(index_dir)
    locks.check_folder(folder, f"index_dir={folder!r}")
    return folder


def load(folder: str, file: FileId, name: str) -> "SavedChunkTable | None":
    """The table of this array of this file, if a whole and current one was saved."""
    return _open_saved(saved_tables.load(folder, file, name))


def save(
    folder: str,
    file: FileId,
    name: str,
    table: KnownTable,
    *,
    from_chunks: int,
    about: Mapping[str, Any] | None = None,
) -> ChunkTable:
    """Save a table of ``from_chunks`` or more for the next time; returns the saved one, else the given one.

    ``about`` says what the chunks are, as JSON: a format that finds it again need not parse the file's own metadata.
    """
    if table.offsets.size < from_chunks:
        return table
    header = {
        "shape": table.shape,
        "length": None if isinstance(table.lengths, np.ndarray) else table.lengths,
        "longest": table.longest,
        "stored_bytes": table.stored_bytes,
        "missing": table.missing,
        "end": table.end,
        "about": dict(about or {}),
    }
    columns = {"offsets": table.offsets, "lengths": table.lengths, "skipped": table.skipped}
    arrays = {key: column for key, column in columns.items() if isinstance(column, np.ndarray)}
    return _open_saved(saved_tables.save(folder, file, name, header, arrays)) or table


def _open_saved(saved: SavedTable | None) -> "SavedChunkTable | None":
    if saved is None:
        return None
    try:
        return SavedChunkTable(saved)
    except (ValueError, KeyError, TypeError):  # not a header of ours
        return None


class SavedChunkTable:
    """A table on disk, mapped when it is first needed."""

    def __init__(self, saved: SavedTable) -> None:
        self._saved, header = saved, saved.header
        blocks, pieces = header["shape"]
        self.shape = (int(blocks), int(pieces))
        self.longest, self.stored_bytes = int(header["longest"]), int(header["stored_bytes"])
        self.missing, self.end = int(header["missing"]), int(header["end"])
        self.about: Mapping[str, Any] = header.get("about", {})
        """As given to ``save``; empty in tables of earlier versions."""
        self.has_skipped = "skipped" in saved.names
        if "offsets" not in saved.names or ("lengths" in saved.names) != (header["length"] is None):
            raise ValueError("columns of something else")
        self._known: KnownTable | None = None
        self._mapping = fork.Lock()

    folder = checked_by = ""
    index_bytes = 0  # mapped: the system may drop it at any time

    def __reduce__(self) -> tuple[type, tuple[SavedTable]]:
        return type(self), (self._saved,)

    def find(self, block: int, pieces: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        if self._known is None:
            with self._mapping:
                self._known = self._known or self._mapped()
        return self._known.find(block, pieces)

    def sums(self, block: int, pieces: np.ndarray | slice) -> None:
        return None

    def _mapped(self) -> KnownTable:
        columns, length = self._saved.columns(), self._saved.header["length"]
        return KnownTable(
            columns["offsets"], columns["lengths"] if length is None else int(length), columns.get("skipped")
        )
