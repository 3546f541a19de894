"""NumPy's own files: a header, then the rows one after another."""

import io
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import ConfigError, Corrupt, SchemaMismatch, Truncated, Unsafe
from penstock.extents import Contiguous, FileId
from penstock.fileio import Files
from penstock.kinds import BAD_NPY_HEADER
from penstock.store import ExtentStore, Store

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions

FIELD = "data"
"""What the one array of a .npy file is called; ``rename`` gives it another name."""

# numpy takes no header beyond 10,000 characters.
HEAD_BYTES = 16 * 1024


def open_file(path: str, options: "OpenOptions") -> Store:
    """The rows of one .npy file."""
    array = parse(path, options.files)
    names = options.fields or (FIELD,)
    if len(names) != 1:
        raise ConfigError(f"{path}: a .npy file has one field, and {len(names)} were asked for: {', '.join(names)}")
    return ExtentStore({names[0]: array}, options.files)


def parse(path: str, files: Files) -> Contiguous:
    """Where the rows lie."""
    file = files.identify(path)
    shape, fortran, dtype, offset = _header(file, files)
    if dtype.hasobject:
        raise Unsafe(f"{path}: holds Python objects, which only unpickling could read; save numbers instead")
    if not shape:
        raise SchemaMismatch(f"{path}: holds a single number, expected an array with one row a sample")
    if fortran and sum(size > 1 for size in shape) > 1:
        raise ConfigError(
            f"{path}: is in Fortran order, so no row lies in one piece. "
            f"Save it once as np.save(path, np.ascontiguousarray(a))"
        )
    return Contiguous(file, "", dtype, shape[1:], shape[0], offset)


def _header(file: FileId, files: Files) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Shape, Fortran order, dtype, and where the header ends."""
    path, head = file.path, files.head_of(file, HEAD_BYTES)
    stream = io.BytesIO(head)
    if len(head) < np.lib.format.MAGIC_LEN:
        raise Truncated(f"{path}: ends inside its header ({file.size:,} bytes); fetch it again")
    if head.startswith(b"PK\x03\x04"):
        raise Corrupt(f"{path}: named .npy, but an .npz archive; save each array with np.save")
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except BAD_NPY_HEADER as error:
        cut = len(head) == file.size and stream.tell() == file.size
        if isinstance(error, ValueError) and cut:
            raise Truncated(f"{path}: ends inside its header ({file.size:,} bytes); fetch it again") from None
        raise Corrupt(
            f"{path}: not a .npy file, or its header is damaged ({file.size:,} bytes); fetch it again, or leave it out"
        ) from None
    if any(isinstance(size, bool) or size < 0 for size in shape):
        raise Corrupt(f"{path}: an array of shape {shape}; its header is damaged: fetch it again, or leave it out")
    return shape, fortran, dtype, stream.tell()
