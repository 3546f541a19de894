"""TileDB arrays that are damaged, incomplete or of another kind: an error that says where and the way out."""

import re
import shutil
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
import tiledb
from penstock.errors import Changed, ConfigError, Corrupt, Missing, SchemaMismatch

# Its own writing, below, would put a warning into os.fork for the rest of this process.
tiledb.ctx._needs_fork_wrapper = False


def create(path: Path, attributes: list[Any], sparse: bool = False, columns: int = 4, kind: Any = np.int64) -> str:
    rows = tiledb.Dim("row", domain=(0, 19), tile=2, dtype=kind)
    across = tiledb.Dim("column", domain=(0, columns - 1), tile=columns, dtype=kind)
    tiledb.Array.create(str(path), tiledb.ArraySchema(tiledb.Domain(rows, across), attributes, sparse=sparse))
    return str(path)


@pytest.fixture
def array(tmp_path: Path) -> str:
    path = create(tmp_path / "a", [tiledb.Attr("x", dtype="f8", filters=[tiledb.ZstdFilter()])])
    with tiledb.open(path, "w") as opened:
        opened[:] = np.arange(80.0).reshape(20, 4)
    return path


def test_never_written(tmp_path: Path) -> None:
    path = create(tmp_path / "a", [tiledb.Attr("x", dtype="f8")])
    with pytest.raises(Missing, match="nothing was ever written"):
        ps.open(path)


@pytest.mark.case(12)
def test_holes_are_refused_unless_they_are_allowed(tmp_path: Path) -> None:
    path = create(tmp_path / "a", [tiledb.Attr("x", dtype="f8", fill=-1.0)])
    for begin, end, columns in ((0, 6, 4), (8, 20, 4)):
        with tiledb.open(path, "w") as opened:
            opened[begin:end, :columns] = np.ones((end - begin, columns))
    with pytest.raises(Missing, match=r"cells from \(6, 0\) on were never written.*allow_fill=True"):
        ps.open(path)
    assert ps.open(path, allow_fill=True)[:]["x"][:, 0].tolist() == [1] * 6 + [-1] * 2 + [1] * 12
    with tiledb.open(path, "w") as opened:
        opened[6:8, :3] = np.ones((2, 3))
    with pytest.raises(Missing, match=r"cells from \(6, 3\) on"):
        ps.open(path)
    with tiledb.open(path, "w") as opened:
        opened[5:9, 3:4] = np.ones((4, 1))
    assert ps.open(path)[:]["x"].tolist() == np.ones((20, 4)).tolist()


def test_sparse_arrays_are_refused(tmp_path: Path) -> None:
    path = create(tmp_path / "a", [tiledb.Attr("x", dtype="f8")], sparse=True)
    with tiledb.open(path, "w") as opened:
        opened[[1, 2], [0, 1]] = np.ones(2)
    with pytest.raises(SchemaMismatch, match="sparse TileDB array; expected a dense one"):
        ps.open(path)


def test_attributes_that_are_no_numbers(tmp_path: Path) -> None:
    text, nullable = tiledb.Attr("text", dtype="U", var=True), tiledb.Attr("some", dtype="f8", nullable=True)
    path = create(tmp_path / "a", [text, tiledb.Attr("x", dtype="f8")])
    with tiledb.open(path, "w") as opened:
        opened[:] = {"text": np.full((20, 4), "a", object), "x": np.ones((20, 4))}
    with pytest.warns(ps.FieldsLeftOut, match="'text': text, or of variable length"):
        assert list(ps.open(path).fields) == ["x"]
    with pytest.raises(Missing, match=r"no attribute 'text' of numbers; the array has 'text' .*'x' \(float64\)"):
        ps.open(path, fields=["text"])
    assert nullable.isnullable


def test_rows_along_a_dimension_that_is_not_there(array: str) -> None:
    with pytest.raises(ConfigError, match="row_axis=2, but the array has 2 dimensions"):
        ps.open(array, row_axis=2)


def test_a_damaged_tile(array: str) -> None:
    ds = ps.open(array)
    assert ds[3]["x"].tolist() == [12, 13, 14, 15]
    (tiles,) = Path(array, "__fragments").glob("*/a0.tdb")
    whole = bytearray(tiles.read_bytes())
    whole[len(whole) // 2 : len(whole) // 2 + 40] = bytes(40)
    tiles.write_bytes(whole)
    ds.store.close()
    with pytest.raises(Corrupt, match=r"a: x, rows [0-9]+ to [0-9]+: .*damaged there.*on_error="):
        ds[:]
    with ps.Loader(ds, batch_size=4, memory="64MiB", on_error="skip", output="numpy") as loader:
        kept = [row for batch in loader for row in batch["x"][:, 0].tolist()]
        assert 0 < loader.stats().left_out_samples == 20 - len(kept) < 20
    assert set(kept) <= set(np.arange(0, 80, 4).tolist())


def test_a_fragment_that_was_removed(array: str) -> None:
    ds = ps.open(array)
    ds.store.close()
    for fragment in Path(array, "__fragments").iterdir():
        shutil.rmtree(fragment)
    with pytest.raises(Corrupt, match=r"TileDB cannot open it .*restore it"):
        ds[:]


@pytest.mark.case(10)
def test_another_array_under_the_same_name(array: str) -> None:
    ds = ps.open(array)
    shutil.rmtree(array)
    create(Path(array), [tiledb.Attr("x", dtype="f8")])
    with pytest.raises(Changed, match=r"replaced|rewritten"):
        ds[:]


def test_a_damaged_schema(array: str) -> None:
    for schema in Path(array, "__schema").iterdir():
        if schema.is_file():
            schema.write_bytes(b"nothing")
    with pytest.raises(Corrupt, match=r"__schema.*34 bytes at byte 0 are beyond byte 7.*restore it"):
        ps.open(array)


@pytest.mark.case(24)
def test_a_schema_that_decodes_to_less_than_it_declares(array: str) -> None:
    """The library would read beyond what was decoded, and crash."""
    (schema,) = (path for path in Path(array, "__schema").iterdir() if path.is_file())
    whole = schema.read_bytes()
    notes = whole.index(struct.pack("<II", 0, 1), 60)  # of the one chunk: no notes, one part
    decoded, stored = struct.unpack_from("<II", whole, notes + 8)
    for parts, data in (
        (struct.pack("<II", 8, stored), whole[notes + 16 :]),
        (struct.pack("<II", decoded, stored), zlib.compress(b"12345678").ljust(stored, b"\0")),
        (struct.pack("<II", decoded, stored), zlib.compress(bytes(decoded + 1)).ljust(stored, b"\0")),
        (struct.pack("<II", decoded, stored), whole[notes + 16 : -4] + bytes(4)),
    ):
        schema.write_bytes(whole[: notes + 8] + parts + data)
        with pytest.raises(Corrupt, match=r"__schema/.*a chunk at byte 72 .*restore it"):
            ps.open(array)
    schema.write_bytes(whole)
    assert len(ps.open(array)) == 20


@pytest.mark.case(24)
@pytest.mark.parametrize("tile", [0, 7])
def test_a_tile_that_declares_millions_of_chunks(array: str, tile: int) -> None:
    """The library would take 40 bytes for each of them."""
    (tiles,) = Path(array, "__fragments").glob("*/a0.tdb")
    whole = tiles.read_bytes()
    begins = [match.start() for match in re.finditer(re.escape(struct.pack("<QI", 1, 64)), whole)]
    assert len(begins) == 10
    tiles.write_bytes(whole[: begins[tile]] + struct.pack("<Q", 2**24) + whole[begins[tile] + 8 :])
    with pytest.raises(Corrupt, match=rf"a0\.tdb: a tile at byte {begins[tile]} declares 16,777,216 chunks in"):
        ps.open(array)


@pytest.mark.case(24)
def test_the_last_of_many_tiles_declares_millions_of_chunks(tmp_path: Path) -> None:
    """The record of where tiles begin has several parts."""
    count, path = 9_000, str(tmp_path / "many.tiledb")
    domain = tiledb.Domain(tiledb.Dim("i", domain=(0, count - 1), tile=1, dtype=np.int64))
    tiledb.Array.create(path, tiledb.ArraySchema(domain, [tiledb.Attr("x", dtype=np.int32)]))
    with tiledb.open(path, "w") as array:
        array[:] = np.arange(count, dtype=np.int32)
    assert ps.open(path)[count - 1]["x"] == count - 1
    (tiles,) = Path(path, "__fragments").glob("*/a0.tdb")
    whole = tiles.read_bytes()
    begin = whole.rindex(struct.pack("<QI", 1, 4))
    tiles.write_bytes(whole[:begin] + struct.pack("<Q", 2**24) + whole[begin + 8 :])
    with pytest.raises(Corrupt, match=rf"a0\.tdb: a tile at byte {begin:,} declares 16,777,216 chunks in"):
        ps.open(path)


def test_without_the_library(array: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiledb", None)
    with pytest.raises(ConfigError, match=r'pip install "penstock\[tiledb\]"'):
        ps.open(array)
