"""Chunk indices of HDF5 that do not fit their dataset: refused, and no reason to let the library fill in zeros."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

import penstock as ps
from penstock.base.file_id import FileId
from penstock.errors import Corrupt, PenstockError
from penstock.formats.hdf5 import layout
from penstock.formats.hdf5.layout import StoredDataset

VALUES = np.arange(1, 121, dtype="i4").reshape(20, 6)
CHUNKS = (2, 3)
NODE_HEAD, KEY, ENTRY = 24, 8 + 3 * 8, 8 + 3 * 8 + 8
"""Of a node: what comes before its keys, a key (size, mask, two corners, an offset inside), and a key with a place."""


def write(path: Path, **options: Any) -> Path:
    with h5py.File(path, "w", libver="earliest") as file:
        file.create_dataset("data", data=VALUES, chunks=CHUNKS, fillvalue=-7, **options)
    return path


def corners(data: bytes) -> list[int]:
    """Where each corner of each chunk stands in the file, and the offset inside of it, which is always 0."""
    at = -1
    while (at := data.find(b"TREE", at + 1)) >= 0:
        if data[at + 4] == 1 and data[at + 5] == 0:
            used = int.from_bytes(data[at + 6 : at + 8], "little")
            entries = [at + NODE_HEAD + number * ENTRY for number in range(used)]
            return [entry + 8 + 8 * axis for entry in entries for axis in range(3)]
    raise AssertionError("no leaf of a tree of chunks")


@pytest.mark.case(47)
@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}, {"scaleoffset": 0}], ids=["plain", "gzip", "h5py"])
@pytest.mark.parametrize("allow_fill", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_changed_coordinate_never_makes_zeros(tmp_path: Path, options: dict[str, Any], allow_fill: bool) -> None:
    """Every coordinate of every chunk, made larger than the grid, the same as another's, or not a multiple."""
    path = write(tmp_path / "a.h5", **options)
    data = path.read_bytes()
    for place in corners(data):
        for value in (1, 2, 4, 6, 200, 2**40, 2**63 + 2):
            bad = value.to_bytes(8, "little")
            if data[place : place + 8] == bad:
                continue
            path.write_bytes(data[:place] + bad + data[place + 8 :])
            with pytest.raises(Corrupt, match=r"a\.h5.*'data'.*offset"):
                ps.open(path, allow_fill=allow_fill)[:]


@pytest.mark.case(47)
@pytest.mark.parametrize("options", [{}, {"scaleoffset": 0}], ids=["plain", "h5py"])
def test_two_chunks_of_the_same_bytes(tmp_path: Path, options: dict[str, Any]) -> None:
    path = write(tmp_path / "a.h5", **options)
    data = path.read_bytes()
    first = corners(data)[0] + 24
    second = first + ENTRY
    path.write_bytes(data[:second] + data[first : first + 8] + data[second + 8 :])
    with pytest.raises(Corrupt, match="overlap"):
        ps.open(path)[:]


def told_by_the_library(
    chunks: Sequence[tuple[tuple[int, ...], int, int]], maxshape: tuple[int | None, ...]
) -> StoredDataset:
    """A dataset whose index the library reads: one of the kinds that newer files have."""

    def chunk_iter(visit: Any) -> None:
        for corner, place, size in chunks:
            visit((corner, 0, place, size))

    dataset = SimpleNamespace(
        chunks=CHUNKS,
        maxshape=maxshape,
        file=SimpleNamespace(userblock_size=0),
        id=SimpleNamespace(chunk_iter=chunk_iter, get_num_chunks=lambda: len(chunks)),
    )
    return StoredDataset(FileId("a.h5", 10_000, 0, 0, is_growing=False, etag="not mapped"), "data", dataset, (4, 6), 0)


WHOLE = [((0, 0), 100, 24), ((0, 3), 200, 24), ((2, 0), 300, 24), ((2, 3), 400, 24)]


@pytest.mark.case(47)
@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ([*WHOLE[:3], ((4, 0), 400, 24)], "outside its grid"),
        ([*WHOLE[:3], ((2, 4), 400, 24)], "outside its grid"),
        ([*WHOLE[:3], ((2, 0), 400, 24)], "a second time"),
        ([*WHOLE, ((0, 0), 500, 24)], "a second time"),
        ([*WHOLE[:3], ((2, 3), 310, 24)], "overlap"),
    ],
)
def test_indices_of_newer_kinds(bad: list[Any], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileId, "can_be_mapped", False)
    table = layout.walk(told_by_the_library(WHOLE, (4, 6)))
    assert table is not None
    assert table.offsets.tolist() == [[100, 200], [300, 400]]
    with pytest.raises(Corrupt, match=told):
        layout.walk(told_by_the_library(bad, (4, 6)))


@pytest.mark.case(47)
@pytest.mark.parametrize("libver", ["earliest", "v110", "latest"])
@pytest.mark.parametrize("maxshape", [None, (None, 6), (None, None), (20, None)])
@pytest.mark.parametrize("options", [{}, {"scaleoffset": 0}], ids=["plain", "h5py"])
def test_whole_indices_of_every_kind_are_taken(
    tmp_path: Path, libver: str, maxshape: tuple[int | None, ...] | None, options: dict[str, Any]
) -> None:
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as file:
        file.create_dataset("data", data=VALUES, chunks=CHUNKS, maxshape=maxshape, **options)
    np.testing.assert_array_equal(ps.open(tmp_path / "a.h5")[:]["data"], VALUES)


@pytest.mark.case(47)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("libver", "options"),
    [("earliest", {}), ("latest", {}), ("latest", {"scaleoffset": 0})],
    ids=["earliest", "latest", "latest by h5py"],
)
def test_no_changed_byte_of_an_index_makes_fill_values(tmp_path: Path, libver: str, options: dict[str, Any]) -> None:
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as file:
        file.create_dataset("data", data=VALUES, chunks=CHUNKS, maxshape=(None, None), fillvalue=-7, **options)
    path = tmp_path / "a.h5"
    data = path.read_bytes()
    begin = data.find(b"BTLF") if libver == "latest" else corners(data)[0] - 8 - NODE_HEAD
    for place in range(begin, begin + NODE_HEAD + 30 * ENTRY):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        try:
            got = ps.open(path)[:]["data"]
        except PenstockError:
            continue
        assert not (got == -7).any(), f"byte {place}"


FILL = """
import sys
import penstock as ps

try:
    ps.open(sys.argv[1], index_dir=False)
except ps.errors.Corrupt as error:
    print(error)
"""


@pytest.mark.case(47)
def test_a_fill_value_of_fewer_bytes_than_none(tmp_path: Path, apart: Any) -> None:
    """HDF5 itself crashes where it is asked for it."""
    with h5py.File(tmp_path / "a.h5", "w", libver="earliest") as file:
        file.create_dataset("data", data=VALUES, chunks=CHUNKS)
    data = (tmp_path / "a.h5").read_bytes()
    none, fewer = bytes([2, 3, 2, 1, 0, 0, 0, 0]), bytes([2, 3, 2, 1, 0x7F, 255, 255, 255])
    assert data.count(none) == 1
    (tmp_path / "a.h5").write_bytes(data.replace(none, fewer))
    done = apart(FILL, tmp_path / "a.h5")
    assert (done.code, done.err) == (0, "")
    assert "a.h5: HDF5 cannot make sense of it" in done.out
