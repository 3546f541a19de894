"""One HTTP request at a time over connections that are kept: what was asked, what came, and never longer than told.

Python's own client moves the bytes, straight into the caller's memory. Clients with threads of their own (obstore's
among them) do not survive a fork, which torch's workers are made by, and hold what they read in memory nobody counts.

Rules:
1. Every wait ends: the time left is looked at before each of them, however slowly a server sends.
2. What may pass by itself is ``Passing``; everything else is an error of ``penstock.errors`` for good.
3. A connection is used again only if the last answer was read to its end, and never across a fork.
4. Redirects are followed as often as told, never from https to http, never from elsewhere into this machine's own
   network, and headers of the caller's own (which may hold a token) stay with the host they were meant for.
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
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from penstock import stopping
from penstock.errors import ConfigError, Unavailable
from penstock.urls import shown

MOST_IDLE = 32
BUFFER_BYTES = 16 * 1024
REDIRECTS = frozenset({301, 302, 303, 307, 308})
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})

_IN_TARGETS = "/%:@!$&'()*+,;=~-._"


class Passing(Exception):
    """A failure that may be over a moment later."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s
        """What the server asked to wait."""


class Clock:
    """The time that one request may take, with everything that is tried for it."""

    def __init__(self, deadline_s: float, stall_timeout_s: float) -> None:
        self.deadline_s, self.stall_timeout_s = deadline_s, stall_timeout_s
        self.began = time.monotonic()
        self.end = self.began + deadline_s

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic()

    def more(self) -> None:
        """Count anew: a piece of what was asked for has come."""
        self.end = time.monotonic() + self.deadline_s

    @property
    def past_s(self) -> float:
        return time.monotonic() - self.began

    def check(self) -> None:
        """Refuse to wait any more."""
        if stopping.asked():
            raise Unavailable("was interrupted: the loader was closed")
        if self.left_s <= 0:
            raise Passing("no more time")


class _Timed(io.RawIOBase):
    """The bytes of one answer; each wait for them is cut short by the request's clock. Closing it closes no socket."""

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        self.sock, self.clock = sock, clock

    def makefile(self, mode: str) -> io.BufferedReader:
        """What Python's client asks of a socket."""
        return io.BufferedReader(self, BUFFER_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, view: Any) -> int:
        stalled = time.monotonic() + self.clock.stall_timeout_s
        while True:
            self.clock.check()
            left = stalled - time.monotonic()
            if left <= 0:
                raise Passing(f"nothing came for {self.clock.stall_timeout_s:g} s")
            self.sock.settimeout(max(0.001, min(left, self.clock.left_s, stopping.LOOK_EVERY_S)))
            try:
                return self.sock.recv_into(view)
            except TimeoutError:
                continue


Place = tuple[str, str, int | None]
"""Scheme, host and port."""


class _Connection:
    """One connection to a host, which answers one request after another."""

    def __init__(self, place: Place, client: http.client.HTTPConnection, proxied: Mapping[str, str] | None) -> None:
        self.place, self._client, self._proxied = place, client, proxied
        self.used = False

    def ask(
        self, target: str, headers: Mapping[str, str], clock: Clock, connect_timeout_s: float
    ) -> tuple[http.client.HTTPResponse, _Timed]:
        """Send a request, and take in the head of its answer."""
        scheme, host, port = self.place
        named = (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "")
        whole = f"{scheme}://{named}{target}" if self._proxied is not None else target
        lines = [f"GET {whole} HTTP/1.1", f"Host: {named}"]
        lines += [f"{name}: {value}" for name, value in {**headers, **(self._proxied or {})}.items()]
        if any(set(line) & {"\r", "\n", "\0"} for line in lines):
            raise http.client.InvalidURL("an address or header with a line break in it")
        if self._client.sock is None:
            self._client.timeout = max(0.001, min(connect_timeout_s, clock.left_s))
            self._client.connect()
        sock: socket.socket = self._client.sock
        sock.settimeout(max(0.001, min(clock.stall_timeout_s, clock.left_s)))
        sock.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        timed = _Timed(sock, clock)
        answer = http.client.HTTPResponse(timed, method="GET")  # type: ignore[arg-type]
        answer.begin()
        return answer, timed

    def close(self) -> None:
        self._client.close()


@dataclass
class Answer:
    """Status and headers; the body is read by ``readinto`` or ``read``, to its end or not."""

    status: int
    headers: Mapping[str, str]
    """By names in small letters."""
    length: int | None
    """Bytes of the body, if the server said so."""
    _response: http.client.HTTPResponse | None
    _timed: _Timed
    _connection: _Connection
    _pool: "Connections"

    def __post_init__(self) -> None:
        self.left = self.length
        self._ended = self.left == 0

    def use(self, clock: Clock) -> None:
        """Let another clock tell how long to wait from now on."""
        self._timed.clock = clock

    def readinto(self, view: memoryview) -> int:
        """Some bytes of the body; 0 at its end, which is not always where the server said it would be."""
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
            raise Passing(f"the connection failed: {_words(error)}") from error
        if got == 0 and not self._ended:
            raise Passing(f"the connection was closed {self.left:,} bytes before the end")
        return int(got)

    def close(self) -> None:
        """Done with it; the connection is kept where nothing of the answer is left in it."""
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


@dataclass(frozen=True)
class Redirects:
    """How often a server may send us elsewhere, and to which hosts: None for any."""

    most: int
    hosts: tuple[str, ...] | None = None

    def check(self, home: SplitResult, url: str) -> None:
        """Refuse a host that the caller would not have named."""
        there, shown_as = _split(url).hostname or "", shown(url)
        if there == home.hostname:
            return
        if self.hosts is not None and there not in self.hosts:
            raise Unavailable(
                f"is redirected to another host, {shown_as}: allow it with "
                f"remote=RemoteOptions(redirect_hosts=[{there!r}])"
            )
        if _is_inside(there) and not _is_inside(home.hostname or ""):
            raise Unavailable(
                f"is redirected to {shown_as}, inside this machine's own network, where it has no business"
            )


def _is_inside(host: str) -> bool:
    """Whether this names this machine, or an address that only its own network has."""
    try:
        return not ip_address(host).is_global
    except ValueError:
        return host == "localhost" or host.endswith((".localhost", ".local", ".internal"))


class Connections:
    """Connections that wait for their next request, by host."""

    def __init__(self, connect_timeout_s: float, redirects: Redirects) -> None:
        self.connect_timeout_s, self.redirects = connect_timeout_s, redirects
        self._reset()

    def _reset(self) -> None:
        self._idle: dict[Place, list[_Connection]] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._tls: ssl.SSLContext | None = None

    def get(self, url: str, headers: Mapping[str, str], private: Mapping[str, str], clock: Clock) -> Answer:
        """The answer to a GET, redirects followed; ``private`` headers go to the host of ``url`` alone."""
        home = _split(url)
        if home.username is not None:
            private = {**private, "Authorization": _basic(home.username, home.password or "")}
        for _ in range(self.redirects.most + 1):
            answer = self._ask(url, {**headers, **private} if _is_at_home(home, url) else headers, clock)
            if answer.status not in REDIRECTS:
                return answer
            answer.close()
            url = _next_hop(url, answer.headers.get("location", ""))
            self.redirects.check(home, url)
        raise Unavailable(
            f"is redirected more than {self.redirects.most} times, last to {shown(url)}. The limit is "
            f"remote=RemoteOptions(redirects=…)"
        )

    def _ask(self, url: str, headers: Mapping[str, str], clock: Clock) -> Answer:
        parts = _split(url)
        place = (parts.scheme, parts.hostname or "", parts.port)
        target = quote(parts.path or "/", safe=_IN_TARGETS)
        if parts.query:
            target += f"?{quote(parts.query, safe=_IN_TARGETS + '?')}"
        sent = {"Accept-Encoding": "identity", "Accept": "*/*", "User-Agent": "penstock", **headers}
        while True:
            clock.check()
            connection = self._connection(place)
            used, connection.used = connection.used, True
            try:
                answer, timed = connection.ask(target, sent, clock, self.connect_timeout_s)
            except (OSError, http.client.HTTPException, ValueError) as error:
                connection.close()
                if used and isinstance(error, http.client.HTTPException | ConnectionError):
                    continue  # it was closed while nobody looked
                raise _failure(error) from error
            except BaseException:
                connection.close()
                raise
            found = {name.lower(): value for name, value in answer.getheaders()}
            length = None if answer.chunked else answer.length
            return Answer(answer.status, found, length, answer, timed, connection, self)

    def _connection(self, place: Place) -> _Connection:
        with self._lock:
            waiting = self._idle.get(place)
            if waiting:
                return waiting.pop()
        scheme, host, port = place
        proxy = None if proxy_bypass(host) else getproxies().get(scheme)
        via = urlsplit(proxy) if proxy else None
        to, at = (via.hostname or "", via.port) if via else (host, port)
        told = {}
        if via is not None and via.username is not None:
            told["Proxy-Authorization"] = _basic(via.username, via.password or "")
        if scheme == "http":
            return _Connection(place, http.client.HTTPConnection(to, at), told if via else None)
        self._tls = self._tls or ssl.create_default_context()
        client = http.client.HTTPSConnection(to, at, context=self._tls)
        if via:
            client.set_tunnel(host, port, headers=told)
        return _Connection(place, client, None)

    def give_back(self, connection: _Connection) -> None:
        """A connection that is ready for another request."""
        with self._lock:
            waiting = self._idle.setdefault(connection.place, [])
            if len(waiting) < MOST_IDLE and self._pid == os.getpid():
                waiting.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close what waits."""
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


def _is_at_home(home: SplitResult, url: str) -> bool:
    """The same host and port; or that host's https, where it was asked by http."""
    now = _split(url)
    same = (now.scheme, now.port) == (home.scheme, home.port)
    return now.hostname == home.hostname and (same or (home.scheme, now.scheme) == ("http", "https"))


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  a port that is no number is found out when it is asked for
    except ValueError as error:
        raise ConfigError(f"is no address ({_words(error)})") from None
    return parts


def _next_hop(url: str, location: str) -> str:
    if not location:
        raise Unavailable("is redirected, but the server does not say where to; of a bucket, check the region")
    found = urljoin(url, location)
    old, new = _split(url), _split(found)
    if new.scheme not in ("http", "https") or not new.hostname:
        raise Unavailable(f"is redirected to {shown(found)!r}, which is no address of a web server")
    if (old.scheme, new.scheme) == ("https", "http"):
        raise Unavailable(f"is redirected from https to {shown(found)}, where anybody could read or change it")
    return found


def _failure(error: Exception) -> Exception:
    if isinstance(error, ssl.SSLCertVerificationError):
        return Unavailable(f"its certificate is not trusted ({error.verify_message})")
    if isinstance(error, http.client.InvalidURL | UnicodeError):
        return ConfigError(f"is no address ({_words(error)})")
    if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN:
        return Unavailable(f"its host has no address ({error.strerror}); check the name")
    return Passing(f"no answer: {_words(error)}")


def retry_after_s(headers: Mapping[str, str]) -> float:
    """What the server asks to wait: seconds, or until a date."""
    told = headers.get("retry-after", "").strip()
    if told.isdigit():
        return float(told)
    try:
        return max(0.0, parsedate_to_datetime(told).timestamp() - time.time()) if told else 0.0
    except (ValueError, TypeError):
        return 0.0


def _basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
