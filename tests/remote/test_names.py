"""Addresses that differ only in what looks like a secret are different files, wherever files are known by name."""

import io
import json

import numpy as np
import pytest

import penstock as ps
from penstock.base.urls import bare_name, base_name, lasting_name, shown_name
from penstock.files import saved as saved_tables
from penstock.files.files import remote_files
from penstock.remote.ranges import RemoteOptions

OPTIONS = RemoteOptions(retries=1, deadline_s=5, stall_timeout_s=1)
LOOK_SECRET = [
    *("token", "token_id", "author", "policy", "expires", "se", "sp", "sr", "st", "sv", "sig", "signature", "key"),
    *("X-Amz-Date", "X-Amz-Signature", "api_key", "passwd"),
]
SIGNED = {
    "amazon": "X-Amz-Date={0}&X-Amz-Credential=me%2F{0}&X-Amz-Signature={0}",
    "amazon, of old": "AWSAccessKeyId=me&Expires={0}&Signature={0}",
    "cloudfront": "Policy={0}&Signature={0}&Key-Pair-Id=K1",
    "google": "X-Goog-Date={0}&X-Goog-Signature={0}",
    "azure": "sv=2024-01-01&st={0}&se={0}&sr=b&sp=r&sig={0}",
}


def npy(value):
    stream = io.BytesIO()
    np.save(stream, np.full((4, 2), value, "f4"))
    return stream.getvalue()


@pytest.mark.case(23)
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("validators", [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("name", LOOK_SECRET)
def test_each_address_delivers_its_own_file(server, tmp_path, name, validators, cached):
    server.gives_etag, server.gives_time = validators
    urls = [server.put(f"a.npy?{name}={value}", npy(value)) for value in (1, 2)]
    how = {"remote": OPTIONS, "index_dir": tmp_path / "index", "cache_dir": tmp_path / "cache" if cached else None}
    for order in ([0, 1], [1, 0], [1], [0]):  # also in later runs, which find what these left
        found = ps.open([urls[each] for each in order], **how)[:]["data"][::4, 0]
        assert found.tolist() == [each + 1 for each in order]


@pytest.mark.case(23)
def test_users_of_one_name_are_told_apart(server):
    names = {shown_name(f"http://{user}@host/a.npy") for user in ("alice:pw", "bob:pw", "bob:pw2")}
    assert len(names) == 3
    assert not any("pw" in name or "bob" in name for name in names)


@pytest.mark.parametrize("kind", SIGNED)
def test_an_address_signed_anew_finds_its_copy(server, tmp_path, kind):
    server.put("a.npy", npy(7))
    for signature, fetched in (("one", 1), ("another", 1)):
        url = f"{server.url}/a.npy?{SIGNED[kind].format(signature)}"
        assert ps.open(url, remote=OPTIONS, cache_dir=tmp_path / "cache")[0]["data"][0] == 7
        assert server.whole_downloads("a.npy") == fetched
    server.gives_etag = False  # then nothing says that it is the same file
    ps.open(url, remote=OPTIONS, cache_dir=tmp_path / "cache")[0]
    ps.open(url.replace("another", "third"), remote=OPTIONS, cache_dir=tmp_path / "cache")[0]
    assert server.whole_downloads("a.npy") == 3


def test_a_weak_etag_does_not_make_one_file_of_two(server, tmp_path):
    some = remote_files(None, None, OPTIONS)
    url = server.put("a.npy", npy(7))
    server.always = lambda handler, data, wanted: handler.answer(
        206, {"ETag": 'W/"x"', "Content-Range": f"bytes 0-{len(data) - 1}/{len(data)}"}, data
    )
    one, two = (some.identify(some.remote.admit(f"{url}?{SIGNED['azure'].format(each)}")) for each in ("one", "two"))
    saved = saved_tables.save(str(tmp_path), one, "table", {}, {"a": np.arange(3)})
    assert saved is not None
    assert saved_tables.load(str(tmp_path), one, "table") is not None
    assert saved_tables.load(str(tmp_path), two, "table") is None


@pytest.mark.parametrize("kind", SIGNED)
def test_a_table_is_found_under_another_signature(server, tmp_path, kind):
    some, url = remote_files(None, None, OPTIONS), server.put("a.npy", npy(7))
    one, two = (some.identify(some.remote.admit(f"{url}?{SIGNED[kind].format(each)}")) for each in ("one", "two"))
    assert one != two
    saved_tables.save(str(tmp_path), one, "table", {}, {"a": np.arange(3)})
    assert saved_tables.load(str(tmp_path), two, "table") is not None


def test_manifests_tell_them_apart_and_outlast_tokens(server, tmp_path):
    urls = [server.put(f"a.npy?st={value}", npy(value)) for value in (1, 2)]
    path = ps.write_manifest(urls, tmp_path / "both.json")
    assert len(json.loads((tmp_path / "both.json").read_text())["files"]) == 2
    assert ps.open(urls, manifest=path, remote=OPTIONS)[:]["data"][::4, 0].tolist() == [1, 2]
    server.put("b.npy", npy(3))
    path = ps.write_manifest(f"{server.url}/b.npy?token=monday", tmp_path / "one.json")
    assert ps.open(f"{server.url}/b.npy?token=tuesday", manifest=path, remote=OPTIONS)[0]["data"][0] == 3
    server.put("b.npy", npy(4))
    with pytest.raises(ps.errors.Corrupt):
        ps.open(f"{server.url}/b.npy?token=friday", manifest=path, remote=OPTIONS)[0]


NAMES = [  # an address, and what is left of it for what is kept on disk, and for a manifest
    ("https://host/a.npy?versionId=3", "https://host/a.npy?versionId=3", "https://host/a.npy?versionId=3"),
    ("https://me:pw@host/a.npy", "https://host/a.npy", "https://host/a.npy"),
    ("https://host/a.npy?token=abcd", "https://host/a.npy?token=…88d4266f", "https://host/a.npy?token=…"),
    ("https://host/a?f=abcd&token=1", "https://host/a?f=…88d4266f&token=…6b86b273", "https://host/a?f=…88d4266f&token=…"),
    ("https://host/a?sig=x&se=1&sv=2", "https://host/a?sig=…&se=…&sv=…", "https://host/a?sig=…&se=…&sv=…"),
    ("s3://bucket/a#b?c", "s3://bucket/a#b?c", "s3://bucket/a#b?c"),
    ("folder/a#0123456789abcdef", "folder/a#0123456789abcdef", "folder/a#0123456789abcdef"),
]  # fmt: skip


@pytest.mark.parametrize(("url", "kept", "in_manifest"), NAMES)
def test_names(url, kept, in_manifest):
    name = shown_name(url)
    assert (lasting_name(name), bare_name(name)) == (kept, in_manifest)
    assert base_name(f"{name}/zarr.json") == "zarr.json" or "#" not in name


def test_bytes_that_are_no_text_are_told_apart():
    assert lasting_name(shown_name("http://host/a?f=%ff")) != lasting_name(shown_name("http://host/a?f=%fe"))


@pytest.mark.parametrize("secret", ["//me:word@", "?token=word"])
def test_files_in_a_folder_are_asked_for_with_its_secrets(server, secret):
    some = remote_files(None, None, OPTIONS)
    server.put("a.zarr/c/0", b"inside")
    url = f"{server.url}/a.zarr".replace("//", secret) if "@" in secret else f"{server.url}/a.zarr{secret}"
    seen = []
    server.always = lambda handler, data, wanted: (seen.append(handler.path), handler.serve(data, wanted))
    assert some.identify(f"{some.remote.admit(url)}/c/0").size == 6
    assert seen == ["/a.zarr/c/0" + (secret if "?" in secret else "")]
    assert ("Authorization" in server.headers[-1]) == ("@" in secret)
