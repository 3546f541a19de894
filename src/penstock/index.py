"""Chunk tables kept on disk, so that a file of many chunks is walked through once and not at every start."""

import os

import numpy as np

from penstock import forks, savedcolumns
from penstock.extents import ChunkTable, FileId, KnownTable
from penstock.savedcolumns import Saved

# Below so many chunks, walking through the file takes no longer than finding a saved table.
WORTH_SAVING = 4096


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
    return _opened(savedcolumns.load(folder, file, name))


def save(folder: str, file: FileId, name: str, table: KnownTable) -> ChunkTable:
    """Keep a table for the next time; returns it as saved, or as it was if it cannot be or need not be."""
    if table.offsets.size < WORTH_SAVING:
        return table
    header = {
        "shape": table.shape,
        "length": None if isinstance(table.lengths, np.ndarray) else table.lengths,
        "longest": table.longest,
        "stored_bytes": table.stored_bytes,
        "missing": table.missing,
        "end": table.end,
    }
    columns = {"offsets": table.offsets, "lengths": table.lengths, "skipped": table.skipped}
    arrays = {key: column for key, column in columns.items() if isinstance(column, np.ndarray)}
    return _opened(savedcolumns.save(folder, file, name, header, arrays)) or table


def _opened(saved: Saved | None) -> "SavedTable | None":
    if saved is None:
        return None
    try:
        return SavedTable(saved)
    except (ValueError, KeyError, TypeError):  # not a header of ours
        return None


class SavedTable:
    """A table on disk, mapped when it is first asked."""

    def __init__(self, saved: Saved) -> None:
        self._saved, header = saved, saved.header
        blocks, pieces = header["shape"]
        self.shape = (int(blocks), int(pieces))
        self.longest, self.stored_bytes = int(header["longest"]), int(header["stored_bytes"])
        self.missing, self.end = int(header["missing"]), int(header["end"])
        self.some_skipped = "skipped" in saved.names
        if "offsets" not in saved.names or ("lengths" in saved.names) != (header["length"] is None):
            raise ValueError("columns of something else")
        self._known: KnownTable | None = None
        self._mapping = forks.Lock()

    folder = ""
    index_bytes = 0  # mapped: the system may drop it at any time

    def __reduce__(self) -> tuple[type, tuple[Saved]]:
        return type(self), (self._saved,)

    def find(self, block: int, pieces: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        if self._known is None:
            with self._mapping:
                self._known = self._known or self._mapped()
        return self._known.find(block, pieces)

    def _mapped(self) -> KnownTable:
        columns, length = self._saved.columns(), self._saved.header["length"]
        return KnownTable(
            columns["offsets"], columns["lengths"] if length is None else int(length), columns.get("skipped")
        )
