"""Which format reads what: by the first bytes or what a folder holds, then by the name.

Other packages add theirs by entry point.

A format is a frozen value and one function from a path to a store. See ``formats/npy.py`` for the smallest one.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import chain
from typing import Any, Literal

from penstock.errors import ConfigError
from penstock.fileio import Files
from penstock.kinds import Wanted
from penstock.store import Store
from penstock.urls import base_name, is_remote

ENTRY_POINT_GROUP = "penstock.formats"


@dataclass(frozen=True)
class OpenOptions:
    """What the caller of ``open`` asked for."""

    fields: tuple[str, ...] | None = None
    allow_fill: bool = False
    """Whether the fill value stands for what was never written; it is an error otherwise, whatever the format says."""
    files: Files = field(default_factory=Files)
    row_axis: int | Mapping[str, int] = 0
    swmr: bool = False
    on_error: Literal["raise", "skip"] = "raise"
    index_folder: str | None = None
    """Where tables of many chunks are kept; None keeps none."""
    allow_external: tuple[str, ...] = ()
    """Folders that an HDF5 file may refer to besides its own."""
    members: Wanted = field(default_factory=Wanted)
    """What pictures, text and the like become, where samples are files."""

    def row_axis_of(self, name: str) -> int:
        """The axis of the rows of one dataset."""
        return self.row_axis if isinstance(self.row_axis, int) else self.row_axis.get(name, 0)


@dataclass(frozen=True)
class Format:
    """How files or folders of one kind are recognised and opened."""

    name: str
    suffixes: tuple[str, ...]
    magic: bytes
    open: Callable[[str, OpenOptions], Store]
    magic_at: int = 0
    recognises: Callable[[str], bool] | None = None
    """Asked of a folder, or of a file that begins right, where first bytes alone do not tell."""
    folders: bool = False
    """Whether a folder can be one."""
    sign: str = ""
    """What is looked for, in words, where that is not its first bytes."""
    reads_itself: bool = False
    """Whether all its bytes come through ``Files``, which holds them against a manifest as they are read; else whole
    files are, when they are opened."""

    def begins(self, head: bytes) -> bool:
        """Whether a file with these first bytes is of this kind."""
        return bool(self.magic) and head.startswith(self.magic, self.magic_at)

    def is_kind_of(self, path: str, head: bytes | None) -> bool:
        """Whether this is one, by its content; a folder has no first bytes."""
        if head is None:
            return self.folders and self.recognises is not None and self.recognises(path)
        if self.recognises is not None and is_remote(path):
            return self.begins(head) and self.is_named(path)
        return self.begins(head) and (self.recognises is None or self.recognises(path))

    def is_named(self, path: str) -> bool:
        """Whether it has the name of one."""
        return base_name(path.rstrip("/")).lower().endswith(self.suffixes)

    def __str__(self) -> str:
        at = f" at {self.magic_at}" if self.magic_at else ""
        looked_for = self.sign or (f"bytes {self.magic!r}{at}" if self.magic else "")
        return f"{self.name} ({', '.join(filter(None, [' '.join(self.suffixes), looked_for]))})"


def _in(module: str, function: str) -> Callable[..., Any]:
    """A function of a format's module, imported when it is first called: there are many, and a program needs few."""

    def call(*args: Any) -> Any:
        return getattr(import_module(f"penstock.formats.{module}"), function)(*args)

    return call


ZIP = b"PK\x03\x04"
COMPRESSED_TAR = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst")

BUILT_IN = (
    Format(
        "hdf5", (".h5", ".hdf5", ".hdf", ".he5", ".mat", ".nwb"), b"\x89HDF\r\n\x1a\n", _in("hdf5", "open_file"),
        reads_itself=True,
    ),
    Format("npy", (".npy",), b"\x93NUMPY", _in("npy", "open_file"), reads_itself=True),
    Format("tar", (".tar",), b"ustar", _in("tar", "open_file"), magic_at=257, reads_itself=True),
    Format("compressed tar", COMPRESSED_TAR, b"", _in("tar", "open_compressed")),
    Format(
        "npz", (".npz",), ZIP, _in("npz", "open_file"), recognises=_in("npz", "is_npz"),
        sign="a zip archive of .npy files",
    ),
    Format(
        "zarr", (".zarr",), ZIP, _in("zarr", "open_store"), recognises=_in("zarr", "is_store"), folders=True,
        sign="a folder or zip archive with zarr.json, .zgroup or .zarray", reads_itself=True,
    ),
    Format("nifti", (".nii",), b"n+1\0", _in("nifti", "open_file"), magic_at=344, reads_itself=True),
    Format("nifti-2", (), b"n+2\0", _in("nifti", "open_file"), magic_at=4, reads_itself=True),
    Format(
        "gzipped nifti", (".nii.gz",), b"\x1f\x8b", _in("nifti", "open_gzipped"), recognises=_in("nifti", "is_gzipped")
    ),
    Format("parquet", (".parquet", ".pq"), b"PAR1", _in("tables", "open_parquet")),
    Format("arrow", (".arrow", ".feather"), b"ARROW1", _in("tables", "open_arrow")),
    Format(
        "lmdb", (".mdb", ".lmdb"), b"\xde\xc0\xef\xbe", _in("lmdb", "open_file"), magic_at=16,
        recognises=_in("lmdb", "is_database"), folders=True, sign="data.mdb in a folder, or bytes of it",
        reads_itself=True,
    ),
    Format(
        "tiledb", (".tiledb", ".tdb"), b"", _in("tiledb", "open_folder"), recognises=_in("tiledb", "is_array"),
        folders=True,
    ),
    Format(  # the last of those for folders: others may hold pictures too
        "pictures", (), b"", _in("folders", "open_folder"), folders=True,
        recognises=_in("folders", "is_folder_of_pictures"), sign="a folder with pictures in it", reads_itself=True,
    ),
)  # fmt: skip


def formats() -> Iterator[Format]:
    """All known formats: ours, then those that installed packages register, asked for only if none of ours will do."""
    yield from BUILT_IN
    yield from of_others()


@cache
def of_others() -> Sequence[Format]:
    """Those that installed packages register."""
    from importlib.metadata import entry_points  # takes a quarter of the time that importing penstock takes

    return tuple(_loaded(entry) for entry in entry_points(group=ENTRY_POINT_GROUP))


def _loaded(entry: Any) -> Format:
    found = entry.load()
    if not isinstance(found, Format):
        raise ConfigError(
            f"the entry point {entry.name!r} of {ENTRY_POINT_GROUP!r} ({entry.value}) is {type(found).__name__}: "
            f"expected a Format. Mend or uninstall the package that has it"
        )
    return found


def folder_format(path: str) -> Format | None:
    """The format of a folder that is opened as one thing, if it is of such a kind."""
    by_content = (known for known in formats() if known.is_kind_of(path, None))
    by_name = (known for known in formats() if known.folders and known.is_named(path))
    return next(chain(by_content, by_name), None)


def tried() -> str:
    """What is known here, and what it is recognised by."""
    return ", ".join(map(str, formats()))


def format_of(path: str, files: Files) -> Format:
    """The format of an existing file or folder."""
    if is_remote(path):
        for known in formats():
            if known.folders and known.is_named(path):
                return known
    if os.path.isdir(path):
        found = folder_format(path)
        if found is None:
            raise ConfigError(f"{path}: a folder of no format known here. Tried, and expected one of: {tried()}")
        return found
    head = files.first_bytes(path)
    by_content = (known for known in formats() if known.is_kind_of(path, head))
    by_name = (known for known in formats() if known.is_named(path))
    for known in chain(by_content, by_name):
        return known
    raise ConfigError(
        f"{path}: not a format known here, neither by its first bytes ({head[:8]!r}) nor by its name. Tried, and "
        f"expected one of: {tried()}"
    )
