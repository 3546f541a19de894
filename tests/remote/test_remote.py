"""Reading over HTTP: right bytes from servers that do wrong, or a clear error in time."""

import http.client
import os
import pickle
import threading
import time
from itertools import pairwise
from urllib.parse import urlsplit

import numpy as np
import pytest

from penstock.base import stop
from penstock.errors import Changed, ConfigError, Missing, Unavailable
from penstock.files.files import Files
from penstock.remote.ranges import Remote, RemoteOptions
from penstock.remote.redirects import Redirects, next_hop

PATIENT = RemoteOptions(retries=4, deadline_s=20, connect_timeout_s=5, stall_timeout_s=0.3)
QUICK = RemoteOptions(retries=3, deadline_s=1, connect_timeout_s=1, stall_timeout_s=0.2)
DATA = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8)

# No answer comes later than this after its deadline, on a machine that does other things too.
GRACE_S = 3


def files(options=PATIENT, **how):
    return Files(remote=Remote(options), **how)


def opened(server, some=None):
    some = some or files()
    file = some.identify(some.remote.admit(server.put("a.bin", DATA)))
    return some, file


def read(some, file, offset=1000, count=200_000):
    target = np.zeros(count, np.uint8)
    with some.lend(file) as handle:
        handle.read_into(offset, target)
    return target


def stream(some, path, size=70_000):
    with some.stream(path) as body:
        return b"".join(iter(lambda: body.read(size), b""))


@pytest.mark.parametrize(("offset", "count"), [(0, 300_000), (0, 1), (299_999, 1), (17, 4_000), (5, 0)])
def test_ranges(server, offset, count):
    some, file = opened(server)
    assert (file.size, file.path) == (len(DATA), f"{server.url}/a.bin")
    assert np.array_equal(read(some, file, offset, count), DATA[offset : offset + count])


def test_several_targets_in_one_request(server):
    some, file = opened(server)
    server.asked.clear()
    one, two = np.zeros(100, np.uint8), np.zeros((5, 20), "<i2")
    with some.lend(file) as handle:
        handle.read_into(50, one, two)
    assert np.array_equal(one, DATA[50:150])
    assert two.tobytes() == DATA[150:350].tobytes()
    assert len(server.asked) == 1


def test_connections_are_kept(server):
    some, file = opened(server)
    before = threading.active_count()
    for offset in range(20):
        read(some, file, offset, 1000)
    assert threading.active_count() == before, "the server has a thread for each connection"


def test_streams(server):
    some = files()
    assert stream(some, some.remote.admit(server.put("a.bin", DATA))) == DATA.tobytes()
    assert stream(some, some.remote.admit(server.put("empty", b""))) == b""


TRANSIENT = {
    "dropped half-way": lambda wrong: [wrong.drop(60_000), wrong.drop(50_000)],
    "dropped at once": lambda wrong: [wrong.drop(0), wrong.hang_up],
    "500 twice": lambda wrong: [wrong.status(500), wrong.status(500)],
    "503": lambda wrong: [wrong.status(503)],
    "429": lambda wrong: [wrong.status(429, Retry_After="0")],
    "announces more than it sends": lambda wrong: [wrong.announce(5_000)],
    "stalls": lambda wrong: [wrong.stall(10_000, 1.0)],
}


@pytest.mark.case(43)
@pytest.mark.parametrize("case", [*TRANSIENT, "another range"])
def test_ranges_survive(server, wrong, case):
    some, file = opened(server)
    server.once = [wrong.other_range] if case == "another range" else TRANSIENT[case](wrong)
    assert np.array_equal(read(some, file), DATA[1000:201_000])
    assert not server.once


@pytest.mark.case(43)
@pytest.mark.parametrize("case", [case for case in TRANSIENT if "announces" not in case])
def test_streams_survive(server, wrong, case):
    some = files()
    path = some.remote.admit(server.put("a.bin", DATA))
    server.once = TRANSIENT[case](wrong)
    assert stream(some, path) == DATA.tobytes()
    assert not server.once


@pytest.mark.case(43)
def test_a_stream_that_is_shorter_than_announced_is_an_error(server, wrong):
    some = files()
    path = some.remote.admit(server.put("a.bin", DATA))
    server.once = [wrong.announce(5_000)]
    with pytest.raises(Changed, match="announced"):
        stream(some, path)


@pytest.mark.case(43)
def test_what_was_had_is_not_asked_for_again(server, wrong):
    some, file = opened(server)
    server.asked.clear()
    server.once = [wrong.drop(60_000)]
    read(some, file)
    assert [wanted for _, _, wanted in server.asked] == ["bytes=1000-200999", "bytes=61000-200999"]


@pytest.mark.case(44)
def test_retry_after_is_waited_for(server, wrong):
    some, file = opened(server)
    server.once = [wrong.status(503, Retry_After="1")]
    began = time.monotonic()
    read(some, file)
    assert time.monotonic() - began >= 1


@pytest.mark.case(44)
def test_each_wait_is_longer_than_the_one_before(server, wrong, monkeypatch):
    """A server that is overwhelmed is not asked as often as before."""
    waits = []
    monkeypatch.setattr(stop, "sleep", waits.append)
    some, file = opened(server, files(RemoteOptions(retries=5, deadline_s=100)))
    server.always = wrong.status(503)
    with pytest.raises(Unavailable, match="failed 6 times"):
        read(some, file)
    server.always = None
    assert len(waits) == 5
    assert all(later >= earlier for earlier, later in pairwise(waits))
    assert waits[-1] > 4 * waits[0]


FOR_EVER = {
    "500": lambda wrong: wrong.status(500),
    "503, come back in an hour": lambda wrong: wrong.status(503, Retry_After="3600"),
    "hangs up": lambda wrong: wrong.hang_up,
    "announces more than it sends": lambda wrong: wrong.announce(500_000),
    "another range": lambda wrong: wrong.other_range,
    "stalls": lambda wrong: wrong.stall(0, 30),
    "drips": lambda wrong: wrong.drip,
}


@pytest.mark.case(44)
@pytest.mark.parametrize(
    ("case", "how"),
    [*((case, "range") for case in FOR_EVER), *((case, "stream") for case in FOR_EVER if case != "another range")],
)
def test_what_does_not_pass_is_an_error_in_time(server, wrong, case, how):
    some, file = opened(server, files(QUICK))
    server.always = FOR_EVER[case](wrong)
    began = time.monotonic()
    with pytest.raises((Unavailable, Changed), match=r"a\.bin") as caught:
        read(some, file) if how == "range" else stream(some, file.path)
    assert time.monotonic() - began < QUICK.deadline_s + GRACE_S
    if case != "announces more than it sends":
        assert "deadline_s" in str(caught.value)
    server.always = None


@pytest.mark.case(44)
def test_a_refused_connection_is_an_error_in_time(server):
    some, file = opened(server, files(QUICK))
    some.close()
    server.close()
    server.http.server_port = 0
    began = time.monotonic()
    with pytest.raises(Unavailable, match="no answer"):
        read(some, file)
    assert time.monotonic() - began < QUICK.deadline_s + GRACE_S
    server.http.shutdown = server.http.server_close = lambda: None


@pytest.mark.case(43)
def test_a_replaced_file_is_noticed(server):
    some, file = opened(server)
    server.put("a.bin", DATA[::-1].copy())
    with pytest.raises(Changed, match="replaced"):
        read(some, file)


@pytest.mark.case(43)
@pytest.mark.parametrize(("etag", "when"), [(False, True), (True, False)])
def test_a_file_replaced_while_it_is_read_is_noticed(server, wrong, etag, when):
    server.gives_etag, server.gives_time = etag, when
    some, file = opened(server)

    def drop_and_replace(handler, data, wanted):
        handler.serve(data, wanted, cut=1000)
        server.put("a.bin", DATA[::-1].copy())

    server.once = [drop_and_replace]
    with pytest.raises(Changed, match="replaced"):
        read(some, file)


@pytest.mark.case(43)
def test_a_shorter_file_is_noticed(server):
    server.gives_etag = server.gives_time = False
    some, file = opened(server)
    server.put("a.bin", DATA[:500])
    with pytest.raises(Changed, match="replaced"):
        read(some, file)


@pytest.mark.case(43)
def test_without_ranges_random_access_is_refused_and_streaming_works(server, wrong):
    server.always = wrong.no_ranges
    some = files()
    path = some.remote.admit(server.put("a.bin", DATA))
    with pytest.raises(Unavailable, match="cache_dir="):
        some.identify(path)
    assert stream(some, path) == DATA.tobytes()
    server.always = wrong.no_ranges_no_length
    assert stream(some, path) == DATA.tobytes()


@pytest.mark.case(43)
def test_a_server_that_stops_sending_ranges(server, wrong):
    some, file = opened(server)
    server.always = wrong.no_ranges
    with pytest.raises(Unavailable, match="ignores ranges"):
        read(some, file)


@pytest.mark.case(43)
def test_a_stream_without_ranges_survives_a_drop(server, wrong):
    some = files()
    path = some.remote.admit(server.put("a.bin", DATA))
    server.once = [wrong.no_ranges_dropping(100_000), wrong.no_ranges_dropping(200_000)]
    server.always = wrong.no_ranges
    assert stream(some, path) == DATA.tobytes()


@pytest.mark.case(44)
@pytest.mark.parametrize(("code", "kind"), [(404, Missing), (410, Missing), (403, Unavailable), (401, Unavailable)])
def test_what_no_retry_helps_is_said_at_once(server, wrong, code, kind):
    some, file = opened(server)
    server.asked.clear()
    server.always = wrong.status(code)
    with pytest.raises(kind, match=str(code)):
        read(some, file)
    assert len(server.asked) == 1


def test_compressed_answers_are_refused(server, wrong):
    some, file = opened(server)
    server.always = lambda handler, data, wanted: handler.answer(200, {"Content-Encoding": "gzip"}, data)
    with pytest.raises(Unavailable, match="compressed"):
        read(some, file)


@pytest.mark.case(21)
def test_redirects(server, wrong):
    some = files()
    server.put("b.bin", DATA)
    path = some.remote.admit(server.put("a.bin", b"x"))

    def moved(handler, data, wanted):
        if handler.path == "/a.bin":
            handler.answer(302, {"Location": "/b.bin"}, b"")
        else:
            handler.serve(data, wanted)

    server.always = moved
    file = some.identify(path)
    assert (file.size, file.path) == (len(DATA), path)
    assert np.array_equal(read(some, file, 5, 10), DATA[5:15])
    server.always = wrong.redirect("/a.bin")
    with pytest.raises(Unavailable, match="redirected more than"):
        some.identify(path)
    server.always = wrong.redirect("file:///etc/passwd")
    with pytest.raises(Unavailable, match="not the address of a web server"):
        some.identify(path)


@pytest.mark.case(21)
def test_redirects_to_other_hosts_can_be_refused(server, wrong):
    other = server.put("b.bin", DATA).replace("127.0.0.1", "localhost")
    for hosts, reached in ((None, True), ((), False), (("elsewhere",), False), (("localhost",), True)):
        some = files(RemoteOptions(redirect_hosts=hosts))
        path = some.remote.admit(server.put("a.bin", b"x"))
        server.once = [wrong.redirect(other)]
        if reached:
            assert some.identify(path).size == len(DATA)
            continue
        with pytest.raises(
            Unavailable, match=r"a\.bin: is redirected to another host, http://localhost.*redirect_hosts="
        ):
            some.identify(path)
    server.once = [wrong.redirect(server.put("b.bin", DATA))]
    assert files(RemoteOptions(redirect_hosts=())).identify(path).size == len(DATA), "the same host is not another"
    server.once = [wrong.redirect(other)]
    with pytest.raises(Unavailable, match="redirected more than 0 times"):
        files(RemoteOptions(redirects=0)).identify(path)


@pytest.mark.case(21)
@pytest.mark.parametrize(
    "inside",
    [
        *("127.0.0.1:8080", "localhost", "169.254.169.254", "10.0.0.1", "[::1]", "box.internal", "127.1", "2130706433"),
        *("0x7f000001", "0177.0.0.1", "0", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "224.0.0.1", "LOCALHOST."),
    ],
)
def test_redirects_lead_nowhere_inside(inside):
    """A server elsewhere must not have this machine ask what only it can reach."""
    redirects, goal = Redirects(5), f"http://{inside}/latest/meta-data"
    with pytest.raises(Unavailable, match="inside this machine's own network"):
        redirects.check(urlsplit("http://data.example.org/a.npy"), goal)
    redirects.check(urlsplit("http://192.168.0.7/a.npy"), goal)
    redirects.check(urlsplit("http://data.example.org/a.npy"), "http://cdn.example.com/a.npy")


@pytest.mark.case(21)
def test_no_redirect_from_https_to_http():
    with pytest.raises(Unavailable, match="redirected from https to"):
        next_hop("https://data.example.org/a.npy", "http://data.example.org/a.npy")


@pytest.mark.case(21)
def test_headers_stay_with_their_host(server, wrong):
    some = files(RemoteOptions(headers={"Authorization": "Bearer secret"}))
    other = server.put("b.bin", DATA).replace("127.0.0.1", "localhost")
    path = some.remote.admit(server.put("a.bin", DATA))
    server.once = [wrong.redirect(other)]
    some.identify(path)
    assert [each.get("Authorization") for each in server.headers] == ["Bearer secret", None]


def test_a_password_follows_on_the_same_host(server, wrong):
    some = files()
    path = some.remote.admit(server.put("a.bin", DATA).replace("//", "//me:word@"))
    server.once = [wrong.redirect(server.put("b.bin", DATA))]
    some.identify(path)
    assert [each.get("Authorization") for each in server.headers] == ["Basic bWU6d29yZA=="] * 2


def test_an_empty_answer_is_not_asked_for_without_end(server):
    some, file = opened(server, files(QUICK))

    def empty(handler, data, wanted):
        headers = {**handler.validators(), "Content-Range": f"bytes 1000-200999/{len(data)}"}
        handler.answer(206, headers, b"", chunked=True)

    server.always = empty
    server.asked.clear()
    with pytest.raises(Unavailable, match="empty answer"):
        read(some, file)
    assert len(server.asked) == 1 + QUICK.retries


@pytest.mark.case(23)
@pytest.mark.parametrize("case", ["404", "500", "refused", "changed", "ranges", "found"])
def test_secrets_are_never_shown(server, wrong, case):
    some = files(RemoteOptions(retries=1, deadline_s=1, stall_timeout_s=0.5, headers={"X": "hidden9"}))
    server.put("a.bin", DATA)
    url = f"{server.url}/a.bin?X-Amz-Signature=hidden1&sig=hidden2&token=hidden3&what=hidden4"
    url = url.replace("//", "//me:hidden5@")
    path = some.remote.admit(url)
    said = [path, repr(some.remote.options)]
    if case in ("404", "500", "ranges"):
        server.always = {"404": wrong.status(404), "500": wrong.status(500), "ranges": wrong.no_ranges}[case]
    if case == "refused":
        some.remote._addresses[path] = url.replace(str(server.http.server_port), "1")
    try:
        file = some.identify(path)
        said.append(repr(file))
        server.put("a.bin", DATA[:10])
        read(some, file)
    except (Missing, Unavailable, Changed) as error:
        said += [str(error), repr(error)]
    assert "hidden" not in " ".join(said)
    assert "127.0.0.1" in path
    if case == "found":
        assert server.headers[0]["Authorization"] == "Basic bWU6aGlkZGVuNQ=="


def test_addresses_that_look_alike_are_told_apart(server):
    some = files()
    one, two = (some.remote.admit(f"{server.url}/get?file={name}") for name in ("train/a", "val/a"))
    assert one != two


def test_threads_share_it(server):
    some, file = opened(server)
    server.latency_s = 0.01
    failed = []

    def work(seed):
        rng = np.random.default_rng(seed)
        offsets = rng.integers(0, 250_000, 10).tolist()
        failed.extend(at for at in offsets if not np.array_equal(read(some, file, at, 5000), DATA[at : at + 5000]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_connections_of_its_own(server):
    some, file = opened(server)
    read(some, file, 0, 10)
    child = os.fork()
    if child == 0:
        right = all(np.array_equal(read(some, file, at, 100), DATA[at : at + 100]) for at in range(50))
        os._exit(0 if right else 1)
    for at in range(50):
        assert np.array_equal(read(some, file, at, 100), DATA[at : at + 100])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_it_can_be_sent_to_other_processes(server):
    some, file = opened(server)
    sent = pickle.loads(pickle.dumps(some))
    assert sent.remote.options == PATIENT
    assert np.array_equal(read(sent, file, 3, 30), DATA[3:33])


def test_an_answer_without_a_head_is_closed(server, monkeypatch):
    """Left to the garbage collector, it is closed after what it reads from, and Python 3.13 complains."""
    some, file = opened(server, files(QUICK))
    made = []

    class Watched(http.client.HTTPResponse):
        def __init__(self, *args, **how):
            super().__init__(*args, **how)
            made.append(self)

    monkeypatch.setattr(http.client, "HTTPResponse", Watched)
    server.always = lambda handler, data, wanted: handler.wfile.write(b"no head of an answer\r\n\r\n")
    with pytest.raises(Unavailable, match="no head of an answer"):
        read(some, file)
    assert made
    assert all(each.closed and each.fp is None for each in made)


@pytest.mark.case(44)
def test_a_thread_that_waits_can_be_stopped(server, wrong):
    some, file = opened(server, files(RemoteOptions(deadline_s=60, stall_timeout_s=60)))
    server.always = wrong.stall(0, 15)
    asked, said = stop.Flag(), []

    def work():
        stop.watch(asked)
        try:
            read(some, file)
        except Unavailable as error:
            said.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.2)
    asked.is_set = True
    thread.join(10)
    assert not thread.is_alive()
    assert "interrupted" in said[0]


def test_settings_are_checked():
    for wrong_one in ({"retries": -1}, {"deadline_s": 0}, {"connect_timeout_s": "soon"}, {"stall_timeout_s": -2}):
        with pytest.raises(ConfigError, match=next(iter(wrong_one))):
            RemoteOptions(**wrong_one)
    for address in ("http://host:port/x", "http://[::1/x", "http:///x"):
        with pytest.raises((ConfigError, Unavailable), match="address"):
            files(QUICK).identify(address)
    with pytest.raises(ConfigError, match="line break"):
        files(RemoteOptions(headers={"A": "b\r\nc"})).identify("http://127.0.0.1:1/x")
