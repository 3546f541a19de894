"""``penstock convert``."""

import json

import numpy as np
import pytest
from tests.convert.sources import read_back, trial_major, voxel_major

from penstock.cli.main import main


def test_a_file_stored_by_voxel(tmp_path, capsys):
    expected = voxel_major(tmp_path / "in.h5")
    assert main(["convert", str(tmp_path / "in.h5"), str(tmp_path / "out.zarr"), "--row-axis", "1"]) == 0
    assert "whole" in capsys.readouterr().out
    np.testing.assert_array_equal(read_back(tmp_path / "out.zarr"), expected)


def test_a_dry_run_as_json(tmp_path, capsys):
    trial_major(tmp_path / "in.h5")
    call = ["convert", str(tmp_path / "in.h5"), str(tmp_path / "out.npy"), "--dry-run", "--json", "--memory", "64MiB"]
    assert main(call) == 0
    assert json.loads(capsys.readouterr().out)["memory_limit_bytes"] == 64 * 2**20
    assert not (tmp_path / "out.npy").exists()


@pytest.mark.slow
def test_parts_and_finish(tmp_path, capsys):
    values = trial_major(tmp_path / "in.h5")
    call = ["convert", str(tmp_path / "in.h5"), str(tmp_path / "out.npy"), "--shard-bytes", "10kB"]
    assert main([*call, "--part", "1/2"]) == 0
    assert main([*call, "--finish"]) == 2
    assert "tasks are not done" in capsys.readouterr().err
    assert main([*call, "--part", "2/2"]) == 0
    assert main([*call, "--finish", "--json"]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), values)


def test_a_mask_and_what_cannot_be(tmp_path, capsys):
    values = trial_major(tmp_path / "in.h5")
    np.save(tmp_path / "mask.npy", values[0] > 0)
    call = ["convert", str(tmp_path / "in.h5"), str(tmp_path / "out.npy")]
    assert main([*call, "--mask", str(tmp_path / "mask.npy")]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), values[:, values[0] > 0])
    assert main(call) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*call[:2], str(tmp_path / "other.npy"), "--memory", "1MiB"]) == 2
    assert "the smallest that works" in capsys.readouterr().err
