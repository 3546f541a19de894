"""A password or a signature in an address is in no message, name, table or state, whatever goes wrong."""

import io
import json
import logging
import tarfile
import traceback
import warnings

import h5py
import numpy as np
import pytest
import zarr

import penstock as ps
import penstock.webdataset as wds
from penstock.base.urls import shown_name
from penstock.remote.ranges import RemoteOptions

SECRET = "hunter2xyzzy"
QUERY = f"?X-Amz-Signature={SECRET}&token={SECRET}&other={SECRET}&{SECRET}"
OPTIONS = RemoteOptions(retries=0, deadline_s=2, stall_timeout_s=0.5, headers={"X-Key": SECRET})

VALUES = np.arange(60, dtype="f4").reshape(20, 3)


def npy():
    stream = io.BytesIO()
    np.save(stream, VALUES)
    return stream.getvalue()


def hdf5():
    stream = io.BytesIO()
    with h5py.File(stream, "w") as file:
        file.create_dataset("data", data=VALUES, chunks=(1, 3), compression="gzip")
    return stream.getvalue()


def tar():
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for row in range(len(VALUES)):
            content = io.BytesIO()
            np.save(content, VALUES[row])
            info = tarfile.TarInfo(f"{row:03d}.npy")
            info.size = len(content.getvalue())
            archive.addfile(info, io.BytesIO(content.getvalue()))
    return stream.getvalue()


FILES = {"a.npy": npy, "a.h5": hdf5, "a.tar": tar}


def secret(server, path):
    return f"{server.url.replace('//', f'//me:{SECRET}@')}/{path}{QUERY}"


def all_of(error):
    return "".join(traceback.format_exception(error)) + repr(error)


def whole_use(url, folder):
    """Everything that a dataset says of itself, and what it leaves on the disk."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ds = ps.open(url, remote=OPTIONS, index_dir=folder / "index", cache_dir=folder / "cache")
        said = [repr(ds), repr(ds.store), ds.fingerprint, str(ds.origin(0)), str(ps.inspect(ds)), repr(ds.left_out)]
        column = next(iter(ds.fields))
        with ps.Loader(
            ds, batch_size=8, memory="64MiB", columns=(column, "__url__", "__key__"), on_error="skip"
        ) as loader:
            said += [str(urls) + str(keys) for _, urls, keys in loader]
            said += [str(loader.plan), str(loader.stats()), json.dumps(loader.state_dict()), repr(vars(loader))]
    said += [str(each.message) for each in warned]
    for path in folder.rglob("*"):
        said += [str(path), path.read_bytes().decode("latin-1") if path.is_file() else ""]
    return "\n".join(said)


@pytest.mark.case(23)
@pytest.mark.parametrize("name", FILES)
def test_nothing_that_a_dataset_says_or_keeps_has_it(server, tmp_path, name, caplog):
    caplog.set_level(logging.DEBUG)
    server.put(name, FILES[name]())
    said = whole_use(secret(server, name), tmp_path)
    assert SECRET not in said + caplog.text
    assert f"127.0.0.1:{server.http.server_port}/{name}" in said, "but where it came from"
    assert any(SECRET in str(headers) for headers in server.headers), "the server was told"


FAULTS = ["404", "403", "500", "stall", "redirect", "cut", "garbage", "replaced", "no ranges", "refused", "no length"]


@pytest.mark.case(23)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("fault", FAULTS)
def test_no_error_has_it(server, wrong, tmp_path, name, fault):
    content = FILES[name]()
    server.put(name, {"cut": content[: len(content) // 2], "garbage": b"<html>" * 999}.get(fault, content))
    url = secret(server, name)
    server.always = {
        "404": wrong.status(404), "403": wrong.status(403), "500": wrong.status(500), "stall": wrong.stall(10, 5),
        "redirect": wrong.redirect(f"http://u:{SECRET}@127.0.0.1:1/?sig={SECRET}"), "no ranges": wrong.no_ranges,
        "no length": wrong.no_ranges_no_length,
    }.get(fault)  # fmt: skip
    if fault == "refused":
        url = url.replace(f":{server.http.server_port}", ":1")
    failed = []
    for use in (lambda: list(wds.WebDataset(url, remote=OPTIONS)), lambda: ps.open(url, remote=OPTIONS)[:]):
        try:
            if fault == "replaced":
                ds = ps.open(url, remote=OPTIONS)
                server.put(name, content + b"more")
                ds[:]
            else:
                use()
        except Exception as error:
            failed.append(error)
    assert failed
    assert SECRET not in "".join(map(all_of, failed))
    assert all(isinstance(error, ps.errors.PenstockError) for error in failed)


@pytest.mark.case(23)
def test_zarr(server, tmp_path):
    path = tmp_path / "a.zarr"
    zarr.create_array(path, shape=VALUES.shape, dtype="f4", chunks=(1, 3))[...] = VALUES + 1
    for file in path.rglob("*"):
        if file.is_file():
            server.put(f"a.zarr/{file.relative_to(path)}", file.read_bytes())
    url = secret(server, "a.zarr").partition("?")[0]
    ds = ps.open(url, remote=OPTIONS)
    said = [repr(ds), str(ds.origin(0)), str(ps.inspect(ds))]
    del server.files["/a.zarr/c/4/0"]
    with pytest.raises(ps.errors.Missing) as caught:
        ds[4]
    assert SECRET not in "".join((*said, all_of(caught.value)))


ODD = [
    f"ftp://me:{SECRET}@host/a.npy?sig={SECRET}", f"http://[::1{SECRET}/a.npy", f"s3://key:{SECRET}@bucket/a.npy",
    f"pipe:curl -H {SECRET} http://host/a.tar", f"http://me:{SECRET}@host:port/a.npy", f"gs://me:{SECRET}@b/*.npy",
    f"s3://me:{SECRET}@b/*.npy",
    f"https://me:{SECRET}@host/*.npy?token={SECRET}", f"HTTPS://me:{SECRET}@127.0.0.1:1/a.npy#{SECRET}",
    f"http://127.0.0.1:1/a.npy?{SECRET}",
]  # fmt: skip


@pytest.mark.case(23)
@pytest.mark.parametrize("url", ODD)
def test_addresses_that_are_none(url):
    assert SECRET not in shown_name(url)
    for use in (lambda: ps.open(url, remote=OPTIONS), lambda: list(wds.WebDataset(url, remote=OPTIONS))):
        with pytest.raises(ps.errors.PenstockError) as caught:
            use()
        assert SECRET not in all_of(caught.value)
