"""Files changed at random: right data or an error of ours, within seconds and the budget, and never a dead process.

``fuzzing.py`` makes the changes and reads what becomes of them, in a child each. What fails is told with its seed and
number: ``python fuzzing.py FOLDER KIND SEED NUMBER 1`` does it again.
"""

import os
import subprocess
import sys

import pytest

from penstock import errors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork, limits and /proc")

FUZZING = os.path.join(os.path.dirname(__file__), "fuzzing.py")

KINDS = (
    *("tar", "npy", "npz", "packed-npz", "nifti", "nifti-gz", "pictures", "arrays"),
    *("hdf5", "hdf5-chunks", "hdf5-pieces", "hdf5-library", "lmdb", "tiledb", "parquet", "arrow"),
    *("zarr", "zarr-shards", "zarr-2", "tar-index", "hdf5-index", "folder-index", "manifest", "state"),
)

OURS = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)}

LIMIT_S = 5.0


def check(folder, kinds, seed, count, deadline):
    command = [sys.executable, FUZZING, str(folder), ",".join(kinds), str(seed), "0", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline, start_new_session=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert len(lines) == len(kinds) * count
    bad = [
        (kind, f"seed {seed}", int(number), found)
        for kind, number, seconds, found in lines
        if (found != "right" and found not in OURS) or float(seconds) > LIMIT_S
    ]
    assert not bad, (len(bad), bad[:5])
    for kind in kinds:
        assert {found for each, _, _, found in lines if each == kind} - {"right"} or kind.endswith("-index"), kind


@pytest.mark.case(24)
@pytest.mark.parametrize("kinds", [KINDS[:8], KINDS[8:16], KINDS[16:]], ids=lambda kinds: f"{kinds[0]}-to-{kinds[-1]}")
def test_changed_files_give_right_data_or_our_errors(every_format, any_seed, kinds):
    check(every_format, kinds, any_seed, 4, deadline=100)


@pytest.mark.slow
@pytest.mark.case(24)
def test_more_changed_files(every_format, any_seed):
    check(every_format, KINDS, any_seed + 1, 12, deadline=250)


@pytest.mark.soak
@pytest.mark.case(24)
@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_changed_files_of_each_kind_and_seed(every_format, any_seed, kind):
    """For ten seeds, two thousand."""
    check(every_format, [kind], any_seed, 200, deadline=1500)
