"""Files on other machines: what they are now, ranges of them into the caller's memory, or all of one in order.

Rules:
1. What is read is the file that was identified: every answer's size, ETag and time are compared with it, and what goes
   on after a broken connection goes on in the same version. Anything else is ``Changed``.
2. What may pass by itself is tried again, later and later, with chance in it so that many readers do not come back
   together; a server's own ``Retry-After`` is waited for. All of that ends with the deadline.
3. A request is a range of at most 16 MiB, or so much of a longer one: each has ``deadline_s``.
4. Addresses are known here by what may be shown of them; no message, table or name ever holds a secret.
"""

import hashlib
import random
import re
import threading
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, NamedTuple

from penstock import stopping
from penstock.errors import Changed, ConfigError, Missing, Unavailable
from penstock.extents import FileId
from penstock.signing import Signer
from penstock.sizes import MiB
from penstock.transport import PASSING, Answer, Clock, Connections, Passing, Redirects, retry_after_s
from penstock.urls import shown

PIECE_BYTES = 16 * MiB
UNKNOWN = -1
"""The size of a file whose server does not tell."""

# A request takes as long as so much takes to come: 40 ms, at 100 MB/s.
NEAR_BYTES = 4 * MiB

HEAD_BYTES = 512
"""Read with the first request, to tell a file's format."""

# The first wait is below 0.1 s, and each may be twice as long as the one before, up to 8 s.
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 8.0

_CONTENT_RANGE = re.compile(r"bytes\s+(?:(\d+)-(\d+)|\*)/(\d+|\*)", re.IGNORECASE)
_KNOWN = frozenset(HTTPStatus)
_WAY_OUT = "try again later, or give more time: remote=RemoteOptions(deadline_s=…, retries=…)"


@dataclass(frozen=True)
class RemoteOptions:
    """How patient to be with servers, and what they are told."""

    retries: int = 8
    """How often what fails is tried again; counted anew whenever more bytes have come."""
    deadline_s: float = 60.0
    """The longest that a request may take, all retries included, for every 16 MiB it asks for."""
    connect_timeout_s: float = 10.0
    stall_timeout_s: float = 20.0
    """After so long without a byte, a connection is given up and another one tried."""
    redirects: int = 5
    """How often a server may send on to another address; 0 for not at all."""
    redirect_hosts: Sequence[str] | None = None
    """Other hosts that it may send on to; None for any, which get none of the headers; () for none."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request to the host that was named, and to no other: ``{"Authorization": "Bearer …"}``."""
    store: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Settings of buckets, as obstore's ``S3Config`` names them: endpoint, region, access_key_id, skip_signature…"""

    def __post_init__(self) -> None:
        for name in ("retries", "redirects"):
            count = getattr(self, name)
            if not isinstance(count, int) or count < 0:
                raise ConfigError(f"RemoteOptions({name}={count!r}): expected a whole number, 0 or more")
        if isinstance(self.redirect_hosts, str):
            raise ConfigError(f"RemoteOptions(redirect_hosts={self.redirect_hosts!r}): expected a list of hosts")
        for name in ("deadline_s", "connect_timeout_s", "stall_timeout_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < 1e6:
                raise ConfigError(f"RemoteOptions({name}={value!r}): expected seconds, more than 0")


class NoLength(Unavailable):
    """A server that does not say how long a file is, which can be read in order alone."""


class Head(NamedTuple):
    """What the first request tells."""

    file: FileId
    first: bytes
    """Its first bytes."""
    in_parts: bool
    """Whether ranges of it can be read."""


class Remote:
    """Files by address, read over connections that all threads share."""

    def __init__(self, options: RemoteOptions | None = None, addresses: Mapping[str, str] | None = None) -> None:
        self.options = options or RemoteOptions()
        self._addresses = dict(addresses or {})
        """Each address by what is shown of it."""
        hosts = self.options.redirect_hosts
        redirects = Redirects(self.options.redirects, None if hosts is None else tuple(hosts))
        self._connections = Connections(self.options.connect_timeout_s, redirects)
        self._signer = Signer(self.options.store, self.options.deadline_s)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.options, self._addresses)

    def after_fork(self) -> None:
        """Begin anew in a child process."""
        self._lock = threading.Lock()
        self._signer.after_fork()
        self._connections.after_fork()

    def close(self) -> None:
        """Close connections that wait."""
        self._connections.close()

    def admit(self, url: str) -> str:
        """Take in an address; the name it goes by from now on."""
        name = shown(url)
        if url[:5].lower() == "s3://" and "@" in url[5:].partition("/")[0]:
            raise ConfigError(
                f"{name}: an address of a bucket with a user and a password in it; give those as "
                f"remote=RemoteOptions(store={{'access_key_id': …, 'secret_access_key': …}}), or in the environment"
            )
        with self._lock:
            self._addresses[name] = url
        return name

    def listed(self, pattern: str) -> list[str]:
        """The addresses that a pattern with stars stands for."""
        if not pattern.startswith("s3://"):
            raise ConfigError(
                f"{shown(pattern)}: web servers cannot be asked what they hold, so stars do not work; use braces, such "
                f"as train-{{000..017}}.tar, or a list"
            )
        found = self._signer.listed(pattern)
        if not found:
            raise Missing(f"{pattern}: the pattern matches nothing in that bucket")
        return found

    def head(self, path: str) -> Head:
        """The file as it is now."""
        clock = self._clock(1)
        tries = _Tries(self.options, clock, path, "asking for it")
        while True:
            try:
                with self._answer(path, 0, HEAD_BYTES, None, clock) as answer:
                    total = _total(answer)
                    if total == UNKNOWN:
                        raise NoLength(
                            f"{path}: the server does not say how long it is, so it can be read in order alone, which "
                            f"penstock.webdataset does"
                        )
                    first = bytearray(min(HEAD_BYTES, total))
                    _fill(answer, memoryview(first))
                    return Head(_identity(path, total, answer), bytes(first), answer.status != 200)
            except Passing as error:
                tries.failed(error)

    def read_into(self, file: FileId, offset: int, targets: Sequence[memoryview]) -> None:
        """Fill ``targets``, one behind the other, from ``offset`` on."""
        end = offset + sum(map(len, targets))
        goals, at, clock = [view for view in targets if len(view)], offset, self._clock(end - offset)
        tries = _Tries(self.options, clock, file.path, f"reading {end - offset:,} bytes at offset {offset:,}")
        while goals:
            try:
                with self._answer(file.path, at, end, file, clock) as answer:
                    began = at
                    while goals:
                        got = answer.readinto(goals[0])
                        if not got and at == began:
                            raise Passing("an empty answer")
                        if not got:
                            break  # a shorter range than asked for: go on from there
                        at += got
                        tries.succeeded()
                        goals[0] = goals[0][got:]
                        if not len(goals[0]):
                            del goals[0]
            except Passing as error:
                tries.failed(error)

    def body(self, path: str, file: FileId | None = None) -> "Body":
        """All of a file, in order; of this version, or of the one that is there."""
        return Body(self, path, file)

    def _clock(self, bytes_: int) -> Clock:
        pieces = max(1, -(-bytes_ // PIECE_BYTES))
        return Clock(self.options.deadline_s * pieces, self.options.stall_timeout_s)

    def _answer(
        self, path: str, begin: int, end: int | None, file: FileId | None, clock: Clock, *, or_whole: bool = False
    ) -> Answer:
        """An answer that holds the bytes asked for; or all of the file, where that will do or nothing is known yet."""
        whole = begin == 0 and end in (None, None if file is None else file.size)
        asked = {} if whole else {"Range": f"bytes={begin}-{'' if end is None else end - 1}"}
        if file is not None and file.etag and not file.etag.startswith("W/"):
            asked["If-Match"] = file.etag
        answer = self._get(path, asked, clock)
        try:
            if answer.status == 403 and path.startswith("s3://"):
                answer.close()
                answer = self._get(path, asked, clock, anew=True)  # what was signed may have expired
            _check_status(path, answer, file)
            if file is not None:
                _check_same(path, answer, file)
            if answer.status == 206:
                _check_range(answer, begin, end)
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

    def _get(self, path: str, asked: Mapping[str, str], clock: Clock, *, anew: bool = False) -> Answer:
        url = self._addresses.get(path, path)
        private = self.options.headers
        if url.startswith("s3://"):
            url, private = self._signer.signed(url, anew=anew), {}
        try:
            answer = self._connections.get(url, asked, private, clock)
        except (Unavailable, ConfigError) as error:
            raise type(error)(f"{path}: {error}") from error.__cause__
        if answer.status in PASSING:
            answer.close()
            raise Passing(f"the server answered {_status(answer)}", retry_after_s(answer.headers))
        return answer


class Body:
    """All bytes of a file from one place on, in order, whatever becomes of connections in between.

    Where the server ignores ranges, what was had already is read again and passed over.
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
        clock = self._remote._clock(len(view))
        tries = _Tries(self._remote.options, clock, self.path, f"reading on from byte {self.at:,}")
        done = 0
        while done < len(view) and (self.file is None or self.at != self.file.size):
            try:
                got = self._opened(clock).readinto(view[done:])
                done, self.at = done + got, self.at + got
                if not got and self._is_end():
                    break
                tries.succeeded()
            except Passing as error:
                self.close()
                tries.failed(error)
        return done

    def read(self, size: int, /) -> bytes:
        """At most so many bytes; none at the end."""
        piece = memoryview(bytearray(min(size, PIECE_BYTES)))
        return bytes(piece[: self.readinto(piece)])

    def move(self, to: int) -> None:
        """Go on from another place: near ones ahead by reading on, others by another request."""
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
        """Done with it, or with this connection."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.close()

    def __enter__(self) -> "Body":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _opened(self, clock: Clock) -> Answer:
        if self._answer is not None:
            self._answer.use(clock)
            return self._answer
        answer = self._remote._answer(self.path, self.at, None, self.file, clock, or_whole=True)
        try:
            if self.file is None:
                self.file = _identity(self.path, _total(answer), answer)
            elif self.at and not (self.file.etag or self.file.mtime_ns or self.file.size != UNKNOWN):
                raise Unavailable(
                    f"{self.path}: the connection broke at byte {self.at:,}, and the server tells neither ETag, time "
                    f"nor length, so it may be another file by now: read it again from its beginning"
                )
            self._in_parts = answer.status == 206 or answer.headers.get("accept-ranges", "").lower() == "bytes"
            if answer.status != 206:
                _pass_over(answer, self.at, clock)
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
            raise Changed(f"{self.path}: goes on behind its {size:,} bytes: it is longer now, or the server miscounts")
        raise Passing(f"the answer ended at byte {self.at:,} of {size:,}")


class _Tries:
    """How often something was tried, and whether to try again."""

    def __init__(self, options: RemoteOptions, clock: Clock, path: str, what: str) -> None:
        self._options, self._clock, self._path, self._what = options, clock, path, what
        self._failed = self._in_a_row = 0

    def succeeded(self) -> None:
        """More bytes have come."""
        self._in_a_row = 0

    def failed(self, error: Passing) -> None:
        """Wait for the next time; an error where there is none."""
        self._failed += 1
        self._in_a_row += 1
        longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (self._in_a_row - 1))
        wait = max(error.wait_s, random.uniform(longest / 2, longest))  # noqa: S311
        over = self._in_a_row > self._options.retries
        if over or wait >= self._clock.left_s:
            asked = f" (the server asks to wait {error.wait_s:g} s)" if error.wait_s else ""
            limit = f"The limit is {self._options.retries} retries and {self._clock.deadline_s:g} s"
            raise Unavailable(
                f"{self._path}: {self._what} failed {self._failed} times in {self._clock.past_s:.1f} s, the last time: "
                f"{error}{asked}. {limit}: {_WAY_OUT}"
            ) from error
        stopping.sleep(wait)


def _fill(answer: Answer, view: memoryview) -> None:
    done = 0
    while done < len(view):
        got = answer.readinto(view[done:])
        if not got:
            raise Passing(f"the answer ended after {done:,} bytes")
        done += got


def _pass_over(answer: Answer, count: int, clock: Clock) -> None:
    """Read and forget."""
    forgotten = memoryview(bytearray(min(count, MiB)))
    passed = 0
    while passed < count:
        got = answer.readinto(forgotten[: count - passed])
        if not got:
            raise Passing(f"the answer ended after {passed:,} bytes")
        if passed // PIECE_BYTES != (passed + got) // PIECE_BYTES:
            clock.more()
        passed += got


def _check_status(path: str, answer: Answer, file: FileId | None) -> None:
    status = answer.status
    if status in (200, 206):
        encoding = answer.headers.get("content-encoding", "identity").lower()
        if encoding not in ("identity", ""):
            raise Unavailable(
                f"{path}: the server sends it compressed ({encoding}) though it was asked not to, so offsets mean "
                f"nothing; switch that off at the server"
            )
        return
    if status == 416 and file is None:
        return
    if status in (404, 410):
        raise Missing(f"{path}: no such file: the server answered {_status(answer)}; check the address")
    if status in (412, 416):
        was = "" if file is None else f": it had {file.size:,} bytes when it was opened"
        raise Changed(
            f"{path}: the file was replaced after it was opened{was}, and the server answers {_status(answer)}; or it "
            f"announced a length that is not the file's. Open the dataset again to read what is there now"
        )
    if status in (401, 403):
        raise Unavailable(f"{path}: the server answered {_status(answer)}: check the credentials, and whether the "
                          f"address has expired")  # fmt: skip
    raise Unavailable(f"{path}: the server answered {_status(answer)}; expected 200 or 206")


def _check_same(path: str, answer: Answer, file: FileId) -> None:
    """Refuse another version: by its ETag if it has one, else by its time, and always by its size."""
    now = _identity(path, _total(answer), answer)
    pairs: list[tuple[str, object, object]] = []
    if UNKNOWN not in (file.size, now.size):
        pairs.append(("size", file.size, now.size))
    if file.etag and now.etag:
        pairs.append(("ETag", file.etag, now.etag))
    elif file.mtime_ns and now.mtime_ns:
        pairs.append(("time", file.mtime_ns // 10**9, now.mtime_ns // 10**9))
    for what, was, found in pairs:
        if was != found:
            raise Changed(
                f"{path}: the file was replaced after it was opened: its {what} was {was}, now {found}. Open the "
                f"dataset again to read the new one"
            )


def _check_range(answer: Answer, begin: int, end: int | None) -> None:
    found = _CONTENT_RANGE.match(answer.headers.get("content-range", ""))
    if found is None or found[1] is None:
        raise Passing("the server answered 206 without saying which bytes it sends")
    first, last = int(found[1]), int(found[2])
    if first != begin or last < first or (end is not None and last >= end):
        raise Passing(f"asked for bytes {begin:,} to {'the end' if end is None else f'{end - 1:,}'}, the server sends "
                      f"{first:,} to {last:,}")  # fmt: skip
    if answer.length is not None and answer.length != last + 1 - first:
        raise Passing(f"the server announces {answer.length:,} bytes for the range {first:,} to {last:,}")


def _total(answer: Answer) -> int:
    """Bytes of the whole file."""
    if answer.status == 200:
        return UNKNOWN if answer.length is None else answer.length
    found = _CONTENT_RANGE.match(answer.headers.get("content-range", ""))
    return UNKNOWN if found is None or found[3] == "*" else int(found[3])


def _identity(path: str, size: int, answer: Answer) -> FileId:
    modified = 0
    with suppress(ValueError, TypeError):
        modified = int(parsedate_to_datetime(answer.headers.get("last-modified", "")).timestamp()) * 10**9
    return FileId(path, size, modified, 0, etag=answer.headers.get("etag", "").strip())


def _status(answer: Answer) -> str:
    return f"{answer.status} {HTTPStatus(answer.status).phrase}" if answer.status in _KNOWN else str(answer.status)


def digest_of(path: str, headers: Mapping[str, str]) -> tuple[str, bytes] | None:
    """The checksum that a server gives of a whole file, and its algorithm."""
    md5 = headers.get("content-md5", "")
    for part in headers.get("x-goog-hash", "").split(","):
        md5 = part.strip().removeprefix("md5=") if part.strip().startswith("md5=") else md5
    for name, value in (("md5", md5), ("sha256", headers.get("x-amz-checksum-sha256", ""))):
        with suppress(NotBase64, ValueError):
            if value and len(decoded := b64decode(value, validate=True)) == hashlib.new(name).digest_size:
                return name, decoded
    etag = headers.get("etag", "").strip('"')
    if path.startswith("s3://") and re.fullmatch(r"[0-9a-f]{32}", etag) and _is_md5(headers):
        return "md5", bytes.fromhex(etag)
    return None


def _is_md5(headers: Mapping[str, str]) -> bool:
    """Whether an object's ETag is its checksum: not so where it is encrypted with a key of its own."""
    encryption = headers.get("x-amz-server-side-encryption", "AES256")
    return encryption == "AES256" and "x-amz-server-side-encryption-customer-algorithm" not in headers
