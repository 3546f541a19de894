"""The chunk index read directly: what the library says of every chunk, or else the library is asked."""

import h5py
import numpy as np
import pytest

import penstock as ps
from penstock.files.handles import identify
from penstock.formats.hdf5 import btree, layout
from penstock.formats.hdf5.layout import StoredDataset

SHAPE, CHUNKS = (200, 30, 7), (2, 1, 3)  # 9,000 chunks in a tree of three levels


def write(path, libver="earliest", rows=slice(None), shape=SHAPE, **options):
    with h5py.File(path, "w", libver=libver) as file:
        for number in range(12):  # so that the header goes on elsewhere
            file.attrs[f"about {number}"] = "x" * 200
        betas = file.create_dataset("betas", shape, "<i2", chunks=CHUNKS, **options)
        betas.attrs["note"] = "y" * 500
        betas[rows] = np.arange(betas[rows].size).reshape(betas[rows].shape)
    return path


def both(path):
    """The table by nodes and one by one."""
    with h5py.File(path) as file:
        found = StoredDataset(identify(str(path)), "betas", file["betas"], file["betas"].shape, 0)
        return layout._walk_nodes(found), layout._walk_chunks(found)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "gzip"},
        {"rows": slice(3, 17)},
        {"rows": slice(0, 0)},
        {"maxshape": (None, None, 7), "fletcher32": True},
        {"shape": (2, 1, 3)},
    ],
    ids=["plain", "gzip", "some written", "none written", "resizable", "one chunk"],
)
def test_it_finds_what_the_library_finds(tmp_path, options):
    mine, theirs = both(write(tmp_path / "a.h5", **options))
    assert np.array_equal(mine.offsets, theirs.offsets)
    assert np.array_equal(mine.lengths, theirs.lengths)
    assert (mine.skipped is None) == (theirs.skipped is None)


def test_filters_that_chunks_skipped(tmp_path):
    path = write(tmp_path / "a.h5", compression="gzip", rows=slice(0, 0))
    with h5py.File(path, "a") as file:
        for row in range(0, SHAPE[0], 2):
            file["betas"].id.write_direct_chunk((row, 0, 0), bytes(12), filter_mask=row // 2 % 2)
    mine, theirs = both(path)
    assert np.array_equal(mine.skipped, theirs.skipped)
    assert mine.skipped.any()


@pytest.mark.parametrize("libver", ["v108", "latest"])
def test_indices_of_other_kinds_are_left_to_the_library(tmp_path, libver):
    path = write(tmp_path / "a.h5", libver)
    with pytest.raises(btree.IndexNotUnderstood):
        both(path)
    with h5py.File(path) as file:
        assert np.array_equal(ps.open(path)[:]["betas"], file["betas"])


def nodes_of(path):
    data = path.read_bytes()
    places, at = [], data.find(b"TREE")
    while at >= 0:
        if data[at + 4] == 1:  # of chunks, not of a group
            places.append(at)
        at = data.find(b"TREE", at + 1)
    return data, sorted(places, key=lambda place: -data[place + 5])


@pytest.mark.parametrize(
    ("at", "new"),
    [
        (0, b"EERT"),
        (4, b"\0"),
        (5, b"\7"),
        (6, b"\xff\xff"),
        (24 + 8 + 4 * 8, b"\xff" * 7 + b"\x7f"),
        (24 + 8 + 4 * 8, "root"),
    ],
    ids=["signature", "kind", "level", "entries", "beyond the end", "a ring"],
)
def test_what_is_damaged_is_not_believed(tmp_path, at, new):
    path = write(tmp_path / "a.h5")
    data, nodes = nodes_of(path)
    assert data[nodes[0] + 5] == 2
    place = nodes[1] if at > 5 else nodes[3]
    new = nodes[0].to_bytes(8, "little") if new == "root" else new
    path.write_bytes(data[: place + at] + new + data[place + at + len(new) :])
    with h5py.File(path) as file:
        found = StoredDataset(identify(str(path)), "betas", file["betas"], SHAPE, 0)
        with pytest.raises(btree.IndexNotUnderstood):
            layout._walk_nodes(found)


def test_more_chunks_than_there_can_be(tmp_path):
    path = write(tmp_path / "a.h5")
    with h5py.File(path) as file:
        betas, (header_at, _) = file["betas"], h5py.h5g.get_objinfo(file["betas"].id, b".").objno
        with pytest.raises(btree.IndexNotUnderstood, match="more chunks"):
            list(btree.read_chunks(identify(str(path)), betas, header_at, (100, 30, 2)))


def test_a_file_cut_short_is_an_error_of_ours(tmp_path):
    path = write(tmp_path / "a.h5")
    with h5py.File(path) as file:
        found = StoredDataset(identify(str(path)), "betas", file["betas"], SHAPE, 0)
        with open(path, "r+b") as cut:
            cut.truncate(5000)
        with pytest.raises(ps.errors.PenstockError):
            layout._walk_nodes(found)
