"""The release in a bucket: the same numbers as from a folder."""

import os

import numpy as np
import pytest

from penstock.errors import Missing
from penstock.nsd import NSD, Pictures
from penstock.remote.ranges import RemoteOptions


@pytest.fixture(scope="module")
def remote(roots):
    """A real S3 server with the tiny release in it."""
    boto3 = pytest.importorskip("boto3")
    moto = pytest.importorskip("moto.server")
    pytest.importorskip("obstore")
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    keys = {"region": "us-east-1", "access_key_id": "testing", "secret_access_key": "testing"}
    settings = {"endpoint": f"http://{host}:{port}", **keys}
    client = boto3.client(
        "s3", endpoint_url=settings["endpoint"], region_name="us-east-1", aws_access_key_id="testing",
        aws_secret_access_key="testing",
    )  # fmt: skip
    client.create_bucket(Bucket="nsd")
    root = roots["voxel-major"]
    for path in root.rglob("*"):
        if path.is_file() and "subj02" not in str(path):
            client.put_object(Bucket="nsd", Key=f"release/{path.relative_to(root)}", Body=path.read_bytes())
    yield RemoteOptions(deadline_s=20, store=settings)
    client.close()
    running.stop()


@pytest.mark.parametrize("cached", [False, True])
def test_the_same_as_from_a_folder(roots, remote, tmp_path, monkeypatch, cached):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    here = NSD(roots["voxel-major"])
    there = NSD("s3://nsd/release", remote=remote, cache_dir=tmp_path / "copies" if cached else None)
    assert there.sessions == here.sessions
    assert there.missing == ()
    assert there.trials.equals(here.trials)
    options = {"roi": "V1", "zscore": "session", "split": "shared1000/train", "images": Pictures(dtype="float32")}
    one, other = there.dataset(**options), here.dataset(**options)
    for ours, theirs in zip(one[:], other[:], strict=True):
        assert np.array_equal(ours, theirs)
    assert one.origin(0).url.startswith("s3://nsd/release/nsddata_betas")
    there.prepare("V1")
    after = NSD("s3://nsd/release", remote=remote, cache_dir=tmp_path / "copies" if cached else None).dataset(**options)
    assert after.store.blocks is None
    assert np.array_equal(after[:][0], other[:][0])
    kept = [name for _, _, names in os.walk(tmp_path) for name in names]
    assert "nsd_expdesign.mat" in kept


def test_what_is_not_there(remote, tmp_path):
    with pytest.raises(Missing, match="no betas of subject 2"):
        NSD("s3://nsd/release", 2, remote=remote, cache_dir=tmp_path)
