"""``install()``: what ``import webdataset`` and ``import wids`` give afterwards, each in a process of its own."""

import subprocess
import sys

import pytest


def run(script: str) -> str:
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_modules_and_names() -> None:
    script = """
import penstock.webdataset as ours
ours.install()
ours.install()
import webdataset as wds, webdataset.filters, webdataset.gopen, wids, importlib.util
from webdataset import gopen, handlers, tariterators
from webdataset.filters import _shuffle, getfirst
from webdataset.shardlists import expand_urls
from webdataset.tariterators import base_plus_ext, tar_file_expander, url_opener, valid_sample
from wids import ShardListDataset, wids_specs
from wids.wids import ChunkedSampler
import wids.wids_specs
assert wds is ours and webdataset.filters is ours.filters and wds.writer.gopen.gopen is gopen
assert importlib.util.find_spec("webdataset") is not None
print(wds.__version__, wds.utils.pytorch_worker_seed())
"""
    assert run(script).split() == ["1.0.2", "0"]


@pytest.mark.slow
def test_too_late() -> None:
    pytest.importorskip("webdataset")
    script = """
import webdataset, penstock.webdataset
try:
    penstock.webdataset.install()
except ValueError as error:
    print(error)
"""
    assert "webdataset was imported already" in run(script)
