"""Arrays as ``.ten`` bytes, by the names of ``webdataset.tenbin``."""

import os
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np

from penstock.errors import ConfigError
from penstock.files.retry import open_for_parser
from penstock.read.npy import decode_ten, encode_ten


def encode_buffer(l: list[np.ndarray], infos: Sequence[str] | None = None) -> bytearray:  # noqa: E741
    """A list of arrays as bytes."""
    if not isinstance(l, list):
        raise ConfigError(f"tenbin: expected a list of arrays, not {type(l).__name__}")
    _check_infos(infos)
    return bytearray(encode_ten(l))


def decode_buffer(buf: bytes | bytearray | memoryview, infos: Any = False) -> list[np.ndarray]:
    """The arrays of such bytes."""
    _check_infos(infos)
    return decode_ten(bytes(buf))


def write(stream: BinaryIO, l: Sequence[np.ndarray], infos: Sequence[str] | None = None) -> None:  # noqa: E741
    """Write arrays to a stream."""
    stream.write(encode_buffer(list(l), infos))


def read(stream: BinaryIO, infos: Any = False) -> list[np.ndarray]:
    """All arrays of a stream."""
    return decode_buffer(stream.read(), infos)


def save(
    fname: str | os.PathLike[str], *args: np.ndarray, infos: Sequence[str] | None = None, nocheck: bool = False
) -> None:
    """Write arrays to a file."""
    _check_name(fname, nocheck)
    with open(fname, "wb") as stream:
        write(stream, args, infos)


def load(fname: str | os.PathLike[str], infos: Any = False, nocheck: bool = False) -> list[np.ndarray]:
    """All arrays of a file."""
    _check_name(fname, nocheck)
    with open_for_parser(os.fspath(fname)) as stream:
        return read(stream, infos)


def _check_name(fname: str | os.PathLike[str], nocheck: bool) -> None:
    if not nocheck and not os.fspath(fname).endswith(".ten"):
        raise ConfigError(f"{fname}: the name of a tensor file ends in .ten; nocheck=True allows others")


def _check_infos(infos: Any) -> None:
    if infos:
        raise ConfigError("tenbin: infos= is not kept here; give arrays names with npz, or with fields of their own")
