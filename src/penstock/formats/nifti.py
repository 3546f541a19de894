"""NIfTI-1 and NIfTI-2: an image of three axes is one row, one of four axes has a row for each volume.

Rows have the axes that nibabel gives them, and its scaled values (as float32) where the header scales. Volumes of
``.nii`` files are read by their place. A ``.nii.gz`` can only be decoded from its beginning: its rows are one block, so
that a loader decodes the file once an epoch; a row by itself costs all that comes before it.
"""

import struct
import zlib
from dataclasses import dataclass
from math import isfinite, prod
from typing import TYPE_CHECKING

import numpy as np

from penstock import tally
from penstock.errors import ConfigError, Corrupt, SchemaMismatch, Truncated
from penstock.extents import Chunks, FileId, KnownTable
from penstock.fileio import Files
from penstock.handles import Handle
from penstock.memory import aligned, borrow
from penstock.sizes import KiB
from penstock.spec import MANIFEST, Cast, Fields, FieldSpec, Origin, ReadPath
from penstock.steady import open_steady
from penstock.store import ExtentStore, Out, Store, check_rows, digest
from penstock.urls import base_name
from penstock.wrap import cast_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.formats.registry import OpenOptions

FIELD = "data"
"""What the image of a file is called; ``rename`` gives it another name."""

HEAD_BYTES = 544

DTYPES = {
    2: "u1", 4: "i2", 8: "i4", 16: "f4", 32: "c8", 64: "f8",
    256: "i1", 512: "u2", 768: "u4", 1024: "i8", 1280: "u8", 1792: "c16",
}  # fmt: skip

# Compressed bytes read at a time, and the most that one step of decoding gives.
STORED_BYTES = 128 * KiB
STEP_BYTES = 256 * KiB


@dataclass(frozen=True)
class Image:
    """What a header says."""

    stored: np.dtype
    shape: tuple[int, ...]
    """As nibabel has it: the first axis is the fastest in the file."""
    offset: int
    slope: float
    inter: float

    @property
    def rows(self) -> int:
        return self.shape[3] if len(self.shape) == 4 else 1

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.shape[:3] if len(self.shape) == 4 else self.shape

    @property
    def row_bytes(self) -> int:
        return self.stored.itemsize * prod(self.row_shape)

    @property
    def casts(self) -> Cast | None:
        """The header's own scaling."""
        if not isfinite(self.slope) or self.slope == 0 or (self.slope, self.inter) == (1, 0):
            return None
        if self.stored.kind == "c":
            return Cast(np.dtype(np.complex64), self.slope, self.inter)
        return Cast(np.dtype(np.float32), self.slope, self.inter)


def header(head: bytes, path: str) -> Image:
    """The header of a single file."""
    for order in "<>":
        size = struct.unpack_from(f"{order}i", head)[0] if len(head) >= 4 else 0
        if size == 348 and len(head) >= 348:
            dims = struct.unpack_from(f"{order}8h", head, 40)
            code, _ = struct.unpack_from(f"{order}2h", head, 70)
            offset, slope, inter = struct.unpack_from(f"{order}3f", head, 108)
            return _image(path, order, dims, code, (offset, slope, inter))
        if size == 540 and len(head) >= 540:
            (code,) = struct.unpack_from(f"{order}h", head, 12)
            dims = struct.unpack_from(f"{order}8q", head, 16)
            return _image(path, order, dims, code, struct.unpack_from(f"{order}q2d", head, 168))
    raise Corrupt(f"{path}: not a whole NIfTI header; fetch the file again, or leave it out")


def _image(path: str, order: str, dims: tuple[int, ...], code: int, placed: tuple[float, float, float]) -> Image:
    count, offset = dims[0], placed[0]
    if not 1 <= count <= 7 or any(size < 1 for size in dims[1 : count + 1]) or not 0 <= offset < 2**62:
        raise Corrupt(f"{path}: its NIfTI header has dimensions {dims} and data at {offset}; fetch the file again")
    if code not in DTYPES:
        raise SchemaMismatch(
            f"{path}: NIfTI data type {code} is not one of plain numbers; expected one of {sorted(DTYPES)}. Save it as "
            f"another with nibabel"
        )
    shape = dims[1 : count + 1]
    return Image(np.dtype(order + DTYPES[code]), shape, int(offset), float(placed[1]), float(placed[2]))


def _name(path: str, options: "OpenOptions") -> str:
    names = options.fields or (FIELD,)
    if len(names) != 1:
        raise ConfigError(f"{path}: an image has one field, and {len(names)} were asked for: {', '.join(names)}")
    return names[0]


def open_file(path: str, options: "OpenOptions") -> Store:
    """The volumes of one ``.nii`` file."""
    file, name = options.files.identify(path), _name(path, options)
    image = header(options.files.head_of(file, HEAD_BYTES), path)
    end = image.offset + image.rows * image.row_bytes
    if end > file.size:
        raise Truncated(
            f"{path}: its image {image.shape} of {image.stored} reaches to byte {end:,}, but the file has only "
            f"{file.size:,}. It was cut short, perhaps by an unfinished download or copy: fetch it again"
        )
    # In the file the last axis is the slowest.
    axes = range(len(image.shape)) if len(image.shape) == 4 else range(len(image.shape) + 1)
    axis = 3 if len(image.shape) == 4 else 0
    order = tuple(reversed(axes)) if axis == 3 else (0, *reversed(axes[1:]))
    places = image.offset + np.arange(image.rows, dtype=np.int64)[:, None] * image.row_bytes
    array = Chunks(
        file, name, image.stored, image.row_shape, image.rows, 1, image.row_shape, KnownTable(places, image.row_bytes),
        row_axis=axis, axes=order,
    )  # fmt: skip
    return ExtentStore({name: array}, options.files, {name: image.casts} if image.casts else None)


# Compressed.


def is_gzipped(path: str) -> bool:
    """Whether a gzip file holds an image."""
    with open_steady(path) as file:
        head = _first(file.read(4 * HEAD_BYTES))
    return head[344:347] == b"n+1" or head[4:7] == b"n+2"


def _first(stored: bytes) -> bytes:
    try:
        return zlib.decompressobj(wbits=31).decompress(stored, HEAD_BYTES)
    except zlib.error:
        return b""


def open_gzipped(path: str, options: "OpenOptions") -> Store:
    """The volumes of one ``.nii.gz`` file."""
    file, name = options.files.identify(path), _name(path, options)
    image = header(_first(options.files.head_of(file, 4 * HEAD_BYTES)), path)
    store = GzippedImage(file, name, image, options.files)
    return cast_fields(store, {name: image.casts}) if image.casts else store


class GzippedImage:
    """Volumes decoded from the beginning of the file up to the last that is wanted, in one pass."""

    index_bytes = 0

    def __init__(self, file: FileId, name: str, image: Image, files: Files) -> None:
        self.file, self.name, self.image, self.files = file, name, image, files
        self.fields: Fields = {name: FieldSpec(image.stored, image.row_shape)}

    @property
    def blocks(self) -> np.ndarray | None:
        return np.array([0]) if self.image.rows > 1 else None

    @property
    def fingerprint(self) -> str:
        return digest("nii.gz", base_name(self.file.path), self.file.size, self.name, self.image)

    def __len__(self) -> int:
        return self.image.rows

    def scratch_bytes(self, rows: int) -> int:
        # Steps are decoded into memory of Python's own, which keeps some of what it has freed.
        return aligned(STORED_BYTES) + aligned(self.image.row_bytes) + 12 * (STEP_BYTES + STORED_BYTES)

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        check_rows(rows, self)
        if self.name not in out or len(rows) == 0:
            return
        target, image = out[self.name], self.image
        places: dict[int, list[int]] = {}
        for row, place in zip(rows.tolist(), at.tolist(), strict=True):
            places.setdefault(row, []).append(place)
        with (
            self.files.lend_in_order(self.file) as handle,
            borrow(STORED_BYTES) as stored,
            borrow(image.row_bytes) as raw,
        ):
            stream = _Stream(handle, stored)
            stream.skip(image.offset)
            volume = raw.view(image.stored).reshape(image.row_shape[::-1]).transpose()
            for row in range(max(places) + 1):
                if row not in places:
                    stream.skip(image.row_bytes)
                    continue
                stream.fill(raw)
                tally.mine().chunks_read += 1
                for place in places[row]:
                    np.copyto(target[place : place + 1].reshape(image.row_shape), volume)
            if row == image.rows - 1:
                stream.finish()

    def read_paths(self) -> "Sequence[ReadPath]":
        how = "decoded from the beginning of the file; a copy as .nii or .zarr can be read anywhere"
        remedy = "gunzip (a copy as .nii)" if self.image.rows > 1 else ""
        times = (self.image.rows + 1) / 2
        spec, rows = self.fields[self.name], self.image.rows
        by = MANIFEST if self.file.compared else ""
        path = ReadPath(
            self.name, spec, rows, "gzip, one stream", how, rows, times, self.file.size, remedy=remedy, checked_by=by
        )
        return [path]

    def origin(self, row: int) -> Origin:
        return Origin(self.file.path, f"{self.name}[{row}]")

    def close(self) -> None:
        self.files.close()


class _Stream:
    """A gzip file, decoded step by step."""

    def __init__(self, handle: Handle, stored: np.ndarray) -> None:
        self.handle, self.stored, self.at = handle, stored, 0
        self._begin()
        self._waiting = b""

    def _begin(self) -> None:
        self._decoder = zlib.decompressobj(wbits=31)

    def fill(self, target: np.ndarray) -> None:
        """The next bytes, as many as ``target`` has."""
        done = 0
        while done < len(target):
            piece = self._step(len(target) - done)
            target[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
            done += len(piece)

    def skip(self, count: int) -> None:
        """Pass over bytes; there is no other way than to decode them."""
        while count:
            count -= len(self._step(count))

    def finish(self) -> None:
        """Go to the end, where the checksum is."""
        while not self._decoder.eof:
            self._step(STEP_BYTES)

    def _step(self, most: int) -> bytes:
        path = self.handle.file.path
        if self._decoder.eof:  # members may follow each other
            self._waiting = self._decoder.unused_data
            self._begin()
        if not self._waiting:
            left = min(len(self.stored), self.handle.size - self.at)
            if left <= 0:
                raise Truncated(f"{path}: the gzip stream ends before its image does; fetch the file again")
            self.handle.read_into(self.at, self.stored[:left])
            self._waiting, self.at = self.stored[:left].tobytes(), self.at + left
        try:
            piece = self._decoder.decompress(self._waiting, min(most, STEP_BYTES))
        except zlib.error as error:
            raise Corrupt(
                f"{path}: the gzip stream is damaged before byte {self.at:,} ({error}); fetch the file again, or leave "
                f"it out"
            ) from error
        self._waiting = self._decoder.unconsumed_tail
        return piece
