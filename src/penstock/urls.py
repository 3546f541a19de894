"""Addresses of files that are not on this machine, and how they are shown.

An address may hold secrets: a user and a password before the host, a signature or a token behind the ``?``. What is
shown, kept in tables and hashed into names is the address without them. Everything that is not known to be harmless is
taken for a secret; where two addresses would look alike without it, a few digits of a hash keep them apart.
"""

import hashlib
import os
import re
from urllib.parse import parse_qsl, quote, urlsplit, urlunsplit

from penstock.errors import ConfigError

SCHEMES = ("http", "https", "s3")

# What signs a request or names the signer: another one, for the same file, is another text tomorrow.
_SIGNS = re.compile(
    r"x-amz-.*|x-goog-.*|x-ms-.*|awsaccesskeyid|googleaccessid|key-pair-id|policy|expires|sig|signature|se|sp|spr|sr|st"
    r"|sv|skoid|sktid|skt|ske|sks|skv|.*(token|secret|passw|api_?key|access_?key|credential|auth).*",
    re.IGNORECASE,
)
_HARMLESS = re.compile(r"[0-9]{1,9}|true|false|raw|main|master", re.IGNORECASE)


def is_remote(path: str) -> bool:
    """Whether this is an address that can be read here; any other is a path."""
    scheme, found, _ = path.partition("://")
    return bool(found) and scheme.lower() in SCHEMES


def shown(url: str) -> str:
    """The address without its secrets: the same for the same file, whoever signs; a path as it is."""
    if not is_remote(url) or url[:5].lower() == "s3://":  # a key may hold any character, and no secret
        return url
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    told = [_told(name, value) for name, value in parse_qsl(parts.query, keep_blank_values=True)]
    return urlunsplit((parts.scheme.lower(), host, parts.path, "&".join(told), ""))


def _told(name: str, value: str) -> str:
    if _SIGNS.fullmatch(name):
        return f"{quote(name)}=…"
    if _HARMLESS.fullmatch(value):
        return f"{quote(name)}={quote(value)}"
    return f"{quote(name)}=…{hashlib.sha256(value.encode()).hexdigest()[:8]}"


def base_name(path: str) -> str:
    """The last part of a path or address, without what follows a ``?``."""
    if is_remote(path) and not path.startswith("s3://"):
        path = urlsplit(path).path
    return path.replace(os.sep, "/").rpartition("/")[2]


def check_local(path: str, what: str) -> None:
    """Refuse an address of something that is read on this machine alone."""
    if is_remote(path):
        raise ConfigError(f"{path}: {what} are read on this machine alone; fetch the file, and open the copy")
