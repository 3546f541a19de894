"""The names of ``webdataset.gopen``: files, here or on a server, as streams.

No command is run. Whoever trusts a command opens it in a function of their own, and says so in ``gopen_schemes``.
"""

import io
import os
import re
import sys
from contextlib import ExitStack
from typing import Any, BinaryIO, NoReturn

from penstock.base import checks
from penstock.base.urls import SCHEMES, shown_name
from penstock.errors import ConfigError, Unsafe
from penstock.files.files import Files
from penstock.webdataset.interface import utils
from penstock.webdataset.shards import BUILT_IN, OPENERS, local_path, open_file, scheme_of

info: dict[str, Any] = {}
"""Programs put notes about this process here."""

gopen_schemes = OPENERS
"""How to open addresses, by scheme: functions of the address, the mode and a buffer's size."""

_WAY_OUT = (
    "no command is run here. Fetch the file, or pass a file object; or, if you trust the command, open it in a "
    "function of your own: gopen_schemes['pipe'] = lambda url, mode, bufsize: …"
)


class Pipe:
    """Refused: it would start a program. Subclasses may start one of their own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        raise Unsafe(f"Pipe: {_WAY_OUT}")


def set_options(obj: Any, **options: Any) -> bool:
    """Set options of a ``Pipe``; False for any other stream."""
    if not isinstance(obj, Pipe):
        return False
    obj.__dict__.update({name: value for name, value in options.items() if value is not None})
    return True


class _RemoteBytes(io.RawIOBase):
    """A file on a server, read in order."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._open = ExitStack()
        files = Files()
        self._body = self._open.enter_context(files.stream(files.remote.admit(url)))

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        piece = self._body.read(len(target))
        target[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        if not self.closed:
            self._open.close()
        super().close()


def gopen_file(url: str, mode: str = "rb", bufsize: int = 8192) -> Any:
    """Open a file here."""
    path = local_path({"url": url})
    if path is None:
        raise ConfigError(f"{shown_name(url)}: is not a path")
    return open_file(path) if mode[:1] == "r" else open(path, "wb")


def gopen_remote(url: str, mode: str = "rb", bufsize: int = 8192) -> BinaryIO:
    """Open a file on a server, to read it."""
    if mode[:1] != "r":
        raise ConfigError(f"{shown_name(url)}: files on servers are only read here; write a file, and copy it there")
    return io.BufferedReader(_RemoteBytes(url), max(bufsize, 8192))


def gopen_pipe(url: str, mode: str = "rb", bufsize: int = 8192) -> NoReturn:
    """Refused."""
    if utils.enforce_security:
        raise ConfigError("gopen_pipe: unsafe_gopen is False, cannot open pipe URLs")
    raise ConfigError(f"pipe:…: {_WAY_OUT}")


def gopen_error(url: str, mode: str = "rb", bufsize: int = 8192) -> NoReturn:
    """Refused: nothing here knows the scheme."""
    scheme = scheme_of(url)
    raise ConfigError(
        f"{shown_name(url)}: addresses of scheme {scheme}: are not opened here; fetch the file, or open it in a "
        f"function of your own: gopen_schemes[{scheme!r}] = lambda url, mode, bufsize: …"
    )


gopen_curl = gopen_gsutil = gopen_hf = gopen_remote
gopen_ais = gopen_htgs = gopen_error
gopen_schemes.update({"__default__": gopen_error, "pipe": gopen_pipe}, **dict.fromkeys(SCHEMES, gopen_remote))
BUILT_IN.update((gopen_error, gopen_pipe, gopen_remote))


def rewrite_url(url: str) -> str:
    """An address as the environment's ``GOPEN_REWRITE`` (``begin=other;begin=other``) has it."""
    rules = os.environ.get("GOPEN_REWRITE", "")
    if rules and utils.enforce_security:
        raise ConfigError("rewrite_url: unsafe_gopen is False, cannot rewrite URLs using environment variables")
    for rule in filter(None, rules.split(";")):
        begin, _, other = rule.partition("=")
        if re.match(begin, url):
            return re.sub(f"^{begin}", other, url)
    return url


def gopen(url: str, mode: str = "rb", bufsize: int = 8192, **kw: Any) -> Any:
    """Open a file by its path or address: ``"rb"`` to read, ``"wb"`` to write; ``"-"`` is standard input or output."""
    mode = checks.one_of("mode", mode, ("rb", "wb"))
    if url == "-":
        return sys.stdin.buffer if mode == "rb" else sys.stdout.buffer
    url = rewrite_url(url)
    scheme = scheme_of(url)
    if scheme in ("", "file"):
        if utils.enforce_security:
            raise ConfigError("gopen: unsafe_gopen is False, cannot open local files")
        return gopen_file(url, mode, bufsize)
    return gopen_schemes.get(scheme, gopen_schemes["__default__"])(url, mode, bufsize, **kw)


def reader(url: str, **kw: Any) -> Any:
    """``gopen`` to read."""
    return gopen(url, "rb", **kw)
