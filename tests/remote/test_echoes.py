"""A server that says back what it was asked puts no secret into a message."""

import base64
import traceback

import pytest

import penstock as ps
from penstock.files.files import remote_files
from penstock.remote.ranges import RemoteOptions
from penstock.remote.secrets import SHOWN_CHARACTERS, Secrets

SECRETS = ["hunter2xyzzy", "p@ss/w+rd", "bearertoken77", "cookievalue55", "signed/../9"]
HEADERS = {"Authorization": f"Bearer {SECRETS[2]}", "Cookie": f"session={SECRETS[3]}; theme=dark"}
QUERY = "?X-Amz-Signature=signed%2F..%2F9&token=hunter2xyzzy&plain=hunter2xyzzy"
OPTIONS = RemoteOptions(retries=0, deadline_s=2, stall_timeout_s=0.5, headers=HEADERS)
HIDDEN = [*SECRETS, "p%40ss", "p%40ss%2Fw%2Brd", base64.b64encode(b"me:p@ss/w+rd").decode(), "signed%2F..%2F9"]


def url_of(server):
    server.put("a.npy", b"x" * 5000)
    return server.url.replace("//", "//me:p%40ss%2Fw%2Brd@") + f"/a.npy{QUERY}"


def asked(handler):
    """All that a request told."""
    return " ".join([handler.requestline, *(f"{name}: {value}" for name, value in handler.headers.items())])


def raw(make):
    """Sends what is made of the request, as it is."""

    def act(handler, data, wanted):
        handler.wfile.write(make(handler).encode("latin-1"))
        handler.close_connection = True

    return act


def answer(headers, status=206):
    def act(handler, data, wanted):
        right, known, body = handler.right(data, wanted)
        more = {name: make(handler) for name, make in headers.items()}
        handler.answer(status or right, {**known, **more}, body)

    return act


ECHOES = {
    "as the status line": raw(lambda handler: f"{asked(handler)}\r\n\r\n"),
    "as the reason": raw(lambda handler: f"HTTP/1.1 404 {asked(handler)}\r\nContent-Length: 0\r\n\r\n"),
    "as a status": raw(lambda handler: f"HTTP/1.1 {asked(handler)}\r\n\r\n"),
    "as a version": raw(lambda handler: f"{asked(handler)} 200 OK\r\n\r\n"),
    "as a line without end": raw(lambda handler: f"HTTP/1.1 200 OK\r\nX: {asked(handler) * 300}\r\n\r\n"),
    "as a chunk's length": raw(
        lambda handler: f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{asked(handler)}\r\n"
    ),
    "as the ETag": answer({"ETag": asked}, status=None),
    "as the time": answer({"Last-Modified": asked}),
    "as the range": answer({"Content-Range": asked}),
    "as the encoding": answer({"Content-Encoding": asked}),
    "as the coding": answer({"Transfer-Encoding": asked}),
    "as where to wait for": answer({"Retry-After": asked}, status=503),
    "as where to go": answer({"Location": lambda handler: f"ftp://host/{asked(handler)}"}, status=302),
    "as no address": answer({"Location": lambda handler: f"http://[{asked(handler)}"}, status=302),
    "as a host": answer({"Location": lambda handler: f"http://{SECRETS[0]}.invalid/{asked(handler)}"}, status=302),
    "round and round": answer({"Location": lambda handler: f"/a.npy/{SECRETS[3]}"}, status=302),
    "in an error's text": lambda handler, data, wanted: handler.answer(403, {}, asked(handler).encode()),
}


def said_by(error):
    return "".join(traceback.format_exception(error)) + repr(error)


@pytest.mark.case(23)
@pytest.mark.parametrize("case", ECHOES)
@pytest.mark.parametrize("later", [False, True], ids=["at first", "later"])
def test_no_message_has_it(server, tmp_path, case, later):
    some = remote_files(tmp_path, None, OPTIONS)
    path, said = some.remote.admit(url_of(server)), []
    server.always = None if later else ECHOES[case]
    try:
        file = some.identify(path)
        said += [repr(file), repr(some.remote), str(file)]
        server.always = ECHOES[case]
        with some.remote.body(path, file) as body:
            while body.read(1000):
                pass
    except ps.errors.PenstockError as error:
        said += [said_by(error), str(error)]
    assert said
    assert len(said[-1]) < 1200
    assert said[-1].isprintable()
    assert not [each for each in HIDDEN for text in said if each in text]
    assert not any(each in str(path) for path in tmp_path.rglob("*") for each in HIDDEN)


def test_a_version_that_the_server_made_of_secrets(server):
    """The ETag is compared and sent back as it is, and never shown."""
    some = remote_files(None, None, OPTIONS)
    number = [0]

    def act(handler, data, wanted):
        number[0] += 1
        status, headers, body = handler.right(data, wanted)
        handler.answer(status, {**headers, "ETag": f'"{number[0]} {asked(handler)}"'}, body)

    server.always = act
    file = some.identify(some.remote.admit(url_of(server)))
    assert SECRETS[0] in file.etag
    assert SECRETS[0] not in repr(file)
    with pytest.raises(ps.errors.Changed) as caught:
        some.remote.read_into(file, 0, [memoryview(bytearray(10))])
    assert not any(each in said_by(caught.value) for each in HIDDEN)


@pytest.mark.case(23)
def test_what_is_shown_is_short_and_printable():
    secrets = Secrets(["s3cret/1"])
    assert secrets.hide("a\x1b[31m\x00b\r\nc\u202e") == "a [31m b c"
    assert secrets.hide("S3CRET/1 s3cret%2F1 s3cret%2f1") == "… … …"
    assert len(secrets.hide("x" * 10**6)) == SHOWN_CHARACTERS + 1
    assert Secrets().hide("as it is") == "as it is"


@pytest.mark.case(23)
def test_a_bucket_that_says_back_what_it_was_told(server, monkeypatch):
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_SESSION_TOKEN", SECRETS[3])
    settings = {"endpoint": server.url, "region": "here", "access_key_id": SECRETS[0], "secret_access_key": SECRETS[2]}

    def echo(handler, data, wanted):
        handler.answer(403, {}, f"<Error><Message>{asked(handler)} {SECRETS[2]}</Message></Error>".encode())

    server.put("bucket", b"")
    server.always = echo
    with pytest.raises(ps.errors.Unavailable) as caught:
        ps.open("s3://bucket/*.npy", remote=RemoteOptions(deadline_s=5, store=settings))
    assert server.asked
    assert "403" in str(caught.value)
    assert not any(each in said_by(caught.value) for each in HIDDEN)
