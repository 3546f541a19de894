"""Memory is bounded, measured in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.base.sizes import MiB
from penstock.nsd import synthesize
from penstock.nsd.synthetic import Scale
from penstock.nsd.synthetic.pictures import write_coco

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]

PIXELS = 128
SCALE = Scale((30, 40, 34), 750, 2, {1: 2}, shared=50, picture=8, region_voxels=9000)  # 61 MB per session


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    root = tmp_path_factory.mktemp("subject")
    made = synthesize(root, SCALE, stimuli=False)
    write_coco(str(root), SCALE, PIXELS, only=made.stimuli(1))
    return root


def measured(timeout=100, **job):
    child = Path(__file__).with_name("child.py")
    done = subprocess.run(
        [sys.executable, str(child), json.dumps(job)], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_preparing_holds_what_it_was_given(subject, tmp_path):
    found = measured(root=str(subject), copies=str(tmp_path), what="prepare", memory="56MiB")
    assert found["samples"] > 5
    assert found["peak"] <= 56 * MiB, found


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["320MiB", "256MiB"])
def test_a_whole_subject_stays_inside_its_budget(tmp_path_factory, tmp_path, memory):
    """Voxels alone of 40 sessions at their true size, 26,880 samples; the files are holes, which take no room."""
    root = tmp_path_factory.getbasetemp() / "full"
    if not root.exists():
        synthesize(root, "full", written="nothing", stimuli=False)
    options = {"dtype": "float16", "split": "mindeye2/train"}
    found = measured(root=str(root), copies=str(tmp_path), what="subject", memory=memory, options=options, timeout=1500)
    assert found["rows"] == 26_880
    assert found["peak"] <= found["limit"], found


@pytest.mark.parametrize("options", [{"zscore": "session"}, {"dtype": "float16"}], ids=str)
def test_loading_holds_what_was_planned(subject, tmp_path, options):
    found = measured(root=str(subject), copies=str(tmp_path), what="loader", options=options)
    assert found["samples"] > 5
    assert found["peak"] <= found["limit"], found


@pytest.mark.parametrize("reps", ["mean", "stack", "random"])
def test_pictures_of_repeated_trials_are_not_held(subject, tmp_path, reps):
    """Straight from sessions stored by voxel: the voxels of all trials are held as stored, pictures come by batch."""
    options = {"reps": reps, "zscore": "session"}
    columns = ("voxels", "image", "coco")
    found = measured(root=str(subject), copies=str(tmp_path), what="loader", columns=columns, options=options)
    assert found["peak"] <= found["limit"], found
    assert found["limit"] < 27_000_000 + 500 * 3 * PIXELS * PIXELS * 2, "voxels as stored, and not all pictures"
