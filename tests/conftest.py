"""What tests share. Nothing that they do is kept in the user's cache folder."""

import contextlib
import os
import tempfile

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache_folder():
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PENSTOCK_CACHE"] = folder
        yield folder


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
