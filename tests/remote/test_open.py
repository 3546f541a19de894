"""``penstock.open`` of addresses: what local files give, from a web server and from an S3 server."""

import io
import os
import signal
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest

import penstock as ps
from penstock.base.spec import Origin
from penstock.errors import Changed, ConfigError, Missing, Unavailable
from penstock.remote.ranges import RemoteOptions
from penstock.testing import check_store

OPTIONS = RemoteOptions(retries=3, deadline_s=20, stall_timeout_s=2)
ROWS = 7


def values(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "a.npy": rng.normal(size=(ROWS, 30, 40)).astype("f4"),
        "b.npy": rng.integers(0, 100, (ROWS, 5)).astype("<i2"),
        "cls": np.arange(ROWS) + 10 * seed,
    }


def tar_bytes(seed=0):
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for row in range(ROWS):
            for name, column in values(seed).items():
                content = io.BytesIO()
                if name.endswith("npy"):
                    np.save(content, column[row])
                else:
                    content.write(str(column[row]).encode())
                about = tarfile.TarInfo(f"{seed:03}{row:03}.{name}")
                about.size = content.tell()
                content.seek(0)
                tar.addfile(about, content)
    return held.getvalue()


def npy_bytes(array):
    held = io.BytesIO()
    np.save(held, array)
    return held.getvalue()


def hdf5_file(path):
    rng = np.random.default_rng(5)
    betas, small = rng.normal(size=(ROWS, 60, 70)).astype("f4"), rng.integers(0, 9, (ROWS, 3))
    with h5py.File(path, "w") as h5:
        h5["contiguous"] = betas
        h5.create_dataset("chunked", data=betas, chunks=(2, 30, 70), compression="gzip", shuffle=True)
        h5["small"] = small
        h5.create_dataset("scaled", data=small, chunks=(2, 3), scaleoffset=4)  # which h5py must read
    return {"chunked": betas, "contiguous": betas, "scaled": small, "small": small}


@pytest.fixture(params=["ranges", "cache"])
def how(request, tmp_path):
    options = {"remote": OPTIONS, "index_dir": tmp_path / "index"}
    return options if request.param == "ranges" else {**options, "cache_dir": tmp_path / "c", "cache_bytes": "20MB"}


def together(*seeds):
    return {name: np.concatenate([values(seed)[name] for seed in seeds]) for name in values()}


def test_tar(server, how):
    for seed in range(3):
        server.put(f"train-{seed:03}.tar", tar_bytes(seed))
    pattern = f"{server.url}/train-{{000..002}}.tar"
    check_store(lambda: ps.open(pattern, **how).store, together(0, 1, 2))
    ds = ps.open(pattern, **how)
    assert ds.origin(8) == Origin(f"{server.url}/train-001.tar", "001001")


@pytest.mark.parametrize(
    "array", [values()["a.npy"], values()["b.npy"], np.ones((4, 90, 90), ">i2")], ids=["f4", "i2", ">i2"]
)
def test_npy(server, how, array):
    url = server.put("x.npy", npy_bytes(array))
    check_store(lambda: ps.open(url, **how).store, {"data": array.astype(array.dtype.newbyteorder("="))})
    part = ps.open(url, **how).select_within("data", (slice(1, 3),) * (array.ndim - 1))
    assert np.array_equal(part[:]["data"], array[(slice(None), *(slice(1, 3),) * (array.ndim - 1))])


def test_hdf5(server, how, tmp_path):
    expected = hdf5_file(tmp_path / "x.h5")
    url = server.put("x.h5", (tmp_path / "x.h5").read_bytes())
    check_store(lambda: ps.open(url, **how).store, expected)


def test_a_loader_over_addresses(server, how, tmp_path):
    for seed in range(2):
        server.put(f"{seed}.tar", tar_bytes(seed))
        (tmp_path / f"{seed}.tar").write_bytes(tar_bytes(seed))
    settings = {"batch_size": 4, "shuffle": True, "seed": 3, "memory": "64MiB", "output": "numpy"}
    there = ps.Loader(ps.open(f"{server.url}/{{0..1}}.tar", **how), **settings)
    here = ps.Loader(ps.open(str(tmp_path / "{0..1}.tar")), **settings)
    for one, two in zip(there, here, strict=True):
        assert all(np.array_equal(one[name], two[name]) for name in two)


def test_an_index_is_kept_while_the_file_stays(server, tmp_path):
    settings = {"remote": OPTIONS, "index_dir": tmp_path}
    url = server.put("a.tar", tar_bytes(0))
    ps.open(url, **settings)
    server.asked.clear()
    ds = ps.open(url, **settings)
    assert server.whole_downloads("a.tar") == 0
    assert np.array_equal(ds[:]["cls"], values()["cls"])
    server.put("a.tar", tar_bytes(1))
    with pytest.raises(Changed, match="replaced"):
        ds[0]
    assert np.array_equal(ps.open(url, **settings)[:]["cls"], values(1)["cls"])
    assert server.whole_downloads("a.tar") == 1


def test_members_that_are_not_asked_for_are_not_fetched(server, tmp_path):
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for row in range(3):
            for name, content in (("big.npy", npy_bytes(np.zeros(2_000_000, "f4"))), ("cls", b"7")):
                about = tarfile.TarInfo(f"{row}.{name}")
                about.size = len(content)
                tar.addfile(about, io.BytesIO(content))
    url = server.put("a.tar", held.getvalue())
    ds = ps.open(url, fields=["cls"], remote=OPTIONS, index_dir=tmp_path)
    before = server.sent_bytes
    assert ds[:]["cls"].tolist() == [7, 7, 7]
    assert server.sent_bytes - before < 100


def test_a_server_without_ranges(server, wrong, tmp_path):
    server.always = wrong.no_ranges
    url = server.put("a.tar", tar_bytes(0))
    with pytest.raises(Unavailable, match="cache_dir="):
        ps.open(url, remote=OPTIONS)
    ds = ps.open(url, remote=OPTIONS, cache_dir=tmp_path / "c", index_dir=False)
    assert np.array_equal(ds[:]["a.npy"], values()["a.npy"])
    assert server.whole_downloads("a.tar") == 1


def test_a_cache_smaller_than_the_dataset(server, tmp_path):
    for seed in range(4):
        server.put(f"{seed}.tar", tar_bytes(seed))
    size = len(tar_bytes(0))
    how = {"cache_dir": tmp_path / "c", "cache_bytes": 2 * size + 100, "remote": OPTIONS}
    ds = ps.open(f"{server.url}/{{0..3}}.tar", **how)
    for row in (0, 27, 5, 13, 20, 1):
        assert ds[row]["cls"] == together(0, 1, 2, 3)["cls"][row]
    assert sum(each.stat().st_size for each in (tmp_path / "c").iterdir()) <= 2 * size + 100
    assert [server.whole_downloads(f"{seed}.tar") for seed in range(4)] == [1, 1, 1, 1], "none pushes another out"
    assert "over the network" in str(ps.inspect(ds))
    assert "over the network" not in str(ps.inspect(f"{server.url}/{{0..1}}.tar", **how))


def test_what_cannot_be_opened_says_so(server, tmp_path):
    with pytest.raises(Missing, match="404"):
        ps.open(f"{server.url}/none.tar", remote=OPTIONS)
    with pytest.raises(ConfigError, match="use braces"):
        ps.open(f"{server.url}/*.tar", remote=OPTIONS)
    with pytest.raises(ConfigError, match="swmr"):
        ps.open(server.put("x.h5", b"\x89HDF\r\n\x1a\n" + bytes(600)), remote=OPTIONS, swmr=True)
    skipping = ps.open([server.put("a.tar", tar_bytes()), f"{server.url}/no.tar"], remote=OPTIONS, on_error="skip")
    assert len(skipping) == ROWS
    assert "no.tar" in str(skipping.left_out[0])


BREAKING_OFF = """
import sys
import penstock as ps
from penstock.remote.ranges import RemoteOptions

try:
    ds = ps.open(sys.argv[1], fields=["scaled"], remote=RemoteOptions(retries=0, deadline_s=5))
    print("opened")
    ds[0]
    print("read")
except (ps.errors.Unavailable, ps.errors.Corrupt, ps.errors.Truncated) as error:
    kept = error
    print("500 Internal" in str(error), type(error).__name__)
"""


@pytest.mark.parametrize(
    ("good", "cut", "said"),
    [
        (1, None, "True Unavailable"),
        (2, None, "opened True Unavailable"),
        (99, 700, "False Truncated"),
        (99, 5, "False Corrupt"),
    ],
)
def test_hdf5_that_breaks_off_says_why(server, wrong, tmp_path, good, cut, said):
    """In a process of its own: HDF5 takes errors of its file so badly that the process may crash at its end."""
    hdf5_file(tmp_path / "x.h5")
    server.put("x.h5", (tmp_path / "x.h5").read_bytes()[:cut])
    server.once, server.always = [None] * good, wrong.status(500)
    source = str(Path(ps.__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, "-c", BREAKING_OFF, f"{server.url}/x.h5"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": source},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == said.split()


def test_a_loader_can_be_closed_while_a_server_stalls(server, wrong):
    url = server.put("x.npy", npy_bytes(np.zeros((20, 5000))))
    patient = RemoteOptions(deadline_s=100, stall_timeout_s=100)
    loader = ps.Loader(ps.open(url, remote=patient), batch_size=2, memory="64MiB", output="numpy")
    server.always = wrong.stall(0, 12)
    iteration = iter(loader)
    closing = threading.Thread(target=loader.close)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    del iteration


# S3.


@pytest.fixture
def bucket(s3):
    client, settings = s3
    return client, RemoteOptions(deadline_s=20, store=settings)


def test_s3(bucket, tmp_path, monkeypatch):
    client, remote = bucket
    for seed in range(2):
        client.put_object(Bucket="shards", Key=f"a b/train+{seed}.tar", Body=tar_bytes(seed))
    client.put_object(Bucket="shards", Key="a b/deeper/train+9.tar", Body=b"not this one")
    for name in ("s3://shards/a b/train+{0..1}.tar", "s3://shards/a b/train*.tar"):
        ds = ps.open(name, remote=remote, index_dir=tmp_path)
        assert np.array_equal(ds[:]["a.npy"], together(0, 1)["a.npy"])
        assert ds.origin(0).url == "s3://shards/a b/train+0.tar"
    cached = ps.open(name, remote=remote, cache_dir=tmp_path / "c")
    assert np.array_equal(cached[:]["cls"], together(0, 1)["cls"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", remote.store["endpoint"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    assert len(ps.open(name, index_dir=tmp_path)) == 2 * ROWS


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_s3_after_a_fork(bucket):
    client, remote = bucket
    client.put_object(Bucket="shards", Key="fork.npy", Body=npy_bytes(np.arange(5)))
    ds = ps.open("s3://shards/fork.npy", remote=remote)
    assert ds[3]["data"] == 3
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if ds[4]["data"] == 4 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ds[2]["data"] == 2


def test_s3_of_everybody(bucket, tmp_path):
    client, remote = bucket
    client.put_object(Bucket="shards", Key="public.npy", Body=npy_bytes(np.arange(5)), ACL="public-read")
    settings = {name: value for name, value in remote.store.items() if "key" not in name}
    public = RemoteOptions(deadline_s=20, store={**settings, "skip_signature": True})
    assert ps.open("s3://shards/public.npy", remote=public)[:]["data"].tolist() == [0, 1, 2, 3, 4]


def test_s3_that_changed(bucket, tmp_path):
    client, remote = bucket
    client.put_object(Bucket="shards", Key="x.npy", Body=npy_bytes(np.arange(5)))
    ds = ps.open("s3://shards/x.npy", remote=remote)
    client.put_object(Bucket="shards", Key="x.npy", Body=npy_bytes(np.arange(5)[::-1].copy()))
    with pytest.raises(Changed, match="replaced"):
        ds[0]


def test_s3_that_is_not_there(bucket):
    _, remote = bucket
    with pytest.raises(Missing, match=r"s3://shards/none\.tar"):
        ps.open("s3://shards/none.tar", remote=remote)
    with pytest.raises(Missing, match="matches nothing"):
        ps.open("s3://shards/none*.tar", remote=remote)
    with pytest.raises(ConfigError, match="bucket/key"):
        ps.open("s3://shards", remote=remote)
    with pytest.raises(ConfigError, match="nonsense"):
        ps.open("s3://shards/x.tar", remote=RemoteOptions(store={"nonsense": 1}))
