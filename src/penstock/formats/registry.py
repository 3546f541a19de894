"""Which format reads which file: by the first bytes, then by the name; other packages add theirs by entry point.

A format is a frozen value and one function from a path to a store. See ``formats/npy.py`` for the smallest one.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import PurePath
from typing import Any, Literal

from penstock import lmdbwalk
from penstock.errors import ConfigError, Unavailable
from penstock.fileio import Files
from penstock.formats import hdf5, lmdb, npy, tar
from penstock.store import Store

ENTRY_POINT_GROUP = "penstock.formats"


@dataclass(frozen=True)
class OpenOptions:
    """What the caller of ``open`` asked for."""

    fields: tuple[str, ...] | None = None
    allow_fill: bool = False
    files: Files = field(default_factory=Files)
    row_axis: int | Mapping[str, int] = 0
    swmr: bool = False
    on_error: Literal["raise", "skip"] = "raise"
    index_folder: str | None = None
    """Where tables of many chunks are kept; None keeps none."""
    raw: Any = None
    """What numpy takes for a dtype, for values that are plain bytes; a mapping where fields differ."""

    def row_axis_of(self, name: str) -> int:
        """The axis of the rows of one dataset."""
        return self.row_axis if isinstance(self.row_axis, int) else self.row_axis.get(name, 0)


@dataclass(frozen=True)
class Format:
    """How files of one kind are recognised and opened."""

    name: str
    suffixes: tuple[str, ...]
    magic: bytes
    open: Callable[[str, OpenOptions], Store]
    magic_at: int = 0
    is_it: Callable[[str], bool] | None = None
    """Whether a folder is of this kind, where folders can be."""

    def begins(self, head: bytes) -> bool:
        """Whether a file with these first bytes is of this kind."""
        return bool(self.magic) and head.startswith(self.magic, self.magic_at)


BUILT_IN = (
    Format("hdf5", (".h5", ".hdf5", ".hdf", ".he5", ".mat", ".nwb"), b"\x89HDF\r\n\x1a\n", hdf5.open_file),
    Format("npy", (".npy",), b"\x93NUMPY", npy.open_file),
    Format("tar", (".tar",), b"ustar", tar.open_file, magic_at=257),
    Format("lmdb", (".mdb", ".lmdb"), lmdbwalk.MAGIC, lmdb.open_file, lmdbwalk.MAGIC_AT, lmdb.is_database),
)


@cache
def formats() -> Sequence[Format]:
    """All known formats: ours, then those that installed packages register."""
    from importlib.metadata import entry_points  # takes a quarter of the time that importing penstock takes

    return (*BUILT_IN, *(entry.load() for entry in entry_points(group=ENTRY_POINT_GROUP)))


def format_of_folder(path: str) -> Format | None:
    """The format of a folder, if it is one dataset."""
    return next((known for known in formats() if known.is_it is not None and known.is_it(path)), None)


def format_of(path: str) -> Format:
    """The format of an existing file, or of a folder that is a dataset."""
    if os.path.isdir(path) and (found := format_of_folder(path)) is not None:
        return found
    try:
        with open(path, "rb") as file:
            head = file.read(512)
    except OSError as error:
        raise Unavailable(f"{path}: cannot be read ({error.strerror})") from error
    by_content = [known for known in formats() if known.begins(head)]
    by_name = [known for known in formats() if PurePath(path).suffix.lower() in known.suffixes]
    for known in (*by_content, *by_name):
        return known
    known_names = ", ".join(f"{known.name} ({' '.join(known.suffixes)})" for known in formats())
    raise ConfigError(
        f"{path}: not a format known here, neither by its first bytes ({head[:8]!r}) nor by its name. "
        f"Known: {known_names}"
    )
