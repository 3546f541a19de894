"""Text from servers, prepared for messages: short, printable, and without the secrets of the request.

A server may put anything into a status line or a header, even the request itself.
"""

import base64
import html
import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import quote, quote_plus, unquote, unquote_plus

from penstock.base.urls import secrets_of

SHOWN_CHARACTERS = 100

# Shorter text is not treated as a secret: hiding it would make messages unreadable.
_LEAST_CHARACTERS = 4


class Secrets:
    """The secrets of one request, in any spelling; searched for only when there is text to show."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._texts, self._urls = list(texts), list[str]()

    def add_url(self, url: str) -> None:
        """An address that is requested."""
        self._urls.append(url)

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Headers that must stay secret: cookies, tokens, passwords."""
        self._texts += headers.values()

    def _all(self) -> Iterator[str]:
        yield from self._texts
        for value in self._texts:
            yield from re.split(r"[\s;,=\"]+", value)
        for url in self._urls:
            yield from secrets_of(url)

    def hide(self, text: object, most: int = SHOWN_CHARACTERS) -> str:
        """Text from a server for a message: without secrets, and with a limited number of characters."""
        text = " ".join("".join(each if each.isprintable() else " " for each in str(text)).split())
        spellings = {spelling for secret in self._all() for spelling in _spellings(secret)}
        spellings = {each for each in spellings if len(each) >= _LEAST_CHARACTERS}
        if spellings:
            longest_first = sorted(spellings, key=len, reverse=True)
            text = re.sub("|".join(map(re.escape, longest_first)), "…", text, flags=re.IGNORECASE)
        return text if len(text) <= most else f"{text[:most]}…"


def _spellings(secret: str) -> Iterable[str]:
    plain = {secret, unquote(secret), unquote_plus(secret)}
    for each in plain:
        raw = each.encode(errors="surrogatepass")
        yield from (each, quote(raw), quote(raw, safe=""), quote_plus(raw), html.escape(each), repr(each)[1:-1])
        yield base64.b64encode(raw).decode().rstrip("=")
