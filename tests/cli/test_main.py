"""The command line: what it prints, what it leaves behind, and how it fails."""

import json
import os
import re
import subprocess
import sys
import tempfile

import pytest

import penstock
from penstock.cli import demo
from penstock.cli.main import main

TINY = ("--scale", "tiny", "--batch-size", "4", "--seconds", "1", "--workers", "1")

# Newer Pythons warn of forking beside threads, torch of more workers than cores, webdataset leaves files open.
loaders_may_warn = pytest.mark.filterwarnings(
    "ignore:This process", "ignore:This DataLoader", "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)  # fmt: skip


@pytest.fixture
def dataset(tmp_path):
    folder = tmp_path / "data"
    with demo.dataset_folder(str(folder), "tiny"):
        pass
    return folder


@pytest.mark.slow
@loaders_may_warn
def test_demo_trains_compares_draws_and_leaves_nothing_else(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["demo", *TINY, "--out", str(tmp_path / "drawn.png")]) == 0
    out, err = capsys.readouterr()
    assert "Subject 1: 72 trials in 3 sessions, 27 voxels of nsdgeneral." in out
    assert re.search(r"^budget +256 MiB$", out, re.MULTILINE)
    for loader in ("penstock", "NSDDataset, 0 workers", "NSDDataset, 1 worker"):
        assert re.search(rf"^HDF5, by voxel  {loader} +[\d,.]+ +[\d.]+ [KM]?i?B  (yes|no)$", out, re.MULTILINE), out
    for loader in ("penstock", "WebDataset, 1 worker"):
        assert re.search(rf"^tar shards +{loader} +[\d,.]+ +[\d.]+ [KM]?i?B  (yes|no)$", out, re.MULTILINE), out
    assert "[ok] each of 72 trials came exactly once in an epoch of the release" in out
    assert "[ok] a new loader resumed after batch 6 of 18, and delivered the same 12 that were left" in out
    assert "[ok] each of 20 pictures came exactly once in an epoch of the shards" in out
    assert re.search(r"^penstock: 100%, [\d,]+ samples/s, mem \d+/256 MiB", err, re.MULTILINE)
    assert "\r" not in err
    assert "What to do next" in out
    assert os.listdir(tmp_path) == ["drawn.png"]
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@loaders_may_warn
def test_demo_uses_a_folder_again_and_keeps_its_promises_in_no_time(dataset, tmp_path, capsys):
    before = {str(file): file.stat().st_mtime_ns for file in dataset.rglob("*") if file.is_file()}
    chart = str(tmp_path / "drawn.png")
    assert main(["demo", *TINY, "--seconds", "0", "--folder", str(dataset), "--out", chart, "--json"]) == 0
    assert {str(file): file.stat().st_mtime_ns for file in dataset.rglob("*") if file.is_file()} == before
    out, err = capsys.readouterr()
    assert "making" not in err
    found = json.loads(out)
    assert found.keys() == {"budget_bytes", "bottleneck", "runs", "promises"}
    assert [run["loader"] for run in found["runs"]][:2] == ["penstock", "NSDDataset, 0 workers"]
    assert all(promise["kept"] for promise in found["promises"])


def test_demo_refuses_a_dataset_of_another_size(dataset, capsys):
    assert main(["demo", "--folder", str(dataset)]) == 2
    assert "holds a dataset of scale tiny, not demo" in capsys.readouterr().err


def test_demo_leaves_a_folder_with_other_files_alone(tmp_path, capsys):
    precious = tmp_path / "betas_session01.hdf5"
    precious.write_text("precious")
    assert main(["demo", *TINY, "--folder", str(tmp_path)]) == 2
    assert "name an empty or a new folder" in capsys.readouterr().err
    assert precious.read_text() == "precious"


def test_memory_that_is_no_size_is_one_line_and_exit_code_2(capsys):
    assert main(["demo", "--memory", "2 gigs"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("penstock demo: --memory='2 gigs' is not a size: expected")
    assert err.count("\n") == 1


def test_interrupt_is_one_line_and_exit_code_130(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "\npenstock demo: interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--version"], 0, f"penstock {penstock.__version__}\n"),
        (["--help"], 0, "demo"),
        (["demo", "--help"], 0, "--batch-size"),
        ([], 2, "required: command"),
        (["demoo"], 2, "invalid choice: 'demoo'; did you mean demo?"),
        (["inspct", "x.h5"], 2, "did you mean inspect?"),
        (["inspect", "x.h5", "--jsn"], 2, "usage: penstock inspect "),
        (["inspect", "x.h5", "--jsn"], 2, "unknown arguments: --jsn; did you mean --json?"),
        (["plan", "x.h5", "--batchsize=3"], 2, "unknown arguments: --batchsize=3; did you mean --batch-size?"),
        (["nsd", "shw", "x"], 2, "usage: penstock nsd "),
        (["nsd", "shw", "x"], 2, "did you mean show?"),
        (["nsd", "show", "x", "--subjct", "1"], 2, "usage: penstock nsd show "),
        (["nsd", "show", "x", "--subjct", "1"], 2, "did you mean --subject?"),
        (["demo", "--workers", "0"], 2, "'0': expected a whole number, at least 1"),
    ],
)
def test_parsing_ends_with(arguments, code, told, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    assert end.value.code == code
    assert told in (err if code else out)


def test_python_m_penstock_is_penstock_and_imports_no_command_for_help():
    code = "import runpy, sys; sys.argv[1:] = ['--version']; runpy.run_module('penstock', run_name='__main__')"
    watched = f"import atexit, sys\natexit.register(lambda: print('penstock.cli.demo' in sys.modules))\n{code}"
    done = subprocess.run([sys.executable, "-c", watched], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"penstock {penstock.__version__}\nFalse\n")
