"""One HTTP request at a time, within a time limit, over connections that are kept open.

Python's own client reads straight into the caller's memory. Clients with threads of their own, such as obstore's, do
not survive a fork, by which torch starts its workers, and hold what they read in memory that is not counted.

Rules:
1. Every wait ends: the time left is checked before each of them, however slowly a server sends.
2. A failure that may be temporary is ``Transient``; every other one is an error of ``penstock.errors``.
3. A connection is used again only if the last answer was read to its end, and never across a fork.
4. Redirects are limited in number. None leads from https to http, nor from elsewhere into this machine's own network;
   what counts is the address that is connected to. The caller's own headers, which may hold a token, are sent to the
   host that the caller named, and to no other.
5. Text from a server appears in a message only after ``Secrets.hide``. Errors of Python itself may quote such text, so
   none is the cause of another error.
"""

import base64
import http.client
import io
import os
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from penstock.base import stop
from penstock.base.dataclass import dataclass
from penstock.base.urls import shown_name
from penstock.errors import ConfigError, Unavailable
from penstock.remote.headers import body_length
from penstock.remote.private_addresses import is_inside, resolves_inside
from penstock.remote.redirects import Redirects, is_same_host, next_hop, redirected_inside, split, target_of
from penstock.remote.secrets import Secrets

MOST_IDLE = 32
BUFFER_BYTES = 16 * 1024
REDIRECTS = frozenset({301, 302, 303, 307, 308})
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})

# Characters of a message that quotes where a redirect leads.
MOST_CHARACTERS = 400


class Transient(Exception):
    """A failure that may be over a moment later."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s
        """Seconds that the server asked to wait."""


class Deadline:
    """The time limit of one request, all its retries included."""

    def __init__(self, deadline_s: float, stall_timeout_s: float) -> None:
        self.deadline_s, self.stall_timeout_s = deadline_s, stall_timeout_s
        self.began = time.monotonic()
        self.end = self.began + deadline_s

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic()

    def restart(self) -> None:
        """Start again: part of the wanted bytes has arrived."""
        self.end = time.monotonic() + self.deadline_s

    @property
    def past_s(self) -> float:
        return time.monotonic() - self.began

    def check(self) -> None:
        """Raise if the time is up, or if the loader was closed."""
        if stop.is_asked():
            raise Unavailable("was interrupted: the loader was closed")
        if self.left_s <= 0:
            raise Transient("no more time")


class _TimedBody(io.RawIOBase):
    """The bytes of one answer; every wait for them ends with the request's time. Closing it leaves the socket open."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self.sock, self.deadline = sock, deadline

    def makefile(self, mode: str) -> io.BufferedReader:
        """The part of a socket that Python's client uses."""
        return io.BufferedReader(self, BUFFER_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, view: Any) -> int:
        stalled = time.monotonic() + self.deadline.stall_timeout_s
        while True:
            self.deadline.check()
            left = stalled - time.monotonic()
            if left <= 0:
                raise Transient(f"no byte arrived for {self.deadline.stall_timeout_s:g} s")
            self.sock.settimeout(max(0.001, min(left, self.deadline.left_s, stop.CHECK_EVERY_S)))
            try:
                return self.sock.recv_into(view)
            except TimeoutError:
                continue


Endpoint = tuple[str, str, int | None]
"""Scheme, host and port."""


class _Connection:
    """One connection to a host, which answers one request after another."""

    def __init__(self, place: Endpoint, client: http.client.HTTPConnection, proxy: Mapping[str, str] | None) -> None:
        self.place, self._client, self._via_proxy = place, client, proxy
        """``proxy``: the headers for the proxy, if there is one."""
        self.used = False
        self._peer = ""

    def connect(self, deadline: Deadline, connect_timeout_s: float) -> None:
        """Connect to the host, unless that was done before."""
        if self._client.sock is None:
            self._client.timeout = max(0.001, min(connect_timeout_s, deadline.left_s))
            self._client.connect()
            self._peer = str(self._client.sock.getpeername()[0])  # type: ignore[attr-defined]

    @property
    def leads_inside(self) -> bool:
        """Whether it leads into this machine's own network: by the address reached or, with a proxy, by the name."""
        return is_inside(self._peer) if self._via_proxy is None else resolves_inside(self.place[1])

    @property
    def proxy_headers(self) -> Mapping[str, str]:
        return self._via_proxy or {}

    def request(self, target: str, headers: Mapping[str, str]) -> bytes:
        """The request as it is sent."""
        scheme, host, port = self.place
        named = (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "")
        if self._via_proxy is not None and scheme == "http":
            target, headers = f"{scheme}://{named}{target}", {**headers, **self._via_proxy}
        lines = [f"GET {target} HTTP/1.1", f"Host: {named}", *(f"{name}: {value}" for name, value in headers.items())]
        if any(set(line) & {"\r", "\n", "\0"} for line in lines):
            raise http.client.InvalidURL("an address or header with a line break in it")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def ask(self, request: bytes, deadline: Deadline) -> tuple[http.client.HTTPResponse, _TimedBody]:
        """Send a request, and read the head of the answer."""
        sock: socket.socket = self._client.sock
        sock.settimeout(max(0.001, min(deadline.stall_timeout_s, deadline.left_s)))
        sock.sendall(request)
        timed = _TimedBody(sock, deadline)
        answer = http.client.HTTPResponse(timed, method="GET")  # type: ignore[arg-type]
        try:
            answer.begin()
        except BaseException:
            answer.close()  # left to the garbage collector, it would be closed after what it reads from
            raise
        return answer, timed

    def close(self) -> None:
        self._client.close()


@dataclass
class Answer:
    """Status and headers; the body is read by ``readinto`` or ``read``, to its end or not."""

    status: int
    headers: Mapping[str, str]
    """By lower-case name."""
    length: int | None
    """Bytes of the body, if the server announced them."""
    secrets: Secrets
    """Secrets that no message may contain."""
    _response: http.client.HTTPResponse | None
    _timed: _TimedBody
    _connection: _Connection
    _pool: "Connections"

    def __post_init__(self) -> None:
        self.left = self.length
        self._ended = self.left == 0

    @property
    def place(self) -> Endpoint:
        """The server that answered."""
        return self._connection.place

    @property
    def is_from_inside(self) -> bool:
        """Whether the server is in this machine's own network."""
        return self._connection.leads_inside

    def quoted(self, header: str) -> str:
        """A header without secrets, for messages."""
        return self.secrets.hide(self.headers.get(header, ""))

    def use(self, deadline: Deadline) -> None:
        """Use another time limit from now on."""
        self._timed.deadline = deadline

    def readinto(self, view: memoryview) -> int:
        """Read some bytes of the body; 0 at its end."""
        response = self._response
        if self._ended or not len(view) or response is None:
            return 0
        try:
            if self.left is None:
                piece = response.read1(len(view))
                view[: len(piece)] = piece
                got = len(piece)
                self._ended = not got
            else:
                got = response.fp.readinto1(view[: self.left])
                self.left -= got
                self._ended = self.left == 0
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Transient(f"the connection failed: {_one_line(error, self.secrets)}") from None
        if got == 0 and not self._ended:
            raise Transient(f"the connection was closed {self.left:,} bytes before the end")
        return int(got)

    def close(self) -> None:
        """Give the connection back if the whole answer was read, else close it."""
        response, self._response = self._response, None
        if response is None:
            return
        keep = self._ended and not response.will_close
        response.close()
        if keep:
            self._pool.give_back(self._connection)
        else:
            self._connection.close()

    def __enter__(self) -> "Answer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Connections:
    """Connections that wait for their next request, by host."""

    def __init__(self, connect_timeout_s: float, redirects: Redirects) -> None:
        self.connect_timeout_s, self.redirects = connect_timeout_s, redirects
        self._reset()

    def _reset(self) -> None:
        self._idle: dict[Endpoint, list[_Connection]] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._tls: ssl.SSLContext | None = None

    def get(self, url: str, headers: Mapping[str, str], private: Mapping[str, str], deadline: Deadline) -> Answer:
        """The answer to a GET, redirects followed; ``private`` headers go to the host of ``url`` alone."""
        home, home_is_inside = split(url), True
        if home.username is not None:
            private = {**private, "Authorization": _basic(home.username, home.password or "")}
        secrets = Secrets()
        secrets.add_headers(private)
        for hop in range(self.redirects.most + 1):
            secrets.add_url(url)
            sent = {**headers, **private} if is_same_host(home, url) else headers
            answer = self._ask(url, sent, deadline, secrets, may_lead_inside=home_is_inside)
            if answer.status not in REDIRECTS:
                return answer
            home_is_inside = answer.is_from_inside if hop == 0 else home_is_inside
            answer.close()
            url = self._next(home, url, answer, home_is_inside)
        raise Unavailable(
            f"is redirected more than {self.redirects.most} times, last to {secrets.hide(shown_name(url))}. The limit "
            f"is remote=RemoteOptions(redirects=…)"
        )

    def _next(self, home: SplitResult, url: str, answer: Answer, home_is_inside: bool) -> str:
        """Where a redirect leads."""
        try:
            there = next_hop(url, answer.headers.get("location", ""))
            self.redirects.check(home, there, home_is_inside=home_is_inside)
        except Unavailable as error:
            raise Unavailable(answer.secrets.hide(error, most=MOST_CHARACTERS)) from None
        return there

    def _ask(
        self, url: str, headers: Mapping[str, str], deadline: Deadline, secrets: Secrets, *, may_lead_inside: bool
    ) -> Answer:
        parts = split(url)
        place, target = (parts.scheme, parts.hostname or "", parts.port), target_of(parts)
        sent = {"Accept-Encoding": "identity", "Accept": "*/*", "User-Agent": "penstock", **headers}
        while True:
            deadline.check()
            connection = self._connection(place)
            secrets.add_headers(connection.proxy_headers)
            used, connection.used = connection.used, True
            try:
                request = connection.request(target, sent)
                connection.connect(deadline, self.connect_timeout_s)
                if not may_lead_inside and connection.leads_inside:
                    raise redirected_inside(secrets.hide(shown_name(url)))
                answer, timed = connection.ask(request, deadline)
                return self._answer(answer, timed, connection, secrets)
            except (OSError, http.client.HTTPException, ValueError) as error:
                connection.close()
                if used and isinstance(error, http.client.HTTPException | ConnectionError):
                    continue  # the server had closed it in the meantime
                raise _explain(error, secrets) from None
            except BaseException:
                connection.close()
                raise

    def _answer(
        self, answer: http.client.HTTPResponse, timed: _TimedBody, connection: _Connection, secrets: Secrets
    ) -> Answer:
        found: dict[str, str] = {}
        for name, value in answer.getheaders():  # a header may come twice: both values count
            name = name.lower()
            found[name] = f"{found[name]}, {value}" if name in found else value
        try:
            length = body_length(answer, found, secrets)
        except Unavailable:
            answer.close()
            raise
        return Answer(
            answer.status, found, length=length, secrets=secrets, _response=answer, _timed=timed,
            _connection=connection, _pool=self,
        )  # fmt: skip

    def _connection(self, place: Endpoint) -> _Connection:
        with self._lock:
            waiting = self._idle.get(place)
            if waiting:
                return waiting.pop()
        scheme, host, port = place
        proxy = None if proxy_bypass(host) else getproxies().get(scheme)
        via = urlsplit(proxy) if proxy else None
        to, at = (via.hostname or "", via.port) if via else (host, port)
        for_proxy = {}
        if via is not None and via.username is not None:
            for_proxy["Proxy-Authorization"] = _basic(via.username, via.password or "")
        via_proxy = for_proxy if via else None
        if scheme == "http":
            return _Connection(place, http.client.HTTPConnection(to, at), via_proxy)
        self._tls = self._tls or ssl.create_default_context()
        client = http.client.HTTPSConnection(to, at, context=self._tls)
        if via:
            client.set_tunnel(host, port, headers=for_proxy)
        return _Connection(place, client, via_proxy)

    def give_back(self, connection: _Connection) -> None:
        """Keep a connection for another request."""
        with self._lock:
            waiting = self._idle.setdefault(connection.place, [])
            if len(waiting) < MOST_IDLE and self._pid == os.getpid():
                waiting.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            every, self._idle = [each for waiting in self._idle.values() for each in waiting], {}
        for connection in every:
            connection.close()

    def __del__(self) -> None:
        self.close()

    def after_fork(self) -> None:
        """Leave the parent's connections to the parent."""
        inherited = self._idle
        self._reset()
        for waiting in inherited.values():
            for connection in waiting:
                connection.close()


def _explain(error: Exception, secrets: Secrets) -> Exception:
    if isinstance(error, ssl.SSLCertVerificationError):
        return Unavailable(f"its certificate is not trusted ({error.verify_message})")
    if isinstance(error, http.client.InvalidURL | UnicodeError):
        return ConfigError(f"not a valid address ({_one_line(error, secrets)})")
    if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN:
        return Unavailable(f"its host has no address ({error.strerror}); check the name")
    return Transient(f"no answer: {_one_line(error, secrets)}")


def _basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()


def _one_line(error: BaseException, secrets: Secrets) -> str:
    return secrets.hide(error) or type(error).__name__
