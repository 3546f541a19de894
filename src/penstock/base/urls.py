"""Addresses of remote files, and the names by which messages, caches and manifests know them.

An address may hold secrets: a user and a password before the host, a signature or a token behind the ``?``. Everything
that is not known to be harmless is treated as a secret, and only a digest of it is ever shown or kept.

One address has three names, for three purposes:
- ``shown_name``: for messages and for all that one process knows of a file. Other secrets make another name, because a
  value that looks like a secret may be what chooses the file: ``https://host/a.npy?token=…ab12cd34#0123456789abcdef``.
- ``lasting_name``: for what is kept on disk, together with a strong ETag. What signs a request is left out, so that an
  address that was signed anew finds what was kept: ``https://host/a.npy?token=…ab12cd34``.
- ``bare_name``: for manifests, whose digests tell files apart. No secret has a part in it: ``https://host/a.npy?token=…``.
"""

import hashlib
import os
import re
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit

from penstock.errors import ConfigError

BUCKETS = ("s3", "gs", "az")
"""``s3://bucket/key``: Amazon's, Google's and Azure's, where the bucket is called a container."""

SCHEMES = ("http", "https", *BUCKETS, "hf")
# Patterns are compiled when they are first needed, which for paths on this machine is never.
_SCHEME = r"(?i)[a-z][a-z0-9+.-]+"

# Names of values that are secrets as such, also where they look harmless.
_PRIVATE = (
    r"(?i)x-amz-.*|x-goog-.*|x-ms-.*|awsaccesskeyid|googleaccessid|key-pair-id|policy|expires|sig|signature|se|sp|spr"
    r"|sr|st|sv|skoid|sktid|skt|ske|sks|skv|.*(token|secret|passw|api_?key|access_?key|credential|auth).*"
)

# How stores sign addresses: names that are there together, and all names that the signature has. The path says which
# file it is. A name by itself may mean anything: ``st`` and ``policy`` do at other servers.
_SIGNED = (
    ({"x-amz-signature", "x-amz-date"}, r"x-amz-.*"),
    ({"x-goog-signature", "x-goog-date"}, r"x-goog-.*"),
    ({"signature", "expires"}, r"signature|expires|awsaccesskeyid|googleaccessid|key-pair-id|x-amz-.*"),
    ({"signature", "policy"}, r"signature|policy|key-pair-id"),
    ({"sig", "sv", "se"}, r"sig|s[eprstv]|spr|sip|srt|sdd|ses|sk(oid|tid|t|e|s|v)|scid"),
)
_DIGEST = r"#[0-9a-f]{16}"
_HIDDEN = r"([?&])([^=&#]+)=…[0-9a-f]{8}(?=[&#/]|$)"
_HARMLESS = r"(?i)[0-9]{1,9}|true|false|raw|main|master"


def is_remote(path: str) -> bool:
    """Whether this is an address that can be read here; any other is a path."""
    scheme, found, _ = path.partition("://")
    return bool(found) and scheme.lower() in SCHEMES


def is_in_bucket(path: str) -> bool:
    """Whether this is the address of something in a bucket."""
    return scheme_of(path) in BUCKETS


def hub_address(url: str) -> str:
    """``hf://datasets/OWNER/NAME@REVISION/PATH`` -> the web address of that file; without a revision, of main."""
    path = url.partition("://")[2]
    kind, _, rest = path.partition("/") if path.startswith(("datasets/", "spaces/")) else ("", "", path)
    owner, _, rest = rest.partition("/")
    name, _, file = rest.partition("/")
    name, _, revision = name.partition("@")
    if not (owner and name and file):
        raise ConfigError(
            f"{shown_name(url)}: expected hf://datasets/OWNER/NAME/PATH, or hf://datasets/OWNER/NAME@REVISION/PATH"
        )
    host = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    parts = (kind, owner, name, "resolve", quote(unquote(revision or "main"), safe=""), quote(unquote(file)))
    return "/".join((host, *filter(None, parts)))


def scheme_of(path: str) -> str:
    """``http`` of ``http://…``, of any address; empty for a path."""
    scheme, found, _ = path.partition("://")
    return scheme.lower() if found and re.fullmatch(_SCHEME, scheme) else ""


def shown_name(url: str) -> str:
    """The name of an address, without its secrets; different addresses have different names. A path stays as it is."""
    if url[:5].lower() == "pipe:":
        return "pipe:…"
    scheme = scheme_of(url)
    if not scheme:
        return url
    if scheme in BUCKETS:  # a key may hold any character, and no secret
        bucket, slash, key = url[5:].partition("/")
        return f"{scheme}://{bucket.rpartition('@')[2]}{slash}{key}"
    try:
        parts = urlsplit(url)
    except ValueError:  # not an address, so any part of it may be a secret
        return f"{scheme}://…"
    user, _, host = parts.netloc.rpartition("@")
    values = _parse_query(parts.query)
    of_signature = _of_signature({name.lower() for name, _ in values})
    query = "&".join(_without_secret(name, value, name.lower() in of_signature) for name, value in values)
    digest = _digest(url.partition("#")[0], 16) if user or "…" in query else ""
    return urlunsplit((scheme, host, parts.path, query, digest))


def _parse_query(query: str) -> list[tuple[str, str]]:
    return parse_qsl(query, keep_blank_values=True, errors="surrogateescape")


def _of_signature(names: set[str]) -> set[str]:
    """The names that belong to the signature of an address, among those of its query."""
    kinds = [of_it for together, of_it in _SIGNED if together <= names]
    return {name for name in names if any(re.fullmatch(of_it, name) for of_it in kinds)}


def _without_secret(name: str, value: str, is_of_signature: bool) -> str:
    called = quote(name, errors="surrogateescape")
    if is_of_signature:
        return f"{called}=…"
    if not value and not re.fullmatch(_HARMLESS, name):  # a name without a value may be a key
        return f"…{_digest(name, 8)}"
    if re.fullmatch(_HARMLESS, value) and not re.fullmatch(_PRIVATE, name):
        return f"{called}={value}"
    return f"{called}=…{_digest(value, 8)}"


def _digest(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:digits]


def lasting_name(name: str) -> str:
    """The name that a file keeps when its address is signed anew."""
    return re.sub(_DIGEST, "", name, count=1) if is_remote(name) and not is_in_bucket(name) else name


def bare_name(name: str) -> str:
    """The name that a file keeps whatever secrets its address has."""
    if not is_remote(name) or is_in_bucket(name):
        return name

    def without_digest(found: re.Match[str]) -> str:
        return f"{found[1]}{found[2]}=…" if re.fullmatch(_PRIVATE, unquote(found[2])) else found[0]

    return re.sub(_HIDDEN, without_digest, lasting_name(name))


def secrets_of(url: str) -> list[str]:
    """Everything in an address that ``shown_name`` hides."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return [url]
    user = parts.netloc.rpartition("@")[0]
    found = [user, *user.split(":", 1)]
    for name, value in _parse_query(parts.query):
        if not _without_secret(name, value, False).endswith(f"={value}"):
            found.append(value or name)
    return [each for each in found if each]


def base_name(path: str) -> str:
    """The last part of a path or address, without what follows a ``?``."""
    if is_remote(path) and not is_in_bucket(path):
        inside = path.partition("#")[2].partition("/")[2]  # of a folder whose name has a digest
        path = inside or urlsplit(path).path
    return path.replace(os.sep, "/").rpartition("/")[2]


def check_scheme(path: str) -> None:
    """Refuse commands, and addresses that cannot be read."""
    if path[:5].lower() == "pipe:":
        raise ConfigError(
            "pipe:…: the scheme pipe: would run a command, which is never done here. Open the file that it would "
            "fetch; or open the pipe in your own program, and pass the file object to penstock.webdataset"
        )
    scheme = scheme_of(path)
    if scheme and scheme not in SCHEMES:
        way_out = "give the path itself" if scheme == "file" else "fetch the file, and open the copy"
        raise ConfigError(
            f"{shown_name(path)}: the scheme {scheme}: is not read here; expected a path, or an address that begins "
            f"with {', '.join(f'{each}://' for each in SCHEMES)}: {way_out}"
        )


def check_local(path: str, what: str) -> None:
    """Refuse the address of a file that must be on a local disk."""
    if is_remote(path):
        raise ConfigError(f"{path}: {what} can only be read from a local disk; fetch the file, and open the copy")
