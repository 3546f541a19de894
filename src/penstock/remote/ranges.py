"""Remote files: identified, read in ranges into the caller's memory, or read in order from beginning to end.

Rules:
1. Only the file that was identified is read: every answer must give the same size, ETag and time, also after a broken
   connection. Anything else is ``Changed``.
2. Failures that may be temporary are retried after growing, random delays, so that many readers do not return at the
   same time; a server's ``Retry-After`` is respected. The deadline ends all of this.
3. A request is for at most 16 MiB; longer ranges take several. Each has ``deadline_s``.
4. Addresses are known by names without secrets (see ``urls``); messages and tables have none either.
"""

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from penstock.base import checks, stop
from penstock.base.dataclass import dataclass
from penstock.base.file_id import FileId
from penstock.base.sizes import MiB
from penstock.base.urls import hub_address, is_in_bucket, scheme_of, shown_name
from penstock.errors import Changed, ConfigError, Missing, Unavailable
from penstock.remote.answers import UNKNOWN, check_range, check_same, check_status, identity, status_of, total_of
from penstock.remote.buckets import Signer
from penstock.remote.headers import retry_after_s
from penstock.remote.http import TRANSIENT, Answer, Connections, Deadline, Transient
from penstock.remote.redirects import Redirects

PIECE_BYTES = 16 * MiB
# A new request takes as long as reading this much: 40 ms at 100 MB/s.
NEAR_BYTES = 4 * MiB

HEAD_BYTES = 512
"""Read with the first request, to recognise the format."""

# The first wait is below 0.1 s, and each may be twice as long as the one before, up to 8 s.
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 8.0

_WAY_OUT = "try again later, or give more time: remote=RemoteOptions(deadline_s=…, retries=…)"


@dataclass(frozen=True)
class RemoteOptions:
    """Time limits, retries, redirects and headers for remote files."""

    retries: int = 8
    """Retries after a failure; the count starts again whenever more bytes have arrived."""
    deadline_s: float = 60.0
    """The time limit of a request, all retries included, per 16 MiB."""
    connect_timeout_s: float = 10.0
    stall_timeout_s: float = 20.0
    """After this time without a byte, the connection is closed and another one tried."""
    redirects: int = 5
    """Redirects to follow per request; 0 follows none."""
    redirect_hosts: Sequence[str] | None = None
    """Other hosts to which redirects may lead: None for any (without ``headers``), () for none."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request to the host that was named, and to no other: ``{"Authorization": "Bearer …"}``."""
    store: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Settings of buckets, as obstore names them: endpoint, region, access_key_id, account_name, skip_signature…"""

    def __post_init__(self) -> None:
        for name in ("retries", "redirects"):
            checks.whole(f"RemoteOptions: {name}", getattr(self, name))
        if self.redirect_hosts is not None:
            hosts = checks.names("RemoteOptions: redirect_hosts", self.redirect_hosts)
            object.__setattr__(self, "redirect_hosts", hosts)
        for name, kinds in (("headers", str), ("store", object)):
            pairs = getattr(self, name).items() if isinstance(getattr(self, name), Mapping) else [(None, None)]
            if not all(isinstance(key, str) and isinstance(value, kinds) for key, value in pairs):
                raise ConfigError(f"RemoteOptions: {name}: expected a dict of texts")  # not shown: may be a password
        for name in ("deadline_s", "connect_timeout_s", "stall_timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
                raise ConfigError(f"RemoteOptions({name}={value!r}): expected seconds, more than 0")


class UnknownLength(Unavailable):
    """The server does not give the length of the file, so it can only be read in order."""


class Head(NamedTuple):
    """The result of the first request."""

    file: FileId
    first: bytes
    """Its first bytes."""
    has_parts: bool
    """Whether ranges of it can be read."""


class Remote:
    """Files by address, read over connections that all threads share."""

    def __init__(self, options: RemoteOptions | None = None, addresses: Mapping[str, str] | None = None) -> None:
        self.options = options or RemoteOptions()
        self._addresses = dict(addresses or {})
        """Each address by its name."""
        hosts = None if self.options.redirect_hosts is None else tuple(self.options.redirect_hosts)
        redirects = Redirects(self.options.redirects, hosts)
        self._connections = Connections(self.options.connect_timeout_s, redirects)
        self._signer = Signer(self.options.store, self.options.deadline_s)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.options, self._addresses)

    def after_fork(self) -> None:
        """In a forked child: start with new connections."""
        self._lock = threading.Lock()
        self._signer.after_fork()
        self._connections.after_fork()

    def close(self) -> None:
        """Close idle connections."""
        self._connections.close()

    def admit(self, url: str) -> str:
        """Register an address; returns its name without secrets."""
        _check_no_user(url)
        name = shown_name(url)
        with self._lock:
            self._addresses[name] = url
        return name

    def listed(self, pattern: str) -> list[str]:
        """The addresses that match a pattern with stars."""
        if not is_in_bucket(pattern):
            raise ConfigError(
                f"{shown_name(pattern)}: web servers do not list their files, so stars do not work; use braces, such "
                f"as train-{{000..017}}.tar, or a list"
            )
        _check_no_user(pattern)
        found = self._signer.listed(pattern)
        if not found:
            raise Missing(f"{pattern}: the pattern matches nothing in that bucket")
        return found

    def head(self, path: str) -> Head:
        """The file as it is now."""
        deadline = self._deadline(1)
        tries = _Attempts(self.options, deadline, path, "asking for it")
        while True:
            try:
                with self._answer(path, 0, HEAD_BYTES, None, deadline) as answer:
                    total = total_of(path, answer)
                    if total == UNKNOWN:
                        raise UnknownLength(
                            f"{path}: the server does not say how long it is, so it can be read in order alone, which "
                            f"penstock.webdataset does"
                        )
                    first = bytearray(min(HEAD_BYTES, total))
                    _fill(answer, memoryview(first))
                    return Head(identity(path, total, answer), bytes(first), answer.status != 200)
            except Transient as error:
                tries.failed(error)

    def read_into(self, file: FileId, offset: int, targets: Sequence[memoryview]) -> None:
        """Fill ``targets`` one after another from ``offset`` on."""
        end = offset + sum(map(len, targets))
        goals, at, deadline = [view for view in targets if len(view)], offset, self._deadline(end - offset)
        tries = _Attempts(self.options, deadline, file.path, f"reading {end - offset:,} bytes at offset {offset:,}")
        while goals:
            try:
                with self._answer(file.path, at, end, file, deadline) as answer:
                    began = at
                    while goals:
                        got = answer.readinto(goals[0])
                        if not got and at == began:
                            raise Transient("an empty answer")
                        if not got:
                            break  # a shorter range than asked for: continue from there
                        at += got
                        tries.succeeded()
                        goals[0] = goals[0][got:]
                        if not len(goals[0]):
                            del goals[0]
            except Transient as error:
                tries.failed(error)

    def body(self, path: str, file: FileId | None = None) -> "Body":
        """All of a file, in order; of this version, or of the one that is there."""
        return Body(self, path, file)

    def _deadline(self, bytes_: int) -> Deadline:
        pieces = max(1, -(-bytes_ // PIECE_BYTES))
        return Deadline(self.options.deadline_s * pieces, self.options.stall_timeout_s)

    def _answer(
        self, path: str, begin: int, end: int | None, file: FileId | None, deadline: Deadline, *, or_whole: bool = False
    ) -> Answer:
        """An answer with the bytes asked for; or with the whole file, if that is acceptable or nothing is known yet."""
        whole = begin == 0 and end in (None, None if file is None else file.size)
        asked = {} if whole else {"Range": f"bytes={begin}-{'' if end is None else end - 1}"}
        if file is not None and file.has_strong_etag:
            asked["If-Match"] = file.etag
        answer = self._get(path, asked, deadline)
        try:
            if answer.status == 403 and is_in_bucket(path):
                answer.close()
                answer = self._get(path, asked, deadline, anew=True)  # what was signed may have expired
            check_status(path, answer, file)
            if file is not None:
                check_same(path, answer, file)
            if answer.status == 206:
                check_range(path, answer, begin, end)
            elif not (whole or or_whole or file is None):
                raise Unavailable(
                    f"{path}: the server ignores ranges: asked for bytes from {begin:,} on it sends the whole file, so "
                    f"single samples cannot be read. Pass cache_dir= to fetch files whole, once; or read in order with "
                    f"penstock.webdataset"
                )
        except BaseException:
            answer.close()
            raise
        return answer

    def _address(self, path: str) -> str:
        """Of a file that was admitted, or that lies in a folder that was."""
        folder, inside = path, ""
        while folder not in self._addresses:
            folder, slash, last = folder.rpartition("/")
            if not slash:
                return path
            inside = f"/{last}{inside}"
        url = self._addresses[folder]
        if not inside or is_in_bucket(url):
            return url + inside
        parts = urlsplit(url)
        return urlunsplit(parts._replace(path=parts.path.rstrip("/") + inside))

    def _get(self, path: str, asked: Mapping[str, str], deadline: Deadline, *, anew: bool = False) -> Answer:
        url = self._address(path)
        private = self.options.headers
        if is_in_bucket(url):
            url, private = self._signer.signed(url, anew=anew), {}
        elif scheme_of(url) == "hf":
            url = hub_address(url)
        try:
            answer = self._connections.get(url, asked, private, deadline)
        except (Unavailable, ConfigError) as error:
            raise type(error)(f"{path}: {error}") from error.__cause__
        if answer.status in TRANSIENT:
            answer.close()
            raise Transient(f"the server answered {status_of(answer)}", retry_after_s(answer.headers))
        return answer


def _check_no_user(url: str) -> None:
    if is_in_bucket(url) and "@" in url[5:].partition("/")[0]:
        raise ConfigError(
            f"{shown_name(url)}: the address of a bucket contains a user and a password; give those as "
            f"remote=RemoteOptions(store={{'access_key_id': …, 'secret_access_key': …}}), or in the environment"
        )


class Body:
    """All bytes of a file from one place on, in order, over as many connections as that takes.

    If the server ignores ranges, bytes that were delivered before are read again and dropped.
    """

    def __init__(self, remote: Remote, path: str, file: FileId | None) -> None:
        self._remote, self.path, self.file = remote, path, file
        self.at = 0
        """The next byte that is read."""
        self.headers: Mapping[str, str] = {}
        """Of the first answer."""
        self._answer: Answer | None = None
        self._in_parts = True

    def readinto(self, view: memoryview) -> int:
        """Fill ``view``; less only at the end of the file."""
        deadline = self._remote._deadline(len(view))
        tries = _Attempts(self._remote.options, deadline, self.path, f"reading on from byte {self.at:,}")
        done = 0
        while done < len(view) and (self.file is None or self.at != self.file.size):
            try:
                got = self._opened(deadline).readinto(view[done:])
                done, self.at = done + got, self.at + got
                if not got and self._is_end():
                    break
                tries.succeeded()
            except Transient as error:
                self.close()
                tries.failed(error)
        return done

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes; none at the end."""
        piece = memoryview(bytearray(min(size, PIECE_BYTES)))
        return bytes(piece[: self.readinto(piece)])

    def move(self, to: int) -> None:
        """Continue at another place: if it is near and ahead by reading on, else by another request."""
        if not self.at <= to <= self.at + NEAR_BYTES and self._in_parts:
            self.close()
            self.at = to
            return
        if to < self.at:
            self.close()
            self.at = 0
        passed = memoryview(bytearray(min(to - self.at, MiB)))
        while self.at < to and self.readinto(passed[: to - self.at]):
            pass

    def close(self) -> None:
        """End this connection."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.close()

    def __enter__(self) -> "Body":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _opened(self, deadline: Deadline) -> Answer:
        if self._answer is not None:
            self._answer.use(deadline)
            return self._answer
        answer = self._remote._answer(self.path, self.at, None, self.file, deadline, or_whole=True)
        try:
            if self.file is None:
                self.file = identity(self.path, total_of(self.path, answer), answer)
            elif self.at and not (self.file.etag or self.file.mtime_ns or self.file.size != UNKNOWN):
                raise Unavailable(
                    f"{self.path}: the connection broke at byte {self.at:,}, and the server sends neither ETag, time "
                    f"nor length, so it may be another file by now: read it again from its beginning"
                )
            self._in_parts = answer.status == 206 or answer.headers.get("accept-ranges", "").lower() == "bytes"
            if answer.status != 206:
                _drop(answer, self.at, deadline)
        except BaseException:
            answer.close()
            raise
        self.headers, self._answer = self.headers or answer.headers, answer
        return answer

    def _is_end(self) -> bool:
        size = UNKNOWN if self.file is None else self.file.size
        if size == UNKNOWN:
            return True
        if self.at > size:
            raise Changed(f"{self.path}: continues after its {size:,} bytes: it is longer now, or the server miscounts")
        raise Transient(f"the answer ended at byte {self.at:,} of {size:,}")


class _Attempts:
    """Counts attempts, and decides whether to try again."""

    def __init__(self, options: RemoteOptions, deadline: Deadline, path: str, what: str) -> None:
        self._options, self._deadline, self._path, self._what = options, deadline, path, what
        self._failed = self._in_a_row = 0

    def succeeded(self) -> None:
        """More bytes have arrived."""
        self._in_a_row = 0

    def failed(self, error: Transient) -> None:
        """Wait for the next attempt; raise if there is none."""
        self._failed += 1
        self._in_a_row += 1
        longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (self._in_a_row - 1))
        wait = max(error.wait_s, random.uniform(longest / 2, longest))  # noqa: S311
        over = self._in_a_row > self._options.retries
        if over or wait >= self._deadline.left_s:
            asked = f" (the server asks to wait {error.wait_s:g} s)" if error.wait_s else ""
            limit = f"The limit is {self._options.retries} retries and {self._deadline.deadline_s:g} s"
            raise Unavailable(
                f"{self._path}: {self._what} failed {self._failed} times in {self._deadline.past_s:.1f} s, the last "
                f"time: {error}{asked}. {limit}: {_WAY_OUT}"
            ) from error
        stop.sleep(wait)


def _fill(answer: Answer, view: memoryview) -> None:
    done = 0
    while done < len(view):
        got = answer.readinto(view[done:])
        if not got:
            raise Transient(f"the answer ended after {done:,} bytes")
        done += got


def _drop(answer: Answer, count: int, deadline: Deadline) -> None:
    """Read and discard."""
    forgotten = memoryview(bytearray(min(count, MiB)))
    passed = 0
    while passed < count:
        got = answer.readinto(forgotten[: count - passed])
        if not got:
            raise Transient(f"the answer ended after {passed:,} bytes")
        if passed // PIECE_BYTES != (passed + got) // PIECE_BYTES:
            deadline.restart()
        passed += got
