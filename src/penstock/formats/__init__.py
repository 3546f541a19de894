"""The file formats, and the names that a new one needs, besides ``penstock.errors`` and ``penstock.testing``."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.base.file_id import FileId
    from penstock.base.scratch import borrow
    from penstock.base.spec import FieldSpec, Origin
    from penstock.dataset.extent_store import ExtentStore
    from penstock.dataset.sliced import Layout, SlicedStore
    from penstock.dataset.store import Store
    from penstock.files.files import Files
    from penstock.formats.registry import Format, OpenOptions
    from penstock.read.chunk_files import FileTable, ShardTable
    from penstock.read.extents import Chunks, Contiguous, KnownTable, Members

__all__ = [
    "Chunks", "Contiguous", "ExtentStore", "FieldSpec", "FileId", "FileTable", "Files", "Format", "KnownTable",
    "Layout", "Members", "OpenOptions", "Origin", "ShardTable", "SlicedStore", "Store", "borrow",
]  # fmt: skip

# Each name is imported on first use: the modules of this package import each other.
_HOMES = {
    "base.file_id": ("FileId",),
    "base.scratch": ("borrow",),
    "base.spec": ("FieldSpec", "Origin"),
    "dataset.sliced": ("Layout", "SlicedStore"),
    "dataset.extent_store": ("ExtentStore",),
    "dataset.store": ("Store",),
    "files.files": ("Files",),
    "formats.registry": ("Format", "OpenOptions"),
    "read.chunk_files": ("FileTable", "ShardTable"),
    "read.extents": ("Chunks", "Contiguous", "KnownTable", "Members"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'penstock.formats' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"penstock.{_HOME_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
