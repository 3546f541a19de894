"""Sessions stored as NIfTI. A compressed one is one stream: reading any trial means reading all that came before it.

So a compressed session is a block: its trials are read together, in one pass, of which only the wanted voxels of the
wanted trials are kept. That costs the decompression of every session in every epoch (some 4 s for 1 GB); ``prepare``
pays it once.
"""

import gzip
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import Corrupt, SchemaMismatch, Truncated, Unavailable
from penstock.extents import Contiguous, FileId
from penstock.fileio import Files
from penstock.handles import check_unchanged, identify
from penstock.memory import aligned, borrow
from penstock.sizes import KiB
from penstock.spec import Fields, FieldSpec, Origin, ReadPath
from penstock.store import ExtentStore, Out, Store, check_rows, digest
from penstock.within import Box, Within, compose, everything
from penstock.wrap import crop

HEADER_BYTES = 348
DTYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4"}
STREAM_BYTES = 512 * KiB
"""Measured: what Python's gzip holds while it reads."""


@dataclass(frozen=True)
class Header:
    """What a NIfTI file of several volumes says of itself."""

    shape: tuple[int, ...]
    """Trials, Z, Y, X: the order in which the numbers follow each other."""
    stored: np.dtype
    offset: int


def open_nifti(path: str, field: str, files: Files) -> Store:
    """The volumes of one file, one row a trial."""
    file = identify(path)
    compressed = path.endswith(".gz")
    header = _header(path, compressed)
    if compressed:
        return CompressedNifti(file, field, header)
    trials, *volume = header.shape
    if header.offset + header.stored.itemsize * int(np.prod(header.shape)) > file.size:
        raise Truncated(
            f"{path}: {file.size:,} bytes are too few for {trials} trials of {tuple(volume)}; fetch it again"
        )
    return ExtentStore({field: Contiguous(file, field, header.stored, tuple(volume), trials, header.offset)}, files)


def _header(path: str, compressed: bool) -> Header:
    try:
        with (gzip.open if compressed else open)(path, "rb") as file:
            head = file.read(HEADER_BYTES)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Corrupt(f"{path}: its beginning cannot be decompressed ({error}); fetch it again") from error
    except OSError as error:
        raise Unavailable(f"{path}: cannot be read ({error})") from error
    for order in "<>":
        if len(head) == HEADER_BYTES and struct.unpack_from(f"{order}i", head)[0] == HEADER_BYTES:
            return _parsed(path, head, order)
    raise Corrupt(f"{path}: not a NIfTI-1 file; fetch it again")


def _parsed(path: str, head: bytes, order: str) -> Header:
    dims = struct.unpack_from(f"{order}8h", head, 40)
    code = struct.unpack_from(f"{order}h", head, 70)[0]
    offset, slope, shift = struct.unpack_from(f"{order}3f", head, 108)
    if dims[0] != 4 or min(dims[1:5]) < 1:
        raise SchemaMismatch(f"{path}: has axes {dims[1 : dims[0] + 1]}, expected X, Y, Z and trials")
    if code not in DTYPES or slope not in (0, 1) or shift != 0:
        raise SchemaMismatch(f"{path}: numbers of kind {code}, scaled by {slope} and {shift}: expected plain ones")
    return Header(tuple(dims[4:0:-1]), np.dtype(f"{order}{DTYPES[code]}"), int(offset))


class CompressedNifti:
    """Rows of one compressed stream, which is read from its beginning each time."""

    index_bytes = 0

    def __init__(self, file: FileId, field: str, header: Header, part: Within | None = None) -> None:
        self.file, self.field, self.header = file, field, header
        self.part: Within = everything(header.shape[1:]) if part is None else part
        self.fields: Fields = {field: FieldSpec(header.stored, self.part.shape)}
        self.blocks = np.array([0])

    def __len__(self) -> int:
        return self.header.shape[0]

    @property
    def _row_bytes(self) -> int:
        return int(np.prod(self.header.shape[1:])) * self.header.stored.itemsize

    @property
    def shared_index(self) -> dict[int, int]:
        return {id(self.part): self.part.index_bytes}

    @property
    def fingerprint(self) -> str:
        name = self.file.path.replace("\\", "/").rpartition("/")[2]
        return digest("nifti", name, self.file.size, self.header, self.part.describe())

    def scratch_bytes(self, rows: int) -> int:
        spec = self.fields[self.field]
        return aligned(self._row_bytes) + aligned(spec.row_bytes) + STREAM_BYTES

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        check_rows(rows, self)
        if not len(rows) or self.field not in out:
            return
        check_unchanged(self.file)
        order = np.argsort(rows, kind="stable")
        try:
            with borrow(self._row_bytes) as raw, gzip.open(self.file.path, "rb") as stream:
                self._stream(stream, raw, rows[order].tolist(), at[order].tolist(), out[self.field])
        except EOFError as error:
            raise Truncated(f"{self.file.path}: the stream ends early ({error}); fetch the file again") from error
        except (zlib.error, gzip.BadGzipFile) as error:
            raise Corrupt(f"{self.file.path}: cannot be decompressed ({error}); fetch the file again") from error
        except OSError as error:
            raise Unavailable(f"{self.file.path}: cannot be read ({error})") from error

    def _stream(
        self, stream: gzip.GzipFile, raw: np.ndarray, rows: list[int], places: list[int], target: np.ndarray
    ) -> None:
        volume = raw.view(self.header.stored).reshape(self.header.shape[1:])
        _fill(
            stream, raw[: self.header.offset] if self.header.offset <= len(raw) else np.empty(self.header.offset, "u1")
        )
        at = -1
        for row, place in zip(rows, places, strict=True):
            while at < row:
                _fill(stream, raw)
                at += 1
            self._place(volume, target[place : place + 1])

    def _place(self, volume: np.ndarray, goal: np.ndarray) -> None:
        if self.header.stored.isnative:
            crop(volume, self.part, goal)
            return
        with borrow(goal.nbytes) as scratch:
            taken = scratch.view(self.header.stored).reshape(goal.shape)
            crop(volume, self.part, taken)
            np.copyto(goal, taken)

    def origin(self, row: int) -> Origin:
        return Origin(self.file.path, f"{self.field}[{row}]")

    def close(self) -> None:
        """Nothing stays open."""

    def read_paths(self) -> Sequence[ReadPath]:
        wanted = max(1, self.fields[self.field].row_bytes)
        how = "decompressed from the beginning, once for all trials of a window"
        remedy = "penstock nsd prepare"
        path = ReadPath(
            self.field, self.fields[self.field], len(self), "one gzip stream", how, len(self),
            len(self) * self._row_bytes / wanted, self.file.size, 0, remedy,
        )  # fmt: skip
        return [path]

    def selecting(self, field: str, part: Within) -> "CompressedNifti":
        whole = isinstance(self.part, Box) and self.part.is_everything
        return CompressedNifti(self.file, self.field, self.header, part if whole else compose(self.part, part))


def _fill(stream: gzip.GzipFile, target: np.ndarray) -> None:
    view, done = target.data, 0
    while done < len(view):
        got = stream.readinto(view[done:])
        if not got:
            raise EOFError(f"{done:,} of {len(view):,} bytes of a volume")
        done += got
