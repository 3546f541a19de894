"""LMDB: a value for each field of each sample, under the name that it would have in a tar. A task writes one file."""

import errno
import hashlib
import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from penstock.base.sizes import MiB
from penstock.conversion.cut import Cut
from penstock.conversion.rows import add_values, sample_of, tar_names
from penstock.conversion.source import Reader
from penstock.dataset.store import Store
from penstock.errors import ConfigError
from penstock.webdataset.encoders import DEFAULT_ENCODERS, encode_sample

FIRST_MAP_BYTES = 16 * MiB
"""What the file may grow to, doubled as often as needed."""


def write_lmdb(path: str, cut: Cut, store: Store, rows: range) -> str:
    """One file, a transaction for each read; returns the digest of its values."""
    lmdb, names = _library(), tar_names(store.fields)
    values_of = hashlib.sha256()
    with (
        lmdb.open(path, subdir=False, lock=False, sync=False, map_size=FIRST_MAP_BYTES) as database,
        Reader(store, min(cut.read_rows, len(rows))) as reader,
    ):
        for read in cut.reads(rows):
            values = reader.read(read)
            _put(lmdb, database, list(_items(values, names, read)))
            add_values(values_of, values)
        database.sync(True)
    return values_of.hexdigest()


def _items(values: Mapping[str, np.ndarray], names: Mapping[str, str], rows: range) -> Iterator[tuple[str, bytes]]:
    """Keys and encoded values of some samples."""
    for at, row in enumerate(rows):
        for name, raw in encode_sample(sample_of(values, names, at), DEFAULT_ENCODERS).items():
            yield f"{row:09d}.{name}", raw


def _library() -> Any:
    try:
        return import_module("lmdb")
    except ImportError:
        raise ConfigError("writing LMDB needs its package: pip install lmdb") from None


def _put(lmdb: Any, database: Any, items: list[tuple[str, bytes]]) -> None:
    """All of them or none; once more in a larger map where it was too small."""
    while True:
        try:
            with database.begin(write=True) as transaction:
                for key, raw in items:
                    transaction.put(key.encode(), raw)
            return
        except lmdb.MapFullError:
            database.set_mapsize(2 * database.info()["map_size"])
        except lmdb.Error as error:
            is_full = os.strerror(errno.ENOSPC) in str(error)
            if not is_full:  # a write that was cut short is "Input/output error"
                is_full = _free_bytes(database.path()) < sum(len(raw) for _, raw in items)
            raise OSError(errno.ENOSPC if is_full else errno.EIO, str(error)) from error


def _free_bytes(path: str) -> int:
    """Free space of the disk that a file is on."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
