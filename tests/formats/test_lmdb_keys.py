"""Which keys make which sample: by how they are named."""

import numpy as np
import pytest

from penstock.base.text_column import TextColumn
from penstock.formats.lmdb import keys as lmdb_keys
from penstock.formats.tar.samples import NOT_THERE, SampleTable
from penstock.formats.tar.walk import MemberTable
from penstock.read import kinds


def table(keys: list[str]) -> MemberTable:
    """Entries in the order of their keys, value ``n`` of the sorted keys at offset ``n``."""
    raws = sorted(key.encode() for key in keys)
    ends = np.cumsum([len(raw) for raw in raws], dtype=np.int64)
    numbers = np.arange(len(raws), dtype=np.int64)
    return MemberTable("x.lmdb", TextColumn(np.frombuffer(b"".join(raws), np.uint8), ends), numbers, numbers + 100)


def grouped(keys: list[str]) -> SampleTable:
    return lmdb_keys.group(table(keys), kinds.is_known)


CASES: dict[str, tuple[list[str], tuple[str, ...], list[str]]] = {
    "padded": (["00", "01", "02"], ("*",), ["00", "01", "02"]),
    "counted": ([str(n) for n in range(12)], ("*",), [str(n) for n in range(12)]),
    "a prefix": (["img_10", "img_9", "img_8"], ("img_*",), ["8", "9", "10"]),
    "text recognition": (
        [f"{kind}-{n:09d}" for kind in ("image", "label") for n in (1, 2)] + ["num-samples"],
        ("image-*", "label-*"),
        ["000000001", "000000002"],
    ),
    "resolutions": (
        [f"{size}-{n:05d}" for size in (8, 16) for n in range(3)] + ["length"],
        ("16-*", "8-*"),
        ["00000", "00001", "00002"],
    ),
    "tensorpack": (["00000000", "00000001", "__keys__", "__len__"], ("*",), ["00000000", "00000001"]),
    "numbers first": (["0_x", "0_y", "10_x", "10_y", "2_x", "2_y"], ("*_x", "*_y"), ["0", "2", "10"]),
    "names of files": (["a/1.jpg", "a/1.cls", "b/1.jpg", "b/1.cls"], ("*.cls", "*.jpg"), ["a/1", "b/1"]),
    "one kind of file": (["n01_1.JPEG", "n02_2.JPEG"], ("*.JPEG",), ["n01_1", "n02_2"]),
    "endings that say nothing": (["a.b", "c.d", "e.b"], ("*",), ["a.b", "c.d", "e.b"]),
    "hashes": (["9fa1", "b2", "c77e"], ("*",), ["9fa1", "b2", "c77e"]),
    "hashes that end in numbers": (["fa1", "b2", "ce3"], ("*",), ["b2", "ce3", "fa1"]),
    "classes and names": (["00_cat/x", "01_dog/y"], ("*",), ["00_cat/x", "01_dog/y"]),
    "the same number twice": (["1", "01", "2"], ("*",), ["01", "1", "2"]),
    "long numbers": (["1" * 30, "2" * 30], ("*",), ["1" * 30, "2" * 30]),
}


@pytest.mark.parametrize("case", CASES)
def test_ways_of_naming(case: str) -> None:
    keys, fields, samples = CASES[case]
    found = grouped(keys)
    assert (found.fields, list(found.keys)) == (fields, samples)
    stored = table(keys)
    where = {name: (offset, length) for name, offset, length in stored}
    for column, pattern in enumerate(found.fields):
        for row, sample in enumerate(found.keys):
            cell = (int(found.offsets[row, column]), int(found.lengths[row, column]))
            assert cell == where[pattern.replace("*", sample, 1)]
    assert found.passed_over == len(keys) - found.offsets.size


def test_a_few_values_may_lack() -> None:
    keys = [f"{kind}-{n}" for kind in ("x", "y") for n in range(10)]
    keys.remove("y-4")
    found = grouped(keys)
    assert found.fields == ("x-*", "y-*")
    assert np.flatnonzero(found.offsets[:, 1] == NOT_THERE).tolist() == [4]


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["image-*", "label-*"], ["image", "label"]),
        (["*"], [""]),
        (["*.JPG", "*_Seg.png"], ["jpg", "seg.png"]),
        (["x-*", "x_*"], ["x-*", "x_*"]),
    ],
)
def test_names_of_fields(patterns: list[str], names: list[str]) -> None:
    assert lmdb_keys.field_names(patterns) == names


def test_databases_side_by_side() -> None:
    keys = [str(n) for n in range(11)]
    found = lmdb_keys.side_by_side([("x", table(keys)), ("y", table(keys))])
    assert found is not None
    assert (found.fields, list(found.keys)) == (("x:*", "y:*"), keys)
    order = [sorted(keys).index(key) for key in keys]
    assert found.offsets.tolist() == [[n, n] for n in order]
    assert lmdb_keys.side_by_side([("x", table(keys)), ("y", table(keys[1:]))]) is None
    assert lmdb_keys.side_by_side([("x", table(["a", "bc"])), ("y", table(["ab", "c"]))]) is None
