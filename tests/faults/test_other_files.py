"""HDF5 files that refer to others: nothing outside the opened folder is read, and no plug-in is loaded."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import penstock as ps
from penstock.errors import Corrupt, Missing, Unsafe

VALUES = np.arange(24, dtype="i4").reshape(6, 4)


@pytest.fixture
def opened(tmp_path: Path) -> Path:
    """The folder that is opened."""
    (tmp_path / "opened").mkdir()
    return tmp_path / "opened"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Bytes elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    VALUES.tofile(tmp_path / "elsewhere" / "secret.raw")
    with h5py.File(tmp_path / "elsewhere" / "secret.h5", "w") as file:
        file["data"] = VALUES
    return tmp_path / "elsewhere"


def stored_in(path: Path, raw: str) -> Path:
    """Its bytes are those of a file that it names."""
    with h5py.File(path, "w") as file:
        file.create_dataset("data", VALUES.shape, "i4", external=[(raw, 0, VALUES.nbytes)])
    return path


def made_of(path: Path, source: str) -> Path:
    """A virtual dataset."""
    layout = h5py.VirtualLayout(VALUES.shape, "i4")
    layout[:] = h5py.VirtualSource(source, "data", VALUES.shape)
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("data", layout, fillvalue=-1)
    return path


def linked(path: Path, link: Any, name: str = "data") -> Path:
    with h5py.File(path, "w") as file:
        file[name] = link
    return path


@pytest.mark.case(20)
@pytest.mark.parametrize("field", ["data", "group/data"])
def test_a_link_into_another_file_is_not_opened(opened: Path, secret: Path, field: str) -> None:
    group = "/" if "/" in field else "data"
    path = linked(opened / "a.h5", h5py.ExternalLink(str(secret / "secret.h5"), group), field.split("/")[0])
    with h5py.File(path) as file:
        assert np.array_equal(file[field][:], VALUES), "h5py reads it without a word"
    with pytest.raises(Unsafe, match=r"a\.h5.*secret\.h5.*open that file itself"):
        ps.open(path, fields=[field])
    with pytest.raises(Missing, match="no datasets"):
        ps.open(path)


@pytest.mark.case(20)
def test_a_link_to_a_pipe_does_not_wait(opened: Path, secret: Path) -> None:
    os.mkfifo(secret / "pipe")
    with pytest.raises(Unsafe, match="pipe"):
        ps.open(linked(opened / "a.h5", h5py.ExternalLink(str(secret / "pipe"), "data")), fields=["data"])
    os.mkfifo(opened / "pipe")
    for path in (stored_in(opened / "b.h5", "pipe"), made_of(opened / "c.h5", "pipe")):
        with pytest.raises(Unsafe, match="pipe, which is not a regular file"):
            ps.open(path)


@pytest.mark.case(20)
def test_links_within_the_file_are_followed(opened: Path) -> None:
    with h5py.File(opened / "a.h5", "w") as file:
        file["deep/data"] = VALUES
        file["deep/beside"] = h5py.SoftLink("data")
        file["near"] = h5py.SoftLink("/deep")
        file["ring"] = h5py.SoftLink("/ring")
        file["nowhere"] = h5py.SoftLink("/none")
    for field in ("near/data", "near/beside", "deep/beside"):
        assert np.array_equal(ps.open(opened / "a.h5", fields=[field])[:][field], VALUES)
    with pytest.raises(Corrupt, match="links, which form a circle"):
        ps.open(opened / "a.h5", fields=["ring"])
    with pytest.raises(Missing, match="link to nowhere"):
        ps.open(opened / "a.h5", fields=["nowhere"])


@pytest.mark.case(20)
@pytest.mark.parametrize("relative", [False, True], ids=["absolute", "a ladder"])
@pytest.mark.parametrize(("make", "name"), [(stored_in, "secret.raw"), (made_of, "secret.h5")])
def test_data_elsewhere_are_refused_unless_allowed(
    opened: Path, secret: Path, make: Any, name: str, relative: bool
) -> None:
    target = f"../elsewhere/{name}" if relative else str(secret / name)
    path = make(opened / "a.h5", target)
    with pytest.raises(Unsafe, match=rf"a\.h5.*{secret / name}, outside the folder.*allow_external="):
        ps.open(path)
    assert np.array_equal(ps.open(path, allow_external=[secret])[:]["data"], VALUES)
    with pytest.raises(Unsafe):
        ps.open(path, allow_external=[secret / "deeper"])


@pytest.mark.case(20)
def test_what_a_virtual_dataset_is_made_of_is_looked_into(opened: Path, secret: Path) -> None:
    stored_in(opened / "inner.h5", str(secret / "secret.raw"))
    path = made_of(opened / "a.h5", "inner.h5")
    with h5py.File(path) as file:
        assert np.array_equal(file["data"][:], VALUES), "h5py reads it without a word"
    with pytest.raises(Unsafe, match=r"inner\.h5.*secret\.raw"):
        ps.open(path)
    assert np.array_equal(ps.open(path, allow_external=[secret])[:]["data"], VALUES)


@pytest.mark.case(20)
def test_what_a_virtual_dataset_takes_from_its_own_file_is_looked_into(opened: Path, secret: Path) -> None:
    path = stored_in(opened / "a.h5", str(secret / "secret.raw"))
    layout = h5py.VirtualLayout(VALUES.shape, "i4")
    layout[:] = h5py.VirtualSource(".", "data", VALUES.shape)
    with h5py.File(path, "a") as file:
        file.create_virtual_dataset("seen", layout)
    with h5py.File(path) as file:
        assert np.array_equal(file["seen"][:], VALUES), "h5py reads it without a word"
    with pytest.raises(Unsafe, match=r"secret\.raw"):
        ps.open(path, fields=["seen"])


@pytest.mark.case(20)
def test_a_link_behind_the_folder_leads_out_of_it(opened: Path, secret: Path) -> None:
    (opened / "inside").symlink_to(secret)
    with pytest.raises(Unsafe, match="outside the folder"):
        ps.open(stored_in(opened / "a.h5", "inside/secret.raw"))


@pytest.mark.case(20)
def test_data_are_looked_for_beside_the_file_and_not_where_the_process_runs(
    opened: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored_in(opened / "a.h5", "secret.raw")
    monkeypatch.chdir(secret)
    with h5py.File(path) as file:
        assert np.array_equal(file["data"][:], VALUES), "h5py takes what lies where the process runs"
    with pytest.raises(Missing, match=r"secret\.raw, which is not there"):
        ps.open(path)
    (VALUES + 1).tofile(opened / "secret.raw")
    assert np.array_equal(ps.open(path)[:]["data"], VALUES + 1)


@pytest.mark.case(12, 20)
def test_a_virtual_dataset_without_its_files(opened: Path) -> None:
    path = made_of(opened / "a.h5", "gone.h5")
    with pytest.raises(Missing, match=r"gone\.h5, which is not there.*fill value -1.*allow_fill=True"):
        ps.open(path)
    assert (ps.open(path, allow_fill=True)[:]["data"] == -1).all()


PLUGIN = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void run(void) { close(open(MARKER, O_CREAT | O_WRONLY, 0600)); }
"""
UNKNOWN_FILTER, BZIP2 = 40_000, 307

BY_H5PY = """
import h5py, sys
try:
    h5py.File(sys.argv[1])["data"][:]
except OSError:
    pass
"""
BY_PENSTOCK = """
import sys, penstock
try:
    penstock.open(sys.argv[1])[0]
except penstock.errors.PenstockError as error:
    print(error)
import h5py
print(h5py.h5pl.size(), h5py.h5pl.get(0).decode())
"""


@pytest.mark.case(20)
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, to make a plug-in")
@pytest.mark.parametrize("number", [UNKNOWN_FILTER, BZIP2])
def test_no_plugin_is_loaded(tmp_path: Path, apart: Any, number: int) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugin.c").write_text(PLUGIN)
    marker = tmp_path / "code-was-run"
    build = ["cc", "-shared", "-fPIC", f'-DMARKER="{marker}"', "plugin.c", "-o", "plugins/libx.so"]
    subprocess.run(build, cwd=tmp_path, check=True, timeout=60)
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((1, 4))
        plist.set_filter(number, h5py.h5z.FLAG_OPTIONAL, ())
        space = h5py.h5s.create_simple(VALUES.shape)
        made = h5py.h5d.create(file.id, b"data", h5py.h5t.NATIVE_INT32, space, plist)
        for row in range(len(VALUES)):
            made.write_direct_chunk((row, 0), VALUES[row].tobytes())
    env = {"HDF5_PLUGIN_PATH": str(tmp_path / "plugins")}
    apart(BY_H5PY, path, env=env)
    assert marker.exists(), "the trap must work"
    marker.unlink()
    outcome = apart(BY_PENSTOCK, path, env=env)
    told, folders = outcome.out.splitlines()
    assert (f"filter {number}" if number == UNKNOWN_FILTER else "damaged there") in told, outcome.err
    assert folders == f"1 {tmp_path / 'plugins'}", "what the user's own reading goes by is as it was"
    assert not marker.exists()
