"""A server elsewhere cannot have this machine ask what only it can reach: the address that is reached counts."""

import socket

import pytest

from penstock.errors import Unavailable
from penstock.files.files import remote_files
from penstock.remote import http as transport
from penstock.remote import private_addresses
from penstock.remote.ranges import RemoteOptions

INSIDE = [
    *(
        "127.0.0.1",
        "127.1",
        "127.0.1",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "0177.0.0.1",
        "017700000001",
        "0",
        "0.0.0.0",
    ),
    *("127.0.0.1.", "192.0.0.192", "168.63.129.16", "64:ff9b:1::7f00:1", "64:ff9b:1:2::a00:1", "::ffff:0:127.0.0.1"),
    *("10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "0xa9fea9fe", "2852039166", "100.64.0.1"),
    *("192.0.0.170", "198.18.0.1", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "::ffff:127.0.0.1", "::ffff:7f00:1", "::127.0.0.1", "64:ff9b::127.0.0.1", "2002:7f00:1::"),
    *("::ffff:169.254.169.254", "fe80::1", "fe80::1%1", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1"),
    *("localhost", "LOCALHOST.", "a.localhost", "printer.local", "metadata.google.internal", "internal"),
]
OUTSIDE = [
    "8.8.8.8",
    "134744072",
    "2001:4860:4860::8888",
    "::ffff:8.8.8.8",
    "::ffff:0:8.8.8.8",
    "64:ff9b::8.8.8.8",
    "8.8.8.8.",
    "data.example.org",
    "mylocal",
    "localhost.org",
]
OPTIONS = RemoteOptions(retries=0, deadline_s=3, connect_timeout_s=1, stall_timeout_s=1)


@pytest.mark.case(21)
@pytest.mark.parametrize("host", INSIDE)
def test_inside(host):
    assert private_addresses.is_inside(host)


@pytest.mark.case(21)
@pytest.mark.parametrize("host", OUTSIDE)
def test_outside(host):
    assert not private_addresses.is_inside(host)


@pytest.fixture
def names(monkeypatch):
    """What names resolve to."""
    known = {"data.example.org": "127.0.0.2", "cdn.example.org": "127.0.0.2", "inside.example.org": "127.0.0.1"}
    really = socket.getaddrinfo

    def resolve(host, *args, **how):
        return really(known.get(host, host), *args, **how)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


@pytest.fixture
def elsewhere(names, server_at, monkeypatch):
    """A server at 127.0.0.2, an address that is taken for one elsewhere: a test has no other."""
    really = private_addresses._is_near
    monkeypatch.setattr(private_addresses, "_is_near", lambda address: str(address) != "127.0.0.2" and really(address))
    try:
        made = server_at("127.0.0.2")
    except OSError:
        pytest.skip("this machine has one address of its own alone")
    made.put("a.bin", b"x" * 100)
    return made


@pytest.fixture
def inside(server):
    server.put("a.bin", b"x" * 100)
    return server


def size(server, host):
    some = remote_files(None, None, OPTIONS)
    return some.identify(some.remote.admit(address(server, host))).size


def address(server, host):
    return f"http://{host}:{server.http.server_port}/a.bin"


SPELLINGS = ["inside.example.org", "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0", "localhost"]


@pytest.mark.case(21)
@pytest.mark.parametrize("host", SPELLINGS)
def test_a_redirect_from_elsewhere_reaches_nothing_inside(elsewhere, inside, wrong, host):
    elsewhere.always = wrong.redirect(address(inside, host))
    with pytest.raises(Unavailable, match=r"a\.bin: is redirected to http.*inside this machine's own network"):
        size(elsewhere, "data.example.org")
    assert not inside.asked


@pytest.mark.case(21)
def test_a_name_that_leads_elsewhere_the_first_time(elsewhere, inside, names, wrong):
    def move(handler, data, wanted):
        names["data.example.org"] = "127.0.0.1"
        handler.answer(302, {"Location": address(inside, "data.example.org")}, b"")

    elsewhere.always = move
    with pytest.raises(Unavailable, match="inside this machine's own network"):
        size(elsewhere, "data.example.org")
    assert not inside.asked


@pytest.mark.case(21)
def test_other_redirects_are_followed(elsewhere, inside, wrong):
    elsewhere.once = [wrong.redirect(address(elsewhere, "cdn.example.org")), None, wrong.redirect("/a.bin")]
    assert size(elsewhere, "data.example.org") == 100
    assert size(elsewhere, "data.example.org") == 100
    for home, goal in (
        ("inside.example.org", "127.0.0.1"),
        ("localhost", "inside.example.org"),
        ("127.1", "localhost"),
    ):
        inside.once = [wrong.redirect(address(inside, goal))]
        assert size(inside, home) == 100
    inside.once = [wrong.redirect(address(elsewhere, "cdn.example.org"))]
    assert size(inside, "localhost") == 100


@pytest.mark.case(21)
def test_a_connection_that_is_kept_is_looked_at_too(elsewhere, inside, wrong):
    some = remote_files(None, None, OPTIONS)
    some.identify(some.remote.admit(address(inside, "inside.example.org")))
    elsewhere.always = wrong.redirect(address(inside, "inside.example.org"))
    with pytest.raises(Unavailable, match="inside this machine's own network"):
        some.identify(some.remote.admit(address(elsewhere, "data.example.org")))
    assert len(inside.asked) == 1


@pytest.mark.case(21)
@pytest.mark.parametrize(
    ("goal", "allowed"), [("inside.example.org", False), ("127.1", False), ("cdn.example.org", True), ("nobody", True)]
)
def test_by_way_of_a_proxy(elsewhere, inside, names, wrong, monkeypatch, goal, allowed):
    """A proxy resolves names; they are resolved here as well, and what has no address here is left to the proxy."""
    monkeypatch.setattr(transport, "getproxies", lambda: {"http": inside.url})
    monkeypatch.setattr(transport, "proxy_bypass", lambda host: False)
    names["nobody"] = "no such name"
    for host in ("data.example.org", goal):
        inside.put("", b"x" * 100)
        inside.files[f"http://{host}/a.bin"] = inside.files.pop("/")
        inside.etags[f"http://{host}/a.bin"] = "x"
    inside.once = [wrong.redirect(f"http://{goal}/a.bin")]
    some = remote_files(None, None, OPTIONS)
    path = some.remote.admit("http://data.example.org/a.bin")
    if allowed:
        assert some.identify(path).size == 100
    else:
        with pytest.raises(Unavailable, match="inside this machine's own network"):
            some.identify(path)
    hosts = ["data.example.org", goal] if allowed else ["data.example.org"]
    assert [asked for _, asked, _ in inside.asked] == [f"http://{each}/a.bin" for each in hosts]
