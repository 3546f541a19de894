"""``--json``: each command that prints facts prints them for scripts too, by the keys that the page "plan" lists."""

import json
import os
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from penstock.cli.main import main
from penstock.nsd.synthetic import synthesize

PAGE = (Path(__file__).parent.parent.parent / "docs" / "plan.md").read_text()


def documented(command: str) -> set[str]:
    row = re.search(rf"^\| {re.escape(command)} \| (.*) \|$", PAGE, re.MULTILINE)
    assert row is not None, command
    return set(re.findall(r"`([a-z_]+)`", re.sub(r"\([^)]*\)|with the keys.*$", "", row[1])))


@pytest.fixture
def path(tmp_path: Path) -> str:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("betas", data=np.arange(24, dtype="i2").reshape(6, 4), chunks=(2, 4), fletcher32=True)
    return str(tmp_path / "a.h5")


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert main(list(words)) == code
    return json.loads(capsys.readouterr().out)


def test_inspect(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "inspect", path, "--json")
    assert found.keys() == documented("`inspect`") - {"deep"}
    assert found["fields"]["betas"].keys() == documented("each of `fields`")
    assert (found["rows"], found["files"]) == (6, 1)
    assert found["fields"]["betas"]["dtype"] == "int16"
    assert found["fields"]["betas"]["delivered_bytes"] == 48


def test_inspect_deep(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "inspect", path, "--json", "--deep")
    assert found.keys() == documented("`inspect`")
    assert found["deep"]["sound"] is True


def test_verify(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    keys = documented("`verify`")
    lost = {"files_left_out", "fields_left_out"}
    assert told(capsys, "verify", path, "--json").keys() == keys - {"bytes"}
    assert told(capsys, "verify", path, "--write", "--json").keys() == documented("`verify --write`")
    assert told(capsys, "verify", path, "--json").keys() == keys - lost
    data = bytearray(Path(path).read_bytes())
    with h5py.File(path) as file:
        at = file["betas"].id.get_chunk_info(1).byte_offset
    data[at] ^= 1
    Path(path).write_bytes(data)
    found = told(capsys, "verify", path, "--json", code=1)
    assert found["sound"] is False
    assert found["damages"][0]["file"].endswith("a.h5")
    Path(found["manifest"]).unlink()
    found = told(capsys, "verify", path, "--json", code=1)
    assert [each["rows"] for each in found["faults"]] == [[2, 3]]


def test_plan(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "plan", path, "--json", "--memory", "64MiB", "--no-measure")
    assert found.keys() == documented("`plan`")


def test_bench(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "bench", path, "--json", "--memory", "256MiB", "--batch-size", "2", "--seconds", "0.1")
    assert found.keys() == documented("`bench`")


def test_nsd_synthesize_and_prepare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(tmp_path / "nsd")
    made = told(capsys, "nsd", "synthesize", root, "--json")
    assert made.keys() == documented("`nsd synthesize`")
    for before in (False, True):
        prepared = told(capsys, "nsd", "prepare", root, "--json")
        assert prepared.keys() == documented("`nsd prepare`")
        assert prepared["complete_before"] is before
        assert sorted(os.listdir(prepared["folder"])) == ["subject.json", "subject.npy"]


def test_nsd_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthesize(str(tmp_path / "nsd"), "tiny")
    found = told(capsys, "nsd", "show", str(tmp_path / "nsd"), "--json")
    assert found.keys() == documented("`nsd show`")
    assert all(region.keys() == {"voxels", "labels"} for region in found["regions"].values())
