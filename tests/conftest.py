"""What tests share. Nothing that they do is kept in the user's cache folder.

A test that takes ``any_seed`` makes its own faults from that number: once in a usual run, and where it is marked
``soak``, which `make soak` alone runs, for ten numbers. Its name carries the number, and ``--seed`` begins there again.

Hypothesis tries the same examples in every usual run: a change alone can make a law fail. `make soak` runs all laws
with the profile "explore" as well, whose examples are new each time, and prints what reproduces a failure.
"""

import contextlib
import dataclasses
import gc
import os
import tempfile

import pytest
from hypothesis import settings

from penstock.base import policy

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("same")

SOAK_SEEDS = 10


def pytest_addoption(parser):
    first = int(os.environ.get("PENSTOCK_SEED", "0"))
    parser.addoption("--seed", type=int, default=first, help="the seed of tests that make their own faults")
    parser.addoption("--processes", type=int, default=0, help="processes that read, wherever a test does not say")
    parser.addoption("--seeds", type=int, default=SOAK_SEEDS, help="for how many seeds tests of the soak run")


def pytest_generate_tests(metafunc):
    if "any_seed" in metafunc.fixturenames:
        first = metafunc.config.getoption("seed")
        count = metafunc.config.getoption("seeds") if metafunc.definition.get_closest_marker("soak") else 1
        metafunc.parametrize("any_seed", range(first, first + count), ids="seed={}".format)


def pytest_collection_modifyitems(config, items):
    if changing := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"names with an address differ between processes; give ids to {changing[0]}")
    if "soak" in config.option.markexpr:
        return
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("soak")])
    items[:] = [item for item in items if not item.get_closest_marker("soak")]


def pytest_collection_finish():
    """Garbage collection passes over all that was imported: tests collect often, and fork."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache_folder():
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PENSTOCK_CACHE"] = folder
        yield folder


@pytest.fixture(scope="session", autouse=True)
def reader_processes(request):
    """With ``--processes``: how many processes loaders read in."""
    count = request.config.getoption("processes")
    if count:
        from tests.in_processes import read_in_processes

        read_in_processes(count)
    return count


@pytest.fixture
def open_in():
    """How many descriptors of this process are of files under a folder; 0 where there is no telling."""

    def count(folder):
        links = []
        for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
            with contextlib.suppress(OSError):  # closed meanwhile
                links.append(os.readlink(f"/proc/self/fd/{name}"))
        return sum(link.startswith(str(folder)) for link in links)

    return count


@pytest.fixture
def read_policy(monkeypatch):
    """Open files with other thresholds: ``read_policy(group_chunks_below_bytes=0)``."""

    def change(**thresholds):
        monkeypatch.setattr(policy, "DEFAULT", dataclasses.replace(policy.DEFAULT, **thresholds))

    return change
