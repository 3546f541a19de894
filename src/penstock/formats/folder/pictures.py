"""Folders of pictures: one file per sample, opened when it is read, decoded straight into the batch.

The label of ``photos/cat/01.jpg`` is the number of ``cat`` among the sorted folders of ``photos``, as in torchvision's
ImageFolder. If the folder contains a table (``metadata.csv`` or the only one of its kind), its rows are the samples, in
its order, and its columns are fields. If there are no pictures, the files may be arrays (npy).
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import field as dataclass_field
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.file_id import FileId
from penstock.base.spec import IN_MEMORY, MANIFEST
from penstock.dataset.combine import Joined, Part
from penstock.dataset.extent_store import ExtentStore
from penstock.dataset.store import Store
from penstock.errors import DataError, Missing
from penstock.formats.folder import listing, tables
from penstock.formats.folder.listing import FileList
from penstock.formats.folder.tables import ColumnStore
from penstock.formats.sample_fields import count_pixels, first_kind, largest_picture
from penstock.read import kinds, pictures
from penstock.read.extents import LooseFiles
from penstock.read.kinds import Kind, check_length

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions


# If a folder has files like these, its pictures are not the dataset.
OTHER_DATA = frozenset({"h5", "hdf5", "tar", "npz", "nii", "gz", "mdb", "lmdb", "arrow"})


def is_folder_of_pictures(path: str) -> bool:
    """Whether a folder has pictures in it, or arrays, and no files that are datasets of their own."""
    if not os.path.isdir(path) or listing.find_any(path, OTHER_DATA.__contains__, depth=0):
        return False
    return listing.find_any(path, lambda ending: _is_picture(ending) or ending == "npy")


def _is_picture(ending: str) -> bool:
    return ending in pictures.EXTENSIONS


def open_folder(path: str, options: "OpenOptions") -> Store:
    """The samples of one folder."""
    folder = options.index_folder
    files, field, ending = listing.list_files(path, _is_picture, folder, "pictures"), "image", "jpg"
    if not len(files):
        files, field, ending = listing.list_files(path, "npy".__eq__, folder, "arrays"), "data", "npy"
    if files.left_out and options.on_error == "raise":
        raise files.left_out[0]
    if not len(files):
        raise Missing(f"{path}: no pictures in it or in its folders ({files.passed_over:,} files of other kinds)")
    if options.files.manifest is not None:
        options.files.manifest.check_there(path)
    columns = _read_columns(files, options)
    fields = options.fields or (field, *columns.store.fields)
    for name in fields:
        if name != field and name not in columns.store.fields:
            raise Missing(f"{path}: no field {name!r}; it has {', '.join(map(repr, (field, *columns.store.fields)))}")
    if options.fields is None:
        for other, count in files.beside.items():
            options.leave_out(f"*.{other}", f"{count:,} files beside those of {field!r}, of another kind")
        for name, why in columns.fields_left_out.items():
            options.leave_out(name, why)
    parts = {}
    if field in fields:
        known_by = field if options.members.decoder(field) is not None else ending
        array = _make_members(files, field, partial(kinds.kind_of, known_by, wanted=options.members), options)
        parts["files"] = Part(ExtentStore({field: array}, options.files), columns.rows, {field: field})
    beside = [name for name in fields if name != field]
    if beside:
        parts["columns"] = Part(columns.store.with_fields(beside), None, {name: name for name in beside})
    store = Joined(parts)
    store.left_out = (*files.left_out, *columns.left_out)
    return store


@dataclass(frozen=True)
class _SampleColumns:
    """Labels, or the columns of a table, by sample."""

    store: ColumnStore
    rows: np.ndarray | None = None
    """The file of each sample; None if every file is a sample."""
    left_out: tuple[DataError, ...] = ()
    fields_left_out: Mapping[str, str] = dataclass_field(default_factory=dict)
    """Columns of the table that cannot be fields, and why."""


def _read_columns(files: FileList, options: "OpenOptions") -> _SampleColumns:
    table = tables.find_table(files.root)
    by = "" if options.files.manifest is None else MANIFEST
    if table is not None:
        options.files.compare_whole(table)
        read = tables.read_table(table, files)
        if read.left_out and options.on_error == "raise":
            raise read.left_out[0]
        store = ColumnStore(read.columns, len(read.rows), (), by, tables.reading_bytes(table, files))
        return _SampleColumns(store, read.rows, read.left_out, read.fields_left_out)
    if not files.top_names or files.tops.min() < 0:  # some are in no folder
        return _SampleColumns(ColumnStore({}, len(files)))
    return _SampleColumns(ColumnStore({"label": files.tops.astype(np.int64)}, len(files), files.top_names, IN_MEMORY))


def _make_members(files: FileList, name: str, kind_of: "partial[Kind]", options: "OpenOptions") -> LooseFiles:
    where = FileId(files.root, int(files.sizes.sum()), 0, 0)
    offsets = np.broadcast_to(np.int64(0), len(files))
    array = LooseFiles(
        where, name, stored=np.dtype(np.uint8), shape=(), rows=len(files), offsets=offsets, lengths=files.sizes,
        keys=files.names, kind=None, table_bytes=files.index_bytes, pattern="*", layout="files of a folder",
        max_bytes=options.members.max_member_bytes, mtimes=files.mtimes, inodes=files.inodes, saved=files.saved,
    )  # fmt: skip
    kind = first_kind(
        options,
        range(array.rows),
        lambda row: kind_of(_read_file(array, row, options)),
        place=lambda row: array.file_at(row).path,
        largest_picture=lambda: _largest_picture(array, options),
    )
    assert kind is not None, "a folder without files was refused before"
    return replace(array, stored=kind.dtype, shape=kind.shape, kind=kind)


def _read_file(array: LooseFiles, row: int, options: "OpenOptions") -> bytes:
    check_length(int(array.lengths[row]), options.members.max_member_bytes)
    data = np.empty(int(array.lengths[row]), np.uint8)
    with options.files.lend(array.file_at(row)) as handle:
        handle.read_into(0, data)
    return data.tobytes()


def _largest_picture(array: LooseFiles, options: "OpenOptions") -> int:
    what = f"pixels of the largest picture of {array.describe()}, {crc32(np.ascontiguousarray(array.mtimes).data)}"
    return largest_picture(
        options, FileId(os.path.abspath(array.file.path), 0, 0, 0), what, _list_pixels(array, options)
    )


def _list_pixels(array: LooseFiles, options: "OpenOptions") -> Iterator[int]:
    """Of each picture."""
    for row in range(array.rows):
        with options.files.lend(array.file_at(row)) as handle:
            yield count_pixels(handle, 0, int(array.lengths[row]))
