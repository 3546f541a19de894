"""What ``import penstock`` gives, and what it costs."""

import json
import subprocess
import sys

import pytest

import penstock

ERRORS = sorted(
    name for name, value in vars(penstock.errors).items() if isinstance(value, type) and issubclass(value, Exception)
)

PUBLIC = [
    *ERRORS,
    "BlockShuffled", "Dataset", "FieldSpec", "InOrder", "Loader", "MultiLoader", "Order", "Plan", "Resampled",
    "Shuffled", "Stats", "Store", "concat", "convert", "errors", "from_arrays",
    "inspect", "join", "open", "open_raw", "plan", "verify", "write_manifest",
]  # fmt: skip

HEAVY = ("torch", "h5py", "imagecodecs", "tqdm", "pandas", "scipy", "hypothesis", "pytest")

# Someone who types ``penstock --help`` waits for this.
IMPORT_SECONDS = 0.2

MEASURE = """
import json, sys, time
began = time.process_time()  # a busy machine is no failure
import penstock
seconds = time.process_time() - began
print(json.dumps({"seconds": seconds, "modules": sorted(sys.modules)}))
"""


def test_public_names_are_pinned():
    assert sorted(penstock.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_there_and_explained(name):
    assert getattr(penstock, name).__doc__


def test_dir_shows_public_names_alone():
    script = "import penstock; penstock.Loader; penstock.inspect; print(*dir(penstock))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.split() == sorted([*PUBLIC, "__version__"])


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_of_the_tree(name):
    assert getattr(penstock, name) is getattr(penstock.errors, name)


def test_version_is_one():
    assert all(part.isdigit() for part in penstock.__version__.split("."))


@pytest.fixture(scope="module")
def imported():
    """Five fresh interpreters: what they had loaded, and the quickest import."""
    told = []
    for _ in range(5):
        ran = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=60)
        told.append(json.loads(ran.stdout))
    return {"modules": told[0]["modules"], "seconds": min(each["seconds"] for each in told)}


@pytest.mark.parametrize("library", HEAVY)
def test_import_brings_no_heavy_library(imported, library):
    assert library not in imported["modules"]


def test_import_is_quick(imported):
    assert imported["seconds"] < IMPORT_SECONDS


COLLECTIONS = """
import gc
import penstock
{before}
was, seen = gc.isenabled(), []
gc.set_threshold(1, 1, 1)
gc.callbacks.append(lambda *_: seen.append(1))
penstock.Loader
found = len(seen)
assert gc.isenabled() == was
print(found)
"""


@pytest.mark.parametrize("before", ["", "gc.disable()"])
def test_importing_collects_no_garbage(before):
    """A collection beside torch's objects takes tens of milliseconds, and importing all modules triggers several."""
    code = COLLECTIONS.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) < 20  # a few before it begins, where every object triggers one
