"""Buckets: ``s3://bucket/key`` -> an address that any web client can read, signed for an hour; and what a bucket holds.

Google's and Azure's (``gs://``, ``az://container/key``) likewise.

obstore knows where credentials come from (arguments, the environment, the machine's own role), how a bucket is
addressed and how a request is signed. It does nothing else here: http.py says why.
"""

import fnmatch
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import quote

from penstock.base.dataclass import dataclass
from penstock.base.urls import scheme_of
from penstock.errors import ConfigError, Unavailable
from penstock.remote.secrets import Secrets

VALID_S = 3600
RENEW_S = 600
"""An address that is valid for less than this is signed anew."""

MOST_LISTED = 1_000_000


@dataclass(frozen=True)
class _Kind:
    """How the buckets of one provider are opened."""

    store: str
    """The class in obstore."""
    prefix: str
    """Of environment variables."""
    no_keys: Mapping[str, str]
    """Placeholder keys for signing, where none are needed."""


_KINDS = {
    "s3": _Kind("S3Store", "AWS_", {"access_key_id": "-", "secret_access_key": "-"}),
    "gs": _Kind("GCSStore", "GOOGLE_", {}),
    "az": _Kind("AzureStore", "AZURE_", {"account_key": "AAAA"}),
}


class Signer:
    """Signed addresses, kept until shortly before they expire."""

    def __init__(self, settings: Mapping[str, Any], deadline_s: float) -> None:
        self._settings, self._deadline_s = dict(settings), deadline_s
        self._secrets = Secrets(_find_secrets(settings))
        self._buckets: dict[tuple[str, str, bool], Any] = {}
        self._signed: dict[str, tuple[str, float]] = {}
        self._lock = threading.Lock()

    def after_fork(self) -> None:
        """Signed addresses stay valid; the thread that held the lock may not exist here."""
        self._lock = threading.Lock()

    def signed(self, url: str, *, anew: bool = False) -> str:
        """The address to read ``s3://bucket/key`` from."""
        with self._lock:
            known, until = self._signed.get(url, ("", 0.0))
            if anew or until - time.monotonic() < RENEW_S:
                known = self._sign(url)
                self._signed[url] = known, time.monotonic() + VALID_S
            return known

    def listed(self, pattern: str) -> list[str]:
        """The objects of a bucket that match ``s3://bucket/folder/*.tar``; a star stays within a folder."""
        scheme, bucket, key = split(pattern)
        folder = key[: min(key.find(mark) for mark in "*?[" if mark in key)].rpartition("/")[0]

        store = self._bucket(scheme, bucket)

        def names() -> list[str]:
            import obstore

            found: list[str] = []
            for page in obstore.list(store, prefix=folder or None):
                found += (each["path"] for each in page if _does_match(each["path"], key))
                if len(found) > MOST_LISTED:
                    raise ConfigError(f"{pattern}: matches more than {MOST_LISTED:,} files")
            return found

        with self._lock:
            return [f"{scheme}://{bucket}/{name}" for name in self._within(pattern, names)]

    def _sign(self, url: str) -> str:
        scheme, bucket, key = split(url)
        if scheme == "gs" and ("#" in key or "?" in key):
            raise ConfigError(f"{url}: obstore cannot sign an address with # or ? in it; rename the object")
        is_public = self._is_public(scheme)
        if is_public and scheme == "gs":  # signing needs a real key, which cannot be made up
            return f"https://storage.googleapis.com/{bucket}/{quote(key)}"
        store = self._bucket(scheme, bucket, signing=True)

        def ask() -> str:
            import obstore

            return str(obstore.sign(store, "GET", key, timedelta(seconds=VALID_S)))

        address: str = self._within(url, ask)
        return address.partition("?")[0] if is_public else address

    def _is_public(self, scheme: str) -> bool:
        """Whether objects are read without a signature."""
        prefix = _KINDS[scheme].prefix
        given = [self._settings.get(name) for name in ("skip_signature", f"{prefix.lower()}skip_signature")]
        given.append(os.environ.get(f"{prefix}SKIP_SIGNATURE"))
        first = next((each for each in given if each is not None), "")
        return str(first).lower() in ("true", "1", "yes", "y", "on")

    def _bucket(self, scheme: str, name: str, *, signing: bool = False) -> Any:
        known = self._buckets.get((scheme, name, signing))
        if known is None:
            known = self._buckets[scheme, name, signing] = self._opened(scheme, name, signing)
        return known

    def _opened(self, scheme: str, name: str, signing: bool) -> Any:
        try:
            import obstore.store
        except ImportError:
            raise ConfigError(f'reading {scheme}:// needs obstore: pip install "penstock[remote]"') from None
        limit = timedelta(seconds=self._deadline_s)
        settings: Any = self._settings
        if signing and self._is_public(scheme):  # only signing gives the address, so placeholder keys are used
            settings = {**settings, **_KINDS[scheme].no_keys, "skip_signature": False}
        try:
            return getattr(obstore.store, _KINDS[scheme].store)(
                name,
                config=settings,
                client_options={"allow_http": True, "timeout": limit, "connect_timeout": limit},
                retry_config={"max_retries": 3, "retry_timeout": limit},
            )
        except Exception as error:
            raise ConfigError(
                f"{scheme}://{name}: RemoteOptions(store=…) or the environment: {self._one_line(error)}"
            ) from None

    def _within(self, url: str, ask: Callable[[], Any]) -> Any:
        """The result of ``ask``, or an error when the time is up: after a fork, obstore would wait forever."""
        came: list[Any] = []

        def work() -> None:
            try:
                came.append((True, ask()))
            except BaseException as error:
                came.append((False, error))

        thread = threading.Thread(target=work, name="penstock-signing", daemon=True)
        thread.start()
        thread.join(self._deadline_s)
        if not came:
            raise Unavailable(
                f"{url}: no credentials within {self._deadline_s:g} s. In a forked process they must be known "
                f"without asking a server: give them in RemoteOptions(store=…), or use workers that are spawned"
            )
        worked, result = came[0]
        if worked:
            return result
        if isinstance(result, ConfigError):
            raise result
        raise Unavailable(f"{url}: {self._one_line(result)}") from None

    def _one_line(self, error: BaseException) -> str:
        """An error of obstore in one line, without its debugging output."""
        return self._secrets.hide(str(error).partition("Debug source:")[0], most=300) or type(error).__name__


def split(url: str) -> tuple[str, str, str]:
    """Scheme, bucket and key; a key may hold any character."""
    bucket, _, key = url.partition("://")[2].partition("/")
    scheme = scheme_of(url)
    if not bucket or not key:
        raise ConfigError(f"{url}: expected {scheme}://bucket/key")
    return scheme, bucket, key


def _does_match(name: str, pattern: str) -> bool:
    parts, wanted = name.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _find_secrets(settings: Mapping[str, Any]) -> Iterator[str]:
    """Keys and tokens, given or found in the environment: errors may quote a server that quotes them."""
    prefixes = tuple(kind.prefix for kind in _KINDS.values())
    found = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    for name, value in (*found.items(), *settings.items()):
        if isinstance(value, str) and re.search("key|secret|token|password", name, re.IGNORECASE):
            yield value
