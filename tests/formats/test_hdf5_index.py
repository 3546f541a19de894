"""Headers of chunk indices that contradict their dataset are refused before HDF5 walks through them."""

import h5py
import numpy as np
import pytest

import penstock as ps
from penstock.errors import Corrupt

VALUES = np.arange(20 * 30, dtype=np.int16).reshape(20, 30)

KINDS = {
    "fixed array": {},
    "paged fixed array": {"chunks": (1, 1), "maxshape": (2000, 30)},
    "extensible array": {"maxshape": (None, 30)},
    "B-tree": {"maxshape": (None, None)},
}
FILTERS = {"plain": {}, "gzip": {"compression": "gzip", "shuffle": True}, "fletcher32": {"fletcher32": True}}


def write(path, libver="latest", **options):
    with h5py.File(path, "w", libver=libver) as file:
        file.create_dataset("x", data=VALUES, **{"chunks": (3, 7), **options})
    return path


@pytest.mark.parametrize("libver", ["latest", ("v110", "v110"), ("v114", "v114")], ids=str)
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_sound_indices_are_believed(tmp_path, kind, filters, libver):
    """Of layouts of version 4 and 5, which give a chunk's length different widths."""
    path = write(tmp_path / "a.h5", libver, **KINDS[kind], **FILTERS[filters])
    assert np.array_equal(ps.open(path)[:]["x"], VALUES)


@pytest.mark.parametrize("rows", [0, 1, 5, 19])
def test_datasets_that_have_grown_or_shrunk_are_believed(tmp_path, rows):
    for number, options in enumerate(KINDS.values()):
        path = write(tmp_path / f"{number}.h5", **{**options, "maxshape": options.get("maxshape", (40, 30))})
        with h5py.File(path, "r+", libver="latest") as file:
            file["x"].resize(1 + rows, 0)
            file["x"].resize(4 + rows, 0)
            file["x"][:] = VALUES[: 4 + rows] if rows < 17 else np.resize(VALUES, (4 + rows, 30))
            expected = file["x"][:]
        assert np.array_equal(ps.open(path)[:]["x"], expected)


def test_a_header_in_several_parts(tmp_path):
    path = write(tmp_path / "a.h5", maxshape=(None, None))
    with h5py.File(path, "r+", libver="latest") as file:
        for number in range(20):
            file["x"].attrs[f"note {number}"] = "x" * 100
    assert np.array_equal(ps.open(path)[:]["x"], VALUES)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize(
    ("kind", "sign", "at", "told"),
    [
        ("B-tree", b"BTHD", 5, "as its kind"),
        ("B-tree", b"BTHD", 9, "bytes of a node"),
        ("B-tree", b"BTHD", 10, "bytes of a record"),
        ("B-tree", b"BTHD", 25, "records of its root"),
        ("B-tree", b"BTHD", 32, "number of records"),
        ("fixed array", b"FAHD", 5, "as its kind"),
        ("fixed array", b"FAHD", 6, "bytes of an entry"),
        ("fixed array", b"FAHD", 7, "bits of a page"),
        ("fixed array", b"FAHD", 15, "number of entries"),
        ("extensible array", b"EAHD", 6, "bytes of an entry"),
        ("extensible array", b"EAHD", 8, "entries of its first block"),
        ("extensible array", b"EAHD", 10, "least pointers"),
        ("extensible array", b"EAHD", 50, "last entry"),
    ],
)
def test_an_index_that_contradicts_its_dataset_is_refused(tmp_path, kind, sign, at, told, filters):
    """With a checksum that is right, HDF5 crashes or does not end on each of the kinds."""
    path = write(tmp_path / "a.h5", **KINDS[kind], **FILTERS[filters])
    data = bytearray(path.read_bytes())
    data[data.index(sign) + at] ^= 0x78
    path.write_bytes(data)
    with pytest.raises(Corrupt, match=f"a.h5: the chunk index of dataset '/x'.*{told}"):
        ps.open(path)
