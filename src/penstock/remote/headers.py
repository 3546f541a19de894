"""Numbers and dates in headers; anything else is refused or ignored, never guessed."""

import http.client
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from penstock.base.sizes import MOST_FILE_BYTES
from penstock.errors import Unavailable
from penstock.remote.secrets import Secrets


def body_length(answer: http.client.HTTPResponse, headers: Mapping[str, str], secrets: Secrets) -> int | None:
    """Bytes of the body, if the server announces them; several announcements must agree."""
    coding = headers.get("transfer-encoding", "identity").strip().lower()
    if coding not in ("identity", "chunked"):
        raise Unavailable(f"is sent in the transfer coding {secrets.hide(coding)!r}; expected none, or chunked")
    if answer.chunked or answer.length == 0:
        return None if answer.chunked else 0
    lengths = {each.strip() for each in headers.get("content-length", "").split(",")}
    if lengths == {""}:
        return None
    length = byte_count(lengths.pop()) if len(lengths) == 1 else None
    if length is None:
        raise Unavailable(
            f"the server says that {secrets.hide(headers['content-length'])!r} bytes follow; expected one number"
        )
    return length


def byte_count(text: str) -> int | None:
    """A number of bytes as servers write it; None for anything else, and for more than any file has."""
    if not re.fullmatch("[0-9]{1,19}", text) or int(text) > MOST_FILE_BYTES:
        return None
    return int(text)


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Seconds that the server asks to wait."""
    asked = headers.get("retry-after", "").strip()
    seconds = byte_count(asked)
    if seconds is not None:
        return float(seconds)
    until = date_s(asked)
    return 0.0 if until is None else max(0.0, until - time.time())


def date_s(text: str) -> float | None:
    """A date as servers write it, in seconds; None for anything else."""
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ArithmeticError, LookupError, OSError, TypeError, ValueError):  # depending on what is odd about it
        return None
