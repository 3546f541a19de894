"""Chunked datasets made of a description: as h5py reports it, or as it was saved with the table of their chunks."""

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.base.file_id import FileId
from penstock.base.spec import without_axis
from penstock.errors import Missing, Truncated
from penstock.read import codecs, saved_chunks
from penstock.read.extents import NEVER_WRITTEN, Chunks, ChunkTable

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions


def repack_command(name: str, shape: tuple[int, ...], row_axis: int) -> str:
    """A command that rewrites a dataset with one row per chunk."""
    whole = "x".join(str(1 if axis == row_axis else size) for axis, size in enumerate(shape))
    return f"h5repack -l {name}:CHUNK={whole} OLD NEW"


def saved_as(name: str, axis: int) -> str:
    """The name of a dataset's saved table: it can be opened along several axes."""
    return f"{name} along {axis}"


def load_array(file: FileId, name: str, options: "OpenOptions") -> Chunks | None:
    """The dataset as it was described when its table was saved; None if it was not, or cannot be read now."""
    axis = options.row_axis_of(name)
    if options.index_folder is None or file.is_growing or file.is_compared:
        return None
    table = saved_chunks.load(options.index_folder, file, saved_as(name, axis))
    if table is None or not table.about:
        return None
    try:
        array = make_array(file, name, axis, table.about, table, options)
    except (KeyError, TypeError, ValueError):  # not a description of ours
        return None
    return check_table(array, options) if all(map(codecs.is_available, array.codecs)) else None


def make_array(
    file: FileId, name: str, axis: int, about: Mapping[str, Any], table: ChunkTable, options: "OpenOptions"
) -> Chunks:
    """The dataset with this description: the values of ``about`` are those of JSON."""
    shape, chunks = tuple(about["shape"]), tuple(about["chunks"])
    return Chunks(
        file=file, name=name, stored=np.dtype(about["stored"]), shape=without_axis(shape, axis), rows=shape[axis],
        rows_per_chunk=chunks[axis], chunk=without_axis(chunks, axis), table=table,
        codecs=tuple((str(codec), int(width)) for codec, width in about["codecs"]), row_axis=axis,
        remedy=repack_command(name, shape, axis), fill_text=about["fill_text"],
        fill=bytes.fromhex(about["fill"]) if options.allow_fill else None,
    )  # fmt: skip


def check_table(array: Chunks, options: "OpenOptions") -> Chunks:
    """Refuse a table with missing or truncated chunks, and name the first; with ``on_error="skip"``, reading does."""
    table = array.table
    if options.on_error == "skip":
        return array
    if table.missing and array.fill is None:
        there = f"{prod(table.shape) - table.missing:,} of {prod(table.shape):,} chunks are"
        first = _find_first(array, lambda offsets, _: offsets == NEVER_WRITTEN)
        refusal = never_written(array.file, array.name, there, array.fill_text)
        raise Missing(f"{refusal}. The first that is not: {first}")
    if table.end > array.file.size and not array.file.is_growing:
        first = _find_first(array, lambda offsets, lengths: offsets + lengths > array.file.size)
        raise Truncated(
            f"{array.file.path}: {first} reaches beyond the file's end: chunks reach to byte {table.end:,}, but the "
            f"file has only {array.file.size:,}. It was cut short, perhaps by an unfinished download or copy: fetch it "
            f'again, or pass on_error="skip" to open and Loader to leave out what cannot be read'
        )
    return array


def never_written(file: FileId, name: str, there: str, fill: object) -> Missing:
    """The error for a dataset that was only partly written."""
    return Missing(
        f"{file.path}: dataset {name!r} was never written in full ({there} there); the rest would read as the fill "
        f"value {fill}. Pass allow_fill=True to accept that"
    )


def _find_first(array: Chunks, bad: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> str:
    for block in range(array.table.shape[0]):
        offsets, lengths, _ = array.table.find(block, slice(None))
        found = np.flatnonzero(bad(offsets, lengths))
        if len(found):
            return array.piece_place(block, int(found[0]))
    return array.name
