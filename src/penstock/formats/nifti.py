"""NIfTI-1 and NIfTI-2: an image of three axes is one row, an image of four axes has one row per volume.

Rows have the axes that nibabel gives them, and nibabel's scaled values (as float32) where the header scales. Volumes of
``.nii`` files are read at their position. A ``.nii.gz`` can only be decoded from its beginning: its rows are one block,
so that a loader decodes the file once per epoch, and reading a single row decodes everything before it. The checksum of
a ``.nii.gz`` is at its end and covers all rows: the first read continues to the end, and a file with a wrong or missing
checksum delivers no rows.
"""

import struct
import zlib
from functools import cached_property, reduce
from math import isfinite, prod
from typing import TYPE_CHECKING

import numpy as np

from penstock.base import counters
from penstock.base.dataclass import dataclass
from penstock.base.file_id import FileId
from penstock.base.scratch import aligned, borrow
from penstock.base.sizes import KiB, MiB
from penstock.base.spec import MANIFEST, Cast, Fields, FieldSpec, Origin, ReadPath
from penstock.base.urls import base_name
from penstock.dataset.extent_store import ExtentStore
from penstock.dataset.rewrite import cast_fields
from penstock.dataset.second_pass import crop
from penstock.dataset.store import Out, Store, StoreBase, check_rows, digest
from penstock.errors import ConfigError, Corrupt, SchemaMismatch, Truncated
from penstock.files.files import Files
from penstock.files.handles import Handle
from penstock.files.retry import open_for_parser
from penstock.read.extents import Chunks, Contiguous, KnownTable
from penstock.read.part import Box, Mask, RowPart, compose, everything

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.formats.registry import OpenOptions

FIELD = "data"
"""The name of a file's image; ``rename`` gives it another name."""

HEAD_BYTES = 544

DTYPES = {
    2: "u1", 4: "i2", 8: "i4", 16: "f4", 32: "c8", 64: "f8",
    256: "i1", 512: "u2", 768: "u4", 1024: "i8", 1280: "u8", 1792: "c16",
}  # fmt: skip

# Compressed bytes read at a time, and the most that one step of decoding gives.
STORED_BYTES = 64 * KiB
STEP_BYTES = 64 * KiB
# Measured: the decoder's own memory, and what Python keeps of pieces and tables that it has freed.
DECODER_BYTES = 8 * MiB


@dataclass(frozen=True)
class Image:
    """The contents of a header."""

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


def parse_header(head: bytes, path: str) -> Image:
    """The header of a single file."""
    for order in "<>":
        size = struct.unpack_from(f"{order}i", head)[0] if len(head) >= 4 else 0
        if size == 348 and head[344:348] == b"n+1\0":
            dims = struct.unpack_from(f"{order}8h", head, 40)
            code, _ = struct.unpack_from(f"{order}2h", head, 70)
            offset, slope, inter = struct.unpack_from(f"{order}3f", head, 108)
            return _make_image(path, order, dims, code, (offset, slope, inter), 352)
        if size == 540 and head[4:8] == b"n+2\0" and len(head) >= 540:
            (code,) = struct.unpack_from(f"{order}h", head, 12)
            dims = struct.unpack_from(f"{order}8q", head, 16)
            return _make_image(path, order, dims, code, struct.unpack_from(f"{order}q2d", head, 168), 544)
    raise Corrupt(
        f"{path}: not a whole NIfTI header: expected a size of 348 and 'n+1' at byte 344, or 540 and 'n+2' at byte 4, "
        f"but it begins with {head[:8]!r} and has {head[344:348]!r} at byte 344. Fetch the file again, or leave it out"
    )


def _make_image(
    path: str, order: str, dims: tuple[int, ...], code: int, placed: tuple[float, float, float], first_byte: int
) -> Image:
    count, (offset, slope, inter) = dims[0], placed
    if not 1 <= count <= 7 or any(size < 1 for size in dims[1 : count + 1]) or not first_byte <= offset < 2**62:
        raise Corrupt(
            f"{path}: its NIfTI header has dimensions {dims} and data at {offset}, expected at {first_byte} or behind "
            f"it; fetch the file again"
        )
    if isfinite(slope) and slope != 0 and not isfinite(inter):
        raise Corrupt(f"{path}: its NIfTI header scales by {slope} and adds {inter}; fetch the file again")
    if code not in DTYPES:
        raise SchemaMismatch(
            f"{path}: NIfTI data type {code} is not one of plain numbers; expected one of {sorted(DTYPES)}. Save it as "
            f"another with nibabel"
        )
    shape = dims[1 : count + 1]
    return Image(np.dtype(order + DTYPES[code]), shape, int(offset), float(slope), float(inter))


def _choose_name(path: str, options: "OpenOptions") -> str:
    names = options.fields or (FIELD,)
    if len(names) != 1:
        raise ConfigError(f"{path}: an image has one field, and {len(names)} were asked for: {', '.join(names)}")
    return names[0]


def open_file(path: str, options: "OpenOptions") -> Store:
    """The volumes of one ``.nii`` file."""
    file, name = options.files.identify(path), _choose_name(path, options)
    image = _read_image(file, options.files)
    # In the file the last axis is the slowest; an image without an axis of volumes gets one in front.
    axis, order = (3, (3, 2, 1, 0)) if len(image.shape) == 4 else (0, (0, *range(len(image.shape), 0, -1)))
    places = image.offset + np.arange(image.rows, dtype=np.int64)[:, None] * image.row_bytes
    array = Chunks(
        file, name, stored=image.stored, shape=image.row_shape, rows=image.rows, rows_per_chunk=1,
        chunk=image.row_shape, table=KnownTable(places, image.row_bytes), row_axis=axis, axes=order,
    )  # fmt: skip
    return ExtentStore({name: array}, options.files, {name: image.casts} if image.casts else None)


def _read_image(file: FileId, files: Files) -> Image:
    """The header of a ``.nii`` file that holds all of its image."""
    image = parse_header(files.head_of(file, HEAD_BYTES), file.path)
    end = image.offset + image.rows * image.row_bytes
    if end > file.size:
        raise Truncated(
            f"{file.path}: its image {image.shape} of {image.stored} reaches to byte {end:,}, but the file has only "
            f"{file.size:,}. It was cut short, perhaps by an unfinished download or copy: fetch it again"
        )
    return image


def open_stored_volumes(path: str, name: str, files: Files) -> Store:
    """The volumes of a ``.nii`` or ``.nii.gz`` file with their axes in the order of the file: (Z, Y, X)."""
    file = files.identify(path)
    if path.endswith(".gz"):
        image = parse_header(_expand_first(files.head_of(file, 4 * HEAD_BYTES)), path)
        store = GzippedVolumes(file, name, image, files)
        return cast_fields(store, {name: image.casts}) if image.casts else store
    image = _read_image(file, files)
    array = Contiguous(file, name, image.stored, image.row_shape[::-1], image.rows, offset=image.offset)
    return ExtentStore({name: array}, files, {name: image.casts} if image.casts else None)


# Compressed.


def is_gzipped(path: str) -> bool:
    """Whether a gzip file holds an image."""
    with open_for_parser(path) as file:
        head = _expand_first(file.read(4 * HEAD_BYTES))
    return head[344:347] == b"n+1" or head[4:7] == b"n+2"


def _expand_first(stored: bytes) -> bytes:
    try:
        return zlib.decompressobj(wbits=31).decompress(stored, HEAD_BYTES)
    except zlib.error:
        return b""


def open_gzipped(path: str, options: "OpenOptions") -> Store:
    """The volumes of one ``.nii.gz`` file."""
    file, name = options.files.identify(path), _choose_name(path, options)
    image = parse_header(_expand_first(options.files.head_of(file, 4 * HEAD_BYTES)), path)
    store = GzippedImage(file, name, image, options.files)
    return cast_fields(store, {name: image.casts}) if image.casts else store


class GzippedImage(StoreBase):
    """Volumes decoded from the beginning of the file up to the last one that is needed, in one pass."""

    fields: Fields

    def __init__(self, file: FileId, name: str, image: Image, files: Files, parts: "tuple[RowPart, ...]" = ()) -> None:
        self.file, self.name, self.image, self.files = file, name, image, files
        self.parts = parts
        """Parts of a row that were selected, each a part of the one before."""
        self.part = reduce(compose, parts) if parts else everything(self.row_shape)
        self.fields = {name: FieldSpec(image.stored, self.part.shape)}
        self._is_checked = False
        self._damage: Corrupt | Truncated | None = None

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a whole row."""
        return self.image.row_shape

    @cached_property
    def _stored_part(self) -> RowPart:
        """The same part of a volume whose axes are in the order of the file, for masks."""
        if isinstance(self.part, Box):
            return self.part
        along = np.unravel_index(self.part.flat, self.row_shape)
        stored = self.row_shape[::-1]
        return Mask(stored, np.ravel_multi_index(along[::-1], stored), self.part.is_single)

    @property
    def blocks(self) -> np.ndarray | None:
        return np.array([0]) if self.image.rows > 1 else None

    @property
    def shared_index(self) -> dict[int, int]:
        parts = {id(self.part): self.part.index_bytes + self._stored_part.index_bytes} if self.parts else {}
        return {**parts, **self.files.shared_index}

    @property
    def fingerprint(self) -> str:
        found = digest("nii.gz", base_name(self.file.path), self.file.size, self.name, self.image)
        for part in self.parts:
            found = digest("part", found, self.name, part.describe())
        return found

    def with_part(self, field: str, part: RowPart) -> "GzippedImage":
        return type(self)(self.file, self.name, self.image, self.files, (*self.parts, part))

    def __len__(self) -> int:
        return self.image.rows

    def scratch_bytes(self, rows: int) -> int:
        return aligned(STORED_BYTES) + aligned(self.image.row_bytes) + DECODER_BYTES + self.files.scratch_bytes

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        check_rows(rows, self)
        if self.name not in out or len(rows) == 0:
            return
        if self._damage is not None:
            raise type(self._damage)(str(self._damage))
        try:
            self._read(rows, at, out[self.name])
        except (Corrupt, Truncated) as error:
            self._damage = type(error)(str(error))
            raise

    def _read(self, rows: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        image = self.image
        places: dict[int, list[int]] = {}
        for row, place in zip(rows.tolist(), at.tolist(), strict=True):
            places.setdefault(row, []).append(place)
        with (
            self.files.lend_in_order(self.file) as handle,
            borrow(STORED_BYTES) as stored,
            borrow(image.row_bytes) as raw,
        ):
            stream = _GzipStream(handle, stored)
            stream.skip(image.offset)
            volume = raw.view(image.stored).reshape(image.row_shape[::-1])
            for row in range(max(places) + 1):
                if row not in places:
                    stream.skip(image.row_bytes)
                    continue
                stream.fill(raw)
                counters.mine().chunks_read += 1
                for place in places[row]:
                    self._place(volume, target[place : place + 1])
            if not self._is_checked:
                stream.skip((image.rows - 1 - row) * image.row_bytes)
                stream.finish()
                self._is_checked = True

    def _place(self, volume: np.ndarray, target: np.ndarray) -> None:
        """The part of one volume, whose axes are in the order of the file."""
        part = self._stored_part
        if isinstance(part, Box):
            np.copyto(target.reshape(part.full_shape), self._turned(volume)[part.index])
        elif volume.dtype.isnative:
            crop(volume, part, target)
        else:
            target.reshape(-1)[:] = volume.reshape(-1)[part.flat]

    def _turned(self, volume: np.ndarray) -> np.ndarray:
        return volume.transpose()

    def read_paths(self) -> "Sequence[ReadPath]":
        how = "decoded from the beginning of the file; a copy as .nii or .zarr can be read anywhere"
        remedy = "gunzip (a copy as .nii)" if self.image.rows > 1 else ""
        times = (self.image.rows + 1) / 2
        spec, rows = self.fields[self.name], self.image.rows
        by = MANIFEST if self.file.is_compared else "crc32"
        path = ReadPath(
            self.name, spec, rows=rows, layout="gzip, one stream", how=how, block_rows=rows, amplification=times,
            stored_bytes=self.file.size, remedy=remedy, checked_by=by,
        )  # fmt: skip
        return [path]

    def origin(self, row: int) -> Origin:
        return Origin(self.file.path, f"{self.name}[{row}]")

    def close(self) -> None:
        self.files.close()


class GzippedVolumes(GzippedImage):
    """``GzippedImage`` with the axes of rows in the order of the file: (Z, Y, X)."""

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.image.row_shape[::-1]

    @property
    def _stored_part(self) -> RowPart:
        return self.part

    def _turned(self, volume: np.ndarray) -> np.ndarray:
        return volume

    @property
    def fingerprint(self) -> str:
        # The text that earlier versions hashed, so that their saved states still load.
        image = self.image
        header = _Verbatim(f"Header(shape={image.shape[::-1]!r}, stored={image.stored!r}, offset={image.offset!r})")
        return digest("nifti", base_name(self.file.path), self.file.size, header, self.part.describe())


class _Verbatim(str):
    """A text whose ``repr`` is the text itself."""

    __repr__ = str.__str__


class _GzipStream:
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
        """Skip bytes, which must be decoded for that."""
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
