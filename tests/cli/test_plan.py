"""``penstock plan``: what it prints, and how it fails."""

import json
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from penstock.cli.main import main

WORKED = ["plan", "--shape", "750,150,150,100", "--dtype", "float32", "--files", "40", "--batch-size", "32"]
OTHERS = ["--workers", "4", "--shuffle-buffer", "500", "--memory", "2GiB"]


@pytest.fixture
def session(tmp_path: Path) -> Path:
    path = tmp_path / "session.h5"
    with h5py.File(path, "w") as file:
        file["betas"] = np.zeros((40, 6, 5, 4), np.int16)
        file["label"] = np.arange(40)
    return path


def test_the_worked_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORKED, *OTHERS]) == 0
    out = capsys.readouterr().out
    for line in (
        "one sample    8.58 MiB",
        "batch of 32    275 MiB",
        "one file      6.29 GiB",
        "all samples    251 GiB",
    ):
        assert f"  {line}" in out
    assert "torch DataLoader, 4 workers " in out
    assert "WebDataset, 4 workers, shuffle(500) " in out
    assert main([*WORKED, *OTHERS, "--with", "picture:uint8:425,425,3"]) == 0
    assert "batch of 32    291 MiB" in capsys.readouterr().out


def test_json_is_bytes(session: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(session), "--batch-size", "8", "--memory", "64MiB", "--no-measure", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["rows"], told["sample_bytes"], told["batch_bytes"]) == (40, 248, 1984)
    assert told["planned_bytes"] == sum(told["holders"].values()) <= told["budget_bytes"] == 64 * 2**20
    assert told["epoch_read_bytes"] == 40 * 248


def test_mask_and_columns(session: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mask = np.zeros((6, 5, 4), bool)
    mask[2] = True
    np.save(tmp_path / "mask.npy", mask)
    arguments = ["plan", str(session), "--columns", "betas", "--no-measure", "--json", "--memory", "64MiB"]
    assert main([*arguments, "--mask", str(tmp_path / "mask.npy")]) == 0
    assert json.loads(capsys.readouterr().out)["sample_bytes"] == 20 * 2


def test_it_measures_and_advises(session: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(session), "--batch-size", "4", "--world", "2", "--threads", "1", "--window", "8"]) == 0
    out = capsys.readouterr().out
    assert "measured here just now" in out
    assert "An epoch, on each of 2 ranks:" in out
    assert "Keep the files as they are" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "expected files or --shape, and not both"),
        (["gone.h5"], "gone.h5: no such file"),
        (["--shape", "9,9", "gone.h5"], "not both"),
        (["--shape", "9,9", "--dtype", "flot"], "is not a dtype"),
        (["--shape", "9,9", "--mask", "m.npy"], "--mask: needs files"),
        (["--shape", "9,9", "--columns", "a"], "columns: needs files"),
        ([*WORKED[1:], "--memory", "100MB"], "the smallest that works is"),
        (["--shape", "9,9", "--memory", "much"], "memory='much' is not a size"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("penstock plan: ")
    assert told in err


def test_masks_that_do_not_fit(session: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "mask.npy", np.zeros((6, 5, 4)))
    (tmp_path / "junk.npy").write_bytes(b"junk")
    refused = "cannot be read as an array"
    for name, told in (("mask.npy", "expected booleans"), ("junk.npy", refused), ("gone.npy", refused)):
        assert main(["plan", str(session), "--mask", str(tmp_path / name)]) == 2
        assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--shape", "9,x"], "'x': expected a whole number"),
        (["--shape", "9", "--with", "picture"], "expected NAME:DTYPE:SHAPE"),
        (["--batch-size", "0"], "at least 1"),
    ],
)
def test_parsing_refuses(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", *arguments])
    assert end.value.code == 2
    assert told in capsys.readouterr().err


def test_help_teaches_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", "--help"])
    assert end.value.code == 0
    assert "penstock plan --shape 750,150,150,100 --dtype float32 --files 40\n" in capsys.readouterr().out


def test_output_survives_a_reader_that_leaves() -> None:
    arguments = [sys.executable, "-m", "penstock", *WORKED, *OTHERS]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.wait(60) == 141
        assert child.stderr.read() == b""
