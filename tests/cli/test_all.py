"""What holds for every command: help that teaches, mistakes in a line, output that survives a pipe."""

import subprocess
import sys

import h5py
import numpy as np
import pytest

from penstock.cli.main import COMMANDS, main


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_teaches_by_example_and_names_exit_codes(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert end.value.code == 0
    out, err = capsys.readouterr()
    assert f"examples:\n  penstock {command}" in out
    assert "\nexit codes: 0 " in out
    assert err == ""
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_survives_a_reader_that_leaves(command):
    arguments = [sys.executable, "-m", "penstock", *command.split(), "--help"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.close()
        assert child.wait(60) in (0, 141)  # argparse may have swallowed it
        assert child.stderr.read() == b""


@pytest.fixture
def odd(tmp_path):
    """Things that people point commands at."""
    with h5py.File(tmp_path / "good.h5", "w") as file:
        file["x"] = np.zeros((20, 3))
    with h5py.File(tmp_path / "empty.h5", "w"):
        pass
    (tmp_path / "folder").mkdir()
    (tmp_path / "nothing.h5").write_bytes(b"")
    (tmp_path / "cut.h5").write_bytes((tmp_path / "good.h5").read_bytes()[:600])
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 4)
    return tmp_path


@pytest.mark.parametrize("command", ["inspect", "plan", "bench"])
@pytest.mark.parametrize(
    "name", ["folder", "empty.h5", "nothing.h5", "cut.h5", "noise", "gone*.h5", "", "\0", "x" * 5000]
)
def test_whatever_it_is_pointed_at(command, name, odd, capsys):
    assert main([command, f"{odd}/{name}" if name else ""]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"penstock {command}: ")
    assert err.count("\n") == 1, err


@pytest.mark.parametrize(
    "arguments",
    [["plan", "--memory", "0"], ["plan", "--memory", "-1"], ["plan", "--columns", "y"], ["inspect", "--fields", "y"],
     ["plan", "--device", "nonsense"], ["bench", "--memory", "1e99"], ["plan", "--window", "0"]],
    ids=" ".join,
)  # fmt: skip
def test_whatever_it_is_asked(arguments, odd, capsys):
    command, *options = arguments
    try:
        code = main([command, f"{odd}/good.h5", *options])
    except SystemExit as end:  # argparse's own
        code = end.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert "Traceback" not in err
