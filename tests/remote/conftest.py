"""A web server on loopback that can be told to misbehave, and a real S3 server."""

import http.server
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from email.utils import formatdate
from hashlib import md5

import pytest


class Server:
    """Files by path, and what to do wrong about the next requests (``once``) or all of them (``always``)."""

    def __init__(self, host="127.0.0.1"):
        self.host = host
        self.files = {}
        """By path; one for a path with a query goes before the one for the path alone."""
        self.once, self.always = [], None
        self.latency_s = 0.0
        self.asked = []
        """Method, path and range of each request."""
        self.headers = []
        self.sent_bytes = 0
        self.versions, self.etags = Counter(), {}
        self.extra_headers = {}
        self.gives_etag = self.gives_time = True
        self.lock = threading.Lock()
        handler = type("Handler", (Handler,), {"owner": self})
        self.http = http.server.ThreadingHTTPServer((host, 0), handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    @property
    def url(self):
        return f"http://{self.host}:{self.http.server_port}"

    def put(self, name, data):
        """Another version of a file; returns its address."""
        self.files[f"/{name}"] = bytes(data)
        self.etags[f"/{name}"] = md5(data).hexdigest()[:8]
        self.versions[f"/{name}"] += 1
        return f"{self.url}/{name}"

    def whole_downloads(self, name):
        """How often all of a file was asked for."""
        return sum(1 for _, path, wanted in self.asked if path == f"/{name}" and wanted is None)

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 20

    def log_message(self, *args):
        pass

    def handle(self):
        try:
            super().handle()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def do_GET(self):
        server = self.owner
        path, wanted = self.file_path, self.headers.get("Range")
        with server.lock:
            server.asked.append(("GET", path, wanted))
            server.headers.append(dict(self.headers))
            act = server.once.pop(0) if server.once else server.always
        if server.latency_s:
            time.sleep(server.latency_s)
        data = server.files.get(path)
        if data is None:
            self.answer(404, {}, b"not here")
        elif act is not None:
            act(self, data, wanted)
        else:
            self.serve(data, wanted)

    @property
    def file_path(self):
        return self.path if self.path in self.owner.files else self.path.partition("?")[0]

    # What can be done about a request.

    def serve(self, data, wanted, **how):
        """As it should be."""
        status, headers, body = self.right(data, wanted)
        self.answer(status, headers, body, **how)

    def right(self, data, wanted):
        headers = self.validators()
        match = self.headers.get("If-Match")
        if match and match != headers.get("ETag"):
            return 412, {}, b""
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "")
        if not found:
            return 200, {**headers, **self.owner.extra_headers}, data
        begin = int(found[1])
        end = min(len(data), int(found[2]) + 1) if found[2] else len(data)
        if begin >= len(data):
            return 416, {**headers, "Content-Range": f"bytes */{len(data)}"}, b""
        return 206, {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}, data[begin:end]

    def validators(self):
        path = self.file_path
        number = self.owner.versions[path]
        headers = {}
        if self.owner.gives_etag:
            headers["ETag"] = f'"{self.owner.etags[path]}-{number}"'
        if self.owner.gives_time:
            headers["Last-Modified"] = formatdate(1_700_000_000 + number, usegmt=True)
        return headers

    def answer(self, status, headers, body, *, length=None, cut=None, pause=None, chunked=False):
        """Send it, of ``length`` bytes as announced, cut off after ``cut``, with a ``pause`` (after, seconds)."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
            body = b"".join(b"%x\r\n%s\r\n" % (len(body[at : at + 5000]), body[at : at + 5000])
                            for at in range(0, len(body), 5000)) + b"0\r\n\r\n"  # fmt: skip
        else:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        with self.owner.lock:
            self.owner.sent_bytes += len(body)
        if pause is not None:
            after, seconds = pause
            self.wfile.write(body[:after])
            time.sleep(seconds)
            body = body[after:]
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None or (length is not None and length > len(body)):
            self.close_connection = True


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


@pytest.fixture
def server_at():
    """Starts servers at other addresses of this machine."""
    started = []

    def start(host):
        started.append(Server(host))
        return started[-1]

    yield start
    for each in started:
        each.close()


# Ways to misbehave.


class Wrong:
    """Functions of a handler, the file and the range that was asked for."""

    @staticmethod
    def status(code, **headers):
        def act(handler, data, wanted):
            handler.answer(code, {name.replace("_", "-"): value for name, value in headers.items()}, b"sorry")

        return act

    @staticmethod
    def drop(after):
        return lambda handler, data, wanted: handler.serve(data, wanted, cut=after)

    @staticmethod
    def hang_up(handler, data, wanted):
        handler.close_connection = True
        handler.connection.close()

    @staticmethod
    def no_ranges(handler, data, wanted):
        handler.serve(data, None)

    @staticmethod
    def no_ranges_no_length(handler, data, wanted):
        handler.serve(data, None, chunked=True)

    @staticmethod
    def no_ranges_dropping(after):
        return lambda handler, data, wanted: handler.serve(data, None, cut=after)

    @staticmethod
    def announce(more):
        """A length that is not the body's."""

        def act(handler, data, wanted):
            status, headers, body = handler.right(data, wanted)
            handler.answer(status, headers, body, length=len(body) + more)

        return act

    @staticmethod
    def other_range(handler, data, wanted):
        status, headers, body = handler.right(data, wanted)
        handler.answer(status, {**headers, "Content-Range": f"bytes 7-{6 + len(body)}/{len(data)}"}, body)

    @staticmethod
    def stall(after, seconds):
        return lambda handler, data, wanted: handler.serve(data, wanted, pause=(after, seconds))

    @staticmethod
    def drip(handler, data, wanted):
        """A byte now and then, for ever."""
        status, headers, body = handler.right(data, wanted)
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        for at in range(len(body)):
            handler.wfile.write(body[at : at + 1])
            time.sleep(0.05)

    @staticmethod
    def redirect(to, code=302):
        return lambda handler, data, wanted: handler.answer(code, {"Location": to}, b"")


@pytest.fixture
def wrong():
    return Wrong


@pytest.fixture(scope="session")
def s3():
    """A real S3 server; settings to reach it, and a client of Amazon's own to fill it."""
    boto3 = pytest.importorskip("boto3")
    moto = pytest.importorskip("moto.server")
    pytest.importorskip("obstore")
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    settings = {
        "endpoint": f"http://{host}:{port}",
        "region": "us-east-1",
        "access_key_id": "testing",
        "secret_access_key": "testing",
    }
    client = boto3.client(
        "s3", endpoint_url=settings["endpoint"], region_name="us-east-1", aws_access_key_id="testing",
        aws_secret_access_key="testing",
    )  # fmt: skip
    client.create_bucket(Bucket="shards")
    yield client, settings
    running.stop()


@pytest.fixture
def on_a_small_disk(tmp_path):
    """Runs a program with an address and a folder on a disk of 2 MB, or where none can be made, with a limit of 2 MB
    for files; what it printed.
    """

    def run(program, address):
        folder = tmp_path / "small"
        folder.mkdir()
        mount = f"mount -t tmpfs -o size=2m,mode=700 none {folder}"
        limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, 2**21))\n"
        with_mount = subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode == 0
        python = [sys.executable, "-c", program if with_mount else limit + program, address, str(folder)]
        command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", *python] if with_mount else python
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout + done.stderr

    return run
