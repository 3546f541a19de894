"""CRC-32 of Parquet pages: compared wherever a page is read, if the file has them."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.errors import Corrupt
from penstock.formats import parquet

VALUES = np.random.default_rng(3).integers(0, 2**40, (60, 50))


def table() -> pa.Table:
    lists = pa.FixedSizeListArray.from_arrays(pa.array(VALUES.reshape(-1)), VALUES.shape[1])
    return pa.table({"x": lists, "n": np.arange(60)})


def write(path: Path, found: pa.Table) -> Path:
    pq.write_table(found, path, row_group_size=20, use_dictionary=False, compression="none", write_page_checksum=True)
    return path


def flip(path: Path, column: int, group: int = 1) -> None:
    """Change a bit near the end of a column's values, in a group of rows."""
    stored = pq.ParquetFile(path).metadata.row_group(group).column(column)
    begin = stored.dictionary_page_offset or stored.data_page_offset
    data = bytearray(path.read_bytes())
    data[begin + stored.total_compressed_size - 9] ^= 4
    path.write_bytes(data)


def everything(path: Path) -> None:
    with ps.Loader(ps.open(path), batch_size=5, memory="64MiB", output="numpy") as loader:
        list(loader)


@pytest.mark.case(4)
@pytest.mark.parametrize("held", [True, False], ids=["held in memory", "by row groups"])
@pytest.mark.parametrize("column", [0, 1])
def test_a_flipped_bit_is_an_error(tmp_path, monkeypatch, held, column):
    if not held:
        monkeypatch.setattr(parquet, "HELD_BYTES", 0)
    path = write(tmp_path / "a.parquet", table())
    everything(path)
    assert ps.verify(path).sound
    flip(path, column)
    with pytest.raises(Corrupt, match=r"a\.parquet.*CRC"):
        everything(path)


@pytest.mark.case(4)
def test_verify_finds_it(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "HELD_BYTES", 0)
    path = write(tmp_path / "a.parquet", table())
    flip(path, 1)
    verdict = ps.verify(path)
    assert verdict.unreadable == 20
    assert not verdict.sound


@pytest.mark.case(4)
def test_a_table_of_a_folder(tmp_path):
    for row in range(3):
        np.save(tmp_path / f"{row}.npy", np.arange(4))
    found = pa.table({"file_name": [f"{row}.npy" for row in range(3)], "label": np.arange(3) + 100})
    path = write(tmp_path / "metadata.parquet", found)
    assert ps.open(tmp_path)[2]["label"] == 102
    data = path.read_bytes()
    place = data.index(np.arange(100, 103).tobytes())
    path.write_bytes(data[:place] + b"\x07" + data[place + 1 :])
    with pytest.raises(Corrupt, match="CRC"):
        ps.open(tmp_path)


@pytest.mark.case(4)
def test_what_convert_writes_has_them(tmp_path):
    ps.convert(ps.from_arrays(x=VALUES), tmp_path / "a.parquet", executor="serial")
    path = next(each for each in [tmp_path / "a.parquet", *tmp_path.rglob("*.parquet")] if each.is_file())
    flip(path, 0, group=0)
    with pytest.raises(Corrupt, match="CRC"):
        everything(tmp_path / "a.parquet")
