"""Nothing that tests do is kept in the user's cache folder."""

import os
import tempfile

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache_folder():
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PENSTOCK_CACHE"] = folder
        yield folder
