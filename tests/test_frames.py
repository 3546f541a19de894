"""How deep a read is: Python frames from the start of a reader thread to the system call, per batch."""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import penstock as ps
from penstock.webdataset import TarWriter

pytestmark = pytest.mark.skipif(not hasattr(os, "preadv"), reason="reads are counted by that call")

MOST_FOR_CHUNKS, MOST_FOR_MEMBERS = 14, 9


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The functions on the stack of a reader thread whenever bytes are read, outermost first."""
    found, preadv = list[list[str]](), os.preadv

    def reading(*args: Any) -> int:
        if threading.current_thread().name.startswith("penstock-reader"):
            found.append(functions_below_the_thread(sys._getframe(1)))
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", reading)
    return found


def functions_below_the_thread(frame: Any) -> list[str]:
    """Without the three functions of ``threading`` that every thread begins with."""
    names = []
    while frame is not None:
        if frame.f_code.co_filename != threading.__file__:
            names.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}")
        frame = frame.f_back
    return names[::-1]


def gzip_files(folder: Path) -> ps.Dataset:
    """Two files, so that a read goes through what puts them one after another."""
    for number, chunk in enumerate([(8, 50, 60), (4, 25, 60)]):  # chunks read one by one, and in groups
        with h5py.File(folder / f"{number}.h5", "w") as file:
            values = np.random.default_rng(number).integers(0, 9, (40, 50, 60)).astype(np.int16)
            file.create_dataset("x", data=values, chunks=chunk, compression="gzip", shuffle=True)
    return ps.open(folder / "*.h5")


def shard(path: Path, fields: dict[str, Any]) -> Path:
    with TarWriter(str(path)) as writer:
        for number in range(8):
            writer.write({"__key__": f"{path.stem}{number:03}", **fields})
    return path


ARRAY, PICTURE = np.full(5000, 7), np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)


def arrays(folder: Path) -> ps.Dataset:
    return ps.open(shard(folder / "x.tar", {"npy": ARRAY}))


def pictures(folder: Path) -> ps.Dataset:
    return ps.open(shard(folder / "x.tar", {"jpg": PICTURE}))


def several_fields_of_two_shards(folder: Path) -> ps.Dataset:
    return ps.open([shard(folder / f"{name}.tar", {"jpg": PICTURE, "npy": ARRAY, "cls": 3}) for name in "ab"])


@pytest.mark.parametrize(
    ("make", "most"),
    [
        pytest.param(gzip_files, MOST_FOR_CHUNKS, id="gzip HDF5"),
        pytest.param(arrays, MOST_FOR_MEMBERS, id="arrays in tar"),
        pytest.param(pictures, MOST_FOR_MEMBERS, id="pictures in tar"),
        pytest.param(several_fields_of_two_shards, MOST_FOR_MEMBERS, id="several fields in tar"),
    ],
)
def test_a_read_is_few_calls_deep(
    make: Callable[[Path], ps.Dataset], most: int, tmp_path: Path, stacks: list[list[str]]
) -> None:
    ds = make(tmp_path)
    with ps.Loader(ds, batch_size=4, shuffle=True, threads=1, memory="64MiB", output="numpy") as batches:
        assert sum(1 for _ in batches) == len(ds) // 4
    assert stacks
    deepest = max(stacks, key=len)
    assert len(deepest) <= most, "\n".join([f"{len(deepest)} frames:", *deepest])
