"""NumPy's own files: a header, then the rows one after another."""

from typing import TYPE_CHECKING

from penstock.base.file_id import FileId
from penstock.dataset.extent_store import ExtentStore
from penstock.dataset.store import Store
from penstock.errors import ConfigError, Corrupt, DataError, DecodeFailed, SchemaMismatch, Truncated
from penstock.files.files import Files
from penstock.read.extents import Contiguous
from penstock.read.npy import HEADER_BYTES, NpyHeader, is_cut

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions

FIELD = "data"
"""The name of the one array of a .npy file; ``rename`` changes it."""


def open_file(path: str, options: "OpenOptions") -> Store:
    """The rows of one .npy file."""
    array = parse(path, options.files)
    names = options.fields or (FIELD,)
    if len(names) != 1:
        raise ConfigError(f"{path}: a .npy file has one field, but fields names {len(names)}: {', '.join(names)}")
    return ExtentStore({names[0]: array}, options.files)


def parse(path: str, files: Files) -> Contiguous:
    """The place of the rows in the file."""
    file = files.identify(path)
    header = _read_header(file, files)
    if not header.shape:
        raise SchemaMismatch(f"{path}: holds a single number, expected an array with one row per sample")
    if header.is_fortran:
        raise ConfigError(
            f"{path}: is in Fortran order, so that no row is contiguous. "
            f"Save it once as np.save(path, np.ascontiguousarray(a))"
        )
    return Contiguous(
        file=file, name="", stored=header.dtype, shape=header.shape[1:], rows=header.shape[0], offset=header.length
    )


def _read_header(file: FileId, files: Files) -> NpyHeader:
    path, head = file.path, files.head_of(file, HEADER_BYTES)
    if head.startswith(b"PK\x03\x04"):
        raise Corrupt(f"{path}: named .npy, but is an .npz archive; save each array with np.save")
    try:
        return NpyHeader.parse(head)
    except DecodeFailed as error:
        if len(head) == file.size and is_cut(head):
            raise Truncated(f"{path}: ends inside its header ({file.size:,} bytes); fetch it again") from None
        raise Corrupt(f"{path}: not a .npy file, or damaged: {error}; fetch it again, or leave it out") from None
    except DataError as error:
        raise type(error)(f"{path}: {error}") from error
