"""The example learns: far above chance from both backends, and the same after a stop as without one."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.nsd.synthetic import Scale

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "mindeye.py"
SMALL = Scale((12, 14, 13), 120, 10, {1: 10}, shared=50, picture=16, region_voxels=400)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("mindeye_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def subject(example, tmp_path_factory):
    root = tmp_path_factory.mktemp("subject")
    example.make_subject(root, SMALL)
    return root


def on_two_ranks(subject, *options):
    """What the example prints last, run by torchrun."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    common = ["--root", str(subject), "--epochs", "6", "--batch-size", "25", "--memory", "256MiB"]
    done = subprocess.run([*run, *common, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def trained(example, subject, *options):
    common = ["--root", str(subject), "--epochs", "8", "--batch-size", "50", "--memory", "256MiB"]
    return example.run(example.arguments([*common, *options]))


def test_retrieval_is_far_above_chance_from_both_backends(example, subject):
    accuracies = []
    for backend in ("hdf5", "tar"):
        accuracy, chance = trained(example, subject, "--backend", backend)
        assert chance == 1 / 50
        assert accuracy > 10 * chance
        accuracies.append(accuracy)
    assert abs(accuracies[0] - accuracies[1]) < 0.25


def test_a_run_that_was_stopped_ends_where_it_would_have(example, subject, tmp_path):
    whole = trained(example, subject, "--backend", "hdf5")
    checkpoint = ("--checkpoint", str(tmp_path / "run.pt"), "--backend", "hdf5")
    trained(example, subject, *checkpoint, "--stop-after", "17")
    assert trained(example, subject, *checkpoint) == whole


def test_two_ranks_share_an_epoch_and_resume(subject, tmp_path):
    whole = on_two_ranks(subject)
    right, chance = (float(share) for share in re.findall(r"([\d.]+)%", whole))
    assert chance == 2
    assert right > 10 * chance
    checkpoint = ("--checkpoint", str(tmp_path / "run.pt"))
    on_two_ranks(subject, *checkpoint, "--stop-after", "13")
    assert on_two_ranks(subject, *checkpoint) == whole
