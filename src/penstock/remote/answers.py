"""Answers of servers: what they report about a file, and whether they match the request.

A server may send anything. An answer that is not understood, or contradicts an earlier one, is refused: the bytes that
follow may belong to another file.
"""

import hashlib
import re
import zlib
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus

from penstock.base.file_id import FileId
from penstock.errors import Changed, Missing, Unavailable
from penstock.remote.headers import byte_count, date_s
from penstock.remote.http import Answer, Transient

UNKNOWN = -1
"""The size of a file if the server does not give it."""

_CONTENT_RANGE = re.compile(r"bytes\s+(?:([0-9]+)-([0-9]+)|\*)/([0-9]+|\*)", re.IGNORECASE)
_KNOWN = frozenset(HTTPStatus)


def check_status(path: str, answer: Answer, file: FileId | None) -> None:
    status = answer.status
    if status in (200, 206):
        if answer.headers.get("content-encoding", "").lower() not in ("identity", ""):
            coding = answer.quoted("content-encoding")
            raise Unavailable(
                f"{path}: the server sends it compressed ({coding}) though the request forbids that, so offsets are "
                f"meaningless; switch that off at the server"
            )
        if answer.headers.get("content-type", "").strip().lower().startswith("multipart/byteranges"):
            raise Unavailable(
                f"{path}: the server sends several parts (multipart/byteranges) though one range was asked for; read "
                f"whole copies with cache_dir=, or repair the server"
            )
        return
    if status == 416 and file is None and total_of(path, answer) == 0:
        return
    if status in (404, 410):
        raise Missing(f"{path}: no such file: the server answered {status_of(answer)}; check the address")
    if status in (412, 416):
        was = "" if file is None else f": it had {file.size:,} bytes when it was opened"
        raise Changed(
            f"{path}: the file was replaced after it was opened{was}, and the server answers {status_of(answer)}; or "
            f"it announced a length that is not the file's. Open the dataset again to read what is there now"
        )
    if status in (401, 403):
        raise Unavailable(f"{path}: the server answered {status_of(answer)}: check the credentials, and whether the "
                          f"address has expired")  # fmt: skip
    raise Unavailable(f"{path}: the server answered {status_of(answer)}; expected 200 or 206")


def check_same(path: str, answer: Answer, file: FileId) -> None:
    """Refuse another version. An ETag or time that was sent once must be sent with every answer: without it, other
    bytes of the same size would go unnoticed.
    """
    now = _describe_version(replace(identity(path, total_of(path, answer), answer), inode=_digest_server(answer)))
    for what, was in _describe_version(file).items():
        found = now.get(what)
        if found == was or (what == "time" and found is not None and file.has_strong_etag):
            continue  # mirrors of one file may have different times
        how = answer.secrets.hide(f"was {was}, now {found}") if found is not None else "is missing now"
        raise Changed(
            f"{path}: the file was replaced after it was opened: its {what} {how}. Open the dataset again to read the "
            f"new one"
        )


def _describe_version(file: FileId) -> dict[str, object]:
    """Whatever identifies a version; if the server sent nothing, the server itself."""
    known = {
        "size": None if file.size == UNKNOWN else file.size,
        "ETag": file.etag or None,
        "time": file.mtime_ns // 10**9 or None,
        "server": file.inode or None,
    }
    return {what: value for what, value in known.items() if value is not None}


def _digest_server(answer: Answer) -> int:
    return zlib.crc32(repr(answer.place).encode())


def _parse_range(path: str, answer: Answer) -> tuple[int | None, int | None, int]:
    """The first and the last byte that the server announces, and the size of the whole."""
    header = answer.headers.get("content-range", "").strip()
    if not header:
        return None, None, UNKNOWN
    found = _CONTENT_RANGE.fullmatch(header)
    numbers = [] if found is None else [byte_count(each) for each in found.groups() if each not in (None, "*")]
    if found is None or None in numbers:
        raise Unavailable(
            f"{path}: the server sends the Content-Range {answer.quoted('content-range')!r}; expected such as "
            f"'bytes 0-511/4096'"
        )
    first, last, total = (None if each in (None, "*") else int(each) for each in found.groups())
    return first, last, UNKNOWN if total is None else total


def check_range(path: str, answer: Answer, begin: int, end: int | None) -> None:
    first, last, total = _parse_range(path, answer)
    if first is None or last is None:
        raise Transient("the server answered 206 and does not say which bytes it sends")
    if first != begin or last < first or (end is not None and last >= end):
        wanted = "the end" if end is None else f"{end - 1:,}"
        raise Transient(f"asked for bytes {begin:,} to {wanted}, the server sends {first:,} to {last:,}")
    if total != UNKNOWN and last >= total:
        raise Transient(f"the server sends bytes up to {last:,} of a file of {total:,}")
    if answer.length is not None and answer.length != last + 1 - first:
        raise Transient(f"the server announces {answer.length:,} bytes for the range {first:,} to {last:,}")


def total_of(path: str, answer: Answer) -> int:
    """Bytes of the whole file."""
    if answer.status == 200:
        return UNKNOWN if answer.length is None else answer.length
    return _parse_range(path, answer)[2]


def identity(path: str, size: int, answer: Answer) -> FileId:
    etag, modified = answer.headers.get("etag", "").strip(), date_s(answer.headers.get("last-modified", ""))
    time_ns = 0 if modified is None else int(modified) * 10**9
    return FileId(path, size, time_ns, 0 if etag or time_ns else _digest_server(answer), etag=etag)


def status_of(answer: Answer) -> str:
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
    """Whether an object's ETag is its checksum: not if it is encrypted with its own key."""
    encryption = headers.get("x-amz-server-side-encryption", "AES256")
    return encryption == "AES256" and "x-amz-server-side-encryption-customer-algorithm" not in headers
