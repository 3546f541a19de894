"""Tar archives as WebDataset writes them: one pass over the headers, then every sample by its position.

Arrays (npy), pictures and whole numbers become arrays; text, JSON and other things of no fixed size come in lists. What
is not known by its name is read if it is asked for, as bytes.
"""

from functools import partial
from typing import TYPE_CHECKING

from penstock.base.file_id import FileId
from penstock.dataset.extent_store import ExtentStore
from penstock.dataset.store import Store
from penstock.errors import Missing, Truncated
from penstock.files import saved as saved_tables
from penstock.formats.registry import NoSamples
from penstock.formats.sample_fields import SampleFields
from penstock.formats.tar import samples as tar_samples
from penstock.formats.tar.samples import SampleTable
from penstock.formats.tar.walk import walk
from penstock.read import kinds
from penstock.read.extents import Extents

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions

_EXPANDED = "size of a compressed archive, expanded"


def open_file(path: str, options: "OpenOptions") -> Store:
    """The samples of one archive."""
    return _open(options.files.identify(path), options)


def open_compressed(path: str, options: "OpenOptions") -> Store:
    """The samples of one compressed archive, of which an expanded copy is kept in the cache."""
    files, folder = options.files, options.index_folder
    packed = files.identify(path)
    saved = None if folder is None else saved_tables.load(folder, packed, _EXPANDED)
    size = None if saved is None else saved.header.get("bytes")
    file = files.expand(path, size if isinstance(size, int) else None)
    if folder is not None and saved is None:
        saved_tables.save(folder, packed, _EXPANDED, {"bytes": file.size}, {})
    return _open(file, options)


def _open(file: FileId, options: "OpenOptions") -> Store:
    path, table = file.path, _load_table(file, options)
    if table.left_out and options.on_error == "raise":
        raise table.left_out[0]
    if not table.samples:
        raise NoSamples(f"{path}: no samples; its members are {_describe_fields(table)}")
    names = options.fields or tuple(name for name in table.fields if kinds.is_known(name, options.members))
    if not names:
        raise Missing(
            f"{path}: no arrays, pictures, numbers or text; its members are {_describe_fields(table)}. Choose some of "
            f"them with fields=, to have their bytes"
        )
    if options.fields is None:
        for name in table.fields:
            if name not in names:
                options.leave_out(name, kinds.why_unknown(name))
    arrays: dict[str, Extents] = {}
    for name in names:
        if name not in table.fields:
            raise Missing(f"{path}: no field {name!r}; its members are {_describe_fields(table)}")
        kind_of = partial(kinds.kind_of, name, wanted=options.members)
        arrays[name] = SampleFields(file, table, options).members(name, table.fields.index(name), kind_of)
    store = ExtentStore(arrays, options.files)
    store.left_out = table.left_out
    return store


def _load_table(file: FileId, options: "OpenOptions") -> SampleTable:
    folder = options.index_folder
    found = None if folder is None else tar_samples.load(folder, file)
    if found is not None:
        return found
    with options.files.lend_in_order(file) as handle:
        try:
            table = tar_samples.group(walk(handle))
        except Truncated as error:
            left = tar_samples.describe_left(folder, file) if folder is not None else ""
            if not left:
                raise
            raise Truncated(f"{error}. By an index of it from before, {left} are whole") from error
    return table if folder is None else tar_samples.save(folder, file, table)


def _describe_fields(table: SampleTable) -> str:
    return ", ".join(map(repr, table.fields)) or "none that belong to a sample"
