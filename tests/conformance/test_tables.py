"""Parquet and Arrow tables against pyarrow's own reading of the same file."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.dataset.memory import HeldStore
from penstock.errors import Corrupt
from penstock.formats import parquet
from penstock.testing import check_store


def table(rows: int = 23) -> pa.Table:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(rows, 6)).astype(np.float32)
    pictures = rng.integers(0, 256, (rows, 2, 3), np.uint8)
    return pa.table(
        {
            "label": pa.array(rng.integers(0, 9, rows)),
            "weight": pa.array(rng.normal(size=rows).astype(np.float32)),
            "kept": pa.array(rng.random(rows) < 0.5),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), 6),
            "picture": pa.FixedShapeTensorArray.from_numpy_ndarray(pictures),
            "name": pa.array([f"s{row}" for row in range(rows)]),
        }
    )


def columns(whole: pa.Table) -> dict[str, np.ndarray]:
    found = {name: whole[name].to_numpy() for name in ("label", "weight", "kept")}
    found["vector"] = np.stack(whole["vector"].to_numpy(zero_copy_only=False))
    found["picture"] = whole["picture"].combine_chunks().to_numpy_ndarray()
    return found


def write(path: Path, whole: pa.Table, rows_a_part: int) -> None:
    if path.suffix == ".parquet":
        pq.write_table(whole, path, row_group_size=rows_a_part)
    elif path.name.startswith("packed"):
        pa.feather.write_feather(whole, path, compression="zstd", chunksize=rows_a_part)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, whole.schema) as writer:
            writer.write_table(whole, max_chunksize=rows_a_part)


@pytest.mark.filterwarnings("ignore::penstock.FieldsLeftOut")
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("rows_a_part", [5, 100])
@pytest.mark.parametrize("name", ["a.parquet", "plain.arrow", "packed.feather"])
def test_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rows_a_part: int, held: bool) -> None:
    if not held:
        monkeypatch.setattr(parquet, "HELD_BYTES", 0)
    write(tmp_path / name, table(), rows_a_part)
    store = ps.open(tmp_path / name).store
    assert isinstance(store, HeldStore) == held
    check_store(lambda: ps.open(tmp_path / name).store, columns(table()))
    if held:
        size = sum(values.nbytes for values in columns(table()).values())
        batch = size * min(rows_a_part, 23) // 23 if name == "packed.feather" else 0  # which is decoded whole
        assert store.index_bytes == size + batch
    elif name != "plain.arrow":
        assert store.blocks is not None
        assert store.blocks.tolist() == list(range(0, 23, rows_a_part))


def test_labels_join_anything(tmp_path: Path) -> None:
    write(tmp_path / "labels.parquet", table(), 5)
    np.save(tmp_path / "betas.npy", np.arange(46.0).reshape(23, 2))
    ds = ps.join(betas=ps.open(tmp_path / "betas.npy"), label=ps.open(tmp_path / "labels.parquet", fields=["label"]))
    seen: list[Any] = []
    for betas, label in ps.Loader(ds, batch_size=4, shuffle=True, memory="64MiB", columns=("betas", "label")):
        seen += zip((betas[:, 0] / 2).tolist(), label.tolist(), strict=True)
    assert sorted(seen) == list(zip(range(23), table()["label"].to_pylist(), strict=True))


def test_what_is_no_field(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", table(), 5)
    with pytest.raises(ps.errors.SchemaMismatch, match="column 'name' is string"):
        ps.open(tmp_path / "a.parquet", fields=["name"])
    with pytest.raises(ps.errors.Missing, match="no column 'nmae'; the file has 'label' \\(int64\\)"):
        ps.open(tmp_path / "a.parquet", fields=["nmae"])
    pq.write_table(pa.table({"name": ["a", "b"]}), tmp_path / "b.parquet")
    with pytest.raises(ps.errors.Missing, match="no column of numbers"):
        ps.open(tmp_path / "b.parquet")


def test_nulls_are_no_numbers(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([1.0, None, 3.0])}), tmp_path / "a.parquet")
    with pytest.raises(ps.errors.Missing, match="rows 0 to 2, column 'x' has 1 nulls"):
        ps.open(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.parquet", "plain.arrow", "packed.feather"])
def test_damaged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(parquet, "HELD_BYTES", 0)
    path = tmp_path / name
    write(path, table(500), 100)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ps.errors.Corrupt, match=r"not a whole .* fetch it again"):
        ps.open(path)


@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("size", [8, 300_000])
def test_a_part_that_holds_fewer_rows_than_it_declares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int, size: int
) -> None:
    """As damage to a page's header makes it: Arrow itself does not mind."""
    pq.write_table(pa.table({"x": np.arange(size)}), tmp_path / "a.parquet", row_group_size=size)
    part, cut = parquet.Parquet.part, lambda self, number, names: part(self, number, names).slice(0, kept)
    monkeypatch.setattr(parquet.Parquet, "part", cut)
    monkeypatch.setattr(parquet.Parquet, "pieces", lambda self, name, rows: [cut(self, 0, [name])])  # of a small table
    with pytest.raises(Corrupt, match=rf"a\.parquet: rows 0 .*'x': {size:,} values were declared, but {kept}"):
        ps.open(tmp_path / "a.parquet")[:]


@pytest.mark.parametrize("name", ["a.arrow", "a.parquet"])
def test_any_byte_that_is_zero_gives_an_error_or_what_arrow_holds_for_valid(tmp_path: Path, name: str) -> None:
    """Types that Arrow does not read, buffers shorter than the values that they are said to hold, and the rest."""
    path, values = tmp_path / name, np.arange(1, 9, dtype=np.int32)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(values), 2)})
    if name == "a.parquet":
        pq.write_table(table, path, compression="none", store_schema=False, write_statistics=False)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    data, refused = path.read_bytes(), 0
    for at in np.flatnonzero(np.frombuffer(data, np.uint8)).tolist():
        path.write_bytes(data[:at] + b"\0" + data[at + 1 :])
        try:
            got = ps.open(path, index_dir=False)[:]
        except ps.errors.PenstockError:
            refused += 1
            continue
        read = pq.read_table(path) if name == "a.parquet" else pa.ipc.open_file(path).read_all()
        read.validate(full=True)
        assert np.array_equal(next(iter(got.values())).tolist(), read.column(0).to_pylist()), at
    assert refused > 50
