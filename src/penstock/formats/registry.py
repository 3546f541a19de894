"""Which format reads which file: by the first bytes, then by the name; other packages add theirs by entry point.

A format is a frozen value and one function from a path to a store. See ``formats/npy.py`` for the smallest one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import PurePath
from typing import Literal

from penstock.errors import ConfigError
from penstock.fileio import Files
from penstock.formats import hdf5, npy, tar
from penstock.members import Wanted
from penstock.store import Store
from penstock.urls import base_name

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
    members: Wanted = field(default_factory=Wanted)
    """What pictures, text and the like become, where samples are files."""

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

    def begins(self, head: bytes) -> bool:
        """Whether a file with these first bytes is of this kind."""
        return bool(self.magic) and head.startswith(self.magic, self.magic_at)


BUILT_IN = (
    Format("hdf5", (".h5", ".hdf5", ".hdf", ".he5", ".mat", ".nwb"), b"\x89HDF\r\n\x1a\n", hdf5.open_file),
    Format("npy", (".npy",), b"\x93NUMPY", npy.open_file),
    Format("tar", (".tar",), b"ustar", tar.open_file, magic_at=257),
)


@cache
def formats() -> Sequence[Format]:
    """All known formats: ours, then those that installed packages register."""
    from importlib.metadata import entry_points  # takes a quarter of the time that importing penstock takes

    return (*BUILT_IN, *(entry.load() for entry in entry_points(group=ENTRY_POINT_GROUP)))


def format_of(path: str, files: Files) -> Format:
    """The format of an existing file."""
    head = files.first_bytes(path)
    by_content = [known for known in formats() if known.begins(head)]
    by_name = [known for known in formats() if PurePath(base_name(path)).suffix.lower() in known.suffixes]
    for known in (*by_content, *by_name):
        return known
    known_names = ", ".join(f"{known.name} ({' '.join(known.suffixes)})" for known in formats())
    raise ConfigError(
        f"{path}: not a format known here, neither by its first bytes ({head[:8]!r}) nor by its name. "
        f"Known: {known_names}"
    )
