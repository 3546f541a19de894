"""NumPy's own files: a header, then the rows one after another."""

from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import ConfigError, Corrupt, SchemaMismatch, Truncated, Unsafe
from penstock.extents import Contiguous
from penstock.fileio import identify
from penstock.members import BAD_NPY_HEADER
from penstock.store import ExtentStore, Store

if TYPE_CHECKING:
    from penstock.formats.registry import OpenOptions

FIELD = "data"
"""What the one array of a .npy file is called; ``rename`` gives it another name."""


def open_file(path: str, options: "OpenOptions") -> Store:
    """The rows of one .npy file."""
    array = parse(path)
    names = options.fields or (FIELD,)
    if len(names) != 1:
        raise ConfigError(f"{path}: a .npy file has one field, and {len(names)} were asked for: {', '.join(names)}")
    return ExtentStore({names[0]: array}, options.files)


def parse(path: str) -> Contiguous:
    """Where the rows lie."""
    file = identify(path)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        if "objects" in str(error):
            raise Unsafe(
                f"{path}: holds Python objects, which only unpickling could read; save numbers instead"
            ) from None
        if "mmap length" in str(error):
            raise Truncated(f"{path}: shorter ({file.size:,} bytes) than its header says; fetch it again") from None
        raise Corrupt(f"{path}: not a .npy file ({file.size:,} bytes); fetch it again, or leave it out") from None
    except EOFError:
        raise Truncated(f"{path}: ends inside its header ({file.size:,} bytes); fetch it again") from None
    except BAD_NPY_HEADER:
        raise Corrupt(f"{path}: its header is damaged ({file.size:,} bytes); fetch it again, or leave it out") from None
    if not isinstance(array, np.memmap):
        array.close()
        raise Corrupt(f"{path}: named .npy, but an .npz archive; save each array with np.save")
    if array.ndim == 0:
        raise SchemaMismatch(f"{path}: holds a single number, expected an array with one row a sample")
    if not array.flags.c_contiguous:
        raise ConfigError(
            f"{path}: is in Fortran order, so no row lies in one piece. "
            f"Save it once as np.save(path, np.ascontiguousarray(a))"
        )
    return Contiguous(file, "", array.dtype, array.shape[1:], array.shape[0], int(array.offset))
