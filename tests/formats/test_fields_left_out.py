"""Fields that cannot be delivered are named, with the reason: when files are opened, inspected and shown."""

import io
import json
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

import penstock as ps
from penstock.cli.main import main

ROWS = 6


def hdf5(folder: Path) -> Path:
    path = folder / "a.h5"
    with h5py.File(path, "w") as file:
        file["betas"] = np.zeros((ROWS, 3), np.float32)
        file["name"] = [f"sample {row}" for row in range(ROWS)]
        file["code"] = np.array([b"ab"] * ROWS)
        spikes = file.create_dataset("spikes", (ROWS,), h5py.vlen_dtype(np.int32))
        spikes[0] = [1, 2]
        file["group/table"] = np.zeros(ROWS, [("x", "f4"), ("y", "i2")])
        file["elsewhere"] = h5py.ExternalLink("b.h5", "/betas")
        file["comment"] = "one for all"
        file["axes"] = ["x", "y", "z"]  # not one for each sample
    return path


def tar(folder: Path) -> Path:
    path = folder / "a.tar"
    with tarfile.open(path, "w") as archive:
        for row in range(ROWS):
            for ending, data in (("cls", b"3"), ("mp3", b"ID3 sound"), ("pyd", b"\x80\x04.")):
                member = tarfile.TarInfo(f"{row:03}.{ending}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return path


def parquet(folder: Path) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = folder / "a.parquet"
    columns = {"x": range(ROWS), "caption": ["a"] * ROWS, "tokens": [[1, 2]] * ROWS, "when": [0] * ROWS}
    table = pa.table({name: list(values) for name, values in columns.items()})
    pq.write_table(table.set_column(3, "when", table["when"].cast(pa.timestamp("s"))), path)
    return path


def zarr(folder: Path) -> Path:
    library = pytest.importorskip("zarr")
    path = folder / "a.zarr"
    group = library.open_group(str(path), mode="w", zarr_format=2)
    values = {"betas": np.ones((ROWS, 3), np.float32), "name": np.full(ROWS, "a", "U4"), "axes": np.full(3, "x", "U4")}
    for name, each in values.items():
        group.create_array(name, shape=each.shape, dtype=each.dtype)[:] = each
    return path


def tiledb(folder: Path) -> Path:
    library = pytest.importorskip("tiledb")
    library.ctx._needs_fork_wrapper = False  # or it would put a warning into os.fork for the rest of this process
    path = folder / "a.tiledb"
    domain = library.Domain(library.Dim("row", domain=(0, ROWS - 1), tile=ROWS, dtype=np.int32))
    attributes = [
        library.Attr("x", np.float32),
        library.Attr("name", np.dtype("U"), var=True),
        library.Attr("maybe", np.int32, nullable=True),
    ]
    library.Array.create(str(path), library.ArraySchema(domain, attributes))
    with library.open(str(path), "w") as array:
        names = np.array([f"n{row}" for row in range(ROWS)], object)
        array[:] = {"x": np.ones(ROWS, np.float32), "name": names, "maybe": np.ones(ROWS, np.int32)}
    return path


def pictures(folder: Path) -> Path:
    path = folder / "pictures"
    path.mkdir()
    for row in range(ROWS):
        Image.new("RGB", (4, 3)).save(path / f"{row}.jpg")
        (path / f"{row}.txt").write_text("a caption")
    (path / "README.md").write_text("about")  # goes with no picture
    return path


def pictures_with_table(folder: Path) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = folder / "pictures"
    path.mkdir()
    for row in range(ROWS):
        Image.new("RGB", (4, 3)).save(path / f"{row}.jpg")
    names = [f"{row}.jpg" for row in range(ROWS)]
    pq.write_table(pa.table({"file": names, "boxes": [[1, 2, 3]] * ROWS}), path / "metadata.parquet")
    return path


def npz(folder: Path) -> Path:
    import zipfile

    path = folder / "a.npz"
    np.savez(path, x=np.arange(ROWS), name=np.array(["a"] * ROWS), none=np.zeros(ROWS, "S0"), rate=30.0)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("notes.json", "{}")
    return path


Make = Callable[[Path], Path]

CASES: dict[str, tuple[Make, str, dict[str, str]]] = {
    "hdf5": (
        hdf5,
        "betas",
        {
            "name": "text",
            "code": "text",
            "spikes": "a list of int32",
            "group/table": "a table of x, y",
            "elsewhere": "another file, 'b.h5'",
        },
    ),
    "tar": (tar, "cls", {"mp3": "no kind known", "pyd": "pickled"}),
    "parquet": (parquet, "x", {"caption": "text", "tokens": "lists of any length", "when": "timestamp"}),
    "zarr": (zarr, "betas", {"name": "no numbers"}),
    "tiledb": (tiledb, "x", {"name": "of variable length", "maybe": "may be null"}),
    "pictures": (pictures, "image", {"*.txt": "6 files beside"}),
    "a table": (pictures_with_table, "image", {"boxes": "lists of any length"}),
    "npz": (
        npz,
        "x",
        {"notes.json": "not an array", "name": "no numbers", "none": "no numbers"},
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str, dict[str, str]]:
    make, field, expected = CASES[request.param]
    return str(make(tmp_path)), field, expected


def assert_named(text: str, expected: dict[str, str]) -> None:
    for name, why in expected.items():
        assert any(repr(name) in part and why in part for part in text.replace("\n", "; ").split("; ")), (name, text)


def test_opening_warns_once_of_all_fields_and_why(case: tuple[str, str, dict[str, str]]) -> None:
    path, _, expected = case
    with pytest.warns(ps.FieldsLeftOut) as warned:
        ds = ps.open(path)
    assert len(warned) == 1
    assert warned[0].filename == __file__, "the caller's line is named"
    assert set(ds.fields_left_out) == set(expected)
    assert_named(str(warned[0].message), expected)
    assert_named(repr(ds), expected)


def test_inspecting_tells_without_a_warning(case: tuple[str, str, dict[str, str]]) -> None:
    path, _, expected = case
    found = ps.inspect(path)
    assert set(found.fields_left_out) == set(expected)
    assert_named(str(found), expected)


def test_fields_chosen_by_name_open_without_a_word(case: tuple[str, str, dict[str, str]]) -> None:
    path, field, _ = case
    ds = ps.open(path, fields=(field,))
    assert ds.fields_left_out == {}
    assert "left out" not in repr(ds)


def test_the_list_of_a_folder_is_saved_with_what_goes_beside(tmp_path: Path) -> None:
    path = pictures(tmp_path)
    for _ in range(2):
        with pytest.warns(ps.FieldsLeftOut, match=r"\*\.txt"):
            ps.open(path, index_dir=tmp_path / "index")


def test_several_files_warn_once(tmp_path: Path) -> None:
    paths = []
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        paths.append(hdf5(folder))
    with pytest.warns(ps.FieldsLeftOut) as warned:
        ps.open(paths)
    assert len(warned) == 1


COMBINED: dict[str, tuple[Callable[[ps.Dataset], ps.Dataset], str]] = {
    "select": (lambda ds: ds.select([0, 1]), "name"),
    "rename": (lambda ds: ds.rename(voxels="betas"), "name"),
    "cast": (lambda ds: ds.cast("betas", "float64"), "name"),
    "permute": (lambda ds: ds.permute("betas", 0), "name"),
    "pad": (lambda ds: ds.pad("betas", to=5), "name"),
    "map": (lambda ds: ds.map(lambda batch: {"b": batch["betas"] * 2}), "name"),
    "gather": (lambda ds: ds.gather([[0, 1], [2, 3]]), "name"),
    "normalize": (lambda ds: ds.normalize("betas", np.zeros(3), np.ones(3)), "name"),
    "select_within": (lambda ds: ds.select_within("betas", np.s_[:2]), "name"),
    "concat": (lambda ds: ps.concat([ds.only("betas"), ds]), "name"),
    "concat of others": (lambda ds: ps.concat([ds, ds.cast("betas", "float32", scale=2)]), "name"),
    "join": (lambda ds: ps.join(brain=ds, label=np.arange(ROWS)), "brain.name"),
    "refresh": (lambda ds: ds.refresh(), "name"),
}


@pytest.mark.parametrize("how", COMBINED)
def test_what_is_made_of_a_dataset_keeps_them(tmp_path: Path, how: str) -> None:
    with pytest.warns(ps.FieldsLeftOut):
        ds = ps.open(hdf5(tmp_path))
    combine, name = COMBINED[how]
    made = combine(ds)
    assert made.fields_left_out[name] == ds.fields_left_out["name"]
    assert set(ps.inspect(made).fields_left_out) == set(made.fields_left_out)


def test_fields_that_were_chosen_leave_nothing_out(tmp_path: Path) -> None:
    with pytest.warns(ps.FieldsLeftOut):
        ds = ps.open(hdf5(tmp_path))
    assert ds.only("betas").fields_left_out == {}


@pytest.mark.parametrize("combine", [lambda ds: ps.concat([ds]), lambda ds: ps.join(x=ds)], ids=["concat", "join"])
def test_files_that_were_left_out_stay_told(tmp_path: Path, combine: Callable[[ps.Dataset], ps.Dataset]) -> None:
    np.save(tmp_path / "a.npy", np.arange(4))
    (tmp_path / "b.npy").write_bytes(b"\x93NUMPY")
    ds = combine(ps.open([tmp_path / "a.npy", tmp_path / "b.npy"], on_error="skip"))
    assert len(ds.left_out) == 1


def test_the_category_silences_it(tmp_path: Path) -> None:
    path = hdf5(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=ps.FieldsLeftOut)
        ps.open(path)


@pytest.mark.parametrize("options", [{}, {"columns": ("betas",)}], ids=["all", "chosen"])
def test_planning_from_files(tmp_path: Path, options: dict[str, Any]) -> None:
    path = hdf5(tmp_path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ps.plan(path, batch_size=2, memory="64MiB", measure=0, **options)
    assert [each.category for each in warned] == ([] if options else [ps.FieldsLeftOut])


def test_commands_tell_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(hdf5(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["plan", path, "--memory", "64MiB", "--no-measure"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("penstock plan: 5 fields are left out")
    assert main(["plan", path, "--memory", "64MiB", "--no-measure", "--columns", "betas"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["inspect", path, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    told = json.loads(out)
    assert told["fields_left_out"].keys() == ps.inspect(path).fields_left_out.keys()
    assert told["fields"]["betas"]["shape"] == [3]


def test_hdf5_names_out_of_order_are_no_field_less(tmp_path):
    """Names of a group are found by their order; one that is out of order is listed, and cannot be opened."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        file["v"], file["w"] = np.arange(6), np.arange(6) + 1.5
    data = bytearray(path.read_bytes())
    first = data.index(b"SNOD") + 8
    entries = slice(first, first + 8), slice(first + 40, first + 48)  # where the names of two entries lie
    data[entries[0]], data[entries[1]] = data[entries[1]], data[entries[0]]
    path.write_bytes(data)
    with h5py.File(path) as file:
        assert sorted(file) == ["v", "w"]
        assert file.get("w") is None
    with pytest.raises(ps.Corrupt, match="w is listed"):
        ps.open(path, index_dir=False)
