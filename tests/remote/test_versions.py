"""Every answer must be of the file that was opened: what told its version once must tell it again."""

import numpy as np
import pytest

from penstock.errors import Changed, PenstockError, Unavailable
from penstock.files.files import remote_files
from penstock.remote.ranges import RemoteOptions

QUICK = RemoteOptions(retries=1, deadline_s=2, stall_timeout_s=0.5)
DATA = np.random.default_rng(0).integers(0, 256, 50_000, np.uint8)
OTHER = DATA[::-1].copy()


def answer(handler, wanted, data, drop=(), **change):
    """The right answer of another file, changed or without some of its headers; None removes one."""
    status, headers, body = handler.right(data.tobytes(), wanted)
    headers = {**headers, **change}
    handler.answer(status, {name: value for name, value in headers.items() if value and name not in drop}, body)


def without(*drop, **change):
    return lambda handler, data, wanted: answer(handler, wanted, OTHER, drop, **change)


def opened(server, cache_dir=None, options=QUICK):
    some = remote_files(cache_dir, None, options)
    return some, some.identify(some.remote.admit(server.put("a.bin", DATA)))


def read(some, file, begin=100, count=1000):
    target = np.zeros(count, np.uint8)
    with some.lend(file) as handle:
        handle.read_into(begin, target)
    return target


def in_order(some, file):
    with some.remote.body(file.path, file) as body:
        return b"".join(iter(lambda: body.read(7_000), b""))


LESS = {  # what the server gives at first, and what is wrong later
    "no ETag": ((True, False), without("ETag")),
    "no ETag, though the time is the same": ((True, True), without("ETag")),
    "no time": ((False, True), without("Last-Modified")),
    "no time, though the ETag is the same": ((True, True), without("Last-Modified")),
    "a time that is none": ((False, True), without(**{"Last-Modified": "yesterday"})),
    "neither": ((True, True), without("ETag", "Last-Modified")),
    "a weak ETag": ((True, False), without(ETag='W/"x"')),
    "another ETag": ((True, False), without(ETag='"x"')),
}


@pytest.mark.case(43)
@pytest.mark.parametrize("how", [read, in_order])
@pytest.mark.parametrize("case", LESS)
def test_what_told_the_version_must_be_told_again(server, case, how):
    (server.gives_etag, server.gives_time), act = LESS[case]
    some, file = opened(server)
    server.always = act
    with pytest.raises(Changed, match="replaced after it was opened"):
        how(some, file)


@pytest.mark.case(43)
@pytest.mark.parametrize("case", LESS)
def test_it_is_not_cached_either(server, tmp_path, case):
    (server.gives_etag, server.gives_time), act = LESS[case]
    some, file = opened(server, tmp_path / "cache")
    server.always = act
    with pytest.raises(Changed):
        read(some, file)
    assert not list((tmp_path / "cache").glob("*.cached"))


@pytest.mark.case(43)
def test_a_weak_etag_is_compared_and_so_is_the_time(server):
    server.gives_etag = False
    weak = {"ETag": 'W/"x"'}
    server.always = lambda handler, data, wanted: answer(handler, wanted, DATA, **weak)
    some, file = opened(server)
    assert np.array_equal(read(some, file), DATA[100:1100])
    server.always = without(**weak, **{"Last-Modified": "Fri, 01 Jan 2021 00:00:00 GMT"})
    with pytest.raises(Changed, match="time"):
        read(some, file)


@pytest.mark.case(43)
def test_a_size_that_is_not_told_any_more(server):
    some, file = opened(server)

    def no_total(handler, data, wanted):
        answer(handler, wanted, OTHER, **{"Content-Range": "bytes 100-1099/*"})

    server.always = no_total
    with pytest.raises(Changed, match="size is missing now"):
        read(some, file)


@pytest.mark.case(43)
def test_another_server_that_tells_nothing_is_another_file(server, wrong):
    server.gives_etag = server.gives_time = False
    some, file = opened(server)
    server.put("b.bin", OTHER)
    server.once = [wrong.redirect(f"http://localhost:{server.http.server_port}/b.bin")]
    with pytest.raises(Changed, match="server"):
        read(some, file)
    server.once = [wrong.redirect("/a.bin")]
    assert np.array_equal(read(some, file), DATA[100:1100]), "the same one may send on"


def test_what_was_not_told_at_first_may_be_told_later(server):
    server.gives_etag = server.gives_time = False
    some, file = opened(server)
    server.gives_etag = server.gives_time = True
    assert np.array_equal(read(some, file), DATA[100:1100])


@pytest.mark.case(43)
def test_a_file_that_is_empty_now(server):
    server.gives_etag = server.gives_time = False
    some, file = opened(server)
    server.put("a.bin", b"")
    with pytest.raises(Changed, match=r"was 50000, now 0|416"):
        in_order(some, file)


def test_an_address_that_cannot_be_written_is_none():
    some = remote_files(None, None, QUICK)
    for address in ("http://127.0.0.1:1/\ud800.npy", "http://127.0.0.1:1/a?b=\ud800", "http://\ud800/a"):
        with pytest.raises(PenstockError, match="not a valid address"):
            some.identify(some.remote.admit(address))


@pytest.mark.case(43)
def test_another_server_of_the_same_version(server, wrong):
    some, file = opened(server)
    server.once = [wrong.redirect(f"http://localhost:{server.http.server_port}/a.bin")]
    assert np.array_equal(read(some, file), DATA[100:1100])


REFUSED = {  # answers that are not what was asked for, though size, ETag and time are right
    "compressed": {"Content-Encoding": "gzip"},
    "compressed, and then not": {"Content-Encoding": "gzip, identity"},
    "in another coding": {"Transfer-Encoding": "gzip"},
    "in parts": {"Content-Type": "multipart/byteranges; boundary=x"},
}


@pytest.mark.case(43)
@pytest.mark.parametrize("case", REFUSED)
def test_other_answers_are_refused_at_once(server, case):
    some, file = opened(server)
    server.always = without(**REFUSED[case])
    server.asked.clear()
    with pytest.raises(Unavailable, match=r"a\.bin"):
        read(some, file)
    assert len(server.asked) == 1


def test_a_header_that_comes_twice_hides_nothing(server):
    some, file = opened(server)

    def twice(handler, data, wanted):
        status, headers, body = handler.right(data, wanted)
        handler.send_response(status)
        for name, value in [*headers.items(), ("Content-Encoding", "gzip"), ("Content-Encoding", "identity")]:
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    server.always = twice
    with pytest.raises(Unavailable, match="compressed"):
        read(some, file)


# Numbers that servers send.

HUGE, NO_END = str(2**70), "9" * 5000
LENGTHS = ["-1", "-5", "+5", "5_0", "5 5", "5, 6", "0x10", "\xb2", "1e3", HUGE, NO_END, "five"]
RANGES = [
    *(f"bytes 0-511/{total}" for total in (HUGE, NO_END, "-1", "+50000", "5_0", "\xb2", "", "x")),
    *(f"bytes {span}/50000" for span in (f"0-{HUGE}", f"{NO_END}-5", "-5-511", "0-", "+0-511", "0-5-1", "0..511")),
    *("bytes", "0-511/50000", "bytes 0-511/50000 bytes 0-511/50000", "bytes 0-511/50000, bytes 1-2/3", "pages 0-511/9"),
    *("bytes 0-511/100", "bytes 5-516/50000", "bytes */50000"),
]
DATES = ["yesterday", "Mon, 01 Jan 0001 00:00:00 +2359", "Mon, 01 Jan 0001 00:00:00 -0000",
         "Fri, 31 Dec 9999 23:59:59 -2359", "Mon, 99 Jan 99999999999999999999 00:00:00 GMT",
         ",", " , ,", "0", HUGE, NO_END]  # fmt: skip


def use(server, tmp_path):
    """Everything that is done with a file, with and without a cache; only our own errors come of it."""
    for cache in (None, tmp_path / "cache"):
        some = remote_files(cache, None, RemoteOptions(retries=0, deadline_s=2, stall_timeout_s=0.5))
        try:
            path = some.remote.admit(server.put("a.bin", DATA))
            file = some.identify(path)
            read(some, file)
            in_order(some, file)
        except PenstockError as error:
            yield error


@pytest.mark.case(43)
@pytest.mark.parametrize("told", LENGTHS, ids=lambda told: told[:9])
@pytest.mark.parametrize("status", [200, 206, 404, 416, 503])
def test_lengths_that_are_none(server, tmp_path, told, status):
    def act(handler, data, wanted):
        _, headers, body = handler.right(data, wanted)
        handler.answer(status, headers, body, length=told, cut=len(body))

    server.always = act
    failed = list(use(server, tmp_path))
    assert len(failed) == 2
    assert all(len(str(error)) < 1000 for error in failed)


@pytest.mark.case(43)
@pytest.mark.parametrize("told", RANGES, ids=lambda told: told[:30])
def test_ranges_that_are_none(server, tmp_path, told):
    server.always = lambda handler, data, wanted: handler.answer(206, {"Content-Range": told}, data[:512])
    failed = list(use(server, tmp_path))
    assert len(failed) == 2
    assert all(len(str(error)) < 1000 for error in failed)


@pytest.mark.case(43)
def test_an_error_page_is_not_the_beginning_of_a_file(server, tmp_path):
    server.always = lambda handler, data, wanted: handler.answer(416, {"Content-Range": "bytes */50000"}, b"x" * 600)
    assert len(list(use(server, tmp_path))) == 2


@pytest.mark.case(44)
@pytest.mark.parametrize("told", [*DATES, "\xb2", "-5", "+5", "1_0"], ids=lambda told: told[:30])
@pytest.mark.parametrize("header", ["Last-Modified", "Retry-After"])
def test_dates_that_are_none(server, tmp_path, told, header):
    def act(handler, data, wanted):
        status, headers, body = handler.right(data, wanted)
        handler.answer(503 if header == "Retry-After" else status, {**headers, header: told}, body)

    server.always = act
    assert len(list(use(server, tmp_path))) == (2 if header == "Retry-After" else 0)


@pytest.mark.case(21)
@pytest.mark.parametrize(
    "goal", ["http://[::1/x", "http://host:port/x", "http://h:99999999/x", "//[", "http://h\xe9/x"]
)
def test_redirects_to_what_is_no_address(server, wrong, goal):
    some, file = opened(server)
    server.always = wrong.redirect(goal)
    with pytest.raises(PenstockError, match=r"a\.bin"):
        read(some, file)
