"""Data that would run code, start programs or lead elsewhere: read by a child whose every such act is counted.

Python reports to an audit hook each process that starts, each name that is unpickled and each file that is opened;
libraries of machine code do not, so the folders around the data are compared as well.
"""

import io
import json
import os
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from PIL import Image

import lmdb
import penstock as ps
import tiledb
from penstock.errors import ConfigError, Missing, PenstockError, Unsafe

# It wraps os.fork, to warn; tests of other modules fork.
tiledb.ctx._needs_fork_wrapper = False

VALUES = np.arange(12, dtype="f4").reshape(4, 3) + 1


def saved(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


# Every format, with pickles wherever it has room for them; what may be said of it.


def pickles_in(folder: Path, trap: Any) -> dict[str, tuple[str, ...]]:
    pickled, objects = pickle.dumps(trap), np.array([trap, None], object)
    np.save(folder / "objects.npy", objects, allow_pickle=True)
    np.savez(folder / "objects.npz", a=objects, b=np.arange(2))
    fields = {f"k{n}.{field}": pickled for n in range(2) for field in ("pkl", "pyd", "pth", "pt")}
    write_tar(folder / "members.tar", {**fields, "k1.cls": b"1"})
    write_tar(folder / "arrays.tar", {f"k{n}.npy": saved(objects) for n in range(2)})
    write_tar(folder / "disguised.tar", {f"k{n}.{kind}": pickled for n in range(2) for kind in ("jpg", "npz")})
    with (
        lmdb.open(str(folder / "values.mdb"), subdir=False, map_size=1 << 20) as database,
        database.begin(write=True) as to,
    ):
        for key in (b"a", b"b"):
            to.put(key, pickled)
    made = zarr.create_array(folder / "objects.zarr", shape=(3,), dtype="i4", chunks=(1,), zarr_format=2)
    made[...] = 1
    document = json.loads((folder / "objects.zarr/.zarray").read_text())
    filters = [{"id": "pickle", "protocol": 4}]
    for name, dtype in (("objects.zarr", "|O"), ("numbers.zarr", "<i4")):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / ".zarray").write_text(json.dumps({**document, "dtype": dtype, "filters": filters}))
        for chunk in range(3):
            (folder / name / str(chunk)).write_bytes(pickled)
    with h5py.File(folder / "attributes.h5", "w") as file:
        file["data"] = VALUES
        file["data"].attrs["pickled"] = np.void(pickled)
        file["objects"] = np.array([np.void(pickled)] * 4)
    kind = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickled}
    schema = pa.schema([pa.field("data", pa.int64(), metadata=kind)])
    pq.write_table(pa.table({"data": pa.array([1, 2, 3])}, schema=schema), folder / "extension.parquet")
    tiledb.from_numpy(str(folder / "metadata.tiledb"), VALUES)
    with tiledb.open(str(folder / "metadata.tiledb"), "w") as array:
        array.meta["pickled"] = pickled
    (folder / "photos").mkdir()
    Image.new("RGB", (4, 4)).save(folder / "photos" / "a.png")
    (folder / "photos" / "b.png").write_bytes(pickled)
    return {
        "objects.npy": ("Unsafe",), "objects.npz": ("Unsafe",), "members.tar": ("read", "SchemaMismatch"),
        "arrays.tar": ("Unsafe",), "disguised.tar": ("DecodeFailed",), "values.mdb": ("Unsafe",),
        "objects.zarr": ("SchemaMismatch", "Unsafe", "Missing"), "numbers.zarr": ("Unsafe",),
        "attributes.h5": ("read",), "extension.parquet": ("read", "SchemaMismatch", "Missing", "Corrupt"),
        "metadata.tiledb": ("read",), "photos": ("DecodeFailed",),
    }  # fmt: skip


WATCH = """
import json, os, sys
folder, index, *paths = sys.argv[1:]
counted, watching = [], False
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty",
          "os.startfile", "pty.spawn", "pickle.find_class", "ctypes.dlopen")
CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

def watch(event, arguments):
    if not watching:
        return
    if event in STARTS and not (event == "ctypes.dlopen" and arguments[0] is None):
        counted.append([event, repr(arguments[:1])])
    elsewhere = not str(arguments[0] if arguments else "").startswith(index)
    if event in CHANGES and elsewhere:
        counted.append([event, repr(arguments)])
    if event == "open" and elsewhere and (arguments[2] or 0) & WRITES:
        counted.append([event, repr(arguments)])

import penstock, penstock.webdataset
from penstock.remote.ranges import RemoteOptions
def read(path):
    ds = penstock.open(path, index_dir=index, remote=RemoteOptions(retries=0, deadline_s=2))
    for batch in penstock.Loader(ds, batch_size=2, memory="256MiB", output="numpy"):
        pass
    penstock.inspect(ds)
    return ds

for name in sorted(os.listdir(folder)):  # libraries start up, and make themselves at home
    try:
        read(os.path.join(folder, name))
    except penstock.errors.PenstockError:
        pass
sys.addaudithook(watch)
watching = True
told = {}
for path in paths:
    try:
        read(path)
        told[path] = "read", ""
    except BaseException as error:
        told[path] = type(error).__name__, str(error)
watching = False
print(json.dumps({"counted": counted, "told": told}))
"""


def watched(apart: Any, index: Path, *paths: object, start_up: Path) -> dict[str, Any]:
    outcome = apart(WATCH, start_up, index, *paths, deadline=90, env={"PYTHONDONTWRITEBYTECODE": "1"})
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out.splitlines()[-1])


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*") if not path.is_fifo()}


@pytest.mark.case(17)
def test_no_format_unpickles(tmp_path: Path, trap: Any, apart: Any) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    expected = pickles_in(folder, trap)
    before = tree(folder)
    found = watched(apart, tmp_path / "index", *(folder / name for name in expected), start_up=folder)
    assert found["counted"] == []
    for name, allowed in expected.items():
        kind, words = found["told"][str(folder / name)]
        assert kind in allowed, (name, kind, words)
        assert kind == "read" or name in words, "the file is named"
    assert tree(folder) == before, "nothing is written beside the data"


@pytest.mark.case(17)
def test_fields_that_are_pickles_can_be_had_as_bytes_alone(tmp_path: Path, trap: Any) -> None:
    pickled = pickle.dumps(trap)
    path = write_tar(tmp_path / "a.tar", {f"k{n}.pkl": pickled for n in range(2)})
    with pytest.raises(Unsafe, match=r"k0\.pkl.*is pickled.*decoders="):
        ps.open(path, fields=["pkl"])
    assert ps.open(path, fields=["pkl"], decoders={"pkl": "bytes"})[1]["pkl"] == pickled


@pytest.mark.case(17)
def test_indices_and_states_are_not_unpickled(tmp_path: Path, trap: Any) -> None:
    path = write_tar(tmp_path / "a.tar", {f"k{n}.cls": b"1" for n in range(4)})
    ps.open(path, index_dir=tmp_path / "index")
    for table in (tmp_path / "index").iterdir():
        table.write_bytes(pickle.dumps(trap))
    ds = ps.open(path, index_dir=tmp_path / "index")
    assert len(ds) == 4
    with ps.Loader(ds, batch_size=2, output="numpy") as loader:
        for state in (
            pickle.dumps(trap),
            {"version": trap},
            {**loader.state_dict(), "samples": trap},
        ):
            with pytest.raises(PenstockError):
                loader.load_state_dict(state)  # type: ignore[arg-type]


COMMANDS = [
    "pipe:touch {marker}", "PIPE:touch {marker}", "|touch {marker}", "; touch {marker}", "`touch {marker}`",
    "$(touch {marker})", "-o{marker}", "--output={marker}", "file://{marker}", "ftp://host/{marker}",
    "data:application/x-sh;base64,dG91Y2g=", "x.tar::pipe:touch {marker}", "http://127.0.0.1:1/;touch {marker}.npy",
]  # fmt: skip


@pytest.mark.case(18)
def test_no_name_starts_a_program(tmp_path: Path, trap: Any, apart: Any) -> None:
    np.save(tmp_path / "a.npy", VALUES)
    (tmp_path / "data").mkdir()
    names = [each.format(marker=trap.marker) for each in COMMANDS]
    found = watched(apart, tmp_path / "index", *names, start_up=tmp_path / "data")
    assert found["counted"] == []
    assert {kind for kind, _ in found["told"].values()} <= {"ConfigError", "Missing", "Unavailable"}
    for name, (kind, words) in found["told"].items():
        if name.split(":")[0].lower() in ("pipe", "file", "ftp"):
            assert (kind, "the scheme" in words) == ("ConfigError", True), name


@pytest.mark.case(18)
def test_the_hook_sees_what_it_looks_for(tmp_path: Path, apart: Any) -> None:
    tried = 'os.system("true"); open(os.path.join(folder, "new"), "w"); __import__("pickle").loads(b"cos\\nsystem\\n.")'
    program = WATCH.replace("for path in paths:", f"{tried}\nfor path in paths:")
    outcome = apart(program, tmp_path, tmp_path / "index", deadline=60)
    assert [event for event, _ in json.loads(outcome.out)["counted"]] == ["os.system", "open", "pickle.find_class"]


# Names that lead elsewhere.

NAMES = [
    "../../outside",
    "/etc/passwd",
    "a/../../b",
    "-rf",
    "n" * 4000,
    "caf\udce9",
    "line\nbreak",
    "%2e%2e/x",
    "C:\\x",
]


@pytest.mark.case(16)
def test_names_of_members_are_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "in" / "ner"
    inner.mkdir(parents=True)
    write_tar(inner / "a.tar", {f"{name}.cls": b"%d" % n for n, name in enumerate(NAMES)})
    with zipfile.ZipFile(inner / "a.npz", "w") as archive:
        for name in ("../x", "/abs", "-rf"):
            archive.writestr(f"{name}.npy", saved(np.arange(3)))
    with lmdb.open(str(inner / "a.mdb"), subdir=False, map_size=1 << 20) as database, database.begin(write=True) as to:
        for key in (b"../../x", b"/etc/passwd", b"\xff\xfe", b"-rf", b"a" * 400, b"a\0b"):
            to.put(key, saved(np.arange(3)))
    monkeypatch.chdir(inner)
    before = tree(tmp_path)
    ds = ps.open("a.tar", index_dir=False)
    assert list(ds.keys) == NAMES
    assert ds[:]["cls"].tolist() == list(range(len(NAMES)))
    assert list(ps.open("a.npz", index_dir=False).fields) == ["../x", "/abs", "-rf"]
    assert len(ps.open("a.mdb", index_dir=False)[:]["data"]) == 6
    with ps.Loader(ds, batch_size=2, columns=("cls", "__key__"), output="numpy") as loader:
        assert [key for _, keys in loader for key in keys] == NAMES
    assert tree(tmp_path) == before


@pytest.mark.case(16)
def test_what_is_kept_is_named_by_a_hash(tmp_path: Path) -> None:
    folder = tmp_path / ("-rf ; é" + "n" * 200)
    folder.mkdir()
    path = write_tar(folder / "$(x).tar", {f"k{n}.cls": b"1" for n in range(3)})
    ps.open(path, index_dir=tmp_path / "index")
    assert all(name.stem.isalnum() for name in (tmp_path / "index").iterdir())
    assert list((tmp_path / "index").iterdir())


@pytest.mark.case(19)
@pytest.mark.parametrize("name", ["../../outside/secret.zarr", "deep/../../../outside/secret.zarr", "%2e%2e/outside"])
def test_a_list_of_arrays_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    """What a group says of the arrays below it is data, and may say anything."""
    for path in ("outside/secret.zarr", "in/a.zarr"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
    made = zarr.create_array(tmp_path / "outside/secret.zarr", shape=VALUES.shape, dtype="f4", chunks=(1, 3))
    made[...] = VALUES
    zarr.create_group(tmp_path / "in/a.zarr")
    group = json.loads((tmp_path / "in/a.zarr/zarr.json").read_text())
    array = json.loads((tmp_path / "outside/secret.zarr/zarr.json").read_text())
    kept = {"kind": "inline", "must_understand": False, "metadata": {name: array}}
    (tmp_path / "in/a.zarr/zarr.json").write_text(json.dumps({**group, "consolidated_metadata": kept}))
    with pytest.raises(Unsafe, match=r"a\.zarr: an array named .*outside of the store"):
        ps.open(tmp_path / "in/a.zarr")
    with pytest.raises(Unsafe, match="outside of the store"):
        ps.open(tmp_path / "in/a.zarr", fields=[name])


@pytest.mark.case(19)
def test_a_link_to_an_array_elsewhere(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "secret.zarr", shape=VALUES.shape, dtype="f4", chunks=(1, 3))[...] = VALUES
    group = zarr.create_group(tmp_path / "a.zarr")
    group.create_array("mine", shape=VALUES.shape, dtype="f4", chunks=(1, 3))[...] = VALUES
    (tmp_path / "a.zarr" / "same").symlink_to(tmp_path / "a.zarr" / "mine")
    assert set(ps.open(tmp_path / "a.zarr").fields) == {"mine", "same"}
    (tmp_path / "a.zarr" / "theirs").symlink_to(tmp_path / "secret.zarr")
    with pytest.raises(Unsafe, match=r"theirs: is a link that leads out of the store"):
        ps.open(tmp_path / "a.zarr")


@pytest.mark.case(19)
@pytest.mark.parametrize("name", ["../outside/s.png", "{outside}/s.png", "sub/../../outside/s.png", "linked.png"])
def test_a_table_of_files_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    for folder in ("photos", "outside"):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (4, 4)).save(tmp_path / folder / ("a.png" if folder == "photos" else "s.png"))
    name = name.format(outside=tmp_path / "outside")
    if name == "linked.png":
        (tmp_path / "photos" / name).symlink_to(tmp_path / "outside" / "s.png")
    (tmp_path / "photos" / "metadata.csv").write_text(f"file_name,label\na.png,1\n{name},2\n")
    with pytest.raises((Missing, Unsafe)):
        ps.open(tmp_path / "photos", index_dir=False)
    ds = ps.open(tmp_path / "photos", index_dir=False, on_error="skip")
    assert ds[:]["label"].tolist() == [1]


@pytest.mark.case(19)
def test_links_out_of_archives_are_not_followed(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, kind in (("x.npy", tarfile.SYMTYPE), ("y.npy", tarfile.LNKTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
        info = tarfile.TarInfo("z.npy")
        info.size = len(saved(VALUES))
        archive.addfile(info, io.BytesIO(saved(VALUES)))
    with pytest.raises(Unsafe, match="outside of the archive"):
        ps.open(tmp_path / "a.tar")
    ds = ps.open(tmp_path / "a.tar", on_error="skip")
    assert (len(ds), ds.keys[0]) == (1, "z")
    assert [type(each) for each in ds.left_out] == [Unsafe, Unsafe]
    with pytest.raises((ConfigError, Missing)):
        ps.open(os.fspath(tmp_path / "a.tar") + "/../../outside")
