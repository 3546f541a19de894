"""Files that examples write, removed once per module."""

import shutil
import tempfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder():
    made = tempfile.mkdtemp()
    yield Path(made)
    shutil.rmtree(made)
