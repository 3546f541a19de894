"""Redirects: where a server may redirect a request, and which headers it may take there."""

from urllib.parse import SplitResult, quote, urljoin, urlsplit

from penstock.base.dataclass import dataclass
from penstock.base.urls import shown_name
from penstock.errors import ConfigError, Unavailable
from penstock.remote.private_addresses import is_inside

_IN_TARGETS = "/%:@!$&'()*+,;=~-._"


@dataclass(frozen=True)
class Redirects:
    """How often a request may be redirected, and to which hosts: None for any."""

    most: int
    hosts: tuple[str, ...] | None = None

    def check(self, home: SplitResult, url: str, *, home_is_inside: bool | None = None) -> None:
        """Refuse a host that the caller did not allow; its address is checked when it is connected to.

        home_is_inside:  whether the one that redirects is in this machine's own network; by its name if not given
        """
        there, shown_as = split(url).hostname or "", shown_name(url)
        if there == home.hostname:
            return
        if self.hosts is not None and there not in self.hosts:
            raise Unavailable(
                f"is redirected to another host, {shown_as}: allow it with "
                f"remote=RemoteOptions(redirect_hosts=[{there!r}])"
            )
        if home_is_inside is None:
            home_is_inside = is_inside(home.hostname or "")
        if not home_is_inside and is_inside(there):
            raise redirected_inside(shown_as)


def redirected_inside(shown_as: str) -> Unavailable:
    return Unavailable(
        f"is redirected to {shown_as}, inside this machine's own network. A server elsewhere cannot be allowed to make "
        f"requests there: open that address itself if you trust it"
    )


def is_same_host(home: SplitResult, url: str) -> bool:
    """Whether this is the same host and port, or the same host by https instead of http."""
    now = split(url)
    same = (now.scheme, now.port) == (home.scheme, home.port)
    return now.hostname == home.hostname and (same or (home.scheme, now.scheme) == ("http", "https"))


def split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  raises if the port is not a number
    except ValueError:  # its text quotes the address, which may contain a password
        raise ConfigError("not a valid address: expected http://host:port/path") from None
    return parts


def target_of(parts: SplitResult) -> str:
    """The path and query of a request."""
    try:
        path, query = quote(parts.path or "/", safe=_IN_TARGETS), quote(parts.query, safe=_IN_TARGETS + "?")
    except UnicodeError:
        raise ConfigError("not a valid address: expected text that can be encoded in UTF-8") from None
    return f"{path}?{query}" if query else path


def next_hop(url: str, location: str) -> str:
    if not location:
        raise Unavailable("is redirected, but the server does not say where to; for a bucket, check the region")
    try:
        found = urljoin(url, location)
        old, new = split(url), split(found)
    except (ValueError, ConfigError):
        raise Unavailable(f"is redirected to {location!r}, which is not the address of a web server") from None
    if new.scheme not in ("http", "https") or not new.hostname:
        raise Unavailable(f"is redirected to {shown_name(found)!r}, which is not the address of a web server")
    if (old.scheme, new.scheme) == ("https", "http"):
        raise Unavailable(f"is redirected from https to {shown_name(found)}, where anybody could read or change it")
    return found
