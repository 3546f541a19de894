"""The command line: what it prints, what it leaves behind, and how it fails."""

import os
import re
import subprocess
import sys
import tempfile

import h5py
import numpy as np
import pytest

import penstock
from penstock.cli import demo, demo_data
from penstock.cli.demo_training import ByHand
from penstock.cli.main import main

TINY = ("--sessions", "2", "--trials", "7", "--batch-size", "4", "--epochs", "1", "--workers", "1")

# Newer Pythons warn of forking beside threads, and torch of more workers than cores: both are the DataLoader's affair.
dataloader_may_warn = pytest.mark.filterwarnings("ignore:This process", "ignore:This DataLoader")


@pytest.fixture
def dataset(tmp_path):
    folder = tmp_path / "data"
    with demo_data.dataset_folder(str(folder), sessions=2, per_session=7):
        pass
    return folder


@pytest.mark.slow
@dataloader_may_warn
def test_demo_trains_compares_and_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["demo", *TINY]) == 0
    out, err = capsys.readouterr()
    assert "14 trials in 2 gzipped HDF5 files" in out
    assert re.search(r"^budget +64\.0 MiB$", out, re.MULTILINE)
    for loader in ("penstock", "DataLoader, 0 workers", "DataLoader, 1 workers"):
        assert re.search(rf"^{loader} +[\d,]+ +[\d.]+ [KM]?i?B  (yes|no)$", out, re.MULTILINE), out
    assert "[ok] each of 14 trials came exactly once in each of 2 epochs" in out
    assert "[ok] a new loader resumed after batch 1 of 4, and delivered the same 3 that were left" in out
    assert re.search(r"^penstock: 100%, [\d,]+ samples/s, mem \d+/64 MiB", err, re.MULTILINE)
    assert "\r" not in err
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@dataloader_may_warn
def test_demo_uses_a_folder_again(dataset, capsys):
    before = {file.name: file.stat().st_mtime_ns for file in dataset.iterdir()}
    assert main(["demo", *TINY, "--folder", str(dataset)]) == 0
    assert {file.name: file.stat().st_mtime_ns for file in dataset.iterdir()} == before
    assert "making" not in capsys.readouterr().err


def test_demo_refuses_a_dataset_of_another_size(dataset, capsys):
    assert main(["demo", "--sessions", "3", "--folder", str(dataset)]) == 2
    assert "holds 2 sessions of 7 trials, not 3 of 40" in capsys.readouterr().err


def test_demo_leaves_a_folder_with_other_files_alone(tmp_path, capsys):
    precious = tmp_path / "betas_session01.hdf5"
    precious.write_text("precious")
    assert main(["demo", *TINY, "--folder", str(tmp_path)]) == 2
    assert "name an empty or a new folder" in capsys.readouterr().err
    assert precious.read_text() == "precious"


def test_demo_data_are_ordinary_hdf5(dataset):
    trials = demo_data.Trials(str(dataset))
    delivered = trials.open()[8]
    with h5py.File(dataset / "betas_session02.hdf5") as file:
        betas = file["betas"]
        assert (betas.chunks, betas.compression, betas.shuffle) == ((1, *demo_data.VOLUME), "gzip", True)
        np.testing.assert_allclose(betas[1] / np.float32(demo_data.SCALE), delivered["voxels"], rtol=1e-6)
    by_hand = ByHand(trials)
    np.testing.assert_array_equal(by_hand[8][1], delivered["images"])
    by_hand.close()


def test_demo_data_compress_like_measurements(dataset):
    raw = 7 * 2 * np.prod(demo_data.VOLUME)
    assert 0.4 < (dataset / "betas_session01.hdf5").stat().st_size / raw < 0.7


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
        (["demoo"], 2, "invalid choice: 'demoo'"),
        (["demo", "--trials", "0"], 2, "'0': expected a whole number, at least 1"),
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
