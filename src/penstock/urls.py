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
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+", re.IGNORECASE)
_WAYS = {
    "file": "give the path itself",
    "gs": "use https://storage.googleapis.com/BUCKET/KEY",
    "hf": "use https://huggingface.co/datasets/OWNER/NAME/resolve/main/FILE",
}

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


def scheme_of(path: str) -> str:
    """``http`` of ``http://…``, of any address; empty for a path."""
    scheme, found, _ = path.partition("://")
    return scheme.lower() if found and _SCHEME.fullmatch(scheme) else ""


def shown(url: str) -> str:
    """The address without its secrets: the same for the same file, whoever signs; a path as it is."""
    if url[:5].lower() == "pipe:":
        return "pipe:…"
    scheme = scheme_of(url)
    if not scheme:
        return url
    if scheme == "s3":  # a key may hold any character, and no secret
        bucket, slash, key = url[5:].partition("/")
        return f"s3://{bucket.rpartition('@')[2]}{slash}{key}"
    try:
        parts = urlsplit(url)
    except ValueError:  # no address at all, and nobody knows what it holds
        return f"{scheme}://…"
    host = parts.netloc.rpartition("@")[2]
    told = [_told(name, value) for name, value in parse_qsl(parts.query, keep_blank_values=True)]
    return urlunsplit((scheme, host, parts.path, "&".join(told), ""))


def _told(name: str, value: str) -> str:
    if not value and not _HARMLESS.fullmatch(name):  # what stands there alone may be a key
        return f"…{hashlib.sha256(name.encode()).hexdigest()[:8]}"
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


def check_scheme(path: str) -> None:
    """Refuse a command, and addresses of kinds that are not read here."""
    if path[:5].lower() == "pipe:":
        raise ConfigError(
            "pipe:…: the scheme pipe: would run a command, which is never done here. Open the file that it would "
            "fetch; or open the pipe in your own program, and pass the file object to penstock.webdataset"
        )
    scheme = scheme_of(path)
    if scheme and scheme not in SCHEMES:
        way_out = _WAYS.get(scheme, "fetch the file, and open the copy")
        raise ConfigError(
            f"{shown(path)}: the scheme {scheme}: is not read here; expected a path, or an address that begins with "
            f"{', '.join(f'{each}://' for each in SCHEMES)}: {way_out}"
        )


def check_local(path: str, what: str) -> None:
    """Refuse an address of something that is read on this machine alone."""
    if is_remote(path):
        raise ConfigError(f"{path}: {what} are read on this machine alone; fetch the file, and open the copy")
