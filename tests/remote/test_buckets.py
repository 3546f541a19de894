"""Google's and Azure's buckets, and the Hugging Face hub: the same reads under other addresses."""

import base64
import io
import json
from urllib.parse import quote

import numpy as np
import pytest

import penstock as ps
from penstock.base.urls import hub_address, shown_name
from penstock.errors import ConfigError
from penstock.remote import RemoteOptions
from penstock.remote.buckets import Signer
from penstock.webdataset import TarWriter, WebDataset, gopen, wids

pytest.importorskip("obstore")

VALUES = np.arange(12.0).reshape(4, 3)


def npy_bytes():
    stream = io.BytesIO()
    np.save(stream, VALUES)
    return stream.getvalue()


@pytest.fixture(scope="session")
def account():
    """What Google gives to a program: a key of its own, here for a server on this machine."""
    rsa = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.rsa")
    from cryptography.hazmat.primitives import serialization as form

    key = rsa.generate_private_key(65537, 2048)
    text = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()).decode()
    return {"type": "service_account", "private_key": text, "private_key_id": "id", "client_email": "me@example.org"}


def settings(scheme, server, account):
    if scheme == "gs":
        return {"service_account_key": json.dumps({**account, "gcs_base_url": server.url})}
    key = base64.b64encode(b"k" * 32).decode()
    return {"account_name": "mine", "account_key": key, "endpoint": f"{server.url}/mine"}


FOLDERS = {"gs": "bucket", "az": "mine/bucket"}
SIGNED = {"gs": "X-Goog-Signature=", "az": "sig="}


@pytest.mark.parametrize("scheme", FOLDERS)
def test_signed(server, account, scheme):
    server.put(f"{FOLDERS[scheme]}/a%20b/x.npy", npy_bytes())
    remote = RemoteOptions(deadline_s=20, store=settings(scheme, server, account))
    address = Signer(remote.store, 20.0).signed(f"{scheme}://bucket/a b/x.npy")
    assert address.startswith(f"{server.url}/{FOLDERS[scheme]}/a%20b/x.npy?")
    assert SIGNED[scheme] in address
    ds = ps.open(f"{scheme}://bucket/a b/x.npy", remote=remote)
    assert np.array_equal(ds[:]["data"], VALUES)
    assert ds.origin(0).url == f"{scheme}://bucket/a b/x.npy"


@pytest.mark.parametrize("scheme", FOLDERS)
def test_shards_by_the_verbs(server, account, scheme, tmp_path):
    for number in range(2):
        with TarWriter(str(tmp_path / "x.tar")) as writer:
            writer.write({"__key__": f"{number}", "cls": number})
        server.put(f"{FOLDERS[scheme]}/x-{number}.tar", (tmp_path / "x.tar").read_bytes())
    remote = RemoteOptions(deadline_s=20, store=settings(scheme, server, account))
    ds = WebDataset(f"{scheme}://bucket/x-{{0..1}}.tar", remote=remote).decode()
    assert [(each["cls"], each["__url__"]) for each in ds] == [(n, f"{scheme}://bucket/x-{n}.tar") for n in range(2)]


@pytest.mark.parametrize(
    ("address", "expected", "given"),
    [
        ("gs://b/a b/é.tar", f"https://storage.googleapis.com/b/a%20b/{quote('é')}.tar", {}),
        ("az://b/a b/c#d.tar", "https://mine.blob.core.windows.net/b/a%20b/c%23d.tar", {"account_name": "mine"}),
    ],
)
def test_of_everybody(address, expected, given):
    assert Signer({"skip_signature": True, **given}, 5.0).signed(address) == expected


def test_keys_that_would_be_cut(account):
    with pytest.raises(ConfigError, match="rename the object"):
        Signer({"service_account_key": json.dumps(account)}, 5.0).signed("gs://b/a#b.tar")


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_secrets_are_not_told(account, scheme):
    assert shown_name(f"{scheme}://me:secret@bucket/a.npy") == f"{scheme}://bucket/a.npy"
    with pytest.raises(ConfigError, match="a user and a password") as caught:
        ps.open(f"{scheme}://me:secret@bucket/a.npy")
    assert "secret@" not in str(caught.value)
    with pytest.raises(ConfigError, match=f"{scheme}://bucket"):
        ps.open(f"{scheme}://bucket/a.npy", remote=RemoteOptions(store={"nonsense": 1}))


HUB = {
    "hf://datasets/owner/name/a/b c.tar": "datasets/owner/name/resolve/main/a/b%20c.tar",
    "hf://datasets/owner/name@v1.0/a.tar": "datasets/owner/name/resolve/v1.0/a.tar",
    "hf://datasets/owner/name@refs%2Fpr%2F1/a.tar": "datasets/owner/name/resolve/refs%2Fpr%2F1/a.tar",
    "hf://owner/name/a.npy": "owner/name/resolve/main/a.npy",
    "hf://spaces/owner/name/a.npy": "spaces/owner/name/resolve/main/a.npy",
}


@pytest.mark.parametrize("address", HUB)
def test_the_hub(monkeypatch, address):
    assert hub_address(address) == f"https://huggingface.co/{HUB[address]}"
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror/")
    assert hub_address(address) == f"http://mirror/{HUB[address]}"


def test_reading_from_the_hub(server, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    server.put("datasets/owner/name/resolve/main/x.npy", npy_bytes())
    private = RemoteOptions(deadline_s=20, headers={"Authorization": "Bearer word"})
    ds = ps.open("hf://datasets/owner/name/x.npy", remote=private)
    assert np.array_equal(ds[:]["data"], VALUES)
    assert ds.origin(0).url == "hf://datasets/owner/name/x.npy"
    assert {each.get("Authorization") for each in server.headers} == {"Bearer word"}
    with pytest.raises(ConfigError, match="hf://datasets/OWNER/NAME/PATH"):
        ps.open("hf://datasets/owner")


def test_shards_on_the_hub_by_the_verbs(server, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    with TarWriter(str(tmp_path / "x.tar")) as writer:
        writer.write({"__key__": "0", "cls": 7})
    shard, address = (tmp_path / "x.tar").read_bytes(), "hf://datasets/owner/name/x.tar"
    server.put("datasets/owner/name/resolve/main/x.tar", shard)
    (streamed,) = WebDataset(address)
    assert (streamed["cls"], streamed["__url__"], "__local_path__" in streamed) == (b"7", address, False)
    (copied,) = WebDataset(address, cache_dir=tmp_path / "copies")
    assert copied["cls"] == b"7"
    assert copied["__local_path__"].startswith(str(tmp_path / "copies"))
    with gopen(address) as stream:
        assert stream.read() == shard
    assert wids.ShardListDataset([{"url": address, "nsamples": 1}])[0][".cls"] == 7
