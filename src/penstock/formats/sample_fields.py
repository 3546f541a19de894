"""From a table of samples to their fields: what archives and databases of samples share."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.file_id import FileId
from penstock.base.sizes import MiB
from penstock.errors import DataError, Missing, SchemaMismatch
from penstock.files import saved as saved_tables
from penstock.files.handles import Handle
from penstock.formats.tar.samples import NOT_THERE, SampleTable
from penstock.read import pictures
from penstock.read.extents import Members
from penstock.read.kinds import Kind, Picture, check_length

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions

# The size is within these first bytes of a picture, unless it begins with a thumbnail or a colour profile.
PICTURE_HEAD_BYTES = 2048

# The most bytes that are searched for the size.
LONGEST_HEAD_BYTES = 16 * MiB

# With on_error="skip": how many samples are tried to find the kind of a field.
MOST_TRIED = 100


@dataclass(frozen=True)
class SampleFields:
    """The samples of one file, and what the caller wants of them."""

    file: FileId
    table: SampleTable
    options: "OpenOptions"
    layout: str = "members of an archive"
    has_patterns: bool = False
    """Whether the table's fields are patterns of keys."""

    def members(self, name: str, column: int, kind_of: Callable[[bytes], Kind]) -> Members:
        """One field: all of a column, read as the kind of its first sample."""
        table, offsets = self.table, self.table.offsets[:, column]
        there = offsets != NOT_THERE
        if not there.all() and self.options.on_error == "raise":
            sample = int(np.argmin(there))
            has = [
                each for each, offset in zip(table.fields, table.offsets[sample], strict=True) if offset != NOT_THERE
            ]
            raise SchemaMismatch(
                f"{self.file.path}: sample {table.keys[sample]!r} has no {name!r} (it has {', '.join(has)}), and "
                f"{np.count_nonzero(~there) - 1:,} others have none either. Leave the field out with fields=(…), or "
                f'pass on_error="skip" to open and Loader'
            )
        kind = first_kind(
            self.options,
            np.flatnonzero(there).tolist(),
            lambda sample: kind_of(self.value(sample, column)),
            place=lambda sample: self._place(sample, column),
            largest_picture=lambda: self._largest_picture(column),
        )
        if kind is None:
            raise Missing(f"{self.file.path}: no sample has {table.fields[column]!r}")
        pattern = table.fields[column] if self.has_patterns else ""
        return Members(
            self.file, name, stored=kind.dtype, shape=kind.shape, rows=table.samples, offsets=offsets,
            lengths=table.lengths[:, column], keys=table.keys, kind=kind, table_bytes=table.index_bytes,
            pattern=pattern, layout=self.layout, max_bytes=self.options.members.max_member_bytes,
        )  # fmt: skip

    def value(self, sample: int, column: int) -> bytes:
        """The bytes of one field of one sample."""
        length = int(self.table.lengths[sample, column])
        check_length(length, self.options.members.max_member_bytes)
        data = np.empty(length, np.uint8)
        with self.options.files.lend(self.file) as handle:
            handle.read_into(int(self.table.offsets[sample, column]), data)
        return data.tobytes()

    def _place(self, sample: int, column: int) -> str:
        """Where a member is, for messages."""
        field, offset = self.table.fields[column], int(self.table.offsets[sample, column])
        name = (field if self.has_patterns else f"*.{field}").replace("*", self.table.keys[sample], 1)
        return f"{self.file.path}: {name} at offset {offset:,}"

    def _largest_picture(self, column: int) -> int:
        what = f"pixels of the largest {self.table.fields[column]}"
        return largest_picture(self.options, self.file, what, self._pixels(column))

    def _pixels(self, column: int) -> Iterator[int]:
        """Of each picture of a field."""
        places = zip(self.table.offsets[:, column].tolist(), self.table.lengths[:, column].tolist(), strict=True)
        with self.options.files.lend_in_order(self.file) as handle:
            yield from (count_pixels(handle, offset, length) for offset, length in places if offset != NOT_THERE)


def first_kind(
    options: "OpenOptions",
    samples: Sequence[int] | range,
    kind_of: Callable[[int], Kind],
    *,
    place: Callable[[int], str],
    largest_picture: Callable[[], int],
) -> Kind | None:
    """The kind of the first sample, which all must have; if bad samples are skipped, of the first that can be read.

    None if there are no samples. ``place`` says where a sample is, for errors.
    """
    wanted = options.members
    first_error: DataError | None = None
    for sample in samples[: MOST_TRIED if options.on_error == "skip" else 1]:
        try:
            kind = kind_of(sample)
            if isinstance(kind, Picture) and wanted.size is not None:
                kind = replace(kind, shape=(*wanted.size, 3), fit=wanted.fit, largest=largest_picture())
            return kind
        except DataError as error:
            first_error = first_error or type(error)(f"{place(sample)}: {error}")
    if first_error is not None:
        raise first_error
    return None


def largest_picture(options: "OpenOptions", file: FileId, what: str, pixels: Iterable[int]) -> int:
    """Pixels of the largest picture. Every header is read once; the answer is saved as ``what`` of this file."""
    folder, most = options.index_folder, options.members.max_pixels
    saved = None if folder is None else saved_tables.load(folder, file, what)
    if saved is not None and isinstance(largest := saved.header.get("pixels"), int):
        return min(largest, most)
    largest = max(pixels, default=0)
    if folder is not None:
        saved_tables.save(folder, file, what, {"pixels": largest}, {})
    return min(largest, most)


def count_pixels(handle: Handle, offset: int, length: int) -> int:
    """The size that a picture's header declares; 0 if it cannot be read, which is an error when the picture is read."""
    for most in (PICTURE_HEAD_BYTES, LONGEST_HEAD_BYTES):
        data = np.empty(min(most, length), np.uint8)
        handle.read_into(offset, data)
        try:
            return pictures.count_pixels(data.tobytes())
        except DataError:
            continue
    return 0
