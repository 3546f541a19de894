"""Arrays whose every value has a known place in a file: npy, and HDF5 without compression. A task fills its places."""

import os
from collections.abc import Iterator
from math import prod

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.sizes import MiB
from penstock.conversion.cut import Cut
from penstock.conversion.source import Reader
from penstock.conversion.work import Work, read_at, write_at, writing
from penstock.dataset.store import Store
from penstock.errors import ConvertFailed

LEAST_RUN_BYTES = 512
"""Rows are not cut so that less than this lies together in the file: there would be no end of writes."""
BACK_BYTES = 1 * MiB
"""What is read again at a time."""


def make_file(work: Work, name: str, partial: str) -> None:
    """Give a file of its final size its place, unless another task's process did so: it may hold values by now."""
    path = work.data(name)
    try:
        with open(partial, "r+b", buffering=0) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)  # a full disk fails now
            os.fsync(file.fileno())
        os.link(partial, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(partial)


def make_npy(work: Work, name: str, cut: Cut) -> None:
    """An npy file with its header, and room for all values."""
    if os.path.exists(work.data(name)):
        return
    partial = work.partial(name)
    with writing(work.goal):
        with open(partial, "wb") as file:
            file.write(npy_header(cut))
            file.truncate(len(npy_header(cut)) + cut.bytes)
        make_file(work, name, partial)


def npy_header(cut: Cut) -> bytes:
    """What numpy writes before the values."""
    import io

    stream = io.BytesIO()
    shape = (cut.rows, *cut.shape)
    header = {"descr": np.lib.format.dtype_to_descr(cut.dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.getvalue()


@dataclass(frozen=True)
class Places:
    """A file whose values have fixed places, and how it is filled."""

    path: str
    offset: int
    """Where the values of the field begin."""
    verify: bool
    sync: bool
    """Whether what was written must be on the disk before the task is done."""


def fill(places: Places, cut: Cut, store: Store, rows: range, part: tuple[slice, ...]) -> int:
    """Write some rows, or part of each, to their places; return how many bytes that were."""
    (field,) = store.fields
    written = 0
    path, offset = places.path, places.offset
    with writing(path), open(path, "r+b", buffering=0) as file:
        with Reader(store, min(cut.read_rows, len(rows))) as reader:
            for read in cut.reads(rows):
                values = reader.read(read)[field]
                for begin, run in runs(cut, read.start, values, part):
                    write_at(file.fileno(), run, offset + begin)
                    if places.verify:
                        _compare(file.fileno(), path, run, offset + begin)
                    written += len(run)
        if places.sync:
            os.fsync(file.fileno())
    return written


def runs(cut: Cut, first: int, values: np.ndarray, part: tuple[slice, ...]) -> Iterator[tuple[int, memoryview]]:
    """Values that lie together in the file, and where, counted from the first value of all."""
    shape = (cut.rows, *cut.shape)
    starts = (first, *(each.start for each in part))
    strides = [prod(shape[axis + 1 :]) * cut.dtype.itemsize for axis in range(len(shape))]
    whole = len(shape)  # axes from here on are not cut
    while whole > 1 and values.shape[whole - 1] == shape[whole - 1]:
        whole -= 1
    origin = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    flat = values.reshape(*values.shape[: whole - 1], -1).view(np.uint8)
    for index in np.ndindex(*values.shape[: whole - 1]):
        yield origin + sum(i * stride for i, stride in zip(index, strides, strict=False)), flat[index].data


def _compare(descriptor: int, path: str, run: memoryview, offset: int) -> None:
    again = np.empty(min(BACK_BYTES, len(run)), np.uint8)
    for begin in range(0, len(run), BACK_BYTES):
        piece = run[begin : begin + BACK_BYTES]
        read_at(descriptor, again.data[: len(piece)], offset + begin)
        if again.data[: len(piece)] != piece:
            raise ConvertFailed(
                f"{path}: bytes from {offset + begin:,} on came back otherwise than they were written: the disk or the "
                f"memory is damaged"
            )
