"""What ``open`` and the first reads take is within the budget too, from before libraries are loaded."""

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

import tiledb

tiledb.ctx._needs_fork_wrapper = False  # else its writing would put a warning into os.fork for good

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

CHILD = Path(__file__).with_name("opening_child.py")
MIB = 2**20


def run(path: Path, *more: object) -> dict:
    done = subprocess.run(
        [sys.executable, CHILD, str(path), *map(str, more)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def packed(path: Path) -> Path:
    values = np.random.default_rng(0).integers(0, 50, (24, MIB // 8))
    np.savez_compressed(path / "a.npz", x=values, y=values.astype(">i8"))
    return path / "a.npz"


def small_table(path: Path) -> Path:
    parquet.write_table(pa.table({"x": np.arange(24.0), "sound": np.arange(24) > 3}), path / "a.parquet")
    return path / "a.parquet"


def wide_table(path: Path) -> Path:
    rows = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(24.0 * 100_000)), 100_000)
    parquet.write_table(pa.table({"x": rows}), path / "a.parquet")
    return path / "a.parquet"


def arrow(row_values: int, compression: str | None) -> Callable[[Path], Path]:
    """All rows in one record batch."""

    def make(path: Path) -> Path:
        rows = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(24.0 * row_values)), row_values)
        table, options = pa.table({"x": rows}), pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_file(str(path / "a.arrow"), table.schema, options=options) as writer:
            writer.write_table(table)
        return path / "a.arrow"

    return make


def folder_with_table(path: Path) -> Path:
    for number in range(24):
        Image.new("RGB", (8, 8)).save(path / f"{number:02d}.png")
    names = [f"{number:02d}.png" for number in range(24)]
    parquet.write_table(pa.table({"file": names, "label": np.arange(24)}), path / "metadata.parquet")
    return path


def picture(kind: str) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        stream = io.BytesIO()
        options = {"compression": "tiff_lzw"} if kind == "tiff" else {}
        Image.new("RGB", (2000, 2000)).save(stream, "JPEG2000" if kind == "jp2" else kind.upper(), **options)
        with tarfile.open(path / "a.tar", "w") as archive:
            for number in range(2):
                info = tarfile.TarInfo(f"{number}.{kind}")
                info.size = len(stream.getvalue())
                archive.addfile(info, io.BytesIO(stream.getvalue()))
        return path / "a.tar"

    return make


MADE: dict[str, tuple[Callable[[Path], Path], int]] = {
    "packed npz": (packed, 24),
    "small table": (small_table, 24),
    "wide table": (wide_table, 24),
    "mapped arrow": (arrow(500_000, None), 24),
    "held arrow": (arrow(300_000, None), 24),
    "held arrow, compressed": (arrow(300_000, "zstd"), 24),
    "folder with a table": (folder_with_table, 24),
    **{kind: (picture(kind), 2) for kind in ("tiff", "jp2", "ppm", "png")},
}


@pytest.mark.parametrize("name", MADE)
def test_opening_and_reading_stay_within_the_smallest_budget(tmp_path: Path, name: str) -> None:
    make, rows = MADE[name]
    held = run(make(tmp_path))
    assert held["rows"] == rows, held
    assert held["peak"] <= held["limit"], held


@pytest.mark.parametrize("kind", ["tiff", "jp2"])
def test_opening_decodes_no_picture(tmp_path: Path, kind: str) -> None:
    held = run(picture(kind)(tmp_path))
    assert held["open"] < 8 * MIB, "decoded it has 11, and passes through several copies"


def test_folders_of_pictures_of_nsd_declare_the_largest(tmp_path: Path) -> None:
    Image.new("RGB", (16, 16)).save(tmp_path / "1.png")
    Image.new("RGB", (4000, 3000)).save(tmp_path / "2.png")
    held = run(tmp_path, 16)
    assert held["rows"] == 2
    assert 36 * MIB < held["peak"] <= held["limit"], held


@pytest.mark.case(8)
@pytest.mark.parametrize("place", [7, 8, 15, 33, 54], ids=["stored", "stored more", "decoded", "filters", "chunks"])
@pytest.mark.parametrize("record", ["__schema/*", "__fragments/*/__fragment_metadata.tdb"])
def test_damaged_tiledb_records_take_no_gigabytes(tmp_path: Path, record: str, place: int) -> None:
    axes = [tiledb.Dim(name, domain=(0, 3), tile=2, dtype=np.int64) for name in ("row", "column")]
    schema = tiledb.ArraySchema(tiledb.Domain(*axes), [tiledb.Attr("x", dtype="f8")])
    tiledb.Array.create(str(tmp_path / "a"), schema)
    with tiledb.open(str(tmp_path / "a"), "w") as array:
        array[:] = np.ones((4, 4))
    file = next(path for path in (tmp_path / "a").glob(record) if path.is_file())
    content = bytearray(file.read_bytes())
    content[place] = 0x30
    file.write_bytes(content)
    held = run(tmp_path / "a")
    assert held["error"] in ("Corrupt", "LimitExceeded"), held
    assert held["peak"] < 32 * MIB, held
