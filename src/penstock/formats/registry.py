"""Finds the format of a file or folder: by its first bytes or its content, then by its name.

A format is a frozen value and one function from a path to a store; ``formats/npy.py`` is the smallest. Other packages
add theirs by entry point.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache
from importlib import import_module
from itertools import chain
from typing import Any, Literal

from penstock.base.dataclass import dataclass
from penstock.base.urls import base_name, is_remote
from penstock.dataset.store import Store
from penstock.errors import ConfigError, Missing
from penstock.files.files import Files
from penstock.read.kinds import MemberOptions

ENTRY_POINT_GROUP = "penstock.formats"


class NoSamples(Missing):
    """A file has no samples. Among others it is left out, and listed; alone it is an error."""


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """The arguments of ``open``, as formats need them."""

    fields: tuple[str, ...] | None = None
    allow_fill: bool = False
    """Deliver the fill value for chunks that were never written; otherwise they are an error."""
    files: Files = field(default_factory=Files)
    row_axis: int | Mapping[str, int] = 0
    swmr: bool = False
    on_error: Literal["raise", "skip"] = "raise"
    index_folder: str | None = None
    """Where large chunk tables are saved; None saves none."""
    allow_external: tuple[str, ...] = ()
    """Folders that an HDF5 file may refer to, besides its own."""
    members: MemberOptions = field(default_factory=MemberOptions)
    """How pictures, text and the like are decoded, if samples are files."""
    fields_left_out: dict[str, str] = field(default_factory=dict, compare=False)
    """Filled by formats: fields that cannot be delivered, and why."""

    def leave_out(self, name: str, why: str) -> None:
        """Report a field that cannot be delivered and was not asked for by name; ``open`` warns of it."""
        self.fields_left_out.setdefault(name, why)

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
    """Called for a folder, or for a file that begins with ``magic``, if first bytes alone do not decide."""
    folders: bool = False
    """Whether a folder can be of this format."""
    sign: str = ""
    """What ``recognises`` looks for, as text for error messages."""
    reads_itself: bool = False
    """Whether all its bytes come through ``Files``, which compares them with a manifest as they are read; otherwise
    whole files are compared when they are opened."""
    has_row_axis: bool = False
    """Whether samples may lie along any axis, which ``OpenOptions.row_axis_of`` gives; otherwise it is refused."""

    def begins(self, head: bytes) -> bool:
        """Whether a file with these first bytes may be of this format."""
        return bool(self.magic) and head.startswith(self.magic, self.magic_at)

    def matches(self, path: str, head: bytes | None) -> bool:
        """Whether a file or folder is of this format, by its content; ``head`` is None for a folder."""
        if head is None:
            return self.folders and self.recognises is not None and self.recognises(path)
        if self.recognises is not None and is_remote(path):
            return self.begins(head) and self.is_named(path)
        return self.begins(head) and (self.recognises is None or self.recognises(path))

    def is_named(self, path: str) -> bool:
        """Whether the name has a suffix of this format."""
        return base_name(path.rstrip("/")).lower().endswith(self.suffixes)

    def __str__(self) -> str:
        at = f" at {self.magic_at}" if self.magic_at else ""
        recognised_by = self.sign or (f"bytes {self.magic!r}{at}" if self.magic else "")
        return f"{self.name} ({', '.join(filter(None, [' '.join(self.suffixes), recognised_by]))})"


def _lazy(module: str, function: str) -> Callable[..., Any]:
    """A function of a format's module, which is imported at the first call: most programs need one or two formats."""

    def call(*args: Any) -> Any:
        return getattr(import_module(f"penstock.formats.{module}"), function)(*args)

    return call


ZIP = b"PK\x03\x04"
COMPRESSED_TAR = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst")

BUILT_IN = (
    Format(
        "hdf5", (".h5", ".hdf5", ".hdf", ".he5", ".mat", ".nwb"), b"\x89HDF\r\n\x1a\n", _lazy("hdf5", "open_file"),
        reads_itself=True, has_row_axis=True,
    ),
    Format("npy", (".npy",), b"\x93NUMPY", _lazy("npy", "open_file"), reads_itself=True),
    Format("tar", (".tar",), b"ustar", _lazy("tar.store", "open_file"), magic_at=257, reads_itself=True),
    Format("compressed tar", COMPRESSED_TAR, b"", _lazy("tar.store", "open_compressed")),
    Format(
        "npz", (".npz",), ZIP, _lazy("npz", "open_file"), recognises=_lazy("npz", "is_npz"),
        sign="a zip archive of .npy files",
    ),
    Format(
        "zarr", (".zarr",), ZIP, _lazy("zarr", "open_store"), recognises=_lazy("zarr", "is_store"), folders=True,
        sign="a folder or zip archive with zarr.json, .zgroup or .zarray", reads_itself=True, has_row_axis=True,
    ),
    Format("nifti", (".nii",), b"n+1\0", _lazy("nifti", "open_file"), magic_at=344, reads_itself=True),
    Format("nifti-2", (), b"n+2\0", _lazy("nifti", "open_file"), magic_at=4, reads_itself=True),
    Format(
        "gzipped nifti", (".nii.gz",), b"\x1f\x8b", _lazy("nifti", "open_gzipped"),
        recognises=_lazy("nifti", "is_gzipped"),
    ),
    Format("parquet", (".parquet", ".pq"), b"PAR1", _lazy("parquet", "open_parquet")),
    Format("arrow", (".arrow", ".feather"), b"ARROW1", _lazy("parquet", "open_arrow")),
    Format(
        "lmdb", (".mdb", ".lmdb"), b"\xde\xc0\xef\xbe", _lazy("lmdb", "open_file"), magic_at=16,
        recognises=_lazy("lmdb", "is_database"), folders=True, sign="data.mdb in a folder, or bytes of it",
        reads_itself=True,
    ),
    Format(
        "tiledb", (".tiledb", ".tdb"), b"", _lazy("tiledb", "open_folder"), recognises=_lazy("tiledb", "is_array"),
        folders=True, has_row_axis=True,
    ),
    Format(  # the last one for folders: folders of other formats may hold pictures too
        "pictures", (), b"", _lazy("folder.pictures", "open_folder"), folders=True,
        recognises=_lazy("folder.pictures", "is_folder_of_pictures"), sign="a folder with pictures in it",
        reads_itself=True,
    ),
)  # fmt: skip


def formats() -> Iterator[Format]:
    """All formats: built in, then those of installed packages, which are looked up only if no built-in one matches."""
    yield from BUILT_IN
    yield from plugin_formats()


@cache
def plugin_formats() -> Sequence[Format]:
    """The formats that installed packages register."""
    from importlib.metadata import entry_points  # slow to import

    return tuple(_load_entry(entry) for entry in entry_points(group=ENTRY_POINT_GROUP))


def _load_entry(entry: Any) -> Format:
    found = entry.load()
    if not isinstance(found, Format):
        raise ConfigError(
            f"the entry point {entry.name!r} of {ENTRY_POINT_GROUP!r} ({entry.value}) is {type(found).__name__}: "
            f"expected a Format. Repair or uninstall the package that has it"
        )
    return found


def folder_format(path: str) -> Format | None:
    """The format of a folder that is opened as one dataset, or None."""
    by_content = (known for known in formats() if known.matches(path, None))
    by_name = (known for known in formats() if known.folders and known.is_named(path))
    return next(chain(by_content, by_name), None)


def known_formats() -> str:
    """All formats and how they are recognised, for error messages."""
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
            raise ConfigError(f"{path}: a folder of no known format. Expected one of: {known_formats()}")
        return found
    head = files.first_bytes(path)
    by_content = (known for known in formats() if known.matches(path, head))
    by_name = (known for known in formats() if known.is_named(path))
    for known in chain(by_content, by_name):
        return known
    raise ConfigError(
        f"{path}: of no known format, neither by its first bytes ({head[:8]!r}) nor by its name. "
        f"Expected one of: {known_formats()}"
    )
